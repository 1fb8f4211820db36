"""Parity with the golden tables: every row, in scalars and as one compiled call, in both precisions."""

import dataclasses
import functools
import json
import operator
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import (
    FLOAT32_RTOL,
    FLOAT64_RTOL,
    LIMIT_TEMPERATURES,
    SATURATED_ATOL,
    assert_gradient_is_the_finite_difference,
)

import rlxjax as rx

GOLDEN = pathlib.Path(__file__).parent / "golden"
SETS = ("arch", "portable")
NAMES = {"UltraFast": "ultra", "FastStreaming": "fast", "RlxCompiled": "rlx", "LearnedCompiled": "learned"}
COUNTS = tuple(field.name for field in dataclasses.fields(rx.GraphIoProfile))
close = functools.partial(np.testing.assert_allclose, rtol=FLOAT64_RTOL, atol=0)
close32 = functools.partial(np.testing.assert_allclose, rtol=FLOAT32_RTOL, atol=0)


@functools.cache
def golden(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


def column(rows, *path):
    values = [functools.reduce(operator.getitem, path, row) for row in rows]
    return np.array([-1 if value is None else float("inf") if value == "inf" else value for value in values])


# --- Graphs --------------------------------------------------------------------------------------


def graph_of(row):
    graph = rx.Graph()
    for node in row["nodes"]:
        graph.add(node["op"], node["inputs"], shape=node["shape"], dtype=node["dtype"])
    graph.set_outputs(row["outputs"])
    return graph


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("profile", lambda row: {}),
        ("profile_fft_host_sync", lambda row: {"fft_host_sync": True}),
        ("profile_selected", lambda row: {"output_indices": row["selected_output_indices"]}),
        ("profile_compile", lambda row: {"output_ids": row["outputs"]}),
    ],
)
def test_every_graph_has_its_profile(field, options):
    for row in golden("graph"):
        profile = rx.profile_graph_io(graph_of(row), **options(row))
        assert profile == rx.GraphIoProfile(**row[field]), row


def test_every_graph_has_its_readback_bytes():
    for row in golden("graph"):
        profile = rx.profile_graph_io(graph_of(row))
        assert profile.host_readback_bytes(True) == row["readback_unified"]
        assert profile.host_readback_bytes(False) == row["readback_discrete"]


# --- Gates ---------------------------------------------------------------------------------------


def gate_table():
    rows = golden("gate")
    gate = rx.IoFusionGate(**{name: column(rows, "gate", name) for name in rows[0]["gate"]})
    before, after = (
        rx.GraphIoProfile(**{name: column(rows, which, name) for name in COUNTS})
        for which in ("before", "after")
    )
    return gate, before, after


def terms_size(gate, benefit):
    """Return the size of the terms that cancel in a score."""
    penalty = np.abs(benefit.sync_points_saved) * gate.host_thunk_penalty_ns
    return jax.tree.map(np.abs, benefit).score_ns(gate) + penalty


def test_every_benefit_is_exact_in_scalars_and_in_a_table():
    rows = golden("gate")
    for row in rows:
        before, after = (rx.GraphIoProfile(**row[which]) for which in ("before", "after"))
        assert rx.fusion_benefit(before, after) == rx.FusionBenefit(**row["benefit"])
    _, before, after = gate_table()
    for name, counts in vars(rx.fusion_benefit(before, after)).items():
        assert counts.dtype == np.int64
        np.testing.assert_array_equal(counts, column(rows, "benefit", name))


def test_every_gate_score_and_decision_in_scalars():
    for row in golden("gate"):
        gate, benefit = rx.IoFusionGate(**row["gate"]), rx.FusionBenefit(**row["benefit"])
        profiles = [rx.GraphIoProfile(**row[which]) for which in ("before", "after")]
        close(gate.score_ns(*profiles), row["gate_score_ns"])
        close(benefit.score_ns(gate), row["benefit_score_ns"])
        assert bool(gate.should_fuse(*profiles)) == row["should_fuse"]
        assert bool(benefit.should_fuse(gate)) == (row["benefit_score_ns"] >= row["gate"]["min_gain_ns"])
        if row["target"] != "custom":
            assert rx.io_fusion_gate_for_target(row["target"]) == gate


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_every_gate_score_and_decision_in_one_call(transform):
    rows = golden("gate")
    gate, before, after = gate_table()
    benefit = rx.fusion_benefit(before, after)
    close(transform(rx.IoFusionGate.score_ns)(gate, benefit), column(rows, "gate_score_ns"))
    close(transform(rx.FusionBenefit.score_ns)(benefit, gate), column(rows, "benefit_score_ns"))
    decision = transform(rx.IoFusionGate.should_fuse)(gate, benefit)
    np.testing.assert_array_equal(decision, column(rows, "should_fuse"))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
@pytest.mark.parametrize(("towards", "fuses"), [(-np.inf, True), (None, True), (np.inf, False)])
def test_every_decision_turns_within_one_ulp_of_its_score(transform, towards, fuses):
    gate, before, after = gate_table()
    benefit = rx.fusion_benefit(before, after)
    score = np.asarray(gate.score_ns(benefit))
    min_gain = score if towards is None else np.nextafter(score, towards)
    gate = dataclasses.replace(gate, min_gain_ns=min_gain)
    np.testing.assert_array_equal(transform(rx.IoFusionGate.should_fuse)(gate, benefit), fuses)
    for i in range(len(score)):
        one_gate, one = jax.tree.map(lambda leaf, i=i: leaf[i].item(), (gate, benefit))
        assert bool(transform(rx.IoFusionGate.should_fuse)(one_gate, one)) is fuses


def test_every_gate_in_float32():
    rows = golden("gate")
    gate, before, after = gate_table()
    with jax.enable_x64(False):
        score, decision = gate.score_ns(before, after), gate.should_fuse(before, after)
    assert score.dtype == jnp.float32
    expected, min_gain = column(rows, "gate_score_ns"), column(rows, "gate", "min_gain_ns")
    close32(score, expected)
    clear = np.abs(expected - min_gain) > FLOAT32_RTOL * np.maximum(np.abs(expected), min_gain)
    assert clear.any()
    np.testing.assert_array_equal(decision[clear], column(rows, "should_fuse")[clear])


def test_every_gate_relaxation_tends_to_the_hard_one():
    rows = golden("gate")
    gate, before, after = gate_table()
    score = column(rows, "gate_score_ns")
    margin = np.abs(score - gate.min_gain_ns)
    probability = gate.fuse_probability(before, after, temperature_ns=margin / 40)
    np.testing.assert_allclose(probability, column(rows, "should_fuse"), rtol=0, atol=SATURATED_ATOL)
    temperature = 1e-9 * np.abs(score)
    soft = gate.soft_score_ns(before, after, temperature_ns=temperature)
    assert (np.abs(soft - score) <= LIMIT_TEMPERATURES * temperature).all()


def test_every_gate_has_its_gradients():
    gate, before, after = gate_table()
    benefit = rx.fusion_benefit(before, after)
    scale = terms_size(gate, benefit)
    margin = np.abs(gate.score_ns(benefit) - gate.min_gain_ns)
    assert_gradient_is_the_finite_difference(lambda g: g.score_ns(benefit), gate, scale=scale)
    for soft, size in (("fuse_probability", 1), ("fuse_log_probability", 1), ("soft_score_ns", margin)):

        def f(g, soft=soft):
            return getattr(g, soft)(benefit, temperature_ns=margin)

        assert_gradient_is_the_finite_difference(jax.jit(f), gate, scale=scale * size / margin)


def test_every_coefficient_that_takes_part_moves_the_probability_within_30_temperatures():
    gate, before, after = gate_table()
    benefit = rx.fusion_benefit(before, after)
    margin = np.abs(gate.score_ns(benefit) - gate.min_gain_ns)
    probability = functools.partial(rx.IoFusionGate.fuse_probability, temperature_ns=margin / 29)
    gradient = jax.grad(lambda g: jnp.sum(probability(g, benefit)))(gate)
    discrete = gate.unified_memory == 0
    takes_part = {
        "dispatch_ns": benefit.launches_saved != 0,
        "roundtrip_ns": benefit.sync_points_saved != 0,
        "memory_bw": (benefit.device_traffic_bytes_saved != 0) & (gate.memory_bw > 1),
        "host_readback_bw": (benefit.host_readback_bytes_saved != 0) & discrete & (gate.host_readback_bw > 1),
        "host_thunk_penalty_ns": benefit.sync_points_saved < 0,
        "min_gain_ns": np.full(len(margin), True),
    }
    for name, part in takes_part.items():
        np.testing.assert_array_equal(getattr(gradient, name) != 0, part, err_msg=name)


# --- Strategies ----------------------------------------------------------------------------------


def strategy_table(name):
    rows = golden(f"strategy_{name}")
    codes = rx.Device.codes(np.array([row["device"] for row in rows]))
    learned = ("learned_available", "learned_active_gates", "learned_total_gates")
    workload = [column(rows, field) for field in ("batch", "n_fft", "k")]
    costs = np.stack([column(rows, "costs", f"{strategy}_ns") for strategy in rx.Strategy], -1)
    picks = np.array([rx.Strategy.parse(NAMES[row["pick"]]).code for row in rows])
    return rows, [codes, *workload], [column(rows, field) for field in learned], costs, picks


@pytest.mark.parametrize("name", SETS)
def test_every_strategy_row_in_scalars(name):
    for row in golden(f"strategy_{name}"):
        workload = (row["device"], row["batch"], row["n_fft"], row["k"])
        learned = (row["learned_available"], row["learned_active_gates"], row["learned_total_gates"])
        costs = rx.estimate_welch_peaks_costs(*workload, *learned, coefficients=name)
        for strategy, expected in row["costs"].items():
            close(getattr(costs, strategy), float(expected))
        assert rx.pick_welch_peaks_strategy(*workload, *learned, coefficients=name) == NAMES[row["pick"]]
        breakdown = rx.welch_peaks_fusion_gate_breakdown(*workload, coefficients=name)
        close(breakdown.score_ns, row["gate"]["score_ns"])
        for field in row["gate"].keys() - {"score_ns"}:
            assert getattr(breakdown, field) == row["gate"][field]
        assert bool(breakdown.compute_floor_ok) == row["compute_floor_ok"]
        close(rx.fused_graph_ns(*workload, coefficients=name), row["fused_graph_ns"])


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_every_strategy_row_in_one_call(name, transform):
    rows, workload, learned, costs, picks = strategy_table(name)

    @transform
    def everything(workload, learned):
        return (
            rx.estimate_welch_peaks_costs(*workload, *learned, coefficients=name).stack(),
            rx.pick_welch_peaks_strategy(*workload, *learned, coefficients=name),
            rx.welch_peaks_fusion_gate_breakdown(*workload, coefficients=name),
            rx.fused_graph_ns(*workload, coefficients=name),
        )

    estimate, pick, breakdown, fused = everything(workload, learned)
    close(estimate, costs)
    np.testing.assert_array_equal(pick, picks)
    close(breakdown.score_ns, column(rows, "gate", "score_ns"))
    for field in rows[0]["gate"].keys() - {"score_ns"}:
        np.testing.assert_array_equal(getattr(breakdown, field), column(rows, "gate", field))
    np.testing.assert_array_equal(breakdown.compute_floor_ok, column(rows, "compute_floor_ok"))
    close(fused, column(rows, "fused_graph_ns"))


@pytest.mark.parametrize("name", SETS)
def test_every_strategy_row_has_its_profiles(name):
    for row in golden(f"strategy_{name}"):
        batch, params = row["batch"], rx.WelchPeakParams.fast(row["n_fft"], row["k"])
        keep, fuse = (
            rx.profile_graph_io(rx.welch_peaks_graph(batch, params, fused)) for fused in (False, True)
        )
        native = row["device"] not in ("Cpu", "Metal", "Mlx", "Ane", "Tpu") and batch >= 2048
        assert keep == rx.GraphIoProfile(**row["profile_fft"])
        fuse = dataclasses.replace(fuse, sync_points=fuse.sync_points - native)
        assert fuse == rx.GraphIoProfile(**row["profile_fused"])
        assert rx.host_fft_profile(batch, params) == rx.GraphIoProfile(**row["host_fft_profile"])
        assert rx.useful_bytes_touched(batch, params) == row["useful_bytes"]


@pytest.mark.parametrize("name", SETS)
def test_every_strategy_row_in_float32(name):
    rows, workload, learned, costs, picks = strategy_table(name)
    with jax.enable_x64(False):
        estimate = rx.estimate_welch_peaks_costs(*workload, *learned, coefficients=name).stack()
        pick = rx.pick_welch_peaks_strategy(*workload, *learned, coefficients=name)
        breakdown = rx.welch_peaks_fusion_gate_breakdown(*workload, coefficients=name)
    assert estimate.dtype == breakdown.score_ns.dtype == jnp.float32
    score, min_gain = column(rows, "gate", "score_ns"), column(rows, "gate", "min_gain_ns")
    close32(breakdown.score_ns, score)
    clear = np.abs(score - min_gain) > FLOAT32_RTOL * np.maximum(np.abs(score), min_gain)
    np.testing.assert_array_equal(
        breakdown.should_fuse[clear], column(rows, "gate", "should_fuse")[clear], strict=True
    )
    close32(estimate[clear], costs[clear])
    first, second = np.sort(costs, -1)[:, :2].T
    clear &= second > (1 + FLOAT32_RTOL) * first
    assert clear.any()
    np.testing.assert_array_equal(pick[clear], picks[clear])


def margins_ns(workload, name):
    """Return how far every row is from its gate's, its floor's and its costs' ties."""
    codes, batch = workload[:2]
    breakdown = rx.welch_peaks_fusion_gate_breakdown(*workload, coefficients=name)
    slack = np.where((batch >= 8192) & np.isin(codes, rx.Device.codes(np.array(["cuda", "rocm"]))), 1.15, 1.1)
    block, fused = (f(*workload, coefficients=name) for f in (rx.block_graph_ns, rx.fused_graph_ns))
    return np.abs(breakdown.score_ns - breakdown.min_gain_ns), np.abs(block * slack - fused)


@pytest.mark.parametrize("name", SETS)
def test_every_strategy_relaxation_tends_to_the_hard_one(name):
    rows, workload, learned, costs, picks = strategy_table(name)
    gate_margin, floor_margin = margins_ns(workload, name)
    first, second = np.sort(costs, -1)[:, :2].T
    smallest = np.min([gate_margin, floor_margin, second - first, 1e-3 * first], 0)
    assert (smallest > 0).all()
    temperature = smallest / 100
    options = {"coefficients": name, "temperature_ns": temperature}
    soft = rx.soft_estimate_welch_peaks_costs(*workload, *learned, **options)
    finite = np.isfinite(costs)
    error = np.abs(soft.costs.stack() - np.where(finite, costs, 0)) / temperature[:, None]
    assert (error[finite] <= LIMIT_TEMPERATURES).all()
    fused = rx.soft_fused_graph_ns(*workload, **options)
    assert (np.abs(fused - column(rows, "fused_graph_ns")) <= LIMIT_TEMPERATURES * temperature).all()
    weights = rx.soft_pick_welch_peaks_strategy(*workload, *learned, **options)
    np.testing.assert_allclose(weights, np.eye(4)[picks], rtol=0, atol=SATURATED_ATOL)
    np.testing.assert_array_equal(np.asarray(soft.available) == 0, impossible(rows))


def impossible(rows):
    """Return where a strategy can never run, `[rows, 4]`."""
    on_cpu, on_tpu = (np.array([row["device"] == device for row in rows]) for device in ("Cpu", "Tpu"))
    active, total = column(rows, "learned_active_gates"), column(rows, "learned_total_gates")
    sparse = (active >= 0) & (total > 0) & (4 * active < total) & column(rows, "learned_available")
    unviable = on_cpu | on_tpu
    ultra = ~on_cpu & (column(rows, "batch") > 128)
    return np.stack([ultra, np.zeros_like(ultra), unviable, unviable | ~sparse], -1)


def batched_set(name, rows):
    """Return a coefficient set for every row, so that every row has a gradient of its own."""
    set_ = rx.coefficient_set(name)
    # Provenance is static: without it both sets share one compilation.
    set_ = dataclasses.replace(set_, backend=dataclasses.replace(set_.backend, provenance=""))
    return jax.tree.map(lambda leaf: np.broadcast_to(leaf, (rows, *np.shape(leaf))), set_)


@jax.jit
@jax.vmap
def hard_costs(set_, workload, learned):
    return rx.estimate_welch_peaks_costs(*workload, *learned, set_).stack()


@pytest.mark.parametrize("name", SETS)
def test_every_cost_has_its_gradients(name):
    rows, workload, learned, _, _ = strategy_table(name)
    for strategy in rx.Strategy:

        def cost(set_, column=strategy.code):
            return hard_costs(set_, workload, learned)[:, column]

        assert_gradient_is_the_finite_difference(cost, batched_set(name, len(rows)))


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.vmap, in_axes=(None, 0, 0, 0, 0))
def relaxed(what, set_, workload, learned, temperature):
    arguments, options = (*workload, *learned, set_), {"temperature_ns": temperature}
    soft = rx.soft_estimate_welch_peaks_costs(*arguments, **options)
    if what == "costs":
        return soft.costs.stack() @ np.array([0.3, -0.8, 0.5, 1.1])
    pick = rx.soft_pick_welch_peaks_strategy(*arguments, **options)
    softmin = rx.pick_weights(rx.estimate_welch_peaks_costs(*arguments), **options)
    mix = pick @ np.array([0.3, -0.8, 0.5, 1.1]) + softmin @ np.array([0.7, 0.2, -0.6, 0.9])
    return mix + 0.4 * jnp.exp(soft.log_fuse_probability)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("what", ["costs", "weights"])
def test_every_strategy_relaxation_has_its_gradients(name, what):
    rows, workload, learned, costs, _ = strategy_table(name)
    first, second = np.sort(costs, -1)[:, :2].T
    gap = np.where(np.isfinite(second), second - first, 0)
    temperature = np.max([*margins_ns(workload, name), gap, 1e-2 * first], 0)
    assert_gradient_is_the_finite_difference(
        lambda set_: relaxed(what, set_, workload, learned, temperature),
        batched_set(name, len(rows)),
        # The flag sits at the end of its range, where a step beyond it means nothing.
        kinks=(".strategy.is_fused_viable",),
    )
