"""What was timed for a section of a calibration: the samples beside it, as one time a cell."""

from pathlib import Path as FilePath
from typing import Any, NamedTuple

import jax
import numpy as np

from calibrate.samples import read_samples
from calibrate.visits import noise_floor, quantile_ns
from rlxjax import Timings
from rlxjax.calibration import (
    MACHINE_FIELDS,
    CalibratedModel,
    Calibration,
    ModelSection,
    fingerprint_differences,
    sha256_of,
)
from rlxjax.fit import cell_runs


class Measured(NamedTuple):
    """Cells that were timed, `[cells]`: runs and what the fit took for their times, and the cells themselves.

    `noise`: relative difference of two halves of the campaign, NaN for a single round.
    """

    timings: Timings
    cells: np.ndarray
    noise: np.ndarray

    def each(self, field: str) -> list[Any]:
        """Return a field of each cell."""
        return [getattr(cell, field) for cell in self.cells]


def some(measured: Measured, kept: np.ndarray) -> Measured:
    """Return the cells of a mask."""
    return jax.tree.map(lambda column: np.asarray(column)[kept], measured)


def model_of(path: FilePath, calibration: Calibration) -> str:
    """Return the name of the model of which a file holds samples."""
    timed = {(cell.variant, frozenset(cell.inputs)) for cell in read_samples(path).cells}
    for name, own in calibration.models.items():
        if timed <= {(variant, frozenset(own.model.inputs)) for variant in own.model.variants}:
            return name
    raise ValueError(f"{path}: expected samples of {', '.join(calibration.models)}, got those of another model")


def measured_beside(
    calibrated: CalibratedModel, section: ModelSection, path: FilePath, samples: FilePath | None
) -> tuple[Measured | None, str]:
    """Return what was timed for a section, and a sentence on where it is from or why it is not shown."""
    if samples is None:
        if section.samples is None:
            return None, "The calibration names no samples, so that no measured times are shown."
        samples = path.parent / section.samples.file
        show = "give it with --samples to see measured times"
        if not samples.is_file():
            return None, f"The samples file {samples.name} is not beside the calibration: {show}."
        if sha256_of(samples) != section.samples.sha256:
            return None, f"{samples.name} beside the calibration is not what was fitted: {show}."
    log = read_samples(samples)
    places = ("in the samples", "in the calibration")
    if differences := fingerprint_differences(log.fingerprint, section.fingerprint, MACHINE_FIELDS, places):
        said = "; ".join(differences)
        raise ValueError(f"{samples}: samples of another machine ({said}); give those of this calibration")
    cells, visits = log.timed()
    if not cells:
        return None, f"{samples.name} holds no times, so that none are shown."
    try:
        runs = cell_runs(calibrated.model, cells)
    except ValueError as reason:
        return None, f"{samples.name} holds no runs of this version of the model: {reason}."
    timings = Timings.checked(calibrated.model, variant=runs.variant, time_ns=quantile_ns(visits), **runs.inputs)
    measured = Measured(timings, np.array(cells), noise_floor(visits))
    # Of learned FFTs, say, the calibration may not know all that were timed.
    can_be = np.asarray(calibrated.model.same_result(runs, calibrated.posterior.facts))
    measured = some(measured, np.take_along_axis(can_be, np.asarray(runs.variant)[:, None], -1)[:, 0])
    said = f"Measured times are those of {len(measured.cells)} cells in {samples.name}"
    is_fitted = section.samples is not None and sha256_of(samples) == section.samples.sha256
    return measured, f"{said}, to which the calibration was fitted." if is_fitted else f"{said}: not what was fitted."
