"""The raw samples: one JSON line each, appended and flushed as it is taken, never rewritten."""

import dataclasses
import gzip
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any

import numpy as np
from pydantic import ValidationError

from rlxjax import Timings
from rlxjax.calibration import Fingerprint, fingerprint_differences, first_refusal
from rlxjax.models import WELCH
from rlxjax.welch import RUNNER_VERSION

from .sample_lines import (
    EARLIER_LINE,
    LINE,
    SAMPLES_VERSION,
    EarlierTiming,
    Header,
    Micro,
    Models,
    Other,
    Timing,
    Visit,
    checked_cell,
)
from .visits import Visits
from .workloads import Cell


@dataclasses.dataclass
class SampleLog:
    """The samples of one campaign.

    Attributes:
        fingerprint: of the machine they were taken on.
        cells: the workloads that every round measures; none until they are chosen.
        rounds: per round, its visits so far in the order they were made: the cell and the least time in ns.
        micro: per micro-benchmark, all its repeats in ns.
        models: of the learned FFTs that were timed, the SHA-256 of the file, by segment length.
        version: of the file's format.
        runner: version of the runner that was timed.
        left_out: timings of `fused` that do not say which form of the selection ran.
    """

    fingerprint: Fingerprint
    cells: list[Cell] = dataclasses.field(default_factory=list)
    rounds: list[list[tuple[Cell, int]]] = dataclasses.field(default_factory=list)
    micro: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    models: dict[int, str] = dataclasses.field(default_factory=dict)
    version: int = SAMPLES_VERSION
    runner: int = RUNNER_VERSION
    left_out: int = 0

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
            header = {"version": log.version, "runner": log.runner}
            self._write({"kind": "header", **header, "fingerprint": log.fingerprint.model_dump()})

    def __enter__(self) -> "SampleWriter":
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


def read_samples(
    path: FilePath, *, mend: str = "take samples with `rlxjax calibrate`", mend_tail: bool = False
) -> SampleLog:
    """Read a samples file of any version, compressed if its name ends in `.gz`.

    A last line that was cut short is left out.

    Args:
        path: the file.
        mend: what to do about a file that cannot be read, for messages.
        mend_tail: also cut such a line off the file, so that appending goes on cleanly.

    Raises:
        ValueError: no such file, or one that is no samples file; one line that names the place.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: cannot be read ({reason}); {mend}") from None
    whole = content[: content.rfind(b"\n") + 1]
    log, adapter = None, LINE
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            line = adapter.validate_json(text)
            if not isinstance(line, Header):
                _add_line(log, line)
            elif log is None:
                log = _begun(line)
                adapter = LINE if log.version == SAMPLES_VERSION else EARLIER_LINE
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
    """Refuse to go on with samples of another version, runner, machine or grid, or of other models."""
    ours = {"version": SAMPLES_VERSION, "runner": RUNNER_VERSION}
    for name, expected in ours.items():
        if (got := getattr(log, name)) != expected:
            raise ValueError(
                f"{path}: holds samples of {name} {got}, and this is {name} {expected}; leave out --resume "
                "to start anew"
            )
    if differences := fingerprint_differences(log.fingerprint, here):
        raise ValueError(f"{path}: was taken elsewhere ({'; '.join(differences)}); leave out --resume to start anew")
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
    return Timings.checked(
        WELCH,
        variant=[cell.variant for cell in cells],
        batch=[cell.batch for cell in cells],
        n_fft=[cell.n_fft for cell in cells],
        k=[cell.k for cell in cells],
        n_segments=[cell.n_segments for cell in cells],
        time_ns=time_ns,
    )


def _begun(header: Header) -> SampleLog:
    """Return the samples of a header, none so far."""
    if header.version > SAMPLES_VERSION:
        raise ValueError(
            f"header.version: {header.version} is newer than {SAMPLES_VERSION}, the newest that this rlxjax reads"
        )
    if header.version < 1:
        raise ValueError(f"header.version: expected 1 to {SAMPLES_VERSION}, got {header.version}")
    return SampleLog(header.fingerprint, version=header.version, runner=header.runner)


def _add_line(log: SampleLog | None, line: Other | Timing | EarlierTiming) -> None:
    """Add what a line says to the samples so far."""
    if log is None:
        raise ValueError("expected a header first")
    if isinstance(line, Visit):
        if line.round > len(log.rounds):
            raise ValueError(
                f"timing.round: expected at most {len(log.rounds)}, the one after the last, got {line.round}"
            )
        cell = checked_cell(log.version, line.strategy, line.batch, line.n_fft, line.k)
        if cell is None:
            log.left_out += 1
            return
        if line.n_segments != cell.n_segments:
            raise ValueError(f"timing.n_segments: {cell.strategy} has {cell.n_segments}, got {line.n_segments}")
        log.add(line.round, cell, line.times_ns)
    elif isinstance(line, Micro):
        log.micro.setdefault(line.name, []).append(line.time_ns)
    elif isinstance(line, Models):
        log.models = dict(line.models)
    else:
        cells = [checked_cell(log.version, *cell) for cell in line.cells]
        log.cells = [cell for cell in cells if cell is not None]
        if len(set(log.cells)) < len(log.cells):
            raise ValueError("cells: expected every workload once")
