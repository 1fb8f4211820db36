"""The commands. Bad input is one line on standard error and exit status 2, never a traceback."""

import contextlib
import sys
import time
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

_STARTED_S = time.perf_counter()

import typer  # noqa: E402

import rlxjax  # noqa: E402

from .command_line import (  # noqa: E402
    NOT_WRITTEN_STATUS,
    OVERVIEW,
    AsJson,
    File,
    Quiet,
    Suites,
    calibration_file,
    command_line,
    epilog,
    one_line_errors,
    run,
    set_up_jax,
    warn,
)
from .decisions import decisions  # noqa: E402
from .evaluate import Prior, evaluate, fleet  # noqa: E402
from .interrupts import last_act  # noqa: E402
from .questions import advise, explain, predict, profile  # noqa: E402
from .report_command import report  # noqa: E402
from .terminal import Progress, console, json_text, say  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .outcome import Outcome

_TYPER: Any = {
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
app = typer.Typer(**_TYPER, epilog=OVERVIEW)

#: Exit status of a calibration that is not good enough, where that was asked.
NOT_READY_STATUS = 3
#: Seconds of the calibrate job for each suite, and the least; the suites that are timed unless others are given.
MODEL_BUDGET_S, MIN_BUDGET_S, SHIPPED = 60.0, 10.0, ("welch", "functions")
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


for _command in (profile, advise, evaluate, fleet):
    app.command(epilog=epilog(_command.__name__))(_command)


@app.command(epilog=epilog("calibrate"))
@one_line_errors
def calibrate(
    device: Annotated[str | None, typer.Option(help="JAX platform to calibrate: cpu, gpu, cuda, rocm or tpu.")] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Seconds for all of it, compiling and fitting included; 60 for each suite unless given."),
    ] = None,
    only: Annotated[
        Literal["welch", "functions"] | None, typer.Option(help="One of the two suites; both unless given.")
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(help="A suite of your own in their place, as module:NAME or installed; may be given again."),
    ] = None,
    out: Annotated[
        FilePath | None, typer.Option(help="The calibration file; by default where rlxjax looks for it.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the samples of an earlier run.")] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A learned FFT to time as well; may be given again."),
    ] = None,
    prior: Prior = None,
    force: Force = False,
    strict: Strict = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine, fit the latency model of each suite, and write the calibration file.

    What the file says of another model of this machine stays. --model is for Welch peaks, whose fit starts from what
    other machines say. Measuring ends early once the errors are small.
    """
    if only is not None and suite:
        raise ValueError("--only: expected no --suite beside it")
    names = suite or ([only] if only else list(SHIPPED))
    budget_s = MODEL_BUDGET_S * len(names) if budget is None else budget
    least_s = MIN_BUDGET_S * len(names)
    if not least_s <= budget_s < float("inf"):
        raise ValueError(f"--budget: expected at least {least_s:g} seconds, {MIN_BUDGET_S:g} a suite, got {budget_s:g}")
    progress = Progress(ends_s=_STARTED_S + budget_s, is_quiet=quiet)
    with progress.waiting("starting JAX"):
        set_up_jax(device)
        from rlxjax.calibration import default_calibration_path, locked

        from .campaign import run as run_campaign
        from .samples import samples_path
        from .suites import suite_of

    given = {"device": device, "only": only, "suite": suite, "out": out, "model": model, "prior": prior}
    command = command_line("calibrate", budget=f"{budget_s:g}", **given, resume=resume, force=force)
    path = default_calibration_path() if out is None else out
    suites, failed = {}, []
    for name in names:
        try:
            suites[name] = suite_of(name, [FilePath(file) for file in model or []])
        except ValueError as error:
            failed.append(str(error))
    begun = [name for name, one in suites.items() if samples_path(path, one.model.name).exists()] or names
    with _told(strict=strict, verbose=verbose, quiet=quiet, as_json=as_json) as tell, locked(path):
        for number, (name, one) in enumerate(suites.items()):
            try:
                outcome = run_campaign(
                    one,
                    name,
                    started_s=_STARTED_S + budget_s * number / len(suites),
                    budget_s=budget_s / len(suites),
                    path=path,
                    resume=resume and name in begun,
                    command=command,
                    progress=progress,
                    force=force,
                    prior=prior,
                )
            except ValueError as error:
                failed.append(str(error))
                continue
            tell(one.model.name, outcome)
            if outcome.is_interrupted:
                break
        if failed:
            raise ValueError("; ".join(failed))


@app.command(epilog=epilog("refit"))
@one_line_errors
def refit(
    samples: Annotated[FilePath, typer.Argument(help="A samples file of calibrate, of any machine.")],
    out: Annotated[
        FilePath | None,
        typer.Option(help="The calibration file; by default NAME.json beside NAME.MODEL.samples.jsonl."),
    ] = None,
    prior: Prior = None,
    suite: Annotated[
        str | None, typer.Option(help="The suite of the samples, as module:NAME, where it is one of your own.")
    ] = None,
    force: Force = False,
    strict: Strict = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Fit a latency model to kept samples again, and write the calibration of their machine.

    For a section of a calibration file that this version does not read, say. Nothing is measured.
    """
    progress = Progress(is_quiet=quiet)
    with progress.waiting("starting JAX"):
        from .campaign import refit as fit_again
        from .samples import read_samples
        from .suites import suite_of, suite_of_file

    log = read_samples(samples)
    set_up_jax("cpu" if log.fingerprint.platform == "cpu" else None)
    of = suite_of(suite) if suite else suite_of_file(log.header.suite, "")
    with _told(strict=strict, verbose=verbose, quiet=quiet, as_json=as_json) as tell:
        outcome = fit_again(
            of,
            log,
            samples,
            out=out,
            command=command_line("refit", samples, out=out, prior=prior, suite=suite, force=force),
            progress=progress,
            force=force,
            prior=prior,
        )
        tell(of.model.name, outcome)


@app.command(epilog=epilog("validate"))
@one_line_errors
def validate(
    file: File = None,
    budget: Annotated[float, typer.Option(help="Seconds for all of it, compiling included.")] = 20.0,
    suite: Suites = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Check that a calibration file is sound and still holds here, by timing a few runs again."""
    progress = Progress(ends_s=_STARTED_S + budget, is_quiet=quiet)
    with progress.waiting("starting JAX"):
        file = calibration_file(file)
        from .check import check
        from .suites import suite_of

    given = [suite_of(name) for name in suite or []]
    verdict = check(file, started_s=_STARTED_S, budget_s=budget, progress=progress, suites=given)
    if as_json:
        typer.echo(json_text(verdict.as_json(file)))
    elif not quiet:
        for text in verdict.sentences(file):
            say(text)
    if quiet and verdict.status:
        warn(verdict.sentences(file)[0])
    raise typer.Exit(verdict.status)


for _command in (report, predict, explain):
    app.command(epilog=epilog(_command.__name__))(_command)
app.add_typer(decisions, name="decisions")


def main() -> None:
    """Run the command line."""
    run(app, sys.argv[1:] or ["--help"], "rlxjax")


def calibrate_main() -> None:
    """Run the calibrate job itself."""
    job = typer.Typer(**_TYPER, add_completion=False)
    job.command(name="calibrate", epilog=epilog("calibrate"))(calibrate)
    run(job, sys.argv[1:], "python -m calibrate")


@contextlib.contextmanager
def _told(*, strict: bool, verbose: bool, quiet: bool, as_json: bool) -> "Iterator[Callable[[str, Outcome], None]]":
    """Yield what prints the outcome of a model as soon as it is known, then end with the exit status of all.

    JSON comes at the end, of those outcomes that there are should a later suite fail.
    """
    outcomes: dict[str, Outcome] = {}

    def tell(model: str, outcome: "Outcome") -> None:
        from .outcome import print_outcome

        outcomes[model] = outcome
        if quiet:
            for text in (*outcome.verdict.cautions, *(() if outcome.is_written else outcome.notes)):
                warn(text)
        elif not as_json:
            print_outcome(outcome, console(), is_verbose=verbose)

    def echo() -> None:
        if as_json and outcomes:
            typer.echo(json_text({name: outcome.as_dict() for name, outcome in outcomes.items()}))

    try:
        with last_act(echo):
            yield tell
    finally:
        echo()
    if any(outcome.is_interrupted for outcome in outcomes.values()):
        raise KeyboardInterrupt("this is of what was measured so far")
    if not all(outcome.is_written for outcome in outcomes.values()):
        raise typer.Exit(NOT_WRITTEN_STATUS)
    if strict and not all(outcome.verdict.is_ready for outcome in outcomes.values()):
        raise typer.Exit(NOT_READY_STATUS)
