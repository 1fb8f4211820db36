"""The raw samples of a campaign, and the time of each cell. A file has a JSON line for each sample, written at once."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from pydantic import Field, TypeAdapter, ValidationError

from rlxjax import calibration as files
from rlxjax.calibration import Fingerprint, NotNegative, Positive, Strict, not_written
from rlxjax.clock import PROTOCOL, QUARTILE, mean_ns
from rlxjax.fit import Cell, Facts, Suite

#: The number of iterations that separate cell times from the machine's pace; a pace is the median of so many visits.
PACE_STEPS, PACE_VISITS = 3, 21


@dataclasses.dataclass(frozen=True)
class Visits:
    """Visits in order, as arrays `[visits]`: the round, the index of the cell (below `n_cells`), and the time."""

    round: np.ndarray
    cell: np.ndarray
    time_ns: np.ndarray
    n_cells: int

    @classmethod
    def of_rounds(cls, times_ns: np.ndarray) -> "Visits":
        """Return the visits for an array of times, `[rounds, cells]`: each round visits each cell once, in order."""
        times_ns = np.asarray(times_ns, np.float64)
        return cls(*np.divmod(np.arange(times_ns.size), times_ns.shape[1]), times_ns.ravel(), times_ns.shape[1])

    def rounds(self) -> np.ndarray:
        return np.unique(self.round)

    def in_rounds(self, rounds: np.ndarray) -> "Visits":
        kept = np.isin(self.round, rounds)
        return Visits(self.round[kept], self.cell[kept], self.time_ns[kept], self.n_cells)


def quantile_ns(visits: Visits) -> np.ndarray:
    """Return each cell's time in ns, float64 `[cells]`: the lower quartile of its visits, scaled to the average pace.

    The pace at a visit is a median over the neighbouring visits, each visit's time divided by its cell's quartile.
    """
    order = np.argsort(visits.cell, kind="stable")
    starts = np.searchsorted(visits.cell[order], np.arange(1, visits.n_cells))

    def quantiles(logs: np.ndarray) -> np.ndarray:
        return np.array([np.quantile(one, QUARTILE) for one in np.split(logs[order], starts)])

    logs = np.log(visits.time_ns)
    of_cell = as_they_were = quantiles(logs)
    for _ in range(PACE_STEPS):
        slower = np.pad(logs - of_cell[visits.cell], PACE_VISITS // 2, mode="symmetric")
        of_cell = quantiles(logs - np.median(sliding_window_view(slower, PACE_VISITS), axis=-1))
    return np.exp(of_cell - of_cell.mean() + as_they_were.mean())


def noise_floor(visits: Visits) -> np.ndarray:
    """Return the relative difference of each cell's time, `[cells]`, between even and odd rounds; NaN for one round."""
    rounds = visits.rounds()
    if (half := len(rounds) // 2) == 0:
        return np.full(visits.n_cells, np.nan)
    even, odd = (quantile_ns(visits.in_rounds(rounds[first : 2 * half : 2])) for first in (0, 1))
    return np.abs(np.log(even / odd))


SAMPLES_VERSION = 5
#: How the name of a samples file ends, after the names of the calibration and the model. The file may be compressed.
SUFFIX = ".samples.jsonl"
ANEW = "leave out --resume to start again"
Name = Annotated[str, Field(min_length=1, max_length=256)]
ShortName = Annotated[str, Field(max_length=64)]


class Header(Strict):
    """The first line of a samples file: the suite, the machine, the model's facts, and the given files' SHA-256."""

    kind: Literal["header"] = "header"
    version: Literal[5] = SAMPLES_VERSION
    suite: Name
    runner: Annotated[int, Field(ge=1)]
    protocol: Annotated[int, Field(ge=1)]
    fingerprint: Fingerprint
    facts: dict[str, NotNegative | list[NotNegative]]
    given: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = {}


class KeptCell(Strict):
    """A line that describes a cell, see `rlxjax.fit.Cell`."""

    name: Name
    variant: Name
    inputs: dict[str, NotNegative | tuple[NotNegative, ...]]
    work: Name
    group: Name
    held_out: bool
    compiled: dict[str, NotNegative | tuple[NotNegative, ...]] = {}


class Cells(Strict):
    """A line that names the cells that all later rounds visit."""

    kind: Literal["cells"] = "cells"
    cells: list[KeptCell]


class Micro(Strict):
    """A line with the time of one repeat of a micro-benchmark."""

    kind: Literal["micro"] = "micro"
    name: ShortName
    time_ns: Positive


class Canary(Strict):
    """A look at the machine's pace: times of micro-benchmarks, and how many processors other processes used."""

    kind: Literal["canary"] = "canary"
    times_ns: dict[ShortName, Positive]
    others: Annotated[float, Field(ge=0)]


class Visit(Strict):
    """A line with the timed calls of one visit of a cell."""

    kind: Literal["visit"] = "visit"
    round: Annotated[int, Field(ge=0)]
    cell: Name
    times_ns: Annotated[list[Annotated[int, Field(ge=1, lt=2**63)]], Field(min_length=1)]


#: The type of each line after the first line.
Line = Cells | Micro | Canary | Visit
_LINE = TypeAdapter(Annotated[Header | Line, Field(discriminator="kind")])


@dataclasses.dataclass
class SampleLog:
    """The samples of a campaign: cells, rounds of visits (cell, ns), micro-benchmarks, and looks at the pace."""

    header: Header
    cells: list[Cell] = dataclasses.field(default_factory=list)
    rounds: list[list[tuple[str, float]]] = dataclasses.field(default_factory=list)
    micro: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    canaries: list[Canary] = dataclasses.field(default_factory=list)
    _file: Any = dataclasses.field(default=None, compare=False, repr=False, init=False)

    @classmethod
    def new(cls, suite: Suite, name: str) -> "SampleLog":
        """Return an empty log for a suite. `name` is the name of the suite on a command line."""
        facts = {name: np.asarray(fact, float).tolist() for name, fact in suite.facts().items()}
        about = {"fingerprint": files.current_fingerprint(), "facts": facts, "given": dict(suite.given)}
        return cls(Header(suite=name, runner=suite.runner, protocol=PROTOCOL, **about))

    @property
    def fingerprint(self) -> Fingerprint:
        return self.header.fingerprint

    @property
    def facts(self) -> Facts:
        facts = self.header.facts
        return {name: np.asarray(fact, float) if isinstance(fact, list) else fact for name, fact in facts.items()}

    def cells_left(self, round_: int) -> list[str]:
        done = {name for name, _ in self.rounds[round_]} if round_ < len(self.rounds) else set()
        return [cell.name for cell in self.cells if cell.name not in done]

    def complete_rounds(self) -> list[list[tuple[str, float]]]:
        """Return the rounds that visited every cell; empty before the cells are chosen."""
        return [one for place, one in enumerate(self.rounds) if self.cells and not self.cells_left(place)]

    def timed(self) -> tuple[list[Cell], Visits]:
        """Return the timed cells and the visits of the complete rounds. If there are none, use the longest round."""
        whole = self.complete_rounds() or [max(self.rounds, key=len, default=[])]
        visited = {name for name, _ in whole[0]}
        cells = [cell for cell in self.cells if cell.name in visited]
        places = {cell.name: place for place, cell in enumerate(cells)}
        # An unfinished first round may hold cells that a resumed job dropped.
        made = [(at, places[name], time_ns) for at, one in enumerate(whole) for name, time_ns in one if name in places]
        round_, cell, time_ns = np.array(made, float).reshape(-1, 3).T
        return cells, Visits(round_.astype(int), cell.astype(int), time_ns, len(cells))

    @contextlib.contextmanager
    def kept_in(self, path: FilePath, *, append: bool) -> Iterator[FilePath | None]:
        """Append each added line to a file at once. Yield the path to which the earlier file was moved, or None."""
        aside = None if append else files.set_aside(path)
        try:
            self._file = open(path, "ab" if append else "xb", buffering=0)  # noqa: SIM115
        except OSError as reason:
            raise not_written(path, reason) from None
        with self._file:
            if not append:
                self._write(self.header)
            yield aside
        self._file = None

    def _write(self, line: Header | Line) -> None:
        rest = f"{line.model_dump_json()}\n".encode()
        try:
            while self._file and rest:  # a full disk may take only a part
                rest = rest[self._file.write(rest) :]
        except OSError as reason:
            raise not_written(self._file.name, reason) from None

    def keep(self, line: Line) -> None:
        self._write(line)
        self.add(line)

    def keep_cells(self, cells: Sequence[Cell]) -> None:
        self.keep(Cells(cells=[KeptCell.model_validate(cell, from_attributes=True) for cell in cells]))

    def add(self, line: Line) -> None:
        """Add the content of a line; refuse a line that must not come after the earlier lines."""
        match line:
            case Micro():
                self.micro.setdefault(line.name, []).append(line.time_ns)
            case Canary():
                self.canaries.append(line)
            case Cells():
                self.cells = [Cell(**cell.model_dump()) for cell in line.cells]
                if len({cell.name for cell in self.cells}) < len(self.cells):
                    raise ValueError("cells: expected every cell once")
            case Visit():
                last = len(self.rounds)
                if line.round > last:
                    raise ValueError(f"visit.round: expected at most {last}, the next round, got {line.round}")
                if line.round == last:
                    self.rounds.append([])
                self.rounds[line.round].append((line.cell, round(mean_ns(line.times_ns))))


def read_samples(
    path: FilePath, *, advice: str = "take samples with `rlxjax calibrate`", cut_tail: bool = False
) -> SampleLog:
    """Read a samples file, which is compressed if its name ends in `.gz`. A truncated last line is left out."""
    content = files.read_file(path, mend=advice)
    whole = content[: content.rfind(b"\n") + 1]
    log = None
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            line = _LINE.validate_json(text)
            json.loads(text, object_pairs_hook=files.without_duplicates)
            if isinstance(line, Header) is (log is not None):
                raise ValueError("expected a header in the first line, and in no other")
            if isinstance(line, Header):
                log = SampleLog(line)
            elif log is not None:
                log.add(line)
        except ValueError as error:
            reason = files.first_refusal(error) if isinstance(error, ValidationError) else error
            raise ValueError(f"{path}: line {number}: {reason}; {advice}") from None
    if log is None:
        raise ValueError(f"{path}: holds no header; {advice}")
    if cut_tail and len(whole) < len(content):
        os.truncate(path, len(whole))
    return log


def resumed(path: FilePath, wanted: Header, cells: Sequence[Cell]) -> SampleLog:
    """Read the samples that a job continues; refuse another suite, version, machine, grid or learned model."""
    log = read_samples(path, advice=ANEW, cut_tail=True)
    for name in ("suite", "runner", "protocol"):
        got, expected = getattr(log.header, name), getattr(wanted, name)
        if got != expected:
            raise ValueError(f"{path}: holds samples of {name} {got}, and this is {name} {expected}; {ANEW}")
    if differences := files.fingerprint_differences(log.fingerprint, wanted.fingerprint):
        raise ValueError(f"{path}: was taken with another machine or software ({'; '.join(differences)}); {ANEW}")
    if log.header.given != wanted.given:
        raise ValueError(f"{path}: holds runs of other learned models; give the same --model files, or {ANEW}")
    known = {cell.name for cell in cells}
    if unknown := [cell.name for cell in log.cells if cell.name not in known]:
        raise ValueError(f"{path}: holds cells of another grid ({unknown[0]}, ...); {ANEW}")
    return log


def samples_path(calibration: FilePath, model: str) -> FilePath:
    """Return the path of a model's samples: `a.welch.samples.jsonl`, beside the calibration `a.json`."""
    return calibration.with_name(f"{calibration.stem}.{model}{SUFFIX}")


def calibration_of(samples: FilePath) -> FilePath:
    """Return the path of the calibration file that belongs to a samples file, from the samples file's name."""
    rest = samples.name.removesuffix(".gz")
    name, _, model = rest.removesuffix(SUFFIX).rpartition(".")
    if not (rest.endswith(SUFFIX) and name and model):
        likes = f"NAME.MODEL{SUFFIX}, which makes NAME.json"
        raise ValueError(f"--out: expected a file, since {samples} is not named like {likes}")
    return samples.with_name(f"{name}.json")
