"""The correction: what the terms of the latency model miss, a small smooth factor of the sizes.

A linear model of the logarithm: piecewise linear in the logarithms of samples, rows and segment length, with
a step where processors begin to share the work and a slope in that of k, which rows and length change. Each
kind of run has its own weights, each with the prior `N(0, CORRECTION_SD**2)`: the level in the middle and the
rises from knot to knot, so that it stays level where nothing was timed.
"""

from itertools import pairwise

import numpy as np
from jaxtyping import Array, Float, Int

from ._latency import MAXIMA
from ._latency_formulas import unshared_rows_of
from ._numerics import namespace_of
from ._typing import Code, RealLike
from .welch import Path

#: Kinds of runs that differ by more than their sizes.
KINDS = ("host", "maxima", "top_k", "block")
#: Prior standard deviation of a weight: the correction is meant to be small, and to change little.
CORRECTION_SD = 0.05
#: log2 of the first and the last knot, and their distance, in samples, rows and samples of a segment.
KNOTS = ((6.0, 24.0, 2.0), (0.0, 14.0, 2.0), (6.0, 14.0, 2.0))
#: k at which its slope adds nothing, and the octaves that one unit of it spans.
CENTRE_K, OCTAVES_OF_K = 16.0, 2.0
#: log2 of the rows between which that slope changes.
SLOPE_KNOTS = (0.0, 2.0, 6.0, 10.0, 13.0)
#: The octaves below the most samples that one processor runs alone, over which a correction may rise.
OCTAVES_BEFORE_SHARING = 2.0

N_FEATURES = sum(round((last - first) / step) for first, last, step in KNOTS) + len(SLOPE_KNOTS) + 4


def kind_codes(path: Code, selection: Code) -> Int[Array, "*batch"]:
    """Return the place in `KINDS` of runs of a path with a form of the selection."""
    xp = namespace_of(path, selection)
    by_form = xp.where(xp.asarray(selection) == MAXIMA, 1, 2)
    on_device = xp.where(xp.asarray(path) == Path.BLOCK.code, 3, by_form)
    return xp.where(xp.asarray(path) == Path.HOST.code, 0, on_device)


def correction_features(
    kind: Int[Array, "*batch"], batch: RealLike, n_fft: RealLike, k: RealLike, n_segments: RealLike
) -> Float[Array, "*batch features"]:
    """Return what the weights of a kind multiply.

    They are the rises between knots; the rise towards the most samples that one processor runs alone, and the
    level beyond them; the slope in k of one row, its rises from knot to knot of rows, and how much larger it
    is for longer rows; and the level.

    A rise goes from 0 at one knot to 1 at the next one, before the middle knot from -1 to 0. Beyond the last
    knots of samples, rows and length a correction stays as it is there.

    Those of NumPy's arrays are NumPy's, in double precision: a fit compiles nothing for them.
    """
    xp = namespace_of(kind, batch, n_fft, k, n_segments)
    sizes = (xp.asarray(size, xp.result_type(float)) for size in (batch, n_fft, k, n_segments))
    kind, *sizes = xp.broadcast_arrays(kind, *sizes)
    rows, length, peaks, segments = (xp.maximum(size, 1.0) for size in sizes)
    columns = []
    for size, (first, last, step) in zip((rows * length * segments, rows, length), KNOTS, strict=True):
        count = round((last - first) / step)
        place = xp.clip((xp.log2(size) - first) / step, 0.0, float(count))
        rises = xp.clip(place[..., None] - along_last(count, place.ndim), 0.0, 1.0)
        columns.append(rises - (along_last(count, place.ndim) < count // 2))
    is_host, is_block = kind == KINDS.index("host"), kind == KINDS.index("block")
    filled = rows / unshared_rows_of(is_host, ~is_block, length, segments)
    is_shared = filled > 1.0
    rise = xp.clip(1.0 + xp.log2(filled) / OCTAVES_BEFORE_SHARING, 0.0, 1.0)
    octaves_of_k = xp.log2(peaks / CENTRE_K) / OCTAVES_OF_K
    of_rows = [way_between(rows, low, high) for low, high in pairwise(SLOPE_KNOTS)]
    of_length = 2.0 * way_between(length, *KNOTS[2][:2]) - 1.0
    slopes = [octaves_of_k * change for change in (1.0, *of_rows, of_length)]
    last = [xp.where(is_shared, 0.0, rise), 1.0 * is_shared, *slopes, xp.ones_like(peaks)]
    return xp.concatenate([*columns, xp.stack(last, -1)], axis=-1)


def correction_log_factor(
    features: Float[Array, "*batch features"] | np.ndarray,
    weights: Float[Array, "kinds features"] | np.ndarray,
    kind: Int[Array, "*batch"] | np.ndarray,
) -> Float[Array, "*batch"]:
    """Return the logarithm of what the correction multiplies predictions by."""
    xp = namespace_of(features, weights, kind)
    return xp.sum(features * xp.asarray(weights)[kind], -1)


def way_between(size: Float[Array, "*batch"], low: float, high: float) -> Float[Array, "*batch"]:
    """Return how far a size is from `2**low` to `2**high` in its logarithm, 0 and 1 beyond them."""
    xp = namespace_of(size)
    return xp.clip((xp.log2(size) - low) / (high - low), 0.0, 1.0)


def along_last(count: int, n_axes: int) -> np.ndarray:
    """Return 0 to count - 1 along an axis after so many others, `[1, ..., 1, count]`."""
    return np.arange(count).reshape((1,) * n_axes + (count,))
