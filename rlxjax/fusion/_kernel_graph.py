"""What planning reads of a graph: its kernel nodes, who reads whom, and what may share a kernel."""

from collections.abc import Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter

from rlxjax.graph._graph import Graph, Node
from rlxjax.graph._ops import OPS

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
