"""Run a job: check the job's manifest, and evaluate the parts that are not yet written, on threads or Ray workers."""

import contextlib
import functools
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from importlib import metadata
from pathlib import Path as FilePath
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlxjax._checks import MOST
from rlxjax._chunks import worker_count
from rlxjax._files import Sealed, digest_of, locked, read_json_file, whole_file, write_json_file
from rlxjax.fit import stacked_lists, unequal_lists, widened_lists

from ._ray import connected, on_ray, said
from ._rows import Compiled, Field, RowProgram, refused_rows
from ._source import (
    COMPRESSION,
    Part,
    Source,
    check_carried,
    columns_of,
    digest_of_file,
    ends_of_groups,
    read_as,
    source_of,
    unreadable,
)

SCHEMA_VERSION = 2
_RESUME = "go on with --resume (resume=True)"
#: An array `[5]`: the numbers of rows and of rejected rows, and the seconds of decoding, evaluating and encoding.
Totals = np.ndarray


class Manifest(Sealed):
    """A description of a job, in a file beside the output folder. Only a job with the same description is resumed."""

    schema_version: Literal[2] = SCHEMA_VERSION
    what: str  # the gate or model, in words
    program: str  # digest of everything that determines the answers
    columns: dict[str, str]  # by field
    carried: list[str]
    rows_per_batch: int
    files: dict[str, str]  # a digest of each file, by path
    package: dict[str, str]  # versions
    parts: dict[str, int]  # number of rows by the part's name


class Job(NamedTuple):
    """The data that every part of a job needs. A job can be pickled and sent to other processes."""

    program: RowProgram
    source: Source
    columns: Mapping[str, str]  # by field
    carried: tuple[str, ...]  # columns that the output keeps
    keys: Mapping[str, Any]  # the type of each column that comes from paths
    sink: FilePath
    rejects: FilePath
    manifest: FilePath  # beside the folder, which holds only rows
    rows_per_batch: int
    is_strict: bool  # the first row without an answer ends the job

    def file(self, part: Part) -> FilePath:
        return self.sink / f"{part.name}.parquet"

    def rejected(self, part: Part) -> FilePath:
        return self.rejects / f"{part.name}.parquet"


def job_of(
    program: RowProgram, source: Any, sink: FilePath, columns: Mapping[str, str] | None, rows: int, is_strict: bool
) -> tuple[Job, list[Part]]:
    """Make all checks that need only the footers of the files. Return the job and its parts, in order."""
    rejects, manifest = (sink.with_name(f"{sink.name}.{end}") for end in ("rejected", "manifest.json"))
    for folder in (sink, rejects):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder}: expected a folder or a free name, got a file")
    files, parts = source_of(source, (sink, rejects, manifest))
    own, carried, keys = columns_of(files, program.fields, columns, [*program.outputs], program.keeps_fields)
    check_carried(files, carried)
    return Job(program, files, own, tuple(carried), keys, sink, rejects, manifest, rows, is_strict), parts


def run_job(
    job: Job,
    parts: Sequence[Part],
    resume: bool,
    advance: Callable[[int, int], None],
    engine: str = "local",
    address: str | None = None,
) -> tuple[Totals, int]:
    """Evaluate the parts that are not yet written. Return the totals, and the number of parts that existed already."""
    cluster = connected(address) if engine == "ray" else contextlib.nullcontext()
    lock, total = threading.Lock(), job.source.rows
    with locked(job.sink / "part"), contextlib.ExitStack() as end, cluster:
        end.callback(_remove_leftovers, job)
        _remove_leftovers(job)
        _begin(job, parts, resume)
        rejected = {part.name: _rejects_of(job, part) for part in parts}
        missing = [part for part in parts if rejected[part.name] is None]
        done = total - sum(part.rows for part in missing)

        def say(rows: int) -> None:
            nonlocal done
            with lock:
                done += rows
                advance(done, total)

        say(0)
        totals = sum((_on_ray if engine == "ray" else _on_threads)(job, missing, say), np.zeros(5))
    totals[:2] = total, totals[1] + sum(filter(None, rejected.values()))
    return totals, len(parts) - len(missing)


def _begin(job: Job, parts: Sequence[Part], resume: bool) -> None:
    """Write the manifest of a new job. If a manifest exists, check that the job is the same and `resume` is True."""
    sink = job.sink
    manifest = Manifest(
        what=job.program.name,
        program=digest_of({"name": job.program.name, **job.program.identity}),
        columns=dict(job.columns),
        carried=list(job.carried),
        rows_per_batch=job.rows_per_batch,
        files={os.path.abspath(path): digest for path, digest in job.source.files.items()},
        package={name: metadata.version(name) for name in ("rlxjax", "jax", "jaxlib")},
        parts={part.name: part.rows for part in parts},
    )
    if not job.manifest.exists():
        for folder in (sink, job.rejects):
            if folder.exists() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
                raise ValueError(f"{folder}: expected a new or empty folder, got a folder with other files")
        write_json_file(manifest, job.manifest)
        return
    known = read_json_file(
        job.manifest, Manifest, SCHEMA_VERSION, ValueError, "give another folder", "the manifest of an evaluation"
    )
    names = {"what": "the gate or model", "program": "the gate or model", "files": "the input"}
    for name in Manifest.model_fields:
        if getattr(known, name) != getattr(manifest, name):
            hint, ours = "", manifest.files
            if name == "files":
                other = next(path for path in known.files | ours if known.files.get(path) != ours.get(path))
                hint = f" ({other}: size, footer or modification time; `cp -p` and `rsync -t` keep the time)"
            differs = names.get(name, name.replace("_", " "))
            raise ValueError(f"{sink}: holds another job: {differs} differs; give another folder{hint}")
    if not resume:
        done = sum(job.file(part).exists() for part in parts)
        other = f"{_RESUME}, or give another folder"
        raise ValueError(f"{sink}: holds {done} of the {len(parts)} parts of this job; {other}")


def _remove_leftovers(job: Job) -> None:
    for folder in (job.sink, job.rejects) if job.manifest.exists() else ():
        for left in folder.glob(".*.tmp"):
            left.unlink(missing_ok=True)


def _rejects_of(job: Job, part: Part) -> int | None:
    """Return the number of rejected rows in a part, or None if the part is missing or incomplete."""
    try:
        rejected = part.rows - pq.read_metadata(job.file(part)).num_rows
        is_whole = not rejected or pq.read_metadata(job.rejected(part)).num_rows == rejected
    except (pa.ArrowException, OSError):
        return None
    return rejected if is_whole else None


def _on_threads(job: Job, parts: Sequence[Part], say: Callable[[int], None]) -> Iterator[Totals]:
    """Evaluate parts on threads, one more than there are processors. Yield totals. An error ends all threads."""
    compiled, ended = Compiled(job.program), threading.Event()

    def advance(rows: int) -> None:
        say(rows)
        if ended.is_set():
            raise InterruptedError

    with ThreadPoolExecutor(worker_count() + 1, "rlxjax") as pool:
        running = [pool.submit(_evaluate_part, job, part, compiled, advance) for part in parts]
        try:
            for one in wait(running, return_when=FIRST_EXCEPTION).done:
                one.result()
            yield from (one.result() for one in running)
        except BaseException:
            ended.set()
            pool.shutdown(cancel_futures=True)
            raise


def _on_ray(job: Job, parts: Sequence[Part], say: Callable[[int], None]) -> Iterator[Totals]:
    gone = []

    def lost(part: Part, why: str) -> Totals:
        last = part.first_group + part.groups - 1
        gone.append(f"{part.file}, row groups {part.first_group} to {last} ({part.name}): {why}")
        return np.zeros(5)

    for own in on_ray(functools.partial(_part_worker, job), parts, lost=lost):
        say(int(own[0]))
        yield own
    if gone:
        raise OSError(f"{'; '.join(gone)}; all other parts are written; {_RESUME}")


def _part_worker(job: Job) -> Callable[[Part], Totals]:
    """Return the function that evaluates parts in a Ray worker. The worker's machine needs the input and output."""
    compiled = Compiled(job.program)

    def work(part: Part) -> Totals:
        for path in (part.file, job.manifest):
            if not os.path.exists(path):
                needs = "all machines of the cluster need the input and the output"
                raise ValueError(f"{path}: not found on {socket.gethostname()}; {needs}")
        return _evaluate_part(job, part, compiled, lambda rows: None)

    return work


def _evaluate_part(job: Job, part: Part, compiled: Compiled, advance: Callable[[int], None]) -> Totals:
    """Read, evaluate and write a part. `advance(rows)` is called after each batch, and may end the work by raising."""
    totals, clock, rejects, first_row = np.zeros(5), time.perf_counter, [], part.first_row
    carried = [(n, job.keys[n]) if n in job.keys else job.source.schema.field(n) for n in job.carried]
    kinds = {name: pa.string() if isinstance(kind, tuple) else kind for name, kind in job.program.outputs.items()}
    schema = pa.schema([*carried, *(pa.field(name, kind, nullable=False) for name, kind in kinds.items())])
    names = [*job.carried, *(name for name, own in job.program.outputs.items() if isinstance(own, tuple))]
    options: Any = {"compression": COMPRESSION, "use_dictionary": names}  # a dictionary saves nothing for floats
    try:
        with whole_file(job.file(part)) as path:
            begun = clock()
            with pq.ParquetWriter(path, schema, **options) as writer:
                for batch in _batches(job, part):
                    decoded = clock()
                    rows, bad = _evaluated(job, part, batch, first_row, compiled, schema)
                    evaluated = clock()
                    writer.write_table(rows, row_group_size=job.rows_per_batch)
                    rejects += [] if bad is None else [bad]
                    first_row += batch.num_rows
                    n_bad = 0 if bad is None else bad.num_rows
                    totals += batch.num_rows, n_bad, decoded - begun, evaluated - decoded, clock() - evaluated
                    advance(batch.num_rows)
                    del batch, rows  # frees memory for the next batch
                    begun = clock()
            if rejects:  # written first, so that a part never appears without its rejected rows
                with whole_file(job.rejected(part)) as beside:
                    pq.write_table(pa.concat_tables(rejects), beside, compression=COMPRESSION)
        totals[4] += clock() - begun
    except pa.ArrowException as reason:
        raise ValueError(f"{part.file}: pyarrow cannot write its rows ({said(reason)})") from None
    return totals


def _batches(job: Job, part: Part) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a part in batches. A batch has the job's columns, except the columns that come from paths."""
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
    if digest_of_file(part.file, metadata) != job.source.files[part.file]:
        raise ValueError(f"{part.file}: the file changed after the job began; start again with another output folder")


def _evaluated(
    job: Job, part: Part, batch: pa.RecordBatch, first_row: int, compiled: Compiled, schema: pa.Schema
) -> tuple[pa.Table, pa.Table | None]:
    """Return two tables: the answered rows of a batch, with the answers; the rejected rows, with places and reasons."""
    columns, reasons, check = {}, {}, job.program.check
    for name, field in job.program.fields.items():
        columns[name], found = _column(job, part, batch, name, field)
        reasons = found | reasons
    if lists := [name for name, field in job.program.fields.items() if field.is_list]:
        most = max(columns[name].shape[1] for name in lists)
        columns |= {name: widened_lists(columns[name], most) for name in lists}
        given = {name: _lengths(batch.column(job.columns[name])) for name in lists if name in job.columns}
        reasons = {row: said for (row,), said in (unequal_lists(given) if given else {}).items()} | reasons
    answers, is_answer = compiled(columns)
    reasons = (refused_rows(check, columns) if check is not None else {}) | reasons
    for row in np.flatnonzero(~is_answer).tolist():
        reasons.setdefault(row, f"no answer: the result for this row is not finite ({job.program.name})")
    added = []
    for name, kind in job.program.outputs.items():
        own = pa.array(answers[name])
        added.append(pa.array(kind).take(own) if isinstance(kind, tuple) else own)
    carried = [_given(job, part, name, batch) for name in job.carried]
    table = pa.Table.from_arrays([*carried, *added], schema=schema)
    if not reasons:
        return table, None
    rows = np.array(sorted(reasons), int)
    places = rows + first_row
    groups = part.first_group + np.searchsorted(ends_of_groups(part), places - part.first_row, "right")
    if job.is_strict:
        raise ValueError(f"{part.file}, row group {groups[0]}, row {places[0]}: {reasons[int(rows[0])]}")
    texts = [reasons[row] for row in rows.tolist()]
    rejected = pa.table({"file": [part.file] * len(rows), "row_group": groups, "row": places, "reason": texts})
    for name, column in zip(batch.schema.names, batch.take(pa.array(rows)).columns, strict=True):
        while name in rejected.column_names:
            name += "_as_read"  # noqa: PLW2901
        rejected = rejected.append_column(name, column)
    keep = np.ones(batch.num_rows, bool)
    keep[rows] = False
    return table.filter(pa.array(keep)), rejected


def _given(job: Job, part: Part, name: str, batch: pa.RecordBatch) -> pa.Array:
    if name not in job.keys:
        return batch.column(name)
    return pa.repeat(pa.scalar(job.source.keys[part.file][name], pa.string()).cast(job.keys[name]), batch.num_rows)


def _column(job: Job, part: Part, batch: pa.RecordBatch, name: str, field: Field) -> tuple[np.ndarray, dict[int, str]]:
    """Return the values of a field, as int64, float64 or codes of names, and a dict from rejected row to reason."""
    if name not in job.columns:
        default = field.names.index(str(field.default)) if field.names else float(field.default or 0.0)
        shape = (batch.num_rows, 1) if field.is_list else batch.num_rows
        return np.full(shape, default, np.int8 if field.names else np.float64), {}
    own = job.columns[name]
    column = _given(job, part, own, batch)
    if field.names:
        import pyarrow.compute  # imported only here, because the import is slow

        compute: Any = pyarrow.compute
        codes = compute.fill_null(compute.index_in(column.cast(pa.string()), pa.array(field.names)), -1)
        values = codes.to_numpy().astype(np.int8)
        is_wrong = values < 0
    else:
        numbers = column.flatten() if field.is_list else column  # without the null lists
        is_whole = pa.types.is_integer(numbers.type)
        values = (numbers.fill_null(0) if is_whole and numbers.null_count else numbers).to_numpy(zero_copy_only=False)
        values = values.astype(np.int64 if is_whole else np.float64, copy=False)  # larger integers become negative
        with np.errstate(invalid="ignore"):
            is_wrong = ~(values >= (math.ceil(field.least) if is_whole else field.least))
            is_wrong |= False if is_whole else values > MOST
            is_wrong |= values % field.step != 0 if field.step else False
        if field.is_list:
            is_wrong &= values != 0
        if numbers.null_count:
            is_wrong |= numbers.is_null().to_numpy(zero_copy_only=False)
        if field.is_list:
            values, is_wrong = (stacked_lists(own, _lengths(column)) for own in (values, is_wrong))
            is_wrong[:, 0] |= column.is_null().to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(is_wrong.any(-1) if field.is_list else is_wrong)
    if rows.size:
        values = values.copy()
        values[rows] = 0 if field.names else max(field.least, field.step, 1.0)
    wrong = {row: column[row].as_py() for row in rows.tolist()}
    if field.is_list:
        wrong = {row: given and given[int(is_wrong[row].argmax())] for row, given in wrong.items()}
    return values, {row: f"{own}: expected {_wrong(value, field)}" for row, value in wrong.items()}


def _lengths(lists: pa.ListArray) -> np.ndarray:
    """Return the number of entries in each list of a column. A null has 0 entries."""
    return lists.value_lengths().fill_null(0).to_numpy()


def _wrong(value: Any, field: Field) -> str:
    if value is None:
        return f"a {field.what}, got null"
    if field.names:
        return f"one of {', '.join(field.names)}, got {value!r}"
    if isinstance(value, int) and value > np.iinfo(np.int64).max:
        return f"at most 2**63 - 1, got {value}"
    bound = f"at least {field.least:g}{f', a multiple of {field.step}' if field.step else ''}"
    return f"a {field.what} of {'at most 2**64' if value > MOST else bound}, got {value:g}"
