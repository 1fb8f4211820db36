"""The terms of the latency model of Welch peaks: counts of work over rates, shared by processors, and fixed costs."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.scipy.special import entr, gammaln
from jaxtyping import Array, Float

from rlxjax._numerics import namespace_of, soft_excess, soft_roofline, straight_through
from rlxjax._typing import Code, RealLike
from rlxjax.fit import Facts, Runs

from ._fft import FFT_BYTES_PER_SAMPLE, ROOFLINE_SHARPNESS, fft_flop
from ._welch_coefficients import LatencyCoefficients

VARIANTS = ("host", "fused_maxima", "fused_top_k", "block", "learned")
#: Their places.
HOST, MAXIMA, TOP_K, BLOCK, LEARNED = range(5)
#: Parts of a prediction, in the order of a run.
TERMS = ("call_ns", "launch_and_sync_ns", "upload_ns", "transform_ns", "selection_ns", "readback_ns")

#: Bytes that NumPy's code moves for one sample, and that its transform holds of one: window product, spectrum,
#: work and factors. A call reads as many anew for each sample of a segment: they have left the caches.
HOST_BYTES_PER_SAMPLE, HOST_HELD_BYTES_PER_SAMPLE = 8.0, 32.0
#: A segment beyond a processor's first cache, and a signal beyond its second, are charged the memory's rate on top;
#: at these sizes half of it.
FIRST_CACHE_BYTES, SECOND_CACHE_BYTES = 48.0 * 2**10, 2.0**21
#: How sharply traffic beyond the caches is charged that: a row fits in the first one or does not.
FIRST_CACHE_SHARPNESS, SECOND_CACHE_SHARPNESS = 8, 4
#: How sharply the least share of one processor, rather than how many there are, decides the time of shared work.
SHARE_SHARPNESS = 16
#: Most numbers that NumPy's partition sorts by a network, and comparisons of a pass over one number.
MOST_NETWORK_PLACES, COMPARISONS_OF_A_PASS = 64.0, 0.5
#: Putting one candidate of the selection by maxima in order takes as long as comparing so many bins.
BINS_OF_A_CANDIDATE = 40.0


def welch_terms_ns(c: LatencyCoefficients, runs: Runs, facts: Facts) -> Mapping[str, RealLike]:
    """Return the parts of what runs take in ns by name, `[*batch]`; their sum is the prediction.

    Args:
        c: of the machine.
        runs: of Welch peaks.
        facts: all that the model knows by default, or other values of them.
    """
    variant = jnp.asarray(runs.variant)
    batch, n_fft, k, n_segments = (jnp.asarray(runs.inputs[name]) for name in ("batch", "n_fft", "k", "n_segments"))
    on_host, is_block, is_learned = variant == HOST, variant == BLOCK, variant == LEARNED
    by_numpy = on_host | is_block
    row_samples, bins = n_segments * n_fft, n_fft / 2 + 1
    rows = jnp.where(on_host, batch, padded_rows(batch, row_samples, facts))
    samples, signal_bytes = rows * row_samples, 2.0 * rows * n_fft * (n_segments + 1.0)

    # Few samples are one processor's. Of more, each of several has at least half as many.
    alone = alone_samples(variant, facts)
    is_shared = batch * row_samples > alone
    least_share = alone / (2.0 * jnp.maximum(samples, 1.0))
    share = jnp.where(is_shared, soft_roofline(least_share, 1.0 / (1.0 + c.parallel_gain), SHARE_SHARPNESS), 1.0)
    joining_ns = jnp.where(is_shared, jnp.where(by_numpy, c.threads_ns, c.streams_ns), 0.0)
    read_anew_ns = HOST_HELD_BYTES_PER_SAMPLE * n_fft / c.memory_bytes_per_ns
    numpy_ns = jnp.where(by_numpy, c.host_call_ns, 0.0)

    long_rows = soft_excess(HOST_HELD_BYTES_PER_SAMPLE * n_fft, FIRST_CACHE_BYTES, FIRST_CACHE_SHARPNESS)
    host_sample_ns = HOST_BYTES_PER_SAMPLE * (1.0 / c.host_bytes_per_ns + long_rows / c.memory_bytes_per_ns)
    device_sample_ns = soft_roofline(
        fft_flop(n_fft) / n_fft / c.device_flop_per_ns, FFT_BYTES_PER_SAMPLE / c.device_bytes_per_ns, ROOFLINE_SHARPNESS
    )
    # The pruned program reads a signal once and writes live bins.
    flop, live_bins, is_known = _learned_work(n_fft, facts)
    learned_bytes = 2.0 * n_fft * (n_segments + 1.0) / n_segments + 8.0 * live_bins
    learned_segment_ns = soft_roofline(
        c.learned_segment_ns + flop / c.learned_flop_per_ns, learned_bytes / c.device_bytes_per_ns, ROOFLINE_SHARPNESS
    )
    sample_ns = jnp.where(is_learned, learned_segment_ns / n_fft, device_sample_ns)
    sample_ns = jnp.where(on_host, host_sample_ns, sample_ns)
    transform_ns = share * samples * sample_ns

    numpy_row_ns = (
        8.0 * n_segments * bins / c.host_bytes_per_ns
        + c.select_row_ns
        + partition_comparisons(bins, k) * c.select_compare_ns
    )
    # A learned run ranks its live bins, and masked ones where these are fewer than the peaks.
    ranked = jnp.where(is_learned, jnp.maximum(live_bins + jnp.minimum(k, bins - live_bins), 1.0), bins)
    passes = maxima_passes(ranked, k)
    maxima_row_ns = passes * (maxima_comparisons(ranked, facts) + BINS_OF_A_CANDIDATE) * c.maxima_compare_ns
    heap_row_ns = ranked * c.topk_bin_ns + heap_comparisons(ranked, k) * c.topk_compare_ns
    row_ns = jnp.where(by_numpy, numpy_row_ns, jnp.where(variant == TOP_K, heap_row_ns, maxima_row_ns))
    # Each processor makes all passes, over its share of the rows. Over one row alone, a pass is a plain loop.
    makes_passes = ((variant == MAXIMA) | is_learned) & (rows > 1)
    passes_ns = jnp.where(makes_passes, passes, 0.0) * c.maxima_pass_ns

    far_bytes = signal_bytes * soft_excess(jnp.maximum(signal_bytes, 1.0), SECOND_CACHE_BYTES, SECOND_CACHE_SHARPNESS)
    uploaded_bytes = jnp.where(on_host, 0.0, signal_bytes)
    read_back_bytes = jnp.where(is_block, 8.0 * rows * n_segments * bins, jnp.where(on_host, 0.0, 8.0 * rows * k))
    return {
        "call_ns": numpy_ns + read_anew_ns + joining_ns,
        "launch_and_sync_ns": jnp.where(on_host, 0.0, c.launch_ns),
        "upload_ns": share * uploaded_bytes / c.copy_bytes_per_ns,
        "transform_ns": jnp.where(is_learned & ~is_known, jnp.inf, transform_ns) + far_bytes / c.memory_bytes_per_ns,
        "selection_ns": share * rows * row_ns + passes_ns,
        "readback_ns": share * read_back_bytes / c.copy_bytes_per_ns,
    }


def alone_samples(variant: Code, facts: Facts) -> Float[Array, "*batch"]:
    """Return the most samples that one processor works on alone, `[*batch]`."""
    xp = namespace_of(variant)
    on_device = xp.where(xp.asarray(variant) == BLOCK, facts["alone_samples_block"], facts["alone_samples_fused"])
    return xp.where(xp.asarray(variant) == HOST, facts["alone_samples_host"], on_device) * 1.0


def padded_rows(batch: Float[Array, "*batch"], row_samples: RealLike, facts: Facts) -> Float[Array, "*batch"]:
    """Return the rows that device programs run, `[*batch]`: padded to a few sizes an octave, up to a chunk.

    The gradient takes them as the batch, since that of a staircase is 0.
    """
    sizes = facts["sizes_per_octave"] * 1.0
    _, octaves = jnp.frexp(jnp.maximum(batch - 1.0, sizes) / sizes)
    step = jnp.ldexp(jnp.ones_like(batch), octaves - 1)
    padded = jnp.minimum(jnp.ceil(batch / step) * step, facts["chunk_samples"] / row_samples)
    return straight_through(jnp.maximum(batch, padded), batch * jnp.ones_like(padded))


def partition_comparisons(bins: RealLike, k: RealLike) -> Float[Array, "*batch"]:
    """Return the comparisons of NumPy's partition of bins around the k largest, and of a sort of these, `[*batch]`.

    Few numbers are sorted by a network of a power of two. More are split around a pivot first, again and again: in
    the mean over all orders by `2 n (1 + H(k / n))` comparisons, where H is the entropy in nats (D. E. Knuth,
    Mathematical Analysis of Algorithms, 1971, of Hoare's FIND). Where all bins are peaks, there is no partition.
    """
    peaks = jnp.minimum(k, bins)
    share = jnp.where(k < bins, peaks / bins, 0.5)
    network = jnp.minimum(jnp.ldexp(jnp.ones_like(bins), _place_bits(bins)), MOST_NETWORK_PLACES)
    passed = jnp.where(bins > MOST_NETWORK_PLACES, bins * (1.0 + entr(share) + entr(1.0 - share)), 0.0)
    sorting = peaks * jnp.log2(peaks + 1.0)
    return sorting + jnp.where(k < bins, network + COMPARISONS_OF_A_PASS * passed, 0.0)


def maxima_passes(bins: RealLike, k: RealLike) -> Float[Array, "*batch"]:
    """Return the passes of the selection by maxima, `[*batch]`: one for each peak, and for spare candidates.

    Keys of more bins hold fewer bits of a power, so that more of them are equal.
    """
    spare = 2.0 + jnp.floor(jnp.maximum(_place_bits(bins) - 8.0, 0.0) / 2.0)
    return jnp.minimum(jnp.minimum(k, bins) + spare, bins)


def maxima_comparisons(bins: RealLike, facts: Facts) -> Float[Array, "*batch"]:
    """Return the bins that one pass compares, `[*batch]`: those of all blocks, then those of one."""
    width = jnp.ldexp(jnp.ones_like(bins), (_place_bits(bins) + 1) // 2)
    width = jnp.minimum(jnp.maximum(width, facts["least_block_bins"]), bins)
    return jnp.maximum(bins, width * facts["least_blocks"]) + width


def heap_comparisons(bins: RealLike, k: RealLike) -> Float[Array, "*batch"]:
    """Return the comparisons of a heap that keeps the k largest of bins in any order, `[*batch]`.

    `k ln(bins / k)` bins enter a heap of k that is full (D. E. Knuth, The Art of Computer Programming, vol. 1,
    1.2.10: how often a running maximum changes), each by `log2(k + 1)` comparisons. What it holds is then taken out
    one by one, by `log2(k!)` in all, as it gets smaller.
    """
    peaks = jnp.minimum(k, bins)
    entries = peaks * jnp.log(bins / peaks)
    return entries * jnp.log2(peaks + 1.0) + gammaln(peaks + 1.0) / math.log(2.0)


def _learned_work(n_fft: RealLike, facts: Facts) -> tuple[Any, Any, Any]:
    """Return operations and live bins of the learned model of a length, and whether there is one, `[*batch]`."""
    flop, live_bins, is_known = jnp.zeros_like(n_fft), jnp.zeros_like(n_fft), jnp.zeros_like(n_fft, bool)
    models = (facts[name] for name in ("learned_n_fft", "learned_flop", "learned_live_bins"))
    for length, its_flop, its_live_bins in zip(*models, strict=True):
        is_this = n_fft == length
        flop, live_bins = jnp.where(is_this, its_flop, flop), jnp.where(is_this, its_live_bins, live_bins)
        is_known = is_known | is_this
    return flop, live_bins, is_known


def _place_bits(bins: RealLike) -> Float[Array, "*batch"]:
    return jnp.frexp(jnp.maximum(bins - 1.0, 1.0))[1]
