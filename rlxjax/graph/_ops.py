"""The class of a graph's nodes, and the table of ops, with the rules that infer the shape and dtype of an output."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlxjax._checks import as_index
from rlxjax._counts import saturate
from rlxjax._values import FrozenDict

Shape = tuple[int | None, ...]

DTYPE_BYTES: Mapping[str, int] = FrozenDict(
    {
        **dict.fromkeys(("i8", "u8", "bool"), 1),
        **dict.fromkeys(("f16", "bf16"), 2),
        **dict.fromkeys(("f32", "i32"), 4),
        **dict.fromkeys(("f64", "i64", "c64"), 8),
        "c128": 16,
    }
)


@dataclasses.dataclass(frozen=True)
class Node:
    """A node of a graph: its op, the ids of its inputs, and the shape and dtype of its output."""

    id: int
    op: str
    inputs: tuple[int, ...]
    shape: Shape
    dtype: str
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def elements(self) -> int:
        """The number of elements in the node's output, or 0 if a dimension is unknown."""
        return 0 if None in self.shape else math.prod(dim for dim in self.shape if dim is not None)

    @property
    def bytes(self) -> int:
        """The number of bytes in the node's output, at most `2**64 - 1`, or 0 if a dimension is unknown."""
        return saturate(self.elements * DTYPE_BYTES[self.dtype])


Inferred = tuple[Shape, str]
Operands = Sequence[Node]
Attributes = Mapping[str, Any]
Rule = Callable[[Operands, Attributes], Inferred]


def _same_shape(operands: Operands, attributes: Attributes) -> Inferred:
    first = operands[0]
    for other in operands[1:]:
        if other.shape != first.shape:
            raise ValueError(f"expected operands of the same shape, got {first.shape} and {other.shape}")
    return first.shape, first.dtype


def _cast(operands: Operands, attributes: Attributes) -> Inferred:
    if attributes.get("from", operands[0].dtype) != operands[0].dtype:
        raise ValueError(f"from: expected the operand's dtype {operands[0].dtype}, got {attributes['from']}")
    return operands[0].shape, parse_dtype(_required(attributes, "to"))


def _to_given_shape(operands: Operands, attributes: Attributes) -> Inferred:
    raise ValueError("shape: expected a shape, because the op cannot infer its output shape; give shape=(...)")


def _transpose(operands: Operands, attributes: Attributes) -> Inferred:
    shape = operands[0].shape
    order = tuple(listed(attributes.get("permutation", reversed(range(len(shape)))), "permutation"))
    if sorted(order) != list(range(len(shape))):
        raise ValueError(f"permutation: expected an order of the axes 0 to {len(shape) - 1}, got {order}")
    return tuple(shape[axis] for axis in order), operands[0].dtype


def _narrow(operands: Operands, attributes: Attributes) -> Inferred:
    shape = operands[0].shape
    axis, length = _axis(attributes, shape), as_index(_required(attributes, "length"), "length")
    start, dim = as_index(attributes.get("start", 0), "start"), shape[axis]
    if dim is not None and start + length > dim:
        raise ValueError(f"start + length: expected at most the axis length {dim}, got {start} + {length}")
    return (*shape[:axis], length, *shape[axis + 1 :]), operands[0].dtype


def _concat(operands: Operands, attributes: Attributes) -> Inferred:
    shapes = [operand.shape for operand in operands]
    axis = _axis(attributes, shapes[0])
    if len({(len(shape), shape[:axis], shape[axis + 1 :]) for shape in shapes}) > 1:
        raise ValueError(f"expected operands with the same shape except along axis {axis}, got {shapes}")
    dims = [shape[axis] for shape in shapes]
    total = None if None in dims else sum(dim for dim in dims if dim is not None)
    return (*shapes[0][:axis], total, *shapes[0][axis + 1 :]), operands[0].dtype


def _matmul(operands: Operands, attributes: Attributes) -> Inferred:
    a, b = (operand.shape for operand in operands)
    if len(a) < 2 or len(b) < 2 or a[-1] != b[-2] or a[:-2] != b[:-2]:
        raise ValueError(f"expected operands of shapes [..., m, k] and [..., k, n], got {a} and {b}")
    return (*a[:-1], b[-1]), operands[0].dtype


def _attention(operands: Operands, attributes: Attributes) -> Inferred:
    if any(len(operand.shape) != 4 for operand in operands):
        shapes = [operand.shape for operand in operands]
        raise ValueError(f"expected operands of shape [batch, heads, seq, head_dim], got {shapes}")
    return _same_shape(operands, attributes)


def _fft(operands: Operands, attributes: Attributes) -> Inferred:
    (operand,) = operands
    last = operand.shape[-1] if operand.shape else 1
    if not operand.dtype.startswith("c") and (last is None or last % 2):
        halves = "n real columns, then n imaginary columns"
        raise ValueError(f"a real operand needs a last axis of even length ({halves}), got shape {operand.shape}")
    return operand.shape, operand.dtype


def _welch_peaks(operands: Operands, attributes: Attributes) -> Inferred:
    k, n_segments = (as_index(_required(attributes, name), name, at_least=1) for name in ("k", "n_segments"))
    shape = operands[0].shape
    if len(shape) != 2 or (shape[0] is not None and shape[0] % n_segments):
        raise ValueError(f"expected an operand of shape [batch * {n_segments}, 2 * n_fft], got {shape}")
    return (None if shape[0] is None else shape[0] // n_segments, k, 2), "f32"


@dataclasses.dataclass(frozen=True)
class Op:
    """The properties of an op.

    Attributes:
        arity: the number of operands that shape inference needs; None means one or more.
        infer: the function that infers the shape and dtype of the output.
        metadata: whether the op moves no data, so that profiles ignore the op's nodes.
        host_sync: whether each node with this op is a sync point.
        elementwise: whether the op has one or two operands, all of the same shape as the output.
        reduction: whether the op reduces all elements of its operand to a single element.
        fusable: whether a node with this op may share a kernel with other nodes.
        may_be_source: whether a node with this op may have no operands. You then supply its array under the node's id.
    """

    arity: int | None
    infer: Rule = _to_given_shape
    metadata: bool = False
    host_sync: bool = False
    elementwise: bool = False
    reduction: bool = False
    fusable: bool = False
    may_be_source: bool = False

    def inferred(self, operands: Operands, attributes: Attributes) -> Inferred:
        """Return the shape and dtype of the output. Raise a ValueError if the operands do not fit the op."""
        if len(operands) != self.arity if self.arity is not None else not operands:
            wanted = "at least 1" if self.arity is None else self.arity
            raise ValueError(f"expected {wanted} operand(s), got {len(operands)}")
        return self.infer(operands, attributes)


_UNARY = ("relu", "sigmoid", "tanh", "gelu", "sqrt", "rsqrt", "exp", "log", "neg", "abs")
_BINARY = ("add", "sub", "mul", "div", "max", "min", "pow")
_REDUCE = ("reduce_sum", "reduce_max", "reduce_min", "reduce_mean")
_RELU = Op(1, _same_shape, elementwise=True, fusable=True, may_be_source=True)

OPS: Mapping[str, Op] = FrozenDict(
    {
        **dict.fromkeys(("input", "param", "constant"), Op(0, metadata=True)),
        "reshape": Op(1, metadata=True),
        "transpose": Op(1, _transpose, metadata=True),
        "narrow": Op(1, _narrow, metadata=True),
        **dict.fromkeys(_UNARY, _RELU),
        "cast": dataclasses.replace(_RELU, infer=_cast),
        **dict.fromkeys(_BINARY, Op(2, _same_shape, elementwise=True, fusable=True)),
        **dict.fromkeys(_REDUCE, Op(1, lambda operands, _: ((1,), operands[0].dtype), reduction=True, fusable=True)),
        **dict.fromkeys(("load", "store", "copy"), Op(1, _same_shape, fusable=True, may_be_source=True)),
        "broadcast": Op(1, fusable=True),
        "concat": Op(None, _concat),
        "matmul": Op(2, _matmul),
        "attention": Op(3, _attention),
        "fft": Op(1, _fft),
        "welch_peaks": Op(1, _welch_peaks, host_sync=True),
        **dict.fromkeys(("log_mel", "log_mel_backward", "custom"), Op(None, host_sync=True)),
    }
)


def _required(attributes: Attributes, name: str) -> Any:
    if name not in attributes:
        raise ValueError(f"expected the attribute {name!r}, got none")
    return attributes[name]


def _axis(attributes: Attributes, shape: Shape) -> int:
    axis = as_index(_required(attributes, "axis"), "axis", at_least=-len(shape))
    if axis >= len(shape):
        raise ValueError(f"axis: expected an axis of the shape {shape}, got {axis!r}")
    return axis % len(shape)


def listed(values: Any, name: str) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise ValueError(f"{name}: expected a list, got {values!r}") from None


def indices(chosen: Any, name: str, what: str, count: int) -> list[int]:
    """Return the chosen positions in a list of `count` entries. Raise a ValueError if a position is not in the list."""
    found = [as_index(index, name) for index in listed(chosen, name)]
    if any(index >= count for index in found):
        raise ValueError(f"{name}: no {what} {max(found)}; the graph has {count} {what}s")
    return found


def parse_shape(shape: Any) -> Shape:
    return tuple(None if dim is None else as_index(dim, "dimension") for dim in listed(shape, "shape"))


def parse_dtype(dtype: str) -> str:
    name = str(dtype).lower()
    if name not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}; expected one of {', '.join(DTYPE_BYTES)}")
    return name
