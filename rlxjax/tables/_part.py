"""One part: its rows are read, evaluated and written batch by batch, and its file appears whole."""

import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlxjax._files import whole_file

from ._rows import Compiled, Field, RowProgram, bad_rows
from ._source import Part, Source, digest_of_file, read_as, said, unreadable

#: How the files are compressed.
COMPRESSION = "zstd"


class Job(NamedTuple):
    """What every part of a job is done by; it travels to other processes.

    Attributes:
        program: what is evaluated.
        source: the files.
        columns: the column of each field that has one.
        carried: columns that are carried along.
        keys: the type of each column that stands in paths.
        sink: the folder of the parts.
        rejects: the folder of the rows that cannot be evaluated.
        rows_per_batch: that are held at a time.
        is_strict: whether the first such row ends the job.
    """

    program: RowProgram
    source: Source
    columns: Mapping[str, str]
    carried: tuple[str, ...]
    keys: Mapping[str, Any]
    sink: FilePath
    rejects: FilePath
    rows_per_batch: int
    is_strict: bool


class PartTimes(NamedTuple):
    """Rows of a part, those that were rejected, and the seconds that each step took."""

    rows: int = 0
    rejected: int = 0
    decode_s: float = 0.0
    evaluate_s: float = 0.0
    encode_s: float = 0.0

    def plus(self, other: "PartTimes") -> "PartTimes":
        """Return the sum of both."""
        return PartTimes(*(one + own for one, own in zip(self, other, strict=True)))  # pyright: ignore[reportArgumentType]


def evaluate_part(
    job: Job, part: Part, compiled: Compiled, advance: Callable[[int], None] = lambda rows: None
) -> PartTimes:
    """Read, evaluate and write one part; `advance` is called with the rows of each batch, and may end it by raising."""
    try:
        return _evaluate_part(job, part, compiled, advance)
    except pa.ArrowException as reason:
        raise ValueError(f"{part.file}: pyarrow cannot take or write its rows ({said(reason)})") from None


def _evaluate_part(job: Job, part: Part, compiled: Compiled, advance: Callable[[int], None]) -> PartTimes:
    times, clock = PartTimes(), time.perf_counter
    rejects, first_row = [], part.first_row
    schema = _schema(job)
    with whole_file(job.sink / f"{part.name}.parquet") as path:
        names = [*job.carried, *(name for name, own in job.program.outputs.items() if isinstance(own, tuple))]
        options: Any = {"compression": COMPRESSION, "use_dictionary": names}  # and not of floats, which differ
        with pq.ParquetWriter(path, schema, **options) as writer:
            batches = _batches(job, part)
            while True:
                begun = clock()
                batch = next(batches, None)
                if batch is None:
                    break
                decoded = clock()
                rows, bad = _evaluated(job, part, batch, first_row, compiled, schema)
                evaluated = clock()
                writer.write_table(rows, row_group_size=job.rows_per_batch)
                if bad is not None:
                    rejects.append(bad)
                n_bad = 0 if bad is None else bad.num_rows
                times = times.plus(
                    PartTimes(batch.num_rows, n_bad, decoded - begun, evaluated - decoded, clock() - evaluated)
                )
                first_row += batch.num_rows
                advance(batch.num_rows)
                del batch, rows  # the next ones take their memory
            begun = clock()
        if rejects:  # first, so that a part that is there has its rejects
            with whole_file(job.rejects / f"{part.name}.parquet") as beside:
                pq.write_table(pa.concat_tables(rejects), beside, compression=COMPRESSION)
    return times.plus(PartTimes(encode_s=clock() - begun))


def _schema(job: Job) -> pa.Schema:
    carried = [
        pa.field(name, job.keys[name]) if name in job.keys else job.source.schema.field(name) for name in job.carried
    ]
    kinds = {name: pa.string() if isinstance(kind, tuple) else kind for name, kind in job.program.outputs.items()}
    added = [pa.field(name, kind, nullable=False) for name, kind in kinds.items()]
    return pa.schema([*carried, *added])


def check_carried(source: Source, carried: Sequence[str], file: str) -> None:
    """Refuse a column of a type of which pyarrow cannot take or write rows: one line."""
    for field in source.schema:
        try:
            if field.name in carried:
                one = pa.Table.from_arrays([pa.nulls(1, field.type)], schema=pa.schema([field]))
                pq.write_table(one.filter(pa.array([True])).take([0]), io.BytesIO(), compression=COMPRESSION)
        except pa.ArrowException as reason:
            raise ValueError(f"{file}: {field.name}: {field.type} cannot be carried along ({said(reason)})") from None


def _batches(job: Job, part: Part) -> Iterator[pa.RecordBatch]:
    """Yield a part's rows, so many at a time, of the columns that are in the file."""
    wanted = {*job.columns.values(), *job.carried}
    schema = pa.schema([field for field in job.source.schema if field.name in wanted])
    groups = [*range(part.first_group, part.first_group + part.groups)]
    try:
        with pq.ParquetFile(part.file, pre_buffer=False, page_checksum_verification=True) as file:
            _check_same(job, part, file.metadata)
            for batch in file.iter_batches(job.rows_per_batch, groups, schema.names, use_threads=False):
                own = [read_as(batch.column(field.name), field.type) for field in schema]
                yield pa.RecordBatch.from_arrays(own, schema=schema)
            _check_same(job, part, file.metadata)
    except (pa.ArrowException, OSError) as reason:
        raise ValueError(unreadable([part.file], schema.names, reason, groups)) from None


def _check_same(job: Job, part: Part, metadata: Any) -> None:
    """Refuse a file that is not what it was when the job began."""
    if digest_of_file(part.file, metadata) != job.source.files[part.file]:
        raise ValueError(f"{part.file}: has changed since the job began; begin again with another folder to write")


def _ends(part: Part) -> np.ndarray:
    """Return how many rows of a part come before the end of each of its row groups."""
    metadata = pq.read_metadata(part.file)
    groups = range(part.first_group, part.first_group + part.groups)
    return np.cumsum([metadata.row_group(group).num_rows for group in groups])


def _evaluated(
    job: Job, part: Part, batch: pa.RecordBatch, first_row: int, compiled: Compiled, schema: pa.Schema
) -> tuple[pa.Table, pa.Table | None]:
    """Return the rows of a batch with their answers, and those that have none with the reason."""
    columns, nulls, reasons = {}, {}, {}
    for name, field in job.program.fields.items():
        columns[name], nulls[name], unknown = _column(job, part, batch, name, field)
        for row, text in unknown.items():
            reasons.setdefault(row, text)
    answers, is_answer = compiled(columns)
    if job.program.check is not None or any(own.size for own in nulls.values()) or not is_answer.all():
        reasons = bad_rows(job.program, columns, nulls, job.columns) | reasons
    for row in np.flatnonzero(~is_answer).tolist():
        reasons.setdefault(row, f"no answer: {job.program.name} gives no number for such a row")
    if reasons and job.is_strict:
        row = min(reasons)
        raise ValueError(f"{_place(part, first_row + row)}: {reasons[row]}")
    added = []
    for name, kind in job.program.outputs.items():
        own = answers[name]
        added.append(pa.array(kind).take(pa.array(own)) if isinstance(kind, tuple) else pa.array(own))
    carried = [_constant(job, part, name, batch) if name in job.keys else batch.column(name) for name in job.carried]
    table = pa.Table.from_arrays([*carried, *added], schema=schema)
    if not reasons:
        return table, None
    rows = np.array(sorted(reasons))
    keep = np.ones(batch.num_rows, bool)
    keep[rows] = False
    return table.filter(pa.array(keep)), _rejected(
        part, batch, rows, first_row, [reasons[row] for row in rows.tolist()]
    )


def _rejected(part: Part, batch: pa.RecordBatch, rows: np.ndarray, first_row: int, reasons: list[str]) -> pa.Table:
    """Return rows as they came, after the place of each and the reason."""
    places = rows + first_row
    groups = part.first_group + np.searchsorted(_ends(part), places - part.first_row, "right")
    own = pa.table({"file": [part.file] * len(rows), "row_group": groups, "row": places, "reason": reasons})
    for name, column in zip(batch.schema.names, batch.take(pa.array(rows)).columns, strict=True):
        while name in own.column_names:
            name += "_as_read"  # noqa: PLW2901
        own = own.append_column(name, column)
    return own


def _place(part: Part, row: int) -> str:
    group = part.first_group + int(np.searchsorted(_ends(part), row - part.first_row, "right"))
    return f"{part.file}, row group {group}, row {row}"


def _constant(job: Job, part: Part, name: str, batch: pa.RecordBatch) -> pa.Array:
    return pa.repeat(pa.scalar(job.source.keys[part.file][name], pa.string()).cast(job.keys[name]), batch.num_rows)


def _column(
    job: Job, part: Part, batch: pa.RecordBatch, name: str, field: Field
) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """Return one field's values as int64, float64 or codes, the rows that are null, and those of other wrong values."""
    none = np.zeros(0, np.int64)
    if name not in job.columns:
        default = field.names.index(str(field.default)) if field.names else float(field.default or 0.0)
        return np.full(batch.num_rows, default, np.int8 if field.names else np.float64), none, {}
    own = job.columns[name]
    column = _constant(job, part, own, batch) if own in job.keys else batch.column(own)
    nulls = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)) if column.null_count else none
    if field.names:
        import pyarrow.compute  # as long as JAX takes to compile: only where it is needed

        compute: Any = pyarrow.compute
        codes = compute.fill_null(compute.index_in(column.cast(pa.string()), pa.array(field.names)), -1).to_numpy()
        known = ", ".join(field.names)
        unknown = {
            row: f"{own}: expected one of {known}, got {column[row].as_py()!r}"
            for row in np.setdiff1d(np.flatnonzero(codes < 0), nulls).tolist()
        }
        return np.maximum(codes, 0).astype(np.int8), nulls, unknown
    if nulls.size and pa.types.is_integer(column.type):  # and a float is NaN
        column = column.fill_null(0)
    values = column.to_numpy(zero_copy_only=False)
    large = np.flatnonzero(values > np.iinfo(np.int64).max) if values.dtype == np.uint64 else none
    wrong = {row: f"{own}: expected at most 2**63 - 1, got {values[row]}" for row in large.tolist()}
    values = values.astype(np.int64 if values.dtype.kind in "iu" else np.float64, copy=False)
    if wrong:
        values[large] = 0
    return values, nulls, wrong
