"""The fit: it recovers known machines, withstands outliers, is the minimum of its objective, and says what it left."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _models import LINE, LINE_TRUTH, TILED, TILED_TRUTH, TWIN, runs_of, timings_of, true_ns

from rlxjax.fit import LatencyPrior, Timings, coefficient_names, fit_latency, predicted_ns
from rlxjax.models import FFT

#: The objective's residuals are in units of this, and linear beyond the knee.
RELATIVE_SD, KNEE = 0.05, 2.0
RUNS = runs_of(LINE)
NAMES = coefficient_names(LINE.prior.median)
SHIPPED = {"line": (LINE, LINE_TRUTH), "tiled": (TILED, TILED_TRUTH)}
each_machine = pytest.mark.parametrize("name", SHIPPED)


@pytest.fixture(scope="module")
def fitted():
    return fit_latency(timings_of(LINE_TRUTH, RUNS, 0.02))


def logs_of(coefficients):
    return np.log(jax.tree.leaves(coefficients))


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


def central_differences(f, place, step=1e-3):
    """Return the gradient of a function by fourth-order central differences."""
    moves = step * np.eye(len(place))
    return (
        np.array([(8 * (f(place + m) - f(place - m)) - f(place + 2 * m) + f(place - 2 * m)) / 12 for m in moves]) / step
    )


@each_machine
def test_timings_give_the_coefficients_back_exactly_or_within_what_the_fit_leaves_open(name):
    model, truth = SHIPPED[name]
    exact = fit_latency(timings_of(truth, runs_of(model)))
    assert exact.converged
    # The priors, of a log-sd of 2, pull by what is left of their variance.
    np.testing.assert_allclose(logs_of(exact.coefficients), logs_of(truth), atol=2e-3)
    assert exact.noise_sd < 1e-3
    assert all(exact.measured.values())
    assert not exact.inseparable
    noisy = [fit_latency(timings_of(truth, runs_of(model), 0.03, seed)) for seed in range(6)]
    off = [(logs_of(own.coefficients) - logs_of(truth)) / np.array(jax.tree.leaves(own.log_sd)) for own in noisy]
    assert np.mean([own.noise_sd for own in noisy]) == pytest.approx(0.03, rel=0.25)
    # Standard normal: of so many, a mean square within three standard deviations of 1.
    assert np.mean(np.square(off)) == pytest.approx(1.0, abs=3 * np.sqrt(2 / np.size(off)))
    assert np.max(np.abs(off)) < 4.0
    with jax.enable_x64(False):
        single = fit_latency(timings_of(truth, runs_of(model), 0.03, 0))
    sds = np.array(jax.tree.leaves(noisy[0].log_sd))
    assert single.converged
    assert single.loss == pytest.approx(noisy[0].loss, abs=0.02)
    np.testing.assert_allclose(logs_of(single.coefficients) / sds, logs_of(noisy[0].coefficients) / sds, atol=0.1)


def test_the_fit_is_the_minimum_of_the_documented_objective():
    wild = np.where(np.arange(RUNS.shape[0]) % 9 == 4, 3.0, 1.0)
    weights = np.linspace(0.2, 2.0, RUNS.shape[0])
    prior = LatencyPrior(LINE.prior.median, dict.fromkeys(LINE.prior.median, 0.05))
    timings = timings_of(LINE_TRUTH, RUNS, 0.05, factor=wild)
    found = fit_latency(timings, prior, weights)
    objective, logs = objective_of(timings, prior, weights), logs_of(found.coefficients)
    assert found.loss == pytest.approx(float(objective(logs)), rel=1e-9)
    gradient = central_differences(objective, logs)
    sds = np.sqrt(np.diag(found.covariance))
    np.testing.assert_allclose(gradient * sds, 0.0, atol=3e-3)
    assert found.expected_decrease < 1e-3
    for direction in np.random.default_rng(0).normal(size=(20, len(logs))) * sds:
        assert float(objective(logs + direction)) > found.loss


class OverflowingModel(type(LINE)):
    """Predicts more than a float holds."""

    name = "overflowing"

    def terms_ns(self, coefficients, runs, facts):
        return {**super().terms_ns(coefficients, runs, facts), "overflow_ns": jnp.exp(1e3 * coefficients["call_ns"])}


def test_a_fit_says_in_a_sentence_whether_it_converged(fitted):
    assert fitted.converged
    assert fitted.message.startswith(f"The fit of {len(RUNS.variant)} timings converged in {fitted.steps} steps (loss ")
    assert fitted.message.endswith(").")
    model = OverflowingModel()
    timings = timings_of(LINE_TRUTH, RUNS)
    found = fit_latency(dataclasses.replace(timings, runs=dataclasses.replace(timings.runs, model=model)))
    assert not found.converged
    assert found.message.startswith(f"The fit of {len(RUNS.variant)} timings did not converge in ")
    assert not any(found.measured.values())
    assert len(found.inseparable) == len(NAMES)
    assert found.log_sd == LINE.prior.log_sd


def test_gross_outliers_barely_move_a_fit(fitted):
    place = np.arange(RUNS.shape[0])
    wild = np.where(place % 14 == 7, 100.0, np.where(place == 18, 0.01, 1.0))
    found = fit_latency(timings_of(LINE_TRUTH, RUNS, 0.02, factor=wild))
    np.testing.assert_allclose(logs_of(found.coefficients), logs_of(fitted.coefficients), atol=0.05)
    assert found.noise_sd < 2 * fitted.noise_sd


def test_a_weight_of_zero_leaves_out_whatever_the_time_and_one_of_two_is_a_timing_twice():
    timings, weights = timings_of(LINE_TRUTH, RUNS, 0.02), (np.arange(RUNS.shape[0]) % 5 != 2).astype(float)
    expected = fit_latency(jax.tree.map(lambda column: column[weights > 0], timings))
    for hidden in (1e12, np.nan, 0.0, -1.0, np.inf):
        spoilt = dataclasses.replace(timings, time_ns=np.where(weights > 0, timings.time_ns, hidden))
        assert_same_fit(fit_latency(spoilt, weights=weights), expected)
    timings, weights = timings_of(LINE_TRUTH, RUNS, 0.05), np.where(np.arange(RUNS.shape[0]) < 10, 2.0, 1.0)
    twice = jax.tree.map(lambda column: np.concatenate([column, column[:10]]), timings)
    assert_same_fit(fit_latency(timings, weights=weights), fit_latency(twice))


def assert_same_fit(found, expected):
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-9)
    np.testing.assert_allclose(logs_of(found.coefficients), logs_of(expected.coefficients), atol=1e-6)
    np.testing.assert_allclose(found.covariance, expected.covariance, rtol=1e-6)
    assert found.noise_sd == pytest.approx(expected.noise_sd, rel=1e-6)


def test_scaling_all_times_and_the_medians_scales_the_coefficients(fitted):
    scale = 40.0
    timings = timings_of(LINE_TRUTH, RUNS, 0.02, factor=scale)
    prior = LINE.prior._replace(median={name: value * scale for name, value in LINE.prior.median.items()})
    found = fit_latency(timings, prior)
    np.testing.assert_allclose(logs_of(found.coefficients), logs_of(fitted.coefficients) + np.log(scale), atol=1e-4)
    np.testing.assert_allclose(found.covariance, fitted.covariance, rtol=1e-2)
    assert found.loss == pytest.approx(fitted.loss, rel=1e-4)


def test_what_was_not_timed_stays_at_the_prior():
    weights = (np.asarray(RUNS.variant) == 0).astype(float)
    found = fit_latency(timings_of(LINE_TRUTH, RUNS, 0.02), weights=weights)
    assert found.coefficients["block_ns"] == pytest.approx(LINE.prior.median["block_ns"], rel=1e-6)
    assert found.log_sd["block_ns"] == pytest.approx(LINE.prior.log_sd["block_ns"], rel=1e-6)
    assert found.measured == {"block_ns": False, "call_ns": True, "item_ns": True}
    assert {"block_ns": 1.0} in [{name: abs(share) for name, share in entry.items()} for entry in found.inseparable]


def test_a_tight_prior_outweighs_the_timings():
    tight = LatencyPrior(LINE.prior.median, dict.fromkeys(LINE.prior.median, 1e-4))
    found = fit_latency(timings_of(LINE_TRUTH, RUNS, 0.02), tight)
    np.testing.assert_allclose(logs_of(found.coefficients), logs_of(LINE.prior.median), atol=1e-2)
    # What a prior is as sure of as the timings, they did not measure.
    assert not any(found.measured.values())


def test_the_covariance_is_the_inverse_of_the_numerical_hessian(fitted):
    timings, weights = timings_of(LINE_TRUTH, RUNS, 0.02), np.ones(RUNS.shape)
    logs, size = logs_of(fitted.coefficients), len(NAMES)
    log_sd, objective = np.array(jax.tree.leaves(LINE.prior.log_sd)), objective_of(timings, LINE.prior, weights)

    def misfit(logs):
        z = (logs - np.log(jax.tree.leaves(LINE.prior.median))) / log_sd
        return float(objective(logs)) - np.sum(z**2) / 2

    step = 1e-3 * np.eye(size)
    hessian = np.array(
        [
            [
                (misfit(logs + a + b) - misfit(logs + a - b) - misfit(logs - a + b) + misfit(logs - a - b)) / 4e-6
                for a in step
            ]
            for b in step
        ]
    )
    # The noise: of the residuals, as those that parameters absorbed say nothing, and four of 5 % believed before.
    count, prior_precision = len(weights), np.diag(log_sd**-2.0)
    absorbed = np.trace(np.linalg.solve(hessian + prior_precision, hessian))
    noise = (count * fitted.noise_sd**2 + 4 * RELATIVE_SD**2) / (count - absorbed + 4)
    expected = np.linalg.inv(hessian * RELATIVE_SD**2 / noise + prior_precision)
    # Gauss and Newton's curvature is the whole one but for residuals times second derivatives.
    scale = np.sqrt(np.diag(expected))
    np.testing.assert_allclose(fitted.covariance / np.outer(scale, scale), expected / np.outer(scale, scale), atol=0.05)
    np.testing.assert_allclose(jax.tree.leaves(fitted.log_sd), np.sqrt(np.diag(fitted.covariance)), rtol=1e-9)


def test_a_coefficient_is_measured_where_little_is_left_of_its_prior():
    timings = timings_of(LINE_TRUTH, RUNS, 0.02)
    log_sd = {"call_ns": 2.0, "item_ns": 0.005, "block_ns": 2.0}
    found = fit_latency(timings, LatencyPrior(LINE_TRUTH, log_sd))
    assert found.log_sd["item_ns"] ** 2 > log_sd["item_ns"] ** 2 / 2
    assert found.measured == {"block_ns": True, "call_ns": True, "item_ns": False}
    # Of runs that are nearly all slope, timings of 2 % leave the start open.
    long = fit_latency(timings_of(LINE_TRUTH, runs_of(LINE, 2.0 ** np.arange(14, 24)), 0.02))
    assert long.log_sd["call_ns"] > 0.3
    assert long.measured == {"block_ns": False, "call_ns": False, "item_ns": True}


def test_a_pair_of_which_the_product_alone_shows_is_named_inseparable():
    truth = {"call_ns": 3000.0, "left": 2.0, "right": 3.0}
    timings = timings_of(truth, runs_of(TWIN), 0.01)
    found = fit_latency(timings)
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


def test_few_timings_do_with_a_prior_that_needs_no_more():
    prior = LatencyPrior(LINE_TRUTH, dict.fromkeys(LINE_TRUTH, 0.1))
    few = jax.tree.map(lambda column: column[[0, 13, 20]], timings_of(LINE_TRUTH, RUNS, 0.02))
    with pytest.raises(ValueError, match="expected at least 8 that count, got 3"):
        fit_latency(few, prior)
    found = fit_latency(few, prior, min_timings=3)
    np.testing.assert_allclose(logs_of(found.coefficients), logs_of(LINE_TRUTH), atol=0.1)


def test_facts_are_the_callers_or_the_models():
    facts = {**TILED.facts, "tile_items": 512.0}
    runs = runs_of(TILED)
    timings = dataclasses.replace(timings_of(TILED_TRUTH, runs), time_ns=true_ns(TILED_TRUTH, runs, facts))
    found = fit_latency(timings, facts=facts)
    np.testing.assert_allclose(logs_of(found.coefficients), logs_of(TILED_TRUTH), atol=2e-3)
    assert fit_latency(timings).loss > 2 * found.loss


def test_coefficients_may_be_a_dataclass():
    runs = FFT.grid()
    median = FFT.prior.median
    truth = dataclasses.replace(median, call_ns=2 * median.call_ns, flop_per_ns=3 * median.flop_per_ns)
    time_ns = np.asarray(jax.jit(predicted_ns)(truth, runs, {}))
    found = fit_latency(Timings.checked(FFT, variant=runs.variant, **runs.inputs, time_ns=time_ns))
    assert isinstance(found.coefficients, type(median))
    assert list(found.measured) == [field.name for field in dataclasses.fields(median)]
    predicted = np.asarray(jax.jit(predicted_ns)(found.coefficients, runs, {}))
    np.testing.assert_allclose(predicted, time_ns, rtol=0.02)
