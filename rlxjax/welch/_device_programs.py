"""The device programs: what the fused and the block path jit."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Complex, Float, Real

from ._host import hann_window, one_sided_weights
from ._params import WelchPeakParams


def segment_spectra(
    signal: Real[Array, "batch length"], params: WelchPeakParams
) -> Complex[Array, "batch n_segments n_bins"]:
    """Return the one-sided spectra of the windowed segments, complex64."""
    signal = signal.astype(jnp.float32)
    starts = range(0, params.n_segments * params.hop, params.hop)
    segments = jnp.stack([signal[:, s : s + params.n_fft] for s in starts], axis=1)
    return jnp.fft.rfft(segments * hann_window(params.n_fft)[None, None])


def fused_peaks(signal: Real[Array, "batch length"], params: WelchPeakParams) -> Float[Array, "batch k 2"]:
    """Return the peaks of rows of samples as one program: only (bin, power) pairs leave it."""
    spectrum = segment_spectra(signal, params)
    power = jnp.square(spectrum.real) + jnp.square(spectrum.imag)
    power = jnp.sum(power, axis=1) * one_sided_weights(params)[None]
    k = min(params.k, params.n_bins)
    # top_k keeps the lower index first among equals, but takes NaN for the largest: a NaN becomes -1.
    ranked, bins = jax.lax.top_k(jnp.where(jnp.isnan(power), -1.0, power), k)
    powers = jnp.where(ranked < 0, jnp.nan, ranked)
    peaks = jnp.stack([bins.astype(jnp.float32), powers], axis=-1)
    return jnp.pad(peaks, ((0, 0), (0, params.k - k), (0, 0)))
