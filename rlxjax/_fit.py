"""The fit: timings in, latency coefficients and diagnostics out. Pure: no clock, no files."""

import dataclasses
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ._latency import COEFFICIENT_NAMES, LatencyCoefficients, predict_latency_ns
from .welch import Path

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
    """

    path: np.ndarray | Int[Array, "n"]
    batch: np.ndarray | Float[Array, "n"]
    n_fft: np.ndarray | Float[Array, "n"]
    k: np.ndarray | Float[Array, "n"]
    n_segments: np.ndarray | Float[Array, "n"]
    time_ns: np.ndarray | Float[Array, "n"]

    @classmethod
    def checked(cls, *, path, batch, n_fft, k, n_segments, time_ns) -> Self:
        """Build from lists or arrays; `path` may hold names.

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
            raise ValueError(
                "path: expected host, fused or block, got learned, which the model has no terms for"
            )
        floats = {}
        for name, values in columns.items():
            try:
                array = np.asarray(values, np.float64)
            except (TypeError, ValueError):
                raise ValueError(f"{name}: expected numbers, got {values!r}") from None
            if array.shape != codes.shape:
                raise ValueError(f"{name}: expected shape {codes.shape}, as path has, got {array.shape}")
            bad = ~(np.isfinite(array) & (array > 0))
            if bad.any():
                index = int(np.flatnonzero(bad)[0])
                raise ValueError(f"{name}[{index}]: expected a positive finite number, got {array[index]}")
            if name != "time_ns" and np.any(array % (2 if name == "n_fft" else 1)):
                wanted = "even whole numbers" if name == "n_fft" else "whole numbers"
                raise ValueError(f"{name}: expected {wanted}, got {array[np.argmax(array % 2 > 0)]}")
            floats[name] = array
        return cls(codes, **floats)


class LatencyPrior(NamedTuple):
    """Log-normal prior of every coefficient: median, and standard deviation of its logarithm."""

    median: LatencyCoefficients
    log_sd: LatencyCoefficients


class FitResult(NamedTuple):
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

    coefficients: LatencyCoefficients
    loss: float
    gradient_norm: float
    steps: int
    converged: bool
    sensitivity: LatencyCoefficients
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
    topk_bin_ns=1.0,
    topk_update_ns=5.0,
)
_WIDE_LOG_SD = 2.0


def typical_prior() -> LatencyPrior:
    """Return the wide prior that `fit_latency` starts from."""
    return LatencyPrior(_TYPICAL, jax.tree.map(lambda _: _WIDE_LOG_SD, _TYPICAL))


def fit_latency(
    timings: Timings, prior: LatencyPrior | None = None, weights: np.ndarray | Float[Array, "n"] | None = None
) -> FitResult:
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
    prior = typical_prior() if prior is None else prior
    counted = np.ones(timings.time_ns.shape) if weights is None else np.asarray(weights, np.float64)
    _check_enough(timings, counted)
    logs, loss, gradient, steps, shares = _minimise(timings, jnp.asarray(counted), prior)
    coefficients = LatencyCoefficients(*(float(value) for value in np.exp(np.asarray(logs))))
    sensitivity = LatencyCoefficients(*(float(share) for share in shares))
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
        informed={n: getattr(sensitivity, n) > INFORMED_SENSITIVITY for n in COEFFICIENT_NAMES},
        message=(
            f"The fit of {int(np.sum(counted > 0))} timings {ending} in {int(steps)} steps "
            f"(loss {float(loss):.4g}, largest gradient {gradient_norm:.2g})."
        ),
    )


def log_ratios(coefficients: LatencyCoefficients, timings: Timings) -> Float[Array, "n"]:
    """Return `log(predicted / measured)` of each timing."""
    predicted = predict_latency_ns(
        coefficients, timings.path, timings.batch, timings.n_fft, timings.k, timings.n_segments
    )
    return jnp.log(predicted / timings.time_ns)


def _objective(logs: Float[Array, "c"], timings: Timings, weights, prior: LatencyPrior) -> Float[Array, ""]:
    import optax

    ratios = log_ratios(_coefficients(logs), timings) / RELATIVE_SD
    misfit = jnp.sum(weights * optax.losses.huber_loss(ratios, delta=HUBER_DELTA))
    surprise = (logs - jnp.log(_vector(prior.median))) / _vector(prior.log_sd)
    return misfit + jnp.sum(surprise**2) / 2


# The optimiser works on one vector of logarithms: a history of 21 scalar leaves takes seconds to compile.
@jax.jit
def _minimise(timings: Timings, weights, prior: LatencyPrior):
    import optax

    def objective(logs):
        return _objective(logs, timings, weights, prior)

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
    jacobian = jax.jacfwd(lambda logs: log_ratios(_coefficients(logs), timings))(logs)
    sensitivity = jnp.max(jnp.abs(jacobian) * (weights > 0)[:, None], axis=0)
    return logs, loss, gradient, steps, sensitivity


def _vector(coefficients: LatencyCoefficients) -> Float[Array, "c"]:
    return jnp.stack([jnp.asarray(leaf, jnp.result_type(float)) for leaf in jax.tree.leaves(coefficients)])


def _coefficients(logs: Float[Array, "c"]) -> LatencyCoefficients:
    return LatencyCoefficients(*jnp.exp(logs))


def _check_enough(timings: Timings, weights: np.ndarray) -> None:
    if weights.shape != np.shape(timings.time_ns):
        raise ValueError(f"weights: expected shape {np.shape(timings.time_ns)}, got {weights.shape}")
    if not np.all(np.isfinite(weights) & (weights >= 0)):
        raise ValueError("weights: expected finite numbers of at least 0")
    count = int(np.sum(weights > 0))
    if count < MIN_TIMINGS:
        raise ValueError(f"timings: expected at least {MIN_TIMINGS} that count, got {count}")
    columns = (timings.path, timings.batch, timings.n_fft, timings.k, timings.n_segments)
    cells = np.stack([np.asarray(column)[weights > 0] for column in columns], -1)
    if len(np.unique(cells, axis=0)) < 2:
        raise ValueError("timings: expected several workloads, got one: vary batch and n_fft")
