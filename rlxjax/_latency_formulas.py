"""The parts of the latency model: work of the device, chunks, the two forms of selection, padding."""

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.scipy.special import entr, gammaln
from jaxtyping import Array, Bool, Float

from ._numerics import namespace_of, soft_excess, soft_roofline
from ._typing import Nanoseconds, RealLike

if TYPE_CHECKING:
    from ._latency import LatencyCoefficients

#: What programs of the runner of version 12 are scheduled by.
CHUNK_ROWS_MULTIPLE, CHUNK_SAMPLES = 8, {"cpu": 2**19, "other": 2**26}
LEAST_SPLIT_N_FFT, LEAST_SPLIT_SAMPLES, SPLIT_RADIX = 512, 2**16, 4
LEAST_HOST_CHUNK_SAMPLES, MOST_UNSHARED_SAMPLES, MOST_UNSHARED_SAMPLES_OF_BLOCK = 2**17, 2**16, 2**17
MIN_BLOCK_BINS, MIN_BLOCKS = 16, 9
LEAST_IN_PLACE_BYTES = 2**22
#: How sharply the larger of compute and memory time decides; 1 would be their sum.
ROOFLINE_SHARPNESS = 2
#: How sharply traffic beyond the cache is charged the second level's rate.
CACHE_SHARPNESS = 4
#: The same of a processor's first cache, which a row fits in or does not.
FIRST_CACHE_SHARPNESS = 8
#: How sharply a piece of the least size, rather than the processors, decides the time of shared work.
SHARE_SHARPNESS = 16
#: Most numbers that NumPy's partition sorts by a network with AVX2; 256 with AVX-512, where 64 fit as well.
MOST_NETWORK_PLACES = 64.0
#: What a pass over one number, two comparisons there, costs in places of that network.
PLACES_OF_A_PASS = 0.5
#: Bytes that the device's FFT stage moves for one sample: read and window, transform, square.
DEVICE_BYTES_PER_SAMPLE = 20.0
#: Bytes that a transform reads and writes for one sample of a segment: a real segment's spectrum is half as
#: long, and two packed segments are one complex row.
TRANSFORM_BYTES_PER_SAMPLE = 8.0


def fft_flop(rows: Float[Array, "*batch"], n_fft: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Return the operations of `rows` real transforms: `2.5 n log2 n` each, as a real FFT is counted."""
    return 2.5 * (rows * n_fft) * jnp.log2(n_fft)


def device_work_ns(
    rows: Float[Array, "*batch"],
    n_fft: Float[Array, "*batch"],
    *,
    row_ns: RealLike,
    flop_per_ns: RealLike,
    bytes_per_ns: RealLike,
    speedup: RealLike = 1.0,
    parts: RealLike = 1.0,
) -> Nanoseconds:
    """Return a device's time for `rows` transforms: a smooth roofline of compute and memory time.

    Args:
        rows: transforms, `[*batch]`.
        n_fft: samples of each.
        row_ns: cost of a transform, apart from its operations.
        flop_per_ns: operations.
        bytes_per_ns: memory.
        speedup: divides the compute time; memory is no faster for it.
        parts: transforms that each is taken apart into, whose operations are counted.
    """
    traffic = jnp.maximum(DEVICE_BYTES_PER_SAMPLE * (rows * n_fft), 1.0)
    compute_ns = jnp.maximum(fft_flop(rows * parts, n_fft / parts), 1.0) / flop_per_ns + rows * row_ns
    return soft_roofline(compute_ns / speedup, traffic / bytes_per_ns, ROOFLINE_SHARPNESS)


def long_rows_ns(
    samples: RealLike, row_bytes: RealLike, cache_bytes: RealLike, far_bytes_per_ns: RealLike
) -> Nanoseconds:
    """Return what transforms cost on top because a row leaves a processor's first cache, `[*batch]`.

    Args:
        samples: of all rows.
        row_bytes: that the transform of one row reads and writes.
        cache_bytes: of a row, at which half of it is charged that.
        far_bytes_per_ns: what it costs.
    """
    beyond = soft_excess(jnp.maximum(row_bytes, 1.0), cache_bytes, FIRST_CACHE_SHARPNESS)
    return jnp.asarray(TRANSFORM_BYTES_PER_SAMPLE * samples * beyond / far_bytes_per_ns)


def fused_transform_bytes(n_fft: RealLike, n_segments: RealLike) -> Float[Array, "*batch"]:
    """Return what one of the fused path's transforms reads and writes: two segments as one complex row.

    Long ones are taken apart where there are many (`welch._device_programs.transform_radix`); few rows are
    not transformed eight at a time, so that they do not crowd the cache. Lengths count as multiples of 8.
    """
    parts = jnp.where(_is_long(n_fft, n_segments), SPLIT_RADIX, 1.0)
    return jnp.asarray(2.0 * TRANSFORM_BYTES_PER_SAMPLE * n_fft / parts)


def is_taken_apart(program_rows: RealLike, n_fft: RealLike, n_segments: RealLike) -> Bool[Array, "*batch"]:
    """Return whether a fused program of so many rows takes its transforms apart (`transform_radix`)."""
    has_rows = jnp.asarray(program_rows) * n_segments * n_fft >= LEAST_SPLIT_SAMPLES
    return _is_long(n_fft, n_segments) & has_rows


def _is_long(n_fft: RealLike, n_segments: RealLike) -> Bool[Array, "*batch"]:
    return (jnp.asarray(n_fft) >= LEAST_SPLIT_N_FFT) & (jnp.asarray(n_segments) % 2 == 0)


def share_of_work(
    is_shared: Bool[Array, "*batch"], rows: RealLike, least_rows: RealLike, gain: RealLike
) -> Float[Array, "*batch"]:
    """Return the share of the time of work on rows that it takes all processors.

    Args:
        is_shared: whether they share it.
        rows: all rows.
        least_rows: of a processor's share.
        gain: speed-up of many rows, less 1.
    """
    least_share = jnp.asarray(least_rows / jnp.maximum(rows, 1.0))
    return jnp.where(is_shared, soft_roofline(least_share, 1.0 / (1.0 + gain), SHARE_SHARPNESS), 1.0)


def unshared_rows_of(
    is_host: RealLike, is_fused: RealLike, n_fft: RealLike, n_segments: RealLike
) -> Float[Array, "*batch"]:
    """Return the most rows that one processor runs alone, on the host, of the fused or of the block path."""
    xp = namespace_of(is_host, is_fused, n_fft, n_segments)
    on_device = xp.where(is_fused, 1.0 * MOST_UNSHARED_SAMPLES, 1.0 * MOST_UNSHARED_SAMPLES_OF_BLOCK)
    samples = xp.where(is_host, 1.0 * LEAST_HOST_CHUNK_SAMPLES, on_device)
    return least_rows_of(samples, n_fft, n_segments, xp.where(is_host, 1.0, CHUNK_ROWS_MULTIPLE))


def least_rows_of(
    samples: RealLike, n_fft: RealLike, n_segments: RealLike, least: RealLike = 1.0
) -> Float[Array, "*batch"]:
    """Return the rows that have so many samples, but at least so many."""
    xp = namespace_of(samples, n_fft, n_segments, least)
    return xp.maximum(samples / (xp.asarray(n_segments) * n_fft), least)


def signal_bytes(rows: RealLike, n_fft: RealLike, n_segments: RealLike) -> Float[Array, "*batch"]:
    """Return the bytes of rows of overlapping segments, as float32."""
    return jnp.asarray(2.0 * rows * n_fft * (n_segments + 1.0))


def far_ns(c: "LatencyCoefficients", traffic_bytes: RealLike) -> Nanoseconds:
    """Return what traffic costs on top of its near rate because it lies beyond the cache, `[*batch]`."""
    traffic_bytes = jnp.maximum(traffic_bytes, 1.0)
    beyond = soft_excess(traffic_bytes, c.cache_bytes, CACHE_SHARPNESS)
    return jnp.asarray(traffic_bytes * beyond / c.far_bytes_per_ns)


def partition_places(bins: RealLike, k: RealLike) -> Float[Array, "*batch"]:
    """Return what NumPy's partition of bins around the k largest costs, in places of a network, `[*batch]`.

    Few numbers are sorted by a network of a power of two. More are split around a pivot first, again and
    again: in the mean over all orders by `2 n (1 + H(k / n))` comparisons, where H is the entropy in nats
    (D. E. Knuth, Mathematical Analysis of Algorithms, 1971, of Hoare's FIND). Where all bins are peaks,
    there is no partition.
    """
    is_partial = (jnp.asarray(k) > 0) & (jnp.asarray(k) < bins)
    share = jnp.where(is_partial, k / bins, 0.5)
    network = jnp.minimum(jnp.ldexp(1.0, _place_bits(bins)), MOST_NETWORK_PLACES)
    passed = jnp.where(bins > MOST_NETWORK_PLACES, bins * (1.0 + entr(share) + entr(1.0 - share)), 0.0)
    return jnp.where(is_partial, network + PLACES_OF_A_PASS * passed, 0.0)


def maxima_ns(
    c: "LatencyCoefficients", rows: RealLike, bins: RealLike, k: RealLike, share: RealLike = 1.0
) -> Nanoseconds:
    """Return the time of selection by successive maxima, `[*batch]`.

    A key is made of every bin; each pass compares all keys; there is one for each peak, and for the spare
    candidates (`welch._selection`), which are put in their exact order afterwards. A pass over one row alone
    is a vector loop over its bins; over tiles of several, it is a longer program. Each of several processors
    makes all passes, over its share of the rows. That it makes them for each group of tiles adds nothing that
    timings show.
    """
    passes = maxima_passes(bins, k)
    row_ns = bins * c.maxima_key_ns + passes * (compared_places(bins) * c.maxima_bin_ns + c.maxima_peak_ns)
    return jnp.asarray(share * rows * row_ns + jnp.where(rows > 1, passes, 0.0) * c.maxima_pass_ns)


def maxima_passes(bins: RealLike, k: RealLike) -> Float[Array, "*batch"]:
    """Return the passes of the selection by maxima: one for each candidate (`welch._selection`)."""
    spare = 2.0 + jnp.floor(jnp.maximum(_place_bits(bins) - 8.0, 0.0) / 2.0)
    return jnp.minimum(jnp.minimum(k, bins) + spare, bins)


def compared_places(bins: RealLike) -> Float[Array, "*batch"]:
    """Return the places that a pass of maxima compares: those of all blocks, then those of one.

    As if blocks did not overlap, but where they are as few as may be (`welch._selection.blocks_of`).
    """
    width = jnp.ldexp(1.0, (_place_bits(bins) + 1) // 2)
    width = jnp.minimum(jnp.maximum(width, MIN_BLOCK_BINS), bins)
    return jnp.maximum(bins, width * MIN_BLOCKS) + width


def _place_bits(bins: RealLike) -> Float[Array, "*batch"]:
    return jnp.frexp(jnp.maximum(bins - 1.0, 1.0))[1]


def top_k_ns(c: "LatencyCoefficients", rows: RealLike, bins: RealLike, k: RealLike) -> Nanoseconds:
    """Return the time of the device's selection, `[*batch]`: a scan of the bins, and a heap's updates.

    Of bins in any order, `k ln(bins / k)` enter a heap of k that is full (D. E. Knuth, The Art of Computer
    Programming, vol. 1, 1.2.10: how often a running maximum changes), each by `log2(k + 1)` comparisons. What
    it holds is then taken out one by one, by `log2(k!)` in all, as it gets smaller.
    """
    peaks = jnp.minimum(k, bins)
    entries = peaks * jnp.log(bins / peaks)
    comparisons = entries * jnp.log2(peaks + 1.0) + gammaln(peaks + 1.0) / math.log(2.0)
    return jnp.asarray(rows * (bins * c.topk_bin_ns + comparisons * c.topk_update_ns))


@jax.custom_jvp
def padded_rows(batch: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Return `padded_batch` of a float batch. Prevents: the zero slope of a staircase."""
    _, bits = jnp.frexp(jnp.maximum(batch, 1.0) - 1.0)
    step = jnp.ldexp(jnp.ones_like(batch), jnp.maximum(bits - 3, 0))
    return jnp.ceil(batch / step) * step


@padded_rows.defjvp
def _padded_jvp(primals, tangents):
    return padded_rows(*primals), tangents[0]


def chunk_rows_of(
    n_fft: Float[Array, "*batch"], n_segments: Float[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """Return the rows of a chunk as a CPU runs them, but not rounded to whole tiles."""
    return jnp.maximum(CHUNK_SAMPLES["cpu"] / (n_segments * n_fft), CHUNK_ROWS_MULTIPLE)


def device_rows(batch: Float[Array, "*batch"], chunk_rows: RealLike) -> Float[Array, "*batch"]:
    """Return the rows that a device runs: padded up to a chunk; the padding of a rest beyond is left out."""
    return jnp.maximum(batch, jnp.minimum(padded_rows(batch), chunk_rows))
