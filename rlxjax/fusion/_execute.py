"""Running plans: kernel by kernel, each one jitted function, compiled once."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rlxjax._checks import as_index
from rlxjax.graph._graph import Node

from ._kernel_graph import GIVEN_OPS
from ._kernels import StepError, agrees, jax_dtype
from ._plan import FusedKernel, FusionPlan, check_operand_counts

#: Arrays, or what NumPy makes one of; whatever a run does not need is ignored.
Arrays = Mapping[int, Any]


def execute_plan(plan: FusionPlan, inputs: Arrays) -> dict[int, Array]:
    """Run a plan and return the values that leave its kernels.

    Each kernel is one jitted function, compiled once for its ops, shapes and dtypes: equal kernels share
    it, within a plan and among plans. Works under `jit`, `vmap` and `grad`. Whatever the plan, a node gives
    what it gives when it runs by itself, but that compilers may contract a product and a sum into one
    rounding.

    Args:
        plan: the plan.
        inputs: arrays by node id: of inputs, params and constants, and of nodes without operands, which
            take theirs by their own id. Shapes are those of the graph; dtypes are converted to it. What is
            not needed is ignored.

    Returns:
        The values of every kernel's external outputs, and of outputs of the graph that are given, by node
        id. (A greedy plan keeps all but the last value of a chain inside, outputs of the graph too.)

    Raises:
        ValueError: naming the node: a missing array, one of another shape than the graph says, operands of
            unequal shapes, a wrong number of operands, an op without kernel. Naming the kernel and the
            value it lacks: a plan in an order that cannot run.

    Examples:
        >>> import rlxjax as rx
        >>> g = rx.Graph()
        >>> x, y = g.input("x", (4,)), g.input("y", (4,))
        >>> g.set_outputs([g.add("add", [g.add("relu", [x]), y])])
        >>> plan = rx.plan_fusion(g)
        >>> print(rx.execute_plan(plan, {x: np.array([-1.0, 0, 1, 2]), y: np.full(4, 10.0)})[3])
        [10. 10. 11. 12.]
    """
    nodes = plan.graph.nodes
    check_operand_counts(nodes)
    arrays = {as_index(id_, "inputs: node id"): array for id_, array in inputs.items()}
    given = {node.id for node in nodes if node.op in GIVEN_OPS}
    values = {id_: array for id_, array in arrays.items() if id_ in given}
    results: dict[int, Array] = {}
    for kernel in plan.kernels:
        for id_ in kernel.external_inputs:
            if id_ not in values and id_ not in given:
                raise ValueError(
                    f"kernel {kernel.id} needs the value of node {id_} ({nodes[id_].op}), which no kernel "
                    "before it gives: this plan cannot run (the default plan can)"
                )
        computed = _run(kernel, values, arrays)
        values.update(computed)
        results.update(computed)
    for id_ in plan.graph.outputs:
        if id_ in given:
            results[id_] = jnp.asarray(_given(nodes[id_], values))
    return results


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
    return _run(kernel, inputs, inputs)


def _run(kernel: FusedKernel, values: Arrays, own: Arrays) -> dict[int, Array]:
    """Run a kernel on the values that it reads, and the arrays of its nodes without operands."""
    try:
        function, inside = kernel.function, set(kernel.nodes)
        arguments = [_given(node, own if node.id in inside else values) for node in kernel.argument_nodes]
        outputs = function(*arguments)
    except StepError as error:
        node = kernel.graph_nodes[kernel.nodes[error.step]]
        raise ValueError(f"node {node.id} ({node.op}): {error}") from None
    return dict(zip(kernel.external_outputs, outputs, strict=True))


def _given(node: Node, arrays: Arrays) -> "np.ndarray | Array":
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
