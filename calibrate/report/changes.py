"""The timings of a calibration's section, and the changes since an earlier calibration of the same machine."""

from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import jax
import numpy as np

from rlxjax import Timings, plot
from rlxjax.calibration import (
    MACHINE_FIELDS,
    CalibratedModel,
    Calibration,
    CalibrationFile,
    ModelSection,
    fingerprint_differences,
    read_calibration_file,
    sha256_of,
)
from rlxjax.fit import Cell, LatencyModel, Runs, cell_runs, estimate, named, unit_of

from ..samples import noise_floor, quantile_ns, read_samples
from ..suites import suite_of_file
from .page import Section, Table, drawn, rows_of

#: A change is more than chance if it exceeds this many joint standard deviations.
SURE_SDS = 2.0


class Measured(NamedTuple):
    """The timed cells: the runs with the times that a fit uses, and the cells themselves, in an array `[cells]`."""

    timings: Timings
    cells: np.ndarray
    noise: np.ndarray  # the relative difference between two halves of the campaign, NaN for a single round

    def each(self, field: str) -> list[Any]:
        return [getattr(cell, field) for cell in self.cells]

    def some(self, kept: np.ndarray) -> "Measured":
        return jax.tree.map(lambda column: np.asarray(column)[kept], self)


def model_of(path: FilePath, calibration: Calibration) -> str:
    cells = read_samples(path).cells
    variants, inputs = {cell.variant for cell in cells}, {frozenset(cell.inputs) for cell in cells}
    for name, own in calibration.models.items():
        if variants <= {*own.model.variants} and (own.model.kernels or inputs <= {frozenset(own.model.inputs)}):
            return name
    raise ValueError(f"{path}: expected samples of {', '.join(calibration.models)}, got samples of another model")


def measured_beside(
    calibrated: CalibratedModel, section: ModelSection, path: FilePath, samples: FilePath | None
) -> tuple[Measured | None, str]:
    """Return a section's timings, and a sentence that names their file or says why the page shows no timings."""
    fitted = section.samples
    if samples is None:
        if fitted is None:
            return None, "The calibration names no samples, so the page shows no measured times."
        samples = path.parent / fitted.file
        show = "give it with --samples to see measured times"
        if not samples.is_file():
            return None, f"The samples file {samples.name} is not beside the calibration: {show}."
        if sha256_of(samples) != fitted.sha256:
            return None, f"{samples.name}, in the calibration's folder, is not the file that the fit used: {show}."
    log = read_samples(samples)
    places = ("in the samples", "in the calibration")
    if differences := fingerprint_differences(log.fingerprint, section.fingerprint, MACHINE_FIELDS, places):
        said = "; ".join(differences)
        raise ValueError(f"{samples}: another machine took these samples ({said}); give samples of this machine")
    cells, visits = log.timed()
    if not cells:
        return None, f"{samples.name} holds no times."
    try:
        runs = _runs(calibrated.model, log.header.suite, cells)
    except ValueError as reason:
        return None, f"{samples.name} holds no runs of this version of the model: {reason}."
    timings = Timings(runs, quantile_ns(visits))
    # The calibration may not know every timed variant: a learned FFT, for instance.
    can_be = np.asarray(calibrated.model.same_result(runs, calibrated.posterior.facts))
    kept = np.take_along_axis(can_be, np.asarray(runs.variant)[:, None], -1)[:, 0]
    measured = Measured(timings, np.array(cells), noise_floor(visits)).some(kept)
    said = f"The measured times are of {len(measured.cells)} cells in {samples.name}"
    is_fitted = fitted is not None and sha256_of(samples) == fitted.sha256
    return measured, f"{said}. The fit {'used' if is_fitted else 'did not use'} these times."


def _runs(model: LatencyModel, suite: str, cells: Sequence[Cell]) -> Runs:
    """Return the runs of timed cells. If the model's runs have kernels, the suite counts the kernels."""
    if not model.kernels:
        return cell_runs(model, cells)
    timed = suite_of_file(suite, model.name)
    if timed.model != model:
        raise ValueError(f"{suite} times runs of {timed.model.name}")
    return timed.runs(cells)


def earlier_calibration(
    path: FilePath, later: CalibrationFile, models: Sequence[LatencyModel]
) -> tuple[CalibrationFile, Calibration]:
    earlier = read_calibration_file(path, models)
    both = earlier.models.keys() & later.models.keys()
    if not both:
        raise ValueError(f"{path}: expected a section of {', '.join(later.models)}, got {', '.join(earlier.models)}")
    for name in both:
        one, other = (file.models[name].fingerprint for file in (earlier, later))
        places = ("in the earlier file", "in the later file")
        if differences := fingerprint_differences(one, other, MACHINE_FIELDS, places):
            said = "; ".join(differences)
            raise ValueError(f"{path}: another machine measured it ({said}); give a calibration of this machine")
    return earlier, Calibration.from_file(earlier, models, path)


def change_section(
    sections: tuple[ModelSection, ModelSection],
    models: tuple[CalibratedModel, CalibratedModel],
    measured: Measured | None,
) -> Section:
    """Return the changes of a model's coefficients and of its predictions for timed cells; the surest comes first."""
    name, names = models[1].model.name, list(named(models[0].coefficients))
    cells = [] if measured is None else measured.each("name")
    columns = []
    for one in models:
        parts = (named(one.coefficients), named(one.posterior.coefficient_log_sd()))
        values, log_sds = ([float(part[name]) for name in names] for part in parts)
        if measured is not None:
            run = estimate(one.posterior, measured.timings.runs)
            values = [*values, *np.asarray(run.time_ns)]
            log_sds = [*log_sds, *np.hypot(np.asarray(run.log_sd()), one.pace_log_sd)]
        columns += [np.array(values), np.array(log_sds)]
    earlier, earlier_sd, later, later_sd = columns
    joint_sd, is_time = np.hypot(earlier_sd, later_sd), np.arange(len(earlier)) >= len(names)
    sds = np.log(later / earlier) / joint_sd
    words = np.where(is_time, np.where(sds > 0, "slower", "faster"), np.where(sds > 0, "larger", "smaller"))
    is_sure, kinds = np.abs(sds) > SURE_SDS, np.where(is_time, "prediction", "coefficient")
    figures = {
        "what": [*names, *cells],
        "kind": kinds,
        "earlier": earlier,
        "later": later,
        "unit": [*map(unit_of, names), *["ns"] * len(cells)],
        "later / earlier": later / earlier,
        "joint standard deviation": joint_sd,
        "change in these": sds,
        "verdict": np.where(is_sure, words, "within chance"),
    }
    rows = rows_of({name: np.asarray(column)[np.argsort(-np.abs(sds))] for name, column in figures.items()})
    counts = [f"{np.sum(is_sure[kinds == kind])} of {np.sum(kinds == kind)} {kind}s" for kind in np.unique(kinds)]
    slower, faster = (np.sum(words[is_sure] == word) or "none" for word in ("slower", "faster"))
    said = [
        f"Since the calibration of {sections[0].created}, {' and '.join(counts)} changed by more than {SURE_SDS:g} "
        f"joint standard deviations. Chance alone exceeds this limit once in twenty. {slower} predictions are surely "
        f"slower, {faster} surely faster.".replace("none predictions", "No predictions"),
        "A change is the logarithm of later divided by earlier, in joint standard deviations. The standard deviation "
        "of a prediction includes the pace of the machine. The earlier coefficients are grey in the picture.",
    ]
    before, after = (one.fingerprint for one in sections)
    if software := fingerprint_differences(before, after, places=("earlier", "now")):
        said.append(f"The software changed too: {'; '.join(software)}.")
    pictures, _ = drawn({"Coefficients": lambda: plot.coefficients(models[1], earlier=models[0])})
    table = Table(f"Changes of {name}, the surest first", rows, "All changes, the surest first")
    return Section(f"{name}-changes", f"{name}: what changed", said, pictures, [table])
