"""The command `evaluate`: a Daft query that adds the answers of a gate or of a model to the rows of files."""

import dataclasses
import os
import re
import shutil
import time
from pathlib import Path as FilePath
from typing import Annotated, Any

import typer
from typer import Argument, Option

import rlxjax
from rlxjax.extras import require

from .command_line import (
    NOT_WRITTEN_STATUS,
    AsJson,
    Quiet,
    calibration_file,
    calibration_of,
    command,
    set_up_jax,
)
from .terminal import Progress, counted, json_text, say

#: The function of Daft that reads files with an ending. Files with other endings are read as Parquet.
READERS = {".csv": "read_csv", **dict.fromkeys((".json", ".jsonl", ".ndjson"), "read_json")}


@command(
    "rlxjax evaluate 'pairs/*.parquet' scored --gate cuda",
    "rlxjax evaluate runs picked --model welch --sort-by batch",
    "DAFT_RUNNER=ray rlxjax evaluate 's3://runs/*.parquet' picked --model fft",
    statuses={1: "some rows are rejected; their column `rejected` says why"},
)
def evaluate(
    source: Annotated[list[str], Argument(help="Parquet, CSV or JSON files, globs, URLs or folders of Parquet.")],
    sink: Annotated[FilePath, Argument(help="A new folder for the answers, in Parquet.")],
    gate: Annotated[str | None, Option(help="A built-in gate, such as cuda; a row is a pair of profiles.")] = None,
    model: Annotated[
        str | None,
        Option(help="A model of the calibration, such as welch, or your module:NAME; a row has the model's inputs."),
    ] = None,
    calibration: Annotated[
        FilePath | None,
        Option(help="A calibration file; without --model, its gate evaluates. Default: this machine's."),
    ] = None,
    column: Annotated[
        list[str] | None, Option(help="The column of an input with another name, as input=column; repeatable.")
    ] = None,
    temperature_ns: Annotated[float | None, Option(help="Temperature in ns of a gate's probability.")] = None,
    strategy: Annotated[
        str | None, Option(help="The strategy of a model whose time is written; default: the fastest.")
    ] = None,
    level: Annotated[float, Option(help="Probability of the interval low_ns to high_ns.")] = 0.9,
    sort_by: Annotated[str | None, Option(help="Sort the rows by a column; otherwise their order may change.")] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate every row of files, which may be larger than memory. Write the answers as Parquet.

    The output has all columns of the input; for a gate, the columns of counts are left out. In a row that cannot be
    evaluated, the answers are null, and the column `rejected` says why. With DAFT_RUNNER=ray, a Ray cluster does the
    work, and all its machines need the files under the same paths.
    """
    begun_s, partial = time.perf_counter(), sink.with_name(f"{sink.name}.partial")
    for path in (sink, partial):
        if path.exists():
            raise ValueError(f"{path}: expected a free name, got a file or a folder; delete it or give another name")
    require("daft", "scale")
    os.environ.setdefault("DO_NOT_TRACK", "true")  # else Daft reports each import to its makers
    os.environ.setdefault("DAFT_PROGRESS_BAR", "0")
    progress = Progress(is_quiet=quiet)
    with progress.waiting("starting JAX"):
        what = _asked(gate, model, calibration)
        import daft

    how: dict[str, Any] = {"temperature_ns": temperature_ns, "strategy": strategy, "level": level}
    try:
        rows = _with_answers(_read(source), what, column or [], how)
        if sort_by is not None:
            rows = rows.sort(sort_by)
        with progress.waiting("evaluating"):
            written = rows.write_parquet(str(partial), compression="zstd").to_pydict()["path"]
        for place, path in enumerate(written):  # sorted rows are in the order of these files
            (partial / FilePath(path).name).rename(partial / f"part-{place:05d}.parquet")
        rejected = daft.col("rejected")
        counts = [rejected.count("all").alias("rows"), rejected.count().alias("rejected")]
        (found,) = daft.read_parquet(f"{partial}/*.parquet").agg(*counts).to_pylist()
        partial.rename(sink)
    except (ValueError, OSError) as error:
        raise ValueError(_said(error)) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    seconds = time.perf_counter() - begun_s
    if as_json:
        typer.echo(json_text({"sink": str(sink), **found, "seconds": seconds}))
    elif not quiet:
        say(f"{counted(found['rows'], 'row')} in {seconds:.1f} s: {sink}.")
        if found["rejected"]:
            say(f"{counted(found['rejected'], 'row')} could not be evaluated: the column `rejected` says why.")
    raise typer.Exit(NOT_WRITTEN_STATUS if found["rejected"] else 0)


def _asked(gate: str | None, model: str | None, file: FilePath | None) -> Any:
    if gate is not None:
        if model is not None or file is not None:
            raise ValueError("--gate: expected no --model and no --calibration as well")
        set_up_jax(None)
        return rlxjax.io_fusion_gate_for_target(gate)
    if model is not None and ":" in model:
        from .suites import latency_model

        users = latency_model(model)
        return rlxjax.load_calibration(calibration_file(file), [users]).of(users.name)
    known = calibration_of(file)
    if model is not None:
        return known.of(model)
    if known.gate is None:
        raise ValueError(f"--gate, --model: expected one of the two options, since {known.source} has no gate")
    return known.gate


def _read(sources: list[str]) -> Any:
    """Return Daft's query of the rows of files. A folder `name=value` in a path is a column `name`."""
    import daft

    if len(sources) == 1 and (FilePath(sources[0]) / "_delta_log").is_dir():
        return daft.read_deltalake(sources[0])
    endings = [FilePath(one).suffixes for one in sources]
    readers = {next((READERS[own] for own in each if own in READERS), "read_parquet") for each in endings}
    if len(readers) > 1:
        raise ValueError(f"source: expected files of one kind, got {', '.join(sources)}")
    paths = [f"{one}/**/*.parquet" if os.path.isdir(one) else one for one in sources]
    return getattr(daft, *readers)(paths, hive_partitioning=True)


def _with_answers(rows: Any, what: Any, renamed: list[str], how: dict[str, Any]) -> Any:
    """Return Daft's query of the rows with the answers."""
    import daft
    import pyarrow as pa

    is_gate = isinstance(what, rlxjax.IoFusionGate)
    counts = [field.name for field in dataclasses.fields(rlxjax.GraphIoProfile)]
    pairs = [f"{side}_{name}" for side in ("before", "after") for name in counts]
    columns = {name: name for name in (pairs if is_gate else what.model.inputs)}
    empty = rows.schema().to_pyarrow_schema().empty_table()
    for text in renamed:
        name, _, column = text.partition("=")
        if name not in columns or column not in empty.column_names:
            inputs, known = ", ".join(columns), ", ".join(empty.column_names)
            raise ValueError(f"--column: expected input=column, of {inputs} and of {known}, got {text!r}")
        columns[name] = column
    columns = {name: column for name, column in columns.items() if column in empty.column_names}
    kept = [name for name in empty.column_names if not (is_gate and name in columns.values())]

    def answers(given: dict[str, Any]) -> pa.Table:
        return rlxjax.tables.evaluate(pa.table(given), what, **how)

    # Wrong columns are refused before any row is read.
    others = {name: empty.column(name) for name in kept if name not in columns}
    schema = answers({**others, **{name: empty.column(own) for name, own in columns.items()}}).schema
    added_names = schema.names[len(others | columns) :]
    types = {name: daft.DataType.from_arrow_type(schema.field(name).type) for name in added_names}

    @daft.func.batch(return_dtype=daft.DataType.struct(types), unnest=True)
    def added(*batch: Any) -> Any:
        given = {name: own.to_arrow() for name, own in zip(columns, batch, strict=True)}
        return answers(given).select([*types]).to_struct_array().combine_chunks()

    return rows.select(*kept, added(*map(daft.col, columns.values())))


def _said(error: Exception) -> str:
    """Return the sentence in an error of Daft, which has several lines and a prefix."""
    return re.sub(r"DaftError::\w+ ", "", " ".join(str(error).split()))
