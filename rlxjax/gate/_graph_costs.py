"""Io cost and graph cost: the time that a profile, or a graph, takes on a backend, hard or smooth."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from rlxjax._checks import check_at_least, check_shapes, fields_of
from rlxjax._counts import as_float, as_temperature
from rlxjax._numerics import Choices, dot
from rlxjax._typing import Count, Nanoseconds, RealLike
from rlxjax.graph import Graph, GraphIoProfile, profile_graph_io

from ._backends import BACKEND_ROWS, BackendCoefficients, without_provenance

#: Matrix products with fewer multiply-adds run at `small_sgemm_gflops`.
SMALL_SGEMM = 32_768


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
    """Count what the cost of a graph depends on; exact, on the host.

    Raises:
        ValueError: a matmul or attention node of a shape that its FLOPs do not follow from.
    """
    profile = profile_graph_io(graph)
    output_bytes = costed = large_flop = small_flop = 0
    for node in graph.nodes:
        if node.op in ("input", "param", "constant"):
            continue
        costed += 1
        if node.op == "matmul":
            if not node.inputs:
                raise ValueError(f"node {node.id} (matmul): its cost needs the shape of its first operand")
            shape = graph.nodes[node.inputs[0]].shape
            multiply_adds = node.elements * (shape[-1] or 0 if shape else 1)
            small_flop += 2 * multiply_adds * (multiply_adds < SMALL_SGEMM)
            large_flop += 2 * multiply_adds * (multiply_adds >= SMALL_SGEMM)
        elif node.op == "attention":
            if len(node.shape) != 4:
                wanted = "a shape [batch, heads, seq, head_dim]"
                raise ValueError(f"node {node.id} (attention): its cost needs {wanted}, got {node.shape}")
            batch, heads, seq, head_dim = (dim or 0 for dim in node.shape)
            large_flop += 2 * batch * heads * seq**2 * head_dim
        else:
            output_bytes += node.elements * 4  # whatever the dtype
    dispatched = sum(node.op not in ("input", "param") for node in graph.nodes)
    readback_bytes = profile.host_readback_bytes(unified_memory=False)
    return GraphWork(profile, readback_bytes, output_bytes, costed, dispatched, large_flop, small_flop)


def profile_work(io: GraphIoProfile, sgemm_flop: int = 0) -> GraphWork:
    """Return the work of a profile, the cost of which is its io cost, and that of some FLOP of matrix products."""
    return GraphWork(io, io.host_readback_bytes(False), 0, io.kernel_launches, 0, sgemm_flop)


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
    _check(row, None, **fields_of(profile))
    return _priced(profile_work(profile), row, None)


def soft_io_cost_ns(profile: GraphIoProfile, row: BackendCoefficients, *, temperature_ns: RealLike) -> Nanoseconds:
    """Return the smooth form of `io_cost_ns`: the floors of the bandwidths are relaxed.

    Other arguments and errors as of `io_cost_ns`; `temperature_ns` is positive, a scalar or `[*batch]`.

    Examples:
        >>> print(soft_io_cost_ns(GraphIoProfile(3, 0, 128, 6272), BACKEND_ROWS["cpu"], temperature_ns=1e-3))
        4165.6
    """
    temperature_ns = as_temperature(temperature_ns)
    _check(row, temperature_ns, **fields_of(profile))
    return _priced(profile_work(profile), row, temperature_ns)


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
    _check(row, None)
    return _priced(graph_work(graph), row, None)


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
    _check(row, temperature_ns)
    return _priced(graph_work(graph), row, temperature_ns)


def backend_cost_ns(work: GraphWork, row: BackendCoefficients) -> Nanoseconds:
    """Return what work takes with a row, in ns; with the row of the discrete fallback, its estimate.

    That is `io_cost_ns + dispatch * (nodes that are neither input nor param)`.
    """
    return _priced(work, row, None, falls_back=float(row is BACKEND_ROWS["discrete"]))


def parts_ns(
    parts: Sequence[GraphWork], whole: GraphWork, row: BackendCoefficients, rules: Choices, falls_back: RealLike = 0.0
) -> list[Nanoseconds]:
    """Return what each part of some work takes at a backend's rates, in ns: the first roundtrip is not in it.

    Args:
        parts: float counts; one that is the Python number 0 has no term.
        whole: all of the work, on which relaxations of the rates act.
        row: what each count costs on the backend.
        rules: hard or relaxed choices.
        falls_back: 1 where the estimate is that of the discrete fallback.
    """
    traffic_bytes = whole.io.device_traffic_bytes + whole.output_bytes
    per_byte, per_readback_byte = (
        1.0 / rules.maximum(bandwidth, 1.0, scale=count_bytes + 1.0)
        for bandwidth, count_bytes in ((row.memory_bw, traffic_bytes), (row.readback_bw, whole.readback_bytes))
    )
    rates = [
        row.dispatch_ns,
        row.roundtrip_ns,
        *(1.0 / (jnp.asarray(gflops) + 1.0) for gflops in (row.sgemm_gflops, row.small_sgemm_gflops)),
        per_byte,
        per_readback_byte,
        jnp.where(jnp.asarray(row.unified_memory) >= 0.5, 0.0, per_readback_byte),
    ]
    is_fallback = jnp.asarray(falls_back) >= 0.5

    def either(of_graph: Count, of_fallback: Count = 0) -> Count:
        return 0 if _is_zero(of_graph) and _is_zero(of_fallback) else jnp.where(is_fallback, of_fallback, of_graph)

    times_ns = []
    for work in parts:
        host_bytes = work.io.host_output_bytes
        counts = (
            either(work.costed_nodes, work.io.kernel_launches + work.dispatched_nodes),
            work.io.sync_points,
            either(work.sgemm_flop),
            either(work.small_sgemm_flop),
            work.io.device_traffic_bytes + either(work.output_bytes),
            host_bytes,
            work.readback_bytes - host_bytes,
        )
        pairs = ((count, rate) for count, rate in zip(counts, rates, strict=True) if not _is_zero(count))
        times_ns.append(dot(*zip(*pairs, strict=True)))
    return times_ns


def _is_zero(count: RealLike) -> bool:
    """Whether a count is zero whatever the values of the arrays."""
    return isinstance(count, (int, float)) and count == 0


def _check(row: BackendCoefficients, temperature_ns: RealLike | None, **counts: Count) -> None:
    for name, count in counts.items():
        check_at_least(count, name)
    row.check("row.")
    soft = {} if temperature_ns is None else {"temperature_ns": temperature_ns}
    check_shapes(**counts, **fields_of(row, "row."), **soft)


def _priced(work: GraphWork, row: BackendCoefficients, temperature_ns, falls_back: float = 0.0) -> Nanoseconds:
    counts = jax.tree_util.tree_map_with_path(
        lambda path, count: as_float(count, jax.tree_util.keystr(path[-1:]).lstrip(".")), work
    )
    return _cost_ns(counts, without_provenance(row), falls_back, temperature_ns)


@jax.jit
def _cost_ns(work: GraphWork, row: BackendCoefficients, falls_back, temperature_ns) -> Nanoseconds:
    return jnp.add(row.roundtrip_ns, *parts_ns([work], work, row, Choices(temperature_ns), falls_back))
