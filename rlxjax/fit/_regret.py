"""A second stage of the fit, for decisions: the correction's weights, moved to where picks cost least.

The first stage (`fit_posterior`) wants every logarithm right. A pick needs only the order of a workload's
alternatives, so the second descends the regret of a softmin over their predictions, made harder step by step.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rlxjax._numerics import log_softmin
from rlxjax._typing import RealLike

from ._correction import correction_log_factor
from ._minimise import lbfgs
from ._posterior import LatencyPosterior
from ._predict import predicted_ns
from ._timings import Timings

#: Temperatures of the logarithm of predictions; colder ones than the timings' noise learn that by heart.
FIRST_TEMPERATURE, LAST_TEMPERATURE = 0.2, 0.05
#: Temperatures in turn, at each of which a round of L-BFGS starts from where the one before it ended.
ROUNDS = 8


class Alternatives(NamedTuple):
    """Which timings are alternatives of which workload, `[workloads, alternatives]`.

    Attributes:
        timing: its place; any valid one where there is none.
        is_one: whether there is one.
    """

    timing: Int[np.ndarray, "workloads alternatives"]
    is_one: Bool[np.ndarray, "workloads alternatives"]


class Refinement(NamedTuple):
    """What `refine_for_decisions` did.

    Attributes:
        posterior: with the weights moved; the rest is the first stage's.
        regret: mean regret of its picks on the timings that count.
        regret_before: the same of the first stage's.
        moved: Mahalanobis distance of the weights from the first stage's.
    """

    posterior: LatencyPosterior
    regret: float
    regret_before: float
    moved: float


def workload_ids(timings: Timings) -> Int[np.ndarray, "n"]:
    """Return a number for each timing, the same for those of equal sizes."""
    sizes = np.stack([np.asarray(column) for column in timings.runs.inputs.values()], axis=1)
    return np.unique(sizes, axis=0, return_inverse=True)[1].reshape(-1)


def alternatives(ids: Int[np.ndarray, "n"]) -> Alternatives:
    """Return the alternatives of each workload, in the order of its number.

    Args:
        ids: of each timing's workload; negative for timings that are no alternative of another.

    Examples:
        >>> alternatives(np.array([1, 0, 1, -1])).timing.tolist()
        [[1, 1], [0, 2]]
    """
    groups = [np.flatnonzero(ids == number) for number in np.unique(ids[ids >= 0])]
    most = max((len(group) for group in groups), default=0)
    timing = np.array([np.resize(group, most) for group in groups], int).reshape(len(groups), most)
    counts = np.array([len(group) for group in groups], int)
    return Alternatives(timing, np.arange(most) < counts[:, None])


def smoothed_regret(
    log_ns: Float[Array | np.ndarray, "*workloads alternatives"],
    measured_ns: RealLike,
    is_one: Bool[Array | np.ndarray, "*workloads alternatives"],
    temperature: RealLike,
) -> Float[Array, "*workloads"]:
    """Return the smooth form of `pick_regret`: `sum(softmin(log_ns / T) * (measured / best - 1))`.

    Args:
        log_ns: logarithms of the predictions, `[*workloads, alternatives]`.
        measured_ns: times of the same, in ns.
        is_one: whether there is such an alternative.
        temperature: of the logarithms; positive.
    """
    chosen = jnp.exp(log_softmin(log_ns, temperature, jnp.where(is_one, 0.0, -jnp.inf)))
    return jnp.sum(chosen * _losses(measured_ns, is_one), -1)


def pick_regret(
    log_ns: Float[Array | np.ndarray, "*workloads alternatives"],
    measured_ns: RealLike,
    is_one: Bool[Array | np.ndarray, "*workloads alternatives"],
) -> Float[Array, "*workloads"]:
    """Return what the pick takes over the fastest, minus 1; 0 where there is no alternative."""
    pick = jnp.argmin(jnp.where(is_one, log_ns, jnp.inf), -1, keepdims=True)
    return jnp.take_along_axis(_losses(measured_ns, is_one), pick, -1)[..., 0]


def refine_for_decisions(
    posterior: LatencyPosterior,
    timings: Timings,
    ids: Int[np.ndarray, "n"] | None = None,
    weights: np.ndarray | None = None,
) -> Refinement:
    """Move the correction's weights to lower the regret of picks.

    No part of `fit_posterior`: whether it helps depends on the timings (`cross_validated_regret` says).
    Minimises `mean(smoothed_regret) + d**2 / (2 n)` by L-BFGS, as the temperature falls: `d` is the
    Mahalanobis distance of the weights from the posterior's, by its covariance, `n` the number of timings
    that count. Predictions are log-linear in the weights, so that the terms are evaluated once. Where the
    picks are no better for it, the weights stay.

    Args:
        posterior: of the first stage.
        timings: one entry a run, `[n]`.
        ids: numbers of the workloads, `[n]`, negative for no alternative of another; by size unless given.
        weights: `[n]`, 0 leaves an entry out (and compiles nothing anew).

    Raises:
        ValueError: ids or weights of another shape.
    """
    counted = np.ones(np.shape(timings.time_ns)) if weights is None else np.asarray(weights, np.float64)
    ids = workload_ids(timings) if ids is None else np.asarray(ids)
    for name, column in (("ids", ids), ("weights", counted)):
        if column.shape != np.shape(timings.time_ns):
            raise ValueError(f"{name}: expected shape {np.shape(timings.time_ns)}, got {column.shape}")
    groups = alternatives(ids)
    is_one = groups.is_one & (counted > 0)[groups.timing]
    if not np.any(is_one.sum(-1) > 1):
        return Refinement(posterior, 0.0, 0.0, 0.0)
    found = _descent(posterior, timings, groups.timing, is_one, float(np.sum(counted > 0)))
    moved, before, after, distance = jax.tree.map(np.asarray, found)
    refined = dataclasses.replace(posterior, weights=moved)
    return Refinement(refined, float(after), float(before), float(distance))


def left_out_folds(timings: Timings, weights: np.ndarray) -> Iterator[np.ndarray]:
    """Yield, for each value of the model's folds that counts, which counted timings have it, `[n]`."""
    for column in timings.model.folds(timings.runs):
        for value in np.unique(column[weights > 0]):
            yield (weights > 0) & (column == value)


def cross_validated_regret(
    fits: Sequence[Callable[[np.ndarray], LatencyPosterior]],
    timings: Timings,
    ids: Int[np.ndarray, "n"] | None = None,
    weights: np.ndarray | None = None,
) -> Float[np.ndarray, "fits"]:
    """Return the mean regret of each fit's picks where a fold was left out of it.

    Args:
        fits: functions of the weights of the timings.
        timings: one entry a run, `[n]`.
        ids: numbers of the workloads, `[n]`; by size unless given.
        weights: `[n]`, 0 leaves an entry out of everything.
    """
    counted = np.ones(np.shape(timings.time_ns)) if weights is None else np.asarray(weights, np.float64)
    groups = alternatives(workload_ids(timings) if ids is None else ids)
    measured = np.asarray(timings.time_ns)[groups.timing]
    regrets: list[list[np.ndarray]] = [[] for _ in fits]
    for out in left_out_folds(timings, counted):
        is_one = groups.is_one & out[groups.timing]
        judged = is_one.sum(-1) > 1
        if not judged.any():
            continue
        for of_fit, fit in zip(regrets, fits, strict=True):
            log_ns = np.asarray(_log_predictions(fit(np.where(out, 0.0, counted)), timings))[groups.timing]
            regret = pick_regret(*map(jnp.asarray, (log_ns, measured, is_one)))
            of_fit.append(np.asarray(regret)[judged])
    return np.array([np.mean(np.concatenate(of_fit)) if of_fit else np.nan for of_fit in regrets])


def _losses(measured_ns, is_one):
    """Return what each alternative takes over the fastest, minus 1; 0 where there is none."""
    best = jnp.min(jnp.where(is_one, measured_ns, jnp.inf), -1, keepdims=True)
    return jnp.where(is_one, measured_ns / jnp.where(jnp.isfinite(best), best, 1.0) - 1.0, 0.0)


def _parts(posterior: LatencyPosterior, timings: Timings):
    """Return the logarithm of the terms, and the features and the variant of each timing."""
    runs = timings.runs
    log_terms = jnp.log(predicted_ns(posterior.coefficients, runs, posterior.facts))
    return log_terms, jnp.asarray(posterior.model.features(runs, posterior.facts)), runs.variant


@jax.jit
def _log_predictions(posterior: LatencyPosterior, timings: Timings) -> Float[Array, "n"]:
    log_terms, features, variant = _parts(posterior, timings)
    return log_terms + correction_log_factor(features, posterior.weights, variant)


@jax.jit
def _descent(posterior, timings, timing, is_one, count):
    """Return the weights, the regret before and after, and the distance moved."""
    log_terms, features, variant = _parts(posterior, timings)
    start = jnp.asarray(posterior.weights)
    # Rows of the factor that belong to the weights: in its coordinates the distance is a norm.
    rows = jnp.asarray(posterior.factor)[-start.size :]
    root = jnp.linalg.cholesky(rows @ rows.T)
    measured = jnp.asarray(timings.time_ns)[timing]
    judged = jnp.sum(is_one, -1) > 1

    def log_ns(place):
        weights = start + (root @ place).reshape(start.shape)
        return (log_terms + correction_log_factor(features, weights, variant))[timing]

    def mean(regret):
        return jnp.sum(jnp.where(judged, regret, 0.0)) / jnp.sum(judged, dtype=regret.dtype)

    def descend(place, temperature):
        def loss(place):
            # In units of a nat, in which the distance has a curvature of 1.
            regret = mean(smoothed_regret(log_ns(place), measured, is_one, temperature))
            return count * regret + jnp.sum(place**2) / 2.0

        return lbfgs(loss, place, *jax.value_and_grad(loss)(place))[0], None

    temperatures = jnp.geomspace(FIRST_TEMPERATURE, LAST_TEMPERATURE, ROUNDS)
    first = jnp.zeros(start.size, start.dtype)
    place, _ = jax.lax.scan(descend, first, temperatures)
    before, after = [mean(pick_regret(log_ns(at), measured, is_one)) for at in (first, place)]
    # A softmin may swap picks that were right by a hair.
    place = jnp.where(after < before, place, first)
    moved = start + (root @ place).reshape(start.shape)
    return moved, before, jnp.minimum(before, after), jnp.linalg.norm(place)
