"""Io cost, graph cost and device cost against the formulas of SPEC 3, written out."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import FLOAT32_RTOL, FLOAT64_RTOL, assert_gradient_is_the_finite_difference
from hypothesis import given, settings
from hypothesis import strategies as st

import rlxjax as rx

PROFILES = [
    rx.GraphIoProfile(),
    rx.GraphIoProfile(3, 0, 128, 6272),
    rx.GraphIoProfile(7, 2, 1001, 4003),
    rx.GraphIoProfile(24_576, 1, 2**40 + 1, 2**42 + 3),
]
lawful = settings(max_examples=40)
profiles = st.builds(rx.GraphIoProfile, *[st.integers(0, 2**20)] * 2, *[st.integers(0, 2**45)] * 2)


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
    if row is not rx.BACKEND_ROWS["discrete"]:
        return graph_cost(graph, row)
    nodes = sum(node.op not in ("input", "param") for node in graph.nodes)
    return io_cost(rx.profile_graph_io(graph), row) + row.dispatch_ns * nodes


def sample_graph(rows=6, inner=8):
    """Return a graph with a node of every kind of cost, views, constants and a sync included."""
    graph = rx.Graph()
    x, w, c = graph.input("x", (rows, inner)), graph.param("w", (inner, 5)), graph.constant("c", (rows, 5))
    product = graph.add("matmul", [x, w])
    total = graph.add("add", [product, c])
    view = graph.add("reshape", [total], shape=(5, rows))
    half = graph.add("cast", [view], to="f16")
    q = graph.add("reshape", [x], shape=(1, 2, rows, inner // 2))
    attended = graph.add("attention", [q, q, q])
    synced = graph.add("custom", [half, attended], shape=(3, 7), dtype="f64")
    graph.set_outputs([synced, total, x])
    return graph


def welch(fused):
    return rx.welch_peaks_graph(64, rx.WelchPeakParams.fast(256, 16), fused)


GRAPHS = {
    "empty": rx.Graph(),
    "small": sample_graph(),
    "large": sample_graph(512, 1024),
    "fused": welch(True),
    "fft": welch(False),
}
rows = pytest.mark.parametrize("row", rx.BACKEND_ROWS.values(), ids=list(rx.BACKEND_ROWS))
graphs = pytest.mark.parametrize("graph", GRAPHS.values(), ids=list(GRAPHS))


# --- Closed forms --------------------------------------------------------------------------------


@rows
@pytest.mark.parametrize("profile", PROFILES)
def test_io_cost_is_the_closed_form(profile, row):
    np.testing.assert_allclose(rx.io_cost_ns(profile, row), io_cost(profile, row), rtol=FLOAT64_RTOL)


@rows
@graphs
def test_graph_cost_is_the_closed_form(graph, row):
    np.testing.assert_allclose(rx.graph_cost_ns(graph, row), graph_cost(graph, row), rtol=FLOAT64_RTOL)


@graphs
@pytest.mark.parametrize("coefficients", ["arch", "portable"])
def test_device_cost_is_the_closed_form_with_its_row_or_the_fallback(graph, coefficients):
    for device in (*rx.Device, "cpu-apple"):
        cost = rx.device_cost_ns(graph, device, coefficients)
        np.testing.assert_allclose(cost, device_cost(graph, device, coefficients), rtol=FLOAT64_RTOL)


@pytest.mark.parametrize("name", ["CPU", "Cpu-Apple", "cpu_apple", "WebGpu", "wgpu", rx.Device.TPU])
def test_a_device_is_named_in_any_case(name):
    known = {"cpu_apple": "cpu-apple", "wgpu": "gpu"}.get(str(name).lower(), str(name).lower())
    assert rx.device_cost_ns(GRAPHS["small"], name) == rx.device_cost_ns(GRAPHS["small"], known)


@pytest.mark.parametrize("op", ["reshape", "transpose", "narrow"])
def test_a_view_costs_its_elements_and_a_dispatch_in_a_graph(op):
    graph, row = rx.Graph(), rx.backend_coefficients("cuda")
    graph.add(op, [graph.input("x", (40, 3))], shape=(30, 3), dtype="i8")
    expected = row.roundtrip_ns + row.dispatch_ns + 90 * 4 / 900
    np.testing.assert_allclose(rx.graph_cost_ns(graph, row), expected, rtol=FLOAT64_RTOL)


@pytest.mark.parametrize(
    ("m", "k", "n", "gflops"), [(32, 32, 32, 5_000), (31, 32, 33, 500), (1, 32_768, 1, 5_000), (1, 1, 1, 500)]
)
def test_a_matmul_below_32768_multiply_adds_runs_at_the_small_rate(m, k, n, gflops):
    graph, row = rx.Graph(), rx.BACKEND_ROWS["mlx"]
    product = graph.add("matmul", [graph.input("a", (m, k)), graph.input("b", (k, n))])
    traffic = 4 * (m * k + k * n + m * n)
    assert graph.nodes[product].shape == (m, n)
    expected = 5_000 + 2_000 + 2 * m * k * n / (gflops + 1) + traffic / 200 + (traffic // 4) / 200
    np.testing.assert_allclose(rx.graph_cost_ns(graph, row), expected, rtol=FLOAT64_RTOL)


def test_attention_costs_the_square_of_its_sequence():
    graph, row = rx.Graph(), rx.backend_coefficients("metal")
    q = graph.input("q", (2, 8, 128, 64))
    graph.add("attention", [q, q, q])
    traffic = 4 * 4 * 2 * 8 * 128 * 64
    expected = 5_000 + 2_000 + 2 * 2 * 8 * 128**2 * 64 / 5_001 + traffic / 200
    np.testing.assert_allclose(rx.graph_cost_ns(graph, row), expected, rtol=FLOAT64_RTOL)


@rows
def test_unified_memory_reads_back_the_host_output_alone(row):
    profile = rx.GraphIoProfile(0, 0, 1000, 44_000)
    unified, discrete = (
        rx.io_cost_ns(profile, dataclasses.replace(row, unified_memory=flag)) for flag in (True, False)
    )
    np.testing.assert_allclose(discrete - unified, 11_000 / row.readback_bw, rtol=1e-9)


@pytest.mark.parametrize("bandwidth", [0.0, 0.5, 1.0])
def test_a_bandwidth_below_1_counts_as_1(bandwidth):
    row = dataclasses.replace(rx.BACKEND_ROWS["cpu"], memory_bw=bandwidth, readback_bw=bandwidth)
    assert rx.io_cost_ns(rx.GraphIoProfile(0, 0, 10, 400), row) == 3_000 + 400 + 110


# --- Laws ----------------------------------------------------------------------------------------


@lawful
@given(profiles, st.sampled_from(list(vars(PROFILES[0]))), st.integers(1, 2**30))
def test_a_larger_profile_costs_no_less(profile, name, more):
    larger = dataclasses.replace(profile, **{name: getattr(profile, name) + more})
    for row in rx.BACKEND_ROWS.values():
        smaller = float(rx.io_cost_ns(profile, row))
        assert rx.io_cost_ns(larger, row) >= smaller * (1 - FLOAT64_RTOL)


@lawful
@given(profiles, st.integers(-6, 6), st.sampled_from(list(rx.BACKEND_ROWS.values())))
def test_a_cost_scales_with_the_unit_of_time(profile, exponent, row):
    unit = 2.0**exponent
    scaled = dataclasses.replace(
        row,
        dispatch_ns=row.dispatch_ns * unit,
        roundtrip_ns=row.roundtrip_ns * unit,
        memory_bw=row.memory_bw * 64 / unit,
        readback_bw=row.readback_bw * 64 / unit,
    )
    wide = dataclasses.replace(row, memory_bw=row.memory_bw * 64, readback_bw=row.readback_bw * 64)
    np.testing.assert_array_equal(rx.io_cost_ns(profile, scaled), rx.io_cost_ns(profile, wide) * unit)


# --- Tables and transformations ------------------------------------------------------------------


def stacked(coefficients="arch"):
    return rx.backend_coefficients(np.arange(len(rx.Device)), coefficients)


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


@graphs
def test_a_graph_on_all_rows_is_one_call_and_vmap_is_a_loop(graph):
    table = dataclasses.replace(stacked(), provenance="uncalibrated")
    loop = [graph_cost(graph, rx.backend_coefficients(device)) for device in rx.Device]
    cost = jax.jit(lambda row: rx.graph_cost_ns(graph, row))
    for costs in (rx.graph_cost_ns(graph, table), cost(table), jax.vmap(cost)(table)):
        np.testing.assert_allclose(costs, loop, rtol=FLOAT64_RTOL)


@graphs
def test_a_whole_row_has_a_gradient(graph):
    assert_gradient_is_the_finite_difference(jax.jit(lambda row: rx.graph_cost_ns(graph, row)), stacked())


@pytest.mark.parametrize("profile", PROFILES)
def test_a_whole_row_has_a_gradient_of_its_io_cost(profile):
    assert_gradient_is_the_finite_difference(jax.jit(lambda row: rx.io_cost_ns(profile, row)), stacked())


# --- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(vars(PROFILES[0])))
@pytest.mark.parametrize("count", [-1, float("nan")])
def test_a_negative_or_nan_count_is_refused_by_name(name, count):
    with pytest.raises(ValueError, match=f"{name}: expected a count of at least 0"):
        rx.io_cost_ns(rx.GraphIoProfile(**{name: count}), rx.BACKEND_ROWS["cpu"])


@pytest.mark.parametrize(("op", "shape"), [("matmul", (2, 2)), ("attention", (2, 2))])
def test_a_node_whose_cost_has_no_shapes_is_refused_by_name(op, shape):
    graph = rx.Graph()
    graph.add(op, [], shape=shape)
    with pytest.raises(ValueError, match=rf"node 0 \({op}\): its cost needs"):
        rx.graph_cost_ns(graph, rx.BACKEND_ROWS["cpu"])


def test_an_unknown_device_or_set_is_refused():
    with pytest.raises(ValueError, match="unknown device 'abacus'"):
        rx.device_cost_ns(GRAPHS["small"], "abacus")
    with pytest.raises(ValueError, match="coefficients: expected one of arch, portable"):
        rx.device_cost_ns(GRAPHS["small"], "cpu", "mine")
