"""A kernel: its nodes, what their ops compute, and running it as one jitted function, compiled once."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rlxjax._values import by_value
from rlxjax.graph import OPS, Node, Shape

#: JAX's names of the kinds of numbers, whose bits follow.
_KINDS = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint", "c": "complex", "bool": "bool"}

#: Constants of the tanh form of gelu.
_GELU_SCALE, _GELU_CUBIC = 0.7978845608, 0.044715

#: Arrays, or what NumPy makes one of; whatever a run does not need is ignored.
Arrays = Mapping[int, Any]


@by_value
@dataclasses.dataclass(frozen=True)
class FusedKernel:
    """Nodes that run as one kernel.

    Attributes:
        id: the kernel's number in its plan.
        nodes: ids, in topological order.
        external_inputs: ids of the values that it reads from outside. A node without operands is fed by
            its own id, which is not among them.
        external_outputs: ids of the values that leave it.
        memory_saved: bytes of the values that never reach memory.
        buffers_eliminated: how many those are.
    """

    id: int
    nodes: tuple[int, ...]
    external_inputs: tuple[int, ...]
    external_outputs: tuple[int, ...]
    memory_saved: int
    buffers_eliminated: int
    graph_nodes: tuple[Node, ...] = dataclasses.field(default=(), repr=False, compare=False)

    @functools.cached_property
    def function(self) -> Callable[..., list[Array]]:
        """The jitted function: arrays of `argument_nodes` in, the external outputs out."""
        members = [self.graph_nodes[id_] for id_ in self.nodes]
        check_operand_counts(members)
        return kernel_function(members, self.argument_nodes, self.external_outputs)

    @functools.cached_property
    def argument_nodes(self) -> list[Node]:
        """The nodes whose arrays the kernel takes: its external inputs, then its nodes without operands."""
        fed = [id_ for id_ in self.nodes if not self.graph_nodes[id_].inputs]
        return [self.graph_nodes[id_] for id_ in (*dict.fromkeys(self.external_inputs), *fed)]


def check_operand_counts(nodes: Sequence[Node]) -> None:
    """Refuse a node, by its name, that has not as many operands as its op takes."""
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
        inputs: arrays by node id, of the kernel's external inputs, and of its nodes without operands by
            their own ids. What is not needed is ignored.

    Raises:
        ValueError: as in `execute_plan`, naming the node.

    Examples:
        >>> import rlxjax as rx
        >>> g = rx.Graph()
        >>> y = g.add("neg", [g.add("abs", shape=(2,))])
        >>> (kernel,) = rx.plan_fusion(g).kernels
        >>> {id_: array.tolist() for id_, array in rx.fusion.execute_kernel(kernel, {0: [1.0, -2.0]}).items()}
        {1: [-1.0, -2.0]}
    """
    return run_kernel(kernel, inputs, inputs)


def run_kernel(kernel: FusedKernel, values: Arrays, own: Arrays) -> dict[int, Array]:
    """Run a kernel on the values that it reads, and the arrays of its nodes without operands."""
    try:
        function, inside = kernel.function, set(kernel.nodes)
        arguments = [given_array(node, own if node.id in inside else values) for node in kernel.argument_nodes]
        outputs = function(*arguments)
    except StepError as error:
        node = kernel.graph_nodes[kernel.nodes[error.step]]
        raise ValueError(f"node {node.id} ({node.op}): {error}") from None
    return dict(zip(kernel.external_outputs, outputs, strict=True))


def given_array(node: Node, arrays: Arrays) -> "np.ndarray | Array":
    """Return the array of a node, of the shape and dtype that the graph says."""
    where = f"node {node.id} ({node.op})"
    if node.id not in arrays:
        name = f" {node.attributes['name']!r}" if "name" in node.attributes else ""
        raise ValueError(f"node {node.id} ({node.op}{name}): no array was given for it")
    array = arrays[node.id]
    array = array if hasattr(array, "shape") else np.asarray(array)
    if not agrees(array.shape, node.shape):
        raise ValueError(f"{where}: expected an array of shape {node.shape}, got {array.shape}")
    try:
        dtype = jax_dtype(node.dtype)
        return array if array.dtype == dtype else jnp.asarray(array).astype(dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


# --- One jitted function --------------------------------------------------------------------------


class Step(NamedTuple):
    """One node of a kernel, without its id, so that equal kernels are compiled once.

    An operand is the number of an argument where negative (-1 the first), else of an earlier step.
    """

    op: str
    operands: tuple[int, ...]
    shape: Shape
    dtype: str
    attributes: tuple[tuple[str, Any], ...]


class StepError(ValueError):
    """A step that cannot be computed: its number, and why."""

    def __init__(self, step: int, reason: str):
        super().__init__(reason)
        self.step = step


def jax_dtype(name: str) -> Any:
    """Return the JAX dtype of a name of the dtype table; one of 64 bits is refused while JAX's 64-bit mode is off."""
    kind = name.rstrip("0123456789")
    dtype = jnp.dtype(_KINDS[kind] + name.removeprefix(kind))
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"{name} needs 64-bit mode: turn jax_enable_x64 on")
    return dtype


def kernel_function(
    nodes: Sequence[Node], argument_nodes: Sequence[Node], output_ids: Sequence[int]
) -> Callable[..., list[Array]]:
    """Return the jitted function of a kernel: its arguments in, the values of its outputs out."""
    arguments = {node.id: -1 - number for number, node in enumerate(argument_nodes)}
    numbers = {node.id: number for number, node in enumerate(nodes)}
    steps = []
    for number, node in enumerate(nodes):
        if node.op not in OP_FUNCTIONS:
            raise StepError(number, f"no kernel computes this op; those that run are {', '.join(OP_FUNCTIONS)}")
        operands = tuple([(arguments | numbers)[i] for i in node.inputs] or [arguments[node.id]])
        given = [name for name in _ATTRIBUTES.get(node.op, ()) if name in node.attributes]
        try:
            attributes = tuple((name, _index(node.attributes[name])) for name in given)
        except (TypeError, ValueError) as error:
            raise StepError(number, f"its attributes {', '.join(given)}: {error}") from None
        if node.op in ("broadcast", "reshape"):
            attributes = (("shape", node.shape),)
        steps.append(Step(node.op, operands, node.shape, node.dtype, attributes))
    return _compiled(tuple(steps), tuple(numbers[id_] for id_ in output_ids))


@functools.lru_cache(maxsize=2048)  # of 0.2 to 0.5 MB a kernel: 1 GB
def _compiled(steps: tuple[Step, ...], outputs: tuple[int, ...]) -> Callable[..., list[Array]]:
    @jax.jit
    def kernel(*arguments: Array) -> list[Array]:
        values: list[Array] = []
        for number, step in enumerate(steps):
            operands = [values[i] if i >= 0 else arguments[-1 - i] for i in step.operands]
            try:
                values.append(_computed(step, operands))
            except (TypeError, ValueError) as error:
                raise StepError(number, str(error)) from None
        return [values[i] for i in outputs]

    return kernel


def agrees(shape: Sequence[int], declared: Shape) -> bool:
    """Whether a shape is the declared one, whose unknown dimensions are None."""
    return len(shape) == len(declared) and all(b in (None, a) for a, b in zip(shape, declared, strict=True))


def _computed(step: Step, operands: list[Array]) -> Array:
    if step.op in _BINARY and len({operand.shape for operand in operands}) > 1:
        raise ValueError(f"operands of one shape are needed, got {', '.join(str(x.shape) for x in operands)}")
    value = OP_FUNCTIONS[step.op](*operands, **dict(step.attributes))
    if not agrees(value.shape, step.shape):
        raise ValueError(f"its shape is {step.shape} in the graph, but its operands give {value.shape}")
    return _rounded(_cast(value, jax_dtype(step.dtype)))


def _cast(value: Array, dtype: jnp.dtype) -> Array:
    """Return a value as another dtype.

    Where a processor has no conversion from float64 to float16, XLA goes by way of float32, which makes ties
    of what were none. What is cut off leaves its trace in the last bit there, so that the second rounding is
    right.
    """
    if value.dtype == jnp.float64 and dtype == jnp.float16:
        near = value.astype(jnp.float32)
        error = value - near.astype(jnp.float64)
        is_even = jax.lax.bitcast_convert_type(near, jnp.int32) % 2 == 0
        is_cut = jnp.isfinite(near) & (error != 0)
        towards = jnp.where(error > 0, jnp.inf, -jnp.inf).astype(jnp.float32)
        value = jnp.where(is_cut & is_even, jnp.nextafter(near, towards), near)
    return value.astype(dtype)


def _rounded(value: Array) -> Array:
    """Return a value, said to be rounded to its dtype.

    Compilers simplify across the ops of a kernel unless a rounding stands between: `log(exp(100))` would
    be 100 where the ops one by one give infinity, and a narrow intermediate result would be kept wide.
    """
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    bits = jnp.finfo(value.dtype)
    return jax.lax.reduce_precision(value, exponent_bits=bits.nexp, mantissa_bits=bits.nmant)


def _index(value: Any) -> Any:
    return tuple(map(int, value)) if isinstance(value, Iterable) else int(value)


# --- What the ops compute ------------------------------------------------------------------------


def _real(x: Array) -> Array:
    """Return integers as JAX's default floats: exp, log and the like have no integer form."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.result_type(float))


def _gelu(x: Array) -> Array:
    x = _real(x)
    return 0.5 * x * (1.0 + jnp.tanh(_GELU_SCALE * (x + _GELU_CUBIC * x * x * x)))


def _reduced(reduce: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return a reduction over everything to one element; nothing gives 0."""

    def reduced(x: Array) -> Array:
        return jnp.zeros((1,), x.dtype) if x.size == 0 else reduce(x).reshape(1)

    return reduced


def _broadcast(x: Array, shape: Shape) -> Array:
    if None in shape:
        raise ValueError(f"its output shape has an unknown dimension: {shape}")
    return jnp.broadcast_to(x.reshape(()) if x.size == 1 else x, shape)  # pyright: ignore[reportArgumentType]


#: Ops of operands of one shape. Of two of which one is NaN, the maximum and the minimum are the other.
_BINARY: Mapping[str, Callable[[Array, Array], Array]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "max": jnp.fmax,
    "min": jnp.fmin,
    "pow": jnp.power,
}
_ATTRIBUTES = {"transpose": ("permutation",), "narrow": ("axis", "start", "length"), "concat": ("axis",)}

#: What the ops compute, from operands and what is read of a node's attributes.
OP_FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    "relu": lambda x: jnp.where(x > 0, x, jnp.zeros_like(x)),  # 0 of NaN
    "sigmoid": lambda x: jax.nn.sigmoid(_real(x)),
    "tanh": lambda x: jnp.tanh(_real(x)),
    "gelu": _gelu,
    "sqrt": lambda x: jnp.sqrt(_real(x)),
    "rsqrt": lambda x: jax.lax.rsqrt(_real(x)),
    "exp": lambda x: jnp.exp(_real(x)),
    "log": lambda x: jnp.log(_real(x)),
    "neg": jnp.negative,
    "abs": jnp.abs,
    **dict.fromkeys(("cast", "load", "store", "copy"), lambda x: x),
    **_BINARY,
    "reduce_sum": _reduced(jnp.sum),
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
