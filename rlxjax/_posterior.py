"""What timings say of latencies, and how sure they are: the fit, the correction, and their covariance."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._correction import (
    CORRECTION_SD,
    KINDS,
    N_FEATURES,
    along_last,
    correction_features,
    correction_log_factor,
    kind_codes,
)
from ._fit import STARTS, FitResult, Timings, minimum_and_result, predicted_ns
from ._latency import LatencyCoefficients, LatencyTerms, latency_terms_ns, predict_latency_ns
from ._least_squares import with_slopes
from ._numerics import namespace_of
from ._prior import LatencyPrior, typical_prior
from ._programs import quick_jit
from ._typing import Code, Nanoseconds, RealLike

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
#: The same of a kind that was not timed, and of all kinds before any was.
UNKNOWN_SPREAD, PRIOR_SPREAD = 0.5, 0.05
#: What one machine says of another: a standard deviation of the logarithm of coefficients, and the share of
#: the correction that is expected there too; chosen on two processors, each by the other
#: (docs/active-design.md).
TRANSFERRED_LOG_SD, TRANSFERRED_SHARE = 1.0, 0.7


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatencyPosterior:
    """The calibrated latency of runs, and how sure it is: `log time ~ N(log prediction, sd**2)`.

    The unknowns are the logarithms of the coefficients, then the weights of the correction by kind.

    Attributes:
        coefficients: of the latency model.
        weights: of the correction, `[kinds, features]`.
        factor: lower triangular `L` with `L @ L.T` the covariance of the unknowns, `[unknowns, unknowns]`.
        spread: standard deviation of the logarithm of what a workload takes beyond all that the unknowns
            explain, timing noise included, by kind, `[kinds]`.
    """

    coefficients: LatencyCoefficients
    weights: Float[Array, "kinds features"] | np.ndarray
    factor: Float[Array, "unknowns unknowns"] | np.ndarray
    spread: Float[Array, "kinds"] | np.ndarray

    def coefficient_log_sd(self) -> LatencyCoefficients:
        """Return the standard deviation of each coefficient's logarithm, whatever the correction is."""
        leaves, structure = jax.tree.flatten(self.coefficients)
        factor = np.asarray(self.factor)[: len(leaves)]
        return structure.unflatten(np.sqrt(np.sum(factor**2, -1)).tolist())


class LatencyEstimate(NamedTuple):
    """What a posterior says of runs, `[*batch]`.

    Attributes:
        time_ns: the prediction.
        scores: derivatives of its logarithm by the unknowns, times `L`: `[*batch, unknowns]`. The product
            of two runs' scores is the covariance of their logarithms.
        spread: standard deviation of the logarithm that is a run's own.
    """

    time_ns: Nanoseconds
    scores: Float[Array, "*batch unknowns"]
    spread: Float[Array, "*batch"]

    def log_sd(self) -> Float[Array, "*batch"]:
        """Return the standard deviation of the logarithm of a new workload's time."""
        return jnp.sqrt(jnp.sum(self.scores**2, -1) + self.spread**2)


@quick_jit
def corrected_terms_ns(
    posterior: LatencyPosterior, path: Code, batch, n_fft, k, n_segments, selection: Code
) -> LatencyTerms:
    """Return the parts of runs' predicted latency, the correction among them, `[*batch]`."""
    path, batch, n_fft, k, n_segments, selection = _together(path, batch, n_fft, k, n_segments, selection)
    terms = latency_terms_ns(posterior.coefficients, path, batch, n_fft, k, n_segments, selection)
    kind = kind_codes(path, selection)
    features = correction_features(kind, batch, n_fft, k, n_segments)
    factor = jnp.expm1(correction_log_factor(features, posterior.weights, kind))
    return dataclasses.replace(terms, correction_ns=terms.total_ns() * factor)


@quick_jit
def estimate(
    posterior: LatencyPosterior,
    path: Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    n_segments: RealLike,
    selection: Code,
) -> LatencyEstimate:
    """Return the estimate of runs with a given form of the selection, `[*batch]`.

    Args:
        posterior: of the machine.
        path: codes of `Path`.
        batch: rows, scalar or `[*batch]`, as the other sizes.
        n_fft: samples of a segment.
        k: peaks of a row.
        n_segments: segments of a row.
        selection: codes of the forms of selection.
    """
    path, batch, n_fft, k, n_segments, selection = _together(path, batch, n_fft, k, n_segments, selection)
    log_ns, jacobian = log_prediction_and_jacobian(
        posterior.coefficients, path, batch, n_fft, k, n_segments, selection
    )
    kind = kind_codes(path, selection)
    features = correction_features(kind, batch, n_fft, k, n_segments)
    log_factor = correction_log_factor(features, posterior.weights, kind)
    unknowns = joint_jacobian(jacobian, features, kind)
    scores = unknowns @ jnp.asarray(posterior.factor)
    return LatencyEstimate(jnp.exp(log_ns + log_factor), scores, jnp.asarray(posterior.spread)[kind])


def _together(*arguments: RealLike) -> list[Array]:
    return jnp.broadcast_arrays(*(jnp.asarray(argument) for argument in arguments))


def log_prediction_and_jacobian(
    coefficients: LatencyCoefficients, path, batch, n_fft, k, n_segments, selection
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch c"]]:
    """Return the logarithm of the terms' prediction, and its derivatives by those of the coefficients."""
    leaves, treedef = jax.tree.flatten(coefficients)
    values = [jnp.asarray(leaf, jnp.result_type(float)) for leaf in leaves]

    def predicted(columns):
        own = treedef.unflatten(columns)
        return jnp.log(predict_latency_ns(own, path, batch, n_fft, k, n_segments, selection))

    log_ns, slopes = with_slopes(predicted, values, jnp.shape(batch))
    return log_ns, jnp.stack([slope * value for slope, value in zip(slopes, values, strict=True)], -1)


def joint_jacobian(jacobian, features, kind) -> Float[Array, "*batch unknowns"]:
    """Return the derivatives by the coefficients' logarithms, then by the weights of every kind."""
    xp = namespace_of(jacobian, features, kind)
    own = kind[..., None] == along_last(len(KINDS), kind.ndim)
    by_kind = xp.where(own[..., None], features[..., None, :], 0.0)
    return xp.concatenate([jacobian, by_kind.reshape(*by_kind.shape[:-2], -1)], axis=-1)


class PosteriorFit(NamedTuple):
    """What `fit_posterior` found.

    Attributes:
        posterior: of the machine.
        terms: the fit of the terms alone.
        left_out_error: mean absolute relative error of each kind where its values were left out, `[kinds]`;
            NaN for kinds without timings.
    """

    posterior: LatencyPosterior
    terms: FitResult[LatencyCoefficients]
    left_out_error: np.ndarray


def prior_posterior(
    prior: LatencyPrior[LatencyCoefficients] | None = None,
    spread: float = PRIOR_SPREAD,
    correction_sd: float = CORRECTION_SD,
) -> LatencyPosterior:
    """Return what is known before any timing: the medians of the prior, and its correction.

    Their covariance is diagonal: `log_sd**2` of coefficients' logarithms, `correction_sd**2` of weights.

    Args:
        prior: of the coefficients; a wide prior unless given.
        spread: that the runs of every kind are expected to have.
        correction_sd: prior standard deviation of the correction's weights.

    Examples:
        >>> posterior = prior_posterior(spread=0.1)
        >>> found = estimate(posterior, 0, [64, 4096], 256, 16, 2, 0)  # the host's path
        >>> bool(jnp.all(found.log_sd() > 0.1))
        True
    """
    prior = typical_prior() if prior is None else prior
    spreads = np.full(len(KINDS), float(spread))
    return LatencyPosterior(
        prior.median, _prior_weights(prior), np.diag(_prior_sd(prior, correction_sd)), spreads
    )


def transferred_prior(posterior: LatencyPosterior) -> LatencyPrior[LatencyCoefficients]:
    """Return what the calibration of one machine says of another, or of the same on another day.

    What the terms miss belongs to the programs as well as to the machine: of an EPYC and a Xeon the weights
    of the correction correlated by 0.54, those of maxima by 0.73 (version 9). A calibration of few timings
    gains most (docs/active-design.md has the figures).

    Args:
        posterior: of the other machine.

    Examples:
        >>> other = prior_posterior()
        >>> prior = transferred_prior(other)
        >>> prior.median == other.coefficients, prior.log_sd.dispatch_ns, float(prior.correction.max())
        (True, 1.0, 0.0)
    """
    log_sd = jax.tree.map(lambda sd: min(sd, TRANSFERRED_LOG_SD), typical_prior().log_sd)
    return LatencyPrior(posterior.coefficients, log_sd, TRANSFERRED_SHARE * np.asarray(posterior.weights))


def fit_posterior(
    timings: Timings,
    prior: LatencyPrior[LatencyCoefficients] | None = None,
    weights: np.ndarray | None = None,
) -> PosteriorFit:
    """Fit terms, correction and spread to timings.

    The terms are fitted first, by `fit_latency`, to times less the prior's correction; the correction's
    weights to what they leave, by reweighted ridge regression. The covariance of all unknowns follows from
    the curvature of both misfits and priors (Laplace's approximation). The spread is such that nine tenths of
    the errors are covered where one value of the batch or of n_fft at a time is left out of the regression.

    Args:
        timings: one entry a workload, `[n]`.
        prior: of the coefficients and the correction; a wide prior unless given.
        weights: `[n]`, 0 leaves an entry out.

    Raises:
        ValueError: as `fit_latency`.
    """
    prior = typical_prior() if prior is None else prior
    known = _prior_weights(prior)
    features, kind = _features_and_kinds(timings)
    if known.any():
        without = np.asarray(timings.time_ns) * np.exp(-correction_log_factor(features, known, kind))
        timings, prior = dataclasses.replace(timings, time_ns=without), prior._replace(correction=0.0)
    counted = np.ones(np.shape(timings.time_ns)) if weights is None else np.asarray(weights, np.float64)
    minimum, terms = minimum_and_result(predicted_ns, timings, prior, counted, starts=STARTS)
    left = -minimum.residuals
    joint = joint_jacobian(np.asarray(minimum.jacobian).T, features, kind)

    found, influence = np.zeros((len(KINDS), N_FEATURES)), counted.copy()
    spread, left_out_error = np.full(len(KINDS), UNKNOWN_SPREAD), np.full(len(KINDS), np.nan)
    for code in range(len(KINDS)):
        mine = (kind == code) & (counted > 0)
        if not mine.any():
            continue
        found[code], influence[mine] = _robust_ridge(features[mine], left[mine], counted[mine])
        groups = (np.asarray(timings.batch)[mine], np.asarray(timings.n_fft)[mine])
        spread[code], errors = _spread_and_errors(features[mine], left[mine], influence[mine], groups)
        left_out_error[code] = float(np.mean(np.expm1(np.abs(errors))))

    prior_sd = _prior_sd(prior)
    scaled = joint * (np.sqrt(influence) / spread[kind])[:, None]
    factor = np.linalg.cholesky(np.linalg.inv(scaled.T @ scaled + np.diag(prior_sd**-2.0)))
    posterior = LatencyPosterior(terms.coefficients, known + found, factor, spread)
    return PosteriorFit(posterior, terms, left_out_error)


def _prior_sd(prior: LatencyPrior[LatencyCoefficients], correction_sd: float = CORRECTION_SD) -> np.ndarray:
    """Return the standard deviations of the unknowns, `[unknowns]`."""
    of_weights = np.full(len(KINDS) * N_FEATURES, float(correction_sd))
    return np.concatenate([np.array(jax.tree.leaves(prior.log_sd), float), of_weights])


def _prior_weights(prior: LatencyPrior) -> np.ndarray:
    """Return the prior mean of the correction's weights."""
    return np.broadcast_to(np.asarray(prior.correction, np.float64), (len(KINDS), N_FEATURES))


def _features_and_kinds(timings: Timings) -> tuple[np.ndarray, np.ndarray]:
    """Return what the weights of the correction multiply, `[n, features]`, and the kinds of runs, `[n]`."""
    own: Timings = jax.tree.map(np.asarray, timings)
    kind = kind_codes(own.path, own.selection)
    features = correction_features(kind, own.batch, own.n_fft, own.k, own.n_segments)
    return np.asarray(features), np.asarray(kind)


def _ridge(
    features: np.ndarray, left: np.ndarray, influence: np.ndarray, noise_sd: float = CORRECTION_NOISE_SD
) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights and their covariance."""
    weighted = features * influence[:, None] / noise_sd**2
    precision = features.T @ weighted + np.eye(features.shape[1]) / CORRECTION_SD**2
    covariance = np.linalg.inv(precision)
    return covariance @ (weighted.T @ left), covariance


def _robust_ridge(
    features: np.ndarray, left: np.ndarray, counted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
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
        covariances = [_ridge(features, left, influence * ~out, spread)[1] for out in outs]
        variances = [
            np.sum(features[out] @ covariance * features[out], axis=1)
            for out, covariance in zip(outs, covariances, strict=True)
        ]
        needed = np.sqrt(np.maximum(squares - np.concatenate(variances), 0.0))
        spread = max(least, float(np.quantile(needed, COVERED)))
    widened = stdtrit(max(len(outs) - 1, 1), (1.0 + COVERED) / 2.0) / COVERED_SDS
    return spread * float(widened), np.concatenate(errors)
