"""The commands. Bad input is one line on standard error and exit status 2, never a traceback."""

import contextlib
import sys
import time
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

_STARTED_S = time.perf_counter()

import typer  # noqa: E402

import rlxjax  # noqa: E402

from .command_help import OVERVIEW, epilog  # noqa: E402
from .command_line import AsJson, File, Quiet, Unsealed, calibration_file, command_line, set_up_jax  # noqa: E402
from .interrupts import last_act  # noqa: E402
from .progress import Progress  # noqa: E402
from .questions import add_questions  # noqa: E402
from .refusals import NOT_WRITTEN_STATUS, one_line_errors, run, warn  # noqa: E402
from .report_command import report  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .outcome import FunctionsOutcome, Outcome

_TYPER: Any = {
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
app = typer.Typer(**_TYPER, epilog=OVERVIEW)

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


@app.command(epilog=epilog("calibrate"))
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
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine, fit the latency models of functions and of Welch peaks, and write the calibration file.

    What the file says of another model of this machine stays. --resume, --model and --prior are for Welch peaks, whose
    fit starts from what other machines say. Measuring ends early once the errors are small.
    """
    parts = 2 if only is None else 1
    budget_s = MODEL_BUDGET_S * parts if budget is None else budget
    if only is None and budget_s < LEAST_BUDGET_S:
        raise ValueError(
            f"--budget: expected at least {LEAST_BUDGET_S:g} seconds, or 10 with --only welch, got {budget_s:g}"
        )
    started_s, outcomes = _STARTED_S, {}
    progress = Progress(ends_s=started_s + budget_s, is_quiet=quiet)
    with progress.waiting("starting JAX"):
        set_up_jax(device)
        from rlxjax.calibration import default_calibration_path, locked

        from .functions_job import run_functions
        from .job import run as run_job

    given = {"device": device, "only": only, "out": out, "model": model, "prior": prior, "resume": resume}
    command = command_line("calibrate", budget=f"{budget_s:g}", **given, force=force)
    path = default_calibration_path() if out is None else out
    with _printed(outcomes, as_json=as_json), locked(path):
        if only != "functions":
            outcomes["welch"] = run_job(
                started_s=started_s,
                budget_s=budget_s / parts,
                out=path,
                resume=resume,
                models=model or [],
                command=command,
                progress=progress,
                force=force,
                prior=prior,
            )
            _say(outcomes["welch"], verbose=verbose, quiet=quiet, as_json=as_json)
        if only != "welch" and not any(outcome.is_interrupted for outcome in outcomes.values()):
            outcomes["functions"] = run_functions(
                started_s=started_s + budget_s - budget_s / parts,
                budget_s=budget_s / parts,
                path=path,
                command=command,
                progress=progress,
                force=force,
            )
            _say(outcomes["functions"], verbose=verbose, quiet=quiet, as_json=as_json)
    _finish(outcomes, strict=strict)


@app.command(epilog=epilog("refit"))
@one_line_errors
def refit(
    samples: Annotated[FilePath, typer.Argument(help="A samples file of calibrate, of any machine.")],
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
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Fit a latency model to kept samples again, and write the calibration of their machine.

    For a calibration file that this version does not read, say. Nothing is measured. --model and --prior are for Welch
    peaks.
    """
    progress = Progress(is_quiet=quiet)
    with progress.waiting("starting JAX"):
        from .refit import refit as fit_again
        from .refit import refit_functions
        from .samples import FunctionLog, read_log

    log = read_log(samples)
    set_up_jax("cpu" if log.fingerprint.platform == "cpu" else None)
    command = command_line("refit", samples, out=out, model=model, prior=prior, force=force)
    asked = {"out": out, "command": command, "progress": progress, "force": force}
    if isinstance(log, FunctionLog):
        for option, given in (("--model", model), ("--prior", prior)):
            if given:
                raise ValueError(f"{option}: expected none, as {samples} holds functions; it is for Welch peaks")
        outcomes = {"functions": refit_functions(log, samples, **asked)}
    else:
        outcomes = {"welch": fit_again(log, samples, **asked, models=model or [], prior=prior)}
    with _printed(outcomes, as_json=as_json):
        for outcome in outcomes.values():
            _say(outcome, verbose=verbose, quiet=quiet, as_json=as_json)
    _finish(outcomes, strict=strict)


@app.command(epilog=epilog("validate"))
@one_line_errors
def validate(
    file: File = None,
    budget: Annotated[float, typer.Option(help="Seconds for all of it, compiling included.")] = 20.0,
    unsealed: Unsealed = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Check that a calibration file is sound and still holds here, by timing a few runs again."""
    progress = Progress(ends_s=_STARTED_S + budget, is_quiet=quiet)
    with progress.waiting("starting JAX"):
        file = calibration_file(file)
        from .staleness import check

    verdict = check(file, started_s=_STARTED_S, budget_s=budget, progress=progress, unsealed=unsealed)
    if as_json:
        from .printing import json_text

        typer.echo(json_text(verdict.as_json(file)))
    elif not quiet:
        typer.echo("\n".join(verdict.lines(file)))
    if quiet and verdict.status:
        warn(verdict.sentences(file)[0])
    raise typer.Exit(verdict.status)


add_questions(app)
app.command(epilog=epilog("report"))(report)


def main() -> None:
    """Run the command line."""
    run(app, sys.argv[1:] or ["--help"], "rlxjax")


def calibrate_main() -> None:
    """Run the calibrate job itself."""
    job = typer.Typer(**_TYPER, add_completion=False)
    job.command(name="calibrate", epilog=epilog("calibrate"))(calibrate)
    run(job, sys.argv[1:], "python -m calibrate")


def _say(outcome: "Outcome | FunctionsOutcome", *, verbose: bool, quiet: bool, as_json: bool) -> None:
    """Print what calibrating one model gave, as soon as that is known; JSON comes at the end."""
    from .outcome import Outcome, print_functions, print_outcome
    from .printing import console

    if quiet:
        for text in (
            *outcome.verdict.cautions,
            *(() if outcome.is_written else outcome.notes),
        ):
            warn(text)
    elif as_json:
        return
    elif isinstance(outcome, Outcome):
        print_outcome(outcome, console(), is_verbose=verbose)
    else:
        print_functions(outcome, console(), is_verbose=verbose)


@contextlib.contextmanager
def _printed(outcomes: "Mapping[str, Outcome | FunctionsOutcome]", *, as_json: bool) -> "Iterator[None]":
    """Print outcomes as JSON at the end where that was asked: those that there are, should a later model fail."""

    def echo() -> None:
        if as_json and outcomes:
            from .outcome import outcome_as_dict
            from .printing import json_text

            typer.echo(json_text({name: outcome_as_dict(outcome) for name, outcome in outcomes.items()}))

    try:
        with last_act(echo):
            yield
    finally:
        echo()


def _finish(outcomes: "Mapping[str, Outcome | FunctionsOutcome]", *, strict: bool) -> None:
    """End with the exit status that says what calibrating each model gave."""
    if any(outcome.is_interrupted for outcome in outcomes.values()):
        raise KeyboardInterrupt("this is of what was measured so far")
    if not all(outcome.is_written for outcome in outcomes.values()):
        raise typer.Exit(NOT_WRITTEN_STATUS)
    if strict and not all(outcome.verdict.is_ready for outcome in outcomes.values()):
        raise typer.Exit(NOT_READY_STATUS)
