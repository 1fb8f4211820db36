"""The latency model of collectives between devices: the bytes on the busiest link, and the hops."""

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

#: Uncalibrated figures of a CPU: its copy rate, and the time until all of its threads meet.
MEMORY_BYTES_PER_NS, RENDEZVOUS_NS = 10.0, 2e4

_Places = tuple[tuple[int, ...], ...]
#: Time per byte on the busiest link, and the time of all hops in sequence, in ns.
_Cost = tuple[float, float]
#: Those devices of a group that a link joins, and the fraction of the group that they are.
_Part = tuple[tuple[int, ...], float]


class _Span(NamedTuple):
    """How a group uses a torus dimension: its links, and its numbers of members, receiving directions and hops."""

    links: list[tuple[Any, ...]]
    members: int
    ways: int
    hops: int


@coefficients
@dataclasses.dataclass(frozen=True)
class CollectiveCoefficients(Coefficients):
    """Coefficients of a collective on one machine; each field is positive, `[*batch]`. Shares refer to the links' data.

    Published measurements support the defaults. On 8 H100 GPUs, NCCL's authors expect 370 GB/s of NVLink's 450 GB/s, or
    480 GB/s if the switches do the all-reduce (NVIDIA/nccl-tests, issue 212). "How to Scale Your Model" measures an
    all-gather on TPUs v5e at 0.95 of the link rate, and assumes 1 us per hop.
    """

    start_ns: RealLike = typical(6e3, "time to start a collective, with any number of bytes and devices.", log_sd=0.8)
    hop_share: RealLike = typical(0.8, "hop latency in the link data, divided by the real hop latency.", log_sd=0.7)
    all_reduce_share: RealLike = typical(0.82, "rate of an all-reduce, relative to the link rate.", log_sd=0.25)
    all_gather_share: RealLike = typical(0.82, "rate of an all-gather, relative to the link rate.", log_sd=0.25)
    reduce_scatter_share: RealLike = typical(0.82, "rate of a reduce-scatter, relative to the link rate.", log_sd=0.25)
    all_to_all_share: RealLike = typical(0.7, "rate of an all-to-all, relative to the link rate.", log_sd=0.35)
    permute_share: RealLike = typical(0.8, "rate of a permutation, relative to the link rate.", log_sd=0.35)


@dataclasses.dataclass(frozen=True)
class CollectivesModel(LatencyModel):
    """The time of a collective: the start, the hops in sequence, and the bytes on the busiest link.

    The model itself knows no topology. Its inputs are link times at full rate, which `collective_inputs` computes.
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
    """Return a link between JAX devices of the same CPU. They share its memory and its processors equally.

    The rate and the latency are orders of magnitude, not data-sheet values. Fitted coefficients correct them.
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
    """Return the inputs of `COLLECTIVES`: the times of a collective's bytes and hops, with links at full rate.

    Let `b` be `moved_bytes`, and `n` the number of devices in a group. An all-gather or a reduce-scatter moves
    `(n - 1) / n * b` bytes to each device; an all-reduce moves twice as many. A device receives through one
    link of a switch. On a torus, it receives through two links for each ring dimension, and one for each line. An
    all-to-all puts `n / 8 * b` bytes on a link of a ring, `n / 4 * b` on a link of a line, and `(n - 1) / n * b` on a
    link of a switch. A permutation puts `b` bytes on a link for each pair whose path includes the link. Groups that use
    the same link share its rate. Far links are used before near links; their transfers overlap.

    Args:
        kind: one of `COLLECTIVES.variants`.
        moved_bytes: bytes on one device: of the result of an all-gather, or of the operand of any other kind.
        groups: for each group, indices of the devices that exchange data. For a permutation, pairs (source, target).
        links: kinds of links, nearest first. Each joins the first `devices` indices, the next `devices`, and so on.
        coordinates: for each device index, its coordinates in the torus; not needed without a torus.

    Returns:
        busiest_ns: time that the busiest link takes for its bytes at full rate.
        hops_ns: sum of the latencies of the hops that follow each other.

    Raises:
        ValueError: the kind is unknown, the bytes are negative, groups or torus coordinates are missing, or no link
            joins the devices of a group.

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
    """Split a sorted group, or a pair, by blocks of `devices` consecutive indices."""
    return [tuple(own) for _, own in itertools.groupby(places, lambda place: place // devices)]


def _switch(kind: str, parts: Sequence[_Part], link: Link, unit: int) -> _Cost:
    """Return the cost of the busiest device at a switch that joins units. Nearer links join the devices of a unit."""
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
    """Yield how a group uses each dimension: as a ring if the dimension is closed and members are evenly spread."""
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
    """Yield the links from a source to a target, dimension by dimension. A ring is passed in the shorter direction."""
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
