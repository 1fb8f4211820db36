"""Strategy costs: profiles in closed form, SPEC 5 written out, tables, gradients, and refusals."""

import dataclasses
import functools
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import FLOAT32_RTOL, FLOAT64_RTOL, QUICKLY, assert_gradient_is_the_finite_difference
from hypothesis import given, settings
from hypothesis import strategies as st

import rlxjax as rx
from rlxjax.device._costs import graph_work
from rlxjax.welch.costs._graphs import welch_graph_work

INF = math.inf
lawful = settings(max_examples=60)
batches = st.one_of(st.integers(1, 2**17), st.sampled_from([128, 129, 511, 512, 2047, 2048, 8191, 8192]))
even = st.integers(1, 2048).map(lambda half: 2 * half)
devices = st.sampled_from(list(rx.Device))
sets = st.sampled_from(["arch", "portable"])
peaks = st.integers(1, 64)
WGPU = ("gpu", "vulkan", "webgpu", "directx", "opengl")
SLOPES = {d: v for ds, v in [(("metal", "mlx", "ane"), (0.22, 1.15)), (("cuda", "rocm"), (0.15, 0.85))] for d in ds}
SLOPES |= dict.fromkeys(WGPU, (0.12, 0.0))
SCALES = dict(zip(("metal", "mlx", "ane", "cuda", "rocm"), (7.5, 7.5, 7.5, 0.43, 0.43), strict=True))
SCALES |= dict.fromkeys(WGPU, 2.2)


# --- SPEC 5, written out -------------------------------------------------------------------------


def host_reference(device, batch, n_fft, k, segments):
    rows, peak_bytes = batch * segments, 8 * batch * k
    traffic = 12 * rows * n_fft + peak_bytes
    ns = 3_000 + (rows + batch) * 300 + traffic / 30 + (peak_bytes + traffic // 4) / 30
    a, b = SLOPES.get(device, (0, 0))
    ns *= 1 + a * math.log(batch / 512) if batch >= 512 else 1
    return ns * (1 + b * math.log2(batch / 2048) if batch > 2048 else 1)


def graph_reference(device, batch, n_fft, k, set_, fused, segments=2):
    graph = rx.welch_peaks_graph(batch, rx.WelchPeakParams(n_fft, segments, k), fused)
    return float(rx.device_cost_ns(graph, device, set_))


def fused_reference(device, batch, n_fft, k, set_, scale=1.0, segments=2):
    io = graph_reference(device, batch, n_fft, k, set_, True, segments)
    c = SCALES.get(device, 1.0) * min(max(scale, 0.25), 1.0)
    floor = 400_000 if device != "cpu" and batch < 512 else 0
    return max(io * c, io + floor) if c >= 1 else max(io * c, floor)


def block_reference(device, batch, n_fft, k, set_, segments=2):
    io = graph_reference(device, batch, n_fft, k, set_, False, segments)
    return io if device == "cpu" else io * 0.72 + 80 * batch * k


def breakdown_reference(device, batch, n_fft, k, set_):
    gate = rx.io_fusion_gate_for_target(rx.fusion_target(device))
    keep, fuse = (
        rx.profile_graph_io(rx.welch_peaks_graph(batch, rx.WelchPeakParams.fast(n_fft, k), fused))
        for fused in (False, True)
    )
    if batch >= 2048 and device in ("cuda", "rocm", *WGPU):
        fuse = dataclasses.replace(fuse, sync_points=fuse.sync_points - 1)
    slack = 1.15 if device in ("cuda", "rocm") and batch >= 8192 else 1.10
    block = block_reference(device, batch, n_fft, k, set_)
    floor_ok = device in ("cpu", "tpu") or batch < 2048
    floor_ok = floor_ok or fused_reference(device, batch, n_fft, k, set_) <= block * slack
    return float(gate.score_ns(keep, fuse)), bool(gate.should_fuse(keep, fuse)), floor_ok


def costs_reference(device, batch, n_fft, k, available, active, total, set_):
    ultra, fast = (host_reference(device, batch, n_fft, k, segments) for segments in (1, 2))
    if device != "cpu" and batch > 128:
        ultra = INF
    rlx = learned = INF
    _, io, floor_ok = breakdown_reference(device, batch, n_fft, k, set_)
    if device not in ("cpu", "tpu") and io and floor_ok:
        rlx = fused_reference(device, batch, n_fft, k, set_)
        if available and active is not None and total > 0 and 4 * active < total:
            learned = fused_reference(device, batch, n_fft, k, set_, 0.30 + 0.70 * active / total)
    return ultra, fast, rlx, learned


learned_models = st.tuples(st.booleans(), st.none() | st.integers(0, 2048), st.sampled_from([0, 1, 1024, 8192]))


@lawful
@given(devices, batches, even, peaks, learned_models, sets)
def test_every_cost_is_the_formula(device, batch, n_fft, k, learned, set_):
    costs = rx.estimate_welch_peaks_costs(device, batch, n_fft, k, *learned, coefficients=set_)
    expected = costs_reference(device, batch, n_fft, k, *learned, set_)
    np.testing.assert_allclose(costs.stack(), expected, rtol=FLOAT64_RTOL)


@lawful
@given(devices, batches, even, peaks, sets, st.integers(1, 8), st.floats(0, 2))
def test_every_path_is_the_formula(device, batch, n_fft, k, set_, segments, scale):
    workload, options = (device, batch, n_fft, k), {"coefficients": set_, "n_segments": segments}
    for value, expected in (
        (rx.fused_graph_ns(*workload, scale, **options), fused_reference(*workload, set_, scale, segments)),
        (rx.block_graph_ns(*workload, **options), block_reference(*workload, set_, segments)),
        (rx.host_path_ns(*workload, **options), host_reference(*workload, segments)),
    ):
        np.testing.assert_allclose(value, expected, rtol=FLOAT64_RTOL)


@lawful
@given(devices, batches, even, peaks, sets)
def test_the_breakdown_is_the_formula(device, batch, n_fft, k, set_):
    breakdown = rx.welch_peaks_fusion_gate_breakdown(device, batch, n_fft, k, set_)
    score, io, floor_ok = breakdown_reference(device, batch, n_fft, k, set_)
    size = 24 * batch * n_fft + 1e8
    np.testing.assert_allclose(breakdown.score_ns, score, rtol=0, atol=FLOAT64_RTOL * size)
    assert (breakdown.should_fuse_io, breakdown.compute_floor_ok) == (io, floor_ok)
    assert breakdown.should_fuse == (io and floor_ok)
    assert breakdown.readback_saved_bytes == 16 * batch * n_fft - 8 * batch * k


# --- Profiles ------------------------------------------------------------------------------------


@lawful
@given(st.integers(0, 2**20), even, peaks, st.integers(1, 9), st.booleans())
def test_the_closed_form_counts_what_the_graph_counts(batch, n_fft, k, segments, fused):
    graph = rx.welch_peaks_graph(batch, rx.WelchPeakParams(n_fft, segments, k), fused)
    assert welch_graph_work(batch, n_fft, k, segments, fused) == graph_work(graph)
    table = welch_graph_work(np.array([batch, 1]), n_fft, k, np.array([segments]), fused)
    assert table.io.device_traffic_bytes[0] == rx.profile_graph_io(graph).device_traffic_bytes


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

CODES, BATCH = np.arange(12)[:, None], np.array([[1, 128, 129, 600, 2048, 9000]])
FUNCTIONS = {
    "costs": lambda d, b, n, k: rx.estimate_welch_peaks_costs(d, b, n, k, True, 10, 1024).stack(),
    "breakdown": lambda d, b, n, k: rx.welch_peaks_fusion_gate_breakdown(d, b, n, k).score_ns,
    "fused": rx.fused_graph_ns,
    "block": rx.block_graph_ns,
    "host": rx.host_path_ns,
    "soft_fused": lambda d, b, n, k: rx.soft_fused_graph_ns(d, b, n, k, temperature_ns=1e4),
}


def test_tables_are_their_scalars_under_jit_and_vmap_too():
    def everything(*workload):
        soft = rx.soft_estimate_welch_peaks_costs(*workload, True, 10, 1024, temperature_ns=1e5)
        found = {"soft_costs": soft.costs.stack(), "log_availability": soft.log_availability()}
        return found | {name: f(*workload) for name, f in FUNCTIONS.items()}

    n_fft, k = np.array([[256], [1024]] * 6), 16
    rows = [
        [everything(device, batch, int(n[0]), k) for batch in BATCH[0].tolist()]
        for device, n in zip(rx.Device, n_fft, strict=True)
    ]
    over_batch = jax.vmap(everything, (None, 0, None, None))
    over_both = jax.jit(jax.vmap(over_batch, (0, None, 0, None)), compiler_options=QUICKLY)
    tables = {
        "one call": everything(CODES, BATCH, n_fft, k),
        "jit": jax.jit(everything, compiler_options=QUICKLY)(CODES, BATCH, n_fft, k),
        "vmap": over_both(CODES[:, 0], BATCH[0], n_fft[:, 0], k),
    }
    for name in tables["one call"]:
        scalars = [[one[name] for one in row] for row in rows]
        for how, table in tables.items():
            np.testing.assert_allclose(table[name], scalars, rtol=FLOAT64_RTOL, err_msg=f"{name}, {how}")


@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_large_batch_does_not_overflow(x64, transform):
    def costs(batch, n_fft):
        breakdown = rx.welch_peaks_fusion_gate_breakdown("cuda", batch, n_fft, 64)
        estimate = rx.estimate_welch_peaks_costs("cuda", batch, n_fft, 64).stack()
        return estimate, breakdown.readback_saved_bytes

    expected = costs_reference("cuda", 10**6, 4096, 64, False, None, 0, "arch")
    with jax.enable_x64(x64):
        estimate, saved = transform(costs)(np.int32(10**6), np.int32(4096))
    np.testing.assert_allclose(estimate, expected, rtol=FLOAT64_RTOL if x64 else FLOAT32_RTOL)
    np.testing.assert_allclose(saved, (16 * 4096 - 8 * 64) * 10**6, rtol=FLOAT64_RTOL if x64 else FLOAT32_RTOL)


def test_the_first_call_of_a_process_may_be_a_traced_one():
    script = """if True:
        import jax, rlxjax as rx
        cost = jax.jit(lambda batch: rx.estimate_welch_peaks_costs("metal", batch, 256, 16).fast_ns)
        print(cost(8192))
    """
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    expected = host_reference("metal", 8192, 256, 16, 2)
    np.testing.assert_allclose(float(result.stdout), expected, rtol=FLOAT32_RTOL)


# --- Coefficient sets ----------------------------------------------------------------------------


def test_a_whole_set_has_a_gradient():
    codes, batch = (x.ravel() for x in np.broadcast_arrays(CODES, BATCH))
    n = len(codes)
    sets_ = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (n, *np.shape(leaf))), rx.coefficient_set())

    @jax.jit
    @jax.vmap
    def total(set_, code, batch):
        costs = rx.estimate_welch_peaks_costs(code, batch, 256, 16, True, 10, 1024, set_).stack()
        return jnp.sum(jnp.where(jnp.isfinite(costs), costs, 0.0))

    assert_gradient_is_the_finite_difference(lambda set_: total(set_, codes, batch), sets_)


def test_a_set_of_ones_own_is_used():
    mine = rx.coefficient_set("arch")
    mine = dataclasses.replace(mine, host=dataclasses.replace(mine.host, dispatch_ns=1_300.0))
    built_in, own = (rx.estimate_welch_peaks_costs("cpu", 100, 256, 16, coefficients=s) for s in ("arch", mine))
    np.testing.assert_allclose(own.stack()[:2] - built_in.stack()[:2], [200_000, 300_000], rtol=FLOAT32_RTOL)


@pytest.mark.parametrize("name", ["arch", "portable"])
def test_the_apple_cpu_is_a_set_of_its_own(name):
    plain, apple = rx.coefficient_set(name), rx.coefficient_set(name, "cpu-apple")
    assert apple.host is rx.BACKEND_ROWS["cpu-apple"]
    changed = jax.tree.map(lambda a, b: np.flatnonzero(a != b).tolist(), plain.backend, apple.backend)
    assert {tuple(leaf) for leaf in vars(changed).values() if isinstance(leaf, list)} <= {(), (0,)}
    assert apple.backend.dispatch_ns[0] == 500
    by_name = rx.estimate_welch_peaks_costs("CPU_Apple", 100, 256, 16, coefficients=name).stack()
    by_set = rx.estimate_welch_peaks_costs("cpu", 100, 256, 16, coefficients=apple).stack()
    np.testing.assert_array_equal(by_name, by_set)


@pytest.mark.parametrize("device", ["metal", "cuda", "cpu"])
def test_an_infinite_penalty_makes_no_nan_in_the_relaxation(device):
    set_ = rx.coefficient_set()
    set_ = dataclasses.replace(set_, gate=dataclasses.replace(set_.gate, host_thunk_penalty_ns=np.full(12, INF)))

    def soft(set_, temperature):
        return rx.soft_estimate_welch_peaks_costs(device, 100, 256, 16, coefficients=set_, temperature_ns=temperature)

    costs = soft(set_, 1e5)
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves((costs, costs.log_availability())))
    gradients = jax.grad(lambda *a: soft(*a).log_keep_probability, (0, 1))(set_, 1e5)
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(gradients))


@lawful
@given(devices, batches, st.floats(1, 1e9))
def test_the_relaxed_decision_is_a_probability(device, batch, temperature):
    soft = rx.soft_estimate_welch_peaks_costs(device, batch, 256, 16, temperature_ns=temperature)
    fuse, keep = np.exp(soft.log_fuse_probability), np.exp(soft.log_keep_probability)
    np.testing.assert_allclose(fuse + keep, 1, rtol=FLOAT64_RTOL)
    assert np.isfinite(soft.costs.stack()).all()


# --- Cases of the specification, and refusals ----------------------------------------------------


@pytest.mark.parametrize(("batch", "fuses"), [(256, False), (1024, True), (4096, True), (8192, True)])
def test_metal_fuses_from_1024_rows_on(batch, fuses):
    assert bool(rx.welch_peaks_fusion_gate_breakdown("metal", batch, 256, 16).should_fuse) is fuses


@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_discrete_devices_fuse_8192_rows_without_a_sync_point(device):
    breakdown = rx.welch_peaks_fusion_gate_breakdown(device, 8192, 256, 16)
    assert breakdown.should_fuse
    assert breakdown.sync_points_saved == 0
    assert breakdown.readback_saved_bytes > 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch": -1}, "batch: expected a size of at least 0, got -1"),
        ({"batch": np.array([3.0, np.nan])}, "batch: expected a size of at least 0, got nan"),
        ({"batch": "many"}, "batch"),
        ({"n_fft": 255}, "n_fft: expected an even number, got 255"),
        ({"n_fft": 0}, "n_fft: expected .*at least 2, got 0"),
        ({"k": 0}, "k: expected .*at least 1, got 0"),
        ({"device": "abacus"}, "unknown device 'abacus'"),
        ({"coefficients": "mine"}, "coefficients: expected one of arch, portable, got 'mine'"),
    ],
)
@pytest.mark.parametrize(
    "f", [rx.estimate_welch_peaks_costs, rx.welch_peaks_fusion_gate_breakdown, rx.pick_welch_peaks_strategy]
)
def test_a_bad_workload_is_refused_by_name(f, change, says):
    with pytest.raises(ValueError, match=says):
        f(**{"device": "cuda", "batch": 8, "n_fft": 256, "k": 16, **change})


def test_an_unknown_cpu_is_refused():
    with pytest.raises(ValueError, match="cpu: expected 'cpu' or 'cpu-apple', got 'z80'"):
        rx.coefficient_set("arch", "z80")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: rx.fused_graph_ns("cuda", 8, 256, 16, n_segments=0), "n_segments"),
        (lambda: rx.host_path_ns("cuda", 8, 256, 16, n_segments=np.nan), "n_segments"),
        (lambda: rx.fused_graph_ns("cuda", 8, 256, 16, scale=-3.0), "scale"),
        (lambda: rx.fused_graph_ns("cuda", [8, 9], 256, 16, scale=[1.0, 1.0, 1.0]), "broadcast"),
        (lambda: rx.host_fft_profile(-3, rx.WelchPeakParams.fast(256, 16)), "batch"),
        (lambda: rx.useful_bytes_touched(None, rx.WelchPeakParams.fast(256, 16)), "batch"),
        (lambda: rx.algorithm_bandwidth_gbps(-5, 3.0), "useful_bytes"),
        (lambda: rx.estimate_welch_peaks_costs("cuda", 8, 256, 16, coefficients=None), "coefficients"),
        (lambda: rx.estimate_welch_peaks_costs("cuda", 8, 256, 16, True, 1, -4), "learned_total_gates"),
        (lambda: rx.pick_weights(3.0, temperature_ns=1.0), "costs"),
        (lambda: rx.pick_weights([3.0], temperature_ns="a"), "temperature_ns"),
        (lambda: rx.pick_weights([3.0], temperature_ns=0.0), "temperature_ns"),
    ],
)
def test_what_has_no_cost_is_refused_by_name(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_a_nan_cost_is_not_mistaken_for_an_impossible_one():
    assert np.isnan(rx.pick_weights([1.0, np.nan, np.inf], temperature_ns=1.0)[:2]).all()


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
    "evaluation": rx.evaluate_welch_peaks,
}


@pytest.mark.parametrize("form", [np.asarray, jnp.asarray, np.ndarray.tolist])
@pytest.mark.parametrize(
    ("f", "name"),
    [
        *((f, name) for f in TAKE_A_MODEL for name in MODEL),
        *((f, name) for f in TAKE_A_TEMPERATURE for name in (*MODEL, "temperature_ns")),
    ],
)
def test_a_shape_that_does_not_agree_is_named(f, name, form):
    call = (TAKE_A_MODEL | TAKE_A_TEMPERATURE)[f]
    options = MODEL | ({"temperature_ns": 1e5} if f in TAKE_A_TEMPERATURE else {})
    options[name] = form(np.ones(2))
    with pytest.raises(ValueError, match=rf"broadcast together, got batch \(3,\), {name} \(2,\)$"):
        call("cuda", form(np.array([64.0, 512.0, 8192.0])), 256, 16, **options)


@pytest.mark.parametrize("f", TAKE_A_TEMPERATURE)
def test_what_stands_beside_a_table_is_a_loop_over_all(f):
    batches, gates, temperatures_ns = [64.0, 512.0, 8192.0], [1e2, 1e3], [1e2, 1e5]

    def leaves(batch, active, temperature_ns):
        options = MODEL | {"learned_active_gates": active, "temperature_ns": temperature_ns}
        return jax.tree.leaves(TAKE_A_TEMPERATURE[f]("cuda", batch, 256, 16, **options))

    table = leaves(np.reshape(batches, (1, 1, 3)), np.reshape(gates, (1, 2, 1)), np.reshape(temperatures_ns, (2, 1, 1)))
    loop = [[[leaves(x, y, z) for x in batches] for y in gates] for z in temperatures_ns]
    for place, leaf in enumerate(table):
        expected = [[[one[place] for one in row] for row in rows] for rows in loop]
        np.testing.assert_allclose(leaf, expected, rtol=FLOAT64_RTOL, atol=FLOAT64_RTOL)


def test_weights_take_the_shapes_that_broadcast_and_name_those_that_do_not():
    costs, temperatures_ns = np.array([[[1.0, 2.0, 4.0], [3.0, 3.0, INF]]]), np.array([[1.0], [5.0]])
    weights = rx.pick_weights(costs, temperature_ns=temperatures_ns)
    loop = [[rx.pick_weights(row, temperature_ns=t) for row in costs[0]] for t in (1.0, 5.0)]
    np.testing.assert_allclose(weights, loop, rtol=FLOAT64_RTOL)
    with pytest.raises(ValueError, match=r"got rows of costs \(1, 2\), temperature_ns \(3,\)"):
        rx.pick_weights(costs, temperature_ns=np.ones(3))
    with pytest.raises(ValueError, match=r"got costs \(1, 2, 3\), log_availability \(4,\)"):
        rx.pick_weights(costs, temperature_ns=1.0, log_availability=np.zeros(4))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (
            lambda: rx.soft_fused_graph_ns("cuda", [1, 2, 3], 256, 16, temperature_ns=[1.0, 2.0]),
            "temperature_ns",
        ),
        (lambda: rx.learned_path_ns("cuda", [1, 2, 3], 256, 16, [1, 2], 1024), "active_gates"),
        (lambda: rx.learned_path_ns(np.array([0, 1, 2]), 1, 256, 16, [1, 2], 1024), "active_gates"),
        (lambda: rx.learned_path_ns("cuda", 1, 256, 16, [1, 2, 3], 1024, n_segments=[1, 2]), "n_segments"),
        (
            lambda: rx.soft_io_cost_ns(
                rx.GraphIoProfile([1, 2, 3], 0, 0, 0),
                rx.backend_coefficients("cpu"),
                temperature_ns=[1.0, 2.0],
            ),
            "temperature_ns",
        ),
        (
            lambda: rx.soft_graph_cost_ns(
                rx.welch_peaks_graph(8, rx.WelchPeakParams.fast(64, 4), True),
                rx.backend_coefficients([0, 1, 2]),
                temperature_ns=[1.0, 2.0],
            ),
            "temperature_ns",
        ),
    ],
)
def test_a_shape_that_does_not_agree_with_a_paths_is_named(call, named):
    with pytest.raises(ValueError, match=rf"broadcast together, got .*{named} \(2,\)"):
        call()
