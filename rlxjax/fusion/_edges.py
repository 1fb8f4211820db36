"""Why two nodes of which one reads the other share a kernel, or do not."""

import dataclasses
import functools

from ._kernel_graph import ALONE, ONE_ELEMENT, KernelGraph, Partition, kernels_after
from ._linear_cost import LinearCost


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


def explained_edges(graph: KernelGraph, kernels: Partition, cost: LinearCost, kind: str) -> tuple[FusionEdge, ...]:
    """Return every edge between nodes that run, in order of the consumers.

    Args:
        graph: the nodes.
        kernels: the positions of each kernel's nodes.
        cost: of launches and bytes.
        kind: how the plan was made.
    """
    explained = _Explained(graph, kernels, cost, kind)
    pairs = ((i, j) for j, producers in enumerate(graph.producers) for i in producers)
    return tuple(explained.edge(i, j) for i, j in pairs)


class _Explained:
    """A plan whose edges are asked for; what two kernels have to do with each other is found once."""

    def __init__(self, graph: KernelGraph, kernels: Partition, cost: LinearCost, kind: str):
        self.graph, self.kernels, self.cost, self.kind = graph, kernels, cost, kind
        self.owner = {i: number for number, group in enumerate(kernels) for i in group}
        self.readers = graph.readers(kernels)
        self.exported = functools.cache(lambda number: set(graph.exports(kernels[number])))
        self.reason_apart = functools.cache(self._reason_apart)

    def edge(self, i: int, j: int) -> FusionEdge:
        """Return the edge from one position to another."""
        graph, a, b = self.graph, self.owner[i], self.owner[j]
        saved_bytes = graph.traffic_bytes([i]) + graph.traffic_bytes([j]) - graph.traffic_bytes([i, j])
        launches = max(0, graph.launches[i] + graph.launches[j] - 1)
        gain_ns = self.cost.launch_ns * launches + self.cost.byte_ns * saved_bytes
        alone = [graph.members[k] for k in (i, j) if graph.loops[k] == ALONE]
        if a == b:
            place = "still leaves the kernel" if i in self.exported(a) else "stays inside"
            reason = f"together they save {launches} launch and {saved_bytes} bytes, {gain_ns:.4g} ns; "
            reason += f"the value {place}"
        elif alone:
            reason = f"node {alone[0].id} ({alone[0].op}) runs alone: its op shares no kernel"
        elif apart := self.reason_apart(a, b):
            reason = apart
        elif gain_ns <= 0:
            reason = "together they would save nothing"
        else:
            why = ", but the search ended before it was found"
            if self.kind != "cost":
                why = f"; a plan of kind {self.kind!r} leaves them apart"
            reason = f"together they would save {gain_ns:.4g} ns{why}"
        return FusionEdge(graph.members[i].id, graph.members[j].id, a == b, gain_ns, reason)

    def _reason_apart(self, a: int, b: int) -> str | None:
        """Return why two kernels cannot be one, if they cannot."""
        if not self.graph.may_be_one(self.kernels[a], self.kernels[b]):
            return f"kernel {a} loops over {self._shapes(a)}, kernel {b} over {self._shapes(b)}"
        through = next((n for n in kernels_after(self.readers, a, b) if b in self.readers[n]), None)
        if through is not None:
            return f"kernels {a} and {b} as one would read from and be read by kernel {through}: a cycle"
        return None

    def _shapes(self, number: int) -> str:
        loops = sorted({self.graph.loops[i] for i in self.kernels[number]} - {ONE_ELEMENT})
        return " and ".join(str(self.graph.loop_shapes[loop]) for loop in loops) or "one element"
