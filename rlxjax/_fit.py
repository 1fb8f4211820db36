"""The fit: timings in, latency coefficients and diagnostics out. Pure: no clock, no files.

`fit_coefficients` fits any prediction that is a function of (coefficients, timings); `fit_latency` is that
of the Welch-peaks model.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ._device import Coefficients
from ._latency import LatencyCoefficients, predict_latency_ns
from ._least_squares import MAX_STEPS, RELATIVE_SD, Minimum, Start, first_start, least_squares
from ._programs import quick_jit
from ._timings import MIN_TIMINGS as MIN_TIMINGS
from ._timings import Timings as Timings
from ._timings import check_enough, filled_up
from ._timings import checked_columns as checked_columns
from ._typing import Nanoseconds

C = TypeVar("C", bound=Coefficients)

#: A coefficient is measured if the timings leave its logarithm no more standard deviation than the first (a
#: third more or less), and took at least this share of its prior's variance.
MEASURED_LOG_SD, MEASURED_SHARE = 0.3, 0.5
ROUNDING = 1e-6
#: What is believed of the noise beforehand counts as so many residuals of `RELATIVE_SD`.
PRIOR_RESIDUALS = 4.0
#: The latency model is fitted from so many starts: the prior's medians, and around them by this share of the
#: prior's standard deviations. From one, a fit may end where the caches are not.
STARTS, START_SHARE = 5, 0.25
#: The minimum from a further start is another one if it is lower by this.
LEAST_GAIN = 0.1
#: Residuals are never taken to be more exact than this: a clock and a machine are not.
LEAST_NOISE_SD = 0.005


class LatencyPrior(NamedTuple, Generic[C]):
    """What is believed before timings: a log-normal prior of every coefficient, and of the correction.

    Attributes:
        median: of the coefficients.
        log_sd: standard deviation of each coefficient's logarithm.
        correction: prior mean of the correction's weights, `[kinds, features]`, or 0 for none; the terms
            alone have no use for it.
    """

    median: C
    log_sd: C
    correction: Float[np.ndarray, "kinds features"] | float = 0.0


def check_prior(prior: LatencyPrior) -> None:
    """Check that medians and standard deviations are positive and finite.

    Raises:
        ValueError: one that is not, by its name.
    """
    for part in ("median", "log_sd"):
        for name, value in vars(getattr(prior, part)).items():
            numbers = np.asarray(value, np.float64)
            if not np.all(np.isfinite(numbers) & (numbers > 0)):
                raise ValueError(f"prior.{part}.{name}: expected positive finite numbers, got {value}")


class FitResult(NamedTuple, Generic[C]):
    """What a fit found; a fit that did not converge is a result that says so.

    Attributes:
        coefficients: the fitted coefficients.
        loss: the objective at the end.
        expected_decrease: what the last step, undamped, promised to take off it.
        steps: Levenberg-Marquardt steps taken.
        converged: whether that promise is small.
        noise_sd: robust standard deviation of `log(predicted / measured)`.
        log_sd: standard deviation of each coefficient's logarithm, from the curvature at the end; of few
            timings, the noise is taken to be closer to 5 %.
        measured: whether the timings say what a coefficient is, rather than its prior: they leave a `log_sd`
            of at most 0.3, and no more than half of the prior's variance.
        covariance: of the coefficients' logarithms, `[c, c]` in the order of the fields.
        inseparable: combinations that the timings do not settle, the least settled first: names with their
            share of the direction, from the singular vectors of the Jacobian in units of the prior.
        message: how it ended, in a sentence.
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


#: Orders of magnitude of a present-day machine; a log-sd of 2 lets data move them by a factor of 50.
_TYPICAL = LatencyCoefficients(
    host_call_ns=4e4,
    host_row_ns=50.0,
    host_bytes_per_ns=8.0,
    host_flop_per_ns=10.0,
    host_row_far_bytes_per_ns=10.0,
    select_bin_ns=1.0,
    select_sort_ns=1.0,
    select_peak_ns=1.0,
    host_parallel_gain=0.7,
    threads_ns=1e5,
    device_call_ns=4e4,
    dispatch_ns=1e4,
    roundtrip_ns=1e4,
    streams_ns=5e4,
    upload_bytes_per_ns=20.0,
    readback_bytes_per_ns=20.0,
    device_row_ns=50.0,
    device_flop_per_ns=10.0,
    device_bytes_per_ns=20.0,
    split_sample_ns=0.2,
    row_far_bytes_per_ns=20.0,
    row_cache_bytes=4.5e4,
    far_bytes_per_ns=10.0,
    cache_bytes=1e6,
    device_parallel_gain=0.7,
    maxima_key_ns=1.0,
    maxima_bin_ns=0.1,
    maxima_peak_ns=1.0,
    maxima_pass_ns=300.0,
    maxima_far_bytes_per_ns=100.0,
    maxima_cache_bytes=4e5,
    topk_bin_ns=1.0,
    topk_update_ns=5.0,
    maxima_parallel_gain=0.7,
    topk_parallel_gain=0.7,
)
_WIDE_LOG_SD = 2.0
#: Caches are of a few sizes, and processors not very many: with a wide prior, a fit may end where no timing
#: is, with a cache of 70 MB or a gain of 42 by two processors.
_FIRST_CACHE_LOG_SD, _NARROWER_LOG_SD = 0.3, 1.0
_NARROWER = ("cache_bytes", "maxima_far_bytes_per_ns", "maxima_cache_bytes") + tuple(
    f"{work}_parallel_gain" for work in ("host", "device", "maxima", "topk")
)


def wide_prior(median: C) -> LatencyPrior[C]:
    """Return the prior that knows each coefficient's order of magnitude and no more."""
    return LatencyPrior(median, jax.tree.map(lambda _: _WIDE_LOG_SD, median))


def typical_prior() -> LatencyPrior[LatencyCoefficients]:
    """Return the prior that `fit_latency` starts from: wide, but for caches and what processors gain."""
    prior = wide_prior(_TYPICAL)
    narrower = dict.fromkeys(_NARROWER, _NARROWER_LOG_SD)
    log_sd = dataclasses.replace(prior.log_sd, row_cache_bytes=_FIRST_CACHE_LOG_SD, **narrower)
    return LatencyPrior(prior.median, log_sd)


def fit_latency(
    timings: Timings,
    prior: LatencyPrior[LatencyCoefficients] | None = None,
    weights: np.ndarray | Float[Array, "n"] | None = None,
    min_timings: int = MIN_TIMINGS,
) -> FitResult[LatencyCoefficients]:
    """Fit the latency model to timings: robust, positive, with log-normal priors.

    Minimises `sum(w * huber(log(predicted / measured) / 0.05)) + sum((log(c / median) / log_sd)**2) / 2`
    over the logarithms of the coefficients, by Levenberg and Marquardt's method with reweighting, from five
    starts, of whose ends the lowest is taken.

    Args:
        timings: one entry a workload, `[n]`.
        prior: what is believed beforehand; a wide prior unless given.
        weights: `[n]`, 0 leaves an entry out (and keeps the shapes, so nothing is compiled anew).
        min_timings: fewer that count are refused; a prior from other devices (`pooled_prior`) does with few.

    Raises:
        ValueError: fewer than `min_timings` timings that count, all of one workload, one that is not positive
            and finite, or a prior with such a number.

    Examples:
        >>> import numpy as np
        >>> batch = np.repeat(2.0 ** np.arange(10), 2)
        >>> n_fft = np.tile([256.0, 1024.0], 10)
        >>> timings = Timings.checked(path=["host"] * 20, batch=batch, n_fft=n_fft, k=[16] * 20,
        ...                           n_segments=[2] * 20, time_ns=4e4 + 10.0 * batch * n_fft)
        >>> result = fit_latency(timings)
        >>> predicted = predict_latency_ns(result.coefficients, "host", 64, 256, 16, 2)
        >>> bool(abs(predicted / (4e4 + 10.0 * 64 * 256) - 1) < 0.1)
        True
    """
    prior = typical_prior() if prior is None else prior
    return minimum_and_result(predicted_ns, timings, prior, weights, min_timings, STARTS)[1]


def predicted_ns(coefficients: LatencyCoefficients, timings: Timings) -> Nanoseconds:
    """Return what the latency model says of each timing, `[n]`."""
    sizes = (timings.batch, timings.n_fft, timings.k, timings.n_segments)
    return predict_latency_ns(coefficients, timings.path, *sizes, selection=timings.selection)


def fit_coefficients(
    predict: Callable[[C, Any], Nanoseconds],
    timings: Any,
    prior: LatencyPrior[C],
    weights: np.ndarray | Float[Array, "n"] | None = None,
    min_timings: int = MIN_TIMINGS,
) -> FitResult[C]:
    """Fit the coefficients of any prediction, from one start; the objective is that of `fit_latency`.

    Args:
        predict: a function of (coefficients, timings), times in ns `[n]`, each from its own row; the same
            function and about as many timings: nothing is compiled anew.
        timings: a dataclass pytree of columns `[n]`, one of them `time_ns`.
        prior: of the coefficients, which the result has the type of.
        weights: `[n]`, 0 leaves an entry out.
        min_timings: fewer that count are refused.

    Raises:
        ValueError: as `fit_latency`.
    """
    return minimum_and_result(predict, timings, prior, weights, min_timings)[1]


def minimum_and_result(
    predict: Callable[[C, Any], Nanoseconds],
    timings: Any,
    prior: LatencyPrior[C],
    weights: np.ndarray | Float[Array, "n"] | None = None,
    min_timings: int = MIN_TIMINGS,
    starts: int = 1,
) -> tuple[Minimum, FitResult[C]]:
    """Return the minimum, of NumPy arrays, and what `fit_coefficients` makes of it; arguments as there.

    Of so many starts the lowest minimum is taken.
    """
    counted = np.ones(timings.time_ns.shape) if weights is None else np.asarray(weights, np.float64)
    check_prior(prior)
    check_enough(timings, counted, min_timings)
    filled, influences = filled_up(timings, counted)
    ends = [_minimise(filled, influences, prior, predict, start) for start in _starts(prior, starts)]
    lowest = functools.reduce(lambda one, other: other if other.loss < one.loss - LEAST_GAIN else one, ends)
    found = jax.tree.map(np.asarray, lowest)
    found = found._replace(
        residuals=found.residuals[: len(counted)], jacobian=found.jacobian[:, : len(counted)]
    )
    return found, _result(found, prior, counted)


def minimise(
    timings: Any,
    weights,
    prior: LatencyPrior,
    predict: Callable = predicted_ns,
    start: Start | None = None,
    most_steps: Any = MAX_STEPS,
) -> Minimum:
    """Return the minimum of the objective of `fit_latency`, or how far the most steps come towards it."""

    def log_ratios(columns):
        coefficients = jax.tree.structure(prior.median).unflatten(columns)
        return jnp.log(predict(coefficients, timings) / timings.time_ns)

    centre, sd = jnp.log(vector(prior.median)), vector(prior.log_sd)
    return least_squares(log_ratios, weights, centre, sd, start, most_steps)


_minimise = quick_jit(minimise, ["predict"])


def _starts(prior: LatencyPrior, count: int) -> list[Start]:
    """Return where fits begin: at the medians, then around them, the same places each time."""
    median, sd = (
        np.array(jax.tree.leaves(part), np.result_type(jnp.result_type(float))) for part in prior[:2]
    )
    around = np.random.default_rng(0).standard_normal((count - 1, median.size)).astype(sd.dtype)
    return [
        first_start(jnp.asarray(np.log(median) + move)) for move in (0.0 * sd, *(START_SHARE * sd * around))
    ]


def _result(found: Minimum, prior: LatencyPrior[C], weights: np.ndarray) -> FitResult[C]:
    structure = jax.tree.structure(prior.median)
    names = list(vars(prior.median))
    left = posterior(found, weights, np.array(jax.tree.leaves(prior.log_sd), float))
    count, ending = int(np.sum(weights > 0)), "converged" if left.converged else "did not converge"
    return FitResult(
        coefficients=structure.unflatten([float(value) for value in np.exp(found.logs)]),
        loss=float(found.loss),
        expected_decrease=float(found.expected_decrease),
        steps=int(found.steps),
        converged=bool(left.converged),
        noise_sd=float(left.noise_sd),
        log_sd=structure.unflatten([float(value) for value in left.log_sd]),
        measured=dict(zip(names, left.measured.tolist(), strict=True)),
        covariance=left.covariance,
        inseparable=[
            _named_shares(direction, names)
            for square, direction in zip(left.squares, left.directions.T, strict=True)
            if square < 1.0
        ],
        message=(
            f"The fit of {count} timings {ending} in {int(found.steps)} steps (loss {float(found.loss):.4g}, "
            f"of which another step promises {float(found.expected_decrease):.2g})."
        ),
    )


class Posterior(NamedTuple):
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


def posterior(
    found: Minimum, weights: Float[np.ndarray, "*devices n"], prior_sd: Float[np.ndarray, "*devices c"]
) -> Posterior:
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
    return Posterior(
        covariance=left * scale,
        log_sd=log_sd,
        measured=is_measured(log_sd, prior_sd),
        squares=squares,
        directions=directions,
        noise_sd=noise_sd,
        converged=np.isfinite(found.loss) & found.is_converged(),
    )


def is_measured(
    log_sd: Float[np.ndarray, "*batch"], prior_sd: Float[np.ndarray, "*batch"]
) -> Bool[np.ndarray, "*batch"]:
    """Return whether measurements, rather than what was believed before them, say what coefficients are.

    Args:
        log_sd: standard deviations of their logarithms.
        prior_sd: the same before any measurement.
    """
    least_taken = 1.0 - MEASURED_SHARE
    # A coefficient that nothing but a micro-benchmark measured has the bound to the last digits.
    return (log_sd <= MEASURED_LOG_SD * (1.0 + ROUNDING)) & ((log_sd / prior_sd) ** 2 <= least_taken)


def _robust_sd(residuals: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return 1.4826 times the weighted median of absolute values, the standard deviation of normal ones."""
    size = np.abs(residuals)
    order = np.argsort(size, -1)
    below = np.cumsum(np.take_along_axis(weights, order, -1), -1)
    middle = np.argmax(below >= below[..., -1:] / 2, -1)[..., None]
    return 1.4826 * np.take_along_axis(size, np.take_along_axis(order, middle, -1), -1)[..., 0]


def _likely_sd(noise_sd: np.ndarray, count: np.ndarray, absorbed: np.ndarray) -> np.ndarray:
    """Return the noise that few residuals make likely: those that parameters absorbed say nothing of it."""
    seen = count * noise_sd**2 + PRIOR_RESIDUALS * RELATIVE_SD**2
    left = np.maximum(count - absorbed, 0.0) + PRIOR_RESIDUALS
    # Residuals that are not finite say nothing.
    return np.where(np.isfinite(noise_sd), np.maximum(np.sqrt(seen / left), LEAST_NOISE_SD), np.inf)


def _named_shares(direction: np.ndarray, names: list[str]) -> dict[str, float]:
    """Return the coefficients that make up nine tenths of a direction, the largest first."""
    order = np.argsort(-(direction**2), kind="stable")
    count = int(np.searchsorted(np.cumsum(direction[order] ** 2), 0.9)) + 1
    return {names[index]: round(float(direction[index]), 3) for index in order[:count]}


def vector(coefficients: Coefficients) -> Float[Array, "c"]:
    """Return coefficients as one vector, in the order of their fields."""
    return jnp.stack([jnp.asarray(leaf, jnp.result_type(float)) for leaf in jax.tree.leaves(coefficients)])
