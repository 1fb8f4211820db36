"""Io cost and graph cost: what a profile, or a graph, takes on a backend in nanoseconds."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlxjax._checks import check_at_least, check_shapes, fields_of
from rlxjax._counts import as_float, as_temperature
from ._devices import (
    BACKEND_ROWS,
    FALLBACK_ROW,
    SMALL_SGEMM,
    BackendCoefficients,
    backend_coefficients,
    without_provenance,
)
from rlxjax.graph._graph import Graph, Node
from rlxjax._numerics import Exact, Smooth, rules_at, times
from rlxjax.graph._profile import GraphIoProfile, profile_graph_io
from rlxjax._programs import formula_jit
from rlxjax._slopes import along
from rlxjax._typing import Count, Nanoseconds, RealLike

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
    + readback / max(readback_bw, 1)` (SPEC, section 3).

    Raises:
        ValueError: a negative or NaN count, or shapes that do not agree.

    Examples:
        >>> print(io_cost_ns(GraphIoProfile(3, 0, 128, 6272), backend_coefficients("cpu")))
        4165.6
    """
    return _io_cost_ns(*_io_inputs(profile, row), None)


def soft_io_cost_ns(
    profile: GraphIoProfile, row: BackendCoefficients, *, temperature_ns: RealLike
) -> Nanoseconds:
    """Return the smooth twin of `io_cost_ns`: the floors of the bandwidths are relaxed."""
    temperature_ns = as_temperature(temperature_ns)
    return _io_cost_ns(*_io_inputs(profile, row, temperature_ns=temperature_ns), temperature_ns)


def graph_cost_ns(graph: Graph, row: BackendCoefficients) -> Nanoseconds:
    """Return the cost of a graph with the coefficients of a row, in ns, `[*batch]` of the row.

    `roundtrip + sum(node costs) + traffic / max(memory_bw, 1) + readback / max(readback_bw, 1)
    + sync_points * roundtrip` (SPEC, section 3).

    Examples:
        >>> g = Graph()
        >>> x = g.input("x", (1000,), "f32")
        >>> g.set_outputs([g.add("relu", [x])])
        >>> print(graph_cost_ns(g, backend_coefficients("cpu")).round(1))
        3900.0
    """
    return _graph_cost_ns(float_counts(graph_work(graph)), without_provenance(row), None)


def soft_graph_cost_ns(graph: Graph, row: BackendCoefficients, *, temperature_ns: RealLike) -> Nanoseconds:
    """Return the smooth twin of `graph_cost_ns`: the floors of the bandwidths are relaxed."""
    temperature_ns = as_temperature(temperature_ns)
    check_shapes(**fields_of(row, "row."), temperature_ns=temperature_ns)
    return _graph_cost_ns(float_counts(graph_work(graph)), without_provenance(row), temperature_ns)


def device_cost_ns(graph: Graph, device: str, coefficients: str = "arch") -> Nanoseconds:
    """Return what a graph takes on a device, in ns: `graph_cost_ns` with the backend's row.

    Where the set has no row for the device (the discrete fallback), the estimate is
    `io_cost_ns + dispatch * (nodes that are neither input nor param)` instead.

    Raises:
        ValueError: an unknown device or set.

    Examples:
        >>> g = Graph()
        >>> x = g.input("x", (1000,), "f32")
        >>> g.set_outputs([g.add("relu", [x])])
        >>> bool(device_cost_ns(g, "cpu") < device_cost_ns(g, "tpu"))
        True
    """
    return backend_cost_ns(graph_work(graph), backend_coefficients(device, coefficients))


def backend_cost_ns(work: GraphWork, row: BackendCoefficients) -> Nanoseconds:
    """Return what work takes with a row, in ns; with the row of the discrete fallback, its estimate."""
    falls_back = float(row is BACKEND_ROWS[FALLBACK_ROW])
    return _device_cost_ns(float_counts(work), without_provenance(row), falls_back)


def float_counts(counts):
    """Return a pytree of counts as floats, each named in errors by its place."""
    return jax.tree_util.tree_map_with_path(
        lambda path, count: as_float(count, jax.tree_util.keystr(path).lstrip(".")), counts
    )


class Rates(NamedTuple):
    """What the io cost with hard choices is linear in, of a backend; every field `[*batch]`."""

    dispatch_ns: RealLike
    roundtrip_ns: RealLike
    traffic_ns_per_byte: RealLike
    readback_ns_per_byte: RealLike
    unified_memory: RealLike


def rates_of(row: BackendCoefficients | Rates) -> Rates:
    """Return a backend's rates; of rates, themselves. Whether memory is unified has no derivative.

    Of a table of devices they cost nothing; of rows that were selected from it, two divisions a row.
    """
    if isinstance(row, Rates):
        return row
    traffic_ns, readback_ns = (1.0 / Exact().maximum(bw, 1.0) for bw in (row.memory_bw, row.readback_bw))
    unified_memory = jax.lax.stop_gradient(row.unified_memory)
    return Rates(row.dispatch_ns, row.roundtrip_ns, traffic_ns, readback_ns, unified_memory)


def profile_cost_ns(
    profile: GraphIoProfile,
    discrete_readback: RealLike,
    row: BackendCoefficients | Rates,
    rules: Exact | Smooth,
) -> Nanoseconds:
    """Return the io cost of float counts, with hard or relaxed choices.

    Args:
        profile: float counts.
        discrete_readback: the profile's readback bytes without unified memory.
        row: the backend, or with hard choices its rates.
        rules: hard or relaxed.
    """
    readbacks = [profile.host_output_bytes, discrete_readback]
    if isinstance(rules, Exact):
        *rates_ns, unified_memory = rates_of(row)
        counts = [profile.kernel_launches, profile.sync_points, profile.device_traffic_bytes]
        return _exact_cost_ns(*jax.tree.map(jnp.asarray, (rates_ns, counts, readbacks, unified_memory)))
    assert isinstance(row, BackendCoefficients)
    unified = jnp.asarray(row.unified_memory) >= 0.5
    return jnp.asarray(
        row.roundtrip_ns
        + times(profile.kernel_launches, row.dispatch_ns)
        + times(profile.sync_points, row.roundtrip_ns)
        + _soft_transfer_ns(profile.device_traffic_bytes, row.memory_bw, rules)
        + _soft_transfer_ns(jnp.where(unified, *readbacks), row.readback_bw, rules)
    )


@jax.custom_jvp
def _exact_cost_ns(
    rates_ns: list[Nanoseconds],
    counts: list[Nanoseconds],
    readbacks: list[Nanoseconds],
    unified_memory: Nanoseconds,
) -> Nanoseconds:
    """Prevents: a derivative in as many passes over the rows as the formula has operations.

    The cost is linear in the rates of a launch, a sync point, a byte of traffic and a readback byte; its
    transposed derivative is one sum over the rows for each. The selection stands last so that XLA
    makes one kernel of the value.
    """
    launches, syncs, traffic = map(times, counts, rates_ns[:3])
    without_readback = rates_ns[1] + launches + syncs + traffic
    unified, discrete = (without_readback + times(readback, rates_ns[3]) for readback in readbacks)
    return jnp.where(unified_memory >= 0.5, unified, discrete)


@functools.partial(_exact_cost_ns.defjvp, symbolic_zeros=True)
def _exact_cost_jvp(primals, tangents):
    rates_ns, counts, readbacks, unified_memory = primals
    is_unified = unified_memory >= 0.5
    # Where a rate is infinite the derivative by its count is 0, as in `times`.
    slopes_ns = [jnp.where(jnp.isinf(rate), 0.0, rate) for rate in rates_ns]
    by_rates = [counts[0], counts[1] + 1.0, counts[2], jnp.where(is_unified, *readbacks)]
    by_readbacks = [jnp.where(is_unified, slopes_ns[3], 0.0), jnp.where(is_unified, 0.0, slopes_ns[3])]
    cost_ns = _exact_cost_ns(*primals)
    slopes = [*by_rates, *slopes_ns[:3], *by_readbacks]
    # A loss of costs is one of ratios or logarithms: it divides by them.
    changes = [*tangents[0], *tangents[1], *tangents[2]]
    return cost_ns, along(cost_ns, slopes, changes, takes_in=True)


def work_cost_ns(
    work: GraphWork, row: BackendCoefficients | Rates, falls_back: RealLike, rules: Exact | Smooth
) -> Nanoseconds:
    """Return the device cost of float counts: the graph cost, or the fallback's estimate.

    They differ in what they count, so the counts are chosen and the cost is computed once.
    """
    is_fallback = jnp.asarray(falls_back) >= 0.5

    def count(in_fallback: RealLike, in_graph: RealLike) -> RealLike:
        if _is_none(in_fallback) and _is_none(in_graph):
            return 0.0
        return jnp.where(is_fallback, in_fallback, in_graph)

    launches = count(work.io.kernel_launches, 0.0)
    work = dataclasses.replace(
        work,
        io=dataclasses.replace(work.io, kernel_launches=launches),
        output_bytes=count(0.0, work.output_bytes),
        costed_nodes=count(work.dispatched_nodes, work.costed_nodes),
        sgemm_flop=count(0.0, work.sgemm_flop),
        small_sgemm_flop=count(0.0, work.small_sgemm_flop),
    )
    return _nodes_cost_ns(work, row, rules)


def _is_none(count: RealLike) -> bool:
    """Whether a count is zero in whatever the formulas are compiled for."""
    return isinstance(count, (int, float)) and count == 0


def _nodes_cost_ns(work: GraphWork, row: BackendCoefficients | Rates, rules: Exact | Smooth) -> Nanoseconds:
    """Return the cost of the nodes, and of the profile, its launches included; rates have no products'."""
    if isinstance(rules, Exact):
        node_ns = times(work.output_bytes, rates_of(row).traffic_ns_per_byte)
    else:
        assert isinstance(row, BackendCoefficients)
        node_ns = _soft_transfer_ns(work.output_bytes, row.memory_bw, rules)
    node_ns += times(work.costed_nodes, row.dispatch_ns)
    for name in ("sgemm", "small_sgemm"):
        if not _is_none(flop := getattr(work, f"{name}_flop")):
            node_ns += flop / (jnp.asarray(getattr(row, f"{name}_gflops")) + 1.0)
    return jnp.asarray(node_ns) + profile_cost_ns(work.io, work.readback_bytes, row, rules)


def _soft_transfer_ns(count_bytes: RealLike, bandwidth: RealLike, rules: Smooth) -> Nanoseconds:
    return jnp.asarray(count_bytes / rules.maximum(bandwidth, 1.0, scale=count_bytes + 1.0))


def _io_inputs(profile: GraphIoProfile, row: BackendCoefficients, **others: RealLike) -> tuple:
    for name, count in fields_of(profile).items():
        check_at_least(count, name)
    check_shapes(**fields_of(profile), **fields_of(row, "row."), **others)
    discrete_readback = as_float(profile.host_readback_bytes(False), "host_readback_bytes")
    return float_counts(profile), discrete_readback, without_provenance(row)


@formula_jit
def _io_cost_ns(profile, discrete_readback, row: BackendCoefficients, temperature_ns) -> Nanoseconds:
    return profile_cost_ns(profile, discrete_readback, row, rules_at(temperature_ns))


@formula_jit
def _graph_cost_ns(work: GraphWork, row: BackendCoefficients, temperature_ns) -> Nanoseconds:
    return work_cost_ns(work, row, False, rules_at(temperature_ns))


@formula_jit
def _device_cost_ns(work: GraphWork, row: BackendCoefficients, falls_back) -> Nanoseconds:
    return work_cost_ns(work, row, falls_back, Exact())


def _matmul_multiply_adds(graph: Graph, node: Node) -> int:
    if not node.inputs:
        raise ValueError(f"node {node.id} (matmul): its cost needs the shape of its first operand")
    shape = graph.nodes[node.inputs[0]].shape
    return node.elements * (shape[-1] or 0 if shape else 1)


def _attention_flop(graph: Graph, node: Node) -> int:
    if len(node.shape) != 4:
        raise ValueError(
            f"node {node.id} (attention): its cost needs a shape [batch, heads, seq, head_dim], "
            f"got {node.shape}"
        )
    batch, heads, seq, head_dim = (dim or 0 for dim in node.shape)
    return 2 * batch * heads * seq**2 * head_dim
