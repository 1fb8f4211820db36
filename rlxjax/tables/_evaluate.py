"""`evaluate`: a gate or a latency model over files of rows, larger than memory."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from rlxjax._checks import as_index
from rlxjax._files import check_pyarrow
from rlxjax.calibration import CalibratedModel
from rlxjax.gate import IoFusionGate

from ._rows import STRATEGY, gate_rows, model_rows

#: Rows that are held at a time, for each processor.
ROWS_PER_BATCH = 2**17


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What `evaluate` did.

    Attributes:
        sink: the folder of the parts.
        rows: that were read, those of parts that were there already too.
        rejected: rows that could not be evaluated.
        rejects: the folder where they are, each with its place and the reason; None without any.
        parts: of the output.
        resumed: parts that were there already.
        seconds: that it took.
        decode_s: seconds of reading, each of these summed over the processors that work side by side.
        evaluate_s: of evaluating.
        encode_s: of writing.
    """

    sink: FilePath
    rows: int
    rejected: int
    rejects: FilePath | None
    parts: int
    resumed: int
    seconds: float
    decode_s: float
    evaluate_s: float
    encode_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return the same as JSON has it."""
        paths = {"sink": str(self.sink), "rejects": None if self.rejects is None else str(self.rejects)}
        return {**dataclasses.asdict(self), **paths}


def evaluate(
    source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    sink: str | os.PathLike[str],
    what: IoFusionGate | CalibratedModel,
    *,
    want: Sequence[str] | None = None,
    columns: Mapping[str, str] | None = None,
    temperature_ns: float | None = None,
    strategy: str | None = None,
    level: float = 0.9,
    rows_per_batch: int = ROWS_PER_BATCH,
    strict: bool = False,
    resume: bool = False,
    engine: str = "local",
    address: str | None = None,
    advance: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Evaluate a gate or a latency model for every row of Parquet files, and write the answers as Parquet.

    Reading, evaluating and writing go on side by side on all processors; memory follows from `rows_per_batch`,
    whatever the files' size. The output is a folder of parts, in the order of the input. A part appears whole or not
    at all; a job that was stopped goes on with `resume`. What several devices there are share the rows of a batch.

    A row that cannot be evaluated (null, negative, NaN, or beyond what the model takes) is not in the output but in the
    folder `SINK.rejected`, with its file, row group, row and reason. `SINK.manifest.json` says what the job is.

    Args:
        source: a file, a glob, a folder, or several; values of `name=value` folders in their paths are columns.
        sink: the folder to write.
        what: a gate, for rows of two profiles (`before_kernel_launches`, ..., `after_device_traffic_bytes`), or a
            calibrated model, for rows of its inputs: of which a run has a list, a column of lists.
        want: columns to add. For a gate: score_ns, should_fuse, fuse_probability, fuse_log_odds. For a model: pick,
            time_ns, low_ns, high_ns, terms (a column for each), margin_ns, probability, undecided, in_domain.
        columns: the column of a field, where it is not called as the field. A model has the field `strategy` too, by
            which each row says whose time is asked for. Columns of no field are carried along.
        temperature_ns: of a gate's probability and log-odds.
        strategy: of a model, whose time, interval and terms are given; the pick's unless given.
        level: of a model's interval.
        rows_per_batch: rows that each processor holds at a time, and those of a row group of the output.
        strict: end at the first row that cannot be evaluated.
        resume: go on with the parts that are there.
        engine: "local", threads of this process, or "ray" for the processors of a Ray cluster, one actor each (of
            GPUs, one each). All machines of a cluster have to see the input and the output under the same paths, and
            to be able to import the module of a model of your own. A part whose actor dies is done again.
        address: of a Ray cluster, as `ray.init` has it; unless given the one that this process is connected to, that
            of `RAY_ADDRESS`, or one that is started on this machine for the job.
        advance: called with the rows that are done and those that there are.

    Returns:
        What was done; `rejected` is not 0 where rows could not be evaluated.

    Raises:
        ValueError: files, columns or arguments that cannot be; another job in the folder; one line.
        OSError: a file that cannot be written, or no Ray cluster that answers; one line.
        ImportError: pyarrow or Ray is not installed.

    Examples:
        >>> import pathlib, tempfile
        >>> import pyarrow as pa, pyarrow.parquet as pq
        >>> from rlxjax import io_fusion_gate_for_target
        >>> folder, names = pathlib.Path(tempfile.mkdtemp()), ("kernel_launches", "sync_points", "host_output_bytes")
        >>> pairs = {f"{side}_{name}": [2, 4] for side in ("before", "after") for name in names}
        >>> pairs |= {"before_device_traffic_bytes": [2**30, 2**10], "after_device_traffic_bytes": [2**20, 2**10]}
        >>> pq.write_table(pa.table({"graph": ["a", "b"], **pairs}), folder / "pairs.parquet")
        >>> done = evaluate(folder / "pairs.parquet", folder / "scored", io_fusion_gate_for_target("cuda"))
        >>> pq.read_table(done.sink).to_pylist()  # doctest: +NORMALIZE_WHITESPACE
        [{'graph': 'a', 'score_ns': 1340866.5, 'should_fuse': True},
         {'graph': 'b', 'score_ns': 0.0, 'should_fuse': False}]
    """
    begun_s, sink = time.perf_counter(), FilePath(sink)
    as_index(rows_per_batch, "rows_per_batch", at_least=1)
    if isinstance(what, IoFusionGate):
        if strategy is not None:
            raise ValueError("strategy: expected none, a gate has no strategies")
        program = gate_rows(what, want, temperature_ns)
    elif isinstance(what, CalibratedModel):
        if temperature_ns is not None:
            raise ValueError("temperature_ns: expected none, a calibrated model knows its own doubt")
        program = model_rows(what, want, strategy, level, has_strategy_column=STRATEGY in (columns or {}))
    else:
        raise ValueError(f"what: expected an IoFusionGate or a CalibratedModel, got {type(what).__name__}")
    if engine not in ("local", "ray"):
        raise ValueError(f"engine: expected local or ray, got {engine!r}")
    if address is not None and engine != "ray":
        raise ValueError(f"address: expected none with the engine {engine}, which is of this process")
    check_pyarrow()
    from ._job import job_of, run_job

    job, parts = job_of(program, source, sink, columns, rows_per_batch, strict)
    totals, resumed = run_job(job, parts, resume, advance or (lambda done, total: None), engine, address)
    rows, rejected, *working_s = totals.tolist()
    rejects, seconds = job.rejects if rejected else None, time.perf_counter() - begun_s
    return Evaluation(sink, int(rows), int(rejected), rejects, len(parts), resumed, seconds, *working_s)
