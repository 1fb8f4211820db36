"""The order in which workloads are measured: those that are shown, those that run models, then the best."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import jax
import numpy as np

from rlxjax import LatencyEstimate, LatencyPosterior, LatencyPrior, estimate, next_measurements, prior_posterior
from rlxjax.fit import Facts
from rlxjax.models import WELCH

from .samples import timings_of
from .workloads import SHOWN_BATCHES, SHOWN_K, SHOWN_N_FFT, WITHOUT_MODEL, Cell, Grid, runs_model

#: Workloads that the fit sees for each held-out one.
SEEN_PER_HELD_OUT = 2
#: Spread of runs and size of the correction that the design supposes, whatever a fit of few timings says.
DESIGN_SPREAD, DESIGN_CORRECTION_SD = 0.05, 0.025
#: Workloads for the sake of the unknowns; so many after them are for that of the times of all workloads.
FOR_UNKNOWNS, FOR_TIMES = 10, 32
#: Seconds that a cell of each strategy takes before its first timing, compiling included, and the runs expected of it.
COMPILE_S: Mapping[str, float] = MappingProxyType(
    {"ultra": 0.01, "fast": 0.01, "fused-maxima": 0.5, "fused-top_k": 0.13, "block": 0.06}
)
EXPECTED_RUNS = 20

Workload = tuple[int, int, int]


def by_workload(cells: Sequence[Cell]) -> dict[Workload, list[Cell]]:
    """Return the cells of each workload (batch, n_fft, k), in the order in which the first of them comes."""
    workloads: dict[Workload, list[Cell]] = {}
    for cell in cells:
        workloads.setdefault((cell.batch, cell.n_fft, cell.k), []).append(cell)
    return workloads


def estimates(posterior: LatencyPosterior, cells: Sequence[Cell]) -> LatencyEstimate:
    """Return what a posterior says of each cell, `[cells]`."""
    return jax.tree.map(np.asarray, estimate(posterior, timings_of(cells, np.ones(len(cells))).runs))


def block_estimates(posterior: LatencyPosterior, blocks: Sequence[Collection[Cell]]) -> LatencyEstimate:
    """Return what a posterior says of workloads, `[workloads, strategies]`.

    A cell that is not in its workload's block has an infinite spread: it is not timed.
    """
    rows = [[Cell(strategy, *next(iter(block))[1:]) for strategy in WITHOUT_MODEL] for block in blocks]
    flat = estimates(posterior, [cell for row in rows for cell in row])
    is_timed = [[cell in block for cell in row] for row, block in zip(rows, blocks, strict=True)]
    whole = jax.tree.map(lambda column: column.reshape(len(rows), len(WITHOUT_MODEL), *column.shape[1:]), flat)
    return whole._replace(spread=np.where(is_timed, whole.spread, np.inf))


def design_posterior(prior: LatencyPrior, facts: Facts, found: LatencyPosterior | None = None) -> LatencyPosterior:
    """Return what the design starts from: the prior's uncertainty, at the values found so far if any were."""
    posterior = prior_posterior(WELCH, prior, DESIGN_SPREAD, DESIGN_CORRECTION_SD, facts)
    if found is None:
        return posterior
    return dataclasses.replace(posterior, coefficients=found.coefficients, weights=found.weights)


def preparation_order(
    cells: Sequence[Cell],
    grid: Grid,
    posterior: LatencyPosterior,
    rng: np.random.Generator,
    timed: Sequence[Cell] = (),
) -> list[Cell]:
    """Return the cells in the order in which they are compiled, in case time runs out.

    All strategies of a workload come together, those of the table that is printed first, then those that
    run a model. Of the others, what the fit sees comes in the order in which it says most for its time
    (`next_measurements`), of the unknowns first and then of the times of all workloads, and beyond these in
    random order; each third place is a held-out workload's, in random order.

    Args:
        cells: to be put in order.
        grid: says which workloads are held out.
        posterior: `design_posterior`.
        rng: chooses where the design does not.
        timed: cells that come before these.
    """
    workloads = by_workload(cells)
    first = [key for key in workloads if key[0] in SHOWN_BATCHES and key[1:] == (SHOWN_N_FFT, SHOWN_K)]
    first += [key for key in workloads if key not in first and any(map(runs_model, workloads[key]))]
    others = [key for key in workloads if key not in first]
    others = [others[i] for i in rng.permutation(len(others))]
    seen = [key for key in others if grid.place(*key[:2]) == "fit"]
    held_out = [key for key in others if grid.place(*key[:2]) != "fit"]
    if seen:
        before = [*(workloads[key] for key in first), *by_workload(timed).values()]
        out = [workloads[key] for key in held_out]
        seen = [seen[i] for i in _design(posterior, [workloads[key] for key in seen], before, out)]
    order = list(first)
    while seen or held_out:
        order += [*seen[:SEEN_PER_HELD_OUT], *held_out[:1]]
        seen, held_out = seen[SEEN_PER_HELD_OUT:], held_out[1:]
    return [cell for key in order for cell in workloads[key]]


def _design(
    posterior: LatencyPosterior,
    blocks: Sequence[Collection[Cell]],
    before: Sequence[Collection[Cell]],
    held_out: Sequence[Collection[Cell]],
) -> list[int]:
    """Return an order of blocks: those first that say most for their seconds once those before are timed."""
    count = len(blocks)
    whole = block_estimates(posterior, [*blocks, *before, *held_out])
    seconds = seconds_of(_part(whole, range(count)))
    taken = list(range(count, count + len(before)))
    chosen: list[int] = []
    for n, targets in ((max(0, min(count, FOR_UNKNOWNS - len(before))), None), (FOR_TIMES, whole)):
        left = [i for i in range(count) if i not in chosen]
        if n_left := min(n, len(left)):
            timed = _part(whole, [*taken, *chosen]) if taken or chosen else None
            candidates = _part(whole, left)
            design = next_measurements(candidates, n_left, seconds=seconds[left], targets=targets, timed=timed)
            chosen += [left[i] for i in design.order]
    return chosen + [i for i in range(count) if i not in chosen]


def seconds_of(blocks: LatencyEstimate) -> np.ndarray:
    """Return how long workloads take to measure, `[workloads]`: compiling and running what is timed of each."""
    compile_s = np.array([COMPILE_S[strategy] for strategy in WITHOUT_MODEL])
    return np.where(np.isfinite(blocks.spread), compile_s + EXPECTED_RUNS * blocks.time_ns / 1e9, 0.0).sum(1)


def _part(blocks: LatencyEstimate, which: Sequence[int]) -> LatencyEstimate:
    return LatencyEstimate(*(column[np.asarray(which)] for column in blocks))
