"""The spread of runs about their predictions, and the correlation of this spread between variants."""

import numpy as np
from jaxtyping import Float

from ._latency_model import Runs
from ._minimise import RELATIVE_SD
from ._posterior import CORRECTION_SD

#: The largest number of rounds for the spread. The loop ends earlier if a round changes the spread by at most the
#: share `SETTLED`.
SPREAD_ROUNDS, SETTLED = 8, 1e-3
#: The smallest spread of a variant's runs.
LEAST_SPREAD = 0.01
#: The median absolute value of a standard normal variable, and the number of standard deviations that clips errors.
MEDIAN_SDS, MOST_SDS = 0.6745, 3.0
#: The prior of `alike_of` counts as much as this number of pieces of work.
PSEUDO_WORKS = 4.0
#: The share of errors that an interval covers, and half the width of this interval in standard deviations.
COVERED, COVERED_SDS = 0.9, 1.6449


def spread_and_errors(
    features: np.ndarray,
    left: np.ndarray,
    influence: np.ndarray,
    groups: tuple[np.ndarray, ...],
    scatter: np.ndarray,
) -> tuple[float, np.ndarray]:
    """Return the spread whose intervals cover the share `COVERED` of the errors on left-out folds; and the errors."""
    from scipy.special import stdtrit  # loaded when first used

    def products(rows):
        return features[rows].T @ (features[rows] * influence[rows][:, None])

    def ridge_covariance(squares, noise_sd):
        """Return the posterior covariance of the correction's weights, `[*folds, f, f]`, for noise of `noise_sd`."""
        return np.linalg.inv(squares / noise_sd**2 + np.eye(squares.shape[-1]) / CORRECTION_SD**2)

    outs, weighted = (
        np.array([values == value for values in groups for value in np.unique(values)]),
        influence * left,
    )
    fold, row = np.nonzero(outs)
    squares = products(slice(None))
    without = squares - np.stack([products(out) for out in outs])
    moments = features.T @ weighted - np.stack([features[out].T @ weighted[out] for out in outs])

    covariance = ridge_covariance(squares, RELATIVE_SD)
    weights = covariance @ (features.T @ weighted) / RELATIVE_SD**2
    freedom = np.sum(covariance * squares) / RELATIVE_SD**2
    rest = np.abs(left - features @ weights) / scatter * np.sqrt(len(left) / max(len(left) - freedom, 1.0))
    least = max(LEAST_SPREAD, float(np.quantile(rest, COVERED)) / COVERED_SDS)
    found = np.einsum("kij,kj->ki", ridge_covariance(without, RELATIVE_SD), moments) / RELATIVE_SD**2
    errors = left[row] - np.sum(features[row] * found[fold], -1)
    needed_squares, spread = (errors / COVERED_SDS) ** 2, RELATIVE_SD
    for _ in range(SPREAD_ROUNDS):
        projected = (features @ ridge_covariance(without, spread))[fold, row]
        needed = np.sqrt(np.maximum(needed_squares - np.sum(projected * features[row], -1), 0.0)) / scatter[row]
        last, spread = spread, max(least, float(np.quantile(needed, COVERED)))
        if abs(spread - last) <= SETTLED * spread:
            break
    # Errors within a fold are correlated. Student's distribution, with the number of folds, widens the spread.
    widened = stdtrit(max(len(outs) - 1, 1), (1.0 + COVERED) / 2.0) / COVERED_SDS
    return spread * float(widened), errors


def alike_of(errors: Float[np.ndarray, "n"], runs: Runs, n_variants: int) -> Float[np.ndarray, "variants variants"]:
    """Return the correlation between the errors of two variants at the same work, that is, at equal inputs."""
    # With `z`, a variant's errors in robust standard deviations, clipped to `-3 .. 3`, the correlation is
    #     sum(z_i z_j) / (sqrt(sum(z_i**2) sum(z_j**2)) + 4)
    # over the work that was timed with both variants. Outliers and small samples therefore count little.
    if n_variants == 1:
        return np.ones((1, 1))
    variant = np.asarray(runs.variant)
    inputs = np.stack([*runs.of_shape(variant.shape).inputs.values()], -1)
    work = np.unique(inputs, axis=0, return_inverse=True)[1].reshape(-1)
    shape = (int(work.max(initial=-1)) + 1, n_variants)
    counts, sums, scaled = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    np.add.at(counts, (work, variant), 1.0)
    np.add.at(sums, (work, variant), errors)
    timed, mean = counts > 0, sums / np.maximum(counts, 1.0)
    for code in np.flatnonzero(timed.any(0)):
        own = mean[timed[:, code], code]
        scale = max(float(np.median(np.abs(own))) / MEDIAN_SDS, LEAST_SPREAD)
        scaled[timed[:, code], code] = np.clip(own / scale, -MOST_SDS, MOST_SDS)
    squares = np.sqrt((scaled**2).T @ timed.astype(float))
    found = scaled.T @ scaled / (squares * squares.T + PSEUDO_WORKS)
    np.fill_diagonal(found, 1.0)
    # A correlation matrix has no negative eigenvalues and a diagonal of 1.
    values, vectors = np.linalg.eigh(found)
    valid = (vectors * np.maximum(values, 0.0)) @ vectors.T
    valid, sds = (valid + valid.T) / 2.0, np.sqrt(np.diag(valid))
    found = np.clip(valid / np.outer(sds, sds), -1.0, 1.0)
    np.fill_diagonal(found, 1.0)
    return found
