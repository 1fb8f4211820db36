"""Local improvement of a partition: move single nodes, merge whole kernels, while that saves time."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from ._kernel_graph import ALONE, ONE_ELEMENT, KernelGraph, Partition
from ._linear_cost import LinearCost

MAX_ROUNDS = 4
#: Kernels looked at, in all, when searching for a cycle that a merge would close.
SEARCH_LIMIT = 100_000
#: How far from what a node reads, and from what reads it, kernels are looked at for a move.
NEAR = 16


def improved(graph: KernelGraph, cost: LinearCost, partition: Partition) -> Partition:
    """Return a partition that is no dearer, its kernels in an order that can run."""
    for _ in range(MAX_ROUNDS):
        merged = _merge(graph, partition)
        moved = _move(graph, cost, merged)
        if moved == partition:
            break
        partition = moved
    return partition


def _merge(graph: KernelGraph, partition: Partition) -> Partition:
    """Merge kernels that an edge or a shared operand joins where that closes no cycle."""
    groups = list(partition)
    owner = {i: number for number, group in enumerate(partition) for i in group}
    after = [{owner[j] for i in group for j in graph.consumers[i]} - {number} for number, group in enumerate(partition)]
    into = list(range(len(groups)))

    def current(number: int) -> int:
        while into[number] != number:
            into[number] = into[into[number]]
            number = into[number]
        return number

    visits = 0

    def leads_to(start: int, end: int) -> bool:
        """Whether a way through other kernels leads from one kernel to another."""
        nonlocal visits
        seen, stack = {start}, [start]
        while stack:
            number = stack.pop()
            for raw in after[number]:
                other = current(raw)
                if other == end and number != start:
                    return True
                if other not in seen and other != end:
                    seen.add(other)
                    stack.append(other)
                    visits += 1
        return False

    loops = [set(_shapes(graph, group)) for group in partition]
    for (first, second), is_link in _joined_pairs(graph, owner).items():
        a, b = current(first), current(second)
        if a == b or visits > SEARCH_LIMIT or ALONE in (loops[a] | loops[b]):
            continue
        if loops[a] and loops[b] and not (loops[a] & loops[b]) and not is_link:
            continue
        if leads_to(a, b) or leads_to(b, a):
            continue
        groups[a], groups[b] = groups[a] + groups[b], []
        loops[a] |= loops[b]
        into[b] = a
        after[a] = {current(number) for number in after[a] | after[b]} - {a}
    ordered = graph.in_order(group for group in groups if group)
    assert ordered is not None
    return ordered


def _joined_pairs(graph: KernelGraph, owner: dict[int, int]) -> dict[tuple[int, int], bool]:
    """Return pairs of kernels joined by an edge, by an operand or by the shape they loop over.

    The value says whether a broadcast in the one follows a reduction in the other.
    """
    pairs: dict[tuple[int, int], bool] = {}
    for j, producers in enumerate(graph.producers):
        for i in producers:
            pair = owner[i], owner[j]
            pairs[pair] = pairs.get(pair, False) or j in graph.links[i]
    last_reader: dict[int, int] = {}
    last_of_loop: dict[int, int] = {}
    for i, ids in enumerate(graph.reads):
        for id_ in ids:
            if id_ in last_reader:
                pairs.setdefault((owner[last_reader[id_]], owner[i]), False)
            last_reader[id_] = i
    for i, loop in enumerate(graph.loops):
        if loop in last_of_loop:
            pairs.setdefault((owner[last_of_loop[loop]], owner[i]), False)
        last_of_loop[loop] = i
    return {pair: is_link for pair, is_link in pairs.items() if pair[0] != pair[1]}


def _move(graph: KernelGraph, cost: LinearCost, partition: Partition) -> Partition:
    """Move single nodes to another kernel between those they read from and those that read them."""
    state = _Placed(graph, cost, partition)
    for i, loop in enumerate(graph.loops):
        if loop == ALONE:
            continue
        best_ns, best = state.least_gain_ns, None
        for target in state.targets(i):
            if (gain_ns := state.gain_ns(i, target)) > best_ns:
                best_ns, best = gain_ns, target
        if best is not None:
            state.move(i, best)
    ordered = graph.in_order(list(group) for group in state.groups if group)
    assert ordered is not None
    return ordered


class _Placed:
    """Nodes placed in kernels, with the counts from which the gain of a move follows at once."""

    def __init__(self, graph: KernelGraph, cost: LinearCost, partition: Partition):
        self.graph, self.cost = graph, cost
        self.groups = [set(group) for group in partition]
        self.owner = {i: number for number, group in enumerate(partition) for i in group}
        self.position = {node.id: i for i, node in enumerate(graph.members)}
        #: Per kernel, how many of its nodes read a value, inner values included.
        self.readers = [Counter(id_ for i in group for id_ in graph.reads[i]) for group in partition]
        #: Per kernel, how many of its nodes loop over a shape; those of one element ride along in any.
        self.loops = [_shapes(graph, group) for group in partition]
        #: The kernels that loop over a shape; under `ONE_ELEMENT` those that loop over none.
        self.with_loop: defaultdict[int, set[int]] = defaultdict(set)
        for number in range(len(partition)):
            self._note_loops(number)
        total = cost.of(graph, partition)
        self.least_gain_ns = 1e-9 * total

    def targets(self, i: int) -> list[int]:
        """Return the kernels that a node may move to: near ones, as far as order and shapes go.

        A node that joins two shapes stays.
        """
        graph, owner, loop = self.graph, self.owner, self.graph.loops[i]
        linked = {owner[j] for j in graph.links[i]}
        if owner[i] in linked and len(self.loops[owner[i]]) > 1:
            return []
        low = max((owner[j] for j in graph.producers[i]), default=0)
        high = min((owner[j] for j in graph.consumers[i]), default=len(self.groups) - 1)
        near = {*range(low, min(high, low + NEAR) + 1), *range(max(low, high - NEAR), high + 1)}
        if loop == ONE_ELEMENT:
            fitting = near - self.with_loop[ALONE]
        else:
            fitting = near & (self.with_loop[loop] | self.with_loop[ONE_ELEMENT] | linked)
        return sorted(number for number in fitting - {owner[i]} if self.groups[number])

    def gain_ns(self, i: int, target: int) -> float:
        """Return what a move saves."""
        graph, source = self.graph, self.owner[i]
        sizes, mine = graph.sizes, graph.members[i].id
        saved = 0
        for id_ in graph.reads[i]:
            producer = self.position.get(id_)
            home = None if producer is None else self.owner[producer]
            if home != source and self.readers[source][id_] == 1:
                saved += sizes[id_]
            if home != target and not self.readers[target][id_]:
                saved -= sizes[id_]
            if producer is not None and not graph.is_needed[producer]:
                outside = len(graph.consumers[producer]) - self.readers[home][id_]  # pyright: ignore
                if home == source and outside == 0:
                    saved -= sizes[id_]
                if home == target and outside == 1:
                    saved += sizes[id_]
        readers_here, readers_there = self.readers[source][mine], self.readers[target][mine]
        saved += sizes[mine] * ((readers_there > 0) - (readers_here > 0))
        if not graph.is_needed[i]:
            count = len(graph.consumers[i])
            saved += sizes[mine] * ((count > readers_here) - (count > readers_there))
        return self.cost.byte_ns * saved + self.cost.launch_ns * (len(self.groups[source]) == 1)

    def move(self, i: int, target: int) -> None:
        """Move a node."""
        source = self.owner[i]
        self.groups[source].remove(i)
        self.groups[target].add(i)
        self.owner[i] = target
        for number, step in ((source, -1), (target, 1)):
            for id_ in self.graph.reads[i]:
                self.readers[number][id_] += step
        for number in (source, target):
            for loop in self.loops[number] or (ONE_ELEMENT,):
                self.with_loop[loop].discard(number)
        self.loops[source] -= _shapes(self.graph, [i])
        self.loops[target] += _shapes(self.graph, [i])
        self._note_loops(source)
        self._note_loops(target)

    def _note_loops(self, number: int) -> None:
        for loop in self.loops[number] or (ONE_ELEMENT,):
            self.with_loop[loop].add(number)


def _shapes(graph: KernelGraph, group: Iterable[int]) -> Counter[int]:
    return Counter(graph.loops[i] for i in group if graph.loops[i] != ONE_ELEMENT)
