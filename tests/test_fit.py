"""The fit recovers predictions from timings, withstands outliers, and says what it could not learn."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlxjax as rx
from rlxjax import _fit
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
    assert fitted.gradient_norm < _fit.GRADIENT_TOLERANCE * max(1, fitted.loss)
    assert fitted.message.startswith(f"The fit of {COUNT} timings converged in {fitted.steps} steps")


def test_a_fit_that_missed_the_tolerance_is_a_result_that_says_so(fitted, monkeypatch):
    monkeypatch.setattr(_fit, "GRADIENT_TOLERANCE", fitted.gradient_norm / fitted.loss / 2)
    result = rx.fit_latency(timings(noise()))
    assert not result.converged
    assert f"did not converge in {result.steps} steps" in result.message
    assert result.coefficients == fitted.coefficients


def test_the_result_is_deterministic(fitted):
    again = rx.fit_latency(timings(noise()), weights=np.ones(COUNT))
    assert again == fitted


def test_one_timing_in_twenty_a_hundredfold_off_barely_matters(fitted):
    wild = np.where(np.arange(COUNT) % 40 == 7, 100.0, np.where(np.arange(COUNT) % 40 == 21, 0.01, 1.0))
    assert 0.04 < np.mean(wild != 1) < 0.06
    result = rx.fit_latency(timings(noise() * wild))
    assert errors(result).mean() < errors(fitted).mean() + 0.02
    assert np.median(errors(result)) < 0.02


def test_weight_zero_hides_a_timing(fitted_to_fused_alone):
    garbage = np.where(IS_FUSED, 1.0, 1e3)
    result = rx.fit_latency(timings(noise() * garbage), weights=IS_FUSED.astype(float))
    assert result == fitted_to_fused_alone


def test_weight_zero_equals_leaving_the_timing_out(fitted_to_fused_alone):
    kept = jax.tree.map(lambda column: column[IS_FUSED], timings(noise()))
    result = rx.fit_latency(kept)
    np.testing.assert_allclose(result.loss, fitted_to_fused_alone.loss, rtol=1e-3)
    found, masked = (predictions(r.coefficients)[IS_FUSED] for r in (result, fitted_to_fused_alone))
    np.testing.assert_allclose(found, masked, rtol=2e-3)
    assert result.informed == fitted_to_fused_alone.informed


def test_a_path_that_was_not_timed_stays_at_the_prior(fitted_to_fused_alone):
    assert errors(fitted_to_fused_alone, IS_FUSED).max() < 0.05
    for name in set(COEFFICIENT_NAMES) - FUSED_ALONE:
        np.testing.assert_allclose(
            getattr(fitted_to_fused_alone.coefficients, name), getattr(PRIOR.median, name), rtol=1e-9
        )
        assert getattr(fitted_to_fused_alone.sensitivity, name) == 0
        assert not fitted_to_fused_alone.informed[name]


def test_what_moves_a_prediction_is_informed(fitted, fitted_to_fused_alone):
    for result, timed in ((fitted, slice(None)), (fitted_to_fused_alone, IS_FUSED)):
        for name in COEFFICIENT_NAMES:
            value = getattr(result.coefficients, name)
            nudged = dataclasses.replace(result.coefficients, **{name: value * 1.0001})
            moved = np.abs(np.log(predictions(nudged) / predictions(result.coefficients)))[timed].max() / 1e-4
            np.testing.assert_allclose(getattr(result.sensitivity, name), moved, rtol=1e-2, atol=1e-6)
            assert result.informed[name] == (getattr(result.sensitivity, name) > _fit.INFORMED_SENSITIVITY)


def test_a_tight_prior_outweighs_the_timings(fitted):
    tight = rx.LatencyPrior(PRIOR.median, jax.tree.map(lambda _: 1e-4, PRIOR.median))
    result = rx.fit_latency(timings(noise()), prior=tight)
    for name in COEFFICIENT_NAMES:
        assert getattr(result.coefficients, name) == pytest.approx(getattr(PRIOR.median, name), rel=1e-2)
    assert errors(result).mean() > errors(fitted).mean()


def test_several_machines_fit_at_once(fitted, fitted_to_fused_alone):
    weights = jnp.stack([jnp.ones(COUNT), jnp.asarray(IS_FUSED, float)])
    minimise = jax.jit(jax.vmap(_fit._minimise, in_axes=(None, 0, None)))
    logs, losses, *_ = minimise(timings(noise()), weights, PRIOR)
    for index, alone in enumerate((fitted, fitted_to_fused_alone)):
        coefficients = _fit._coefficients(logs[index])
        timed = slice(None) if index == 0 else IS_FUSED
        np.testing.assert_allclose(losses[index], alone.loss, rtol=1e-3)
        np.testing.assert_allclose(
            predictions(coefficients)[timed], predictions(alone.coefficients)[timed], rtol=2e-3
        )


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
