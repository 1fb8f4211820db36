"""The fit: timings in, coefficients and diagnostics out. Pure: no clock, no files, any latency model."""

import operator
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Float

from rlxjax._html import html_of
from rlxjax._values import by_value

from ._laplace import laplace_approximation, named_shares
from ._minimise import Minimum, minimise
from ._model import Facts
from ._names import coefficient_names, coefficient_table
from ._prior import LatencyPrior, check_prior
from ._timings import MIN_TIMINGS, Timings, check_enough, filled_up, with_counted_rows

C = TypeVar("C")

#: A fit is from so many starts: the prior's medians, and around them by this share of the prior's standard
#: deviations. From one, a fit may end where the caches are not.
STARTS, START_SHARE = 8, 0.25
#: The minimum from a further start is another one if it is lower by this.
LEAST_GAIN = 0.1


@by_value
class FitResult(NamedTuple, Generic[C]):
    """What a fit found; a fit that did not converge is a result that says so.

    Attributes:
        coefficients: the fitted coefficients.
        loss: the objective at the end.
        expected_decrease: what a further step, by Gauss and Newton, promises to take off it.
        steps: of L-BFGS.
        converged: whether that promise is small.
        noise_sd: robust standard deviation of `log(predicted / measured)`.
        log_sd: standard deviation of each coefficient's logarithm, from the curvature at the end; of few
            timings, the noise is taken to be closer to 5 %.
        measured: whether the timings say what a coefficient is, rather than its prior: they leave a `log_sd`
            of at most 0.3, and no more than half of the prior's variance.
        covariance: of the coefficients' logarithms, `[c, c]` in the order of the names.
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

    def _repr_html_(self) -> str:
        known = {name: "timings" if is_one else "prior" for name, is_one in self.measured.items()}
        lead = [self.message, f"The timings scatter by {100 * self.noise_sd:.1f} %."]
        return html_of(lead, coefficient_table(self.coefficients, self.log_sd, known))


def fit_latency(
    timings: Timings,
    prior: LatencyPrior[Any] | None = None,
    weights: np.ndarray | Float[Array, "n"] | None = None,
    min_timings: int = MIN_TIMINGS,
    facts: Facts | None = None,
) -> FitResult[Any]:
    """Fit a latency model to timings: robust, positive, with log-normal priors.

    Minimises `sum(w * huber(log(predicted / measured) / 0.05)) + sum((log(c / median) / log_sd)**2) / 2`
    over the logarithms of the coefficients by `optax.lbfgs`, from eight starts, of whose ends the lowest is
    taken.

    Args:
        timings: of a model, one entry a workload, `[n]`.
        prior: what is believed beforehand; the model's own unless given.
        weights: `[n]`, 0 leaves an entry out (and keeps the shapes, so nothing is compiled anew).
        min_timings: fewer that count are refused; a prior from other devices (`pooled_prior`) does with few.
        facts: how the machine schedules; the model's own unless given.

    Raises:
        ValueError: fewer than `min_timings` timings that count, all of one workload, one that is not positive
            and finite, or a prior with such a number.

    Examples:
        >>> import numpy as np
        >>> from rlxjax.models import FFT
        >>> batch, n_fft = np.repeat([32, 256, 2048], 4), np.tile([64, 256, 1024, 4096], 3)
        >>> time_ns = 2e4 + 12.0 * batch * n_fft
        >>> timings = Timings.checked(FFT, variant="fft", batch=batch, n_fft=n_fft, time_ns=time_ns)
        >>> result = fit_latency(timings)
        >>> result.converged, bool(result.noise_sd < 0.1)
        (True, True)
    """
    return minimum_and_result(timings, prior, weights, min_timings, facts)[1]


def minimum_and_result(
    timings: Timings,
    prior: LatencyPrior[Any] | None = None,
    weights: np.ndarray | Float[Array, "n"] | None = None,
    min_timings: int = MIN_TIMINGS,
    facts: Facts | None = None,
) -> tuple[Minimum, FitResult]:
    """Return the minimum, of NumPy arrays, and what `fit_latency` makes of it; arguments as there."""
    prior, facts = with_defaults(timings, prior, facts)
    counted = np.ones(timings.time_ns.shape) if weights is None else np.asarray(weights, np.float64)
    check_enough(timings, counted, min_timings)
    starts = _starts(prior)
    columns = (*filled_up(with_counted_rows(timings, counted), counted), prior)
    own, influences, priors = jax.tree.map(
        lambda leaf: np.broadcast_to(np.asarray(leaf), (STARTS, *np.shape(leaf))), columns
    )
    ends = minimise(own, influences, priors, facts, starts)
    losses = np.where(np.isfinite(ends.loss), ends.loss, np.inf)
    # Of ends that are the same but for rounding, the first.
    chosen = int(np.argmax(losses <= losses.min() + LEAST_GAIN))
    found: Minimum = jax.tree.map(operator.itemgetter(chosen), ends)
    n = len(counted)
    found = found._replace(residuals=found.residuals[:n], jacobian=found.jacobian[:n])
    return found, _result(found, prior, counted)


def with_defaults(timings: Timings, prior: LatencyPrior | None, facts: Facts | None) -> tuple[LatencyPrior, Facts]:
    """Return the prior of the terms, checked, and the facts: the model's own where none are given."""
    prior = timings.model.prior if prior is None else prior
    check_prior(prior)
    # The terms alone have no use for a correction.
    return prior._replace(correction=0.0), dict(timings.model.facts if facts is None else facts)


def _starts(prior: LatencyPrior) -> np.ndarray:
    """Return where fits begin: at the medians, then around them, the same places each time, `[starts, c]`."""
    around = np.random.default_rng(0).standard_normal((STARTS - 1, len(jax.tree.leaves(prior.median))))
    return np.concatenate([np.zeros_like(around[:1]), START_SHARE * around])


def _result(found: Minimum, prior: LatencyPrior[C], weights: np.ndarray) -> FitResult[C]:
    structure, names = jax.tree.structure(prior.median), coefficient_names(prior.median)
    left = laplace_approximation(found, weights, np.array(jax.tree.leaves(prior.log_sd), float))
    count, ending = int(np.sum(weights > 0)), "converged" if left.converged else "did not converge"
    decrease = float(found.expected_decrease)
    return FitResult(
        coefficients=structure.unflatten([float(value) for value in np.exp(found.logs)]),
        loss=float(found.loss),
        expected_decrease=decrease,
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
            f"of which another step promises {decrease:.2g})."
        ),
    )
