"""Costs of profiles, graphs and strategies against SPEC 3 and 5 written out; picks; derivatives; refusals."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import (
    FLOAT32_RTOL,
    FLOAT64_RTOL,
    GRADIENT_RTOL,
    SATURATED_ATOL,
    assert_close,
    assert_gradient_is_the_finite_difference,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import rlxjax as rx

INF = math.inf
PROFILES = [
    rx.GraphIoProfile(),
    rx.GraphIoProfile(3, 0, 128, 6272),
    rx.GraphIoProfile(7, 2, 1001, 4003),
    rx.GraphIoProfile(24_576, 1, 2**40 + 1, 2**42 + 3),
]
#: What is known of a learned FFT: whether there is one, its gates that are on, all of them.
MODELS = [(False, None, 0), (True, None, 1024), (True, 255, 1024), (True, 256, 1024), (True, 0, 0), (False, 1, 1024)]
BATCHES = [1, 128, 129, 256, 257, 1024, 8191, 8192, 65_536]
MIX = np.array([0.3, -1.0, 2.0, 0.7])

lawful = settings(max_examples=40)
profiles = st.builds(rx.GraphIoProfile, *[st.integers(0, 2**20)] * 2, *[st.integers(0, 2**45)] * 2)
batches = st.one_of(st.integers(1, 2**17), st.sampled_from([128, 129, 511, 512, 2047, 2048, 8191, 8192]))
even = st.integers(1, 2048).map(lambda half: 2 * half)
devices = st.sampled_from(list(rx.Device))
sets = st.sampled_from(["arch", "portable"])
peaks = st.integers(1, 64)
models = st.sampled_from(MODELS)


# --- SPEC 3, written out -------------------------------------------------------------------------


def io_cost(profile, row):
    launches, syncs, host, traffic = vars(profile).values()
    readback = host if row.unified_memory else host + traffic // 4
    return (
        row.roundtrip_ns * (1 + syncs)
        + row.dispatch_ns * launches
        + traffic / max(row.memory_bw, 1)
        + readback / max(row.readback_bw, 1)
    )


def node_cost(graph, node, row):
    if node.op in ("input", "param", "constant"):
        return 0
    if node.op == "matmul":
        k = graph.nodes[node.inputs[0]].shape[-1]
        mkn = math.prod(node.shape) * k
        gflops = row.small_sgemm_gflops if mkn < 32_768 else row.sgemm_gflops
        return 2 * mkn / (gflops + 1) + row.dispatch_ns
    if node.op == "attention":
        batch, heads, seq, head_dim = node.shape
        return 2 * batch * heads * seq**2 * head_dim / (row.sgemm_gflops + 1) + row.dispatch_ns
    return math.prod(node.shape) * 4 / max(row.memory_bw, 1) + row.dispatch_ns


def graph_cost(graph, row):
    io = dataclasses.replace(rx.profile_graph_io(graph), kernel_launches=0)
    return io_cost(io, row) + sum(node_cost(graph, node, row) for node in graph.nodes)


def device_cost(graph, name, coefficients):
    row = rx.backend_coefficients(name, coefficients)
    if row is not rx.gate.BACKEND_ROWS["discrete"]:
        return graph_cost(graph, row)
    nodes = sum(node.op not in ("input", "param") for node in graph.nodes)
    return io_cost(rx.profile_graph_io(graph), row) + row.dispatch_ns * nodes


def sample_graph(rows=6, inner=8):
    """Return a graph with a node of every kind of cost, views, constants and a sync included."""
    graph = rx.Graph()
    x, w, c = graph.input("x", (rows, inner)), graph.param("w", (inner, 5)), graph.constant("c", (rows, 5))
    total = graph.add("add", [graph.add("matmul", [x, w]), c])
    half = graph.add("cast", [graph.add("reshape", [total], shape=(5, rows))], to="f16")
    q = graph.add("reshape", [x], shape=(1, 2, rows, inner // 2))
    synced = graph.add("custom", [half, graph.add("attention", [q, q, q])], shape=(3, 7), dtype="f64")
    graph.set_outputs([synced, total, x])
    return graph


def products(m, k, n):
    graph = rx.Graph()
    graph.add("matmul", [graph.input("a", (m, k)), graph.input("b", (k, n))])
    return graph


GRAPHS = {
    "empty": rx.Graph(),
    "small": sample_graph(),
    "large": sample_graph(512, 1024),
    "welch": rx.welch_peaks_graph(64, rx.WelchPeakParams.fast(256, 16)),
    # Around 32768 multiply-adds, from which on a product runs at the large rate.
    **{f"product of {size}": products(*size) for size in ((32, 32, 32), (31, 32, 33), (1, 32_768, 1), (1, 1, 1))},
}


def stacked(coefficients="arch"):
    return rx.backend_coefficients(np.arange(len(rx.Device)), coefficients)


def test_costs_of_profiles_and_graphs_are_the_closed_forms():
    for row in (
        *rx.gate.BACKEND_ROWS.values(),
        dataclasses.replace(rx.gate.BACKEND_ROWS["cpu"], memory_bw=0.5, readback_bw=0.0),
    ):
        for profile in PROFILES:
            np.testing.assert_allclose(rx.io_cost_ns(profile, row), io_cost(profile, row), rtol=FLOAT64_RTOL)
        for graph in GRAPHS.values():
            np.testing.assert_allclose(rx.graph_cost_ns(graph, row), graph_cost(graph, row), rtol=FLOAT64_RTOL)


def test_the_cost_of_a_device_is_that_of_its_row_or_of_the_fallback():
    for coefficients, graph in itertools.product(("arch", "portable"), GRAPHS.values()):
        for device in rx.Device:
            (cost,) = rx.rank_devices(graph, [device], coefficients=coefficients).costs.values()
            np.testing.assert_allclose(cost, device_cost(graph, device, coefficients), rtol=FLOAT64_RTOL)
    assert [rx.rank_devices(GRAPHS["small"], [name]).device for name in ("CPU", "wgpu")] == ["cpu", "gpu"]


@lawful
@given(profiles, st.sampled_from(list(vars(PROFILES[0]))), st.integers(1, 2**30))
def test_a_larger_profile_costs_no_less(profile, name, more):
    larger = dataclasses.replace(profile, **{name: getattr(profile, name) + more})
    for row in rx.gate.BACKEND_ROWS.values():
        smaller = float(rx.io_cost_ns(profile, row))
        assert rx.io_cost_ns(larger, row) >= smaller * (1 - FLOAT64_RTOL)


@lawful
@given(profiles, st.integers(-6, 6), st.sampled_from(list(rx.gate.BACKEND_ROWS.values())))
def test_a_cost_scales_with_the_unit_of_time(profile, exponent, row):
    unit = 2.0**exponent
    wide = dataclasses.replace(row, memory_bw=row.memory_bw * 64, readback_bw=row.readback_bw * 64)
    per_time = {name: getattr(wide, name) / unit for name in ("memory_bw", "readback_bw")}
    scaled = dataclasses.replace(
        row, dispatch_ns=row.dispatch_ns * unit, roundtrip_ns=row.roundtrip_ns * unit, **per_time
    )
    np.testing.assert_array_equal(rx.io_cost_ns(profile, scaled), rx.io_cost_ns(profile, wide) * unit)


def test_a_table_of_profiles_and_devices_is_one_call():
    names = list(vars(PROFILES[0]))
    table = rx.GraphIoProfile(**{name: np.array([[getattr(profile, name)] for profile in PROFILES]) for name in names})
    row = jax.tree.map(lambda leaf: leaf[None], stacked())
    expected = [[io_cost(profile, rx.backend_coefficients(d)) for d in rx.Device] for profile in PROFILES]
    np.testing.assert_allclose(rx.io_cost_ns(table, row), expected, rtol=FLOAT64_RTOL)
    floats = jax.tree.map(lambda count: count.astype(float), table)
    np.testing.assert_allclose(jax.jit(rx.io_cost_ns)(floats, row), expected, rtol=FLOAT64_RTOL)
    with jax.enable_x64(False):
        costs = rx.io_cost_ns(table, jax.tree.map(lambda leaf: leaf[None], stacked()))
    assert costs.dtype == jnp.float32
    np.testing.assert_allclose(costs, expected, rtol=FLOAT32_RTOL)


def test_a_graph_on_all_rows_is_one_call_vmap_is_a_loop_and_a_whole_row_has_a_gradient():
    table = dataclasses.replace(stacked(), provenance="uncalibrated")
    for graph in (GRAPHS["small"], GRAPHS["welch"]):
        loop = [graph_cost(graph, rx.backend_coefficients(device)) for device in rx.Device]
        cost = jax.jit(lambda row, graph=graph: rx.graph_cost_ns(graph, row))
        for costs in (rx.graph_cost_ns(graph, table), cost(table), jax.vmap(cost)(table)):
            np.testing.assert_allclose(costs, loop, rtol=FLOAT64_RTOL)
        assert_gradient_is_the_finite_difference(cost, stacked())
    for profile in PROFILES:
        assert_gradient_is_the_finite_difference(jax.jit(lambda row, p=profile: rx.io_cost_ns(p, row)), stacked())


# --- Paths and profiles in closed form: the golden tables have the rest --------------------------


@lawful
@given(batches, even, peaks, sets, st.integers(1, 8), st.floats(0, 2))
def test_a_path_of_any_segments_on_the_cpu_is_the_cost_of_its_graph_or_profile(batch, n_fft, k, set_, segments, scale):
    params, options = rx.WelchPeakParams(n_fft, segments, k), {"coefficients": set_, "n_segments": segments}
    workload, row = ("cpu", batch, n_fft, k), rx.backend_coefficients("cpu")
    fused_ns, block_ns = (graph_cost(rx.welch_peaks_graph(batch, params, fused), row) for fused in (True, False))
    for value, expected in (
        (rx.fused_graph_ns(*workload, scale, **options), fused_ns * min(max(scale, 0.25), 1.0)),
        (rx.block_graph_ns(*workload, **options), block_ns),
        (rx.welch.host_path_ns(*workload, **options), io_cost(rx.host_fft_profile(batch, params), row)),
    ):
        np.testing.assert_allclose(value, expected, rtol=FLOAT64_RTOL)


@lawful
@given(st.integers(1, 2**40), even, peaks, st.integers(1, 9))
def test_the_host_profile_and_the_useful_bytes_are_exact(batch, n_fft, k, segments):
    params, rows = rx.WelchPeakParams(n_fft, segments, k), batch * segments
    traffic = 12 * rows * n_fft + 8 * batch * k
    expected = rx.GraphIoProfile(rows + batch, 0, 8 * batch * k, traffic)
    assert rx.host_fft_profile(batch, params) == expected
    assert rx.useful_bytes_touched(batch, params) == 4 * rows * n_fft + 8 * batch * k
    table = rx.host_fft_profile(np.array([1, batch]), params)
    assert table.device_traffic_bytes[1] == traffic


def test_the_bandwidth_of_an_algorithm_is_bytes_over_time_and_0_without_time():
    bandwidth = rx.algorithm_bandwidth_gbps(2176, np.array([1000.0, 0.0, -5.0]))
    np.testing.assert_array_equal(bandwidth, [2.176, 0, 0])
    assert jax.grad(rx.algorithm_bandwidth_gbps, 1)(2176.0, 0.0) == 0


# --- Tables, transformations, precision ----------------------------------------------------------

CODES, BATCH = np.arange(12)[:, None], np.array([[1, 129, 9000]])
FUNCTIONS = {
    "costs": lambda d, b, n, k: rx.estimate_welch_peaks_costs(d, b, n, k, True, 10, 1024).stack(),
    "breakdown": lambda d, b, n, k: rx.welch_peaks_fusion_gate_breakdown(d, b, n, k).score_ns,
    "fused": rx.fused_graph_ns,
    "block": rx.block_graph_ns,
    "host": rx.welch.host_path_ns,
    "soft_fused": lambda d, b, n, k: rx.soft_fused_graph_ns(d, b, n, k, temperature_ns=1e4),
    "soft_pick": lambda *work: rx.soft_pick_welch_peaks_strategy(*work, True, 10, 1024, temperature_ns=1e5),
}


def test_tables_are_their_scalars_under_jit_and_vmap_too():
    def everything(*workload):
        soft = rx.soft_estimate_welch_peaks_costs(*workload, True, 10, 1024, temperature_ns=1e5)
        found = {"soft_costs": soft.costs.stack(), "log_availability": soft.log_availability()}
        table = rx.welch.evaluate_welch_peaks(*workload, temperature_ns=1e7)
        found |= {"evaluated": table.score_ns, "probability": table.fuse_probability}
        return found | {name: f(*workload) for name, f in FUNCTIONS.items()}

    n_fft, k = np.array([[256], [1024]] * 6), 16
    rows = [
        [everything(device, batch, int(n[0]), k) for batch in BATCH[0].tolist()]
        for device, n in zip(rx.Device, n_fft, strict=True)
    ]
    tables = {
        "one call": everything(CODES, BATCH, n_fft, k),
        "jit of vmap": jax.jit(jax.vmap(everything, (0, None, 0, None)))(CODES[:, 0], BATCH[0], n_fft[:, 0], k),
    }
    for name in tables["one call"]:
        scalars = [[one[name] for one in row] for row in rows]
        for how, table in tables.items():
            np.testing.assert_allclose(
                table[name], scalars, rtol=FLOAT64_RTOL, atol=SATURATED_ATOL, err_msg=f"{name}, {how}"
            )


@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_large_batch_does_not_overflow(x64, transform):
    def costs(batch, n_fft):
        breakdown = rx.welch_peaks_fusion_gate_breakdown("cuda", batch, n_fft, 64)
        estimate = rx.estimate_welch_peaks_costs("cuda", batch, n_fft, 64).stack()
        return estimate, breakdown.readback_saved_bytes

    expected = rx.estimate_welch_peaks_costs("cuda", 10.0**6, 4096.0, 64.0).stack()
    with jax.enable_x64(x64):
        estimate, saved = transform(costs)(np.int32(10**6), np.int32(4096))
    np.testing.assert_allclose(estimate, expected, rtol=FLOAT64_RTOL if x64 else FLOAT32_RTOL)
    np.testing.assert_allclose(saved, (16 * 4096 - 8 * 64) * 10**6, rtol=FLOAT64_RTOL if x64 else FLOAT32_RTOL)


# --- Coefficient sets ----------------------------------------------------------------------------


def test_a_set_of_ones_own_is_used():
    mine = rx.welch.coefficient_set("arch")
    mine = dataclasses.replace(mine, host=dataclasses.replace(mine.host, dispatch_ns=1_300.0))
    built_in, own = (rx.estimate_welch_peaks_costs("cpu", 100, 256, 16, coefficients=s) for s in ("arch", mine))
    np.testing.assert_allclose(own.stack()[:2] - built_in.stack()[:2], [200_000, 300_000], rtol=FLOAT32_RTOL)


@pytest.mark.parametrize("name", ["arch", "portable"])
def test_the_apple_cpu_is_a_set_of_its_own(name):
    plain, apple = rx.welch.coefficient_set(name), rx.welch.coefficient_set(name, "cpu-apple")
    assert apple.host is rx.gate.BACKEND_ROWS["cpu-apple"]
    changed = jax.tree.map(lambda a, b: np.flatnonzero(a != b).tolist(), plain.backend, apple.backend)
    assert {tuple(leaf) for leaf in vars(changed).values() if isinstance(leaf, list)} <= {(), (0,)}
    assert apple.backend.dispatch_ns[0] == 500
    by_name = rx.estimate_welch_peaks_costs("CPU_Apple", 100, 256, 16, coefficients=name).stack()
    by_set = rx.estimate_welch_peaks_costs("cpu", 100, 256, 16, coefficients=apple).stack()
    np.testing.assert_array_equal(by_name, by_set)


def test_metal_fuses_from_1024_rows_on_and_discrete_devices_8192_rows_without_a_sync_point():
    for batch, fuses in ((256, False), (1024, True), (4096, True), (8192, True)):
        assert bool(rx.welch_peaks_fusion_gate_breakdown("metal", batch, 256, 16).should_fuse) is fuses
    for device in ("gpu", "cuda"):
        breakdown = rx.welch_peaks_fusion_gate_breakdown(device, 8192, 256, 16)
        assert breakdown.should_fuse
        assert breakdown.sync_points_saved == 0
        assert breakdown.readback_saved_bytes > 0


# --- The hard pick -------------------------------------------------------------------------------


def test_the_earliest_of_the_cheapest_is_picked():
    for costs in itertools.product([1.0, 2.0, INF], repeat=4):
        assert rx.WelchPeaksCostEstimates(*costs).pick_index() == costs.index(min(costs))


@lawful
@given(devices, batches, models, sets)
def test_the_pick_is_the_cheapest_strategy(device, batch, model, set_):
    pick = rx.pick_welch_peaks_strategy(device, batch, 256, 16, *model, coefficients=set_)
    costs = rx.estimate_welch_peaks_costs(device, batch, 256, 16, *model, coefficients=set_)
    assert isinstance(pick, rx.welch.ReferenceStrategy)
    assert getattr(costs, f"{pick}_ns") == min(vars(costs).values()) < INF


def legacy(device, batch, available, active, total):
    large = device != "cpu" and batch >= 8192
    sparse = active is not None and total > 0 and 4 * active < total
    if large:
        return "learned" if available and sparse else "rlx"
    return "ultra" if batch <= (256 if device == "cpu" else 128) else "fast"


@pytest.mark.parametrize("is_legacy", [False, True])
def test_a_mixed_table_of_picks_is_one_call(is_legacy):
    rows = list(itertools.product(rx.Device, BATCHES, MODELS))
    columns = [rx.Device.codes([device for device, _, _ in rows]), np.array([batch for _, batch, _ in rows])]
    columns += [np.array([-1 if model[i] is None else model[i] for *_, model in rows]) for i in range(3)]

    def pick(device, batch, *model):
        return rx.pick_welch_peaks_strategy(device, batch, 256, 16, *model, legacy=is_legacy)

    found = pick(*columns)
    for transform in (jax.jit, jax.vmap):
        np.testing.assert_array_equal(transform(pick)(*columns), found)
    names = [list(rx.welch.ReferenceStrategy)[code] for code in found]
    assert names[::7] == [pick(device, batch, *model) for device, batch, model in rows[::7]]
    if is_legacy:
        assert names == [legacy(device, batch, *model) for device, batch, model in rows]


def test_a_name_means_its_strategy_however_it_is_spelt():
    names = {
        "auto": ["auto", ""],
        "ultra": ["ultra", "ultra_fast", "ultra_fast_rustfft", "1seg"],
        "fast": ["fast", "streaming", "fast_streaming", "fast_streaming_rustfft", "rustfft", "2seg"],
        "rlx": ["rlx", "rlx_compiled", "compiled", "gpu", "fused"],
        "learned": ["learned", "learned_compiled"],
    }
    for meaning, alias in ((meaning, alias) for meaning, aliases in names.items() for alias in aliases):
        for spelt in (alias, alias.upper(), alias.title(), alias.replace("_", "-"), f" {alias} "):
            assert rx.parse_welch_peaks_strategy(spelt) == meaning
    for name in ("block", "host", "3seg", "ultra fast", "rlx_"):
        with pytest.raises(ValueError, match=f"strategy: expected one of auto, ultra, .*2seg.*got '{name}'"):
            rx.parse_welch_peaks_strategy(name)


# --- The softmin ---------------------------------------------------------------------------------

costs_ns = st.one_of(st.floats(1, 1e9), st.sampled_from([1.0, 2.0, INF]))


@lawful
@given(st.sampled_from([1, 2, 6]).flatmap(lambda n: st.lists(costs_ns, min_size=n, max_size=n)), st.floats(1e-3, 1e9))
def test_weights_are_the_softmin_and_sum_to_one(costs, temperature):
    weights = rx.pick_weights(np.array(costs), temperature_ns=temperature)
    best = min(costs)
    if best == INF:
        np.testing.assert_array_equal(weights, 0)
        return
    exponentials = [math.exp(-(cost - best) / temperature) if cost < INF else 0.0 for cost in costs]
    expected = np.array(exponentials) / sum(exponentials)
    np.testing.assert_allclose(weights, expected, rtol=FLOAT64_RTOL, atol=SATURATED_ATOL)
    np.testing.assert_allclose(weights.sum(), 1, rtol=FLOAT64_RTOL)
    assert all(weight == 0 for cost, weight in zip(costs, weights, strict=True) if cost == INF)


@jax.jit
def mixed(costs, temperature, log_availability):
    weights = rx.pick_weights(costs, temperature_ns=temperature, log_availability=log_availability)
    return weights @ MIX[:3], weights


def test_no_gradient_of_the_weights_is_nan_and_the_impossible_has_none():
    gradient = jax.jit(jax.grad(mixed, (0, 1, 2), has_aux=True))
    for costs, log_availability in itertools.product(
        itertools.product([3.0, 5.0, INF], repeat=3), [(0.0, 0.0, 0.0), (0.0, -INF, -1.0), (-INF, -INF, -INF)]
    ):
        gradients, weights = gradient(np.array(costs), 2.0, np.array(log_availability))
        assert all(np.isfinite(gradient).all() for gradient in gradients)
        impossible = np.isinf(costs) | np.isinf(log_availability)
        np.testing.assert_array_equal(gradients[0][impossible], 0)
        np.testing.assert_array_equal(weights[impossible], 0)
    assert np.isnan(rx.pick_weights([1.0, np.nan, np.inf], temperature_ns=1.0)[:2]).all()


def test_weights_have_their_gradients():
    costs = np.random.default_rng(0).uniform(1e5, 1e6, (20, 4))
    tree = {"costs": costs, "temperature": np.ptp(costs, -1), "log_availability": np.log(costs / 1e6)}

    @jax.jit
    def f(tree):
        weights = rx.pick_weights(
            tree["costs"], temperature_ns=tree["temperature"], log_availability=tree["log_availability"]
        )
        return weights @ MIX

    assert_gradient_is_the_finite_difference(f, tree, scale=np.full(20, 10.0))


def test_estimates_and_integers_are_costs_too():
    estimates = rx.WelchPeaksCostEstimates(jnp.array([1.0, 3.0]), 2.0, INF, 1.0)
    weights = rx.pick_weights(estimates, temperature_ns=np.ones(2))
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=FLOAT64_RTOL)
    np.testing.assert_array_equal(*(rx.pick_weights(np.array([1, 2], t), temperature_ns=4.0) for t in (int, float)))


# --- The relaxed pick ----------------------------------------------------------------------------


@lawful
@given(devices, batches, models, st.floats(1, 1e9))
def test_a_relaxed_pick_is_a_distribution_over_what_is_possible(device, batch, model, temperature):
    arguments, options = (device, batch, 256, 16, *model), {"temperature_ns": temperature}
    weights = rx.soft_pick_welch_peaks_strategy(*arguments, **options)
    np.testing.assert_allclose(weights.sum(), 1, rtol=FLOAT64_RTOL)
    gpu, viable = device != "cpu", device not in ("cpu", "tpu")
    sparse = model[0] and model[1] is not None and 4 * model[1] < model[2]
    possible = np.array([not (gpu and batch > 128), True, viable, viable and sparse])
    np.testing.assert_array_equal(weights[~possible], 0)
    soft = rx.soft_estimate_welch_peaks_costs(*arguments, **options)
    np.testing.assert_array_equal(soft.available, possible)
    # The law of total probability over the fuse decision.
    fuse, keep = np.exp(soft.log_fuse_probability), np.exp(soft.log_keep_probability)
    np.testing.assert_allclose(fuse + keep, 1, rtol=FLOAT64_RTOL)
    assert np.isfinite(soft.costs.stack()).all()
    stacked = jnp.where(possible, soft.costs.stack(), INF)
    unfused = jnp.where(np.array([1, 1, 0, 0], bool), stacked, INF)
    expected = fuse * rx.pick_weights(stacked, **options) + keep * rx.pick_weights(unfused, **options)
    np.testing.assert_allclose(weights, expected, rtol=1e-9, atol=SATURATED_ATOL)


def test_straight_through_is_the_hard_pick_with_the_soft_gradient():
    def f(set_, temperature, straight):
        options = {"temperature_ns": temperature, "straight_through_gradient": straight}
        weights = rx.soft_pick_welch_peaks_strategy("metal", 1024, 256, 16, coefficients=set_, **options)
        return weights @ MIX, weights

    gradient = jax.value_and_grad(f, (0, 1), has_aux=True)
    both = jax.jit(lambda *at: [gradient(*at, straight) for straight in (True, False)])
    ((_, hard), by_hard), ((_, soft), by_soft) = both(rx.welch.coefficient_set(), 3e5)
    code = rx.pick_welch_peaks_strategy("metal", 1024, 256, 16).code
    np.testing.assert_array_equal(hard, np.eye(4)[code])
    assert 0 < soft[code] < 1
    for a, b in zip(jax.tree.leaves(by_hard), jax.tree.leaves(by_soft), strict=True):
        np.testing.assert_allclose(a, b, rtol=FLOAT64_RTOL, atol=0)
    assert any((leaf != 0).any() for leaf in jax.tree.leaves(by_soft))


def test_an_infinite_penalty_makes_no_nan_in_costs_and_picks():
    set_ = rx.welch.coefficient_set()
    set_ = dataclasses.replace(set_, gate=dataclasses.replace(set_.gate, host_thunk_penalty_ns=np.full(12, INF)))
    device, batch = rx.Device.codes(["metal", "cuda", "webgpu", "cpu"])[:, None], np.array([[100, 1024]])

    def f(set_, temperature):
        options = {"coefficients": set_, "temperature_ns": temperature}
        weights = rx.soft_pick_welch_peaks_strategy(device, batch, 256, 16, **options)
        soft = rx.soft_estimate_welch_peaks_costs(device, batch, 256, 16, **options)
        log_keep = soft.log_keep_probability
        return jnp.sum(weights @ MIX) + jnp.sum(log_keep), (weights, log_keep, soft.costs, soft.log_availability())

    (_, found), gradients = jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(set_, 1e6)
    np.testing.assert_allclose(found[0].sum(-1), 1, rtol=FLOAT64_RTOL)
    np.testing.assert_array_equal(found[0][..., 2:], 0)
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(found))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_a_relaxed_pick_in_float32_agrees():
    arguments, options = (np.arange(12), 1024, 256, 16, True, 10, 1024), {"temperature_ns": 1e7}
    exact = rx.soft_pick_welch_peaks_strategy(*arguments, **options)
    with jax.enable_x64(False):
        weights = rx.soft_pick_welch_peaks_strategy(*arguments, **options)
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights, exact, rtol=10 * FLOAT32_RTOL)


# --- Derivatives ---------------------------------------------------------------------------------


def floats(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, float), tree)


def finite(column):
    return jnp.where(jnp.isfinite(column), column, 0.0)


def gate_loss(gate, benefit):
    """Return a loss of score, log-odds and both probabilities, through methods and a table alike."""
    options = {"temperature_ns": 1e7}
    result = gate.evaluate(benefit, **options)
    log_odds, log_p = gate.fuse_log_odds(benefit, **options), gate.fuse_log_probability(benefit, **options)
    square = jnp.square(result.fuse_probability - 0.3) + jnp.square(1e-8 * result.score_ns)
    return jnp.mean(square + jax.nn.softplus(log_odds) - 0.3 * log_odds - log_p)


def io_loss(row, profile):
    cost_ns = rx.io_cost_ns(profile, row)
    return jnp.mean(jnp.log(cost_ns) + jnp.square(cost_ns / 1e4 - 1.0))


def strategy_loss(set_, *workload):
    """Return a loss of all strategies' costs, and of the gate's score and probability, mixed devices."""
    result = rx.welch.evaluate_welch_peaks(*workload, True, 10, 1024, coefficients=set_, temperature_ns=1e7)
    costs = jnp.mean(jnp.log1p(finite(result.costs.stack())))
    return costs + jnp.mean(jnp.arctan(1e-6 * result.score_ns) + result.fuse_probability)


def cases():
    rng = np.random.default_rng(0)
    benefit = rx.FusionBenefit(*rng.integers(-5, 6, (2, 40)), *rng.integers(-(2**30), 2**30, (2, 40)))
    profile = rx.GraphIoProfile(*(rng.integers(0, most, 40) for most in (20, 4, 2**10, 2**18)))
    sizes = rng.choice(BATCHES, 40), 2 ** rng.integers(1, 13, 40), rng.integers(1, 40, 40)
    workload = jnp.asarray(rng.integers(0, len(rx.Device), 40)), *floats(sizes)
    gate = rx.IoFusionGate(700.0, 9_000.0, 150.0, 30.0, 0.0, 4e6, 2_500.0)
    return {
        "gate": (gate_loss, floats(gate), (floats(benefit),)),
        "io": (io_loss, floats(rx.backend_coefficients("cuda")), (floats(profile),)),
        "strategies": (strategy_loss, floats(rx.welch.coefficient_set()), workload),
    }


CASES = cases()
#: Of many strategies, whose derivatives compile for long; the two other cases have the same laws.
each_case = pytest.mark.parametrize("name", ["gate", "io", pytest.param("strategies", marks=pytest.mark.slow)])


def scaled(coefficients, factors):
    """Return coefficients with the leaves multiplied in turn by one of some factors; flags stay."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(coefficients)
    flags = ("unified_memory", "is_gpu", "is_fused_viable", "has_native_kernel", "falls_back")
    return structure.unflatten(
        leaf if str(path[-1]).lstrip(".") in flags else leaf * factors[i % len(factors)]
        for i, (path, leaf) in enumerate(leaves)
    )


@functools.cache
def programs(name):
    """Return value, gradient, forward derivative and Hessian by three factors of the coefficients."""
    loss, coefficients, rows = CASES[name]
    of_factors = lambda factors: loss(scaled(coefficients, factors), *rows)  # noqa: E731
    return tuple(map(jax.jit, (of_factors, jax.grad(of_factors), jax.jacfwd(of_factors), jax.hessian(of_factors))))


@each_case
def test_derivatives_agree_to_second_order_over_many_sets_and_over_the_rows_of_a_table(name):
    value, gradient, forward, hessian = programs(name)
    at, step = jnp.array([0.93, 1.07, 1.11]), 1e-4
    np.testing.assert_allclose(forward(at), gradient(at), rtol=1e-9)
    for f, derivative in ((value, gradient(at)), (gradient, hessian(at))):
        moved = jnp.stack([(f(at + move) - f(at - move)) / (2 * step) for move in step * jnp.eye(3)], -1)
        assert_close(derivative, moved, 10 * GRADIENT_RTOL)
        assert np.all(np.asarray(derivative).any(-1))
    factors = jnp.array([[0.5, 0.6, 0.7], [1.0, 1.0, 1.0], [1.5, 2.0, 3.0]])
    assert_close(jax.vmap(gradient)(factors), jnp.stack([gradient(one) for one in factors]), 1e-10)
    loss, coefficients, rows = CASES[name]
    of_loss = jax.jit(jax.grad(loss))
    one_by_one = [of_loss(coefficients, *jax.tree.map(lambda x, i=i: x[i], rows)) for i in range(40)]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *one_by_one)
    assert_close(of_loss(coefficients, *rows), mean, 1e-9)


@pytest.mark.parametrize(("of_set", "of_batch"), [(np.float32, np.float64), (np.float64, np.float32)])
@pytest.mark.parametrize("device", ["cuda", np.arange(12)])
def test_a_gradient_has_the_types_of_what_it_is_of(device, of_set, of_batch):
    set_ = jax.tree.map(lambda leaf: jnp.asarray(leaf, of_set), rx.welch.coefficient_set())
    batch = jnp.asarray(2.0 ** np.arange(12), of_batch)
    for cost in (rx.estimate_welch_peaks_costs, rx.welch.host_path_ns, rx.fused_graph_ns):

        def loss(set_, batch, cost=cost):
            return sum(jnp.sum(finite(ns)) for ns in jax.tree.leaves(cost(device, batch, 256, 16, coefficients=set_)))

        with jax.numpy_dtype_promotion("standard"):
            by_set, by_batch = jax.eval_shape(jax.grad(loss, (0, 1)), set_, batch)
        assert {leaf.dtype for leaf in jax.tree.leaves(by_set)} == {np.dtype(of_set)}
        assert by_batch.dtype == of_batch


@functools.cache
def path_costs(name):
    """Return a cost of rows, each with a set of its own, by sizes that may have derivatives; of a code's device."""

    def costs_ns(tree, device):
        scale = {"scale": tree["scale"]} if name == "fused_graph_ns" else {}
        sizes = [tree[size] for size in ("batch", "n_fft", "k")]
        options = {"n_segments": tree["n_segments"], "coefficients": tree["set"]}
        return getattr(rx.welch, name)(device, *sizes, **options, **scale)

    return jax.vmap(costs_ns)


@pytest.mark.parametrize("name", ["host_path_ns", "fused_graph_ns"])
def test_the_gradient_of_a_path_by_sizes_segments_and_scale_is_the_finite_difference(name):
    segments, scale, batch = (x.ravel() for x in np.meshgrid([1, 2, 5], [0.1, 0.6, 1.4], [30, 700, 9000]))
    n = len(batch)
    tree = {"set": rows_with_sets(n), "batch": batch, "n_fft": np.full(n, 256), "k": np.full(n, 16)}
    tree |= {"n_segments": segments, "scale": scale}
    for device in ("cuda", "metal", "tpu"):
        kinks = {"['set'].strategy.is_gpu", "['set'].strategy.falls_back"}
        if device == "tpu":  # its factor of 1 is where the floor starts
            kinks.add("['set'].strategy.fused_scale")
        codes = np.full(n, rx.Device.parse(device).code)
        assert_gradient_is_the_finite_difference(path_costs(name), tree, codes, kinks=kinks)


@pytest.mark.parametrize("value", [INF, math.nan])
@pytest.mark.parametrize(("name", "count"), [("dispatch_ns", 300.0), ("roundtrip_ns", 1.0)])
def test_the_derivative_by_an_infinite_rate_is_its_count_and_shows_in_all_others(name, count, value):
    def cost_ns(rate_ns, batch):
        set_ = rx.welch.coefficient_set()
        set_ = dataclasses.replace(set_, host=dataclasses.replace(set_.host, **{name: rate_ns}))
        return rx.welch.host_path_ns("cuda", batch, 256.0, 16.0, coefficients=set_)

    cost, (by_rate, by_batch) = jax.value_and_grad(cost_ns, (0, 1))(value, 100.0)
    assert by_rate == count
    np.testing.assert_array_equal(cost, value)
    assert not np.isfinite(by_batch)


@pytest.mark.parametrize("name", ["memory_bw", "host_readback_bw", "readback_bw"])
def test_an_infinite_bandwidth_moves_bytes_for_nothing_and_makes_no_nan(name):
    profile, benefit = rx.GraphIoProfile(1.0, 0.0, 4096.0, 8192.0), rx.FusionBenefit(1.0, 0.0, 4096.0, 8192.0)
    gate, row = CASES["gate"][1], rx.backend_coefficients("cuda")
    if name != "readback_bw":
        gate = dataclasses.replace(gate, **{name: INF})
    if name != "host_readback_bw":
        row = dataclasses.replace(row, **{name: INF})
    for f, coefficients in (
        (lambda g: g.score_ns(benefit), gate),
        (lambda r: rx.io_cost_ns(profile, r), row),
    ):
        value, gradient = jax.value_and_grad(f)(coefficients)
        assert np.isfinite(value)
        assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(gradient))


# --- What is refused -----------------------------------------------------------------------------


def test_what_has_no_cost_is_refused_by_name():
    nodes = {op: rx.Graph() for op in ("matmul", "attention")}
    for op, graph in nodes.items():
        graph.add(op, [], shape=(2, 2))
    params, row = rx.WelchPeakParams.fast(256, 16), rx.gate.BACKEND_ROWS["cpu"]
    for call, says in [
        *(
            (
                lambda bad=bad: rx.io_cost_ns(rx.GraphIoProfile(**bad), row),
                f"{[*bad][0]}: expected a count of at least 0",
            )
            for bad in ({name: count} for name in vars(PROFILES[0]) for count in (-1, math.nan))
        ),
        *(
            (lambda graph=graph: rx.graph_cost_ns(graph, row), rf"node 0 \({op}\): its cost needs")
            for op, graph in nodes.items()
        ),
        (lambda: rx.io_cost_ns(rx.GraphIoProfile([1, 2], [1, 2, 3]), row), "broadcast"),
        (lambda: rx.backend_coefficients("abacus"), "unknown device 'abacus'"),
        (lambda: rx.welch.coefficient_set("arch", "z80"), "cpu: expected 'cpu' or 'cpu-apple', got 'z80'"),
        (lambda: rx.fused_graph_ns("cuda", 8, 256, 16, n_segments=0), "n_segments"),
        (lambda: rx.welch.host_path_ns("cuda", 8, 256, 16, n_segments=np.nan), "n_segments"),
        (lambda: rx.fused_graph_ns("cuda", 8, 256, 16, scale=-3.0), "scale"),
        (lambda: rx.fused_graph_ns("cuda", [8, 9], 256, 16, scale=[1.0, 1.0, 1.0]), "broadcast"),
        (lambda: rx.host_fft_profile(-3, params), "batch"),
        (lambda: rx.useful_bytes_touched(None, params), "batch"),
        (lambda: rx.algorithm_bandwidth_gbps(-5, 3.0), "useful_bytes"),
        (lambda: rx.estimate_welch_peaks_costs("cuda", 8, 256, 16, coefficients=None), "coefficients"),
        (lambda: rx.estimate_welch_peaks_costs("abacus", 8, 256, 16), "unknown device 'abacus'"),
        (lambda: rx.estimate_welch_peaks_costs("cuda", "many", 256, 16), "batch"),
        (
            lambda: rx.estimate_welch_peaks_costs("cuda", 8, 256, 16, coefficients="mine"),
            "expected one of arch, portable",
        ),
        (lambda: rx.estimate_welch_peaks_costs("cuda", 8, 256, 16, True, 1, -4), "learned_total_gates"),
        (lambda: rx.pick_weights(3.0, temperature_ns=1.0), "costs"),
        (lambda: rx.pick_weights([3.0], temperature_ns="a"), "temperature_ns"),
        (lambda: rx.pick_weights([3.0], temperature_ns=0.0), "temperature_ns"),
    ]:
        with pytest.raises(ValueError, match=says):
            call()


@pytest.mark.parametrize("form", [np.asarray, jnp.asarray, lambda column: column[-1].item()])
def test_a_bad_workload_is_refused_by_name_in_scalars_on_the_host_on_a_device_and_in_a_program(form):
    good = {"device": np.arange(12), "batch": np.full(12, 8), "n_fft": np.full(12, 256), "k": np.full(12, 16)}
    evaluate = functools.partial(rx.welch.evaluate_welch_peaks, temperature_ns=1.0)
    for name, bad, says in [
        ("batch", -1.0, "batch: expected a size of at least 0, got -1"),
        ("batch", math.nan, "batch: expected a size of at least 0, got nan"),
        ("n_fft", 255, "n_fft: expected an even number"),
        ("n_fft", 2.5, "n_fft: expected an even number"),
        ("n_fft", INF, "n_fft: expected a"),
        ("n_fft", 0, "n_fft: expected .*at least 2, got 0"),
        ("k", 0, "k: expected .*at least 1, got 0"),
        ("device", 12, "device: expected codes from 0 to 11"),
        ("device", -1, "device: expected codes from 0 to 11"),
    ]:
        column = np.array(good[name], type(bad))
        column[-1] = bad
        work = {**good, name: column}
        work = {name: form(values) for name, values in work.items()}
        for f in (
            rx.estimate_welch_peaks_costs,
            rx.welch_peaks_fusion_gate_breakdown,
            rx.pick_welch_peaks_strategy,
            evaluate,
        ):
            with pytest.raises(ValueError, match=says):
                f(**work)
        with pytest.raises(ValueError, match=says):
            jax.jit(lambda t, work=work: rx.welch.evaluate_welch_peaks(**work, temperature_ns=t))(1.0)


# --- Shapes --------------------------------------------------------------------------------------

MODEL = {"learned_available": True, "learned_active_gates": 10, "learned_total_gates": 1024}
TAKE_A_MODEL = {
    "costs": rx.estimate_welch_peaks_costs,
    "pick": rx.pick_welch_peaks_strategy,
    "legacy pick": functools.partial(rx.pick_welch_peaks_strategy, legacy=True),
}
TAKE_A_TEMPERATURE = {
    "soft costs": rx.soft_estimate_welch_peaks_costs,
    "soft pick": rx.soft_pick_welch_peaks_strategy,
    "straight-through pick": functools.partial(rx.soft_pick_welch_peaks_strategy, straight_through_gradient=True),
    "evaluation": rx.welch.evaluate_welch_peaks,
}


def test_a_shape_that_does_not_agree_is_named():
    cases = [(f, name) for f in TAKE_A_MODEL for name in MODEL]
    cases += [(f, name) for f in TAKE_A_TEMPERATURE for name in (*MODEL, "temperature_ns")]
    for (f, name), form in itertools.product(cases, (np.asarray, jnp.asarray, np.ndarray.tolist)):
        options = MODEL | ({"temperature_ns": 1e5} if f in TAKE_A_TEMPERATURE else {})
        options[name] = form(np.ones(2))
        with pytest.raises(ValueError, match=rf"broadcast together, got batch \(3,\), {name} \(2,\)$"):
            (TAKE_A_MODEL | TAKE_A_TEMPERATURE)[f]("cuda", form(np.array([64.0, 512.0, 8192.0])), 256, 16, **options)
    temperatures = {"temperature_ns": [1.0, 2.0]}
    for call in (
        lambda: rx.soft_fused_graph_ns("cuda", [1, 2, 3], 256, 16, **temperatures),
        lambda: rx.soft_io_cost_ns(
            rx.GraphIoProfile([1, 2, 3], 0, 0, 0), rx.backend_coefficients("cpu"), **temperatures
        ),
        lambda: rx.soft_graph_cost_ns(GRAPHS["welch"], rx.backend_coefficients([0, 1, 2]), **temperatures),
    ):
        with pytest.raises(ValueError, match=r"broadcast together, got .*temperature_ns \(2,\)"):
            call()


@pytest.mark.parametrize("f", TAKE_A_TEMPERATURE)
def test_what_stands_beside_a_table_is_a_loop_over_all(f):
    batches, temperatures_ns = [64.0, 512.0, 8192.0], [1e2, 1e5]

    def leaves(batch, temperature_ns):
        return jax.tree.leaves(TAKE_A_TEMPERATURE[f]("cuda", batch, 256, 16, **MODEL, temperature_ns=temperature_ns))

    table = leaves(np.reshape(batches, (1, 3)), np.reshape(temperatures_ns, (2, 1)))
    loop = [[leaves(x, t) for x in batches] for t in temperatures_ns]
    for place, leaf in enumerate(table):
        expected = [[one[place] for one in row] for row in loop]
        np.testing.assert_allclose(leaf, expected, rtol=FLOAT64_RTOL, atol=FLOAT64_RTOL)


@pytest.mark.parametrize(("x64", "coefficients"), [(True, "arch"), (False, "portable")])
def test_an_evaluation_is_what_the_separate_functions_return(x64, coefficients):
    rng = np.random.default_rng(0)
    sizes = rng.choice([0, 1, 129, 512, 2048, 8192, 16384], 50), 2 ** rng.integers(1, 13, 50), rng.integers(1, 40, 50)
    device = rng.integers(0, len(rx.Device), 50)
    if x64:  # Columns of one precision meet coefficients of another.
        device, sizes = "cuda", [np.asarray(size, np.float32) for size in sizes]
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("standard"):
        options = {"coefficients": coefficients}
        result = rx.welch.evaluate_welch_peaks(device, *sizes, **MODEL, **options, temperature_ns=1e5)
        costs = rx.estimate_welch_peaks_costs(device, *sizes, **MODEL, **options)
        why = rx.welch_peaks_fusion_gate_breakdown(device, *sizes, **options)
        rtol = FLOAT64_RTOL if x64 else FLOAT32_RTOL
        np.testing.assert_allclose(result.costs.stack(), costs.stack(), rtol=rtol)
        for name in ("score_ns", "should_fuse_io", "should_fuse", "compute_floor_ok"):
            np.testing.assert_array_equal(getattr(result, name), getattr(why, name))
        np.testing.assert_array_equal(result.benefit.sync_points_saved, why.sync_points_saved)
        np.testing.assert_allclose(result.benefit.host_readback_bytes_saved, why.readback_saved_bytes, rtol=rtol)
        gate = rx.io_fusion_gate_for_target(rx.fusion_target(jnp.asarray(rx.Device.codes(device))))
        by_gate = gate.fuse_probability(result.benefit, temperature_ns=1e5)
        np.testing.assert_allclose(result.fuse_probability, by_gate, rtol=1e3 * rtol, atol=1e-30)
        assert {leaf.shape for leaf in jax.tree.leaves(result)} == {(50,)}


def test_weights_take_the_shapes_that_broadcast_and_name_those_that_do_not():
    costs, temperatures_ns = np.array([[[1.0, 2.0, 4.0], [3.0, 3.0, INF]]]), np.array([[1.0], [5.0]])
    weights = rx.pick_weights(costs, temperature_ns=temperatures_ns)
    loop = [[rx.pick_weights(row, temperature_ns=t) for row in costs[0]] for t in (1.0, 5.0)]
    np.testing.assert_allclose(weights, loop, rtol=FLOAT64_RTOL)
    with pytest.raises(ValueError, match=r"got rows of costs \(1, 2\), temperature_ns \(3,\)"):
        rx.pick_weights(costs, temperature_ns=np.ones(3))
    with pytest.raises(ValueError, match=r"got costs \(1, 2, 3\), log_availability \(4,\)"):
        rx.pick_weights(costs, temperature_ns=1.0, log_availability=np.zeros(4))


def rows_with_sets(n):
    return jax.tree.map(lambda leaf: np.broadcast_to(leaf, (n, *np.shape(leaf))), rx.welch.coefficient_set())


def test_the_gradient_of_an_evaluated_table_is_the_finite_difference():
    batch, n_fft, k = (x.ravel() for x in np.meshgrid([30.0, 700.0, 5000.0], [64.0, 1024.0], [4.0, 16.0]))
    tree = {"set": rows_with_sets(len(batch)), "batch": batch, "n_fft": n_fft, "k": k}
    tree |= {"temperature_ns": np.full(len(batch), 3e6)}

    @jax.vmap
    def score_and_probability(tree):
        options = {"coefficients": tree["set"], "temperature_ns": tree["temperature_ns"]}
        result = rx.welch.evaluate_welch_peaks("cuda", tree["batch"], tree["n_fft"], tree["k"], **options)
        return result.score_ns * 1e-7 + result.fuse_probability

    # A native kernel saves the whole sync point: what adds one is penalised.
    kinks = {"['set'].strategy.has_native_kernel"}
    assert_gradient_is_the_finite_difference(score_and_probability, tree, kinks=kinks)


def test_a_learned_model_is_used_where_it_is_known_to_be_sparse():
    for model in (*MODELS, (True, 0, 1), (True, -1, 1024), (True, None, 0)):
        costs = rx.estimate_welch_peaks_costs("metal", 8192, 256, 16, *model)
        is_used = model in ((True, 255, 1024), (True, 0, 1))
        assert np.isfinite(costs.learned_ns) == is_used
        if is_used:
            scale = 0.30 + 0.70 * model[1] / model[2]
            assert costs.learned_ns == rx.fused_graph_ns("metal", 8192, 256, 16, scale)
            assert costs.learned_ns <= costs.rlx_ns
        for device, batch in (("cpu", 8192), ("tpu", 8192), ("metal", 256)):
            assert rx.estimate_welch_peaks_costs(device, batch, 256, 16, *model).learned_ns == INF
