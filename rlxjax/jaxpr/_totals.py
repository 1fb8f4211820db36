"""What the equations of a jaxpr add up to, and how often the bodies of its loops run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlxjax._checks import as_index

from ._kernels import kernel_bytes
from ._rules import OperationCounts

NONE = OperationCounts(bytes=0, launches=0)
#: Trip counts of the loops that do not tell theirs: by line, or in order of appearance.
TripCounts = Mapping[str, int | None] | Sequence[int | None]
#: Keys of what runs: single counts; others begin with a word and a name, and end with the place of a count.
SYNC_POINTS, FUSED_BYTES, CYCLES = ("sync points", "", 0), ("fused bytes", "", 0), ("cycles", "", 0)
#: Cycles of kernels that do more than to go over their arrays: products, and what a compiler has code of its own for.
OWN_CYCLES = ("own cycles", "", 0)
#: Turns of loops, and choices among branches.
TRIPS = ("trips", "", 0)
#: What keys of exchanges, and of the products of a compiled program by their kind, begin with.
EXCHANGE, PRODUCT = "exchange", "product"
#: And those of custom kernels, by what their authors say.
CUSTOM = "custom"


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
    """Hands out the trip counts of loops, in order of appearance, and remembers which loops asked."""

    def __init__(self, trip_counts: TripCounts | None) -> None:
        self._is_in_order = isinstance(trip_counts, Sequence) and not isinstance(trip_counts, str)
        if not (self._is_in_order or trip_counts is None or isinstance(trip_counts, Mapping)):
            raise ValueError(f"trip_counts: expected a mapping by line or a sequence of integers, got {trip_counts!r}")
        given: Any = dict(enumerate(trip_counts or ())) if self._is_in_order else trip_counts or {}
        #: By place or by line.
        self._given = {key: n if n is None else as_index(n, "trip_counts") for key, n in given.items()}
        #: Of the loops that asked, and what they were told; and the trips by line of those that tell their own.
        self._asked: list[tuple[str, int | None]] = []
        self.read: list[tuple[str, int | None]] = []

    def next(self, line: str) -> int | None:
        """Return the trips of the loop that appears now, None if nobody said."""
        trips = self._given.get(len(self._asked) if self._is_in_order else line)
        self._asked.append((line, trips))
        return trips

    def by_line(self) -> dict[str, int]:
        """Return the trips of the lines whose loops all have the same, of those that appeared."""
        found: dict[str, set[int | None]] = {}
        for line, trips in (*self.read, *self._asked):
            found.setdefault(line, set()).add(trips)
        return {line: trips for line, (trips, *others) in found.items() if trips is not None and not others}

    def check_used(self) -> None:
        """Refuse a count for a loop that is not there, and too few."""
        lines = [line for line, _ in self._asked]
        if self._is_in_order and len(self._given) != len(lines):
            where = f" ({', '.join(lines)})" if lines else ""
            wanted = f"one for each of the {len(lines)} loops of unknown length{where}"
            raise ValueError(f"trip_counts: expected {wanted}, got {len(self._given)}")
        if not self._is_in_order and (unused := self._given.keys() - lines):
            raise ValueError(f"trip_counts: expected lines of {lines}, got {min(unused)!r}")


class Totals:
    """What one jaxpr, or a part of a compiled program, does when it runs once."""

    def __init__(self) -> None:
        #: What runs, by its key.
        self.work: Counter[Any] = Counter()
        #: Of a compiled program: its kernels by kind, and commands of a GPU's host.
        self.kernels: Counter[Any] = Counter()
        self.commands: Counter[str] = Counter()
        #: Each equation once, operations of a loop's body once, bytes as often as they move.
        self.equations = self.static_ops = self.all_bytes = self.counted_bytes = 0
        self.uncosted: Counter[str] = Counter()
        #: How often each loop of unknown length is started; None inside another one.
        self.loop_starts: dict[int, int | None] = {}
        self.spreads: dict[str, BranchSpread] = {}
        #: Of the arguments and constants that somebody uses, and of what lives beside them.
        self.argument_bytes = self.temp_bytes = 0

    def rows(self, of: str) -> dict[str, OperationCounts]:
        found: dict[str, list[int]] = {}
        for (what, name, place), count in self.work.items():
            if what == of:
                found.setdefault(name, [0] * len(NONE))[place] += count
        return {name: OperationCounts(*counts) for name, counts in found.items()}

    def sums(self) -> OperationCounts:
        return summed(*self.rows("family").values())

    def count(self, family: str, line: str, counts: OperationCounts) -> None:
        for place, count in enumerate(counts):
            self.work["family", family, place] += count or 0
            self.work["line", line, place] += count or 0

    def add(self, other: "Totals", times: int) -> None:
        for key, count in other.work.items():
            self.work[key] += times * count
        self.add_kernels(other, times)
        self.meet(other, times)

    def add_kernels(self, other: "Totals", times: int) -> None:
        for own, others in ((self.kernels, other.kernels), (self.commands, other.commands)):
            for key, count in others.items():
                own[key] += times * count

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
            self.work[TRIPS] += trips
        return UnknownLoop(line, 0, summed(test.sums(), turn.sums()))

    def add_branches(self, branches: Sequence["Totals"], line: str) -> "Totals":
        """Add the dearest branch of a conditional, by FLOP, bytes, then launches; return the cheapest one."""

        def order(branch: Totals) -> tuple[Any, ...]:  # libraries may go over the bytes of a call several times
            sums = branch.sums()
            return sums.flops, kernel_bytes(branch.kernels), *sums[3:]

        ordered = sorted(branches, key=order)
        self.add(ordered[-1], 1)
        for branch in ordered[:-1]:
            self.meet(branch, 0)
            self.loop_starts.update(dict.fromkeys(branch.loop_starts))  # it may be taken all the same
        if len(ordered) > 1:
            self.spreads[line] = BranchSpread(line, ordered[0].sums(), ordered[-1].sums())
        return ordered[0]


def summed(*counts: OperationCounts) -> OperationCounts:
    return OperationCounts(*map(sum, zip(NONE, *counts, strict=True)))
