"""What there is memory and time to measure: the cells of a campaign, compiled and warm."""

import os
import time
from typing import NamedTuple

import jax
import numpy as np

from .measure import Deadline, warm_up
from .report import SHOWN_BATCHES, SHOWN_K, SHOWN_N_FFT, Progress
from .samples import SampleLog
from .workloads import Cell, Models, Signals, runs_model

#: Share of the time before the fit that compiling and warming up may take.
WARM_UP_SHARE = 0.5
#: Rounds that have to fit in the remaining time; cells are left out until they do, down to so many.
MIN_ROUNDS, MIN_CELLS = 4, 24
#: Share of the free memory that one run may use.
MEMORY_SHARE = 0.25


class Plan(NamedTuple):
    """What will be measured; not ready if earlier samples are all that there is time for."""

    cells: list[Cell]
    left_out: dict[str, list[str]]
    signals: Signals
    is_ready: bool


def prepare(
    log: SampleLog,
    cells: list[Cell],
    models: Models,
    rng: np.random.Generator,
    deadline: Deadline,
    progress: Progress,
) -> Plan:
    """Compile and warm up, and choose the cells that there is time to measure.

    A resumed campaign that has a whole round keeps its cells, so that all have as many rounds.
    """
    fixed = bool(log.complete_rounds())
    wanted = log.cells or cells
    outside = [str(cell) for cell in cells if cell not in set(wanted)]
    left_out = {"not in the campaign that was resumed": outside} if outside else {}
    signals = Signals(wanted, models=models)
    share = 1.0 if fixed else WARM_UP_SHARE
    warm_deadline = Deadline(time.perf_counter() + share * deadline.left_s())
    order = preparation_order(wanted, rng)
    with progress.phase("compiling", total=len(order)) as advance:
        warm = warm_up(order, signals, warm_deadline, advance, at_least=0 if fixed else MIN_CELLS)
    if fixed:
        return Plan(wanted, left_out, signals, is_ready=len(warm) == len(wanted))
    budget_ns = 1e9 * max(deadline.left_s(), 0.0)
    too_slow = []
    while len(warm) > MIN_CELLS and MIN_ROUNDS * sum(warm.values()) > budget_ns:
        slowest = max(warm, key=lambda cell: warm[cell])
        del warm[slowest]
        too_slow.append(slowest)
    not_compiled = [cell for cell in wanted if cell not in warm and cell not in too_slow]
    for reason, out in (("no time to compile", not_compiled), ("too slow for the budget", too_slow)):
        if out:
            left_out[reason] = [str(cell) for cell in out]
    return Plan([cell for cell in wanted if cell in warm], left_out, signals, is_ready=True)


def preparation_order(cells: list[Cell], rng: np.random.Generator) -> list[Cell]:
    """Return the cells in the order in which they are compiled, in case time runs out.

    All strategies of a workload come together, those of the table that is printed first, then those that
    run a model, the others at random.
    """
    workloads: dict[tuple[int, int, int], list[Cell]] = {}
    for cell in cells:
        workloads.setdefault((cell.batch, cell.n_fft, cell.k), []).append(cell)
    keys = [list(workloads)[i] for i in rng.permutation(len(workloads))]

    def place(key: tuple[int, int, int]) -> tuple[bool, bool]:
        is_shown = key[0] in SHOWN_BATCHES and key[1:] == (SHOWN_N_FFT, SHOWN_K)
        return not is_shown, not any(runs_model(cell) for cell in workloads[key])

    keys.sort(key=place)
    return [cell for key in keys for cell in workloads[key]]


def memory_limit_bytes() -> int:
    """Return the bytes that the arrays of one run may take on host and device."""
    limits = []
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if stats := jax.devices()[0].memory_stats():
        limits.append(stats.get("bytes_limit", 2**34) - stats.get("bytes_in_use", 0))
    return int(MEMORY_SHARE * min(limits, default=2**33))
