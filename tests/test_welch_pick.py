"""The pick: ties, the softmin, its relaxation, the legacy thresholds, and the names that a user may type."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import (
    FLOAT32_RTOL,
    FLOAT64_RTOL,
    QUICKLY,
    SATURATED_ATOL,
    assert_gradient_is_the_finite_difference,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import rlxjax as rx

INF = math.inf
MIX = np.array([0.3, -1.0, 2.0, 0.7])
MODELS = [
    (False, None, 0),
    (True, None, 1024),
    (True, 255, 1024),
    (True, 256, 1024),
    (True, 0, 0),
    (False, 1, 1024),
]
BATCHES = [1, 128, 129, 256, 257, 1024, 8191, 8192, 65_536]
lawful = settings(max_examples=60)
devices = st.sampled_from(list(rx.Device))
batches = st.one_of(st.integers(1, 2**17), st.sampled_from(BATCHES))
models = st.sampled_from(MODELS)
costs_ns = st.one_of(st.floats(1, 1e9), st.sampled_from([1.0, 2.0, INF]))


def lists_of_costs(n):
    return st.lists(costs_ns, min_size=n, max_size=n)


# --- The hard pick -------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", list(itertools.product([1.0, 2.0, INF], repeat=4)))
def test_the_earliest_of_the_cheapest_is_picked(costs):
    assert rx.WelchPeaksCostEstimates(*costs).pick_index() == costs.index(min(costs))


@lawful
@given(devices, batches, models, st.sampled_from(["arch", "portable"]))
def test_the_pick_is_the_cheapest_strategy(device, batch, model, set_):
    pick = rx.pick_welch_peaks_strategy(device, batch, 256, 16, *model, coefficients=set_)
    costs = rx.estimate_welch_peaks_costs(device, batch, 256, 16, *model, coefficients=set_)
    assert isinstance(pick, rx.ReferenceStrategy)
    assert getattr(costs, f"{pick}_ns") == min(vars(costs).values()) < INF


@pytest.mark.parametrize(
    ("model", "finite"),
    [
        ((True, 255, 1024), True),
        ((True, 0, 1), True),
        ((True, 256, 1024), False),
        ((False, 0, 1024), False),
        ((True, None, 1024), False),
        ((True, -1, 1024), False),
        ((True, 0, 0), False),
        ((True, None, 0), False),
    ],
)
def test_a_learned_model_is_used_where_it_is_known_to_be_sparse(model, finite):
    costs = rx.estimate_welch_peaks_costs("metal", 8192, 256, 16, *model)
    assert np.isfinite(costs.learned_ns) == finite
    if finite:
        scale = 0.30 + 0.70 * model[1] / model[2]
        assert costs.learned_ns == rx.fused_graph_ns("metal", 8192, 256, 16, scale)
        assert costs.learned_ns <= costs.rlx_ns
    for device, batch in (("cpu", 8192), ("tpu", 8192), ("metal", 256)):
        assert rx.estimate_welch_peaks_costs(device, batch, 256, 16, *model).learned_ns == INF


@pytest.mark.parametrize("device", rx.Device)
def test_ultra_is_impossible_beyond_128_rows_but_on_the_cpu(device):
    costs = rx.estimate_welch_peaks_costs(device, np.array([128, 129]), 256, 16)
    np.testing.assert_array_equal(np.isfinite(costs.ultra_ns), [True, device == "cpu"])
    assert np.isfinite(costs.fast_ns).all()


# --- The legacy pick -----------------------------------------------------------------------------


def legacy(device, batch, available, active, total):
    large = device != "cpu" and batch >= 8192
    sparse = active is not None and total > 0 and 4 * active < total
    if large:
        return "learned" if available and sparse else "rlx"
    return "ultra" if batch <= (256 if device == "cpu" else 128) else "fast"


@pytest.mark.parametrize("device", rx.Device)
@pytest.mark.parametrize("model", MODELS)
def test_the_legacy_pick_goes_by_thresholds(device, model):
    for batch in BATCHES:
        pick = rx.pick_welch_peaks_strategy(device, batch, 256, 16, *model, legacy=True)
        assert pick == legacy(device, batch, *model)


# --- Tables and transformations ------------------------------------------------------------------


@pytest.mark.parametrize("is_legacy", [False, True])
def test_a_mixed_table_of_picks_is_one_call(is_legacy):
    rows = list(itertools.product(rx.Device, BATCHES, MODELS))
    expected = [
        rx.pick_welch_peaks_strategy(device, batch, 256, 16, *model, legacy=is_legacy).code
        for device, batch, model in rows
    ]
    codes, batch = rx.Device.codes([row[0] for row in rows]), np.array([row[1] for row in rows])
    models_ = (np.array([-1 if m[i] is None else m[i] for *_, m in rows]) for i in range(3))

    def pick(codes, batch, available, active, total):
        return rx.pick_welch_peaks_strategy(codes, batch, 256, 16, available, active, total, legacy=is_legacy)

    arguments = (codes, batch, *models_)
    for f in (pick, jax.jit(pick), jax.vmap(pick)):
        np.testing.assert_array_equal(f(*arguments), expected)
    arguments = (codes, batch, arguments[2].astype(bool), *arguments[3:])
    np.testing.assert_array_equal(pick(*arguments), expected)


def test_a_soft_pick_of_a_table_is_its_scalars():
    codes, batch = np.arange(12), np.array([1, 128, 129, 600, 2048, 9000] * 2)
    temperature = np.geomspace(1e3, 1e7, 12)

    def pick(codes, batch, temperature):
        return rx.soft_pick_welch_peaks_strategy(codes, batch, 256, 16, True, 10, 1024, temperature_ns=temperature)

    loop = [pick(device, b, t) for device, b, t in zip(rx.Device, batch.tolist(), temperature.tolist(), strict=True)]
    transformed = (jax.jit(f, compiler_options=QUICKLY) for f in (pick, jax.vmap(pick)))
    for f in (pick, *transformed):
        np.testing.assert_allclose(f(codes, batch, temperature), loop, rtol=FLOAT64_RTOL, atol=SATURATED_ATOL)
    one = [pick(int(code), int(b), 1e5) for code, b in zip(codes, batch, strict=True)]
    np.testing.assert_allclose(pick(codes, batch, 1e5), one, rtol=FLOAT64_RTOL, atol=SATURATED_ATOL)


# --- The softmin ---------------------------------------------------------------------------------


@lawful
@given(st.sampled_from([1, 2, 6]).flatmap(lists_of_costs), st.floats(1e-3, 1e9))
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
    return weights @ MIX[:3]


@pytest.mark.parametrize("costs", list(itertools.product([3.0, 5.0, INF], repeat=3)))
@pytest.mark.parametrize("log_availability", [(0.0, 0.0, 0.0), (0.0, -INF, -1.0), (-INF, -INF, -INF)])
def test_no_gradient_of_the_weights_is_nan(costs, log_availability):
    arguments = (np.array(costs), 2.0, np.array(log_availability))
    gradients = jax.grad(mixed, (0, 1, 2))(*arguments)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    impossible = np.isinf(costs) | np.isinf(log_availability)
    np.testing.assert_array_equal(gradients[0][impossible], 0)
    weights = rx.pick_weights(arguments[0], temperature_ns=2.0, log_availability=arguments[2])
    np.testing.assert_array_equal(weights[impossible], 0)


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


def test_estimates_integers_and_tables_are_costs_too():
    estimates = rx.WelchPeaksCostEstimates(jnp.array([1.0, 3.0]), 2.0, INF, 1.0)
    weights = rx.pick_weights(estimates, temperature_ns=np.ones(2))
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=FLOAT64_RTOL)
    table = np.array([[1, 2, 3], [9, 9, 9]])
    by_row = [rx.pick_weights(row, temperature_ns=4.0) for row in table]
    np.testing.assert_allclose(rx.pick_weights(table, temperature_ns=4.0), by_row, rtol=FLOAT64_RTOL)


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
    both = jax.jit(lambda *at: [gradient(*at, straight) for straight in (True, False)], compiler_options=QUICKLY)
    ((_, hard), by_hard), ((_, soft), by_soft) = both(rx.coefficient_set(), 3e5)
    code = rx.pick_welch_peaks_strategy("metal", 1024, 256, 16).code
    np.testing.assert_array_equal(hard, np.eye(4)[code])
    assert 0 < soft[code] < 1
    for a, b in zip(jax.tree.leaves(by_hard), jax.tree.leaves(by_soft), strict=True):
        np.testing.assert_allclose(a, b, rtol=FLOAT64_RTOL, atol=0)
    assert any((leaf != 0).any() for leaf in jax.tree.leaves(by_soft))


@pytest.mark.parametrize("device", ["metal", "cuda", "webgpu", "cpu"])
@pytest.mark.parametrize("batch", [100, 1024])
def test_an_infinite_penalty_makes_no_nan_in_the_pick(device, batch):
    set_ = rx.coefficient_set()
    gate = dataclasses.replace(set_.gate, host_thunk_penalty_ns=np.full(12, INF))
    set_ = dataclasses.replace(set_, gate=gate)

    def f(set_, temperature):
        weights = rx.soft_pick_welch_peaks_strategy(
            device, batch, 256, 16, coefficients=set_, temperature_ns=temperature
        )
        return weights @ MIX, weights

    (_, weights), gradients = jax.value_and_grad(f, (0, 1), has_aux=True)(set_, 1e6)
    np.testing.assert_allclose(weights.sum(), 1, rtol=FLOAT64_RTOL)
    np.testing.assert_array_equal(weights[2:], 0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("device", rx.Device)
def test_a_relaxed_pick_in_float32_agrees(device):
    arguments, options = (device, 1024, 256, 16, True, 10, 1024), {"temperature_ns": 1e7}
    exact = rx.soft_pick_welch_peaks_strategy(*arguments, **options)
    with jax.enable_x64(False):
        weights = rx.soft_pick_welch_peaks_strategy(*arguments, **options)
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights, exact, rtol=10 * FLOAT32_RTOL)


# --- Names ---------------------------------------------------------------------------------------

NAMES = {
    "auto": ["auto", ""],
    "ultra": ["ultra", "ultra_fast", "ultra_fast_rustfft", "1seg"],
    "fast": ["fast", "streaming", "fast_streaming", "fast_streaming_rustfft", "rustfft", "2seg"],
    "rlx": ["rlx", "rlx_compiled", "compiled", "gpu", "fused"],
    "learned": ["learned", "learned_compiled"],
}


@pytest.mark.parametrize(("meaning", "alias"), [(m, alias) for m, aliases in NAMES.items() for alias in aliases])
@pytest.mark.parametrize("spell", [str, str.upper, str.title, lambda s: s.replace("_", "-"), lambda s: f" {s} "])
def test_a_name_means_its_strategy_however_it_is_spelt(meaning, alias, spell):
    assert rx.parse_welch_peaks_strategy(spell(alias)) == meaning


@pytest.mark.parametrize("name", ["block", "host", "3seg", "ultra fast", "rlx_"])
def test_an_unknown_name_is_refused_with_those_that_are_known(name):
    with pytest.raises(ValueError, match=f"strategy: expected one of auto, ultra, .*2seg.*got '{name}'"):
        rx.parse_welch_peaks_strategy(name)
