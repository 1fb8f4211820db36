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
        if trip_counts is not None and (
            isinstance(trip_counts, str) or not isinstance(trip_counts, (Mapping, Sequence))
        ):
            raise ValueError(f"trip_counts: expected a mapping by line or a sequence of integers, got {trip_counts!r}")
        named = trip_counts if isinstance(trip_counts, Mapping) else {}
        self._by_line = {line: _checked(trips) for line, trips in named.items()}
        self._in_order = None if trip_counts is None or self._by_line else list(map(_checked, trip_counts))
        self.lines: list[str] = []
        #: Of loops that tell their own.
        self.read: dict[str, set[int | None]] = {}

    def next(self, line: str) -> int | None:
        """Return the trips of the loop that appears now, None if nobody said."""
        number = len(self.lines)
        self.lines.append(line)
        if self._in_order is not None:
            return self._in_order[number] if number < len(self._in_order) else None
        return self._by_line.get(line)

    def by_line(self) -> dict[str, int]:
        """Return the trips of the lines whose loops all have the same, of those that appeared."""
        given = {line: set(trips) for line, trips in self.read.items()}
        for number, line in enumerate(self.lines):
            named = self._by_line.get(line)
            given.setdefault(line, set()).add(named if self._in_order is None else self._in_order[number])
        return {line: trips for line, (trips, *others) in given.items() if trips is not None and not others}

    def check_used(self) -> None:
        if self._in_order is not None and len(self._in_order) != len(self.lines):
            where = f" ({', '.join(self.lines)})" if self.lines else ""
            raise ValueError(
                f"trip_counts: expected one for each of the {len(self.lines)} loops of unknown length{where}, "
                f"got {len(self._in_order)}"
            )
        if unused := [line for line in self._by_line if line not in self.lines]:
            raise ValueError(f"trip_counts: expected lines of {self.lines}, got {unused[0]!r}")


def _checked(trips: object) -> int | None:
    if isinstance(trips, bool):
        raise ValueError(f"trip_counts: expected an integer, got {trips!r}")
    return None if trips is None else as_index(trips, "trip_counts")
