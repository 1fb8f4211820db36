"""The parts of a time in the latency model of Welch peaks: work divided by rates and processors, and fixed costs."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rlxjax._numerics import namespace_of, soft_excess, soft_roofline, straight_through
from rlxjax._schedule import padded_rows, shared_rows
from rlxjax._typing import Code, RealLike
from rlxjax.fit import Facts, Runs
from rlxjax.gate import Coefficients

from ._coefficients import ROOFLINE_SHARPNESS, coefficients, typical
from ._fft import FFT_BYTES_PER_SAMPLE, factor_ratio, fft_flop

VARIANTS = ("host", "fused_maxima", "fused_top_k", "block", "learned")
#: The code of each variant: its place in `VARIANTS`.
HOST, MAXIMA, TOP_K, BLOCK, LEARNED = range(5)

#: Bytes per sample that NumPy's code moves, and that a NumPy transform keeps: window product, spectrum, work and
#: factors. Each call reads the kept bytes of one segment again, because they have left the caches.
HOST_BYTES_PER_SAMPLE, HOST_HELD_BYTES_PER_SAMPLE = 8.0, 32.0
#: Segments that exceed the first cache, and signals that exceed the second cache, add memory traffic. At exactly these
#: sizes, half of this traffic is added.
FIRST_CACHE_BYTES, SECOND_CACHE_BYTES = 48.0 * 2**10, 2.0**21
#: Bytes per sample that a complex transform keeps, and the relative extra time of transforms beyond the first cache.
COMPLEX_HELD_BYTES, SPILLED_TRANSFORM = 16.0, 1.0
#: Sharpness of the transitions beyond the first and the second cache.
FIRST_CACHE_SHARPNESS, SECOND_CACHE_SHARPNESS = 8, 4
#: Sharpness of the maximum of two shares of the work: the least share of a processor, and 1 / number of processors.
SHARE_SHARPNESS = 16
#: How many bins NumPy's partition sorts with a network at most, and the comparisons per bin that a pass is worth.
MOST_NETWORK_PLACES, COMPARISONS_OF_A_PASS = 64.0, 0.5
#: log2 of the number of bins from which the selection by maxima needs half a spare candidate more for each octave.
SPARE_KEY_BITS = 7.5
#: Number of bins with which a pass of the selection by maxima takes `maxima_pass_ns`, besides its comparisons.
BINS_OF_A_PASS = 256.0
#: The lowest number of rows that a pass compares: the number of lanes in a vector.
LANES = 8.0
#: To sort a candidate in the selection by maxima takes as long as to compare this number of bins.
BINS_OF_A_CANDIDATE = 40.0


@coefficients
@dataclasses.dataclass(frozen=True)
class LatencyCoefficients(Coefficients):
    """Coefficients of a run of Welch peaks on one machine; each field is positive, `[*batch]`.

    The defaults are orders of magnitude of a present-day machine.
    """

    host_call_ns: RealLike = typical(4e4, "time of a call of NumPy code: host path, or selection of block path.")
    launch_ns: RealLike = typical(5e4, "time of a call of a device path: checks, launch and wait.")
    threads_ns: RealLike = typical(1e5, "time to start other threads on the host and the block path.")
    streams_ns: RealLike = typical(5e4, "time to start the program on other processors.")
    # With a wider prior, a fit could end at a number of processors that no timing supports.
    parallel_gain: RealLike = typical(0.7, "speedup on all processors together, minus 1.", log_sd=1.0)
    padding_ns: RealLike = typical(5e3, "time to allocate padded rows, apart from their bytes.")
    copy_bytes_per_ns: RealLike = typical(20.0, "rate of copies between host and device.")
    memory_bytes_per_ns: RealLike = typical(10.0, "rate of traffic beyond caches, and of data that calls read again.")
    host_bytes_per_ns: RealLike = typical(8.0, "rate at which NumPy's code moves samples and spectra.")
    select_row_ns: RealLike = typical(100.0, "time per row of NumPy's selection, for any number of bins.")
    select_compare_ns: RealLike = typical(1.0, "time per comparison of NumPy's selection.")
    device_flop_per_ns: RealLike = typical(20.0, "rate of FFT operations on the device.")
    device_bytes_per_ns: RealLike = typical(20.0, "rate of memory traffic of device transforms within a chunk.")
    maxima_compare_ns: RealLike = typical(0.1, "time per bin in a pass of the selection by maxima.")
    maxima_pass_ns: RealLike = typical(300.0, "time per pass of the selection by maxima, for any number of rows.")
    topk_bin_ns: RealLike = typical(1.0, "time per bin that the selection by a heap scans.")
    topk_compare_ns: RealLike = typical(5.0, "time per comparison of the selection by a heap.")
    learned_segment_ns: RealLike = typical(50.0, "time per segment of a pruned FFT, apart from operations and bytes.")
    learned_flop_per_ns: RealLike = typical(30.0, "rate of operations of a pruned transform.")


def welch_terms_ns(c: LatencyCoefficients, runs: Runs, facts: Facts) -> Mapping[str, RealLike]:
    """Return a dict from name to part of the predicted time in ns, `[*batch]`. The sum is the predicted time."""
    facts = jax.tree.map(lambda fact: jnp.asarray(fact, jnp.result_type(float)), facts)
    variant = jnp.asarray(runs.variant)
    batch, n_fft, k, n_segments = (jnp.asarray(runs.inputs[name]) for name in ("batch", "n_fft", "k", "n_segments"))
    on_host, is_learned, is_block = variant == HOST, variant == LEARNED, variant == BLOCK
    is_exact = (variant == MAXIMA) | (variant == TOP_K)
    by_numpy = on_host | is_block
    has_maxima = jnp.asarray(facts["least_blocks"]) > 0  # else a heap selects
    by_maxima, by_heap = ~by_numpy & (variant != TOP_K) & has_maxima, ~by_numpy & ((variant == TOP_K) | ~has_maxima)
    row_samples, bins, row_bytes = n_segments * n_fft, n_fft / 2.0 + 1.0, 2.0 * n_fft * (n_segments + 1.0)
    on_device, is_padded = device_rows(variant, batch, row_samples, facts)
    rows, is_padded = jnp.where(on_host, batch, on_device), ~on_host & is_padded
    samples, signal_bytes = rows * row_samples, rows * row_bytes
    copy_ns, memory_ns, host_ns = 1.0 / c.copy_bytes_per_ns, 1.0 / c.memory_bytes_per_ns, 1.0 / c.host_bytes_per_ns

    # Up to `alone` samples, one processor does all work. Beyond, each processor gets at least half of `alone`.
    alone = alone_samples(variant, facts)
    is_shared, least_share = batch * row_samples > alone, alone / (2.0 * jnp.maximum(samples, 1.0))

    def share_of(processors: RealLike) -> Array:
        return jnp.where(is_shared, soft_roofline(least_share, 1.0 / processors, SHARE_SHARPNESS), 1.0)

    share = share_of(1.0 + c.parallel_gain)
    # The comparisons of a heap wait for each other, so hyperthreads of one core do not slow each other.
    heap_share = share_of(facts["processors"])

    # A complex transform covers two real segments, and takes longer if it exceeds the first cache.
    spilled = SPILLED_TRANSFORM * soft_excess(COMPLEX_HELD_BYTES * n_fft, FIRST_CACHE_BYTES, FIRST_CACHE_SHARPNESS)
    ratio = factor_ratio(n_fft)
    device_flop = rows * n_segments * fft_flop(n_fft) * (ratio * (1.0 + jnp.where(is_exact, spilled, 0.0)))
    flop, live_bins, is_known = jnp.zeros_like(n_fft), jnp.zeros_like(n_fft), jnp.zeros_like(n_fft, bool)
    learned = (facts[name] for name in ("learned_n_fft", "learned_flop", "learned_live_bins"))
    for length, its_flop, its_live_bins in zip(*learned, strict=True):
        is_this = n_fft == length
        flop, live_bins = jnp.where(is_this, its_flop, flop), jnp.where(is_this, its_live_bins, live_bins)
        is_known = is_known | is_this
    segments = rows * n_segments
    learned_ns = segments * c.learned_segment_ns + segments * flop * (1.0 / c.learned_flop_per_ns)
    # A pruned program reads a signal once and writes only unmasked (live) bins.
    learned_bytes = signal_bytes + 8.0 * rows * n_segments * live_bins
    device_bytes = jnp.where(is_learned, learned_bytes, FFT_BYTES_PER_SAMPLE * samples)
    compute_ns = jnp.where(is_learned, learned_ns, device_flop * (1.0 / c.device_flop_per_ns))
    # The bytes stay above 0, where a roofline has no slope.
    moving_ns = jnp.maximum(device_bytes, 1.0) * (1.0 / c.device_bytes_per_ns)
    device_ns = soft_roofline(jnp.where(on_host, 0.0, compute_ns), moving_ns, ROOFLINE_SHARPNESS)
    far_row = soft_excess(HOST_HELD_BYTES_PER_SAMPLE * n_fft, FIRST_CACHE_BYTES, FIRST_CACHE_SHARPNESS)
    numpy_ns = HOST_BYTES_PER_SAMPLE * samples * ratio * host_ns + HOST_BYTES_PER_SAMPLE * samples * far_row * memory_ns
    far_signal = soft_excess(jnp.maximum(signal_bytes, 1.0), SECOND_CACHE_BYTES, SECOND_CACHE_SHARPNESS)
    transform_ns = share * jnp.where(on_host, numpy_ns, device_ns) + signal_bytes * far_signal * memory_ns

    # A learned run ranks its live bins, and also masked bins if there are fewer live bins than peaks.
    ranked = jnp.where(is_learned, jnp.maximum(live_bins + jnp.minimum(k, bins - live_bins), 1.0), bins)
    passes, spectrum_bytes = maxima_passes(ranked, k), 8.0 * n_segments * bins
    compared = jnp.maximum(rows, LANES) * (passes * (maxima_comparisons(ranked, facts) + BINS_OF_A_CANDIDATE))
    select_ns = spectrum_bytes * host_ns + c.select_row_ns + partition_comparisons(bins, k) * c.select_compare_ns
    selection_ns = jnp.where(by_numpy, rows * select_ns, jnp.where(by_maxima, compared * c.maxima_compare_ns, 0.0))
    heap_ns = ranked * c.topk_bin_ns + heap_comparisons(ranked, k) * c.topk_compare_ns
    # A pass over a single row is a plain loop over the bins.
    pass_ns = jnp.where(rows > 1, passes * jnp.sqrt(ranked / BINS_OF_A_PASS) * c.maxima_pass_ns, 0.0)

    joining_ns = jnp.where(is_shared, jnp.where(by_numpy, c.threads_ns, c.streams_ns), 0.0)
    read_back_bytes = jnp.where(is_block, rows * spectrum_bytes, jnp.where(on_host, 0.0, 8.0 * rows * k))
    # Padded rows are copied twice: into the padded signal, and to the device.
    uploaded_bytes = jnp.where(on_host, 0.0, signal_bytes) * jnp.where(is_padded, 2.0, 1.0)
    call_ns = jnp.where(by_numpy, c.host_call_ns, 0.0)
    return {
        "call_ns": call_ns + joining_ns + HOST_HELD_BYTES_PER_SAMPLE * n_fft * memory_ns,
        "launch_and_sync_ns": jnp.where(on_host, 0.0, c.launch_ns),
        "upload_ns": jnp.where(is_padded, c.padding_ns, 0.0) + share * (uploaded_bytes * copy_ns),
        "transform_ns": jnp.where(is_learned & ~is_known, jnp.inf, transform_ns),
        # Each processor makes all passes over its share of the rows.
        "selection_ns": share * selection_ns
        + heap_share * jnp.where(by_heap, rows * heap_ns, 0.0)
        + jnp.where(by_maxima, pass_ns, 0.0),
        "readback_ns": share * (read_back_bytes * copy_ns),
    }


def alone_samples(variant: Code, facts: Facts) -> RealLike:
    """Return the maximum number of samples on which a processor works alone, `[*batch]`."""
    xp = namespace_of(variant)
    on_device = xp.where(xp.asarray(variant) == BLOCK, facts["alone_samples_block"], facts["alone_samples_fused"])
    return xp.where(xp.asarray(variant) == HOST, facts["alone_samples_host"], on_device) * 1.0


def device_rows(
    variant: Code, batch: Float[Array, "*#batch"], row_samples: RealLike, facts: Facts
) -> tuple[Float[Array, "*#batch"], Bool[Array | np.ndarray, "*#batch"]]:
    """Return the number of rows that device programs process, and whether the batch is padded, `[*batch]` each."""
    # Processors work on chunks in rounds; a last round with fewer chunks takes the same time. The number of rows is a
    # staircase of slope 0, so the gradient is that of the batch.
    processors, batch = facts["processors"], jnp.asarray(batch)
    share, is_one = shared_rows(batch, row_samples, alone_samples(variant, facts), processors, facts)
    rounds = processors * jnp.ceil(jnp.ceil(batch / share) / processors)
    found = jnp.where(is_one, padded_rows(batch, facts), rounds * share)
    found = jnp.where(batch > 0, found, 0.0)
    return straight_through(found, batch * jnp.ones_like(found)), is_one & (found > batch)


def partition_comparisons(bins: RealLike, k: RealLike) -> Float[Array, "*batch"]:
    """Return the number of comparisons in which NumPy selects the k largest bins and sorts them, `[*batch]`."""
    # A network sorts few numbers. More numbers are first split around a pivot, with `2 n (1 + H(k / n))` comparisons on
    # average; H is the entropy in nats (D. E. Knuth, Mathematical Analysis of Algorithms, 1971, on Hoare's FIND).
    peaks = jnp.minimum(k, bins)
    share = jnp.where(k < bins, peaks / bins, 0.5)
    entropy = -share * jnp.log(share) - (1.0 - share) * jnp.log(1.0 - share)
    passed = jnp.where(bins > MOST_NETWORK_PLACES, COMPARISONS_OF_A_PASS * bins * (1.0 + entropy), 0.0)
    partition = jnp.minimum(2.0 * bins, MOST_NETWORK_PLACES) + passed
    return peaks * jnp.log2(peaks + 1.0) + jnp.where(k < bins, partition, 0.0)


def maxima_passes(bins: RealLike, k: RealLike) -> Float[Array, "*batch"]:
    """Return the number of passes of the selection by maxima, `[*batch]`: one per peak and per spare candidate."""
    # With more bins, a key has fewer bits for the power, so more keys are equal.
    spare = 2.0 + jnp.maximum(jnp.log2(bins) - SPARE_KEY_BITS, 0.0) / 2.0
    return jnp.minimum(jnp.minimum(k, bins) + spare, bins)


def maxima_comparisons(bins: RealLike, facts: Facts) -> Float[Array, "*batch"]:
    """Return the number of bins that a pass compares, `[*batch]`: the bins of all blocks, plus the bins of a block."""
    width = jnp.minimum(jnp.maximum(jnp.sqrt(2.0 * bins), facts["least_block_bins"]), bins)
    return jnp.maximum(bins, width * facts["least_blocks"]) + width


def heap_comparisons(bins: RealLike, k: RealLike) -> Float[Array, "*batch"]:
    """Return the number of comparisons in which a heap selects the k largest of randomly ordered bins, `[*batch]`."""
    # `k ln(bins / k)` bins enter a full heap of k (D. E. Knuth, The Art of Computer Programming, vol. 1, 1.2.10), each
    # with `log2(k + 1)` comparisons. Emptying the heap takes `log2(k!)` comparisons, here from Stirling's series.
    peaks = jnp.minimum(k, bins)
    entries = peaks * jnp.log(bins / peaks)
    log_factorial = (peaks + 0.5) * jnp.log(peaks) - peaks + 0.5 * math.log(2.0 * math.pi) + 1.0 / (12.0 * peaks)
    heap = entries * jnp.log2(peaks + 1.0) + log_factorial / math.log(2.0)
    return jnp.where(k < bins, heap, 2.0 * bins * jnp.log(bins))
