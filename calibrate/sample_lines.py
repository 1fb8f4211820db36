"""The lines of a samples file: their schema on one screen."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, field_validator

from rlxjax.calibration import Fingerprint, Positive, Strict
from rlxjax.clock import FIRST_PROTOCOL

from .workloads import STRATEGIES, Cell

SAMPLES_VERSION, FUNCTIONS_VERSION = 4, 1
#: How the job names the samples of functions, beside the calibration.
FUNCTIONS_SUFFIX = ".functions.jsonl"
#: The last version whose visits hold one run.
LAST_OF_SINGLE_RUNS = 2
#: What a runner counts as that the samples do not name: of that version or an earlier one.
UNNAMED_RUNNER = 12
#: The strategy that `fused` of an earlier version is now; where it is None, its samples do not say which form
#: of the selection ran.
FUSED_OF_VERSION: Mapping[int, str | None] = MappingProxyType({1: "fused-top_k", 2: None})
#: Largest size of a workload, and largest time in ns.
MAX_SIZE, MAX_TIME_NS = 2**31 - 1, 2**63 - 1

Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
TimeNs = Annotated[int, Field(ge=1, le=MAX_TIME_NS)]


class Header(Strict, extra="ignore"):
    """The first line; a newer version may have other fields."""

    kind: Literal["header"] = "header"
    version: int
    runner: Annotated[int, Field(ge=1)] = UNNAMED_RUNNER
    protocol: Annotated[int, Field(ge=1)] = FIRST_PROTOCOL
    fingerprint: Fingerprint

    @field_validator("version")
    @classmethod
    def _is_known(cls, version: int) -> int:
        if version > SAMPLES_VERSION:
            raise ValueError(f"{version} is newer than {SAMPLES_VERSION}, the newest that this rlxjax reads")
        if version < 1:
            raise ValueError(f"expected 1 to {SAMPLES_VERSION}, got {version}")
        return version


class Cells(Strict):
    """The workloads that every round measures from here on."""

    kind: Literal["cells"] = "cells"
    cells: list[tuple[str, Size, Size, Size]]


class Models(Strict):
    """Of the learned FFTs that are timed, the n_fft and the SHA-256 of the file."""

    kind: Literal["models"] = "models"
    models: list[tuple[Size, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]]


class Micro(Strict):
    """One repeat of a micro-benchmark."""

    kind: Literal["micro"] = "micro"
    name: Annotated[str, Field(max_length=64)]
    time_ns: Positive


class Canary(Strict):
    """A look at the machine's pace: micro-benchmarks once more, and the processors that others used since then."""

    kind: Literal["canary"] = "canary"
    times_ns: dict[Annotated[str, Field(max_length=64)], Positive]
    others: Annotated[float, Field(ge=0)]


class Visit(Strict):
    """A visit of a workload."""

    kind: Literal["timing"] = "timing"
    round: Annotated[int, Field(ge=0)]
    strategy: str
    batch: Size
    n_fft: Size
    k: Size
    n_segments: Size


class Timing(Visit):
    """Its timed runs."""

    times_ns: Annotated[list[TimeNs], Field(min_length=1)]


class EarlierTiming(Visit):
    """Its only timed run; of versions 1 and 2."""

    time_ns: TimeNs

    @property
    def times_ns(self) -> list[int]:
        """The timed runs."""
        return [self.time_ns]


class FunctionsHeader(Strict):
    """The first line of a file of samples of functions."""

    kind: Literal["functions"] = "functions"
    version: Literal[1] = FUNCTIONS_VERSION
    protocol: Annotated[int, Field(ge=1)] = FIRST_PROTOCOL
    fingerprint: Fingerprint


class FunctionVisit(Strict):
    """The timed runs of one visit of a function."""

    kind: Literal["visit"] = "visit"
    round: Annotated[int, Field(ge=0)]
    name: Annotated[str, Field(max_length=256)]
    times_ns: Annotated[list[TimeNs], Field(min_length=1)]


#: What comes after the header.
Line = Cells | Models | Micro | Canary | Timing | EarlierTiming
FUNCTIONS_LINE = TypeAdapter(Annotated[FunctionsHeader | FunctionVisit, Field(discriminator="kind")])
LINE = TypeAdapter(Annotated[Header | Cells | Models | Micro | Canary | Timing, Field(discriminator="kind")])
EARLIER_LINE = TypeAdapter(Annotated[Header | Cells | Models | Micro | EarlierTiming, Field(discriminator="kind")])


def checked_cell(version: int, strategy: str, batch: int, n_fft: int, k: int) -> Cell | None:
    """Return a workload; None where a version does not say what ran."""
    if n_fft % 2:
        raise ValueError(f"n_fft: expected an even number, got {n_fft}")
    if strategy == "fused" and version in FUSED_OF_VERSION:
        now = FUSED_OF_VERSION[version]
        return None if now is None else Cell(now, batch, n_fft, k)
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
    return Cell(strategy, batch, n_fft, k)
