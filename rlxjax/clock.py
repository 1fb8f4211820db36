"""What a time is: that of one call among calls that follow each other, results waited for, as `timeit` shows it.

A program that others share processors with takes one of several times from call to call: the mean over a loop of
calls is what a user sees. Everything that is measured, predicted or judged means the lower quartile of such means.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

#: Which protocol timings are of: it changes when what a time is does.
PROTOCOL = 2
#: Calls of a visit. A visit ends after the first number of calls once it took so long, or after the second one.
LEAST_CALLS, MOST_CALLS, VISIT_NS = 2, 128, 4_000_000
#: Of the calls of a visit, the share that comes first: it finds caches and threads as another program left them.
FIRST_SHARE = 0.25
#: Of visits, the share that a time is not below.
QUARTILE = 0.25


def visit_ns(call: Callable[[], Any], count: int | None = None) -> list[int]:
    """Return the time in ns of each call of a visit, of so many if given; results are waited for and dropped."""
    times_ns, taken = [], 0
    least, most = (LEAST_CALLS, MOST_CALLS) if count is None else (count, count)
    while len(times_ns) < least or (taken < VISIT_NS and len(times_ns) < most):
        times_ns.append(call_ns(call))
        taken += times_ns[-1]
    return times_ns


def calls_of_visit(time_ns: float) -> int:
    """Return the calls of a visit to a program of a known time."""
    return int(np.clip(np.nan_to_num(VISIT_NS / time_ns), LEAST_CALLS, MOST_CALLS))


def call_ns(call: Callable[[], Any]) -> int:
    """Return the time in ns until the results of one call are there, 1 at least; they are dropped after that."""
    start = time.perf_counter_ns()
    results = jax.block_until_ready(call())
    taken = time.perf_counter_ns() - start
    del results
    return max(taken, 1)


def mean_ns(times_ns: Sequence[int]) -> float:
    """Return the mean time in ns of a visit's calls, without the first of them where there are others.

    Examples:
        >>> mean_ns([900, 90, 100, 110])
        100.0
    """
    return float(np.mean(settled_ns(times_ns)))


def settled_ns(times_ns: Sequence[int]) -> Sequence[int]:
    """Return the times of a visit's calls without the first of them where there are others."""
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
