"""Version 5 of the schema of calibration files. A file has sections, each with a digest of the section's content."""

import contextlib
import math
import os
import platform
import sys
import warnings
from collections.abc import Iterable
from importlib import metadata
from typing import Annotated, Any, Literal

import jax
from pydantic import Field, model_validator

from rlxjax._files import Sealed, Strict
from rlxjax._typing import Provenance

SCHEMA_VERSION = 5
UNITS = {"time": "ns", "size": "bytes", "bandwidth": "bytes/ns", "throughput": "FLOP/ns"}

_THREAD_FLAGS = ("XLA_FLAGS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
#: The fields of a fingerprint that identify the machine and not the software, and the word for an unknown value.
MACHINE_FIELDS, UNKNOWN = ("platform", "device_kind", "machine", "cpu_model", "cores"), "unknown"

#: The smallest and the largest positive value that a file may hold; a time of 1e-18 ns, for example, is a mistake.
LEAST, MOST = 1e-15, 1e18

Positive = Annotated[float, Field(ge=LEAST, le=MOST, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]
Correlation = Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
Finite = Annotated[float, Field(ge=-MOST, le=MOST, allow_inf_nan=False)]


class MachineMismatchWarning(UserWarning):
    """A warning that a calibration was made on another machine, or with other software."""


class Fingerprint(Strict):
    """A description of the machine and the software that made timings."""

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
    """A coefficient of a latency model, and the standard deviation of its logarithm."""

    value: Positive
    log_sd: Positive
    unit: str
    provenance: Provenance = Field(strict=False)


class GateCoefficient(Strict):
    """A measured coefficient of the IO gate."""

    value: NotNegative
    unit: str
    provenance: Provenance = Field(strict=False)


class ErrorSummary(Strict):
    """Mean absolute relative errors of predicted times for a group of cells (workloads), fitted and held out."""

    fit: NotNegative | None
    terms_alone: NotNegative | None  # held-out error of the terms without the correction
    covered: NotNegative | None  # share of held-out times within their 90 % interval
    held_out: NotNegative | None
    held_out_cells: int
    noise_floor: NotNegative | None


class Range(Strict):
    """The smallest and the largest measured value."""

    low: NotNegative
    high: NotNegative

    @model_validator(mode="after")
    def _in_order(self) -> "Range":
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class Samples(Strict):
    """The file of a section's raw timings; `runner` is the version of the programs that the suite times."""

    suite: str
    file: str
    sha256: str
    runner: int
    timings: int
    rounds: int
    workloads: int


class FitSummary(Strict):
    """The result of the fit; `outliers` are workloads far from the prediction, which had little weight in the fit."""

    converged: bool
    loss: Finite
    message: str
    inseparable: list[dict[str, float]]
    outliers: list[str] = []


class Uncertainty(Strict):
    """The fields of a `LatencyPosterior` about uncertainty; `covariance_factor` lists the lower triangle's rows."""

    correction: dict[str, list[Finite]]
    spread: dict[str, Positive]
    covariance_factor: list[list[Finite]] | None = None
    alike: dict[str, list[Correlation]] | None = None

    @model_validator(mode="after")
    def _of_these_shapes(self) -> "Uncertainty":
        if any(len(row) != place for place, row in enumerate(self.covariance_factor or [], start=1)):
            raise ValueError("covariance_factor: expected rows of 1, 2, 3, ... numbers")
        return self


class Pace(Strict):
    """The speed of the machine during the timings."""

    usual: Positive | None  # relative to the machine's fastest earlier calibration; None for the first calibration
    known: Range | None = None  # relative to the fastest (low) and the slowest machine (high) of the population
    usual_ns: dict[str, Positive]  # times of the micro-benchmarks in the fastest calibration
    log_sd: Positive  # standard deviation of the speed's logarithm from one minute to the next
    others: NotNegative | None  # processors that other processes kept busy; None if unknown


class Machine(Strict):
    """A machine of a population, and the file of its samples; `runner` is the version of the timed programs."""

    fingerprint: Fingerprint
    canary_ns: dict[str, Positive] = {}  # times of the micro-benchmarks that measure the machine's pace
    samples: str
    sha256: str
    runner: int
    coefficients: dict[str, FittedCoefficient] = {}  # fitted to the machine's own timings, if predictions use them
    uncertainty: Uncertainty | None = None


class Population(Strict):
    """The machines of a population, or the number of a fleet's devices, and the spread of the machines' speeds."""

    machines: list[Machine] = []
    devices: int = 0
    speed_log_sd: Positive


class Section(Sealed):
    """The fields that all sections have: date, command, fingerprint, samples and cautions."""

    created: str
    command: str = ""
    fingerprint: Fingerprint
    samples: Samples | None = None
    cautions: list[str] = []


class ModelSection(Section):
    """The section of a fitted latency model. For a population, the `spread` was measured on held-out machines."""

    model_version: int
    facts: dict[str, NotNegative | list[NotNegative]]  # how the machine schedules programs
    coefficients: dict[str, FittedCoefficient]
    uncertainty: Uncertainty
    noise_floor: NotNegative | None
    held_out: dict[str, ErrorSummary]
    domain: dict[str, Range]
    fit: FitSummary
    population: Population | None = None
    skipped: list[str] = []  # names of cells that were not timed
    given: dict[str, str] = {}  # files that the timed programs used, with their SHA-256


class MachineSection(Section):
    """The section about the machine, which serves all models; `canary_ns` holds the times of micro-benchmarks."""

    gate: dict[str, GateCoefficient] | None = None
    canary_ns: dict[str, Positive] = {}
    pace: Pace | None = None


class CalibrationFile(Sealed):
    """The content of a calibration file; reading a file leaves its unusable sections out."""

    schema_version: Literal[5] = SCHEMA_VERSION
    units: dict[str, str] = UNITS
    models: dict[str, ModelSection]
    machine: MachineSection | None = None

    def sections(self) -> dict[str, Section]:
        """Return the file's sections by name."""
        return {**self.models, **({} if self.machine is None else {"the machine": self.machine})}

    @model_validator(mode="after")
    def _units(self) -> "CalibrationFile":
        if self.units != UNITS:
            raise ValueError(f"units: expected {UNITS}, got {self.units}")
        return self


def rounded(number: Any) -> float:
    """Return a number rounded to six significant digits, as numbers are stored in a calibration file."""
    value = float(f"{float(number):.6g}")
    return value if math.isfinite(value) else float(number)


def current_fingerprint() -> Fingerprint:
    """Return the fingerprint of this process: its machine and its software."""
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
        python=platform.python_version(),
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
    )


def fingerprint_of_device(device: str, platform: str = UNKNOWN) -> Fingerprint:
    """Return a fingerprint for the timings of a device whose name is known, but not its software.

    Examples:
        >>> found = fingerprint_of_device("phone-7")
        >>> found.device_kind, found.platform, found.cores
        ('phone-7', 'unknown', 0)
    """
    texts = dict.fromkeys(("machine", "cpu_model", "jax", "jaxlib", "numpy", "python"), UNKNOWN)
    return Fingerprint(device_kind=device, platform=platform, device_count=0, cores=0, thread_flags={}, **texts)


def fingerprint_differences(
    made_on: Fingerprint,
    here: Fingerprint,
    names: Iterable[str] = tuple(Fingerprint.model_fields),
    places: tuple[str, str] = ("there", "here"),
) -> list[str]:
    """Return a phrase for each field in which two fingerprints differ; `places` are words for the two machines."""
    return [
        f"{name} {getattr(made_on, name)!r} {places[0]}, {getattr(here, name)!r} {places[1]}"
        for name in names
        if getattr(made_on, name) != getattr(here, name)
    ]


def warn_if_elsewhere(content: CalibrationFile, path: str | os.PathLike[str]) -> None:
    """Warn if sections were made on another machine or with other software; the warning names the differences."""
    here, made_on = current_fingerprint(), {name: own.fingerprint for name, own in content.sections().items()}
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, known in made_on.items():
        alike.setdefault(tuple(fingerprint_differences(known, here)), []).append(name)
    for differences, names in alike.items():
        of, first = "" if len(alike) == 1 else f": {', '.join(names)}", made_on[names[0]]
        how = "elsewhere" if fingerprint_differences(first, here, MACHINE_FIELDS) else "with other software"
        said = (
            f"made {how}: {'; '.join(differences)}. Its predictions may not hold here: "
            "check with `rlxjax validate`, or measure again with `rlxjax calibrate`."
        )
        if not first.device_count:
            said = f"fitted to timings of the device {first.device_kind!r}. Its predictions are for that device."
        if differences:
            warnings.warn(f"{path}{of} was {said}", MachineMismatchWarning, stacklevel=3)


def _cpu_model() -> str:
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
