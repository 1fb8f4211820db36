"""The posterior: the correction, what is left to noise, intervals, and decisions with a probability."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _models import LINE, LINE_TRUTH, TILED, TILED_TRUTH, line_fit, random_posterior, runs_of, timings_of, true_ns
from _tolerances import FLOAT64_RTOL, assert_gradient_is_the_finite_difference

from rlxjax.fit import (
    COVERED,
    COVERED_SDS,
    SURE,
    Estimate,
    LatencyPosterior,
    Runs,
    compare,
    corrected_terms_ns,
    estimate,
    faster_probability,
    fit_posterior,
    fit_posteriors,
    named,
    prior_posterior,
    stack_timings,
    transferred_prior,
)
from rlxjax.models import FFT

#: Floors that the documentation states: no run is known better, and one that was not timed not at all.
LEAST_SPREAD, UNKNOWN_SPREAD = 0.01, 0.5
POSTERIOR = random_posterior(TILED, TILED_TRUTH)
RUNS = Runs.checked(TILED, [0, 1, 2, 0, 1, 2], n=[1.0, 40.0, 100.0, 700.0, 5000.0, 8192.0], depth=[1.0, 2.0, 0.5] * 2)
DRAWS = 20_000


def log_ns(unknowns, run):
    """Return the logarithm of one run's prediction, given logarithms of coefficients and weights."""
    logs, weights = jnp.split(unknowns, [len(TILED_TRUTH)])
    coefficients = jax.tree.structure(TILED_TRUTH).unflatten(list(jnp.exp(logs)))
    own = dataclasses.replace(POSTERIOR, coefficients=coefficients, weights=weights.reshape(3, -1))
    return jnp.log(sum(corrected_terms_ns(own, run).values()))


UNKNOWNS = np.concatenate([np.log(jax.tree.leaves(TILED_TRUTH)), np.ravel(POSTERIOR.weights)])


def test_the_parts_sum_to_the_prediction_and_the_correction_is_a_factor_of_the_terms():
    terms = corrected_terms_ns(POSTERIOR, RUNS)
    assert list(terms) == ["call_ns", "launch_ns", "work_ns", "correction_ns"]
    alone = true_ns(TILED_TRUTH, RUNS)
    features = np.asarray(TILED.features(RUNS, TILED.facts))
    factor = np.exp(np.sum(features * POSTERIOR.weights[RUNS.variant], -1))
    np.testing.assert_allclose(sum(terms.values()), alone * factor, rtol=1e-12)
    np.testing.assert_allclose(terms["correction_ns"], alone * (factor - 1), rtol=1e-9)
    np.testing.assert_allclose(estimate(POSTERIOR, RUNS).time_ns, alone * factor, rtol=1e-12)
    assert all(term.shape == RUNS.shape for term in terms.values())


def test_scores_are_the_derivatives_by_the_unknowns_times_the_factor():
    scores = np.asarray(estimate(POSTERIOR, RUNS).scores)

    def rows(unknowns):
        return jax.vmap(log_ns)(unknowns, RUNS)

    each = np.tile(UNKNOWNS, (RUNS.shape[0], 1))
    assert_gradient_is_the_finite_difference(rows, each)
    gradient = jax.jit(jax.vmap(jax.grad(log_ns)))(each, RUNS)
    np.testing.assert_allclose(scores, gradient @ POSTERIOR.factor, rtol=1e-9, atol=1e-12)


def test_coefficients_and_runs_are_as_sure_as_the_covariance_of_all_unknowns_says():
    covariance = POSTERIOR.factor @ POSTERIOR.factor.T
    expected = np.sqrt(np.diag(covariance)[: len(TILED_TRUTH)])
    np.testing.assert_allclose(jax.tree.leaves(POSTERIOR.coefficient_log_sd()), expected, rtol=1e-12)
    # Of small steps, draws of the unknowns move predictions as the scores say.
    drawn = UNKNOWNS + 0.1 * np.random.default_rng(0).normal(size=(2000, len(UNKNOWNS))) @ POSTERIOR.factor.T
    logs = np.asarray(jax.jit(jax.vmap(jax.vmap(log_ns, (None, 0)), (0, None)))(drawn, RUNS))
    found = estimate(POSTERIOR, RUNS)
    sds = np.sqrt(np.asarray(found.log_sd()) ** 2 - np.asarray(found.spread) ** 2)
    np.testing.assert_allclose(10 * logs.std(0), sds, rtol=0.06)
    np.testing.assert_array_equal(found.spread, POSTERIOR.spread[RUNS.variant])


def test_estimates_are_the_same_eager_jitted_mapped_and_in_single_precision():
    jitted = estimate(POSTERIOR, RUNS)
    with jax.disable_jit():
        eager = estimate(POSTERIOR, RUNS)
    mapped = jax.jit(jax.vmap(lambda run: estimate(POSTERIOR, run)))(RUNS)
    of_one = dataclasses.replace(RUNS, variant=1)
    jax.tree.map(
        lambda own, all_: np.testing.assert_allclose(own, all_, rtol=1e-12, atol=1e-15),
        estimate(POSTERIOR, of_one),
        estimate(POSTERIOR, of_one.together()),
    )
    # In a row of one and as a column of one, too.
    column = estimate(POSTERIOR, jax.tree.map(lambda leaf: np.asarray(leaf)[:, None], RUNS))
    for other in (eager, mapped, jax.tree.map(lambda leaf: leaf[:, 0], column)):
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-14), jitted, other)
    with jax.enable_x64(False):
        single = estimate(jax.tree.map(np.float32, POSTERIOR), jax.tree.map(np.asarray, RUNS))
    np.testing.assert_allclose(single.time_ns, jitted.time_ns, rtol=1e-5)
    np.testing.assert_allclose(single.log_sd(), jitted.log_sd(), rtol=1e-4)


def test_intervals_cover_nine_tenths_of_what_was_held_out():
    """The mean share over machines is within three of its standard deviations; times of one machine go together."""
    runs, new = (runs_of(TILED, np.unique(np.round(least * 2.0 ** np.arange(0, 13, 0.33)))) for least in (1.0, 1.1))
    timings, weights = stack_timings([timings_of(TILED_TRUTH, runs, 0.04, seed) for seed in range(8)])
    shares = []
    for seed, found in enumerate(fit_posteriors(timings, None, weights, n_starts=1)):
        predicted = estimate(found.posterior, new)
        drawn_ns = timings_of(TILED_TRUTH, new, 0.04, 100 + seed).time_ns
        off = np.log(drawn_ns / np.asarray(predicted.time_ns)) / np.asarray(predicted.log_sd())
        shares.append(np.mean(np.abs(off) <= COVERED_SDS))
    assert np.mean(shares) == pytest.approx(COVERED, abs=3 * np.std(shares) / len(shares) ** 0.5)
    # No more than twice what counts of independent times would scatter by.
    assert np.std(shares) < 2 * np.sqrt(COVERED * (1 - COVERED) / new.shape[0])


def smooth_factor(runs):
    """Return a factor that the terms lack: it rises with n, for tiles alone."""
    n = np.asarray(runs.inputs["n"])
    return np.where(np.asarray(runs.variant) == 1, np.exp(0.3 * (np.clip((np.log2(n) - 2) / 8, 0, 1) - 0.5)), 1.0)


def test_the_correction_learns_what_the_terms_lack_and_is_small_where_they_suffice():
    runs = runs_of(TILED, 2.0 ** np.arange(0, 14, 0.5).round())
    suffices, lacks = (
        fit_posterior(timings_of(TILED_TRUTH, runs, 0.02, factor=factor)) for factor in (1.0, smooth_factor(runs))
    )
    assert np.abs(suffices.posterior.weights).max() < 0.03
    assert np.abs(lacks.posterior.weights).max() > 0.05
    truth = true_ns(TILED_TRUTH, runs) * smooth_factor(runs)
    whole = np.asarray(estimate(lacks.posterior, runs).time_ns)
    alone = true_ns(lacks.terms.coefficients, runs)
    errors = [np.mean(np.abs(np.log(times / truth))) for times in (whole, alone)]
    assert errors[0] < 0.7 * errors[1]
    assert errors[0] < 0.02


def test_the_spread_is_what_the_timings_have_and_never_less_than_a_floor():
    for sd in (0.0, 0.04, 0.12):
        found = fit_posterior(timings_of(LINE_TRUTH, runs_of(LINE), sd))
        assert np.all((found.posterior.spread > 0.5 * sd) & (found.posterior.spread >= LEAST_SPREAD))
        assert np.all(found.posterior.spread < max(2.5 * sd, 2 * LEAST_SPREAD))


def test_the_covariance_of_all_unknowns_is_that_of_linear_regression_at_the_end():
    """Without features: the inverse of the Jacobian's squares, each run at its variant's spread, and the prior's."""
    timings, found = timings_of(LINE_TRUTH, runs_of(LINE), 0.02), line_fit()
    names = sorted(LINE_TRUTH)
    logs = np.log([found.posterior.coefficients[name] for name in names])

    def logs_ns(logs):
        return np.log(true_ns(dict(zip(names, np.exp(logs).tolist(), strict=True)), timings.runs))

    steps = 1e-5 * np.eye(len(names))
    jacobian = np.stack([(logs_ns(logs + step) - logs_ns(logs - step)) / 2e-5 for step in steps], -1)
    scaled = jacobian / found.posterior.spread[np.asarray(timings.runs.variant)][:, None]
    expected = np.linalg.inv(scaled.T @ scaled + np.eye(len(names)) / 4.0)
    np.testing.assert_allclose(found.posterior.factor @ found.posterior.factor.T, expected, rtol=1e-5)


def test_a_known_correction_is_taken_off_the_times_and_added_to_what_is_found():
    runs = runs_of(TILED)
    measured = timings_of(TILED_TRUTH, runs, 0.03)
    known = transferred_prior(POSTERIOR)
    factor = np.exp(np.sum(np.asarray(TILED.features(runs, TILED.facts)) * known.correction[runs.variant], -1))
    shifted = dataclasses.replace(measured, time_ns=measured.time_ns / factor)
    found = fit_posterior(measured, known).posterior
    plain = fit_posterior(shifted, known._replace(correction=0.0)).posterior
    np.testing.assert_allclose(found.weights, plain.weights + known.correction, atol=1e-9)
    jax.tree.map(np.testing.assert_allclose, found.coefficients, plain.coefficients)
    np.testing.assert_allclose(found.factor, plain.factor, atol=1e-9)


def test_several_machines_have_the_mean_of_their_logarithms_and_a_variance_that_shrinks_with_their_number():
    known, wide = named(POSTERIOR.coefficients), named(POSTERIOR.model.prior.log_sd)
    for factors in ([1.0], [0.5, 1.0, 3.0]):
        machines = [
            dataclasses.replace(POSTERIOR, coefficients={name: value * factor for name, value in known.items()})
            for factor in factors
        ]
        found, logs, count = transferred_prior(*machines), np.log(factors), len(factors)
        sd = np.sqrt((np.sum((logs - logs.mean()) ** 2) + 1.0) / count)
        for name, median in named(found.median).items():
            np.testing.assert_allclose(median, known[name] * np.exp(logs.mean()))
            np.testing.assert_allclose(named(found.log_sd)[name], min(sd, wide[name]))
        np.testing.assert_allclose(found.correction, count / (count + 3 / 7) * np.asarray(POSTERIOR.weights))
    with pytest.raises(ValueError, match="at least one"):
        transferred_prior()


def test_few_timings_do_better_with_what_a_like_machine_says():
    runs = runs_of(TILED)
    like = dataclasses.replace(POSTERIOR, weights=2.0 * POSTERIOR.weights)
    truth = np.asarray(estimate(like, runs).time_ns)
    noisy = truth * np.exp(np.random.default_rng(1).normal(0, 0.03, runs.shape))
    measured = dataclasses.replace(timings_of(TILED_TRUTH, runs), time_ns=noisy)
    weights = np.zeros(runs.shape)
    weights[np.random.default_rng(3).permutation(runs.shape[0])[:9]] = 1.0
    errors = [
        np.abs(np.asarray(estimate(fit.posterior, runs).time_ns) / truth - 1)[weights == 0].mean()
        for fit in (fit_posterior(measured, prior, weights) for prior in (None, transferred_prior(like)))
    ]
    assert errors[1] < 0.7 * errors[0]


def test_timings_that_are_left_out_change_nothing_and_one_that_is_far_off_little():
    measured = timings_of(TILED_TRUTH, runs_of(TILED), 0.03)
    weights = np.where(np.asarray(measured.runs.inputs["n"]) == 64, 0.0, 1.0)
    first, *others = (
        fit_posterior(
            dataclasses.replace(measured, time_ns=np.where(weights > 0, measured.time_ns, hidden)), None, weights
        )
        for hidden in (measured.time_ns, 1e12, np.nan)
    )
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first.posterior, other.posterior)
    wild = measured.time_ns * np.where(np.arange(len(weights)) == 20, 1000.0, 1.0)
    spoilt = fit_posterior(dataclasses.replace(measured, time_ns=wild), None, weights)
    before, after = (np.asarray(estimate(fit.posterior, measured.runs).time_ns) for fit in (first, spoilt))
    assert np.abs(after / before - 1).mean() < 0.01


def test_a_variant_without_timings_is_unknown():
    measured = timings_of(TILED_TRUTH, runs_of(TILED), 0.02)
    is_timed = np.asarray(measured.runs.variant) != 2
    found, whole = fit_posterior(measured, weights=is_timed.astype(float)), fit_posterior(measured)
    assert np.isnan(found.left_out_error).tolist() == [False, False, True]
    assert found.posterior.spread[2] == UNKNOWN_SPREAD
    assert not np.any(found.posterior.weights[2])
    sds = [np.asarray(estimate(fit.posterior, measured.runs).log_sd()) for fit in (found, whole)]
    assert np.all(sds[0][~is_timed] > sds[1][~is_timed])


def pair_of(one, other):
    runs = jax.tree.map(lambda column: np.asarray(column)[[one, other]], RUNS)
    return [jax.tree.map(lambda leaf, i=i: leaf[i], estimate(POSTERIOR, runs)) for i in (0, 1)]


def test_what_two_runs_share_cancels_in_their_difference():
    one, other = pair_of(1, 4)
    found = compare(one, other)
    both = np.stack([one.time_ns * one.scores, other.time_ns * other.scores])
    own = [(one.time_ns * one.spread) ** 2, (other.time_ns * other.spread) ** 2]
    covariance, difference = both @ both.T + np.diag(own), np.array([-1.0, 1.0])
    np.testing.assert_allclose(found.margin_sd_ns, np.sqrt(difference @ covariance @ difference), rtol=1e-9)
    np.testing.assert_allclose(found.margin_ns, other.time_ns - one.time_ns)
    temperature_ns = found.margin_sd_ns * np.sqrt(3) / np.pi
    np.testing.assert_allclose(found.probability, jax.nn.sigmoid(found.margin_ns / temperature_ns))


def test_a_decision_and_its_opposite_say_the_same():
    one, other = pair_of(0, 3)
    there, back = compare(one, other), compare(other, one)
    assert float(there.margin_ns) == -float(back.margin_ns)
    assert float(there.probability + back.probability) == pytest.approx(1.0)
    assert back.verdict() == {"fuse": "keep", "keep": "fuse", "undecided": "undecided"}[there.verdict()]
    same = compare(one, one)
    assert (float(same.margin_ns), float(same.probability), same.verdict()) == (0.0, 0.5, "undecided")


def test_the_probability_is_that_of_a_simulation():
    """Both runs drawn, unknowns and their own spread: the share of draws in which the first is faster."""
    rng, ratio, spread = np.random.default_rng(0), np.array([0.93, 1.0, 1.02, 1.1]), np.array([0.02, 0.03])
    scores, times = rng.normal(0, 0.02, (2, 5)), 1e4 * np.stack([np.ones_like(ratio), ratio])
    one, other = (
        Estimate(*map(jnp.asarray, (times[i], np.tile(scores[i], (4, 1)), np.full(4, spread[i])))) for i in (0, 1)
    )
    logs = rng.normal(size=(DRAWS, 5)) @ scores.T + spread * rng.normal(size=(DRAWS, 2))
    share = np.mean(logs[:, :1] < logs[:, 1:] + np.log(ratio), 0)
    # A logistic distribution of the same standard deviation is within 0.023 of the normal one.
    np.testing.assert_allclose(compare(one, other).probability, share, atol=0.023 + 3 * 0.5 / DRAWS**0.5)


def test_what_is_own_to_both_runs_of_one_work_cancels_as_far_as_it_is_alike():
    one, other = pair_of(1, 4)
    shared = float(np.sum(np.square(other.time_ns * other.scores - one.time_ns * one.scores)))
    own = np.array([one.time_ns * one.spread, other.time_ns * other.spread])
    alike = np.linspace(-1.0, 1.0, 21)
    found = jax.vmap(compare, (None, None, 0))(one, other, alike)
    np.testing.assert_allclose(found.margin_sd_ns**2, shared + np.sum(own**2) - 2 * alike * np.prod(own), rtol=1e-9)
    away = np.abs(np.asarray(found.probability) - 0.5)
    assert np.all(np.diff(away) > 0)
    for row in (0, 7, 20):
        by_itself = compare(one, other, alike[row])
        with jax.disable_jit():
            eager = compare(one, other, alike[row])
        for got, want, mapped in zip(eager[:5], by_itself[:5], found[:5], strict=True):
            np.testing.assert_allclose(got, want, rtol=FLOAT64_RTOL)
            np.testing.assert_allclose(np.broadcast_to(mapped, 21)[row], want, rtol=FLOAT64_RTOL)
    jax.tree.map(np.testing.assert_array_equal, compare(one, other, 0.0)[:5], compare(one, other)[:5])
    # Of equal times and spreads nothing is left but what the unknowns say.
    twin = other._replace(time_ns=one.time_ns, spread=one.spread)
    left = float(one.time_ns) * np.linalg.norm(np.asarray(one.scores - twin.scores))
    assert float(compare(one, twin, 1.0).margin_sd_ns) == pytest.approx(left, rel=1e-9)


def own_times(alike, noise_sd=0.08, sizes=140):
    """Return timings of a machine that takes longer or shorter for a work, alike by its variants, and its own noise."""
    runs = runs_of(TILED, np.unique(np.round(np.geomspace(1.0, 8192.0, sizes))))
    works = np.random.default_rng(0).standard_normal(np.unique(runs.inputs["n"]).size)
    common = works[np.unique(runs.inputs["n"], return_inverse=True)[1]]
    factor = np.exp(noise_sd * np.sqrt(alike) * common)
    return timings_of(TILED_TRUTH, runs, noise_sd * np.sqrt(1.0 - alike), factor=factor), works.size


def test_how_alike_the_variants_of_a_work_are_is_found_in_timings_that_say_so():
    shares = (0.0, 0.5, 0.9)
    (*_, (timings, works)) = many = [own_times(alike) for alike in shares]
    n, variant = np.asarray(timings.runs.inputs["n"]), np.asarray(timings.runs.variant)
    # On a fourth machine variant 2 shares no work with the others, and 0 and 1 share few.
    place = np.unique(n, return_inverse=True)[1]
    few = np.isin(n, np.unique(n)[:6:2])
    kept = np.where(variant == 2, place % 2 == 1, (place % 2 == 0) & (few | ((variant == 0) == (place % 4 == 0))))
    stacked, weights = stack_timings([*(own for own, _ in many), timings])
    weights[-1] = kept
    *fits, apart = (np.asarray(fit.posterior.alike) for fit in fit_posteriors(stacked, None, weights, n_starts=1))
    for alike, found in zip(shares, fits, strict=True):
        np.testing.assert_allclose(found[np.triu_indices(3, 1)], alike, atol=4 * (1 - alike**2) / works**0.5 + 0.04)
        np.testing.assert_array_equal(found, found.T)
        np.testing.assert_array_equal(np.diag(found), 1.0)
        assert np.linalg.eigvalsh(found).min() > -1e-12
    np.testing.assert_array_equal(apart[2, :2], 0.0)
    assert abs(apart[0, 1]) <= 3 * 9 / (3 * 9 + 4.0)
    assert prior_posterior(TILED).alike is None


def test_verdicts_follow_the_probability():
    times = jnp.array([1.0, 1.0, 1.0])
    exact = Estimate(times, jnp.zeros((3, 1)), jnp.full(3, 0.1))
    other = Estimate(jnp.array([2.0, 1.0, 0.4]), jnp.zeros((3, 1)), jnp.full(3, 0.1))
    found = compare(exact, other)
    assert found.verdict().tolist() == ["fuse", "undecided", "keep"]
    for verdict, probability in zip(found.verdict(), found.probability, strict=True):
        assert verdict == ("fuse" if probability >= SURE else "keep" if probability <= 1 - SURE else "undecided")
    barely = float(found.probability[0]) - 1e-9
    assert found.verdict(barely)[0] == "fuse"
    for bad in (0.5, 1.1, float("nan")):
        with pytest.raises(ValueError, match=f"sure: expected a probability above 0.5, got {bad}"):
            found.verdict(bad)


def test_a_posterior_of_a_dataclass_of_coefficients_is_estimated_too():
    runs = Runs.checked(FFT, "fft", batch=[1, 64, 4096], n_fft=[256, 64, 1024])
    found = LatencyPosterior(FFT, {}, FFT.prior.median, np.zeros((1, 0)), 0.1 * np.eye(5), np.array([0.05]))
    got = estimate(found, runs)
    np.testing.assert_allclose(got.time_ns, sum(FFT.terms_ns(FFT.prior.median, runs, {}).values()), rtol=1e-12)
    assert got.scores.shape == (*runs.shape, 5)


def test_a_probability_is_one_half_without_a_margin_or_with_an_infinite_spread_and_certain_without_a_spread():
    margins_ns, sds_ns = np.array([3.0, 3.0, 0.0, -3.0, 0.0, np.inf]), np.array([np.inf, 0.0, 0.0, 0.0, 2.0, 1.0])
    expected = [0.5, 1.0, 0.5, 0.0, 0.5, 1.0]
    assert faster_probability(margins_ns, sds_ns).tolist() == expected
    assert faster_probability(jnp.asarray(margins_ns), sds_ns).tolist() == expected
    slope = jax.grad(lambda margin_ns: faster_probability(margin_ns, 2.0))(0.0)
    assert float(slope) == pytest.approx(np.pi / np.sqrt(3.0) / 8.0)  # of the logistic distribution at its middle
