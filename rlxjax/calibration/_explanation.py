"""Explain why a model picks a strategy: the terms of each time, the margin, and the nearest size with another pick."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlxjax._chunks import on_cpu
from rlxjax._values import by_value
from rlxjax.fit import all_inputs, alternatives_of
from rlxjax.units import time_text

from ._predict import CalibratedModel

#: The number of sizes that a search tries at once, and how often the search looks between two of them.
GRID_POINTS, REFINEMENTS = 513, 4
#: Outside `Crossover.interval`, one of the two strategies is faster with at least this probability.
SURE_OUTSIDE = 0.95


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


@by_value
@dataclasses.dataclass(frozen=True)
class Crossover:
    """The value of the model's first input, nearest to the given value, at which another strategy becomes the fastest.

    Attributes:
        input: the name of the model's first input.
        value: the value of the input; None if the pick stays the fastest.
        below: the strategy that is the fastest just below the value.
        above: the strategy that is the fastest just above the value.
        interval: the range around the value in which neither strategy is faster with a probability of 95 %.
        in_domain: whether the workload with this value lies within the measured range.
        sentence: a sentence that states the crossover.
    """

    input: str
    value: float | None
    below: str | None
    above: str | None
    interval: tuple[float, float] | None
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
        why: a sentence that names the term in which the pick saves the most time.
        crossover: the nearest value of the first input at which another strategy becomes the fastest.
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
    why: str
    crossover: Crossover

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation as a dict for JSON, in which each input of the workload has its own key."""
        found = json.loads(json.dumps(dataclasses.asdict(self)))
        return {**found.pop("inputs"), **found}


@on_cpu()
def explain(calibrated: CalibratedModel, *inputs: float, **given: float | None) -> Explanation:
    """Explain which strategy a model picks: the terms of each time, the margin, and the nearest other pick.

    Args:
        calibrated: a latency model that was fitted to one machine.
        *inputs: the sizes of the workload, in the order of the model's inputs.
        **given: the sizes of the workload by name.

    Raises:
        ValueError: an input is impossible, or fewer than two strategies can be used.
    """
    model = calibrated.model
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
    return Explanation(
        sizes,
        in_domain=bool(calibrated.in_domain(**sizes)),
        strategies=tuple(strategies),
        pick=pick,
        runner_up=runner_up,
        **{name: float(getattr(decided, name)) for name in ("margin_ns", "margin_sd_ns", "probability")},
        verdict=pick if decided.verdict() == "fuse" else "undecided",
        why=_why(*strategies[:2]),
        crossover=_crossover(calibrated, by_time, sizes),
    )


def _why(pick: StrategyExplanation, runner_up: StrategyExplanation) -> str:
    saved_ns = {term: runner_up.terms_ns[term] - time_ns for term, time_ns in pick.terms_ns.items()}
    term = max(saved_ns, key=saved_ns.__getitem__)
    own, other = (time_text(one.terms_ns[term]) for one in (pick, runner_up))
    return f"{pick.strategy} saves the most in {term.removesuffix('_ns').replace('_', ' ')}: {own} against {other}"


def _crossover(calibrated: CalibratedModel, names: list[str], sizes: Mapping[str, float]) -> Crossover:
    """Search all values of the first input for the nearest value at which the first of `names` is not the fastest."""
    first, entry = next(iter(calibrated.model.inputs.items()))
    here, low, high = sizes[first], max(entry.least, 1.0), max(entry.most, sizes[first])
    tried = np.sort([here, *np.geomspace(low, high, GRID_POINTS)])
    tried = np.round(tried) if entry.step else tried

    def fastest(values: np.ndarray) -> np.ndarray:
        given: dict[str, Any] = {**sizes, first: values}
        return np.asarray(calibrated.pick_index(candidates=names, **given))

    values, picks = tried, fastest(tried)
    below = above = names[0]
    for _ in range(REFINEMENTS):
        changes = np.flatnonzero((picks[1:] == 0) != (picks[:-1] == 0))
        if not changes.size:
            break
        distances = np.abs(np.log([values[changes] / here, values[changes + 1] / here])).min(0)
        nearest = changes[np.argmin(distances)]
        below, above = (names[picks[place]] for place in (nearest, nearest + 1))
        values = np.geomspace(values[nearest], values[nearest + 1], len(values))
        picks = fastest(values)
    if below == above:
        words = f"{names[0]} stays the fastest from {first} {low:,.0f} to {high:,.0f}"
        return Crossover(first, None, None, None, None, None, words)
    at = float(values[np.flatnonzero(picks != picks[0]).min(initial=len(picks) - 1)])
    probability = np.asarray(calibrated.compare(below, above, **{**sizes, first: tried}).probability)
    is_sure = np.abs(probability - 0.5) >= SURE_OUTSIDE - 0.5
    interval = tried[is_sure & (tried < at)].max(initial=tried[0]), tried[is_sure & (tried > at)].min(initial=tried[-1])
    in_domain = bool(calibrated.in_domain(**{**sizes, first: at}))
    words = f"{below} is the fastest just below {first} {at:,.1f}, {above} just above"
    words += "" if in_domain else " (extrapolated)"
    return Crossover(first, at, below, above, (float(interval[0]), float(interval[1])), in_domain, words)
