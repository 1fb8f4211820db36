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
    SATURATED_ATOL,
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
    bandwidth = rx.algorithm_bandwidth_gbps(2176, np.array([1000.0, 0.0, -5.0]))
    np.testing.assert_array_equal(bandwidth, [2.176, 0, 0])
    assert jax.grad(rx.algorithm_bandwidth_gbps, 1)(2176.0, 0.0) == 0


# --- Tables, precision, sets ---------------------------------------------------------------------


def test_a_large_batch_does_not_overflow():
    def costs(batch, n_fft):
        breakdown = rx.welch_peaks_fusion_gate_breakdown("cuda", batch, n_fft, 64)
        return rx.estimate_welch_peaks_costs("cuda", batch, n_fft, 64).stack(), breakdown.readback_saved_bytes

    expected, _ = costs(10**6, 4096)
    with jax.enable_x64(False):
        estimate, saved = jax.jit(costs)(np.int32(10**6), np.int32(4096))
        np.testing.assert_allclose(estimate, expected, rtol=FLOAT32_RTOL)
        np.testing.assert_allclose(saved, (16 * 4096 - 8 * 64) * 10**6, rtol=FLOAT32_RTOL)


def test_a_set_of_ones_own_is_used_and_the_apple_cpu_is_one():
    mine = rx.welch.coefficient_set("arch")
    mine = dataclasses.replace(mine, host=dataclasses.replace(mine.host, dispatch_ns=1_300.0))
    built_in, own = (rx.estimate_welch_peaks_costs("cpu", 100, 256, 16, coefficients=s) for s in ("arch", mine))
    np.testing.assert_allclose(own.stack()[:2] - built_in.stack()[:2], [200_000, 300_000], rtol=FLOAT32_RTOL)
    for name in ("arch", "portable"):
        plain, apple = rx.welch.coefficient_set(name), rx.welch.coefficient_set(name, "cpu-apple")
        assert apple.host is ROWS["cpu-apple"]
        np.testing.assert_array_equal(apple.backend.dispatch_ns, [500, *plain.backend.dispatch_ns[1:]])
        by_name = rx.estimate_welch_peaks_costs("CPU_Apple", 100, 256, 16, coefficients=name).stack()
        by_set = rx.estimate_welch_peaks_costs("cpu", 100, 256, 16, coefficients=apple).stack()
        np.testing.assert_array_equal(by_name, by_set)


# --- Picks ---------------------------------------------------------------------------------------


def legacy(device, batch, available, active, total):
    large = device != "cpu" and batch >= 8192
    sparse = active is not None and total > 0 and 4 * active < total
    if large:
        return "learned" if available and sparse else "rlx"
    return "ultra" if batch <= (256 if device == "cpu" else 128) else "fast"


def test_the_legacy_pick_goes_by_the_batch_and_of_equal_costs_the_earliest_is_picked():
    rows = list(itertools.product(rx.Device, [1, 128, 129, 256, 257, 8191, 8192, 65_536], MODELS))
    columns = [rx.Device.codes([device for device, _, _ in rows]), np.array([batch for _, batch, _ in rows]), 256, 16]
    columns += [np.array([-1 if model[i] is None else model[i] for *_, model in rows]) for i in range(3)]
    found = rx.pick_welch_peaks_strategy(*columns, legacy=True)
    assert [list(rx.welch.ReferenceStrategy)[code] for code in found] == [legacy(*row[:2], *row[2]) for row in rows]
    device, batch, model = rows[29]
    alone = rx.pick_welch_peaks_strategy(device, batch, 256, 16, *model, legacy=True)
    assert isinstance(alone, rx.welch.ReferenceStrategy)
    assert alone == legacy(device, batch, *model)
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


# --- Derivatives ---------------------------------------------------------------------------------


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
    gate = rx.IoFusionGate(700.0, 9_000.0, INF, INF, 0.0, 4e6, 2_500.0)
    row = dataclasses.replace(rx.backend_coefficients("cuda"), memory_bw=INF, readback_bw=INF)
    for f, coefficients in ((lambda g: g.score_ns(benefit), gate), (lambda r: rx.io_cost_ns(profile, r), row)):
        assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(jax.jit(jax.value_and_grad(f))(coefficients)))


# --- What is refused -----------------------------------------------------------------------------

NEEDS = {op: rx.Graph() for op in ("matmul", "attention")}
for op, bare in NEEDS.items():
    bare.add(op, [], shape=(2, 2))
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
    (lambda: rx.welch.host_path_ns("cuda", 8, 256, 16, n_segments=np.nan), "n_segments"),
    (lambda: fused(8, scale=-3.0), "scale"),
    (lambda: fused([8, 9], scale=[1.0, 1.0, 1.0]), "broadcast"),
    (lambda: rx.host_fft_profile(-3, FFT), "batch"),
    (lambda: rx.algorithm_bandwidth_gbps(-5, 3.0), "useful_bytes"),
    (lambda: costs("cuda", coefficients="mine"), "expected one of arch, portable"),
    *(
        (
            lambda f=f: f("cuda", [8, 9, 10], 256, 16, True, [1, 2], 9, temperature_ns=1.0),
            r"broadcast together, got batch \(3,\), learned_active_gates \(2,\)$",
        )
        for f in (rx.soft_pick_welch_peaks_strategy, rx.welch.evaluate_welch_peaks)
    ),
    (lambda: rx.pick_weights(3.0, temperature_ns=1.0), "costs"),
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
        ("n_fft", 255, "n_fft: expected an even number"),
        ("n_fft", 2.5, "n_fft: expected an even number"),
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
