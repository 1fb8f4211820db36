"""Explain why a model picks a strategy: the terms of each time, the margin, and the changes that alter the pick.

At the crossover, a value `x` of the model's first input, the predicted times `a` and `b` of two strategies are equal.
The equation `log a = log b` defines `log x`. The derivative of `log x` with respect to an unknown of the fit is thus
`-(d log a - d log b) / (d (log a - log b) / d log x)`, which gives the uncertainty of the crossover.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rlxjax._chunks import on_cpu
from rlxjax._values import by_value
from rlxjax.fit import (
    COVERED_SDS,
    LatencyPosterior,
    Runs,
    all_inputs,
    alternatives_of,
    coefficient_names,
    named,
    strategy_of,
    total_ns,
    unit_of,
)

from ._predict import CalibratedModel

#: The largest factor by which the search changes an input or a coefficient, the number of factors in the search's grid,
#: and the number of times that the search refines the interval in which the pick changes.
LARGEST_FACTOR, GRID_POINTS, REFINEMENTS = 100.0, 513, 6
#: Outside `Crossover.interval` at a jump, one of the two strategies is faster with at least this probability.
JUMP_SURE = 0.95


@by_value
@dataclasses.dataclass(frozen=True)
class StrategyExplanation:
    """The predicted time of one strategy.

    Attributes:
        strategy: the name of the strategy.
        terms_ns: the parts of the predicted time by name, in ns.
        time_ns: the predicted time in ns, which is the sum of the parts.
        interval_ns: the two ends of the interval that holds a run's time with a probability of 90 %, in ns.
    """

    strategy: str
    terms_ns: Mapping[str, float]
    time_ns: float
    interval_ns: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Flip:
    """The smallest change of one input or coefficient that makes the second fastest strategy faster than the fastest.

    Attributes:
        name: the name of the input or coefficient.
        kind: "input" or "coefficient".
        value: the value before the change.
        unit: the unit of the value.
        factor: the factor that multiplies the value; None if no factor from 1/100 to 100 changes the pick.
        log_sd: standard deviation of the logarithm of the coefficient; None for an input, since inputs are known.
        sds: the absolute logarithm of the factor, divided by `log_sd`; None if either is None.
        is_jump: whether the two predicted times jump past each other at the change instead of becoming equal.
        in_domain: whether the changed workload lies within the measured range; None if `factor` is None.
    """

    name: str
    kind: str
    value: float
    unit: str
    factor: float | None
    log_sd: float | None
    sds: float | None
    is_jump: bool
    in_domain: bool | None


@by_value
@dataclasses.dataclass(frozen=True)
class Crossover:
    """The value of the model's first input, nearest to the given value, at which the faster of two strategies changes.

    Attributes:
        strategies: the names of two strategies; the first name is the faster strategy at the given value. They are the
            fastest two strategies, or the model's first two strategies if the fastest two have no crossover.
        input: the name of the model's first input.
        value: the value at which the predicted times are equal or jump past each other; None if there is no crossover.
        below: the strategy that is faster just below the value.
        above: the strategy that is faster just above the value.
        log_sd: standard deviation of the logarithm of the value; None at a jump.
        interval: the 90 % interval of the value, cut off at the ends of the searched range. At a jump, the range in
            which no strategy reaches a 95 % probability of being the faster one.
        is_jump: whether the predicted times jump past each other at the value instead of being equal.
        in_domain: whether the workload with this value lies within the measured range.
        sentence: a sentence that states the crossover.
    """

    strategies: tuple[str, str]
    input: str
    value: float | None
    below: str | None
    above: str | None
    log_sd: float | None
    interval: tuple[float, float] | None
    is_jump: bool
    in_domain: bool | None
    sentence: str


@by_value
@dataclasses.dataclass(frozen=True)
class Explanation:
    """The explanation of a pick for one workload.

    Attributes:
        inputs: the sizes of the workload by name.
        in_domain: whether the workload lies within the measured range; if not, all predictions are extrapolated.
        strategies: the predicted time of each strategy that gives the same result, the fastest first.
        pick: the name of the fastest strategy.
        runner_up: the name of the second fastest strategy.
        margin_ns: the predicted time that the pick saves compared with the runner-up.
        margin_sd_ns: standard deviation of the margin.
        probability: the probability that the pick is faster than the runner-up.
        verdict: the name of the pick if `probability` is high enough for a sure decision, otherwise "undecided".
        flips: a `Flip` for each input and for each coefficient, the smallest change first.
        crossover: the value of the first input at which the faster strategy changes.
    """

    inputs: Mapping[str, float]
    in_domain: bool
    strategies: tuple[StrategyExplanation, ...]
    pick: str
    runner_up: str
    margin_ns: float
    margin_sd_ns: float
    probability: float
    verdict: str
    flips: tuple[Flip, ...]
    crossover: Crossover

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation as a dict for JSON, in which each input of the workload has its own key."""
        found = json.loads(json.dumps(dataclasses.asdict(self)))
        return {**found.pop("inputs"), **found}


@on_cpu()
def explain(calibrated: CalibratedModel, *inputs: float, **given: float | None) -> Explanation:
    """Explain which strategy a model picks: the terms of each time, the margin, and the changes that alter the pick.

    Args:
        calibrated: a latency model that was fitted to one machine.
        *inputs: the sizes of the workload, in the order of the model's inputs.
        **given: the sizes of the workload by name.

    Raises:
        ValueError: an input is impossible; an input of the model is a list; or fewer than two strategies can be used.
    """
    model = calibrated.model
    if lists := [name for name, entry in model.inputs.items() if entry.is_list]:
        raise ValueError(f"{model.name}: expected a model whose inputs are numbers, but {lists[0]} is a list")
    known = all_inputs(model, next(iter(alternatives_of(model) or model.strategies)), inputs, given)
    for name, value in known.items():
        if np.ndim(value) or not np.asarray(value) > 0:
            raise ValueError(f"{name}: expected one positive number of {model.inputs[name].unit}, got {value}")
    sizes: dict[str, Any] = {name: np.asarray(value).item() for name, value in known.items()}
    names = calibrated.alternatives(**sizes)
    if len(names) < 2:
        raise ValueError(f"{model.name}: expected two strategies to choose among, got {', '.join(names) or 'none'}")
    strategies = []
    for name in names:
        low, high = map(float, calibrated.interval_ns(name, **sizes))
        parts = {term: float(time_ns) for term, time_ns in calibrated.terms_ns(name, **sizes).items()}
        strategies.append(StrategyExplanation(name, parts, sum(parts.values()), (low, high)))
    strategies.sort(key=lambda one: one.time_ns)  # equal times stay in order, as in `pick`
    by_time = [strategy.strategy for strategy in strategies]
    pick, runner_up = by_time[:2]
    decided = calibrated.compare(pick, runner_up, **sizes)
    search = _search(calibrated, (pick, runner_up), sizes)
    crossover = _crossover(search)
    first_two = [name for name in list(alternatives_of(model))[:2] if name in names]
    if crossover.value is None and len(first_two) == 2 and set(first_two) != {pick, runner_up}:
        one, other = (name for name in by_time if name in first_two)
        elsewhere = _crossover(_search(calibrated, (one, other), sizes))
        crossover = crossover if elsewhere.value is None else elsewhere
    return Explanation(
        sizes,
        in_domain=bool(calibrated.in_domain(**sizes)),
        strategies=tuple(strategies),
        pick=pick,
        runner_up=runner_up,
        **{name: float(getattr(decided, name)) for name in ("margin_ns", "margin_sd_ns", "probability")},
        verdict=pick if decided.verdict() == "fuse" else "undecided",
        flips=_flips(search),
        crossover=crossover,
    )


class _Moved(NamedTuple):
    """Two strategies, the faster strategy first, and the quantities that the search varies: coefficients and inputs."""

    variants: Int[np.ndarray, "2 most"]
    posterior: LatencyPosterior
    inputs: Mapping[str, float]


class _Search(NamedTuple):
    """For each quantity (axis), the smallest change that alters the pick; the last axis gives the crossover."""

    calibrated: CalibratedModel
    names: tuple[str, str]
    sizes: Mapping[str, float]
    axes: tuple[str, ...]
    places: np.ndarray
    moved: _Moved
    grid: Float[np.ndarray, "axes grid"]
    log_factor: Float[np.ndarray, "axes"]
    is_jump: np.ndarray


def _search(calibrated: CalibratedModel, names: tuple[str, str], sizes: Mapping[str, float]) -> _Search:
    """Find the smallest change of each quantity that makes the second of two strategies faster than the first."""
    model, first = calibrated.model, next(iter(calibrated.model.inputs))
    coefficients = coefficient_names(calibrated.coefficients)
    axes = (*coefficients, *(name for name, entry in model.inputs.items() if entry.default is None), first)
    grid = np.tile(np.linspace(-1.0, 1.0, GRID_POINTS) * math.log(LARGEST_FACTOR), (len(axes), 1))
    for place in range(len(coefficients), len(axes)):
        entry, value = model.inputs[axes[place]], float(sizes[axes[place]])
        low, high = max(value / LARGEST_FACTOR, entry.least, 1.0), value * LARGEST_FACTOR
        if place == len(axes) - 1:
            low, high = max(entry.least, 1.0), max(entry.most, value)
        tried = np.geomspace(low, high, GRID_POINTS)
        # Only whole sizes are tried: steps of the machine's schedule cause crossings between sizes.
        grid[place] = np.log((np.round(tried) if axes[place] == first and entry.step else tried) / value)
    variants = [[model.variants.index(v) for v in strategy_of(model, name).variants] for name in names]
    codes = np.array([np.resize(own, max(map(len, variants))) for own in variants], np.int32)
    moved = _Moved(codes, calibrated.posterior, {name: float(value) for name, value in sizes.items()})
    # JAX orders the leaves of a dictionary by name.
    places = np.array([[*coefficients, *sorted(sizes)].index(name) for name in axes])
    found = map(np.asarray, _nearest_crossings(moved, places, grid))
    return _Search(calibrated, names, sizes, axes, places, moved, grid, *found)


def _flips(search: _Search) -> tuple[Flip, ...]:
    calibrated, sizes, flips = search.calibrated, search.sizes, []
    sd_of, values = named(calibrated.posterior.coefficient_log_sd()), {**named(calibrated.coefficients), **sizes}
    for name, log_factor, is_jump in zip(search.axes[:-1], search.log_factor, search.is_jump, strict=False):
        is_input, is_flip, log_sd = name in sizes, bool(np.isfinite(log_factor)), sd_of.get(name)
        factor = math.exp(log_factor) if is_flip else None
        changed = {**sizes, name: sizes[name] * factor} if is_input and factor is not None else sizes
        kind, unit = ("input", calibrated.model.inputs[name].unit) if is_input else ("coefficient", unit_of(name))
        sds = abs(float(log_factor)) / log_sd if is_flip and log_sd else None
        inside = bool(calibrated.in_domain(**changed)) if is_flip else None
        flips.append(Flip(name, kind, float(values[name]), unit, factor, log_sd, sds, bool(is_jump), inside))
    return tuple(sorted(flips, key=lambda flip: math.inf if flip.factor is None else abs(math.log(flip.factor))))


def _crossover(search: _Search) -> Crossover:
    calibrated, names, sizes, (*_, first), *_ = search
    grid = search.grid[-1]
    log_factor, is_jump, tried = float(search.log_factor[-1]), bool(search.is_jump[-1]), sizes[first] * np.exp(grid)
    if not math.isfinite(log_factor):
        words = f"{names[0]} stays faster than {names[1]} from {first} {tried[0]:,.0f} to {tried[-1]:,.0f}"
        return Crossover(names, first, None, None, None, None, None, False, None, words)
    at, log_sd = sizes[first] * math.exp(log_factor), None
    below, above = names if log_factor > 0 else names[::-1]
    if not is_jump:
        here = search.moved._replace(inputs={**search.moved.inputs, first: at})
        slope = abs(float(_log_slope(here, np.int32(search.places[-1]))))
        # If predictions are nearly equal, the margin divided by a prediction is the logarithm of their ratio.
        there = calibrated.compare(*names, **{**sizes, first: at})
        log_sd = float(there.margin_sd_ns / there.kept_ns) / slope if slope else None
    if log_sd is None:
        probability = np.asarray(calibrated.compare(*names, **{**sizes, first: tried}).probability)
        is_unsure = np.abs(probability - 0.5) <= JUMP_SURE - 0.5
        low = _reach(is_unsure[::-1], tried[::-1], at, grid[::-1] < log_factor)
        high = _reach(is_unsure, tried, at, grid > log_factor)
    else:
        reach = min(COVERED_SDS * log_sd, grid[-1] - grid[0])
        low, high = max(float(tried[0]), at * math.exp(-reach)), min(float(tried[-1]), at * math.exp(reach))
    inside = bool(calibrated.in_domain(**{**sizes, first: at}))
    how = "the predictions jump past each other" if is_jump else "the predictions are equal"
    words = f"{how} at {first} {at:,.1f}: {below} is faster just below, {above} just above"
    words += "" if inside else " (extrapolated)"
    return Crossover(names, first, at, below, above, log_sd, (low, high), is_jump, inside, words)


def _reach(is_unsure: np.ndarray, values: np.ndarray, at: float, is_beyond: np.ndarray) -> float:
    """Walk from `at` through the values beyond `at`; return the last value before the first sure decision."""
    decided = np.flatnonzero(is_beyond & ~is_unsure)
    nearest = values[is_beyond][: None if not decided.size else np.sum(is_beyond[: decided[0]])]
    return float(nearest[-1]) if nearest.size else at


@jax.jit
def _nearest_crossings(moved: _Moved, axes: Int[Array, "axes"], grid: Float[Array, "axes grid"]) -> tuple[Array, Array]:
    """Return, per axis, the `log(factor)` nearest to 0 that makes the first strategy slower, and whether times jump."""
    # Each refinement makes the grid finer, between the first change of the pick and the point before it, on all axes.
    # Steps of the machine's schedule can make the predictions jump past each other.
    grid = jnp.asarray(grid, jnp.result_type(float))
    share, last = jnp.linspace(0.0, 1.0, grid.shape[1])[None], grid.shape[1] - 1

    def entry(values, places):
        return jnp.take_along_axis(values, jnp.clip(places, 0, last)[:, None], 1)

    def refine(_, state):
        points, inner, outer, gap = state
        log_ratio = _log_ratios(moved, axes, points)
        distance = jnp.where(log_ratio < 0.0, jnp.abs(points), jnp.inf)
        upward, downward = (jnp.where(own, distance, jnp.inf) for own in (points > 0.0, points < 0.0))
        up, down = jnp.argmin(upward, 1), last - jnp.argmin(downward[:, ::-1], 1)
        is_up = upward.min(1) <= downward.min(1)
        found, before = jnp.where(is_up, up, down), jnp.where(is_up, up - 1, down + 1)
        nearer, is_up = entry(points, before), is_up[:, None]
        nearer = jnp.where(is_up, jnp.maximum(nearer, 0.0), jnp.minimum(nearer, 0.0))
        # Rounding can hide the change in a finer grid; the earlier result then stays.
        is_found = jnp.isfinite(jnp.minimum(upward, downward)).any(1, keepdims=True)
        inner = jnp.where(is_found, nearer, inner)
        outer = jnp.where(is_found, entry(points, found), outer)
        gap = jnp.where(is_found, entry(log_ratio, before) - entry(log_ratio, found), gap)
        finer = jnp.where(share < 1.0, inner + (outer - inner) * share, outer)
        return jnp.where(outer < 0.0, finer[:, ::-1], finer), inner, outer, gap

    nothing = jnp.full_like(grid[:, :1], jnp.nan)
    _, _, outer, gap = jax.lax.fori_loop(0, REFINEMENTS, refine, (grid, nothing, nothing, nothing))
    # The predictions differ at a crossing only by rounding.
    return jnp.where(jnp.isnan(outer), jnp.inf, outer)[:, 0], (gap > jnp.sqrt(jnp.finfo(grid.dtype).eps))[:, 0]


@jax.jit
def _log_slope(moved: _Moved, place: Int[Array, ""]) -> Float[Array, ""]:
    """Return the derivative of `log(second time / first time)` with respect to the logarithm of quantity `place`."""
    here, axes = jnp.zeros((1, 1), jnp.result_type(float)), jnp.asarray(place)[None]
    return jax.jvp(lambda x: _log_ratios(moved, axes, x)[0, 0], (here,), (here + 1.0,))[1]


def _log_ratios(moved: _Moved, axes: Int[Array, "axes"], log_factor: Float[Array, "axes n"]) -> Float[Array, "axes n"]:
    """Return `log(second time / first time)` after each axis's quantity is multiplied by each factor of the axis."""
    leaves, structure = jax.tree.flatten((moved.posterior.coefficients, moved.inputs))
    # The strategies and their variants are leading axes of one evaluation.
    factors = [jnp.exp(jnp.where(axes[:, None] == place, log_factor, 0.0))[None, None] for place in range(len(leaves))]
    coefficients, inputs = structure.unflatten([leaf * factor for leaf, factor in zip(leaves, factors, strict=True)])
    posterior = dataclasses.replace(moved.posterior, coefficients=coefficients)
    runs = Runs(posterior.model, jnp.asarray(moved.variants)[:, :, None, None], inputs)
    time_ns = total_ns(posterior, runs).min(1)
    return jnp.log(time_ns[1]) - jnp.log(time_ns[0])
