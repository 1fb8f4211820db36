"""Partitions of a graph into kernels: which nodes may share a kernel, the cost of a partition, and the search."""

import copy
import functools
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import jax
import numpy as np

from rlxjax._checks import is_traced
from rlxjax.gate import BackendCoefficients, IoFusionGate, backend_coefficients, jax_device
from rlxjax.graph import OPS, Graph

#: Ops whose values are given, so that they need no kernel.
GIVEN_OPS = ("input", "param", "constant")
#: The loop number of a node that shares no kernel, and the loop number of nodes of one element.
ALONE, ONE_ELEMENT = -1, 0

Partition = list[list[int]]


class KernelGraph:
    """The reads between the nodes of a graph. Each list is by node id and includes given nodes."""

    def __init__(self, graph: Graph):
        self.nodes = nodes = graph.nodes
        #: Ids of the nodes that run, in topological order; and by node, all nodes that it reads and those that run.
        self.members = [node.id for node in nodes if node.op not in GIVEN_OPS]
        self.reads = [tuple(dict.fromkeys(node.inputs)) if node.op not in GIVEN_OPS else () for node in nodes]
        self.producers = [[i for i in ids if nodes[i].op not in GIVEN_OPS] for ids in self.reads]
        #: The number of the shape that each node loops over, `ONE_ELEMENT` or `ALONE`; and the shapes by number.
        numbers: dict[tuple[int | None, ...], int] = {(1,): ONE_ELEMENT}
        self.loops = [ALONE] * len(nodes)
        #: Ids of the nodes that read each node.
        self.consumers: list[list[int]] = [[] for _ in nodes]
        #: Broadcasts after each reduction, and the reduction before each broadcast, if their loops differ.
        self.links: list[list[int]] = [[] for _ in nodes]
        for i in self.members:
            node, rule = nodes[i], OPS[nodes[i].op]
            if rule.fusable:
                looped = nodes[node.inputs[0]] if rule.reduction and node.inputs else node
                is_one = looped.elements == 1
                self.loops[i] = ONE_ELEMENT if is_one else numbers.setdefault(looped.shape, len(numbers))
            for producer in self.producers[i]:
                self.consumers[producer].append(i)
                follows = node.op == "broadcast" and OPS[nodes[producer].op].reduction
                if follows and ONE_ELEMENT not in (self.loops[i], self.loops[producer]):
                    self.links[producer].append(i)
                    self.links[i].append(producer)
        self.loop_shapes = list(numbers)
        #: Whether the value always leaves its kernel: it is an output of the graph, or no node reads it.
        outputs = set(graph.outputs)
        self.is_needed = [node.id in outputs or not self.consumers[node.id] for node in nodes]
        self.is_view = [OPS[node.op].metadata for node in nodes]
        self.sizes = [node.bytes for node in nodes]

    def may_be_one(self, one: Sequence[int], other: Sequence[int]) -> bool:
        """Whether two kernels may be fused if no cycle arises: they loop over the same shape, or links join them."""
        first, second = ({self.loops[i] for i in group} - {ONE_ELEMENT} for group in (one, other))
        if ALONE in first | second:
            return False
        inside = set(other)
        is_linked = any(not inside.isdisjoint(self.links[i]) for i in one)
        return not first or not second or bool(first & second) or is_linked

    def exports(self, group: Sequence[int]) -> list[int]:
        inside = set(group)
        return [i for i in group if self.is_needed[i] or any(j not in inside for j in self.consumers[i])]

    def external_reads(self, group: Sequence[int]) -> list[int]:
        inside = set(group)
        return list(dict.fromkeys(id_ for i in group for id_ in self.reads[i] if id_ not in inside))

    def work(self, group: Sequence[int]) -> tuple[int, int]:
        """Return the launches of a kernel and the bytes that it reads and writes; zeros if all nodes are views."""
        if all(self.is_view[i] for i in group):
            return 0, 0
        return 1, sum(self.sizes[i] for i in (*self.external_reads(group), *self.exports(group)))

    def owners(self, partition: Partition) -> tuple[dict[int, int], list[set[int]]]:
        """Return the kernel number of each node, and the numbers of the kernels that read from each kernel."""
        owner = {i: number for number, group in enumerate(partition) for i in group}
        readers = [{owner[j] for i in group for j in self.consumers[i]} for group in partition]
        return owner, [others - {number} for number, others in enumerate(readers)]

    def in_order(self, partition: Iterable[Iterable[int]]) -> Partition:
        """Return the kernels in an order that can run; an empty list if they form a cycle."""
        groups = sorted(sorted(group) for group in partition)
        sorter = TopologicalSorter(dict.fromkeys(range(len(groups)), ()))
        for number, others in enumerate(self.owners(groups)[1]):
            for other in others:
                sorter.add(other, number)
        try:
            return [groups[number] for number in sorter.static_order()]
        except CycleError:
            return []


def kernels_after(readers: Sequence[set[int]], start: int, end: int) -> Iterator[int]:
    """Yield the kernels that depend on kernel `start` through paths that avoid kernel `end`."""
    seen, stack = {start, end}, [start]
    while stack:
        number = stack.pop()
        if number != start:
            yield number
        fresh = readers[number] - seen
        seen |= fresh
        stack.extend(fresh)


class LinearCost(NamedTuple):
    """The cost in ns of a launch and of a byte of memory traffic."""

    launch_ns: float
    byte_ns: float

    @classmethod
    def of_row(cls, row: BackendCoefficients) -> "LinearCost":
        """Return the costs that a launch and a byte of memory traffic add to `io_cost_ns` on a backend."""
        byte_ns = 1.0 / max(float(row.memory_bw), 1.0)
        if not float(row.unified_memory) >= 0.5:
            byte_ns += 0.25 / max(float(row.readback_bw), 1.0)
        return cls(float(row.dispatch_ns), byte_ns)

    def of(self, graph: KernelGraph, partition: Partition) -> float:
        works = map(graph.work, partition)
        return sum(self.launch_ns * launches + self.byte_ns * moved_bytes for launches, moved_bytes in works)


def backend_row(coefficients: Any) -> BackendCoefficients:
    """Return the backend of a name, a row, a gate or a calibration; refuse anything else."""
    if isinstance(coefficients, str):
        if coefficients.strip().lower() in ("arch", "portable"):
            return backend_coefficients(jax_device(), coefficients)
        return backend_coefficients(coefficients)
    row = getattr(coefficients, "gate", coefficients)
    if isinstance(row, IoFusionGate):
        rates = (row.dispatch_ns, row.roundtrip_ns, row.memory_bw, row.host_readback_bw, row.unified_memory)
        row = BackendCoefficients(*rates, sgemm_gflops=math.inf, small_sgemm_gflops=math.inf)  # a gate has none
    if not isinstance(row, BackendCoefficients):
        wanted = "a set, a device, BackendCoefficients, an IoFusionGate or a Calibration"
        raise ValueError(f"coefficients: expected {wanted}, got {coefficients!r}")
    if is_traced(*jax.tree.leaves(row)):
        raise ValueError("coefficients: expected numbers, got traced values; plan outside the traced function")
    if any(map(np.ndim, jax.tree.leaves(row))):
        raise ValueError("coefficients: expected a single backend, got arrays of several")
    row.check("coefficients: ")
    return row


# --- The search ----------------------------------------------------------------------------------

#: The most kernels that all searches for cycles visit in total.
SEARCH_LIMIT = 100_000
#: The product of beam width and count of nodes, and the widest beam.
BEAM_NODES, MAX_BEAM = 1_500, 24


def cheapest_partition(graph: KernelGraph, cost: LinearCost) -> Partition:
    """Return the cheapest partition found, in an order that can run; the reference's chains are a candidate."""
    if not graph.members:
        return []
    width, by_cost = max(1, min(MAX_BEAM, BEAM_NODES // len(graph.members))), functools.partial(cost.of, graph)
    found = [*_beam(graph, cost, width), greedy_partition(graph)]
    candidates = sorted(filter(None, map(graph.in_order, found)), key=by_cost)
    better = [_merged(graph, partition) for partition in candidates[:width]]
    return min([*better, *candidates, graph.in_order([i] for i in graph.members)], key=by_cost)


def greedy_partition(graph: KernelGraph) -> Partition:
    """Return the reference's chains of elementwise nodes of one shape, whose order may not be executable."""
    visited: set[int] = set()
    partition: Partition = []
    for start in graph.members:
        if start in visited:
            continue
        first, chain = graph.nodes[start], [start]
        while OPS[first.op].elementwise and len(graph.consumers[chain[-1]]) == 1:
            node = graph.nodes[graph.consumers[chain[-1]][0]]
            reads_once = node.inputs.count(chain[-1]) == 1  # a node that reads twice counts as two consumers
            if node.id in visited or not (reads_once and OPS[node.op].elementwise and node.shape == first.shape):
                break
            chain.append(node.id)
        visited.update(chain)
        partition.append(chain)
    return partition


class _Run:
    """The state after some kernels of a graph have run: these kernels, and the nodes that can run next, by loop."""

    def __init__(self, graph: KernelGraph, cost: LinearCost):
        self.graph, self.price = graph, functools.partial(cost.of, graph)
        self.alone_ns = {i: self.price([[i]]) for i in graph.members}
        self.waiting = [len(others) for others in graph.producers]
        self.ready: dict[int, list[int]] = {}
        self.groups: Partition = []
        self.done, self.saved_ns = 0, 0.0
        for i in graph.members:
            if not self.waiting[i]:
                self.ready.setdefault(graph.loops[i], []).append(i)
        self._run_alone()

    def then(self, loop: int) -> "_Run":
        """Return the state after one more kernel, which has all nodes that can run in this loop."""
        graph, other = self.graph, copy.copy(self)
        other.waiting, other.groups = self.waiting.copy(), self.groups.copy()
        other.ready = ready = {each: nodes.copy() for each, nodes in self.ready.items()}
        loops, group = {loop, ONE_ELEMENT}, []
        stack = ready.pop(loop)
        stack += ready.pop(ONE_ELEMENT, ())
        while stack:
            i = stack.pop()
            group.append(i)
            for j in other._run(i):
                its_loop = graph.loops[j]
                if its_loop in loops:
                    stack.append(j)
                elif j in graph.links[i]:
                    loops.add(its_loop)
                    stack += [j, *ready.pop(its_loop, ())]
                else:
                    ready.setdefault(its_loop, []).append(j)
        other.groups.append(group)
        other.saved_ns += sum(self.alone_ns[i] for i in group) - self.price([group])
        other._run_alone()
        return other

    def _run_alone(self) -> None:
        while self.ready.get(ALONE):
            i = self.ready[ALONE].pop()
            self.groups.append([i])
            for j in self._run(i):
                self.ready.setdefault(self.graph.loops[j], []).append(j)

    def _run(self, i: int) -> list[int]:
        """Run a node; return the nodes that waited only for this node."""
        self.done |= 1 << i
        for j in self.graph.consumers[i]:
            self.waiting[j] -= 1
        return [j for j in self.graph.consumers[i] if not self.waiting[j]]


def _beam(graph: KernelGraph, cost: LinearCost, width: int) -> list[Partition]:
    """Return the partitions that a beam search finds; each step chooses the loop of the next kernel."""
    frequency = Counter(graph.loops[i] for i in graph.members)
    states, finished = [_Run(graph, cost)], []
    while states:
        following: dict[int, _Run] = {}
        for state in states:
            loops = [loop for loop, nodes in state.ready.items() if nodes]
            if not loops:
                finished.append(state.groups)
            shaped = [loop for loop in loops if loop != ONE_ELEMENT] or loops
            for loop in heapq.nlargest(width, shaped, key=frequency.__getitem__):
                child = state.then(loop)
                known = following.get(child.done)
                if known is None or child.saved_ns > known.saved_ns:
                    following[child.done] = child
        states = heapq.nlargest(width, following.values(), key=lambda state: state.saved_ns)
    return finished


def _merged(graph: KernelGraph, partition: Partition) -> Partition:
    """Fuse kernels that share an edge, an operand or a shape until no two can be fused; return them in order."""
    groups = [list(group) for group in partition]
    owner, readers = graph.owners(groups)
    visits = 0

    def leads_to(start: int, end: int) -> bool:
        """Whether a path through other kernels leads from one kernel to another."""
        nonlocal visits
        for number in kernels_after(readers, start, end):
            visits += 1
            if end in readers[number]:
                return True
        return False

    # Pairs joined by an edge, and successive nodes that read the same value or loop over the same shape.
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
        readers[a], readers[b] = readers[a] | readers[b], set()
        for others in readers:
            if b in others:
                others.remove(b)
                others.add(a)
        readers[a].discard(a)
    return graph.in_order(group for group in groups if group)
