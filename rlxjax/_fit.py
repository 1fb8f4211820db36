"""The fit: timings in, latency coefficients and diagnostics out. Pure: no clock, no files.

`fit_coefficients` fits any prediction that is a function of (coefficients, timings); `fit_latency` is that
of the Welch-peaks model.
"""

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._device import Coefficients
from ._laplace import laplace_approximation, named_shares
from ._latency import LatencyCoefficients, predict_latency_ns
from ._least_squares import MAX_STEPS, Minimum, Start, first_start, least_squares
from ._prior import LatencyPrior, check_prior, typical_prior
from ._programs import quick_jit
from ._timings import MIN_TIMINGS as MIN_TIMINGS
from ._timings import Timings as Timings
from ._timings import check_enough, filled_up
from ._timings import checked_columns as checked_columns
from ._typing import Nanoseconds

C = TypeVar("C", bound=Coefficients)

#: The latency model is fitted from so many starts: the prior's medians, and around them by this share of the
#: prior's standard deviations. From one, a fit may end where the caches are not.
STARTS, START_SHARE = 5, 0.25
#: The minimum from a further start is another one if it is lower by this.
LEAST_GAIN = 0.1


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
    ends = [
        jax.tree.map(np.asarray, _minimise(filled, influences, prior, predict, start))
        for start in _starts(prior, starts)
    ]
    found = functools.reduce(lambda one, other: other if other.loss < one.loss - LEAST_GAIN else one, ends)
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
    return [first_start(np.log(median) + move) for move in (0.0 * sd, *(START_SHARE * sd * around))]


def _result(found: Minimum, prior: LatencyPrior[C], weights: np.ndarray) -> FitResult[C]:
    structure = jax.tree.structure(prior.median)
    names = list(vars(prior.median))
    left = laplace_approximation(found, weights, np.array(jax.tree.leaves(prior.log_sd), float))
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
            named_shares(direction, names)
            for square, direction in zip(left.squares, left.directions.T, strict=True)
            if square < 1.0
        ],
        message=(
            f"The fit of {count} timings {ending} in {int(found.steps)} steps (loss {float(found.loss):.4g}, "
            f"of which another step promises {float(found.expected_decrease):.2g})."
        ),
    )


def vector(coefficients: Coefficients) -> Float[Array, "c"]:
    """Return coefficients as one vector, in the order of their fields."""
    return jnp.stack([jnp.asarray(leaf, jnp.result_type(float)) for leaf in jax.tree.leaves(coefficients)])
