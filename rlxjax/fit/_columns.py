"""Timings from elsewhere: columns by name, of a data frame, of records or of a CSV file.

Each refusal is one sentence: the file and line or the row, the column, what was expected and what came.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ._model import Input, LatencyModel, check_timed_size, variant_codes

#: Nanoseconds of the units that the name of a column of times ends in.
UNITS_NS = {"_ns": 1.0, "_us": 1e3, "_ms": 1e6, "_s": 1e9}
#: Names of columns that a message shows at most.
SHOWN_NAMES = 12


class Table(NamedTuple):
    """Cells by column, as they came, and where they came from.

    Attributes:
        names: of the columns.
        cells: of a column, by its name, `[n]`.
        source: the file or object.
        place: of a row, by its number from 0.
    """

    names: Sequence[str]
    cells: Callable[[str], Sequence[Any] | np.ndarray]
    source: str
    place: Callable[[int], str]


class Checked(NamedTuple):
    """Timings whose every cell was checked, `[n]` each: variants as places, times in ns, and inputs by name."""

    variant: np.ndarray
    time_ns: np.ndarray
    inputs: dict[str, np.ndarray]


def columns_of_frame(frame: Any) -> Table:
    """Return the columns of whatever has some by name: pandas, polars, pyarrow, NumPy's records, a dictionary."""
    if isinstance(frame, Mapping):
        names = list(frame)
    else:
        dtype_names = getattr(getattr(frame, "dtype", None), "names", None)
        names = getattr(frame, "column_names", getattr(frame, "columns", dtype_names))
    if names is None:
        raise ValueError(f"frame: expected columns by name, as a DataFrame or a dictionary has, got {_kind(frame)}")

    def cells(name: str) -> np.ndarray:
        column = np.asarray(frame[name])
        if column.ndim != 1:
            raise ValueError(f"frame: {name}: expected one column, got shape {column.shape}")
        return column

    return Table(list(names), cells, "frame", lambda row: f"frame, row {row}")


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
    places = {name: place for place, name in enumerate(names)}
    if len(places) < len(names):
        twice = next(name for place, name in enumerate(names) if places[name] > place)
        raise ValueError(f"{source}: expected columns of different names, got {twice!r} twice")
    for line, row in rows:
        if len(row) != len(names):
            raise ValueError(f"{source}, line {line}: expected {len(names)} cells, as the header has, got {len(row)}")

    def cells(name: str) -> list[str]:
        return [row[places[name]] for _, row in rows]

    return Table(names, cells, source, lambda row: f"{source}, line {rows[row][0]}")


def checked_columns(model: LatencyModel, columns: Table, variant: str, time_ns: str) -> Checked:
    """Return the timings that columns hold, every cell checked; columns of other names are left alone.

    Args:
        model: whose runs were timed.
        columns: of a source.
        variant: name of the column of variants; it may be missing where the model has one.
        time_ns: name of the column of times, whose end may be a unit; "time_ns" stands for the others if it is missing.
    """
    if isinstance(model, type) or not hasattr(model, "variants"):
        raise ValueError(f"model: expected a LatencyModel, an instance of its class, got {_kind(model)}")
    name, unit_ns = _column_of_times(columns, time_ns)
    times_ns = unit_ns * _numbers(columns, name, positive=True)
    if not len(times_ns):
        raise ValueError(f"{columns.source}: expected a row for each timing, got none")
    if variant in columns.names:
        codes = _codes(model, columns, variant)
    elif len(model.variants) == 1:
        codes = [0] * len(times_ns)
    else:
        _lacks(columns, variant, f", one of {', '.join(model.variants)}")
    inputs: dict[str, np.ndarray] = {}
    for key, entry in model.inputs.items():
        if key in columns.names:
            inputs[key] = _numbers(columns, key)
            _check_sizes(columns, key, inputs[key], entry)
        elif entry.default is None:
            _lacks(columns, key, f", a number of {entry.unit}")
    lengths = {name: len(times_ns), variant: len(codes), **{key: len(column) for key, column in inputs.items()}}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise ValueError(f"{columns.source}: expected columns of one length, got {said}")
    return Checked(np.array(codes, np.int32), times_ns, inputs)


def _column_of_times(columns: Table, time_ns: str) -> tuple[str, float]:
    """Return the name of the column of times, and the nanoseconds of its unit."""
    others = [f"time{unit}" for unit in list(UNITS_NS)[1:]] if time_ns == "time_ns" else []
    found = [name for name in ([time_ns] if time_ns in columns.names else others) if name in columns.names]
    if not found:
        _lacks(columns, time_ns, f" (or {', '.join(others)})" if others else "")
    if len(found) > 1:
        raise ValueError(f"{columns.source}: expected one column of times, got {' and '.join(found)}")
    return found[0], next((unit_ns for unit, unit_ns in UNITS_NS.items() if found[0].endswith(unit)), 1.0)


def _numbers(columns: Table, name: str, positive: bool = False) -> np.ndarray:
    cells = columns.cells(name)
    numbers = np.array([_number(cell) for cell in cells], np.float64)
    wrong = np.flatnonzero(~(np.isfinite(numbers) & (numbers > 0 if positive else True)))
    if wrong.size:
        cell = cells[wrong[0]]
        got = "nothing" if cell is None or str(cell) == "" else repr(cell) if isinstance(cell, str) else str(cell)
        expected = "a positive finite number" if positive else "a finite number"
        raise ValueError(f"{columns.place(wrong[0])}: {name}: expected {expected}, got {got}")
    return numbers


def _number(cell: Any) -> float:
    if isinstance(cell, (np.timedelta64, np.datetime64)):  # which are floats of units of their own
        return np.nan
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return np.nan


def _codes(model: LatencyModel, columns: Table, name: str) -> list[Any]:
    """Return the places of variants, which are given by name or place."""
    places: dict[str | int, Any] = {}
    codes = []
    for row, cell in enumerate(columns.cells(name)):
        is_place = isinstance(cell, (int, np.integer)) and not isinstance(cell, bool)
        given = int(cell) if is_place else str(cell).strip()
        if given not in places:
            places[given] = _at(columns, row, variant_codes, model, given, name)
        codes.append(places[given])
    return codes


def _check_sizes(columns: Table, name: str, sizes: np.ndarray, entry: Input) -> None:
    try:
        check_timed_size(sizes, name, entry)
    except ValueError:  # which does not know the row
        for row, size in enumerate(sizes):
            _at(columns, row, check_timed_size, size, name, entry)


def _at(columns: Table, row: int, check: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a check returns; what it refuses is said with the place of the row."""
    try:
        return check(*arguments)
    except ValueError as reason:
        raise ValueError(f"{columns.place(row)}: {reason}") from None


def _lacks(columns: Table, name: str, what: str) -> NoReturn:
    shown = [str(other) for other in columns.names[:SHOWN_NAMES]] + ["..."] * (len(columns.names) > SHOWN_NAMES)
    raise ValueError(f"{columns.source}: expected a column {name!r}{what}, got {', '.join(shown) or 'none'}")


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
