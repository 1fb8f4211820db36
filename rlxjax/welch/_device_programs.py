"""The device programs: what the fused and the block path jit."""

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
from ._rows import Line, Rows, rows_of
from ._selection import (
    TILE_ROWS,
    default_selection,
    divisor_near,
    from_tiles,
    selected_peaks,
    tile_rows,
    to_tiles,
)

#: Most samples of a chunk of rows: on CPUs what a processor is given at a time, elsewhere what memory holds.
CHUNK_SAMPLES = {"cpu": 2**19, "other": 2**26}
#: Most samples that the fused path's program on a CPU transforms at a time, and any that traced code runs
#: there: arrays of a piece stay in a core's second cache.
PIECE_SAMPLES = 2**17
#: Rows of a chunk are a multiple of this: the selection works in whole tiles, and each chunk of an aligned
#: signal is aligned.
CHUNK_ROWS_MULTIPLE = TILE_ROWS
#: Into how many transforms a CPU's is taken apart, from so many samples of a segment and of all rows on.
SPLIT_RADIX, LEAST_SPLIT_N_FFT, LEAST_SPLIT_SAMPLES = 4, 512, 2**16


def padding_step(batch: int) -> int:
    """Return what padding makes a batch a multiple of: four sizes an octave."""
    return 1 << max(0, (batch - 1).bit_length() - 3) if batch > 0 else 1


def chunk_rows(params: WelchPeakParams, platform: str) -> int:
    """Return the rows of a chunk: they, not the batch, decide what memory a device takes.

    They are a size that padding leaves as it is.

    Examples:
        >>> chunk_rows(WelchPeakParams.fast(256, 16), "cpu")
        1024
    """
    samples = CHUNK_SAMPLES.get(platform, CHUNK_SAMPLES["other"])
    rows = max(CHUNK_ROWS_MULTIPLE, samples // (params.n_segments * params.n_fft))
    step = max(CHUNK_ROWS_MULTIPLE, padding_step(rows))
    return rows // step * step


def piece_rows(batch: int, params: WelchPeakParams, platform: str) -> int:
    """Return the rows that a program transforms at a time, a piece; on a CPU none are left, if that can be.

    Examples:
        >>> [piece_rows(batch, WelchPeakParams.fast(4096, 16), "cpu") for batch in (16, 24, 56, 57)]
        [16, 8, 8, 16]
    """
    if platform != "cpu":
        return chunk_rows(params, platform)
    most = PIECE_SAMPLES // (params.n_segments * params.n_fft)
    if batch <= most:
        return batch
    most_tiles, (n_tiles, rest) = max(1, most // TILE_ROWS), divmod(batch, TILE_ROWS)
    tiles = None if rest else divisor_near(n_tiles, most_tiles)
    return TILE_ROWS * (tiles or most_tiles)


def segment_spectra(
    signal: Real[Array, "batch length"] | Line, params: WelchPeakParams
) -> Complex[Array, "batch n_segments n_bins"]:
    """Return the one-sided spectra of the windowed segments, complex64."""
    window = hann_window(params.n_fft)[None]
    segments = [segment * window for (segment,) in _segments(rows_of(signal), params)]
    return jnp.fft.rfft(jnp.stack(segments, axis=1))


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


def mean_power(rows: Rows, params: WelchPeakParams, tile_rows: int = 1, radix: int = 1) -> Float[Array, "batch n_bins"]:
    """Return the mean one-sided power of the windowed segments, the bins in their order or in `bin_order`.

    Two real segments are one complex transform: `|X1[b]|^2 + |X2[b]|^2 = (|Z[b]|^2 + |Z[n-b]|^2) / 2`
    with `Z` that of `x1 + i x2`. An odd one out is transformed alone.

    Args:
        rows: each one's prefix is used.
        params: the parameters.
        tile_rows: rows of the tiles in which powers are computed.
        radix: as of `transform_radix`; 1 for an odd number of segments.
    """
    assert radix == 1 or params.n_segments % 2 == 0
    window, segments = hann_window(params.n_fft), _segments(rows, params, radix)
    # DC, the bins between by what they leave when divided by the radix, Nyquist
    parts: list[Any] = [0] * (radix + 2)
    if pairs := list(zip(segments[::2], segments[1::2], strict=False)):
        half = window * np.float32(0.5)  # so that a pair's sum is its mean, and overflows no sooner
        by_pair = [taken_apart(one, two, half) for one, two in pairs]
        transforms = [jnp.fft.fft(jnp.stack(samples, axis=1)) for samples in zip(*by_pair, strict=True)]
        powers = [to_tiles(jnp.sum(_squared_magnitude(each), axis=1), tile_rows) for each in transforms]
        nyquist = params.hop // radix
        parts = [4.0 * powers[0][:, :1], 2.0 * (powers[0][:, 1:nyquist] + powers[0][:, :nyquist:-1])]
        for rest in range(1, radix):  # the mirrored bin leaves -rest
            parts.append(2.0 * (powers[rest][:, :nyquist] + powers[-rest][:, : nyquist - 1 : -1]))
        parts.append(4.0 * powers[0][:, nyquist : nyquist + 1])
    if params.n_segments % 2:
        power = to_tiles(_squared_magnitude(jnp.fft.rfft(segments[-1][0] * window[None])), tile_rows)
        ends = (np.s_[:1], np.s_[1 : params.hop], np.s_[params.hop :])
        parts = [part + power[:, each] for part, each in zip(parts, ends, strict=True)]
    at_dc, between, at_nyquist = one_sided_weights(params)[[0, 1, -1]]
    weights = [at_dc, *[between] * radix, at_nyquist]
    # Joined last: XLA computes a concatenation once, but would compute a product anew for all who use it.
    return from_tiles(jnp.concatenate([part * weight for part, weight in zip(parts, weights, strict=True)], axis=1))


def taken_apart(
    one: Sequence[Float[Array, "batch n"]], two: Sequence[Float[Array, "batch n"]], window: np.ndarray
) -> Sequence[Complex[Array, "batch n"]]:
    """Return samples whose transforms together are that of windowed `x = one + i two`: the r-th `Z[4 q + r]`.

    A step of decimation in frequency, in one loop with the window:
    `y_r[j] = w^(r j) sum_m (-i)^(r m) x[j + m n/4]` with `w = exp(-2 pi i / n)`.

    Args:
        one: a segment whole, or its quarters.
        two: the other one, as many parts.
        window: of a segment.
    """
    radix = len(one)
    if radix == 1:
        return [jnp.asarray(lax.complex(one[0] * window[None], two[0] * window[None]))]
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

    return in_one_loop(step)((), [list(one), list(two)])


def fused_peaks(
    signal: Real[Array, "batch length"] | Line,
    params: WelchPeakParams,
    selection: str | None = None,
    platform: str | None = None,
) -> Float[Array, "batch k 2"]:
    """Return the peaks of rows of samples as one program: only (bin, power) pairs leave it.

    Rows beyond a piece are computed `in_pieces`, one after the other.

    Args:
        signal: real `[batch, length]`, each row's prefix is used.
        params: the parameters.
        selection: "maxima" or "top_k"; by default the one that is faster on the platform.
        platform: what the program is for; by default what JAX's default device is.
    """
    batch = signal.shape[0]
    platform = platform or jax.default_backend()
    selection = selection or default_selection(batch, params.n_bins, platform)
    radix = transform_radix(batch, params, platform)

    def peaks_of(rows: Rows) -> Float[Array, "rows k 2"]:
        tile = tile_rows(rows.count) if selection == "maxima" else 1
        power = mean_power(rows, params, tile, radix)
        return selected_peaks(power, params.k, selection, bin_order(params, radix))

    return in_pieces(peaks_of, signal, params, platform)


def in_pieces(
    peaks_of: Callable[[Rows], Float[Array, "rows k 2"]],
    signal: Real[Array, "batch length"] | Line,
    params: WelchPeakParams,
    platform: str,
) -> Float[Array, "batch k 2"]:
    """Return the peaks that a function finds in rows, in one piece after the other and then in what is left.

    The loop is over where pieces start: one over the pieces themselves takes them as an array of their own,
    which XLA writes out if rows are left.
    """
    batch = signal.shape[0]
    rows = piece_rows(batch, params, platform)
    if batch <= rows:
        return peaks_of(rows_of(signal))
    n_pieces, rest = divmod(batch, rows)

    def peaks_from(start: Int[Array, ""]) -> Float[Array, "rows k 2"]:
        return peaks_of(Rows(signal, rows, start))

    peaks = lax.map(peaks_from, rows * jnp.arange(n_pieces)).reshape(-1, params.k, 2)
    return jnp.concatenate([peaks, peaks_of(Rows(signal, rest, batch - rest))]) if rest else peaks


def _segments(rows: Rows, params: WelchPeakParams, parts: int = 1) -> list[list[Array]]:
    """Return the segments, each in parts of its columns."""
    n = params.n_fft // parts
    starts = range(0, params.n_segments * params.hop, params.hop)
    return [[rows.columns(start + n * part, start + n * (part + 1)) for part in range(parts)] for start in starts]


def _squared_magnitude(spectrum: Complex[Array, "*batch"]) -> Float[Array, "*batch"]:
    return jnp.square(spectrum.real) + jnp.square(spectrum.imag)
