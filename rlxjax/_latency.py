"""The calibrated latency model: what a Welch-peaks run takes on one machine, from NumPy to NumPy.

The io-cost form (launches, sync points, bytes over bandwidths) with the terms that the work really has:
FFT operations, selection of peaks, upload, a smooth roofline, a second level of memory, and the onset of
parallel execution. All coefficients are positive and shared by the paths as far as physics allows.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._checks import check_shapes, check_sizes, fields_of, is_traced
from ._counts import size_as_float
from ._device import Coefficients
from ._latency_formulas import (
    CHUNK_ROWS_MULTIPLE,
    LEAST_IN_PLACE_BYTES,
    SPLIT_RADIX,
    TRANSFORM_BYTES_PER_SAMPLE,
    chunk_rows_of,
    device_rows,
    device_work_ns,
    far_ns,
    fft_flop,
    fused_transform_bytes,
    is_taken_apart,
    long_rows_ns,
    maxima_ns,
    partition_places,
    share_of_work,
    signal_bytes,
    top_k_ns,
    unshared_rows_of,
)
from ._programs import quick_jit
from ._typing import Code, Nanoseconds, RealLike
from .welch import Path
from .welch._selection import SELECTIONS

#: Changes whenever the same coefficients would give another prediction.
FORMULA_VERSION = 12

#: Bytes that the host path moves for one sample.
HOST_BYTES_PER_SAMPLE = 8.0
#: Bytes that NumPy's transform reads and writes for one sample: window product, spectrum, work, factors.
HOST_ROW_BYTES_PER_SAMPLE = 32.0
#: Bytes that a call reads from memory for each sample of a segment, however many rows it has: window, factors
#: and work arrays, which are no longer in the caches.
BYTES_READ_ANEW_PER_SAMPLE = 32.0
#: Codes of the forms of the device's selection, in the order of `SELECTIONS`, and of the cheaper of the two.
MAXIMA, TOP_K, CHEAPER = range(3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatencyCoefficients(Coefficients):
    """What the parts of a run take on one machine; every field positive, `[*batch]`.

    Units stand in the names: ns, bytes per ns (GB/s), FLOP per ns (GFLOP/s).

    Attributes:
        host_call_ns: one call of NumPy code: the host path, or the block path's selection.
        host_row_ns: one segment's transform on the host, apart from its operations.
        host_bytes_per_ns: samples and spectra that the host path moves.
        host_flop_per_ns: FFT operations on the host.
        host_row_far_bytes_per_ns: what a transform on the host costs on top beyond a processor's first cache.
        select_row_ns: one row of the host's selection, however many bins it has.
        select_bin_ns: one bin scanned by the host's selection.
        select_sort_ns: one place of the network by which its partition sorts; a pass over a bin, half of it.
        select_peak_ns: one comparison of the host's final sort.
        host_parallel_gain: speed-up by all processors on the host, less 1.
        threads_ns: having other threads of Python's join in.
        device_call_ns: one call of a device path: checks, padding, argument handling.
        dispatch_ns: one program launch.
        roundtrip_ns: one wait of the host for the device.
        streams_ns: having the programs of other processors run beside the first one.
        upload_bytes_per_ns: host to device.
        staging_bytes_per_ns: the copy of a signal below 4 MiB, on its way to where a device takes it from.
        readback_bytes_per_ns: device to host.
        device_row_ns: one segment's transform on the device, apart from its operations.
        device_flop_per_ns: FFT operations on the device.
        device_bytes_per_ns: device memory, within a chunk.
        split_sample_ns: one sample of the step that takes long transforms apart.
        row_far_bytes_per_ns: what a transform costs on top beyond a processor's first cache.
        row_cache_bytes: a row's transform at which half of it is charged that.
        far_bytes_per_ns: memory: what a signal beyond the cache costs on top, and what each call reads anew.
        cache_bytes: signal at which half of it is charged that.
        device_parallel_gain: speed-up by programs on all processors at a time, less 1.
        maxima_key_ns: one bin's key, in the selection by maxima.
        maxima_bin_ns: one bin compared in one of its passes.
        maxima_peak_ns: one candidate gathered and put in order.
        maxima_pass_ns: one of those passes, however many rows it has.
        maxima_parallel_gain: speed-up of those passes by all processors at a time, less 1.
        topk_bin_ns: one bin scanned by the selection by a heap.
        topk_update_ns: one comparison of that heap.
        topk_parallel_gain: speed-up of heaps on all processors at a time, less 1.
    """

    host_call_ns: RealLike
    host_row_ns: RealLike
    host_bytes_per_ns: RealLike
    host_flop_per_ns: RealLike
    host_row_far_bytes_per_ns: RealLike
    select_row_ns: RealLike
    select_bin_ns: RealLike
    select_sort_ns: RealLike
    select_peak_ns: RealLike
    host_parallel_gain: RealLike
    threads_ns: RealLike
    device_call_ns: RealLike
    dispatch_ns: RealLike
    roundtrip_ns: RealLike
    streams_ns: RealLike
    upload_bytes_per_ns: RealLike
    staging_bytes_per_ns: RealLike
    readback_bytes_per_ns: RealLike
    device_row_ns: RealLike
    device_flop_per_ns: RealLike
    device_bytes_per_ns: RealLike
    split_sample_ns: RealLike
    row_far_bytes_per_ns: RealLike
    row_cache_bytes: RealLike
    far_bytes_per_ns: RealLike
    cache_bytes: RealLike
    device_parallel_gain: RealLike
    maxima_key_ns: RealLike
    maxima_bin_ns: RealLike
    maxima_peak_ns: RealLike
    maxima_pass_ns: RealLike
    maxima_parallel_gain: RealLike
    topk_bin_ns: RealLike
    topk_update_ns: RealLike
    topk_parallel_gain: RealLike


class DeviceWork(NamedTuple):
    """What a device path does of its own, `[*batch]`.

    Attributes:
        transform_ns: the transform of all rows by one processor.
        ranked_bins: bins of a row that the selection ranks.
        spectrum_bytes: of a row, that the block path reads back.
    """

    transform_ns: Nanoseconds
    ranked_bins: RealLike
    spectrum_bytes: RealLike


COEFFICIENT_NAMES = tuple(field.name for field in dataclasses.fields(LatencyCoefficients))


def coefficient_unit(name: str) -> str:
    """Return the unit of a latency coefficient, as its name says.

    Examples:
        >>> coefficient_unit("upload_bytes_per_ns"), coefficient_unit("host_parallel_gain")
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
    """The parts of a predicted latency in ns, `[*batch]`; their sum is the prediction.

    The correction, of either sign, is a calibration's; the terms alone have none.
    """

    call_ns: Nanoseconds
    launch_and_sync_ns: Nanoseconds
    upload_ns: Nanoseconds
    transform_ns: Nanoseconds
    selection_ns: Nanoseconds
    readback_ns: Nanoseconds
    correction_ns: Nanoseconds | float = 0.0

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


@quick_jit
def _terms_ns(c: LatencyCoefficients, path, selection, batch, n_fft, k, n_segments) -> LatencyTerms:
    on_host, is_fused = path == Path.HOST.code, path == Path.FUSED.code
    host = _host_terms_ns(c, batch, n_fft, k, n_segments)
    device = device_terms_ns(c, is_fused, selection, batch, n_fft, k, n_segments)
    terms = jax.tree.map(lambda mine, other: jnp.where(on_host, mine, other), host, device)
    leaves, treedef = jax.tree.flatten(terms)
    return treedef.unflatten(jnp.broadcast_arrays(*leaves))


def _host_terms_ns(c: LatencyCoefficients, batch, n_fft, k, n_segments) -> LatencyTerms:
    transform_ns, selection_ns = _host_work_ns(c, batch, n_fft, k, n_segments)
    unshared = unshared_rows_of(True, False, n_fft, n_segments)
    is_shared = jnp.asarray(batch > unshared)
    share = share_of_work(is_shared, batch, unshared, c.host_parallel_gain)
    nothing = jnp.zeros_like(transform_ns)
    return LatencyTerms(
        call_ns=jnp.asarray(
            c.host_call_ns + _read_anew_ns(c, n_fft) + jnp.where(is_shared, c.threads_ns, 0.0)
        ),
        launch_and_sync_ns=nothing,
        upload_ns=nothing,
        transform_ns=share * transform_ns + far_ns(c, signal_bytes(batch, n_fft, n_segments)),
        selection_ns=share * selection_ns,
        readback_ns=nothing,
    )


def _host_work_ns(c: LatencyCoefficients, rows, n_fft, k, n_segments) -> tuple[Nanoseconds, Nanoseconds]:
    """Return what transform and selection of rows take one processor of the host."""
    bins = n_fft / 2 + 1
    peaks = jnp.minimum(k, bins)
    samples = rows * n_segments * n_fft
    transform_ns = (
        rows * n_segments * c.host_row_ns
        + samples * HOST_BYTES_PER_SAMPLE / c.host_bytes_per_ns
        + fft_flop(rows * n_segments, n_fft) / c.host_flop_per_ns
        + long_rows_ns(
            samples, HOST_ROW_BYTES_PER_SAMPLE * n_fft, c.row_cache_bytes, c.host_row_far_bytes_per_ns
        )
    )
    row_ns = (
        n_segments * bins * 8.0 / c.host_bytes_per_ns
        + c.select_row_ns
        + bins * c.select_bin_ns
        + partition_places(bins, k) * c.select_sort_ns
        + peaks * jnp.log2(peaks + 1.0) * c.select_peak_ns
    )
    return transform_ns, rows * row_ns


def _read_anew_ns(c: LatencyCoefficients, n_fft) -> Nanoseconds:
    return jnp.asarray(BYTES_READ_ANEW_PER_SAMPLE * n_fft / c.far_bytes_per_ns)


def device_terms_ns(
    c: LatencyCoefficients, is_fused, selection, batch, n_fft, k, n_segments, work: DeviceWork | None = None
) -> LatencyTerms:
    """Return the parts of a run on the device; `work` is that of a path with its own transform."""
    bins = n_fft / 2 + 1
    most = chunk_rows_of(n_fft, n_segments)
    unshared = unshared_rows_of(False, is_fused, n_fft, n_segments)
    least = jnp.maximum(unshared / 2, CHUNK_ROWS_MULTIPLE)
    rows, is_shared = device_rows(batch, most), jnp.asarray(batch > unshared)
    share = share_of_work(is_shared, rows, least, c.device_parallel_gain)
    # Taken for that of a whole number of processors, two at least: so it steps halfway between two of them,
    # not at 1, where fits of two processors end.
    processors = jnp.where(is_shared, 1.0 + jnp.maximum(jnp.round(c.device_parallel_gain), 1.0), 1.0)
    program_rows = jnp.clip(rows / processors, jnp.minimum(rows, least), most)
    samples = rows * n_segments * n_fft
    if work is None:
        is_apart = is_fused & is_taken_apart(program_rows, n_fft, n_segments)
        transform_ns = device_work_ns(
            rows * n_segments,
            n_fft,
            row_ns=c.device_row_ns,
            flop_per_ns=c.device_flop_per_ns,
            bytes_per_ns=c.device_bytes_per_ns,
            parts=jnp.where(is_apart, SPLIT_RADIX, 1.0),
        )
        transform_ns = transform_ns + jnp.where(is_apart, samples * c.split_sample_ns, 0.0)
        packed_bytes = fused_transform_bytes(n_fft, n_segments)
        row_bytes = jnp.where(is_fused, packed_bytes, TRANSFORM_BYTES_PER_SAMPLE * n_fft)
        transform_ns = transform_ns + long_rows_ns(
            samples, row_bytes, c.row_cache_bytes, c.row_far_bytes_per_ns
        )
        work = DeviceWork(transform_ns, bins, 8.0 * n_segments * bins)
    transform_ns = share * work.transform_ns
    # Each form gains by processors on its own: a heap stays in a processor's first cache, the keys that
    # maxima pass over again and again do not.
    maxima_share = share_of_work(is_shared, rows, least, c.maxima_parallel_gain)
    by_maxima_ns = maxima_ns(c, rows, work.ranked_bins, k, maxima_share)
    heap_share = share_of_work(is_shared, rows, least, c.topk_parallel_gain)
    by_heap_ns = heap_share * top_k_ns(c, rows, work.ranked_bins, k)
    takes_maxima = jnp.where(selection == CHEAPER, by_maxima_ns <= by_heap_ns, selection == MAXIMA)
    selection_ns = jnp.where(is_fused, jnp.where(takes_maxima, by_maxima_ns, by_heap_ns), 0.0)

    # A processor that runs the block path's programs selects from their spectra as well.
    host_share = share_of_work(is_shared, rows, least, c.host_parallel_gain)
    block_ns = host_share * _host_work_ns(c, rows, n_fft, k, n_segments)[1]
    # NumPy's calls hold the interpreter: those of several processors take turns.
    host_calls = jnp.where(is_shared, 1.0 + c.host_parallel_gain, 1.0)
    numpy_ns = jnp.where(is_fused, 0.0, host_calls * c.host_call_ns + _read_anew_ns(c, n_fft))
    # One thread launches a program for each processor, and further ones while those run; for the block path,
    # other threads join in.
    joining_ns = jnp.where(is_shared, jnp.where(is_fused, c.streams_ns, c.threads_ns), 0.0)

    uploaded_bytes = signal_bytes(rows, n_fft, n_segments)
    staged_bytes = jnp.where(uploaded_bytes < LEAST_IN_PLACE_BYTES, uploaded_bytes, 0.0)
    upload_ns = uploaded_bytes / c.upload_bytes_per_ns + staged_bytes / c.staging_bytes_per_ns
    # The spectra of each processor's later chunks lie where those of its first one did.
    first_rows = jnp.minimum(rows, (1.0 + c.device_parallel_gain) * most)
    readback_bytes = jnp.where(is_fused, 8.0 * rows * k, first_rows * work.spectrum_bytes)
    return LatencyTerms(
        call_ns=jnp.asarray(c.device_call_ns + _read_anew_ns(c, n_fft) + numpy_ns + joining_ns),
        launch_and_sync_ns=jnp.asarray(c.dispatch_ns + c.roundtrip_ns),
        upload_ns=share * upload_ns + far_ns(c, uploaded_bytes),
        transform_ns=transform_ns,
        selection_ns=jnp.where(is_fused, selection_ns, block_ns),
        readback_ns=share * readback_bytes / c.readback_bytes_per_ns,
    )


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
