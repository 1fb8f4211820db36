"""What latency models tell apart about an equation: the operation by name, its sizes, and how it reads its operands."""

import math
import re
from collections.abc import Sequence
from typing import Any

from ._equations import is_outer_reduction
from ._kernels import TRANSPOSE, Work
from ._memory import EACH, SPREAD
from ._operations import Aval, Operation, OperationCounts, Rule, elements, number_kind
from ._rules_heavy import window_reads

#: Elements of the last axis that is moved there so that what they come from stays in a first cache.
_FEW = 16
#: Of a line of a cache: elements closer to each other are read together.
_LINE_BYTES = 64
#: Addresses that are multiples of this apart fall into few sets of a cache; and the lines that these sets hold.
_SET_BYTES, _SET_LINES = 2048, 256
#: Arguments that a processor foretells: it learns by heart which way sines take.
_FORETOLD = 8192
_REDUCTION = re.compile("reduce_(?!window|precision)|reduce$|arg(max|min)$")
#: Factors that transforms are written out for; what a step of another one costs, of those; and how many steps of a
#: smooth transform Bluestein's algorithm (1970) takes for one of its own, with its other passes.
_WRITTEN_OUT, _OTHER_FACTOR, _BLUESTEIN = 5, 1.1, 3.0


def work_of(equation: Any, rule: Rule, counts: OperationCounts, operation: Operation) -> Work:
    """Return what an equation computes."""
    largest = max(map(elements, operation.outputs), default=0)
    also = {}
    name = operation_of(equation)
    if rule.slices:
        also[f"{name} slices"] = rule.slices(operation)
    if name.startswith("fft"):
        also["fft steps"] = transform_steps(equation)
    if name == "conv_general_dilated":
        _, also["window elements"], also["edge window elements"] = window_reads(operation)
    if rule.family == "linear algebra":
        also["matrix elements"] = _square_elements(operation.operand)
    return Work(
        rule.family,
        name,
        _itemsize(operation),
        sum(map(elements, operation.outputs)),
        counts.flops,
        counts.integer_ops,
        also,
        any(elements(aval) < largest for aval in operation.inputs),
        _rows(operation),
    )


def reordering(size_bytes: int) -> Work:
    """Return the work of a copy in another order of memory."""
    return Work("movement", TRANSPOSE, 4, size_bytes // 4)


def operation_of(equation: Any) -> str:
    """Return the name of an equation's primitive, with what tells its cost.

    A reduction and a transpose say whether the last axis takes part, a sine whether its arguments are few, a
    transform whether one side is real.
    """
    name = equation.primitive.name
    if _REDUCTION.match(name) and not is_outer_reduction(equation):
        return f"{name} inner"
    if name in ("div", "rem") and number_kind(equation.invars[0].aval.dtype) == "integer":
        return f"{name} integer"
    if name in ("sin", "cos") and elements(equation.outvars[0].aval) <= _FORETOLD:
        return f"{name} foretold"
    if name == "fft":
        return "fft real" if _is_real_on_one_side(equation) else name
    if name == "transpose":
        shape, order = equation.invars[0].aval.shape, equation.params["permutation"]
        stride_bytes = math.prod(shape[order[-1] + 1 :]) * equation.invars[0].aval.dtype.itemsize
        if order[-1] == len(order) - 1 or shape[order[-1]] <= _FEW or stride_bytes < _LINE_BYTES:
            return name
        return transposed(shape, order[-1], equation.invars[0].aval.dtype.itemsize)
    return name


def transposed(shape: Sequence[int], axis: int, itemsize: int) -> str:
    """Return the name of reading an array along an axis that is not its last."""
    if math.prod(shape[axis + 1 :]) * itemsize % _SET_BYTES:
        return TRANSPOSE
    return f"{TRANSPOSE} by {'sets' if shape[axis] <= _SET_LINES else 'pages'}"


def transform_steps(equation: Any) -> int:
    """Return the points of a Fourier transform times the sum of the factors of its lengths, half where one is real."""
    aval = max((equation.invars[0].aval, equation.outvars[0].aval), key=elements)
    steps = elements(aval) * sum(map(_steps, equation.params["fft_lengths"]))
    return round(steps / 2 if _is_real_on_one_side(equation) else steps)


def _is_real_on_one_side(equation: Any) -> bool:
    """Return whether a transform turns real numbers into complex ones, or back."""
    return len({number_kind(var.aval.dtype) for var in (*equation.invars, *equation.outvars)}) > 1


def _steps(length: int) -> float:
    """Return the steps of a point of a transform: the sum of the factors, or those of Bluestein's algorithm."""
    smooth_log2 = (2 * length - 1).bit_length()
    return min(_sum_of_factors(length), _BLUESTEIN * smooth_log2 * 2**smooth_log2 / length)


def _sum_of_factors(length: int) -> float:
    total, factor = 0.0, 2
    while factor * factor <= length:
        while length % factor == 0:
            total, length = total + (factor if factor <= _WRITTEN_OUT else _OTHER_FACTOR * factor), length // factor
        factor += 1
    return total + (length * (1.0 if length <= _WRITTEN_OUT else _OTHER_FACTOR) if length > 1 else 0.0)


def reuse(equation: Any, rule: Rule) -> list[str]:
    """Return how an equation reads each of its operands."""
    if equation.primitive.name in ("slice", "dynamic_slice", "gather"):
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


def _itemsize(operation: Operation) -> int:
    """Return the bytes of a number that an operation works on: of its largest array, as keys have none."""
    arrays = [aval for aval in (*operation.inputs, *operation.outputs) if getattr(aval, "shape", None) is not None]
    return max((elements(aval), aval.dtype.itemsize) for aval in arrays)[1] if arrays else 4


def _square_elements(aval: Aval) -> int:
    """Return the elements of the largest squares in matrices; of what is no matrix, its elements."""
    *_, rows, columns = (1, 1, *aval.shape)
    return elements(aval) * min(rows, columns) // max(rows, columns, 1) if len(aval.shape) > 1 else elements(aval)


def _rows(operation: Operation) -> int:
    """Return the rows of the largest array: a loop over each of them is entered anew."""
    arrays = [aval for aval in (*operation.inputs, *operation.outputs) if getattr(aval, "shape", ())]
    largest = max(arrays, key=elements, default=None)
    return 1 if largest is None else elements(largest) // max(largest.shape[-1], 1)
