"""Sums of counts over the equations of a jaxpr. The counts of a loop are multiplied by its trip count."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlxjax._checks import as_index

from ._kernels import kernel_bytes
from ._rules import OperationCounts

NONE = OperationCounts(bytes=0, launches=0)
#: The trip counts that the user gives: a mapping from source line to trip count, or a sequence in order of appearance.
TripCounts = Mapping[str, int | None] | Sequence[int | None]
#: Keys of `Totals.work` that have a single count. Other keys are (word, name, position in the name's list of counts).
SYNC_POINTS, FUSED_BYTES, CYCLES = ("sync points", "", 0), ("fused bytes", "", 0), ("cycles", "", 0)
#: Key of the estimated cycles of matrix products, and of other kernels that a TPU implements with special code.
OWN_CYCLES = ("own cycles", "", 0)
#: Key of the number of loop iterations plus the number of times that a conditional picks a branch.
TRIPS = ("trips", "", 0)
#: First words of other keys: of exchanges, of kinds of matrix products, and of custom kernels with declared counts.
EXCHANGE, PRODUCT, CUSTOM = "exchange", "product", "custom"


class UnknownLoop(NamedTuple):
    """A `while_loop` whose trip count depends on data.

    Attributes:
        line: source line of the loop, such as `file.py:12`.
        starts: number of times that the loop starts; None if the loop is inside another unknown loop.
        per_trip: counts of one iteration (body and condition), without the iterations of unknown loops inside it.
    """

    line: str
    starts: int | None
    per_trip: OperationCounts


class BranchSpread(NamedTuple):
    """A `cond` or `switch`. Of its branches, only the most expensive branch counts in the totals.

    Attributes:
        line: source line of the conditional, such as `file.py:12`.
        least: counts of the cheapest branch: the branch with the least FLOP or, at equal FLOP, the least bytes.
        most: counts of the most expensive branch.
    """

    line: str
    least: OperationCounts
    most: OperationCounts


class Trips:
    """The trip counts that the user gives, and a record of every loop with its trip count."""

    def __init__(self, trip_counts: TripCounts | None) -> None:
        self._is_in_order = isinstance(trip_counts, Sequence) and not isinstance(trip_counts, str)
        if not (self._is_in_order or trip_counts is None or isinstance(trip_counts, Mapping)):
            raise ValueError(f"trip_counts: expected a mapping by line or a sequence of integers, got {trip_counts!r}")
        given: Any = dict(enumerate(trip_counts or ())) if self._is_in_order else trip_counts or {}
        self._given = {key: n if n is None else as_index(n, "trip_counts") for key, n in given.items()}
        #: Pairs (source line, trip count): of the loops that need the user's trip count, and of all other loops.
        self._asked: list[tuple[str, int | None]] = []
        self.read: list[tuple[str, int | None]] = []

    def next(self, line: str) -> int | None:
        """Return the user's trip count for the next loop of unknown length; None if the user gives no count."""
        trips = self._given.get(len(self._asked) if self._is_in_order else line)
        self._asked.append((line, trips))
        return trips

    def by_line(self) -> dict[str, int]:
        """Return a dict from source line to trip count, for lines whose loops all have the same known trip count."""
        found: dict[str, set[int | None]] = {}
        for line, trips in (*self.read, *self._asked):
            found.setdefault(line, set()).add(trips)
        return {line: trips for line, (trips, *others) in found.items() if trips is not None and not others}

    def check_used(self) -> None:
        """Raise a `ValueError` if one of the user's counts matches no loop, or if the user's sequence is too short."""
        lines = [line for line, _ in self._asked]
        if self._is_in_order and len(self._given) != len(lines):
            where = f" ({', '.join(lines)})" if lines else ""
            wanted = f"a count for each of the {len(lines)} loops of unknown length{where}"
            raise ValueError(f"trip_counts: expected {wanted}, got {len(self._given)}")
        if not self._is_in_order and (unused := self._given.keys() - lines):
            raise ValueError(f"trip_counts: expected lines of loops of unknown length, {lines}, got {min(unused)!r}")


class Totals:
    """The sums of the counts of one run of a jaxpr, or of one run of a computation in a compiled program."""

    def __init__(self) -> None:
        self.work: Counter[Any] = Counter()
        #: For a compiled program: the counts of its kernels, and the number of each kind of command of a GPU's host.
        self.kernels: Counter[Any] = Counter()
        self.commands: Counter[str] = Counter()
        #: How much of the work has a rule. An equation in a loop counts once, but its bytes count in each iteration.
        self.equations = self.static_ops = self.all_bytes = self.counted_bytes = 0
        self.uncosted: Counter[str] = Counter()
        #: How often each unknown loop starts, by the loop's number; None if unknown, for example inside such a loop.
        self.loop_starts: dict[int, int | None] = {}
        self.spreads: dict[str, BranchSpread] = {}
        #: The bytes of the arguments and constants that are used, and the peak bytes of all other memory.
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
        """Add the coverage, not the work, of a part that runs `times` times. None (unknown) counts as one time."""
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
        """Add a loop, and return the counts of an iteration. If `trips` is None, add only the first condition."""
        self.add(test, 1 + (trips or 0))
        if trips is None:
            self.meet(turn, None)
            self.loop_starts[number] = 1
        else:
            self.add(turn, trips)
            self.work[TRIPS] += trips
        return UnknownLoop(line, 0, summed(test.sums(), turn.sums()))

    def add_branches(self, branches: Sequence["Totals"], line: str) -> "Totals":
        """Add the most expensive branch (by FLOP, then bytes, then launches), and return the cheapest branch."""

        def order(branch: Totals) -> tuple[Any, ...]:  # a library call may read its bytes several times
            sums = branch.sums()
            return sums.flops, kernel_bytes(branch.kernels), *sums[3:]

        ordered = sorted(branches, key=order)
        self.add(ordered[-1], 1)
        for branch in ordered[:-1]:
            self.meet(branch, 0)
            self.loop_starts.update(dict.fromkeys(branch.loop_starts))  # this branch may run too
        if len(ordered) > 1:
            self.spreads[line] = BranchSpread(line, ordered[0].sums(), ordered[-1].sums())
        return ordered[0]


def summed(*counts: OperationCounts) -> OperationCounts:
    return OperationCounts(*map(sum, zip(NONE, *counts, strict=True)))
