"""Evaluate a gate or a calibrated model for every row of Parquet files that may be larger than memory.

`evaluate` reads the files, writes the answers, and returns an `Evaluation`, a summary. `fleet_of` returns a `Fleet`,
which reads the timings of a few of many devices at a time. `on_ray` runs independent work items on a Ray cluster.
"""

from ._evaluate import ROWS_PER_BATCH as ROWS_PER_BATCH
from ._evaluate import Evaluation as Evaluation
from ._evaluate import evaluate as evaluate
from ._fleet import Fleet as Fleet
from ._fleet import fleet_of as fleet_of
from ._ray import connected as connected
from ._ray import on_ray as on_ray
from ._rows import GATE_COLUMNS as GATE_COLUMNS
from ._rows import MODEL_COLUMNS as MODEL_COLUMNS

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
