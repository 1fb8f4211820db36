"""The second stage of the fit: a smooth regret that tends to that of picks, and weights that move to lower it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _compilations import compilations
from _models import TILED, TILED_TRUTH, certain, runs_of, timings_of
from _tolerances import FLOAT64_RTOL, SATURATED_ATOL, assert_gradient_is_the_finite_difference

from rlxjax.fit import (
    Runs,
    cross_validated_regret,
    estimate,
    pick_regret,
    refine_for_decisions,
    smoothed_regret,
)
from rlxjax.fit._regret import alternatives, left_out_folds, workload_ids

RNG = np.random.default_rng(0)
ROWS, WIDTH = 40, 4
LOGS = RNG.normal(10.0, 0.2, (ROWS, WIDTH))
MEASURED = np.exp(LOGS + RNG.normal(0.0, 0.1, LOGS.shape))
IS_ONE = RNG.uniform(size=LOGS.shape) < 0.8
IS_ONE[0], IS_ONE[1] = False, [True, False, False, False]


def hard_regret(logs, measured, is_one):
    there = np.flatnonzero(is_one)
    if not there.size:
        return 0.0
    return measured[there[np.argmin(logs[there])]] / measured[there].min() - 1.0


def test_the_regret_of_a_pick_is_that_of_a_loop():
    expected = [hard_regret(*row) for row in zip(LOGS, MEASURED, IS_ONE, strict=True)]
    np.testing.assert_allclose(pick_regret(LOGS, MEASURED, IS_ONE), expected, atol=FLOAT64_RTOL)


def test_the_smooth_regret_is_the_mean_over_a_softmin_and_tends_to_the_pick_as_it_cools():
    temperature = 0.07
    weights = np.where(IS_ONE, np.exp(-(LOGS - LOGS.min()) / temperature), 0.0)
    weights = weights / np.maximum(weights.sum(1, keepdims=True), 1e-300)
    best = np.min(np.where(IS_ONE, MEASURED, np.inf), 1, keepdims=True)
    expected = np.sum(weights * np.where(IS_ONE, MEASURED / best - 1.0, 0.0), 1)
    np.testing.assert_allclose(smoothed_regret(LOGS, MEASURED, IS_ONE, temperature), expected, atol=FLOAT64_RTOL)
    rows = np.sort(np.where(IS_ONE, LOGS, 1e6), 1)
    coldest = np.min(rows[:, 1] - rows[:, 0], where=rows[:, 1] < 1e6, initial=1.0) / 40.0
    cold = smoothed_regret(LOGS, MEASURED, IS_ONE, coldest)
    np.testing.assert_allclose(cold, pick_regret(LOGS, MEASURED, IS_ONE), atol=SATURATED_ATOL)


def test_the_gradient_of_the_smooth_regret_is_the_finite_difference():
    def of(tree):
        logs, temperature = tree["logs"], tree["temperature"]
        return jax.vmap(smoothed_regret)(logs, jnp.asarray(MEASURED), jnp.asarray(IS_ONE), temperature)

    tree = {"logs": LOGS / 10.0, "temperature": np.full(ROWS, 0.05)}
    assert_gradient_is_the_finite_difference(of, tree, scale=np.ones(ROWS))


def test_alternatives_are_the_timings_of_a_number():
    found = alternatives(np.array([2, 0, 2, -1, 0, 2, 5]))
    groups = [set(row[kept]) for row, kept in zip(found.timing, found.is_one, strict=True)]
    assert groups == [{1, 4}, {0, 2, 5}, {6}]


#: The first two variants at many sizes, of which the terms say all.
GRID = runs_of(TILED, np.unique(np.round(2.0 ** np.arange(4, 13, 0.25))))
IS_TIMED = np.asarray(GRID.variant) < 2
WORLD = jax.tree.map(lambda column: column[IS_TIMED], timings_of(TILED_TRUTH, GRID))


def posterior_of(off=0.0, sd=0.3):
    """Return the truth, the tiles of which are off by a factor that grows with n."""
    found = certain(TILED, TILED_TRUTH, sd, 0.05)
    weights = np.array(found.weights)
    weights[1] = off
    return dataclasses.replace(found, weights=weights)


def logs_of(posterior):
    return np.log(np.asarray(estimate(posterior, WORLD.runs).time_ns))


def mean_regret(posterior):
    groups = alternatives(workload_ids(WORLD))
    return np.mean(pick_regret(logs_of(posterior)[groups.timing], WORLD.time_ns[groups.timing], groups.is_one))


OFF = -0.6


def test_numbers_of_workloads_are_those_of_equal_sizes():
    ids = workload_ids(WORLD)
    assert np.all(np.bincount(ids) == 2)
    for number in np.unique(ids):
        assert len(set(WORLD.runs.inputs["n"][ids == number].tolist())) == 1
    depths = Runs.checked(TILED, 0, n=[8.0, 8.0, 8.0], depth=[1.0, 2.0, 1.0])
    found = workload_ids(dataclasses.replace(WORLD, runs=depths.together()))
    assert found[0] == found[2] != found[1]


def test_weights_stay_where_the_picks_are_right():
    found = refine_for_decisions(posterior_of(), WORLD)
    assert found[1:] == pytest.approx((0.0, 0.0, 0.0), abs=FLOAT64_RTOL)
    np.testing.assert_allclose(logs_of(found.posterior), np.log(WORLD.time_ns), rtol=FLOAT64_RTOL)


def test_refining_lowers_the_regret_where_the_first_stage_errs_and_moves_the_weights_alone():
    off = posterior_of(OFF)
    found = refine_for_decisions(off, WORLD)
    assert found.regret_before == pytest.approx(mean_regret(off))
    assert found.regret_before > 0.01
    assert found.regret < 0.5 * found.regret_before
    assert found.regret == pytest.approx(mean_regret(found.posterior))
    before, after = vars(off), vars(found.posterior)
    assert after["coefficients"] == before["coefficients"]
    for name in ("spread", "factor"):
        np.testing.assert_array_equal(after[name], before[name])
    # The distance is that of the covariance, here of independent weights.
    assert found.moved == pytest.approx(np.linalg.norm(found.posterior.weights - off.weights) / 0.3)
    # Of weights that the first stage knows, little moves.
    tight = refine_for_decisions(posterior_of(OFF, sd=1e-3), WORLD)
    assert np.abs(tight.posterior.weights - off.weights).max() < 0.1 * found.moved


@pytest.mark.parametrize("seed", range(4))
def test_refining_is_never_worse_on_what_it_saw(seed):
    rng = np.random.default_rng(seed)
    off = posterior_of(rng.normal(0, 0.3))
    noisy = dataclasses.replace(WORLD, time_ns=WORLD.time_ns * np.exp(rng.normal(0, 0.2, WORLD.time_ns.shape)))
    found = refine_for_decisions(off, noisy)
    assert found.regret <= found.regret_before
    if found.regret == found.regret_before:
        np.testing.assert_allclose(found.posterior.weights, off.weights, atol=FLOAT64_RTOL)


def test_timings_of_weight_zero_do_not_matter_and_nothing_is_compiled_anew():
    counted = (WORLD.runs.inputs["n"] > 64).astype(float)
    spoilt = dataclasses.replace(WORLD, time_ns=np.where(counted > 0, WORLD.time_ns, 1e3))
    found = refine_for_decisions(posterior_of(OFF), WORLD, None, counted)
    compilations.clear()
    other = refine_for_decisions(posterior_of(OFF), spoilt, None, counted)
    assert not compilations
    np.testing.assert_allclose(found.posterior.weights, other.posterior.weights, atol=FLOAT64_RTOL)
    assert found.regret == pytest.approx(other.regret)


def test_nothing_moves_where_there_is_no_choice():
    found = refine_for_decisions(posterior_of(OFF), WORLD, np.arange(len(WORLD.time_ns)))
    assert found == (found.posterior, 0.0, 0.0, 0.0)
    np.testing.assert_array_equal(found.posterior.weights, posterior_of(OFF).weights)


def test_columns_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"ids: expected shape \(\d+,\), got \(3,\)"):
        refine_for_decisions(posterior_of(), WORLD, np.zeros(3, int))
    with pytest.raises(ValueError, match=r"weights: expected shape \(\d+,\), got \(3,\)"):
        refine_for_decisions(posterior_of(), WORLD, None, np.ones(3))


def test_folds_leave_out_each_value_of_the_models_among_the_counted():
    counted = (WORLD.runs.inputs["n"] > 64).astype(float)
    folds = list(left_out_folds(WORLD, counted))
    assert len(folds) == len(np.unique(WORLD.runs.inputs["n"][counted > 0]))
    np.testing.assert_array_equal(np.sum(folds, 0), counted)


def test_cross_validation_judges_a_fit_by_what_it_did_not_see():
    asked = []

    def right(weights):
        asked.append(weights)
        return posterior_of()

    regrets = cross_validated_regret([right, lambda weights: posterior_of(OFF)], WORLD)
    assert regrets[0] == pytest.approx(0.0, abs=FLOAT64_RTOL)
    assert regrets[1] == pytest.approx(mean_regret(posterior_of(OFF)))
    folds = left_out_folds(WORLD, np.ones(len(WORLD.time_ns)))
    for weights, fold in zip(asked, folds, strict=True):
        np.testing.assert_array_equal(weights, np.where(fold, 0.0, 1.0))
