"""Robust nonlinear least squares with a normal prior, by Levenberg and Marquardt's method: traced code."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

#: Residuals are expected of this standard deviation; beyond `HUBER_DELTA` of them the loss is linear.
RELATIVE_SD = 0.05
HUBER_DELTA = 2.0
MAX_STEPS = 200
#: Steps end once one promises to lower the objective by no more, or by no more than this share of it: both
#: below the half that a parameter off by one standard deviation costs, the second as timings are noisier.
CONVERGED_DECREASE, CONVERGED_SHARE = 0.02, 2e-4
#: First damping of a step, relative to the curvature, and the largest.
FIRST_DAMPING, MOST_DAMPING = 1e-2, 1e8
#: What is believed of the noise beforehand counts as so many residuals of `RELATIVE_SD`.
PRIOR_RESIDUALS = 4.0
#: Residuals are never taken to be more exact than this: a clock and a machine are not.
LEAST_NOISE_SD = 0.005


class Minimum(NamedTuple):
    """Where the objective is least; what a fit needs to say of it.

    Attributes:
        logs: the parameters, logarithms of coefficients, `[c]`.
        loss: the objective.
        expected_decrease: what the last step promised to take off it, undamped.
        steps: taken.
        noise_sd: robust standard deviation of the residuals.
        curvature: of the misfit in the parameters, `[c, c]`, at the noise that `noise_sd`, what is believed
            of it beforehand and the parameters that the residuals paid for make likely.
        damping: of a further step.
    """

    logs: Any
    loss: Any
    expected_decrease: Any
    steps: Any
    noise_sd: Any
    curvature: Any
    damping: Any

    def is_converged(self):
        """Return whether the last step promised too little for a further one."""
        return _is_converged(self.expected_decrease, self.loss)

    def is_finished(self):
        """Return whether no further step is of use."""
        return self.is_converged() | (self.steps >= MAX_STEPS) | (self.damping >= MOST_DAMPING)


class Start(NamedTuple):
    """Where steps begin, or go on: a minimum's fields of these names."""

    logs: Any
    damping: Any
    steps: Any


class _State(NamedTuple):
    logs: Any
    residuals: Any
    jacobian: Any
    loss: Any
    damping: Any
    expected_decrease: Any
    step: Any


def least_squares(
    residuals_of: Callable[[Float[Array, "n c"]], Float[Array, "n"]],
    weights: Float[Array, "n"],
    centre: Float[Array, "c"],
    sd: Float[Array, "c"],
    start: Start | None = None,
    most_steps: Any = MAX_STEPS,
) -> Minimum:
    """Return the minimum of `sum(w * huber(residual / 0.05)) + sum(((logs - centre) / sd)**2) / 2`.

    Levenberg and Marquardt's steps on reweighted squares, with Nielsen's damping.

    Args:
        residuals_of: residual i from row i of its argument alone.
        weights: of the residuals, 0 leaves one out.
        centre: of the prior.
        sd: of the prior, the standard deviations.
        start: where to begin; at `centre` unless given.
        most_steps: steps, those of the start included, after which the minimum is given as it is.

    References:
        K. Madsen, H. B. Nielsen, O. Tingleff, Methods for Non-Linear Least Squares Problems, 2004, 3.2.
    """
    n, knee = weights.size, HUBER_DELTA * RELATIVE_SD

    def residuals_and_jacobian(logs):
        # Every residual has parameters of its own, so that one pull-back gives all rows of the Jacobian.
        residuals, pull_back = jax.vjp(residuals_of, jnp.broadcast_to(logs, (n, logs.size)))
        return residuals, pull_back(jnp.ones_like(residuals))[0]

    def objective(residuals, logs):
        size = jnp.abs(residuals)
        misfit = jnp.where(size < knee, size**2 / 2, knee * (size - knee / 2)) / RELATIVE_SD**2
        return jnp.sum(weights * misfit) + jnp.sum(((logs - centre) / sd) ** 2) / 2

    def influence(residuals):
        return weights * jnp.minimum(1.0, knee / jnp.maximum(jnp.abs(residuals), knee))

    def advance(state: _State) -> _State:
        influences = influence(state.residuals) / RELATIVE_SD**2
        curvature = state.jacobian.T @ (state.jacobian * influences[:, None]) + jnp.diag(sd**-2)
        gradient = state.jacobian.T @ (influences * state.residuals) + (state.logs - centre) / sd**2
        damped = curvature + state.damping * jnp.diag(jnp.diag(curvature))
        both = jax.vmap(_solved, (0, None))(jnp.stack([damped, curvature]), gradient[:, None])
        move, undamped_move = -both[..., 0]
        promised = -(gradient @ move) - move @ curvature @ move / 2
        # A damped step promises little wherever it is: what an undamped one would shows how far the end is.
        expected = -(gradient @ undamped_move) / 2
        logs = state.logs + move
        residuals, jacobian = residuals_and_jacobian(logs)
        loss = objective(residuals, logs)
        gain = (state.loss - loss) / jnp.maximum(promised, jnp.finfo(loss).tiny)
        lower = loss < state.loss
        damping = state.damping * jnp.where(lower, jnp.clip(1 - (2 * gain - 1) ** 3, 0.1, 3.0), 4.0)
        taken = (logs, residuals, jacobian, loss)
        kept = (state.logs, state.residuals, state.jacobian, state.loss)
        best = [jnp.where(lower, new, old) for new, old in zip(taken, kept, strict=True)]
        return _State(best[0], best[1], best[2], best[3], damping, expected, state.step + 1)

    def is_unfinished(state: _State):
        has_means = (state.step < most_steps) & (state.damping < MOST_DAMPING)
        return has_means & ~_is_converged(state.expected_decrease, state.loss)

    start = Start(centre, FIRST_DAMPING, 0) if start is None else start
    residuals, jacobian = residuals_and_jacobian(start.logs)
    loss = objective(residuals, start.logs)
    damping, never = jnp.full_like(loss, start.damping), jnp.full_like(loss, jnp.inf)
    first = _State(start.logs, residuals, jacobian, loss, damping, never, jnp.asarray(start.steps))
    last = jax.lax.while_loop(is_unfinished, advance, first)
    noise_sd = _robust_sd(last.residuals, weights)
    curvature = last.jacobian.T @ (last.jacobian * influence(last.residuals)[:, None])
    likely_sd = _likely_sd(noise_sd, jnp.sum(weights), curvature, sd)
    curvature = curvature / likely_sd**2
    return Minimum(last.logs, last.loss, last.expected_decrease, last.step, noise_sd, curvature, last.damping)


def _solved(matrix: Float[Array, "c c"], right: Float[Array, "c m"]) -> Float[Array, "c m"]:
    """Return the solutions of a positive definite system, by elimination.

    LAPACK's solver of several systems waits for XLA's threads: programs that run at the same time on all of
    them would wait for one another for ever.
    """
    scale = jax.lax.rsqrt(jnp.diag(matrix))
    rows = jnp.concatenate([matrix * jnp.outer(scale, scale), right * scale[:, None]], 1)

    def eliminate(k, rows):
        # Less 1 in row k, which thereby becomes the pivot's.
        column = rows[:, k] - (jnp.arange(scale.size) == k)
        return rows - jnp.outer(column, rows[k] / rows[k, k])

    solved = jax.lax.fori_loop(0, scale.size, eliminate, rows)
    return scale[:, None] * solved[:, scale.size :]


def _is_converged(expected_decrease, loss):
    return expected_decrease < CONVERGED_DECREASE + CONVERGED_SHARE * loss


def _robust_sd(residuals, weights):
    """Return 1.4826 times the weighted median of absolute values, the standard deviation of normal ones."""
    size = jnp.abs(residuals)
    order = jnp.argsort(size)
    below = jnp.cumsum(weights[order])
    median = size[order][jnp.argmax(below >= below[-1] / 2)]
    return 1.4826 * median


def _likely_sd(noise_sd, count, squares, prior_sd):
    """Return the noise that few residuals make likely: those that parameters absorbed say nothing of it."""
    in_prior_units = squares * jnp.outer(prior_sd, prior_sd) / RELATIVE_SD**2
    absorbed = jnp.trace(_solved(in_prior_units + jnp.eye(prior_sd.size), in_prior_units))
    seen = count * noise_sd**2 + PRIOR_RESIDUALS * RELATIVE_SD**2
    left = jnp.maximum(count - absorbed, 0.0) + PRIOR_RESIDUALS
    return jnp.maximum(jnp.sqrt(seen / left), LEAST_NOISE_SD)
