"""Which device is cheapest for a piece of work, and how far the answer can be trusted."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from rlxjax._typing import Provenance
from rlxjax._values import short_repr, whole_ns
from rlxjax.graph import Graph, GraphIoProfile
from rlxjax.jaxpr import profile_function

from ._backends import BackendCoefficients, Device, backend_coefficients
from ._graph_costs import GraphWork, backend_cost_ns, graph_work, profile_work


class _Answer(NamedTuple):
    device: Device
    costs: Mapping[Device, float]
    left_out: Mapping[Device, str]


class DeviceRanking(_Answer):
    """The cheapest device, and what the answer rests on; unpacks into device, costs, left_out.

    Attributes:
        device: the cheapest device; of equal ones the earlier in `Device`.
        costs: ns of every device ranked, cheapest first.
        left_out: the devices that were not ranked, each with the reason.
        provenance: of the coefficients of every device ranked.
        reason: the answer in a sentence.
    """

    provenance: Mapping[Device, Provenance]
    reason: str

    __repr__ = short_repr


def rank_devices(
    work: Graph | GraphIoProfile | Callable[..., Any],
    devices: Iterable[str] | None = None,
    *,
    args: tuple[Any, ...] = (),
    coefficients: str = "arch",
    rows: Mapping[str, BackendCoefficients] | None = None,
) -> DeviceRanking:
    """Rank devices by what a piece of work takes on each.

    A device whose coefficients are guesses (provenance "uncalibrated") is left out, unless all are; the
    answer says so.

    Args:
        work: a graph (`graph_cost_ns`; where the set has no row for the device, `io_cost_ns` and a dispatch for each
            node that is neither input nor param), a profile (`io_cost_ns`), or a JAX function, of which the profile
            counts (`profile_function`): its fused launches and bytes, its FLOP at the rate of matrix products, its
            results read back.
        devices: the devices to rank; all unless given.
        args: what the function takes; arrays or `jax.ShapeDtypeStruct`.
        coefficients: the built-in set, "arch" or "portable".
        rows: coefficients of your own by device name, which then take the place of the built-in ones; a
            measured row says so in its `provenance`.

    Returns:
        The cheapest device, the costs, and those left out with the reason. The smooth form of the choice is
        `pick_weights` of the costs.

    Raises:
        ValueError: an unknown device or set, no device, a row of arrays, arguments without a function, or a function
            that does not trace or whose counts are not whole.

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
        'cuda at 58,972 ns; every device is uncalibrated: these are guesses'
    """
    counted = _work_of(work, args)
    chosen = tuple(Device) if devices is None else tuple(dict.fromkeys(Device.parse(name) for name in devices))
    if not chosen:
        raise ValueError("devices: expected at least one device, got none")
    own = {Device.parse(name): _checked(row, name) for name, row in (rows or {}).items()}
    table = {device: own.get(device) or backend_coefficients(device, coefficients) for device in chosen}
    provenance = {device: Provenance(row.provenance) for device, row in table.items()}
    trusted = [device for device in chosen if provenance[device] is not Provenance.UNCALIBRATED]
    ranked = trusted or chosen
    costs = {device: float(backend_cost_ns(counted, table[device])) for device in ranked}
    costs = dict(sorted(costs.items(), key=lambda item: item[1]))
    left_out = {device: "its coefficients are uncalibrated" for device in chosen if device not in costs}
    ranking = DeviceRanking(next(iter(costs)), costs, left_out)
    ranking.provenance = {device: provenance[device] for device in costs}
    ranking.reason = _reason(ranking, all_guessed=not trusted)
    return ranking


def _reason(ranking: DeviceRanking, all_guessed: bool) -> str:
    first, *others = ranking.costs.items()
    parts = [f"{first[0]} at {whole_ns(first[1])} ns"]
    if others and not all_guessed:
        parts[0] += f" ({ranking.provenance[first[0]]}), before {others[0][0]} at {whole_ns(others[0][1])} ns"
    if all_guessed:
        parts.append("every device is uncalibrated: these are guesses")
    if ranking.left_out:
        parts.append(f"left out as uncalibrated: {', '.join(ranking.left_out)}")
    return "; ".join(parts)


def _checked(row: BackendCoefficients, name: str) -> BackendCoefficients:
    if not isinstance(row, BackendCoefficients):
        raise ValueError(f"rows: expected BackendCoefficients for {name!r}, got {row!r}")
    if any(np.ndim(leaf) for leaf in jax.tree.leaves(row)):
        raise ValueError(f"rows: expected one backend for {name!r}, got arrays of several")
    row.check(f"rows: {name}: ")
    return row


def _work_of(work: Graph | GraphIoProfile | Callable[..., Any], args: tuple[Any, ...]) -> GraphWork:
    if isinstance(work, (Graph, GraphIoProfile)):
        if args:
            raise ValueError(f"args: only a function takes arguments, got {len(args)} with {type(work).__name__}")
        return graph_work(work) if isinstance(work, Graph) else profile_work(work)
    if not callable(work):
        raise ValueError(f"work: expected a Graph, a GraphIoProfile or a function, got {work!r}")
    profile = profile_function(work, *args)
    if profile.uncounted:
        raise ValueError(f"work: {profile.uncounted[0]}; or rank profile_function(...).io, which counts the rest")
    launches = sum(group.launches for group in profile.kernels)
    io = dataclasses.replace(profile.io, kernel_launches=launches, device_traffic_bytes=profile.fused_traffic_bytes)
    return profile_work(io, profile.flops)
