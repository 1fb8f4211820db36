"""A contest: programs are timed in rounds until one program is surely the fastest.

A round visits each program once, in random order. A visit calls its program several times, and its cost is the mean
time of these calls. Calls can be slow for two reasons. The machine disturbs all programs alike; a program's own slow
calls follow the program. So programs are compared twice, by the logarithm of the ratio of two costs:

- by the usual visit, which is the lower quartile of the visits, as if all slow visits came from the machine;
- by the mean of the visits, as if they came from the programs.

Both comparisons divide a round by the factor by which it slows *both* programs. Resampled rounds give the errors (the
bootstrap of Efron, 1979). If all slow visits come from the machine, the ratio of mean to usual visit is equal in both
programs. The measured ratios say how probable this is, and so how much each comparison counts.
"""

import functools
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlxjax._values import by_value
from rlxjax.clock import FIRST_SHARE, LEAST_CALLS, QUARTILE, calls_of_visit, quiet_collector, settled_ns, visit_ns

from ._calls import ALONE, Caller, FailedError, Party

#: A contest takes at least `LEAST_ROUNDS` rounds. Programs may drop out after each `LEAST_ROUNDS` rounds, but not
#: before the share `LEAST_SHARE` of the limit, because a shared machine stays in one state for tens of milliseconds. A
#: first round shorter than the share `WARMING` is left out.
LEAST_ROUNDS, LEAST_SHARE, WARMING = 6, 0.5, 0.25
#: The number of resamples, the probability from which a program is surely slower, and the least error of a ratio.
RESAMPLES, LEVEL, LEAST_ERROR = 200, 0.99, 0.002
#: A program drops out only if the fastest stays ahead with one more visit that takes `UNSEEN` times its usual time
#: longer. When time is up, the fastest is sure if it stays ahead with one more visit of half as long again.
UNSEEN, UNSEEN_SURE = 10.0, 0.5
#: Before timing, slow calls are the programs' own with probability one half. If they are, the ratio of mean to usual
#: visit differs between two programs by this standard deviation of its logarithm.
OWN_LOG_SD = 0.3
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
    time_ns: np.ndarray  # the mean of each program's visits, `[n]`, without what slowed all, and its 90 % interval
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
    """Time programs until one is surely the fastest, or until time is up."""
    extras = np.zeros(len(calls)) if extra_ns is None else np.asarray(extra_ns, float)
    rng = np.random.default_rng(seed if party is ALONE else party.gathered(random.getrandbits(32))[0])
    firsts, rests = np.empty((2, 0, len(calls)))  # mean time of the first calls of a visit, and of the other calls
    failed, elapsed_s, begun_s = {}, 0.0, time.perf_counter()
    active, is_first = list(range(len(calls))), True
    counts: list[int | None] = [None if party is ALONE else LEAST_CALLS] * len(calls)
    with quiet_collector(), Caller() as caller:
        while len(active) > 1 and not _is_over(len(rests), elapsed_s, limit_s):
            row, own_failed = np.full((2, len(calls)), np.nan), {}
            # A visit's length varies, so that it does not follow the rhythm of a program's slow calls.
            longer = rng.integers(2, size=len(calls)).tolist()
            for place in rng.permutation(active).tolist():
                count = counts[place]
                visit = functools.partial(visit_ns, calls[place], count and count + longer[place])
                try:
                    times_ns = caller(visit, (LEAST_CALLS + 1) * longest_s(limit_s))
                    rest_ns = settled_ns(times_ns)
                    row[:, place] = np.mean(times_ns[: -len(rest_ns)]), np.mean(rest_ns)
                except FailedError as reason:
                    own_failed[place] = str(reason)
            said = party.gathered([row.tolist(), [*own_failed.items()], time.perf_counter() - begun_s])
            row, elapsed_s = np.max([own for own, _, _ in said], axis=0), said[0][2]
            failed |= {place: reason for _, reasons, _ in reversed(said) for place, reason in reasons}
            active = [place for place in active if place not in failed]
            row[:, [*failed]] = firsts[:, [*failed]] = rests[:, [*failed]] = np.nan
            counts = [calls_of_visit(time_ns) for time_ns in np.fmin.reduce([*rests, row[1]])]
            if is_first and elapsed_s < WARMING * limit_s:
                is_first = False  # caches and threads were in the state that other programs left
                continue
            is_first, firsts, rests = False, np.vstack([firsts, row[0]]), np.vstack([rests, row[1]])
            if len(rests) % LEAST_ROUNDS == 0 and elapsed_s >= LEAST_SHARE * limit_s:
                active = _left(_means(firsts, rests) + extras, active, regret)
    means = _means(firsts, rests)
    if not active:
        none = np.full(len(calls), np.nan)
        return Contest(favourite, (), 0.0, none, none, none, len(means), failed)
    time_ns, low_ns, high_ns = np.array([_mean_interval(own) for own in _without_shared(means).T]).T
    costs, most = means + extras, math.log1p(regret)
    best = _ahead(costs, active) if len(costs) else active[0]
    if favourite in active:
        ratio = _Ratio.of(costs, favourite, best)
        best = best if ratio.centre > most and ratio.chance_above(0.0) >= LIKELY else favourite
    timed = [place for place in range(len(calls)) if place not in failed and len(means)]
    ratios = {place: _Ratio.of(costs, place, best) for place in timed if place != best}
    costs_ns = time_ns + extras

    def is_tied(place: int, one: _Ratio) -> bool:
        is_alike = abs(one.centre) <= most or one.chance_above(math.log1p(UNSEEN_SURE / len(costs))) < LEVEL
        return is_alike and place in active or bool(costs_ns[place] * (1.0 + regret) < costs_ns[best])

    tied = tuple(place for place, one in ratios.items() if is_tied(place, one))
    chance = min((ratio.chance_above(-most) for ratio in ratios.values()), default=1.0)
    return Contest(best, tied, chance, time_ns, low_ns, high_ns, len(means), failed)


def _is_over(rounds: int, elapsed_s: float, limit_s: float) -> bool:
    """Whether time is up. `LEAST_ROUNDS` rounds may take longer than the limit, but no longer than a call may."""
    least = LEAST_ROUNDS if elapsed_s < longest_s(limit_s) else 2
    return rounds >= least and elapsed_s >= limit_s


class _Ratio(NamedTuple):
    """The logarithm of the ratio of two programs' costs: by their usual visits, and by the means of their visits."""

    logs: np.ndarray  # `[2]`, the two comparisons
    errors: np.ndarray  # their standard errors
    weights: np.ndarray  # how probable it is that each of them holds
    freedom: int

    @classmethod
    def of(cls, costs: np.ndarray, place: int, other: int) -> "_Ratio":
        both = costs[:, [place, other]]
        both = _without_shared(both[~np.isnan(both).any(axis=1)])
        if (rounds := len(both)) < 2:
            return cls(np.log(both[0, 0] / both[0, 1]) * np.ones(2) if rounds else np.zeros(2), *_UNKNOWN)
        drawn = both[np.concatenate([np.arange(rounds)[None], _drawn(rounds)])]
        usual, mean = (np.log(own[:, 0] / own[:, 1]) for own in (_quartile(drawn), drawn.mean(axis=1)))
        # The mean is as uncertain as if a visit as slow as the slowest of a program could come once more.
        more = np.log1p((both.max(axis=0) / both.mean(axis=0) - 1.0) / rounds).max()
        errors = np.std([usual[1:], mean[1:], (mean - usual)[1:]], axis=1) * math.sqrt(rounds / (rounds - 1))
        errors = np.maximum(np.hypot(errors, [0.0, more, more]), LEAST_ERROR)
        # The Bayes factor of a difference that is 0, against a difference drawn with the deviation `OWN_LOG_SD`.
        prior, error = OWN_LOG_SD**2, errors[2] ** 2
        excess = (mean[0] - usual[0]) ** 2 / (2.0 * error) * prior / (error + prior)
        factor = math.sqrt(1.0 + prior / error) * math.exp(-excess)
        weights = np.array([factor, 1.0]) / (1.0 + factor)
        return cls(np.array([usual[0], mean[0]]), errors[:2], weights, rounds - 1)

    @property
    def centre(self) -> float:
        return float(self.weights @ self.logs)

    def chance_above(self, bound: float) -> float:
        from scipy.special import stdtr  # loaded when first used

        return float(self.weights @ stdtr(self.freedom, (self.logs - bound) / self.errors))


#: Errors, weights and degrees of freedom of a ratio that no two rounds give.
_UNKNOWN = np.full(2, math.inf), np.full(2, 0.5), 1


@functools.lru_cache(maxsize=64)
def _drawn(rounds: int) -> np.ndarray:
    """Return the indices of the rounds in each resample, of shape `[resamples, rounds]`."""
    return np.random.default_rng(rounds).integers(0, rounds, (RESAMPLES, rounds))


def _left(costs: np.ndarray, active: list[int], regret: float) -> list[int]:
    """Return the programs that may be the fastest."""
    ahead, most = _ahead(costs, active), math.log1p(regret) + math.log1p(UNSEEN / len(costs))
    return [place for place in active if place == ahead or _Ratio.of(costs, place, ahead).chance_above(most) < LEVEL]


def _ahead(costs: np.ndarray, active: list[int]) -> int:
    first = active[0]
    return min(active, key=lambda place: 0.0 if place == first else _Ratio.of(costs, place, first).centre)


def _means(firsts: np.ndarray, rests: np.ndarray) -> np.ndarray:
    """Return the mean time of a call in each visit, without the time that first calls usually lose to cold caches."""
    cold = np.maximum(_quartile(firsts / rests), 1.0)
    return FIRST_SHARE * firsts / cold + (1.0 - FIRST_SHARE) * rests


def _without_shared(costs: np.ndarray) -> np.ndarray:
    """Divide each round, `[rounds, programs]`, by the factor by which all of its programs are slower than usual."""
    return costs / np.maximum(np.fmin.reduce(costs / _quartile(costs), axis=1), 1.0)[:, None]


def _quartile(values: np.ndarray) -> np.ndarray:
    """Return the lower quartile over the rounds of an array `[..., rounds, programs]`. NaNs do not count."""
    if not values.shape[-2]:
        return np.full(values.shape[-1:], np.nan)
    place = QUARTILE * np.maximum((~np.isnan(values)).sum(axis=-2, keepdims=True) - 1, 0)
    ranked = np.sort(values, axis=-2)
    low, high = (np.take_along_axis(ranked, end(place).astype(int), -2) for end in (np.floor, np.ceil))
    return (low + place % 1.0 * (high - low)).squeeze(-2)


def _mean_interval(times_ns: np.ndarray) -> tuple[float, float, float]:
    """Return the mean of a program's visits, and the ends of its 90 % interval."""
    seen = times_ns[~np.isnan(times_ns)]
    if not len(seen):
        return math.nan, math.nan, math.nan
    middle, *drawn = seen.mean(), *seen[_drawn(len(seen))].mean(axis=1)
    low, high = np.quantile(drawn, [0.05, 0.95])
    return float(middle), float(min(low, middle)), float(max(high, middle))
