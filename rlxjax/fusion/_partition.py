"""Partitions of a graph into kernels: which nodes may share a kernel, what a partition costs, and the search."""

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

#: Ops whose values the caller gives. A node with such an op is a given node and needs no kernel.
GIVEN_OPS = ("input", "param", "constant")
#: Special loop numbers: for a node that never shares a kernel, and for a node that loops over a single element.
ALONE, ONE_ELEMENT = -1, 0

Partition = list[list[int]]


class KernelGraph:
    """The nodes of a graph, and which node reads which. Most lists have an entry for each node, by node id."""

    def __init__(self, graph: Graph):
        self.nodes = nodes = graph.nodes
        #: Ids of all nodes but given nodes; for each node, ids of the nodes it reads, with and without given nodes.
        self.members = [node.id for node in nodes if node.op not in GIVEN_OPS]
        self.reads = [tuple(dict.fromkeys(node.inputs)) if node.op not in GIVEN_OPS else () for node in nodes]
        self.producers = [[i for i in ids if nodes[i].op not in GIVEN_OPS] for ids in self.reads]
        #: `numbers`: a number for each shape. `loops`: for each node, the number of the shape of its loop, or `ALONE`.
        numbers: dict[tuple[int | None, ...], int] = {(1,): ONE_ELEMENT}
        self.loops = [ALONE] * len(nodes)
        #: Ids of the nodes that read each node.
        self.consumers: list[list[int]] = [[] for _ in nodes]
        #: For a reduction, ids of the broadcasts that read it; for these broadcasts, the id of the reduction.
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
        #: Whether the value of each node must leave its kernel, because it is an output or because no node reads it.
        outputs = set(graph.outputs)
        self.is_needed = [node.id in outputs or not self.consumers[node.id] for node in nodes]
        self.is_view = [OPS[node.op].metadata for node in nodes]
        self.sizes = [node.bytes for node in nodes]

    def may_be_one(self, one: Sequence[int], other: Sequence[int]) -> bool:
        """Return whether two kernels loop over the same shape or are linked, so that only a cycle prevents fusion."""
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
        """Return a kernel's number of launches, and the bytes that it reads and writes: zeros if it has only views."""
        if all(self.is_view[i] for i in group):
            return 0, 0
        return 1, sum(self.sizes[i] for i in (*self.external_reads(group), *self.exports(group)))

    def owners(self, partition: Partition) -> tuple[dict[int, int], list[set[int]]]:
        """Return the kernel number of each node, and for each kernel the numbers of the kernels that read from it."""
        owner = {i: number for number, group in enumerate(partition) for i in group}
        readers = [{owner[j] for i in group for j in self.consumers[i]} for group in partition]
        return owner, [others - {number} for number, others in enumerate(readers)]

    def in_order(self, partition: Iterable[Iterable[int]]) -> Partition:
        """Return the kernels in an order in which they can run, or an empty list if their dependences form a cycle."""
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
        """Return the cost of a launch and of a byte of memory traffic, as in `io_cost_ns`, for a backend."""
        byte_ns = 1.0 / max(float(row.memory_bw), 1.0)
        if not float(row.unified_memory) >= 0.5:
            byte_ns += 0.25 / max(float(row.readback_bw), 1.0)
        return cls(float(row.dispatch_ns), byte_ns)

    def of(self, graph: KernelGraph, partition: Partition) -> float:
        works = map(graph.work, partition)
        return sum(self.launch_ns * launches + self.byte_ns * moved_bytes for launches, moved_bytes in works)


def backend_row(coefficients: Any) -> BackendCoefficients:
    """Return the coefficients of the backend that a name, a gate or a calibration stands for; refuse anything else."""
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

#: The maximum number of kernels that all searches for cycles visit together.
SEARCH_LIMIT = 100_000
#: The width of the beam search: `BEAM_NODES` divided by the number of nodes, but at most `MAX_BEAM`.
BEAM_NODES, MAX_BEAM = 1_500, 24


def cheapest_partition(graph: KernelGraph, cost: LinearCost) -> Partition:
    """Return the cheapest partition that can run: from the search, from the reference, or with a kernel per node."""
    if not graph.members:
        return []
    width, by_cost = max(1, min(MAX_BEAM, BEAM_NODES // len(graph.members))), functools.partial(cost.of, graph)
    found = [*_beam(graph, cost, width), greedy_partition(graph)]
    candidates = sorted(filter(None, map(graph.in_order, found)), key=by_cost)
    better = [_merged(graph, partition) for partition in candidates[:width]]
    return min([*better, *candidates, graph.in_order([i] for i in graph.members)], key=by_cost)


def greedy_partition(graph: KernelGraph) -> Partition:
    """Return the reference's partition: chains of elementwise nodes of the same shape. Its order may be impossible."""
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
    """The state of a graph after some of its kernels: the kernels so far, and the nodes that can run next, by loop."""

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
        """Return the state after one more kernel, which consists of all nodes that can run in the given loop."""
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
        """Mark a node as run, and return the nodes that become ready because they waited only for this node."""
        self.done |= 1 << i
        for j in self.graph.consumers[i]:
            self.waiting[j] -= 1
        return [j for j in self.graph.consumers[i] if not self.waiting[j]]


def _beam(graph: KernelGraph, cost: LinearCost, width: int) -> list[Partition]:
    """Return the partitions that a beam search finds. Each step of the search chooses the loop of the next kernel."""
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
    """Fuse pairs of kernels that share an edge, an operand or a shape. Return the kernels in an order that can run."""
    groups = [list(group) for group in partition]
    owner, readers = graph.owners(groups)
    visits = 0

    def leads_to(start: int, end: int) -> bool:
        """Return whether a path through at least one other kernel leads from kernel `start` to kernel `end`."""
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
