"""The next best measurement: by brute force, and against the formulas that it states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _models import TILED, tiled_fit

from rlxjax.fit import (
    CORRECTION_SD,
    Estimate,
    Runs,
    estimate,
    next_measurements,
    prior_posterior,
)

UNKNOWNS, RUNS, WORKLOADS = 6, 3, 7


def random_estimate(seed=0, workloads=WORKLOADS, runs=RUNS):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(workloads, runs, UNKNOWNS)) * rng.uniform(0.1, 2.0, (workloads, 1, 1))
    spread = rng.uniform(0.3, 1.0, (workloads, runs))
    return Estimate(jnp.ones((workloads, runs)), jnp.asarray(scores), jnp.asarray(spread))


CANDIDATES, TARGETS = random_estimate(), random_estimate(1, 5, 2)


def part(candidates, index):
    return jax.tree.map(lambda column: column[index], candidates)


def covariance_after(candidates, chosen):
    """Return the covariance of the unknowns, by the inverse of their precision."""
    precision = np.eye(UNKNOWNS)
    for index in chosen:
        scaled = np.asarray(candidates.scores[index] / candidates.spread[index][:, None])
        precision += scaled.T @ scaled
    return np.linalg.inv(precision)


def entropy(covariance):
    return np.linalg.slogdet(covariance)[1] / 2


def variances(targets, covariance):
    """Return the variances of the logarithms of the targets' times."""
    scores = np.asarray(targets.scores).reshape(-1, UNKNOWNS)
    return np.einsum("nu,uv,nv->n", scores, covariance, scores) + np.ravel(targets.spread) ** 2


def information(chosen, other):
    """Return the entropy that the unknowns lose by one more candidate."""
    return entropy(covariance_after(CANDIDATES, chosen)) - entropy(covariance_after(CANDIDATES, [*chosen, other]))


def marginal_information(chosen, other):
    """Return what one more candidate says of the targets on average."""
    before, after = (variances(TARGETS, covariance_after(CANDIDATES, own)) for own in (chosen, [*chosen, other]))
    return np.mean(np.log(before / after)) / 2


@pytest.fixture(scope="module")
def before_timings():
    """Estimates of twelve workloads, of three variants each, by the prior."""
    n, depth = np.meshgrid([4.0, 64.0, 512.0, 4096.0], [1.0, 8.0, 64.0])
    return estimate(
        prior_posterior(TILED), Runs.checked(TILED, np.arange(3), n=n.reshape(-1, 1), depth=depth.reshape(-1, 1))
    )


@pytest.mark.parametrize("seconds", [None, np.random.default_rng(2).uniform(0.1, 10.0, WORKLOADS)])
@pytest.mark.parametrize(("targets", "gain_of"), [(None, information), (TARGETS, marginal_information)])
def test_each_choice_is_the_best_by_brute_force_after_those_before_it(targets, gain_of, seconds):
    design = next_measurements(CANDIDATES, WORKLOADS, targets=targets, seconds=seconds)
    cost, chosen = np.ones(WORKLOADS) if seconds is None else seconds, []
    for index, gain in zip(design.order.tolist(), design.gain, strict=True):
        left = [other for other in range(WORKLOADS) if other not in chosen]
        gains = {other: gain_of(chosen, other) / cost[other] for other in left}
        assert index == max(gains, key=gains.get)
        assert gain == pytest.approx(gains[index], rel=1e-9)
        chosen.append(index)
    assert sorted(chosen) == list(range(WORKLOADS))


def test_gains_add_up_to_that_of_all_blocks_as_one_and_a_run_of_infinite_spread_is_not_timed():
    one_block = jax.tree.map(lambda column: column.reshape(1, WORKLOADS * RUNS, *column.shape[2:]), CANDIDATES)
    total = next_measurements(CANDIDATES, WORKLOADS).gain.sum()
    np.testing.assert_allclose(total, next_measurements(one_block, 1).gain.sum(), rtol=1e-9)
    without = next_measurements(part(CANDIDATES, (slice(None), slice(1, None))), WORKLOADS)
    hidden = next_measurements(CANDIDATES._replace(spread=CANDIDATES.spread.at[:, 0].set(jnp.inf)), WORKLOADS)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9), hidden, without)


@pytest.mark.parametrize("targets", [None, TARGETS])
def test_what_is_timed_in_any_case_takes_its_part_off(targets):
    whole = next_measurements(CANDIDATES, 4, targets=targets)
    first, others = whole.order[:2], np.setdiff1d(np.arange(WORKLOADS), whole.order[:2])
    design = next_measurements(part(CANDIDATES, others), 2, targets=targets, timed=part(CANDIDATES, first))
    np.testing.assert_array_equal(others[design.order], whole.order[2:])
    np.testing.assert_allclose(design.gain, whole.gain[2:], rtol=1e-9)


def test_a_workload_brings_less_the_second_time_and_each_choice_less_than_the_one_before(before_timings):
    count = len(before_timings.time_ns)
    whole, twice = (
        next_measurements(candidates, len(candidates.time_ns))
        for candidates in (before_timings, part(before_timings, np.repeat(np.arange(count), 2)))
    )
    assert np.all(np.diff(whole.gain) <= 1e-9)
    assert np.all(whole.gain > 0)
    gain = dict(zip(twice.order.tolist(), twice.gain, strict=True))
    assert all(min(gain[2 * i], gain[2 * i + 1]) < max(gain[2 * i], gain[2 * i + 1]) for i in range(count))


def test_after_timings_there_is_less_to_learn():
    runs = Runs.checked(TILED, np.arange(3), n=np.array([[4.0], [512.0]]))
    after, before = (
        next_measurements(estimate(posterior, runs), 2).gain
        for posterior in (tiled_fit().posterior, prior_posterior(TILED))
    )
    assert np.all(after < before)


def test_float32_makes_the_same_choices(before_timings):
    single = jax.tree.map(lambda column: column.astype(jnp.float32), before_timings)
    double, found = next_measurements(before_timings, 5), next_measurements(single, 5)
    np.testing.assert_array_equal(found.order, double.order)
    np.testing.assert_allclose(found.gain, double.gain, rtol=1e-3)


def test_before_any_timing_the_medians_are_predicted_as_surely_as_the_prior_says():
    posterior = prior_posterior(TILED, spread=0.1)
    assert posterior.coefficients == TILED.prior.median
    assert not np.any(posterior.weights)
    sds = [*jax.tree.leaves(TILED.prior.log_sd), *np.full(np.size(posterior.weights), CORRECTION_SD)]
    np.testing.assert_array_equal(posterior.factor, np.diag(sds))
    np.testing.assert_array_equal(posterior.spread, 0.1)
    corrected = prior_posterior(TILED, TILED.prior._replace(correction=0.1), correction_sd=0.2)
    np.testing.assert_array_equal(corrected.weights, 0.1)
    assert corrected.factor[-1, -1] == 0.2


def test_what_cannot_be_chosen_is_refused():
    none, zero = part(TARGETS, slice(0, 0)), "n: expected 1 to"
    for candidates, n, options, said in (
        (CANDIDATES, 0, {}, f"{zero} 7 (the number of candidates), got 0"),
        (CANDIDATES, 8, {}, f"{zero} 7 (the number of candidates), got 8"),
        (part(CANDIDATES, slice(0, 0)), 1, {}, f"{zero} 0 (the number of candidates), got 1"),
        (part(CANDIDATES, 0), 1, {}, "candidates: expected scores [workloads, runs, unknowns], got shape (3, 6)"),
        (part(part(CANDIDATES, 0), 0), 1, {}, "candidates: expected scores [..., runs, unknowns]"),
        *(
            (CANDIDATES, 1, {"seconds": s}, "seconds: expected a positive finite number for each of 7")
            for s in (np.ones(3), np.zeros(7))
        ),
        *((CANDIDATES, 1, {name: none}, f"{name}: expected at least one run") for name in ("targets", "timed")),
    ):
        with pytest.raises(ValueError, match=".") as caught:
            next_measurements(candidates, n, **options)
        assert said in str(caught.value)
