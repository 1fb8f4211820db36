"""What links take for collectives: closed forms against simulated schedules, laws, and what the prior says of them."""

import itertools
from collections import Counter

import jax
import numpy as np
import pytest
from _tolerances import FLOAT64_RTOL
from hypothesis import given
from hypothesis import strategies as st

from calibrate.suites import suite_of
from rlxjax.calibration import CalibratedModel
from rlxjax.devices import Link
from rlxjax.fit import Cell, prior_posterior
from rlxjax.models import COLLECTIVES, collective_inputs, memory_link

KINDS = COLLECTIVES.variants
GATHERS = ("all_gather", "reduce_scatter")
RATE, HOP_NS = 3.0, 700.0
#: Shapes of tori, and the sizes whose multiples close to rings.
TORI = [((8,), 8), ((8,), 16), ((7,), 7), ((5,), 8), ((2, 4), 8), ((4, 4), 4), ((2, 4), 2), ((3, 4, 4), 4)]
NVLINK = Link(name="NVLink", shape="switch", bytes_per_ns=450.0, latency_ns=1e3, devices=8)
NETWORK = Link(name="network", shape="switch", bytes_per_ns=50.0, latency_ns=5e3, devices=1024)


def torus(wraps):
    return Link(name="ICI", shape="torus", bytes_per_ns=RATE, latency_ns=HOP_NS, devices=4096, wraps=wraps)


def places(shape):
    return list(itertools.product(*map(range, shape)))


def groups_along(shape, axes, stride=1):
    """Return groups of places that differ in some axes alone, of the first of these by multiples of a stride."""
    found = {}
    for number, place in enumerate(places(shape)):
        kept = [own % stride if axis == axes[0] else own for axis, own in enumerate(place) if axis not in axes[1:]]
        found.setdefault(tuple(kept), []).append(number)
    return list(found.values())


def way(source, target, shape, wraps):
    """Yield the directed links of the shortest way, dimension by dimension, with shares: both ways if equally long."""
    place = list(source)
    for axis, extent in enumerate(shape):
        ahead = (target[axis] - place[axis]) % extent
        back = extent - ahead
        ways = [(1, ahead)] if extent % wraps == 0 or target[axis] > place[axis] else [(-1, back)]
        if extent % wraps == 0:
            ways = [(1, ahead)] if ahead < back else [(-1, back)] if back < ahead else [(1, ahead), (-1, back)]
        for step, hops in ways:
            at = list(place)
            for _ in range(hops if target[axis] != place[axis] else 0):
                yield (axis, step, tuple(at)), 1 / len(ways)
                at[axis] = (at[axis] + step) % extent
        place[axis] = target[axis]


def loads(pairs, n_bytes, shape, wraps):
    found, at = Counter(), places(shape)
    for source, target in pairs:
        for link, share in way(at[source], at[target], shape, wraps):
            found[link] += share * n_bytes
    return found


def busiest(kind, n_bytes, groups, shape, wraps):
    return collective_inputs(kind, n_bytes, groups, [torus(wraps)], places(shape))["busiest_ns"] * RATE


@pytest.mark.parametrize(("shape", "wraps"), TORI)
def test_an_all_to_all_takes_what_the_busiest_link_of_shortest_ways_carries(shape, wraps):
    cases = [
        groups_along(shape, axes)
        for n in range(len(shape))
        for axes in itertools.combinations(range(len(shape)), n + 1)
    ]
    cases += [groups_along(shape, [0], stride) for stride in (2, 4) if shape[0] % stride == 0 and shape[0] > stride]
    for groups in cases:
        pairs = [pair for group in groups for pair in itertools.permutations(group, 2)]
        carried = loads(pairs, 840 / len(groups[0]), shape, wraps)
        np.testing.assert_allclose(
            busiest("all_to_all", 840, groups, shape, wraps), max(carried.values()), rtol=FLOAT64_RTOL
        )


@pytest.mark.parametrize("kind", GATHERS)
@pytest.mark.parametrize("n", [2, 3, 7, 8])
def test_a_gather_takes_what_the_busiest_link_of_a_schedule_carries(n, kind):
    for is_ring in (True, False):
        carried = Counter()
        for source, step in itertools.product(range(n), (1, -1)):
            # Half of a block goes round a ring each way; a line takes whole blocks to both ends.
            hops = n - 1 if is_ring else (n - 1 - source if step == 1 else source)
            for hop in range(hops):
                carried[(source + step * hop) % n, step] += 840 / n / (1 + is_ring)
        found = busiest(kind, 840, [range(n)], (n,), n if is_ring else 64)
        np.testing.assert_allclose(found, max(carried.values()), rtol=FLOAT64_RTOL)


def test_a_gather_over_a_square_torus_uses_the_links_of_both_dimensions():
    # Half of each block is gathered along the rows first, half along the columns, at the same time, then the other way.
    for k, wraps, ways in ((4, 4, 2), (4, 16, 1), (6, 2, 2)):
        phases = [(k - 1) * size * 840 / k**2 / 2 / ways for size in (1, k)]
        np.testing.assert_allclose(
            busiest("all_gather", 840, [range(k * k)], (k, k), wraps), sum(phases), rtol=FLOAT64_RTOL
        )


@pytest.mark.parametrize(("shape", "wraps"), [one for one in TORI if one[0] != (8,)])
def test_a_permutation_takes_its_busiest_link_and_the_longest_way(shape, wraps):
    rng, count = np.random.default_rng(0), int(np.prod(shape))
    at = places(shape)
    for _ in range(20):
        # Ways of equal length round a ring may be taken either way: pairs have one shortest way.
        pairs = [(a, b) for a, b in enumerate(rng.permutation(count).tolist()) if a != b]
        pairs = [(a, b) for a, b in pairs if all(share == 1 for _, share in way(at[a], at[b], shape, wraps))]
        found = collective_inputs("permute", 840, pairs, [torus(wraps)], at)
        expected = max(loads(pairs, 840, shape, wraps).values(), default=0)
        np.testing.assert_allclose(found["busiest_ns"] * RATE, expected, rtol=FLOAT64_RTOL)
        longest = max((len(list(way(at[a], at[b], shape, wraps))) for a, b in pairs), default=0)
        assert found["hops_ns"] == longest * HOP_NS


def test_a_dimension_that_closes_halves_the_time_of_a_line_and_about_its_hops():
    for kind in KINDS[:4]:
        line, ring = (collective_inputs(kind, 960, [range(8)], [torus(wraps)], places((8,))) for wraps in (16, 8))
        assert ring["busiest_ns"] == line["busiest_ns"] / 2
        assert (line["hops_ns"], ring["hops_ns"]) == tuple(HOP_NS * (1 + (kind == "all_reduce")) * n for n in (7, 4))


def test_groups_that_share_links_share_their_rate():
    for kind in GATHERS:
        alone = busiest(kind, 840, [range(4)], (4,), 64)
        assert busiest(kind, 840, [(0, 1, 2, 3), (4, 5, 6, 7)], (8,), 64) == alone
        assert busiest(kind, 840, [(0, 2, 4, 6), (1, 3, 5, 7)], (8,), 64) == 2 * alone


@given(st.sampled_from(KINDS[:4]), st.sampled_from(TORI), st.integers(0, 2**40), st.floats(0.1, 10), st.floats(0.1, 10))
def test_laws_of_bytes_units_and_of_an_all_reduce(kind, own, n_bytes, rate, latency):
    shape, wraps = own
    groups, link = groups_along(shape, [len(shape) - 1]), torus(wraps)
    scaled = link.model_copy(update={"bytes_per_ns": rate * RATE, "latency_ns": latency * HOP_NS})
    for links, coordinates in (([link], places(shape)), ([NVLINK, NETWORK], ())):
        once = collective_inputs(kind, n_bytes, groups, links, coordinates)
        more = collective_inputs(kind, 2 * n_bytes + 1, groups, links, coordinates)
        assert more["busiest_ns"] > once["busiest_ns"]
        assert more["hops_ns"] == once["hops_ns"] > 0
        both = [collective_inputs(each, n_bytes, groups, links, coordinates) for each in GATHERS]
        total = collective_inputs("all_reduce", n_bytes, groups, links, coordinates)
        for name, value in total.items():
            np.testing.assert_allclose(value, sum(part[name] for part in both), rtol=FLOAT64_RTOL)
    first, other = (collective_inputs(kind, n_bytes, groups, [one], places(shape)) for one in (link, scaled))
    np.testing.assert_allclose(other["busiest_ns"], first["busiest_ns"] / rate, rtol=FLOAT64_RTOL)
    np.testing.assert_allclose(other["hops_ns"], first["hops_ns"] * latency, rtol=FLOAT64_RTOL)


def test_devices_at_a_switch_take_what_one_of_them_receives():
    for n in (2, 5, 8):
        found = {kind: collective_inputs(kind, 9e9, [range(n)], [NVLINK, NETWORK]) for kind in KINDS[:4]}
        moved_ns = (n - 1) / n * 9e9 / 450
        for kind, passes in zip(KINDS, (2, 1, 1, 1), strict=False):
            np.testing.assert_allclose(found[kind]["busiest_ns"], passes * moved_ns, rtol=FLOAT64_RTOL)
        assert found["all_gather"]["hops_ns"] == 1e3 * np.ceil(np.log2(n))
    shift = [(place, (place + 1) % 8) for place in range(8)]
    assert collective_inputs("permute", 9e9, shift, [NVLINK]) == {"busiest_ns": 2e7, "hops_ns": 1e3}
    assert collective_inputs("permute", 9e9, [(7, 8)], [NVLINK, NETWORK])["busiest_ns"] == 9e9 / 50


def test_groups_beyond_a_switch_gather_across_first_each_device_its_part():
    nodes, inside = 4, 8
    found = collective_inputs("all_gather", 9e9, [range(nodes * inside)], [NVLINK, NETWORK])
    across_ns, inside_ns = (nodes - 1) / nodes * 9e9 / inside / 50, (inside - 1) / inside * 9e9 / 450
    np.testing.assert_allclose(found["busiest_ns"], max(across_ns, inside_ns), rtol=FLOAT64_RTOL)
    assert found["hops_ns"] == 2 * 5e3 + 3 * 1e3
    exchanged = collective_inputs("all_to_all", 9e9, [range(nodes * inside)], [NVLINK, NETWORK])
    np.testing.assert_allclose(exchanged["busiest_ns"], (nodes - 1) / nodes * 9e9 / 50, rtol=FLOAT64_RTOL)
    # One device of each node: all bytes go over the network.
    apart = collective_inputs("all_gather", 9e9, [range(first, 32, 8) for first in range(8)], [NVLINK, NETWORK])
    np.testing.assert_allclose(apart["busiest_ns"], 0.75 * 9e9 / 50, rtol=FLOAT64_RTOL)


def test_a_group_of_one_device_takes_nothing():
    for kind in KINDS:
        alone = [(0, 0), (1, 1)] if kind == "permute" else [(0,), (1,)]
        for links, coordinates in (([NVLINK], ()), ([torus(4)], places((4,))), ([], ())):
            assert collective_inputs(kind, 9e9, alone, links, coordinates) == {"busiest_ns": 0.0, "hops_ns": 0.0}


def test_what_cannot_be_is_refused_in_one_line():
    for said, given_ in {
        "kind: expected one of all_reduce": ("reduce", 1, [range(2)], [NVLINK]),
        "moved_bytes: expected a number of at least 0, got nan": ("permute", np.nan, [(0, 1)], [NVLINK]),
        "groups: expected the devices of each group": ("all_gather", 1, [], [NVLINK]),
        "links: expected one that joins the devices 0 and 8": ("all_gather", 1, [(0, 8)], [NVLINK]),
        "coordinates: expected those of all devices in the torus of ICI": ("all_gather", 1, [(0, 1)], [torus(4)]),
        "collectives: expected several local devices, got one; a CPU has eight with XLA_FLAGS": None,
    }.items():
        with pytest.raises(ValueError, match=f"^{said}") as caught:
            collective_inputs(*given_) if given_ else suite_of("collectives").cells()
        assert "\n" not in str(caught.value)


def test_a_prior_without_any_fit_holds_what_is_published():
    known = CalibratedModel(prior_posterior(COLLECTIVES), {}, {}, {})
    large = collective_inputs("all_reduce", 8e9, [range(8)], [NVLINK])
    for kind in KINDS:
        low, high = known.interval_ns(kind, **large)
        assert 1.5 < high / low < 4.0  # a factor of at most 2 each way
    # Bus bandwidths of 8 H100 in GB/s: NCCL's authors, by rings and by the switches' own sums (nccl-tests, issue 212).
    low, high = known.interval_ns("all_reduce", **large)
    for bus_bandwidth in (370, 480):
        assert low < 2 * 7 / 8 * 8e9 / bus_bandwidth < high
    # Each kind is a work of its own: nothing is picked among them.
    assert known.strategies == ()
    with pytest.raises(ValueError, match="expected"):
        known.pick(**large)


def test_a_cpu_shares_its_memory_among_its_devices():
    for devices in (2, 8):
        found = collective_inputs("all_gather", 2**20, [range(devices)], [memory_link(devices)])
        everyone = memory_link(2).bytes_per_ns * 2
        np.testing.assert_allclose(found["busiest_ns"], (devices - 1) * 2**20 / everyone, rtol=FLOAT64_RTOL)


def test_the_suite_of_samples_is_found_where_there_is_one_device():
    assert jax.local_device_count() == 1
    suite = suite_of("collectives")
    assert suite.model is COLLECTIVES
    cells = [Cell("permute 16384 of 2", "permute", {"busiest_ns": 1.0, "hops_ns": 1.0})]
    assert suite.runs(cells).inputs["hops_ns"].tolist() == [1.0]
