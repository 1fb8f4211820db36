"""Plans that group consecutive stages into programs, based on the time and the peak memory of each group."""

import functools
import heapq
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rlxjax._checks import check_at_least, real_numbers
from rlxjax._numerics import soft_minimum
from rlxjax._typing import Nanoseconds, RealLike

#: A table: entry `[first, last]` is for the program of the stages first to last. Entries with first > last are ignored.
Table = Float[Array | np.ndarray, "stages stages"]


class StagePlan(NamedTuple):
    """A plan that groups a sequence of stages into programs.

    Attributes:
        groups: for each program, the numbers of its stages, in order.
        time_ns: total time of the programs, in ns.
        peak_bytes: the largest peak memory of any of the programs, in bytes.
    """

    groups: tuple[tuple[int, ...], ...]
    time_ns: float
    peak_bytes: float


def plan_stages(
    time_ns: Table | Sequence[Sequence[float]],
    peak_bytes: Table | Sequence[Sequence[float]] | float = 0.0,
    *,
    peak_price_ns_per_byte: float = 0.0,
    count: int = 1,
) -> list[StagePlan]:
    """Return the best plans that group a sequence of stages, the best plan first.

    A group is a sequence of consecutive stages that share a program. The time of a plan is the sum of the times of its
    groups. The peak memory of a plan is the largest peak memory of a group. The best plan has the lowest cost: its time
    plus the price times its peak memory. `n` stages have `2**(n - 1)` plans, which dynamic programming searches.

    Args:
        time_ns: time of each group in ns, `[first, last]`, by its first and last stage; infinity forbids a group.
        peak_bytes: peak memory of each group in bytes, `[first, last]`, or the same number for all groups.
        peak_price_ns_per_byte: the price: the cost in ns of a byte of peak memory.
        count: the maximum number of plans to return.

    Returns:
        At most `count` plans. Of two plans with the same cost, the plan with more programs comes first.

    Raises:
        ValueError: a table is not square, or a number is negative or NaN.

    Examples:
        >>> times = [[950.0, 1030.0, 6000.0], [0, 980.0, 6000.0], [0, 0, 960.0]]
        >>> best, second = plan_stages(times, count=2)
        >>> best.groups, best.time_ns, second.groups
        (((0, 1), (2,)), 1990.0, ((0,), (1,), (2,)))
    """
    times = np.asarray(real_numbers(time_ns, "time_ns"), np.float64)
    if times.ndim != 2 or times.shape[0] != times.shape[1] or not len(times):
        raise ValueError(f"time_ns: expected a number for each first and last stage, got shape {times.shape}")
    peaks = np.broadcast_to(np.asarray(real_numbers(peak_bytes, "peak_bytes"), np.float64), times.shape)
    upper = np.triu_indices(len(times))
    numbers = {"time_ns": times[upper], "peak_bytes": peaks[upper], "count": count}
    for name, value in (numbers | {"peak_price_ns_per_byte": peak_price_ns_per_byte}).items():
        check_at_least(value, name, what="number", most=np.inf)
    is_group = np.triu(np.isfinite(times))
    # The best plan is the fastest plan among the plans that need no more memory.
    caps = np.unique(peaks[is_group]) if peak_price_ns_per_byte else [np.inf]
    found = {plan for cap in caps for plan in _fastest(times, peaks, is_group & (peaks <= cap), count)}
    return heapq.nsmallest(
        count, found, key=lambda plan: (plan.time_ns + peak_price_ns_per_byte * plan.peak_bytes, -len(plan.groups))
    )


def _fastest(times: np.ndarray, peaks: np.ndarray, allowed: np.ndarray, count: int) -> list[StagePlan]:
    best = [[StagePlan((), 0.0, 0.0)]]
    for last in range(len(times)):
        longer = (
            StagePlan(
                (*plan.groups, tuple(range(first, last + 1))),
                plan.time_ns + float(times[first, last]),
                max(plan.peak_bytes, float(peaks[first, last])),
            )
            for first in range(last + 1)
            if allowed[first, last]
            for plan in best[first]
        )
        best.append(heapq.nsmallest(count, longer, key=lambda plan: plan.time_ns))
    return best[-1]


def soft_plan_ns(time_ns: Float[Array | np.ndarray, "*batch stages stages"], temperature_ns: RealLike) -> Nanoseconds:
    """Return a smooth approximation of the best plan's time in ns, `[*batch]`: the softmin of the times of all plans.

    The softmin is `-temperature * log(sum(exp(-time / temperature)))`, with a sum over all plans. It is at most the
    time of the best plan, and tends to this time as the temperature goes to 0. Its derivative with respect to the time
    of a group is the sum of the softmax weights of the plans that contain this group.

    Args:
        time_ns: time of each group in ns, `[*batch, first, last]`, by first and last stage; infinity forbids a group.
        temperature_ns: the temperature in ns, a positive number, `[*batch]`.

    Examples:
        >>> times = jnp.array([[950.0, 1030.0], [0.0, 980.0]])
        >>> [round(float(soft_plan_ns(times, temperature))) for temperature in (1.0, 1000.0)]
        [1030, 689]
    """
    times = jnp.asarray(real_numbers(time_ns, "time_ns"))
    best = [jnp.zeros(times.shape[:-2], times.dtype)]
    for last in range(times.shape[-1]):
        ways = [before + times[..., first, last] for first, before in enumerate(best)]
        best.append(functools.reduce(functools.partial(soft_minimum, temperature=temperature_ns), ways))
    return best[-1]
