"""The fit of many devices at once."""

from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rlxjax._values import by_value

from ._fit import with_defaults
from ._laplace import laplace_approximation
from ._minimise import Minimum, minimise
from ._model import Facts
from ._names import coefficient_names
from ._prior import LatencyPrior
from ._timings import MIN_TIMINGS, Timings, check_enough, with_counted_rows

C = TypeVar("C")


@by_value
class DeviceFits(NamedTuple, Generic[C]):
    """What the fits of many devices found: the fields of `FitResult`, each with a leading axis `[devices]`.

    Attributes:
        coefficients: the fitted coefficients, every leaf `[devices]`.
        loss: the objective at the end.
        expected_decrease: what a further step, by Gauss and Newton, promises to take off it.
        steps: of L-BFGS.
        converged: whether that promise is small.
        noise_sd: robust standard deviation of `log(predicted / measured)`.
        log_sd: standard deviation of each coefficient's logarithm, every leaf `[devices]`.
        measured: whether the timings say what a coefficient is, rather than its prior, `[devices]` by name.
        covariance: of the coefficients' logarithms, `[devices, c, c]` in the order of the names.
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
    prior: LatencyPrior[Any] | None = None,
    weights: np.ndarray | Float[Array, "devices n"] | None = None,
    min_timings: int = MIN_TIMINGS,
    facts: Facts | None = None,
) -> DeviceFits[Any]:
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
    prior, facts = with_defaults(timings, prior, facts)
    counted = np.ones(shape) if weights is None else np.asarray(weights, np.float64)
    check_enough(timings, counted, min_timings)
    own = with_counted_rows(timings, counted)
    priors = jax.tree.map(lambda leaf: np.broadcast_to(np.asarray(leaf, np.float64), shape[0]), prior)
    starts = np.zeros((shape[0], len(jax.tree.leaves(prior.median))))
    return _results(minimise(own, counted, priors, facts, starts), counted, priors)


def _results(minima: Minimum, weights: np.ndarray, priors: LatencyPrior[C]) -> DeviceFits[C]:
    structure, names = jax.tree.structure(priors.median), coefficient_names(priors.median)
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
