"""Many devices at once: the fits of each alone, and what they say of the next device."""

import dataclasses

import jax
import numpy as np
import pytest
from _models import LINE, LINE_TRUTH, TILED, TILED_TRUTH, runs_of, timings_of, true_ns

from rlxjax.fit import (
    CORRECTION_SD,
    COVERED,
    COVERED_SDS,
    FitResult,
    LatencyPrior,
    coefficient_names,
    estimate,
    fit_devices,
    fit_latency,
    fit_posterior,
    fit_posteriors,
    pooled_prior,
    stack_timings,
)

RUNS = runs_of(LINE, 2.0 ** np.arange(2, 14, 2))
NAMES = coefficient_names(LINE.prior.median)
MEDIAN = np.log(jax.tree.leaves(LINE.prior.median))
#: More than a program takes at a time, and no multiple of that.
DEVICES = 37


def machines(count, seed=1, sd=1.0):
    """Return logarithms of the coefficients of machines around the prior's medians, `[devices, c]`."""
    return MEDIAN + sd * np.random.default_rng(seed).normal(size=(count, MEDIAN.size))


def timings_of_machines(logs, noise_sd=0.05):
    coefficients = [dict(zip(NAMES, np.exp(own).tolist(), strict=True)) for own in logs]
    return stack_timings([timings_of(own, RUNS, noise_sd, seed) for seed, own in enumerate(coefficients)])[0]


def of_device(tree, index):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], tree)


def logs_of(coefficients):
    return np.log(np.stack(jax.tree.leaves(coefficients), -1))


@pytest.fixture(scope="module")
def fitted():
    """Timings of which a third is left out, as of ragged devices, and the fits."""
    timings = timings_of_machines(machines(DEVICES))
    weights = (np.random.default_rng(2).uniform(size=timings.time_ns.shape) > 1 / 3).astype(float)
    return timings, weights, fit_devices(timings, weights=weights, min_timings=1)


def test_many_devices_are_fitted_as_one_after_the_other(fitted):
    timings, weights, many = fitted
    assert many.converged.all()
    assert many.expected_decrease.max() < 1e-3
    assert many.covariance.shape == (DEVICES, 3, 3)
    assert {name: measured.shape for name, measured in many.measured.items()} == dict.fromkeys(NAMES, (DEVICES,))
    for index in range(0, DEVICES, 3):
        alone = fit_latency(of_device(timings, index), weights=weights[index], min_timings=1)
        assert alone.converged
        assert many.loss[index] == pytest.approx(alone.loss, abs=1e-4)
        sds = np.array(jax.tree.leaves(alone.log_sd))
        own = of_device(many.coefficients, index)
        np.testing.assert_allclose(logs_of(own) / sds, logs_of(alone.coefficients) / sds, atol=0.02)
        np.testing.assert_allclose(jax.tree.leaves(of_device(many.log_sd, index)), sds, rtol=0.01)
        np.testing.assert_allclose(many.covariance[index], alone.covariance, atol=0.02 * np.max(sds) ** 2)
        assert {name: bool(found[index]) for name, found in many.measured.items()} == alone.measured
        assert many.noise_sd[index] == pytest.approx(alone.noise_sd, abs=1e-3)


def test_a_device_with_fewer_timings_is_fitted_to_its_own(fitted):
    whole = of_device(fitted[0], 0)
    part = jax.tree.map(lambda column: column[3:], whole)
    # As many devices as above, so that one program fits both.
    timings, weights = stack_timings([whole] * (DEVICES - 1) + [part])
    many = fit_devices(timings, weights=weights)
    for index, own in ((0, whole), (DEVICES - 1, part)):
        alone = fit_latency(own)
        assert many.loss[index] == pytest.approx(alone.loss, abs=1e-4)
        np.testing.assert_allclose(logs_of(of_device(many.coefficients, index)), logs_of(alone.coefficients), atol=1e-3)


def test_times_of_weight_zero_may_be_anything_and_devices_may_have_priors_of_their_own(fitted):
    timings, weights, many = fitted
    spoilt = dataclasses.replace(timings, time_ns=np.where(weights > 0, timings.time_ns, np.nan))
    # A correction is of no matter to the terms.
    found = fit_devices(spoilt, LINE.prior._replace(correction=0.3), weights, min_timings=1)
    jax.tree.map(np.testing.assert_array_equal, found.coefficients, many.coefficients)
    factor = np.where(np.arange(DEVICES) == 4, 3.0, 1.0)
    medians = {name: value * factor for name, value in LINE.prior.median.items()}
    other = fit_devices(timings, LatencyPrior(medians, LINE.prior.log_sd), weights, min_timings=1)
    assert np.flatnonzero(np.abs(other.loss - many.loss) > 1e-6).tolist() == [4]


def test_facts_are_those_of_every_device():
    facts, runs = {**TILED.facts, "tile_items": 512.0}, runs_of(TILED)
    own = dataclasses.replace(timings_of(TILED_TRUTH, runs), time_ns=true_ns(TILED_TRUTH, runs, facts))
    both, _ = stack_timings([own, own])
    found, expected = logs_of(fit_devices(both, facts=facts).coefficients), np.log(jax.tree.leaves(TILED_TRUTH))
    np.testing.assert_allclose(found, [expected] * 2, atol=2e-3)


def as_fits(means, sds, converged=True):
    """Return fits with these logarithms and standard deviations, `[devices, c]`."""
    means, sds = np.asarray(means, float), np.asarray(sds, float)
    count = len(means)
    return FitResult(
        coefficients=dict(zip(NAMES, np.exp(means).T, strict=True)),
        loss=np.zeros(count),
        expected_decrease=np.zeros(count),
        steps=np.zeros(count, int),
        converged=np.broadcast_to(converged, count),
        noise_sd=np.zeros(count),
        log_sd=dict(zip(NAMES, sds.T, strict=True)),
        measured={},
        covariance=np.zeros((count, 3, 3)),
        inseparable=[],
        message="",
    )


def moments(prior):
    return np.log(jax.tree.leaves(prior.median)), np.array(jax.tree.leaves(prior.log_sd))


def test_pooling_is_the_step_that_its_documentation_states():
    means, sds = machines(5, sd=1.5), np.random.default_rng(3).uniform(0.01, 1.0, (5, 3))
    mean, sd = moments(pooled_prior(as_fits(means, sds), LINE.prior))
    every, variances = np.vstack([means, MEDIAN]), np.vstack([sds**2, np.full((1, 3), 4.0)])
    np.testing.assert_allclose(mean, every.mean(0), rtol=1e-12)
    np.testing.assert_allclose(sd**2, np.mean((every - every.mean(0)) ** 2 + variances, 0), rtol=1e-12)
    # What no device measured keeps the prior, and no variance falls below the prior's share.
    open_ = moments(pooled_prior(as_fits(np.tile(MEDIAN, (4, 1)), np.full((4, 3), 2.0)), LINE.prior))
    np.testing.assert_allclose(open_, moments(LINE.prior), rtol=1e-12)
    _, sharp = moments(pooled_prior(as_fits(np.tile(MEDIAN, (4, 1)), np.zeros((4, 3))), LINE.prior))
    np.testing.assert_allclose(sharp**2, 4.0 / 5, rtol=1e-12)


def test_many_well_measured_devices_give_their_own_mean_and_standard_deviation():
    means = machines(5000, sd=0.7) + 1.0
    mean, sd = moments(pooled_prior(as_fits(means, np.full(means.shape, 0.01)), LINE.prior))
    np.testing.assert_allclose(mean, MEDIAN + 1.0, atol=0.05)
    np.testing.assert_allclose(sd, 0.7, atol=0.05)


def test_fits_that_did_not_converge_are_left_out_and_none_is_refused():
    means, sds = machines(3), np.full((3, 3), 0.1)
    some = moments(pooled_prior(as_fits(means, sds, [True, False, True]), LINE.prior))
    np.testing.assert_allclose(some, moments(pooled_prior(as_fits(means[::2], sds[::2]), LINE.prior)))
    # Fits one by one pool as those of one call do.
    one_by_one = [fit_latency(timings_of(LINE_TRUTH, RUNS, 0.02, seed)) for seed in range(3)]
    at_once = fit_devices(stack_timings([timings_of(LINE_TRUTH, RUNS, 0.02, seed) for seed in range(3)])[0])
    pooled = (moments(pooled_prior(fits, LINE.prior)) for fits in (one_by_one, at_once))
    np.testing.assert_allclose(*pooled, atol=0.01)
    with pytest.raises(ValueError, match="fits: expected one at least that converged, got none"):
        pooled_prior(as_fits(means, sds, False), LINE.prior)
    with pytest.raises(ValueError, match="fits: expected one at least, got none"):
        pooled_prior([], LINE.prior)


def test_devices_that_are_alike_teach_others_what_three_timings_do_not():
    alike = machines(DEVICES, sd=0.2) + np.array([1.0, 2.0, 1.0])
    timings = timings_of_machines(alike)
    known = jax.tree.map(lambda leaf: leaf[:-5], fit_devices(timings))
    few = np.tile(np.isin(np.arange(RUNS.shape[0]), [0, 4, 5]).astype(float), (DEVICES, 1))
    is_new = np.arange(DEVICES)[:, None] >= DEVICES - 5
    errors = []
    for prior in (LINE.prior, pooled_prior(known, LINE.prior)):
        fits = fit_devices(timings, prior, few, min_timings=3)
        predicted = [true_ns(of_device(fits.coefficients, index), RUNS) for index in range(DEVICES)]
        off = np.log(predicted) - np.log([true_ns(dict(zip(NAMES, np.exp(own), strict=True)), RUNS) for own in alike])
        errors.append(np.mean(np.abs(off)[is_new & (few == 0)]))
    assert errors[1] < errors[0] / 2


#: Machines whose timings have a correction, sizes of each, and sizes that are not timed.
CORRECTED, TIMED_N, NEW_N = 48, 2.0 ** np.arange(0, 14, 0.5), 2.0 ** np.arange(0.25, 13, 0.5)


@pytest.fixture(scope="module")
def corrected():
    """Logarithms of machines' coefficients, their times of new runs, and what is fitted to noisy ones of other runs."""
    rng, medians = np.random.default_rng(0), TILED.prior.median
    timed, new = (runs_of(TILED, np.round(n)) for n in (TIMED_N, NEW_N))
    features = [np.asarray(TILED.features(runs, TILED.facts)) for runs in (timed, new)]
    names, logs, times, timings = coefficient_names(medians), [], [], []
    for seed in range(CORRECTED):
        own = {name: medians[name] * np.exp(TILED.prior.log_sd[name] * rng.normal() / 2) for name in names}
        weights = CORRECTION_SD * rng.normal(size=(len(TILED.variants), features[0].shape[-1]))
        factors = [
            np.exp(np.sum(of * weights[np.asarray(runs.variant)], -1))
            for of, runs in zip(features, (timed, new), strict=True)
        ]
        logs.append([np.log(own[name]) for name in names])
        times.append(true_ns(own, new) * factors[1])
        timings.append(timings_of(own, timed, 0.04, seed, factors[0]))
    return np.array(logs), new, np.array(times), timings, fit_posteriors(*stack_timings_of(timings))


def stack_timings_of(timings):
    """Return the first arguments of a fit of several devices' timings: timings, no prior, weights."""
    stacked, weights = stack_timings(timings)
    return stacked, None, weights


def test_coefficients_and_times_of_new_runs_lie_in_their_intervals_whatever_the_correction(corrected):
    logs, new, times, _, fits = corrected
    off = [
        (logs_of(fit.posterior.coefficients) - own) / np.array(jax.tree.leaves(fit.posterior.coefficient_log_sd()))
        for own, fit in zip(logs, fits, strict=True)
    ]
    runs_off = []
    for own_ns, fit in zip(times, fits, strict=True):
        found = estimate(fit.posterior, new)
        runs_off.append(np.log(np.asarray(found.time_ns) / own_ns) / np.sqrt(np.sum(np.asarray(found.scores) ** 2, -1)))
    for found in (off, runs_off):
        shares = np.mean(np.abs(np.array(found)) <= COVERED_SDS, -1)
        assert np.mean(shares) == pytest.approx(COVERED, abs=max(0.02, 3 * np.std(shares) / CORRECTED**0.5))


def test_the_posterior_of_one_of_many_devices_is_that_of_the_device_alone(corrected):
    *_, timings, fits = corrected
    for own, found in list(zip(timings, fits, strict=True))[:3]:
        alone = fit_posterior(own)
        sds = np.array(jax.tree.leaves(alone.posterior.coefficient_log_sd()))
        ends = [logs_of(one.posterior.coefficients) / sds for one in (found, alone)]
        np.testing.assert_allclose(*ends, atol=0.02)
        np.testing.assert_allclose(found.posterior.weights, alone.posterior.weights, atol=1e-3)
        np.testing.assert_allclose(found.posterior.spread, alone.posterior.spread, rtol=0.01)
        np.testing.assert_allclose(found.posterior.factor, alone.posterior.factor, atol=0.02 * np.max(sds))
