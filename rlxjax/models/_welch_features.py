"""What the correction of a variant of Welch peaks may depend on: a piecewise linear function of logarithms of sizes.

Samples, rows and segment length, a step where processors begin to share the work, and a slope in the logarithm of k,
which rows and length change.
"""

from itertools import pairwise

import numpy as np
from jaxtyping import Array, Float

from rlxjax._numerics import namespace_of
from rlxjax._typing import RealLike
from rlxjax.fit import Facts, Runs

from ._welch_terms import alone_samples

#: log2 of the first and the last knot, and their distance, in samples, rows and samples of a segment.
KNOTS = ((6.0, 24.0, 2.0), (0.0, 14.0, 2.0), (6.0, 14.0, 1.0))
#: k at which its slope adds nothing, and the octaves that one unit of it spans.
CENTRE_K, OCTAVES_OF_K = 16.0, 2.0
#: log2 of the rows between which that slope changes.
SLOPE_KNOTS = (0.0, 2.0, 6.0, 10.0, 13.0)
#: The octaves below the most samples that one processor works on alone, over which a correction may rise.
OCTAVES_BEFORE_SHARING = 2.0


def welch_features(runs: Runs, facts: Facts) -> Float[Array | np.ndarray, "*batch features"]:
    """Return what the weights of a variant multiply.

    They are the rises between knots; the rise towards the most samples that one processor works on alone, and the
    level beyond them; the slope in k of one row, its rises from knot to knot of rows, and how much larger it is for
    longer rows; and the level.

    A rise goes from 0 at one knot to 1 at the next one, before the middle knot from -1 to 0: so a correction stays
    level where nothing was timed.

    Those of NumPy's arrays are NumPy's, in double precision: a fit compiles nothing for them.
    """
    xp = namespace_of(runs.variant, *runs.inputs.values())
    sizes = (xp.asarray(runs.inputs[name], xp.result_type(float)) for name in ("batch", "n_fft", "k", "n_segments"))
    variant, *sizes = xp.broadcast_arrays(xp.asarray(runs.variant), *sizes)
    rows, length, peaks, segments = (xp.maximum(size, 1.0) for size in sizes)
    samples = rows * length * segments
    columns = []
    for size, (first, last, step) in zip((samples, rows, length), KNOTS, strict=True):
        count = round((last - first) / step)
        places = np.arange(float(count)).reshape((1,) * rows.ndim + (count,))
        rises = xp.clip((xp.log2(size)[..., None] - first) / step - places, 0.0, 1.0)
        columns.append(rises - np.where(places < count // 2, 1.0, 0.0))
    filled = samples / alone_samples(variant, facts)
    rise = xp.clip(1.0 + xp.log2(filled) / OCTAVES_BEFORE_SHARING, 0.0, 1.0)
    octaves_of_k = xp.log2(peaks / CENTRE_K) / OCTAVES_OF_K
    of_rows = [_way_between(rows, low, high) for low, high in pairwise(SLOPE_KNOTS)]
    of_length = 2.0 * _way_between(length, *KNOTS[2][:2]) - 1.0
    slopes = [octaves_of_k * change for change in (1.0, *of_rows, of_length)]
    last = [xp.where(filled > 1.0, 0.0, rise), xp.where(filled > 1.0, 1.0, 0.0), *slopes, xp.ones_like(peaks)]
    return xp.concatenate([*columns, xp.stack(last, -1)], axis=-1)


def _way_between(size: RealLike, low: float, high: float) -> RealLike:
    """Return how far a size is from `2**low` to `2**high` in its logarithm, 0 and 1 beyond them."""
    xp = namespace_of(size)
    return xp.clip((xp.log2(size) - low) / (high - low), 0.0, 1.0)
