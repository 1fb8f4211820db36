"""What there is memory and time to measure: the cells of a campaign, compiled and warm."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from rlxjax import LatencyPosterior, LatencyPrior, fit_posterior
from rlxjax.fit import MIN_TIMINGS, Facts
from rlxjax.welch import keep_programs

from .clock import Deadline
from .design import by_workload, design_posterior, preparation_order
from .measure import warm_up
from .progress import Progress
from .samples import SampleLog, timings_of
from .workloads import Cell, Grid, Models, Signals

#: Share of the time before the fit that compiling and warming up may take.
WARM_UP_SHARE = 0.6
#: Rounds that have to fit in the remaining time; cells are left out until they do, down to so many.
MIN_ROUNDS, MIN_CELLS = 4, 24
#: Cells that take less time to compile than to put in order.
FEW_CELLS = 100
#: Workloads after which the order of the others follows what was found, and the seconds that have to be left
#: for compiling the fit that says so.
WORKLOADS_BEFORE_REFIT, REFIT_RESERVE_S = 12, 30.0
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
    grid: Grid,
    prior: LatencyPrior,
    facts: Facts,
    rng: np.random.Generator,
    deadline: Deadline,
    progress: Progress,
) -> Plan:
    """Compile and warm up, and choose the cells that there is time to measure.

    The order is that of `preparation_order`, by the prior at first, then by a fit of the first workloads'
    times. A resumed campaign that has a whole round keeps its cells, so that all have as many rounds.
    """
    fixed = bool(log.complete_rounds())
    wanted = log.cells or cells
    left_out = {"not in the campaign that was resumed": [str(cell) for cell in cells if cell not in set(wanted)]}
    signals = Signals(wanted, models=models)
    share = 1.0 if fixed else WARM_UP_SHARE
    warm_deadline = Deadline(time.perf_counter() + share * deadline.left_s())
    at_least = 0 if fixed else MIN_CELLS
    is_ordered = not fixed and len(wanted) > FEW_CELLS
    order = wanted
    if is_ordered:
        with progress.phase("choosing workloads"):
            order = preparation_order(wanted, grid, design_posterior(prior, facts), rng)
    blocks = list(by_workload(order).values())
    first = [cell for block in blocks[:WORKLOADS_BEFORE_REFIT] for cell in block]
    keep_programs(len(order))  # each is visited in every round
    with progress.phase("compiling", total=len(order)) as advance:
        warm = warm_up(first, signals, warm_deadline, advance, at_least)
        others = order[len(first) :]
        is_refit = bool(others) and not fixed and warm_deadline.left_s() > REFIT_RESERVE_S
        if is_refit and (found := posterior_so_far(wanted, warm, prior, facts)):
            start = design_posterior(prior, facts, found)
            others = preparation_order(others, grid, start, rng, timed=list(warm))
        warm |= warm_up(others, signals, warm_deadline, advance, at_least - len(warm))
    if fixed:
        return Plan(wanted, left_out, signals, is_ready=len(warm) == len(wanted))
    budget_ns = 1e9 * max(deadline.left_s(), 0.0)
    too_slow = []
    while len(warm) > MIN_CELLS and MIN_ROUNDS * sum(warm.values()) > budget_ns:
        slowest = max(warm, key=lambda cell: warm[cell])
        del warm[slowest]
        too_slow.append(slowest)
    chosen = [cell for cell in wanted if cell in warm]
    left_out["no time to compile"] = [str(cell) for cell in wanted if cell not in warm and cell not in too_slow]
    left_out["too slow for the budget"] = [str(cell) for cell in too_slow]
    return Plan(chosen, left_out, signals, is_ready=True)


def posterior_so_far(
    cells: Sequence[Cell], times_ns: Mapping[Cell, int], prior: LatencyPrior, facts: Facts
) -> LatencyPosterior | None:
    """Return what the times of some of the cells say, or None if they are too few.

    The others have weight 0, so that the fit of a whole campaign finds the program compiled.
    """
    is_timed = np.array([cell in times_ns for cell in cells])
    if is_timed.sum() < MIN_TIMINGS:
        return None
    timings = timings_of(cells, np.array([float(times_ns.get(cell, 1)) for cell in cells]))
    return fit_posterior(timings, prior, is_timed.astype(float), facts).posterior


def memory_limit_bytes() -> int:
    """Return the bytes that the arrays of one run may take on host and device."""
    limits = []
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if stats := jax.devices()[0].memory_stats():
        limits.append(stats.get("bytes_limit", 2**34) - stats.get("bytes_in_use", 0))
    return int(MEMORY_SHARE * min(limits, default=2**33))
