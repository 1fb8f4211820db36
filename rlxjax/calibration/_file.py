"""The calibration file: its schema on one screen, and the machine that it belongs to."""

import dataclasses
import math
import os
import platform
import sys
import warnings
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

import jax
import numpy as np
from pydantic import Field, model_validator

from ._calibration import CalibrationFileError, MachineMismatchWarning
from ._correction import KINDS, N_FEATURES
from ._device import Provenance
from ._files import Strict, read_json_file
from ._gate import IoFusionGate
from ._latency import COEFFICIENT_NAMES, FORMULA_VERSION, LatencyCoefficients, coefficient_unit
from ._learned_latency import LEARNED_COEFFICIENT_NAMES
from ._posterior import LatencyPosterior
from .welch import FAST_SEGMENTS, ULTRA_SEGMENTS

SCHEMA_VERSION = 3

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Fingerprint(Strict):
    """The machine and software that timings belong to."""

    platform: str
    device_kind: str
    device_count: int
    machine: str
    cpu_model: str
    cores: int
    thread_flags: dict[str, str]
    jax: str
    jaxlib: str
    numpy: str
    python: str


class FittedCoefficient(Strict):
    """One latency coefficient, and the standard deviation of its logarithm."""

    value: Positive
    log_sd: Positive
    unit: str
    provenance: Provenance = Field(strict=False)


class GateCoefficient(Strict):
    """One coefficient of the measured gate."""

    value: NotNegative
    unit: str
    provenance: Provenance = Field(strict=False)


class ErrorSummary(Strict):
    """Mean absolute relative error of one strategy, where the fit saw the workload and where it did not.

    `terms_alone` is that of the terms without the correction, held out; `covered` the share of held-out times
    within their interval of 90 %.
    """

    fit: NotNegative | None
    terms_alone: NotNegative | None
    covered: NotNegative | None
    interior: NotNegative | None
    edge: NotNegative | None
    held_out: NotNegative | None
    held_out_cells: int
    noise_floor: NotNegative | None
    built_in: NotNegative


class Range(Strict):
    """Smallest and largest value measured."""

    low: Positive
    high: Positive

    @model_validator(mode="after")
    def _in_order(self) -> "Range":
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class Domain(Strict):
    """The hull of the workloads measured, `batch * n_fft` included.

    Where a file does not say how many segments, they are those that the job times.
    """

    batch: Range
    n_fft: Range
    k: Range
    n_segments: Range = Range(low=ULTRA_SEGMENTS, high=FAST_SEGMENTS)
    samples: Range


class Samples(Strict):
    """The raw samples behind the file."""

    file: str
    sha256: str
    timings: int
    rounds: int
    workloads: int


class FitSummary(Strict):
    """How the fit ended; `outliers` are the workloads far off their prediction, which counted little."""

    converged: bool
    loss: float = Field(allow_inf_nan=False)
    message: str
    inseparable: list[dict[str, float]]
    outliers: list[str] = []


class Uncertainty(Strict):
    """The correction, and how sure the calibration is; see `LatencyPosterior`.

    By kind of run: the weights of the correction, and the spread. The factor of the covariance by rows of its
    lower triangle.
    """

    correction: dict[str, list[float]]
    spread: dict[str, Positive]
    covariance_factor: list[list[float]]

    @model_validator(mode="after")
    def _of_these_shapes(self) -> "Uncertainty":
        for name, entries in (("correction", self.correction), ("spread", self.spread)):
            if set(entries) != set(KINDS):
                raise ValueError(f"uncertainty.{name}: expected {', '.join(KINDS)}, got {', '.join(entries)}")
        for kind, weights in self.correction.items():
            if len(weights) != N_FEATURES:
                raise ValueError(f"uncertainty.correction.{kind}: expected {N_FEATURES} weights")
        expected = list(range(1, len(COEFFICIENT_NAMES) + len(KINDS) * N_FEATURES + 1))
        if [len(row) for row in self.covariance_factor] != expected:
            raise ValueError(f"uncertainty.covariance_factor: expected rows of 1 to {expected[-1]} numbers")
        numbers = [*self.correction.values(), *self.covariance_factor]
        if not all(math.isfinite(number) for row in numbers for number in row):
            raise ValueError("uncertainty: expected finite numbers")
        return self

    @classmethod
    def of(cls, posterior: LatencyPosterior) -> "Uncertainty":
        """Return the section of a posterior, its numbers with six digits."""
        factor = [
            [_rounded(number) for number in row[: place + 1]]
            for place, row in enumerate(np.asarray(posterior.factor))
        ]
        weights = np.asarray(posterior.weights).tolist()
        return cls(
            correction={kind: [_rounded(w) for w in row] for kind, row in zip(KINDS, weights, strict=True)},
            spread=dict(zip(KINDS, np.asarray(posterior.spread).tolist(), strict=True)),
            covariance_factor=factor,
        )

    def posterior(self, coefficients: LatencyCoefficients) -> LatencyPosterior:
        """Return the posterior with these coefficients."""
        factor = np.zeros((len(self.covariance_factor),) * 2)
        for place, row in enumerate(self.covariance_factor):
            factor[place, : place + 1] = row
        weights = np.array([self.correction[kind] for kind in KINDS])
        return LatencyPosterior(
            coefficients, weights, factor, np.array([self.spread[kind] for kind in KINDS])
        )


class LearnedModel(Strict):
    """A learned FFT that was timed.

    `flop` is of the pruned program for one segment, `live_bins` the bins that are not masked.
    """

    n_fft: int
    flop: Positive
    live_bins: int
    active_gates: int
    total_gates: int
    file: str
    sha256: str

    @model_validator(mode="after")
    def _possible(self) -> "LearnedModel":
        if self.n_fft < 2 or self.n_fft & (self.n_fft - 1):
            raise ValueError(f"n_fft: expected a power of two of at least 2, got {self.n_fft}")
        for name, most in (("live_bins", self.n_fft // 2 + 1), ("active_gates", self.total_gates)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name}: expected 0 to {most}, got {getattr(self, name)}")
        return self


class LearnedSection(Strict):
    """The learned path, if the job was given models."""

    coefficients: dict[str, FittedCoefficient]
    spread: Positive
    models: list[LearnedModel]
    fit: FitSummary

    @model_validator(mode="after")
    def _all_coefficients(self) -> "LearnedSection":
        _check_entries("learned.coefficients", self.coefficients, LEARNED_COEFFICIENT_UNITS)
        lengths = [model.n_fft for model in self.models]
        if not lengths or len(set(lengths)) < len(lengths):
            raise ValueError(f"learned.models: expected models of different n_fft, got n_fft {lengths}")
        return self


class CalibrationFile(Strict):
    """The schema, version 3: earlier ones knew no uncertainty.

    `canary_ns` are the times of the micro-benchmarks, by which a machine that has changed is known.
    """

    schema_version: Literal[3]
    formula_version: Literal[12]
    created: str
    command: str
    units: dict[str, str]
    fingerprint: Fingerprint
    coefficients: dict[str, FittedCoefficient]
    uncertainty: Uncertainty
    gate: dict[str, GateCoefficient]
    canary_ns: dict[str, Positive]
    noise_floor: NotNegative | None
    held_out: dict[str, ErrorSummary]
    domain: Domain
    samples: Samples
    fit: FitSummary
    skipped: list[str]
    learned: LearnedSection | None = None

    @model_validator(mode="after")
    def _all_coefficients(self) -> "CalibrationFile":
        _check_entries("coefficients", self.coefficients, COEFFICIENT_UNITS)
        _check_entries("gate", self.gate, GATE_UNITS)
        if self.units != UNITS:
            raise ValueError(f"units: expected {UNITS}, got {self.units}")
        if self.gate["unified_memory"].value not in (0.0, 1.0):
            raise ValueError(f"gate.unified_memory: expected 0 or 1, got {self.gate['unified_memory'].value}")
        return self


def _rounded(number: float) -> float:
    return float(f"{number:.6g}")


def _check_entries(section: str, entries: Mapping[str, Any], units: Mapping[str, str]) -> None:
    for name, unit in units.items():
        if name not in entries:
            raise ValueError(f"{section}.{name} is missing")
        if entries[name].unit != unit:
            raise ValueError(f"{section}.{name}.unit: expected {unit!r}, got {entries[name].unit!r}")
    if unknown := set(entries) - set(units):
        raise ValueError(f"{section}.{min(unknown)} is no coefficient of this schema")


UNITS = {"time": "ns", "size": "bytes", "bandwidth": "bytes/ns", "throughput": "FLOP/ns"}
COEFFICIENT_UNITS = {name: coefficient_unit(name) for name in COEFFICIENT_NAMES}
LEARNED_COEFFICIENT_UNITS = {name: coefficient_unit(name) for name in LEARNED_COEFFICIENT_NAMES}
#: The gate's names are the reference's; its bandwidths carry no unit in them.
GATE_UNITS = {
    field.name: "bytes/ns" if field.name.endswith("_bw") else coefficient_unit(field.name)
    for field in dataclasses.fields(IoFusionGate)
}


_THREAD_FLAGS = ("XLA_FLAGS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
#: What makes it another machine; the rest is software.
MACHINE_FIELDS = ("platform", "device_kind", "machine", "cpu_model", "cores")


def current_fingerprint() -> Fingerprint:
    """Return the fingerprint of this process."""
    device = jax.devices()[0]
    affinity = getattr(os, "sched_getaffinity", None)
    return Fingerprint(
        platform=device.platform,
        device_kind=device.device_kind,
        device_count=jax.device_count(),
        machine=platform.machine(),
        cpu_model=_cpu_model(),
        cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
        thread_flags={name: os.environ[name] for name in _THREAD_FLAGS if name in os.environ},
        jax=metadata.version("jax"),
        jaxlib=metadata.version("jaxlib"),
        numpy=metadata.version("numpy"),
        python=platform.python_version(),
    )


def fingerprint_differences(
    made_on: Fingerprint, here: Fingerprint, names: Iterable[str] = tuple(Fingerprint.model_fields)
) -> list[str]:
    """Return a phrase for every field that differs."""
    return [
        f"{name} {getattr(made_on, name)!r} there, {getattr(here, name)!r} here"
        for name in names
        if getattr(made_on, name) != getattr(here, name)
    ]


def default_calibration_path(platform_name: str | None = None) -> FilePath:
    """Return where the calibrate job writes, and `load_calibration()` looks, for a JAX platform.

    The directory is `RLXJAX_HOME` where it is set, else the user's data directory.
    """
    import platformdirs

    home = os.environ.get("RLXJAX_HOME") or platformdirs.user_data_dir("rlxjax", appauthor=False)
    return FilePath(home) / f"calibration-{platform_name or jax.default_backend()}.json"


def read_calibration_file(path: str | os.PathLike) -> CalibrationFile:
    """Return the validated content of a calibration file.

    Raises:
        CalibrationFileError: the file is missing, truncated, of another schema, or has a missing,
            negative or NaN coefficient. The file is left as it was.
    """
    return read_json_file(
        path,
        CalibrationFile,
        {"schema_version": SCHEMA_VERSION, "formula_version": FORMULA_VERSION},
        CalibrationFileError,
        mend=f"make a new one with `rlxjax calibrate --out {path}`",
        what="a calibration",
    )


def warn_if_elsewhere(content: CalibrationFile, path: str | os.PathLike) -> None:
    """Warn where a calibration was made on another machine, or with other software, saying what differs."""
    here = current_fingerprint()
    if differences := fingerprint_differences(content.fingerprint, here):
        is_elsewhere = fingerprint_differences(content.fingerprint, here, MACHINE_FIELDS)
        how = "elsewhere" if is_elsewhere else "with other software"
        warnings.warn(
            f"{path} was made {how}: {'; '.join(differences)}. Its predictions may not hold here; "
            "`rlxjax calibrate` makes one that does, `rlxjax validate` says whether these still do.",
            MachineMismatchWarning,
            stacklevel=3,
        )


def _cpu_model() -> str:
    if sys.platform == "linux":
        try:
            with open("/proc/cpuinfo", encoding="utf-8") as file:
                for line in file:
                    if line.startswith("model name"):
                        return line.partition(":")[2].strip()
        except OSError:
            pass
    return platform.processor() or "unknown"
