"""Warming up, and rounds of randomly interleaved cells.

Protocol: every program is compiled and run before it is timed; each round visits every cell, those of short
runs several times, in a new random order, so that a slow spell of the machine hits all alike; the same
number of rounds counts for every cell; every repeat is kept.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from rlxjax import welch_peaks

from .canary import CanaryWatch
from .clock import Deadline, quiet_collector
from .interrupts import heeded
from .samples import SampleLog, SampleWriter
from .workloads import STRATEGIES, Cell, Signals

#: A visit of a cell repeats its run until they took so long together, but no more often than that.
VISIT_NS, MOST_REPEATS = 2_000_000, 4
#: Visits in a round of a cell whose runs take less than that: they differ by a fifth from one visit to the
#: next, by little within one.
VISITS, SHORT_NS = 4, 250_000


def warm_up(
    cells: Sequence[Cell],
    signals: Signals,
    deadline: Deadline,
    advance: Callable[[], None],
    at_least: int = 0,
) -> dict[Cell, int]:
    """Compile and run cells until the deadline, but so many at least; return each one's second time in ns."""
    warm: dict[Cell, int] = {}
    for cell in cells:
        if deadline.left_s() <= 0 and len(warm) >= at_least:
            break
        time_cell(cell, signals)
        warm[cell] = time_cell(cell, signals)
        advance()
    return warm


def measure_rounds(
    log: SampleLog,
    writer: SampleWriter,
    signals: Signals,
    deadline: Deadline,
    rng: np.random.Generator,
    advance: Callable[[], None],
    is_enough: Callable[[], bool] = lambda: False,
) -> None:
    """Measure rounds until it is enough or the deadline, one at least.

    An unfinished round of an earlier run comes first. Whether it is enough is asked after each round.

    Ctrl-C ends the measuring, not the job.
    """
    has_round, canary = bool(log.complete_rounds()), CanaryWatch(writer)
    unfinished = [i for i, visits in enumerate(log.rounds) if visits and not log.is_complete(visits)]
    with heeded(deadline), quiet_collector():
        while deadline.left_s() > 0 or not has_round:
            round_ = unfinished.pop(0) if unfinished else len(log.rounds)
            for cell in _visits_left(log, round_, rng):
                if deadline.interrupted or (has_round and deadline.left_s() <= 0):
                    return
                canary.look()
                writer.timing(round_, cell, visit(cell, signals))
            has_round = True
            advance()
            if is_enough():
                return


def _visits_left(log: SampleLog, round_: int, rng: np.random.Generator) -> list[Cell]:
    """Return the visits that a round still lacks, in random order."""
    done = Counter(cell for cell, _ in log.rounds[round_]) if round_ < len(log.rounds) else Counter()
    last = next(filter(log.is_complete, reversed(log.rounds)), [])
    short = {cell for cell, time_ns in last if time_ns < SHORT_NS}
    left = [max(0, (VISITS if cell in short else 1) - done[cell]) for cell in log.cells]
    return [log.cells[index] for index in rng.permutation(np.repeat(np.arange(len(left)), left))]


def visit(cell: Cell, signals: Signals) -> list[int]:
    """Return the times of one run of a cell, and of more right after it if it is short.

    A short run after another workload finds cold caches and sleeping threads; called again and again it does
    not.
    """
    times_ns = [time_cell(cell, signals)]
    while len(times_ns) < MOST_REPEATS and sum(times_ns) < VISIT_NS:
        times_ns.append(time_cell(cell, signals))
    return times_ns


def time_cell(cell: Cell, signals: Signals) -> int:
    """Return the time in ns of one run, from a NumPy signal on the host to NumPy peaks on the host."""
    path, _, selection = STRATEGIES[cell.strategy]
    signal, params, name, model = signals.of(cell), cell.params, str(path), signals.model_of(cell)
    start = time.perf_counter_ns()
    welch_peaks(signal, params, name, model=model, selection=selection)
    return time.perf_counter_ns() - start
