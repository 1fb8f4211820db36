"""The commands that ask: what runs take, why one is picked, whether functions should be one, and how peers compare."""

import json
from pathlib import Path as FilePath
from typing import Annotated

import typer

import rlxjax

from .command_line import (
    MAX_SIZE,
    AsJson,
    Batch,
    File,
    NFft,
    Peaks,
    Segments,
    calibration_of,
    command_line,
    console,
    say_source,
    set_up_jax,
)
from .refusals import one_line_errors

#: Exit status of an advice that decides nothing.
UNSURE_STATUS = 1


def add_questions(app: typer.Typer) -> None:
    """Add the commands of this module to an application."""
    for command in (predict, explain, advise, bench):
        app.command()(command)


@one_line_errors
def predict(
    batch: Batch,
    file: File = None,
    n_fft: NFft = 256,
    k: Peaks = 16,
    segments: Segments = 2,
    as_json: AsJson = False,
) -> None:
    """Predict what each strategy takes for a workload, and pick the cheapest of the same result.

    With two segments, ultra is shown as well: the host's path with one, another result.
    """
    known = calibration_of(file)
    from rlxjax import WelchPeakParams
    from rlxjax.models import WELCH

    params = WelchPeakParams(n_fft, segments, k)
    calibration = known.of(WELCH.name)
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
        found |= {"in_domain": inside, "extrapolated": not inside}
        typer.echo(json.dumps(sizes | found | {"calibration": known.source, "cautions": calibration.cautions}))
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
    say_source(known, WELCH.name)


@one_line_errors
def explain(
    batch: Batch,
    file: File = None,
    n_fft: NFft = 256,
    k: Peaks = 16,
    segments: Segments = 2,
    as_json: AsJson = False,
) -> None:
    """Say why a strategy is picked: the parts of its time, the margin, and what would change the choice."""
    known = calibration_of(file)
    from rlxjax.models import WELCH

    explanation = known.explain(batch, n_fft, k, segments, model=WELCH.name)
    if as_json:
        said = {"calibration": known.source, "cautions": known.of(WELCH.name).cautions}
        typer.echo(json.dumps(explanation.as_dict() | said))
        return
    from .explanation import print_explanation

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
    set_up_jax(None)
    import jax

    from rlxjax import advise as ask

    from .named import arguments_of, named

    with jax.enable_x64(False):  # as users call them
        functions = [named(stage, "stages") for stage in stages]
        given = arguments_of(arg or [], args)
        known = None if calibration else rlxjax.default_calibration()
        known = rlxjax.load_calibration(calibration) if known is None else known
        advice = ask(
            functions if len(functions) > 1 else functions[0],
            *given,
            calibration=known,
            min_gain_ns=min_gain,
            trip_counts=trips,
            measure=measure,
        )
    if as_json:
        typer.echo(json.dumps(advice.as_dict() | {"calibration": known.source}))
    else:
        typer.echo(str(advice))
        say_source(known, "functions")
    raise typer.Exit(0 if advice.verdict in ("fuse", "keep") else UNSURE_STATUS)


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
    calibration: Annotated[
        FilePath | None,
        typer.Option(help="The calibration that auto picks by; the saved one of this machine unless given."),
    ] = None,
    out: Annotated[FilePath | None, typer.Option(help="A JSON file for every time.")] = None,
) -> None:
    """Time Welch peaks against the naive form and every peer that is installed, and print the ratios."""
    set_up_jax(device)
    import jax

    from rlxjax import default_calibration, load_calibration

    from .bench import bench_cells, run_bench
    from .bench_report import print_bench
    from .report import Progress

    cells = bench_cells(n_fft or (), batch or (), k or (), segments)
    sizes = {"n_fft": n_fft, "batch": batch, "k": k, "segments": segments}
    options = {"budget": f"{budget:g}", "device": device, "calibration": calibration, "out": out}
    with jax.enable_x64(False):
        auto_by = default_calibration() if calibration is None else load_calibration(calibration)
    with Progress().phase("measuring", total=len(cells)) as advance:
        content = run_bench(
            cells,
            budget_s=budget,
            command=command_line("bench", **sizes, contender=contender, **options),
            names=contender or (),
            out=out,
            calibration=auto_by,
            advance=advance,
        )
    print_bench(content, console(120))
    typer.echo(f"auto picks by {'the built-in coefficients' if auto_by is None else auto_by.source}")
    if out is not None:
        typer.echo(f"every time: {out}")
