"""The reference's plan: chains of elementwise nodes of one shape, in the order of their first nodes."""

from rlxjax.graph._ops import OPS

from ._kernel_graph import KernelGraph, Partition


def greedy_partition(graph: KernelGraph) -> Partition:
    """Return chains, in order of creation (SPEC, section 8).

    A chain grows while its last node has exactly one consumer entry (one that reads it twice counts as
    two), which is elementwise, of the first node's shape and in no chain yet. The kernels need not be in
    an order that can run.
    """
    consumers: list[list[int]] = [[] for _ in graph.members]
    position = {node.id: i for i, node in enumerate(graph.members)}
    for i, node in enumerate(graph.members):
        for id_ in node.inputs:
            if id_ in position:
                consumers[position[id_]].append(i)
    visited = [False] * len(graph.members)
    partition: Partition = []
    for start, first in enumerate(graph.members):
        if visited[start]:
            continue
        chain = [start]
        visited[start] = True
        while OPS[first.op].elementwise and len(consumers[chain[-1]]) == 1:
            (following,) = consumers[chain[-1]]
            node = graph.members[following]
            if visited[following] or not OPS[node.op].elementwise or node.shape != first.shape:
                break
            chain.append(following)
            visited[following] = True
        partition.append(chain)
    return partition
