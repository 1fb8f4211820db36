"""The commands. Bad input is one line on standard error and exit status 2, never a traceback."""

import json
import sys
import time
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

_STARTED_S = time.perf_counter()

import typer  # noqa: E402

import rlxjax  # noqa: E402

from .command_line import AsJson, File, command_line, console, set_up_jax, set_up_jax_as  # noqa: E402
from .questions import add_questions  # noqa: E402
from .refusals import NOT_WRITTEN_STATUS, one_line_errors, run  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .report import FunctionsOutcome, Outcome

_TYPER: Any = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
app = typer.Typer(**_TYPER)

#: Exit status of a calibration that is not good enough, where that was asked.
NOT_READY_STATUS = 3
#: Seconds of the calibrate job for each model, and the least for both.
MODEL_BUDGET_S, LEAST_BUDGET_S = 60.0, 30.0
Verbose = Annotated[bool, typer.Option("--verbose", help="Also print tables of errors, coefficients and workloads.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit status 3 unless the calibration is good enough.")]
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
    strict: Strict = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine, fit the latency models of functions and of Welch peaks, and write the calibration file.

    What the file says of another model of this machine stays. --resume, --model and --prior are for Welch peaks, whose
    fit starts from what other machines say. Measuring ends early once the errors are small.
    Exit status 1: a fit did not converge and was not written; 2: bad input; 3: with --strict, not good enough.
    """
    parts = 2 if only is None else 1
    budget_s = MODEL_BUDGET_S * parts if budget is None else budget
    if only is None and budget_s < LEAST_BUDGET_S:
        raise ValueError(
            f"--budget: expected at least {LEAST_BUDGET_S:g} seconds, or 10 with --only welch, got {budget_s:g}"
        )
    set_up_jax(device)
    from rlxjax.calibration import default_calibration_path

    from .report import Progress

    given = {"device": device, "only": only, "out": out, "model": model, "prior": prior, "resume": resume}
    command = command_line("calibrate", budget=f"{budget_s:g}", **given, force=force)
    started_s, outcomes = _STARTED_S, {}
    if only != "functions":
        from .job import run as run_job

        outcomes["welch"] = run_job(
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
        _say(outcomes["welch"], verbose=verbose, as_json=as_json)
    if only != "welch":
        from .functions_job import run_functions

        outcomes["functions"] = run_functions(
            started_s=started_s + budget_s - budget_s / parts,
            budget_s=budget_s / parts,
            path=default_calibration_path() if out is None else out,
            command=command,
            progress=Progress(),
            force=force,
        )
        _say(outcomes["functions"], verbose=verbose, as_json=as_json)
    _finish(outcomes, strict=strict, as_json=as_json)


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
    strict: Strict = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Fit a latency model to kept samples again, and write the calibration of their machine.

    For a calibration file that this version does not read, say. Nothing is measured.
    Exit status 1: the fit did not converge and nothing was written; 2: bad input; 3: with --strict, not good enough.
    """
    from .function_samples import read_function_samples
    from .functions_job import fit_functions
    from .refit import refit as fit_again
    from .report import Progress
    from .samples import read_samples

    if (functions := read_function_samples(samples)) is not None:
        name = str(samples).removesuffix(".gz").removesuffix(".functions.jsonl")
        path = FilePath(f"{name}.json") if out is None else out
        set_up_jax("cpu" if functions.fingerprint.platform == "cpu" else None)
        found = fit_functions(functions, path, samples, command_line("refit", samples, out=out), [], force)
        _say(found, verbose=verbose, as_json=as_json)
        _finish({"functions": found}, strict=strict, as_json=as_json)
        return
    log = read_samples(samples)
    set_up_jax("cpu" if log.fingerprint.platform == "cpu" else None)
    outcome = fit_again(
        log,
        samples,
        out=out,
        command=command_line("refit", samples, out=out, model=model, prior=prior, force=force),
        progress=Progress(),
        models=model or [],
        force=force,
        prior=prior,
    )
    _say(outcome, verbose=verbose, as_json=as_json)
    _finish({"welch": outcome}, strict=strict, as_json=as_json)


@app.command()
@one_line_errors
def validate(
    file: File = None,
    budget: Annotated[float, typer.Option(help="Seconds for all of it, compiling included.")] = 20.0,
    as_json: AsJson = False,
) -> None:
    """Check that a calibration file is sound and still holds here, by timing a few runs again.

    Exit status 0: good; 1: drifted; 2: not this machine, or a file that cannot be used.
    """
    file = set_up_jax_as(file)
    from .report import Progress
    from .staleness import check

    verdict = check(file, started_s=_STARTED_S, budget_s=budget, progress=Progress())
    typer.echo(json.dumps(verdict.as_json(file)) if as_json else "\n".join(verdict.sentences(file)))
    raise typer.Exit(verdict.status)


add_questions(app)


def main() -> None:
    """Run the command line."""
    run(app, sys.argv[1:] or ["--help"])


def calibrate_main() -> None:
    """Run the calibrate job itself."""
    job = typer.Typer(**_TYPER)
    job.command(name="calibrate")(calibrate)
    run(job, sys.argv[1:])


def _say(outcome: "Outcome | FunctionsOutcome", *, verbose: bool, as_json: bool) -> None:
    """Print what calibrating one model gave, as soon as that is known; JSON comes at the end."""
    from .report import Outcome, print_functions, print_outcome

    if as_json:
        return
    if isinstance(outcome, Outcome):
        print_outcome(outcome, console(), is_verbose=verbose)
    else:
        print_functions(outcome, console(), is_verbose=verbose)


def _finish(outcomes: "Mapping[str, Outcome | FunctionsOutcome]", *, strict: bool, as_json: bool) -> None:
    """End with the exit status that says what calibrating each model gave, printed as JSON where that was asked."""
    from .report import outcome_as_dict

    if as_json:
        typer.echo(json.dumps({name: outcome_as_dict(outcome) for name, outcome in outcomes.items()}))
    if not all(outcome.is_written for outcome in outcomes.values()):
        raise typer.Exit(NOT_WRITTEN_STATUS)
    if strict and not all(outcome.verdict.is_ready for outcome in outcomes.values()):
        raise typer.Exit(NOT_READY_STATUS)
