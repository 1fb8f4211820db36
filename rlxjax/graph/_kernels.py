"""The kernels of a function, as a compiler that fuses would make them, grouped by kind and size."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

#: What moves the last axis, and what is added to its name where a kernel also broadcasts: compilers then leave their
#: loop over tiles.
TRANSPOSE, UNTILED = "transpose inner", ", untiled"


class KernelKind(NamedTuple):
    """What the kernels of one group have in common.

    Attributes:
        family: of the operation whose result the kernel keeps in memory.
        operation: that operation, the name of its primitive; "reduce_sum inner" if it reduces the last axis,
            "transpose inner" if it moves it, and "transpose inner by pages" if its stride is a multiple of 4 KiB.
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
        elements: of results, by operation, those computed again included. A transpose is ", untiled" where the kernel
            also broadcasts. "gather slices", say, are the places that gathers read; there are such of scatters too;
            of convolutions they are the runs of channels, of factorisations the matrices, of "fft" the transforms.
    """

    kind: KernelKind
    launches: int
    bytes: int
    written_bytes: int
    flops: int
    integer_ops: int
    elements: Mapping[str, int]


class Work(NamedTuple):
    """What one equation computes, whichever kernel does it."""

    family: str
    operation: str
    itemsize: int
    elements: int = 0
    flops: int = 0
    integer_ops: int = 0
    slices: int | None = None
    has_broadcast: bool = False


class Kernels:
    """Adds kernels up by kind."""

    def __init__(self) -> None:
        self._counts: dict[KernelKind, list[int]] = {}
        self._elements: dict[KernelKind, dict[str, int]] = {}

    def add(self, moved_bytes: int, written_bytes: int, parts: Iterable[Work]) -> None:
        """Add one kernel.

        Args:
            moved_bytes: that it reads and writes.
            written_bytes: those that it writes.
            parts: what it computes; the last step, whose result it keeps, comes first.
        """
        last, *others = parts
        untiled = any(part.has_broadcast for part in (last, *others))
        kind = KernelKind(last.family, last.operation, last.itemsize, max(moved_bytes.bit_length() - 1, 0))
        self._add(kind, (1, moved_bytes, min(written_bytes, moved_bytes), 0, 0), {})
        for part in (last, *others):
            is_tiled = not (untiled and part.operation.startswith(TRANSPOSE))
            elements = {part.operation if is_tiled else f"{part.operation}{UNTILED}": part.elements}
            if part.slices is not None:
                elements[f"{part.operation} slices"] = part.slices
            self._add(kind, (0, 0, 0, part.flops, part.integer_ops), elements)

    def add_all(self, other: "Kernels", times: int) -> None:
        """Add the kernels of another program that runs so many times."""
        for kind, counts in other._counts.items():
            elements = {name: times * count for name, count in other._elements[kind].items()}
            self._add(kind, [times * count for count in counts], elements)

    def groups(self) -> tuple[KernelGroup, ...]:
        """Return the groups in order of appearance."""
        return tuple(
            KernelGroup(kind, *counts, elements=self._elements[kind])
            for kind, counts in self._counts.items()
            if counts[0]
        )

    def _add(self, kind: KernelKind, counts: Iterable[int], elements: Mapping[str, int]) -> None:
        mine = self._counts.setdefault(kind, [0, 0, 0, 0, 0])
        for i, count in enumerate(counts):
            mine[i] += count
        names = self._elements.setdefault(kind, {})
        for name, count in elements.items():
            names[name] = names.get(name, 0) + count
