"""The fit of a whole posterior: terms, correction and spread, from timings."""

import dataclasses
import operator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from rlxjax._chunks import for_each_chunk
from rlxjax._values import by_value

from ._fit import STARTS, FitResult, checked_fit, for_each, has_converged, minima_and_results
from ._latency_model import Facts, LatencyPrior, Runs
from ._minimise import HUBER_DELTA, RELATIVE_SD, Minimum, minimise
from ._posterior import CORRECTION_SD, LatencyPosterior, correction_log_factor, prior_posterior
from ._timings import MIN_TIMINGS, Timings, filled_up

#: No error is taken for smaller than this, relative: what a run is known to at best.
LEAST_SPREAD = 0.01
#: The median of the absolute values of a normal variable, and the standard deviations at which errors are clipped.
MEDIAN_SDS, MOST_SDS = 0.6745, 3.0
#: Works without a common part that are added to those that were timed. Correlations of works are expected within
#: about `1 / sqrt(4)`, of which `n` works leave the share `n / (n + 4)`.
PSEUDO_WORKS = 4.0
#: Rounds in which the spread and the variances that depend on it settle, to this share.
SPREAD_ROUNDS, SETTLED_SHARE = 8, 1e-3
#: Share of errors that the spread is chosen to cover, and a normal variable's bound for it.
COVERED, COVERED_SDS = 0.9, 1.6449
#: The spread of a variant that was not timed.
UNKNOWN_SPREAD = 0.5


@by_value
class PosteriorFit(NamedTuple):
    """What `fit_posterior` found.

    Attributes:
        posterior: of the machine.
        terms: the fit of the terms alone; it has not converged where that of terms and correction has not.
        runs: that were timed, `[n]`.
        left_out_error: mean absolute relative error of each variant where its folds were left out of the
            correction, `[variants]`; NaN for variants without timings.
    """

    posterior: LatencyPosterior
    terms: FitResult[Any]
    runs: Runs
    left_out_error: np.ndarray


def fit_posterior(
    timings: Timings,
    prior: LatencyPrior[Any] | None = None,
    weights: np.ndarray | None = None,
    facts: Facts | None = None,
) -> PosteriorFit:
    """Fit terms, correction and spread to timings.

    The terms are fitted first, by `fit_latency`, to times less the prior's correction. From there, terms and
    correction are fitted together, as the likeliest of both: what a smooth factor explains as well moves no
    coefficient. The covariance of all unknowns follows from the curvature of misfit and priors (Laplace's
    approximation). The spread is such that nine tenths of the errors are covered where one of the model's folds at a
    time is left out of the correction. How alike it is between the variants that do one piece of work is what the
    fit leaves of the timings of equal inputs.

    Args:
        timings: of a model, one entry a workload, `[n]`.
        prior: of the coefficients and the correction; the model's own unless given.
        weights: `[n]`, 0 leaves an entry out.
        facts: how the machine schedules; the model's own unless given.

    Raises:
        ValueError: as of `fit_latency`.

    Examples:
        >>> from rlxjax.models import FFT
        >>> batch, n_fft = np.repeat([32, 256, 2048], 4), np.tile([64, 256, 1024, 4096], 3)
        >>> time_ns = 2e4 + 12.0 * batch * n_fft
        >>> timings = Timings.checked(FFT, variant="fft", batch=batch, n_fft=n_fft, time_ns=time_ns)
        >>> fit = fit_posterior(timings)
        >>> fit.terms.converged, fit.posterior.weights.shape
        (True, (1, 0))
    """
    _, counted, _ = checked_fit(timings, prior, weights, MIN_TIMINGS, facts)
    one, its_weights = jax.tree.map(lambda column: np.asarray(column)[None], (timings, counted))
    return fit_posteriors(one, prior, its_weights, facts)[0]


def fit_posteriors(
    timings: Timings,
    prior: LatencyPrior[Any] | None = None,
    weights: np.ndarray | None = None,
    facts: Facts | None = None,
    n_starts: int = STARTS,
) -> list[PosteriorFit]:
    """Fit terms, correction and spread to each of many devices' timings: `fit_posterior` of each, at once.

    Args:
        timings: every column `[devices, n]`; `stack_timings` makes them of several devices'.
        prior: of every device; the model's own unless given.
        weights: `[devices, n]`, 0 leaves an entry out, as where a device has fewer timings.
        facts: how the machines schedule; the model's own unless given.
        n_starts: from which each fit is tried; of a prior that other devices made, one is enough for most.

    Raises:
        ValueError: as of `fit_devices`.

    Examples:
        >>> from rlxjax.fit import stack_timings
        >>> from rlxjax.models import FFT
        >>> batch, n_fft = np.repeat([32, 256, 2048], 4), np.tile([64, 256, 1024, 4096], 3)
        >>> timings, weights = stack_timings([Timings.checked(FFT, variant="fft", batch=batch, n_fft=n_fft,
        ...                                   time_ns=2e4 + rate * batch * n_fft) for rate in (3.0, 12.0)])
        >>> [fit.terms.converged for fit in fit_posteriors(timings, weights=weights)]
        [True, True]
    """
    model = timings.model
    prior = model.prior if prior is None else prior
    before = prior_posterior(model, prior, facts=facts)
    known, timed = np.asarray(before.weights), jax.tree.map(np.asarray, timings.runs)
    of_terms, counted, facts = checked_fit(timings, prior, weights, MIN_TIMINGS, before.facts)
    own, counted = filled_up(timings, counted)
    features, variant = np.asarray(model.features(own.runs, facts), np.float64), np.asarray(own.runs.variant)
    if known.any():
        without = np.asarray(own.time_ns) * np.exp(-correction_log_factor(features, known, variant))
        own = dataclasses.replace(own, time_ns=without)
    minima, terms = minima_and_results(own, counted, of_terms, facts, n_starts)
    if features.shape[-1]:
        begin = np.concatenate([minima.z, np.zeros((len(counted), known.size))], -1)
        minima = minimise(own, counted, for_each(of_terms, len(counted)), facts, begin, features)
    ended, structure = has_converged(minima), jax.tree.structure(prior.median)
    found: list[Any] = [None] * len(counted)

    def of_devices(start: int, stop: int) -> None:
        for place in range(start, stop):
            columns = minima, own.runs, features, counted
            minimum, runs, its, counts = jax.tree.map(operator.itemgetter(place), columns)
            prior_factor = np.asarray(before.factor)
            weights, factor, spread, alike, error = _posterior_at(minimum, runs, its, counts, known.shape, prior_factor)
            coefficients = structure.unflatten(np.exp(minimum.logs).tolist())
            posterior = LatencyPosterior(model, facts, coefficients, known + weights, factor, spread, alike)
            alone = terms[place]
            if alone.converged and not ended[place]:
                said = f"{alone.message} With the correction, it did not converge."
                alone = alone._replace(converged=False, message=said)
            found[place] = PosteriorFit(posterior, alone, jax.tree.map(operator.itemgetter(place), timed), error)

    for_each_chunk(of_devices, len(counted), 1)
    return found


def _posterior_at(
    minimum: Minimum,
    runs: Runs,
    features: np.ndarray,
    counted: np.ndarray,
    shape: tuple[int, ...],
    prior_factor: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return one device's weights (of a shape), covariance factor, spread, correlations, and left-out errors."""
    variant, knee = np.asarray(runs.variant), HUBER_DELTA * RELATIVE_SD
    weights = CORRECTION_SD * minimum.z[len(minimum.logs) :].reshape(shape)
    left = correction_log_factor(features, weights, variant) - minimum.residuals
    influence = counted * np.minimum(1.0, knee / np.maximum(np.abs(minimum.residuals), knee))
    spread, left_out_error = np.full(shape[0], UNKNOWN_SPREAD), np.full(shape[0], np.nan)
    for code in range(shape[0]):
        mine = (variant == code) & (counted > 0)
        if not mine.any():
            continue
        own = jax.tree.map(lambda column: np.asarray(column)[mine], runs)  # noqa: B023 - used at once
        folds = tuple(runs.model.folds(own))
        spread[code], errors = _spread_and_errors(features[mine], left[mine], influence[mine], folds)
        left_out_error[code] = float(np.mean(np.expm1(np.abs(errors))))
    scaled = minimum.jacobian * (np.sqrt(influence) / spread[variant])[:, None]
    precision = np.where(np.isfinite(scaled), scaled, 0.0)
    factor = np.linalg.cholesky(np.linalg.inv(precision.T @ precision + np.diag(np.diag(prior_factor) ** -2.0)))
    timed = (counted > 0) & np.isfinite(minimum.residuals)
    alike = alike_of(minimum.residuals[timed], jax.tree.map(lambda column: np.asarray(column)[timed], runs), shape[0])
    return weights, factor, spread, alike, left_out_error


def _spread_and_errors(
    features: np.ndarray, left: np.ndarray, influence: np.ndarray, groups: tuple[np.ndarray, ...]
) -> tuple[float, np.ndarray]:
    """Return the spread with which intervals cover, and the errors where each value of a group is left out."""
    from scipy.special import stdtrit  # loaded when first used

    outs = np.array([values == value for values in groups for value in np.unique(values)])
    fold, row = np.nonzero(outs)
    squares = _squares(features, influence)
    without = squares - np.stack([_squares(features[out], influence[out]) for out in outs])
    moments = features.T @ (influence * left) - np.stack([features[out].T @ (influence * left)[out] for out in outs])

    covariance = _ridge_covariance(squares, RELATIVE_SD)
    weights = covariance @ (features.T @ (influence * left)) / RELATIVE_SD**2
    freedom = np.sum(covariance * squares) / RELATIVE_SD**2
    rest = np.abs(left - features @ weights) * np.sqrt(len(left) / max(len(left) - freedom, 1.0))
    least = max(LEAST_SPREAD, float(np.quantile(rest, COVERED)) / COVERED_SDS)
    found = np.einsum("kij,kj->ki", _ridge_covariance(without, RELATIVE_SD), moments) / RELATIVE_SD**2
    errors = left[row] - np.sum(features[row] * found[fold], -1)
    needed_squares, spread = (errors / COVERED_SDS) ** 2, RELATIVE_SD
    for _ in range(SPREAD_ROUNDS):
        projected = (features @ _ridge_covariance(without, spread))[fold, row]
        needed = np.sqrt(np.maximum(needed_squares - np.sum(projected * features[row], -1), 0.0))
        last, spread = spread, max(least, float(np.quantile(needed, COVERED)))
        if abs(spread - last) <= SETTLED_SHARE * spread:
            break
    # Errors of one value go together: widened as Student's distribution of as many values is beside the normal one.
    widened = stdtrit(max(len(outs) - 1, 1), (1.0 + COVERED) / 2.0) / COVERED_SDS
    return spread * float(widened), errors


def _squares(features: np.ndarray, influence: np.ndarray) -> np.ndarray:
    """Return the weighted sum of the features' outer products."""
    return features.T @ (features * influence[:, None])


def _ridge_covariance(squares: np.ndarray, noise_sd: float) -> np.ndarray:
    """Return the covariance of the correction's weights after timings of this noise, `[*folds, f, f]`."""
    return np.linalg.inv(squares / noise_sd**2 + np.eye(squares.shape[-1]) / CORRECTION_SD**2)


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
    values, vectors = np.linalg.eigh(found)
    valid = (vectors * np.maximum(values, 0.0)) @ vectors.T
    # No less than 1, as nothing was taken away.
    scale = np.sqrt(np.diag(valid))
    valid = np.clip((valid + valid.T) / (2.0 * np.outer(scale, scale)), -1.0, 1.0)
    np.fill_diagonal(valid, 1.0)
    return valid
