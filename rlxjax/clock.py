"""The definition of a time: one call in a loop of calls that wait for their results, as `timeit` measures it.

On a busy machine the time of a call varies, and you see the mean over a loop of calls. Every measured or predicted time
is the lower quartile of such means.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

#: The version of this definition, kept with each timing.
PROTOCOL = 2
#: A *visit* is a loop of calls. It ends after `LEAST_CALLS` calls once it took `VISIT_NS`, or after `MOST_CALLS`.
LEAST_CALLS, MOST_CALLS, VISIT_NS = 2, 128, 4_000_000
#: The share of a visit's calls that are left out: the first calls find the caches and threads of another program.
FIRST_SHARE = 0.25
#: A time is this quantile of the means of its visits.
QUARTILE = 0.25


def visit_ns(call: Callable[[], Any], count: int | None = None) -> list[int]:
    """Return the time of each call of a visit, in ns, or of `count` calls; each call waits for its results."""
    times_ns, taken = [], 0
    least, most = (LEAST_CALLS, MOST_CALLS) if count is None else (count, count)
    while len(times_ns) < least or (taken < VISIT_NS and len(times_ns) < most):
        times_ns.append(call_ns(call))
        taken += times_ns[-1]
    return times_ns


def calls_of_visit(time_ns: float) -> int:
    """Return the number of calls in a visit to a program that takes `time_ns`."""
    return int(np.clip(np.nan_to_num(VISIT_NS / time_ns), LEAST_CALLS, MOST_CALLS))


def call_ns(call: Callable[[], Any]) -> int:
    """Return the time in ns until the results of one call are ready, at least 1; freeing the results is not timed."""
    start = time.perf_counter_ns()
    results = jax.block_until_ready(call())
    taken = time.perf_counter_ns() - start
    del results
    return max(taken, 1)


def mean_ns(times_ns: Sequence[int]) -> float:
    """Return the mean time of a visit's calls in ns, without the first quarter of the calls.

    Examples:
        >>> mean_ns([900, 90, 100, 110])
        100.0
    """
    return float(np.mean(settled_ns(times_ns)))


def settled_ns(times_ns: Sequence[int]) -> Sequence[int]:
    """Return the times of a visit's calls without the first quarter; at least the last call stays."""
    return times_ns[min(int(np.ceil(FIRST_SHARE * len(times_ns))), len(times_ns) - 1) :]


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """Keep the garbage collector out of timed code."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
