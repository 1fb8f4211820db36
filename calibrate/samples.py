"""The raw samples: one JSON line each, appended and flushed as it is taken, never rewritten."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from rlxjax import Timings
from rlxjax._calibration_file import Fingerprint, Positive, fingerprint_differences
from rlxjax._files import Strict, first_refusal
from rlxjax.welch._selection import SELECTIONS

from .visits import Visits
from .workloads import STRATEGIES, Cell

SAMPLES_VERSION = 3
#: Largest size of a workload, and largest time in ns.
MAX_SIZE, MAX_TIME_NS = 2**31 - 1, 2**63 - 1

_Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
_TimeNs = Annotated[int, Field(ge=1, le=MAX_TIME_NS)]


class _Header(Strict, extra="ignore"):
    """The first line; a newer version may have other fields."""

    kind: Literal["header"]
    version: int
    fingerprint: Fingerprint


class _Cells(Strict):
    """The workloads that every round measures from here on."""

    kind: Literal["cells"]
    cells: list[tuple[str, _Size, _Size, _Size]]


class _Models(Strict):
    """Of the learned FFTs that are timed, the n_fft and the SHA-256 of the file."""

    kind: Literal["models"]
    models: list[tuple[_Size, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]]


class _Micro(Strict):
    """One repeat of a micro-benchmark."""

    kind: Literal["micro"]
    name: Annotated[str, Field(max_length=64)]
    time_ns: Positive


class _Timing(Strict):
    """The timed runs of one visit."""

    kind: Literal["timing"]
    round: Annotated[int, Field(ge=0)]
    strategy: str
    batch: _Size
    n_fft: _Size
    k: _Size
    n_segments: _Size
    times_ns: Annotated[list[_TimeNs], Field(min_length=1)]


_Line = Annotated[_Header | _Cells | _Models | _Micro | _Timing, Field(discriminator="kind")]
_LINE: TypeAdapter[_Line] = TypeAdapter(_Line)


@dataclasses.dataclass
class SampleLog:
    """The samples of one campaign.

    Attributes:
        fingerprint: of the machine they were taken on.
        cells: the workloads that every round measures; none until they are chosen.
        rounds: per round, its visits so far in the order they were made: the cell and the least time in ns.
        micro: per micro-benchmark, all its repeats in ns.
        models: of the learned FFTs that were timed, the SHA-256 of the file, by segment length.
    """

    fingerprint: Fingerprint
    cells: list[Cell] = dataclasses.field(default_factory=list)
    rounds: list[list[tuple[Cell, int]]] = dataclasses.field(default_factory=list)
    micro: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    models: dict[int, str] = dataclasses.field(default_factory=dict)

    def is_complete(self, round_: Sequence[tuple[Cell, int]]) -> bool:
        """Return whether every cell was measured in a round; none is before cells are chosen."""
        return bool(self.cells) and set(self.cells) <= {cell for cell, _ in round_}

    def complete_rounds(self) -> list[list[tuple[Cell, int]]]:
        """Return the rounds in which every cell was measured."""
        return [round_ for round_ in self.rounds if self.is_complete(round_)]

    def visits(self) -> Visits:
        """Return the visits of the complete rounds, which are numbered from 0."""
        places = {cell: place for place, cell in enumerate(self.cells)}
        # A first round that was not finished may hold cells that were dropped when it was resumed.
        made = [
            (number, places[cell], time_ns)
            for number, round_ in enumerate(self.complete_rounds())
            for cell, time_ns in round_
            if cell in places
        ]
        round_, cell, time_ns = np.array(made, np.int64).reshape(-1, 3).T
        return Visits(round_, cell, time_ns, len(self.cells))

    def add(self, round_: int, cell: Cell, times_ns: Sequence[int]) -> None:
        """Keep the timed runs of one visit, of which the least counts."""
        while len(self.rounds) <= round_:
            self.rounds.append([])
        self.rounds[round_].append((cell, min(times_ns)))


class SampleWriter:
    """Appends to a samples file; every line is handed to the system before the next sample is taken."""

    def __init__(self, path: FilePath, log: SampleLog, *, append: bool):
        self._file = open(path, "a" if append else "x", encoding="utf-8")  # noqa: SIM115
        self._log = log
        if not append:
            header = {"version": SAMPLES_VERSION, "fingerprint": log.fingerprint.model_dump()}
            self._write({"kind": "header", **header})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def cells(self, cells: Sequence[Cell]) -> None:
        """Keep which workloads every round measures."""
        self._write({"kind": "cells", "cells": [list(cell) for cell in cells]})
        self._log.cells = list(cells)

    def models(self, models: Mapping[int, str]) -> None:
        """Keep which learned FFTs are timed."""
        self._write({"kind": "models", "models": [[n_fft, sha256] for n_fft, sha256 in models.items()]})
        self._log.models = dict(models)

    def micro(self, name: str, time_ns: float) -> None:
        """Keep one repeat of a micro-benchmark."""
        self._write({"kind": "micro", "name": name, "time_ns": time_ns})
        self._log.micro.setdefault(name, []).append(time_ns)

    def timing(self, round_: int, cell: Cell, times_ns: Sequence[int]) -> None:
        """Keep the timed runs of one visit."""
        sample = {**cell._asdict(), "n_segments": cell.n_segments, "times_ns": list(times_ns)}
        self._write({"kind": "timing", "round": round_, **sample})
        self._log.add(round_, cell, times_ns)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()


def read_samples(path: FilePath, *, mend_tail: bool = False) -> SampleLog:
    """Read a samples file; a last line that was cut short is left out.

    Args:
        path: the file.
        mend_tail: also cut such a line off the file, so that appending goes on cleanly.

    Raises:
        ValueError: no such file, or one that is no samples file; one line that names the place.
    """
    mend = "leave out --resume to start anew"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); {mend}") from None
    whole = content[: content.rfind(b"\n") + 1]
    log: SampleLog | None = None
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            line = _LINE.validate_json(text)
            if not isinstance(line, _Header):
                _add_line(log, line)
            elif log is None:
                log = _begun(line)
            else:
                raise ValueError("a second header: a file holds the samples of one campaign")
        except ValueError as error:
            reason = first_refusal(error) if isinstance(error, ValidationError) else error
            raise ValueError(f"{path}: line {number}: {reason}; {mend}") from None
    if log is None:
        raise ValueError(f"{path}: holds no header; {mend}")
    if mend_tail and len(whole) < len(content):
        os.truncate(path, len(whole))
    return log


def check_resumable(
    log: SampleLog,
    path: FilePath,
    cells: Sequence[Cell],
    here: Fingerprint,
    models: Mapping[int, str] = MappingProxyType({}),
) -> None:
    """Refuse to go on with samples of another machine, another grid or other models."""
    if differences := fingerprint_differences(log.fingerprint, here):
        raise ValueError(
            f"{path}: was taken elsewhere ({'; '.join(differences)}); leave out --resume to start anew"
        )
    if log.cells and log.models != models:
        raise ValueError(
            f"{path}: holds runs of other learned models; give the same --model files, or leave out --resume "
            "to start anew"
        )
    if unknown := set(log.cells) - set(cells):
        raise ValueError(
            f"{path}: holds workloads of another grid ({min(unknown)}, ...); leave out --resume to start anew"
        )


def set_aside(path: FilePath) -> FilePath | None:
    """Rename an existing file to the next free numbered name; return that, or None if there was none."""
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


def timings_of(cells: Sequence[Cell], time_ns: np.ndarray) -> Timings:
    """Return the timings `[cells]` that the fit takes."""
    timings = Timings.checked(
        path=[str(cell.path) for cell in cells],
        batch=[cell.batch for cell in cells],
        n_fft=[cell.n_fft for cell in cells],
        k=[cell.k for cell in cells],
        n_segments=[cell.n_segments for cell in cells],
        time_ns=time_ns,
    )
    forms = list(SELECTIONS)
    selection = [forms.index(cell.selection) if cell.selection else 0 for cell in cells]
    return dataclasses.replace(timings, selection=np.array(selection, np.int32))


def _begun(header: _Header) -> SampleLog:
    """Return the samples of a header, none so far."""
    if header.version > SAMPLES_VERSION:
        raise ValueError(
            f"header.version: {header.version} is newer than {SAMPLES_VERSION}, the newest that this rlxjax "
            "reads"
        )
    if header.version != SAMPLES_VERSION:
        raise ValueError(f"header.version: expected {SAMPLES_VERSION}, got {header.version}")
    return SampleLog(header.fingerprint)


def _add_line(log: SampleLog | None, line: _Cells | _Models | _Micro | _Timing) -> None:
    """Add what a line says to the samples so far."""
    if log is None:
        raise ValueError("expected a header first")
    if isinstance(line, _Timing):
        cell = _checked_cell(line.strategy, line.batch, line.n_fft, line.k)
        if line.n_segments != cell.n_segments:
            raise ValueError(
                f"timing.n_segments: {cell.strategy} has {cell.n_segments}, got {line.n_segments}"
            )
        if line.round > len(log.rounds):
            raise ValueError(
                f"timing.round: expected at most {len(log.rounds)}, the one after the last, got {line.round}"
            )
        log.add(line.round, cell, line.times_ns)
    elif isinstance(line, _Micro):
        log.micro.setdefault(line.name, []).append(line.time_ns)
    elif isinstance(line, _Models):
        log.models = dict(line.models)
    else:
        log.cells = [_checked_cell(*cell) for cell in line.cells]
        if len(set(log.cells)) < len(log.cells):
            raise ValueError("cells: expected every workload once")


def _checked_cell(strategy: str, batch: int, n_fft: int, k: int) -> Cell:
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if n_fft % 2:
        raise ValueError(f"n_fft: expected an even number, got {n_fft}")
    return Cell(strategy, batch, n_fft, k)
