"""What a time is in this package: the mean time of a call in a loop of calls, as `timeit` measures it.

Each call in the loop waits for its results. On a busy machine the mean varies from loop to loop. A calibration, and
thus a prediction, takes the lower quartile of the means of several loops. A choice that is measured takes the mean of
these means, because a program's own slow calls count: `rlxjax.choices` says how it tells them from disturbances.
"""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

#: The version of this definition of a time, kept with each timing.
PROTOCOL = 2
#: A *visit* is a loop of calls. It lasts `VISIT_NS`, but makes at least `LEAST_CALLS` and at most `MOST_CALLS` calls.
LEAST_CALLS, MOST_CALLS, VISIT_NS = 2, 128, 4_000_000
#: The share of first calls in a visit that the mean leaves out, because the caches still hold another program's data.
FIRST_SHARE = 0.25
#: The time of a calibration is this quantile of the mean times of several visits.
QUARTILE = 0.25
#: A machine is busy if other work takes this share of it. Processor time is counted in steps of 10 ms, so its share is
#: known after `LEAST_WATCH_S` seconds.
BUSY, LEAST_WATCH_S = 0.25, 0.1


def visit_ns(call: Callable[[], Any], count: int | None = None) -> list[int]:
    """Run a visit, or `count` calls if given, and return the time of each call in ns."""
    times_ns, taken = [], 0
    least, most = (LEAST_CALLS, MOST_CALLS) if count is None else (count, count)
    while len(times_ns) < least or (taken < VISIT_NS and len(times_ns) < most):
        times_ns.append(call_ns(call))
        taken += times_ns[-1]
    return times_ns


def calls_of_visit(time_ns: float) -> int:
    """Return the number of calls that a visit makes if each call takes `time_ns`."""
    return int(np.clip(np.nan_to_num(VISIT_NS / time_ns), LEAST_CALLS, MOST_CALLS))


def call_ns(call: Callable[[], Any]) -> int:
    """Return the time in ns from a call's start until its results are ready. Freeing the results is not timed."""
    start = time.perf_counter_ns()
    results = jax.block_until_ready(call())
    taken = time.perf_counter_ns() - start
    del results
    return max(taken, 1)


def mean_ns(times_ns: Sequence[int]) -> float:
    """Return the mean time of a call in ns; the first quarter of the calls is left out.

    Examples:
        >>> mean_ns([900, 90, 100, 110])
        100.0
    """
    return float(np.mean(settled_ns(times_ns)))


def settled_ns(times_ns: Sequence[int]) -> Sequence[int]:
    """Return the times without those of the first quarter of the calls; at least the last call stays."""
    return times_ns[min(int(np.ceil(FIRST_SHARE * len(times_ns))), len(times_ns) - 1) :]


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """Turn the garbage collector off inside the `with` block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class OtherWork:
    """Measures how much of the machine other work takes: by processor time, and by a canary, a fixed small program."""

    def __init__(self) -> None:
        import psutil  # loaded when first used

        self._own, self._begun_s = psutil.Process(), time.perf_counter()
        self.processors()
        self._canary_ns = self._canary()

    def processors(self) -> float:
        """Return the number of processors that other processes kept busy since the last call."""
        import psutil

        busy = psutil.cpu_percent() * (psutil.cpu_count() or 1) - self._own.cpu_percent()
        return max(busy / 100.0, 0.0)

    def share(self) -> float:
        """Return the share of the machine, 0 to 1, that other work took since this object was made."""
        canary_ns = [*self._canary_ns, *self._canary()]
        lost = 1.0 - min(canary_ns) / float(np.mean(canary_ns))
        if time.perf_counter() - self._begun_s < LEAST_WATCH_S:
            return lost
        return min(max(lost, self.processors() / (os.cpu_count() or 1)), 1.0)

    def _canary(self) -> Sequence[int]:
        numbers = np.random.default_rng(0).random(4096)
        return settled_ns(visit_ns(lambda: np.sort(numbers)))
