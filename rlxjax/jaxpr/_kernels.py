"""The kernels of a function, as a compiler that fuses would make them, grouped by kind and size."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlxjax._values import FrozenDict

#: What moves the last axis, and what is added to its name where a kernel also broadcasts: compilers then leave their
#: loop over tiles.
TRANSPOSE, UNTILED = "transpose inner", ", untiled"
#: A copy that no equation asks for.
BESIDE = "copy beside"
#: Among the elements of kernels: the rows that their loops enter.
ROWS = "rows"
_NO_RESULTS = re.compile(rf" slices$| steps$| elements$|^{ROWS}$|^{TRANSPOSE}")


class KernelKind(NamedTuple):
    """What the kernels of one group have in common.

    Attributes:
        family: of the operation whose result the kernel keeps in memory.
        operation: that operation, the name of its primitive; "reduce_sum inner" if it reduces the last axis,
            "transpose inner" if it moves it, and "transpose inner by sets" or "by pages" if its stride is one of few
            sets of a cache, which hold what is moved or do not; "sin foretold" if its arguments are few; "fft real";
            and "copy beside", which no equation asks for: of what an update would overwrite, or of a turn's result
            into the stack of all.
        itemsize: bytes of a number that it works on.
        log2_bytes: of what one kernel moves, rounded down; 0 of nothing.
    """

    family: str
    operation: str
    itemsize: int
    log2_bytes: int


class KernelGroup(NamedTuple):
    """Kernels of one kind and about one size; counts are those of all of them together.

    Attributes:
        kind: what they have in common.
        launches: how many there are.
        bytes: that they read and write.
        written_bytes: those that they write.
        flops: floating-point operations, those of what is computed on the way included.
        integer_ops: operations on integers and booleans, likewise.
        looped: how many of the launches loops do.
        elements: of results, by operation, those computed again included. A transpose is ", untiled" where the kernel
            also broadcasts, and where a product reads its left matrix so. "gather slices", say, are the places that
            gathers read; there are such of scatters too; of convolutions they are the runs of neighbours, of
            factorisations and products the matrices, of transforms how many there are. "fft steps" are the points of
            transforms times the factors of their lengths, "window elements" what convolutions load, "edge
            window elements" that of windows over an edge, "matrix elements" those of the largest squares in what is
            factored, "rows" those that the loop over the result enters.
    """

    kind: KernelKind
    launches: int
    bytes: int
    written_bytes: int
    flops: int
    integer_ops: int
    looped: int
    elements: Mapping[str, int]

    @property
    def computed_elements(self) -> int:
        """How many results of operations it computes; places, rows and moves are none."""
        return sum(count for name, count in self.elements.items() if not _NO_RESULTS.search(name))


class Work(NamedTuple):
    """What one equation computes, whichever kernel does it."""

    family: str
    operation: str
    itemsize: int
    elements: int = 0
    flops: int = 0
    integer_ops: int = 0
    also: Mapping[str, int] = FrozenDict()
    has_broadcast: bool = False
    rows: int = 0


#: Of what holds kernels of its own.
NO_WORK = Work("", "", 4)


class Kernels:
    """Adds kernels up by kind."""

    def __init__(self) -> None:
        self._groups: dict[KernelKind, tuple[list[int], Counter[str]]] = {}

    def add(self, moved_bytes: int, written_bytes: int, parts: Sequence[Work]) -> None:
        """Add one kernel by what it moves and what it computes; the last step, whose result it keeps, comes first."""
        last = parts[0]
        kind = KernelKind(last.family, last.operation, last.itemsize, max(moved_bytes.bit_length() - 1, 0))
        operations = sum(part.flops for part in parts), sum(part.integer_ops for part in parts)
        elements = self._add(kind, (1, moved_bytes, min(written_bytes, moved_bytes), *operations, 0))
        elements[ROWS] += last.rows
        untiled = UNTILED if any(part.has_broadcast for part in parts) else ""
        for part in parts:
            elements[part.operation + (untiled if part.operation.startswith(TRANSPOSE) else "")] += part.elements
            elements.update(part.also)

    def add_all(self, other: "Kernels", times: int) -> None:
        """Add the kernels of another program that runs so many times."""
        for kind, (counts, elements) in other._groups.items():
            mine = self._add(kind, [times * count for count in counts])
            mine.update({name: times * count for name, count in elements.items()})

    def mark_looped(self) -> None:
        """Say of all kernels that a loop launches them."""
        for counts, _ in self._groups.values():
            counts[-1] = counts[0]

    def groups(self) -> tuple[KernelGroup, ...]:
        """Return the groups in order of appearance."""
        return tuple(
            KernelGroup(kind, *counts, elements=dict(elements))
            for kind, (counts, elements) in self._groups.items()
            if counts[0]
        )

    def _add(self, kind: KernelKind, counts: Sequence[int]) -> Counter[str]:
        """Add to the counts of a kind, and return the elements of it."""
        mine, elements = self._groups.setdefault(kind, ([0] * 6, Counter()))
        for i, count in enumerate(counts):
            mine[i] += count
        return elements
