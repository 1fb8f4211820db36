"""Timings from elsewhere: columns by name, of a data frame, of records, of a CSV or a Parquet file.

Each refusal is one sentence: the file and line or the row, the column, what was expected and what came.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ._model import LatencyModel, Runs, check_timed_size, variant_codes

#: Nanoseconds of the units that the name of a column of times ends in.
UNITS_NS = {"_ns": 1.0, "_us": 1e3, "_ms": 1e6, "_s": 1e9}
#: Names of columns that a message shows at most.
SHOWN_NAMES = 12


class Table(NamedTuple):
    """The names of columns, the cells of one as they came, `[n]`, the source, and the place of a row from 0."""

    names: Sequence[str]
    cells: Callable[[str], Sequence[Any] | np.ndarray]
    source: str
    place: Callable[[int], str]


def columns_of_frame(frame: Any, source: str = "frame") -> Table:
    """Return the columns of whatever has some by name: pandas, polars, pyarrow, NumPy's records, a dictionary."""
    if isinstance(frame, Mapping):
        names = list(frame)
    else:
        dtype_names = getattr(getattr(frame, "dtype", None), "names", None)
        names = getattr(frame, "column_names", getattr(frame, "columns", dtype_names))
    if names is None:
        raise ValueError(f"{source}: expected columns by name, as a DataFrame or a dictionary has, got {_kind(frame)}")

    def cells(name: str) -> np.ndarray:
        if list(names).count(name) > 1:
            raise ValueError(f"{source}: expected columns of different names, got {name!r} twice")
        column = np.asarray(frame[name])
        if column.ndim != 1:
            raise ValueError(f"{source}: {name}: expected one column, got shape {column.shape}")
        return column

    return Table(list(names), cells, source, lambda row: f"{source}, row {row}")


def columns_of_records(records: Iterable[Mapping[str, Any]]) -> Table:
    """Return the columns of mappings, one a timing."""
    rows = list(records)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"records, record {number}: expected cells by column, got {_kind(row)}")
    names = list(dict.fromkeys(name for row in rows for name in row))
    return Table(names, lambda name: [row.get(name) for row in rows], "records", lambda row: f"records, record {row}")


def columns_of_csv(path: str | os.PathLike[str]) -> Table:
    """Return the columns of a CSV file with a header, cells as texts; blank lines are skipped."""
    from rlxjax._files import read_csv_file  # loaded when first used

    source, lines = os.fspath(path), read_csv_file(path)
    if not lines:
        raise ValueError(f"{source}: expected a header and a line for each timing, got an empty file")
    (_, names), *rows = lines
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"{source}: expected columns of different names, got {twice[0]!r} twice")
    for line, row in rows:
        if len(row) != len(names):
            raise ValueError(f"{source}, line {line}: expected {len(names)} cells, as the header has, got {len(row)}")
    columns = dict(zip(names, zip(*(row for _, row in rows), strict=True), strict=False)) if rows else {}
    return Table(names, lambda name: columns.get(name, ()), source, lambda row: f"{source}, line {rows[row][0]}")


def columns_of_parquet(path: str | os.PathLike[str]) -> Table:
    """Return the columns of a Parquet file."""
    from rlxjax._files import read_parquet_file  # loaded when first used

    return columns_of_frame(read_parquet_file(path), os.fspath(path))


def runs_and_times(model: LatencyModel, table: Table, variant: str, time_ns: str) -> tuple[Runs, np.ndarray]:
    """Return the runs of a table's rows and their times in ns, `[n]`, every cell checked."""
    if isinstance(model, type) or not hasattr(model, "variants"):
        raise ValueError(f"model: expected a LatencyModel, an instance of its class, got {_kind(model)}")
    others = [f"time{unit}" for unit in list(UNITS_NS)[1:]] if time_ns == "time_ns" else []
    found = [name for name in ([time_ns] if time_ns in table.names else others) if name in table.names]
    if len(found) > 1:
        raise ValueError(f"{table.source}: expected one column of times, got {' and '.join(found)}")
    name = found[0] if found else _lacks(table, time_ns, f" (or {', '.join(others)})" if others else "")
    unit_ns = next((unit_ns for unit, unit_ns in UNITS_NS.items() if name.endswith(unit)), 1.0)
    times_ns = unit_ns * _numbers(table, name, positive=True)
    if not len(times_ns):
        raise ValueError(f"{table.source}: expected a row for each timing, got none")
    if variant in table.names:
        codes = _codes(model, table, variant)
    elif len(model.variants) == 1:
        codes = [0] * len(times_ns)
    else:
        _lacks(table, variant, f", one of {', '.join(model.variants)}")
    inputs: dict[str, np.ndarray] = {}
    for key, entry in model.inputs.items():
        if key in table.names:
            inputs[key] = _numbers(table, key)
            for row in sorted(np.unique(inputs[key], return_index=True)[1].tolist()):
                _at(table, row, check_timed_size, inputs[key][row], key, entry)
        elif entry.default is None:
            _lacks(table, key, f", a number of {entry.unit}")
        else:
            inputs[key] = np.full(len(times_ns), float(entry.default))
    lengths = {name: len(times_ns), variant: len(codes), **{key: len(column) for key, column in inputs.items()}}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise ValueError(f"{table.source}: expected columns of one length, got {said}")
    return Runs(model, np.array(codes, np.int32), inputs), times_ns


def _numbers(table: Table, name: str, positive: bool = False) -> np.ndarray:
    cells = table.cells(name)
    is_numbers = isinstance(cells, np.ndarray) and cells.dtype.kind in "iuf"
    numbers = np.array(cells if is_numbers else [_number(cell) for cell in cells], np.float64)
    wrong = np.flatnonzero(~(np.isfinite(numbers) & (numbers > 0 if positive else True)))
    if wrong.size:
        cell = cells[wrong[0]]
        text = "" if cell is None else str(cell)
        got = "nothing" if not text else repr(text) if isinstance(cell, str) else text
        expected = "a positive finite number" if positive else "a finite number"
        raise ValueError(f"{table.place(wrong[0])}: {name}: expected {expected}, got {got}")
    return numbers


def _number(cell: Any) -> float:
    if isinstance(cell, (np.timedelta64, np.datetime64)):  # which are floats of units of their own
        return np.nan
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return np.nan


def _codes(model: LatencyModel, table: Table, name: str) -> list[Any]:
    """Return the places of a column's variants; each name is looked up once."""
    codes, known = [], {}
    for row, cell in enumerate(table.cells(name)):
        code = known.get(cell) if isinstance(cell, str) else None
        if code is None:
            code = _at(table, row, _code, model, cell, name)
            if isinstance(cell, str):
                known[cell] = code
        codes.append(code)
    return codes


def _code(model: LatencyModel, cell: Any, name: str) -> Any:
    """Return the place of a variant, which is given by name or place."""
    is_place = isinstance(cell, (int, np.integer)) and not isinstance(cell, bool)
    return variant_codes(model, int(cell) if is_place else str(cell).strip(), name)


def _at(table: Table, row: int, check: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a check returns; what it refuses is said with the place of the row."""
    try:
        return check(*arguments)
    except ValueError as reason:
        raise ValueError(f"{table.place(row)}: {reason}") from None


def _lacks(table: Table, name: str, what: str) -> NoReturn:
    shown = [str(other) for other in table.names[:SHOWN_NAMES]] + ["..."] * (len(table.names) > SHOWN_NAMES)
    raise ValueError(f"{table.source}: expected a column {name!r}{what}, got {', '.join(shown) or 'none'}")


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
