"""The graph: nodes in topological order, and one table of what each op is.

The way data takes begins here: `Graph -> GraphIoProfile -> FusionBenefit -> score`.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ._checks import as_index
from ._counts import saturate

Shape = tuple[int | None, ...]

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
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


def tensor_bytes(shape: Sequence[int | None], dtype: str) -> int:
    """Return `elements * size of the dtype`, 0 where a dimension is unknown.

    Raises:
        ValueError: a dimension that is no size, or an unknown dtype.

    Examples:
        >>> tensor_bytes((8, 512), "f32"), tensor_bytes((None, 3), "f32")
        (16384, 0)
    """
    size, dims = DTYPE_BYTES[_dtype(dtype)], _shape(shape)
    return 0 if None in dims else saturate(math.prod(dim for dim in dims if dim is not None) * size)


# --- Shape rules: (operands, attributes) -> (shape, dtype) ---------------------------------------

Rule = Callable[[list[Node], dict[str, Any]], tuple[Shape, str]]


def _same_shape(operands: list[Node], attributes: dict[str, Any]) -> tuple[Shape, str]:
    first = operands[0]
    for other in operands[1:]:
        if other.shape != first.shape:
            raise ValueError(f"operands of one shape are needed, got {first.shape} and {other.shape}")
    return first.shape, first.dtype


def _cast(operands: list[Node], attributes: dict[str, Any]) -> tuple[Shape, str]:
    return operands[0].shape, _dtype(_required(attributes, "to"))


def _to_one_element(operands: list[Node], attributes: dict[str, Any]) -> tuple[Shape, str]:
    return (1,), operands[0].dtype


def _to_given_shape(operands: list[Node], attributes: dict[str, Any]) -> tuple[Shape, str]:
    raise ValueError("its output shape has to be given (shape=...)")


def _transpose(operands: list[Node], attributes: dict[str, Any]) -> tuple[Shape, str]:
    shape = operands[0].shape
    order = tuple(_listed(attributes.get("permutation", reversed(range(len(shape)))), "permutation"))
    if sorted(order) != list(range(len(shape))):
        raise ValueError(f"permutation has to order the axes 0 to {len(shape) - 1}, got {order}")
    return tuple(shape[axis] for axis in order), operands[0].dtype


def _narrow(operands: list[Node], attributes: dict[str, Any]) -> tuple[Shape, str]:
    shape = list(operands[0].shape)
    axis, length = _axis(attributes, shape), as_index(_required(attributes, "length"), "length")
    start, dim = as_index(attributes.get("start", 0), "start"), shape[axis]
    if dim is not None and start + length > dim:
        raise ValueError(f"start + length has to be at most {dim}, got {start} + {length}")
    shape[axis] = length
    return tuple(shape), operands[0].dtype


def _concat(operands: list[Node], attributes: dict[str, Any]) -> tuple[Shape, str]:
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


def _matmul(operands: list[Node], attributes: dict[str, Any]) -> tuple[Shape, str]:
    a, b = operands
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"shapes [..., m, k] and [..., k, n] are needed, got {a.shape} and {b.shape}")
    return (*a.shape[:-1], b.shape[-1]), a.dtype


def _attention(operands: list[Node], attributes: dict[str, Any]) -> tuple[Shape, str]:
    if any(len(operand.shape) != 4 for operand in operands):
        raise ValueError(
            f"shapes [batch, heads, seq, head_dim] are needed, got {[operand.shape for operand in operands]}"
        )
    return _same_shape(operands, attributes)


def _fft(operands: list[Node], attributes: dict[str, Any]) -> tuple[Shape, str]:
    (operand,) = operands
    last = operand.shape[-1] if operand.shape else 1
    if not operand.dtype.startswith("c") and (last is None or last % 2):
        raise ValueError(
            "a real operand holds n real columns, then n imaginary ones: an even last axis is needed, "
            f"got {operand.shape}"
        )
    return operand.shape, operand.dtype


def _welch_peaks(operands: list[Node], attributes: dict[str, Any]) -> tuple[Shape, str]:
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
        source: has no operands.
    """

    arity: int | None
    infer: Rule = _to_given_shape
    metadata: bool = False
    host_sync: bool = False
    elementwise: bool = False
    source: bool = False


_UNARY = ("relu", "sigmoid", "tanh", "gelu", "sqrt", "rsqrt", "exp", "log", "neg", "abs")
_BINARY = ("add", "sub", "mul", "div", "max", "min", "pow")

OPS: Mapping[str, Op] = MappingProxyType(
    {
        **dict.fromkeys(("input", "param", "constant"), Op(0, metadata=True, source=True)),
        "reshape": Op(1, metadata=True),
        "transpose": Op(1, _transpose, metadata=True),
        "narrow": Op(1, _narrow, metadata=True),
        **dict.fromkeys(_UNARY, Op(1, _same_shape, elementwise=True)),
        "cast": Op(1, _cast, elementwise=True),
        **dict.fromkeys(_BINARY, Op(2, _same_shape, elementwise=True)),
        **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_mean"), Op(1, _to_one_element)),
        **dict.fromkeys(("load", "store", "copy"), Op(1, _same_shape)),
        "broadcast": Op(1),
        "concat": Op(None, _concat),
        "matmul": Op(2, _matmul),
        "attention": Op(3, _attention),
        "fft": Op(1, _fft),
        "welch_peaks": Op(1, _welch_peaks, host_sync=True),
        **dict.fromkeys(("log_mel", "log_mel_backward", "custom"), Op(None, host_sync=True)),
    }
)


class Graph:
    """A list of nodes in topological order, with ids 0, 1, 2, ... in order of adding.

    Examples:
        >>> g = Graph("gain")
        >>> x = g.input("x", (8, 512), "f32")
        >>> y = g.add("mul", [x, x])
        >>> g.set_outputs([y])
        >>> g.nodes[y].shape
        (8, 512)
    """

    def __init__(self, name: str = "graph"):
        self.name = name
        self._nodes: list[Node] = []
        self._outputs: tuple[int, ...] = ()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, in order of their ids."""
        return tuple(self._nodes)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The ids of the outputs, in the order given."""
        return self._outputs

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self._nodes)} nodes, outputs={list(self._outputs)})"

    def input(self, name: str, shape: Sequence[int | None], dtype: str = "f32") -> int:
        """Add an input; return its id."""
        return self.add("input", [], shape=shape, dtype=dtype, name=name)

    def param(self, name: str, shape: Sequence[int | None], dtype: str = "f32") -> int:
        """Add a parameter; return its id."""
        return self.add("param", [], shape=shape, dtype=dtype, name=name)

    def constant(self, name: str, shape: Sequence[int | None], dtype: str = "f32") -> int:
        """Add a constant; return its id."""
        return self.add("constant", [], shape=shape, dtype=dtype, name=name)

    def add(
        self,
        op: str,
        inputs: Iterable[int] = (),
        *,
        shape: Sequence[int | None] | None = None,
        dtype: str | None = None,
        **attributes: Any,
    ) -> int:
        """Add a node and return its id.

        Args:
            op: a name of the op table, in lower case.
            inputs: ids of nodes already in the graph; one id may come more than once.
            shape: the output's shape, None for an unknown dimension. Inferred where the op allows it;
                where given it is taken as given, and the number of operands is not looked at.
            dtype: the output's dtype; the inferred one, or the first operand's, unless given.
            **attributes: what the op needs: `axis` (concat, narrow), `start`, `length` (narrow),
                `permutation` (transpose), `to` (cast), `k`, `n_segments` (welch_peaks).

        Raises:
            ValueError: an unknown op, dtype or input id, a negative dimension, or operands from which
                no shape follows.
        """
        rule = OPS.get(op)
        if rule is None:
            near = difflib.get_close_matches(str(op).lower(), OPS, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"unknown op {op!r}{hint}; expected one of {', '.join(OPS)}")
        id_ = len(self._nodes)
        where = f"node {id_} ({op})"
        operands = [self._nodes[self._known(i, where)] for i in _listed(inputs, f"{where}: inputs")]
        if shape is None:
            arity = rule.arity
            if len(operands) != arity if arity is not None else not operands:
                wanted = "at least 1" if arity is None else arity
                raise ValueError(f"{where}: expected {wanted} operand(s), got {len(operands)}")
            try:
                shape, inferred = rule.infer(operands, attributes)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        else:
            inferred = "f32" if op == "welch_peaks" or not operands else operands[0].dtype
            inferred = attributes.get("to", inferred) if op == "cast" else inferred
        try:
            node = Node(
                id_,
                op,
                tuple(operand.id for operand in operands),
                _shape(shape),
                _dtype(inferred if dtype is None else dtype),
                MappingProxyType(attributes),
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        self._nodes.append(node)
        return id_

    def set_outputs(self, ids: Iterable[int]) -> None:
        """Say which nodes are the graph's outputs, in order.

        Raises:
            ValueError: an id that is not in the graph.
        """
        self._outputs = tuple(self._known(i, "outputs") for i in _listed(ids, "outputs"))

    def _known(self, node_id: int, where: str) -> int:
        index = as_index(node_id, f"{where}: node id")
        if index >= len(self._nodes):
            raise ValueError(f"{where}: no node {index} yet; the graph has {len(self._nodes)} nodes")
        return index


def _required(attributes: Mapping[str, Any], name: str) -> Any:
    if name not in attributes:
        raise ValueError(f"the attribute {name!r} has to be given")
    return attributes[name]


def _axis(attributes: Mapping[str, Any], shape: Sequence[int | None]) -> int:
    axis = as_index(_required(attributes, "axis"), "axis", at_least=-len(shape))
    if axis >= len(shape):
        raise ValueError(f"axis has to be an axis of {tuple(shape)}, got {axis!r}")
    return axis % len(shape)


def _listed(values: Any, name: str) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise ValueError(f"{name}: expected a list, got {values!r}") from None


def _shape(shape: Any) -> Shape:
    return tuple(None if dim is None else as_index(dim, "dimension") for dim in _listed(shape, "shape"))


def _dtype(dtype: str) -> str:
    name = str(dtype).lower()
    if name not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}; expected one of {', '.join(DTYPE_BYTES)}")
    return name
