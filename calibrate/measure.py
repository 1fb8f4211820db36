"""Warming up, and rounds of randomly interleaved cells.

Protocol: every program is compiled and run before it is timed; each round visits every cell in a new random order, so
that a slow spell of the machine hits all alike; the same number of rounds counts for every cell; every call is kept.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from rlxjax import welch_peaks
from rlxjax.clock import call_ns, quiet_collector, visit_ns

from .canary import CanaryWatch
from .clock import Deadline
from .interrupts import heeded
from .samples import SampleLog, SampleWriter
from .workloads import STRATEGIES, Cell, Signals


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
        call = call_of(cell, signals)
        call_ns(call)
        warm[cell] = call_ns(call)
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
            for cell in _cells_left(log, round_, rng):
                if deadline.interrupted or (has_round and deadline.left_s() <= 0):
                    return
                canary.look()
                writer.timing(round_, cell, visit_ns(call_of(cell, signals)))
            has_round = True
            advance()
            if is_enough():
                return


def _cells_left(log: SampleLog, round_: int, rng: np.random.Generator) -> list[Cell]:
    """Return the cells that a round still lacks, in random order."""
    done = {cell for cell, _ in log.rounds[round_]} if round_ < len(log.rounds) else set()
    left = [cell for cell in log.cells if cell not in done]
    return [left[index] for index in rng.permutation(len(left))]


def call_of(cell: Cell, signals: Signals) -> Callable[[], object]:
    """Return what runs a cell once, from a NumPy signal on the host to NumPy peaks on the host."""
    path, _, selection = STRATEGIES[cell.strategy]
    signal, model = signals.of(cell), signals.model_of(cell)
    return functools.partial(welch_peaks, signal, cell.params, str(path), model=model, selection=selection)
