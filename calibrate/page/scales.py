"""Axes: from values to places in a picture, and the round values that are marked."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

#: Steps within a decade, from few to many.
_STEPS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))


class Scale(NamedTuple):
    """A logarithmic or linear axis.

    Attributes:
        low: the value at its start.
        high: the value at its end.
        start: place of the lowest value.
        end: place of the highest value.
        is_log: whether equal distances are equal factors.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = True

    def __call__(self, value: float) -> float:
        """Return the place of a value; one beyond an end is at that end.

        Examples:
            >>> Scale(1, 100, 0, 10)(10), Scale(0, 4, 10, 0, is_log=False)(1)
            (5.0, 7.5)
        """
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Return round values within the axis.

        Args:
            most: of them.

        Examples:
            >>> Scale(8, 2000, 0, 1).ticks(), Scale(0, 7, 0, 1, is_log=False).ticks(4)
            ([10.0, 30.0, 100.0, 300.0, 1000.0], [0.0, 2.0, 4.0, 6.0])
        """
        return log_ticks(self.low, self.high, most) if self.is_log else linear_ticks(self.low, self.high, most)


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return round values between two, by factors."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found = [10.0**power for power in range(first, last + 1)]
    best = [value for value in found if _within(value, low, high)]
    for steps in _STEPS:
        finer = [step * value for value in found for step in steps]
        finer = [value for value in finer if _within(value, low, high)]
        if len(finer) <= most:
            best = finer
    return best[:: math.ceil(len(best) / most)] if best else [low, high]


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Return round values between two, by equal steps."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def ratio_scale(log_reach: float, start: float, end: float) -> Scale:
    """Return an axis of ratios around 1 that reaches as far down as up."""
    return Scale(math.exp(-log_reach), math.exp(log_reach), start, end)


def ratio_ticks(scale: Scale, apart: float) -> list[float]:
    """Return as many round ratios within an axis around 1 as there is place for, each with its inverse, or nearly.

    Args:
        scale: of ratios.
        apart: the least distance between two.

    Examples:
        >>> ratio_ticks(ratio_scale(0.3, 0, 100), 10)
        [0.8, 0.9, 1.0, 1.1, 1.25]
    """
    ladders: Sequence[Sequence[float]] = (
        (1.0,),
        (0.01, 0.1, 1.0, 10.0, 100.0),
        (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
        (0.25, 0.5, 1.0, 2.0, 4.0),
        (0.5, 0.7, 1.0, 1.4, 2.0),
        (0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5),
        (0.9, 0.95, 1.0, 1.05, 1.1),
    )
    fitting = [[value for value in ladder if _within(value, scale.low, scale.high)] for ladder in ladders]
    spaced = [
        ladder
        for ladder in fitting
        if all(abs(scale(high) - scale(low)) >= apart for low, high in itertools.pairwise(ladder))
    ]
    return max(spaced, key=len)


def _within(value: float, low: float, high: float) -> bool:
    return low * (1 - 1e-9) <= value <= high * (1 + 1e-9)
