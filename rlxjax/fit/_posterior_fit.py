"""The fit of a whole posterior: terms, correction and spread, from timings."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from rlxjax._values import by_value

from ._coefficients import LatencyPrior
from ._fit import FitResult, minimum_and_result
from ._model import Facts, Runs
from ._posterior import CORRECTION_SD, LatencyPosterior, correction_log_factor, joint_jacobian, prior_posterior
from ._timings import Timings

#: Rounds in which the spread and the variances that depend on it settle.
SPREAD_ROUNDS = 8
#: Relative error of timings that the weights of the correction are fitted with.
CORRECTION_NOISE_SD = 0.04
#: Rounds of reweighting against outliers, and the error beyond which one counts less.
REWEIGHTINGS, KNEE = 4, 0.1
#: Share of errors that the spread is chosen to cover, and a normal variable's bound for it.
COVERED, COVERED_SDS = 0.9, 1.6449
#: A run is never taken to be known better than this, relative.
LEAST_SPREAD = 0.01
#: The spread of a variant that was not timed.
UNKNOWN_SPREAD = 0.5


@by_value
class PosteriorFit(NamedTuple):
    """What `fit_posterior` found.

    Attributes:
        posterior: of the machine.
        terms: the fit of the terms alone.
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

    The terms are fitted first, by `fit_latency`, to times less the prior's correction; the correction's
    weights to what they leave, by reweighted ridge regression. The covariance of all unknowns follows from
    the curvature of both misfits and priors (Laplace's approximation). The spread is such that nine tenths of
    the errors are covered where one of the model's folds at a time is left out of the regression.

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
    model = timings.model
    prior = model.prior if prior is None else prior
    before = prior_posterior(model, prior, facts=facts)
    facts, known = before.facts, np.asarray(before.weights)
    runs: Runs = jax.tree.map(np.asarray, timings.runs)
    features, variant = np.asarray(model.features(runs, facts), np.float64), np.asarray(runs.variant)
    if known.any():
        without = np.asarray(timings.time_ns) * np.exp(-correction_log_factor(features, known, variant))
        timings = dataclasses.replace(timings, time_ns=without)
    counted = np.ones(np.shape(timings.time_ns)) if weights is None else np.asarray(weights, np.float64)
    minimum, terms = minimum_and_result(timings, prior, counted, facts=facts)
    left = -minimum.residuals
    joint = joint_jacobian(minimum.jacobian, features, variant, len(known))

    found, influence = np.zeros(known.shape), counted.copy()
    spread, left_out_error = np.full(len(known), UNKNOWN_SPREAD), np.full(len(known), np.nan)
    for code in range(len(known)):
        mine = (variant == code) & (counted > 0)
        if not mine.any():
            continue
        found[code], influence[mine] = _robust_ridge(features[mine], left[mine], counted[mine])
        own = jax.tree.map(lambda column: column[mine], runs)  # noqa: B023 - used at once
        spread[code], errors = _spread_and_errors(features[mine], left[mine], influence[mine], tuple(model.folds(own)))
        left_out_error[code] = float(np.mean(np.expm1(np.abs(errors))))

    scaled = joint * (np.sqrt(influence) / spread[variant])[:, None]
    factor = np.linalg.cholesky(np.linalg.inv(scaled.T @ scaled + np.diag(np.diag(before.factor) ** -2.0)))
    posterior = LatencyPosterior(model, facts, terms.coefficients, known + found, factor, spread)
    return PosteriorFit(posterior, terms, runs, left_out_error)


def _ridge(
    features: np.ndarray, left: np.ndarray, influence: np.ndarray, noise_sd: float = CORRECTION_NOISE_SD
) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights and their covariance."""
    weighted = features * influence[:, None] / noise_sd**2
    precision = features.T @ weighted + np.eye(features.shape[1]) / CORRECTION_SD**2
    covariance = np.linalg.inv(precision)
    return covariance @ (weighted.T @ left), covariance


def _robust_ridge(features: np.ndarray, left: np.ndarray, counted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights, and how much each timing counted."""
    influence = counted
    for _ in range(REWEIGHTINGS):
        errors = np.abs(left - features @ _ridge(features, left, influence)[0])
        influence = counted * np.minimum(1.0, KNEE / np.maximum(errors, KNEE))
    return _ridge(features, left, influence)[0], influence


def _spread_and_errors(
    features: np.ndarray, left: np.ndarray, influence: np.ndarray, groups: tuple[np.ndarray, ...]
) -> tuple[float, np.ndarray]:
    """Return the spread with which intervals cover, and the errors where each value of a group is left out.

    What an error needs, beside its prediction's own variance, to be within its interval; that variance
    follows from the spread in turn. No less than what the regression leaves of the timings that it is given,
    for its degrees of freedom. Errors of one value go together, so that the spread is known from as many as
    there are values: it is widened as Student's distribution is beside the normal one.
    """
    from scipy.special import stdtrit  # loaded when first used

    weights, covariance = _ridge(features, left, influence)
    freedom = np.sum(features @ covariance * features * influence[:, None]) / CORRECTION_NOISE_SD**2
    rest = np.abs(left - features @ weights) * np.sqrt(len(left) / max(len(left) - freedom, 1.0))
    least = max(LEAST_SPREAD, float(np.quantile(rest, COVERED)) / COVERED_SDS)
    outs = [values == value for values in groups for value in np.unique(values)]
    errors = [left[out] - features[out] @ _ridge(features, left, influence * ~out)[0] for out in outs]
    squares, spread = (np.concatenate(errors) / COVERED_SDS) ** 2, CORRECTION_NOISE_SD
    for _ in range(SPREAD_ROUNDS):
        covariances = (_ridge(features, left, influence * ~out, spread)[1] for out in outs)
        variances = [np.sum(features[out] @ own * features[out], 1) for out, own in zip(outs, covariances, strict=True)]
        needed = np.sqrt(np.maximum(squares - np.concatenate(variances), 0.0))
        spread = max(least, float(np.quantile(needed, COVERED)))
    widened = stdtrit(max(len(outs) - 1, 1), (1.0 + COVERED) / 2.0) / COVERED_SDS
    return spread * float(widened), np.concatenate(errors)
