"""Find the coefficients and the correction's weights that maximise a robust posterior, with optax's L-BFGS.

Many fits run at once: threads run chunks of fits. L-BFGS runs in short rounds. Before each round,
the unknowns are whitened: in the whitened unknowns `u`, with `z = z_0 + root @ u`, the curvature of
the objective is close to the identity.
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
from ._posterior import (
    CORRECTION_SD,
    correction_log_factor,
    joint_jacobian,
    log_prediction_and_jacobian,
    predicted_ns,
)
from ._timings import Timings

#: The expected standard deviation of residuals, and the number of standard deviations beyond which
#: the loss is linear.
RELATIVE_SD, HUBER_DELTA = 0.05, 2.0
#: The largest number of steps in a round, and the largest number of rounds.
MAX_STEPS, MAX_ROUNDS = 20, 30
#: A fit ends once the predicted reduction of the objective, in nats, is at most this number.
REDUCTION_TOLERANCE = 1e-5
#: A round ends at a smaller one, because the curvature at the round's end is not the identity.
ROUND_TOLERANCE = 1e-6
#: A fit also ends if a round reduces the objective by at most this share, which may be rounding.
RELATIVE_TOLERANCE = 1e-7
#: The largest number of fits that a compiled program runs at once.
CHUNK_FITS = 8

#: The line search starts with a step of 1, because the unknowns are whitened.
_lbfgs = optax.lbfgs(
    memory_size=10,
    linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=20, initial_guess_strategy="one"),
)


class Problem(NamedTuple):
    """The data of one fit; of many fits, each array with a leading axis `[fits]`."""

    timings: Timings
    weights: Any  # of the timings, `[n]`
    prior: LatencyPrior
    features: Any  # of the correction, `[n, features]`

    def log_coefficients(self, z) -> Float[Array, "c"]:
        log_sd = vector(self.prior.log_sd)
        return jnp.log(vector(self.prior.median)) + log_sd * z[: log_sd.size]

    def coefficients(self, z) -> Any:
        return jax.tree.structure(self.prior.median).unflatten([*jnp.exp(self.log_coefficients(z))])

    def log_correction(self, z) -> Float[Array, "n"]:
        weights = CORRECTION_SD * z[len(jax.tree.leaves(self.prior.median)) :]
        shape = len(self.timings.model.variants), self.features.shape[-1]
        variant = self.timings.runs.variant
        return jnp.asarray(correction_log_factor(self.features, weights.reshape(shape), variant))

    def objective(self, residuals, z) -> Float[Array, ""]:
        misfit = optax.losses.huber_loss(residuals / RELATIVE_SD, delta=HUBER_DELTA)
        return jnp.sum(self.weights * misfit) + jnp.sum(z**2) / 2


class Minimum(NamedTuple):
    """The end of fits, `[fits, ...]`. The unknowns are the coefficients' logarithms, then the weights."""

    z: Any  # the unknowns' distance from their prior medians, in prior standard deviations, `[u]`
    logs: Any  # logarithms of the coefficients
    loss: Any
    predicted_reduction: Any  # of the loss, in the next Gauss-Newton step
    steps: Any
    gradient: Any
    squares: Any  # Gauss-Newton curvature of the misfit in the unknowns, for `RELATIVE_SD`, `[u, u]`
    residuals: Any  # `log(predicted / measured)`, `[n]`
    jacobian: Any  # derivatives of the residuals by the unknowns, `[n, u]`


class _Start(NamedTuple):
    """Where a round begins, `[fits, ...]`."""

    z: Any
    loss: Any
    gradient: Any  # by `z`
    root: Any  # `root @ root.T` is the inverse of the objective's curvature in `z`
    steps: Any


class _Descent(NamedTuple):
    """The state of L-BFGS in a round."""

    u: Any
    solver: Any
    step: Any


def minimise(
    timings: Timings,
    weights: Float[np.ndarray, "fits n"],
    prior: LatencyPrior,
    facts: Facts,
    z: Float[np.ndarray, "fits u"],
    features: Float[np.ndarray, "fits n features"] | None = None,
) -> Minimum:
    """Minimise `sum(w * huber(log(predicted / measured) / 0.05)) + sum(z**2) / 2`, starting from `z`.

    `z` holds `log(coefficients / median) / log_sd`, then the correction's `weights / CORRECTION_SD`
    if there are features.

    References:
        J. Nocedal, S. Wright, Numerical Optimization, 2nd edition, 2006, sections 3.5 and 7.2.
    """
    fits, log_sds = len(z), np.array(jax.tree.leaves(prior.log_sd), np.float64)
    sds = np.concatenate([log_sds, np.full(z.shape[-1] - len(log_sds), CORRECTION_SD)])
    features = np.zeros((*weights.shape, 0)) if features is None else features
    priors = jax.tree.map(lambda leaf: np.broadcast_to(np.asarray(leaf, np.float64), fits), prior)
    problems = Problem(timings, weights, priors, features)
    # The chunk size stays the same after some fits have ended, so the program is compiled once.
    chunk = min(CHUNK_FITS, 1 << (-(-fits // worker_count()) - 1).bit_length())

    def run(start: _Start, problems: Problem, max_steps: int) -> Minimum:
        program = functools.partial(_round, max_steps=max_steps, facts=facts)
        return _in_chunks(program, chunk, (start, problems))

    zeros = np.zeros(fits)
    nowhere = _Start(z, zeros, np.zeros_like(z), np.zeros((*z.shape, z.shape[1])), zeros.astype(int))
    found = run(nowhere, problems, 0)
    active, roots = np.arange(fits), _whitening(found.squares, sds)
    for _ in range(MAX_ROUNDS):
        before, own = jax.tree.map(operator.itemgetter(active), (found, problems))
        start = _Start(before.z, before.loss, before.gradient, roots, before.steps)
        after = run(start, own, MAX_STEPS)
        roots = _whitening(after.squares, sds)
        reduction = np.sum(np.einsum("fij,fi->fj", roots, after.gradient) ** 2, -1) / 2
        reduction = np.where(np.isfinite(after.loss), reduction, np.inf)
        after = after._replace(predicted_reduction=reduction)
        for whole, part in zip(found, after, strict=True):
            whole[active] = part
        is_reduced = before.loss - after.loss > RELATIVE_TOLERANCE * np.abs(after.loss)
        goes_on = (reduction > REDUCTION_TOLERANCE) & is_reduced
        active, roots = active[goes_on], roots[goes_on]
        if not active.size:
            break
    return found


def _whitening(squares: Float[np.ndarray, "fits u u"], sds: Float[np.ndarray, "u"]) -> Float[np.ndarray, "fits u u"]:
    """Return the roots: `root @ root.T` is the inverse of the objective's curvature in `z`."""
    curvature = squares * sds[:, None] * sds
    is_finite = np.isfinite(curvature).all((-2, -1), keepdims=True)
    lower = np.linalg.cholesky(np.eye(len(sds)) + np.where(is_finite, curvature, 0.0))
    return np.swapaxes(np.linalg.inv(lower), -2, -1)


@jax.jit
def _round(starts: _Start, problems: Problem, max_steps, facts: Facts) -> Minimum:
    """Run at most `max_steps` steps of L-BFGS for each fit, in the whitened unknowns."""

    def of_one(start: _Start, problem: Problem) -> Minimum:
        runs, time_ns = problem.timings.runs, problem.timings.time_ns

        @jax.jit  # traced once for all evaluations of the line search
        def objective(u):
            z = start.z + start.root @ u
            log_ratio = jnp.log(predicted_ns(problem.coefficients(z), runs, facts) / time_ns)
            return problem.objective(log_ratio + problem.log_correction(z), z)

        def goes_on(state: _Descent):
            # The curvature is the identity: the predicted reduction is half the squared gradient.
            predicted_reduction = jnp.sum(optax.tree.get(state.solver, "grad") ** 2) / 2
            is_large = (state.step == 0) | (predicted_reduction > ROUND_TOLERANCE)
            return (state.step < max_steps) & is_large

        def advance(state: _Descent) -> _Descent:
            # The line search has already computed the value and the gradient at `u`.
            value, gradient = (optax.tree.get(state.solver, name) for name in ("value", "grad"))
            with jax.numpy_dtype_promotion("standard"):  # optax counts steps in int32 and int64
                update, solver = _lbfgs.update(
                    gradient, state.solver, state.u, value=value, grad=gradient, value_fn=objective
                )
            return _Descent(state.u + update, solver, state.step + 1)

        u = jnp.zeros_like(start.z)
        gradient = start.root.T @ start.gradient
        solver = optax.tree.set(_lbfgs.init(u), value=start.loss, grad=gradient)
        end = jax.lax.while_loop(goes_on, advance, _Descent(u, solver, jnp.asarray(0)))
        z = start.z + start.root @ end.u
        return _minimum_at(z, problem, facts)._replace(steps=start.steps + end.step)

    def as_float(column):
        return jnp.asarray(column, jnp.result_type(float))

    starts = jax.tree.map(as_float, starts)._replace(steps=starts.steps)
    weights, features = as_float(problems.weights), as_float(problems.features)
    return jax.vmap(of_one)(starts, problems._replace(weights=weights, features=features))


def _minimum_at(z, problem: Problem, facts: Facts) -> Minimum:
    timings, prior = problem.timings, problem.prior
    coefficients, features = problem.coefficients(z), problem.features
    log_ns, of_terms = log_prediction_and_jacobian(coefficients, timings.runs, facts)
    residuals = log_ns - jnp.log(timings.time_ns) + problem.log_correction(z)
    n_variants = len(timings.model.variants)
    jacobian = joint_jacobian(of_terms, features, timings.runs.variant, n_variants)
    log_sd = vector(prior.log_sd)
    sds = jnp.concatenate([log_sd, jnp.full(z.size - log_sd.size, CORRECTION_SD, z.dtype)])
    weighted = jacobian * (problem.weights * influence_of(residuals) / RELATIVE_SD**2)[:, None]
    return Minimum(
        z=z,
        logs=problem.log_coefficients(z),
        loss=problem.objective(residuals, z),
        predicted_reduction=jnp.inf,
        steps=0,
        gradient=(weighted.T @ residuals) * sds + z,
        squares=weighted.T @ jacobian,
        residuals=residuals,
        jacobian=jacobian,
    )


def influence_of(residuals: Any) -> Any:
    """Return the weights with which least squares has the gradient of the Huber loss, `[n]`."""
    xp = jnp if isinstance(residuals, jax.Array) else np
    knee = HUBER_DELTA * RELATIVE_SD
    return xp.minimum(1.0, knee / xp.maximum(xp.abs(residuals), knee))


def _in_chunks(run: Callable[..., Any], chunk: int, columns: tuple[Any, ...]) -> Any:
    """Run a program, which takes `chunk` fits at a time, on all fits. Threads run the chunks."""
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
