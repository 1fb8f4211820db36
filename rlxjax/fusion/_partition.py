"""Which nodes of a graph share a kernel: what may, what launches and bytes cost, and the search of the cost plan."""

import copy
import functools
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple, Protocol

import jax
import numpy as np

from rlxjax._checks import is_traced
from rlxjax.gate import BackendCoefficients, IoFusionGate, backend_coefficients, jax_device
from rlxjax.graph import OPS, Graph, Node

#: Nodes that are no kernels: their values are given.
GIVEN_OPS = ("input", "param", "constant")
#: Loop of a node that shares its kernel with no other, and of nodes of one element.
ALONE, ONE_ELEMENT = -1, 0

Partition = list[list[int]]


class KernelGraph:
    """Who reads whom among the nodes that run; every list is by the id of a node, those that are given included.

    A kernel loops over one shape; nodes of one element ride along in any, and a broadcast may follow a
    reduction of its own kernel whatever its shape.
    """

    def __init__(self, graph: Graph):
        self.nodes = nodes = graph.nodes
        #: Ids of the nodes that run, in topological order; what each reads, and which of those run.
        self.members = [node.id for node in nodes if node.op not in GIVEN_OPS]
        self.reads = [tuple(dict.fromkeys(node.inputs)) if node.op not in GIVEN_OPS else () for node in nodes]
        self.producers = [[i for i in ids if nodes[i].op not in GIVEN_OPS] for ids in self.reads]
        #: Number of the shape that each one loops over, `ONE_ELEMENT` or `ALONE`; and the shapes by number.
        numbers: dict[tuple[int | None, ...], int] = {(1,): ONE_ELEMENT}
        self.loops = [_loop(node, nodes, numbers) for node in nodes]
        self.loop_shapes = list(numbers)
        #: Ids that read each one's value.
        self.consumers: list[list[int]] = [[] for _ in nodes]
        #: The broadcasts that follow each reduction, and the reduction before each broadcast, of unequal loops.
        self.links: list[list[int]] = [[] for _ in nodes]
        for i in self.members:
            for producer in self.producers[i]:
                self.consumers[producer].append(i)
                follows = nodes[i].op == "broadcast" and OPS[nodes[producer].op].reduction
                if follows and ONE_ELEMENT not in (self.loops[i], self.loops[producer]):
                    self.links[producer].append(i)
                    self.links[i].append(producer)
        #: Whether the value leaves whatever kernel computes it: an output of the graph, or read by nobody.
        outputs = set(graph.outputs)
        self.is_needed = [node.id in outputs or not self.consumers[node.id] for node in nodes]
        self.is_view = [OPS[node.op].metadata for node in nodes]
        self.sizes = [node.bytes for node in nodes]

    def may_be_one(self, one: Sequence[int], other: Sequence[int]) -> bool:
        """Whether two kernels may be one, but for the order of kernels."""
        first, second = ({self.loops[i] for i in group} - {ONE_ELEMENT} for group in (one, other))
        if ALONE in first | second:
            return False
        inside = set(other)
        is_linked = any(not inside.isdisjoint(self.links[i]) for i in one)
        return not first or not second or bool(first & second) or is_linked

    def exports(self, group: Sequence[int]) -> list[int]:
        """Return the nodes of a kernel whose values leave it."""
        inside = set(group)
        return [i for i in group if self.is_needed[i] or any(j not in inside for j in self.consumers[i])]

    def external_reads(self, group: Sequence[int]) -> list[int]:
        """Return the ids that a kernel reads from outside, without repetition, in order."""
        inside = set(group)
        return list(dict.fromkeys(id_ for i in group for id_ in self.reads[i] if id_ not in inside))

    def work(self, group: Sequence[int]) -> tuple[int, int]:
        """Return the launches of a kernel and the bytes that it reads and writes: none where all are views."""
        if all(self.is_view[i] for i in group):
            return 0, 0
        return 1, sum(self.sizes[i] for i in (*self.external_reads(group), *self.exports(group)))

    def readers(self, partition: Partition) -> list[set[int]]:
        """Return the numbers of the other kernels that read from each."""
        owner = {i: number for number, group in enumerate(partition) for i in group}
        return [
            {owner[j] for i in group for j in self.consumers[i]} - {number} for number, group in enumerate(partition)
        ]

    def in_order(self, partition: Iterable[Iterable[int]]) -> Partition:
        """Return the kernels so that each comes after those it reads from; none if they form a cycle."""
        groups = sorted(sorted(group) for group in partition)
        sorter = TopologicalSorter(dict.fromkeys(range(len(groups)), ()))
        for number, others in enumerate(self.readers(groups)):
            for other in others:
                sorter.add(other, number)
        try:
            return [groups[number] for number in sorter.static_order()]
        except CycleError:
            return []


def kernels_after(readers: Sequence[set[int]], start: int, end: int) -> Iterator[int]:
    """Yield the kernels that ways from one kernel lead to, but for ways through the other."""
    seen, stack = {start, end}, [start]
    while stack:
        number = stack.pop()
        if number != start:
            yield number
        fresh = readers[number] - seen
        seen |= fresh
        stack.extend(fresh)


def _loop(node: Node, nodes: tuple[Node, ...], numbers: dict[tuple[int | None, ...], int]) -> int:
    rule = OPS[node.op]
    if node.op in GIVEN_OPS or not rule.fusable:
        return ALONE
    looped = nodes[node.inputs[0]] if rule.reduction and node.inputs else node
    return ONE_ELEMENT if looped.elements == 1 else numbers.setdefault(looped.shape, len(numbers))


class HasGate(Protocol):
    """What holds a measured gate, as a `Calibration` does."""

    @property
    def gate(self) -> IoFusionGate: ...


class LinearCost(NamedTuple):
    """What a launch and a byte of traffic cost in ns."""

    launch_ns: float
    byte_ns: float

    @classmethod
    def of_row(cls, row: BackendCoefficients) -> "LinearCost":
        """Return what a launch and a byte of traffic add to `io_cost_ns` on a backend."""
        byte_ns = 1.0 / max(float(row.memory_bw), 1.0)
        if not float(row.unified_memory) >= 0.5:
            byte_ns += 0.25 / max(float(row.readback_bw), 1.0)
        return cls(float(row.dispatch_ns), byte_ns)

    def of(self, graph: KernelGraph, partition: Partition) -> float:
        """Return the cost of all kernels."""
        works = map(graph.work, partition)
        return sum(self.launch_ns * launches + self.byte_ns * moved_bytes for launches, moved_bytes in works)


def backend_row(coefficients: str | BackendCoefficients | IoFusionGate | HasGate) -> BackendCoefficients:
    """Return the backend whose costs decide; an unknown name, something else and arrays are refused."""
    if isinstance(coefficients, str):
        if coefficients.strip().lower() in ("arch", "portable"):
            return backend_coefficients(jax_device(), coefficients)
        return backend_coefficients(coefficients)
    row = getattr(coefficients, "gate", coefficients)
    if isinstance(row, IoFusionGate):
        rates = (row.dispatch_ns, row.roundtrip_ns, row.memory_bw, row.host_readback_bw, row.unified_memory)
        row = BackendCoefficients(*rates, sgemm_gflops=math.inf, small_sgemm_gflops=math.inf)  # it has none
    if not isinstance(row, BackendCoefficients):
        raise ValueError(
            "coefficients: expected a set, a device, BackendCoefficients, an IoFusionGate or a Calibration, "
            f"got {coefficients!r}"
        )
    if is_traced(*jax.tree.leaves(row)):
        raise ValueError("coefficients: a plan is made on the host, so they cannot be traced")
    if any(map(np.ndim, jax.tree.leaves(row))):
        raise ValueError("coefficients: expected one backend, got arrays of several")
    row.check("coefficients: ")
    return row


# --- The search ----------------------------------------------------------------------------------

#: Kernels looked at, in all, when searching for a cycle that a merge would close.
SEARCH_LIMIT = 100_000
#: The beam is as wide as this allows for the number of nodes, within its limits.
BEAM_NODES, MAX_BEAM = 1_500, 24


def cheapest_partition(graph: KernelGraph, cost: LinearCost) -> Partition:
    """Return the cheapest partition found, its kernels in an order that can run; the chains are among those tried."""
    if not graph.members:
        return []
    width, by_cost = max(1, min(MAX_BEAM, BEAM_NODES // len(graph.members))), functools.partial(cost.of, graph)
    found = [*_beam(graph, cost, width), greedy_partition(graph)]
    candidates = sorted(filter(None, map(graph.in_order, found)), key=by_cost)
    better = [_merged(graph, partition) for partition in candidates[:width]]
    return min([*better, *candidates, graph.in_order([i] for i in graph.members)], key=by_cost)


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

    def __init__(self, graph: KernelGraph):
        self.graph = graph
        self.waiting = [len(others) for others in graph.producers]
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
        for j in self.graph.consumers[i]:
            self.waiting[j] -= 1
        return [j for j in self.graph.consumers[i] if not self.waiting[j]]


def _beam(graph: KernelGraph, cost: LinearCost, width: int) -> list[Partition]:
    """Return partitions of graphs that run kernel by kernel: a beam over which shape comes next."""
    frequency = Counter(graph.loops[i] for i in graph.members)
    alone_ns = {i: cost.of(graph, [[i]]) for i in graph.members}
    states, finished = [_Run(graph)], []
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
    """Return kernels of which no two that share an edge, an operand or a shape may be one, in an order that can run."""
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
