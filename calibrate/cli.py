"""The commands. Bad input is one line on standard error and exit status 2, never a traceback."""

import json
import shlex
import sys
import time
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

_STARTED_S = time.perf_counter()

import typer  # noqa: E402
from rich.console import Console  # noqa: E402

import rlxjax  # noqa: E402

from .refusals import NOT_WRITTEN_STATUS, one_line_errors, run  # noqa: E402

if TYPE_CHECKING:
    from .report import Outcome

_TYPER: Any = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
app = typer.Typer(**_TYPER)

#: Exit status of an advice that decides nothing.
UNSURE_STATUS = 1
#: Seconds of the calibrate job for each model, and the least for both.
MODEL_BUDGET_S, LEAST_BUDGET_S = 60.0, 30.0
#: Largest size of a workload: what arrays of JAX are indexed by.
MAX_SIZE = 2**31 - 1
Batch = Annotated[int, typer.Option(help="Rows of the signal.", max=MAX_SIZE)]
NFft = Annotated[int, typer.Option(help="Samples of a segment, even.", max=MAX_SIZE)]
Peaks = Annotated[int, typer.Option("--k", help="Peaks of a row; those beyond the bins are (0, 0.0).", max=MAX_SIZE)]
Segments = Annotated[int, typer.Option(help="Segments of a row.", max=MAX_SIZE)]
File = Annotated[FilePath, typer.Argument(help="A calibration file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Write the file even if the fit did not converge.")]


def _print_version(is_asked: bool | None) -> None:
    if is_asked:
        typer.echo(f"rlxjax {rlxjax.__version__}")
        raise typer.Exit


@app.callback()
def commands(
    version: Annotated[
        bool | None,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version),
    ] = None,
) -> None:
    """Decide, with numbers measured on this machine, whether fusing work on a device pays."""


@app.command()
@one_line_errors
def calibrate(
    device: Annotated[str | None, typer.Option(help="JAX platform to calibrate: cpu, gpu, cuda, rocm or tpu.")] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Seconds for all of it, compiling and fitting included; 60 for each model unless given."),
    ] = None,
    only: Annotated[
        Literal["welch", "functions"] | None, typer.Option(help="One latency model alone; both unless given.")
    ] = None,
    out: Annotated[
        FilePath | None, typer.Option(help="The calibration file; by default where rlxjax looks for it.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the samples of an earlier run.")] = False,
    model: Annotated[
        list[FilePath] | None, typer.Option(help="A learned FFT to time as well; may be given again.")
    ] = None,
    prior: Annotated[
        FilePath | None,
        typer.Option(help="A calibration to start from, of another machine or day: few timings then do."),
    ] = None,
    force: Force = False,
) -> None:
    """Measure this machine, fit the latency models of functions and of Welch peaks, and write the calibration file.

    What the file says of another model of this machine stays. --resume, --model and --prior are for Welch peaks.
    Exit status 1: a fit did not converge and was not written; 2: bad input.
    """
    parts = 2 if only is None else 1
    budget_s = MODEL_BUDGET_S * parts if budget is None else budget
    if only is None and budget_s < LEAST_BUDGET_S:
        raise ValueError(
            f"--budget: expected at least {LEAST_BUDGET_S:g} seconds, or 10 with --only welch, got {budget_s:g}"
        )
    _set_up_jax(device)
    from rlxjax.calibration import default_calibration_path

    from .report import Progress, print_functions, print_outcome

    given = {"device": device, "only": only, "out": out, "model": model, "prior": prior, "resume": resume}
    command = _command_line("calibrate", budget=f"{budget_s:g}", **given, force=force)
    started_s, written = _STARTED_S, []
    if only != "functions":
        from .job import run as run_job

        outcome = run_job(
            started_s=started_s,
            budget_s=budget_s / parts,
            out=out,
            resume=resume,
            models=model or [],
            command=command,
            progress=Progress(),
            force=force,
            prior=prior,
        )
        print_outcome(outcome, _console())
        written.append(outcome.is_written)
    if only != "welch":
        from .functions_job import run_functions

        functions = run_functions(
            started_s=started_s + budget_s - budget_s / parts,
            budget_s=budget_s / parts,
            path=default_calibration_path() if out is None else out,
            command=command,
            progress=Progress(),
            force=force,
        )
        print_functions(functions, _console())
        written.append(functions.is_written)
    if not all(written):
        raise typer.Exit(NOT_WRITTEN_STATUS)


@app.command()
@one_line_errors
def refit(
    samples: Annotated[FilePath, typer.Argument(help="A samples file of calibrate, of any version or machine.")],
    out: Annotated[
        FilePath | None,
        typer.Option(help="The calibration file; by default NAME.json beside NAME.samples.jsonl."),
    ] = None,
    model: Annotated[
        list[FilePath] | None, typer.Option(help="A learned FFT that was timed; may be given again.")
    ] = None,
    prior: Annotated[
        FilePath | None, typer.Option(help="A calibration to start from, of another machine or day.")
    ] = None,
    force: Force = False,
) -> None:
    """Fit a latency model to kept samples again, and write the calibration of their machine.

    For a calibration file that this version does not read, say. Nothing is measured.
    Exit status 1: the fit did not converge and nothing was written; 2: bad input.
    """
    from .functions_job import fit_functions, read_function_samples
    from .refit import refit as fit_again
    from .report import Progress, print_functions
    from .samples import read_samples

    if (functions := read_function_samples(samples)) is not None:
        name = str(samples).removesuffix(".gz").removesuffix(".functions.jsonl")
        path = FilePath(f"{name}.json") if out is None else out
        _set_up_jax("cpu" if functions.fingerprint.platform == "cpu" else None)
        found = fit_functions(functions, path, samples, _command_line("refit", samples, out=out), [], force)
        print_functions(found, _console())
        raise typer.Exit(0 if found.is_written else NOT_WRITTEN_STATUS)
    log = read_samples(samples)
    _set_up_jax("cpu" if log.fingerprint.platform == "cpu" else None)
    outcome = fit_again(
        log,
        samples,
        out=out,
        command=_command_line("refit", samples, out=out, model=model, prior=prior, force=force),
        progress=Progress(),
        models=model or [],
        force=force,
        prior=prior,
    )
    _print_outcome(outcome)


@app.command()
@one_line_errors
def validate(
    file: File,
    budget: Annotated[float, typer.Option(help="Seconds for all of it, compiling included.")] = 20.0,
    as_json: AsJson = False,
) -> None:
    """Check that a calibration file is sound and still holds here, by timing a few runs again.

    Exit status 0: good; 1: drifted; 2: not this machine, or a file that cannot be used.
    """
    _set_up_jax_as(file)
    from .report import Progress
    from .staleness import check

    verdict = check(file, started_s=_STARTED_S, budget_s=budget, progress=Progress())
    typer.echo(json.dumps(verdict.as_json(file)) if as_json else "\n".join(verdict.sentences(file)))
    raise typer.Exit(verdict.status)


@app.command()
@one_line_errors
def predict(
    file: File, batch: Batch, n_fft: NFft = 256, k: Peaks = 16, segments: Segments = 2, as_json: AsJson = False
) -> None:
    """Predict what each strategy takes for a workload, and pick the cheapest of the same result.

    With two segments, ultra is shown as well: the host's path with one, another result.
    """
    _set_up_jax_as(file)
    from rlxjax import WelchPeakParams, load_calibration
    from rlxjax.models import WELCH

    params = WelchPeakParams(n_fft, segments, k)
    calibration = load_calibration(file).of(WELCH.name)
    sizes = {"batch": batch, "n_fft": params.n_fft, "k": params.k, "n_segments": params.n_segments}
    candidates = [calibration.name_of(name, **sizes) for name in calibration.alternatives(**sizes)]
    runs = dict.fromkeys(candidates, sizes)
    if "fast" in runs:
        runs = {"ultra": sizes | {"n_segments": 1}, **runs}
    predicted = {name: float(calibration.predict_ns(name, **run)) for name, run in runs.items()}
    intervals = {name: [float(end) for end in calibration.interval_ns(name, **run)] for name, run in runs.items()}
    pick, next_best = sorted(candidates, key=predicted.__getitem__)[:2]  # of equals the earlier one
    decided = calibration.decide(**sizes, fused=pick, kept=next_best)
    inside, probability = bool(decided.in_domain), float(decided.probability)
    verdict = pick if decided.verdict() == "fuse" else "undecided"
    if as_json:
        found = {"predicted_ns": predicted, "interval_ns": intervals}
        found |= {"pick": pick, "next_best": next_best, "probability": probability, "verdict": verdict}
        typer.echo(json.dumps(sizes | found | {"in_domain": inside, "extrapolated": not inside}))
        return
    for strategy, time_ns in predicted.items():
        low, high = (f"{end / 1e3:,.1f}" for end in intervals[strategy])
        marks = "" if inside else "  extrapolated"
        if strategy == pick:
            sure = ", undecided" if verdict == "undecided" else ""
            marks += f"  <- pick, faster than {next_best} with {100 * probability:.0f} %{sure}"
        typer.echo(f"{strategy:7} {time_ns / 1e3:12,.1f} us  (90 %: {low} to {high}){marks}")
    if not inside:
        typer.echo("outside the calibrated domain: an extrapolation")


@app.command()
@one_line_errors
def explain(
    file: File, batch: Batch, n_fft: NFft = 256, k: Peaks = 16, segments: Segments = 2, as_json: AsJson = False
) -> None:
    """Say why a strategy is picked: the parts of its time, the margin, and what would change the choice."""
    _set_up_jax_as(file)
    from rlxjax import load_calibration
    from rlxjax.models import WELCH

    explanation = load_calibration(file).explain(batch, n_fft, k, segments, model=WELCH.name)
    if as_json:
        typer.echo(json.dumps(explanation.as_dict()))
        return
    from .explanation import print_explanation

    print_explanation(explanation, _console())


@app.command()
@one_line_errors
def advise(
    stages: Annotated[
        list[str], typer.Argument(help="Functions as module:function, in order; of one, its parts are compared.")
    ],
    arg: Annotated[
        list[str] | None, typer.Option(help="An argument of the first, as f32[1024,256]; may be given again.")
    ] = None,
    args: Annotated[
        str | None, typer.Option(help="All arguments, as module:name of a tuple or of a function that returns it.")
    ] = None,
    calibration: Annotated[FilePath | None, typer.Option(help="The calibration; by default this machine's.")] = None,
    min_gain: Annotated[float, typer.Option(help="Nanoseconds that one program has to save in a call.", min=0)] = 0.0,
    trips: Annotated[
        list[int] | None, typer.Option(help="How often a loop turns whose length depends on data; in order.", min=0)
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also compile and time both forms.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say whether jitted functions should be one program on this machine, and why.

    The modules that are named are imported, from the current folder too.
    Exit status 0: fuse or keep; 1: undecided, or it cannot be modelled; 2: bad input.
    """
    _set_up_jax(None)
    import jax

    from rlxjax import advise as ask

    from .named import arguments_of, named

    with jax.enable_x64(False):  # as users call them
        functions = [named(stage, "stages") for stage in stages]
        given = arguments_of(arg or [], args)
        advice = ask(
            functions if len(functions) > 1 else functions[0],
            *given,
            calibration=calibration,
            min_gain_ns=min_gain,
            trip_counts=trips,
            measure=measure,
        )
    typer.echo(json.dumps(advice.as_dict()) if as_json else str(advice))
    raise typer.Exit(0 if advice.verdict in ("fuse", "keep") else UNSURE_STATUS)


@app.command()
@one_line_errors
def bench(
    n_fft: Annotated[
        list[int] | None, typer.Option(help="Samples of a segment, even; may be given again.", max=MAX_SIZE)
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Rows of the signal; may be given again.", max=MAX_SIZE)
    ] = None,
    k: Annotated[list[int] | None, typer.Option(help="Peaks of a row; may be given again.", max=MAX_SIZE)] = None,
    segments: Segments = 2,
    contender: Annotated[
        list[str] | None, typer.Option(help="Who takes part, all by default; may be given again.")
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds for each workload.")] = 5.0,
    device: Annotated[str | None, typer.Option(help="JAX platform to run on: cpu, gpu, cuda, rocm or tpu.")] = None,
    calibration: Annotated[FilePath | None, typer.Option(help="The calibration that auto picks by.")] = None,
    out: Annotated[FilePath | None, typer.Option(help="A JSON file for every time.")] = None,
) -> None:
    """Time Welch peaks against the naive form and every peer that is installed, and print the ratios."""
    _set_up_jax(device)
    import jax

    from rlxjax import load_calibration

    from .bench import bench_cells, run_bench
    from .bench_report import print_bench
    from .report import Progress

    cells = bench_cells(n_fft or (), batch or (), k or (), segments)
    sizes = {"n_fft": n_fft, "batch": batch, "k": k, "segments": segments}
    options = {"budget": f"{budget:g}", "device": device, "calibration": calibration, "out": out}
    with jax.enable_x64(False):
        auto_by = None if calibration is None else load_calibration(calibration)
    with Progress().phase("measuring", total=len(cells)) as advance:
        content = run_bench(
            cells,
            budget_s=budget,
            command=_command_line("bench", **sizes, contender=contender, **options),
            names=contender or (),
            out=out,
            calibration=auto_by,
            advance=advance,
        )
    print_bench(content, _console(120))
    if out is not None:
        typer.echo(f"every time: {out}")


def main() -> None:
    """Run the command line."""
    run(app, sys.argv[1:] or ["--help"])


def calibrate_main() -> None:
    """Run the calibrate job itself."""
    job = typer.Typer(**_TYPER)
    job.command(name="calibrate")(calibrate)
    run(job, sys.argv[1:])


def _print_outcome(outcome: "Outcome") -> None:
    from .report import print_outcome

    print_outcome(outcome, _console())
    if not outcome.is_written:
        raise typer.Exit(NOT_WRITTEN_STATUS)


def _set_up_jax_as(file: FilePath) -> None:
    """Choose the platform of a calibration: the processor also where JAX would take an accelerator."""
    from rlxjax.calibration import read_calibration_file

    _set_up_jax("cpu" if read_calibration_file(file).fingerprint.platform == "cpu" else None)


def _set_up_jax(device: str | None) -> None:
    """Choose the platform, before JAX starts one, turn float64 on, and keep what is compiled."""
    import jax

    jax.config.update("jax_enable_x64", True)
    if device is not None:
        known = ("cpu", "gpu", "cuda", "rocm", "tpu")
        if device.lower() not in known:
            raise ValueError(f"--device: expected one of {', '.join(known)}, got {device!r}")
        jax.config.update("jax_platforms", "cuda" if device.lower() == "gpu" else device.lower())
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or ["it failed to start"])[0]
        asked = f"--device {device}" if device else "JAX_PLATFORMS"
        raise ValueError(f"{asked}: JAX finds no such device here ({reason})") from None
    from .compiled import keep_compiled_programs

    keep_compiled_programs()


def _console(width: int = 110) -> Console:
    """Return where tables are printed: as wide as the terminal, or so wide where there is none."""
    return Console(width=None if sys.stdout.isatty() else width)


def _command_line(command: str, *arguments: object, **options: object) -> str:
    """Return a command with the options that have a value; those of several values come again for each."""
    parts = ["rlxjax", command, *map(str, arguments)]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            parts.append(option)
        elif value:
            values = value if isinstance(value, list) else [value]
            parts += [part for one in values for part in (option, str(one))]
    return shlex.join(parts)
