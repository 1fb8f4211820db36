"""The calibration file's schema, version 5: independent sections of a machine, or a population, each with a digest."""

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
#: The fields of a fingerprint that make it another machine; the rest is software. What is said where nothing is known.
MACHINE_FIELDS, UNKNOWN = ("platform", "device_kind", "machine", "cpu_model", "cores"), "unknown"

#: What a machine has lies within; a time of 1e-18 ns, say, is a mistake.
LEAST, MOST = 1e-15, 1e18

Positive = Annotated[float, Field(ge=LEAST, le=MOST, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]
Correlation = Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
Finite = Annotated[float, Field(ge=-MOST, le=MOST, allow_inf_nan=False)]


class MachineMismatchWarning(UserWarning):
    """A calibration was made on another machine, or with other software."""


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
    """One coefficient of a latency model, and the standard deviation of its logarithm."""

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
    """Mean absolute relative error of one group of cells, where the fit saw the cell and where it did not."""

    fit: NotNegative | None
    terms_alone: NotNegative | None  # of the terms without the correction, held out
    covered: NotNegative | None  # share of held-out times within their interval of 90 %
    held_out: NotNegative | None
    held_out_cells: int
    noise_floor: NotNegative | None


class Range(Strict):
    """Smallest and largest value measured."""

    low: NotNegative
    high: NotNegative

    @model_validator(mode="after")
    def _in_order(self) -> "Range":
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class Samples(Strict):
    """The raw samples behind the file; `runner` is the version of the suite's programs that were timed."""

    suite: str
    file: str
    sha256: str
    runner: int
    timings: int
    rounds: int
    workloads: int


class FitSummary(Strict):
    """How the fit ended; `outliers` are the workloads far off their prediction, which counted little."""

    converged: bool
    loss: Finite
    message: str
    inseparable: list[dict[str, float]]
    outliers: list[str] = []


class Uncertainty(Strict):
    """What `LatencyPosterior` holds beside coefficients, by variant; the factor is the rows of its lower triangle."""

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
    """How fast the machine was while it was timed."""

    usual: Positive | None  # its speed in units of the fastest of its earlier calibrations; None without any
    known: Range | None = None  # in units of the fastest (low) and the slowest machine (high) of the population
    usual_ns: dict[str, Positive]  # the canaries' times in the fastest calibration
    log_sd: Positive  # how much the logarithm of its speed changes from one minute to the next
    others: NotNegative | None  # processors that other processes kept busy; None where nobody looked


class Machine(Strict):
    """A machine of a population, and the samples that were taken of it; of which runner, where that matters."""

    fingerprint: Fingerprint
    canary_ns: dict[str, Positive] = {}  # times of the micro-benchmarks that tell its pace
    samples: str
    sha256: str
    runner: int
    coefficients: dict[str, FittedCoefficient] = {}  # by its own timings, where predictions for it start from them
    uncertainty: Uncertainty | None = None


class Population(Strict):
    """The machines that a section is of, of a fleet their number alone, and how much their speeds differ."""

    machines: list[Machine] = []
    devices: int = 0
    speed_log_sd: Positive


class Section(Sealed):
    """What each section says of itself: when, how, on what and of which samples it was made, and what to beware of."""

    created: str
    command: str = ""
    fingerprint: Fingerprint
    samples: Samples | None = None
    cautions: list[str] = []


class ModelSection(Section):
    """What timings say of one latency model; of a population, the spread is of runs of a machine that was left out."""

    model_version: int
    facts: dict[str, NotNegative | list[NotNegative]]  # how the machine schedules
    coefficients: dict[str, FittedCoefficient]
    uncertainty: Uncertainty
    noise_floor: NotNegative | None
    held_out: dict[str, ErrorSummary]
    domain: dict[str, Range]
    fit: FitSummary
    population: Population | None = None
    skipped: list[str] = []  # cells that were not timed
    given: dict[str, str] = {}  # files that the programs ran, with their SHA-256


class MachineSection(Section):
    """What micro-benchmarks say of the machine, whatever the model; `canary_ns`, their times, tell how fast it is."""

    gate: dict[str, GateCoefficient] | None = None
    canary_ns: dict[str, Positive] = {}
    pace: Pace | None = None


class CalibrationFile(Sealed):
    """The whole file; a section that cannot be used is left out of what is read."""

    schema_version: Literal[5] = SCHEMA_VERSION
    units: dict[str, str] = UNITS
    models: dict[str, ModelSection]
    machine: MachineSection | None = None

    def sections(self) -> dict[str, Section]:
        """Return the sections that there are, by name."""
        return {**self.models, **({} if self.machine is None else {"the machine": self.machine})}

    @model_validator(mode="after")
    def _units(self) -> "CalibrationFile":
        if self.units != UNITS:
            raise ValueError(f"units: expected {UNITS}, got {self.units}")
        return self


def rounded(number: Any) -> float:
    """Return a number with six digits, as the file keeps it."""
    value = float(f"{float(number):.6g}")
    return value if math.isfinite(value) else float(number)


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
        python=platform.python_version(),
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
    )


def fingerprint_of_device(device: str, platform: str = UNKNOWN) -> Fingerprint:
    """Return the fingerprint of timings of which no more than the name of a device is known.

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
    """Return a phrase for every field that differs, with words for the two places."""
    return [
        f"{name} {getattr(made_on, name)!r} {places[0]}, {getattr(here, name)!r} {places[1]}"
        for name in names
        if getattr(made_on, name) != getattr(here, name)
    ]


def warn_if_elsewhere(content: CalibrationFile, path: str | os.PathLike[str]) -> None:
    """Warn where sections were made on another machine, or with other software, saying what differs."""
    here, made_on = current_fingerprint(), {name: own.fingerprint for name, own in content.sections().items()}
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, known in made_on.items():
        alike.setdefault(tuple(fingerprint_differences(known, here)), []).append(name)
    for differences, names in alike.items():
        of, first = "" if len(alike) == 1 else f": {', '.join(names)}", made_on[names[0]]
        how = "elsewhere" if fingerprint_differences(first, here, MACHINE_FIELDS) else "with other software"
        said = (
            f"made {how}: {'; '.join(differences)}. Its predictions may not hold here; "
            "`rlxjax calibrate` makes one that does, `rlxjax validate` says whether these still do."
        )
        if not first.device_count:
            said = (
                f"fitted to timings of the device {first.device_kind!r}, of which nothing else is known. "
                "Its predictions are of that device."
            )
        if differences:
            warnings.warn(f"{path}{of} was {said}", MachineMismatchWarning, stacklevel=3)


def _cpu_model() -> str:
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
