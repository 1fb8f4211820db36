"""The fit of many devices: vmapped, in chunks on threads, and in rounds, so that a slow one holds up few."""

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ._chunks import for_each_chunk
from ._device import Coefficients
from ._fit import minimise, predicted_ns
from ._laplace import laplace_approximation
from ._latency import LatencyCoefficients
from ._least_squares import FIRST_DAMPING, MAX_STEPS, Minimum, Start
from ._prior import LatencyPrior, check_prior, typical_prior
from ._programs import quick_jit
from ._timings import MIN_TIMINGS, Timings, check_enough, with_counted_rows
from ._typing import Nanoseconds

C = TypeVar("C", bound=Coefficients)

#: Devices of one program; of fewer devices, the next power of two.
CHUNK_DEVICES = 32
#: Steps of the first round; each further one goes on with the devices that are left, up to twice as far.
FIRST_STEPS = 12


class DeviceFits(NamedTuple, Generic[C]):
    """What the fits of many devices found: the fields of `FitResult`, each with a leading axis `[devices]`.

    Attributes:
        coefficients: the fitted coefficients, every leaf `[devices]`.
        loss: the objective at the end.
        expected_decrease: what the last step, undamped, promised to take off it.
        steps: Levenberg-Marquardt steps taken.
        converged: whether that promise is small.
        noise_sd: robust standard deviation of `log(predicted / measured)`.
        log_sd: standard deviation of each coefficient's logarithm, every leaf `[devices]`.
        measured: whether the timings say what a coefficient is, rather than its prior, `[devices]` by name.
        covariance: of the coefficients' logarithms, `[devices, c, c]` in the order of the fields.
    """

    coefficients: C
    loss: Float[np.ndarray, "devices"]
    expected_decrease: Float[np.ndarray, "devices"]
    steps: Int[np.ndarray, "devices"]
    converged: Bool[np.ndarray, "devices"]
    noise_sd: Float[np.ndarray, "devices"]
    log_sd: C
    measured: dict[str, np.ndarray]
    covariance: Float[np.ndarray, "devices c c"]


def fit_devices(
    timings: Timings,
    prior: LatencyPrior[LatencyCoefficients] | None = None,
    weights: np.ndarray | Float[Array, "devices n"] | None = None,
    min_timings: int = MIN_TIMINGS,
) -> DeviceFits[LatencyCoefficients]:
    """Fit the latency model to each of many devices' timings: `fit_latency` of each at once, from one start.

    Args:
        timings: every column `[devices, n]`; `stack_timings` makes them of several devices'.
        prior: of every device, or with leaves `[devices]`; a wide prior unless given.
        weights: `[devices, n]`, 0 leaves an entry out, as where a device has fewer timings.
        min_timings: fewer of a device that count are refused.

    Raises:
        ValueError: columns without these two axes, or a device with fewer than `min_timings` timings that
            count, or with those of one workload alone; what `fit_latency` refuses.

    Examples:
        >>> import numpy as np
        >>> batch, n_fft = np.repeat(2.0 ** np.arange(10), 2), np.tile([256.0, 1024.0], 10)
        >>> sizes = dict(path=["host"] * 20, batch=batch, n_fft=n_fft, k=[16] * 20, n_segments=[2] * 20)
        >>> timings = [Timings.checked(**sizes, time_ns=4e4 + rate * batch * n_fft) for rate in (2.0, 10.0)]
        >>> fits = fit_devices(jax.tree.map(lambda *columns: np.stack(columns), *timings))
        >>> fits.coefficients.host_bytes_per_ns.shape, fits.converged.tolist()
        ((2,), [True, True])
    """
    # The terms alone have no use for a correction.
    prior = typical_prior() if prior is None else prior._replace(correction=0.0)
    return fit_coefficients_of_devices(predicted_ns, timings, prior, weights, min_timings)


def fit_coefficients_of_devices(
    predict: Callable[[C, Any], Nanoseconds],
    timings: Any,
    prior: LatencyPrior[C],
    weights: np.ndarray | Float[Array, "devices n"] | None = None,
    min_timings: int = MIN_TIMINGS,
) -> DeviceFits[C]:
    """Fit the coefficients of any prediction to each of many devices; arguments as `fit_devices`.

    Args:
        predict: a function of one device's (coefficients, timings), times in ns `[n]`; the same function,
            timings of as many entries: nothing is compiled anew.
        timings: a dataclass pytree of columns `[devices, n]`, one of them `time_ns`.
        prior: of the coefficients, which the result has the type of.
        weights: `[devices, n]`, 0 leaves an entry out.
        min_timings: fewer of a device that count are refused.

    Raises:
        ValueError: as `fit_devices`.
    """
    shape = np.shape(timings.time_ns)
    if len(shape) != 2 or not shape[0]:
        raise ValueError(f"timings: expected columns [devices, n], got time_ns of shape {shape}")
    counted = np.ones(shape) if weights is None else np.asarray(weights, np.float64)
    check_prior(prior)
    check_enough(timings, counted, min_timings)
    timings = with_counted_rows(timings, counted)
    devices = shape[0]
    priors = jax.tree.map(lambda leaf: np.broadcast_to(np.asarray(leaf, np.float64), devices), prior)
    minima = _minimise_all(jax.tree.map(np.asarray, (timings, counted, priors)), devices, predict)
    return _results(minima, counted, priors)


def _minimise_all(columns: Any, devices: int, predict: Callable) -> Minimum:
    """Return the minima of devices, from their timings, weights and priors."""
    float_type = jnp.zeros(()).dtype
    logs = np.log(np.stack(jax.tree.leaves(columns[-1].median), -1)).astype(float_type)
    damping, excess = (
        np.full(devices, FIRST_DAMPING, float_type),
        np.zeros((*logs.shape, logs.shape[-1]), float_type),
    )
    starts = Start(logs, damping, np.zeros(devices, int), excess)
    chunk_devices = min(CHUNK_DEVICES, 1 << (devices - 1).bit_length())
    left, most_steps = np.arange(devices), min(FIRST_STEPS, MAX_STEPS)
    minima = _minimise_some(columns, starts, left, chunk_devices, most_steps, predict)
    while (left := np.flatnonzero(~minima.is_finished())).size:
        # A round's unfinished devices share the chunks of the next.
        most_steps = min(2 * most_steps, MAX_STEPS)
        starts = Start(minima.logs, minima.damping, minima.steps, minima.excess)
        found = _minimise_some(columns, starts, left, chunk_devices, most_steps, predict)
        minima = jax.tree.map(functools.partial(_replaced, left), minima, found)
    return minima


def _minimise_some(columns, starts: Start, chosen, chunk_devices: int, most_steps: int, predict) -> Minimum:
    """Return how far the most steps bring the chosen devices, in chunks on threads."""
    found: list[Any] = [None] * -(-chosen.size // chunk_devices)

    def fit_chunk(begin: int, end: int) -> None:
        # The last chunk is filled up with its last device, without timings: its steps end at once.
        rows = chosen[np.minimum(np.arange(begin, begin + chunk_devices), end - 1)]
        (timings, weights, priors), own = jax.tree.map(lambda column: column[rows], (columns, starts))
        weights[end - begin :] = 0.0
        minima = _minimise_each(timings, weights, priors, own, most_steps, predict)
        found[begin // chunk_devices] = jax.tree.map(lambda leaf: np.asarray(leaf)[: end - begin], minima)

    for_each_chunk(fit_chunk, chosen.size, chunk_devices)
    return jax.tree.map(lambda *chunks: np.concatenate(chunks), *found)


def _each(timings: Any, weights, priors: LatencyPrior, starts, most_steps, predict: Callable) -> Minimum:
    def one(own, own_weights, prior, start):
        return minimise(own, own_weights, prior, predict, start, most_steps)._replace(jacobian=None)

    return jax.vmap(one)(timings, weights, priors, starts)


_minimise_each = quick_jit(_each, ["predict"])


def _replaced(index: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    changed = old.copy()
    changed[index] = new
    return changed


def _results(minima: Minimum, weights: np.ndarray, priors: LatencyPrior[C]) -> DeviceFits[C]:
    structure = jax.tree.structure(priors.median)
    names = list(vars(priors.median))
    left = laplace_approximation(minima, weights, np.stack(jax.tree.leaves(priors.log_sd), -1))
    return DeviceFits(
        coefficients=structure.unflatten(list(np.exp(minima.logs).T)),
        loss=minima.loss,
        expected_decrease=minima.expected_decrease,
        steps=minima.steps,
        converged=left.converged,
        noise_sd=left.noise_sd,
        log_sd=structure.unflatten(list(left.log_sd.T)),
        measured=dict(zip(names, left.measured.T, strict=True)),
        covariance=left.covariance,
    )
