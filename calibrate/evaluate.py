"""Two commands for large tables: `evaluate` answers rows by a gate or a latency model; `fleet` calibrates devices."""

from pathlib import Path as FilePath
from typing import Annotated, Any

import typer
from typer import Argument, Option

import rlxjax

from .command_line import (
    NOT_WRITTEN_STATUS,
    Address,
    AsJson,
    Engine,
    Prior,
    Quiet,
    calibration_file,
    calibration_of,
    command,
    command_line,
    set_up_jax,
    warn,
)
from .terminal import Progress, counted, json_text, say

Columns = Annotated[
    list[str] | None, Option("--column", help="The column of a field with another name, as field=name; repeatable.")
]


def _columns_by_field(given: list[str] | None) -> dict[str, str]:
    columns = {}
    for text in given or []:
        field, equals, name = text.partition("=")
        if not (field and equals and name) or field in columns:
            raise ValueError(f"--column: expected field=name, with each field once, got {text!r}")
        columns[field] = name
    return columns


@command(
    "rlxjax evaluate 'pairs/*.parquet' scored --gate cuda",
    "rlxjax evaluate runs picked --model welch --want pick,time_ns,probability",
    statuses={1: "some rows are rejected, and listed", 130: "interrupted; continue with --resume"},
)
def evaluate(
    source: Annotated[list[str], Argument(help="Parquet files, globs or folders.")],
    sink: Annotated[FilePath, Argument(help="The folder to write.")],
    gate: Annotated[str | None, Option(help="A built-in gate, such as cuda; a row is a pair of profiles.")] = None,
    model: Annotated[
        str | None,
        Option(help="A model of the calibration, such as welch, or your module:NAME; a row has the model's inputs."),
    ] = None,
    calibration: Annotated[
        FilePath | None,
        Option(help="A calibration file; without --model, its gate evaluates. Default: this machine's."),
    ] = None,
    want: Annotated[
        str | None,
        Option(
            help="Columns to add. Gate: score_ns, should_fuse, fuse_probability, fuse_log_odds. Model: pick, "
            "time_ns, low_ns, high_ns, terms, margin_ns, probability, undecided, in_domain."
        ),
    ] = None,
    column: Columns = None,
    temperature_ns: Annotated[
        float | None, Option(help="Temperature in ns of a gate's probability and log-odds.")
    ] = None,
    strategy: Annotated[
        str | None, Option(help="The strategy of a model whose time is written; default: the fastest.")
    ] = None,
    level: Annotated[float, Option(help="Probability of the interval low_ns to high_ns.")] = 0.9,
    rows_per_batch: Annotated[int, Option(help="Rows that each processor holds in memory.", min=1)] = 2**17,
    strict: Annotated[bool, Option("--strict", help="Stop at the first row that cannot be evaluated.")] = False,
    resume: Annotated[bool, Option("--resume", help="Continue a stopped job with its missing parts.")] = False,
    engine: Engine = "local",
    address: Address = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate every row of Parquet files, which may be larger than memory. Write the answers as Parquet.

    The output has all columns of the input; for a gate, the columns of counts are left out. A row that cannot be
    evaluated goes to SINK.rejected, with its place in the input and the reason.
    """
    progress = Progress(is_quiet=quiet)
    with progress.waiting("starting JAX"):
        what = _asked(gate, model, calibration)
    with progress.counting("evaluating", "row") as advance:
        names = None if want is None else [name.strip() for name in want.split(",")]
        how: dict[str, Any] = {"temperature_ns": temperature_ns, "strategy": strategy, "level": level}
        how |= {"rows_per_batch": rows_per_batch, "strict": strict, "resume": resume}
        how |= {"engine": engine, "address": address, "advance": advance}
        done = rlxjax.evaluate(source, sink, what, want=names, columns=_columns_by_field(column), **how)
    if as_json:
        typer.echo(json_text(done.as_dict()))
    elif not quiet:
        resumed = f" ({done.resumed} from an earlier run)" if done.resumed else ""
        parts = f"{counted(done.parts, 'part')}{resumed} in {done.sink}"
        say(f"{counted(done.rows, 'row')} in {done.seconds:.1f} s: {parts}.")
        shares_s = {"reading": done.decode_s, "evaluating": done.evaluate_s, "writing": done.encode_s}
        if working_s := sum(shares_s.values()):
            say(", ".join(f"{name} {share_s / working_s:.0%}" for name, share_s in shares_s.items()) + " of the time.")
        if done.rejected:
            say(f"{counted(done.rejected, 'row')} could not be evaluated: see {done.rejects}.")
    raise typer.Exit(NOT_WRITTEN_STATUS if done.rejected else 0)


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


@command("rlxjax fleet 'timings/*.parquet' fleet", statuses={1: "some devices are left out, and listed"})
def fleet(
    context: typer.Context,
    source: Annotated[list[str], Argument(help="Timings of devices: Parquet files, globs or folders.")],
    sink: Annotated[FilePath, Argument(help="A new folder for a calibration of each device and their prior.")],
    model: Annotated[str, Option(help="The model of the timings, such as welch, or your module:NAME.")] = "welch",
    column: Columns = None,
    prior: Prior = None,
    engine: Engine = "local",
    address: Address = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Calibrate each device of a fleet from the device's timings, and make a prior for devices to come.

    Nothing is measured. With --engine ray, a cluster fits the devices.
    """
    columns, progress = _columns_by_field(column), Progress(is_quiet=quiet)
    with progress.waiting("starting JAX"):
        set_up_jax("cpu")
        from rlxjax.calibration import read_prior
        from rlxjax.tables import fleet_of

        from . import fleet as job
        from .suites import latency_model

    of = latency_model(model)
    job.check_folder(sink)
    outcome = job.run(
        fleet_of(source, of, columns, sink),
        sink,
        known=None if prior is None else read_prior(prior, of)[0],
        command=command_line(context),
        progress=progress,
        pool=job.on_ray_pool(address) if engine == "ray" else job.pool_of,
    )
    for device, reason in [*outcome.left_out.items()][: job.SHOWN]:
        warn(f"{device} is left out: {reason}")
    if (more := len(outcome.left_out) - job.SHOWN) > 0:
        warn(f"{more} more are left out: see {sink / job.LEFT_OUT}.json")
    if as_json:
        typer.echo(json_text(outcome.as_dict()))
    elif not quiet:
        for text in outcome.sentences():
            say(text)
    if outcome.left_out:
        raise typer.Exit(NOT_WRITTEN_STATUS)
