"""Loops and conditionals of a jaxpr: how often a body runs, where that can be known."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlxjax._checks import as_index

from ._rules import OperationCounts

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
