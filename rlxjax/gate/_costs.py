"""Io cost and graph cost: what a profile, or a graph, takes on a backend in nanoseconds."""

import dataclasses

import jax
import jax.numpy as jnp

from rlxjax._checks import check_at_least, check_shapes, fields_of
from rlxjax._counts import as_float, as_temperature
from rlxjax._numerics import Choices, dot
from rlxjax._typing import Count, Nanoseconds, RealLike
from rlxjax.graph._graph import Graph, Node
from rlxjax.graph._profile import GraphIoProfile, profile_graph_io

from ._devices import BACKEND_ROWS, FALLBACK_ROW, SMALL_SGEMM, BackendCoefficients, without_provenance

#: Bytes that the cost of a plain node counts per output element, whatever its dtype.
_COSTED_ELEMENT_BYTES = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GraphWork:
    """All that the cost of a graph depends on, besides the row; every field `[*batch]`.

    Attributes:
        io: the graph's profile.
        readback_bytes: `io.host_readback_bytes` of discrete memory.
        output_bytes: 4 bytes for each output element of the plain nodes, views included.
        costed_nodes: nodes that are neither input, param nor constant.
        dispatched_nodes: nodes that are neither input nor param.
        sgemm_flop: of matrix products and attention.
        small_sgemm_flop: of matrix products with fewer than 32768 multiply-adds.
    """

    io: GraphIoProfile
    readback_bytes: Count
    output_bytes: Count
    costed_nodes: Count
    dispatched_nodes: Count
    sgemm_flop: Count = 0
    small_sgemm_flop: Count = 0


def graph_work(graph: Graph) -> GraphWork:
    """Count what the cost of a graph depends on; exact, on the host."""
    profile = profile_graph_io(graph)
    output_bytes = costed = dispatched = large_flop = small_flop = 0
    for node in graph.nodes:
        dispatched += node.op not in ("input", "param")
        if node.op in ("input", "param", "constant"):
            continue
        costed += 1
        if node.op == "matmul":
            multiply_adds = _matmul_multiply_adds(graph, node)
            small_flop += 2 * multiply_adds * (multiply_adds < SMALL_SGEMM)
            large_flop += 2 * multiply_adds * (multiply_adds >= SMALL_SGEMM)
        elif node.op == "attention":
            large_flop += _attention_flop(graph, node)
        else:
            output_bytes += node.elements * _COSTED_ELEMENT_BYTES
    return GraphWork(
        profile,
        profile.host_readback_bytes(unified_memory=False),
        output_bytes,
        costed,
        dispatched,
        large_flop,
        small_flop,
    )


def io_cost_ns(profile: GraphIoProfile, row: BackendCoefficients) -> Nanoseconds:
    """Return what a profile's launches, syncs and bytes take on a backend, in ns, `[*batch]`.

    `roundtrip + launches * dispatch + sync_points * roundtrip + traffic / max(memory_bw, 1)
    + readback / max(readback_bw, 1)`.

    Args:
        profile: the counts.
        row: what each costs on the backend.

    Raises:
        ValueError: a negative or NaN count, or shapes that do not agree.

    Examples:
        >>> print(io_cost_ns(GraphIoProfile(3, 0, 128, 6272), BACKEND_ROWS["cpu"]))
        4165.6
    """
    return _cost_ns(*_io_inputs(profile, row), 0.0, None)


def soft_io_cost_ns(profile: GraphIoProfile, row: BackendCoefficients, *, temperature_ns: RealLike) -> Nanoseconds:
    """Return the smooth form of `io_cost_ns`: the floors of the bandwidths are relaxed.

    Other arguments and errors as of `io_cost_ns`; `temperature_ns` is positive, a scalar or `[*batch]`.

    Examples:
        >>> print(soft_io_cost_ns(GraphIoProfile(3, 0, 128, 6272), BACKEND_ROWS["cpu"], temperature_ns=1e-3))
        4165.6
    """
    temperature_ns = as_temperature(temperature_ns)
    return _cost_ns(*_io_inputs(profile, row, temperature_ns=temperature_ns), 0.0, temperature_ns)


def graph_cost_ns(graph: Graph, row: BackendCoefficients) -> Nanoseconds:
    """Return the cost of a graph with the coefficients of a row, in ns, `[*batch]` of the row.

    `roundtrip + sum(node costs) + traffic / max(memory_bw, 1) + readback / max(readback_bw, 1)
    + sync_points * roundtrip`.

    Args:
        graph: the graph.
        row: what its launches, syncs, bytes and FLOPs cost on the backend.

    Raises:
        ValueError: a matmul or attention node of a shape that its FLOPs do not follow from.

    Examples:
        >>> g = Graph()
        >>> x = g.input("x", (1000,), "f32")
        >>> g.set_outputs([g.add("relu", [x])])
        >>> print(graph_cost_ns(g, BACKEND_ROWS["cpu"]).round(1))
        3900.0
    """
    row.check("row.")
    return _cost_ns(float_counts(graph_work(graph)), without_provenance(row), 0.0, None)


def soft_graph_cost_ns(graph: Graph, row: BackendCoefficients, *, temperature_ns: RealLike) -> Nanoseconds:
    """Return the smooth form of `graph_cost_ns`: the floors of the bandwidths are relaxed.

    Other arguments and errors as of `graph_cost_ns`; `temperature_ns` is positive, a scalar or `[*batch]`.

    Examples:
        >>> g = Graph()
        >>> g.set_outputs([g.add("relu", [g.input("x", (1000,), "f32")])])
        >>> print(soft_graph_cost_ns(g, BACKEND_ROWS["cpu"], temperature_ns=1e-3).round(1))
        3900.0
    """
    temperature_ns = as_temperature(temperature_ns)
    row.check("row.")
    check_shapes(**fields_of(row, "row."), temperature_ns=temperature_ns)
    return _cost_ns(float_counts(graph_work(graph)), without_provenance(row), 0.0, temperature_ns)


def backend_cost_ns(work: GraphWork, row: BackendCoefficients) -> Nanoseconds:
    """Return what work takes with a row, in ns; with the row of the discrete fallback, its estimate.

    That is `io_cost_ns + dispatch * (nodes that are neither input nor param)`.
    """
    falls_back = float(row is BACKEND_ROWS[FALLBACK_ROW])
    return _cost_ns(float_counts(work), without_provenance(row), falls_back, None)


def float_counts(counts):
    """Return a pytree of counts as floats, each named in errors by its place."""
    return jax.tree_util.tree_map_with_path(
        lambda path, count: as_float(count, jax.tree_util.keystr(path).lstrip(".")), counts
    )


def work_ns(work: GraphWork, rates: list[RealLike]) -> Nanoseconds:
    """Return what float counts take at a backend's rates: launches, sync points, bytes and FLOPs."""
    host_bytes = work.io.host_output_bytes
    counts = (
        work.io.kernel_launches,
        work.io.sync_points,
        work.sgemm_flop,
        work.small_sgemm_flop,
        work.io.device_traffic_bytes + work.output_bytes,
        host_bytes,
        work.readback_bytes - host_bytes,
    )
    pairs = ((count, rate) for count, rate in zip(counts, rates, strict=True) if not is_zero(count))
    return dot(*zip(*pairs, strict=True))


def rates_of(row: BackendCoefficients, work: GraphWork, rules: Choices) -> list[RealLike]:
    """Return a backend's rates in ns, in the order of the counts of `work_ns`."""
    traffic_bytes = work.io.device_traffic_bytes + work.output_bytes
    per_byte, per_readback_byte = (
        1.0 / rules.maximum(bandwidth, 1.0, scale=count_bytes + 1.0)
        for bandwidth, count_bytes in ((row.memory_bw, traffic_bytes), (row.readback_bw, work.readback_bytes))
    )
    is_unified = jnp.asarray(row.unified_memory) >= 0.5
    return [
        row.dispatch_ns,
        row.roundtrip_ns,
        *(1.0 / (jnp.asarray(gflops) + 1.0) for gflops in (row.sgemm_gflops, row.small_sgemm_gflops)),
        per_byte,
        per_readback_byte,
        jnp.where(is_unified, 0.0, per_readback_byte),
    ]


def counted_work(work: GraphWork, falls_back: RealLike) -> GraphWork:
    """Return what the cost of a graph counts of its work, or what the estimate of the fallback does."""
    is_fallback = jnp.asarray(falls_back) >= 0.5

    def of_graph(count: RealLike) -> RealLike:
        return count if is_zero(count) else jnp.where(is_fallback, 0.0, count)

    in_fallback = work.io.kernel_launches + work.dispatched_nodes
    if not (is_zero(in_fallback) and is_zero(work.costed_nodes)):
        in_fallback = jnp.where(is_fallback, in_fallback, work.costed_nodes)
    return dataclasses.replace(
        work,
        io=dataclasses.replace(work.io, kernel_launches=in_fallback),
        output_bytes=of_graph(work.output_bytes),
        sgemm_flop=of_graph(work.sgemm_flop),
        small_sgemm_flop=of_graph(work.small_sgemm_flop),
    )


def is_zero(count: RealLike) -> bool:
    """Whether a count is zero whatever the values of the arrays."""
    return isinstance(count, (int, float)) and count == 0


def _io_inputs(profile: GraphIoProfile, row: BackendCoefficients, **others: RealLike) -> tuple:
    for name, count in fields_of(profile).items():
        check_at_least(count, name)
    row.check("row.")
    check_shapes(**fields_of(profile), **fields_of(row, "row."), **others)
    io, readback_bytes = float_counts(profile), as_float(profile.host_readback_bytes(False), "host_readback_bytes")
    return GraphWork(io, readback_bytes, 0.0, io.kernel_launches, 0.0), without_provenance(row)


@jax.jit
def _cost_ns(work: GraphWork, row: BackendCoefficients, falls_back, temperature_ns) -> Nanoseconds:
    work = counted_work(work, falls_back)
    return jnp.add(row.roundtrip_ns, work_ns(work, rates_of(row, work, Choices(temperature_ns))))


def _matmul_multiply_adds(graph: Graph, node: Node) -> int:
    if not node.inputs:
        raise ValueError(f"node {node.id} (matmul): its cost needs the shape of its first operand")
    shape = graph.nodes[node.inputs[0]].shape
    return node.elements * (shape[-1] or 0 if shape else 1)


def _attention_flop(graph: Graph, node: Node) -> int:
    if len(node.shape) != 4:
        raise ValueError(
            f"node {node.id} (attention): its cost needs a shape [batch, heads, seq, head_dim], got {node.shape}"
        )
    batch, heads, seq, head_dim = (dim or 0 for dim in node.shape)
    return 2 * batch * heads * seq**2 * head_dim
