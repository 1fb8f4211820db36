"""What latency models of code share, whose inputs are counts of what a program does."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlxjax.fit import LatencyModel, Runs


class CountsModel(LatencyModel):
    """A latency model whose runs are programs: they come as code, which is counted, and not as sizes."""

    def extents(self, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return what a domain bounds: each count by itself, since a program has few kinds of work."""
        return list(values.items())

    def folds(self, runs: Runs) -> Sequence[np.ndarray]:
        """Return a column that leaves every program out by itself, `[n]`."""
        return [np.arange(len(next(iter(runs.inputs.values()))))]

    def grid(self) -> Runs:
        """Return no runs, `[0]`."""
        return self.runs([])

    def runs(self, rows: Sequence[Mapping[str, float]]) -> Runs:
        """Return the runs of programs by their counts, `[n]`."""
        columns = {name: np.array([row[name] for row in rows], float) for name in self.inputs}
        return Runs(self, np.zeros(len(rows), np.int32), columns)
