"""The commands that ask: what runs take, why one is picked, and whether functions should be one."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

import typer

import rlxjax

from .command_line import (
    AsJson,
    Batch,
    File,
    NFft,
    Peaks,
    Segments,
    calibration_of,
    cautions_of,
    one_line_errors,
    say_source,
    set_up_jax,
    workload,
)
from .decisions import decided_here, in_words, summary
from .terminal import Progress, console, json_text, plain, say

#: Exit status of an advice that decides nothing.
UNSURE_STATUS = 1


@one_line_errors
def predict(
    batch: Batch,
    file: File = None,
    n_fft: NFft = 256,
    k: Peaks = 16,
    segments: Segments = 2,
    as_json: AsJson = False,
) -> None:
    """Predict what each strategy of Welch peaks takes, and pick the cheapest of the same result.

    With two segments, ultra is shown as well: the host's path with one, another result.
    """
    with Progress().waiting("predicting"):
        sizes = workload(batch, n_fft, k, segments)
        known = calibration_of(file)
        from rlxjax.models import WELCH

        from .explanation import prediction_of, print_prediction

        found = prediction_of(known.of(WELCH.name), sizes)
    _answer(known, WELCH.name, found if as_json else None, lambda: print_prediction(found))


@one_line_errors
def explain(
    batch: Batch,
    file: File = None,
    n_fft: NFft = 256,
    k: Peaks = 16,
    segments: Segments = 2,
    as_json: AsJson = False,
) -> None:
    """Say why a strategy of Welch peaks is picked: parts of its time, margin, and what would change the choice."""
    with Progress().waiting("explaining"):
        sizes = workload(batch, n_fft, k, segments)
        known = calibration_of(file)
        from rlxjax.models import WELCH

        from .explanation import possible, print_explanation

        explanation = possible(known.explain(**sizes, model=WELCH.name), WELCH)
        decided = decided_here(known.of(WELCH.name), sizes)
    found = explanation.as_dict() | {"remembered": None if decided is None else summary(decided)}

    def print_text() -> None:
        print_explanation(explanation, console())
        if decided is not None:
            say(in_words(decided))

    _answer(known, WELCH.name, found if as_json else None, print_text)


def _answer(
    known: "rlxjax.Calibration | None", model: str, found: dict[str, Any] | None, print_text: Callable[[], None]
) -> None:
    """Print what was found, as JSON if that is given, and which calibration says so, if one does."""
    source, cautions = (None, []) if known is None else (known.source, cautions_of(known, model))
    if found is not None:
        typer.echo(json_text(found | {"calibration": source, "cautions": cautions}))
        return
    print_text()
    if known is not None:
        say_source(known, model)


Arg = Annotated[list[str] | None, typer.Option(help="An argument, as f32[1024,256]; may be given again.")]
Args = Annotated[
    str | None, typer.Option(help="All arguments, as module:name of a tuple or of a function that returns it.")
]
Given = Annotated[
    FilePath | None, typer.Option("--calibration", help="The calibration; the saved one of this machine unless given.")
]
Trips = Annotated[
    list[int] | None, typer.Option(help="How often a loop turns whose length depends on data; in order.", min=0)
]


Target = Annotated[str | None, typer.Option(help="A device to compile for, as tpu-v5e or h100, or a file of one.")]


@contextlib.contextmanager
def _users_functions(
    what: str, names: list[str], arg: list[str] | None, args: str | None
) -> Iterator[tuple[list[Callable], tuple]]:
    """Import functions and run what asks about them as users call them; yield them and their arguments."""
    with Progress().waiting(what):
        set_up_jax(None)
        import jax

        from .suites import arguments_of, named

        # What their code prints is no part of the answer.
        with jax.enable_x64(False), contextlib.redirect_stdout(sys.stderr):
            functions = [named(name, "function", Callable) for name in names]
            yield functions, arguments_of(arg or [], args)


def _asked(file: FilePath | None) -> "rlxjax.Calibration":
    """Return the calibration of a file, or that of this machine."""
    known = None if file else rlxjax.default_calibration()
    return known or rlxjax.load_calibration(file)


@one_line_errors
def profile(
    function: Annotated[str, typer.Argument(help="The function, as module:function.")],
    arg: Arg = None,
    args: Args = None,
    calibration: Given = None,
    trips: Trips = None,
    target: Target = None,
    as_json: AsJson = False,
) -> None:
    """Count what a jitted function does, and say what it takes on this machine and which part of it takes how long.

    The module is imported, from the current folder too. Nothing is compiled or run, unless a target is given: then the
    function is compiled for that device, which need not be there, and kernels, memory and estimates are its compiler's.
    """
    if target is not None:
        known = rlxjax.load_calibration(calibration) if calibration else None
        return _profile_for(target, function, arg, args, trips, known, as_json)
    with _users_functions("profiling", [function], arg, args) as ((fn,), given):
        known = _asked(calibration)
        found = known.predict_function(fn, *given, trip_counts=trips)
    text = plain(f"{found.profile}\n\n{found}")
    _answer(known, "functions", found.as_dict() if as_json else None, lambda: typer.echo(text))
    raise typer.Exit(UNSURE_STATUS if found.uncounted else 0)


def _profile_for(
    target: str,
    function: str,
    arg: list[str] | None,
    args: str | None,
    trips: list[int] | None,
    known: "rlxjax.Calibration | None",
    as_json: bool,
) -> None:
    """Print what a function takes of a device that it is compiled for."""
    from rlxjax.calibration import predict_for_target
    from rlxjax.targets import DoesNotFitError

    found, predicted, refused = None, None, ""
    with _users_functions(f"compiling for {target}", [function], arg, args) as ((fn,), given):
        try:
            found = rlxjax.profile_function(fn, *given, level="compiled", target=target, trip_counts=trips)
            if found.target is not None and found.target.devices == 1:
                predicted = predict_for_target(fn, *given, target=target, calibration=known, trip_counts=trips)
        except DoesNotFitError as error:  # which is an answer
            refused = str(error)
    if found is None:
        answer = json_text({"target": {"name": target, "fits": False, "reason": refused}})
        typer.echo(answer if as_json else plain(refused))
        raise typer.Exit(UNSURE_STATUS)
    if as_json:
        time = None if predicted is None else predicted.time_as_dict()
        typer.echo(json_text(found.as_dict() | {"prediction": time}))
    else:
        text = f"{found}" if predicted is None else f"{found}\n\n{predicted}"
        typer.echo(plain(text))
    fits = found.target is not None and found.target.fits
    raise typer.Exit(UNSURE_STATUS if found.uncounted or not fits else 0)


@one_line_errors
def advise(
    stages: Annotated[
        list[str], typer.Argument(help="Functions as module:function, in order; of one, its parts are compared.")
    ],
    arg: Arg = None,
    args: Args = None,
    calibration: Given = None,
    min_gain: Annotated[
        float, typer.Option(help="Nanoseconds that fewer programs have to save in a call.", min=0)
    ] = 0.0,
    trips: Trips = None,
    measure: Annotated[
        Literal["never", "undecided", "always"] | None,
        typer.Option(
            help="Compile and time the forms that the model does not rule out, or always; RLXJAX_MEASURE, else never."
        ),
    ] = None,
    target: Target = None,
    as_json: AsJson = False,
) -> None:
    """Say which of several jitted functions should be one program on this machine, and why.

    The modules that are named are imported, from the current folder too. With a target every form is compiled for that
    device, which need not be there, and its compiler's kernels, bytes, memory and estimates decide.
    """
    if target is not None and calibration:
        raise ValueError("--calibration: expected none with --target, which is another device than this one")
    is_timed = measure not in (None, "never")
    what = "timing the forms" if is_timed else f"compiling for {target}" if target else "advising"
    with _users_functions(what, stages, arg, args) as (functions, given):
        known = None if target else _asked(calibration)
        advice = rlxjax.advise(
            functions if len(functions) > 1 else functions[0],
            *given,
            calibration=known,
            min_gain_ns=min_gain,
            trip_counts=trips,
            measure=measure,
            target=target,
        )

    _answer(known, "functions", advice.as_dict() if as_json else None, lambda: say(str(advice)))
    raise typer.Exit(0 if advice.verdict in ("fuse", "group", "keep") else UNSURE_STATUS)
