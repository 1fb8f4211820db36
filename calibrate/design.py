"""The order in which works are made ready and measured, in case time runs out."""

import itertools
from collections.abc import Sequence

import jax
import numpy as np

from rlxjax.fit import (
    Cell,
    Facts,
    LatencyEstimate,
    LatencyPrior,
    Suite,
    cell_runs,
    estimate,
    next_measurements,
    prior_posterior,
)

#: Works that the fit sees for each held-out one.
SEEN_PER_HELD_OUT = 2
#: Spread of runs and size of the correction that the design supposes.
DESIGN_SPREAD, DESIGN_CORRECTION_SD = 0.05, 0.025
#: Works that are chosen for the sake of the times of all, after one for each unknown.
FOR_TIMES = 32
#: Seconds that a cell takes before its first timing, compiling included, and the runs expected of it.
READY_S, EXPECTED_RUNS = 0.2, 20


def by_work(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Return the cells of each work, in the order in which the first of them comes."""
    works: dict[str, list[Cell]] = {}
    for cell in cells:
        works.setdefault(cell.work, []).append(cell)
    return works


def measuring_order(
    suite: Suite, cells: Sequence[Cell], prior: LatencyPrior, facts: Facts, rng: np.random.Generator
) -> list[Cell]:
    """Return the cells in the order in which to make them ready.

    All cells of a work come together, those that are shown first. Of the others that the fit sees, one of each group
    comes first, then those that say most for their time (`next_measurements`), of the unknowns and then of the times
    of all works, then the rest in random order; each third place is a held-out work's, the groups taking turns.
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
    held_out = [name for turn in itertools.zip_longest(*groups.values()) for name in turn if name is not None]
    if seen:
        blocks = [works[name] for name in (*seen, *held_out, *first)]
        n_unknowns = max(0, len(jax.tree.leaves(prior.median)) - len(first))
        seen = [
            seen[place] for place in _design(_blocks(suite, blocks, prior, facts), len(seen), len(first), n_unknowns)
        ]
    of_groups = {works[name][0].group: name for name in reversed(seen)}
    seen = list(dict.fromkeys([name for name in seen if name in of_groups.values()] + seen))
    order = list(first)
    while seen or held_out:
        order += [*seen[:SEEN_PER_HELD_OUT], *held_out[:1]]
        seen, held_out = seen[SEEN_PER_HELD_OUT:], held_out[1:]
    return [cell for name in order for cell in works[name]]


def _blocks(suite: Suite, blocks: Sequence[Sequence[Cell]], prior: LatencyPrior, facts: Facts) -> LatencyEstimate:
    """Return what the prior says of works, `[works, cells]`; what is beyond a work's cells has an infinite spread."""
    posterior = prior_posterior(suite.model, prior, DESIGN_SPREAD, DESIGN_CORRECTION_SD, facts)
    width = max(map(len, blocks))
    rows = [[*block, *[block[0]] * (width - len(block))] for block in blocks]
    flat = estimate(posterior, cell_runs(suite.model, [cell for row in rows for cell in row]))
    found = jax.tree.map(lambda column: np.asarray(column).reshape(len(rows), width, *column.shape[1:]), flat)
    is_there = np.arange(width) < np.array([len(block) for block in blocks])[:, None]
    return found._replace(spread=np.where(is_there, found.spread, np.inf))


def _design(blocks: LatencyEstimate, count: int, n_first: int, n_unknowns: int) -> list[int]:
    """Return an order of the first blocks, so many, once the last ones are timed; all are targets."""
    seconds = np.where(np.isfinite(blocks.spread), READY_S + EXPECTED_RUNS * blocks.time_ns / 1e9, 0.0).sum(1)
    taken, chosen = list(range(len(seconds) - n_first, len(seconds))), []
    for n, targets in ((n_unknowns, None), (FOR_TIMES, blocks)):
        left = [place for place in range(count) if place not in chosen]
        if (n := min(n, len(left))) > 0:
            timed = _part(blocks, [*taken, *chosen]) if taken or chosen else None
            found = next_measurements(_part(blocks, left), n, seconds=seconds[left], targets=targets, timed=timed)
            chosen += [left[place] for place in found.order]
    return chosen + [place for place in range(count) if place not in chosen]


def _part(blocks: LatencyEstimate, which: Sequence[int]) -> LatencyEstimate:
    return LatencyEstimate(*(column[np.asarray(which)] for column in blocks))
