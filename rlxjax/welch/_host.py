"""The host path: NumPy only, no device involved."""

import functools

import numpy as np
from numpy.typing import NDArray

from rlxjax._chunks import for_each_chunk

from ._params import WelchPeakParams

#: Samples that one chunk of rows transforms at a time, so that its arrays stay in a core's cache.
CHUNK_SAMPLES = 2**17


@functools.cache
def hann_window(n_fft: int) -> np.ndarray:
    """Return the symmetric Hann window `0.5 * (1 - cos(2*pi*i / (n_fft - 1)))`, float32 `[n_fft]`.

    Examples:
        >>> hann_window(4).round(2).tolist()
        [0.0, 0.75, 0.75, 0.0]
    """
    window = 0.5 * (1.0 - np.cos(2.0 * np.pi * np.arange(n_fft) / (n_fft - 1)))
    window = window.astype(np.float32)
    window.flags.writeable = False
    return window


@functools.cache
def one_sided_weights(params: WelchPeakParams) -> np.ndarray:
    """Return the weight of `|X|^2` in the mean one-sided power, float32 `[n_bins]`.

    `1 / n_segments` at DC and Nyquist, twice that between.
    """
    weights = np.full(params.n_bins, 2.0)
    weights[[0, -1]] = 1.0
    weights = (weights / params.n_segments).astype(np.float32)
    weights.flags.writeable = False
    return weights


def host_chunk_rows(params: WelchPeakParams) -> int:
    """Return the rows of a chunk on the host."""
    return max(1, CHUNK_SAMPLES // (params.n_segments * params.n_fft))


def host_peaks(signal: np.ndarray, params: WelchPeakParams) -> np.ndarray:
    """Return the peaks of rows of samples.

    Args:
        signal: `[batch, length]`, real, `length >= frame_len`; each row's prefix is used.
        params: the parameters.

    Returns:
        float32 `[batch, k, 2]` of (bin, power).
    """
    peaks = np.zeros((signal.shape[0], params.k, 2), np.float32)
    window = hann_window(params.n_fft)

    def run(start: int, stop: int) -> None:
        with np.errstate(all="ignore"):  # as on a device: inf and NaN are results
            rows = signal[start:stop, : params.frame_len].astype(np.float32, copy=False)
            segments = np.lib.stride_tricks.sliding_window_view(rows, params.n_fft, axis=1)
            spectrum = np.fft.rfft(segments[:, :: params.hop] * window)
            select_peaks(mean_power(spectrum, params), params, out=peaks[start:stop])

    for_each_chunk(run, signal.shape[0], host_chunk_rows(params))
    return peaks


def spectrum_peaks(spectrum: NDArray[np.complexfloating], params: WelchPeakParams) -> np.ndarray:
    """Return the peaks of one-sided spectra, complex64 `[batch, n_segments, n_bins]`."""
    peaks = np.zeros((spectrum.shape[0], params.k, 2), np.float32)

    def run(start: int, stop: int) -> None:
        select_peaks(mean_power(spectrum[start:stop], params), params, out=peaks[start:stop])

    for_each_chunk(run, spectrum.shape[0], host_chunk_rows(params))
    return peaks


def mean_power(spectrum: NDArray[np.complexfloating], params: WelchPeakParams) -> np.ndarray:
    """Return the mean one-sided power `[batch, n_bins]` of `[batch, n_segments, n_bins]`."""
    with np.errstate(all="ignore"):
        power = np.square(spectrum.real)
        power += np.square(spectrum.imag)
        total = power[:, 0] if params.n_segments == 1 else power.sum(axis=1)
        total *= one_sided_weights(params)
    return total


def select_peaks(power: np.ndarray, params: WelchPeakParams, out: np.ndarray) -> None:
    """Write the top k bins of each row of powers, descending, into `out` `[batch, k, 2]`.

    Partial selection on one integer a bin: the bits of a non-negative float32 order as the float does,
    so `power bits * 2**32 + (n_bins - 1 - bin)` puts the larger power first and, among equals, the
    lower bin. A NaN is given the bits -1, below all others, which are those of a NaN again.
    """
    n_bins, k = params.n_bins, min(params.k, params.n_bins)
    bits = power.view(np.int32).astype(np.int64)
    bits[np.isnan(power)] = -1
    keys = (bits << 32) + np.arange(n_bins - 1, -1, -1)
    if k < n_bins:
        keys = np.partition(keys, n_bins - k, axis=1)[:, n_bins - k :]
    keys = np.sort(keys, axis=1)[:, ::-1]
    out[:, :k, 0] = n_bins - 1 - (keys & 0xFFFFFFFF)
    out[:, :k, 1] = (keys >> 32).astype(np.int32).view(np.float32)
