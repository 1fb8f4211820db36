"""The mean power of packed segments against float64, and the gradients of the powers of peaks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import FLOAT32_RTOL
from _welch_reference import noise, reference_power

import rlxjax as rx
from rlxjax.welch._device_programs import bin_order, fused_peaks, mean_power, transform_radix
from rlxjax.welch._rows import rows_of

FAST = rx.WelchPeakParams.fast(n_fft=64, k=5)


@functools.partial(jax.jit, static_argnames=("params", "tile_rows", "radix"))
def mean_power_of(signal, params, tile_rows=1, radix=1):
    return mean_power(rows_of(signal), params, tile_rows, radix)


@pytest.mark.parametrize("n_segments", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("n_fft", [2, 4, 16, 30, 4096])
def test_the_mean_power_of_packed_segments_is_that_of_float64(n_fft, n_segments):
    params = rx.WelchPeakParams(n_fft, n_segments, 1)
    signal = noise(4, params)
    power = reference_power(signal, params)
    error = np.abs(mean_power_of(signal, params) - power)
    assert np.all(error <= FLOAT32_RTOL * power.max(1, keepdims=True))


@pytest.mark.parametrize("n_segments", [1, 2, 3])
@pytest.mark.parametrize("n_fft", [2, 32])
def test_the_mean_power_is_the_same_in_tiles_of_any_rows(n_fft, n_segments):
    params = rx.WelchPeakParams(n_fft, n_segments, 1)
    signal = noise(6, params)
    power = mean_power_of(signal, params)
    assert power.shape == (6, params.n_bins)
    for tile_rows in (2, 3, 6):
        tiled = mean_power_of(signal, params, tile_rows)
        np.testing.assert_allclose(tiled, power, rtol=4e-7, atol=1e-7 * power.max())


@pytest.mark.parametrize("n_segments", [2, 4])
@pytest.mark.parametrize("n_fft", [8, 24, 64, 1000, 4096])
def test_a_transform_taken_apart_has_the_same_powers_in_their_order(n_fft, n_segments):
    params = rx.WelchPeakParams(n_fft, n_segments, 1)
    signal, order = noise(8, params), bin_order(params, 4)
    assert sorted(order) == list(range(params.n_bins))
    power = reference_power(signal, params)
    for bad, kind in ((np.nan, np.isnan), (np.inf, lambda power: ~np.isfinite(power))):
        spoilt = signal.copy()
        spoilt[3, n_fft // 2 + 1] = bad
        found = np.asarray(mean_power_of(spoilt, params, 8, 4))
        assert kind(found[3]).all()
        assert np.isfinite(np.delete(found, 3, axis=0)).all()
    for tile_rows in (1, 8):
        error = np.abs(mean_power_of(signal, params, tile_rows, 4) - power[:, order])
        assert np.all(error <= FLOAT32_RTOL * power.max(1, keepdims=True))


def test_rows_enough_of_long_segments_in_pairs_are_taken_apart_on_cpus():
    fast = rx.WelchPeakParams.fast
    assert transform_radix(2**12, fast(1024, 1), "cpu") == 4
    assert transform_radix(2**12, fast(1024, 1), "gpu") == 1
    for rows, params in [
        (31, fast(1024, 1)),
        (2**12, fast(256, 1)),
        (2**12, fast(1028, 1)),
        (2**12, rx.WelchPeakParams(1024, 3, 1)),
    ]:
        assert transform_radix(rows, params, "cpu") == 1


def test_of_a_transform_taken_apart_vmap_equals_a_loop_and_gradients_are_the_same():
    params = rx.WelchPeakParams.fast(512, 4)
    signals = np.stack([noise(64, params), noise(64, params) + 1])
    assert transform_radix(64, params, jax.default_backend()) == (4 if jax.default_backend() == "cpu" else 1)
    peaks_of = jax.jit(lambda signal: fused_peaks(signal, params, "top_k"))
    for peaks, signal in zip(jax.jit(jax.vmap(peaks_of))(signals), signals, strict=True):
        np.testing.assert_array_equal(peaks[..., 0], peaks_of(signal)[..., 0])
        np.testing.assert_allclose(peaks[..., 1], peaks_of(signal)[..., 1], rtol=1e-5)

    def slope(radix):
        total = lambda signal: jnp.sum(jnp.log(mean_power_of(signal, params, 1, radix)))  # noqa: E731
        return np.asarray(jax.jit(jax.grad(total))(signals[0]))

    np.testing.assert_allclose(slope(4), slope(1), rtol=1e-3, atol=1e-4 * np.abs(slope(1)).max())


@pytest.mark.parametrize("n_segments", [2, 3, 4])
@pytest.mark.parametrize("loud", [0, 1, 2, 3])
@pytest.mark.parametrize("factor", [1e-12, 1e-4, 1e4, 1e12])
def test_a_loud_or_quiet_segment_has_its_share_of_the_mean_power(factor, loud, n_segments):
    params = rx.WelchPeakParams(64, n_segments, 1)
    signal = noise(3, params)
    signal[:, loud * params.hop : loud * params.hop + 64] *= factor
    power = reference_power(signal, params)
    error = np.abs(mean_power_of(signal, params) - power)
    assert np.all(error <= FLOAT32_RTOL * power.max(1, keepdims=True))


@pytest.mark.parametrize("n_segments", [1, 2, 3])
def test_the_mean_power_overflows_no_sooner_than_the_sum_over_segments(n_segments):
    params = rx.WelchPeakParams(64, n_segments, 1)
    shape = np.cos(2 * np.pi * 10 * np.arange(params.frame_len) / 64)[None].astype(np.float32)
    per_square = reference_power(shape, params).max()
    highest = np.finfo(np.float32).max
    largest_sum = 0.999 * highest / max(1, n_segments / 2)
    signal = shape * np.float32(np.sqrt(largest_sum / per_square))
    power = mean_power_of(signal, params)
    assert np.all(np.isfinite(power))
    np.testing.assert_allclose(power.max(), largest_sum, rtol=1e-4)
    assert np.isinf(mean_power_of(signal * np.float32(1.1 * np.sqrt(max(1, n_segments / 2))), params)[0, 10])


@pytest.mark.parametrize("selection", ["maxima", "top_k"])
@pytest.mark.parametrize("n_segments", [1, 3])
def test_the_gradient_is_the_same_however_peaks_are_selected(selection, n_segments):
    params = rx.WelchPeakParams(32, n_segments, k=3)
    signal, direction = noise(2, params), noise(2, params, seed=1)
    total = jax.jit(lambda x: jnp.sum(rx.welch_peaks(x, params, selection=selection)[..., 1]))
    # A quadratic form while the bins stay, so a central difference is exact up to rounding.
    power = [reference_power(signal + sign * 2.0**-10 * direction.astype(float), params) for sign in (1, -1)]
    largest = np.argsort(-reference_power(signal, params), axis=1)[:, :3]
    ends = [np.take_along_axis(each, largest, 1).sum() for each in power]
    slope = jnp.sum(jax.grad(total)(jnp.asarray(signal)) * direction)
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) * 2.0**9, rtol=10 * FLOAT32_RTOL)


@pytest.mark.parametrize("n_segments", [1, 2])
def test_gradient_of_powers_is_that_of_float64_finite_differences(n_segments):
    params = rx.WelchPeakParams(32, n_segments, k=2)
    time = np.arange(params.frame_len) / 32
    signal = 2 * np.cos(2 * np.pi * 5 * time) + np.cos(2 * np.pi * 11 * time)

    def two_powers(rows):
        return np.sort(reference_power(rows, params))[:, -2:].sum(1)

    steps = 1e-4 * np.eye(params.frame_len)
    expected = (two_powers(signal + steps) - two_powers(signal - steps)) / 2e-4
    gradient = jax.grad(lambda x: rx.welch_peaks(x, params)[..., 1].sum())(jnp.asarray(signal))
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=FLOAT32_RTOL * np.abs(expected).max())


def test_gradient_at_silence_is_zero():
    gradient = jax.grad(lambda x: rx.welch_peaks(x, FAST)[..., 1].sum())(jnp.zeros((2, FAST.frame_len)))
    np.testing.assert_array_equal(gradient, 0)
