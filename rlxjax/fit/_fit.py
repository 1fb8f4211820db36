"""The fit: timings in, coefficients and how sure they are out. Pure: no clock, no files, any latency model.

How sure follows from the curvature at the minimum (Laplace's approximation).
"""

import operator
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from rlxjax._typing import RealLike
from rlxjax._values import by_value

from ._latency_model import Facts, LatencyPrior, check_prior, coefficient_names, vector
from ._minimise import RELATIVE_SD, Minimum, minimise
from ._posterior import LatencyPosterior
from ._timings import MIN_TIMINGS, Timings, check_enough, filled_up, with_counted_rows

C = TypeVar("C")

#: A fit is from so many starts: the prior's medians, and around them by this share of the prior's standard
#: deviations. From one, a fit may end where the caches are not.
STARTS, START_SHARE = 8, 0.25
#: The minimum from a further start is another one if it is lower by this.
LEAST_GAIN = 0.1

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
#: What one machine says of another: a standard deviation of the logarithm of coefficients, and the share of
#: the correction that is expected there too; `benchmarks/population_prior.py` judges both.
TRANSFERRED_LOG_SD, TRANSFERRED_SHARE = 1.0, 0.7
#: Residuals are never taken to be more exact than this: a clock and a machine are not.
LEAST_NOISE_SD = 0.005


@by_value
class FitResult(NamedTuple, Generic[C]):
    """What the fit of a device found; of many devices, each field has a leading axis `[devices]`.

    A fit that did not converge is a result that says so.

    Attributes:
        coefficients: the fitted coefficients.
        loss: the objective at the end.
        expected_decrease: what a further step, by Gauss and Newton, promises to take off it.
        steps: of L-BFGS.
        converged: whether that promise is small.
        noise_sd: robust standard deviation of `log(predicted / measured)`.
        log_sd: standard deviation of each coefficient's logarithm, from the curvature at the end; of few
            timings, the noise is taken to be closer to 5 %.
        measured: whether the timings say what a coefficient is, rather than its prior, by name: they leave a `log_sd`
            of at most 0.3, and no more than half of the prior's variance.
        covariance: of the coefficients' logarithms, `[c, c]` in the order of the names.
        inseparable: combinations that the timings do not settle, the least settled first: names with their
            share of the direction, from the singular vectors of the Jacobian in units of the prior; of one device.
        message: how it ended, in a sentence; of one device.
    """

    coefficients: C
    loss: Any
    expected_decrease: Any
    steps: Any
    converged: Any
    noise_sd: Any
    log_sd: C
    measured: dict[str, Any]
    covariance: np.ndarray
    inseparable: list[dict[str, float]]
    message: str


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
    prior, counted, facts = checked_fit(timings, prior, weights, min_timings, facts)
    own, influences = filled_up(*jax.tree.map(lambda column: np.asarray(column)[None], (timings, counted)))
    return minima_and_results(own, influences, prior, facts)[1][0]


def fit_devices(
    timings: Timings,
    prior: LatencyPrior[Any] | None = None,
    weights: np.ndarray | Float[Array, "devices n"] | None = None,
    min_timings: int = MIN_TIMINGS,
    facts: Facts | None = None,
) -> FitResult[Any]:
    """Fit a latency model to each of many devices' timings: `fit_latency` of each at once, from one start.

    Args:
        timings: every column `[devices, n]`; `stack_timings` makes them of several devices'.
        prior: of every device, or with leaves `[devices]`; the model's own unless given.
        weights: `[devices, n]`, 0 leaves an entry out, as where a device has fewer timings.
        min_timings: fewer of a device that count are refused.
        facts: how the machines schedule; the model's own unless given.

    Raises:
        ValueError: columns without these two axes, or a device with fewer than `min_timings` timings that
            count, or with those of one workload alone; what `fit_latency` refuses.

    Examples:
        >>> import numpy as np
        >>> from rlxjax.models import FFT
        >>> batch, n_fft = np.repeat([32, 256, 2048], 4), np.tile([64, 256, 1024, 4096], 3)
        >>> timings = [Timings.checked(FFT, variant="fft", batch=batch, n_fft=n_fft,
        ...                            time_ns=2e4 + rate * batch * n_fft) for rate in (3.0, 12.0)]
        >>> fits = fit_devices(jax.tree.map(lambda *columns: np.stack(columns), *timings))
        >>> fits.coefficients.call_ns.shape, fits.converged.tolist()
        ((2,), [True, True])
    """
    shape = np.shape(timings.time_ns)
    if len(shape) != 2 or not shape[0]:
        raise ValueError(f"timings: expected columns [devices, n], got time_ns of shape {shape}")
    prior, counted, facts = checked_fit(timings, prior, weights, min_timings, facts)
    own, priors = with_counted_rows(timings, counted), for_each(prior, shape[0])
    starts = np.zeros((shape[0], len(jax.tree.leaves(prior.median))))
    return _fits(minimise(own, counted, priors, facts, starts, np.zeros((*shape, 0))), counted, priors)[0]


def minima_and_results(
    timings: Timings,
    counted: Float[np.ndarray, "devices n"],
    prior: LatencyPrior[Any],
    facts: Facts,
    n_starts: int = STARTS,
) -> tuple[Minimum, list[Any]]:
    """Return the minima of devices, of NumPy arrays, and what `fit_latency` makes of each."""
    # At the medians, then around them, the same places each time.
    starts = START_SHARE * np.random.default_rng(0).standard_normal((n_starts, len(jax.tree.leaves(prior.median))))
    starts = np.concatenate([np.zeros_like(starts[:1]), starts[:-1]])
    devices = len(counted)
    own, influences = jax.tree.map(lambda column: np.repeat(np.asarray(column), n_starts, 0), (timings, counted))
    none = np.zeros((*influences.shape, 0))
    ends = minimise(own, influences, for_each(prior, len(influences)), facts, np.tile(starts, (devices, 1)), none)
    losses = np.where(np.isfinite(ends.loss), ends.loss, np.inf).reshape(devices, n_starts)
    # Of ends that are the same but for rounding, the first.
    chosen = np.argmax(losses <= losses.min(-1, keepdims=True) + LEAST_GAIN, -1) + n_starts * np.arange(devices)
    found: Minimum = jax.tree.map(operator.itemgetter(chosen), ends)
    fits, squares, directions = _fits(found, counted, for_each(prior, devices))
    results = [_result(fits, place, int(np.sum(own > 0)), squares, directions) for place, own in enumerate(counted)]
    return found, results


def _result(fits: FitResult[C], place: int, count: int, squares: np.ndarray, directions: np.ndarray) -> FitResult[C]:
    """Return the fit of one device with what its timings do not settle, and how it ended."""
    arrays = fits._replace(message=None)
    one: Any = jax.tree.map(lambda leaf: leaf[place].tolist() if leaf.ndim == 1 else leaf[place], arrays)
    measured = {name: bool(column[place]) for name, column in fits.measured.items()}  # in the order of the names
    ending = "converged" if one.converged else "did not converge"
    inseparable, names = [], list(measured)
    for direction in directions[place].T[squares[place] < 1.0]:
        # The coefficients that make up nine tenths of a direction, the largest first.
        order = np.argsort(-(direction**2), kind="stable")
        largest = order[: int(np.searchsorted(np.cumsum(direction[order] ** 2), 0.9)) + 1]
        inseparable.append({names[index]: round(float(direction[index]), 3) for index in largest})
    message = (
        f"The fit of {count} timings {ending} in {one.steps} steps (loss {one.loss:.4g}, "
        f"of which another step promises {one.expected_decrease:.2g})."
    )
    return one._replace(measured=measured, inseparable=inseparable, message=message)


def for_each(prior: LatencyPrior[C], devices: int) -> LatencyPrior[C]:
    """Return the prior of the terms with leaves `[devices]`."""
    return jax.tree.map(lambda leaf: np.broadcast_to(np.asarray(leaf, np.float64), devices), prior)


def checked_fit(
    timings: Timings, prior: LatencyPrior | None, weights: Any, min_timings: int, facts: Facts | None
) -> tuple[LatencyPrior, np.ndarray, Facts]:
    """Return the prior of the terms, the weights and the facts: the model's own, and 1, where none are given."""
    prior = timings.model.prior if prior is None else prior
    check_prior(prior)
    counted = np.ones(np.shape(timings.time_ns)) if weights is None else np.asarray(weights, np.float64)
    check_enough(timings, counted, min_timings)
    # The terms alone have no use for a correction.
    return prior._replace(correction=0.0), counted, dict(timings.model.facts if facts is None else facts)


def _fits(
    minima: Minimum, weights: Float[np.ndarray, "devices n"], priors: LatencyPrior[C]
) -> tuple[FitResult[C], np.ndarray, np.ndarray]:
    """Return what the timings of devices say, and what they leave unknown in units of the prior's deviations."""
    structure, prior_sd = jax.tree.structure(priors.median), np.stack(jax.tree.leaves(priors.log_sd), -1)
    # In units of the prior, the posterior's precision is 1 + s**2 along each singular vector.
    scale = prior_sd[..., :, None] * prior_sd[..., None, :]
    finite = np.isfinite(minima.squares).all((-2, -1), keepdims=True)
    squares, directions = np.linalg.eigh(np.where(finite, minima.squares, 0.0) * scale)
    squares = np.maximum(squares, 0.0)
    noise_sd, absorbed = _robust_sd(minima.residuals, weights), np.sum(squares / (1.0 + squares), -1)
    squares *= (RELATIVE_SD / _likely_sd(noise_sd, weights.sum(-1), absorbed)[..., None]) ** 2
    left = (directions / (1.0 + squares[..., None, :])) @ np.swapaxes(directions, -2, -1)
    log_sd = prior_sd * np.sqrt(np.diagonal(left, axis1=-2, axis2=-1))
    measured = is_measured(log_sd, prior_sd)
    fits = FitResult(
        coefficients=structure.unflatten(list(np.exp(minima.logs).T)),
        loss=minima.loss,
        expected_decrease=minima.expected_decrease,
        steps=minima.steps,
        converged=has_converged(minima),
        noise_sd=noise_sd,
        log_sd=structure.unflatten(list(log_sd.T)),
        measured=dict(zip(coefficient_names(priors.median), measured.T, strict=True)),
        covariance=left * scale,
        inseparable=[],
        message="",
    )
    return fits, squares, directions


def has_converged(minima: Minimum) -> Bool[np.ndarray, "devices"]:
    """Return whether a further step promises to lower the objectives by little."""
    least_decrease = CONVERGED_DECREASE + CONVERGED_SHARE * minima.loss
    return np.isfinite(minima.loss) & (minima.expected_decrease < least_decrease)


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


def pooled_prior(
    fits: FitResult[C] | Sequence[FitResult[C]] | Sequence[LatencyPosterior], prior: LatencyPrior[C]
) -> LatencyPrior[C]:
    """Return the log-normal prior of a further device's coefficients, from the fits of several devices.

    With `m_d` and `v_d` the mean and variance of a coefficient's logarithm after the fit of device d, and
    `m_0`, `v_0` those of the prior, which counts as one device more,

        mean = sum(m_d) / (D + 1),   variance = sum((m_d - mean)**2 + v_d) / (D + 1),   d from 0 to D

    which is a step of expectation and maximisation towards the likeliest mean and variance over devices.
    To take a further step, fit the devices again with the result, and pool with the first prior again.

    A coefficient that no device measured keeps the prior, and no variance is below `v_0 / (D + 1)`; one that
    differs more between devices than the prior expected becomes wider than it. Fits that did not converge
    are left out. Of posteriors, the correction is pooled too, as by `transferred_prior`; fits of terms have none.

    Args:
        fits: of the devices: of their terms, or posteriors.
        prior: what is believed without them, the model's own say.

    Raises:
        ValueError: no fit that converged.

    References:
        A. Gelman et al., Bayesian Data Analysis, 3rd edition, 2013, chapter 5 and section 13.6.

    Examples:
        >>> from rlxjax.fit import Timings, fit_latency
        >>> from rlxjax.models import FFT
        >>> batch, n_fft = np.repeat([32, 256, 2048], 4), np.tile([64, 256, 1024, 4096], 3)
        >>> def timings(call_ns):
        ...     time_ns = call_ns + 12.0 * batch * n_fft
        ...     return Timings.checked(FFT, variant="fft", batch=batch, n_fft=n_fft, time_ns=time_ns)
        >>> fits = [fit_latency(timings(call_ns)) for call_ns in (1e6, 2e6, 3e6)]
        >>> pooled = pooled_prior(fits, FFT.prior)
        >>> bool(6e4 < pooled.median.call_ns < 3e6)
        True
        >>> few = jax.tree.map(lambda column: column[:3], timings(4e6))
        >>> bool(abs(fit_latency(few, pooled, min_timings=3).coefficients.call_ns / 4e6 - 1) < 0.1)
        True
    """
    if not isinstance(fits, FitResult) and not fits:
        raise ValueError("fits: expected one at least, got none")
    correction, pairs = 0.0, []
    for one in [fits] if isinstance(fits, FitResult) else fits:
        if isinstance(one, LatencyPosterior):
            pairs.append((_leaves(one.coefficients), _leaves(one.coefficient_log_sd())))
        elif (is_used := np.asarray(one.converged)).any():
            pairs.append(tuple(_leaves(part)[is_used] for part in (one.coefficients, one.log_sd)))
    if posteriors := [one for one in fits if isinstance(one, LatencyPosterior)]:
        correction = _shared_correction(posteriors)
    if not pairs:
        raise ValueError("fits: expected one at least that converged, got none")
    structure, last = jax.tree.structure(prior.median), [_leaves(prior.median), _leaves(prior.log_sd)]
    values, sds = (np.vstack(part) for part in zip(*pairs, last, strict=True))
    means, variances = np.log(values), sds**2
    mean = means.mean(0)
    variance = np.mean((means - mean) ** 2 + variances, 0)
    medians, log_sds = (structure.unflatten(part.tolist()) for part in (np.exp(mean), np.sqrt(variance)))
    return LatencyPrior(medians, log_sds, correction)


def transferred_prior(*posteriors: LatencyPosterior) -> LatencyPrior[Any]:
    """Return what the calibrations of some machines say of another, or of one on another day.

    With `m_d` the logarithm of a coefficient on machine d of D,

        median = exp(sum(m_d) / D),   log_sd**2 = (sum((m_d - sum(m_d) / D)**2) + 1) / D

    which is the likeliest mean, and a variance that one machine alone leaves at 1; no larger than the model's own
    prior has it. What the terms miss belongs to the programs as well as to the machine, so that most of the correction
    is expected there too: of one machine's 0.7, of several ones' mean more.

    Args:
        *posteriors: of the other machines, of one model and one version of it.

    Raises:
        ValueError: no posterior, or posteriors of different models.

    References:
        A. Gelman et al., Bayesian Data Analysis, 3rd edition, 2013, chapter 5.

    Examples:
        >>> from rlxjax.fit import prior_posterior
        >>> from rlxjax.models import FFT
        >>> prior = transferred_prior(prior_posterior(FFT))
        >>> round(prior.median.call_ns), prior.log_sd.call_ns
        (60000, 1.0)
    """
    if len({(one.model.name, one.model.version) for one in posteriors}) != 1:
        raise ValueError("posteriors: expected one at least, all of one model")
    known, count = posteriors[0].model.prior, len(posteriors)
    logs = np.log([vector(one.coefficients) for one in posteriors])
    squares = np.sum((logs - logs.mean(0)) ** 2, 0) + TRANSFERRED_LOG_SD**2
    log_sd = np.minimum(np.sqrt(squares / count), np.asarray(vector(known.log_sd)))
    structure = jax.tree.structure(known.median)
    medians = structure.unflatten(np.exp(logs.mean(0)).tolist())
    return LatencyPrior(medians, structure.unflatten(log_sd.tolist()), _shared_correction(posteriors))


def _leaves(tree: Any) -> np.ndarray:
    """Return the coefficients of a device, `[c]`, or of many, `[devices, c]`."""
    return np.moveaxis(np.array(jax.tree.leaves(tree), np.float64), 0, -1)


def _shared_correction(posteriors: Sequence[LatencyPosterior]) -> np.ndarray:
    """Return the part of the mean correction of some machines that is expected of another."""
    count = len(posteriors)
    share = count / (count + 1.0 / TRANSFERRED_SHARE - 1.0)
    return share * np.mean([np.asarray(one.weights) for one in posteriors], 0)
