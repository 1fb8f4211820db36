"""The calibration file's schema, on one screen: version 5, independent sections, each with a digest of its own."""

import math
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from rlxjax._files import Sealed, Strict
from rlxjax.gate._devices import Provenance

from ._fingerprint import Fingerprint

SCHEMA_VERSION = 5
UNITS = {"time": "ns", "size": "bytes", "bandwidth": "bytes/ns", "throughput": "FLOP/ns"}

#: What a machine has lies within; a time of 1e-18 ns, say, is a mistake.
LEAST, MOST = 1e-15, 1e18

Positive = Annotated[float, Field(ge=LEAST, le=MOST, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]
Correlation = Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
Finite = Annotated[float, Field(ge=-MOST, le=MOST, allow_inf_nan=False)]


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
    """Mean absolute relative error of one group of cells, where the fit saw the cell and where it did not.

    `terms_alone` is that of the terms without the correction, held out; `covered` the share of held-out times
    within their interval of 90 %.
    """

    fit: NotNegative | None
    terms_alone: NotNegative | None
    covered: NotNegative | None
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
    """The correction, and how sure the calibration is; see `LatencyPosterior`.

    By variant: the weights of the correction, the spread, and its correlations with that of each variant, in the
    model's order; None for independent ones. The factor of the covariance by rows of its lower triangle.
    """

    correction: dict[str, list[Finite]]
    spread: dict[str, Positive]
    covariance_factor: list[list[Finite]]
    alike: dict[str, list[Correlation]] | None = None

    @model_validator(mode="after")
    def _of_these_shapes(self) -> "Uncertainty":
        if [len(row) for row in self.covariance_factor] != list(range(1, len(self.covariance_factor) + 1)):
            raise ValueError("covariance_factor: expected rows of 1, 2, 3, ... numbers")
        return self


class Pace(Strict):
    """How fast the machine was while it was timed.

    `usual`: its speed in units of the fastest of its earlier calibrations, None without any; `known`: in units of the
    fastest (low) and of the slowest machine (high) of the population, None without one; `usual_ns`: the canaries' times
    in the fastest calibration; `log_sd`: how much the logarithm of its speed changes from one minute to the next;
    `others`: processors that other processes kept busy, None where nobody looked.
    """

    usual: Positive | None
    known: Range | None = None
    usual_ns: dict[str, Positive]
    log_sd: Positive
    others: NotNegative | None


class Section(Sealed):
    """What each section says of itself: when, by which command, on what and from which samples it was made.

    `cautions`: what a user of its predictions should know.
    """

    created: str
    command: str = ""
    fingerprint: Fingerprint
    samples: Samples | None = None
    cautions: list[str] = []


class ModelSection(Section):
    """What timings say of one latency model.

    `facts`: how the machine schedules; `skipped`: cells that were not timed; `given`: files that the programs ran, with
    their SHA-256.
    """

    model_version: int
    facts: dict[str, NotNegative | list[NotNegative]]
    coefficients: dict[str, FittedCoefficient]
    uncertainty: Uncertainty
    noise_floor: NotNegative | None
    held_out: dict[str, ErrorSummary]
    domain: dict[str, Range]
    fit: FitSummary
    skipped: list[str] = []
    given: dict[str, str] = {}


class MachineSection(Section):
    """What micro-benchmarks say of the machine, whatever the model.

    `canary_ns` are their times, by which a machine that has changed is known; `cautions` are for users of any
    prediction.
    """

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


def facts_of(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what a section says of how a machine schedules, lists as arrays."""
    return {name: np.asarray(fact, float) if isinstance(fact, list) else fact for name, fact in facts.items()}


def rounded(number: Any) -> float:
    """Return a number with six digits, as the file keeps it."""
    value = float(f"{float(number):.6g}")
    return value if math.isfinite(value) else float(number)
