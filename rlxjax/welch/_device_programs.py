"""The programs that devices run for the strategies "fused" and "block"."""

import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Complex, Float, Int, Real

from rlxjax._checks import as_index, is_symbolic
from rlxjax._schedule import padded_rows, schedule

from ._kernels import KERNEL_COMPILERS, has_kernel, kernel_peaks
from ._selection import at_any_scale, default_selection, selected_peaks
from ._workload import WelchPeakParams, hann_window, host_peaks, one_sided_weights

#: A kernel is right if its powers agree with the host's to this relative tolerance, and at least this share of its bins
#: agrees. Some bins may differ, because rounding may exchange two peaks of nearly equal power.
RIGHT_RTOL, RIGHT_SHARE = 1e-4, 0.95
#: The index of a first row: a Python integer, or a traced integer.
Start = int | Int[Array, ""]


def padded_batch(batch: int | np.integer) -> int:
    """Return the number of rows to which a device program pads a batch.

    Each doubling has only four padded sizes, so a few programs can run batches of many sizes.

    Args:
        batch: number of rows, at least 0.

    Raises:
        ValueError: `batch` is negative or not a whole number.

    Examples:
        >>> [padded_batch(batch) for batch in (0, 3, 9, 33, 8192)]
        [0, 3, 10, 40, 8192]
    """
    return int(padded_rows(as_index(batch, "batch"), schedule("cpu")._asdict()))


def piece_rows(batch: Any, params: WelchPeakParams, platform: str) -> Any:
    """Return the number of rows in a piece: the limit, or a divisor of the batch if one is above half the limit."""
    if is_symbolic(batch):
        return batch
    plan = schedule(platform)
    most = max(1, plan.piece_samples // (params.n_segments * params.n_fft * plan.tile_rows))
    n_tiles, rest = divmod(batch, plan.tile_rows)
    if batch <= most * plan.tile_rows:
        return batch
    fitting = (tiles for tiles in range(most, most // 2, -1) if rest == 0 and n_tiles % tiles == 0)
    return plan.tile_rows * next(fitting, most)


def segment_spectra(
    signal: Real[Array | np.ndarray, "batch length"], params: WelchPeakParams
) -> Complex[Array, "batch n_segments n_bins"]:
    """Return the one-sided spectra of a signal's windowed segments as complex64."""
    window = hann_window(params.n_fft)[None]
    segments = [segment * window for segment in _segments(signal, params, 0, signal.shape[0])]
    return jnp.fft.rfft(jnp.stack(segments, axis=1))


def mean_power(
    signal: Real[Array | np.ndarray, "batch length"], params: WelchPeakParams, start: Start = 0, count: Any = None
) -> Float[Array, "count n_bins"]:
    """Return the one-sided power of each row, averaged over the windowed segments of the row.

    A single complex transform `Z`, of `x1 + i x2`, gives the power of two real segments `x1` and `x2` of `n` samples:
    `|X1[b]|^2 + |X2[b]|^2 = (|Z[b]|^2 + |Z[n-b]|^2) / 2`. The last of an odd number of segments has its own transform.

    Args:
        signal: real `[batch, length]`; the first `params.frame_len` samples of each row are used.
        params: segment length and number of segments.
        start: index of the first row to compute.
        count: number of rows to compute; by default all rows.
    """
    window = hann_window(params.n_fft)
    segments = _segments(signal, params, start, signal.shape[0] if count is None else count)
    # The powers at DC, at the bins between, and at Nyquist.
    parts: list[Array | float] = [0.0, 0.0, 0.0]
    if pairs := list(zip(segments[::2], segments[1::2], strict=False)):
        half = window[None] * np.float32(0.5)  # keeps the sum of a pair from overflowing before the mean overflows
        packed = [lax.complex(one * half, two * half) for one, two in pairs]
        power = jnp.sum(_squared_magnitude(jnp.fft.fft(jnp.stack(packed, axis=1))), axis=1)
        hop = params.hop
        between = power[:, 1:hop] + power[:, :hop:-1]
        parts = [4.0 * power[:, :1], 2.0 * between, 4.0 * power[:, hop : hop + 1]]
    if params.n_segments % 2:
        power = _squared_magnitude(jnp.fft.rfft(segments[-1] * window[None]))
        columns = power[:, :1], power[:, 1:-1], power[:, -1:]
        parts = [part + column for part, column in zip(parts, columns, strict=True)]
    weights = one_sided_weights(params)[[0, 1, -1]]
    # The concatenation comes last, because XLA computes a product again for each use, but a concatenation only once.
    return jnp.concatenate([part * weight for part, weight in zip(parts, weights, strict=True)], axis=1)


def fused_peaks(
    signal: Real[Array | np.ndarray, "batch length"],
    params: WelchPeakParams,
    selection: str | None = None,
    platform: str | None = None,
    rescales: bool = True,
) -> Float[Array, "batch k 2"]:
    """Return the peaks of rows of samples. A single program computes pieces of rows, one piece after the other.

    Args:
        signal: real `[batch, length]`; the first `params.frame_len` samples of each row are used.
        params: segment length, number of segments and number of peaks.
        selection: how the program selects peaks: "maxima" or "top_k", or "kernel" for a single kernel that computes
            everything. The default depends on the platform and on the sizes.
        platform: platform that runs the program; by default the platform of JAX's default device.
        rescales: whether rows whose powers leave the range of float32 are scaled.

    Returns:
        The peaks, as from `welch_peaks`: (bin, power), float32 `[batch, k, 2]`.
    """
    platform, batch = platform or jax.default_backend(), signal.shape[0]
    selection = selection or default_fused_selection(batch, params, platform)
    if selection == "kernel":  # a program that is compiled for another platform selects by top_k
        options: dict[str, Any] = {"params": params, "platform": platform, "rescales": rescales}
        others = functools.partial(fused_peaks, **options, selection="top_k")
        kernel = functools.partial(one_kernel_peaks, **options)
        return lax.platform_dependent(signal, default=others, **{KERNEL_COMPILERS[platform]: kernel})

    def peaks_of(start: Start, count: Any) -> Float[Array, "count k 2"]:
        def power_of(rows: Array | np.ndarray, first: Start = 0) -> Array:
            return _few_rows_at_a_time(rows, params, first, count, platform)

        def rows() -> Array:
            return lax.dynamic_slice(signal, (start, 0), (count, params.frame_len))

        own = {"rows": rows, "power_of": power_of} if rescales else {}
        return selected_peaks(power_of(signal, start), params.k, selection, **own)

    rows = piece_rows(batch, params, platform)
    if batch <= rows:
        return peaks_of(0, batch)
    n_pieces, rest = divmod(batch, rows)
    starts = rows * jnp.arange(n_pieces)
    peaks = lax.map(lambda start: peaks_of(start, rows), starts).reshape(-1, params.k, 2)
    return jnp.concatenate([peaks, peaks_of(batch - rest, rest)]) if rest else peaks


def default_fused_selection(batch: Any, params: WelchPeakParams, platform: str) -> str:
    """Return the `selection` of `fused_peaks` that is used if no calibration decides."""
    if has_kernel(batch, params, platform) and _is_right_here(params, platform):
        return "kernel"
    return default_selection(batch, params.n_bins, platform)


@functools.lru_cache(maxsize=2**14)
def _is_right_here(params: WelchPeakParams, platform: str) -> bool:
    """Whether the kernel finds the right peaks on a device of this process. True if there is no device to try."""
    try:
        device = jax.local_devices(backend=platform)[0]
    except RuntimeError:  # the program is for another machine
        return True
    kernel = jax.jit(functools.partial(one_kernel_peaks, params=params, platform=platform))

    def tried() -> bool:
        with jax.default_device(device):
            return is_right(kernel, params)

    # A kernel cannot run while JAX traces a function in the same thread, so another thread runs the kernel.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(tried).result()


def is_right(peaks_of: Callable[[np.ndarray], Any], params: WelchPeakParams) -> bool:
    """Return whether a program and the host find the same peaks in rows of noise. If not, warn."""
    rows = np.random.default_rng(0).standard_normal((64, params.frame_len), np.float32)
    try:
        found, expected = np.asarray(peaks_of(rows)), np.asarray(host_peaks(rows, params))
    except Exception as error:  # noqa: BLE001  (a compiler may raise anything)
        problem = f"it raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
    else:
        is_same = np.allclose(found[..., 1], expected[..., 1], rtol=RIGHT_RTOL)
        if is_same and np.mean(found[..., 0] == expected[..., 0]) >= RIGHT_SHARE:
            return True
        problem = "its peaks differ from the host's"
    warnings.warn(f"welch_peaks: this device's kernel is not used: {problem}", stacklevel=2)
    return False


def one_kernel_peaks(
    signal: Real[Array | np.ndarray, "batch length"],
    params: WelchPeakParams,
    platform: str,
    interpret: bool = False,
    rescales: bool = True,
) -> Float[Array, "batch k 2"]:
    """Return the peaks, computed by a single kernel. The derivative comes from `mean_power` at the peaks' bins."""

    def with_places(peaks: Array) -> tuple[Array, Array]:
        return peaks, peaks[..., 0].astype(jnp.int32)

    @jax.custom_jvp
    def peaks(rows: Array) -> Array:
        found = kernel_peaks(rows, params, platform, interpret)
        if not rescales:
            return found

        def again(scaled: Array) -> tuple[Array, Array]:
            return with_places(fused_peaks(scaled, params, "top_k", platform, rescales=False))

        return at_any_scale(with_places(found), lambda: rows[:, : params.frame_len], again)[0]

    @peaks.defjvp
    def _(rows: tuple[Array], changes: tuple[Array]) -> tuple[Array, Array]:  # pyright: ignore[reportUnusedFunction]
        found = peaks(*rows)
        bins = found[..., 0].astype(jnp.int32)
        _, change = jax.jvp(lambda samples: jnp.take_along_axis(mean_power(samples, params), bins, 1), rows, changes)
        return found, jnp.stack([jnp.zeros_like(change), change], axis=-1)

    return peaks(jnp.asarray(signal).astype(jnp.float32))


def _few_rows_at_a_time(
    signal: Real[Array | np.ndarray, "batch length"], params: WelchPeakParams, start: Start, count: Any, platform: str
) -> Float[Array, "count n_bins"]:
    """Return `mean_power` of rows. If the rows have more samples than a piece may have, compute them in parts."""
    rows = max(1, schedule(platform).piece_samples // (params.n_segments * params.n_fft))
    rows = 1 << (rows.bit_length() - 1)  # a power of two divides a tile
    if is_symbolic(count) or count <= rows or count % rows:
        return mean_power(signal, params, start, count)
    powers = lax.map(lambda first: mean_power(signal, params, first, rows), start + rows * jnp.arange(count // rows))
    return powers.reshape(count, params.n_bins)


def _segments(
    signal: Real[Array | np.ndarray, "batch length"], params: WelchPeakParams, start: Start, count: Any
) -> list[Float[Array, "count n_fft"]]:
    # One slice of rows and columns becomes vector code in a loop over pieces on CPUs; two slices become a copy.
    firsts = range(0, params.n_segments * params.hop, params.hop)
    blocks = (lax.dynamic_slice(signal, (start, first), (count, params.n_fft)) for first in firsts)
    return [block.astype(jnp.float32) for block in blocks]


def _squared_magnitude(spectrum: Complex[Array, "*batch"]) -> Float[Array, "*batch"]:
    return jnp.square(spectrum.real) + jnp.square(spectrum.imag)
