"""The next best measurement: which runs to time so that the timings say most, from the model's derivatives.

A workload is timed by a block of runs, all its strategies say: the rows of an estimate `[workloads, runs]`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rlxjax._values import by_value

from ._minimise import on_cpu
from ._posterior import LatencyEstimate


@by_value
class Design(NamedTuple):
    """Workloads in the order in which to time them, and what each is expected to bring.

    Attributes:
        order: indices of the candidates, `[n]`.
        gain: of each in nats, once those before it are timed, `[n]`; per second where seconds were given.
    """

    order: Int[np.ndarray, "n"]
    gain: Float[np.ndarray, "n"]


def next_measurements(
    candidates: LatencyEstimate,
    n: int,
    *,
    seconds: np.ndarray | Float[Array, "workloads"] | None = None,
    targets: LatencyEstimate | None = None,
    timed: LatencyEstimate | None = None,
) -> Design:
    """Choose the workloads to time next, one after the other, each the best after those before it.

    For runs of scores `J L` (the unknowns' covariance is `L @ L.T`) and spreads `s`, the best has the largest

        logdet(I + diag(1 / s) J L L^T J^T diag(1 / s)) / 2,

    by which the entropy of the unknowns falls (Bayesian D-optimality); with targets, the largest mean over them of
    what it says of a run's time, `log(variance before / variance after) / 2` (MacKay's mean marginal information).
    After each choice the unknowns' covariance is that which timing the workload would leave, whatever the times turn
    out to be: a second workload like the first brings little. None is chosen twice.

    Args:
        candidates: estimates `[workloads, runs]` by `prior_posterior` before there are timings, and by
            `fit_posterior` then; a run of infinite spread is not timed.
        n: how many to choose.
        seconds: that each takes, compilation included; the best then brings most per second.
        targets: runs `[*batch]` that predictions are wanted of; the unknowns themselves unless given.
        timed: runs `[*batch]` that will be timed in any case, or were since the posterior was fitted.

    Raises:
        ValueError: no candidates or fewer than `n`; `n` below 1; another shape than above; seconds that
            are not positive.

    References:
        K. Chaloner, I. Verdinelli, Bayesian Experimental Design: A Review, Statistical Science 10, 1995.
        D. J. C. MacKay, Information-Based Objective Functions for Active Data Selection, Neural
        Computation 4, 1992.

    Examples:
        >>> from rlxjax.fit import Runs, estimate, prior_posterior
        >>> from rlxjax.models import WELCH
        >>> batch, n_fft = np.meshgrid([1.0, 64.0, 4096.0], [128.0, 1024.0])
        >>> variants = np.array([0, 1, 3])  # three runs of each of the six workloads
        >>> runs = Runs.checked(WELCH, variants, batch=batch.reshape(-1, 1), n_fft=n_fft.reshape(-1, 1), k=16)
        >>> candidates = estimate(prior_posterior(WELCH), runs)
        >>> design = next_measurements(candidates, 3)
        >>> len(set(design.order.tolist())), bool(np.all(np.diff(design.gain) <= 0))
        (3, True)
    """
    scaled = _scaled("candidates", candidates)
    if scaled.ndim != 3:
        raise ValueError(f"candidates: expected scores [workloads, runs, unknowns], got shape {scaled.shape}")
    count, _, unknowns = scaled.shape
    if not 1 <= n <= count:
        raise ValueError(f"n: expected at least 1 and at most as many as candidates ({count}), got {n}")
    cost = np.ones(count) if seconds is None else np.asarray(seconds, np.float64)
    if cost.shape != (count,) or not np.all(np.isfinite(cost) & (cost > 0)):
        raise ValueError(f"seconds: expected {count} positive finite numbers, one a candidate, got {seconds}")
    wanted = None if targets is None else _rows("targets", targets, unknowns)
    if timed is not None:
        block = _rows("timed", timed, unknowns)
        scaled, wanted = jax.tree.map(lambda scores: _after(scores, block), (scaled, wanted))
    with on_cpu():
        order, gain = _greedy(*jax.tree.map(np.asarray, (scaled, cost.astype(scaled.dtype), wanted)), n)
    return Design(np.asarray(order), np.asarray(gain))


@functools.partial(jax.jit, static_argnames="n")
def _greedy(scaled, cost, targets, n: int):
    """Return the order and the gains; scores are in units of the runs' spreads."""

    def choose(state, _):
        scaled, targets, is_left = state
        # The covariance of what the runs of each block will show, in units of their spreads.
        variances = scaled @ jnp.swapaxes(scaled, -2, -1) + jnp.eye(scaled.shape[-2], dtype=scaled.dtype)[None]
        if targets is None:
            gain = jnp.linalg.slogdet(variances)[1] / 2
        else:
            # What a block takes off the targets' variances, all but their own spread: `[workloads, targets]`.
            values, vectors = jnp.linalg.eigh(variances)
            along = jnp.swapaxes(vectors, -2, -1) @ scaled
            shared = (along / jnp.sqrt(values)[..., None]) @ targets.T
            share = jnp.sum(shared**2, -2) / (jnp.sum(targets**2, -1) + 1.0)[None]
            gain = -jnp.mean(jnp.log1p(-share), -1) / 2
        gain = gain / cost
        best = jnp.argmax(jnp.where(is_left, gain, -jnp.inf))
        block = scaled[best]
        scaled = _after(scaled, block)
        targets = None if targets is None else _after(targets, block)
        return (scaled, targets, is_left.at[best].set(False)), (best, gain[best])

    state = (scaled, targets, jnp.ones(len(scaled), bool))
    return jax.lax.scan(choose, state, length=n)[1]


def _after(scores, block):
    """Return scores by the unknowns that are independent once the runs of a block, `[runs, u]`, are timed.

    The product of two is what `I - B^T (I + B B^T)^-1 B` gives: its symmetric square root is
    `I - B^T U diag((1 - (1 + e)**-0.5) / e) U^T B`, with `B B^T = U diag(e) U^T`.
    """
    # A block of many runs has no more directions than there are unknowns; the others have eigenvalue 0.
    values, vectors = jnp.linalg.eigh(block @ block.T)
    root = jnp.sqrt(1.0 + jnp.maximum(values, 0.0))
    along = vectors.T @ block
    return scores - (scores @ along.T) @ (along / (root * (1.0 + root))[:, None])


def _rows(name: str, estimate: LatencyEstimate, unknowns: int) -> Float[Array, "runs unknowns"]:
    """Return scaled scores of some runs, one a row."""
    scaled = _scaled(name, estimate)
    if scaled.shape[-1] != unknowns or not scaled.size:
        said = f"expected at least one run, with scores of {unknowns} unknowns, got {scaled.shape}"
        raise ValueError(f"{name}: {said}")
    return scaled.reshape(-1, unknowns)


def _scaled(name: str, estimate: LatencyEstimate) -> Float[Array, "*batch runs unknowns"]:
    """Return scores in units of the runs' spreads."""
    scores, spread = jnp.asarray(estimate.scores), jnp.asarray(estimate.spread)
    if spread.ndim < 1 or scores.shape[:-1] != spread.shape:
        said = f"scores [..., runs, unknowns] and spreads [..., runs], got {scores.shape} and {spread.shape}"
        raise ValueError(f"{name}: expected {said}")
    return scores / spread[..., None]
