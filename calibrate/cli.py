"""The commands that measure and fit, and the entry points. Bad input prints one line and gives exit status 2."""

import contextlib
import sys
import time
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

_STARTED_S = time.perf_counter()

import typer  # noqa: E402
from typer import Argument, Option  # noqa: E402
from typer.main import get_command  # noqa: E402

import rlxjax  # noqa: E402

from . import decisions, evaluate, questions, report  # noqa: E402, F401  (which add their commands)
from .command_line import (  # noqa: E402
    NOT_WRITTEN_STATUS,
    OF_PRINTING,
    AsJson,
    File,
    Force,
    Prior,
    Quiet,
    Strict,
    Suites,
    Verbose,
    app,
    calibration_file,
    command,
    command_line,
    run,
    set_up_jax,
    warn,
)
from .interrupts import last_act  # noqa: E402
from .terminal import Progress, console, json_text, say  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .judge import Outcome

#: The exit status of a command with --strict if a calibration is not ready.
NOT_READY_STATUS = 3
#: The default seconds and the least seconds for each suite; the default suites; and the weights (1 by default) by which
#: suites share the seconds beyond the least seconds.
MODEL_BUDGET_S, MIN_BUDGET_S, SHIPPED, SHARES = 60.0, 10.0, ("functions", "welch"), {"functions": 4.0}
#: The order of the commands in the help.
ORDER = ["profile", "advise", "evaluate", "calibrate", "refit", "validate", "report", "predict", "explain"]
_FITTED = {1: "a fit did not converge, or is worse than the calibration: not written", 3: "with --strict: not ready"}


def _print_version(is_asked: bool | None) -> None:
    if is_asked:
        typer.echo(f"rlxjax {rlxjax.__version__}")
        raise typer.Exit


@app.callback()
def commands(
    version: Annotated[
        bool | None, Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = None,
) -> None:
    """Count, predict and measure JAX functions, and decide which of them should be one program."""


@command(
    "rlxjax calibrate",
    "rlxjax calibrate --only functions --budget 30",
    statuses=_FITTED | {130: "interrupted; prints the fit of the samples until then"},
)
def calibrate(
    context: typer.Context,
    device: Annotated[str | None, Option(help="JAX platform to calibrate: cpu, gpu, cuda, rocm or tpu.")] = None,
    budget: Annotated[
        float | None,
        Option(help="Total seconds, with compilation and fits. Default: 60 for each suite; functions get most."),
    ] = None,
    only: Annotated[
        Literal["welch", "functions", "collectives"] | None,
        Option(help="Measure one suite. Default: functions, welch and, with several local devices, collectives."),
    ] = None,
    suite: Annotated[
        list[str] | None, Option(help="Your own suite instead, as module:NAME or an entry point. Repeatable.")
    ] = None,
    out: Annotated[FilePath | None, Option(help="The calibration file. Default: the file that rlxjax loads.")] = None,
    resume: Annotated[bool, Option("--resume", help="Continue with the samples of an earlier run.")] = False,
    model: Annotated[list[FilePath] | None, Option(help="A learned FFT to time as well. Repeatable.")] = None,
    prior: Prior = None,
    force: Force = False,
    strict: Strict = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine, fit the latency model of each suite, and write the calibration file.

    A fit that predicts worse than the calibration goes to another file. Sections of other models stay. Measuring
    ends early once the errors are small. --model applies only to Welch peaks.
    """
    if only is not None and suite:
        raise ValueError("--only: expected either --only or --suite, got both")
    names = suite or ([only] if only else list(SHIPPED))
    budget_s, least_s = MODEL_BUDGET_S * len(names) if budget is None else budget, MIN_BUDGET_S * len(names)
    if not least_s <= budget_s < float("inf"):
        raise ValueError(
            f"--budget: expected at least {least_s:g} seconds, {MIN_BUDGET_S:g} per suite, got {budget_s:g}"
        )
    progress = Progress(ends_s=_STARTED_S + budget_s, is_quiet=quiet)
    with progress.waiting("starting JAX"):
        set_up_jax(device)
        import jax

        from rlxjax.calibration import current_fingerprint, default_calibration_path, locked, machine_section

        from .campaign import run as run_campaign
        from .samples import samples_path
        from .suites import suite_of

    path = default_calibration_path() if out is None else out
    if not (suite or only) and jax.local_device_count() > 1 and (budget is None or budget >= least_s + MIN_BUDGET_S):
        names, budget_s = [*names, "collectives"], budget_s + MODEL_BUDGET_S * (budget is None)
        progress = Progress(ends_s=_STARTED_S + budget_s, is_quiet=quiet)
    suites, failed = {}, []
    for name in names:
        try:
            suites[name] = suite_of(name, model or [])
        except ValueError as error:
            failed.append(str(error))
    begun = [name for name, one in suites.items() if samples_path(path, one.model.name).exists()] or names
    shared: dict[str, Any] = {"path": path, "command": command_line(context), "progress": progress}
    shared |= {"force": force, "prior": prior}
    begins_s, shares = _STARTED_S, {name: SHARES.get(name, 1.0) for name in suites}
    with _told(context) as tell, locked(path):
        shared["earlier"] = machine_section(path, current_fingerprint())
        for name, one in suites.items():
            own_s = MIN_BUDGET_S + (budget_s - MIN_BUDGET_S * len(suites)) * shares[name] / sum(shares.values())
            try:
                own = {"started_s": begins_s, "budget_s": own_s, "resume": resume and name in begun}
                begins_s += own_s
                outcome = run_campaign(one, name, **own, **shared)
            except ValueError as error:
                failed.append(str(error))
                continue
            tell(one.model.name, outcome)
            if outcome.is_interrupted:
                break
        if failed:
            raise ValueError("; ".join(failed))


@command("rlxjax refit calibration-cpu.functions.samples.jsonl --verbose", statuses=_FITTED)
def refit(
    context: typer.Context,
    samples: Annotated[FilePath, Argument(help="A samples file of `calibrate`, from any machine.")],
    out: Annotated[
        FilePath | None, Option(help="The calibration file. Default: NAME.json beside NAME.MODEL.samples.jsonl.")
    ] = None,
    prior: Prior = None,
    suite: Annotated[str | None, Option(help="Your own suite that took the samples, as module:NAME.")] = None,
    force: Force = False,
    strict: Strict = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Fit a latency model again to samples that were kept, and write the calibration of the machine that took them.

    Use this for a section that this version of rlxjax cannot read. Nothing is measured.
    """
    progress = Progress(is_quiet=quiet)
    with progress.waiting("starting JAX"):
        from .campaign import refit as fit_again
        from .samples import read_samples
        from .suites import suite_of, suite_of_file

    log = read_samples(samples)
    set_up_jax("cpu" if log.fingerprint.platform == "cpu" else None)
    of = suite_of(suite) if suite else suite_of_file(log.header.suite, "")
    with _told(context) as tell:
        said = command_line(context)
        outcome = fit_again(of, log, samples, out=out, command=said, progress=progress, force=force, prior=prior)
        tell(of.model.name, outcome)


@command(
    "rlxjax validate",
    "rlxjax validate calibration.json --quiet",
    statuses={
        0: "the calibration holds",
        1: "the calibration is off",
        2: "a calibration of another machine, or bad input",
        3: "inconclusive: the machine is busier, or the intervals are too wide",
    },
)
def validate(
    file: File = None,
    budget: Annotated[float, Option(help="Total seconds, with compilation.")] = 20.0,
    suite: Suites = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Check that a calibration file still holds on this machine, by timing a few runs again."""
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


app.registered_commands.sort(key=lambda own: ORDER.index(own.callback.__name__ if own.callback else ""))


def main() -> None:
    run(app, sys.argv[1:] or ["--help"], "rlxjax")


def calibrate_main() -> None:
    job = get_command(app)
    run(getattr(job, "commands", {})["calibrate"], sys.argv[1:], "python -m calibrate")


@contextlib.contextmanager
def _told(context: typer.Context) -> "Iterator[Callable[[str, Outcome], None]]":
    """Yield a function that prints a model's outcome. At the end, print JSON and exit with the status of all models."""
    outcomes: dict[str, Outcome] = {}
    strict, verbose, quiet, as_json = (context.params[name] for name in OF_PRINTING)

    def tell(model: str, outcome: "Outcome") -> None:
        from .judge import print_outcome

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
        raise KeyboardInterrupt("the output covers the samples so far")
    if not all(outcome.is_written for outcome in outcomes.values()):
        raise typer.Exit(NOT_WRITTEN_STATUS)
    if strict and not all(outcome.verdict.is_ready for outcome in outcomes.values()):
        raise typer.Exit(NOT_READY_STATUS)
