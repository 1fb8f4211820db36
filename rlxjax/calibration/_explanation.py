"""Why a strategy is picked: the parts of each one's time, the margin, and what would change the choice.

A choice between two strategies changes where their predictions cross. The crossover batch has an error bar:
as `log a = log b` defines `log batch`, its derivative by an unknown is
`-(d log a - d log b) / (d (log a - log b) / d log batch)`, and so is its own by what is a workload's own.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from ._checks import LEAST_SIZES, as_index
from ._crossings import Crossings, Pair, Quantities, log_batch_slope, nearest_crossings
from ._decision import decision
from ._latency import COEFFICIENT_NAMES, coefficient_unit
from ._learned_latency import LEARNED_COEFFICIENT_NAMES
from ._posterior import COVERED_SDS
from .welch import FAST_SEGMENTS, ULTRA_SEGMENTS, Path, WelchPeakParams

if TYPE_CHECKING:
    from ._calibration import Calibration

#: Inputs and coefficients are moved up and down by at most this factor.
LARGEST_FACTOR = 100.0
#: Batches from 1 to this are searched for a crossover.
LARGEST_BATCH = 2**17
#: Factors tried along each axis, before the interval in which the choice changes is divided.
GRID_POINTS = 513
#: Inputs that can be moved, with their units and least values.
INPUTS = {"batch": ("rows", 1.0), "n_fft": ("samples", 2.0), "k": ("peaks", 1.0)}


@dataclasses.dataclass(frozen=True)
class StrategyExplanation:
    """What one strategy takes.

    Attributes:
        strategy: its name.
        terms_ns: the parts by name, in ns; their sum is the prediction.
        time_ns: the prediction.
        interval_ns: bounds between which a run's time lies in nine cases of ten.
    """

    strategy: str
    terms_ns: Mapping[str, float]
    time_ns: float
    interval_ns: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Flip:
    """The smallest change of one input or coefficient from which on the runner-up is the faster one.

    Attributes:
        name: of the input or coefficient.
        kind: "input" or "coefficient".
        value: as it is now.
        unit: of the value.
        factor: by which to multiply it; None if no factor from 1/100 to 100 changes the choice.
        log_sd: standard deviation of the logarithm of the coefficient; None for inputs, which are known, and
            for coefficients of the learned path.
        sds: the change in these standard deviations.
        is_jump: whether the predictions jump past each other there instead of meeting.
        in_domain: whether the changed workload lies within what was measured; None without a factor.
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


@dataclasses.dataclass(frozen=True)
class Crossover:
    """The batch nearest to the asked one at which two strategies change places.

    Attributes:
        strategies: the two, the faster one at the asked batch first: the best two, or host and fused where
            the best two change places nowhere.
        batch: where the predictions are equal, or jump past each other; None if nowhere.
        below: the strategy that is the faster one just below it.
        above: the one that is just above it.
        log_sd: standard deviation of the logarithm of the batch; None at a jump.
        interval: batches between which it lies in nine cases of ten, within those that were searched. At a
            jump, the batches around it for which neither strategy is faster with a probability of 95 %.
        is_jump: whether the predictions jump past each other.
        in_domain: whether the workload there lies within what was measured.
        sentence: what was found, in words.
    """

    strategies: tuple[str, str]
    batch: float | None
    below: str | None
    above: str | None
    log_sd: float | None
    interval: tuple[float, float] | None
    is_jump: bool
    in_domain: bool | None
    sentence: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a strategy is picked for one workload.

    Attributes:
        batch: rows of the signal.
        n_fft: samples of a segment.
        k: peaks of a row.
        n_segments: segments of a row.
        in_domain: whether the workload lies within what was measured; if not, all of this is extrapolated.
        strategies: those that give the same result, the fastest first.
        pick: the fastest.
        runner_up: the second.
        margin_ns: what the pick saves over the runner-up.
        margin_sd_ns: standard deviation of that.
        probability: that the pick is the faster one of the two.
        verdict: the pick if that is sure enough, else "undecided".
        flips: of every input and coefficient, the smallest changes first, those without any last.
        crossover: the batch at which strategies change places.
    """

    batch: int
    n_fft: int
    k: int
    n_segments: int
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
        """Return the same as plain dictionaries, lists and numbers, as JSON has them."""
        return _plain(dataclasses.asdict(self))


class _Search(NamedTuple):
    """The nearest changes of the choice between two strategies; the last axis is that of the crossover."""

    names: tuple[str, str]
    axes: tuple[str, ...]
    pair: Pair
    quantities: Quantities
    grid: Float[np.ndarray, "axes grid"]
    found: Crossings


def explain(
    calibration: "Calibration", batch: int, n_fft: int, k: int, n_segments: int = FAST_SEGMENTS
) -> Explanation:
    """Return why a strategy is picked; arguments as in `Calibration.explain`."""
    batch = as_index(batch, "batch", at_least=1)
    params = WelchPeakParams(n_fft, n_segments, k)
    sizes = (batch, params.n_fft, params.k, params.n_segments)
    host = host_strategy(params.n_segments)
    names = (host, "fused", "block", *calibration.learned_strategies(params.n_fft))
    # Of equals the earlier one, as `pick` has it.
    strategies = sorted((_strategy(calibration, name, sizes) for name in names), key=lambda s: s.time_ns)
    by_time = [strategy.strategy for strategy in strategies]
    pick, runner_up = by_time[:2]
    decided = decision(calibration.estimate(pick, *sizes), calibration.estimate(runner_up, *sizes))
    search = _search(calibration, (pick, runner_up), sizes)
    crossover = _crossover(calibration, search, sizes)
    if crossover.batch is None and host not in (pick, runner_up):
        one, other = (name for name in by_time if name in (host, "fused"))
        elsewhere = _crossover(calibration, _search(calibration, (one, other), sizes), sizes)
        crossover = crossover if elsewhere.batch is None else elsewhere
    return Explanation(
        *sizes,
        in_domain=bool(calibration.in_domain(*sizes)),
        strategies=tuple(strategies),
        pick=pick,
        runner_up=runner_up,
        margin_ns=float(decided.margin_ns),
        margin_sd_ns=float(decided.margin_sd_ns),
        probability=float(decided.probability),
        verdict=pick if decided.verdict() == "fuse" else "undecided",
        flips=_flips(calibration, search, sizes),
        crossover=crossover,
    )


def _strategy(calibration: "Calibration", name: str, sizes: tuple[int, ...]) -> StrategyExplanation:
    terms = calibration.terms_ns(name, *sizes)
    low, high = calibration.interval_ns(name, *sizes)
    parts = {field.name: float(getattr(terms, field.name)) for field in dataclasses.fields(terms)}
    return StrategyExplanation(name, parts, float(terms.total_ns()), (float(low), float(high)))


def _search(calibration: "Calibration", names: tuple[str, str], sizes: tuple[int, ...]) -> _Search:
    """Return what changes the choice between two strategies, the first of which is the faster one."""
    batch, n_fft, k, n_segments = sizes
    learned = calibration.learned if "learned" in names else None
    own, work = (None, None) if learned is None else (learned.coefficients, learned.works[n_fft])
    pair = Pair(
        np.array([_path(name).code for name in names], np.int32),
        calibration.posterior,
        work,
        float(n_segments),
    )
    quantities = Quantities(calibration.coefficients, own, float(batch), float(n_fft), float(k))
    axes = (*COEFFICIENT_NAMES, *(LEARNED_COEFFICIENT_NAMES if learned else ()), *INPUTS, "batch")
    grid = np.tile(np.linspace(-1.0, 1.0, GRID_POINTS) * math.log(LARGEST_FACTOR), (len(axes), 1))
    for place, name in enumerate(axes):
        if name in INPUTS:
            value = getattr(quantities, name)
            low, high = max(value / LARGEST_FACTOR, INPUTS[name][1]), value * LARGEST_FACTOR
            if place == len(axes) - 1:
                low, high = 1.0, max(LARGEST_BATCH, value)
            tried = np.geomspace(low, high, GRID_POINTS)
            # Between whole batches the padding makes crossings that no batch has.
            grid[place] = np.log((np.round(tried) if name == "batch" else tried) / value)
        if name == "n_fft" and learned is not None:
            grid[place] = 0.0  # a model is of one length
    places = np.append(np.arange(len(axes) - 1), axes.index("batch"))
    found = jax.tree.map(np.asarray, nearest_crossings(pair, quantities, places, grid))
    return _Search(names, axes, pair, quantities, grid, found)


def _flips(calibration: "Calibration", search: _Search, sizes: tuple[int, ...]) -> tuple[Flip, ...]:
    """Return the flip of every input and coefficient, the smallest changes first."""
    sd_of = vars(calibration.posterior.coefficient_log_sd())
    values = jax.tree.leaves(search.quantities)
    flips = []
    for name, value, log_factor, is_jump in zip(
        search.axes[:-1], values, search.found.log_factor[:-1], search.found.is_jump[:-1], strict=True
    ):
        is_input, is_flip, log_sd = name in INPUTS, bool(np.isfinite(log_factor)), sd_of.get(name)
        factor = math.exp(log_factor) if is_flip else None
        changed = dict(zip(LEAST_SIZES, map(float, sizes), strict=True))
        if is_input and factor is not None:
            changed[name] *= factor
        flips.append(
            Flip(
                name=name,
                kind="input" if is_input else "coefficient",
                value=float(value),
                unit=INPUTS[name][0] if is_input else coefficient_unit(name),
                factor=factor,
                log_sd=log_sd,
                sds=abs(float(log_factor)) / log_sd if is_flip and log_sd else None,
                is_jump=bool(is_jump),
                in_domain=bool(calibration.in_domain(**changed)) if is_flip else None,
            )
        )
    return tuple(
        sorted(flips, key=lambda flip: math.inf if flip.factor is None else abs(math.log(flip.factor)))
    )


def _crossover(calibration: "Calibration", search: _Search, sizes: tuple[int, ...]) -> Crossover:
    """Return the crossover that was found along the batch, with its error bar."""
    batch, *others = sizes
    names, log_factor, grid = search.names, float(search.found.log_factor[-1]), search.grid[-1]
    batches = batch * np.exp(grid)
    if not math.isfinite(log_factor):
        words = f"{names[0]} stays ahead of {names[1]} from batch 1 to {batches[-1]:,.0f}"
        return Crossover(names, None, None, None, None, None, False, None, words)
    at = batch * math.exp(log_factor)
    below, above = names if log_factor > 0 else names[::-1]

    def log_ratio_sd(batch):
        one, other = (calibration.estimate(name, batch, *others) for name in names)
        shared = np.sum(np.asarray(one.scores - other.scores) ** 2, -1)
        return np.sqrt(shared + np.asarray(one.spread) ** 2 + np.asarray(other.spread) ** 2)

    log_sd, is_jump = None, bool(search.found.is_jump[-1])
    if not is_jump:
        slope = abs(float(log_batch_slope(search.pair, search.quantities._replace(batch=at))))
        log_sd = float(log_ratio_sd(at)) / slope if slope else None
    if log_sd is None:
        is_unsure = np.abs(search.found.log_ratio[-1]) <= COVERED_SDS * log_ratio_sd(batches)
        low = _reach(is_unsure[::-1], batches[::-1], at, grid[::-1] < log_factor)
        high = _reach(is_unsure, batches, at, grid > log_factor)
    else:
        reach = min(COVERED_SDS * log_sd, grid[-1] - grid[0])
        low, high = max(1.0, at * math.exp(-reach)), min(float(batches[-1]), at * math.exp(reach))
    inside = bool(calibration.in_domain(at, *others))
    how = "the predictions jump past each other" if is_jump else "the predictions are equal"
    words = f"{how} at batch {at:,.1f}: {below} is faster just below it, {above} just above"
    words += "" if inside else " (extrapolated)"
    return Crossover(names, at, below, above, log_sd, (low, high), is_jump, inside, words)


def _reach(is_unsure: np.ndarray, batches: np.ndarray, at: float, is_beyond: np.ndarray) -> float:
    """Return how far from a batch none is decided; batches beyond it are in order of their distance."""
    decided = np.flatnonzero(is_beyond & ~is_unsure)
    nearest = batches[is_beyond][: None if not decided.size else np.sum(is_beyond[: decided[0]])]
    return float(nearest[-1]) if nearest.size else at


def host_strategy(n_segments: int) -> str:
    """Return what the host's path is called with so many segments.

    Examples:
        >>> [host_strategy(n_segments) for n_segments in (1, 2, 8)]
        ['ultra', 'fast', 'host']
    """
    return {ULTRA_SEGMENTS: "ultra", FAST_SEGMENTS: "fast"}.get(n_segments, "host")


def _path(name: str) -> Path:
    """Return the path of a strategy that `explain` names."""
    return Path(name) if name in ("fused", "block", "learned") else Path.HOST


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value
