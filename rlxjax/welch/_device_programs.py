"""The device programs: what the fused and the block path jit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Complex, Float, Real

from ._host import hann_window, one_sided_weights
from ._params import WelchPeakParams
from ._selection import TILE_ROWS, default_selection, from_tiles, selected_peaks, tile_rows, to_tiles

#: Samples that a chunk of rows transforms at a time: on CPUs its arrays stay in cache, elsewhere memory
#: bounds them.
CHUNK_SAMPLES = {"cpu": 2**20, "other": 2**26}
#: Rows of a chunk are a multiple of this: the selection works in whole tiles, and each chunk of an aligned
#: signal is aligned.
CHUNK_ROWS_MULTIPLE = TILE_ROWS


def padding_step(batch: int) -> int:
    """Return what padding makes a batch a multiple of: four sizes an octave."""
    return 1 << max(0, (batch - 1).bit_length() - 3) if batch > 0 else 1


def chunk_rows(params: WelchPeakParams, platform: str) -> int:
    """Return the rows that a device transforms at a time: they, not the batch, decide what memory it takes.

    They are a size that padding leaves as it is.

    Examples:
        >>> chunk_rows(WelchPeakParams.fast(256, 16), "cpu")
        2048
    """
    samples = CHUNK_SAMPLES.get(platform, CHUNK_SAMPLES["other"])
    rows = max(CHUNK_ROWS_MULTIPLE, samples // (params.n_segments * params.n_fft))
    step = max(CHUNK_ROWS_MULTIPLE, padding_step(rows))
    return rows // step * step


def segment_spectra(
    signal: Real[Array, "batch length"], params: WelchPeakParams
) -> Complex[Array, "batch n_segments n_bins"]:
    """Return the one-sided spectra of the windowed segments, complex64."""
    signal = signal.astype(jnp.float32)
    window = hann_window(params.n_fft)[None]
    return jnp.fft.rfft(jnp.stack([segment * window for segment in _segments(signal, params)], axis=1))


def mean_power(
    signal: Real[Array, "batch length"], params: WelchPeakParams, tile_rows: int = 1
) -> Float[Array, "batch n_bins"]:
    """Return the mean one-sided power of the windowed segments.

    Two real segments are one complex transform: `|X1[b]|^2 + |X2[b]|^2 = (|Z[b]|^2 + |Z[n-b]|^2) / 2`
    with `Z` that of `x1 + i x2`. An odd one out is transformed alone.

    Args:
        signal: each row's prefix is used.
        params: the parameters.
        tile_rows: rows of the tiles in which powers are computed.
    """
    signal = signal.astype(jnp.float32)
    hop, window, segments = params.hop, hann_window(params.n_fft)[None], _segments(signal, params)
    # DC, the bins between, Nyquist
    parts: list[Any] = [0, 0, 0]
    if pairs := list(zip(segments[::2], segments[1::2], strict=False)):
        half = window * np.float32(0.5)  # so that a pair's sum is its mean, and overflows no sooner
        packed = jnp.stack([lax.complex(one * half, two * half) for one, two in pairs], axis=1)
        power = to_tiles(jnp.sum(_squared_magnitude(jnp.fft.fft(packed)), axis=1), tile_rows)
        mirrored = power[:, :hop:-1]
        parts = [4.0 * power[:, :1], 2.0 * (power[:, 1:hop] + mirrored), 4.0 * power[:, hop : hop + 1]]
    if params.n_segments % 2:
        power = to_tiles(_squared_magnitude(jnp.fft.rfft(segments[-1] * window)), tile_rows)
        parts = [
            part + power[:, each]
            for part, each in zip(parts, (np.s_[:1], np.s_[1:hop], np.s_[hop:]), strict=True)
        ]
    weights = np.split(one_sided_weights(params)[None, :, None], [1, hop], axis=1)
    # Joined last: XLA computes a concatenation once, but would compute a product anew for all who use it.
    return from_tiles(
        jnp.concatenate([part * weight for part, weight in zip(parts, weights, strict=True)], axis=1)
    )


def fused_peaks(
    signal: Real[Array, "batch length"], params: WelchPeakParams, selection: str | None = None
) -> Float[Array, "batch k 2"]:
    """Return the peaks of rows of samples as one program: only (bin, power) pairs leave it.

    Rows beyond a chunk are computed chunk by chunk.

    Args:
        signal: `[batch, length]`, real; each row's prefix is used.
        params: the parameters.
        selection: "maxima" or "top_k"; by default the one that is faster on JAX's default platform.
    """
    platform = jax.default_backend()
    batch, rows = signal.shape[0], chunk_rows(params, platform)
    if selection is None:
        selection = default_selection(batch, params.n_bins, platform)
    if batch <= rows:
        return _peaks(signal, params, selection)
    n_chunks, rest = divmod(batch, rows)
    chunks = signal[: n_chunks * rows].reshape(n_chunks, rows, -1)
    peaks = lax.map(lambda chunk: _peaks(chunk, params, selection), chunks).reshape(-1, params.k, 2)
    return jnp.concatenate([peaks, _peaks(signal[-rest:], params, selection)]) if rest else peaks


def _peaks(signal, params: WelchPeakParams, selection: str) -> Float[Array, "batch k 2"]:
    rows = tile_rows(signal.shape[0]) if selection == "maxima" else 1
    return selected_peaks(mean_power(signal, params, rows), params.k, selection)


def _segments(signal: Float[Array, "batch length"], params: WelchPeakParams) -> list[Array]:
    starts = range(0, params.n_segments * params.hop, params.hop)
    return [signal[:, start : start + params.n_fft] for start in starts]


def _squared_magnitude(spectrum: Complex[Array, "*batch"]) -> Float[Array, "*batch"]:
    return jnp.square(spectrum.real) + jnp.square(spectrum.imag)
