"""What was timed: the samples beside a calibration, as one time a workload with its prediction."""

import dataclasses
from pathlib import Path as FilePath

import numpy as np

from calibrate.judge import timings_of
from calibrate.samples import read_samples
from calibrate.visits import noise_floor, quantile_ns
from rlxjax.calibration import (
    MACHINE_FIELDS,
    CalibratedModel,
    ModelSection,
    fingerprint_differences,
    sha256_of,
)
from rlxjax.fit import MIN_TIMINGS, Cell, estimate


@dataclasses.dataclass(frozen=True)
class Measured:
    """The workloads of a samples file that a calibration predicts, `[cells]` each.

    Attributes:
        cells: the workloads.
        time_ns: as measured, what the fit took.
        noise: relative difference of two halves of the campaign; NaN for a single round.
        predicted_ns: by the calibration.
        low_ns: lower ends of the intervals of 90 %.
        high_ns: their upper ends.
    """

    cells: list[Cell]
    time_ns: np.ndarray
    noise: np.ndarray
    predicted_ns: np.ndarray
    low_ns: np.ndarray
    high_ns: np.ndarray


def measured_beside(
    section: ModelSection, calibrated: CalibratedModel, path: FilePath, samples: FilePath | None
) -> tuple[Measured | None, str]:
    """Return what was timed for a calibration, and a sentence on where it is from or why it is not shown.

    Args:
        section: of Welch peaks in the calibration file.
        calibrated: its model of Welch peaks.
        path: of the file.
        samples: a file to take; the one beside the calibration that the latter names unless given.

    Raises:
        ValueError: a file that was given and holds no samples, or those of another machine.
    """
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
    if differences := fingerprint_differences(log.fingerprint, section.fingerprint, MACHINE_FIELDS):
        said = "; ".join(differences).replace(" here", " in the calibration").replace(" there", " in the samples")
        raise ValueError(f"{samples}: samples of another machine ({said}); give those of this calibration")
    visits = log.visits()
    lengths = set(np.ravel(calibrated.posterior.facts.get("learned_n_fft", ())).tolist())
    kept = np.array([not runs_model(cell) or cell.n_fft in lengths for cell in log.cells], bool)
    if not len(visits.rounds()) or kept.sum() < MIN_TIMINGS:
        return None, f"{samples.name} holds no whole round of workloads, so that no measured times are shown."
    cells = [cell for cell, is_one in zip(log.cells, kept, strict=True) if is_one]
    time_ns = quantile_ns(visits)[kept]
    found = estimate(calibrated.posterior, timings_of(cells, time_ns).runs)
    predicted = map(np.asarray, (found.time_ns, *calibrated.bounds_ns(found)))
    measured = Measured(cells, time_ns, noise_floor(visits)[kept], *predicted)
    said = f"Measured times are those of {len(cells)} workloads in {samples.name}"
    is_fitted = section.samples is not None and sha256_of(samples) == section.samples.sha256
    return measured, f"{said}, to which the calibration was fitted." if is_fitted else f"{said}: not what was fitted."
