"""Timed visits of cells in the order they were made, and what each cell takes by them."""

import dataclasses

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rlxjax.clock import QUARTILE

#: Steps that tell a cell's time from the machine's pace.
PACE_STEPS = 3
#: Visits in a row whose median is the pace in the middle of them, odd.
PACE_VISITS = 21


@dataclasses.dataclass(frozen=True)
class Visits:
    """Visits in the order they were made.

    Attributes:
        round: of which round each is, `[visits]`.
        cell: of which cell, from 0 to `n_cells` less 1, `[visits]`; each cell has one at least.
        time_ns: how long it took, `[visits]`, positive.
        n_cells: how many cells there are.
    """

    round: np.ndarray
    cell: np.ndarray
    time_ns: np.ndarray
    n_cells: int

    @classmethod
    def of_rounds(cls, times_ns: np.ndarray) -> "Visits":
        """Return rounds of one visit a cell, in the order of cells, from `[rounds, cells]`."""
        times_ns = np.asarray(times_ns, np.float64)
        n_rounds, n_cells = times_ns.shape
        round_, cell = np.divmod(np.arange(times_ns.size), n_cells)
        return cls(round_, cell, times_ns.ravel(), n_cells)

    def rounds(self) -> np.ndarray:
        """Return the numbers of the rounds, ascending."""
        return np.unique(self.round)

    def in_rounds(self, rounds: np.ndarray) -> "Visits":
        """Return all visits of the rounds of these numbers."""
        kept = np.isin(self.round, rounds)
        return type(self)(self.round[kept], self.cell[kept], self.time_ns[kept], self.n_cells)


def quantile_ns(visits: Visits, quantile: float = QUARTILE) -> np.ndarray:
    """Return what each cell takes in ns, float64 `[cells]`: a low quantile of its visits at one pace.

    The pace of a visit is the median, over the `PACE_VISITS` of those given around it, of how much slower
    they were than their cells' quantiles. It is taken out: which slow and quick spells of the machine a cell
    met then tells little of the cell. The times are as long, in the geometric mean over cells, as the
    quantiles of the visits as they were.
    """
    logs = np.log(visits.time_ns)
    of_cell = as_they_were = _quantiles(logs, visits, quantile)
    for _ in range(PACE_STEPS):
        of_cell = _quantiles(logs - _running_median(logs - of_cell[visits.cell]), visits, quantile)
    return np.exp(of_cell - of_cell.mean() + as_they_were.mean())


def noise_floor(visits: Visits, quantile: float = QUARTILE) -> np.ndarray:
    """Return, per cell, the relative difference of the times that two disjoint halves of the rounds give.

    Even against odd rounds, each half as many; `[cells]`. With a single round nothing can be said: NaN.
    """
    rounds = visits.rounds()
    half = len(rounds) // 2
    if half == 0:
        return np.full(visits.n_cells, np.nan)
    even, odd = (quantile_ns(visits.in_rounds(rounds[first : 2 * half : 2]), quantile) for first in (0, 1))
    return np.abs(np.log(even / odd))


def _quantiles(logs: np.ndarray, visits: Visits, quantile: float) -> np.ndarray:
    """Return a quantile over the visits of each cell, `[cells]`."""
    order = np.argsort(visits.cell, kind="stable")
    starts = np.searchsorted(visits.cell[order], np.arange(1, visits.n_cells))
    return np.array([np.quantile(one, quantile) for one in np.split(logs[order], starts)])


def _running_median(values: np.ndarray) -> np.ndarray:
    """Return the median of each value and those around it; beyond both ends it is mirrored."""
    padded = np.pad(values, PACE_VISITS // 2, mode="symmetric")
    return np.median(sliding_window_view(padded, PACE_VISITS), axis=-1)
