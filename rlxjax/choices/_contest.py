"""A contest: programs are timed in rounds until one program is surely the fastest.

A round visits each program once, in random order, so that a disturbance of the machine affects all programs alike. A
visit calls its program several times. Programs are compared by the lower quartile of the median times of their visits.
The comparison uses the logarithm of the ratio of two times; resampled rounds give its error (the bootstrap of Efron,
1979). A program whose mean time is surely higher does not win. If measured times contradict the choice, it is a tie.
"""

import functools
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlxjax._values import by_value
from rlxjax.clock import LEAST_CALLS, QUARTILE, calls_of_visit, quiet_collector, settled_ns, visit_ns
from rlxjax.fit import COVERED_SDS, SURE

from ._calls import ALONE, Caller, FailedError, Party

#: A contest takes at least `LEAST_ROUNDS` rounds and the share `LEAST_SHARE` of its time limit, because a shared
#: machine stays in one state for tens of milliseconds. A first round shorter than the share `WARMING` is left out.
LEAST_ROUNDS, LEAST_SHARE, WARMING = 6, 0.5, 0.25
#: The number of resamples, the confidence level of a ratio's interval, and the smallest standard error of a ratio.
RESAMPLES, LEVEL, LEAST_ERROR = 200, 0.99, 0.002
#: A call is given up after `LONGEST_CALL` times the time limit, but not before `LEAST_WAIT_S` seconds.
LONGEST_CALL, LEAST_WAIT_S = 100, 1.0
#: When time is up, a program replaces the favourite if it is faster with at least this probability.
LIKELY = 2 / 3


@by_value
class Contest(NamedTuple):
    """The result of a contest. Each program is given by its index. The times of a failed program are NaN."""

    best: int  # the favourite, unless another program is likely to be faster by more than the regret
    tied: tuple[int, ...]  # programs that are not told apart from the best
    probability: float  # that no other program is faster by more than the regret
    time_ns: np.ndarray  # the lower quartile of each program's visits, `[n]`, and the ends of its 90 % interval
    low_ns: np.ndarray
    high_ns: np.ndarray
    rounds: int  # rounds with at least two programs
    failed: dict[int, str]  # the reason of each program that dropped out, by the program's place


def longest_s(limit_s: float) -> float:
    """Return the number of seconds after which a call is given up."""
    return max(LONGEST_CALL * limit_s, LEAST_WAIT_S)


def contest(
    calls: Sequence[Callable[[], Any]],
    *,
    favourite: int = 0,
    regret: float,
    limit_s: float,
    extra_ns: Sequence[float] | None = None,
    seed: int | None = None,
    party: Party = ALONE,
) -> Contest:
    """Time programs until one is surely the fastest, until all that may be are surely equal, or until time is up."""
    extras = np.zeros(len(calls)) if extra_ns is None else np.asarray(extra_ns, float)
    rng = np.random.default_rng(seed if party is ALONE else party.gathered(random.getrandbits(32))[0])
    medians, means = np.empty((2, 0, len(calls)))  # median and mean of the calls of a visit, plus the extra cost
    failed, elapsed_s, begun_s = {}, 0.0, time.perf_counter()
    active, is_settled, is_first = list(range(len(calls))), False, True
    counts: list[int | None] = [None if party is ALONE else LEAST_CALLS] * len(calls)
    with quiet_collector(), Caller() as caller:
        while len(active) > 1 and not is_settled and (len(medians) < 2 or elapsed_s < limit_s):
            row, own_failed = np.full((2, len(calls)), np.nan), {}
            for place in rng.permutation(active).tolist():
                visit = functools.partial(visit_ns, calls[place], counts[place])
                try:
                    times_ns = settled_ns(caller(visit, LEAST_CALLS * longest_s(limit_s)))
                    row[:, place] = np.median(times_ns) + extras[place], np.mean(times_ns) + extras[place]
                except FailedError as reason:
                    own_failed[place] = str(reason)
            said = party.gathered([row.tolist(), [*own_failed.items()], time.perf_counter() - begun_s])
            row, elapsed_s = np.max([own for own, _, _ in said], axis=0), said[0][2]
            failed |= {place: reason for _, reasons, _ in reversed(said) for place, reason in reasons}
            active = [place for place in active if place not in failed]
            row[:, [*failed]] = medians[:, [*failed]] = means[:, [*failed]] = np.nan
            if party is not ALONE:
                counts = [calls_of_visit(time_ns) for time_ns in row[1] - extras]
            if is_first and elapsed_s < WARMING * limit_s:
                is_first = False  # caches and threads were in the state that other programs left
                continue
            is_first, medians, means = False, np.vstack([medians, row[0]]), np.vstack([means, row[1]])
            # A program that is surely slower by more than the regret drops out.
            if len(medians) >= LEAST_ROUNDS and elapsed_s >= LEAST_SHARE * limit_s:
                active, is_settled = _left(medians, active, regret)
    if not active:
        none = np.full(len(calls), np.nan)
        return Contest(favourite, (), 0.0, none, none, none, len(medians), failed)
    time_ns, low_ns, high_ns = np.array([_quantiles(own) for own in (means - extras).T]).T
    best, costs, most = _ahead(medians, active) if len(medians) else active[0], medians, math.log1p(regret)
    if favourite in active:
        ratio = _Ratio.of(medians, favourite, best)
        best = best if ratio.centre > most and ratio.chance_above(0.0) >= LIKELY else favourite
    timed = [place for place in range(len(calls)) if place not in failed and len(means)]
    for place in timed:  # a program with rare slow calls can be slower on average
        by_time = _Ratio.of(means, best, place)
        if by_time.centre > most and by_time.chance_above(0.0) >= SURE:
            best, costs = place, means
    ratios = {place: _Ratio.of(costs, place, best) for place in timed if place != best}
    costs_ns = time_ns + extras

    def is_tied(place: int, one: _Ratio) -> bool:
        is_alike = abs(one.centre) <= most or 1.0 - SURE < one.chance_above(0.0) < SURE
        return is_alike and place in active or bool(costs_ns[place] * (1.0 + regret) < costs_ns[best])

    tied = tuple(place for place, one in ratios.items() if is_tied(place, one))
    chance = min((ratio.chance_above(-most) for ratio in ratios.values()), default=1.0)
    return Contest(best, tied, chance, time_ns, low_ns, high_ns, len(medians), failed)


class _Ratio(NamedTuple):
    """The logarithm of the ratio of two programs' costs, with its standard error and its degrees of freedom."""

    centre: float
    error: float
    freedom: int

    @classmethod
    def of(cls, costs: np.ndarray, place: int, other: int) -> "_Ratio":
        both = np.log(costs[:, [place, other]])
        both = both[~np.isnan(both).any(axis=1)]
        if (rounds := len(both)) < 2:
            return cls(float(np.subtract(*both[0])) if rounds else 0.0, math.inf, 1)
        ranked = np.sort(np.concatenate([both[None], both[_drawn(rounds)]]), axis=1)
        below, share = divmod(QUARTILE * (rounds - 1), 1.0)
        low, high = ranked[:, int(below)], ranked[:, int(below) + 1]
        centre, *drawn = ((1.0 - share) * low + share * high) @ (1.0, -1.0)
        return cls(float(centre), max(float(np.std(drawn)), LEAST_ERROR), rounds - 1)

    def reach(self) -> float:
        """Return half the width of the interval that holds the logarithm with probability `LEVEL`."""
        from scipy.special import stdtrit  # loaded when first used

        return self.error * float(stdtrit(self.freedom, (1.0 + LEVEL) / 2.0))

    def chance_above(self, bound: float) -> float:
        from scipy.special import stdtr

        return float(stdtr(self.freedom, (self.centre - bound) / self.error))


@functools.lru_cache(maxsize=64)
def _drawn(rounds: int) -> np.ndarray:
    """Return the indices of the rounds in each resample, of shape `[resamples, rounds]`."""
    return np.random.default_rng(rounds).integers(0, rounds, (RESAMPLES, rounds))


def _left(costs: np.ndarray, active: list[int], regret: float) -> tuple[list[int], bool]:
    """Return the programs that may be the fastest, and whether their times are surely equal within `regret`."""
    ahead, most = _ahead(costs, active), math.log1p(regret)
    ratios = {place: _Ratio.of(costs, place, ahead) for place in active if place != ahead}
    reaches = {place: ratio.reach() for place, ratio in ratios.items()}
    left = [ahead, *(place for place, ratio in ratios.items() if ratio.centre - reaches[place] <= most)]
    return left, all(abs(ratios[place].centre) + reaches[place] <= most for place in left[1:])


def _ahead(costs: np.ndarray, active: list[int]) -> int:
    return min(active, key=lambda place: _Ratio.of(costs, place, active[0]).centre)


def _quantiles(times_ns: np.ndarray) -> tuple[float, float, float]:
    """Return the lower quartile of a program's times in its visits, and the ends of its 90 % interval."""
    seen = times_ns[~np.isnan(times_ns)]
    if not len(seen):
        return math.nan, math.nan, math.nan
    reach = COVERED_SDS * math.sqrt(QUARTILE * (1.0 - QUARTILE) / len(seen))
    ends = np.clip([QUARTILE, QUARTILE - reach, QUARTILE + reach], 0.0, 1.0)
    middle, low, high = np.quantile(seen, ends).tolist()
    return middle, low, high
