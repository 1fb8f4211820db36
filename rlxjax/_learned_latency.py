"""The latency of the learned path: the device's of the fused one, but for the work of its own program."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._checks import check_shapes, check_sizes, fields_of
from ._counts import as_float, size_as_float
from ._device import Coefficients
from ._fit import FitResult, LatencyPrior, fit_coefficients, wide_prior
from ._latency import LatencyCoefficients, LatencyTerms
from ._latency_formulas import (
    ROOFLINE_SHARPNESS,
    chunk_rows_of,
    chunked_ns,
    device_rows,
    far_ns,
    maxima_ns,
    threaded_ns,
)
from ._numerics import soft_roofline
from ._typing import Nanoseconds, RealLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LearnedLatencyCoefficients(Coefficients):
    """What the pruned transform takes on one machine; every field positive, `[*batch]`.

    Attributes:
        learned_segment_ns: one segment, apart from its operations and its bytes.
        learned_flop_per_ns: operations of the pruned program, before parallel execution sets in.
    """

    learned_segment_ns: RealLike
    learned_flop_per_ns: RealLike


LEARNED_COEFFICIENT_NAMES = tuple(field.name for field in dataclasses.fields(LearnedLatencyCoefficients))

_TYPICAL = LearnedLatencyCoefficients(learned_segment_ns=50.0, learned_flop_per_ns=30.0)


class _Parts(NamedTuple):
    """A run but for the pruned transform's own coefficients, `[*batch]`; work is that of its first chunk."""

    without_transform: LatencyTerms
    all_over_first_chunk: RealLike
    segments: RealLike
    flop: RealLike
    memory_ns: RealLike


def learned_terms_ns(
    own: LearnedLatencyCoefficients,
    shared: LatencyCoefficients,
    flop: RealLike,
    live_bins: RealLike,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    n_segments: RealLike,
) -> LatencyTerms:
    """Return the predicted parts of one run of the learned path, from NumPy to NumPy, in ns, `[*batch]`.

    Call, launch, upload and readback are the fused path's. The transform is a roofline of the pruned
    program's operations and the bytes of signal and live bins; the selection is over the live bins and as
    many masked ones as could be among the peaks.

    Args:
        own: of the pruned transform.
        shared: of the machine.
        flop: operations of the pruned program for one segment.
        live_bins: bins that are not masked.
        batch: rows of the signal, scalar or `[*batch]`, as the other sizes.
        n_fft: samples of a segment.
        k: peaks of a row.
        n_segments: segments of a row.

    Raises:
        ValueError: a size that cannot be, or shapes that do not agree.
    """
    sizes = {"batch": batch, "n_fft": n_fft, "k": k, "n_segments": n_segments}
    check_sizes(**sizes)
    check_shapes(flop=flop, live_bins=live_bins, **sizes, **fields_of(own), **fields_of(shared))
    floats = [size_as_float(value, name) for name, value in sizes.items()]
    return _terms_ns(own, shared, as_float(flop, "flop"), as_float(live_bins, "live_bins"), *floats)


@jax.jit
def _terms_ns(own, shared, flop, live_bins, batch, n_fft, k, n_segments) -> LatencyTerms:
    parts = _parts(shared, flop, live_bins, batch, n_fft, k, n_segments)
    transform_ns = parts.all_over_first_chunk * _transform_ns(
        own, parts.segments, parts.flop, parts.memory_ns, shared.thread_gain, shared.thread_onset_ns
    )
    terms = dataclasses.replace(parts.without_transform, transform_ns=transform_ns)
    leaves, treedef = jax.tree.flatten(terms)
    return treedef.unflatten(jnp.broadcast_arrays(*leaves))


def fit_learned(
    shared: LatencyCoefficients,
    flop: Sequence[float] | np.ndarray,
    live_bins: Sequence[int] | np.ndarray,
    sizes: np.ndarray,
    time_ns: np.ndarray,
    weights: np.ndarray | None = None,
) -> FitResult[LearnedLatencyCoefficients]:
    """Fit the pruned transform's coefficients to runs of the learned path; the machine's stay as they are.

    Args:
        shared: of the machine, fitted to the other paths.
        flop: operations of each run's program for one segment, `[n]`.
        live_bins: of each run's program, `[n]`.
        sizes: batch, n_fft, k and n_segments of each run, `[4, n]`.
        time_ns: of each run, `[n]`.
        weights: `[n]`, 0 leaves an entry out.

    Raises:
        ValueError: fewer than 8 timings that count, or all of one workload.
    """
    columns = [np.asarray(column, float) for column in (flop, live_bins, *sizes)]
    parts = _parts(shared, *columns)
    terms = parts.without_transform
    fixed = [terms.call_ns, terms.launch_and_sync_ns, terms.upload_ns, terms.selection_ns, terms.readback_ns]
    shape = np.shape(time_ns)

    def column(values: RealLike) -> np.ndarray:
        return np.broadcast_to(np.asarray(values, float), shape)

    timings = _Runs(
        fixed_ns=column(sum(np.asarray(part) for part in fixed)),
        all_over_first_chunk=column(parts.all_over_first_chunk),
        segments=column(parts.segments),
        flop=column(parts.flop),
        memory_ns=column(parts.memory_ns),
        thread_gain=column(shared.thread_gain),
        thread_onset_ns=column(shared.thread_onset_ns),
        time_ns=np.asarray(time_ns, float),
    )
    prior: LatencyPrior[LearnedLatencyCoefficients] = wide_prior(_TYPICAL)
    return fit_coefficients(_predicted_ns, timings, prior, weights)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Runs:
    """Runs of the learned path, `[n]`."""

    fixed_ns: np.ndarray | Float[Array, "n"]
    all_over_first_chunk: np.ndarray | Float[Array, "n"]
    segments: np.ndarray | Float[Array, "n"]
    flop: np.ndarray | Float[Array, "n"]
    memory_ns: np.ndarray | Float[Array, "n"]
    thread_gain: np.ndarray | Float[Array, "n"]
    thread_onset_ns: np.ndarray | Float[Array, "n"]
    time_ns: np.ndarray | Float[Array, "n"]


def _predicted_ns(own: LearnedLatencyCoefficients, runs: _Runs) -> Nanoseconds:
    transform_ns = _transform_ns(
        own, runs.segments, runs.flop, runs.memory_ns, runs.thread_gain, runs.thread_onset_ns
    )
    return jnp.asarray(runs.fixed_ns + runs.all_over_first_chunk * transform_ns)


def _transform_ns(own, segments, flop, memory_ns, thread_gain, thread_onset_ns) -> Nanoseconds:
    compute_ns = segments * own.learned_segment_ns + flop / own.learned_flop_per_ns
    return threaded_ns(soft_roofline(compute_ns, memory_ns, ROOFLINE_SHARPNESS), thread_gain, thread_onset_ns)


def _parts(shared, flop, live_bins, batch, n_fft, k, n_segments) -> _Parts:
    floats = (jnp.asarray(size, jnp.result_type(float)) for size in (batch, n_fft, k, n_segments))
    batch, n_fft, k, n_segments = floats
    live_bins = jnp.asarray(live_bins, jnp.result_type(float))
    bins, chunk_rows = n_fft / 2 + 1, chunk_rows_of(n_fft, n_segments)
    rows = device_rows(batch, chunk_rows)
    first, all_of_it = (
        jnp.minimum(rows, chunk_rows),
        chunked_ns(1.0, rows, chunk_rows, shared.device_chunk_gain),
    )
    row_bytes = 4.0 * n_fft * (n_segments + 1.0) / 2.0
    segments = first * n_segments
    traffic = jnp.maximum(first * row_bytes + 8.0 * segments * live_bins, 1.0)
    ranked = jnp.maximum(live_bins + jnp.minimum(k, bins - live_bins), 1.0)
    bins_ns, passes_ns = maxima_ns(shared, first, ranked, k)
    selection_ns = threaded_ns(bins_ns, shared.thread_gain, shared.thread_onset_ns) + passes_ns
    terms = LatencyTerms(
        call_ns=jnp.asarray(shared.device_call_ns),
        launch_and_sync_ns=jnp.asarray(all_of_it * (shared.dispatch_ns + shared.roundtrip_ns)),
        upload_ns=rows * row_bytes / shared.upload_bytes_per_ns + far_ns(shared, rows * row_bytes),
        transform_ns=jnp.zeros(()),
        selection_ns=jnp.asarray(all_of_it * selection_ns),
        readback_ns=8.0 * rows * k / shared.readback_bytes_per_ns,
    )
    memory_ns = traffic / shared.device_bytes_per_ns
    return _Parts(terms, all_of_it, segments, jnp.maximum(segments * flop, 1.0), memory_ns)
