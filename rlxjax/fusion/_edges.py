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
    """Return every edge between nodes that run, in order of the consumers, of a plan of some kind."""
    owner = {i: number for number, group in enumerate(kernels) for i in group}
    readers = graph.readers(kernels)
    exported = {i for group in kernels for i in graph.exports(group)}

    @functools.cache
    def reason_apart(a: int, b: int) -> str | None:
        if not graph.may_be_one(kernels[a], kernels[b]):
            return f"kernel {a} loops over {shapes(a)}, kernel {b} over {shapes(b)}"
        for between in kernels_after(readers, a, b):
            if b in readers[between]:
                return f"kernels {a} and {b} as one would read from and be read by kernel {between}: a cycle"
        return None

    def shapes(number: int) -> str:
        loops = sorted({graph.loops[i] for i in kernels[number]} - {ONE_ELEMENT})
        return " and ".join(str(graph.loop_shapes[loop]) for loop in loops) or "one element"

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
            why = ended if kind == "cost" else f"; a plan of kind {kind!r} leaves them apart"
            reason = f"together they would save {gain_ns:.4g} ns{why}"
        return FusionEdge(i, j, a == b, gain_ns, reason)

    return tuple(edge(i, j) for j in graph.members for i in graph.producers[j])
