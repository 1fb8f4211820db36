"""The clock: deadlines, one timed run, and the runs of one visit."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

#: Runs of a visit, of which the least counts: it finds in the caches what these can hold. A visit ends after the first
#: number of runs once it took so long, or after the second one.
LEAST_RUNS, MOST_RUNS, VISIT_NS = 4, 24, 2_500_000
#: Time between two runs of a visit: the threads of a program sleep then, as a call that comes alone finds them. Of runs
#: that follow at once, some find them awake, and take half as long.
PAUSE_NS = 60_000


class Deadline:
    """A point in time that a phase has to end by, and whether the user asked to stop."""

    def __init__(self, at_s: float):
        self.at_s = at_s
        self.interrupted = False

    def left_s(self) -> float:
        """Seconds until the deadline; 0 once the user has asked to stop."""
        return 0.0 if self.interrupted else self.at_s - time.perf_counter()


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


def visit_ns(run: Callable[[], Any]) -> list[int]:
    """Return the times in ns of the runs of one visit."""
    times_ns = [run_ns(run) for _ in range(LEAST_RUNS)]
    while len(times_ns) < MOST_RUNS and sum(times_ns) < VISIT_NS:
        times_ns.append(run_ns(run))
    return times_ns


def run_ns(run: Callable[[], Any]) -> int:
    """Return the time in ns until the results of one run are there, after a pause; they are dropped after that."""
    pause_until = time.perf_counter_ns() + PAUSE_NS
    while time.perf_counter_ns() < pause_until:
        pass
    start = time.perf_counter_ns()
    results = jax.block_until_ready(run())
    taken = time.perf_counter_ns() - start
    del results
    return taken
