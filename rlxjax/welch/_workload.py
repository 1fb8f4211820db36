"""The parameters and variants of Welch peaks, and the code of the variant that NumPy computes on the host."""

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from rlxjax._checks import as_index, check_positive, real_numbers
from rlxjax._chunks import for_each_chunk, worker_count
from rlxjax._kept import Kept
from rlxjax._schedule import rows_of_a_processor, schedule
from rlxjax._typing import RealLike
from rlxjax._values import FrozenDict

#: The largest number of samples in a segment. float32 cannot hold all bin numbers of longer segments.
MOST_N_FFT = 2**25
#: The numbers of segments of the presets `ultra`, `fast` and `reference`.
ULTRA_SEGMENTS, FAST_SEGMENTS, REFERENCE_SEGMENTS = 1, 2, 8
#: If the largest power of a row is in this range, float32 holds all powers that exceed the rounding errors of a
#: transform, which are about 2**-50 of the largest power. Rows with other powers are scaled.
LEAST_POWER, MOST_POWER = 2.0**-72, 2.0**120
_SCHEDULE = schedule("cpu")
#: Only scratch arrays of these sizes are kept. Smaller arrays are quick to allocate, and larger arrays are rare.
LEAST_SCRATCH_SIZE, MOST_SCRATCH_SIZE = 2**12, 4 * _SCHEDULE.host_chunk_samples

#: The scratch arrays of each thread, by name.
_thread = threading.local()


@dataclasses.dataclass(frozen=True)
class WelchPeakParams:
    """The parameters of Welch peaks: segment length, number of segments and number of peaks. Segments overlap by half.

    Attributes:
        n_fft: number of samples in a segment: an even number from 2 to 2**25.
        n_segments: number of segments in a row, at least 1.
        k: number of peaks to find in a row, at least 1. If `k` exceeds the number of bins, the last peaks are (0, 0.0).

    Raises:
        ValueError: `n_fft` is odd or out of range, or `n_segments` or `k` is below 1.

    Examples:
        >>> params = WelchPeakParams.fast(n_fft=256, k=16)
        >>> params.frame_len, params.n_bins
        (384, 129)
    """

    n_fft: int
    n_segments: int
    k: int

    def __post_init__(self) -> None:
        n_fft = as_index(self.n_fft, "n_fft", at_least=2)
        if n_fft % 2:
            raise ValueError(f"n_fft: expected an even number, got {n_fft}")
        if n_fft > MOST_N_FFT:
            raise ValueError(f"n_fft: expected at most {MOST_N_FFT}, got {n_fft}")
        object.__setattr__(self, "n_fft", n_fft)
        for name in ("n_segments", "k"):
            object.__setattr__(self, name, as_index(getattr(self, name), name, at_least=1))

    @classmethod
    def ultra(cls, n_fft: int, k: int) -> "WelchPeakParams":
        """Return parameters with one segment."""
        return cls(n_fft, ULTRA_SEGMENTS, k)

    @classmethod
    def fast(cls, n_fft: int, k: int) -> "WelchPeakParams":
        """Return parameters with two segments."""
        return cls(n_fft, FAST_SEGMENTS, k)

    @classmethod
    def reference(cls, n_fft: int, k: int) -> "WelchPeakParams":
        """Return parameters with eight segments."""
        return cls(n_fft, REFERENCE_SEGMENTS, k)

    @property
    def hop(self) -> int:
        """Number of samples between the starts of neighbouring segments."""
        return self.n_fft // 2

    @property
    def frame_len(self) -> int:
        """Number of samples that all segments of a row span."""
        return self.n_fft + (self.n_segments - 1) * self.hop

    @property
    def n_bins(self) -> int:
        """Number of bins in the one-sided spectrum, DC and Nyquist included."""
        return self.n_fft // 2 + 1

    def bin_frequencies_hz(self, bins: RealLike, sample_rate_hz: float) -> RealLike:
        """Return the centre frequency of each bin in Hz, as an array of the shape of `bins`.

        Examples:
            >>> float(WelchPeakParams.fast(256, 1).bin_frequencies_hz(32, 16_000.0))
            2000.0
        """
        check_positive(sample_rate_hz, "sample_rate_hz")
        bins = bins if isinstance(bins, jax.Array) else real_numbers(bins, "bins")
        return bins * (sample_rate_hz / self.n_fft)


class WelchVariant(NamedTuple):
    """A way to compute Welch peaks. All variants give the same peaks, except variants with a learned FFT.

    Attributes:
        transform: "numpy" for NumPy on the host, "fft" for the exact FFT on a device, "learned" for a learned FFT.
        selection: "numpy" selects peaks on the host. "maxima" and "top_k" select peaks on the device. "kernel" is a
            single kernel that computes everything. None stands for the default selection of the platform.
    """

    transform: Literal["numpy", "fft", "learned"]
    selection: Literal["numpy", "maxima", "top_k", "kernel"] | None = None


#: The variants, by their names in the latency model.
VARIANTS: Mapping[str, WelchVariant] = FrozenDict(
    {
        "host": WelchVariant("numpy", "numpy"),
        "fused_maxima": WelchVariant("fft", "maxima"),
        "fused_top_k": WelchVariant("fft", "top_k"),
        "block": WelchVariant("fft", "numpy"),
        "learned": WelchVariant("learned"),
    }
)
#: The variants, by the names that a call may give. The variant of "fused" has no selection of its own.
RUNS: Mapping[str, WelchVariant] = FrozenDict({**VARIANTS, "fused": WelchVariant("fft")})


@functools.partial(Kept, most_bytes=2**25, bytes_of=lambda array, *_: array.nbytes)
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


@functools.partial(Kept, most_bytes=2**25, bytes_of=lambda array, *_: array.nbytes)
def one_sided_weights(params: WelchPeakParams) -> np.ndarray:
    """Return each bin's weight of `|X|^2` in the mean one-sided power, float32 `[n_bins]`. `X` is a segment's spectrum.

    The weight is `1 / n_segments` at DC and Nyquist, and `2 / n_segments` at the bins between.
    """
    weights = np.full(params.n_bins, 2.0)
    weights[[0, -1]] = 1.0
    weights = (weights / params.n_segments).astype(np.float32)
    weights.flags.writeable = False
    return weights


@functools.lru_cache(maxsize=2**10)
def _host_chunk_rows(params: WelchPeakParams, batch: int, processors: int) -> int:
    """Return the number of rows that NumPy computes in each chunk."""
    row_samples = params.n_segments * params.n_fft
    most = max(1, _SCHEDULE.host_chunk_samples // row_samples)
    return max(1, int(rows_of_a_processor(batch, _SCHEDULE.alone_samples_host // row_samples, most, processors)))


def host_peaks(signal: np.ndarray, params: WelchPeakParams) -> np.ndarray:
    """Return the peaks of rows of samples, computed by NumPy on all processors."""
    peaks = np.zeros((signal.shape[0], params.k, 2), np.float32)
    window = hann_window(params.n_fft)

    def peaks_of(rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        out = np.zeros((len(rows), params.k, 2), np.float32) if out is None else out
        shape, (row_bytes, sample_bytes) = (len(rows), params.n_segments, params.n_fft), rows.strides
        strides = (row_bytes, params.hop * sample_bytes, sample_bytes)
        segments = np.lib.stride_tricks.as_strided(rows, shape, strides, writeable=False)
        windowed = np.multiply(segments, window, out=_scratch("windowed", segments.shape, np.float32))
        shape = (*segments.shape[:-1], params.n_bins)
        spectrum = np.fft.rfft(windowed, out=_scratch("spectrum", shape, np.complex64))
        select_peaks(mean_power(spectrum, params), params, out)
        return out

    def run(start: int, stop: int) -> None:
        with np.errstate(all="ignore"):  # infinity and NaN are valid results, as on a device
            rows = signal[start:stop, : params.frame_len].astype(np.float32, copy=False)
            found = peaks_of(rows, peaks[start:stop])
            if (rescaled := rescaled_peaks(found, rows, peaks_of)) is not found:
                found[:] = rescaled

    for_each_chunk(run, len(signal), _host_chunk_rows(params, len(signal), worker_count()))
    return peaks


def rescaled_peaks(peaks: np.ndarray, rows: np.ndarray, peaks_of: Callable[[np.ndarray], Any]) -> np.ndarray:
    """Return the peaks of float32 rows, as `at_any_scale` does on a device. `peaks_of` returns the peaks of rows."""
    largest_power = peaks[:, 0, 1]
    if all(LEAST_POWER <= power <= MOST_POWER for power in largest_power.tolist()):  # for few rows faster than NumPy
        return peaks
    largest = np.abs(rows).max(axis=1)
    is_ordinary = (largest_power >= LEAST_POWER) & (largest_power <= MOST_POWER)
    is_scaled = ~is_ordinary & (largest > 0) & np.isfinite(largest)
    if not is_scaled.any():
        return peaks
    exponents = np.where(is_scaled, np.frexp(largest)[1], 0)[:, None]
    scaled = np.array(peaks_of(np.ldexp(rows, -exponents)))
    with np.errstate(over="ignore", under="ignore"):
        scaled[..., 1] = np.ldexp(scaled[..., 1], 2 * exponents)
    return np.where(is_scaled[:, None, None], scaled, peaks)


def spectrum_peaks(spectrum: NDArray[np.complexfloating], params: WelchPeakParams) -> np.ndarray:
    """Return the peaks of rows, given their segments' one-sided spectra, complex64 `[batch, n_segments, n_bins]`."""
    peaks = np.zeros((spectrum.shape[0], params.k, 2), np.float32)

    def run(start: int, stop: int) -> None:
        select_peaks(mean_power(spectrum[start:stop], params), params, out=peaks[start:stop])

    for_each_chunk(run, len(spectrum), _host_chunk_rows(params, len(spectrum), worker_count()))
    return peaks


def mean_power(spectrum: NDArray[np.complexfloating], params: WelchPeakParams) -> np.ndarray:
    """Return the mean one-sided power, `[batch, n_bins]`. The next call in this thread overwrites the result."""
    with np.errstate(all="ignore"):
        power = np.square(spectrum.real, out=_scratch("power", spectrum.shape, np.float32))
        power += np.square(spectrum.imag, out=_scratch("square", spectrum.shape, np.float32))
        if params.n_segments == 1:
            total = power[:, 0]
        else:
            total = np.sum(power, axis=1, out=_scratch("total", (len(power), params.n_bins), np.float32))
        total *= one_sided_weights(params)
    return total


def select_peaks(power: np.ndarray, params: WelchPeakParams, out: np.ndarray) -> None:
    """Write the k largest powers of each row, the largest first, as (bin, power) into `out`, `[batch, k, 2]`."""
    # Each bin has the integer key `power bits * 2**32 + (n_bins - 1 - bin)`. The bits of non-negative float32 numbers
    # have the same order as the numbers. So the largest key has the largest power, and the lower bin among equal
    # powers. A NaN gets the bits -1, which are below all other bits and are again a NaN.
    n_bins, k = params.n_bins, min(params.k, params.n_bins)
    keys = _scratch("keys", power.shape, np.int64)
    keys[:] = power.view(np.int32)
    keys[np.isnan(power, out=_scratch("is_nan", power.shape, np.bool_))] = -1
    keys <<= 32
    keys += np.arange(n_bins - 1, -1, -1)
    if k < n_bins:
        keys.partition(n_bins - k, axis=1)
    largest = _scratch("largest", (len(power), k), np.int64)
    largest[:] = keys[:, n_bins - k :]
    largest.sort(axis=1)
    words = largest[:, ::-1]
    places = np.bitwise_and(words, 0xFFFFFFFF, out=_scratch("places", words.shape, np.int64))
    np.subtract(n_bins - 1, places, out=out[:, :k, 0], casting="unsafe")
    places = np.right_shift(words, 32, out=places)
    out[:, :k, 1].view(np.int32)[:] = places


def _scratch(role: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Return an uninitialised array in memory that this thread keeps for arrays of the same role."""
    # New memory comes page by page from the system, which takes longer than the computation.
    size = math.prod(shape)
    if not LEAST_SCRATCH_SIZE <= size <= MOST_SCRATCH_SIZE:
        return np.empty(shape, dtype)
    n_bytes = size * np.dtype(dtype).itemsize
    buffers = vars(_thread)
    if role not in buffers or buffers[role].nbytes < n_bytes:
        buffers[role] = np.empty(n_bytes, np.uint8)
    return buffers[role][:n_bytes].view(dtype).reshape(shape)
