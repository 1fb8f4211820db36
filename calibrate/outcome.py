"""What a calibrate job found, as its report reads it."""

import dataclasses
from pathlib import Path as FilePath

import numpy as np

from rlxjax.calibration import Calibration, CalibrationFile, ModelSection

from .measure import MicroRates
from .workloads import Cell


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a job found, for the report.

    Attributes:
        path: the calibration file.
        is_written: whether it was written: not where a fit did not converge, unless that was asked for.
        samples_path: the raw samples.
        calibration: what the file holds.
        content: the file's content.
        section: of it, what it says of Welch peaks.
        cells: the workloads measured.
        measured_ns: of the visits (`quartile_ns`), `[cells]`.
        predicted_ns: by the coefficients in the file, `[cells]`.
        skipped: workloads that were not measured, by reason.
        rates: what the micro-benchmarks say.
        notes: sentences that a person should read.
    """

    path: FilePath
    is_written: bool
    samples_path: FilePath
    calibration: Calibration
    content: CalibrationFile
    section: ModelSection
    cells: list[Cell]
    measured_ns: np.ndarray
    predicted_ns: np.ndarray
    skipped: dict[str, list[str]]
    rates: MicroRates
    notes: list[str]
