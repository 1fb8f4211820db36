"""Which of several programs takes the least, timed by turns until that is clear.

All are visited once a round, in random order, so that what the machine does meanwhile meets all of them. Two are
compared by the logarithms of their ratios, round by round: the trimmed mean of these, and Yuen's interval of it. It
says by how much one is the faster, whatever few rounds were disturbed. What is compared is the median of a visit's
calls: where others take the processors, most visits have a call that waits, by which their means differ.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlxjax._chunks import with_callers_settings
from rlxjax._values import by_value
from rlxjax.clock import QUARTILE, quiet_collector, settled_ns, visit_ns
from rlxjax.fit import COVERED_SDS, SURE

#: Rounds, and the share of the limit, before anything is sure: a shared machine stays in one of several states for some
#: tens of milliseconds, in which one program may do better than another that is the faster one otherwise.
LEAST_ROUNDS, LEAST_SHARE = 6, 0.5
#: Share of the ratios that are left out at either end, and the probability that an interval of their mean holds.
TRIMMED, LEVEL = 0.2, 0.99
#: A call that takes so many times the limit does not end, as far as anybody waits.
LONGEST_CALL = 100
#: At the limit a program takes the favourite's place if it is the faster one with this probability.
LIKELY = 2 / 3
#: No ratio is known better than this.
LEAST_ERROR = 0.002
#: The first round is left out if it took no more than this share of the limit.
WARMING = 0.25


class FirstCall(NamedTuple):
    """What came of calling a program for the first time.

    Attributes:
        result: that it gave.
        taken_s: seconds that it took, compiling included.
        failed: why there is no result, in a sentence.
    """

    result: Any = None
    taken_s: float = 0.0
    failed: str = ""


@by_value
class Contest(NamedTuple):
    """What programs took, and which is the one to run.

    Attributes:
        best: its place; the favourite where none is ahead of it by more than the regret, as far as that is likely.
        is_tie: whether others are as good as far as the rounds say: within the regret, or not told apart.
        probability: that no other is faster by more than the regret.
        time_ns: of each, the lower quartile of its visits, `[n]`; NaN of one that failed.
        low_ns: the lower end of the interval that holds it with 90 %, `[n]`.
        high_ns: its upper end, `[n]`.
        rounds: in which two programs at least were left.
        failed: why a program dropped out, by its place.
    """

    best: int
    is_tie: bool
    probability: float
    time_ns: np.ndarray
    low_ns: np.ndarray
    high_ns: np.ndarray
    rounds: int
    failed: dict[int, str]


def first_call(call: Callable[[], Any], limit_s: float) -> FirstCall:
    """Call a program that may raise, or not end: then its thread is left alone, and the process goes on.

    Args:
        call: of no arguments.
        limit_s: seconds until it counts as one that does not end.
    """
    found: list[FirstCall] = []

    def run() -> None:
        begun = time.perf_counter()
        try:
            result = jax.block_until_ready(call())
        except BaseException as error:  # noqa: BLE001 - a user's program may raise anything, and may exit
            found.append(FirstCall(failed=raised(error)))
        else:
            found.append(FirstCall(result, time.perf_counter() - begun))

    thread = threading.Thread(target=with_callers_settings(run), daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0] if found else FirstCall(failed=f"did not end within {limit_s:g} s")


def raised(error: BaseException) -> str:
    """Return in a few words that a program raised an error."""
    reason = str(error).strip().partition("\n")[0]
    return f"raised {type(error).__name__}{f': {reason}' if reason else ''}"


def contest(
    calls: Sequence[Callable[[], Any]],
    *,
    favourite: int = 0,
    regret: float,
    limit_s: float,
    extra_ns: Sequence[float] | None = None,
    seed: int | None = None,
) -> Contest:
    """Time programs that have run once, until one is surely the fastest, or surely none is by more than the regret.

    A program that is surely slower than another by more than the regret is visited no more. Half of the limit has to
    pass first.

    Args:
        calls: of no arguments, one a program.
        favourite: the place of the one that stays where none is likely to be ahead by more than the regret.
        regret: relative difference that does not count.
        limit_s: seconds after which no further round begins; two rounds are made at least.
        extra_ns: what each costs beside its time; nothing unless given.
        seed: of the order of visits; another one each time unless given.
    """
    extras = np.zeros(len(calls)) if extra_ns is None else np.asarray(extra_ns, float)
    rng, costs, times_ns, failed = np.random.default_rng(seed), *np.empty((2, 0, len(calls))), {}
    active, is_settled, is_first = list(range(len(calls))), False, True
    begun_s = time.perf_counter()
    with quiet_collector():
        while len(active) > 1 and not is_settled and (len(costs) < 2 or time.perf_counter() < begun_s + limit_s):
            row, row_ns = np.full((2, len(calls)), np.nan)
            for place in rng.permutation(active).tolist():
                try:
                    visit = settled_ns(visit_ns(calls[place]))
                    row[place], row_ns[place] = np.median(visit) + extras[place], np.mean(visit)
                except Exception as error:  # noqa: BLE001 - whatever a user's program raises
                    failed[place] = raised(error)
                    active.remove(place)
                    row[place] = row_ns[place] = costs[:, place] = times_ns[:, place] = np.nan
            if is_first and time.perf_counter() < begun_s + WARMING * limit_s:
                is_first = False  # it found caches and threads as other programs left them
                continue
            is_first, costs, times_ns = False, np.vstack([costs, row]), np.vstack([times_ns, row_ns])
            if len(costs) >= LEAST_ROUNDS and time.perf_counter() >= begun_s + LEAST_SHARE * limit_s:
                active, is_settled = _left(costs, active, regret)
    if not active:
        none = np.full(len(calls), np.nan)
        return Contest(favourite, False, 0.0, none, none, none, len(costs), failed)
    best = _best(costs, active, favourite, regret)
    is_tie = any(_Ratio.of(costs, place, best).is_tie(regret) for place in active if place != best)
    others = [place for place in range(len(calls)) if place != best and place not in failed and len(costs)]
    chances = [_Ratio.of(costs, place, best).chance_above(-math.log1p(regret)) for place in others]
    time_ns, low_ns, high_ns = np.array([_quantiles(own) for own in times_ns.T]).T
    return Contest(best, is_tie, min(chances, default=1.0), time_ns, low_ns, high_ns, len(costs), failed)


class _Ratio(NamedTuple):
    """The logarithm of the ratio of two programs' costs: its trimmed mean, its standard error, degrees of freedom."""

    centre: float
    error: float
    freedom: int

    @classmethod
    def of(cls, costs: np.ndarray, place: int, other: int) -> "_Ratio":
        """Compare two programs in the rounds that visited both."""
        ratios = np.log(costs[:, place] / costs[:, other])
        ratios = np.sort(ratios[~np.isnan(ratios)])
        cut = int(TRIMMED * len(ratios))
        if (kept := len(ratios) - 2 * cut) < 2:
            return cls(float(np.median(ratios)) if len(ratios) else 0.0, math.inf, 1)
        winsorised = np.clip(ratios, ratios[cut], ratios[-1 - cut])
        error = np.std(winsorised, ddof=1) * math.sqrt((len(ratios) - 1) / (kept * (kept - 1)))
        return cls(float(np.mean(ratios[cut : len(ratios) - cut])), max(float(error), LEAST_ERROR), kept - 1)

    def reach(self, level: float = LEVEL) -> float:
        """Return how far the interval of a level goes either way."""
        from scipy.special import stdtrit  # loaded when first used

        return self.error * float(stdtrit(self.freedom, (1.0 + level) / 2.0))

    def chance_above(self, bound: float) -> float:
        """Return the probability that the logarithm is above a bound."""
        from scipy.special import stdtr

        return float(stdtr(self.freedom, (self.centre - bound) / self.error))

    def is_tie(self, regret: float) -> bool:
        """Whether the two are within the regret of each other, or not told apart."""
        return abs(self.centre) <= math.log1p(regret) or 1.0 - SURE < self.chance_above(0.0) < SURE


def _left(costs: np.ndarray, active: list[int], regret: float) -> tuple[list[int], bool]:
    """Return the programs that may be the best, and whether they are surely as good as each other."""
    ahead, most = _ahead(costs, active), math.log1p(regret)
    ratios = {place: _Ratio.of(costs, place, ahead) for place in active if place != ahead}
    reaches = {place: ratio.reach() for place, ratio in ratios.items()}
    left = [ahead, *(place for place, ratio in ratios.items() if ratio.centre - reaches[place] <= most)]
    return left, all(abs(ratios[place].centre) + reaches[place] <= most for place in left[1:])


def _ahead(costs: np.ndarray, active: list[int]) -> int:
    """Return the program of the least cost."""
    return min(active, key=lambda place: _Ratio.of(costs, place, active[0]).centre)


def _best(costs: np.ndarray, active: list[int], favourite: int, regret: float) -> int:
    """Return the program to run: the favourite, unless one is likely to be ahead of it by more than the regret."""
    ahead = _ahead(costs, active) if len(costs) else active[0]
    if favourite not in active:
        return ahead
    ratio = _Ratio.of(costs, favourite, ahead)
    return ahead if ratio.centre > math.log1p(regret) and ratio.chance_above(0.0) >= LIKELY else favourite


def _quantiles(times_ns: np.ndarray) -> tuple[float, float, float]:
    """Return the lower quartile of visits, and the order statistics between which it lies with 90 %."""
    seen = times_ns[~np.isnan(times_ns)]
    if not len(seen):
        return math.nan, math.nan, math.nan
    reach = COVERED_SDS * math.sqrt(QUARTILE * (1.0 - QUARTILE) / len(seen))
    ends = np.clip([QUARTILE, QUARTILE - reach, QUARTILE + reach], 0.0, 1.0)
    middle, low, high = np.quantile(seen, ends).tolist()
    return middle, low, high
