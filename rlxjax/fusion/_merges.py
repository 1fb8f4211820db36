"""Local improvement of a partition: whole kernels become one, which never costs, where that closes no cycle."""

from ._kernel_graph import KernelGraph, Partition, kernels_after

#: Kernels looked at, in all, when searching for a cycle that a merge would close.
SEARCH_LIMIT = 100_000


def merged(graph: KernelGraph, partition: Partition) -> Partition:
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

    for i, j in _joined_pairs(graph):
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
    ordered = graph.in_order(group for group in groups if group)
    assert ordered is not None
    return ordered


def _joined_pairs(graph: KernelGraph) -> list[tuple[int, int]]:
    """Return pairs of nodes joined by an edge, and neighbours of those that read a value or loop over a shape."""
    pairs = [(i, j) for j in graph.members for i in graph.producers[j]]
    for shared in (graph.reads, [[loop] for loop in graph.loops]):
        last: dict[int, int] = {}
        for i in graph.members:
            pairs += [(last[key], i) for key in shared[i] if key in last]
            last.update(dict.fromkeys(shared[i], i))
    return pairs
