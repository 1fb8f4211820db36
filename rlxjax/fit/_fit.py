"""Fit the posterior of any latency model to timings of one device, or of many devices at once."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Bool

from rlxjax._checks import real_numbers
from rlxjax._chunks import for_each_chunk
from rlxjax._typing import RealLike
from rlxjax._values import by_value

from ._latency_model import Facts, LatencyPrior, Runs, coefficient_names, named
from ._minimise import RELATIVE_SD, Minimum, influence_of, minimise
from ._posterior import (
    CORRECTION_SD,
    LatencyPosterior,
    correction_log_factor,
    mean_correction,
    prior_posterior,
)
from ._spread import alike_of, spread_and_errors
from ._timings import MIN_TIMINGS, Timings, check_enough, filled_up

C = TypeVar("C")

#: The number of starting points of a fit, and the typical distance of random points from the prior's medians, in
#: standard deviations of the prior. A fit from a single point may end in a local minimum with wrong cache sizes.
STARTS, START_SHARE = 8, 0.25
#: Minima whose losses differ by at most this number count as equal; the earliest starting point wins.
LEAST_GAIN = 0.1
#: A coefficient counts as measured if the standard deviation of its logarithm is at most `MEASURED_LOG_SD` and the
#: timings removed at least the share `MEASURED_SHARE` of the prior's variance.
MEASURED_LOG_SD, MEASURED_SHARE = 0.3, 0.5
ROUNDING = 1e-6
#: A fit has converged if the expected decrease of the objective in the next step is less than `CONVERGED_DECREASE` plus
#: the share `CONVERGED_SHARE` of the objective. A coefficient one standard deviation off adds 0.5 to the objective.
CONVERGED_DECREASE, CONVERGED_SHARE = 1e-3, 1e-5
#: The prior of the noise counts as much as this number of residuals whose standard deviation is `RELATIVE_SD`.
PRIOR_RESIDUALS = 4.0
#: The smallest standard deviation of the noise: no clock and no machine is more precise.
LEAST_NOISE_SD = 0.005
#: The spread of a variant that was not timed.
UNKNOWN_SPREAD = 0.5


@by_value
class FitResult(NamedTuple, Generic[C]):
    """The result of fitting a model's terms to the timings of a device, without the correction.

    Attributes:
        coefficients: the fitted coefficients.
        loss: the value of the objective (see `fit_posterior`) at the end of the fit.
        expected_decrease: the expected decrease of the objective in the next Gauss-Newton step.
        steps: the number of L-BFGS steps.
        converged: whether the fit converged, that is, whether `expected_decrease` is small.
        noise_sd: a robust estimate of the standard deviation of `log(predicted / measured)`.
        log_sd: standard deviation of each coefficient's logarithm, from the objective's curvature at the fit's end.
        measured: by coefficient name, whether the timings determine the coefficient: whether its `log_sd` is at most
            0.3, and its logarithm's variance is at most half of the prior's variance.
        covariance: covariance of the coefficients' logarithms, `[c, c]`, in the order of `coefficient_names`.
        inseparable: directions of the coefficients' logarithms that the timings do not determine, the least determined
            first. A direction is a dict from names to components, in units of the prior's standard deviations.
        message: a sentence that says how the fit ended.
    """

    coefficients: C
    loss: float
    expected_decrease: float
    steps: int
    converged: bool
    noise_sd: float
    log_sd: C
    measured: dict[str, bool]
    covariance: np.ndarray
    inseparable: list[dict[str, float]]
    message: str


@by_value
class PosteriorFit(NamedTuple):
    """The result of `fit_posterior`.

    Attributes:
        posterior: the posterior of the machine.
        terms: the fit without the correction. `terms.converged` is True only if the joint fit converged too.
        runs: the timed runs, `[n]`.
        left_out_error: each variant's mean absolute relative error on left-out folds, `[variants]`; NaN if not timed.
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
    min_timings: int = MIN_TIMINGS,
) -> PosteriorFit:
    """Fit a model's coefficients, correction and spread to timings, with log-normal priors and a robust loss.

    1. The times are divided by the correction that the prior expects.
    2. `optax.lbfgs` fits the coefficients `c` from eight starting points and keeps the lowest minimum of
       `sum(w * huber(log(predicted / measured) / 0.05)) + sum((log(c / median) / log_sd)**2) / 2`.
    3. If the model has features, a joint fit of the coefficients and the correction starts from this minimum.
    4. The curvature of the objective gives the covariance (Laplace's approximation). With the chosen spread, 90 %
       intervals cover 90 % of the errors on left-out folds. Residuals at equal inputs give the variants' correlation.

    Args:
        timings: the timings of the model, `[n]`.
        prior: the prior of the coefficients and the correction; by default, the model's `prior`.
        weights: the weight of each timing, `[n]`. A weight of 0 leaves the timing out and causes no new compilation.
        facts: the facts that describe how the machine schedules programs; by default, the model's `facts`.
        min_timings: the smallest accepted number of timings of positive weight. With a `pooled_prior`, a few suffice.

    Raises:
        ValueError: fewer than `min_timings` timings have a positive weight, all timings are of a single workload, or a
            time or a number of the prior is not positive and finite.

    Examples:
        >>> from rlxjax.models import FFT
        >>> batch, n_fft = np.repeat([32, 256, 2048], 4), np.tile([64, 256, 1024, 4096], 3)
        >>> time_ns = 2e4 + 12.0 * batch * n_fft
        >>> timings = Timings.checked(FFT, variant="fft", batch=batch, n_fft=n_fft, time_ns=time_ns)
        >>> fit = fit_posterior(timings)
        >>> fit.terms.converged, bool(fit.terms.noise_sd < 0.1), fit.posterior.weights.shape
        (True, True, (1, 0))
    """
    _, counted, _ = _checked(timings, prior, weights, min_timings, facts)
    one, its_weights = jax.tree.map(lambda column: np.asarray(column)[None], (timings, counted))
    return fit_posteriors(one, prior, its_weights, facts, min_timings=min_timings)[0]


def fit_posteriors(
    timings: Timings,
    prior: LatencyPrior[Any] | None = None,
    weights: np.ndarray | None = None,
    facts: Facts | None = None,
    n_starts: int = STARTS,
    min_timings: int = MIN_TIMINGS,
) -> list[PosteriorFit]:
    """Fit the posteriors of many devices at once, each as in `fit_posterior`.

    The columns of `timings` and the array `weights` have the shape `[devices, n]`; `stack_timings` returns both.
    `n_starts` is the number of starting points of each fit. With a prior from other devices, 1 is usually enough. The
    other arguments are the same as for `fit_posterior`.

    Raises:
        ValueError: a column lacks the axis of devices, or `fit_posterior` would refuse the timings of a device.

    Examples:
        >>> from rlxjax.fit import stack_timings
        >>> from rlxjax.models import FFT
        >>> batch, n_fft = np.repeat([32, 256, 2048], 4), np.tile([64, 256, 1024, 4096], 3)
        >>> timings, weights = stack_timings([Timings.checked(FFT, variant="fft", batch=batch, n_fft=n_fft,
        ...                                   time_ns=2e4 + rate * batch * n_fft) for rate in (3.0, 12.0)])
        >>> [fit.terms.converged for fit in fit_posteriors(timings, weights=weights)]
        [True, True]
    """
    before, timed = (
        prior_posterior(timings.model, prior, facts=facts),
        jax.tree.map(np.asarray, timings.runs),
    )
    _check_devices(timings)
    prior, counted, facts = _checked(timings, prior, weights, min_timings, before.facts)
    own, counted = filled_up(timings, counted)
    features, known = (
        np.asarray(own.model.features(own.runs, facts), np.float64),
        np.asarray(before.weights),
    )
    if known.any():
        factor = np.exp(-correction_log_factor(features, known, np.asarray(own.runs.variant)))
        own = dataclasses.replace(own, time_ns=np.asarray(own.time_ns) * factor)
    minima = of_terms = _lowest(own, counted, prior, facts, n_starts)
    if features.shape[-1]:
        begin = np.concatenate([minima.z, np.zeros((len(counted), known.size))], -1)
        minima = minimise(own, counted, prior, facts, begin, features)
    found: list[Any] = [None] * len(counted)

    def fit(start: int, stop: int) -> None:
        for place in range(start, stop):
            alone, its = (
                _terms(_of_device(of_terms, place), counted[place], prior),
                _of_device(minima, place),
            )
            posterior, error = _posterior(before, its, *_of_device((own.runs, features, counted), place))
            if alone.converged and not _has_converged(its):
                said = f"{alone.message} The fit with the correction did not converge."
                alone = alone._replace(converged=False, message=said)
            found[place] = PosteriorFit(posterior, alone, _of_device(timed, place), error)

    for_each_chunk(fit, len(counted), 1)
    return found


def _check_devices(timings: Timings) -> None:
    if len(shape := np.shape(timings.time_ns)) != 2 or not shape[0]:
        raise ValueError(f"timings: expected columns of shape [devices, n], got time_ns of shape {shape}")


def _checked(
    timings: Timings,
    prior: LatencyPrior | None,
    weights: Any,
    min_timings: int,
    facts: Facts | None,
) -> tuple[LatencyPrior, np.ndarray, Facts]:
    """Check the arguments and fill in defaults. Return the prior without its correction, the weights and the facts."""
    prior = timings.model.prior if prior is None else prior
    for part in ("median", "log_sd"):
        for name, value in named(getattr(prior, part)).items():
            if np.ndim(value) or not (np.isfinite(value) and value > 0):
                raise ValueError(f"prior.{part}.{name}: expected a positive finite number, got {value}")
    counted = (
        np.ones(np.shape(timings.time_ns))
        if weights is None
        else real_numbers(weights, "weights", is_flag=True).astype(float)
    )
    check_enough(timings, counted, min_timings)
    return (
        prior._replace(correction=0.0),
        counted,
        dict(timings.model.facts if facts is None else facts),
    )


def _of_device(tree: Any, place: int) -> Any:
    return jax.tree.map(operator.itemgetter(place), tree)


def _lowest(timings: Timings, counted: np.ndarray, prior: LatencyPrior, facts: Facts, n_starts: int) -> Minimum:
    """Return each device's lowest minimum over all starting points."""
    # The first point is the prior's medians. The other points are random, and the same in every call.
    starts = START_SHARE * np.random.default_rng(0).standard_normal((n_starts, len(jax.tree.leaves(prior.median))))
    starts = np.concatenate([np.zeros_like(starts[:1]), starts[:-1]])
    own, influences = jax.tree.map(lambda column: np.repeat(np.asarray(column), n_starts, 0), (timings, counted))
    ends = minimise(own, influences, prior, facts, np.tile(starts, (len(counted), 1)))
    losses = np.where(np.isfinite(ends.loss), ends.loss, np.inf).reshape(-1, n_starts)
    chosen = np.argmax(losses <= losses.min(-1, keepdims=True) + LEAST_GAIN, -1)
    return jax.tree.map(operator.itemgetter(chosen + n_starts * np.arange(len(counted))), ends)


def _has_converged(minimum: Minimum) -> bool:
    least_decrease = CONVERGED_DECREASE + CONVERGED_SHARE * minimum.loss
    return bool(np.isfinite(minimum.loss) & (minimum.predicted_reduction < least_decrease))


def _terms(minimum: Minimum, weights: np.ndarray, prior: LatencyPrior[C]) -> FitResult[C]:
    """Return the `FitResult` of a device from the minimum of the device's fit."""
    structure, names = jax.tree.structure(prior.median), coefficient_names(prior.median)
    prior_sd = np.array(jax.tree.leaves(prior.log_sd), np.float64)
    scale = prior_sd[:, None] * prior_sd
    # In units of the prior, the posterior's precision is `1 + squares` along the directions.
    squares = minimum.squares if np.isfinite(minimum.squares).all() else np.zeros_like(scale)
    squares, directions = np.linalg.eigh(squares * scale)
    squares = np.maximum(squares, 0.0)
    # 1.4826 times the median absolute value of normal residuals is their standard deviation.
    size = np.abs(minimum.residuals)
    below = np.cumsum(weights[order := np.argsort(size)])
    noise_sd = 1.4826 * size[order[np.argmax(below >= below[-1] / 2)]]
    # The fewer the residuals, the more the noise's prior counts. The coefficients use up `absorbed` degrees of freedom.
    seen, absorbed = weights.sum(), np.sum(squares / (1.0 + squares))
    likely = seen * noise_sd**2 + PRIOR_RESIDUALS * RELATIVE_SD**2
    likely = max(np.sqrt(likely / (max(seen - absorbed, 0.0) + PRIOR_RESIDUALS)), LEAST_NOISE_SD)
    squares *= (RELATIVE_SD / (likely if np.isfinite(noise_sd) else np.inf)) ** 2
    left = (directions / (1.0 + squares)) @ directions.T
    log_sd = prior_sd * np.sqrt(np.diagonal(left))
    inseparable = []
    for direction in directions.T[squares < 1.0]:
        # The largest components, until their squares make up nine tenths of the direction.
        order = np.argsort(-(direction**2), kind="stable")
        largest = order[: int(np.searchsorted(np.cumsum(direction[order] ** 2), 0.9)) + 1]
        inseparable.append({names[index]: round(float(direction[index]), 3) for index in largest})
    converged, count = _has_converged(minimum), int(np.sum(weights > 0))
    message = (
        f"The fit of {count} timings {'converged' if converged else 'did not converge'} in {minimum.steps} steps "
        f"(loss {minimum.loss:.4g}, expected decrease in the next step {minimum.predicted_reduction:.2g})."
    )
    fitted, sds = (structure.unflatten(own.tolist()) for own in (np.exp(minimum.logs), log_sd))
    end = (
        float(minimum.loss),
        float(minimum.predicted_reduction),
        int(minimum.steps),
        converged,
        float(noise_sd),
    )
    measured = dict(zip(names, is_measured(log_sd, prior_sd).tolist(), strict=True))
    return FitResult(fitted, *end, sds, measured, left * scale, inseparable, message)


def is_measured(log_sd: RealLike, prior_sd: RealLike) -> Bool[np.ndarray, "*batch"]:
    """Return whether timings determined coefficients, given the coefficients' `log_sd` after and `prior_sd` before."""
    # If only a micro-benchmark measured a coefficient, `log_sd` equals the bound up to rounding.
    log_sd, prior_sd = np.asarray(log_sd), np.asarray(prior_sd)
    taken = (log_sd / prior_sd) ** 2 <= 1.0 - MEASURED_SHARE
    return np.asarray((log_sd <= MEASURED_LOG_SD * (1.0 + ROUNDING)) & taken)


def _posterior(
    before: LatencyPosterior,
    minimum: Minimum,
    runs: Runs,
    features: np.ndarray,
    counted: np.ndarray,
) -> tuple[LatencyPosterior, np.ndarray]:
    """Return a device's posterior, and the mean error of each variant on left-out folds."""
    shape, variant = np.shape(before.weights), np.asarray(runs.variant)
    weights = CORRECTION_SD * minimum.z[len(minimum.logs) :].reshape(shape)
    left = correction_log_factor(features, weights, variant) - minimum.residuals
    influence = counted * influence_of(minimum.residuals)
    spread, left_out_error = np.full(shape[0], UNKNOWN_SPREAD), np.full(shape[0], np.nan)
    scatter = np.broadcast_to(np.asarray(runs.model.scatter(runs, before.facts), np.float64), variant.shape)
    for code in range(shape[0]):
        mine = (variant == code) & (counted > 0)
        if mine.any():
            own = jax.tree.map(operator.itemgetter(mine), runs)
            folds = tuple(runs.model.folds(own))
            spread[code], errors = spread_and_errors(features[mine], left[mine], influence[mine], folds, scatter[mine])
            left_out_error[code] = float(np.mean(np.expm1(np.abs(errors))))
    scaled = minimum.jacobian * (np.sqrt(influence) / (spread[variant] * scatter))[:, None]
    precision = np.where(np.isfinite(scaled), scaled, 0.0)
    prior_precision = np.diag(np.diag(np.asarray(before.factor)) ** -2.0)
    timed = (counted > 0) & np.isfinite(minimum.residuals)
    posterior = dataclasses.replace(
        before,
        coefficients=jax.tree.structure(before.coefficients).unflatten(np.exp(minimum.logs).tolist()),
        weights=np.asarray(before.weights) + weights,
        factor=np.linalg.cholesky(np.linalg.inv(precision.T @ precision + prior_precision)),
        spread=spread,
        alike=alike_of(minimum.residuals[timed], jax.tree.map(operator.itemgetter(timed), runs), shape[0]),
    )
    return posterior, left_out_error


def pooled_prior(fits: Sequence[FitResult[C] | LatencyPosterior], prior: LatencyPrior[C]) -> LatencyPrior[C]:
    """Return the log-normal prior for a new device's coefficients, from the fits of several devices.

    `m_d` and `v_d` are the mean and variance of a coefficient's logarithm after the fit of device d, from 1 to D. The
    given prior counts as one more device, with mean `m_0` and variance `v_0`. The pooled prior of the logarithm has

        mean = sum(m_d) / (D + 1),   variance = sum((m_d - mean)**2 + v_d) / (D + 1),   d from 0 to D.

    This is one step of expectation-maximisation towards the most likely mean and variance over devices. For another
    step, fit the devices again with the pooled prior, and pool the new fits with the original `prior`. The sums leave
    out fits that did not converge. If you give posteriors, their corrections are pooled as in `transferred_prior`.

    Args:
        fits: fits of the terms, or posteriors, one per device.
        prior: the prior before any timing of these devices, for example the model's `prior`.

    Raises:
        ValueError: no fit converged.

    References:
        A. Gelman et al., Bayesian Data Analysis, 3rd edition, 2013, chapter 5 and section 13.6.

    Examples:
        >>> from rlxjax.models import FFT
        >>> batch, n_fft = np.repeat([32, 256, 2048], 4), np.tile([64, 256, 1024, 4096], 3)
        >>> def timings(call_ns):
        ...     time_ns = call_ns + 12.0 * batch * n_fft
        ...     return Timings.checked(FFT, variant="fft", batch=batch, n_fft=n_fft, time_ns=time_ns)
        >>> fits = [fit_posterior(timings(call_ns)).terms for call_ns in (1e6, 2e6, 3e6)]
        >>> pooled = pooled_prior(fits, FFT.prior)
        >>> bool(6e4 < pooled.median.call_ns < 3e6)
        True
    """
    posteriors = [one for one in fits if isinstance(one, LatencyPosterior)]
    pairs = [(one.coefficients, one.log_sd) for one in fits if isinstance(one, FitResult) and one.converged]
    pairs += [(one.coefficients, one.coefficient_log_sd()) for one in posteriors]
    if not pairs:
        raise ValueError("fits: expected at least one converged fit, got none")
    structure = jax.tree.structure(prior.median)
    leaves = [[jax.tree.leaves(part) for part in pair] for pair in (*pairs, prior[:2])]
    means, sds = np.moveaxis(np.array(leaves, np.float64), 1, 0)
    means = np.log(means)
    mean = means.mean(0)
    variance = np.mean((means - mean) ** 2 + sds**2, 0)
    medians, log_sds = (structure.unflatten(part.tolist()) for part in (np.exp(mean), np.sqrt(variance)))
    return LatencyPrior(medians, log_sds, mean_correction(posteriors) if posteriors else 0.0)
