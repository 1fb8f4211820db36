"""An independent model of fusion, from nodes and a row alone: what is legal, what it costs, the best."""

from graphlib import CycleError, TopologicalSorter

from _random_graphs import BINARY, GIVEN, MEMORY, REDUCE, UNARY

import rlxjax as rx

INFINITY = float("inf")
#: What plans are made by in tests, by name.
COEFFICIENTS = {
    **{device: device for device in ("cuda", "cpu", "metal", "wgpu")},
    "free launches": rx.IoFusionGate(dispatch_ns=0.0, memory_bw=10.0, host_readback_bw=5.0),
    "free bytes": rx.IoFusionGate(dispatch_ns=1e3, memory_bw=INFINITY, host_readback_bw=INFINITY),
}

SHARES = {*UNARY, "cast", *BINARY, *REDUCE, *MEMORY, "broadcast"}
VIEWS = {"reshape", "transpose", "narrow"}


def running(graph):
    """Return the ids of the nodes that are kernels."""
    return [node.id for node in graph.nodes if node.op not in GIVEN]


def loop_shape(graph, id_):
    """Return the shape that a node loops over, or None for one element."""
    node = graph.nodes[id_]
    shape = graph.nodes[node.inputs[0]].shape if node.op in REDUCE else node.shape
    return None if all(dim == 1 for dim in shape) else shape


def is_legal(graph, ids):
    """Whether nodes may share a kernel, but for the order of kernels.

    One node may always; several only if every op shares, and the shapes they loop over are one, or joined
    by broadcasts that read a reduction among them.
    """
    ids = set(ids)
    if len(ids) == 1:
        return True
    if any(graph.nodes[i].op not in SHARES for i in ids):
        return False
    components = [{shape} for shape in {loop_shape(graph, i) for i in ids} - {None}]
    for i in ids:
        node = graph.nodes[i]
        if node.op == "broadcast" and node.inputs[0] in ids and graph.nodes[node.inputs[0]].op in REDUCE:
            ends = {loop_shape(graph, i), loop_shape(graph, node.inputs[0])} - {None}
            touched = [component for component in components if component & ends]
            components = [component for component in components if not component & ends]
            components += [set().union(*touched)] if touched else []
    return len(components) <= 1


def reads(graph, ids):
    """Return the ids that a kernel reads from outside, once each, in order of first use."""
    return list(dict.fromkeys(x for i in sorted(ids) for x in graph.nodes[i].inputs if x not in ids))


def writes(graph, ids):
    """Return the ids of a kernel whose values leave it: outputs, read by another kernel, or by nobody."""
    consumers = {i: {node.id for node in graph.nodes if i in node.inputs} for i in ids}
    return [i for i in sorted(ids) if i in graph.outputs or not consumers[i] or consumers[i] - set(ids)]


def launches(graph, ids):
    return int(any(graph.nodes[i].op not in VIEWS for i in ids))


def traffic(graph, ids):
    """Return the bytes that a kernel moves: views move none."""
    moved = [*reads(graph, ids), *writes(graph, ids)]
    return sum(graph.nodes[i].bytes for i in moved) * launches(graph, ids)


def cost(graph, ids, row):
    """Return what the launch and the traffic of a kernel cost in ns (SPEC, section 3)."""
    readback_share = 0.0 if row.unified_memory else 0.25
    byte_ns = 1 / max(row.memory_bw, 1) + readback_share / max(row.readback_bw, 1)
    return row.dispatch_ns * launches(graph, ids) + byte_ns * traffic(graph, ids)


def is_acyclic(graph, kernels):
    """Whether the kernels can run in some order."""
    owner = {i: number for number, ids in enumerate(kernels) for i in ids}
    before = {
        number: {owner[x] for i in ids for x in graph.nodes[i].inputs if x in owner} - {number}
        for number, ids in enumerate(kernels)
    }
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return False
    return True


def best_cost(graph, row):
    """Return the least cost of all partitions into legal kernels that can run in some order."""
    members = running(graph)
    by_lowest = [[] for _ in members]  # legal sets of nodes with their prices, by their first node, the cheapest first
    for mask in range(1, 1 << len(members)):
        ids = [i for bit, i in enumerate(members) if mask >> bit & 1]
        if is_legal(graph, ids):
            by_lowest[members.index(ids[0])].append((cost(graph, ids, row), mask, ids))
    best = sum(cost(graph, [i], row) for i in members)

    def walk(free, spent, kernels):
        nonlocal best
        if not free:
            if is_acyclic(graph, kernels):
                best = spent
            return
        for ns, mask, ids in sorted(by_lowest[(free & -free).bit_length() - 1]):
            if mask & free == mask and spent + ns < best:
                walk(free ^ mask, spent + ns, [*kernels, ids])

    walk((1 << len(members)) - 1, 0.0, [])
    return best
