"""What timings leave unknown of coefficients, by the curvature at the fit, and which of them are measured."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from rlxjax._typing import RealLike

from ._minimise import RELATIVE_SD, Minimum

#: A coefficient is measured if the timings leave its logarithm no more standard deviation than the first (a
#: third more or less), and took at least this share of its prior's variance.
MEASURED_LOG_SD, MEASURED_SHARE = 0.3, 0.5
ROUNDING = 1e-6
#: A fit has converged once a further step promises to lower the objective by no more, or by no more than this
#: share of it: both below the half that a coefficient off by one standard deviation costs, the second as
#: timings are noisier.
CONVERGED_DECREASE, CONVERGED_SHARE = 1e-3, 1e-5
#: What is believed of the noise beforehand counts as so many residuals of `RELATIVE_SD`.
PRIOR_RESIDUALS = 4.0
#: Residuals are never taken to be more exact than this: a clock and a machine are not.
LEAST_NOISE_SD = 0.005


class LaplaceApproximation(NamedTuple):
    """What timings leave unknown of the logarithms of coefficients; any leading axes.

    Attributes:
        covariance: `[c, c]`.
        log_sd: `[c]`.
        measured: `[c]`.
        squares: information along each direction, in units of the prior's, ascending `[c]`.
        directions: one a column, in units of the prior's standard deviations, `[c, c]`.
        noise_sd: robust standard deviation of the residuals.
        converged: whether the fit did.
    """

    covariance: np.ndarray
    log_sd: np.ndarray
    measured: np.ndarray
    squares: np.ndarray
    directions: np.ndarray
    noise_sd: np.ndarray
    converged: np.ndarray


def laplace_approximation(
    found: Minimum, weights: Float[np.ndarray, "*devices n"], prior_sd: Float[np.ndarray, "*devices c"]
) -> LaplaceApproximation:
    """Return what timings leave unknown, by the curvature at the minimum (Laplace's approximation).

    The curvature is that at the noise which the residuals, what is believed of it beforehand and the
    parameters that the residuals paid for make likely.
    """
    # In units of the prior, the posterior's precision is 1 + s**2 along each singular vector.
    scale = prior_sd[..., :, None] * prior_sd[..., None, :]
    finite = np.isfinite(found.squares).all((-2, -1), keepdims=True)
    squares, directions = np.linalg.eigh(np.where(finite, found.squares, 0.0) * scale)
    squares = np.maximum(squares, 0.0)
    noise_sd, absorbed = _robust_sd(found.residuals, weights), np.sum(squares / (1.0 + squares), -1)
    squares *= (RELATIVE_SD / _likely_sd(noise_sd, weights.sum(-1), absorbed)[..., None]) ** 2
    left = (directions / (1.0 + squares[..., None, :])) @ np.swapaxes(directions, -2, -1)
    shares = np.diagonal(left, axis1=-2, axis2=-1)
    log_sd = prior_sd * np.sqrt(shares)
    return LaplaceApproximation(
        covariance=left * scale,
        log_sd=log_sd,
        measured=is_measured(log_sd, prior_sd),
        squares=squares,
        directions=directions,
        noise_sd=np.asarray(noise_sd),
        converged=np.isfinite(found.loss)
        & (found.expected_decrease < CONVERGED_DECREASE + CONVERGED_SHARE * found.loss),
    )


def is_measured(log_sd: RealLike, prior_sd: RealLike) -> Bool[np.ndarray, "*batch"]:
    """Return whether measurements, rather than what was believed before them, say what coefficients are.

    Args:
        log_sd: standard deviations of their logarithms.
        prior_sd: the same before any measurement.
    """
    least_taken = 1.0 - MEASURED_SHARE
    # A coefficient that nothing but a micro-benchmark measured has the bound to the last digits.
    log_sd, prior_sd = np.asarray(log_sd), np.asarray(prior_sd)
    return np.asarray((log_sd <= MEASURED_LOG_SD * (1.0 + ROUNDING)) & ((log_sd / prior_sd) ** 2 <= least_taken))


def _robust_sd(residuals: np.ndarray, weights: np.ndarray) -> np.ndarray | np.floating:
    """Return 1.4826 times the weighted median of absolute values, the standard deviation of normal ones."""
    size = np.abs(residuals)
    order = np.argsort(size, -1)
    below = np.cumsum(np.take_along_axis(weights, order, -1), -1)
    middle = np.argmax(below >= below[..., -1:] / 2, -1)[..., None]
    return 1.4826 * np.take_along_axis(size, np.take_along_axis(order, middle, -1), -1)[..., 0]


def _likely_sd(
    noise_sd: np.ndarray | np.floating, count: np.ndarray | np.floating, absorbed: np.ndarray | np.floating
) -> np.ndarray:
    """Return the noise that few residuals make likely: those that parameters absorbed say nothing of it."""
    seen = count * noise_sd**2 + PRIOR_RESIDUALS * RELATIVE_SD**2
    left = np.maximum(count - absorbed, 0.0) + PRIOR_RESIDUALS
    # Residuals that are not finite say nothing.
    return np.where(np.isfinite(noise_sd), np.maximum(np.sqrt(seen / left), LEAST_NOISE_SD), np.inf)


def named_shares(direction: np.ndarray, names: list[str]) -> dict[str, float]:
    """Return the coefficients that make up nine tenths of a direction, the largest first."""
    order = np.argsort(-(direction**2), kind="stable")
    count = int(np.searchsorted(np.cumsum(direction[order] ** 2), 0.9)) + 1
    return {names[index]: round(float(direction[index]), 3) for index in order[:count]}
