"""The raw samples: one JSON line each, appended and flushed as it is taken, never rewritten."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from rlxjax import Timings
from rlxjax._calibration_file import Fingerprint, fingerprint_differences
from rlxjax.welch._selection import SELECTIONS

from .visits import Visits
from .workloads import STRATEGIES, Cell

SAMPLES_VERSION = 3


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
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); leave out --resume to start anew"
        ) from None
    whole = content[: content.rfind(b"\n") + 1]
    log: SampleLog | None = None
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            log = _add_line(log, json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: line {number}: not a sample of this job ({error}); leave out --resume to start anew"
            ) from None
    if log is None:
        raise ValueError(f"{path}: holds no header; leave out --resume to start anew")
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


def _add_line(log: SampleLog | None, line: dict[str, Any]) -> SampleLog:
    kind = line["kind"]
    if kind == "header":
        if line["version"] != SAMPLES_VERSION:
            raise ValueError(f"version {line['version']}, expected {SAMPLES_VERSION}")
        return SampleLog(Fingerprint.model_validate(line["fingerprint"]))
    if log is None:
        raise ValueError("a header was expected first")
    if kind == "cells":
        log.cells = [Cell(*cell) for cell in line["cells"]]
    elif kind == "models":
        log.models = {int(n_fft): str(sha256) for n_fft, sha256 in line["models"]}
    elif kind == "micro":
        if not 0 < line["time_ns"] < math.inf:
            raise ValueError(f"a time of {line['time_ns']}, which is not positive and finite")
        log.micro.setdefault(line["name"], []).append(float(line["time_ns"]))
    elif kind == "timing":
        times_ns = line["times_ns"]
        if line["strategy"] not in STRATEGIES or line["round"] < 0 or not times_ns:
            raise ValueError("unknown strategy, a negative round, or no times")
        if not all(isinstance(time_ns, int) and time_ns > 0 for time_ns in times_ns):
            raise ValueError(f"times of {times_ns}, of which one is no whole number of ns that is positive")
        log.add(line["round"], Cell(line["strategy"], line["batch"], line["n_fft"], line["k"]), times_ns)
    else:
        raise ValueError(f"unknown kind {kind!r}")
    return log
