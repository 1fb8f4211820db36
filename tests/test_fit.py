"""The fit: it recovers known machines, is the minimum of its objective and says what it left, for many devices too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _models import LINE, LINE_TRUTH, TILED, TILED_TRUTH, TWIN, runs_of, timings_of, true_ns

from rlxjax.fit import (
    CORRECTION_SD,
    COVERED,
    COVERED_SDS,
    LatencyPrior,
    Timings,
    coefficient_names,
    estimate,
    fit_posterior,
    fit_posteriors,
    pooled_prior,
    predicted_ns,
    stack_timings,
)
from rlxjax.models import FFT

#: The objective's residuals are in units of this, and linear beyond the knee.
RELATIVE_SD, KNEE = 0.05, 2.0
RUNS = runs_of(LINE)
NAMES = coefficient_names(LINE.prior.median)
MEDIAN = np.log(jax.tree.leaves(LINE.prior.median))


def terms_of(timings, *arguments, **options):
    return fit_posterior(timings, *arguments, **options).terms


def logs_of(coefficients):
    return np.log(jax.tree.leaves(coefficients))


@pytest.fixture(scope="module")
def fitted():
    return terms_of(timings_of(LINE_TRUTH, RUNS, 0.02))


def objective_of(timings, prior, weights):
    """Return the objective as the documentation has it, a function of the coefficients' logarithms."""
    median, log_sd = (jnp.array(jax.tree.leaves(part)) for part in prior[:2])
    model, time_ns = timings.model, jnp.asarray(timings.time_ns)

    def objective(logs):
        coefficients = jax.tree.structure(prior.median).unflatten(list(jnp.exp(logs)))
        size = jnp.abs(jnp.log(predicted_ns(coefficients, timings.runs, model.facts) / time_ns)) / RELATIVE_SD
        huber = jnp.where(size < KNEE, size**2 / 2, KNEE * size - KNEE**2 / 2)
        return jnp.sum(weights * huber) + jnp.sum(((logs - jnp.log(median)) / log_sd) ** 2) / 2

    return jax.jit(objective)


# --- One device ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "truth"), [(LINE, LINE_TRUTH), (TILED, TILED_TRUTH)])
def test_exact_timings_give_the_coefficients_back(model, truth):
    exact = terms_of(timings_of(truth, runs_of(model)))
    assert exact.converged
    # The priors, of a log-sd of 2, pull by what is left of their variance.
    np.testing.assert_allclose(logs_of(exact.coefficients), logs_of(truth), atol=2e-3)
    assert exact.noise_sd < 1e-3
    assert all(exact.measured.values())
    assert not exact.inseparable


def test_noisy_timings_give_the_coefficients_back_within_what_the_fit_leaves_open():
    """With a correction, too: see the test of many machines below."""
    several, _ = stack_timings([timings_of(LINE_TRUTH, RUNS, 0.03, seed) for seed in range(6)])
    noisy = [fit.terms for fit in fit_posteriors(several, n_starts=1)]
    off = [(logs_of(own.coefficients) - logs_of(LINE_TRUTH)) / np.array(jax.tree.leaves(own.log_sd)) for own in noisy]
    assert np.mean([own.noise_sd for own in noisy]) == pytest.approx(0.03, rel=0.25)
    # Standard normal: of so many, a mean square within three standard deviations of 1.
    assert np.mean(np.square(off)) == pytest.approx(1.0, abs=3 * np.sqrt(2 / np.size(off)))
    assert np.max(np.abs(off)) < 4.0
    with jax.enable_x64(False):
        single = terms_of(timings_of(LINE_TRUTH, RUNS, 0.03, 0))
    sds = np.array(jax.tree.leaves(noisy[0].log_sd))
    assert single.converged
    assert single.loss == pytest.approx(noisy[0].loss, abs=0.02)
    np.testing.assert_allclose(logs_of(single.coefficients) / sds, logs_of(noisy[0].coefficients) / sds, atol=0.1)


def test_the_fit_is_the_minimum_of_the_documented_objective():
    wild = np.where(np.arange(RUNS.shape[0]) % 9 == 4, 3.0, 1.0)
    weights = np.linspace(0.2, 2.0, RUNS.shape[0])
    prior = LatencyPrior(LINE.prior.median, dict.fromkeys(LINE.prior.median, 0.05))
    timings = timings_of(LINE_TRUTH, RUNS, 0.05, factor=wild)
    found = terms_of(timings, prior, weights)
    f, logs, step = objective_of(timings, prior, weights), logs_of(found.coefficients), 1e-3
    assert found.loss == pytest.approx(float(f(logs)), rel=1e-9)
    moves = step * np.eye(len(logs))
    slopes = [8 * (f(logs + m) - f(logs - m)) - f(logs + 2 * m) + f(logs - 2 * m) for m in moves]
    sds = np.sqrt(np.diag(found.covariance))
    np.testing.assert_allclose(np.array(slopes) / (12 * step) * sds, 0.0, atol=3e-3)
    assert found.expected_decrease < 1e-3
    for direction in np.random.default_rng(0).normal(size=(20, len(logs))) * sds:
        assert float(f(logs + direction)) > found.loss


class OverflowingModel(type(LINE)):
    """Predicts more than a float holds."""

    name = "overflowing"

    def terms_ns(self, coefficients, runs, facts):
        return {**super().terms_ns(coefficients, runs, facts), "overflow_ns": jnp.exp(1e3 * coefficients["call_ns"])}


def test_a_fit_says_in_a_sentence_whether_it_converged(fitted):
    assert fitted.converged
    assert fitted.message.startswith(f"The fit of {len(RUNS.variant)} timings converged in {fitted.steps} steps (loss ")
    assert fitted.message.endswith(").")
    timings = timings_of(LINE_TRUTH, RUNS)
    found = terms_of(dataclasses.replace(timings, runs=dataclasses.replace(timings.runs, model=OverflowingModel())))
    assert not found.converged
    assert found.message.startswith(f"The fit of {len(RUNS.variant)} timings did not converge in ")
    assert not any(found.measured.values())
    assert len(found.inseparable) == len(NAMES)
    assert found.log_sd == LINE.prior.log_sd


def assert_same_fit(found, expected):
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-9)
    np.testing.assert_allclose(logs_of(found.coefficients), logs_of(expected.coefficients), atol=1e-6)
    np.testing.assert_allclose(found.covariance, expected.covariance, rtol=1e-6)
    assert found.noise_sd == pytest.approx(expected.noise_sd, rel=1e-6)


def test_outliers_barely_move_a_fit_a_weight_of_zero_leaves_a_time_out_and_one_of_two_is_a_timing_twice(fitted):
    place = np.arange(RUNS.shape[0])
    wild = np.where(place % 14 == 7, 100.0, np.where(place == 18, 0.01, 1.0))
    robust = terms_of(timings_of(LINE_TRUTH, RUNS, 0.02, factor=wild))
    np.testing.assert_allclose(logs_of(robust.coefficients), logs_of(fitted.coefficients), atol=0.05)
    assert robust.noise_sd < 2 * fitted.noise_sd
    timings, weights = timings_of(LINE_TRUTH, RUNS, 0.02), (place % 5 != 2).astype(float)
    expected = terms_of(jax.tree.map(lambda column: column[weights > 0], timings))
    for hidden in (1e12, np.nan, 0.0):
        spoilt = dataclasses.replace(timings, time_ns=np.where(weights > 0, timings.time_ns, hidden))
        assert_same_fit(terms_of(spoilt, weights=weights), expected)
    timings, weights = timings_of(LINE_TRUTH, RUNS, 0.05), np.where(place < 10, 2.0, 1.0)
    twice = jax.tree.map(lambda column: np.concatenate([column, column[:10]]), timings)
    assert_same_fit(terms_of(timings, weights=weights), terms_of(twice))


def test_scaling_all_times_and_the_medians_scales_the_coefficients(fitted):
    timings = timings_of(LINE_TRUTH, RUNS, 0.02, factor=40.0)
    prior = LINE.prior._replace(median={name: 40.0 * value for name, value in LINE.prior.median.items()})
    found = terms_of(timings, prior)
    np.testing.assert_allclose(logs_of(found.coefficients), logs_of(fitted.coefficients) + np.log(40.0), atol=1e-4)
    np.testing.assert_allclose(found.covariance, fitted.covariance, rtol=1e-2)
    assert found.loss == pytest.approx(fitted.loss, rel=1e-4)


def test_what_was_not_timed_or_is_known_as_surely_is_not_measured():
    timings, (median, wide) = timings_of(LINE_TRUTH, RUNS, 0.02), LINE.prior[:2]
    found = terms_of(timings, weights=(np.asarray(RUNS.variant) == 0).astype(float))
    assert found.coefficients["block_ns"] == pytest.approx(median["block_ns"], rel=1e-6)
    assert found.log_sd["block_ns"] == pytest.approx(wide["block_ns"], rel=1e-6)
    assert found.measured == {"block_ns": False, "call_ns": True, "item_ns": True}
    assert {"block_ns": 1.0} in [{name: abs(share) for name, share in entry.items()} for entry in found.inseparable]
    tight = terms_of(timings, LatencyPrior(median, dict.fromkeys(median, 1e-4)))
    np.testing.assert_allclose(logs_of(tight.coefficients), MEDIAN, atol=1e-2)
    assert not any(tight.measured.values())
    log_sd = {"call_ns": 2.0, "item_ns": 0.005, "block_ns": 2.0}
    found = terms_of(timings, LatencyPrior(LINE_TRUTH, log_sd))
    assert found.log_sd["item_ns"] ** 2 > log_sd["item_ns"] ** 2 / 2
    assert found.measured == {"block_ns": True, "call_ns": True, "item_ns": False}
    # Of runs that are nearly all slope, timings of 2 % leave the start open.
    long = terms_of(timings_of(LINE_TRUTH, runs_of(LINE, 2.0 ** np.arange(14, 24)), 0.02))
    assert long.log_sd["call_ns"] > 0.3
    assert long.measured == {"block_ns": False, "call_ns": False, "item_ns": True}


def test_the_covariance_is_the_inverse_of_the_numerical_hessian(fitted):
    timings, weights = timings_of(LINE_TRUTH, RUNS, 0.02), np.ones(RUNS.shape)
    logs, log_sd = logs_of(fitted.coefficients), np.array(jax.tree.leaves(LINE.prior.log_sd))
    objective = objective_of(timings, LINE.prior, weights)

    def misfit(logs):
        return float(objective(logs)) - np.sum(((logs - MEDIAN) / log_sd) ** 2) / 2

    step = 1e-3 * np.eye(len(NAMES))
    hessian = np.array(
        [
            [sum(s * misfit(logs + a + s * b) - s * misfit(logs - a + s * b) for s in (1, -1)) for a in step]
            for b in step
        ]
    )
    hessian /= 4e-6
    # The noise: of the residuals, as those that parameters absorbed say nothing, and four of 5 % believed before.
    count, prior_precision = len(weights), np.diag(log_sd**-2.0)
    absorbed = np.trace(np.linalg.solve(hessian + prior_precision, hessian))
    noise = (count * fitted.noise_sd**2 + 4 * RELATIVE_SD**2) / (count - absorbed + 4)
    expected = np.linalg.inv(hessian * RELATIVE_SD**2 / noise + prior_precision)
    # Gauss and Newton's curvature is the whole one but for residuals times second derivatives.
    scale = np.sqrt(np.diag(expected))
    np.testing.assert_allclose(fitted.covariance / np.outer(scale, scale), expected / np.outer(scale, scale), atol=0.05)
    np.testing.assert_allclose(jax.tree.leaves(fitted.log_sd), np.sqrt(np.diag(fitted.covariance)), rtol=1e-9)


def test_a_pair_of_which_the_product_alone_shows_is_named_inseparable():
    truth = {"call_ns": 3000.0, "left": 2.0, "right": 3.0}
    found = terms_of(timings_of(truth, runs_of(TWIN), 0.01))
    assert found.converged
    assert found.coefficients["left"] * found.coefficients["right"] == pytest.approx(6.0, rel=0.02)
    # Of alike priors each takes half of the logarithm.
    assert found.coefficients["left"] == pytest.approx(found.coefficients["right"], rel=1e-3)
    (pair,) = found.inseparable
    assert pair.keys() == {"left", "right"}
    assert pair["left"] == pytest.approx(-pair["right"], abs=1e-3)
    assert abs(pair["left"]) == pytest.approx(0.5**0.5, abs=1e-3)
    assert found.measured == {"call_ns": True, "left": False, "right": False}
    # The difference of their logarithms has the prior's variance still.
    left, right = (coefficient_names(truth).index(name) for name in ("left", "right"))
    cut = found.covariance[left, left] + found.covariance[right, right] - 2 * found.covariance[left, right]
    assert cut == pytest.approx(2 * 2.0**2, rel=1e-3)


def test_few_timings_do_with_a_prior_that_needs_no_more_and_facts_are_the_callers_or_the_models():
    prior = LatencyPrior(LINE_TRUTH, dict.fromkeys(LINE_TRUTH, 0.1))
    few = jax.tree.map(lambda column: column[[0, 13, 20]], timings_of(LINE_TRUTH, RUNS, 0.02))
    with pytest.raises(ValueError, match="expected at least 8 timings, got 3"):
        fit_posterior(few, prior)
    np.testing.assert_allclose(logs_of(terms_of(few, prior, min_timings=3).coefficients), logs_of(LINE_TRUTH), atol=0.1)
    facts, runs = {**TILED.facts, "tile_items": 512.0}, runs_of(TILED)
    timings = dataclasses.replace(timings_of(TILED_TRUTH, runs), time_ns=true_ns(TILED_TRUTH, runs, facts))
    found = terms_of(timings, facts=facts)
    np.testing.assert_allclose(logs_of(found.coefficients), logs_of(TILED_TRUTH), atol=2e-3)
    assert terms_of(timings).loss > 2 * found.loss


def test_coefficients_may_be_a_dataclass():
    runs, median = FFT.grid(), FFT.prior.median
    truth = dataclasses.replace(median, call_ns=2 * median.call_ns, flop_per_ns=3 * median.flop_per_ns)
    time_ns = np.asarray(jax.jit(predicted_ns)(truth, runs, {}))
    found = terms_of(Timings.checked(FFT, variant=runs.variant, **runs.inputs, time_ns=time_ns))
    assert isinstance(found.coefficients, type(median))
    assert list(found.measured) == [field.name for field in dataclasses.fields(median)]
    predicted = np.asarray(jax.jit(predicted_ns)(found.coefficients, runs, {}))
    np.testing.assert_allclose(predicted, time_ns, rtol=0.02)


# --- Many devices --------------------------------------------------------------------------------

DEVICE_RUNS = runs_of(LINE, 2.0 ** np.arange(2, 14, 2))
#: More than a program takes at a time, and no multiple of that.
DEVICES = 21


def machines(count, seed=1, sd=1.0):
    """Return logarithms of the coefficients of machines around the prior's medians, `[devices, c]`."""
    return MEDIAN + sd * np.random.default_rng(seed).normal(size=(count, MEDIAN.size))


def named_of(logs):
    return dict(zip(NAMES, np.exp(logs).tolist(), strict=True))


def timings_of_machines(logs):
    return stack_timings([timings_of(named_of(own), DEVICE_RUNS, 0.05, seed) for seed, own in enumerate(logs)])[0]


def of_device(tree, index):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], tree)


def test_many_devices_are_fitted_as_one_after_the_other_whatever_stands_where_a_weight_is_zero():
    """A third of the timings is left out, as of ragged devices."""
    timings = timings_of_machines(machines(DEVICES))
    weights = (np.random.default_rng(2).uniform(size=timings.time_ns.shape) > 1 / 3).astype(float)
    options = {"n_starts": 1, "min_timings": 1}
    many = [fit.terms for fit in fit_posteriors(timings, weights=weights, **options)]
    assert all(own.converged and own.expected_decrease < 1e-3 for own in many)
    for index in range(0, DEVICES, 4):
        alone = terms_of(of_device(timings, index), weights=weights[index], min_timings=1)
        assert many[index].loss == pytest.approx(alone.loss, abs=1e-4)
        sds = np.array(jax.tree.leaves(alone.log_sd))
        found, expected = (logs_of(own.coefficients) / sds for own in (many[index], alone))
        np.testing.assert_allclose(found, expected, atol=0.02)
        np.testing.assert_allclose(jax.tree.leaves(many[index].log_sd), sds, rtol=0.01)
        np.testing.assert_allclose(many[index].covariance, alone.covariance, atol=0.02 * np.max(sds) ** 2)
        assert many[index].measured == alone.measured
        assert many[index].noise_sd == pytest.approx(alone.noise_sd, abs=1e-3)
    spoilt = dataclasses.replace(timings, time_ns=np.where(weights > 0, timings.time_ns, np.nan))
    again = fit_posteriors(spoilt, weights=weights, **options)
    assert [fit.terms.coefficients for fit in again] == [own.coefficients for own in many]


def as_fits(fit, means, sds, converged=True):
    """Return fits with these logarithms and standard deviations, `[devices, c]`."""
    rows = zip(means, sds, np.broadcast_to(converged, len(means)).tolist(), strict=True)
    return [
        fit._replace(coefficients=named_of(mean), log_sd=dict(zip(NAMES, sd.tolist(), strict=True)), converged=ended)
        for mean, sd, ended in rows
    ]


def moments(prior):
    return np.log(jax.tree.leaves(prior.median)), np.array(jax.tree.leaves(prior.log_sd))


def test_pooling_is_the_step_that_its_documentation_states(fitted):
    means, sds = machines(5, sd=1.5), np.random.default_rng(3).uniform(0.01, 1.0, (5, 3))
    mean, sd = moments(pooled_prior(as_fits(fitted, means, sds), LINE.prior))
    every, variances = np.vstack([means, MEDIAN]), np.vstack([sds**2, np.full((1, 3), 4.0)])
    np.testing.assert_allclose(mean, every.mean(0), rtol=1e-12)
    np.testing.assert_allclose(sd**2, np.mean((every - every.mean(0)) ** 2 + variances, 0), rtol=1e-12)
    # What no device measured keeps the prior, and no variance falls below the prior's share.
    open_ = moments(pooled_prior(as_fits(fitted, np.tile(MEDIAN, (4, 1)), np.full((4, 3), 2.0)), LINE.prior))
    np.testing.assert_allclose(open_, moments(LINE.prior), rtol=1e-12)
    _, sharp = moments(pooled_prior(as_fits(fitted, np.tile(MEDIAN, (4, 1)), np.zeros((4, 3))), LINE.prior))
    np.testing.assert_allclose(sharp**2, 4.0 / 5, rtol=1e-12)
    # Many well measured devices give their own mean and standard deviation.
    many = machines(2000, sd=0.7) + 1.0
    mean, sd = moments(pooled_prior(as_fits(fitted, many, np.full(many.shape, 0.01)), LINE.prior))
    np.testing.assert_allclose(mean, MEDIAN + 1.0, atol=0.05)
    np.testing.assert_allclose(sd, 0.7, atol=0.05)
    some = pooled_prior(as_fits(fitted, means, sds, [True, False, True, True, False]), LINE.prior)
    assert some == pooled_prior(as_fits(fitted, means[[0, 2, 3]], sds[[0, 2, 3]]), LINE.prior)
    for fits in ([], as_fits(fitted, means, sds, False)):
        with pytest.raises(ValueError, match="fits: expected at least one converged fit, got none"):
            pooled_prior(fits, LINE.prior)


def test_devices_that_are_alike_teach_others_what_three_timings_do_not():
    alike = machines(DEVICES, sd=0.2) + np.array([1.0, 2.0, 1.0])
    timings = timings_of_machines(alike)
    known = [fit.terms for fit in fit_posteriors(timings, n_starts=1)[:-5]]
    few = np.tile(np.isin(np.arange(DEVICE_RUNS.shape[0]), [0, 4, 5]).astype(float), (DEVICES, 1))
    errors = []
    for prior in (LINE.prior, pooled_prior(known, LINE.prior)):
        fits = fit_posteriors(timings, prior, few, n_starts=1, min_timings=3)[-5:]
        found, truth = (
            np.log([true_ns(own, DEVICE_RUNS) for own in of])
            for of in ((fit.terms.coefficients for fit in fits), map(named_of, alike[-5:]))
        )
        errors.append(np.mean(np.abs(found - truth)[few[-5:] == 0]))
    assert errors[1] < errors[0] / 2


#: Machines whose timings have a correction, and sizes of each: those that are timed, and others.
CORRECTED, SIZES = 32, (2.0 ** np.arange(0, 14, 0.5), 2.0 ** np.arange(0.25, 13, 0.5))


def test_coefficients_and_times_of_new_runs_lie_in_their_intervals_and_one_of_many_is_as_alone():
    rng, medians = np.random.default_rng(0), TILED.prior.median
    both = [runs_of(TILED, np.round(n)) for n in SIZES]
    features = [np.asarray(TILED.features(runs, TILED.facts)) for runs in both]
    logs, times, timings = [], [], []
    for seed in range(CORRECTED):
        own = {name: medians[name] * np.exp(TILED.prior.log_sd[name] * rng.normal() / 2) for name in sorted(medians)}
        weights = CORRECTION_SD * rng.normal(size=(len(TILED.variants), features[0].shape[-1]))
        factors = [
            np.exp(np.sum(of * weights[np.asarray(runs.variant)], -1)) for of, runs in zip(features, both, strict=True)
        ]
        logs.append(logs_of(own))
        times.append(true_ns(own, both[1]) * factors[1])
        timings.append(timings_of(own, both[0], 0.04, seed, factors[0]))
    stacked, weights = stack_timings(timings)
    fits, off, runs_off = fit_posteriors(stacked, None, weights, n_starts=1), [], []
    for own, own_ns, fit in zip(logs, times, fits, strict=True):
        sds = np.array(jax.tree.leaves(fit.posterior.coefficient_log_sd()))
        off.append((logs_of(fit.posterior.coefficients) - own) / sds)
        found = estimate(fit.posterior, both[1])
        runs_off.append(np.log(np.asarray(found.time_ns) / own_ns) / np.sqrt(np.sum(np.asarray(found.scores) ** 2, -1)))
    for found in (off, runs_off):
        shares = np.mean(np.abs(np.array(found)) <= COVERED_SDS, -1)
        assert np.mean(shares) == pytest.approx(COVERED, abs=max(0.02, 3 * np.std(shares) / CORRECTED**0.5))
    for own, found in list(zip(timings, fits, strict=True))[:2]:
        alone = fit_posterior(own).posterior
        sds = np.array(jax.tree.leaves(alone.coefficient_log_sd()))
        ends = [logs_of(one.coefficients) / sds for one in (found.posterior, alone)]
        np.testing.assert_allclose(*ends, atol=0.02)
        np.testing.assert_allclose(found.posterior.weights, alone.weights, atol=1e-3)
        np.testing.assert_allclose(found.posterior.spread, alone.spread, rtol=0.01)
        np.testing.assert_allclose(found.posterior.factor, alone.factor, atol=0.02 * np.max(sds))


class ScatteredModel(type(LINE)):
    """Runs of many items are known less well than others, as the model says."""

    name = "scattered"

    def scatter(self, runs, facts):
        return jnp.where(jnp.asarray(runs.inputs["n"]) < 100, 1.0, 20.0)


def test_runs_scatter_as_the_model_says_and_intervals_cover_those_of_each_kind():
    model, noise_sd = ScatteredModel(), 0.01
    runs = runs_of(model, np.tile(np.geomspace(1, 1e4, 40).round(), 10))
    scatter = np.asarray(model.scatter(runs, {}))
    noise = np.exp(noise_sd * scatter * np.random.default_rng(0).standard_normal(runs.shape))
    timings = Timings.checked(
        model, variant=runs.variant, n=runs.inputs["n"], time_ns=true_ns(LINE_TRUTH, runs) * noise
    )
    fit = fit_posterior(timings)
    found = estimate(fit.posterior, runs)
    np.testing.assert_allclose(found.spread, np.asarray(fit.posterior.spread)[runs.variant] * scatter, rtol=1e-12)
    np.testing.assert_allclose(fit.posterior.spread, noise_sd, rtol=0.25)
    covered = np.abs(np.log(timings.time_ns / np.asarray(found.time_ns))) <= COVERED_SDS * np.asarray(found.log_sd())
    for kind in (scatter == 1.0, scatter > 1.0):
        assert 0.82 < covered[kind].mean() < 0.98
