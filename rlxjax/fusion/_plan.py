"""Plans: which nodes run as one kernel, what that saves, and the profiles that the gate decides by."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from jaxtyping import Array

from rlxjax._counts import saturate
from rlxjax._values import by_value
from rlxjax.gate import BackendCoefficients, IoFusionGate, io_cost_ns
from rlxjax.graph._graph import Graph, Node
from rlxjax.graph._ops import OPS
from rlxjax.graph._profile import GraphIoProfile, profile_graph_io

from ._edges import FusionEdge, explained_edges
from ._kernel_graph import KernelGraph, Partition
from ._kernels import kernel_function
from ._linear_cost import HasGate, LinearCost, backend_row
from ._search import cheapest_partition, greedy_partition

#: Bytes that the reference's plan counts for an element, whatever its dtype.
_GREEDY_ELEMENT_BYTES = 4


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


@by_value
@dataclasses.dataclass(frozen=True)
class FusionPlan:
    """Kernels in the order in which they run.

    Attributes:
        kernels: the kernels.
        memory_saved: bytes of the values that never reach memory.
        original_kernel_count: kernels if every node ran by itself.
        kernel_reduction: the share of kernels saved, 0 for none.
        kind: how the plan was made: "cost", "greedy" or "unfused".
        graph: what was planned, as it was then.
        coefficients: the backend whose costs the plan was made by.
    """

    kernels: Sequence[FusedKernel]
    memory_saved: int
    original_kernel_count: int
    kernel_reduction: float = math.nan
    kind: str = "cost"
    graph: Graph = dataclasses.field(default_factory=Graph, repr=False, compare=False)
    coefficients: BackendCoefficients | None = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernels", tuple(self.kernels))
        if math.isnan(self.kernel_reduction):
            count = self.original_kernel_count
            share = 1.0 - len(self.kernels) / count if count else 0.0
            object.__setattr__(self, "kernel_reduction", share)

    @property
    def fused_kernel_count(self) -> int:
        """Number of kernels."""
        return len(self.kernels)

    def __str__(self) -> str:
        """Return one line for a person."""
        return (
            f"Fusion: {self.original_kernel_count} → {self.fused_kernel_count} kernels "
            f"({100 * self.kernel_reduction:.0f}% reduction), "
            f"{self.memory_saved / 1024:.1f}KB memory saved"
        )

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
        return explained_edges(self._kernel_graph, self._partition, LinearCost.of_row(self._row), self.kind)

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
        works = [self._kernel_graph.work(group) for group in partition]
        return dataclasses.replace(
            profile_graph_io(self.graph),
            kernel_launches=sum(launches for launches, _ in works),
            device_traffic_bytes=saturate(sum(moved_bytes for _, moved_bytes in works)),
        )


def plan_fusion(
    graph: Graph,
    plan: str = "cost",
    coefficients: str | BackendCoefficients | IoFusionGate | HasGate = "arch",
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
    kernels = [_kernel(kernel_graph, number, group, plan == "greedy") for number, group in enumerate(partition)]
    saved = sum(kernel.memory_saved for kernel in kernels)
    return FusionPlan(kernels, saved, len(kernel_graph.members), kind=plan, graph=graph, coefficients=row)


def check_operand_counts(nodes: Sequence[Node]) -> None:
    """Refuse a node, by its name, that has not as many operands as its op takes."""
    for node in nodes:
        rule, count = OPS[node.op], len(node.inputs)
        if count == rule.arity or (rule.arity is None and count) or (rule.may_be_source and not count):
            continue
        wanted = "at least 1" if rule.arity is None else rule.arity
        raise ValueError(f"node {node.id} ({node.op}): expected {wanted} operand(s), got {count}")


def _kernel(graph: KernelGraph, number: int, group: Sequence[int], is_chain: bool) -> FusedKernel:
    """Return a kernel, or one of the reference's chains with what the reference says of it."""
    inside = set(group)
    if is_chain:
        inputs = [id_ for i in group for id_ in graph.nodes[i].inputs if id_ not in inside]
        outputs = [group[-1]]
        saved = (len(group) - 1) * graph.nodes[group[0]].elements * _GREEDY_ELEMENT_BYTES
        eliminated = max(0, len(group) - len(inputs) - 1)
    else:
        inputs, outputs = graph.external_reads(group), graph.exports(group)
        saved, eliminated = sum(graph.sizes[i] for i in inside.difference(outputs)), len(inside) - len(outputs)
    return FusedKernel(number, tuple(group), tuple(inputs), tuple(outputs), saved, eliminated, graph.nodes)
