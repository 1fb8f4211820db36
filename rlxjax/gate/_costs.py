"""The cost of a profile or a graph on a backend, in ns, in a hard or smooth form; and a ranking of devices by cost."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import check_at_least, check_shapes, fields_of
from rlxjax._counts import as_float, as_temperature
from rlxjax._numerics import Choices, dot
from rlxjax._typing import Count, Nanoseconds, Provenance, RealLike
from rlxjax._values import by_value
from rlxjax.graph import Graph, GraphIoProfile, profile_graph_io
from rlxjax.jaxpr import profile_function
from rlxjax.units import time_text

from ._backends import BACKEND_ROWS, BackendCoefficients, Device, backend_coefficients, without_provenance

#: Matrix products with fewer multiply-adds than this number run at the rate `small_sgemm_gflops`.
SMALL_SGEMM = 32_768


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GraphWork:
    """The counts that determine the cost of a graph on a backend. Each count is `[*batch]`.

    Attributes:
        io: the graph's profile.
        readback_bytes: the result of `io.host_readback_bytes` for a backend without unified memory.
        output_bytes: 4 times the number of output elements, summed over all nodes except inputs, params, constants,
            matrix products and attention nodes.
        costed_nodes: number of nodes that are not inputs, params or constants.
        dispatched_nodes: number of nodes that are not inputs or params.
        sgemm_flop: number of FLOP in attention nodes and in matrix products with at least 32768 multiply-adds.
        small_sgemm_flop: number of FLOP in matrix products with fewer than 32768 multiply-adds.
    """

    io: GraphIoProfile
    readback_bytes: Count
    output_bytes: Count
    costed_nodes: Count
    dispatched_nodes: Count
    sgemm_flop: Count = 0
    small_sgemm_flop: Count = 0


def graph_work(graph: Graph) -> GraphWork:
    """Return the counts that determine the cost of a graph, as exact integers."""
    profile = profile_graph_io(graph)
    output_bytes = costed = large_flop = small_flop = 0
    for node in graph.nodes:
        if node.op in ("input", "param", "constant"):
            continue
        costed += 1
        if node.op == "matmul":
            if not node.inputs:
                raise ValueError(f"node {node.id} (matmul): expected two operands, got none")
            shape = graph.nodes[node.inputs[0]].shape
            multiply_adds = node.elements * (shape[-1] or 0 if shape else 1)
            if multiply_adds < SMALL_SGEMM:
                small_flop += 2 * multiply_adds
            else:
                large_flop += 2 * multiply_adds
        elif node.op == "attention":
            if len(node.shape) != 4:
                wanted = "a shape [batch, heads, seq, head_dim]"
                raise ValueError(f"node {node.id} (attention): expected {wanted}, got {node.shape}")
            batch, heads, seq, head_dim = (dim or 0 for dim in node.shape)
            large_flop += 2 * batch * heads * seq**2 * head_dim
        else:
            output_bytes += node.elements * 4  # for every dtype
    dispatched = sum(node.op not in ("input", "param") for node in graph.nodes)
    readback_bytes = profile.host_readback_bytes(unified_memory=False)
    return GraphWork(profile, readback_bytes, output_bytes, costed, dispatched, large_flop, small_flop)


def profile_work(io: GraphIoProfile, sgemm_flop: int = 0) -> GraphWork:
    """Return the work that a profile describes, plus matrix products with `sgemm_flop` FLOP in total."""
    return GraphWork(io, io.host_readback_bytes(False), 0, io.kernel_launches, 0, sgemm_flop)


def io_cost_ns(
    profile: GraphIoProfile, row: BackendCoefficients, *, temperature_ns: RealLike | None = None
) -> Nanoseconds:
    """Return the cost of the launches, sync points and bytes in a profile on a backend, in ns, `[*batch]`.

    The cost is `roundtrip + launches * dispatch + sync_points * roundtrip + traffic / max(memory_bw, 1)
    + readback / max(readback_bw, 1)`. `traffic` is `device_traffic_bytes`; `readback` is `host_readback_bytes`.

    Args:
        profile: the counts of launches, sync points and bytes.
        row: the backend's coefficients.
        temperature_ns: a positive temperature, a scalar or `[*batch]`, that makes `max` smooth; None for the hard cost.

    Raises:
        ValueError: a count is negative or NaN, the temperature is not positive, or argument shapes do not broadcast.

    Examples:
        >>> print(io_cost_ns(GraphIoProfile(3, 0, 128, 6272), BACKEND_ROWS["cpu"]))
        4165.6
        >>> print(io_cost_ns(GraphIoProfile(3, 0, 128, 6272), BACKEND_ROWS["cpu"], temperature_ns=1e-3).round(1))
        4165.6
    """
    counts = fields_of(profile)
    for name, count in counts.items():
        check_at_least(count, name)
    _check(row, temperature_ns, counts)
    return _priced(profile_work(profile), row, temperature_ns)


def graph_cost_ns(graph: Graph, row: BackendCoefficients, *, temperature_ns: RealLike | None = None) -> Nanoseconds:
    """Return the cost of a graph on a backend, in ns. The cost has the same shape `[*batch]` as the coefficients.

    The cost is `roundtrip + sum(node costs) + traffic / max(memory_bw, 1) + readback / max(readback_bw, 1)
    + sync_points * roundtrip`. Inputs, params and constants cost 0; other nodes, a dispatch plus FLOP or bytes.

    Args:
        graph: the graph.
        row: the backend's coefficients.
        temperature_ns: a temperature that makes `max` smooth, the same as in `io_cost_ns`.

    Raises:
        ValueError: the FLOP of a matmul or attention node are unknown, or a value is wrong, as in `io_cost_ns`.

    Examples:
        >>> g = Graph()
        >>> x = g.input("x", (1000,), "f32")
        >>> g.set_outputs([g.add("relu", [x])])
        >>> print(graph_cost_ns(g, BACKEND_ROWS["cpu"]).round(1))
        3900.0
    """
    _check(row, temperature_ns, {})
    return _priced(graph_work(graph), row, temperature_ns)


def _check(row: BackendCoefficients, temperature_ns: RealLike | None, counts: Mapping[str, Count]) -> None:
    row.check("row.")
    soft = {} if temperature_ns is None else {"temperature_ns": as_temperature(temperature_ns)}
    check_shapes(**counts, **fields_of(row, "row."), **soft)


def _priced(work: GraphWork, row: BackendCoefficients, temperature_ns: Any, falls_back: float = 0.0) -> Nanoseconds:
    temperature_ns = None if temperature_ns is None else as_float(temperature_ns, "temperature_ns")
    counts = jax.tree_util.tree_map_with_path(
        lambda path, count: as_float(count, jax.tree_util.keystr(path[-1:]).lstrip(".")), work
    )
    return _cost_ns(counts, without_provenance(row), falls_back, temperature_ns)


@jax.jit
def _cost_ns(work: GraphWork, row: BackendCoefficients, falls_back, temperature_ns) -> Nanoseconds:
    return jnp.add(row.roundtrip_ns, *parts_ns([work], work, row, Choices(temperature_ns), falls_back))


def parts_ns(
    parts: Sequence[GraphWork], whole: GraphWork, row: BackendCoefficients, rules: Choices, falls_back: RealLike = 0.0
) -> list[Nanoseconds]:
    """Return the cost of each part of a piece of work on a backend, in ns. The first roundtrip is not included.

    Args:
        parts: the work of each part, with floats as counts. A count that is the Python number 0 adds no term.
        whole: the work of all parts together. The counts of this work set the scale of the smooth functions.
        row: the backend's coefficients.
        rules: the `Choices` that compute `max`, in the hard or in the smooth form.
        falls_back: 1 for the formula for devices without a row of their own (see `rank_devices`), else 0.
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

    def is_zero(count: Count) -> bool:
        return isinstance(count, (int, float)) and count == 0

    def either(of_graph: Count, of_fallback: Count = 0) -> Count:
        return 0 if is_zero(of_graph) and is_zero(of_fallback) else jnp.where(is_fallback, of_fallback, of_graph)

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
        held = [place for place, count in enumerate(counts) if not is_zero(count)]
        times_ns.append(dot([counts[place] for place in held], [rates[place] for place in held]))
    return times_ns


@by_value
@dataclasses.dataclass(frozen=True)
class DeviceRanking:
    """The result of `rank_devices`. It can be unpacked: `device, costs, left_out = ranking`.

    Attributes:
        device: the cheapest device. If several devices have this cost, the device that was given first.
        costs: a dict from each ranked device to its cost in ns, with the lowest cost first.
        left_out: a dict from each device that is not ranked to the reason.
        provenance: a dict from each ranked device to the provenance of its coefficients.
        reason: a sentence that names the cheapest device and explains the ranking.
    """

    device: Device
    costs: Mapping[Device, float]
    left_out: Mapping[Device, str]
    provenance: Mapping[Device, Provenance]
    reason: str

    def __iter__(self) -> Iterator[Any]:
        return iter((self.device, self.costs, self.left_out))


def rank_devices(
    work: Graph | GraphIoProfile | Callable[..., Any],
    devices: Iterable[str] | None = None,
    *,
    args: tuple[Any, ...] = (),
    coefficients: str = "arch",
    rows: Mapping[str, BackendCoefficients] | None = None,
) -> DeviceRanking:
    """Rank devices by the cost of a piece of work.

    A device is left out if its coefficients are uncalibrated. If this is true of all devices, all devices are ranked.

    Args:
        work: a graph, a profile or a JAX function. The cost of a graph is `graph_cost_ns`, and the cost of a profile is
            `io_cost_ns`. On a device without a row of its own, the cost of a graph is the `io_cost_ns` of its profile,
            plus a dispatch for each node except inputs and params. The cost of a function comes from
            `profile_function`: launches and bytes after fusion, FLOP at the rate of matrix products, and readback.
        devices: the names of the devices to rank. By default, all devices are ranked.
        args: the arguments of the function: arrays or `jax.ShapeDtypeStruct` objects.
        coefficients: the set of built-in coefficients, "arch" or "portable".
        rows: a dict from device name to coefficients that replace the built-in ones. If you measured, set `provenance`.

    Returns:
        The ranking. For a smooth choice between the devices, give the costs to `pick_weights`.

    Raises:
        ValueError: a device or set is unknown, no device is given, a row holds arrays, `args` are given without a
            function, JAX cannot trace the function, or the profile leaves some of the function's work uncounted.

    Examples:
        >>> g = Graph()
        >>> x = g.input("x", (1 << 20,), "f32")
        >>> g.set_outputs([g.add("relu", [x])])
        >>> device, costs, left_out = rank_devices(g)
        >>> print(device, list(map(str, costs)))
        metal ['metal', 'cpu']
        >>> left_out["cuda"]
        'its coefficients are uncalibrated'
        >>> rank_devices(g, devices=["cuda", "tpu"]).reason
        'cuda at 59.0 us; this is a guess, because no device is calibrated'
    """
    counted = _work_of(work, args)
    chosen = tuple(Device) if devices is None else tuple(dict.fromkeys(map(Device.parse, devices)))
    if not chosen:
        raise ValueError("devices: expected at least one device, got none")
    table = {device: backend_coefficients(device, coefficients) for device in chosen}
    for name, row in (rows or {}).items():
        if not isinstance(row, BackendCoefficients):
            raise ValueError(f"rows: expected BackendCoefficients for {name!r}, got {row!r}")
        if any(np.ndim(leaf) for leaf in jax.tree.leaves(row)):
            raise ValueError(f"rows: expected a row of numbers for {name!r}, got a row of arrays")
        row.check(f"rows: {name}: ")
        if (device := Device.parse(name)) in table:
            table[device] = row
    provenance = {device: Provenance(row.provenance) for device, row in table.items()}
    trusted = [device for device in chosen if provenance[device] is not Provenance.UNCALIBRATED]
    found: dict[Device, float] = {}
    for device in trusted or chosen:
        # A device without its own row has another formula.
        falls_back = float(table[device] is BACKEND_ROWS["discrete"])
        found[device] = float(_priced(counted, table[device], None, falls_back))
    costs = dict(sorted(found.items(), key=lambda item: item[1]))
    left_out = {device: "its coefficients are uncalibrated" for device in chosen if device not in costs}
    best, *others = costs
    reason = f"{best} at {time_text(costs[best])}"
    if not trusted:
        reason += "; this is a guess, because no device is calibrated"
    elif others:
        reason += f" ({provenance[best]}), before {others[0]} at {time_text(costs[others[0]])}"
    if left_out:
        reason += f"; left out as uncalibrated: {', '.join(left_out)}"
    return DeviceRanking(best, costs, left_out, {device: provenance[device] for device in costs}, reason)


def _work_of(work: Graph | GraphIoProfile | Callable[..., Any], args: tuple[Any, ...]) -> GraphWork:
    if isinstance(work, (Graph, GraphIoProfile)):
        if args:
            raise ValueError(f"args: expected no arguments for a {type(work).__name__}, got {len(args)}")
        return graph_work(work) if isinstance(work, Graph) else profile_work(work)
    if not callable(work):
        raise ValueError(f"work: expected a Graph, a GraphIoProfile or a function, got {work!r}")
    profile = profile_function(work, *args)
    if profile.uncounted:
        raise ValueError(f"work: {profile.uncounted[0]}; to rank the rest, give profile_function(...).io")
    launches = int(profile.kernels.launches.sum())
    io = dataclasses.replace(profile.io, kernel_launches=launches, device_traffic_bytes=profile.fused_traffic_bytes)
    return profile_work(io, profile.flops)
