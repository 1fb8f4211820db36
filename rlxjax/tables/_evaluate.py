"""Evaluate a gate or a latency model for each row of files that may be larger than memory."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from rlxjax._checks import as_index
from rlxjax.calibration import CalibratedModel
from rlxjax.extras import require
from rlxjax.gate import IoFusionGate

from ._rows import STRATEGY, gate_rows, model_rows

#: The default number of rows that each processor holds in memory at a time.
ROWS_PER_BATCH = 2**17


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The summary of a call of `evaluate`.

    Attributes:
        sink: the folder with the output.
        rows: number of rows in the input, including the rows that an earlier call evaluated.
        rejected: number of rows without an answer.
        rejects: the folder with the rejected rows, each with its place and the reason; None if no row was rejected.
        parts: number of files in the output. Each file is called a part.
        resumed: number of parts that an earlier call wrote.
        seconds: duration of the call, in seconds.
        decode_s: time that was spent on reading, in seconds, summed over all processors.
        evaluate_s: time that was spent on evaluating, in seconds, summed over all processors.
        encode_s: time that was spent on writing, in seconds, summed over all processors.
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
        """Return the fields as a dict that can be written as JSON. Paths become strings."""
        return dataclasses.asdict(self) | {"sink": str(self.sink), "rejects": self.rejects and str(self.rejects)}


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

    All processors read, evaluate and write at the same time. `rows_per_batch` bounds the memory, whatever the size of
    the files. The output is a folder of files (parts), in the order of the input. A stopped job leaves no unfinished
    parts, and can be continued with `resume`. The rows of a batch are split over all JAX devices.

    A row has no answer if a value is null, negative, NaN or impossible for the model. The output leaves these rows out.
    The folder `SINK.rejected` holds these rows, each with its file, its row group, its row number and the reason.
    The file `SINK.manifest.json` describes the job.

    Args:
        source: a file, a glob or a folder, or several of these. A folder `name=value` in a path gives a column `name`.
        sink: the folder to which the output is written.
        what: a gate, which needs columns of counts `before_kernel_launches`, ..., `after_device_traffic_bytes`; or a
            calibrated model, which needs a column for each input without a default. A list input needs a list column.
        want: the columns to add. For a gate: score_ns, should_fuse, fuse_probability, fuse_log_odds. For a model: pick,
            time_ns, low_ns, high_ns, terms (one column per term), margin_ns, probability, undecided, in_domain.
        columns: a dict from a count or input to its column, if the names differ. For a model, the entry `strategy`
            names the column of strategies to predict. The output keeps all input columns, except a gate's counts.
        temperature_ns: the temperature of a gate's probability and log-odds, in ns.
        strategy: the strategy for which a model predicts the time. By default, it is the fastest strategy in each row.
        level: the level of a model's interval from low_ns to high_ns, between 0 and 1.
        rows_per_batch: number of rows (at least 1) that each processor holds at a time, and of each output row group.
        strict: whether to stop with an error at the first row without an answer.
        resume: whether to continue a job that was stopped.
        engine: "local" for threads of this process, or "ray" for a Ray cluster, with one worker for each processor or
            GPU. All machines of the cluster need the input and the output under the same paths. If you defined the
            model, they also need your module. If a worker dies, its part is evaluated again.
        address: the address of a Ray cluster, in the form for `ray.init`. By default, the job uses the cluster of this
            process, else the cluster at `RAY_ADDRESS`, else a new cluster on this machine.
        advance: a function that the job calls with two numbers: the number of finished rows and the number of all rows.

    Returns:
        A summary. The field `rejected` of the summary is the number of rows without an answer.

    Raises:
        ValueError: files, columns or arguments are wrong, or the folder holds another job. The message is one line.
        OSError: a file cannot be written, or no Ray cluster answers. The message is one line.
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
            raise ValueError("strategy: expected none with a gate, which has no strategies")
        program = gate_rows(what, want, temperature_ns)
    elif isinstance(what, CalibratedModel):
        if temperature_ns is not None:
            raise ValueError("temperature_ns: expected none with a calibrated model, which has its own uncertainty")
        program = model_rows(what, want, strategy, level, has_strategy_column=STRATEGY in (columns or {}))
    else:
        raise ValueError(f"what: expected an IoFusionGate or a CalibratedModel, got {type(what).__name__}")
    if engine not in ("local", "ray"):
        raise ValueError(f"engine: expected local or ray, got {engine!r}")
    if address is not None and engine != "ray":
        raise ValueError(f"address: expected none with the engine {engine}, which runs in this process")
    require("pyarrow", "scale")
    from ._job import job_of, run_job

    job, parts = job_of(program, source, sink, columns, rows_per_batch, strict)
    totals, resumed = run_job(job, parts, resume, advance or (lambda done, total: None), engine, address)
    rows, rejected, *working_s = totals.tolist()
    rejects, seconds = job.rejects if rejected else None, time.perf_counter() - begun_s
    return Evaluation(sink, int(rows), int(rejected), rejects, len(parts), resumed, seconds, *working_s)
