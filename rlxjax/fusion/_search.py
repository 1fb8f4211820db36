"""The search of the cost plan: which nodes share a kernel, so that launches and bytes cost least.

Every kernel that shares saves launches and bytes; what has to be decided is which of the fusions that
exclude each other to take, because kernels have to run in some order. The search runs the graph kernel
by kernel, each taking all that is ready and may share it (a beam over which shape comes next, forward
and backward), then merges whole kernels.
"""

import copy
import heapq
from collections import Counter
from collections.abc import Sequence

from ._kernel_graph import ALONE, ONE_ELEMENT, KernelGraph, Partition
from ._linear_cost import LinearCost
from ._merges import merged

#: The beam is as wide as this allows for the number of nodes, within its limits.
BEAM_NODES, MAX_BEAM = 1_500, 24


def cheapest_partition(graph: KernelGraph, cost: LinearCost, starts: Sequence[Partition] = ()) -> Partition:
    """Return the cheapest partition found, its kernels in an order that can run.

    Args:
        graph: the nodes.
        cost: of launches and bytes.
        starts: partitions to begin from as well; the result is at most as dear as each of them that can
            run.
    """
    if not graph.members:
        return []
    alone: Partition = [[i] for i in graph.members]
    found = [*_beam(graph, cost, backward=False), *_beam(graph, cost, backward=True)]
    candidates = [partition for start in (*found, *starts) if (partition := graph.in_order(start)) is not None]
    candidates.sort(key=lambda partition: cost.of(graph, partition))
    better = [merged(graph, partition) for partition in candidates[: _width(graph)]]
    best = min([*better, *candidates, alone], key=lambda partition: cost.of(graph, partition))
    ordered = graph.in_order(best)
    assert ordered is not None
    return ordered


def _width(graph: KernelGraph) -> int:
    return max(1, min(MAX_BEAM, BEAM_NODES // len(graph.members)))


class _Run:
    """A graph being run kernel by kernel: what has run, and what is ready, by the shape it loops over."""

    def __init__(self, graph: KernelGraph, backward: bool):
        self.graph = graph
        self.after = graph.producers if backward else graph.consumers
        before = graph.consumers if backward else graph.producers
        self.waiting = [len(others) for others in before]
        self.ready: dict[int, list[int]] = {}
        self.groups: Partition = []
        self.done = 0
        self.saved_ns = 0.0
        for i in graph.members:
            if not self.waiting[i]:
                self._note_ready(i)

    def copy(self) -> "_Run":
        other = copy.copy(self)
        other.waiting = self.waiting.copy()
        other.ready = {loop: nodes.copy() for loop, nodes in self.ready.items()}
        other.groups = self.groups.copy()
        return other

    def run_alone(self) -> None:
        """Run all that shares no kernel and is ready."""
        while self.ready.get(ALONE):
            i = self.ready[ALONE].pop()
            self.groups.append([i])
            for j in self._run(i):
                self._note_ready(j)

    def run_kernel(self, loop: int) -> list[int]:
        """Run one kernel over a shape, with all that is ready and may share it; return its nodes."""
        loops, group = {loop, ONE_ELEMENT}, []
        stack = self.ready.pop(loop)
        stack += self.ready.pop(ONE_ELEMENT, ())
        while stack:
            i = stack.pop()
            group.append(i)
            for j in self._run(i):
                its_loop = self.graph.loops[j]
                if its_loop in loops:
                    stack.append(j)
                elif j in self.graph.links[i]:
                    loops.add(its_loop)
                    stack.append(j)
                    stack += self.ready.pop(its_loop, ())
                else:
                    self._note_ready(j)
        self.groups.append(group)
        return group

    def _note_ready(self, i: int) -> None:
        self.ready.setdefault(self.graph.loops[i], []).append(i)

    def _run(self, i: int) -> list[int]:
        """Run a node; return those that waited for it alone."""
        self.done |= 1 << i
        for j in self.after[i]:
            self.waiting[j] -= 1
        return [j for j in self.after[i] if not self.waiting[j]]


def _beam(graph: KernelGraph, cost: LinearCost, *, backward: bool) -> list[Partition]:
    width = _width(graph)
    frequency = Counter(graph.loops[i] for i in graph.members)
    alone_ns = {i: cost.of_kernel(graph, [i]) for i in graph.members}
    states, finished = [_Run(graph, backward)], []
    states[0].run_alone()
    while states:
        following: dict[int, _Run] = {}
        for state in states:
            loops = [loop for loop, nodes in state.ready.items() if nodes]
            if not loops:
                finished.append(state.groups)
                continue
            shaped = [loop for loop in loops if loop != ONE_ELEMENT] or loops
            for loop in heapq.nlargest(width, shaped, key=frequency.__getitem__):
                child = state.copy()
                group = child.run_kernel(loop)
                child.saved_ns += sum(alone_ns[i] for i in group) - cost.of_kernel(graph, group)
                child.run_alone()
                known = following.get(child.done)
                if known is None or child.saved_ns > known.saved_ns:
                    following[child.done] = child
        states = heapq.nlargest(width, following.values(), key=lambda state: state.saved_ns)
    return finished
