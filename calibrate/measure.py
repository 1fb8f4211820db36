"""How a campaign times cells: the order of the cells, their programs, and rounds of visits.

Every program is compiled and run before its first timing. Each round visits every cell in a new random order, so that a
slow minute of the machine affects all cells alike. Every cell has the same number of rounds, and every call is kept.
"""

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax.clock import call_ns, quiet_collector, visit_ns
from rlxjax.fit import (
    Cell,
    Estimate,
    Facts,
    LatencyPrior,
    Suite,
    estimate,
    next_measurements,
    prior_posterior,
)

from .interrupts import heeded
from .machine import CanaryWatch
from .samples import SampleLog, Visit
from .terminal import Deadline

#: The number of seen works, which the fit uses, for each held-out work.
SEEN_PER_HELD_OUT = 2
#: What the choice of works assumes: the spread of runs, and the standard deviation of the correction.
DESIGN_SPREAD, DESIGN_CORRECTION_SD = 0.05, 0.025
#: After one work for each unknown coefficient, this many more works are chosen: those that best predict all times.
FOR_TIMES = 32
#: Assumptions for a cell: the seconds before its first timing, including compilation, and its number of runs.
READY_S, EXPECTED_RUNS = 0.2, 20
#: The most seconds until a cell's second run has ended: the limit before the deadline, and the limit after it.
CELL_LIMIT_S, GRACE_S = 30.0, 3.0
#: The most numbers of a result that are compared between two runs, and the relative tolerance of the comparison.
COMPARED, TOLERANCE = 4096, 1e-3
#: The largest share of the free memory that one run may use.
MEMORY_SHARE = 0.25


def by_work(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Return a dict from each work to its cells; the works are in the order of their first cells."""
    works: dict[str, list[Cell]] = {}
    for cell in cells:
        works.setdefault(cell.work, []).append(cell)
    return works


def measuring_order(
    suite: Suite, cells: Sequence[Cell], prior: LatencyPrior, facts: Facts, rng: np.random.Generator
) -> list[Cell]:
    """Return the cells in the order of compilation. The cells of a work stay together, and the shown works come first.

    Then comes a work of each group, then the works that tell most for their time, then the rest in random order. Every
    third work is held out; the held-out works come from the groups in turn.
    """
    works = by_work(cells)
    first = [name for name in suite.shown if name in works]
    others = [name for name in works if name not in first]
    others = [others[place] for place in rng.permutation(len(others))]
    seen = [name for name in others if not works[name][0].held_out]
    groups: dict[str, list[str]] = {}
    for name in others:
        if works[name][0].held_out:
            groups.setdefault(works[name][0].group, []).append(name)
    held_out = [name for names in itertools.zip_longest(*groups.values()) for name in names if name is not None]
    if seen:
        blocks = [works[name] for name in (*seen, *held_out, *first)]
        expected = _expected(suite, blocks, prior, facts)
        n_unknowns = max(0, len(jax.tree.leaves(prior.median)) - len(first))
        seen = [seen[place] for place in _design(expected, len(seen), len(first), n_unknowns)]
    of_groups = {works[name][0].group: name for name in reversed(seen)}
    seen = list(dict.fromkeys([name for name in seen if name in of_groups.values()] + seen))
    order = list(first)
    while seen or held_out:
        order += [*seen[:SEEN_PER_HELD_OUT], *held_out[:1]]
        seen, held_out = seen[SEEN_PER_HELD_OUT:], held_out[1:]
    return [cell for name in order for cell in works[name]]


def _expected(suite: Suite, blocks: Sequence[Sequence[Cell]], prior: LatencyPrior, facts: Facts) -> Estimate:
    """Return the prior's estimates, `[works, cells]`. Works with fewer cells are padded, with an infinite spread."""
    posterior = prior_posterior(suite.model, prior, DESIGN_SPREAD, DESIGN_CORRECTION_SD, facts)
    width = max(map(len, blocks))
    cells = [cell for block in blocks for cell in (*block, *[block[0]] * (width - len(block)))]
    flat = estimate(posterior, suite.runs(cells))
    found = jax.tree.map(lambda column: np.asarray(column).reshape(len(blocks), width, *column.shape[1:]), flat)
    is_there = np.arange(width) < np.array([len(block) for block in blocks])[:, None]
    return found._replace(spread=np.where(is_there, found.spread, np.inf))


def _design(blocks: Estimate, count: int, n_first: int, n_unknowns: int) -> list[int]:
    """Order `count` blocks by how much each helps to predict all blocks. The last `n_first` are timed already."""

    def part(which: Sequence[int]) -> Estimate:
        return Estimate(*(column[np.asarray(which)] for column in blocks))

    seconds = np.where(np.isfinite(blocks.spread), READY_S + EXPECTED_RUNS * blocks.time_ns / 1e9, 0.0).sum(1)
    taken, chosen = list(range(len(seconds) - n_first, len(seconds))), []
    for n, targets in ((n_unknowns, None), (FOR_TIMES, blocks)):
        left = [place for place in range(count) if place not in chosen]
        if (n := min(n, len(left))) > 0:
            timed = part([*taken, *chosen]) if taken or chosen else None
            found = next_measurements(part(left), n, seconds=seconds[left], targets=targets, timed=timed)
            chosen += [left[place] for place in found.order]
    return chosen + [place for place in range(count) if place not in chosen]


class Ready(NamedTuple):
    """Compiled cells by name: their programs, and the ns of their second runs. Also why each other cell is left out."""

    programs: dict[str, Callable[[], Any]]
    times_ns: dict[str, int]
    refused: dict[str, str]


def made_ready(
    suite: Suite,
    cells: Sequence[Cell],
    deadline: Deadline,
    advance: Callable[[], None] = lambda: None,
    *,
    at_least: int = 0,
    n_threads: int = 1,
) -> Ready:
    """Compile and run cells in their order until the deadline, but at least `at_least` cells.

    A program is refused if it raises, gives another result the second time, or takes longer than `CELL_LIMIT_S`. After
    the deadline, the limit is `GRACE_S`. A program that exceeds the limit continues in the background.
    """
    waiting, running, tried, done = list(reversed(cells)), {}, {}, queue.SimpleQueue()
    while True:
        left_s, made = deadline.left_s(), sum(isinstance(one, tuple) for one in tried.values())
        while waiting and len(running) < max(n_threads, 1) and not deadline.interrupted:
            if left_s <= 0 and made + len(running) >= at_least:
                break
            cell = waiting.pop()
            running[cell.name] = time.perf_counter()
            run = lambda cell=cell: done.put((cell.name, _tried(suite, cell)))  # noqa: E731
            threading.Thread(target=run, daemon=True).start()
        if not running:
            break
        try:
            name, result = done.get(timeout=0.05)
        except queue.Empty:
            pass
        else:
            if running.pop(name, None) is not None:  # None: refused already
                tried[name] = result
                advance()
        limit_s = GRACE_S if left_s < -GRACE_S and made >= at_least else CELL_LIMIT_S
        for name in [name for name, begun_s in running.items() if time.perf_counter() - begun_s > limit_s]:
            del running[name]
            tried[name] = f"two runs took longer than {limit_s:g} seconds, and the program still runs in the background"
    good = {cell.name: tried[cell.name] for cell in cells if isinstance(tried.get(cell.name), tuple)}
    programs, times_ns = ({name: one[place] for name, one in good.items()} for place in (0, 1))
    return Ready(programs, times_ns, {name: why for name, why in tried.items() if isinstance(why, str)})


def _tried(suite: Suite, cell: Cell) -> tuple[Callable[[], Any], int] | str:
    """Return the program of a cell and the time of its second run in ns, or the reason why the program is refused."""
    try:
        program = suite.program(cell)
        first = jax.block_until_ready(program())
        taken = call_ns(program)
        if not _alike(first, jax.block_until_ready(program())):
            return "its results differ between two runs"
    except Exception as error:  # noqa: BLE001
        return _raised(error)
    return program, taken


def _raised(error: Exception) -> str:
    return f"it raises {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _alike(first: Any, second: Any) -> bool:
    """Return whether two results agree; only a sample of their numbers is compared."""

    def few(result: Any) -> np.ndarray:
        if jnp.issubdtype(getattr(result, "dtype", float), jax.dtypes.prng_key):
            result = jax.random.key_data(result)
        flat = np.asarray(result).ravel()
        flat = flat[:: max(1, flat.size // COMPARED)]
        return flat if flat.dtype.kind in "biufc" else flat.astype(np.float64)

    ones, others = jax.tree.leaves(first), jax.tree.leaves(second)
    return len(ones) == len(others) and all(
        np.shape(one) == np.shape(other) and np.allclose(few(one), few(other), TOLERANCE, TOLERANCE, equal_nan=True)
        for one, other in zip(ones, others, strict=True)
    )


def measure_rounds(
    log: SampleLog,
    programs: dict[str, Callable[[], Any]],
    deadline: Deadline,
    rng: np.random.Generator,
    advance: Callable[[], None],
    is_enough: Callable[[], bool] = lambda: False,
) -> dict[str, str]:
    """Time rounds until `is_enough` or the deadline, unfinished rounds first. Return why cells are left out."""
    refused: dict[str, str] = {}
    canary, has_round = CanaryWatch(log), bool(log.complete_rounds())
    unfinished = [place for place, visits in enumerate(log.rounds) if visits and log.cells_left(place)]
    with heeded(deadline), quiet_collector():
        while deadline.left_s() > 0 or not has_round:
            round_ = unfinished.pop(0) if unfinished else len(log.rounds)
            for name in rng.permutation(np.array(log.cells_left(round_), object)):
                if deadline.interrupted or (has_round and deadline.left_s() <= 0):
                    return refused
                canary.look()
                try:
                    times_ns = visit_ns(programs[name])
                except Exception as error:  # noqa: BLE001
                    refused[name] = _raised(error)
                    log.keep_cells([cell for cell in log.cells if cell.name != name])
                else:
                    log.keep(Visit(round=round_, cell=name, times_ns=times_ns))
            has_round = True
            advance()
            if not log.cells or is_enough():
                break
    return refused


def memory_limit_bytes() -> int:
    limits = []
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if stats := jax.devices()[0].memory_stats():
        limits.append(stats.get("bytes_limit", 2**34) - stats.get("bytes_in_use", 0))
    return int(MEMORY_SHARE * min(limits, default=2**33))
