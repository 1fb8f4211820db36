"""The mean power of packed segments against float64, and the gradients of the powers of peaks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import FLOAT32_RTOL
from _welch_reference import noise, reference_power

import rlxjax as rx
from rlxjax.welch import mean_power

FAST = rx.WelchPeakParams.fast(n_fft=64, k=5)


mean_power_of = jax.jit(mean_power, static_argnames="params")


@pytest.mark.parametrize("n_segments", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("n_fft", [2, 4, 16, 30, 4096])
def test_the_mean_power_of_packed_segments_is_that_of_float64(n_fft, n_segments):
    params = rx.WelchPeakParams(n_fft, n_segments, 1)
    signal = noise(4, params)
    power = reference_power(signal, params)
    error = np.abs(np.asarray(mean_power_of(signal, params)) - power)
    assert np.all(error <= FLOAT32_RTOL * power.max(1, keepdims=True))


@pytest.mark.parametrize("n_segments", [1, 2, 3])
def test_the_power_of_some_rows_is_that_of_these_rows(n_segments):
    params = rx.WelchPeakParams(32, n_segments, 1)
    signal = noise(6, params)
    found = jax.jit(lambda start: mean_power(signal, params, start, 3))(2)
    np.testing.assert_allclose(found, mean_power_of(signal, params)[2:5], rtol=FLOAT32_RTOL)


@pytest.mark.parametrize("n_segments", [2, 3, 4])
@pytest.mark.parametrize("loud", [0, 1, 2, 3])
@pytest.mark.parametrize("factor", [1e-12, 1e-4, 1e4, 1e12])
def test_a_loud_or_quiet_segment_has_its_share_of_the_mean_power(factor, loud, n_segments):
    params = rx.WelchPeakParams(64, n_segments, 1)
    signal = noise(3, params)
    signal[:, loud * params.hop : loud * params.hop + 64] *= factor
    power = reference_power(signal, params)
    error = np.abs(np.asarray(mean_power_of(signal, params)) - power)
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


@pytest.mark.parametrize("strategy", ["fused_maxima", "fused_top_k"])
@pytest.mark.parametrize("n_segments", [1, 3])
def test_the_gradient_is_the_same_however_peaks_are_selected(strategy, n_segments):
    params = rx.WelchPeakParams(32, n_segments, k=3)
    signal, direction = noise(2, params), noise(2, params, seed=1)
    total = jax.jit(lambda x: jnp.sum(rx.welch_peaks(x, params, strategy)[..., 1]))
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
