"""The kernels of a function, as a compiler that fuses would make them: what each equation computes, and their sums."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlxjax._values import FrozenDict

from ._primitives import is_outer_reduction
from ._rules import Aval, Operation, OperationCounts, Rule, elements, is_real_on_one_side, number_kind
from ._rules_algebra import LINEAR_ALGEBRA

#: How a step may read its operand.
SPREAD, EACH = "spread", "each"
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
        counted = self._add(kind, (1, moved_bytes, min(written_bytes, moved_bytes), *operations, 0))
        counted[ROWS] += last.rows
        untiled = UNTILED if any(part.has_broadcast for part in parts) else ""
        for part in parts:
            counted[part.operation + (untiled if part.operation.startswith(TRANSPOSE) else "")] += part.elements
            counted.update(part.also)

    def add_all(self, other: "Kernels", times: int) -> None:
        """Add the kernels of another program that runs so many times."""
        for kind, (counts, counted) in other._groups.items():
            mine = self._add(kind, [times * count for count in counts])
            mine.update({name: times * count for name, count in counted.items()})

    def mark_looped(self) -> None:
        """Say of all kernels that a loop launches them."""
        for counts, _ in self._groups.values():
            counts[-1] = counts[0]

    def groups(self) -> tuple[KernelGroup, ...]:
        """Return the groups in order of appearance."""
        return tuple(
            KernelGroup(kind, *counts, elements=dict(counted))
            for kind, (counts, counted) in self._groups.items()
            if counts[0]
        )

    def _add(self, kind: KernelKind, counts: Sequence[int]) -> Counter[str]:
        """Add to the counts of a kind, and return the elements of it."""
        mine, counted = self._groups.setdefault(kind, ([0] * 6, Counter()))
        for i, count in enumerate(counts):
            mine[i] += count
        return counted


#: Elements of the last axis that is moved there so that what they come from stays in a first cache.
_FEW = 16
#: Of a line of a cache: elements closer to each other are read together.
_LINE_BYTES = 64
#: Addresses that are multiples of this apart fall into few sets of a cache; and the lines that these sets hold.
_SET_BYTES, _SET_LINES = 2048, 256
#: Arguments that a processor foretells: it learns by heart which way sines take.
_FORETOLD = 8192


def work_of(equation: Any, rule: Rule, counts: OperationCounts, op: Operation) -> Work:
    """Return what an equation computes."""
    name = _operation_of(equation, rule, op)
    also = {f"{name} slices": rule.slices(op)} if rule.slices else {}
    if rule.also:
        also |= rule.also(op)
    if rule.family == LINEAR_ALGEBRA:
        also["matrix elements"] = _square_elements(op.operand)
    arrays = [aval for aval in (*op.inputs, *op.outputs) if getattr(aval, "shape", None) is not None]
    largest = max(arrays, key=lambda aval: (elements(aval), aval.dtype.itemsize), default=None)
    longest = max((aval for aval in arrays if aval.shape), key=elements, default=None)
    most = max(map(elements, op.outputs), default=0)
    return Work(
        rule.family,
        name,
        4 if largest is None else largest.dtype.itemsize,  # keys have none
        sum(map(elements, op.outputs)),
        counts.flops,
        counts.integer_ops,
        also,
        has_broadcast=any(elements(aval) < most for aval in op.inputs),
        # A loop over each row of the largest array is entered anew.
        rows=elements(longest) // max(longest.shape[-1], 1) if longest is not None else 1,
    )


def reordering(size_bytes: int) -> Work:
    """Return the work of a copy in another order of memory."""
    return Work("movement", TRANSPOSE, 4, size_bytes // 4)


def _operation_of(equation: Any, rule: Rule, op: Operation) -> str:
    """Return the name of an equation's primitive, with what tells its cost."""
    name = equation.primitive.name
    if rule.family == "reduction" and not is_outer_reduction(equation):
        return f"{name} inner"
    if name in ("div", "rem") and number_kind(op.operand.dtype) == "integer":
        return f"{name} integer"
    if name in ("sin", "cos") and elements(op.result) <= _FORETOLD:
        return f"{name} foretold"
    if name == "fft" and is_real_on_one_side(op):
        return "fft real"
    if name == "transpose":
        shape, last, itemsize = op.operand.shape, op.params["permutation"][-1], op.operand.dtype.itemsize
        stride_bytes = math.prod(shape[last + 1 :]) * itemsize
        if last < len(shape) - 1 and shape[last] > _FEW and stride_bytes >= _LINE_BYTES:
            return transposed(shape, last, itemsize)
    return name


def transposed(shape: Sequence[int], axis: int, itemsize: int) -> str:
    """Return the name of reading an array along an axis that is not its last."""
    if math.prod(shape[axis + 1 :]) * itemsize % _SET_BYTES:
        return TRANSPOSE
    return f"{TRANSPOSE} by {'sets' if shape[axis] <= _SET_LINES else 'pages'}"


def reuse(equation: Any, rule: Rule) -> list[str]:
    """Return how an equation reads each of its operands."""
    if rule.reads_part:
        return [EACH] + [""] * (len(equation.invars) - 1)
    return [_repeats(equation, rule, getattr(var.aval, "shape", ())) for var in equation.invars]


def _repeats(equation: Any, rule: Rule, shape: tuple[int, ...]) -> str:
    """Return whether an operand is repeated along an axis before its last one; along the last axis a loop keeps it."""
    if rule.in_memory != 0 or rule.writes_memory or not equation.outvars or math.prod(shape) <= 1:
        return ""
    result = equation.outvars[0].aval.shape
    placed = equation.params.get("broadcast_dimensions", range(len(result)))
    if len(placed) != len(shape) or equation.primitive.name in ("reshape", "transpose", "pad", "concatenate", "split"):
        return ""
    kept = [axis for axis, size in zip(placed, shape, strict=True) if size == result[axis] and size > 1]
    repeated = [axis for axis, size in enumerate(result) if axis not in kept and size > 1]
    return SPREAD if any(axis < max(kept, default=-1) for axis in repeated) else ""


def _square_elements(aval: Aval) -> int:
    """Return the elements of the largest squares in matrices; of what is no matrix, its elements."""
    *_, rows, columns = (1, 1, *aval.shape)
    return elements(aval) * min(rows, columns) // max(rows, columns, 1) if len(aval.shape) > 1 else elements(aval)
