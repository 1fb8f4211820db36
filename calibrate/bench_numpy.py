"""The peers that work on NumPy arrays: scipy, pyfftw and mkl_fft, each with NumPy's partial selection."""

import importlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rlxjax import WelchPeakParams

from .bench_c import cores

#: Samples that are transformed at a time, so that the arrays stay in a cache: the fastest of 2**14 to 2**20.
CHUNK_SAMPLES = 2**17

Peaks = tuple[np.ndarray, np.ndarray]


def welch_window(n_fft: int) -> np.ndarray:
    """Return the symmetric Hann window, float32."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n_fft) / (n_fft - 1))).astype(np.float32)


def power_weights(params: WelchPeakParams) -> np.ndarray:
    """Return the weight of `|X|^2` in the mean over segments of the one-sided power, float32."""
    weights = np.full(params.n_bins, 2.0 / params.n_segments, np.float32)
    weights[[0, -1]] /= 2.0
    return weights


def peaks_kept(params: WelchPeakParams) -> int:
    """Return the peaks that there are bins for."""
    return min(params.k, params.n_bins)


def chunk_rows(params: WelchPeakParams, batch: int, samples: int = CHUNK_SAMPLES) -> int:
    """Return the rows of a chunk of so many samples."""
    return min(batch, max(1, samples // (params.n_segments * params.n_fft)))


def welch_arguments(params: WelchPeakParams, window) -> dict:
    """Return the arguments of scipy's and JAX's `welch`, which give the power over `sum(window)^2`."""
    return {
        "window": window,
        "nperseg": params.n_fft,
        "noverlap": params.n_fft - params.hop,
        "detrend": False,
        "scaling": "spectrum",
    }


def scipy_run(signal: np.ndarray, params: WelchPeakParams) -> Callable[[], Peaks]:
    """Return a run of `scipy.signal.welch`."""
    from scipy.signal import welch

    window = welch_window(params.n_fft)
    arguments, scale = welch_arguments(params, window), window.sum() ** 2

    def run() -> Peaks:
        power = welch(signal, **arguments)[1]
        power *= scale
        return _top_k(power, params)

    return run


def pyfftw_run(signal: np.ndarray, params: WelchPeakParams) -> Callable[[], Peaks]:
    """Return a run of a planned FFTW of many rows on all cores."""
    pyfftw = importlib.import_module("pyfftw")
    shape = chunk_rows(params, len(signal)), params.n_segments
    windowed = pyfftw.empty_aligned((*shape, params.n_fft), np.float32)
    spectrum = pyfftw.empty_aligned((*shape, params.n_bins), np.complex64)
    plan = pyfftw.FFTW(windowed, spectrum, axes=(2,), flags=("FFTW_MEASURE",), threads=cores())

    def transform(count: int) -> NDArray[np.complex64]:
        plan()  # all rows, of which the last chunk has fewer
        return spectrum[:count]

    return _in_chunks(signal, params, windowed, transform)


def mkl_fft_run(signal: np.ndarray, params: WelchPeakParams) -> Callable[[], Peaks]:
    """Return a run of MKL through its NumPy interface."""
    rfft = importlib.import_module("mkl_fft.interfaces.numpy_fft").rfft
    windowed = np.zeros((chunk_rows(params, len(signal)), params.n_segments, params.n_fft), np.float32)
    return _in_chunks(signal, params, windowed, lambda count: rfft(windowed[:count]))


def _in_chunks(
    signal: np.ndarray, params: WelchPeakParams, windowed: np.ndarray, transform: Callable[[int], NDArray[np.complex64]]
) -> Callable[[], Peaks]:
    """Return a run that writes chunks of windowed segments; `transform` gives the spectra of so many rows."""
    window, weights, batch = welch_window(params.n_fft), power_weights(params), len(signal)
    view = np.lib.stride_tricks.sliding_window_view(signal[:, : params.frame_len], params.n_fft, axis=1)
    segments, step, k = view[:, :: params.hop], len(windowed), peaks_kept(params)

    def run() -> Peaks:
        bins, powers = np.empty((batch, k), np.intp), np.empty((batch, k), np.float32)
        for start in range(0, batch, step):
            chunk = segments[start : start + step]
            np.multiply(chunk, window, out=windowed[: len(chunk)])
            spectrum = transform(len(chunk))
            power = np.square(spectrum.real)
            power += np.square(spectrum.imag)
            power = power.sum(1) * weights
            bins[start : start + step], powers[start : start + step] = _top_k(power, params)
        return bins, powers

    return run


def _top_k(power: np.ndarray, params: WelchPeakParams) -> Peaks:
    first = params.n_bins - peaks_kept(params)
    bins = np.argpartition(power, first, axis=1)[:, first:] if first else np.argsort(power, axis=1)
    values = np.take_along_axis(power, bins, axis=1)
    order = np.argsort(-values, axis=1)
    return np.take_along_axis(bins, order, axis=1), np.take_along_axis(values, order, axis=1)
