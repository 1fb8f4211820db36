"""A job: its parts, those of them that are missing, and the processors that share them."""

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from importlib import metadata
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from rlxjax._chunks import worker_count
from rlxjax._files import locked

from ._manifest import begin, manifest_of, manifest_path
from ._part import Job, PartTimes, check_carried, evaluate_part
from ._ray import connected, on_ray
from ._rows import Compiled, RowProgram
from ._source import Part, columns_of, source_of

#: Called with the rows that are done and those that there are.
Advance = Callable[[int, int], None]


class Done(NamedTuple):
    """What a job did: rows and rejects of all parts, parts, those that were there already, times of the others."""

    rows: int
    rejected: int
    rejects: FilePath
    parts: int
    resumed: int
    times: PartTimes


def run_job(
    job: Job, parts: Sequence[Part], resume: bool, advance: Advance, engine: str = "local", address: str | None = None
) -> Done:
    """Evaluate the parts that are missing; arguments and errors as of `evaluate`."""
    sink = job.sink
    cluster = connected(address) if engine == "ray" else contextlib.nullcontext()
    with locked(sink / "part"), _without_leftovers(job), cluster:
        begin(manifest_of(job, parts, _package()), job, resume)
        rejected = {part.name: _rejected(job, part) for part in parts}
        missing = [part for part in parts if rejected[part.name] is None]
        done_rows = job.source.rows - sum(part.rows for part in missing)
        say = _counting(done_rows, job.source.rows, advance)
        times = (_on_ray if engine == "ray" else _on_threads)(job, missing, say)
    of_all = times.rejected + sum(filter(None, rejected.values()))
    return Done(job.source.rows, of_all, job.rejects, len(parts), len(parts) - len(missing), times)


def job_of(
    program: RowProgram, source: Any, sink: FilePath, columns: Mapping[str, str] | None, rows: int, is_strict: bool
) -> tuple[Job, list[Part]]:
    """Return a job and its parts, in their order, everything checked that footers say."""
    rejects = sink.with_name(f"{sink.name}.rejected")
    for folder in (sink, rejects):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder}: expected a folder, or none, got a file")
    files, parts = source_of(source, (sink, rejects, manifest_path(sink)))
    first = next(iter(files.files))
    own, carried, keys = columns_of(files, program.fields, columns, [*program.outputs], first)
    check_carried(files, carried, first)
    return Job(program, files, own, tuple(carried), keys, sink, rejects, rows, is_strict), parts


def _package() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("rlxjax", "jax", "jaxlib")}


def _counting(done: int, total: int, advance: Advance) -> Callable[[int], None]:
    """Return what counts rows as they are done, whatever thread says so."""
    lock = threading.Lock()

    def count(rows: int) -> None:
        nonlocal done
        with lock:
            done += rows
            advance(done, total)

    count(0)
    return count


def _on_threads(job: Job, parts: Sequence[Part], say: Callable[[int], None]) -> PartTimes:
    """Evaluate parts side by side; what one raises ends all of them.

    They are one more than processors, which so have work while a part goes to the disk.
    """
    compiled, ended = Compiled(job.program), threading.Event()

    def advance(rows: int) -> None:
        say(rows)
        if ended.is_set():
            raise InterruptedError

    with ThreadPoolExecutor(worker_count() + 1, "rlxjax") as pool:
        running = [pool.submit(evaluate_part, job, part, compiled, advance) for part in parts]
        try:
            done, _ = wait(running, return_when=FIRST_EXCEPTION)
            for one in done:
                one.result()
            return _sum(one.result() for one in running)
        except BaseException:
            ended.set()
            pool.shutdown(cancel_futures=True)
            raise


def _on_ray(job: Job, parts: Sequence[Part], say: Callable[[int], None]) -> PartTimes:
    """Evaluate parts on the actors of the cluster that this process is connected to."""
    total, gone = PartTimes(), []

    def lost(part: Part, why: str) -> PartTimes:
        last = part.first_group + part.groups - 1
        gone.append(f"{part.file}, row groups {part.first_group} to {last} ({part.name}): {why}")
        return PartTimes()

    for own in on_ray(functools.partial(_part_worker, job), parts, lost=lost):
        say(own.rows)
        total = total.plus(own)
    if gone:
        raise OSError(f"{'; '.join(gone)}; all other parts are there: go on with --resume (resume=True)")
    return total


def _part_worker(job: Job) -> Callable[[Part], PartTimes]:
    """Return what evaluates parts in an actor, on whatever machine: the files have to be there."""
    compiled = Compiled(job.program)

    def work(part: Part) -> PartTimes:
        for path in (part.file, manifest_path(job.sink)):
            if not os.path.exists(path):
                raise ValueError(
                    f"{path}: not there on {socket.gethostname()}; all machines have to see the input and the output"
                )
        return evaluate_part(job, part, compiled)

    return work


@contextlib.contextmanager
def _without_leftovers(job: Job) -> Iterator[None]:
    """Remove what killed processes of this folder's job have left half written, at the begin and at the end."""

    def remove() -> None:
        for folder in (job.sink, job.rejects) if manifest_path(job.sink).exists() else ():
            for left in folder.glob(".*.tmp"):
                left.unlink(missing_ok=True)

    remove()
    try:
        yield
    finally:
        remove()


def _sum(times: Iterable[PartTimes]) -> PartTimes:
    total = PartTimes()
    for own in times:
        total = total.plus(own)
    return total


def _rejected(job: Job, part: Part) -> int | None:
    """Return how many rows a part has rejected; None of one that is not there, or lacks rows or rejects."""
    try:
        rejected = part.rows - pq.read_metadata(job.sink / f"{part.name}.parquet").num_rows
        is_whole = not rejected or pq.read_metadata(job.rejects / f"{part.name}.parquet").num_rows == rejected
    except (pa.ArrowException, OSError):
        return None
    return rejected if is_whole else None
