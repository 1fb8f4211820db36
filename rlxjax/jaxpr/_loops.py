"""Loops and conditionals of a jaxpr: how often a body runs, where that can be known."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
        self._named: dict[str, int | None] = {}
        self._in_order: list[int | None] | None = None
        if isinstance(trip_counts, Mapping):
            self._named = {line: _checked(trips) for line, trips in trip_counts.items()}
        elif isinstance(trip_counts, Sequence) and not isinstance(trip_counts, str):
            self._in_order = list(map(_checked, trip_counts))
        elif trip_counts is not None:
            raise ValueError(f"trip_counts: expected a mapping by line or a sequence of integers, got {trip_counts!r}")
        #: Of the loops that asked, and what they were told; and the trips by line of those that tell their own.
        self.asked: list[tuple[str, int | None]] = []
        self.read: dict[str, set[int | None]] = {}

    def next(self, line: str) -> int | None:
        """Return the trips of the loop that appears now, None if nobody said."""
        number = len(self.asked)
        in_order = self._in_order or []
        self.asked.append((line, in_order[number] if number < len(in_order) else self._named.get(line)))
        return self.asked[-1][1]

    def by_line(self) -> dict[str, int]:
        """Return the trips of the lines whose loops all have the same, of those that appeared."""
        given = {line: set(trips) for line, trips in self.read.items()}
        for line, trips in self.asked:
            given.setdefault(line, set()).add(trips)
        return {line: trips for line, (trips, *others) in given.items() if trips is not None and not others}

    def check_used(self) -> None:
        lines = [line for line, _ in self.asked]
        if self._in_order is not None and len(self._in_order) != len(lines):
            where = f" ({', '.join(lines)})" if lines else ""
            raise ValueError(
                f"trip_counts: expected one for each of the {len(lines)} loops of unknown length{where}, "
                f"got {len(self._in_order)}"
            )
        if unused := [line for line in self._named if line not in lines]:
            raise ValueError(f"trip_counts: expected lines of {lines}, got {unused[0]!r}")


def _checked(trips: object) -> int | None:
    if isinstance(trips, bool):
        raise ValueError(f"trip_counts: expected an integer, got {trips!r}")
    return None if trips is None else as_index(trips, "trip_counts")
