"""Fusion plans: which nodes share a kernel and why, the costs before and after fusion, and the execution of a plan."""

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
from rlxjax.units import bytes_text, printable, time_text

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

#: Bytes that the reference assumes for an element of any dtype.
_GREEDY_ELEMENT_BYTES = 4


class HasGate(Protocol):
    """An object with an attribute `gate`: for example a `Calibration`, whose gate was measured."""

    @property
    def gate(self) -> IoFusionGate: ...


@dataclasses.dataclass(frozen=True)
class FusionEdge:
    """A pair of nodes in a graph: the second node reads the value of the first node.

    Attributes:
        producer: id of the node that is read.
        consumer: id of the node that reads.
        is_fused: whether both nodes are in the same kernel.
        gain_ns: ns that fusing only these two nodes would save, according to the plan's coefficients.
        reason: why the two nodes are in the same kernel, or why they are not.
    """

    producer: int
    consumer: int
    is_fused: bool
    gain_ns: float
    reason: str


@by_value
@dataclasses.dataclass(frozen=True)
class FusionPlan:
    """A partition of a graph into kernels.

    Attributes:
        kernels: the kernels, in the order in which they run.
        memory_saved: total bytes of the values that a kernel computes and never writes to memory.
        original_kernel_count: number of kernels if each node were a kernel of its own.
        kind: the method that made the plan: "cost", "greedy" or "unfused".
        graph: a copy of the planned graph.
        coefficients: coefficients of the backend, which give the costs of launches and bytes.
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
        """The fraction of `original_kernel_count` that the plan saves, from 0 to 1."""
        count = self.original_kernel_count
        return 1.0 - len(self.kernels) / count if count else 0.0

    @property
    def fused_kernel_count(self) -> int:
        """The number of kernels in the plan."""
        return len(self.kernels)

    def __str__(self) -> str:
        kernels = f"{self.original_kernel_count} {printable('→', '->')} {self.fused_kernel_count} kernels"
        saved = f"{self.memory_saved / 1024:.1f}KB memory saved"
        return f"Fusion: {kernels} ({100 * self.kernel_reduction:.0f}% reduction), {saved}"

    @functools.cached_property
    def before(self) -> GraphIoProfile:
        """The IO profile of the graph if each node were a kernel of its own."""
        return self._profile([[i] for i in self._kernel_graph.members])

    @functools.cached_property
    def after(self) -> GraphIoProfile:
        """The IO profile of the graph with the kernels of the plan. A kernel reads each of its inputs once."""
        return self._profile(self._partition)

    @property
    def unfused_cost_ns(self) -> float:
        """The IO cost of the profile `before` in ns, according to the plan's coefficients."""
        return float(io_cost_ns(self.before, self._row))

    @property
    def cost_ns(self) -> float:
        """The IO cost of the profile `after` in ns, according to the plan's coefficients."""
        return float(io_cost_ns(self.after, self._row))

    @functools.cached_property
    def edges(self) -> tuple[FusionEdge, ...]:
        """All pairs of nodes of which one reads the other, each with the reason why they share a kernel or do not."""
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

    Elementwise ops, reductions, `load`, `store`, `copy` and `broadcast` may share a kernel. A node with any other op is
    a kernel of its own. Nodes that share a kernel loop over the same shape, except in two cases: a node of one element
    may join any kernel, and a broadcast may join the reduction that it reads. A reduction loops over its operand.

    Args:
        graph: the graph. A value that no node reads is treated like an output: it leaves its kernel.
        plan: "cost": of the plans that a search finds, the plan whose launches and bytes cost least. "greedy": the plan
            of the Rust reference, whose kernels may have an impossible order. "unfused": each node is a kernel.
        coefficients: what sets the cost of a launch and of a byte: a built-in set ("arch" or "portable", for JAX's
            default device), a device name, a `BackendCoefficients`, an `IoFusionGate`, or a calibration with a gate.

    Raises:
        ValueError: the plan, the device or the set is unknown; a coefficient is an array, traced, negative or NaN; or,
            for the plan "cost", a node has a wrong number of operands.

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
    """Run the kernels of a plan and return the values that leave them.

    Each kernel is a jitted function. Kernels with equal ops, shapes and dtypes are compiled once, even if they are in
    different plans. `execute_plan` works under `jit`, `vmap` and `grad`. All plans of a graph give the same values,
    except that a compiler may round a product and the sum that reads it once instead of twice.

    Args:
        plan: the plan.
        inputs: a dict from node id to array, for inputs, params, constants and all other nodes without operands. The
            shape must fit the node; the dtype is converted. Arrays of other nodes are ignored.

    Returns:
        A dict from node id to value, for the external outputs of all kernels and for all outputs of the graph.

    Raises:
        ValueError: an array is missing or has a wrong shape; a node has operands of unequal shapes or a wrong number of
            operands; no kernel computes an op; or the kernels cannot run in order. The message says where.

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
    wanted = set(plan.graph.outputs)
    for kernel in plan.kernels:
        for id_ in kernel.external_inputs:
            if id_ not in results and id_ not in given:
                raise ValueError(
                    f"kernel {kernel.id} needs the value of node {id_} ({nodes[id_].op}), which no earlier kernel "
                    "computes: the order of this plan cannot run; use the default plan"
                )
        # The last node is the only external output of a greedy kernel, but other nodes may be outputs of the graph.
        others = wanted.intersection(kernel.nodes).difference(kernel.external_outputs)
        own = dataclasses.replace(kernel, external_outputs=(*kernel.external_outputs, *others)) if others else kernel
        computed = execute_kernel(own, arrays)
        arrays.update(computed)
        results.update(computed)
    of_given = {id_: given_array(nodes[id_], arrays) for id_ in plan.graph.outputs if id_ in given}
    return results | {id_: jnp.asarray(array) for id_, array in of_given.items()}
