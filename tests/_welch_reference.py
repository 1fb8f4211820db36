"""Signals for Welch peaks, and what float64 makes of them."""

import numpy as np
from _tolerances import FLOAT32_RTOL


def noise(batch, params, seed=0):
    return np.random.default_rng(seed).standard_normal((batch, params.frame_len)).astype(np.float32)


def reference_power(signal, params):
    """Return the mean one-sided power `[batch, n_bins]` in float64."""
    window = 0.5 * (1 - np.cos(2 * np.pi * np.arange(params.n_fft) / (params.n_fft - 1)))
    starts = np.arange(params.n_segments) * params.hop
    segments = np.stack([signal[:, s : s + params.n_fft] for s in starts], 1).astype(np.float64)
    power = np.abs(np.fft.rfft(segments * window)) ** 2
    power[..., 1:-1] *= 2
    return power.mean(1)


def assert_peaks_of(power, peaks, params):
    k = min(params.k, params.n_bins)
    assert peaks.shape == (len(power), params.k, 2)
    assert peaks.dtype == np.float32
    np.testing.assert_array_equal(peaks[:, k:], 0.0)
    bins, powers = peaks[:, :k, 0].astype(int), peaks[:, :k, 1]
    assert all(len(set(row)) == k for row in bins)
    tolerance = FLOAT32_RTOL * power.max(1, keepdims=True)
    true = np.take_along_axis(power, bins, 1)
    best = -np.sort(-power, axis=1)[:, :k]
    assert np.all(np.abs(powers - true) <= tolerance)
    assert np.all(np.abs(true - best) <= tolerance), "other bins than those of the largest powers"
    assert np.all(np.diff(powers) <= 0)
