"""Local improvement of a partition: move single nodes, merge whole kernels, while that saves time."""

from collections import Counter, defaultdict

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
    after = graph.readers(partition)
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

    loops = [{graph.loops[i] for i in group} - {ONE_ELEMENT} for group in partition]
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
    for shared in (graph.reads, [[loop] for loop in graph.loops]):
        last: dict[int, int] = {}
        for i, keys in enumerate(shared):
            for key in keys:
                if key in last:
                    pairs.setdefault((owner[last[key]], owner[i]), False)
                last[key] = i
    return {pair: is_link for pair, is_link in pairs.items() if pair[0] != pair[1]}


def _move(graph: KernelGraph, cost: LinearCost, partition: Partition) -> Partition:
    """Move single nodes to another kernel between those they read from and those that read them."""
    placed = _Placed(graph, partition)
    least_gain_ns = 1e-9 * cost.of(graph, partition)
    for i in range(len(graph.members)):
        home = best = placed.owner[i]
        best_ns, bytes_at_home = least_gain_ns, placed.bytes_around(i)
        launch_ns = cost.launch_ns * (len(placed.groups[home]) == 1)
        for target in placed.targets(i):
            placed.move(i, target)
            gain_ns = cost.byte_ns * (bytes_at_home - placed.bytes_around(i)) + launch_ns
            if gain_ns > best_ns:
                best_ns, best = gain_ns, target
        placed.move(i, best)
    ordered = graph.in_order(group for group in placed.groups if group)
    assert ordered is not None
    return ordered


class _Placed:
    """Nodes placed in kernels, with the counts from which the bytes of a value follow at once."""

    def __init__(self, graph: KernelGraph, partition: Partition):
        self.graph = graph
        self.owner = {i: number for number, group in enumerate(partition) for i in group}
        self.groups: list[set[int]] = [set() for _ in partition]
        #: Per kernel, how many of its nodes loop over a shape; those of one element ride along in any.
        self.loops: list[Counter[int]] = [Counter() for _ in partition]
        #: Per value, how many nodes of each kernel that reads it do.
        self.readers: dict[int, Counter[int]] = defaultdict(Counter)
        for i in self.owner:
            self._count(i, 1)

    def move(self, i: int, target: int) -> None:
        """Move a node to another kernel."""
        self._count(i, -1)
        self.owner[i] = target
        self._count(i, 1)

    def targets(self, i: int) -> list[int]:
        """Return the kernels that a node may move to: near ones, as far as order and shapes go.

        A node that joins two shapes stays.
        """
        graph, owner, loop = self.graph, self.owner, self.graph.loops[i]
        linked = {owner[j] for j in graph.links[i]}
        if loop == ALONE or (owner[i] in linked and len(self.loops[owner[i]]) > 1):
            return []
        low = max((owner[j] for j in graph.producers[i]), default=0)
        high = min((owner[j] for j in graph.consumers[i]), default=len(self.groups) - 1)
        near = {*range(low, min(high, low + NEAR) + 1), *range(max(low, high - NEAR), high + 1)} - {owner[i]}
        return sorted(number for number in near if self.groups[number] and self._fits(loop, number, linked))

    def _fits(self, loop: int, number: int, linked: set[int]) -> bool:
        loops = self.loops[number]
        if loop == ONE_ELEMENT:
            return ALONE not in loops
        return not loops or loop in loops or number in linked

    def bytes_around(self, i: int) -> int:
        """Return the bytes that all kernels move of what a node reads, and of its own value."""
        graph, total = self.graph, 0
        for id_ in (*graph.reads[i], graph.members[i].id):
            count, producer = len(self.readers[id_]), graph.position.get(id_)
            if producer is not None:
                count -= self.owner[producer] in self.readers[id_]
                count += count > 0 or graph.is_needed[producer]
            total += count * graph.sizes[id_]
        return total

    def _count(self, i: int, step: int) -> None:
        graph, number = self.graph, self.owner[i]
        (self.groups[number].add if step > 0 else self.groups[number].remove)(i)
        counters = [(self.readers[id_], number) for id_ in graph.reads[i]]
        if graph.loops[i] != ONE_ELEMENT:
            counters.append((self.loops[number], graph.loops[i]))
        for counter, key in counters:
            counter[key] += step
            if not counter[key]:
                del counter[key]
