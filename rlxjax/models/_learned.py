"""The latency of the learned path: the device's of the fused one, but for the work of its own program."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._checks import check_shapes, check_sizes, fields_of
from ._counts import as_float, size_as_float
from ._device import Coefficients
from ._fit import FitResult, fit_coefficients
from ._latency import MAXIMA, DeviceWork, LatencyCoefficients, LatencyTerms, device_terms_ns
from ._latency_formulas import ROOFLINE_SHARPNESS, chunk_rows_of, device_rows
from ._numerics import soft_roofline
from ._prior import LatencyPrior, wide_prior
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
    bins, segments = n_fft / 2 + 1, n_segments * device_rows(batch, chunk_rows_of(n_fft, n_segments))
    row_bytes = 4.0 * n_fft * (n_segments + 1.0) / 2.0
    traffic = segments / n_segments * row_bytes + 8.0 * segments * live_bins
    compute_ns = segments * (own.learned_segment_ns + flop / own.learned_flop_per_ns)
    memory_ns = jnp.maximum(traffic, 1.0) / shared.device_bytes_per_ns
    ranked_bins = jnp.maximum(live_bins + jnp.minimum(k, bins - live_bins), 1.0)
    transform_ns = soft_roofline(jnp.maximum(compute_ns, 1.0), memory_ns, ROOFLINE_SHARPNESS)
    work = DeviceWork(transform_ns, ranked_bins, 8.0 * n_segments * live_bins)
    terms = device_terms_ns(shared, True, MAXIMA, batch, n_fft, k, n_segments, work)
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
    shape = np.shape(time_ns)
    columns = [np.broadcast_to(np.asarray(column, float), shape) for column in (flop, live_bins, *sizes)]
    each = jax.tree.map(lambda value: np.broadcast_to(np.asarray(value, float), shape), shared)
    prior: LatencyPrior[LearnedLatencyCoefficients] = wide_prior(_TYPICAL)
    return fit_coefficients(
        _predicted_ns, _Runs(each, *columns, time_ns=np.asarray(time_ns, float)), prior, weights
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Runs:
    """Runs of the learned path on a machine, `[n]`."""

    shared: LatencyCoefficients
    flop: np.ndarray | Float[Array, "n"]
    live_bins: np.ndarray | Float[Array, "n"]
    batch: np.ndarray | Float[Array, "n"]
    n_fft: np.ndarray | Float[Array, "n"]
    k: np.ndarray | Float[Array, "n"]
    n_segments: np.ndarray | Float[Array, "n"]
    time_ns: np.ndarray | Float[Array, "n"]


def _predicted_ns(own: LearnedLatencyCoefficients, runs: _Runs) -> Nanoseconds:
    sizes = (runs.batch, runs.n_fft, runs.k, runs.n_segments)
    return _terms_ns(own, runs.shared, runs.flop, runs.live_bins, *sizes).total_ns()
