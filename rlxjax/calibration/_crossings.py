"""Where two strategies change places: the nearest change of which one is faster, along every input and coefficient.

Along each axis one quantity is multiplied by factors. The first of a grid of them from which on the other strategy
is the faster one is found, then a grid between it and its neighbour, and so on: all axes at a time, in one compiled
program. Predictions need not meet there: steps in how a machine schedules make them jump.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rlxjax.fit import LatencyPosterior, Runs, total_ns

#: Grids of which each divides an interval of the one before.
REFINEMENTS = 6


class Moved(NamedTuple):
    """Two strategies, and all that can be moved: coefficients, then inputs; an axis is the place of a leaf in these.

    Attributes:
        variants: places of the variants that each strategy may run, the faster one first, `[2, most]`.
        posterior: of the machine.
        inputs: of the workload.
    """

    variants: Int[np.ndarray, "2 most"]
    posterior: LatencyPosterior
    inputs: Mapping[str, float]


class Crossings(NamedTuple):
    """The nearest change along each axis, `[axes]`.

    Attributes:
        log_factor: on the far side of it; infinite where there is none.
        is_jump: whether the predictions jump past each other there.
        log_ratio: logarithm of the second strategy's time over the first's on the grid, `[axes, grid]`.
    """

    log_factor: Float[Array, "axes"]
    is_jump: Bool[Array, "axes"]
    log_ratio: Float[Array, "axes grid"]


@jax.jit
def nearest_crossings(moved: Moved, axes: Int[Array, "axes"], grid: Float[Array, "axes grid"]) -> Crossings:
    """Return the nearest factor of each axis from which on the first strategy is no more the faster one."""
    grid = jnp.asarray(grid, jnp.result_type(float))
    share, last = jnp.linspace(0.0, 1.0, grid.shape[1])[None], grid.shape[1] - 1

    def refine(index, state):
        points, inner, outer, gap, first = state
        log_ratio = log_ratios(moved, axes, points)

        def entry(values, places):
            return jnp.take_along_axis(values, jnp.clip(places, 0, last)[:, None], 1)

        upward, downward = (log_ratio < 0.0) & (points > 0.0), (log_ratio < 0.0) & (points < 0.0)
        up, down = jnp.argmax(upward, 1), last - jnp.argmax(downward[:, ::-1], 1)
        reach_up = jnp.where(upward.any(1, keepdims=True), entry(points, up), jnp.inf)
        reach_down = jnp.where(downward.any(1, keepdims=True), -entry(points, down), jnp.inf)
        is_up, is_found = reach_up <= reach_down, jnp.isfinite(jnp.minimum(reach_up, reach_down))
        found = jnp.where(is_up[:, 0], up, down)
        before = jnp.where(is_up[:, 0], up - 1, down + 1)
        nearer = entry(points, before)
        nearer = jnp.where(is_up, jnp.maximum(nearer, 0.0), jnp.minimum(nearer, 0.0))
        # At the level of rounding a change may be lost again: what was found then stays.
        inner = jnp.where(is_found, nearer, inner)
        outer = jnp.where(is_found, entry(points, found), outer)
        gap = jnp.where(is_found, entry(log_ratio, before) - entry(log_ratio, found), gap)
        finer = jnp.where(share < 1.0, inner + (outer - inner) * share, outer)
        finer = jnp.where(outer < 0.0, finer[:, ::-1], finer)
        return finer, inner, outer, gap, jnp.where(index == 0, log_ratio, first)

    nothing = jnp.full_like(grid[:, :1], jnp.nan)
    state = (grid, nothing, nothing, nothing, grid)
    _, _, outer, gap, first = jax.lax.fori_loop(0, REFINEMENTS, refine, state)
    # Where the predictions meet, what is left of their difference is rounding.
    is_jump = gap > jnp.sqrt(jnp.finfo(grid.dtype).eps)
    return Crossings(jnp.where(jnp.isnan(outer[:, 0]), jnp.inf, outer[:, 0]), is_jump[:, 0], first)


@jax.jit
def log_slope(moved: Moved, place: Int[Array, ""]) -> Float[Array, ""]:
    """Return the derivative of `log(second / first)` by the logarithm of the leaf at a place."""
    here = jnp.zeros((1, 1), jnp.result_type(float))
    axes = jnp.asarray(place)[None]
    return jax.jvp(lambda x: log_ratios(moved, axes, x)[0, 0], (here,), (here + 1.0,))[1]


def log_ratios(
    moved: Moved, axes: Int[Array, "axes"], log_factor: Float[Array, "axes steps"]
) -> Float[Array, "axes steps"]:
    """Return `log(second / first)` where the quantity of each axis is multiplied by factors."""
    leaves, structure = jax.tree.flatten((moved.posterior.coefficients, moved.inputs))
    # Both strategies and their variants are leading axes, so that all is one evaluation.
    factors = [jnp.exp(jnp.where(axes[:, None] == place, log_factor, 0.0))[None, None] for place in range(len(leaves))]
    coefficients, inputs = structure.unflatten([leaf * factor for leaf, factor in zip(leaves, factors, strict=True)])
    posterior = dataclasses.replace(moved.posterior, coefficients=coefficients)
    runs = Runs(posterior.model, jnp.asarray(moved.variants)[:, :, None, None], inputs)
    time_ns = total_ns(posterior, runs).min(1)
    return jnp.log(time_ns[1]) - jnp.log(time_ns[0])
