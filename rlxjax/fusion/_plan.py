"""Plans: which nodes run as one kernel, what that saves, and the profiles that the gate decides by."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Array

from rlxjax._checks import check_at_least, is_traced
from rlxjax._counts import saturate
from rlxjax.device._costs import io_cost_ns
from rlxjax.device._devices import (
    BackendCoefficients,
    backend_coefficients,
    jax_device,
    normalised,
)
from rlxjax.device._gate import IoFusionGate
from rlxjax.graph._graph import Graph, Node
from rlxjax.graph._ops import OPS
from rlxjax.graph._profile import GraphIoProfile

from ._edges import FusionEdge, explained_edges
from ._greedy import greedy_partition
from ._kernel_graph import KernelGraph, Partition
from ._kernels import kernel_function
from ._linear_cost import LinearCost
from ._search import cheapest_partition


class HasGate(Protocol):
    """What holds a measured gate, as a `Calibration` does."""

    @property
    def gate(self) -> IoFusionGate:
        """The gate."""
        ...


#: Bytes that the reference's plan counts for an element, whatever its dtype.
_GREEDY_ELEMENT_BYTES = 4


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
        ids = (*dict.fromkeys(self.external_inputs), *self.fed_nodes)
        return [self.graph_nodes[id_] for id_ in ids]

    @functools.cached_property
    def fed_nodes(self) -> tuple[int, ...]:
        """Ids of the nodes without operands, which take theirs by their own id."""
        return tuple(id_ for id_ in self.nodes if not self.graph_nodes[id_].inputs)


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
        return self._profile([[i] for i in range(len(self._kernel_graph.members))])

    @functools.cached_property
    def after(self) -> GraphIoProfile:
        """The profile of the graph with these kernels, each reading a value once."""
        position = {node.id: i for i, node in enumerate(self._kernel_graph.members)}
        return self._profile([[position[id_] for id_ in kernel.nodes] for kernel in self.kernels])

    @property
    def unfused_cost_ns(self) -> float:
        """The io cost of `before`, in ns, by the plan's coefficients."""
        return self._cost_ns(self.before)

    @property
    def cost_ns(self) -> float:
        """The io cost of `after`, in ns, by the plan's coefficients."""
        return self._cost_ns(self.after)

    @functools.cached_property
    def edges(self) -> tuple[FusionEdge, ...]:
        """Every pair of nodes of which one reads the other: whether they share a kernel, and why."""
        kernels = [list(kernel.nodes) for kernel in self.kernels]
        return explained_edges(self._kernel_graph, kernels, linear_cost(self._row), self.kind)

    @functools.cached_property
    def checked_nodes(self) -> tuple[Node, ...]:
        """The graph's nodes, each with as many operands as its op takes.

        Raises:
            ValueError: naming a node that has not.
        """
        check_operand_counts(self.graph.nodes)
        return self.graph.nodes

    @functools.cached_property
    def _kernel_graph(self) -> KernelGraph:
        return KernelGraph.of(self.graph)

    @property
    def _row(self) -> BackendCoefficients:
        return backend_row("arch") if self.coefficients is None else self.coefficients

    def _cost_ns(self, profile: GraphIoProfile) -> float:
        return float(io_cost_ns(profile, self._row))

    def _profile(self, partition: Partition) -> GraphIoProfile:
        graph, outputs = self._kernel_graph, set(self.graph.outputs)
        rules = [OPS[node.op] for node in graph.members]
        return GraphIoProfile(
            kernel_launches=sum(any(graph.launches[i] for i in group) for group in partition),
            sync_points=sum(rule.host_sync for rule in rules),
            host_output_bytes=saturate(
                sum(
                    node.bytes
                    for node, rule in zip(graph.members, rules, strict=True)
                    if node.id in outputs and not rule.metadata
                )
            ),
            device_traffic_bytes=saturate(sum(graph.traffic_bytes(group) for group in partition)),
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
            every needed value exported, inputs without repetition. "greedy", the reference's chains (SPEC,
            section 8), which may be in an order that cannot run. "unfused", every node by itself.
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
    row, kernel_graph = backend_row(coefficients), KernelGraph.of(graph)
    makers = {"cost": _cost_kernels, "greedy": _greedy_kernels, "unfused": _unfused_kernels}
    if plan not in makers:
        raise ValueError(f"plan: expected one of {', '.join(makers)}, got {plan!r}")
    kernels = makers[plan](kernel_graph, row)
    saved = sum(kernel.memory_saved for kernel in kernels)
    return FusionPlan(kernels, saved, len(kernel_graph.members), kind=plan, graph=graph, coefficients=row)


def backend_row(
    coefficients: str | BackendCoefficients | IoFusionGate | HasGate,
) -> BackendCoefficients:
    """Return the backend whose costs decide.

    Raises:
        ValueError: an unknown name, something else, or coefficients that are arrays.
    """
    if isinstance(coefficients, str):
        if normalised(coefficients) in ("arch", "portable"):
            return backend_coefficients(jax_device(), coefficients)
        return backend_coefficients(coefficients)
    chosen = getattr(coefficients, "gate", coefficients)
    if isinstance(chosen, IoFusionGate):
        nothing = float("nan")
        chosen = BackendCoefficients(
            chosen.dispatch_ns,
            chosen.roundtrip_ns,
            chosen.memory_bw,
            chosen.host_readback_bw,
            chosen.unified_memory,
            nothing,
            nothing,
        )
    if not isinstance(chosen, BackendCoefficients):
        raise ValueError(
            "coefficients: expected a set, a device, BackendCoefficients, an IoFusionGate or a Calibration, "
            f"got {coefficients!r}"
        )
    for name in ("dispatch_ns", "roundtrip_ns", "memory_bw", "readback_bw", "unified_memory"):
        value = getattr(chosen, name)
        if is_traced(value):
            raise ValueError("coefficients: a plan is made on the host, so they cannot be traced")
        if np.ndim(value):
            raise ValueError("coefficients: expected one backend, got arrays of several")
        check_at_least(value, f"coefficients: {name}", what="number")
    return chosen


def linear_cost(row: BackendCoefficients) -> LinearCost:
    """Return what a launch and a byte of traffic add to `io_cost_ns` on a backend."""
    byte_ns = 1.0 / max(float(row.memory_bw), 1.0)
    if not float(row.unified_memory) >= 0.5:
        byte_ns += 0.25 / max(float(row.readback_bw), 1.0)
    return LinearCost(float(row.dispatch_ns), byte_ns)


def check_operand_counts(nodes: Sequence[Node]) -> None:
    """Refuse a node that has not as many operands as its op takes.

    Raises:
        ValueError: naming the node.
    """
    for node in nodes:
        rule, count = OPS[node.op], len(node.inputs)
        if count == rule.arity or (rule.arity is None and count) or (rule.may_be_source and not count):
            continue
        wanted = "at least 1" if rule.arity is None else rule.arity
        raise ValueError(f"node {node.id} ({node.op}): expected {wanted} operand(s), got {count}")


def _cost_kernels(graph: KernelGraph, row: BackendCoefficients) -> list[FusedKernel]:
    check_operand_counts(graph.nodes)
    partition = cheapest_partition(graph, linear_cost(row), [greedy_partition(graph)])
    return _kernels(graph, partition)


def _unfused_kernels(graph: KernelGraph, row: BackendCoefficients) -> list[FusedKernel]:
    return _kernels(graph, [[i] for i in range(len(graph.members))])


def _kernels(graph: KernelGraph, partition: Partition) -> list[FusedKernel]:
    kernels = []
    for number, group in enumerate(partition):
        exported = graph.exports(group)
        inner = [graph.members[i] for i in set(group).difference(exported)]
        kernels.append(
            FusedKernel(
                id=number,
                nodes=tuple(graph.members[i].id for i in group),
                external_inputs=tuple(graph.external_reads(group)),
                external_outputs=tuple(graph.members[i].id for i in exported),
                memory_saved=sum(node.bytes for node in inner),
                buffers_eliminated=len(inner),
                graph_nodes=graph.nodes,
            )
        )
    return kernels


def _greedy_kernels(graph: KernelGraph, row: BackendCoefficients) -> list[FusedKernel]:
    kernels = []
    for number, chain in enumerate(greedy_partition(graph)):
        members = [graph.members[i] for i in chain]
        ids = {node.id for node in members}
        inputs = tuple(id_ for node in members for id_ in node.inputs if id_ not in ids)
        saved = (len(chain) - 1) * members[0].elements * _GREEDY_ELEMENT_BYTES
        kernels.append(
            FusedKernel(
                id=number,
                nodes=tuple(node.id for node in members),
                external_inputs=inputs,
                external_outputs=(members[-1].id,),
                memory_saved=saved,
                buffers_eliminated=max(0, len(chain) - len(inputs) - 1),
                graph_nodes=graph.nodes,
            )
        )
    return kernels
