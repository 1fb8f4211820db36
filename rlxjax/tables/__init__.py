"""Add the answers of a gate or of a calibrated model to a table, as columns.

Any engine for tables (Daft, Polars, DuckDB, Ray Data) can call `evaluate` for each of its batches.
"""

from ._evaluate import evaluate as evaluate

__all__ = ["evaluate"]
