"""Judge predictions as decisions: error, regret, ordering, probabilities, intervals.

Tables are `[workloads, alternatives]`. The alternatives are the strategies with the same result, in the order of
`SAME_RESULT`. An alternative without timings is NaN.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks._campaigns import SAME_RESULT
from rlxjax.fit import COVERED_SDS, Cell, Estimate, LatencyPosterior, compare, own_correlation

#: Pairs closer than this share, or than this multiple of the noise, have no right order.
LEAST_DISTANCE, NOISES = 0.03, 2.0


class Workloads(NamedTuple):
    """The cells of each workload's alternatives.

    Attributes:
        sizes: batch, n_fft and k, `[workloads, 3]`.
        place: the index of the cell, `[workloads, alternatives]`; -1 without a cell.
    """

    sizes: np.ndarray
    place: np.ndarray

    def table(self, values: np.ndarray) -> np.ndarray:
        """Return values of the cells as a table, `[workloads, alternatives]`."""
        return np.where(self.place >= 0, np.asarray(values, float)[self.place], np.nan)


def workloads_of(cells: Sequence[Cell]) -> Workloads:
    """Return the workloads with at least two alternatives among the cells."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, cell in enumerate(cells):
        if cell.group in SAME_RESULT:
            sizes = tuple(int(cell.inputs[name]) for name in ("batch", "n_fft", "k"))
            found.setdefault(sizes, [-1] * len(SAME_RESULT))[SAME_RESULT.index(cell.group)] = number
    kept = {sizes: row for sizes, row in found.items() if sum(number >= 0 for number in row) > 1}
    place = np.array(list(kept.values()), int).reshape(len(kept), len(SAME_RESULT))
    return Workloads(np.array(list(kept), int).reshape(len(kept), 3), place)


def errors_by_strategy(cells: Sequence[Cell], predicted_ns: np.ndarray, measured_ns: np.ndarray) -> dict[str, float]:
    """Return the mean absolute relative error of each strategy among the cells."""
    errors = np.abs(predicted_ns / measured_ns - 1.0)
    names = np.array([cell.group for cell in cells])
    return {str(name): float(errors[names == name].mean()) for name in dict.fromkeys(names)}


def regrets(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Return the regret: the pick's time over the fastest time, minus 1, `[workloads]`."""
    picked = np.take_along_axis(measured, np.nanargmin(predicted, axis=1)[:, None], axis=1)[:, 0]
    return picked / np.nanmin(measured, axis=1) - 1.0


class Pairs(NamedTuple):
    """Two alternatives of one workload each, `[pairs]`: every timed pair once.

    Attributes:
        workload: its row.
        one: the first alternative's column.
        other: the second's.
    """

    workload: np.ndarray
    one: np.ndarray
    other: np.ndarray

    def of(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return both alternatives' values from a table, `[pairs]` each."""
        return table[self.workload, self.one], table[self.workload, self.other]


def pairs_of(measured: np.ndarray) -> Pairs:
    """Return the pairs of alternatives that were both timed."""
    found = [
        (row, one, other)
        for row, times in enumerate(measured)
        for one, other in itertools.combinations(np.flatnonzero(np.isfinite(times)), 2)
    ]
    return Pairs(*np.array(found, int).reshape(-1, 3).T)


def ordering(predicted: np.ndarray, measured: np.ndarray, noise: np.ndarray) -> tuple[float, int]:
    """Return the share of pairs that predictions order as the timings do, and the number of pairs.

    Only pairs that differ by more than 3 % and by more than twice the larger noise count.

    Args:
        predicted: `[workloads, alternatives]`.
        measured: the same shape.
        noise: relative noise, the same shape.
    """
    pairs = pairs_of(measured)
    one, other = pairs.of(measured)
    reach = np.maximum(LEAST_DISTANCE, NOISES * np.maximum(*pairs.of(noise)))
    apart = np.maximum(one, other) / np.minimum(one, other) - 1.0 > reach
    said_one, said_other = pairs.of(predicted)
    right = (said_one < said_other) == (one < other)
    # A tie orders nothing.
    right &= said_one != said_other
    return float(right[apart].mean()) if apart.any() else float("nan"), int(apart.sum())


def faster_probability(
    posterior: LatencyPosterior, cells: Sequence[Cell], found: Estimate, workloads: Workloads, pairs: Pairs
) -> np.ndarray:
    """Return the probability that the first alternative of each pair is faster, `[pairs]`.

    Args:
        posterior: the machine's posterior.
        cells: the predicted cells.
        found: the estimates of the cells.
        workloads: the workloads of the same cells.
        pairs: the pairs of their alternatives.
    """
    place = workloads.place
    one, other = place[pairs.workload, pairs.one], place[pairs.workload, pairs.other]
    chosen = [Estimate(*(jnp.asarray(part)[which] for part in found)) for which in (one, other)]
    variant = np.array([posterior.model.variants.index(cell.variant) for cell in cells])
    return np.asarray(compare(*chosen, own_correlation(posterior, variant[one], variant[other])).probability)


def brier_score(probability: np.ndarray, happened: np.ndarray) -> float:
    """Return the mean square of probability minus outcome: 0 at best, 1/4 for a constant probability of 1/2."""
    return float(np.mean((probability - happened) ** 2))


def coverage(found: Estimate, measured_ns: np.ndarray) -> float:
    """Return the share of timings in the 90 % interval, `[cells]` each."""
    off = np.abs(np.log(measured_ns / np.asarray(found.time_ns)))
    return float(np.mean(off <= COVERED_SDS * np.asarray(found.log_sd())))


def log_loss(probability: np.ndarray, happened: np.ndarray, least: float = 1e-4) -> float:
    """Return the mean of `-log` of the true outcome's probability, which counts as at least `least`."""
    held = np.clip(probability, least, 1.0 - least)
    return float(-np.mean(np.log(np.where(happened, held, 1.0 - held))))
