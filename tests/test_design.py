import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import FLOAT64_RTOL

from rlxjax import information_gain, next_measurements, prior_posterior, typical_prior
from rlxjax._correction import CORRECTION_SD
from rlxjax._posterior import LatencyEstimate, estimate
from rlxjax.welch import Path

UNKNOWNS, RUNS, WORKLOADS = 6, 3, 7
#: Paths and forms of the selection of the runs of a workload.
PATHS = np.array([Path.HOST.code, Path.FUSED.code, Path.FUSED.code, Path.BLOCK.code])
FORMS = np.array([0, 0, 1, 0])


def random_estimate(seed=0, workloads=WORKLOADS, runs=RUNS):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(workloads, runs, UNKNOWNS)) * rng.uniform(0.1, 2.0, (workloads, 1, 1))
    spread = rng.uniform(0.3, 1.0, (workloads, runs))
    return LatencyEstimate(jnp.ones((workloads, runs)), jnp.asarray(scores), jnp.asarray(spread))


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


def best_one(value, chosen):
    """Return the candidate that is not chosen of the largest value, and the value."""
    values = [-np.inf if index in chosen else value(index) for index in range(WORKLOADS)]
    return int(np.argmax(values)), max(values)


@pytest.fixture(scope="module")
def before_timings():
    """Estimates of twelve workloads by the prior."""
    batch, n_fft = np.meshgrid([1.0, 32.0, 512.0, 4096.0], [64.0, 512.0, 2048.0])
    sizes = (batch.reshape(-1, 1), n_fft.reshape(-1, 1), 16.0, np.array([1, 2, 2, 2]))
    return estimate(prior_posterior(typical_prior()), PATHS, *sizes, FORMS)


def test_the_gain_is_the_entropy_that_the_unknowns_lose():
    candidates = random_estimate()
    expected = [
        entropy(np.eye(UNKNOWNS)) - entropy(covariance_after(candidates, [i])) for i in range(WORKLOADS)
    ]
    np.testing.assert_allclose(information_gain(candidates), expected, rtol=FLOAT64_RTOL)


def test_each_choice_is_the_best_by_brute_force_after_those_before_it():
    candidates = random_estimate()
    design, chosen = next_measurements(candidates, WORKLOADS), []
    for index, gain in zip(design.order.tolist(), design.gain, strict=True):

        def lost(other, chosen=tuple(chosen)):
            return entropy(covariance_after(candidates, chosen)) - entropy(
                covariance_after(candidates, [*chosen, other])
            )

        best, expected = best_one(lost, chosen)
        assert index == best
        assert gain == pytest.approx(expected, rel=1e-9)
        chosen.append(index)


def test_gains_add_up_to_that_of_all_blocks_as_one():
    candidates = random_estimate()
    one_block = LatencyEstimate(
        candidates.time_ns.ravel(), candidates.scores.reshape(-1, UNKNOWNS), candidates.spread.ravel()
    )
    total = next_measurements(candidates, WORKLOADS).gain.sum()
    np.testing.assert_allclose(total, information_gain(one_block), rtol=1e-9)


def test_with_targets_each_choice_says_most_of_them_on_average():
    candidates, targets = random_estimate(), random_estimate(1, 5, 2)
    design, chosen = next_measurements(candidates, 4, targets=targets), []
    for index, gain in zip(design.order.tolist(), design.gain, strict=True):

        def told(other, chosen=tuple(chosen)):
            before = variances(targets, covariance_after(candidates, chosen))
            return (
                np.mean(np.log(before / variances(targets, covariance_after(candidates, [*chosen, other]))))
                / 2
            )

        best, expected = best_one(told, chosen)
        assert index == best
        assert gain == pytest.approx(expected, rel=1e-9)
        chosen.append(index)


@pytest.mark.parametrize("targets", [None, random_estimate(1, 5, 2)])
def test_what_is_timed_in_any_case_takes_its_part_off(targets):
    candidates = random_estimate()
    whole = next_measurements(candidates, 4, targets=targets)
    first, others = whole.order[:2], np.setdiff1d(np.arange(WORKLOADS), whole.order[:2])
    design = next_measurements(part(candidates, others), 2, targets=targets, timed=part(candidates, first))
    np.testing.assert_array_equal(others[design.order], whole.order[2:])
    np.testing.assert_allclose(design.gain, whole.gain[2:], rtol=1e-9)


def test_per_second_the_first_choice_has_the_largest_ratio():
    candidates = random_estimate()
    seconds = np.random.default_rng(2).uniform(0.1, 10.0, WORKLOADS)
    ratios = np.asarray(information_gain(candidates)) / seconds
    design = next_measurements(candidates, 4, seconds=seconds)
    assert design.order[0] == np.argmax(ratios)
    np.testing.assert_allclose(design.gain[0], ratios.max(), rtol=1e-9)


def test_a_workload_brings_less_the_second_time(before_timings):
    count = len(before_timings.time_ns)
    twice = part(before_timings, np.repeat(np.arange(count), 2))
    design = next_measurements(twice, 2 * count)
    gain = dict(zip(design.order.tolist(), design.gain, strict=True))
    assert all(min(gain[2 * i], gain[2 * i + 1]) < max(gain[2 * i], gain[2 * i + 1]) for i in range(count))
    assert set(design.order[:3] // 2) == set(next_measurements(before_timings, 12).order[:3])


def test_gains_fall_from_choice_to_choice(before_timings):
    gain = next_measurements(before_timings, 12).gain
    assert np.all(np.diff(gain) <= 1e-9)
    assert np.all(gain > 0)


def test_a_run_of_infinite_spread_is_not_timed():
    candidates = random_estimate()
    spread = candidates.spread.at[:, 0].set(jnp.inf)
    without = LatencyEstimate(candidates.time_ns[:, 1:], candidates.scores[:, 1:], candidates.spread[:, 1:])
    np.testing.assert_allclose(
        information_gain(candidates._replace(spread=spread)), information_gain(without), rtol=FLOAT64_RTOL
    )


def test_the_gain_is_the_same_compiled_and_for_single_workloads():
    candidates = random_estimate()
    eager = information_gain(candidates)
    np.testing.assert_allclose(jax.jit(information_gain)(candidates), eager, rtol=FLOAT64_RTOL)
    np.testing.assert_allclose(jax.vmap(information_gain)(candidates), eager, rtol=FLOAT64_RTOL)


def test_float32_makes_the_same_choices(before_timings):
    single = jax.tree.map(lambda column: column.astype(jnp.float32), before_timings)
    double, found = next_measurements(before_timings, 12), next_measurements(single, 12)
    np.testing.assert_array_equal(found.order[:6], double.order[:6])
    np.testing.assert_allclose(found.gain[:6], double.gain[:6], rtol=1e-3)


def test_before_any_timing_the_medians_are_predicted_as_surely_as_the_prior_says():
    prior = typical_prior()
    posterior = prior_posterior(prior, spread=0.1)
    assert posterior.coefficients == prior.median
    assert not np.any(posterior.weights)
    sds = [*jax.tree.leaves(prior.log_sd), *np.full(np.size(posterior.weights), CORRECTION_SD)]
    np.testing.assert_array_equal(posterior.factor, np.diag(sds))
    np.testing.assert_array_equal(posterior.spread, 0.1)


@pytest.mark.parametrize(
    ("n", "options", "message"),
    [
        (0, {}, "n: expected at least 1 and at most as many as candidates"),
        (WORKLOADS + 1, {}, "n: expected at least 1 and at most as many as candidates"),
        (1, {"seconds": np.ones(3)}, "seconds: expected 7 positive finite numbers"),
        (1, {"seconds": np.zeros(WORKLOADS)}, "seconds: expected 7 positive finite numbers"),
        (1, {"targets": part(random_estimate(), slice(0, 0))}, "targets: expected at least one run"),
        (1, {"timed": part(random_estimate(), slice(0, 0))}, "timed: expected at least one run"),
    ],
)
def test_what_cannot_be_chosen_is_refused(n, options, message):
    with pytest.raises(ValueError, match=message):
        next_measurements(random_estimate(), n, **options)


def test_nothing_to_choose_from_and_other_shapes_are_refused():
    candidates = random_estimate()
    with pytest.raises(ValueError, match=r"candidates \(0\), got 1"):
        next_measurements(part(candidates, slice(0, 0)), 1)
    with pytest.raises(ValueError, match=r"candidates: expected scores \[workloads, runs, unknowns\]"):
        next_measurements(part(candidates, 0), 1)
    with pytest.raises(ValueError, match="candidates: expected scores"):
        information_gain(part(part(candidates, 0), 0))
