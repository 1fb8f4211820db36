"""The kernels of a function, as a compiler that fuses would make them: what each equation computes, and their sums."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlxjax._values import FrozenDict

from ._primitives import is_outer_reduction
from ._rules import Operation, OperationCounts, Rule, elements, is_real_on_one_side, number_kind

#: How a step may read its operand.
SPREAD, EACH = "spread", "each"
#: What moves the last axis, and what is added to its name where a kernel also broadcasts: compilers then leave their
#: loop over tiles.
TRANSPOSE, UNTILED = "transpose inner", ", untiled"
#: A copy that no equation asks for.
BESIDE = "copy beside"
#: Among the elements of kernels: the rows that their loops enter.
ROWS = "rows"
#: What gives another shape and repeats nothing.
_NO_REPEATS = ("reshape", "transpose", "pad", "concatenate", "split")
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


def add_kernel(work: Counter[Any], moved_bytes: int, written_bytes: int, parts: Sequence[Work]) -> None:
    """Add a kernel by what it moves and what it computes; the last step, whose result it keeps, comes first."""
    last = parts[0]
    kind = KernelKind(last.family, last.operation, last.itemsize, max(moved_bytes.bit_length() - 1, 0))
    operations = sum(part.flops for part in parts), sum(part.integer_ops for part in parts)
    for place, count in enumerate((1, moved_bytes, min(written_bytes, moved_bytes), *operations, 0)):
        work["kernel", kind, place] += count
    work["elements", kind, ROWS] += last.rows
    untiled = UNTILED if any(part.has_broadcast for part in parts) else ""
    for part in parts:
        name = part.operation + (untiled if part.operation.startswith(TRANSPOSE) else "")
        work["elements", kind, name] += part.elements
        for name, count in part.also.items():
            work["elements", kind, name] += count


def mark_looped(work: Counter[Any]) -> None:
    """Say of all kernels that a loop launches them."""
    for what, kind, place in [*work]:
        if (what, place) == ("kernel", 0):
            work["kernel", kind, 5] = work["kernel", kind, 0]


def kernel_groups(work: Mapping[Any, int]) -> tuple[KernelGroup, ...]:
    """Return the groups of kernels in order of appearance."""
    found: dict[KernelKind, tuple[list[int], dict[str, int]]] = {}
    for (what, kind, which), count in work.items():
        if what in ("kernel", "elements"):
            counts, computed = found.setdefault(kind, ([0] * 6, {}))
            (counts if what == "kernel" else computed)[which] = count
    return tuple(
        KernelGroup(kind, *counts, elements=computed) for kind, (counts, computed) in found.items() if counts[0]
    )


#: Elements of the last axis that is moved there so that what they come from stays in a first cache.
_FEW = 16
#: Of a line of a cache: elements closer to each other are read together.
_LINE_BYTES = 64
#: Addresses that are multiples of this apart fall into few sets of a cache; and the lines that these sets hold.
_SET_BYTES, _SET_LINES = 2048, 256
#: Arguments that a processor foretells: it learns by heart which way sines take.
_FORETOLD = 8192


def work_of(name: str, rule: Rule, counts: OperationCounts, op: Operation) -> Work:
    """Return what an equation computes, by the name of its primitive with what tells its cost."""
    if rule.family == "reduction" and not is_outer_reduction(name, op):
        name = f"{name} inner"
    elif name in ("div", "rem") and number_kind(op.operand.dtype) == "integer":
        name = f"{name} integer"
    elif name in ("sin", "cos") and elements(op.result) <= _FORETOLD:
        name = f"{name} foretold"
    elif name == "fft" and is_real_on_one_side(op):
        name = "fft real"
    elif name == "transpose":
        shape, last, itemsize = op.operand.shape, op.params["permutation"][-1], op.operand.dtype.itemsize
        stride_bytes = math.prod(shape[last + 1 :]) * itemsize
        if last < len(shape) - 1 and shape[last] > _FEW and stride_bytes >= _LINE_BYTES:
            name = transposed(shape, last, itemsize)
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
        {**({f"{name} slices": rule.slices(op)} if rule.slices else {}), **(rule.also(op) if rule.also else {})},
        has_broadcast=any(elements(aval) < most for aval in op.inputs),
        # A loop over each row of the largest array is entered anew.
        rows=elements(longest) // max(longest.shape[-1], 1) if longest is not None else 1,
    )


def reordering(size_bytes: int) -> Work:
    """Return the work of a copy in another order of memory."""
    return Work("movement", TRANSPOSE, 4, size_bytes // 4)


def transposed(shape: Sequence[int], axis: int, itemsize: int) -> str:
    """Return the name of reading an array along an axis that is not its last."""
    if math.prod(shape[axis + 1 :]) * itemsize % _SET_BYTES:
        return TRANSPOSE
    return f"{TRANSPOSE} by {'sets' if shape[axis] <= _SET_LINES else 'pages'}"


def reuse(name: str, rule: Rule, op: Operation) -> list[str]:
    """Return how an equation reads each operand; one that is repeated along its last axis alone is read once."""
    if rule.reads_part:
        return [EACH] + [""] * (len(op.inputs) - 1)
    if rule.in_memory != 0 or rule.writes_memory or not op.outputs or name in _NO_REPEATS:
        return [""] * len(op.inputs)
    result, hows = op.result.shape, []
    placed = op.params.get("broadcast_dimensions", range(len(result)))
    for shape in (getattr(aval, "shape", ()) for aval in op.inputs):
        how = ""
        if math.prod(shape) > 1 and len(placed) == len(shape):
            kept = [axis for axis, size in zip(placed, shape, strict=True) if size == result[axis] > 1]
            repeated = (axis for axis, size in enumerate(result) if axis not in kept and size > 1)
            how = SPREAD if any(axis < max(kept, default=-1) for axis in repeated) else ""
        hows.append(how)
    return hows
