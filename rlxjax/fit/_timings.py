"""Timings for a fit, read from files, data frames or records, and checked."""

import dataclasses
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jaxtyping import Array, Float

from rlxjax._checks import real_numbers, unmasked
from rlxjax._values import by_value
from rlxjax.extras import require

from ._latency_model import LatencyModel, Runs, check_takes_sizes, check_timed_size, variant_codes

#: The number of nanoseconds in the unit of a time column, by the ending of the column's name.
UNITS_NS = {"_ns": 1.0, "_us": 1e3, "_ms": 1e6, "_s": 1e9}
#: The largest number of column names that an error message lists.
SHOWN_NAMES = 12
#: The smallest number of timings that a fit accepts by default, and the smallest number to which timings are padded.
MIN_TIMINGS, LEAST_FILLED = 8, 128


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Timings:
    """Timed runs of a model. Each column has the shape `[n]`, or `[devices, n]` for many devices.

    Attributes:
        runs: the timed runs.
        time_ns: the time of each run in ns. For a repeated run, this may be a quartile of its times.
    """

    runs: Runs
    time_ns: np.ndarray | Float[Array, "*devices n"]

    @classmethod
    def checked(cls, model: LatencyModel, *, variant, time_ns, **inputs) -> "Timings":
        """Build timings from columns, which are lists or arrays of the same length.

        Args:
            model: the model of the timed runs.
            variant: each run's variant, `[n]`, as a name or an index into `model.variants`; or one variant for all.
            time_ns: the time of each run in ns, `[n]`.
            **inputs: each input of the model, `[n]`. Inputs with a default are optional.

        Raises:
            ValueError: columns differ in length, a variant or an input is unknown, a size is not allowed, or a time is
                not positive and finite. The message names the column and the row; rows are counted from 0.

        Examples:
            >>> from rlxjax.models import FFT
            >>> Timings.checked(FFT, variant="fft", batch=[8, 64], n_fft=[256, 256], time_ns=[1e5, 2e5]).time_ns.shape
            (2,)
        """
        if unknown := [name for name in inputs if name not in model.inputs]:
            raise ValueError(f"{model.name}: expected the inputs {', '.join(model.inputs)}; got {unknown[0]!r}")
        time_ns = unmasked(time_ns, "time_ns")
        variant = np.broadcast_to(variant, np.shape(time_ns)) if np.ndim(variant) == 0 else variant
        columns = {"variant": variant, "time_ns": time_ns, **inputs}
        table = _table_of_frame(columns, "timings")
        return cls(*runs_and_times(model, table, "variant", "time_ns"))

    @classmethod
    def of(
        cls,
        model: LatencyModel,
        source: "str | os.PathLike[str] | Iterable[Mapping[str, Any]] | Any",
        *,
        variant: str = "variant",
        time_ns: str = "time_ns",
    ) -> "Timings":
        r"""Read timings from a file, a data frame or records. Each row of the source is a timing.

        The column of an input has the input's name. If an input has a default, its column may be missing. Columns with
        other names are ignored.

        Args:
            model: the model of the timed runs.
            source: the path of a Parquet file (.parquet, .pq) or of a UTF-8 CSV file with a header; a pandas or polars
                DataFrame; a dictionary from column names to lists; or a list of mappings, one per row.
            variant: the name of the column of variants (names or indices). A model with a single variant needs none.
            time_ns: the name of the column of times. Times are in ns unless this name ends in _us, _ms or _s. If the
                default column, time_ns, is missing, the column time_us, time_ms or time_s is read.

        Raises:
            ValueError: a file is missing, empty or neither CSV nor Parquet; a column is missing; columns differ in
                length; there is no row; a cell is invalid. The message names the column and the line (or row, from 0).
            ImportError: the source is a Parquet file, and pyarrow is not installed.

        Examples:
            >>> import pathlib, tempfile
            >>> from rlxjax.models import FFT
            >>> frame = {"batch": [8, 64], "n_fft": [256, 256], "time_us": [100.0, 200.0], "note": ["a", "b"]}
            >>> Timings.of(FFT, frame).time_ns.tolist()
            [100000.0, 200000.0]
            >>> path = pathlib.Path(tempfile.mkdtemp()) / "fft.csv"
            >>> _ = path.write_text("batch,n_fft,time_ms\n8,256,0.1\n64,256,0.2\n")
            >>> Timings.of(FFT, path).time_ns.tolist()
            [100000.0, 200000.0]
        """
        return cls(*runs_and_times(model, _table_of(source), variant, time_ns))

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write a Parquet file with a row for each timing. The columns are `variant` (names), the inputs and `time_ns`.

        Args:
            path: the path of the file. The file is written completely or not at all.

        Raises:
            ValueError: the timings are of several devices, or the path is a folder.
            OSError: the file cannot be written.
            ImportError: pyarrow is not installed.

        Examples:
            >>> import pathlib, tempfile
            >>> from rlxjax.models import FFT
            >>> path = pathlib.Path(tempfile.mkdtemp()) / "fft.parquet"
            >>> Timings.checked(FFT, variant="fft", batch=[8], n_fft=[256], time_ns=[1e5]).to_parquet(path)
            >>> import pyarrow.parquet as pq
            >>> pq.read_table(path).column_names
            ['variant', 'batch', 'n_fft', 'time_ns']
        """
        from rlxjax._files import whole_file  # loaded when first used

        require("pyarrow", "scale")
        import pyarrow as pa
        import pyarrow.parquet as pq

        if len(shape := np.shape(self.time_ns)) != 1:
            raise ValueError(f"timings: expected columns of shape [n], a single device, got time_ns of shape {shape}")
        names = np.array(self.model.variants)[np.broadcast_to(np.asarray(self.runs.variant), shape)]
        own = self.runs.of_shape(shape).inputs
        columns = {name: own[name] for name in self.model.inputs}
        table = pa.table({"variant": names.tolist(), **columns, "time_ns": np.asarray(self.time_ns)})
        with whole_file(path) as temporary:
            pq.write_table(table, temporary)

    @property
    def model(self) -> LatencyModel:
        """The model of the timed runs."""
        return self.runs.model


def stack_timings(timings: Sequence[Timings]) -> tuple[Timings, Float[np.ndarray, "devices n"]]:
    """Return the timings of several devices together, with columns `[devices, n]`, and a weight for each timing.

    If a device has fewer than `n` timings, copies of its last timing follow. A copy has weight 0, a timing weight 1.

    Args:
        timings: the timings of each device d, `[n_d]`. All timings must be of the same model.

    Raises:
        ValueError: there is no device, or a device has no timings.

    Examples:
        >>> from rlxjax.models import FFT
        >>> two = Timings.checked(FFT, variant="fft", batch=[8, 64], n_fft=[256, 256], time_ns=[1e5, 4e5])
        >>> one = jax.tree.map(lambda column: column[:1], two)
        >>> both, weights = stack_timings([two, one])
        >>> both.time_ns.shape, weights.tolist()
        ((2, 2), [[1.0, 1.0], [1.0, 0.0]])
    """
    counts = np.array([len(own.time_ns) for own in timings])
    if not len(counts):
        raise ValueError("timings: expected at least one device, got none")
    if not counts.all():
        raise ValueError(f"timings[{np.argmin(counts)}]: expected at least one timing, got none")
    rows, last = np.arange(counts.max()), counts[:, None] - 1
    pairs = zip(np.minimum(rows, last), timings, strict=True)
    filled = [jax.tree.map(operator.itemgetter(own), one) for own, one in pairs]

    def stack(*columns: np.ndarray) -> np.ndarray:
        most = max(np.shape(column)[-1] for column in columns)  # the number of kernels may differ
        pads = ([*[(0, 0)] * (np.ndim(column) - 1), (0, most - np.shape(column)[-1])] for column in columns)
        return np.stack([np.pad(column, pad) for column, pad in zip(columns, pads, strict=True)])

    return jax.tree.map(stack, *filled), (rows <= last).astype(float)


def filled_up(
    timings: Timings, weights: Float[np.ndarray, "*devices n"]
) -> tuple[Timings, Float[np.ndarray, "*devices m"]]:
    """Return timings and weights padded to length `m`. Places of weight 0 get the first timing of positive weight."""
    # Only four padded sizes lie between two powers of two, so another number of timings seldom compiles a fit again.
    n = weights.shape[-1]
    step = 1 << max(0, (n - 1).bit_length() - 3)
    most = max(LEAST_FILLED, -(-n // step) * step)
    filled = np.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, most - n)])
    rows = np.where(filled > 0, np.arange(most), np.argmax(filled > 0, -1)[..., None])

    def fill(column: Any) -> np.ndarray:
        column = np.asarray(column)
        return np.take_along_axis(column, np.expand_dims(rows, (*range(rows.ndim, column.ndim),)), rows.ndim - 1)

    return jax.tree.map(fill, timings), filled


def check_enough(timings: Timings, weights: np.ndarray, min_timings: int) -> None:
    """Check that timings, `[n]` or `[devices, n]`, and their weights suffice for a fit.

    Raises:
        ValueError: a column's shape differs from that of `time_ns`; a weight is negative or not finite; a counted time
            (of positive weight) is invalid; a device has fewer than `min_timings` counted times, or a single workload.
    """
    times_ns = real_numbers(timings.time_ns, "time_ns")
    shape = times_ns.shape
    if weights.shape != shape:
        raise ValueError(f"weights: expected shape {shape}, got {weights.shape}")
    if not np.all(np.isfinite(weights) & (weights >= 0)):
        raise ValueError("weights: expected finite numbers of at least 0")
    sizes = {"variant": timings.runs.variant, **timings.runs.inputs, **timings.runs.kernels}
    for name, column in sizes.items():
        own = np.shape(column)[: -1 if name in timings.runs.kernels else None]
        if own != shape:
            raise ValueError(f"{name}: expected shape {shape}, the same as time_ns, got {own}")
    counted = weights > 0
    for place in np.argwhere(counted & ~(np.isfinite(times_ns) & (times_ns > 0))).tolist():
        got = times_ns[tuple(place)]
        raise ValueError(f"time_ns[{', '.join(map(str, place))}]: expected a positive finite number, got {got}")
    by_device = np.atleast_2d(counted)
    columns = [np.reshape(own, (*by_device.shape, *np.shape(own)[len(shape) :])) for own in sizes.values()]
    for device, rows in enumerate(by_device):
        where = f" for device {device}" if len(shape) > 1 else ""
        if (count := int(rows.sum())) < min_timings:
            raise ValueError(f"timings: expected at least {min_timings} timings, got {count}{where}")
        # Workloads are different if any size differs.
        works = [column[device][rows] for column in columns]
        if min_timings > 1 and not any(np.any(work != work[:1]) for work in works):
            vary = " and ".join(list(sizes)[1:3])
            raise ValueError(f"timings: expected several workloads, got a single workload{where}; vary {vary}")


class Table(NamedTuple):
    """A table of timings. `cells` maps a column's name to its cells. `place` maps a row to text that says where."""

    names: Sequence[str]
    cells: Callable[[str], Sequence[Any] | np.ndarray]
    source: str
    place: Callable[[int], str]


def _table_of(source: Any) -> Table:
    from rlxjax._files import read_csv_file, read_parquet_file  # loaded when first used

    if isinstance(source, (str, os.PathLike)):
        name = os.fspath(source)
        if name.lower().endswith((".parquet", ".pq")):
            return _table_of_frame(read_parquet_file(source), name)
        return _table_of_lines(read_csv_file(source), name)
    if isinstance(source, Mapping) or _names_of(source) is not None or not isinstance(source, Iterable):
        return _table_of_frame(source)
    rows = list(source)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"records, record {number}: expected a mapping from column to cell, got {_kind(row)}")
    names = list(dict.fromkeys(name for row in rows for name in row))
    return Table(names, lambda name: [row.get(name) for row in rows], "records", lambda row: f"records, record {row}")


def _table_of_frame(frame: Any, source: str = "frame") -> Table:
    """Return the `Table` of a pandas, polars or pyarrow frame, of NumPy records, or of a dictionary of columns."""
    names = list(frame) if isinstance(frame, Mapping) else _names_of(frame)
    if names is None:
        raise ValueError(f"{source}: expected named columns (a DataFrame or a dictionary), got {_kind(frame)}")

    def cells(name: str) -> np.ndarray:
        if list(names).count(name) > 1:
            raise ValueError(f"{source}: expected columns of different names, got {name!r} twice")
        given = unmasked(frame[name], f"{source}: {name}")
        try:
            column = np.asarray(given)
        except ValueError:  # the lists differ in length
            column = np.asarray(given, object)
        if column.ndim != 1:
            raise ValueError(f"{source}: {name}: expected a column with one cell per row, got shape {column.shape}")
        return column

    return Table(list(names), cells, source, lambda row: f"{source}, row {row}")


def _names_of(frame: Any) -> Any:
    dtype_names = getattr(getattr(frame, "dtype", None), "names", None)
    return getattr(frame, "column_names", getattr(frame, "columns", dtype_names))


def _table_of_lines(lines: list[tuple[int, list[str]]], source: str) -> Table:
    if not lines:
        raise ValueError(f"{source}: expected a header and a line for each timing, got an empty file")
    (_, names), *rows = lines
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"{source}: expected columns of different names, got {twice[0]!r} twice")
    for line, row in rows:
        if len(row) != len(names):
            raise ValueError(f"{source}, line {line}: expected {len(names)} cells, one per name, got {len(row)}")
    columns = dict(zip(names, zip(*(row for _, row in rows), strict=True), strict=False)) if rows else {}
    return Table(names, lambda name: columns.get(name, ()), source, lambda row: f"{source}, line {rows[row][0]}")


def runs_and_times(model: LatencyModel, table: Table, variant: str, time_ns: str) -> tuple[Runs, np.ndarray]:
    """Check every cell of a table; return the runs of the table's rows and their times in ns, `[n]`."""
    if isinstance(model, type) or not hasattr(model, "variants"):
        raise ValueError(f"model: expected an instance of a LatencyModel, got {_kind(model)}")

    check_takes_sizes(model)

    def lacks(name: str, what: str) -> NoReturn:
        shown = [str(other) for other in table.names[:SHOWN_NAMES]] + ["..."] * (len(table.names) > SHOWN_NAMES)
        raise ValueError(f"{table.source}: expected a column {name!r}{what}, got {', '.join(shown) or 'none'}")

    def at(row: int, check: Callable[..., Any], *arguments: Any) -> Any:
        """Return `check(*arguments)`. If that raises a ValueError, put the row's place in front of the message."""
        try:
            return check(*arguments)
        except ValueError as reason:
            raise ValueError(f"{table.place(row)}: {reason}") from None

    others = [f"time{unit}" for unit in list(UNITS_NS)[1:]] if time_ns == "time_ns" else []
    found = [name for name in ([time_ns] if time_ns in table.names else others) if name in table.names]
    if len(found) > 1:
        raise ValueError(f"{table.source}: expected a single column of times, got {' and '.join(found)}")
    name = found[0] if found else lacks(time_ns, f" (or {', '.join(others)})" if others else "")
    unit_ns = next((unit_ns for unit, unit_ns in UNITS_NS.items() if name.endswith(unit)), 1.0)
    times_ns = unit_ns * _numbers(table, name, positive=True)
    if not len(times_ns):
        raise ValueError(f"{table.source}: expected a row for each timing, got none")
    if variant not in table.names and len(model.variants) > 1:
        lacks(variant, f", one of {', '.join(model.variants)}")
    codes, known = [0] * len(times_ns), {}
    if variant in table.names:
        codes = []
        for row, cell in enumerate(table.cells(variant)):
            is_place = isinstance(cell, (int, np.integer)) and not isinstance(cell, bool)
            key = int(cell) if is_place else str(cell).strip()
            if key not in known:
                known[key] = at(row, variant_codes, model, key, variant)
            codes.append(known[key])
    inputs: dict[str, Any] = {}
    for key, entry in model.inputs.items():
        if key in table.names:
            inputs[key] = _numbers(table, key)
            try:
                check_timed_size(inputs[key], key, entry)
            except ValueError:
                for row, value in enumerate(inputs[key]):
                    at(row, check_timed_size, value, key, entry)
        elif entry.default is None:
            lacks(key, f", a number of {entry.unit}")
        else:
            inputs[key] = np.full(len(times_ns), float(entry.default))
    lengths = {name: len(times_ns), variant: len(codes), **{key: len(column) for key, column in inputs.items()}}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise ValueError(f"{table.source}: expected columns of the same length, got {said}")
    return Runs(model, np.array(codes, np.int32), inputs), times_ns


def _numbers(table: Table, name: str, positive: bool = False) -> np.ndarray:
    def number(cell: Any) -> float:
        try:  # the cells of a CSV file are texts
            return float(cell if isinstance(cell, str) else real_numbers(cell, name))
        except (TypeError, ValueError, OverflowError):
            return np.nan

    cells = table.cells(name)
    is_numbers = isinstance(cells, np.ndarray) and cells.dtype.kind in "iuf"
    numbers = np.array(cells if is_numbers else [number(cell) for cell in cells], np.float64)
    wrong = np.flatnonzero(~(np.isfinite(numbers) & (numbers > 0 if positive else True)))
    if wrong.size:
        cell = cells[wrong[0]]
        text = "" if cell is None else str(cell)
        got = "nothing" if not text else repr(text) if isinstance(cell, str) else text
        expected = "a positive finite number" if positive else "a finite number"
        raise ValueError(f"{table.place(wrong[0])}: {name}: expected {expected}, got {got}")
    return numbers


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
