"""Kernels of a graph: the nodes of a kernel, the JAX function of each op, and the execution of a kernel under jit."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rlxjax._checks import unmasked
from rlxjax._values import by_value
from rlxjax.graph import OPS, Node, Shape

#: The first part of a JAX dtype name, by the first part of a graph's dtype name. The number of bits follows in both.
_KINDS = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint", "c": "complex", "bool": "bool"}

#: Arrays, or values that NumPy converts to arrays, by node id. Arrays that an execution does not need are ignored.
Arrays = Mapping[int, Any]


@by_value
@dataclasses.dataclass(frozen=True)
class FusedKernel:
    """Nodes of a graph that run as one kernel.

    Attributes:
        id: the kernel's number in its plan.
        nodes: ids of the kernel's nodes, in topological order.
        external_inputs: ids of the nodes outside the kernel whose values the kernel reads.
        external_outputs: ids of the nodes whose values leave the kernel.
        memory_saved: total bytes of the values that the kernel computes and never writes to memory.
        buffers_eliminated: number of values that the kernel computes and never writes to memory.
    """

    id: int
    nodes: tuple[int, ...]
    external_inputs: tuple[int, ...]
    external_outputs: tuple[int, ...]
    memory_saved: int
    buffers_eliminated: int
    graph_nodes: tuple[Node, ...] = dataclasses.field(default=(), repr=False, compare=False)

    @functools.cached_property
    def argument_nodes(self) -> list[Node]:
        """The nodes whose arrays are the kernel's arguments: external inputs, then its nodes without operands."""
        fed = [id_ for id_ in self.nodes if not self.graph_nodes[id_].inputs]
        return [self.graph_nodes[id_] for id_ in (*dict.fromkeys(self.external_inputs), *fed)]

    @functools.cached_property
    def function(self) -> Callable[..., list[Array]]:
        """The kernel as a jitted function. It takes the arrays of `argument_nodes` and returns the external outputs."""
        members = [self.graph_nodes[id_] for id_ in self.nodes]
        check_operand_counts(members)
        # Operands number steps or, if negative, arguments. Without node ids, equal kernels are compiled once.
        arguments = {node.id: -1 - number for number, node in enumerate(self.argument_nodes)}
        places = arguments | {node.id: number for number, node in enumerate(members)}
        steps = []
        for number, node in enumerate(members):
            if node.op not in OP_FUNCTIONS:
                raise StepError(number, f"no kernel computes this op; expected one of {', '.join(OP_FUNCTIONS)}")
            names = [name for name in _ATTRIBUTES.get(node.op, ()) if name in node.attributes]
            try:
                attributes = tuple((name, _index(node.attributes[name])) for name in names)
            except (TypeError, ValueError) as error:
                raise StepError(number, f"its attributes {', '.join(names)}: {error}") from None
            if node.op in ("broadcast", "reshape"):
                attributes = (("shape", node.shape),)
            operands = tuple([places[i] for i in node.inputs] or [arguments[node.id]])
            steps.append((node.op, operands, node.shape, node.dtype, attributes))
        return _compiled(tuple(steps), tuple(places[id_] for id_ in self.external_outputs))


class StepError(ValueError):
    """The error for a node that cannot be computed. It holds the node's position in the kernel, and the reason."""


def check_operand_counts(nodes: Sequence[Node]) -> None:
    """Raise a ValueError if the number of operands of a node does not fit the op of the node."""
    for node in nodes:
        rule, count = OPS[node.op], len(node.inputs)
        if count == rule.arity or (rule.arity is None and count) or (rule.may_be_source and not count):
            continue
        wanted = "at least 1" if rule.arity is None else rule.arity
        raise ValueError(f"node {node.id} ({node.op}): expected {wanted} operand(s), got {count}")


def execute_kernel(kernel: FusedKernel, inputs: Arrays) -> dict[int, Array]:
    """Run one kernel alone and return its external outputs by node id.

    Args:
        kernel: a kernel of a plan.
        inputs: a dict from node id to array, for the kernel's external inputs and for its nodes without operands.

    Raises:
        ValueError: for the same reasons as in `execute_plan`. The message names the node.

    Examples:
        >>> import rlxjax as rx
        >>> g = rx.Graph()
        >>> y = g.add("neg", [g.add("abs", shape=(2,))])
        >>> (kernel,) = rx.plan_fusion(g).kernels
        >>> {id_: array.tolist() for id_, array in rx.fusion.execute_kernel(kernel, {0: [1.0, -2.0]}).items()}
        {1: [-1.0, -2.0]}
    """
    try:
        outputs = kernel.function(*[given_array(node, inputs) for node in kernel.argument_nodes])
    except StepError as error:
        number, reason = error.args
        node = kernel.graph_nodes[kernel.nodes[number]]
        raise ValueError(f"node {node.id} ({node.op}): {reason}") from None
    return dict(zip(kernel.external_outputs, outputs, strict=True))


def given_array(node: Node, arrays: Arrays) -> "np.ndarray | Array":
    """Return the array of a node, converted to the node's dtype. Raise a ValueError if its shape does not fit."""
    where = f"node {node.id} ({node.op})"
    if node.id not in arrays:
        name = f" {node.attributes['name']!r}" if "name" in node.attributes else ""
        raise ValueError(f"node {node.id} ({node.op}{name}): no array was given for this node")
    array = arrays[node.id]
    array = unmasked(array, where)
    array = array if hasattr(array, "shape") else np.asarray(array)
    if not _agrees(array.shape, node.shape):
        raise ValueError(f"{where}: expected an array of shape {node.shape}, got {array.shape}")
    try:
        dtype = _jax_dtype(node.dtype)
        if array.dtype == dtype:
            return array
        if isinstance(array, np.ndarray) and array.dtype.kind in "iuf" and dtype.kind in "iu" and dtype.itemsize < 8:
            limits = np.iinfo(dtype)  # without 64-bit mode, JAX would first narrow the array
            return np.clip(np.nan_to_num(array.astype(np.float64)), limits.min, limits.max).astype(dtype)
        return _rounded(jnp.asarray(array), dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


@functools.lru_cache(maxsize=2048)  # 0.2 to 0.5 MB per kernel, so at most 1 GB
def _compiled(steps: tuple[Any, ...], outputs: tuple[int, ...]) -> Callable[..., list[Array]]:
    @jax.jit
    def kernel(*arguments: Array) -> list[Array]:
        values: list[Array] = []
        for number, (op, places, shape, dtype, attributes) in enumerate(steps):
            operands = [values[i] if i >= 0 else arguments[-1 - i] for i in places]
            shapes = [operand.shape for operand in operands]
            try:
                if op in _BINARY and len(set(shapes)) > 1:
                    raise ValueError(f"expected operands of the same shape, got {', '.join(map(str, shapes))}")
                value = OP_FUNCTIONS[op](*operands, **dict(attributes))
                if not _agrees(value.shape, shape):
                    raise ValueError(f"its shape is {shape} in the graph, but its operands give {value.shape}")
                values.append(_rounded(value, _jax_dtype(dtype)))
            except (TypeError, ValueError) as error:
                raise StepError(number, str(error)) from None
        return [values[i] for i in outputs]

    return kernel


def _jax_dtype(name: str) -> Any:
    """Return the JAX dtype for a graph's dtype name. Raise a ValueError for 64 bits if JAX's 64-bit mode is off."""
    kind = name.rstrip("0123456789")
    dtype = jnp.dtype(_KINDS[kind] + name.removeprefix(kind))
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"{name} needs 64-bit mode: turn jax_enable_x64 on")
    return dtype


def _agrees(shape: Sequence[int], declared: Shape) -> bool:
    """Return whether a shape fits the declared shape. A dimension that is declared as None fits any size."""
    return len(shape) == len(declared) and all(b in (None, a) for a, b in zip(shape, declared, strict=True))


def _rounded(value: Array, dtype: Any) -> Array:
    """Return a value rounded to a dtype, in a form from which the compiler does not remove the rounding."""
    if value.dtype == jnp.float64 and dtype == jnp.float16:
        # Some processors convert through float32, and the first rounding can create a tie for the second rounding. An
        # odd last bit in float32 marks that digits were cut, so that the second rounding is right.
        near = value.astype(jnp.float32)
        error = value - near.astype(jnp.float64)
        is_even = jax.lax.bitcast_convert_type(near, jnp.int32) % 2 == 0
        is_cut = jnp.isfinite(near) & (error != 0)
        towards = jnp.where(error > 0, jnp.inf, -jnp.inf).astype(jnp.float32)
        value = jnp.where(is_cut & is_even, jnp.nextafter(near, towards), near)
    if all(jnp.issubdtype(own, jnp.integer) for own in (value.dtype, dtype)):  # XLA limits floats, but no integers
        own, wanted = jnp.iinfo(value.dtype), jnp.iinfo(dtype)
        value = jnp.clip(value, max(own.min, wanted.min), min(own.max, wanted.max))
    value = value.astype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return value
    # A rounding between ops keeps the compiler from simplifying them: otherwise log(exp(100)) is 100 instead of
    # infinity, and a narrow intermediate result stays wide.
    bits = jnp.finfo(dtype)
    return jax.lax.reduce_precision(value, exponent_bits=bits.nexp, mantissa_bits=bits.nmant)


def _index(value: Any) -> Any:
    return tuple(map(int, value)) if isinstance(value, Iterable) else int(value)


# --- Functions of the ops ------------------------------------------------------------------------


def _real(x: Array) -> Array:
    """Convert integers to JAX's default float type, because functions like exp and log take no integers."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.result_type(float))


def _quotient(x: Array, y: Array) -> Array:
    """Return `x / y`; for integers the exact quotient, as an integer by the rules of a cast."""
    dtype = jnp.result_type(x, y)
    if not jnp.issubdtype(dtype, jnp.integer):
        return jnp.divide(x, y)
    x, y, limits = x.astype(dtype), y.astype(dtype), jnp.iinfo(dtype)
    by_zero = jnp.where(x > 0, limits.max, jnp.where(x < 0, limits.min, 0))
    quotient = jax.lax.div(x, jnp.where(y == 0, 1, y))
    is_beyond = (x < 0) & (y < 0) & (quotient < 0)  # the least integer, divided by -1
    return jnp.where(y == 0, by_zero, jnp.where(is_beyond, limits.max, quotient)).astype(dtype)


def _power(x: Array, y: Array) -> Array:
    """Return `x**y`; for integers and a negative exponent, the quotient of 1 and the power."""
    dtype = jnp.result_type(x, y)
    if not jnp.issubdtype(dtype, jnp.integer):
        return jnp.power(x, y)
    x, y = x.astype(dtype), y.astype(dtype)
    # For an even or odd exponent, the power of -1, 0 and 1 is that of 2 or 1; the quotient of all others is 0.
    inverse = _quotient(jnp.ones_like(x), jnp.where(y % 2 == 0, x * jnp.sign(x), x))
    power = jnp.ones_like(x)
    for bit in range(jnp.iinfo(dtype).bits):  # `jnp.power` reads only the last bits of an exponent
        power, x = jnp.where((y >> bit) & 1, power * x, power), x * x
    return jnp.where(y < 0, inverse, power)


def _reduced(reduce: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return a function that reduces all elements of an array to one element. An empty array gives 0."""
    return lambda x: jnp.zeros((1,), x.dtype) if x.size == 0 else reduce(x).reshape(1)


def _broadcast(x: Array, shape: Shape) -> Array:
    if None in shape:
        raise ValueError(f"its output shape has an unknown dimension: {shape}")
    return jnp.broadcast_to(x.reshape(()) if x.size == 1 else x, shape)  # pyright: ignore[reportArgumentType]


#: Ops whose two operands must have the same shape. For NaN and a number, max and min give the number.
_BINARY: Mapping[str, Callable[[Array, Array], Array]] = {
    **{"add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "div": _quotient},
    **{"max": jnp.fmax, "min": jnp.fmin, "pow": _power},
}
_ATTRIBUTES = {"transpose": ("permutation",), "narrow": ("axis", "start", "length"), "concat": ("axis",)}

#: The function that computes each op. It takes the operands, and the attributes of the node as keyword arguments.
OP_FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    "relu": lambda x: jnp.where(x > 0, x, jnp.zeros_like(x)),  # NaN gives 0
    "sigmoid": lambda x: jax.nn.sigmoid(_real(x)),
    "tanh": lambda x: jnp.tanh(_real(x)),
    "gelu": lambda x: 0.5 * (y := _real(x)) * (1.0 + jnp.tanh(0.7978845608 * (y + 0.044715 * y * y * y))),
    "sqrt": lambda x: jnp.sqrt(_real(x)),
    "rsqrt": lambda x: jax.lax.rsqrt(_real(x)),
    "exp": lambda x: jnp.exp(_real(x)),
    "log": lambda x: jnp.log(_real(x)),
    "neg": jnp.negative,
    "abs": jnp.abs,
    **dict.fromkeys(("cast", "load", "store", "copy"), lambda x: x),
    **_BINARY,
    "reduce_sum": _reduced(lambda x: jnp.sum(x, dtype=x.dtype)),
    "reduce_max": _reduced(jnp.nanmax),
    "reduce_min": _reduced(jnp.nanmin),
    "reduce_mean": _reduced(jnp.mean),
    "broadcast": _broadcast,
    "reshape": lambda x, shape: x.reshape([-1 if dim is None else dim for dim in shape]),
    "transpose": lambda x, permutation=None: jnp.transpose(x, permutation),
    "narrow": lambda x, axis, length, start=0: jax.lax.slice_in_dim(x, start, start + length, axis=axis),
    "concat": lambda *xs, axis: jnp.concatenate(xs, axis=axis),
    "matmul": jnp.matmul,
}
