"""The calibrated latency model: what a Welch-peaks run takes on one machine, from NumPy to NumPy.

The io-cost form (launches, sync points, bytes over bandwidths) with the terms that the work really has:
FFT operations, selection of peaks, upload, a smooth roofline, a second level of memory, and the onset of
parallel execution. All coefficients are positive and shared by the paths as far as physics allows.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._checks import check_shapes, check_sizes, fields_of, is_traced
from ._counts import size_as_float
from ._device import Coefficients
from ._numerics import soft_roofline
from ._typing import Code, Nanoseconds, RealLike
from .welch import Path
from .welch._host import CHUNK_SAMPLES

#: Changes whenever the same coefficients would give another prediction.
FORMULA_VERSION = 1

#: How sharply the larger of compute and memory time decides; 1 would be their sum.
ROOFLINE_SHARPNESS = 2.0
#: How sharply traffic beyond the cache is charged the second level's rate.
CACHE_SHARPNESS = 4.0
#: Bytes that the device's FFT stage moves for one sample: read and window, transform, square.
DEVICE_BYTES_PER_SAMPLE = 20.0
#: Bytes that the host path moves for one sample.
HOST_BYTES_PER_SAMPLE = 8.0


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
        device_call_ns: one call of a device path: checks, padding, argument handling.
        dispatch_ns: one program launch.
        roundtrip_ns: one wait of the host for the device.
        upload_bytes_per_ns: host to device.
        readback_bytes_per_ns: device to host.
        device_row_ns: one segment's transform on the device, apart from its operations.
        device_flop_per_ns: FFT operations on the device, before parallel execution sets in.
        device_bytes_per_ns: device memory while the traffic stays in cache.
        far_bytes_per_ns: what traffic beyond the cache costs on top.
        cache_bytes: traffic at which half of it is charged that.
        thread_gain: speed-up of large device work, less 1.
        thread_onset_ns: device work at which half of the gain is reached.
        topk_bin_ns: one bin scanned by the device's selection.
        topk_update_ns: one comparison of its heap.
    """

    host_call_ns: RealLike
    host_chunk_ns: RealLike
    host_row_ns: RealLike
    host_bytes_per_ns: RealLike
    host_flop_per_ns: RealLike
    select_bin_ns: RealLike
    select_peak_ns: RealLike
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
) -> LatencyTerms:
    """Return the predicted parts of one run's latency, from a NumPy signal to NumPy peaks.

    Args:
        coefficients: of the machine.
        path: "host", "fused" or "block", or codes of `Path`.
        batch: rows; the device paths run `padded_batch` of them, which the gradient takes as `batch`.
        n_fft: samples of a segment.
        k: peaks of a row.
        n_segments: segments of a row.

    Every argument but the coefficients is a scalar or `[*batch]`.

    Raises:
        ValueError: an unknown path, a negative or NaN size, or a path the model has no terms for.
    """
    codes = _path_codes(path)
    sizes = {"batch": batch, "n_fft": n_fft, "k": k, "n_segments": n_segments}
    check_sizes(**sizes)
    check_shapes(path=codes, **sizes, **fields_of(coefficients))
    return _terms_ns(coefficients, codes, *(size_as_float(value, name) for name, value in sizes.items()))


def predict_latency_ns(
    coefficients: LatencyCoefficients,
    path: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    n_segments: RealLike,
) -> Nanoseconds:
    """Return the predicted latency of one run in ns, `[*batch]`; arguments as in `latency_terms_ns`."""
    return latency_terms_ns(coefficients, path, batch, n_fft, k, n_segments).total_ns()


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
    far_bytes_per_ns: RealLike = math.inf,
    cache_bytes: RealLike = 1.0,
    speedup: RealLike = 1.0,
) -> Nanoseconds:
    """Return a device's time for `rows` transforms: a smooth roofline of compute and memory time.

    Args:
        rows: transforms, `[*batch]`.
        n_fft: samples of each.
        row_ns: cost of a transform, apart from its operations.
        flop_per_ns: operations.
        bytes_per_ns: memory while the traffic stays in cache.
        far_bytes_per_ns: what traffic beyond the cache costs on top; infinite where memory has one level.
        cache_bytes: traffic at which half of it is charged that.
        speedup: divides the compute time; memory is no faster for it.
    """
    traffic = jnp.maximum(DEVICE_BYTES_PER_SAMPLE * (rows * n_fft), 1.0)
    beyond_cache = jax.nn.sigmoid(CACHE_SHARPNESS * jnp.log(traffic / cache_bytes))
    memory_ns = traffic / bytes_per_ns + traffic * beyond_cache / far_bytes_per_ns
    compute_ns = jnp.maximum(fft_flop(rows, n_fft), 1.0) / flop_per_ns + rows * row_ns
    return soft_roofline(compute_ns / speedup, memory_ns, ROOFLINE_SHARPNESS)


def threaded_ns(work_ns: RealLike, thread_gain: RealLike, thread_onset_ns: RealLike) -> Nanoseconds:
    """Return the time of device work, `[*batch]`: small work runs alone, large work in parallel."""
    return jnp.asarray(work_ns / (1.0 + thread_gain * work_ns / (work_ns + thread_onset_ns)))


def top_k_ns(c: LatencyCoefficients, rows: RealLike, bins: RealLike, k: RealLike) -> Nanoseconds:
    """Return the time of the device's selection, `[*batch]`: a scan of the bins, and a heap's updates."""
    peaks = jnp.minimum(k, bins)
    updates = rows * (peaks * jnp.log2(peaks + 1.0)) * jnp.log(bins / peaks + 1.0)
    return jnp.asarray(rows * bins * c.topk_bin_ns + updates * c.topk_update_ns)


@jax.jit
def _terms_ns(c: LatencyCoefficients, path, batch, n_fft, k, n_segments) -> LatencyTerms:
    on_host, is_fused = path == Path.HOST.code, path == Path.FUSED.code
    run_rows = jnp.where(on_host, batch, padded_rows(batch))
    rows, bins = run_rows * n_segments, n_fft / 2 + 1
    samples = rows * n_fft
    flop = fft_flop(rows, n_fft)
    peaks = jnp.minimum(k, bins)
    sorting = peaks * jnp.log2(peaks + 1.0)
    spectrum_bytes = 8.0 * rows * bins

    chunk_rows = jnp.maximum(1.0, jnp.floor(CHUNK_SAMPLES / (n_segments * n_fft)))
    chunk_ns = jnp.maximum(1.0, _ceil(batch / chunk_rows)) * c.host_chunk_ns
    host_selection_ns = (
        batch * (n_segments * bins * 8.0 / c.host_bytes_per_ns + bins * c.select_bin_ns)
        + batch * sorting * c.select_peak_ns
    )
    host_transform_ns = (
        rows * c.host_row_ns
        + samples * HOST_BYTES_PER_SAMPLE / c.host_bytes_per_ns
        + flop / c.host_flop_per_ns
    )

    work_ns = device_work_ns(
        rows,
        n_fft,
        row_ns=c.device_row_ns,
        flop_per_ns=c.device_flop_per_ns,
        bytes_per_ns=c.device_bytes_per_ns,
        far_bytes_per_ns=c.far_bytes_per_ns,
        cache_bytes=c.cache_bytes,
    )
    device_transform_ns = threaded_ns(work_ns, c.thread_gain, c.thread_onset_ns)
    device_selection_ns = top_k_ns(c, run_rows, bins, k) + spectrum_bytes / c.device_bytes_per_ns
    upload_ns = 4.0 * run_rows * n_fft * (n_segments + 1.0) / 2.0 / c.upload_bytes_per_ns
    readback_bytes = jnp.where(is_fused, 8.0 * run_rows * k, spectrum_bytes)

    device_selection_ns = jnp.where(is_fused, device_selection_ns, chunk_ns + host_selection_ns)
    terms = LatencyTerms(
        call_ns=jnp.where(on_host, c.host_call_ns + chunk_ns, c.device_call_ns),
        launch_and_sync_ns=jnp.where(on_host, 0.0, c.dispatch_ns + c.roundtrip_ns),
        upload_ns=jnp.where(on_host, 0.0, upload_ns),
        transform_ns=jnp.where(on_host, host_transform_ns, device_transform_ns),
        selection_ns=jnp.where(on_host, host_selection_ns, device_selection_ns),
        readback_ns=jnp.where(on_host, 0.0, readback_bytes / c.readback_bytes_per_ns),
    )
    leaves, treedef = jax.tree.flatten(terms)
    return treedef.unflatten(jnp.broadcast_arrays(*leaves))


@jax.custom_jvp
def padded_rows(batch: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Return `padded_batch` of a float batch. Prevents: the zero slope of a staircase."""
    _, bits = jnp.frexp(jnp.maximum(batch, 1.0) - 1.0)
    step = jnp.ldexp(jnp.ones_like(batch), jnp.maximum(bits - 3, 0))
    return jnp.ceil(batch / step) * step


@padded_rows.defjvp
def _padded_jvp(primals, tangents):
    return padded_rows(*primals), tangents[0]


@jax.custom_jvp
def _ceil(x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Return `ceil(x)`. Prevents: the zero slope of a staircase."""
    return jnp.ceil(x)


@_ceil.defjvp
def _ceil_jvp(primals, tangents):
    return _ceil(*primals), tangents[0]


def _path_codes(path: str | Code) -> Code:
    codes = Path.codes(path)
    if not is_traced(codes) and np.any(np.asarray(codes) == Path.LEARNED.code):
        raise ValueError(
            "path: expected host, fused or block, got learned, which depends on its model; see Calibration"
        )
    return codes
