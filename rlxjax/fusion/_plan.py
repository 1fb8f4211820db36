"""Plans: which nodes run as one kernel and why, the profiles that the gate decides by, and running them."""

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

#: Bytes that the reference's plan counts for an element, whatever its dtype.
_GREEDY_ELEMENT_BYTES = 4


class HasGate(Protocol):
    """What holds a measured gate, as a `Calibration` does."""

    @property
    def gate(self) -> IoFusionGate: ...


@dataclasses.dataclass(frozen=True)
class FusionEdge:
    """One node that reads another.

    Attributes:
        producer: id of the node that is read.
        consumer: id of the node that reads it.
        is_fused: whether they share a kernel.
        gain_ns: what the two alone, as one kernel in place of two, would save by the plan's coefficients.
        reason: why they share a kernel, or do not.
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
        original_kernel_count: kernels if every node ran by itself.
        kind: how the plan was made: "cost", "greedy" or "unfused".
        graph: what was planned, as it was then.
        coefficients: the backend whose costs the plan was made by.
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
        """The share of kernels saved, 0 for none."""
        count = self.original_kernel_count
        return 1.0 - len(self.kernels) / count if count else 0.0

    @property
    def fused_kernel_count(self) -> int:
        """Number of kernels."""
        return len(self.kernels)

    def __str__(self) -> str:
        kernels = f"{self.original_kernel_count} → {self.fused_kernel_count} kernels"
        saved = f"{self.memory_saved / 1024:.1f}KB memory saved"
        return f"Fusion: {kernels} ({100 * self.kernel_reduction:.0f}% reduction), {saved}"

    @functools.cached_property
    def before(self) -> GraphIoProfile:
        """The profile of the graph with every node as a kernel of its own.

        `profile_graph_io`, but a kernel reads a value once, however many of its operands it is.
        """
        return self._profile([[i] for i in self._kernel_graph.members])

    @functools.cached_property
    def after(self) -> GraphIoProfile:
        """The profile of the graph with these kernels, each reading a value once."""
        return self._profile(self._partition)

    @property
    def unfused_cost_ns(self) -> float:
        """The io cost of `before`, in ns, by the plan's coefficients."""
        return float(io_cost_ns(self.before, self._row))

    @property
    def cost_ns(self) -> float:
        """The io cost of `after`, in ns, by the plan's coefficients."""
        return float(io_cost_ns(self.after, self._row))

    @functools.cached_property
    def edges(self) -> tuple[FusionEdge, ...]:
        """Every pair of nodes of which one reads the other: whether they share a kernel, and why."""
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
                    return f"kernels {a} and {b} as one would read from and be read by kernel {between}: a cycle"
            return None

        def edge(i: int, j: int) -> FusionEdge:
            a, b = owner[i], owner[j]
            works = zip(graph.work([i]), graph.work([j]), graph.work([i, j]), strict=True)
            launches, saved_bytes = (one + other - both for one, other, both in works)
            gain_ns = cost.launch_ns * launches + cost.byte_ns * saved_bytes
            alone = [graph.nodes[k] for k in (i, j) if graph.loops[k] == ALONE]
            if a == b:
                place = "still leaves the kernel" if i in exported else "stays inside"
                saves = f"{launches} launch and {saved_bytes} bytes, {gain_ns:.4g} ns"
                reason = f"together they save {saves}; the value {place}"
            elif alone:
                reason = f"node {alone[0].id} ({alone[0].op}) runs alone: its op shares no kernel"
            elif apart := reason_apart(a, b):
                reason = apart
            elif gain_ns <= 0:
                reason = "together they would save nothing"
            else:
                ended = ", but the search ended before it was found"
                why = ended if self.kind == "cost" else f"; a plan of kind {self.kind!r} leaves them apart"
                reason = f"together they would save {gain_ns:.4g} ns{why}"
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

    A kernel loops over one shape; nodes of one element ride along in any, a reduction shares its kernel
    with the nodes of its operand's shape, and the broadcast that follows it may share it too. Elementwise
    ops, reductions, `load`, `store`, `copy` and `broadcast` may share; every other op runs alone.

    Args:
        graph: the graph, as it is now. Values that nothing reads leave their kernel as outputs do.
        plan: "cost", the cheapest plan found by launches and bytes: kernels in an order that can run,
            every needed value exported, inputs without repetition. "greedy", the reference's chains, which
            may be in an order that cannot run. "unfused", every node by itself.
        coefficients: what a launch and a byte cost: a built-in set ("arch", "portable": the row of JAX's
            default device), a device name, a row, a gate (its rates; least gain and penalty are for
            `should_fuse`), or a calibration (its measured gate).

    Raises:
        ValueError: an unknown plan, device or set, coefficients that are arrays, traced, negative or NaN,
            or (plan "cost") a node with a wrong number of operands.

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
        if plan == "greedy":  # what the reference says of a chain
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

    Each kernel is one jitted function, compiled once for its ops, shapes and dtypes: equal kernels share it, within a
    plan and among plans. Works under `jit`, `vmap` and `grad`. Whatever the plan, a node gives what it gives when it
    runs by itself, but that compilers may contract a product and a sum into one rounding.

    Args:
        plan: the plan.
        inputs: arrays by node id: of inputs, params and constants, and of nodes without operands, which take theirs by
            their own id. Shapes are those of the graph; dtypes are converted to it. What is not needed is ignored.

    Returns:
        The values of every kernel's external outputs, and of outputs of the graph that are given, by node
        id. (A greedy plan keeps all but the last value of a chain inside, outputs of the graph too.)

    Raises:
        ValueError: naming the node: a missing array, one of another shape than the graph says, operands of
            unequal shapes, a wrong number of operands, an op without kernel. Naming the kernel and the
            value it lacks: a plan in an order that cannot run.

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
                    f"kernel {kernel.id} needs the value of node {id_} ({nodes[id_].op}), which no kernel "
                    "before it gives: this plan cannot run (the default plan can)"
                )
        computed = execute_kernel(kernel, arrays)
        arrays.update(computed)
        results.update(computed)
    of_given = {id_: given_array(nodes[id_], arrays) for id_ in plan.graph.outputs if id_ in given}
    return results | {id_: jnp.asarray(array) for id_, array in of_given.items()}
