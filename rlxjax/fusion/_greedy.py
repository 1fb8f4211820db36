"""The reference's plan: chains of elementwise nodes of one shape, in the order of their first nodes."""

from rlxjax.graph._ops import OPS

from ._kernel_graph import KernelGraph, Partition


def greedy_partition(graph: KernelGraph) -> Partition:
    """Return chains, in order of creation.

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
