"""What the equations of a jaxpr add up to, and how often the bodies of its loops run."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlxjax._checks import as_index

from ._gpu_program import GpuLaunches
from ._kernels import Kernels
from ._rules import OperationCounts

#: Counts by name: of a family of operations, or of a line.
Rows = dict[str, OperationCounts]
NONE = OperationCounts(bytes=0, launches=0)
#: Trip counts of the loops that do not tell theirs: by line, or in order of appearance.
TripCounts = Mapping[str, int | None] | Sequence[int | None]


class UnknownLoop(NamedTuple):
    """A `while` whose number of trips depends on data.

    Attributes:
        line: where it stands.
        starts: how often it is started; None inside another unknown loop.
        per_trip: what one trip does, of body and condition, without unknown loops inside.
    """

    line: str
    starts: int | None
    per_trip: OperationCounts


class BranchSpread(NamedTuple):
    """A `cond` or `switch`, charged by its dearest branch.

    Attributes:
        line: where it stands.
        least: what its cheapest branch does, by FLOP, then bytes.
        most: what its dearest branch does.
    """

    line: str
    least: OperationCounts
    most: OperationCounts


class Trips:
    """Hands out the trip counts of loops, in order of appearance, and remembers which loops asked.

    Raises:
        ValueError: from `check_used`, a count for a loop that is not there, or too few.
    """

    def __init__(self, trip_counts: TripCounts | None) -> None:
        given: Mapping[Any, int | None] = {}
        if isinstance(trip_counts, Mapping):
            given = trip_counts
        elif isinstance(trip_counts, Sequence) and not isinstance(trip_counts, str):
            given = dict(enumerate(trip_counts))
        elif trip_counts is not None:
            raise ValueError(f"trip_counts: expected a mapping by line or a sequence of integers, got {trip_counts!r}")
        self._is_in_order = not isinstance(trip_counts, Mapping) and trip_counts is not None
        #: By place or by line.
        self._given = {key: n if n is None else as_index(n, "trip_counts") for key, n in given.items()}
        #: Of the loops that asked, and what they were told; and the trips by line of those that tell their own.
        self.asked: list[tuple[str, int | None]] = []
        self.read: dict[str, set[int | None]] = {}

    def next(self, line: str) -> int | None:
        """Return the trips of the loop that appears now, None if nobody said."""
        trips = self._given.get(len(self.asked) if self._is_in_order else line)
        self.asked.append((line, trips))
        return trips

    def by_line(self) -> dict[str, int]:
        """Return the trips of the lines whose loops all have the same, of those that appeared."""
        given = {line: set(trips) for line, trips in self.read.items()}
        for line, trips in self.asked:
            given.setdefault(line, set()).add(trips)
        return {line: trips for line, (trips, *others) in given.items() if trips is not None and not others}

    def check_used(self) -> None:
        lines = [line for line, _ in self.asked]
        if self._is_in_order and len(self._given) != len(lines):
            where = f" ({', '.join(lines)})" if lines else ""
            raise ValueError(
                f"trip_counts: expected one for each of the {len(lines)} loops of unknown length{where}, "
                f"got {len(self._given)}"
            )
        if not self._is_in_order and (unused := self._given.keys() - lines):
            raise ValueError(f"trip_counts: expected lines of {lines}, got {min(unused)!r}")


@dataclasses.dataclass
class Totals:
    """What one jaxpr does."""

    families: Rows = dataclasses.field(default_factory=dict)
    lines: Rows = dataclasses.field(default_factory=dict)
    equations: int = 0
    all_bytes: int = 0
    counted_bytes: int = 0
    sync_points: int = 0
    fused_bytes: int = 0
    temp_bytes: int = 0
    #: Of the arguments and constants that somebody uses.
    argument_bytes: int = 0
    uncosted: Counter[str] = dataclasses.field(default_factory=Counter)
    #: How often each loop of unknown length is started; None inside another one.
    loop_starts: dict[int, int | None] = dataclasses.field(default_factory=dict)
    spreads: dict[str, BranchSpread] = dataclasses.field(default_factory=dict)
    kernels: Kernels = dataclasses.field(default_factory=Kernels)
    #: Turns of loops, and choices among branches.
    trips: int = 0
    #: Operations, those of a loop's body once.
    static_ops: int = 0
    #: That a compiler estimates, of what it estimates.
    cycles: int = 0
    gpu: GpuLaunches = dataclasses.field(default_factory=GpuLaunches)

    def sums(self) -> OperationCounts:
        """Return everything that is known, over all families."""
        return summed(*self.families.values())

    def count(self, family: str, line: str, counts: OperationCounts) -> None:
        """Add what an operation does."""
        add_row(self.families, family, counts)
        add_row(self.lines, line, counts)

    def add(self, other: "Totals", times: int) -> None:
        """Add the work of another jaxpr that runs so many times."""
        for mine, others in ((self.families, other.families), (self.lines, other.lines)):
            for name, row in others.items():
                add_row(mine, name, row, times)
        self.sync_points += times * other.sync_points
        self.fused_bytes += times * other.fused_bytes
        self.kernels.add_all(other.kernels, times)
        self.trips += times * other.trips
        self.cycles += times * other.cycles
        self.gpu.add_all(other.gpu, times)
        self.meet(other, times)

    def meet(self, other: "Totals", times: int | None) -> None:
        """Add what is met, each equation once, and its bytes as often as they move; None is unknown, and once."""
        for number, starts in other.loop_starts.items():
            self.loop_starts[number] = 0 if times == 0 else starts and times and starts * times
        self.spreads.update(other.spreads)
        times = 1 if times is None else times
        self.equations += other.equations
        self.static_ops += other.static_ops
        self.all_bytes += times * other.all_bytes
        self.counted_bytes += times * other.counted_bytes
        self.uncosted.update(other.uncosted)

    def add_loop(self, test: "Totals", turn: "Totals", trips: int | None, line: str, number: int) -> UnknownLoop:
        """Add a loop, and say what one turn does; of unknown trips it counts its first test, and is met by a number."""
        self.add(test, 1 + (trips or 0))
        if trips is None:
            self.meet(turn, None)
            self.loop_starts[number] = 1
        else:
            self.add(turn, trips)
            self.trips += trips
        return UnknownLoop(line, 0, summed(test.sums(), turn.sums()))

    def add_branches(self, branches: Sequence["Totals"], line: str) -> "Totals":
        """Add the dearest branch of a conditional, by FLOP, bytes, then launches; return the cheapest one."""
        ordered = sorted(branches, key=lambda branch: (branch.sums().flops, *branch.sums()[3:]))
        self.add(ordered[-1], 1)
        for branch in ordered[:-1]:
            self.meet(branch, 0)
            self.loop_starts.update(dict.fromkeys(branch.loop_starts))  # it may be taken all the same
        if len(ordered) > 1:
            self.spreads[line] = BranchSpread(line, ordered[0].sums(), ordered[-1].sums())
        return ordered[0]


def summed(*counts: OperationCounts) -> OperationCounts:
    return OperationCounts(*map(sum, zip(NONE, *counts, strict=True)))


def add_row(rows: Rows, name: str, counts: OperationCounts, times: int = 1) -> None:
    """Add counts, so many times, to those of a name."""
    both = zip(rows.get(name, NONE), counts, strict=True)
    rows[name] = OperationCounts(*((mine or 0) + times * (count or 0) for mine, count in both))
