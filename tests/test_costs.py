"""Costs of profiles, graphs and strategies beside the golden tables: laws, tables, picks, derivatives, refusals."""

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
ROWS = rx.gate.BACKEND_ROWS
PROFILES = [
    rx.GraphIoProfile(),
    rx.GraphIoProfile(7, 2, 1001, 4003),
    rx.GraphIoProfile(24_576, 1, 2**40 + 1, 2**42 + 3),
]
COUNTS = [*vars(PROFILES[0])]
#: What is known of a learned FFT: whether there is one, its gates that are on, all of them.
MODELS = [(False, None, 0), (True, None, 1024), (True, 255, 1024), (True, 256, 1024), (True, 0, 0), (False, 1, 1024)]
SPARSE = {"learned_available": True, "learned_active_gates": 10, "learned_total_gates": 1024}
FFT = rx.WelchPeakParams.fast(256, 16)

lawful = settings(max_examples=20)
batches = st.one_of(st.integers(1, 2**17), st.sampled_from([128, 129, 511, 512, 2047, 2048, 8191, 8192]))
even = st.integers(1, 2048).map(lambda half: 2 * half)


# --- Profiles and graphs -------------------------------------------------------------------------


def io_cost(profile, row):
    launches, syncs, host, traffic = vars(profile).values()
    readback = host if row.unified_memory else host + traffic // 4
    moved = traffic / max(row.memory_bw, 1) + readback / max(row.readback_bw, 1)
    return row.roundtrip_ns * (1 + syncs) + row.dispatch_ns * launches + moved


def node_cost(graph, node, row):
    if node.op in ("input", "param", "constant"):
        return 0
    moved, macs, rate = math.prod(node.shape) * 4 / max(row.memory_bw, 1), 0, row.sgemm_gflops
    if node.op == "matmul":
        macs = math.prod(node.shape) * graph.nodes[node.inputs[0]].shape[-1]
        rate = row.small_sgemm_gflops if macs < 32_768 else rate
    elif node.op == "attention":
        macs = math.prod(node.shape) * node.shape[2]
    return row.dispatch_ns + (2 * macs / (rate + 1) if macs else moved)


def graph_cost(graph, row):
    if row is ROWS["discrete"]:
        nodes = sum(node.op not in ("input", "param") for node in graph.nodes)
        return io_cost(rx.profile_graph_io(graph), row) + row.dispatch_ns * nodes
    io = dataclasses.replace(rx.profile_graph_io(graph), kernel_launches=0)
    return io_cost(io, row) + sum(node_cost(graph, node, row) for node in graph.nodes)


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


def product(m, k, n):
    graph = rx.Graph()
    graph.add("matmul", [graph.input("a", (m, k)), graph.input("b", (k, n))])
    return graph


#: Around 32768 multiply-adds, from which on a product runs at the large rate, too.
GRAPHS = [rx.Graph(), sample_graph(), rx.welch_peaks_graph(64, FFT), product(32, 32, 32), product(31, 32, 33)]


def stacked():
    return rx.backend_coefficients(np.arange(len(rx.Device)))


def test_costs_of_profiles_and_graphs_are_the_closed_forms_on_every_device():
    odd = dataclasses.replace(ROWS["cpu"], memory_bw=0.5, readback_bw=0.0)
    for row, profile in itertools.product((*ROWS.values(), odd), PROFILES):
        np.testing.assert_allclose(rx.io_cost_ns(profile, row), io_cost(profile, row), rtol=FLOAT64_RTOL)
    for set_, graph in itertools.product(("arch", "portable"), GRAPHS):
        for device in rx.Device:
            (found,) = rx.rank_devices(graph, [device], coefficients=set_).costs.values()
            expected = graph_cost(graph, rx.backend_coefficients(device, set_))
            np.testing.assert_allclose(found, expected, rtol=FLOAT64_RTOL)
    assert [rx.rank_devices(GRAPHS[1], [name]).device for name in ("CPU", "wgpu")] == ["cpu", "gpu"]


def test_a_table_of_profiles_or_a_graph_on_all_rows_is_one_call_and_a_whole_row_has_a_gradient():
    table = rx.GraphIoProfile(**{name: np.array([[getattr(own, name)] for own in PROFILES]) for name in COUNTS})
    expected = [[io_cost(profile, rx.backend_coefficients(d)) for d in rx.Device] for profile in PROFILES]
    row, floats = jax.tree.map(lambda leaf: leaf[None], stacked()), jax.tree.map(lambda own: own.astype(float), table)
    for found in (rx.io_cost_ns(table, row), jax.jit(rx.io_cost_ns)(floats, row)):
        np.testing.assert_allclose(found, expected, rtol=FLOAT64_RTOL)
    with jax.enable_x64(False):
        costs = rx.io_cost_ns(table, jax.tree.map(lambda leaf: leaf[None], stacked()))
    assert costs.dtype == jnp.float32
    np.testing.assert_allclose(costs, expected, rtol=FLOAT32_RTOL)
    whole = dataclasses.replace(stacked(), provenance="uncalibrated")
    cost = jax.jit(functools.partial(rx.graph_cost_ns, GRAPHS[1]))
    loop = [rx.graph_cost_ns(GRAPHS[1], rx.backend_coefficients(device)) for device in rx.Device]
    for costs in (rx.graph_cost_ns(GRAPHS[1], whole), cost(whole), jax.vmap(cost)(whole)):
        np.testing.assert_allclose(costs, loop, rtol=FLOAT64_RTOL)
    for f in (cost, jax.jit(functools.partial(rx.io_cost_ns, PROFILES[2]))):
        assert_gradient_is_the_finite_difference(f, stacked())


@lawful
@given(batches, even, st.integers(1, 64), st.sampled_from(["arch", "portable"]), st.integers(1, 8), st.floats(0, 2))
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


def test_the_host_profile_and_useful_bytes_are_exact_and_a_bandwidth_is_bytes_over_time_and_0_without_time():
    for batch, n_fft, k, segments in ((1, 2, 1, 1), (2**40, 4096, 64, 9), (999, 30, 7, 3)):
        params, rows = rx.WelchPeakParams(n_fft, segments, k), batch * segments
        expected = rx.GraphIoProfile(rows + batch, 0, 8 * batch * k, 12 * rows * n_fft + 8 * batch * k)
        assert rx.host_fft_profile(batch, params) == expected
        assert rx.useful_bytes_touched(batch, params) == 4 * rows * n_fft + 8 * batch * k
        table = rx.host_fft_profile(np.array([1, batch]), params)
        assert table.device_traffic_bytes[1] == expected.device_traffic_bytes
    bandwidth = rx.algorithm_bandwidth_gbps(2176, np.array([1000.0, 0.0, -5.0]))
    np.testing.assert_array_equal(bandwidth, [2.176, 0, 0])
    assert jax.grad(rx.algorithm_bandwidth_gbps, 1)(2176.0, 0.0) == 0


# --- Tables, precision, sets ---------------------------------------------------------------------


def everything(device, batch, n_fft, temperature_ns):
    work, soft = (device, batch, n_fft, 16), {"temperature_ns": temperature_ns}
    return {
        "evaluation": rx.welch.evaluate_welch_peaks(*work, **SPARSE, **soft),
        "soft pick": rx.soft_pick_welch_peaks_strategy(*work, **SPARSE, **soft),
        "paths": [path(*work) for path in (rx.fused_graph_ns, rx.block_graph_ns, rx.welch.host_path_ns)],
        "soft fused": rx.soft_fused_graph_ns(*work, **soft),
    }


def test_tables_are_their_scalars_under_jit_and_vmap_too():
    codes, n_fft, temperatures_ns, batch = [0, 2, 4, 8], [256, 1024] * 2, [1e4, 1e5] * 2, [1, 129, 9000]
    scalars = [
        everything(list(rx.Device)[code], rows, n, temperature_ns)
        for code, n, temperature_ns in zip(codes, n_fft, temperatures_ns, strict=True)
        for rows in batch
    ]
    columns = map(np.array, (codes, batch, n_fft, temperatures_ns))
    table = jax.jit(jax.vmap(everything, (0, None, 0, 0)))(*columns)
    expected = jax.tree.map(lambda *leaves: np.reshape(leaves, (4, 3, *leaves[0].shape)), *scalars)
    close = functools.partial(np.testing.assert_allclose, rtol=FLOAT64_RTOL, atol=SATURATED_ATOL)
    jax.tree.map(close, table, expected)


def test_a_large_batch_does_not_overflow_and_a_relaxed_pick_agrees_in_float32():
    def costs(batch, n_fft):
        breakdown = rx.welch_peaks_fusion_gate_breakdown("cuda", batch, n_fft, 64)
        return rx.estimate_welch_peaks_costs("cuda", batch, n_fft, 64).stack(), breakdown.readback_saved_bytes

    def pick(device):
        return rx.soft_pick_welch_peaks_strategy(device, 1024, 256, 16, **SPARSE, temperature_ns=1e7)

    expected, exact = costs(10**6, 4096)[0], [pick(device) for device in rx.Device]
    with jax.enable_x64(False):
        estimate, saved = jax.jit(costs)(np.int32(10**6), np.int32(4096))
        np.testing.assert_allclose(estimate, expected, rtol=FLOAT32_RTOL)
        np.testing.assert_allclose(saved, (16 * 4096 - 8 * 64) * 10**6, rtol=FLOAT32_RTOL)
        weights = pick(np.arange(12))
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights, exact, rtol=10 * FLOAT32_RTOL)


def test_a_set_of_ones_own_is_used_and_the_apple_cpu_is_one():
    mine = rx.welch.coefficient_set("arch")
    mine = dataclasses.replace(mine, host=dataclasses.replace(mine.host, dispatch_ns=1_300.0))
    built_in, own = (rx.estimate_welch_peaks_costs("cpu", 100, 256, 16, coefficients=s) for s in ("arch", mine))
    np.testing.assert_allclose(own.stack()[:2] - built_in.stack()[:2], [200_000, 300_000], rtol=FLOAT32_RTOL)
    for name in ("arch", "portable"):
        plain, apple = rx.welch.coefficient_set(name), rx.welch.coefficient_set(name, "cpu-apple")
        assert apple.host is ROWS["cpu-apple"]
        changed = jax.tree.map(lambda a, b: np.flatnonzero(a != b).tolist(), plain.backend, apple.backend)
        assert {tuple(leaf) for leaf in vars(changed).values() if isinstance(leaf, list)} <= {(), (0,)}
        assert apple.backend.dispatch_ns[0] == 500
        by_name = rx.estimate_welch_peaks_costs("CPU_Apple", 100, 256, 16, coefficients=name).stack()
        by_set = rx.estimate_welch_peaks_costs("cpu", 100, 256, 16, coefficients=apple).stack()
        np.testing.assert_array_equal(by_name, by_set)


def test_a_learned_model_is_used_where_it_is_known_to_be_sparse():
    devices, batch = rx.Device.codes(["metal", "cpu", "tpu", "metal"]), np.array([8192, 8192, 8192, 256])
    for model in (*MODELS, (True, 0, 1), (True, -1, 1024)):
        costs = rx.estimate_welch_peaks_costs(devices, batch, 256, 16, *model)
        assert np.isfinite(costs.learned_ns).tolist() == [model in ((True, 255, 1024), (True, 0, 1)), *[False] * 3]
        if np.isfinite(costs.learned_ns[0]):
            scale = 0.30 + 0.70 * model[1] / model[2]
            expected = rx.fused_graph_ns("metal", 8192, 256, 16, scale)
            np.testing.assert_allclose(costs.learned_ns[0], expected, rtol=FLOAT64_RTOL)
            assert expected <= costs.rlx_ns[0]


def test_an_evaluation_is_what_the_separate_functions_return():
    rng = np.random.default_rng(0)
    sizes = rng.choice([0, 1, 129, 512, 2048, 8192, 16384], 50), 2 ** rng.integers(1, 13, 50), rng.integers(1, 40, 50)
    work = rng.integers(0, len(rx.Device), 50), *(np.asarray(size, np.float32) for size in sizes)
    with jax.numpy_dtype_promotion("standard"):  # columns of one precision meet coefficients of another
        result = rx.welch.evaluate_welch_peaks(*work, **SPARSE, temperature_ns=1e5)
        costs = rx.estimate_welch_peaks_costs(*work, **SPARSE)
        why = rx.welch_peaks_fusion_gate_breakdown(*work)
        np.testing.assert_allclose(result.costs.stack(), costs.stack(), rtol=FLOAT64_RTOL)
        for name in ("score_ns", "should_fuse_io", "should_fuse", "compute_floor_ok"):
            np.testing.assert_array_equal(getattr(result, name), getattr(why, name))
        np.testing.assert_array_equal(result.benefit.sync_points_saved, why.sync_points_saved)
        np.testing.assert_allclose(result.benefit.host_readback_bytes_saved, why.readback_saved_bytes, rtol=1e-12)
        gate = rx.io_fusion_gate_for_target(rx.fusion_target(jnp.asarray(work[0])))
        by_gate = gate.fuse_probability(result.benefit, temperature_ns=1e5)
        np.testing.assert_allclose(result.fuse_probability, by_gate, rtol=1e3 * FLOAT64_RTOL, atol=1e-30)
    assert {leaf.shape for leaf in jax.tree.leaves(result)} == {(50,)}


# --- Picks ---------------------------------------------------------------------------------------


def legacy(device, batch, available, active, total):
    large = device != "cpu" and batch >= 8192
    sparse = active is not None and total > 0 and 4 * active < total
    if large:
        return "learned" if available and sparse else "rlx"
    return "ultra" if batch <= (256 if device == "cpu" else 128) else "fast"


@pytest.mark.parametrize("is_legacy", [False, True])
def test_a_mixed_table_of_picks_is_one_call_and_the_earliest_of_the_cheapest_is_picked(is_legacy):
    rows = list(itertools.product(rx.Device, [1, 128, 129, 256, 257, 8191, 8192, 65_536], MODELS))
    columns = [rx.Device.codes([device for device, _, _ in rows]), np.array([batch for _, batch, _ in rows])]
    columns += [np.array([-1 if model[i] is None else model[i] for *_, model in rows]) for i in range(3)]

    def pick(device, batch, *model):
        return rx.pick_welch_peaks_strategy(device, batch, 256, 16, *model, legacy=is_legacy)

    found, strategies = pick(*columns), list(rx.welch.ReferenceStrategy)
    np.testing.assert_array_equal(jax.jit(jax.vmap(pick))(*columns), found)
    names = [strategies[code] for code in found]
    alone = [pick(device, batch, *model) for device, batch, model in rows[::29]]
    assert names[::29] == alone
    assert all(isinstance(one, rx.welch.ReferenceStrategy) for one in alone)
    if is_legacy:
        assert names == [legacy(device, batch, *model) for device, batch, model in rows]
        return
    costs = rx.estimate_welch_peaks_costs(*columns[:2], 256, 16, *columns[2:]).stack()
    np.testing.assert_array_equal(found, np.argmin(costs, -1))
    for own in itertools.product([1.0, 2.0, INF], repeat=4):
        assert rx.WelchPeaksCostEstimates(*own).pick_index() == own.index(min(own))


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


def test_weights_are_the_softmin_of_costs_estimates_and_integers_of_any_shapes_that_broadcast():
    costs, temperatures_ns = np.array([[[1.0, 2.0, 4.0], [3.0, 3.0, INF], [INF] * 3]]), np.array([[1.0], [5.0]])
    weights = rx.pick_weights(costs, temperature_ns=temperatures_ns)
    powers = np.exp(-costs / temperatures_ns[..., None])
    expected = powers / np.maximum(powers.sum(-1, keepdims=True), 1e-300)
    np.testing.assert_allclose(weights, expected, rtol=FLOAT64_RTOL)
    log_availability = np.array([0.0, -INF, -1.0])
    weights, gradients = jax.jit(
        jax.jacrev(lambda *at: 2 * [rx.pick_weights(at[0], temperature_ns=at[1], log_availability=at[2])], (0, 1, 2))
    )(costs[0], 2.0, log_availability)
    assert all(np.isfinite(leaf).all() for leaf in (*weights, *gradients))
    estimates = rx.WelchPeaksCostEstimates(jnp.array([1.0, 3.0]), 2.0, INF, 1.0)
    np.testing.assert_allclose(rx.pick_weights(estimates, temperature_ns=np.ones(2)).sum(-1), 1, rtol=FLOAT64_RTOL)
    np.testing.assert_array_equal(*(rx.pick_weights(np.array([1, 2], t), temperature_ns=4.0) for t in (int, float)))
    assert np.isnan(rx.pick_weights([1.0, np.nan, np.inf], temperature_ns=1.0)[:2]).all()


@lawful
@given(st.sampled_from(list(rx.Device)), batches, st.sampled_from(MODELS), st.floats(1, 1e9))
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
    set_ = rx.welch.coefficient_set()

    def both(gate, temperature_ns):
        pick = functools.partial(
            rx.soft_pick_welch_peaks_strategy, "metal", 1024, 256, 16, coefficients=dataclasses.replace(set_, gate=gate)
        )
        return [pick(temperature_ns=temperature_ns, straight_through_gradient=straight) for straight in (True, False)]

    at = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), (set_.gate, 3e5))
    rng = np.random.default_rng(0)
    along = jax.tree.map(lambda leaf: leaf * rng.uniform(size=leaf.shape), at)
    (hard, soft), (by_hard, by_soft) = jax.jit(lambda *both_ways: jax.jvp(both, *both_ways))(at, along)
    code = rx.pick_welch_peaks_strategy("metal", 1024, 256, 16).code
    np.testing.assert_array_equal(hard, np.eye(4)[code])
    assert 0 < soft[code] < 1
    np.testing.assert_allclose(by_hard, by_soft, rtol=FLOAT64_RTOL, atol=0)
    assert by_soft[code] != 0


# --- Derivatives ---------------------------------------------------------------------------------


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
    result = rx.welch.evaluate_welch_peaks(*workload, *SPARSE.values(), coefficients=set_, temperature_ns=1e7)
    costs = jnp.mean(jnp.log1p(finite(result.costs.stack())))
    return costs + jnp.mean(jnp.arctan(1e-6 * result.score_ns) + result.fuse_probability)


def cases(rows=20):
    rng, floats = np.random.default_rng(0), functools.partial(jax.tree.map, lambda leaf: jnp.asarray(leaf, float))
    benefit = rx.FusionBenefit(*rng.integers(-5, 6, (2, rows)), *rng.integers(-(2**30), 2**30, (2, rows)))
    profile = rx.GraphIoProfile(*(rng.integers(0, most, rows) for most in (20, 4, 2**10, 2**18)))
    sizes = rng.choice([1, 129, 1024, 8192], rows), 2 ** rng.integers(1, 13, rows), rng.integers(1, 40, rows)
    workload = jnp.asarray(rng.integers(0, len(rx.Device), rows)), *floats(sizes)
    gate = rx.IoFusionGate(700.0, 9_000.0, 150.0, 30.0, 0.0, 4e6, 2_500.0)
    return {
        "gate": (gate_loss, floats(gate), (floats(benefit),)),
        "io": (io_loss, floats(rx.backend_coefficients("cuda")), (floats(profile),)),
        "strategies": (strategy_loss, floats(rx.welch.coefficient_set()), workload),
    }


def scaled(coefficients, factors):
    """Return coefficients with the leaves multiplied in turn by one of some factors; flags stay."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(coefficients)
    flags = ("unified_memory", "is_gpu", "is_fused_viable", "has_native_kernel", "falls_back")
    return structure.unflatten(
        leaf if str(path[-1]).lstrip(".") in flags else leaf * factors[i % len(factors)]
        for i, (path, leaf) in enumerate(leaves)
    )


#: Derivatives of gates and of many strategies compile for long; costs of profiles have the same laws.
@pytest.mark.parametrize(
    "name", ["io", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gate", "strategies"))]
)
def test_derivatives_agree_to_second_order_over_many_sets_and_over_the_rows_of_a_table(name):
    loss, coefficients, rows = cases()[name]
    of_factors = lambda factors: loss(scaled(coefficients, factors), *rows)  # noqa: E731
    gradient, at, step = jax.grad(of_factors), np.array([0.93, 1.07, 1.11]), 1e-4
    all_of = [of_factors, gradient, jax.jacfwd(of_factors), jax.hessian(of_factors)]
    moves = step * np.eye(3)
    factors = np.array([at, *(at + moves), *(at - moves), [0.5, 0.6, 0.7], [1.5, 2.0, 3.0]])
    found = jax.jit(jax.vmap(lambda factors: [f(factors) for f in all_of]))(factors)
    value, slope, forward, curvature = map(np.asarray, found)
    np.testing.assert_allclose(forward[0], slope[0], rtol=1e-9)
    for f, derivative in ((value, slope[0]), (slope, curvature[0])):
        assert_close(derivative, np.stack((f[1:4] - f[4:7]) / (2 * step), -1), 10 * GRADIENT_RTOL)
        assert np.all(derivative.any(-1))
    assert_close(slope[-2:], np.stack([*map(jax.jit(gradient), factors[-2:])]), 1e-10)
    of_loss = jax.jit(jax.grad(loss))
    one_by_one = [of_loss(coefficients, *jax.tree.map(lambda x, i=i: x[i], rows)) for i in range(20)]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *one_by_one)
    assert_close(of_loss(coefficients, *rows), mean, 1e-9)


@pytest.mark.parametrize(
    ("of_set", "of_batch", "cost", "device"),
    [
        (np.float32, np.float64, rx.estimate_welch_peaks_costs, np.arange(12)),
        (np.float64, np.float32, rx.welch.host_path_ns, "cuda"),
    ],
)
def test_a_gradient_has_the_types_of_what_it_is_of(of_set, of_batch, cost, device):
    def loss(set_, batch):
        return sum(jnp.sum(finite(ns)) for ns in jax.tree.leaves(cost(device, batch, 256, 16, coefficients=set_)))

    set_ = jax.tree.map(lambda leaf: jnp.asarray(leaf, of_set), rx.welch.coefficient_set())
    with jax.numpy_dtype_promotion("standard"):
        by_set, by_batch = jax.eval_shape(jax.grad(loss, (0, 1)), set_, jnp.asarray(2.0 ** np.arange(12), of_batch))
    assert {leaf.dtype for leaf in jax.tree.leaves(by_set)} == {np.dtype(of_set)}
    assert by_batch.dtype == of_batch


@pytest.mark.parametrize("name", ["host_path_ns", "fused_graph_ns", "evaluate_welch_peaks"])
def test_the_gradient_by_sizes_segments_scale_and_temperature_is_the_finite_difference(name):
    segments, scale, batch = (x.ravel() for x in np.meshgrid([1, 2, 5], [0.1, 0.6, 1.4], [30, 700, 5000]))
    rows = len(batch)
    sets = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (rows, *np.shape(leaf))), rx.welch.coefficient_set())
    tree = {"coefficients": sets, "batch": batch, "n_fft": np.full(rows, 256), "k": np.full(rows, 16)}
    tree |= {"temperature_ns": np.full(rows, 3e6)} if name == "evaluate_welch_peaks" else {"n_segments": segments}
    tree |= {"scale": scale} if name == "fused_graph_ns" else {}

    @jax.vmap
    def f(tree, device):
        found = getattr(rx.welch, name)(device, **tree)
        return found if not hasattr(found, "score_ns") else found.score_ns * 1e-7 + found.fuse_probability

    # The factor of a TPU is 1, where the floor starts.
    for device in ("cuda", "tpu") if name == "fused_graph_ns" else ("cuda",):
        kinks = {"is_gpu", "falls_back", *(("fused_scale",) if device == "tpu" else ())}
        # A native kernel saves the whole sync point: what adds one is penalised.
        kinks |= {"has_native_kernel"} if name == "evaluate_welch_peaks" else set()
        kinks = {f"['coefficients'].strategy.{kink}" for kink in kinks}
        codes = np.full(rows, rx.Device.parse(device).code)
        assert_gradient_is_the_finite_difference(f, tree, codes, kinks=kinks)


def test_what_is_infinite_makes_no_nan_where_its_count_is_none_and_shows_in_all_others():
    def cost_ns(dispatch_ns, roundtrip_ns, batch):
        set_ = rx.welch.coefficient_set()
        host = dataclasses.replace(set_.host, dispatch_ns=dispatch_ns, roundtrip_ns=roundtrip_ns)
        return rx.welch.host_path_ns("cuda", batch, 256.0, 16.0, coefficients=dataclasses.replace(set_, host=host))

    gradient = jax.jit(jax.value_and_grad(cost_ns, (0, 1, 2)))
    for value, (place, count) in itertools.product((INF, math.nan), enumerate((300.0, 1.0))):
        cost, by = gradient(*(value if place == i else 100.0 for i in range(3)))
        np.testing.assert_array_equal((by[place], cost), (count, value))
        assert not np.isfinite(by[2])
    profile, benefit = rx.GraphIoProfile(1.0, 0.0, 4096.0, 8192.0), rx.FusionBenefit(1.0, 0.0, 4096.0, 8192.0)
    gate = dataclasses.replace(cases()["gate"][1], memory_bw=INF, host_readback_bw=INF)
    row = dataclasses.replace(rx.backend_coefficients("cuda"), memory_bw=INF, readback_bw=INF)
    for f, coefficients in ((lambda g: g.score_ns(benefit), gate), (lambda r: rx.io_cost_ns(profile, r), row)):
        assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(jax.jit(jax.value_and_grad(f))(coefficients)))


# --- What is refused -----------------------------------------------------------------------------

TAKE_A_MODEL = {
    "costs": rx.estimate_welch_peaks_costs,
    "pick": rx.pick_welch_peaks_strategy,
    "soft costs": rx.soft_estimate_welch_peaks_costs,
    "soft pick": functools.partial(rx.soft_pick_welch_peaks_strategy, straight_through_gradient=True),
    "evaluation": rx.welch.evaluate_welch_peaks,
}
NEEDS = {op: rx.Graph() for op in ("matmul", "attention")}
for op, graph in NEEDS.items():
    graph.add(op, [], shape=(2, 2))
THREE, PAIR = rx.GraphIoProfile([1, 2, 3], 0, 0, 0), {"temperature_ns": [1.0, 2.0]}
costs = functools.partial(rx.estimate_welch_peaks_costs, batch=8, n_fft=256, k=16)
fused = functools.partial(rx.fused_graph_ns, "cuda", n_fft=256, k=16)
#: What has no cost, and what is said of it.
REFUSED = [
    *(
        (lambda own=own: rx.io_cost_ns(own, ROWS["cpu"]), f"{name}: expected a count of at least 0")
        for name, own in ((name, rx.GraphIoProfile(**{name: bad})) for name in COUNTS for bad in (-1, math.nan))
    ),
    *((lambda own=own: rx.graph_cost_ns(own, ROWS["cpu"]), rf"node 0 \({op}\): expected") for op, own in NEEDS.items()),
    (lambda: rx.io_cost_ns(rx.GraphIoProfile([1, 2], [1, 2, 3]), ROWS["cpu"]), "broadcast"),
    (lambda: rx.backend_coefficients("abacus"), "unknown device 'abacus'"),
    (lambda: rx.welch.coefficient_set("arch", "z80"), "cpu: expected 'cpu' or 'cpu-apple', got 'z80'"),
    (lambda: fused(8, n_segments=0), "n_segments"),
    (lambda: rx.welch.host_path_ns("cuda", 8, 256, 16, n_segments=np.nan), "n_segments"),
    (lambda: fused(8, scale=-3.0), "scale"),
    (lambda: fused([8, 9], scale=[1.0, 1.0, 1.0]), "broadcast"),
    (lambda: rx.host_fft_profile(-3, FFT), "batch"),
    (lambda: rx.useful_bytes_touched(None, FFT), "batch"),
    (lambda: rx.algorithm_bandwidth_gbps(-5, 3.0), "useful_bytes"),
    (lambda: costs("cuda", coefficients=None), "coefficients"),
    (lambda: costs("cuda", coefficients="mine"), "expected one of arch, portable"),
    (lambda: costs("abacus"), "unknown device 'abacus'"),
    (lambda: costs("cuda", batch="many"), "batch"),
    (lambda: costs("cuda", learned_total_gates=-4), "learned_total_gates"),
    (lambda: rx.pick_weights(3.0, temperature_ns=1.0), "costs"),
    (lambda: rx.pick_weights([3.0], temperature_ns="a"), "temperature_ns"),
    (lambda: rx.pick_weights([3.0], temperature_ns=0.0), "temperature_ns"),
    (
        lambda: rx.pick_weights(np.ones((1, 2, 3)), temperature_ns=np.ones(3)),
        r"got rows of costs \(1, 2\), temperature_ns \(3,\)",
    ),
    (
        lambda: rx.pick_weights(np.ones((1, 2, 3)), temperature_ns=1.0, log_availability=np.zeros(4)),
        r"got costs \(1, 2, 3\), log_availability \(4,\)",
    ),
    *(
        (call, r"broadcast together, got .*temperature_ns \(2,\)")
        for call in (
            lambda: rx.soft_fused_graph_ns("cuda", [1, 2, 3], 256, 16, **PAIR),
            lambda: rx.io_cost_ns(THREE, ROWS["cpu"], **PAIR),
            lambda: rx.graph_cost_ns(GRAPHS[2], rx.backend_coefficients([0, 1, 2]), **PAIR),
        )
    ),
]


def test_what_has_no_cost_is_refused_by_name():
    for call, says in REFUSED:
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
        work = {key: form(values) for key, values in {**good, name: column}.items()}
        for f in (rx.estimate_welch_peaks_costs, rx.welch_peaks_fusion_gate_breakdown, evaluate):
            with pytest.raises(ValueError, match=says):
                f(**work)
        with pytest.raises(ValueError, match=says):
            jax.jit(lambda t, work=work: rx.welch.evaluate_welch_peaks(**work, temperature_ns=t))(1.0)


def test_a_shape_that_does_not_agree_is_named():
    for (what, f), form in itertools.product(TAKE_A_MODEL.items(), (np.asarray, np.ndarray.tolist)):
        soft = {} if what in ("costs", "pick") else {"temperature_ns": 1e5}
        for name in SPARSE | soft:
            options = SPARSE | soft | {name: form(np.ones(2))}
            with pytest.raises(ValueError, match=rf"broadcast together, got batch \(3,\), {name} \(2,\)$"):
                f("cuda", form(np.array([64.0, 512.0, 8192.0])), 256, 16, **options)
