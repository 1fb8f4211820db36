"""Robust nonlinear least squares with a normal prior, by Levenberg and Marquardt's method: traced code."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

#: Residuals are expected of this standard deviation; beyond `HUBER_DELTA` of them the loss is linear.
RELATIVE_SD = 0.05
HUBER_DELTA = 2.0
MAX_STEPS = 200
#: Steps end once one promises to lower the objective by no more, or by no more than this share of it: both
#: below the half that a parameter off by one standard deviation costs, the second as timings are noisier.
CONVERGED_DECREASE, CONVERGED_SHARE = 1e-3, 1e-5
#: First damping of a step, relative to the curvature, and the largest.
FIRST_DAMPING, MOST_DAMPING = 1e-2, 1e8
#: The curvature that residuals bend by is learned from moves along which the gradient rises by this share of
#: what the squares alone make it rise.
LEAST_RISE = 1e-3


class Minimum(NamedTuple):
    """Where the objective is least; what a fit needs to say of it.

    Attributes:
        logs: the parameters, logarithms of coefficients, `[c]`.
        loss: the objective.
        expected_decrease: what the last step promised to take off it, undamped.
        steps: taken.
        squares: curvature of the misfit in the parameters at a noise of `RELATIVE_SD`, `[c, c]`.
        damping: of a further step.
        excess: what steps have shown the objective's curvature to be beyond that of its squares, `[c, c]`.
        residuals: `[n]`.
        jacobian: of the residuals in the parameters, `[c, n]`.
    """

    logs: Any
    loss: Any
    expected_decrease: Any
    steps: Any
    squares: Any
    damping: Any
    excess: Any
    residuals: Any
    jacobian: Any = None

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
    excess: Any


class _Point(NamedTuple):
    """Parameters, and what the objective and its model are there."""

    logs: Any
    loss: Any
    residuals: Any
    jacobian: Any
    gradient: Any
    squares: Any
    excess: Any


class _State(NamedTuple):
    best: _Point
    candidate: Any
    promised: Any
    damping: Any
    expected_decrease: Any
    step: Any
    is_first: Any


def least_squares(
    residuals_of: Callable[[list[Float[Array, "n"]]], Float[Array, "n"]],
    weights: Float[Array, "n"],
    centre: Float[Array, "c"],
    sd: Float[Array, "c"],
    start: Start | None = None,
    most_steps: Any = MAX_STEPS,
) -> Minimum:
    """Return the minimum of `sum(w * huber(residual / 0.05)) + sum(((logs - centre) / sd)**2) / 2`.

    Levenberg and Marquardt's steps on reweighted squares, with Nielsen's damping, and with what those squares
    leave out of the curvature learned from the steps taken: residuals stay large, and without it steps crawl.

    Args:
        residuals_of: of a column for each coefficient; residual i from the columns' entries i alone.
        weights: of the residuals, 0 leaves one out.
        centre: of the prior.
        sd: of the prior, the standard deviations.
        start: where to begin; at `centre` unless given.
        most_steps: steps, those of the start included, after which the minimum is given as it is.

    References:
        J. E. Dennis, D. M. Gay, R. E. Welsch, An Adaptive Nonlinear Least-Squares Algorithm, 1981.
        K. Madsen, H. B. Nielsen, O. Tingleff, Methods for Non-Linear Least Squares Problems, 2004, 3.2.
    """
    n, knee = weights.size, HUBER_DELTA * RELATIVE_SD
    diagonal = jnp.eye(centre.size)
    prior_curvature = diagonal * (sd**-2)[None]

    def point(logs, excess) -> _Point:
        residuals, slopes = with_slopes(residuals_of, jnp.exp(logs), (n,))
        jacobian = jnp.stack(slopes) * jnp.exp(logs)[:, None]
        size, from_centre = jnp.abs(residuals), (logs - centre) / sd
        misfit = jnp.where(size < knee, size**2 / 2, knee * (size - knee / 2)) / RELATIVE_SD**2
        both = jnp.concatenate([jacobian, residuals[None]])
        products = (jacobian * (influence(residuals) / RELATIVE_SD**2)[None]) @ both.T
        return _Point(
            logs=logs,
            loss=jnp.sum(weights * misfit) + jnp.sum(from_centre**2) / 2,
            residuals=residuals,
            jacobian=jacobian,
            gradient=products[:, -1] + from_centre / sd,
            squares=products[:, :-1],
            excess=excess,
        )

    def influence(residuals):
        return weights * jnp.minimum(1.0, knee / jnp.maximum(jnp.abs(residuals), knee))

    def advance(state: _State) -> _State:
        # The start is a candidate too, so that the residuals are in the program once.
        best, is_first = state.best, state.is_first
        new = point(state.candidate, best.excess)
        gain = (best.loss - new.loss) / jnp.maximum(state.promised, jnp.finfo(new.loss).tiny)
        is_lower = new.loss < best.loss
        factor = jnp.where(is_lower, jnp.clip(1 - (2 * gain - 1) ** 3, 0.1, 3.0), 4.0)
        damping = state.damping * jnp.where(is_first, 1.0, factor)
        curvature = new.squares + prior_curvature
        learned = _sized(best.excess, new.logs - best.logs, new.gradient - best.gradient, curvature)
        new = new._replace(excess=jnp.where(is_first, best.excess, learned))
        best = jax.tree.map(lambda mine, other: jnp.where(is_first | is_lower, mine, other), new, best)

        curvature = best.squares + prior_curvature
        full_curvature = curvature + best.excess
        damped = full_curvature + damping * (diagonal * curvature)
        both = jax.vmap(_solved, (0, None))(jnp.stack([damped, curvature]), best.gradient[:, None])
        move, undamped_move = -both[..., 0]
        return _State(
            best=best,
            candidate=best.logs + move,
            promised=-(best.gradient @ move) - move @ _product(full_curvature, move) / 2,
            damping=damping,
            # What an undamped step promises: a damped one promises little wherever it is.
            expected_decrease=-(best.gradient @ undamped_move) / 2,
            step=state.step + ~is_first,
            is_first=jnp.zeros_like(is_first),
        )

    def is_unfinished(state: _State):
        has_means = (state.step < most_steps) & (state.damping < MOST_DAMPING)
        return has_means & ~_is_converged(state.expected_decrease, state.best.loss)

    start = first_start(centre) if start is None else start
    zeros, infinity = jnp.zeros((centre.size, n), centre.dtype), jnp.full((), jnp.inf, centre.dtype)
    nowhere = _Point(start.logs, infinity, zeros[0], zeros, zeros[:, 0], start.excess, start.excess)
    last = jax.lax.while_loop(
        is_unfinished,
        advance,
        _State(
            best=nowhere,
            candidate=start.logs,
            promised=infinity,
            damping=jnp.full_like(infinity, start.damping),
            expected_decrease=infinity,
            step=jnp.asarray(start.steps),
            is_first=jnp.asarray(True),
        ),
    )
    best = last.best
    return Minimum(
        logs=best.logs,
        loss=best.loss,
        expected_decrease=last.expected_decrease,
        steps=last.step,
        squares=best.squares,
        damping=last.damping,
        excess=best.excess,
        residuals=best.residuals,
        jacobian=best.jacobian,
    )


def with_slopes(
    values_of: Callable[[list[Float[Array, "*batch"]]], Float[Array, "*batch"]],
    coefficients: Iterable[Float[Array, ""]],
    shape: tuple[int, ...],
) -> tuple[Float[Array, "*batch"], list[Float[Array, "*batch"]]]:
    """Return values, and their derivatives by each coefficient.

    Args:
        values_of: of a column for each coefficient; each value from the columns' entries in its place alone.
        coefficients: the same for every value.
        shape: of the columns.
    """
    # Every value has coefficients of its own, so that one pull-back gives all the derivatives.
    columns = [jnp.broadcast_to(coefficient, shape) for coefficient in coefficients]
    values, pull_back = jax.vjp(values_of, columns)
    return values, pull_back(jnp.ones_like(values))[0]


def first_start(logs: np.ndarray | Float[Array, "c"]) -> Start:
    """Return where steps begin that begin anew; outside a program nothing is compiled for it."""
    return Start(logs, FIRST_DAMPING, 0, np.zeros((logs.size, logs.size), logs.dtype))


def _sized(
    excess: Float[Array, "c c"],
    move: Float[Array, "c"],
    change: Float[Array, "c"],
    curvature: Float[Array, "c c"],
) -> Float[Array, "c c"]:
    """Return the excess such that curvature and excess explain how a move changed the gradient.

    Dennis, Gay and Welsch's sized secant update; where the gradient did not rise along the move, as before.
    """
    tiny = jnp.finfo(change.dtype).tiny
    by_squares, by_excess, rise = _product(curvature, move), _product(excess, move), move @ change
    own = change - by_squares
    size = jnp.minimum(1.0, jnp.abs(move @ own) / jnp.maximum(jnp.abs(move @ by_excess), tiny))
    missed, unit = own - size * by_excess, change / jnp.maximum(rise, tiny)
    cross = jnp.outer(missed, unit)
    updated = size * excess + cross + cross.T - (move @ missed) * jnp.outer(unit, unit)
    return jnp.where(rise > LEAST_RISE * (move @ by_squares), updated, size * excess)


def _product(matrix: Float[Array, "c c"], vector: Float[Array, "c"]) -> Float[Array, "c"]:
    """Return their product; XLA's own of them compiles in five times as long as this loop."""
    return jnp.sum(matrix * vector[None], -1)


def _solved(matrix: Float[Array, "c c"], right: Float[Array, "c m"]) -> Float[Array, "c m"]:
    """Return the solutions of a positive definite system, by elimination.

    LAPACK's solver of several systems waits for XLA's threads: programs that run at the same time on all of
    them would wait for one another for ever.
    """
    scale = jax.lax.rsqrt(jnp.sum(matrix * jnp.eye(len(matrix)), -1))
    rows = jnp.concatenate([matrix * jnp.outer(scale, scale), right * scale[:, None]], 1)

    def eliminate(k, rows):
        # Less 1 in row k, which thereby becomes the pivot's.
        column = rows[:, k] - (jnp.arange(scale.size) == k)
        return rows - jnp.outer(column, rows[k] / rows[k, k])

    solved = jax.lax.fori_loop(0, scale.size, eliminate, rows)
    return scale[:, None] * solved[:, scale.size :]


def _is_converged(expected_decrease, loss):
    return expected_decrease < CONVERGED_DECREASE + CONVERGED_SHARE * loss
