"""Many devices at once: the fits of each alone, and what they say of the next device."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import rlxjax as rx
from benchmarks import published_latency
from benchmarks.startup import compilations
from rlxjax import _device_fits
from rlxjax._posterior import prior_posterior

WIDE = rx.typical_fft_prior()
MEDIAN = np.log(jax.tree.leaves(WIDE.median))
NAMES = [field.name for field in dataclasses.fields(rx.FftLatencyCoefficients)]
BATCH, N_FFT = (
    np.array(c) for c in zip(*itertools.product((32, 256, 2048), (64, 256, 1024, 4096)), strict=True)
)
COUNT = BATCH.size
#: More than a chunk, and no multiple of one.
DEVICES = _device_fits.CHUNK_DEVICES + 3


def fft_timings(logs, seed=0):
    """Return timings with 5 % noise of machines with these logarithms, `[devices, n]`."""
    logs = np.asarray(logs)
    machines = rx.FftLatencyCoefficients(*np.exp(logs).T[..., None])
    noise = np.exp(np.random.default_rng(seed).normal(0, 0.05, (len(logs), COUNT)))
    time_ns = np.asarray(rx.fft_latency_ns(machines, BATCH[None], N_FFT[None])) * noise
    batch, n_fft = (np.broadcast_to(column, time_ns.shape).astype(float) for column in (BATCH, N_FFT))
    return rx.FftTimings(batch, n_fft, time_ns)


def machines(count, seed=1, sd=1.0):
    return MEDIAN + sd * np.random.default_rng(seed).normal(size=(count, MEDIAN.size))


def weights_of(devices, seed=2):
    """Return weights of which a third is 0, as ragged devices have."""
    return (np.random.default_rng(seed).uniform(size=(devices, COUNT)) > 1 / 3).astype(float)


def of_device(tree, index):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], tree)


@pytest.fixture(scope="module")
def fitted():
    timings, weights = fft_timings(machines(DEVICES)), weights_of(DEVICES)
    return timings, weights, rx.fit_fft_devices(timings, weights=weights, min_timings=1)


def assert_same_fit(many, index, alone):
    assert bool(many.converged[index]) == alone.converged
    np.testing.assert_allclose(many.loss[index], alone.loss, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(
        np.log(jax.tree.leaves(of_device(many.coefficients, index))),
        np.log(jax.tree.leaves(alone.coefficients)),
        atol=0.02,
    )
    sds = np.array(jax.tree.leaves(alone.log_sd))
    np.testing.assert_allclose(jax.tree.leaves(of_device(many.log_sd, index)), sds, rtol=0.05)
    np.testing.assert_allclose(many.covariance[index], alone.covariance, atol=0.05 * np.max(sds) ** 2)


def test_many_devices_are_fitted_as_one_after_the_other(fitted):
    timings, weights, many = fitted
    for index in range(DEVICES):
        alone = rx.fit_fft_latency(of_device(timings, index), weights=weights[index], min_timings=1)
        assert_same_fit(many, index, alone)
    assert many.converged.all()
    assert many.steps.min() < _device_fits.FIRST_STEPS < many.steps.max()
    assert many.covariance.shape == (DEVICES, 5, 5)
    assert {name: measured.shape for name, measured in many.measured.items()} == dict.fromkeys(
        NAMES, (DEVICES,)
    )


def test_the_latency_model_is_fitted_to_devices_with_fewer_timings_too():
    batch, n_fft = np.repeat(2.0 ** np.arange(10), 2), np.tile([256.0, 1024.0], 10)
    sizes = {"path": ["host"] * 20, "batch": batch, "n_fft": n_fft, "k": [16] * 20, "n_segments": [2] * 20}
    rates = np.array([2.0, 10.0, 10.0])
    single = [rx.Timings.checked(**sizes, time_ns=4e4 + rate * batch * n_fft) for rate in rates]
    single[2] = jax.tree.map(lambda column: column[:16], single[2])
    timings, weights = rx.stack_timings(single)
    fits = rx.fit_devices(timings, weights=weights)
    predicted = rx.predict_latency_ns(fits.coefficients, "host", 64, 256, 16, 2)
    np.testing.assert_allclose(predicted, 4e4 + rates * 64 * 256, rtol=0.1)
    assert not fits.measured["upload_bytes_per_ns"].any()


def test_devices_may_have_priors_of_their_own(fitted):
    timings, weights, many = fitted
    medians = jax.tree.map(lambda median: median * np.where(np.arange(DEVICES) == 4, 3.0, 1.0), WIDE.median)
    other = rx.fit_fft_devices(timings, rx.LatencyPrior(medians, WIDE.log_sd), weights, min_timings=1)
    is_moved = np.abs(other.loss - many.loss) > 1e-6
    assert np.flatnonzero(is_moved).tolist() == [4]


def test_new_values_compile_nothing_and_nor_do_more_chunks(fitted):
    _, weights, _ = fitted
    others, more = fft_timings(machines(DEVICES, 5), 6), fft_timings(machines(DEVICES + 30, 7))
    compilations.clear()
    rx.fit_fft_devices(others, WIDE, weights[::-1], min_timings=1)
    rx.fit_fft_devices(more, weights=np.ones((DEVICES + 30, COUNT)))
    assert not compilations


def test_float32_fits_the_same_predictions(fitted):
    timings, weights, many = fitted
    with jax.enable_x64(False):
        single = rx.fit_fft_devices(timings, weights=weights, min_timings=1)
    assert single.converged.mean() > 0.9
    np.testing.assert_allclose(single.loss, many.loss, rtol=0.01, atol=0.01)


def test_a_prior_with_a_correction_and_times_of_weight_zero_that_are_none_fit_devices_too():
    sizes = {"batch": 2.0 ** np.arange(10), "n_fft": [256.0] * 10, "k": [16] * 10, "n_segments": [2] * 10}
    times_ns = 4e4 + 20.0 * 256 * sizes["batch"]
    one = rx.Timings.checked(path=["host"] * 10, time_ns=times_ns, **sizes)
    both, weights = rx.stack_timings([one, one])
    weights[1, 3] = 0.0
    prior = rx.transferred_prior(prior_posterior())
    expected = rx.fit_devices(both, prior._replace(correction=0.0), weights)
    both.time_ns[1, 3] = np.nan
    found = rx.fit_devices(both, prior, weights)
    assert found.converged.all()
    jax.tree.map(np.testing.assert_array_equal, found.coefficients, expected.coefficients)
    with pytest.raises(ValueError, match=r"time_ns\[1, 3\]: expected a positive finite number, got nan"):
        rx.fit_devices(both, prior)
    spoilt = prior._replace(log_sd=dataclasses.replace(prior.log_sd, dispatch_ns=0.0))
    with pytest.raises(ValueError, match=r"prior\.log_sd\.dispatch_ns: expected positive finite numbers"):
        rx.fit_devices(both, spoilt, weights)


def test_stacked_timings_are_filled_up_with_weight_zero():
    whole = of_device(fft_timings(machines(1)), 0)
    part = jax.tree.map(lambda column: column[3:8], whole)
    stacked, weights = rx.stack_timings([part, whole])
    assert weights.sum(1).tolist() == [5, COUNT]
    for index, own in enumerate((part, whole)):
        kept = jax.tree.map(lambda column, index=index: column[index][weights[index] > 0], stacked)
        np.testing.assert_equal(vars(kept), vars(own))
    with pytest.raises(ValueError, match="at least one device"):
        rx.stack_timings([])
    with pytest.raises(ValueError, match="device 1 has none"):
        rx.stack_timings([part, jax.tree.map(lambda column: column[:0], part)])


def test_devices_that_cannot_be_fitted_are_refused_by_number():
    timings = fft_timings(machines(3))
    weights = np.ones((3, COUNT))
    with pytest.raises(ValueError, match="at least 8 that count, got 0 for device 1"):
        rx.fit_fft_devices(timings, weights=weights * [[1], [0], [1]])
    with pytest.raises(ValueError, match=r"expected columns \[devices, n\]"):
        rx.fit_fft_devices(of_device(timings, 0))
    with pytest.raises(ValueError, match=r"weights: expected shape \(3, 12\)"):
        rx.fit_fft_devices(timings, weights=weights[0])
    with pytest.raises(ValueError, match=r"batch: expected shape \(3, 12\), as time_ns has, got \(12,\)"):
        rx.fit_fft_devices(dataclasses.replace(timings, batch=BATCH))
    same = dataclasses.replace(timings, batch=timings.batch.copy(), n_fft=timings.n_fft.copy())
    same.batch[2], same.n_fft[2] = 32, 64
    with pytest.raises(ValueError, match="several workloads, got one for device 2"):
        rx.fit_fft_devices(same)


def as_fits(means, sds, converged=None):
    """Return fits with these logarithms and standard deviations, `[devices, 5]`."""
    means, sds = np.asarray(means, float), np.asarray(sds, float)
    count = len(means)
    return _device_fits.DeviceFits(
        coefficients=rx.FftLatencyCoefficients(*np.exp(means).T),
        loss=np.zeros(count),
        expected_decrease=np.zeros(count),
        steps=np.zeros(count, int),
        converged=np.ones(count, bool) if converged is None else converged,
        noise_sd=np.zeros(count),
        log_sd=rx.FftLatencyCoefficients(*sds.T),
        measured={},
        covariance=np.zeros((count, 5, 5)),
    )


def logs_of(prior):
    return np.log(jax.tree.leaves(prior.median)), np.array(jax.tree.leaves(prior.log_sd))


def test_what_no_device_measured_keeps_the_prior():
    pooled = rx.pooled_prior(as_fits(np.tile(MEDIAN, (4, 1)), np.full((4, 5), 2.0)), WIDE)
    np.testing.assert_allclose(logs_of(pooled), logs_of(WIDE), rtol=1e-12)


def test_many_well_measured_devices_give_their_own_mean_and_standard_deviation():
    means = machines(5000, sd=0.7) + 1.0
    mean, sd = logs_of(rx.pooled_prior(as_fits(means, np.full(means.shape, 0.01)), WIDE))
    np.testing.assert_allclose(mean, MEDIAN + 1.0, atol=0.05)
    np.testing.assert_allclose(sd, 0.7, atol=0.05)


def test_the_standard_deviation_stays_away_from_zero_and_what_a_fit_leaves_open_adds_to_it():
    alike = np.tile(MEDIAN, (3, 1))
    _, sharp = logs_of(rx.pooled_prior(as_fits(alike, np.zeros((3, 5))), WIDE))
    np.testing.assert_allclose(sharp, 2.0 / np.sqrt(4))
    _, vague = logs_of(rx.pooled_prior(as_fits(alike, np.full((3, 5), 0.5)), WIDE))
    np.testing.assert_allclose(vague**2, sharp**2 + 0.75 * 0.25)


def test_fits_that_did_not_converge_are_left_out_and_none_is_refused():
    means, sds = machines(3), np.full((3, 5), 0.1)
    some = rx.pooled_prior(as_fits(means, sds, np.array([True, False, True])), WIDE)
    np.testing.assert_allclose(logs_of(some), logs_of(rx.pooled_prior(as_fits(means[::2], sds[::2]), WIDE)))
    with pytest.raises(ValueError, match="one at least that converged"):
        rx.pooled_prior(as_fits(means, sds, np.zeros(3, bool)), WIDE)
    with pytest.raises(ValueError, match="one at least, got none"):
        rx.pooled_prior([], WIDE)


def test_fits_one_by_one_and_all_at_once_pool_alike(fitted):
    timings, weights, many = fitted
    alone = [rx.fit_fft_latency(of_device(timings, i), weights=weights[i], min_timings=1) for i in range(4)]
    first = jax.tree.map(lambda leaf: leaf[:4], many)
    np.testing.assert_allclose(
        logs_of(rx.pooled_prior(alone, WIDE)), logs_of(rx.pooled_prior(first, WIDE)), atol=0.02
    )


def test_devices_that_are_alike_teach_others_what_three_timings_do_not():
    alike = machines(DEVICES, sd=0.2) + np.array([1.0, 2.0, -1.0, 1.0, 3.0])
    timings = fft_timings(alike)
    known = jax.tree.map(lambda leaf: leaf[:-5], rx.fit_fft_devices(timings))
    few = np.tile(np.isin(np.arange(COUNT), [0, 5, 10]).astype(float), (DEVICES, 1))
    errors = []
    for prior in (WIDE, rx.pooled_prior(known, WIDE)):
        fits = rx.fit_fft_devices(timings, prior, few, min_timings=3)
        coefficients = jax.tree.map(lambda leaf: leaf[:, None], fits.coefficients)
        predicted = np.asarray(rx.fft_latency_ns(coefficients, BATCH[None], N_FFT[None]))
        is_new = np.arange(DEVICES)[:, None] >= DEVICES - 5
        errors.append(np.mean(np.abs(np.log(predicted / timings.time_ns))[is_new & (few == 0)]))
    assert errors[1] < errors[0] / 2


def test_pooling_does_better_than_none_on_the_published_latencies():
    """Each path left out, 5 of its cells given: every fifteenth choice of them."""
    found = published_latency.few_cells(
        published_latency.read_timings(published_latency.PUBLISHED), stride=15
    )
    alone, pooled = (
        np.mean([path[name]["mean_error"] for path in found["paths"]]) for name in ("alone", "pooled")
    )
    assert pooled < alone
