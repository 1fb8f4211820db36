"""How alike the errors of the variants of one work are: what takes longer by one takes longer by the others."""

import numpy as np
from jaxtyping import Float, Int

from ._model import Runs

#: No error is taken for smaller than this, relative: what a run is known to at best.
LEAST_SPREAD = 0.01
#: The median of the absolute values of a normal variable, and the standard deviations at which errors are clipped.
MEDIAN_SDS, MOST_SDS = 0.6745, 3.0
#: Works without a common part that are added to those that were timed. Correlations of works are expected within
#: about `1 / sqrt(4)`, of which `n` works leave the share `n / (n + 4)`.
PSEUDO_WORKS = 4.0


def alike_of(errors: Float[np.ndarray, "n"], runs: Runs, n_variants: int) -> Float[np.ndarray, "variants variants"]:
    """Return the correlation of the errors of the variants that do one piece of work: runs of equal inputs.

    With `z` the errors of a variant in units of their median absolute value, as of a normal variable, clipped to
    `-3 .. 3`, and the sums over the works that both variants were timed at,

        alike[i, j] = sum(z_i z_j) / (sqrt(sum(z_i**2) sum(z_j**2)) + 4),

    so that outliers count little, and few works too. Negative eigenvalues of the matrix are taken as none, and its
    diagonal scaled back to one. The noise of timings, which is independent, is part of the errors: the correlation is
    rather too small than too large, and a decision rather less sure than it could be.
    """
    if n_variants == 1:
        return np.ones((1, 1))
    variant = np.asarray(runs.variant)
    inputs = np.stack([np.broadcast_to(column, variant.shape) for column in runs.inputs.values()], -1)
    _, work = np.unique(inputs, axis=0, return_inverse=True)
    work = work.reshape(-1)
    scaled, is_timed = _by_work(errors, variant, work, n_variants)
    squares = np.sqrt((scaled**2).T @ is_timed)
    found = scaled.T @ scaled / (squares * squares.T + PSEUDO_WORKS)
    np.fill_diagonal(found, 1.0)
    values, vectors = np.linalg.eigh(found)
    valid = (vectors * np.maximum(values, 0.0)) @ vectors.T
    # No less than 1, as nothing was taken away.
    scale = np.sqrt(np.diag(valid))
    valid = np.clip((valid + valid.T) / (2.0 * np.outer(scale, scale)), -1.0, 1.0)
    np.fill_diagonal(valid, 1.0)
    return valid


def _by_work(
    errors: Float[np.ndarray, "n"], variant: Int[np.ndarray, "n"], work: Int[np.ndarray, "n"], n_variants: int
) -> tuple[Float[np.ndarray, "works variants"], Float[np.ndarray, "works variants"]]:
    """Return the scaled mean error of each variant at each work, 0 where it was not timed, and where it was."""
    shape = (int(work.max(initial=-1)) + 1, n_variants)
    counts, sums = np.zeros(shape), np.zeros(shape)
    np.add.at(counts, (work, variant), 1.0)
    np.add.at(sums, (work, variant), errors)
    is_timed, mean = counts > 0, sums / np.maximum(counts, 1.0)
    scaled = np.zeros(shape)
    for code in np.flatnonzero(is_timed.any(0)):
        own = mean[is_timed[:, code], code]
        scale = max(float(np.median(np.abs(own))) / MEDIAN_SDS, LEAST_SPREAD)
        scaled[is_timed[:, code], code] = np.clip(own / scale, -MOST_SDS, MOST_SDS)
    return scaled, is_timed.astype(float)
