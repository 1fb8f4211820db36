"""Simpler ways to predict the same timings, from the same ones: what the fit has to beat."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from rlxjax._fit import predicted_ns
from rlxjax._prior import LatencyPrior
from scipy import optimize

from rlxjax import Timings

from .samples import timings_of
from .validate import sizes_of
from .workloads import Cell

#: What the greedy search multiplies and divides a coefficient by, one factor after the other.
FACTORS = (4.0, 2.0, 1.4, 1.2, 1.1, 1.05, 1.02)
#: Moves of the greedy search at most, for each factor.
MOST_MOVES = 200


def geometric_means_ns(cells: Sequence[Cell], measured_ns: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return, for each cell, the geometric mean of the seen times of its strategy in ns, `[cells]`.

    Args:
        cells: the workloads.
        measured_ns: `[cells]`.
        seen: `[cells]`, whether the fit may see a workload; some of each strategy.
    """
    result, names = np.zeros(len(cells)), np.array([cell.strategy for cell in cells])
    for name in np.unique(names):
        result[names == name] = np.exp(np.mean(np.log(measured_ns[(names == name) & seen])))
    return result


def linear_features(cells: Sequence[Cell]) -> np.ndarray:
    """Return what a linear model of latency is linear in, `[cells, 8]`.

    One; rows; segments; bytes of the signal; `n log2 n` a segment; bins; `bins log2 k`; peaks.
    """
    batch, n_fft, k, n_segments = sizes_of(cells)
    bins, segments = n_fft / 2 + 1, batch * n_segments
    signal_bytes = 4.0 * batch * n_fft * (n_segments + 1.0) / 2.0
    columns = (
        np.ones(len(cells)),
        batch,
        segments,
        signal_bytes,
        n_fft * np.log2(n_fft) * segments,
        bins * batch,
        bins * np.log2(k) * batch,
        batch * k,
    )
    return np.stack(columns, axis=1)


class LinearFit(NamedTuple):
    """Non-negative least squares: coefficients by strategy, each `[8]` in ns, and predictions `[cells]`."""

    coefficients: dict[str, np.ndarray]
    time_ns: np.ndarray


def fit_linear(cells: Sequence[Cell], measured_ns: np.ndarray, seen: np.ndarray) -> LinearFit:
    """Fit a linear model with non-negative coefficients to each strategy: least squares of relative errors.

    Args:
        cells: the workloads.
        measured_ns: `[cells]`.
        seen: `[cells]`, whether the fit may see a workload.
    """
    features, names = linear_features(cells), np.array([cell.strategy for cell in cells])
    scale = features.mean(0)
    coefficients, time_ns = {}, np.zeros(len(cells))
    for name in dict.fromkeys(names):
        mine = names == name
        relative = features[mine & seen] / scale / measured_ns[mine & seen, None]
        size = np.maximum(np.linalg.norm(relative, axis=0), np.finfo(float).tiny)
        solved, _ = optimize.nnls(relative / size, np.ones(len(relative)))
        coefficients[str(name)] = solved / size / scale
        time_ns[mine] = features[mine] @ coefficients[str(name)]
    return LinearFit(coefficients, time_ns)


class GreedyFit(NamedTuple):
    """What the greedy search found.

    Attributes:
        coefficients: of the latency model.
        error: mean absolute relative error of what it saw.
        moves: coefficients changed, one at a time.
    """

    coefficients: Any
    error: float
    moves: int


def fit_greedily(
    cells: Sequence[Cell],
    measured_ns: np.ndarray,
    seen: np.ndarray,
    prior: LatencyPrior,
    factors: Sequence[float] = FACTORS,
    most_moves: int = MOST_MOVES,
) -> GreedyFit:
    """Multiply or divide the one coefficient that lowers the error most, until none does.

    Args:
        cells: the workloads, none of a model.
        measured_ns: `[cells]`.
        seen: `[cells]`, whether the fit may see a workload.
        prior: whose median is the start.
        factors: to multiply and divide by, one after the other.
        most_moves: for each factor.
    """
    timings, weights = timings_of(cells, measured_ns), seen / seen.sum()
    structure = jax.tree.structure(prior.median)
    logs = np.log(np.array(jax.tree.leaves(prior.median), float))
    error, moves = float(_errors(logs[None], timings, weights, prior.median)[0]), 0
    for factor in factors:
        steps = np.log(factor) * np.concatenate([np.eye(logs.size), -np.eye(logs.size)])
        for _ in range(most_moves):
            errors = np.asarray(_errors(logs + steps, timings, weights, prior.median))
            best = int(np.argmin(errors))
            if not errors[best] < error:
                break
            logs, error, moves = logs + steps[best], float(errors[best]), moves + 1
    coefficients = structure.unflatten([float(value) for value in np.exp(logs)])
    return GreedyFit(coefficients, error, moves)


@jax.jit
def _errors(
    logs: Float[Array, "moves c"], timings: Timings, weights: Float[Array, "n"], like: Any
) -> Float[Array, "moves"]:
    """Return the mean absolute relative error of each vector of coefficients' logarithms."""

    def error(own):
        coefficients = jax.tree.unflatten(jax.tree.structure(like), list(jnp.exp(own)))
        return jnp.sum(weights * jnp.abs(predicted_ns(coefficients, timings.runs, WELCH.facts) / timings.time_ns - 1.0))

    return jax.vmap(error)(logs)
