"""What the equations of a jaxpr add up to."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from ._kernels import Kernels
from ._loops import BranchSpread, UnknownLoop
from ._rules import OperationCounts

#: Counts by name: of a family of operations, or of a line.
Rows = dict[str, OperationCounts]
NONE = OperationCounts(bytes=0, launches=0)


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
