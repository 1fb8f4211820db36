"""The search of the cost plan: which nodes share a kernel, so that launches and bytes cost least.

Every kernel that shares saves launches and bytes; what has to be decided is which of the fusions that
exclude each other to take, because kernels have to run in some order. The search runs the graph kernel
by kernel, each taking all that is ready and may share it (a beam over which shape comes next, forward
and backward), then merges whole kernels.
"""

import copy
import functools
import heapq
from collections import Counter

from rlxjax.graph._ops import OPS

from ._kernel_graph import ALONE, ONE_ELEMENT, KernelGraph, Partition, kernels_after
from ._linear_cost import LinearCost

#: Kernels looked at, in all, when searching for a cycle that a merge would close.
SEARCH_LIMIT = 100_000
#: The beam is as wide as this allows for the number of nodes, within its limits.
BEAM_NODES, MAX_BEAM = 1_500, 24


def cheapest_partition(graph: KernelGraph, cost: LinearCost) -> Partition:
    """Return the cheapest partition found, its kernels in an order that can run; the chains are among those tried."""
    if not graph.members:
        return []
    width = max(1, min(MAX_BEAM, BEAM_NODES // len(graph.members)))
    alone: Partition = [[i] for i in graph.members]
    found = [*_beam(graph, cost, width, False), *_beam(graph, cost, width, True), greedy_partition(graph)]
    candidates = sorted(filter(None, map(graph.in_order, found)), key=functools.partial(cost.of, graph))
    better = [_merged(graph, partition) for partition in candidates[:width]]
    return min([*better, *candidates, graph.in_order(alone)], key=functools.partial(cost.of, graph))


def greedy_partition(graph: KernelGraph) -> Partition:
    """Return the reference's chains of elementwise nodes of one shape, in order of creation.

    A chain grows while its last node has exactly one consumer entry (one that reads it twice counts as
    two), which is elementwise, of the first node's shape and in no chain yet. The kernels need not be in
    an order that can run.
    """
    visited: set[int] = set()
    partition: Partition = []
    for start in graph.members:
        if start in visited:
            continue
        first, chain = graph.nodes[start], [start]
        while OPS[first.op].elementwise and len(graph.consumers[chain[-1]]) == 1:
            (following,) = graph.consumers[chain[-1]]
            node = graph.nodes[following]
            reads_once = node.inputs.count(chain[-1]) == 1
            is_like = OPS[node.op].elementwise and node.shape == first.shape
            if following in visited or not (reads_once and is_like):
                break
            chain.append(following)
        visited.update(chain)
        partition.append(chain)
    return partition


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
                self.ready.setdefault(graph.loops[i], []).append(i)
        self._run_alone()

    def copy(self) -> "_Run":
        other = copy.copy(self)
        other.waiting = self.waiting.copy()
        other.ready = {loop: nodes.copy() for loop, nodes in self.ready.items()}
        other.groups = self.groups.copy()
        return other

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
                    self.ready.setdefault(its_loop, []).append(j)
        self.groups.append(group)
        self._run_alone()
        return group

    def _run_alone(self) -> None:
        """Run all that shares no kernel and is ready."""
        while self.ready.get(ALONE):
            i = self.ready[ALONE].pop()
            self.groups.append([i])
            for j in self._run(i):
                self.ready.setdefault(self.graph.loops[j], []).append(j)

    def _run(self, i: int) -> list[int]:
        """Run a node; return those that waited for it alone."""
        self.done |= 1 << i
        for j in self.after[i]:
            self.waiting[j] -= 1
        return [j for j in self.after[i] if not self.waiting[j]]


def _beam(graph: KernelGraph, cost: LinearCost, width: int, backward: bool) -> list[Partition]:
    frequency = Counter(graph.loops[i] for i in graph.members)
    alone_ns = {i: cost.of(graph, [[i]]) for i in graph.members}
    states, finished = [_Run(graph, backward)], []
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
                child.saved_ns += sum(alone_ns[i] for i in group) - cost.of(graph, [group])
                known = following.get(child.done)
                if known is None or child.saved_ns > known.saved_ns:
                    following[child.done] = child
        states = heapq.nlargest(width, following.values(), key=lambda state: state.saved_ns)
    return finished


def _merged(graph: KernelGraph, partition: Partition) -> Partition:
    """Return kernels of which no two that share an edge, an operand or a shape may be one, in an order that can run.

    Whole kernels become one, which never costs, where that closes no cycle.
    """
    groups = [list(group) for group in partition]
    owner = {i: number for number, group in enumerate(groups) for i in group}
    readers = graph.readers(groups)
    visits = 0

    def leads_to(start: int, end: int) -> bool:
        """Whether a way through other kernels leads from one kernel to another."""
        nonlocal visits
        for number in kernels_after(readers, start, end):
            visits += 1
            if end in readers[number]:
                return True
        return False

    # Nodes joined by an edge, and neighbours of those that read a value or loop over a shape.
    pairs = [(i, j) for j in graph.members for i in graph.producers[j]]
    for shared in (graph.reads, [[loop] for loop in graph.loops]):
        last: dict[int, int] = {}
        for i in graph.members:
            pairs += [(last[key], i) for key in shared[i] if key in last]
            last.update(dict.fromkeys(shared[i], i))
    for i, j in pairs:
        a, b = owner[i], owner[j]
        if a == b or visits > SEARCH_LIMIT or not graph.may_be_one(groups[a], groups[b]):
            continue
        if leads_to(a, b) or leads_to(b, a):
            continue
        if len(groups[a]) < len(groups[b]):
            a, b = b, a
        owner.update(dict.fromkeys(groups[b], a))
        groups[a], groups[b] = groups[a] + groups[b], []
        readers[a] |= readers[b]
        readers[b] = set()
        for others in readers:
            if b in others:
                others.remove(b)
                others.add(a)
        readers[a].discard(a)
    return graph.in_order(group for group in groups if group)
