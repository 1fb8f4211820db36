"""What latency models tell apart about an equation: the operation by name, its sizes, and how it reads its operands."""

import math
from collections.abc import Sequence
from typing import Any

from ._equations import is_outer_reduction
from ._kernels import TRANSPOSE, Work
from ._memory import EACH, SPREAD
from ._rules import Aval, Operation, OperationCounts, Rule, elements, is_real_on_one_side, number_kind
from ._rules_matrices import LINEAR_ALGEBRA

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
    """Return the name of an equation's primitive, with what tells its cost.

    A reduction and a transpose say whether the last axis takes part, a sine whether its arguments are few, a
    transform whether one side is real.
    """
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
