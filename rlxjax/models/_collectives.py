"""The latency of collectives of several devices, by the bytes of the busiest link and the hops."""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from rlxjax._typing import RealLike
from rlxjax._values import FrozenDict
from rlxjax.devices import Link
from rlxjax.fit import Facts, Input, LatencyModel, Runs
from rlxjax.gate import Coefficients

from ._coefficients import coefficients, prior_of, typical

#: Copy rate of a CPU, and the time until its threads meet; uncalibrated.
MEMORY_BYTES_PER_NS, RENDEZVOUS_NS = 10.0, 2e4

_Places = tuple[tuple[int, ...], ...]
#: Time of one byte on the busiest link, and of the hops in sequence, in ns.
_Cost = tuple[float, float]
#: Devices of a group that one link joins, and their share of the group.
_Part = tuple[tuple[int, ...], float]


class _Span(NamedTuple):
    """How a group uses a torus dimension: its links, members in a row, receiving directions and hops."""

    links: list[tuple[Any, ...]]
    members: int
    ways: int
    hops: int


@coefficients
@dataclasses.dataclass(frozen=True)
class CollectiveCoefficients(Coefficients):
    """Coefficients of a collective on one machine, relative to the data of its links; positive, `[*batch]`.

    Published measurements support the defaults. NCCL's authors expect 370 GB/s of NVLink's 450 on 8 H100, and 480 for
    an all-reduce inside the switches (NVIDIA/nccl-tests, issue 212). "How to Scale Your Model" measures 0.95 of the
    link rate of a TPU v5e in an all-gather, and assumes 1 us per hop.
    """

    start_ns: RealLike = typical(6e3, "starting one collective, for any bytes and devices.", log_sd=0.8)
    hop_share: RealLike = typical(0.8, "speed of a hop, as a share of the link data.", log_sd=0.7)
    all_reduce_share: RealLike = typical(0.82, "rate of an all-reduce, relative to the link rate.", log_sd=0.25)
    all_gather_share: RealLike = typical(0.82, "rate of an all-gather, relative to the link rate.", log_sd=0.25)
    reduce_scatter_share: RealLike = typical(0.82, "rate of a reduce-scatter, relative to the link rate.", log_sd=0.25)
    all_to_all_share: RealLike = typical(0.7, "rate of an all-to-all, relative to the link rate.", log_sd=0.35)
    permute_share: RealLike = typical(0.8, "rate of a permutation, relative to the link rate.", log_sd=0.35)


@dataclasses.dataclass(frozen=True)
class CollectivesModel(LatencyModel):
    """A collective: a start, hops in sequence, and the bytes of the busiest link.

    The model knows no topology: `collective_inputs` returns the link times at full rate.
    """

    name, version, is_choice = "collectives", 1, False
    inputs = FrozenDict({name: Input("ns", least=0.0, step=0) for name in ("busiest_ns", "hops_ns")})
    variants = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
    prior = prior_of(CollectiveCoefficients)  # pyright: ignore

    def terms_ns(self, coefficients: CollectiveCoefficients, runs: Runs, facts: Facts) -> Mapping[str, RealLike]:
        shares = [jnp.asarray(getattr(coefficients, f"{kind}_share")) for kind in self.variants]
        share = jnp.choose(jnp.asarray(runs.variant), shares, mode="clip")
        return {
            "start_ns": coefficients.start_ns,
            "hops_ns": jnp.asarray(runs.inputs["hops_ns"]) / coefficients.hop_share,
            "links_ns": jnp.asarray(runs.inputs["busiest_ns"]) / share,
        }


COLLECTIVES = CollectivesModel()


def memory_link(devices: int) -> Link:
    """Return the link between devices of one CPU, each of which has a share of the memory and the processors.

    The figures are orders of magnitude, not data-sheet values; a fit finds the shares.
    """
    rate = MEMORY_BYTES_PER_NS / devices
    return Link(name="memory", shape="switch", bytes_per_ns=rate, latency_ns=RENDEZVOUS_NS, devices=devices)


def collective_inputs(
    kind: str,
    moved_bytes: float,
    groups: Sequence[Sequence[int]],
    links: Sequence[Link],
    coordinates: Sequence[Sequence[int]] = (),
) -> dict[str, float]:
    """Return the link times of a collective at full rate: the inputs of `COLLECTIVES`.

    With `b` bytes and `n` devices, all-gather and reduce-scatter move `(n - 1) / n * b` to each device, an all-reduce
    twice as much. A device receives by one link of a switch. On a torus a device receives by two links for each ring
    dimension, and by one for each line. An all-to-all loads a link of a ring by `n / 8 * b`, of a line by `n / 4 * b`,
    and of a switch by `(n - 1) / n * b`. A permutation loads a link by `b` for each pair whose path uses the link.
    Groups that share links share their rates. A group beyond the nearest link gathers across units before it gathers
    inside; both overlap.

    Args:
        kind: one of `COLLECTIVES.variants`.
        moved_bytes: bytes on one device, of the result for an all-gather and of the operand for other kinds.
        groups: indices of devices that exchange data; for a permutation, pairs (source, target).
        links: nearest first; a link joins the indices `0` to `devices - 1`, the next `devices`, and so on.
        coordinates: torus coordinates by device index; not needed for switches.

    Returns:
        busiest_ns: time of the busiest link for its bytes at full rate.
        hops_ns: summed latency of the hops in sequence.

    Raises:
        ValueError: an unknown kind, negative bytes, no groups, devices that no link joins, or a torus without
            coordinates.

    Examples:
        >>> from rlxjax.devices import Link
        >>> ici = Link(name="ICI", shape="torus", bytes_per_ns=45.0, latency_ns=1e3, devices=256, wraps=16)
        >>> row = [tuple(range(16))], [ici], [(x, 0) for x in range(16)]
        >>> collective_inputs("all_gather", 96_000_000, *row)
        {'busiest_ns': 1000000.0, 'hops_ns': 8000.0}
        >>> collective_inputs("all_reduce", 96_000_000, *row)["busiest_ns"]
        2000000.0
    """
    if kind not in COLLECTIVES.variants:
        raise ValueError(f"kind: expected one of {', '.join(COLLECTIVES.variants)}, got {kind!r}")
    if not moved_bytes >= 0:
        raise ValueError(f"moved_bytes: expected a number of at least 0, got {moved_bytes}")
    if not groups and kind != "permute":
        raise ValueError(f"groups: expected the devices of each group of the {kind}, got none")
    places = (tuple(map(tuple, rows)) for rows in (groups, coordinates))
    of_byte_ns, hops_ns = _cost(kind, tuple(links), *places)
    return {"busiest_ns": moved_bytes * of_byte_ns, "hops_ns": hops_ns}


@functools.lru_cache(maxsize=1024)  # a program has the same groups many times
def _cost(kind: str, links: tuple[Link, ...], groups: _Places, coordinates: _Places) -> _Cost:
    of_byte_ns, hops_ns, unit = 0.0, 0.0, 1
    groups = tuple(group if kind == "permute" else tuple(sorted(group)) for group in groups)
    for link in links:
        # This link joins parts of groups within one block of its devices and across blocks of a nearer link.
        blocks = ((group, _blocks(group, link.devices)) for group in groups)
        parts = [(own, len(own) / len(group)) for group, cut in blocks for own in cut if len(_blocks(own, unit)) > 1]
        joined = _torus(kind, parts, link, coordinates) if link.shape == "torus" else _switch(kind, parts, link, unit)
        of_byte_ns, hops_ns, unit = max(of_byte_ns, joined[0]), hops_ns + joined[1], link.devices
    if apart := next((group for group in groups if len(_blocks(group, unit)) > 1), None):
        raise ValueError(f"links: expected one that joins the devices {min(apart)} and {max(apart)}, got none")
    passes = 2 if kind == "all_reduce" else 1
    return passes * of_byte_ns, passes * hops_ns


def _blocks(places: Sequence[int], devices: int) -> list[tuple[int, ...]]:
    """Return the indices in each block of `devices` devices, for an ordered group or a pair."""
    return [tuple(own) for _, own in itertools.groupby(places, lambda place: place // devices)]


def _switch(kind: str, parts: Sequence[_Part], link: Link, unit: int) -> _Cost:
    """Return the cost of the busiest device at a switch between units that nearer links join."""
    moved, steps = 0.0, 0
    for own, share in parts:
        units = len(_blocks(own, unit))
        of_kind = {"permute": (1.0, 1), "all_to_all": ((units - 1) / units * share, 1)}
        # Each device gathers its own part across units, in log2(units) steps by doubling.
        own_moved, own_steps = of_kind.get(kind, ((units - 1) / len(own), math.ceil(math.log2(units))))
        moved, steps = max(moved, own_moved), max(steps, own_steps)
    return moved / link.bytes_per_ns, steps * link.latency_ns


def _torus(kind: str, parts: Sequence[_Part], link: Link, coordinates: _Places) -> _Cost:
    """Return the cost of the busiest link of a torus."""
    if len(coordinates) <= max((place for own, _ in parts for place in own), default=-1):
        raise ValueError(f"coordinates: expected those of all devices in the torus of {link.name}")
    extents = [max(column) + 1 for column in zip(*coordinates, strict=True)]
    closed = [link.wraps is not None and extent % link.wraps == 0 for extent in extents]
    groups = [[coordinates[place] for place in own] for own, _ in parts]
    spans = [list((_way if kind == "permute" else _spans)(group, extents, closed)) for group in groups]
    loads = Counter(itertools.chain.from_iterable(span.links for own in spans for span in own))
    moved, hops = 0.0, 0
    for (own, share), own_spans in zip(parts, spans, strict=True):
        # Groups that share the busiest link of a dimension share its directions.
        rates = [(span, span.ways / max(loads[one] for one in span.links)) for span in own_spans]
        if kind == "permute":
            own_moved = max((1 / rate for _, rate in rates), default=0.0)
        elif kind == "all_to_all":
            own_moved = share * max((span.members**2 // 4 / span.members / rate for span, rate in rates), default=0.0)
        else:  # devices at the same place exchange nothing
            own_moved = (len(own) - 1) / len(own) / sum(rate for _, rate in rates) if rates else 0.0
        moved, hops = max(moved, own_moved), max(hops, sum(span.hops for span in own_spans))
    return moved / link.bytes_per_ns, hops * link.latency_ns


def _spans(group: Sequence[Sequence[int]], extents: Sequence[int], closed: Sequence[bool]) -> Iterator[_Span]:
    """Yield the use of each dimension by a group: a ring if the members are evenly spread over a closed dimension."""
    members = [sorted(set(column)) for column in zip(*group, strict=True)]
    for axis, (own, extent) in enumerate(zip(members, extents, strict=True)):
        if len(own) < 2:
            continue
        gaps = {after - before for before, after in itertools.pairwise([*own, own[0] + extent])}
        is_ring = closed[axis] and len(gaps) == 1
        first, end = (0, extent) if is_ring else (own[0], own[-1])
        lines = itertools.product(*members[:axis], range(first, end), *members[axis + 1 :])
        yield _Span([(axis, line) for line in lines], len(own), 1 + is_ring, (end - first) // (1 + is_ring))


def _way(pair: Sequence[Sequence[int]], extents: Sequence[int], closed: Sequence[bool]) -> Iterator[_Span]:
    """Yield the links from a source to a target, one dimension after the other, by the shorter direction of a ring."""
    place, target = map(tuple, pair)
    for axis, extent in enumerate(extents):
        ahead = target[axis] - place[axis]
        if closed[axis] and 2 * abs(ahead) > extent:
            ahead -= extent if ahead > 0 else -extent
        step = 1 if ahead > 0 else -1
        passed = ((place[axis] + step * hop) % extent for hop in range(abs(ahead)))
        links = [(axis, step, (*target[:axis], at, *place[axis + 1 :])) for at in passed]
        if links:
            yield _Span(links, 2, 1, len(links))
