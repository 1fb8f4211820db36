"""Whether a contender's peaks are right: against float64 NumPy, by the tolerance below."""

from typing import Any

import numpy as np

from rlxjax import WelchPeakParams

#: Of a row's largest power.
TOLERANCE = 1e-5
#: Rows that are compared: the first, the last and some between.
MOST_ROWS = 128


def disagreement(result: Any, signal: np.ndarray, params: WelchPeakParams) -> str | None:
    """Return what is wrong with the peaks of a signal, a phrase, or None.

    Powers are within `TOLERANCE` of the row's largest power from the reference's of the same rank, and so is
    the reference's power at each bin: bins are the same except among powers closer than that.

    Args:
        result: `[batch, k, 2]` of (bin, power), or bins and powers, of any array type; slots beyond the bins
            may be left out, and are zeros otherwise.
        signal: `[batch, frame_len]`.
        params: the parameters.
    """
    batch, largest = len(signal), min(params.k, params.n_bins)
    rows = np.unique(np.linspace(0, batch - 1, min(batch, MOST_ROWS)).astype(np.intp))
    bins, powers = map(_on_host, result) if isinstance(result, tuple) else np.moveaxis(_on_host(result), -1, 0)
    if bins.shape != powers.shape or bins.shape not in ((batch, largest), (batch, params.k)):
        return f"expected peaks of shape {(batch, params.k)}, got {bins.shape} and {powers.shape}"
    bins, powers = bins[rows].astype(np.float64), powers[rows].astype(np.float64)
    if np.any(bins[:, largest:]) or np.any(powers[:, largest:]):
        return "slots beyond the bins are not zeros"
    bins, powers = bins[:, :largest], powers[:, :largest]
    if not np.all((bins >= 0) & (bins < params.n_bins) & (bins == np.floor(bins))):
        return "bins are not whole numbers of the spectrum's range"
    if np.any(np.diff(np.sort(bins, axis=1), axis=1) == 0):
        return "a bin comes twice in a row"
    expected = reference_power(signal[rows], params)
    scale = expected.max(axis=1, keepdims=True)
    ranked = -np.sort(-expected, axis=1)[:, :largest]
    at_bins = np.take_along_axis(expected, bins.astype(np.intp), axis=1)
    errors = np.maximum(np.abs(powers - ranked), np.abs(at_bins - ranked)) / np.where(scale > 0, scale, 1.0)
    if not np.all(np.isfinite(errors)):
        return "a power is not finite"
    if np.any(errors > TOLERANCE):
        return f"a power is off by {errors.max():.2g} of its row's largest, more than {TOLERANCE:g}"
    return None


def reference_power(signal: np.ndarray, params: WelchPeakParams) -> np.ndarray:
    """Return the mean one-sided power in float64 `[batch, n_bins]`."""
    window = 0.5 * (1.0 - np.cos(2.0 * np.pi * np.arange(params.n_fft) / (params.n_fft - 1)))
    total = np.zeros((len(signal), params.n_bins))
    for segment in range(params.n_segments):
        start = segment * params.hop
        spectrum = np.fft.rfft(signal[:, start : start + params.n_fft].astype(np.float64) * window)
        total += np.square(spectrum.real) + np.square(spectrum.imag)
    total[:, 1:-1] *= 2.0
    return total / params.n_segments


def _on_host(array: Any) -> np.ndarray:
    if hasattr(array, "cpu"):  # torch
        return array.cpu().numpy()
    return array.get() if hasattr(array, "get") else np.asarray(array)  # cupy, or what NumPy knows
