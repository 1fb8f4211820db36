"""Parity with the golden tables of strategies: every row, in scalars and as one call, in both precisions."""

import dataclasses
import functools

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
    value_and_gradient,
)
from test_golden import close, close32, column, golden

import rlxjax as rx

each_set = pytest.mark.parametrize("name", ["arch", "portable"])
NAMES = {"UltraFast": "ultra", "FastStreaming": "fast", "RlxCompiled": "rlx", "LearnedCompiled": "learned"}


@functools.cache
def strategy_table(name):
    rows = golden(f"strategy_{name}")
    codes = rx.Device.codes(np.array([row["device"] for row in rows]))
    learned = ("learned_available", "learned_active_gates", "learned_total_gates")
    workload = [column(rows, field) for field in ("batch", "n_fft", "k")]
    costs = np.stack([column(rows, "costs", f"{strategy}_ns") for strategy in rx.welch.ReferenceStrategy], -1)
    picks = np.array([rx.welch.ReferenceStrategy.parse(NAMES[row["pick"]]).code for row in rows])
    return rows, [codes, *workload], [column(rows, field) for field in learned], costs, picks


@each_set
def test_strategy_rows_and_their_profiles_in_scalars(name):
    for row in golden(f"strategy_{name}")[::7]:  # and all of them in one program, below
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
        batch, params = row["batch"], rx.WelchPeakParams.fast(row["n_fft"], row["k"])
        keep, fuse = (rx.profile_graph_io(rx.welch_peaks_graph(batch, params, fused)) for fused in (False, True))
        native = row["device"] not in ("Cpu", "Metal", "Mlx", "Ane", "Tpu") and batch >= 2048
        assert keep == rx.GraphIoProfile(**row["profile_fft"])
        fuse = dataclasses.replace(fuse, sync_points=fuse.sync_points - native)
        assert fuse == rx.GraphIoProfile(**row["profile_fused"])
        assert rx.host_fft_profile(batch, params) == rx.GraphIoProfile(**row["host_fft_profile"])
        assert rx.useful_bytes_touched(batch, params) == row["useful_bytes"]


def traced_set(name):
    """Return a coefficient set as an argument of programs; without its provenance, which is static, all share one."""
    set_ = rx.welch.coefficient_set(name)
    return dataclasses.replace(set_, backend=dataclasses.replace(set_.backend, provenance=""))


@jax.jit
def everything(set_, workload, learned):
    return (
        rx.estimate_welch_peaks_costs(*workload, *learned, coefficients=set_).stack(),
        rx.pick_welch_peaks_strategy(*workload, *learned, coefficients=set_),
        rx.welch_peaks_fusion_gate_breakdown(*workload, coefficients=set_),
        rx.fused_graph_ns(*workload, coefficients=set_),
        rx.block_graph_ns(*workload, coefficients=set_),
        rx.welch.evaluate_welch_peaks(*workload, *learned, coefficients=set_, temperature_ns=1e6),
    )


@each_set
def test_every_strategy_row_in_one_program_and_in_float32(name):
    rows, workload, learned, costs, picks = strategy_table(name)
    estimate, pick, breakdown, fused, _, whole = everything(traced_set(name), workload, learned)
    for found in (estimate, whole.costs.stack()):
        close(found, costs)
    np.testing.assert_array_equal(pick, picks)
    close(breakdown.score_ns, column(rows, "gate", "score_ns"))
    for field in rows[0]["gate"].keys() - {"score_ns"}:
        np.testing.assert_array_equal(getattr(breakdown, field), column(rows, "gate", field))
    np.testing.assert_array_equal(breakdown.compute_floor_ok, column(rows, "compute_floor_ok"))
    for field in ("score_ns", "should_fuse_io", "should_fuse", "compute_floor_ok"):
        np.testing.assert_array_equal(getattr(whole, field), getattr(breakdown, field))
    np.testing.assert_array_equal(whole.fuse_probability > 0.5, breakdown.should_fuse_io)
    close(fused, column(rows, "fused_graph_ns"))
    with jax.enable_x64(False):
        estimate, pick, breakdown, *_ = everything(traced_set(name), workload, learned)
    assert estimate.dtype == breakdown.score_ns.dtype == jnp.float32
    score, min_gain = column(rows, "gate", "score_ns"), column(rows, "gate", "min_gain_ns")
    close32(breakdown.score_ns, score)
    clear = np.abs(score - min_gain) > FLOAT32_RTOL * np.maximum(np.abs(score), min_gain)
    np.testing.assert_array_equal(breakdown.should_fuse[clear], column(rows, "gate", "should_fuse")[clear], strict=True)
    close32(estimate[clear], costs[clear])
    first, second = np.sort(costs, -1)[:, :2].T
    clear &= second > (1 + FLOAT32_RTOL) * first
    assert clear.any()
    np.testing.assert_array_equal(pick[clear], picks[clear])


def margins_ns(name):
    """Return how far every row is from its gate's, its floor's and its costs' ties."""
    _, workload, learned, _, _ = strategy_table(name)
    codes, batch = workload[:2]
    _, _, breakdown, fused, block, _ = everything(traced_set(name), workload, learned)
    slack = np.where((batch >= 8192) & np.isin(codes, rx.Device.codes(np.array(["cuda", "rocm"]))), 1.15, 1.1)
    return np.abs(breakdown.score_ns - breakdown.min_gain_ns), np.abs(block * slack - fused)


@jax.jit
def relaxations(set_, workload, learned, temperature):
    options = {"coefficients": set_, "temperature_ns": temperature}
    return (
        rx.soft_estimate_welch_peaks_costs(*workload, *learned, **options),
        rx.soft_fused_graph_ns(*workload, **options),
        rx.soft_pick_welch_peaks_strategy(*workload, *learned, **options),
    )


@each_set
def test_every_strategy_relaxation_tends_to_the_hard_one(name):
    rows, workload, learned, costs, picks = strategy_table(name)
    gate_margin, floor_margin = margins_ns(name)
    first, second = np.sort(costs, -1)[:, :2].T
    smallest = np.min([gate_margin, floor_margin, second - first, 1e-3 * first], 0)
    assert (smallest > 0).all()
    temperature = smallest / 100
    soft, fused, weights = relaxations(traced_set(name), workload, learned, temperature)
    finite = np.isfinite(costs)
    error = np.abs(soft.costs.stack() - np.where(finite, costs, 0)) / temperature[:, None]
    assert (error[finite] <= LIMIT_TEMPERATURES).all()
    assert (np.abs(fused - column(rows, "fused_graph_ns")) <= LIMIT_TEMPERATURES * temperature).all()
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
    return jax.tree.map(lambda leaf: np.broadcast_to(leaf, (rows, *np.shape(leaf))), traced_set(name))


@functools.partial(jax.vmap, in_axes=(0, 0, 0, None))
def hard_cost(set_, workload, learned, strategy):
    return rx.estimate_welch_peaks_costs(*workload, *learned, set_).stack()[strategy]


#: Of the set "arch": another set's gradients are of the same program at other rates.
def test_every_cost_has_its_gradients():
    rows, workload, learned, _, _ = strategy_table("arch")
    for strategy in rx.welch.ReferenceStrategy:
        assert_gradient_is_the_finite_difference(
            hard_cost, batched_set("arch", len(rows)), workload, learned, strategy.code
        )


@functools.partial(jax.vmap, in_axes=(0, 0, 0, None))
def relaxed(own, workload, learned, of_costs):
    set_, temperature = own
    arguments, options = (*workload, *learned, set_), {"temperature_ns": temperature}
    soft = rx.soft_estimate_welch_peaks_costs(*arguments, **options)
    pick = rx.soft_pick_welch_peaks_strategy(*arguments, **options)
    mix = pick @ np.array([0.3, -0.8, 0.5, 1.1]) + 0.4 * jnp.exp(soft.log_fuse_probability)
    return jnp.where(of_costs, soft.costs.stack() @ np.array([0.3, -0.8, 0.5, 1.1]), mix)


@pytest.mark.parametrize("name", ["arch", pytest.param("portable", marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ["costs", "weights"])
def test_every_strategy_relaxation_has_its_gradients(name, what):
    rows, workload, learned, costs, _ = strategy_table(name)
    first, second = np.sort(costs, -1)[:, :2].T
    gap = np.where(np.isfinite(second), second - first, 0)
    temperature = np.max([*margins_ns(name), gap, 1e-2 * first], 0)
    assert_gradient_is_the_finite_difference(
        relaxed,
        (batched_set(name, len(rows)), temperature),
        *(workload, learned, what == "costs"),
        # Weights of at most 1 cancel in their mixture.
        scale=None if what == "costs" else np.ones(len(rows)),
        # The flag sits at the end of its range, where a step beyond it means nothing.
        kinks=("[0].strategy.is_fused_viable",),
    )


def test_an_infinite_penalty_leaves_no_weight_to_what_fuses_and_every_gradient_finite():
    """In the programs of the tests above."""
    rows, workload, learned, _, _ = strategy_table("arch")
    one, batched = (
        dataclasses.replace(own, gate=dataclasses.replace(own.gate, host_thunk_penalty_ns=infinite))
        for own in (traced_set("arch"), batched_set("arch", len(rows)))
        for infinite in [np.full_like(own.gate.host_thunk_penalty_ns, np.inf)]
    )
    temperature = np.full(len(rows), 1e6)
    soft, _, weights = relaxations(one, workload, learned, temperature)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=FLOAT64_RTOL)
    # Larger batches have a kernel of their own where that adds no sync point.
    np.testing.assert_array_equal(weights[workload[1] < 2048, 2:], 0)
    told = jax.tree.leaves((weights, soft.costs, soft.log_keep_probability, soft.log_availability()))
    assert not any(np.isnan(leaf).any() for leaf in told)
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (batched, temperature))
    for of_costs in (True, False):
        found = value_and_gradient(relaxed, tree, others=(workload, learned, of_costs))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
