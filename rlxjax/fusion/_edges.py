"""Why two nodes of which one reads the other share a kernel, or do not."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._kernel_graph import ALONE, ONE_ELEMENT, KernelGraph

if TYPE_CHECKING:
    from ._search import LinearCost


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


def explained_edges(
    graph: KernelGraph, kernels: Sequence[Sequence[int]], cost: "LinearCost"
) -> tuple[FusionEdge, ...]:
    """Return every edge between nodes that run, in order of the consumers.

    Args:
        graph: the nodes.
        kernels: the ids of each kernel's nodes.
        cost: of launches and bytes.
    """
    position = {node.id: i for i, node in enumerate(graph.members)}
    groups = [[position[id_] for id_ in kernel] for kernel in kernels]
    owner = {i: number for number, group in enumerate(groups) for i in group}
    between = _Between(graph, groups, owner)
    return tuple(
        _edge(graph, cost, groups, owner, between, i, j)
        for j, producers in enumerate(graph.producers)
        for i in producers
    )


def _edge(
    graph: KernelGraph,
    cost: "LinearCost",
    groups: list[list[int]],
    owner: dict[int, int],
    between: "_Between",
    i: int,
    j: int,
) -> FusionEdge:
    first, second = graph.members[i], graph.members[j]
    a, b = owner[i], owner[j]
    apart_bytes = graph.traffic_bytes([i]) + graph.traffic_bytes([j])
    saved_bytes = apart_bytes - graph.traffic_bytes([i, j])
    launches = graph.launches[i] + graph.launches[j] - 1
    gain_ns = cost.launch_ns * max(launches, 0) + cost.byte_ns * saved_bytes
    if a == b:
        written = (
            "its value still leaves the kernel" if i in between.exported(a) else "its value stays inside"
        )
        reason = f"one kernel saves {launches} launch and {saved_bytes} bytes, {gain_ns:.4g} ns; {written}"
    else:
        reason = _reason_apart(graph, groups, between, i, j, a, b, gain_ns)
    return FusionEdge(first.id, second.id, a == b, gain_ns, reason)


def _reason_apart(
    graph: KernelGraph,
    groups: list[list[int]],
    between: "_Between",
    i: int,
    j: int,
    a: int,
    b: int,
    gain_ns: float,
) -> str:
    for k in (i, j):
        if graph.loops[k] == ALONE:
            node = graph.members[k]
            return f"node {node.id} ({node.op}) runs alone: its op shares no kernel"
    if not graph.may_share([*groups[a], *groups[b]]):
        return (
            f"kernel {a} loops over {_shapes(graph, groups[a])}, kernel {b} over {_shapes(graph, groups[b])}"
        )
    through = between.kernel_between(a, b)
    if through is not None:
        return f"kernels {a} and {b} as one would read from and be read by kernel {through}: a cycle"
    if gain_ns <= 0:
        return "one kernel would save nothing"
    return f"one kernel would save {gain_ns:.4g} ns, but the search ended before it was found"


def _shapes(graph: KernelGraph, group: Sequence[int]) -> str:
    loops = sorted({graph.loops[i] for i in group} - {ONE_ELEMENT})
    return " and ".join(str(graph.loop_shapes[loop]) for loop in loops) or "one element"


class _Between:
    """Which kernels lie on the way from one kernel to another."""

    def __init__(self, graph: KernelGraph, groups: list[list[int]], owner: dict[int, int]):
        self._graph, self._groups = graph, groups
        self._after = [
            {owner[j] for i in group for j in graph.consumers[i]} - {number}
            for number, group in enumerate(groups)
        ]
        self._exported: dict[int, set[int]] = {}

    def exported(self, number: int) -> set[int]:
        """Return the positions whose values leave a kernel."""
        if number not in self._exported:
            self._exported[number] = set(self._graph.exports(self._groups[number]))
        return self._exported[number]

    def kernel_between(self, start: int, end: int) -> int | None:
        """Return the last kernel on a way of several steps; None if there is no such way."""
        seen, stack = {start}, [start]
        while stack:
            number = stack.pop()
            if number != start and end in self._after[number]:
                return number
            fresh = self._after[number] - seen - {end}
            seen |= fresh
            stack.extend(fresh)
        return None
