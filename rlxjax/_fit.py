"""The fit: timings in, latency coefficients and diagnostics out. Pure: no clock, no files.

`fit_coefficients` fits any prediction that is a function of (coefficients, timings); `fit_latency` is that
of the Welch-peaks model.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ._device import Coefficients
from ._latency import LatencyCoefficients, predict_latency_ns
from ._typing import Nanoseconds
from .welch import Path
from .welch._selection import SELECTIONS, default_selection

C = TypeVar("C", bound=Coefficients)

#: Relative error at which the loss turns from quadratic to linear is `HUBER_DELTA * RELATIVE_SD`.
RELATIVE_SD = 0.05
HUBER_DELTA = 2.0
MAX_STEPS = 400
GRADIENT_TOLERANCE = 1e-3
#: A coefficient is not informed if no prediction shows more than this share of its relative change.
INFORMED_SENSITIVITY = 0.05
MIN_TIMINGS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Timings:
    """Measured runs, one entry a workload; every field `[n]`.

    Attributes:
        path: codes of `Path`.
        batch: rows of the signal.
        n_fft: samples of a segment.
        k: peaks of a row.
        n_segments: segments of a row.
        time_ns: the time of one run, the minimum over repeats say.
        selection: codes of the forms of selection of fused runs, in the order of `SELECTIONS`.
    """

    path: np.ndarray | Int[Array, "n"]
    batch: np.ndarray | Float[Array, "n"]
    n_fft: np.ndarray | Float[Array, "n"]
    k: np.ndarray | Float[Array, "n"]
    n_segments: np.ndarray | Float[Array, "n"]
    time_ns: np.ndarray | Float[Array, "n"]
    selection: np.ndarray | Int[Array, "n"]

    @classmethod
    def checked(cls, *, path, batch, n_fft, k, n_segments, time_ns, platform: str = "cpu") -> Self:
        """Build from lists or arrays; `path` may hold names.

        Fused runs are taken to select as `welch_peaks` does by itself on the platform.

        Raises:
            ValueError: columns of unequal length, an unknown path, a size or time that is not positive
                and finite.

        Examples:
            >>> Timings.checked(path=["host"], batch=[8], n_fft=[256], k=[16], n_segments=[2],
            ...                 time_ns=[1e5]).time_ns.shape
            (1,)
        """
        columns = {"batch": batch, "n_fft": n_fft, "k": k, "n_segments": n_segments, "time_ns": time_ns}
        codes = np.asarray(Path.codes(np.asarray(path)), np.int32)
        if codes.ndim != 1:
            raise ValueError(f"path: expected one axis, got shape {codes.shape}")
        if np.any(codes == Path.LEARNED.code):
            raise ValueError("path: expected host, fused or block, got learned, which depends on its model")
        floats = checked_columns("path", codes.shape, columns)
        sizes = zip(floats["batch"], floats["n_fft"], strict=True)
        forms = [default_selection(int(rows), int(n) // 2 + 1, platform) for rows, n in sizes]
        selection = np.array([list(SELECTIONS).index(form) for form in forms], np.int32)
        return cls(codes, selection=selection, **floats)


def checked_columns(first: str, shape: tuple[int, ...], columns: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return columns of timings as float64 arrays of a shape.

    Args:
        first: the name of the column that has the shape, for the message.
        shape: of every column.
        columns: sizes of a workload, and `time_ns`.

    Raises:
        ValueError: as `Timings.checked`.
    """
    floats = {}
    for name, values in columns.items():
        try:
            array = np.asarray(values, np.float64)
        except (TypeError, ValueError):
            raise ValueError(f"{name}: expected numbers, got {values!r}") from None
        if array.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, as {first} has, got {array.shape}")
        bad = ~(np.isfinite(array) & (array > 0))
        if bad.any():
            index = int(np.flatnonzero(bad)[0])
            raise ValueError(f"{name}[{index}]: expected a positive finite number, got {array[index]}")
        left_over = array % (2 if name == "n_fft" else 1)
        if name != "time_ns" and np.any(left_over):
            wanted = "even whole numbers" if name == "n_fft" else "whole numbers"
            raise ValueError(f"{name}: expected {wanted}, got {array[np.argmax(left_over > 0)]}")
        floats[name] = array
    return floats


class LatencyPrior(NamedTuple, Generic[C]):
    """Log-normal prior of every coefficient: median, and standard deviation of its logarithm."""

    median: C
    log_sd: C


class FitResult(NamedTuple, Generic[C]):
    """What a fit found; a fit that did not converge is a result that says so.

    Attributes:
        coefficients: the fitted coefficients.
        loss: the objective at the end.
        gradient_norm: largest absolute entry of its gradient.
        steps: L-BFGS steps taken.
        converged: whether the gradient fell below the tolerance.
        sensitivity: largest share of a coefficient's relative change that any prediction shows.
        informed: whether a coefficient is informed by the timings, rather than by the prior alone.
        message: all that in a sentence.
    """

    coefficients: C
    loss: float
    gradient_norm: float
    steps: int
    converged: bool
    sensitivity: C
    informed: dict[str, bool]
    message: str


#: Orders of magnitude of a present-day machine; a log-sd of 2 lets data move them by a factor of 50.
_TYPICAL = LatencyCoefficients(
    host_call_ns=3e4,
    host_chunk_ns=2e4,
    host_row_ns=50.0,
    host_bytes_per_ns=8.0,
    host_flop_per_ns=10.0,
    select_bin_ns=1.0,
    select_peak_ns=1.0,
    host_chunk_gain=0.7,
    device_call_ns=4e4,
    dispatch_ns=1e4,
    roundtrip_ns=1e4,
    upload_bytes_per_ns=20.0,
    readback_bytes_per_ns=20.0,
    device_row_ns=50.0,
    device_flop_per_ns=10.0,
    device_bytes_per_ns=20.0,
    far_bytes_per_ns=10.0,
    cache_bytes=3e7,
    thread_gain=1.0,
    thread_onset_ns=3e5,
    device_chunk_gain=0.4,
    maxima_key_ns=3.0,
    maxima_bin_ns=0.3,
    maxima_pass_ns=2e3,
    topk_bin_ns=1.0,
    topk_update_ns=5.0,
)
_WIDE_LOG_SD = 2.0


def wide_prior(median: C) -> LatencyPrior[C]:
    """Return the prior that knows each coefficient's order of magnitude and no more."""
    return LatencyPrior(median, jax.tree.map(lambda _: _WIDE_LOG_SD, median))


def typical_prior() -> LatencyPrior[LatencyCoefficients]:
    """Return the wide prior that `fit_latency` starts from."""
    return wide_prior(_TYPICAL)


def fit_latency(
    timings: Timings,
    prior: LatencyPrior[LatencyCoefficients] | None = None,
    weights: np.ndarray | Float[Array, "n"] | None = None,
) -> FitResult[LatencyCoefficients]:
    """Fit the latency model to timings: robust, positive, with log-normal priors.

    Minimises `sum(w * huber(log(predicted / measured) / 0.05)) + sum((log(c / median) / log_sd)**2) / 2`
    over the logarithms of the coefficients, with optax's L-BFGS.

    Args:
        timings: one entry a workload, `[n]`.
        prior: what is believed beforehand; a wide prior unless given.
        weights: `[n]`, 0 leaves an entry out (and keeps the shapes, so nothing is compiled anew).

    Raises:
        ValueError: fewer than 8 timings that count, or all of one workload.

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
    return fit_coefficients(predicted_ns, timings, typical_prior() if prior is None else prior, weights)


def predicted_ns(coefficients: LatencyCoefficients, timings: Timings) -> Nanoseconds:
    """Return what the latency model says of each timing, `[n]`."""
    sizes = (timings.batch, timings.n_fft, timings.k, timings.n_segments)
    return predict_latency_ns(coefficients, timings.path, *sizes, selection=timings.selection)


def fit_coefficients(
    predict: Callable[[C, Any], Nanoseconds],
    timings: Any,
    prior: LatencyPrior[C],
    weights: np.ndarray | Float[Array, "n"] | None = None,
) -> FitResult[C]:
    """Fit the coefficients of any prediction; the objective is that of `fit_latency`.

    Args:
        predict: a function of (coefficients, timings), times in ns `[n]`; the same function, timings of
            the same shape: nothing is compiled anew.
        timings: a dataclass pytree of columns `[n]`, one of them `time_ns`.
        prior: of the coefficients, which the result has the type of.
        weights: `[n]`, 0 leaves an entry out.

    Raises:
        ValueError: fewer than 8 timings that count, or all of one workload.
    """
    counted = np.ones(timings.time_ns.shape) if weights is None else np.asarray(weights, np.float64)
    _check_enough(timings, counted)
    logs, loss, gradient, steps, shares = _minimise(timings, jnp.asarray(counted), prior, predict)
    structure = jax.tree.structure(prior.median)
    coefficients = structure.unflatten([float(value) for value in np.exp(np.asarray(logs))])
    sensitivity = structure.unflatten([float(share) for share in shares])
    gradient_norm = float(np.max(np.abs(gradient)))
    converged = bool(np.isfinite(float(loss)) and gradient_norm < GRADIENT_TOLERANCE * max(1.0, float(loss)))
    ending = "converged" if converged else "did not converge"
    return FitResult(
        coefficients=coefficients,
        loss=float(loss),
        gradient_norm=gradient_norm,
        steps=int(steps),
        converged=converged,
        sensitivity=sensitivity,
        informed={name: share > INFORMED_SENSITIVITY for name, share in vars(sensitivity).items()},
        message=(
            f"The fit of {int(np.sum(counted > 0))} timings {ending} in {int(steps)} steps "
            f"(loss {float(loss):.4g}, largest gradient {gradient_norm:.2g})."
        ),
    )


# The optimiser works on one vector of logarithms: a history of 21 scalar leaves takes seconds to compile.
@functools.partial(jax.jit, static_argnames="predict")
def _minimise(timings: Any, weights, prior: LatencyPrior, predict: Callable = predicted_ns):
    import optax

    def log_ratios(logs):
        return jnp.log(predict(_coefficients(logs, prior.median), timings) / timings.time_ns)

    def objective(logs):
        misfit = optax.losses.huber_loss(log_ratios(logs) / RELATIVE_SD, delta=HUBER_DELTA)
        surprise = (logs - jnp.log(_vector(prior.median))) / _vector(prior.log_sd)
        return jnp.sum(weights * misfit) + jnp.sum(surprise**2) / 2

    optimiser = optax.lbfgs()
    value_and_gradient = optax.value_and_grad_from_state(objective)
    start = jnp.log(_vector(prior.median))

    def unfinished(carry):
        _, state, gradient, step = carry
        loss = optax.tree.get(state, "value")
        tolerance = GRADIENT_TOLERANCE * jnp.maximum(1.0, jnp.where(jnp.isfinite(loss), loss, 1.0)) / 2
        return (step < MAX_STEPS) & (jnp.max(jnp.abs(gradient)) >= tolerance)

    def advance(carry):
        logs, state, _, step = carry
        loss, gradient = value_and_gradient(logs, state=state)
        updates, state = optimiser.update(
            gradient, state, logs, value=loss, grad=gradient, value_fn=objective
        )
        return optax.apply_updates(logs, updates), state, optax.tree.get(state, "grad"), step + 1

    first = (start, optimiser.init(start), jnp.full_like(start, jnp.inf), jnp.asarray(0))
    logs, state, gradient, steps = jax.lax.while_loop(unfinished, advance, first)
    loss = optax.tree.get(state, "value")
    jacobian = jax.jacfwd(log_ratios)(logs)
    sensitivity = jnp.max(jnp.abs(jacobian) * (weights > 0)[:, None], axis=0)
    return logs, loss, gradient, steps, sensitivity


def _vector(coefficients: Coefficients) -> Float[Array, "c"]:
    return jnp.stack([jnp.asarray(leaf, jnp.result_type(float)) for leaf in jax.tree.leaves(coefficients)])


def _coefficients(logs: Float[Array, "c"], like: C = _TYPICAL) -> C:
    return jax.tree.unflatten(jax.tree.structure(like), list(jnp.exp(logs)))


def _check_enough(timings: Any, weights: np.ndarray) -> None:
    if weights.shape != np.shape(timings.time_ns):
        raise ValueError(f"weights: expected shape {np.shape(timings.time_ns)}, got {weights.shape}")
    if not np.all(np.isfinite(weights) & (weights >= 0)):
        raise ValueError("weights: expected finite numbers of at least 0")
    count = int(np.sum(weights > 0))
    if count < MIN_TIMINGS:
        raise ValueError(f"timings: expected at least {MIN_TIMINGS} that count, got {count}")
    columns = [column for name, column in vars(timings).items() if name != "time_ns"]
    cells = np.stack([np.asarray(column)[weights > 0] for column in columns], -1)
    if len(np.unique(cells, axis=0)) < 2:
        raise ValueError("timings: expected several workloads, got one: vary batch and n_fft")
