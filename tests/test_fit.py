"""The fit recovers predictions from timings, withstands outliers, and says what it could not learn."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import QUICKLY

import rlxjax as rx
from rlxjax import _fit, _laplace, _least_squares, _posterior
from rlxjax._latency import COEFFICIENT_NAMES, MAXIMA, TOP_K
from rlxjax.welch._selection import FEW_ROWS

PRIOR = rx.typical_prior()
#: Columns (path, batch, n_fft, k, n_segments): one compiled shape serves every test.
WORKLOADS = tuple(
    np.array(column)
    for column in zip(
        *itertools.product(range(3), (1, 8, 64, 256, 1024, 4096), (64, 256, 1024), (4, 16), (1, 2)),
        strict=True,
    )
)
#: How fused runs of these select by themselves: few rows by a heap.
SELECTION = np.where(WORKLOADS[1] <= FEW_ROWS, TOP_K, MAXIMA)
SIZE_NAMES = ("path", "batch", "n_fft", "k", "n_segments")
COUNT = len(WORKLOADS[0])
IS_FUSED = WORKLOADS[0] == rx.Path.FUSED.code
FUSED_ALONE = {name for name in COEFFICIENT_NAMES if not name.startswith(("host_", "select_"))}


def machine():
    """Return known coefficients, each a factor of about 2 from the prior's median."""
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda median: float(median * 2.0 ** rng.uniform(-1, 1)), PRIOR.median)


def predictions(coefficients):
    return np.asarray(rx.predict_latency_ns(coefficients, *WORKLOADS, selection=SELECTION))


def timings(factor):
    """Return the timings of the known machine, times a factor `[n]`."""
    columns = dict(zip(SIZE_NAMES, WORKLOADS, strict=True))
    return rx.Timings.checked(**columns, time_ns=predictions(machine()) * factor)


def noise():
    return np.exp(np.random.default_rng(0).normal(0, 0.02, COUNT))


def errors(result, where=slice(None)):
    """Return the relative errors of a fit's predictions against the known machine's."""
    return np.abs(predictions(result.coefficients) / predictions(machine()) - 1)[where]


@pytest.fixture(scope="module")
def fitted():
    return rx.fit_latency(timings(noise()))


@pytest.mark.parametrize("left_out", [np.nan, 0.0, -1.0, np.inf])
def test_a_time_of_weight_zero_may_be_anything(left_out, fitted):
    one, times_ns = timings(noise()), timings(noise()).time_ns
    weights = np.ones(COUNT)
    weights[::9] = 0.0
    hidden = dataclasses.replace(one, time_ns=np.where(weights > 0, times_ns, left_out))
    assert rx.fit_latency(hidden, weights=weights).coefficients == (
        rx.fit_latency(one, weights=weights).coefficients
    )


@pytest.mark.parametrize("bad", [np.nan, 0.0, -1.0, np.inf])
@pytest.mark.parametrize("fit", [rx.fit_latency, _posterior.fit_posterior])
def test_a_time_that_counts_and_is_none_is_named(fit, bad):
    one = timings(noise())
    spoilt = dataclasses.replace(one, time_ns=np.where(np.arange(COUNT) == 5, bad, one.time_ns))
    with pytest.raises(ValueError, match=r"time_ns\[5\]: expected a positive finite number, got "):
        fit(spoilt)


@pytest.mark.parametrize("bad", [np.nan, 0.0, -1.0, np.inf])
@pytest.mark.parametrize("part", ["median", "log_sd"])
@pytest.mark.parametrize("fit", [rx.fit_latency, _posterior.fit_posterior])
def test_a_prior_that_is_none_is_named(fit, part, bad):
    spoilt = dataclasses.replace(getattr(PRIOR, part), dispatch_ns=bad)
    with pytest.raises(ValueError, match=rf"prior\.{part}\.dispatch_ns: expected positive finite numbers"):
        fit(timings(noise()), PRIOR._replace(**{part: spoilt}))


@pytest.fixture(scope="module")
def fitted_to_fused_alone():
    return rx.fit_latency(timings(noise()), weights=IS_FUSED.astype(float))


def test_predictions_are_recovered_from_noisy_timings(fitted):
    assert errors(fitted).mean() < 0.01
    assert errors(fitted).max() < 0.05


def test_predictions_are_recovered_where_nothing_was_timed(fitted):
    sizes = (np.arange(3), 512, 512, 8, 2)
    machines = (fitted.coefficients, machine())
    found, true = (rx.predict_latency_ns(c, *sizes, selection="maxima") for c in machines)
    np.testing.assert_allclose(found, true, rtol=0.05)


def test_every_coefficient_is_positive_and_finite(fitted):
    assert all(np.isfinite(value) and value > 0 for value in jax.tree.leaves(fitted.coefficients))


def test_a_fit_that_converged_says_so(fitted):
    assert fitted.converged
    assert fitted.steps < _least_squares.MAX_STEPS
    assert fitted.message.startswith(f"The fit of {COUNT} timings converged in {fitted.steps} steps")


def test_the_loss_is_that_of_the_documentation_and_no_step_lowers_it(fitted):
    measured_ns = timings(noise()).time_ns
    median, log_sd = (np.array(jax.tree.leaves(part)) for part in PRIOR[:2])

    def loss(logs):
        coefficients = jax.tree.structure(PRIOR.median).unflatten(list(jnp.exp(logs)))
        predicted = rx.predict_latency_ns(coefficients, *WORKLOADS, selection=SELECTION)
        size = jnp.abs(jnp.log(predicted / measured_ns)) / _least_squares.RELATIVE_SD
        huber = jnp.where(size < 2, size**2 / 2, 2 * size - 2)
        return jnp.sum(huber) + jnp.sum(((logs - jnp.log(median)) / log_sd) ** 2) / 2

    logs = np.log(jax.tree.leaves(fitted.coefficients))
    value, gradient = map(np.asarray, jax.jit(jax.value_and_grad(loss), compiler_options=QUICKLY)(logs))
    assert value == pytest.approx(fitted.loss, rel=1e-6)
    assert gradient @ fitted.covariance @ gradient / 2 < 0.01


def test_a_fit_that_was_stopped_is_a_result_that_says_so(fitted):
    logs, size = np.log(jax.tree.leaves(fitted.coefficients)), len(COEFFICIENT_NAMES)
    found = _least_squares.Minimum(
        logs, 12.0, 0.5, 3, np.zeros((size, size)), 1.0, np.zeros((size, size)), np.full(COUNT, 0.02)
    )
    result = _fit._result(found, PRIOR, np.ones(COUNT))
    assert not result.converged
    assert "did not converge in 3 steps" in result.message
    assert not any(result.measured.values())
    assert len(result.inseparable) == size


def test_the_result_is_deterministic(fitted):
    again = rx.fit_latency(timings(noise()), weights=np.ones(COUNT))
    np.testing.assert_equal(again._asdict(), fitted._asdict())


def test_one_timing_in_twenty_a_hundredfold_off_barely_matters(fitted):
    wild = np.where(np.arange(COUNT) % 40 == 7, 100.0, np.where(np.arange(COUNT) % 40 == 21, 0.01, 1.0))
    assert 0.04 < np.mean(wild != 1) < 0.06
    result = rx.fit_latency(timings(noise() * wild))
    assert errors(result).mean() < errors(fitted).mean() + 0.02
    assert np.median(errors(result)) < 0.02


def test_weight_zero_hides_a_timing(fitted_to_fused_alone):
    garbage = np.where(IS_FUSED, 1.0, 1e3)
    result = rx.fit_latency(timings(noise() * garbage), weights=IS_FUSED.astype(float))
    np.testing.assert_equal(result._asdict(), fitted_to_fused_alone._asdict())


def test_weight_zero_equals_leaving_the_timing_out(fitted_to_fused_alone):
    kept = jax.tree.map(lambda column: column[IS_FUSED], timings(noise()))
    result = rx.fit_latency(kept)
    np.testing.assert_allclose(result.loss, fitted_to_fused_alone.loss, rtol=1e-3)
    found, masked = (predictions(r.coefficients)[IS_FUSED] for r in (result, fitted_to_fused_alone))
    np.testing.assert_allclose(found, masked, rtol=2e-3)
    assert result.measured == fitted_to_fused_alone.measured


def test_a_path_that_was_not_timed_stays_at_the_prior(fitted_to_fused_alone):
    assert errors(fitted_to_fused_alone, IS_FUSED).max() < 0.05
    for name in set(COEFFICIENT_NAMES) - FUSED_ALONE:
        np.testing.assert_allclose(
            getattr(fitted_to_fused_alone.coefficients, name), getattr(PRIOR.median, name), rtol=1e-9
        )
        assert getattr(fitted_to_fused_alone.log_sd, name) == pytest.approx(getattr(PRIOR.log_sd, name))
        assert not fitted_to_fused_alone.measured[name]


def test_what_is_measured_has_little_left_of_its_prior(fitted, fitted_to_fused_alone):
    for result in (fitted, fitted_to_fused_alone):
        variances = np.diag(result.covariance)
        np.testing.assert_allclose(jax.tree.leaves(result.log_sd), np.sqrt(variances), rtol=1e-9)
        for name, log_sd, variance in zip(
            COEFFICIENT_NAMES, jax.tree.leaves(result.log_sd), variances, strict=True
        ):
            prior_variance = getattr(PRIOR.log_sd, name) ** 2
            assert variance <= prior_variance * (1 + 1e-9)
            is_sharp = log_sd <= _laplace.MEASURED_LOG_SD
            assert result.measured[name] == (is_sharp and variance <= prior_variance / 2)


def test_the_truth_is_within_three_standard_deviations(fitted):
    off = np.log(jax.tree.leaves(fitted.coefficients)) - np.log(jax.tree.leaves(machine()))
    assert np.mean(np.abs(off) < 3 * np.array(jax.tree.leaves(fitted.log_sd))) > 0.9


def least_squares(residuals_of, count, centre, sd):
    def minimum(centre, sd):
        return _least_squares.least_squares(residuals_of, jnp.ones(count), centre, sd)

    return jax.tree.map(np.asarray, jax.jit(minimum, compiler_options=QUICKLY)(centre, sd))


def test_the_posterior_is_the_normal_one_where_the_prediction_is_a_power_law():
    """A prediction that is linear in the logarithms, without noise: Bayes' formula for normal variables."""
    rng = np.random.default_rng(1)
    powers, scale = rng.normal(size=(40, 3)), np.array([1.0, 2.0, 0.5])
    centre, sd = np.zeros(3), np.array([1.0, 0.1, 2.0])
    values = powers @ scale + rng.normal(0, 0.01, 40)

    def residuals_of(coefficients):
        return jnp.sum(jnp.log(jnp.stack(coefficients, -1)) * powers, -1) - values

    found = least_squares(residuals_of, 40, centre, sd)
    precision = powers.T @ powers / _least_squares.RELATIVE_SD**2
    mean = np.linalg.solve(precision + np.diag(sd**-2), powers.T @ values / _least_squares.RELATIVE_SD**2)
    np.testing.assert_allclose(found.logs, mean, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.squares, precision, rtol=1e-9)
    left = _laplace.laplace_approximation(found, np.ones(40), sd)
    noise_sd = 1.4826 * np.median(np.abs(found.residuals))
    assert left.noise_sd == pytest.approx(noise_sd, rel=0.1)
    absorbed = np.trace(np.linalg.solve(precision + np.diag(sd**-2), precision))
    prior_squares = _laplace.PRIOR_RESIDUALS * _least_squares.RELATIVE_SD**2
    likely = (40 * left.noise_sd**2 + prior_squares) / (40 - absorbed + _laplace.PRIOR_RESIDUALS)
    expected = np.linalg.inv(precision * _least_squares.RELATIVE_SD**2 / likely + np.diag(sd**-2))
    np.testing.assert_allclose(left.covariance, expected, rtol=1e-6, atol=1e-12)
    # A prior that is as sharp as the timings measured nothing of its coefficient.
    assert left.measured.tolist() == [True, bool(expected[1, 1] <= sd[1] ** 2 / 2), True]


def test_combinations_that_the_timings_do_not_settle_are_named():
    """Only the product of two coefficients shows: their ratio is as open as before."""

    def residuals_of(coefficients):
        return jnp.log(coefficients[0] * coefficients[1]) - 1.0

    found = least_squares(residuals_of, 20, np.zeros(2), np.full(2, 2.0))
    left = _laplace.laplace_approximation(found, np.ones(20), np.full(2, 2.0))
    np.testing.assert_allclose(found.logs, 0.5, atol=1e-3)
    assert left.squares[0] == pytest.approx(0, abs=1e-9)
    np.testing.assert_allclose(
        left.directions[:, 0] * np.sign(left.directions[0, 0]), [0.5**0.5, -(0.5**0.5)]
    )
    assert _laplace.named_shares(left.directions[:, 0], ["a", "b"]).keys() == {"a", "b"}
    assert not left.measured.any()


def test_a_tight_prior_outweighs_the_timings(fitted):
    tight = rx.LatencyPrior(PRIOR.median, jax.tree.map(lambda _: 1e-4, PRIOR.median))
    result = rx.fit_latency(timings(noise()), prior=tight)
    for name in COEFFICIENT_NAMES:
        assert getattr(result.coefficients, name) == pytest.approx(getattr(PRIOR.median, name), rel=1e-2)
    assert errors(result).mean() > errors(fitted).mean()


def test_float32_recovers_predictions_too():
    true = timings(noise())
    with jax.enable_x64(False):
        result = rx.fit_latency(true)
    assert errors(result).mean() < 0.01
    assert errors(result).max() < 0.05


def columns(count=10, **changed):
    good = {
        "path": ["host", "fused"] * (count // 2),
        "batch": [2.0**i for i in range(count)],
        "n_fft": [64] * count,
        "k": [4] * count,
        "n_segments": [2] * count,
        "time_ns": [1e5] * count,
    }
    return {**good, **changed}


@pytest.mark.parametrize("name", ["batch", "n_fft", "k", "n_segments", "time_ns"])
@pytest.mark.parametrize("bad", [0.0, -3.0, np.nan, np.inf])
def test_a_number_that_no_run_has_is_refused_by_column_and_row(name, bad):
    values = [1.0] * 10
    values[6] = bad
    with pytest.raises(ValueError, match=rf"{name}\[6\]: expected a positive finite number, got {bad}"):
        rx.Timings.checked(**columns(**{name: values}))


@pytest.mark.parametrize("name", ["batch", "n_fft", "k", "n_segments", "time_ns"])
def test_columns_of_unequal_length_are_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"{name}: expected shape \(10,\).*got \(9,\)"):
        rx.Timings.checked(**columns(**{name: [1.0] * 9}))


def test_unknown_paths_are_refused():
    with pytest.raises(ValueError, match="unknown path .*turbo"):
        rx.Timings.checked(**columns(path=["turbo"] * 10))
    with pytest.raises(ValueError, match="path: expected one axis"):
        rx.Timings.checked(**columns(path=[["host"] * 10]))


def test_too_few_timings_are_refused():
    few = rx.Timings.checked(**columns(_fit.MIN_TIMINGS - 2))
    with pytest.raises(ValueError, match="at least 8 that count, got 6"):
        rx.fit_latency(few)
    with pytest.raises(ValueError, match="at least 8 that count, got 3"):
        rx.fit_latency(rx.Timings.checked(**columns()), weights=np.arange(10) < 3)
    with pytest.raises(ValueError, match="at least 4 that count, got 3"):
        rx.fit_latency(rx.Timings.checked(**columns()), weights=np.arange(10) < 3, min_timings=4)


def test_timings_of_one_workload_are_refused():
    same = rx.Timings.checked(**columns(path=["host"] * 10, batch=[64] * 10))
    with pytest.raises(ValueError, match="expected several workloads, got one"):
        rx.fit_latency(same)


def test_timings_of_a_path_without_a_model_are_refused():
    with pytest.raises(ValueError, match="learned"):
        rx.fit_latency(rx.Timings.checked(**columns(path=["host", "learned"] * 5)))


@pytest.mark.parametrize(
    "weights",
    [np.ones(9), np.ones((10, 1)), np.r_[np.ones(9), -1.0], np.r_[np.ones(9), np.nan]],
    ids=["short", "column", "negative", "nan"],
)
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(ValueError, match="weights"):
        rx.fit_latency(rx.Timings.checked(**columns()), weights=weights)
