"""The raw samples: one JSON line each, appended and flushed as it is taken, never rewritten."""

import dataclasses
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from rlxjax import Timings
from rlxjax.calibration import (
    Fingerprint,
    fingerprint_differences,
    first_refusal,
    not_written,
    read_file,
    set_aside,
    without_duplicates,
)
from rlxjax.clock import PROTOCOL, mean_ns
from rlxjax.models import WELCH
from rlxjax.welch import RUNNER_VERSION

from .sample_lines import (
    FUNCTIONS_LINE,
    LINE,
    Canary,
    Cells,
    FunctionsHeader,
    FunctionVisit,
    Header,
    Line,
    Micro,
    Models,
    Timing,
    checked_cell,
)
from .visits import Visits
from .workloads import Cell

#: What a file begins with, which says what else it holds.
_HEADER = TypeAdapter(Annotated[Header | FunctionsHeader, Field(discriminator="kind")])


@dataclasses.dataclass
class SampleLog:
    """The samples of one campaign.

    Attributes:
        fingerprint: of the machine they were taken on.
        cells: the workloads that every round measures; none until they are chosen.
        rounds: per round, its visits so far in the order they were made: the cell and the mean time of its calls in ns.
        micro: per micro-benchmark, all its repeats in ns.
        canaries: the repeats that tell the pace, each with how many visits were made before it.
        models: of the learned FFTs that were timed, the SHA-256 of the file, by segment length.
        runner: version of the runner that was timed.
        protocol: by which it was timed.
    """

    fingerprint: Fingerprint
    cells: list[Cell] = dataclasses.field(default_factory=list)
    rounds: list[list[tuple[Cell, int]]] = dataclasses.field(default_factory=list)
    micro: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    canaries: list[tuple[int, Canary]] = dataclasses.field(default_factory=list)
    models: dict[int, str] = dataclasses.field(default_factory=dict)
    runner: int = RUNNER_VERSION
    protocol: int = PROTOCOL
    lines: ClassVar[TypeAdapter] = LINE

    def header(self) -> Header:
        """Return the first line of the file."""
        return Header(runner=self.runner, protocol=self.protocol, fingerprint=self.fingerprint)

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

    def add(self, line: Line) -> None:
        """Add what a line says.

        Raises:
            ValueError: a line that cannot follow those before.
        """
        match line:
            case Micro():
                self.micro.setdefault(line.name, []).append(line.time_ns)
            case Canary():
                self.canaries.append((sum(map(len, self.rounds)), line))
            case Models():
                self.models = dict(line.models)
            case Cells():
                self.cells = [checked_cell(*cell) for cell in line.cells]
                if len(set(self.cells)) < len(self.cells):
                    raise ValueError("cells: expected every workload once")
            case _:
                self._add_visit(line)

    def _add_visit(self, visit: Timing) -> None:
        """Keep the timed calls of one visit, of which the mean counts."""
        if visit.round > len(self.rounds):
            raise ValueError(
                f"timing.round: expected at most {len(self.rounds)}, the one after the last, got {visit.round}"
            )
        cell = checked_cell(visit.strategy, visit.batch, visit.n_fft, visit.k)
        if visit.n_segments != cell.n_segments:
            raise ValueError(f"timing.n_segments: {cell.strategy} has {cell.n_segments}, got {visit.n_segments}")
        if visit.round == len(self.rounds):
            self.rounds.append([])
        self.rounds[visit.round].append((cell, round(mean_ns(visit.times_ns))))


@dataclasses.dataclass
class FunctionLog:
    """The samples of one campaign of functions.

    Attributes:
        fingerprint: of the machine.
        protocol: by which they were timed.
        visits: in the order in which they were made.
    """

    fingerprint: Fingerprint
    protocol: int = PROTOCOL
    visits: list[FunctionVisit] = dataclasses.field(default_factory=list)
    lines: ClassVar[TypeAdapter] = FUNCTIONS_LINE

    def header(self) -> FunctionsHeader:
        """Return the first line of the file."""
        return FunctionsHeader(protocol=self.protocol, fingerprint=self.fingerprint)

    def add(self, visit: FunctionVisit) -> None:
        """Add a visit, of the round of the last one or of the next.

        Raises:
            ValueError: one of another round.
        """
        last = self.visits[-1].round if self.visits else -1
        if not max(last, 0) <= visit.round <= last + 1:
            raise ValueError(f"visit.round: expected {max(last, 0)} or the next, got {visit.round}")
        self.visits.append(visit)

    def names(self) -> list[str]:
        """Return the functions of every round that was begun, in order of appearance."""
        return list(dict.fromkeys(visit.name for visit in self.visits))

    def as_visits(self) -> Visits:
        """Return the visits of whole rounds; of the only one where none is whole."""
        names = self.names()
        rounds = [list(own) for _, own in itertools.groupby(self.visits, lambda visit: visit.round)]
        whole = [own for own in rounds if len({visit.name for visit in own}) == len(names)] or rounds[:1]
        made = [
            (number, names.index(visit.name), round(mean_ns(visit.times_ns)))
            for number, own in enumerate(whole)
            for visit in own
        ]
        round_, cell, time_ns = np.array(made, np.int64).reshape(-1, 3).T
        return Visits(round_, cell, time_ns.astype(float), len(names))


class SampleWriter:
    """Appends to a samples file; every line is handed to the system before the next sample is taken.

    Attributes:
        aside: where samples that lay at the path were put, which happens once the new file opens.
    """

    def __init__(self, path: FilePath, log: SampleLog | FunctionLog, *, append: bool):
        self._path, self._log = path, log
        self.aside = None if append else set_aside(path)
        try:
            self._file = open(path, "ab" if append else "xb", buffering=0)  # noqa: SIM115
        except OSError as reason:
            raise not_written(path, reason) from None
        if not append:
            self._write(log.header())

    def __enter__(self) -> "SampleWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def cells(self, cells: Sequence[Cell]) -> None:
        """Keep which workloads every round measures."""
        self.keep(Cells(cells=list(cells)))

    def models(self, models: Mapping[int, str]) -> None:
        """Keep which learned FFTs are timed."""
        self.keep(Models(models=list(models.items())))

    def micro(self, name: str, time_ns: float) -> None:
        """Keep one repeat of a micro-benchmark."""
        self.keep(Micro(name=name, time_ns=time_ns))

    def canary(self, times_ns: Mapping[str, float], others: float) -> None:
        """Keep one look at the machine's pace."""
        self.keep(Canary(times_ns=dict(times_ns), others=others))

    def timing(self, round_: int, cell: Cell, times_ns: Sequence[int]) -> None:
        """Keep the timed runs of one visit."""
        self.keep(Timing(round=round_, **cell._asdict(), n_segments=cell.n_segments, times_ns=list(times_ns)))

    def keep(self, line: Line | FunctionVisit) -> None:
        """Keep a line."""
        self._write(line)
        self._log.add(line)  # pyright: ignore[reportArgumentType]

    def _write(self, line: Header | FunctionsHeader | Line | FunctionVisit) -> None:
        rest = f"{line.model_dump_json()}\n".encode()
        try:
            while rest:  # of which a full disk takes a part
                rest = rest[self._file.write(rest) :]
        except OSError as reason:
            raise not_written(self._path, reason) from None


def read_samples(
    path: FilePath, *, mend: str = "take samples with `rlxjax calibrate`", mend_tail: bool = False
) -> SampleLog:
    """Return the samples of Welch peaks that a file holds; arguments and errors as of `read_log`."""
    log = read_log(path, mend=mend, mend_tail=mend_tail)
    if not isinstance(log, SampleLog):
        raise ValueError(f"{path}: expected samples of Welch peaks, got those of functions; {mend}")
    return log


def read_log(
    path: FilePath, *, mend: str = "take samples with `rlxjax calibrate`", mend_tail: bool = False
) -> SampleLog | FunctionLog:
    """Read a samples file of any kind and version, compressed if its name ends in `.gz`.

    A last line that was cut short is left out.

    Args:
        path: the file.
        mend: what to do about a file that cannot be read, for messages.
        mend_tail: also cut such a line off the file, so that appending goes on cleanly.

    Raises:
        ValueError: no such file, or one that is no samples file; one line that names the place.
    """
    content = read_file(path, mend=mend)
    whole = content[: content.rfind(b"\n") + 1]
    log = None
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            line = (_HEADER if log is None else log.lines).validate_json(text)
            json.loads(text, object_pairs_hook=without_duplicates)
            if log is None:
                log = _log_after(line)
            elif isinstance(line, (Header, FunctionsHeader)):
                raise ValueError("a second header: a file holds the samples of one campaign")
            else:
                log.add(line)
        except ValueError as error:
            reason = first_refusal(error) if isinstance(error, ValidationError) else error
            raise ValueError(f"{path}: line {number}: {reason}; {mend}") from None
    if log is None:
        raise ValueError(f"{path}: holds no header; {mend}")
    if mend_tail and len(whole) < len(content):
        os.truncate(path, len(whole))
    return log


def _log_after(header: Header | FunctionsHeader) -> SampleLog | FunctionLog:
    """Return the log that begins with a header."""
    if isinstance(header, Header):
        return SampleLog(header.fingerprint, runner=header.runner, protocol=header.protocol)
    return FunctionLog(header.fingerprint, header.protocol)


def check_resumable(
    log: SampleLog,
    path: FilePath,
    cells: Sequence[Cell],
    here: Fingerprint,
    models: Mapping[int, str] = MappingProxyType({}),
) -> None:
    """Refuse to go on with samples of another version, runner, machine or grid, or of other models."""
    anew = "leave out --resume to start anew"
    for name, got, expected in (
        ("runner", log.runner, RUNNER_VERSION),
        ("protocol", log.protocol, PROTOCOL),
    ):
        if got != expected:
            raise ValueError(f"{path}: holds samples of {name} {got}, and this is {name} {expected}; {anew}")
    if differences := fingerprint_differences(log.fingerprint, here):
        raise ValueError(f"{path}: was taken elsewhere ({'; '.join(differences)}); {anew}")
    if log.cells and log.models != models:
        raise ValueError(f"{path}: holds runs of other learned models; give the same --model files, or {anew}")
    if unknown := set(log.cells) - set(cells):
        raise ValueError(f"{path}: holds workloads of another grid ({min(unknown)}, ...); {anew}")


def said_of_protocol(protocol: int) -> list[str]:
    """Return a sentence on samples whose times mean something else than predictions do."""
    if protocol == PROTOCOL:
        return []
    return [
        f"The samples were timed by protocol {protocol}, and this is protocol {PROTOCOL}: a time is the mean of a loop "
        "of calls, and these hold few calls of each loop, or pauses between them."
    ]


def timings_of(cells: Sequence[Cell], time_ns: np.ndarray) -> Timings:
    """Return the timings `[cells]` that the fit takes."""
    names = ("variant", *WELCH.inputs)
    columns = {name: [getattr(cell, name) for cell in cells] for name in names}
    columns["k"] = [min(cell.k, cell.params.n_bins) for cell in cells]  # what is beyond the bins is no peak
    return Timings.checked(WELCH, **columns, time_ns=time_ns)
