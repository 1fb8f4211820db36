"""The calibrated latency model: what a Welch-peaks run takes on one machine, from NumPy to NumPy.

The io-cost form (launches, sync points, bytes over bandwidths) with the terms that the work really has:
FFT operations, selection of peaks, upload, a smooth roofline, a second level of memory, and the onset of
parallel execution. All coefficients are positive and shared by the paths as far as physics allows.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ._checks import check_shapes, check_sizes, fields_of, is_traced
from ._counts import size_as_float
from ._device import Coefficients
from ._latency_formulas import (
    chunk_rows_of,
    chunked_ns,
    device_rows,
    device_work_ns,
    far_ns,
    fft_flop,
    maxima_ns,
    threaded_ns,
    top_k_ns,
)
from ._typing import Code, Nanoseconds, RealLike
from .welch import Path
from .welch._host import CHUNK_SAMPLES
from .welch._selection import SELECTIONS

#: Changes whenever the same coefficients would give another prediction.
FORMULA_VERSION = 2

#: Bytes that the host path moves for one sample.
HOST_BYTES_PER_SAMPLE = 8.0
#: Codes of the forms of the device's selection, in the order of `SELECTIONS`, and of the cheaper of the two.
MAXIMA, TOP_K, CHEAPER = range(3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatencyCoefficients(Coefficients):
    """What the parts of a run take on one machine; every field positive, `[*batch]`.

    Units stand in the names: ns, bytes per ns (GB/s), FLOP per ns (GFLOP/s).

    Attributes:
        host_call_ns: one call of the host path.
        host_chunk_ns: one chunk of rows on the host (its NumPy calls).
        host_row_ns: one segment's transform on the host, apart from its operations.
        host_bytes_per_ns: samples and spectra that the host path moves.
        host_flop_per_ns: FFT operations on the host.
        select_bin_ns: one bin scanned by the host's selection.
        select_peak_ns: one comparison of the host's final sort.
        host_chunk_gain: speed-up of several chunks on the host at a time, less 1.
        device_call_ns: one call of a device path: checks, padding, argument handling.
        dispatch_ns: one program launch.
        roundtrip_ns: one wait of the host for the device.
        upload_bytes_per_ns: host to device.
        readback_bytes_per_ns: device to host.
        device_row_ns: one segment's transform on the device, apart from its operations.
        device_flop_per_ns: FFT operations on the device, before parallel execution sets in.
        device_bytes_per_ns: device memory, within a chunk.
        far_bytes_per_ns: what a signal beyond the cache costs on top.
        cache_bytes: signal at which half of it is charged that.
        thread_gain: speed-up of large device work, less 1.
        thread_onset_ns: device work at which half of the gain is reached.
        device_chunk_gain: speed-up of several chunks on the device at a time, less 1.
        maxima_key_ns: one bin's key, in the selection by maxima.
        maxima_bin_ns: one bin compared in one of its passes.
        maxima_pass_ns: one pass over a chunk, apart from its bins.
        topk_bin_ns: one bin scanned by the selection by a heap.
        topk_update_ns: one comparison of that heap.
    """

    host_call_ns: RealLike
    host_chunk_ns: RealLike
    host_row_ns: RealLike
    host_bytes_per_ns: RealLike
    host_flop_per_ns: RealLike
    select_bin_ns: RealLike
    select_peak_ns: RealLike
    host_chunk_gain: RealLike
    device_call_ns: RealLike
    dispatch_ns: RealLike
    roundtrip_ns: RealLike
    upload_bytes_per_ns: RealLike
    readback_bytes_per_ns: RealLike
    device_row_ns: RealLike
    device_flop_per_ns: RealLike
    device_bytes_per_ns: RealLike
    far_bytes_per_ns: RealLike
    cache_bytes: RealLike
    thread_gain: RealLike
    thread_onset_ns: RealLike
    device_chunk_gain: RealLike
    maxima_key_ns: RealLike
    maxima_bin_ns: RealLike
    maxima_pass_ns: RealLike
    topk_bin_ns: RealLike
    topk_update_ns: RealLike


COEFFICIENT_NAMES = tuple(field.name for field in dataclasses.fields(LatencyCoefficients))


def coefficient_unit(name: str) -> str:
    """Return the unit of a latency coefficient, as its name says.

    Examples:
        >>> coefficient_unit("upload_bytes_per_ns"), coefficient_unit("thread_gain")
        ('bytes/ns', '1')
    """
    for suffix, unit in (
        ("bytes_per_ns", "bytes/ns"),
        ("flop_per_ns", "FLOP/ns"),
        ("_ns", "ns"),
        ("_bytes", "bytes"),
        ("_rows", "rows"),
    ):
        if name.endswith(suffix):
            return unit
    return "1"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatencyTerms:
    """The parts of a predicted latency in ns, `[*batch]`; their sum is the prediction."""

    call_ns: Nanoseconds
    launch_and_sync_ns: Nanoseconds
    upload_ns: Nanoseconds
    transform_ns: Nanoseconds
    selection_ns: Nanoseconds
    readback_ns: Nanoseconds

    def total_ns(self) -> Nanoseconds:
        """Return the prediction."""
        return jax.tree.reduce(jnp.add, self)


def latency_terms_ns(
    coefficients: LatencyCoefficients,
    path: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    n_segments: RealLike,
    selection: str | Code | None = None,
) -> LatencyTerms:
    """Return the predicted parts of one run's latency, from a NumPy signal to NumPy peaks.

    Args:
        coefficients: of the machine.
        path: "host", "fused" or "block", or codes of `Path`.
        batch: rows; the device paths run whole chunks and `padded_batch` of the rest, which the gradient
            takes as `batch`.
        n_fft: samples of a segment.
        k: peaks of a row.
        n_segments: segments of a row.
        selection: how the fused path selects, "maxima" or "top_k", or codes in this order; the cheaper of
            the two unless given.

    Every argument but the coefficients is a scalar or `[*batch]`.

    Raises:
        ValueError: an unknown path or selection, a negative or NaN size, or a path without terms here.
    """
    codes = _path_codes(path)
    sizes = {"batch": batch, "n_fft": n_fft, "k": k, "n_segments": n_segments}
    check_sizes(**sizes)
    forms = _selection_codes(selection)
    check_shapes(path=codes, selection=forms, **sizes, **fields_of(coefficients))
    floats = [size_as_float(value, name) for name, value in sizes.items()]
    return _terms_ns(coefficients, codes, forms, *floats)


def predict_latency_ns(
    coefficients: LatencyCoefficients,
    path: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    n_segments: RealLike,
    selection: str | Code | None = None,
) -> Nanoseconds:
    """Return the predicted latency of one run in ns, `[*batch]`; arguments as in `latency_terms_ns`."""
    return latency_terms_ns(coefficients, path, batch, n_fft, k, n_segments, selection).total_ns()


@jax.jit
def _terms_ns(c: LatencyCoefficients, path, selection, batch, n_fft, k, n_segments) -> LatencyTerms:
    on_host, is_fused = path == Path.HOST.code, path == Path.FUSED.code
    bins = n_fft / 2 + 1
    peaks = jnp.minimum(k, bins)
    sorting = peaks * jnp.log2(peaks + 1.0)
    host_chunk = jnp.maximum(1.0, jnp.floor(CHUNK_SAMPLES / (n_segments * n_fft)))
    device_chunk = chunk_rows_of(n_fft, n_segments)
    run_rows = device_rows(batch, device_chunk)

    def host_chunks(rows):
        """Return the rows of a first chunk on the host, and the time of all rows over that of these."""
        return jnp.minimum(rows, host_chunk), chunked_ns(1.0, rows, host_chunk, c.host_chunk_gain)

    def host_selection_ns(rows):
        first, all_of_it = host_chunks(rows)
        spectrum_ns = n_segments * bins * 8.0 / c.host_bytes_per_ns
        row_ns = spectrum_ns + bins * c.select_bin_ns + sorting * c.select_peak_ns
        return all_of_it * first * row_ns

    first, all_of_it = host_chunks(batch)
    segment_ns = (
        c.host_row_ns
        + n_fft * HOST_BYTES_PER_SAMPLE / c.host_bytes_per_ns
        + fft_flop(jnp.ones_like(n_fft), n_fft) / c.host_flop_per_ns
    )
    host_transform_ns = all_of_it * first * n_segments * segment_ns

    first = jnp.minimum(run_rows, device_chunk)
    all_of_it = chunked_ns(1.0, run_rows, device_chunk, c.device_chunk_gain)
    transform_ns = device_work_ns(
        first * n_segments,
        n_fft,
        row_ns=c.device_row_ns,
        flop_per_ns=c.device_flop_per_ns,
        bytes_per_ns=c.device_bytes_per_ns,
    )
    # The transform and the maxima are vector loops that share the processors; a heap is one row's own.
    by_maxima, passes_ns = maxima_ns(c, first, bins, k)
    together_ns = threaded_ns(transform_ns + by_maxima, c.thread_gain, c.thread_onset_ns)
    alone_ns = threaded_ns(transform_ns, c.thread_gain, c.thread_onset_ns)
    heap_ns = top_k_ns(c, first, bins, k)
    is_cheaper = together_ns + passes_ns <= alone_ns + heap_ns
    takes_maxima = is_fused & jnp.where(selection == CHEAPER, is_cheaper, selection == MAXIMA)
    share = together_ns / (transform_ns + by_maxima)
    fused_selection_ns = jnp.where(takes_maxima, share * by_maxima + passes_ns, heap_ns)
    device_transform_ns = all_of_it * jnp.where(takes_maxima, share * transform_ns, alone_ns)
    block_selection_ns = c.host_chunk_ns + host_selection_ns(first)

    signal_bytes = 4.0 * run_rows * n_fft * (n_segments + 1.0) / 2.0
    spectrum_bytes = 8.0 * run_rows * n_segments * bins
    upload_ns = signal_bytes / c.upload_bytes_per_ns + far_ns(c, signal_bytes)
    readback_bytes = jnp.where(is_fused, 8.0 * run_rows * k, spectrum_bytes)
    device_selection_ns = all_of_it * jnp.where(is_fused, fused_selection_ns, block_selection_ns)
    host_call_ns = c.host_call_ns + c.host_chunk_ns * chunked_ns(1.0, batch, host_chunk, c.host_chunk_gain)
    terms = LatencyTerms(
        call_ns=jnp.where(on_host, host_call_ns, c.device_call_ns),
        launch_and_sync_ns=jnp.where(on_host, 0.0, all_of_it * (c.dispatch_ns + c.roundtrip_ns)),
        upload_ns=jnp.where(on_host, 0.0, upload_ns),
        transform_ns=jnp.where(on_host, host_transform_ns, device_transform_ns),
        selection_ns=jnp.where(on_host, host_selection_ns(batch), device_selection_ns),
        readback_ns=jnp.where(on_host, 0.0, readback_bytes / c.readback_bytes_per_ns),
    )
    leaves, treedef = jax.tree.flatten(terms)
    return treedef.unflatten(jnp.broadcast_arrays(*leaves))


def _path_codes(path: str | Code) -> Code:
    codes = Path.codes(path)
    if not is_traced(codes) and np.any(np.asarray(codes) == Path.LEARNED.code):
        raise ValueError(
            "path: expected host, fused or block, got learned, which depends on its model; see Calibration"
        )
    return codes


def _selection_codes(selection: str | Code | None) -> Code:
    if selection is None:
        return CHEAPER
    if not isinstance(selection, str):
        return selection
    if selection not in SELECTIONS:
        raise ValueError(f"selection: expected one of {', '.join(SELECTIONS)}, got {selection!r}")
    return list(SELECTIONS).index(selection)
