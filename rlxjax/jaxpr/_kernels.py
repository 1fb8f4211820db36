"""The fused kernels of a function as one table of arrays. Similar kernels share a row."""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from rlxjax._values import FrozenDict, by_value

from ._operations import FAMILIES, FAMILY_CODE, OPERATIONS, PLACE_OF, operation_of
from ._primitives import is_outer_reduction
from ._rules import Operation, OperationCounts, Rule, elements, number_kind

#: Two ways in which a step reads an operand other than each element once: see `Step.reuse`.
SPREAD, EACH = "spread", "each"
#: Transposes that move the last axis. Compilers transpose tile by tile, but not in a kernel that reads several operands
#: or repeats an operand. The transposes in such a kernel are called untiled.
TRANSPOSE, UNTILED = "transpose_inner", "transpose_inner_untiled"
#: A copy that no equation asks for: of data that an update would overwrite, or of the result of an iteration.
BESIDE = "copy_beside"
#: Matrix products of float32 at the highest precision. Some devices compute these with other instructions.
EXACT = "dot_general_exact"
#: Families of kernels that may contain operations of other families.
_FUSED = ("elementwise", "movement", "reduction", "gather")
#: Rows with fewer elements than this number are reduced without vector instructions.
SHORT_ROW = 32
#: The largest number of elements that a vector can have.
MOST_ALIGNMENT = 64
#: Primitives that change the shape of an operand but repeat none of its elements.
_NO_REPEATS = ("reshape", "transpose", "pad", "concatenate", "split")


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kernels:
    """A table of kernels: a pytree of columns, which are arrays. A row sums kernels of the same kind and similar size.

    In a profile, each column holds exact integers and has shape `[kernels]`. `stacked` pads the tables of several
    programs with rows of zeros, to `[*batch, kernels]`. `jax.vmap`, `jax.jit` and `jax.grad` work as for any pytree.

    Attributes:
        family: index in `FAMILIES` of the family of the operation whose result the kernel stores.
        operation: index in `OPERATIONS` of the operation whose result the kernel stores.
        launches: number of kernels.
        looped: number of the kernels that are launched in loops.
        read_bytes: bytes that the kernels read.
        written_bytes: bytes that the kernels write.
        working_bytes: bytes of all arrays that the kernels use. An array counts in full even if only a part is read.
        itemsize: bytes of a single number in the arrays.
        rows: number of rows that the kernels loop over; 0 if the kernels do not loop over rows.
        alignment: the largest power of two that divides the number of elements in a row, at most 64.
        pieces: number of matrix products, matrices or transforms; for other kernels, the number of launches.
        elements: number of elements that all operations compute, including elements that are computed again.
        flops: floating-point operations, including operations that are done again.
        is_exact: 1 if float32 products are requested at the highest precision, else 0.
        extent: size of the axis that a transpose makes the last axis; 0 without a transpose.
        stride_bytes: bytes between neighbours along this axis in the operand of the transpose.
        counts: count of each operation in `OPERATIONS`, of shape `[*batch, kernels, operations]`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from rlxjax import profile_function
        >>> kernels = profile_function(lambda x: jnp.exp(x).sum(), jnp.ones(8)).kernels
        >>> kernels.family_names(), kernels.launches.tolist(), kernels.operations(0)["exp"]
        (['reduction'], [1], 8)
    """

    family: Int[Array | np.ndarray, "*batch kernels"]
    operation: Any
    launches: Any
    looped: Any
    read_bytes: Any
    written_bytes: Any
    working_bytes: Any
    itemsize: Any
    rows: Any
    alignment: Any
    pieces: Any
    elements: Any
    flops: Any
    is_exact: Any
    extent: Any
    stride_bytes: Any
    counts: Float[Array | np.ndarray, "*batch kernels operations"] | Any

    def __len__(self) -> int:
        return int(np.shape(self.launches)[-1])

    def family_names(self) -> list[str]:
        """Return the name of the family of each row. The table must belong to a single program."""
        return [FAMILIES[code] for code in np.asarray(self.family).tolist()]

    def operation_names(self) -> list[str]:
        """Return the name of the operation whose result each row stores. The table must belong to a single program."""
        return [_NAMES[place] for place in np.asarray(self.operation).tolist()]

    def operations(self, row: int) -> dict[str, int]:
        """Return a dict from operation to count for the row with this index, without counts of zero."""
        counts = np.asarray(self.counts)[row].tolist()
        return {name: count for name, count in zip(OPERATIONS, counts, strict=True) if count}

    def padded(self, rows: int) -> "Kernels":
        """Return the table with rows of zeros at the end, so that it has the given number of rows."""
        return jax.tree.map(lambda one: np.pad(one, [(0, rows - len(one))] + [(0, 0)] * (np.ndim(one) - 1)), self)


def stacked(tables: Sequence[Kernels], least: int = 1) -> Kernels:
    """Stack the tables of several programs to shape `[programs, kernels]`. The number of rows is a power of two."""
    rows = 1 << (max([least, 1, *map(len, tables)]) - 1).bit_length()
    return jax.tree.map(lambda *columns: np.stack(columns), *(table.padded(rows) for table in tables))


_NAMES = tuple(OPERATIONS)


class _Kind(NamedTuple):
    """The properties that all kernels of a row share. `log2_bytes` is the log2 of the moved bytes, rounded down."""

    family: str
    operation: str
    itemsize: int
    extent: int
    stride_bytes: int
    alignment: int
    log2_bytes: int


class Work(NamedTuple):
    """The work of an equation, whichever kernel runs the equation. `counts` maps operations to counts."""

    family: str
    operation: str
    itemsize: int
    elements: int = 0
    flops: int = 0
    counts: Mapping[str, int] = FrozenDict()
    has_others: bool = False
    rows: int = 0
    row_elements: int = 0
    pieces: int = 0
    extent: int = 0
    stride_bytes: int = 0


#: The work of an equation, such as a loop, whose inner equations have kernels of their own.
NO_WORK = Work("", "", 4)
#: The names of the counts of a kernel, in the order in which `add_kernel` stores them.
_COUNTED = ("launches", "moved", "written_bytes", "working_bytes", "rows", "pieces", "elements", "flops", "looped")
_LAUNCHES, _MOVED, _WRITTEN, _LOOPED = map(_COUNTED.index, ("launches", "moved", "written_bytes", "looped"))


def add_kernel(
    work: Counter[Any], moved_bytes: int, written_bytes: int, parts: Sequence[Work], working_bytes: int = 0
) -> None:
    """Add a kernel to `work`. `parts` holds the work of its steps, starting with the step whose result is stored."""
    last = parts[0]
    strided = max(parts, key=lambda part: part.extent * part.stride_bytes)
    # Fused steps compute at their own width, and the widest step takes most of the time.
    most = max(part.elements for part in parts)
    widest = max(part.itemsize for part in parts if 2 * part.elements >= most)
    width = widest if last.family in _FUSED else last.itemsize
    alignment, log2_bytes = min(last.row_elements & -last.row_elements, MOST_ALIGNMENT), moved_bytes.bit_length() - 1
    strides = strided.extent, strided.stride_bytes
    kind = _Kind(last.family, last.operation, width, *strides, alignment, max(log2_bytes, 0))
    computed, flops = sum(part.elements for part in parts), sum(part.flops for part in parts)
    # Compilers implement the product of a matrix and a vector as a loop over rows.
    rows = last.rows if last.family in _FUSED or "product_with_vector" in last.counts else 0
    own = (
        *(1, moved_bytes, min(written_bytes, moved_bytes), max(working_bytes, moved_bytes)),
        *(rows, max(last.pieces, 1), computed, flops, 0),
    )
    for place, count in enumerate(own):
        work["kernel", kind, place] += count
    is_untiled = any(part.has_others for part in parts)
    for part in parts:
        for name, count in part.counts.items():
            work["count", kind, UNTILED if is_untiled and name == TRANSPOSE else name] += count


def kernel_bytes(work: Mapping[Any, int]) -> int:
    """Return the total number of bytes that the kernels in `work` read and write."""
    return sum(count for (what, _, place), count in work.items() if (what, place) == ("kernel", _MOVED))


def mark_looped(work: Counter[Any]) -> None:
    """Mark all kernels in `work` as launched in a loop."""
    for what, kind, place in [*work]:
        if (what, place) == ("kernel", _LAUNCHES):
            work["kernel", kind, _LOOPED] = work["kernel", kind, _LAUNCHES]


def kernel_table(work: Mapping[Any, int]) -> Kernels:
    """Return the kernels in `work` as a table, in order of appearance."""
    found: dict[_Kind, tuple[list[int], dict[str, int]]] = {}
    for (what, kind, which), count in work.items():
        if what in ("kernel", "count"):
            own, counts = found.setdefault(kind, ([0] * len(_COUNTED), {}))
            (own if what == "kernel" else counts)[which] = count
    rows = [(kind, own, counts) for kind, (own, counts) in found.items() if own[_LAUNCHES]]
    table = [[0] * len(OPERATIONS) for _ in rows]
    for line, (_, _, counts) in zip(table, rows, strict=True):
        for name, count in counts.items():
            line[PLACE_OF[name]] += count

    kinds, of_kind = [kind for kind, _, _ in rows], ("itemsize", "alignment", "extent", "stride_bytes")
    columns = {name: _exact([own[place] for _, own, _ in rows]) for place, name in enumerate(_COUNTED)}
    return Kernels(
        family=_exact([FAMILY_CODE.get(kind.family, FAMILY_CODE["custom"]) for kind in kinds]),
        operation=_exact([PLACE_OF[operation_of(kind.operation, kind.family)] for kind in kinds]),
        read_bytes=columns.pop("moved") - columns["written_bytes"],
        is_exact=_exact([int(kind.operation == EXACT) for kind in kinds]),
        counts=_exact(table).reshape(len(rows), len(OPERATIONS)),
        **columns,
        **{name: _exact([getattr(kind, name) for kind in kinds]) for name in of_kind},
    )


def _exact(values: list[Any]) -> np.ndarray:
    """Return the values as an array of 64-bit integers, or as an array of floats if a value is too large."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return np.array(values, np.float64)


def work_of(name: str, rule: Rule, counts: OperationCounts, op: Operation) -> Work:
    """Return the work of an equation. A variant with another cost counts as an operation whose name has a suffix."""
    extent = stride_bytes = 0
    if name.startswith("reduce_") and rule.family == "reduction" and not is_outer_reduction(name, op):
        name = f"{name}_inner"
    elif name == "dot_general" and op.operand.dtype == np.float32 and "HIGHEST" in str(op.params.get("precision")):
        name = EXACT
    elif name == "sort" and len(op.inputs) > 1:
        name = "sort_several"
    elif name in ("div", "rem") and number_kind(op.operand.dtype) == "integer":
        name = f"{name}_integer" if op.inputs[1].shape else f"{name}_by_scalar"
    elif name == "transpose":
        shape = op.operand.shape
        order = [axis for axis in op.params["permutation"] if shape[axis] > 1]
        if order and (last := order[-1]) < max(order):
            name, extent = TRANSPOSE, shape[last]
            stride_bytes = math.prod(shape[last + 1 :]) * op.operand.dtype.itemsize
    arrays = [aval for aval in (*op.inputs, *op.outputs) if getattr(aval, "shape", None) is not None]
    largest = max(arrays, key=lambda aval: (elements(aval), aval.dtype.itemsize), default=None)
    longest = max((aval for aval in arrays if aval.shape), key=elements, default=None)
    most, results = max(map(elements, op.outputs), default=0), sum(map(elements, op.outputs))
    # A kernel starts one loop for each row of the largest array; axes of one element do not count.
    row_elements = next((size for size in reversed(longest.shape) if size > 1), 1) if longest is not None else 1
    rows = elements(longest) // max(row_elements, 1) if longest is not None else 1
    operations = counts.flops + counts.transcendentals + counts.integer_ops
    found = {operation_of(name, rule.family): operations or results}
    pieces = rule.pieces(op) if rule.pieces else 1
    if rule.also:
        found |= rule.also(op)
    elif rule.family == "reduction":
        found["reduced_rows"] = rows
        if row_elements < SHORT_ROW:
            found["short_row_elements"] = elements(longest) if longest is not None else 0
    elif rule.family == "linear algebra":
        (own,) = found
        columns = pieces * min(op.operand.shape[-2:], default=1)
        found = {own: _square_elements(op), f"{own}_flop": operations, f"{own}_columns": columns}
        found[f"{own}_matrices"] = pieces
    return Work(
        rule.family,
        name,
        4 if largest is None else largest.dtype.itemsize,  # random keys have no itemsize
        results,
        counts.flops,
        found,
        has_others=len(op.inputs) > 1 or any(elements(aval) < most for aval in op.inputs),
        rows=rows,
        row_elements=row_elements,
        pieces=pieces,
        extent=extent,
        stride_bytes=stride_bytes,
    )


def _square_elements(op: Operation) -> int:
    """Return the number of elements in the largest square of each matrix; for a vector or number, of all elements."""
    shape, count = op.operand.shape, elements(op.operand)
    return count * min(shape[-2:]) // max(*shape[-2:], 1) if len(shape) > 1 else count


def copying(size_bytes: int, itemsize: int) -> Work:
    """Return the work of a copy that no equation asks for (`BESIDE`)."""
    return Work("movement", BESIDE, itemsize, counts={BESIDE: size_bytes // max(itemsize, 1)})


def reordering(size_bytes: int) -> Work:
    """Return the work of a copy into another memory layout."""
    return Work("movement", "reorder", 4, size_bytes // 4, counts={"reorder": size_bytes // 4})


def reuse(name: str, rule: Rule, op: Operation) -> list[str]:
    """Return the `Step.reuse` of an equation. An operand that repeats only along its last axis is read once."""
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
