"""The commands that ask: what runs take, why one is picked, and whether functions should be one."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Annotated

import typer

import rlxjax

from .command_help import epilog
from .command_line import (
    AsJson,
    Batch,
    File,
    NFft,
    Peaks,
    Segments,
    Unsealed,
    calibration_of,
    say_source,
    set_up_jax,
    workload,
)
from .printing import console, filled, json_text, plain
from .progress import Progress
from .refusals import one_line_errors

#: Exit status of an advice that decides nothing.
UNSURE_STATUS = 1


def add_questions(app: typer.Typer) -> None:
    """Add the commands of this module to an application."""
    for command in (predict, explain, advise):
        app.command(epilog=epilog(command.__name__))(command)


@one_line_errors
def predict(
    batch: Batch,
    file: File = None,
    n_fft: NFft = 256,
    k: Peaks = 16,
    segments: Segments = 2,
    unsealed: Unsealed = False,
    as_json: AsJson = False,
) -> None:
    """Predict what each strategy takes for a workload, and pick the cheapest of the same result.

    With two segments, ultra is shown as well: the host's path with one, another result.
    """
    with Progress().waiting("predicting"):
        sizes = workload(batch, n_fft, k, segments)
        known = calibration_of(file, unsealed)
        from rlxjax.models import WELCH

        from .prediction import prediction_of, print_prediction

        found = prediction_of(known, sizes)
    if as_json:
        typer.echo(json_text(found))
        return
    print_prediction(found)
    say_source(known, WELCH.name)


@one_line_errors
def explain(
    batch: Batch,
    file: File = None,
    n_fft: NFft = 256,
    k: Peaks = 16,
    segments: Segments = 2,
    unsealed: Unsealed = False,
    as_json: AsJson = False,
) -> None:
    """Say why a strategy is picked: the parts of its time, the margin, and what would change the choice."""
    with Progress().waiting("explaining"):
        sizes = workload(batch, n_fft, k, segments)
        known = calibration_of(file, unsealed)
        from rlxjax.models import WELCH

        from .explanation import possible, print_explanation

        explanation = possible(known.explain(**sizes, model=WELCH.name))
    if as_json:
        said = {"calibration": known.source, "cautions": known.of(WELCH.name).cautions}
        typer.echo(json_text(explanation.as_dict() | said))
        return
    print_explanation(explanation, console())
    say_source(known, WELCH.name)


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
    calibration: Annotated[
        FilePath | None, typer.Option(help="The calibration; the saved one of this machine unless given.")
    ] = None,
    min_gain: Annotated[
        float, typer.Option(help="Nanoseconds that fewer programs have to save in a call.", min=0)
    ] = 0.0,
    trips: Annotated[
        list[int] | None, typer.Option(help="How often a loop turns whose length depends on data; in order.", min=0)
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also compile and time the forms.")] = False,
    unsealed: Unsealed = False,
    as_json: AsJson = False,
) -> None:
    """Say which of several jitted functions should be one program on this machine, and why.

    The modules that are named are imported, from the current folder too.
    """
    with Progress().waiting("timing the forms" if measure else "advising"):
        set_up_jax(None)
        import jax

        from rlxjax import advise as ask

        from .named import arguments_of, named

        # As users call them; what their code prints is no part of the answer.
        with jax.enable_x64(False), contextlib.redirect_stdout(sys.stderr):
            functions = [named(stage, "stages", Callable) for stage in stages]
            given = arguments_of(arg or [], args)
            known = None if calibration or unsealed else rlxjax.default_calibration()
            known = rlxjax.load_calibration(calibration, unsealed=unsealed) if known is None else known
            advice = ask(
                functions if len(functions) > 1 else functions[0],
                *given,
                calibration=known,
                min_gain_ns=min_gain,
                trip_counts=trips,
                measure=measure,
            )
    if as_json:
        typer.echo(
            json_text(advice.as_dict() | {"calibration": known.source, "cautions": known.of("functions").cautions})
        )
    else:
        code = advice.code.splitlines()
        for line in str(advice).splitlines():
            typer.echo(
                plain(line) if line in code else filled(line.lstrip(), indent=line[: len(line) - len(line.lstrip())])
            )
        say_source(known, "functions")
    raise typer.Exit(0 if advice.verdict in ("fuse", "group", "keep") else UNSURE_STATUS)
