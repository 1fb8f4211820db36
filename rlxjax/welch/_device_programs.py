"""The device programs: what the fused and the block path jit."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Complex, Float, Int, Real

from rlxjax._one_loop import in_one_loop

from ._host import hann_window, one_sided_weights
from ._params import WelchPeakParams
from ._selection import TILE_ROWS, default_selection, from_tiles, selected_peaks, tile_rows, to_tiles

#: Samples that a chunk of rows transforms at a time: on CPUs its arrays stay in cache, elsewhere memory
#: bounds them.
CHUNK_SAMPLES = {"cpu": 2**19, "other": 2**26}
#: Rows of a chunk are a multiple of this: the selection works in whole tiles, and each chunk of an aligned
#: signal is aligned.
CHUNK_ROWS_MULTIPLE = TILE_ROWS
#: Into how many transforms a CPU's is taken apart, from so many samples of a segment and of all rows on.
SPLIT_RADIX, LEAST_SPLIT_N_FFT, LEAST_SPLIT_SAMPLES = 4, 512, 2**16


def padding_step(batch: int) -> int:
    """Return what padding makes a batch a multiple of: four sizes an octave."""
    return 1 << max(0, (batch - 1).bit_length() - 3) if batch > 0 else 1


def chunk_rows(params: WelchPeakParams, platform: str) -> int:
    """Return the rows that a device transforms at a time: they, not the batch, decide what memory it takes.

    They are a size that padding leaves as it is.

    Examples:
        >>> chunk_rows(WelchPeakParams.fast(256, 16), "cpu")
        1024
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


def transform_radix(rows: int, params: WelchPeakParams, platform: str) -> int:
    """Return into how many transforms that of a pair of segments is taken apart.

    XLA's transform on CPUs takes 8 rows at a time, and less for a sample if these fit a core's first cache.
    Of few rows the programs that are started in addition cost more.

    Examples:
        >>> [transform_radix(1024, WelchPeakParams.fast(n_fft, 16), "cpu") for n_fft in (256, 1024)]
        [1, 4]
    """
    is_long = params.n_fft >= LEAST_SPLIT_N_FFT and params.n_fft % (2 * SPLIT_RADIX) == 0
    has_rows = rows * params.n_segments * params.n_fft >= LEAST_SPLIT_SAMPLES
    is_split = platform == "cpu" and is_long and params.n_segments % 2 == 0 and has_rows
    return SPLIT_RADIX if is_split else 1


def bin_order(params: WelchPeakParams, radix: int) -> np.ndarray | None:
    """Return the bin at each place of `mean_power`, None where that is the place itself."""
    if radix == 1:
        return None
    between = np.arange(1, params.hop)
    return np.concatenate([[0], between[np.argsort(between % radix, kind="stable")], [params.hop]])


def mean_power(
    signal: Real[Array, "batch length"], params: WelchPeakParams, tile_rows: int = 1, radix: int = 1
) -> Float[Array, "batch n_bins"]:
    """Return the mean one-sided power of the windowed segments, the bins in their order or in `bin_order`.

    Two real segments are one complex transform: `|X1[b]|^2 + |X2[b]|^2 = (|Z[b]|^2 + |Z[n-b]|^2) / 2`
    with `Z` that of `x1 + i x2`. An odd one out is transformed alone.

    Args:
        signal: each row's prefix is used.
        params: the parameters.
        tile_rows: rows of the tiles in which powers are computed.
        radix: as of `transform_radix`; 1 for an odd number of segments.
    """
    signal = signal.astype(jnp.float32)
    window, segments = hann_window(params.n_fft), _segments(signal, params)
    # DC, the bins between by what they leave when divided by the radix, Nyquist
    parts: list[Any] = [0] * (radix + 2)
    if pairs := list(zip(segments[::2], segments[1::2], strict=False)):
        half = window * np.float32(0.5)  # so that a pair's sum is its mean, and overflows no sooner
        by_pair = [taken_apart(one, two, half, radix) for one, two in pairs]
        transforms = [jnp.fft.fft(jnp.stack(samples, axis=1)) for samples in zip(*by_pair, strict=True)]
        powers = [to_tiles(jnp.sum(_squared_magnitude(each), axis=1), tile_rows) for each in transforms]
        nyquist = params.hop // radix
        parts = [4.0 * powers[0][:, :1], 2.0 * (powers[0][:, 1:nyquist] + powers[0][:, :nyquist:-1])]
        for rest in range(1, radix):  # the mirrored bin leaves -rest
            parts.append(2.0 * (powers[rest][:, :nyquist] + powers[-rest][:, : nyquist - 1 : -1]))
        parts.append(4.0 * powers[0][:, nyquist : nyquist + 1])
    if params.n_segments % 2:
        power = to_tiles(_squared_magnitude(jnp.fft.rfft(segments[-1] * window[None])), tile_rows)
        ends = (np.s_[:1], np.s_[1 : params.hop], np.s_[params.hop :])
        parts = [part + power[:, each] for part, each in zip(parts, ends, strict=True)]
    at_dc, between, at_nyquist = one_sided_weights(params)[[0, 1, -1]]
    weights = [at_dc, *[between] * radix, at_nyquist]
    # Joined last: XLA computes a concatenation once, but would compute a product anew for all who use it.
    return from_tiles(
        jnp.concatenate([part * weight for part, weight in zip(parts, weights, strict=True)], axis=1)
    )


def taken_apart(
    one: Float[Array, "batch n_fft"], two: Float[Array, "batch n_fft"], window: np.ndarray, radix: int
) -> Sequence[Complex[Array, "batch n"]]:
    """Return samples whose transforms together are that of windowed `x = one + i two`: the r-th `Z[4 q + r]`.

    A step of decimation in frequency, in one loop with the window:
    `y_r[j] = w^(r j) sum_m (-i)^(r m) x[j + m n/4]` with `w = exp(-2 pi i / n)`.
    """
    if radix == 1:
        return [jnp.asarray(lax.complex(one * window[None], two * window[None]))]
    n_fft, n = len(window), len(window) // radix

    def step(_: tuple, quarters: list[list[Array]]) -> list[Any]:
        def by_row(factors: np.ndarray) -> np.ndarray:
            return factors.reshape(1, n, *[1] * (quarters[0][0].ndim - 2))

        windows = [by_row(part) for part in np.split(window, radix)]
        x = [lax.complex(a * part, b * part) for a, b, part in zip(*quarters, windows, strict=True)]
        twiddles = np.exp(-2j * np.pi / n_fft * np.outer(np.arange(radix), np.arange(n))).astype(np.complex64)
        even, odd, even_less, odd_less = x[0] + x[2], x[1] + x[3], x[0] - x[2], x[1] - x[3]
        turned = lax.complex(odd_less.imag, -odd_less.real)
        sums = [even + odd, even_less + turned, even - odd, even_less - turned]
        return sums[:1] + [by_row(each) * y for each, y in zip(twiddles[1:], sums[1:], strict=True)]

    return in_one_loop(step)((), [jnp.split(each, radix, axis=1) for each in (one, two)])


def fused_peaks(
    signal: Real[Array, "batch length"], params: WelchPeakParams, selection: str | None = None
) -> Float[Array, "batch k 2"]:
    """Return the peaks of rows of samples as one program: only (bin, power) pairs leave it.

    Rows beyond a chunk are computed `in_chunks`, one after the other.

    Args:
        signal: `[batch, length]`, real; each row's prefix is used.
        params: the parameters.
        selection: "maxima" or "top_k"; by default the one that is faster on JAX's default platform.
    """
    if selection is None:
        selection = default_selection(signal.shape[0], params.n_bins, jax.default_backend())
    return in_chunks(functools.partial(_peaks, params=params, selection=selection), signal, params)


def in_chunks(
    peaks_of: Callable[[Real[Array, "rows length"]], Float[Array, "rows k 2"]],
    signal: Real[Array, "batch length"],
    params: WelchPeakParams,
) -> Float[Array, "batch k 2"]:
    """Return the peaks that a function finds in rows, in one chunk after the other and then in what is left.

    The loop is over where chunks start: one over the chunks themselves takes them as an array of their own,
    which XLA writes out if rows are left.
    """
    batch, rows = signal.shape[0], chunk_rows(params, jax.default_backend())
    if batch <= rows:
        return peaks_of(signal)
    n_chunks, rest = divmod(batch, rows)

    def no_peaks(_: Array) -> Float[Array, "rows k 2"]:
        return jnp.zeros((rows, params.k, 2), jnp.float32)

    def peaks_from(start: Int[Array, ""]) -> Float[Array, "rows k 2"]:
        chunk = lax.dynamic_slice(signal, (start, 0), (rows, params.frame_len))
        # What a branch is given is written out first. Loops that cut the chunk themselves read its start for
        # every sample, and XLA's CPU compiler makes no vector code of that.
        return lax.cond(start >= 0, peaks_of, no_peaks, chunk)

    peaks = lax.map(peaks_from, rows * jnp.arange(n_chunks)).reshape(-1, params.k, 2)
    return jnp.concatenate([peaks, peaks_of(signal[-rest:])]) if rest else peaks


def _peaks(signal, params: WelchPeakParams, selection: str) -> Float[Array, "batch k 2"]:
    rows = tile_rows(signal.shape[0]) if selection == "maxima" else 1
    radix = transform_radix(signal.shape[0], params, jax.default_backend())
    power = mean_power(signal, params, rows, radix)
    return selected_peaks(power, params.k, selection, bin_order(params, radix))


def _segments(signal: Float[Array, "batch length"], params: WelchPeakParams) -> list[Array]:
    starts = range(0, params.n_segments * params.hop, params.hop)
    return [signal[:, start : start + params.n_fft] for start in starts]


def _squared_magnitude(spectrum: Complex[Array, "*batch"]) -> Float[Array, "*batch"]:
    return jnp.square(spectrum.real) + jnp.square(spectrum.imag)
