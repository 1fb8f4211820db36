"""Fusion plans: which nodes share a kernel and why, the profiles before and after, and the execution of a plan."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array

from rlxjax._checks import as_index
from rlxjax._counts import saturate
from rlxjax._values import by_value
from rlxjax.gate import BackendCoefficients, IoFusionGate, io_cost_ns
from rlxjax.graph import Graph, GraphIoProfile, profile_graph_io
from rlxjax.units import bytes_text, time_text

from ._kernels import Arrays, FusedKernel, check_operand_counts, execute_kernel, given_array
from ._partition import (
    ALONE,
    GIVEN_OPS,
    ONE_ELEMENT,
    KernelGraph,
    LinearCost,
    Partition,
    backend_row,
    cheapest_partition,
    greedy_partition,
    kernels_after,
)

#: Bytes of an element in the reference's plan, for any dtype.
_GREEDY_ELEMENT_BYTES = 4


class HasGate(Protocol):
    """An object with a measured gate, as a `Calibration`."""

    @property
    def gate(self) -> IoFusionGate: ...


@dataclasses.dataclass(frozen=True)
class FusionEdge:
    """A node that reads another node.

    Attributes:
        producer: id of the node that is read.
        consumer: id of the node that reads.
        is_fused: whether both share a kernel.
        gain_ns: ns that fusing only these two nodes saves, by the plan's coefficients.
        reason: why both share a kernel, or why not.
    """

    producer: int
    consumer: int
    is_fused: bool
    gain_ns: float
    reason: str


@by_value
@dataclasses.dataclass(frozen=True)
class FusionPlan:
    """Kernels in the order in which they run.

    Attributes:
        kernels: the kernels.
        memory_saved: bytes of the values that never reach memory.
        original_kernel_count: count of kernels if each node is a kernel.
        kind: the method of planning: "cost", "greedy" or "unfused".
        graph: a copy of the planned graph.
        coefficients: the backend whose costs the plan minimises.
    """

    kernels: Sequence[FusedKernel]
    memory_saved: int
    original_kernel_count: int
    kind: str = "cost"
    graph: Graph = dataclasses.field(default_factory=Graph, repr=False, compare=False)
    coefficients: BackendCoefficients | None = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernels", tuple(self.kernels))

    @property
    def kernel_reduction(self) -> float:
        """The share of kernels that the plan saves, from 0 to 1."""
        count = self.original_kernel_count
        return 1.0 - len(self.kernels) / count if count else 0.0

    @property
    def fused_kernel_count(self) -> int:
        """The count of kernels."""
        return len(self.kernels)

    def __str__(self) -> str:
        kernels = f"{self.original_kernel_count} → {self.fused_kernel_count} kernels"
        saved = f"{self.memory_saved / 1024:.1f}KB memory saved"
        return f"Fusion: {kernels} ({100 * self.kernel_reduction:.0f}% reduction), {saved}"

    @functools.cached_property
    def before(self) -> GraphIoProfile:
        """The profile of the graph if each node is a kernel of its own."""
        return self._profile([[i] for i in self._kernel_graph.members])

    @functools.cached_property
    def after(self) -> GraphIoProfile:
        """The profile of the graph with the kernels of the plan. A kernel reads each value once."""
        return self._profile(self._partition)

    @property
    def unfused_cost_ns(self) -> float:
        """The IO cost of `before` in ns, by the plan's coefficients."""
        return float(io_cost_ns(self.before, self._row))

    @property
    def cost_ns(self) -> float:
        """The IO cost of `after` in ns, by the plan's coefficients."""
        return float(io_cost_ns(self.after, self._row))

    @functools.cached_property
    def edges(self) -> tuple[FusionEdge, ...]:
        """All pairs of a node and a node that reads it, and the reason why both share a kernel or not."""
        graph, kernels, cost = self._kernel_graph, self._partition, LinearCost.of_row(self._row)
        owner, readers = graph.owners(kernels)
        exported = {i for group in kernels for i in graph.exports(group)}

        def shapes(number: int) -> str:
            loops = sorted({graph.loops[i] for i in kernels[number]} - {ONE_ELEMENT})
            return " and ".join(str(graph.loop_shapes[loop]) for loop in loops) or "one element"

        @functools.cache
        def reason_apart(a: int, b: int) -> str | None:
            if not graph.may_be_one(kernels[a], kernels[b]):
                return f"kernel {a} loops over {shapes(a)}, kernel {b} over {shapes(b)}"
            for between in kernels_after(readers, a, b):
                if b in readers[between]:
                    return f"fusing kernels {a} and {b} forms a cycle with kernel {between}"
            return None

        def edge(i: int, j: int) -> FusionEdge:
            a, b = owner[i], owner[j]
            works = zip(graph.work([i]), graph.work([j]), graph.work([i, j]), strict=True)
            launches, saved_bytes = (one + other - both for one, other, both in works)
            gain_ns = cost.launch_ns * launches + cost.byte_ns * saved_bytes
            alone = [graph.nodes[k] for k in (i, j) if graph.loops[k] == ALONE]
            if a == b:
                place = "still leaves the kernel" if i in exported else "stays inside"
                saves = f"{launches} launch and {bytes_text(saved_bytes)}, {time_text(gain_ns)}"
                reason = f"fusing both saves {saves}; the value {place}"
            elif alone:
                reason = f"node {alone[0].id} ({alone[0].op}) runs alone, because its op never shares a kernel"
            elif apart := reason_apart(a, b):
                reason = apart
            elif gain_ns <= 0:
                reason = "fusing both would save nothing"
            else:
                ended = ", but the search ended before finding this fusion"
                why = ended if self.kind == "cost" else f"; a plan of kind {self.kind!r} does not fuse them"
                reason = f"fusing both would save {time_text(gain_ns)}{why}"
            return FusionEdge(i, j, a == b, gain_ns, reason)

        return tuple(edge(i, j) for j in graph.members for i in graph.producers[j])

    @functools.cached_property
    def _kernel_graph(self) -> KernelGraph:
        return KernelGraph(self.graph)

    @property
    def _partition(self) -> Partition:
        return [list(kernel.nodes) for kernel in self.kernels]

    @property
    def _row(self) -> BackendCoefficients:
        return backend_row("arch") if self.coefficients is None else self.coefficients

    def _profile(self, partition: Partition) -> GraphIoProfile:
        launches, moved_bytes = map(sum, zip((0, 0), *map(self._kernel_graph.work, partition), strict=True))
        counts = {"kernel_launches": launches, "device_traffic_bytes": saturate(moved_bytes)}
        return dataclasses.replace(profile_graph_io(self.graph), **counts)


def plan_fusion(
    graph: Graph, plan: str = "cost", coefficients: str | BackendCoefficients | IoFusionGate | HasGate = "arch"
) -> FusionPlan:
    """Decide which nodes of a graph run as one kernel.

    All nodes of a kernel loop over the same shape; a node of one element may join any kernel. A reduction may share a
    kernel with nodes of its operand's shape, and the broadcast after the reduction may join. Elementwise ops,
    reductions, `load`, `store`, `copy` and `broadcast` may share a kernel; each other op is a kernel of its own.

    Args:
        graph: the graph. Values that no node reads leave their kernel, as outputs do.
        plan: "cost": the plan with the lowest cost of launches and bytes that the search finds. "greedy": the
            reference's chains, whose order may not be executable. "unfused": each node is a kernel.
        coefficients: costs of a launch and a byte: a built-in set ("arch" or "portable", for JAX's default device), a
            device name, a `BackendCoefficients`, an `IoFusionGate`, or a calibration with a measured gate.

    Raises:
        ValueError: the plan, the device or the set is unknown; coefficients are arrays, traced, negative or NaN; a node
            has a wrong number of operands (plan "cost").

    Examples:
        >>> g = Graph()
        >>> x = g.input("x", (1024,), "f32")
        >>> y = g.add("add", [g.add("tanh", [x]), g.add("exp", [x])])
        >>> g.set_outputs([y])
        >>> plan = plan_fusion(g, coefficients="cuda")
        >>> print(plan)
        Fusion: 3 → 1 kernels (67% reduction), 8.0KB memory saved
        >>> plan.kernels[0].external_inputs, plan.kernels[0].external_outputs
        ((0,), (3,))
    """
    graph = graph.copy()
    row, kernel_graph = backend_row(coefficients), KernelGraph(graph)
    if plan == "cost":
        check_operand_counts(graph.nodes)
        partition = cheapest_partition(kernel_graph, LinearCost.of_row(row))
    elif plan == "greedy":
        partition = greedy_partition(kernel_graph)
    elif plan == "unfused":
        partition = [[i] for i in kernel_graph.members]
    else:
        raise ValueError(f"plan: expected one of cost, greedy, unfused, got {plan!r}")
    kernels = []
    for number, group in enumerate(partition):
        inside = set(group)
        if plan == "greedy":  # the counts that the reference gives for a chain
            inputs, outputs = [j for i in group for j in kernel_graph.nodes[i].inputs if j not in inside], group[-1:]
            saved = (len(group) - 1) * kernel_graph.nodes[group[0]].elements * _GREEDY_ELEMENT_BYTES
            eliminated = max(0, len(group) - len(inputs) - 1)
        else:
            inputs, outputs = kernel_graph.external_reads(group), kernel_graph.exports(group)
            inner = inside.difference(outputs)
            saved, eliminated = sum(kernel_graph.sizes[i] for i in inner), len(inner)
        ids = tuple(group), tuple(inputs), tuple(outputs)
        kernels.append(FusedKernel(number, *ids, saved, eliminated, kernel_graph.nodes))
    saved = sum(kernel.memory_saved for kernel in kernels)
    return FusionPlan(kernels, saved, len(kernel_graph.members), kind=plan, graph=graph, coefficients=row)


def execute_plan(plan: FusionPlan, inputs: Arrays) -> dict[int, Array]:
    """Run a plan and return the values that leave its kernels.

    Each kernel is one jitted function. Kernels of equal ops, shapes and dtypes are compiled once, even in several
    plans. The function works under `jit`, `vmap` and `grad`. Results do not depend on the plan, except that a compiler
    may round a product and a sum once instead of twice.

    Args:
        plan: the plan.
        inputs: arrays by node id, for inputs, params, constants and nodes without operands. Shapes must fit the graph;
            dtypes are converted. Other arrays are ignored.

    Returns:
        The external outputs of all kernels, and outputs of the graph that are inputs, by node id. A greedy plan returns
        only the last value of a chain.

    Raises:
        ValueError: an array is missing or has a wrong shape; operands have unequal shapes or a wrong number; an op has
            no kernel; the kernels cannot run in the order of the plan. The message names the node or the kernel.

    Examples:
        >>> import numpy as np
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
    results: dict[int, Array] = {}
    for kernel in plan.kernels:
        for id_ in kernel.external_inputs:
            if id_ not in results and id_ not in given:
                raise ValueError(
                    f"kernel {kernel.id} needs the value of node {id_} ({nodes[id_].op}), which no earlier kernel "
                    "computes: the order of this plan cannot run; use the default plan"
                )
        computed = execute_kernel(kernel, arrays)
        arrays.update(computed)
        results.update(computed)
    of_given = {id_: given_array(nodes[id_], arrays) for id_ in plan.graph.outputs if id_ in given}
    return results | {id_: jnp.asarray(array) for id_, array in of_given.items()}
