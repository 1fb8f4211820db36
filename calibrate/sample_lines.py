"""The lines of a samples file: their schema on one screen."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from rlxjax.calibration import Fingerprint, Positive, Strict

from .workloads import STRATEGIES, Cell

SAMPLES_VERSION, FUNCTIONS_VERSION = 4, 1
#: How the job names the samples of functions, beside the calibration.
FUNCTIONS_SUFFIX = ".functions.jsonl"
#: Largest size of a workload, and largest time in ns.
MAX_SIZE, MAX_TIME_NS = 2**31 - 1, 2**63 - 1

Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
TimeNs = Annotated[int, Field(ge=1, le=MAX_TIME_NS)]


class Header(Strict):
    """The first line."""

    kind: Literal["header"] = "header"
    version: Literal[4] = SAMPLES_VERSION
    runner: Annotated[int, Field(ge=1)]
    protocol: Annotated[int, Field(ge=1)]
    fingerprint: Fingerprint


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


class Timing(Strict):
    """The timed calls of one visit of a workload."""

    kind: Literal["timing"] = "timing"
    round: Annotated[int, Field(ge=0)]
    strategy: str
    batch: Size
    n_fft: Size
    k: Size
    n_segments: Size
    times_ns: Annotated[list[TimeNs], Field(min_length=1)]


class FunctionsHeader(Strict):
    """The first line of a file of samples of functions."""

    kind: Literal["functions"] = "functions"
    version: Literal[1] = FUNCTIONS_VERSION
    protocol: Annotated[int, Field(ge=1)]
    fingerprint: Fingerprint


class FunctionVisit(Strict):
    """The timed runs of one visit of a function."""

    kind: Literal["visit"] = "visit"
    round: Annotated[int, Field(ge=0)]
    name: Annotated[str, Field(max_length=256)]
    times_ns: Annotated[list[TimeNs], Field(min_length=1)]


#: What comes after the header.
Line = Cells | Models | Micro | Canary | Timing
FUNCTIONS_LINE = TypeAdapter(Annotated[FunctionsHeader | FunctionVisit, Field(discriminator="kind")])
LINE = TypeAdapter(Annotated[Header | Cells | Models | Micro | Canary | Timing, Field(discriminator="kind")])


def checked_cell(strategy: str, batch: int, n_fft: int, k: int) -> Cell:
    """Return a workload that the job may time."""
    if n_fft % 2:
        raise ValueError(f"n_fft: expected an even number, got {n_fft}")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
    return Cell(strategy, batch, n_fft, k)
