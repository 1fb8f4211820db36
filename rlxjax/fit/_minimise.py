"""Find the coefficients and the correction's weights that maximise a robust posterior, with optax's L-BFGS.

Many fits run at once: threads run chunks of fits. L-BFGS runs in short rounds. Before each round, the unknowns are
whitened: they are transformed so that the posterior's curvature is close to 1 along every direction.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from rlxjax._chunks import for_each_chunk, on_cpu, worker_count

from ._latency_model import Facts, LatencyPrior, vector
from ._posterior import CORRECTION_SD, correction_log_factor, joint_jacobian, log_prediction_and_jacobian, predicted_ns
from ._timings import Timings

#: The expected standard deviation of residuals, and the number of standard deviations beyond which the loss is linear.
RELATIVE_SD, HUBER_DELTA = 0.05, 2.0
#: The largest number of steps in a round, and the largest number of rounds.
ROUND_STEPS, MAX_ROUNDS = 20, 30
#: A fit ends if the expected decrease of the objective in the next step is at most `LEAST_PROMISE` nats, or if a round
#: lowers the objective by at most the share `LEAST_GAIN_SHARE` of its value, which may be a rounding error.
LEAST_PROMISE, LEAST_GAIN_SHARE = 1e-5, 1e-7
#: The largest number of fits that a compiled program runs at once.
CHUNK_FITS = 8

#: The line search starts with a step of 1, because the unknowns are whitened.
_solver = optax.lbfgs(
    memory_size=10, linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=20, initial_guess_strategy="one")
)


class Minimum(NamedTuple):
    """The results of fits, `[fits, ...]`. The unknowns, `[u]`, are the coefficients' logarithms, then the weights."""

    z: Any  # distance of the unknowns from the prior's medians, in standard deviations of the prior, `[u]`
    logs: Any  # logarithms of the coefficients
    loss: Any
    expected_decrease: Any
    steps: Any
    gradient: Any
    squares: Any  # Gauss-Newton curvature of the misfit in the unknowns, for noise of `RELATIVE_SD`, `[u, u]`
    residuals: Any  # `log(predicted / measured)`, `[n]`
    jacobian: Any  # derivatives of the residuals, `[n, u]`


def minimise(
    timings: Timings,
    weights: Float[np.ndarray, "fits n"],
    prior: LatencyPrior,
    facts: Facts,
    z: Float[np.ndarray, "fits u"],
    features: Float[np.ndarray, "fits n features"] | None = None,
) -> Minimum:
    """Minimise `sum(w * huber(log(predicted / measured) / 0.05)) + sum(z**2) / 2` from the starting points `z`."""
    # `z` holds `log(coefficients / median) / log_sd`, then the correction's `weights / CORRECTION_SD`, if there are
    # features. J. Nocedal, S. Wright, Numerical Optimization, 2nd edition, 2006, 3.5 and 7.2.
    fits, log_sds = len(z), np.array(jax.tree.leaves(prior.log_sd), np.float64)
    sds = np.concatenate([log_sds, np.full(z.shape[-1] - len(log_sds), CORRECTION_SD)])
    features = np.zeros((*weights.shape, 0)) if features is None else features
    priors = jax.tree.map(lambda leaf: np.broadcast_to(np.asarray(leaf, np.float64), fits), prior)
    columns = (timings, weights, priors, features)
    # The chunk size stays the same after some fits have ended, so the program is compiled once.
    share = -(-fits // worker_count())
    chunk = min(CHUNK_FITS, 1 << (share - 1).bit_length())
    none = np.zeros(fits)
    begin = (z, none.astype(int), np.zeros((*z.shape, z.shape[1])), none, np.zeros_like(z))
    found = _in_chunks(functools.partial(_round, most_steps=0, facts=facts), chunk, (*begin, *columns))
    left, roots = np.arange(fits), _whitening(found.squares, sds)
    for _ in range(MAX_ROUNDS):
        mine, own = jax.tree.map(operator.itemgetter(left), (columns, found))
        begin = (own.z, own.steps, roots, own.loss, own.gradient)
        ends = _in_chunks(functools.partial(_round, most_steps=ROUND_STEPS, facts=facts), chunk, (*begin, *mine))
        roots = _whitening(ends.squares, sds)
        promise = np.sum(np.einsum("fij,fi->fj", roots, ends.gradient) ** 2, -1) / 2
        ends = ends._replace(expected_decrease=np.where(np.isfinite(ends.loss), promise, np.inf))
        goes_on = (promise > LEAST_PROMISE) & (own.loss - ends.loss > LEAST_GAIN_SHARE * np.abs(ends.loss))
        for whole, part in zip(found, ends, strict=True):
            whole[left] = part
        left, roots = left[goes_on], roots[goes_on]
        if not left.size:
            break
    return found


def _whitening(squares: Float[np.ndarray, "fits u u"], sds: Float[np.ndarray, "u"]) -> Float[np.ndarray, "fits u u"]:
    """Return matrices `R`; `R @ R.T` is the inverse of the posterior's curvature with respect to `z`."""
    own = squares * sds[:, None] * sds
    finite = np.where(np.isfinite(own).all((-2, -1), keepdims=True), own, 0.0)
    lower = np.linalg.cholesky(np.eye(len(sds)) + finite)
    return np.swapaxes(np.linalg.inv(lower), -2, -1)


@jax.jit
def _round(z, steps, roots, loss, gradient, timings, weights, priors, features, most_steps, facts: Facts) -> Minimum:
    """Run each fit for at most `most_steps` steps in the whitened unknowns `u`. `z` changes by `root @ u`."""

    def of_one(z, steps, root, loss, gradient, timings, weights, prior, features) -> Minimum:
        @jax.jit  # traced once for all evaluations of the line search
        def objective(u):
            at = z + root @ u
            terms = jnp.log(predicted_ns(_coefficients(at, prior), timings.runs, facts) / timings.time_ns)
            return _objective(terms + _correction(at, timings, prior, features), weights, at)

        def goes_on(state):
            _, solver, step = state
            # The curvature is 1, so the expected decrease is half of the squared gradient.
            promise = jnp.sum(optax.tree.get(solver, "grad") ** 2) / 2
            return (step < most_steps) & ((step == 0) | (promise > 0.1 * LEAST_PROMISE))

        def advance(state):
            u, solver, step = state
            # The line search has already computed the value and the gradient at `u`.
            value, gradient = (optax.tree.get(solver, name) for name in ("value", "grad"))
            with jax.numpy_dtype_promotion("standard"):  # optax counts steps in int32 and int64
                move, solver = _solver.update(gradient, solver, u, value=value, grad=gradient, value_fn=objective)
            return u + move, solver, step + 1

        u = jnp.zeros_like(z)
        solver = optax.tree.set(_solver.init(u), value=loss, grad=root.T @ gradient)
        u, _, taken = jax.lax.while_loop(goes_on, advance, (u, solver, jnp.asarray(0)))
        return _minimum_at(z + root @ u, steps + taken, timings, weights, prior, features, facts)

    z, roots, weights, loss, gradient, features = (
        jnp.asarray(column, jnp.result_type(float)) for column in (z, roots, weights, loss, gradient, features)
    )
    return jax.vmap(of_one)(z, steps, roots, loss, gradient, timings, weights, priors, features)


def _minimum_at(z, steps, timings: Timings, weights, prior: LatencyPrior, features, facts: Facts) -> Minimum:
    predicted, of_terms = log_prediction_and_jacobian(_coefficients(z, prior), timings.runs, facts)
    residuals = predicted - jnp.log(timings.time_ns) + _correction(z, timings, prior, features)
    jacobian = joint_jacobian(of_terms, features, timings.runs.variant, len(timings.model.variants))
    log_sd = vector(prior.log_sd)
    sds = jnp.concatenate([log_sd, jnp.full(z.size - log_sd.size, CORRECTION_SD, z.dtype)])
    knee = HUBER_DELTA * RELATIVE_SD
    influence = weights * jnp.minimum(1.0, knee / jnp.maximum(jnp.abs(residuals), knee)) / RELATIVE_SD**2
    weighted = jacobian * influence[:, None]
    return Minimum(
        z=z,
        logs=_logs(z, prior),
        loss=_objective(residuals, weights, z),
        expected_decrease=jnp.inf,
        steps=steps,
        gradient=(weighted.T @ residuals) * sds + z,
        squares=weighted.T @ jacobian,
        residuals=residuals,
        jacobian=jacobian,
    )


def _objective(residuals, weights, z) -> Float[Array, ""]:
    misfit = optax.losses.huber_loss(residuals / RELATIVE_SD, delta=HUBER_DELTA)
    return jnp.sum(weights * misfit) + jnp.sum(z**2) / 2


def _coefficients(z, prior: LatencyPrior) -> Any:
    return jax.tree.structure(prior.median).unflatten(list(jnp.exp(_logs(z, prior))))


def _logs(z, prior: LatencyPrior) -> Float[Array, "c"]:
    log_sd = vector(prior.log_sd)
    return jnp.log(vector(prior.median)) + log_sd * z[: log_sd.size]


def _correction(z, timings: Timings, prior: LatencyPrior, features) -> Float[Array, "n"]:
    weights = CORRECTION_SD * z[len(jax.tree.leaves(prior.median)) :]
    by_variant = weights.reshape(len(timings.model.variants), features.shape[-1])
    return jnp.asarray(correction_log_factor(features, by_variant, timings.runs.variant))


def _in_chunks(run: Callable[..., Any], chunk: int, columns: Any) -> Any:
    """Run a program, which takes `chunk` fits at a time, on all fits. Threads run the chunks. Return all results."""
    fits = len(jax.tree.leaves(columns)[0])
    found: list[Any] = [None] * -(-fits // chunk)

    def of_chunk(begin: int, end: int) -> None:
        # Copies of the last fit fill up the last chunk.
        rows = np.minimum(np.arange(begin, begin + chunk), end - 1)
        with on_cpu():
            out = run(*jax.tree.map(lambda column: np.asarray(column)[rows], columns))
        found[begin // chunk] = jax.tree.map(lambda leaf: np.asarray(leaf)[: end - begin], out)

    for_each_chunk(of_chunk, fits, chunk)
    return jax.tree.map(lambda *chunks: np.concatenate(chunks), *found)
