"""A node of a graph, and the op table: what each op is, and the shape rule that infers its output."""

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
    """One node: its op, the ids of its inputs, and the shape and dtype of its output."""

    id: int
    op: str
    inputs: tuple[int, ...]
    shape: Shape
    dtype: str
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def elements(self) -> int:
        """Number of elements of the output; 0 where a dimension is unknown."""
        return 0 if None in self.shape else math.prod(dim for dim in self.shape if dim is not None)

    @property
    def bytes(self) -> int:
        """Bytes of the output; 0 where a dimension is unknown."""
        return saturate(self.elements * DTYPE_BYTES[self.dtype])


# --- Shape rules: (operands, attributes) -> (shape, dtype) ---------------------------------------

Inferred = tuple[Shape, str]
Rule = Callable[[Sequence[Node], dict[str, Any]], Inferred]


def _same_shape(operands: Sequence[Node], attributes: dict[str, Any]) -> Inferred:
    first = operands[0]
    for other in operands[1:]:
        if other.shape != first.shape:
            raise ValueError(f"operands of one shape are needed, got {first.shape} and {other.shape}")
    return first.shape, first.dtype


def _cast(operands: Sequence[Node], attributes: dict[str, Any]) -> Inferred:
    if attributes.get("from", operands[0].dtype) != operands[0].dtype:
        raise ValueError(f"it casts from {attributes['from']}, but its operand is {operands[0].dtype}")
    return operands[0].shape, parse_dtype(_required(attributes, "to"))


def _to_given_shape(operands: Sequence[Node], attributes: dict[str, Any]) -> Inferred:
    raise ValueError("its output shape has to be given (shape=...)")


def _transpose(operands: Sequence[Node], attributes: dict[str, Any]) -> Inferred:
    shape = operands[0].shape
    order = tuple(listed(attributes.get("permutation", reversed(range(len(shape)))), "permutation"))
    if sorted(order) != list(range(len(shape))):
        raise ValueError(f"permutation has to order the axes 0 to {len(shape) - 1}, got {order}")
    return tuple(shape[axis] for axis in order), operands[0].dtype


def _narrow(operands: Sequence[Node], attributes: dict[str, Any]) -> Inferred:
    shape = list(operands[0].shape)
    axis, length = _axis(attributes, shape), as_index(_required(attributes, "length"), "length")
    start, dim = as_index(attributes.get("start", 0), "start"), shape[axis]
    if dim is not None and start + length > dim:
        raise ValueError(f"start + length has to be at most {dim}, got {start} + {length}")
    shape[axis] = length
    return tuple(shape), operands[0].dtype


def _concat(operands: Sequence[Node], attributes: dict[str, Any]) -> Inferred:
    shape = list(operands[0].shape)
    axis = _axis(attributes, shape)
    total: int | None = 0
    for operand in operands:
        rest = operand.shape[:axis] + operand.shape[axis + 1 :]
        if len(operand.shape) != len(shape) or rest != tuple(shape[:axis] + shape[axis + 1 :]):
            raise ValueError(f"shapes have to agree but along axis {axis}, got {[o.shape for o in operands]}")
        dim = operand.shape[axis]
        total = None if total is None or dim is None else total + dim
    shape[axis] = total
    return tuple(shape), operands[0].dtype


def _matmul(operands: Sequence[Node], attributes: dict[str, Any]) -> Inferred:
    a, b = operands
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"shapes [..., m, k] and [..., k, n] are needed, got {a.shape} and {b.shape}")
    return (*a.shape[:-1], b.shape[-1]), a.dtype


def _attention(operands: Sequence[Node], attributes: dict[str, Any]) -> Inferred:
    if any(len(operand.shape) != 4 for operand in operands):
        raise ValueError(
            f"shapes [batch, heads, seq, head_dim] are needed, got {[operand.shape for operand in operands]}"
        )
    return _same_shape(operands, attributes)


def _fft(operands: Sequence[Node], attributes: dict[str, Any]) -> Inferred:
    (operand,) = operands
    last = operand.shape[-1] if operand.shape else 1
    if not operand.dtype.startswith("c") and (last is None or last % 2):
        raise ValueError(
            "a real operand holds n real columns, then n imaginary ones: an even last axis is needed, "
            f"got {operand.shape}"
        )
    return operand.shape, operand.dtype


def _welch_peaks(operands: Sequence[Node], attributes: dict[str, Any]) -> Inferred:
    k = as_index(_required(attributes, "k"), "k", at_least=1)
    n_segments = as_index(_required(attributes, "n_segments"), "n_segments", at_least=1)
    shape = operands[0].shape
    if len(shape) != 2 or (shape[0] is not None and shape[0] % n_segments):
        raise ValueError(f"an operand [batch * {n_segments}, 2 * n_fft] is needed, got {shape}")
    return (None if shape[0] is None else shape[0] // n_segments, k, 2), "f32"


# --- The table -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Op:
    """What the model knows of an op.

    Attributes:
        arity: number of operands where a shape is inferred; None is one or more.
        infer: the shape rule.
        metadata: never counted in a profile.
        host_sync: one sync point each.
        elementwise: unary or binary, of one shape in and out.
        reduction: over everything, to one element.
        fusable: may share a kernel with others.
        may_be_source: without operands it is a source, fed by its own id.
    """

    arity: int | None
    infer: Rule = _to_given_shape
    metadata: bool = False
    host_sync: bool = False
    elementwise: bool = False
    reduction: bool = False
    fusable: bool = False
    may_be_source: bool = False

    def inferred(self, operands: Sequence[Node], attributes: dict[str, Any]) -> Inferred:
        """Return the shape and dtype of the output; raise a ValueError where they do not follow."""
        if len(operands) != self.arity if self.arity is not None else not operands:
            wanted = "at least 1" if self.arity is None else self.arity
            raise ValueError(f"expected {wanted} operand(s), got {len(operands)}")
        return self.infer(operands, attributes)


_UNARY = ("relu", "sigmoid", "tanh", "gelu", "sqrt", "rsqrt", "exp", "log", "neg", "abs")
_BINARY = ("add", "sub", "mul", "div", "max", "min", "pow")
_REDUCE = ("reduce_sum", "reduce_max", "reduce_min", "reduce_mean")
_MEMORY = ("load", "store", "copy")


def _unary(infer: Rule) -> Op:
    return Op(1, infer, elementwise=True, fusable=True, may_be_source=True)


OPS: Mapping[str, Op] = FrozenDict(
    {
        **dict.fromkeys(("input", "param", "constant"), Op(0, metadata=True)),
        "reshape": Op(1, metadata=True),
        "transpose": Op(1, _transpose, metadata=True),
        "narrow": Op(1, _narrow, metadata=True),
        **dict.fromkeys(_UNARY, _unary(_same_shape)),
        "cast": _unary(_cast),
        **dict.fromkeys(_BINARY, Op(2, _same_shape, elementwise=True, fusable=True)),
        **dict.fromkeys(_REDUCE, Op(1, lambda operands, _: ((1,), operands[0].dtype), reduction=True, fusable=True)),
        **dict.fromkeys(_MEMORY, Op(1, _same_shape, fusable=True, may_be_source=True)),
        "broadcast": Op(1, fusable=True),
        "concat": Op(None, _concat),
        "matmul": Op(2, _matmul),
        "attention": Op(3, _attention),
        "fft": Op(1, _fft),
        "welch_peaks": Op(1, _welch_peaks, host_sync=True),
        **dict.fromkeys(("log_mel", "log_mel_backward", "custom"), Op(None, host_sync=True)),
    }
)


def _required(attributes: Mapping[str, Any], name: str) -> Any:
    if name not in attributes:
        raise ValueError(f"the attribute {name!r} has to be given")
    return attributes[name]


def _axis(attributes: Mapping[str, Any], shape: Sequence[int | None]) -> int:
    axis = as_index(_required(attributes, "axis"), "axis", at_least=-len(shape))
    if axis >= len(shape):
        raise ValueError(f"axis has to be an axis of {tuple(shape)}, got {axis!r}")
    return axis % len(shape)


def listed(values: Any, name: str) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise ValueError(f"{name}: expected a list, got {values!r}") from None


def indices(chosen: Any, name: str, what: str, count: int) -> list[int]:
    """Return positions in a list of so many; refuse what is none."""
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
