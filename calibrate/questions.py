"""The commands that predict times, explain a pick, profile a function, and advise on fusing functions."""

import contextlib
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from typer import Argument, Option

import rlxjax
from rlxjax.units import interval_text, printable, probability_text, time_text

from .command_line import (
    AsJson,
    Batch,
    File,
    NFft,
    Peaks,
    Segments,
    calibration_of,
    command,
    command_line,
    in_options,
    say_source,
    set_up_jax,
    source_of,
    workload,
)
from .decisions import decided_here, in_words, summary
from .terminal import Progress, console, finite_ns, json_text, print_table, say

#: The exit status of an advice that contains no decision.
UNSURE_STATUS = 1
#: The lengths, in characters, of the longest bar and of the shortest bar to draw.
BAR_WIDTH, LEAST_BAR_WIDTH = 16, 4


# --- Welch peaks ---------------------------------------------------------------------------------


@command("rlxjax predict --batch 8192 --n-fft 256 --k 16")
def predict(
    batch: Batch, file: File = None, n_fft: NFft = 256, k: Peaks = 16, segments: Segments = 2, as_json: AsJson = False
) -> None:
    """Predict the time of each strategy of Welch peaks, and name the fastest strategy."""
    with Progress().waiting("predicting"):
        sizes = workload(batch, n_fft, k, segments)
        known = calibration_of(file)
        own = known.of("welch")
        names = own.alternatives(**sizes)
        times_ns = {name: finite_ns(own.predict_ns(name, **sizes), name) for name in names}
        ends_ns = {name: [finite_ns(end, name) for end in own.interval_ns(name, **sizes)] for name in names}
        pick, next_best = sorted(names, key=times_ns.__getitem__)[:2]  # the earlier name if two times are equal
        decided = own.compare(pick, next_best, **sizes)
        probability, in_domain = float(decided.probability), bool(decided.in_domain)
        verdict = pick if decided.verdict() == "fuse" else "undecided"
        ratio = times_ns[pick] / times_ns[next_best]
    if as_json:
        found = {**sizes, "predicted_ns": times_ns, "interval_ns": ends_ns, "pick": pick, "next_best": next_best}
        found |= {"ratio_to_next_best": ratio, "probability": probability, "verdict": verdict}
        found |= {"in_domain": in_domain, "extrapolated": not in_domain}
        typer.echo(json_text(found | source_of(known, "welch")))
        return
    say("predicted time of a call, and its 90 % interval:")
    for name, time_ns in times_ns.items():
        say(f"  {name:8}{interval_text(time_ns, *ends_ns[name])}{'  <- pick' if name == pick else ''}")
    likely = f"{pick} is {probability_text(probability)} likely to be faster than {next_best}"
    said = f"{likely}; its predicted time is {ratio:.2f} times the predicted time of {next_best}"
    say(f"undecided: {said}" if verdict == "undecided" else said)
    if not in_domain:
        say("extrapolated: the workload is outside the measured range")
    say_source(known, "welch")


@command("rlxjax explain --batch 8192 --n-fft 256 --k 16")
def explain(
    batch: Batch, file: File = None, n_fft: NFft = 256, k: Peaks = 16, segments: Segments = 2, as_json: AsJson = False
) -> None:
    """Explain the pick, the fastest strategy of Welch peaks: its time in parts, and the nearest other pick."""
    with Progress().waiting("explaining"):
        sizes = workload(batch, n_fft, k, segments)
        known = calibration_of(file)
        own = known.of("welch")
        explanation = finite(known.explain(**sizes, model="welch"))
        decided = decided_here(own, sizes)
    if as_json:
        found = explanation.as_dict() | {"remembered": None if decided is None else summary(decided)}
        typer.echo(json_text(found | source_of(known, "welch")))
        return
    to = console()
    _print_waterfall(explanation, to)
    for text in reasons(explanation):
        say(text, to)
    if not explanation.in_domain:
        say("extrapolated: the workload is outside the measured range", to)
    if decided is not None:
        say(in_words(decided))
    say_source(known, "welch")


def finite(explanation: "rlxjax.calibration.Explanation") -> "rlxjax.calibration.Explanation":
    """Return an explanation; refuse it if a time is not finite."""
    for strategy in explanation.strategies:
        finite_ns(strategy.time_ns, strategy.strategy)
    return explanation


def reasons(explanation: "rlxjax.calibration.Explanation") -> list[str]:
    """Return sentences on the pick's lead, its probability and the verdict; on why; and on the crossover."""
    verdict, crossover = explanation.verdict, explanation.crossover
    ends = "" if crossover.interval is None else "; 90 % interval {:,.0f} to {:,.0f}".format(*crossover.interval)
    return [
        f"predicted: {explanation.pick} is faster than {explanation.runner_up} by {time_text(explanation.margin_ns)}, "
        f"give or take {time_text(explanation.margin_sd_ns)}; probability {100 * explanation.probability:.1f} %: "
        f"{'undecided, too close to call' if verdict == 'undecided' else verdict}",
        f"why: {explanation.why}",
        f"crossover: {'' if ends else 'none, '}{crossover.sentence}{ends}",
    ]


def _print_waterfall(explanation: "rlxjax.calibration.Explanation", to: Console) -> None:
    """Print a row with a bar for each term. Each bar begins where the bar above ends, and all bars have one scale."""
    strategies = explanation.strategies
    names = [name.removesuffix("_ns").replace("_", " ") for name in strategies[0].terms_ns]
    rows: list[list[str]] = [[name] for name in (*names, "total", "90 %: from", "90 %: to")]
    times = [[*map(time_text, (*one.terms_ns.values(), one.time_ns, *one.interval_ns))] for one in strategies]
    texts = [*names, "90 %: from"], *([one.strategy, *own] for one, own in zip(strategies, times, strict=True))
    left = to.width - sum(max(map(len, column)) for column in texts)
    width = min(left // len(strategies) - 3, BAR_WIDTH)
    ends = [[*itertools.accumulate(one.terms_ns.values(), initial=0.0)] for one in strategies]
    scale, headings, parts = width / max(map(max, ends)), ["term"], 2 if width >= LEAST_BAR_WIDTH else 1
    for own, sums, one in zip(times, ends, strategies, strict=True):
        bars = [_bar(*span, scale) for span in (*itertools.pairwise(sums), (0.0, one.time_ns))]
        headings += [one.strategy, ""][:parts]
        for row, cells in zip(rows, itertools.zip_longest(own, bars, fillvalue=""), strict=True):
            row += cells[:parts]
    sizes = ", ".join(f"{name} {value:,g}" for name, value in explanation.inputs.items())
    title = f"{sizes}: predicted time{'' if explanation.in_domain else ', extrapolated'}"
    print_table(to, title, headings, rows)


def _bar(start: float, end: float, scale: float) -> str:
    """Return a bar between two places. The bar of a negative term has a lighter shade."""
    first, last = (round(max(place * scale, 0.0)) for place in sorted((start, end)))
    return " " * first + (printable("█", "#") if end >= start else printable("░", "-")) * (last - first)


# --- Functions -----------------------------------------------------------------------------------

Arg = Annotated[list[str] | None, Option(help="An argument: f32[1024,256], float32[1024,256] or key[]; repeatable.")]
Args = Annotated[str | None, Option(help="All arguments: module:name of a tuple, or of a function returning a tuple.")]
Given = Annotated[
    FilePath | None, Option("--calibration", help="A calibration file; default: the calibration of this machine.")
]
Trips = Annotated[
    list[int] | None, Option(help="The trip count of a loop whose length depends on data; repeatable, in order.", min=0)
]
Target = Annotated[str | None, Option(help="A device to compile for: tpu-v5e, h100, ... or a target's file.")]
Axes = Annotated[str | None, Option("--mesh", help="The mesh of the target's devices, as data=4,model=2.")]


@contextlib.contextmanager
def _users_functions(
    what: str, names: list[str], arg: list[str] | None, args: str | None, size: str | None = None
) -> Iterator[tuple[list[Callable], Any]]:
    """Import a user's functions. Yield them and their arguments, or with `size` a function from a size to arguments."""
    with Progress().waiting(what):
        set_up_jax(None)
        import jax

        from .suites import arguments_of, arguments_of_size, named

        # The user's code may print, and its output is not part of the answer.
        with jax.enable_x64(False), contextlib.redirect_stdout(sys.stderr):
            functions = [named(name, "function", Callable) for name in names]
            yield functions, arguments_of_size(size, arg or [], args) if size else arguments_of(arg or [], args)


def _mesh_of(text: str | None) -> dict[str, int] | None:
    """Return a dict of the sizes of mesh axes by axis name, from a text such as data=4,model=2."""
    if text is None:
        return None
    pairs = [part.strip().partition("=") for part in text.split(",")]
    if not all(name and size.isdecimal() and int(size) for name, _, size in pairs):
        raise ValueError(f"--mesh: expected axes and sizes, as data=4,model=2, got {text!r}")
    return {name: int(size) for name, _, size in pairs}


def _asked(file: FilePath | None) -> "rlxjax.Calibration":
    """Return the calibration in a file, or without a file the calibration of this machine."""
    known = None if file else rlxjax.default_calibration()
    return known or rlxjax.load_calibration(file)


@command(
    "rlxjax profile stages:scale --arg 'f32[2048,1024]'",
    "rlxjax profile stages:scale --arg 'f32[64,8]' --target tpu-v5e --mesh x=4",
    "rlxjax profile stages:scale --args stages:of_size --target l4 --largest size",
    statuses={1: "some work is not counted, or the program does not fit a target"},
)
def profile(
    function: Annotated[str, Argument(help="The function, as module:function.")],
    arg: Arg = None,
    args: Args = None,
    calibration: Given = None,
    trips: Trips = None,
    target: Target = None,
    mesh: Axes = None,
    largest: Annotated[
        str | None,
        Option(help="Find the largest value of a size that fits a target: a name in --arg, or the argument of --args."),
    ] = None,
    devices: Annotated[
        int | None, Option(help="Compare all meshes of this many devices, with axes data and model.", min=1)
    ] = None,
    prices: Annotated[
        FilePath | None, Option(help="A file of prices per hour, to print the price of a step on a target.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count the work of a function, and predict the time of a jitted call and of its parts on this machine.

    Launches and memory traffic are counted without fusion, although XLA fuses most of these launches. Your module is
    imported, from the current folder too, but nothing is compiled or run. With --target, the function is compiled for a
    device that you need not have, and the compiler gives the kernels, the memory and its estimates.
    """
    known = None
    of_target: dict[str, Any] = {"--mesh": mesh, "--largest": largest, "--devices": devices, "--prices": prices}
    if target is None and (name := next((name for name, value in of_target.items() if value is not None), None)):
        raise ValueError(f"{name}: expected --target as well")
    if devices and (mesh or largest):
        raise ValueError("--devices: expected neither --mesh nor --largest, since --devices compares meshes")
    what = f"compiling for {target}" if target else "profiling"
    with _users_functions(what, [function], arg, args, largest) as ((fn,), given):
        if target is None:
            known = _asked(calibration)
            predicted = known.predict_function(fn, *given, trip_counts=trips)
            found, parts = predicted.as_dict() | source_of(known, "functions"), [predicted.profile, predicted]
            is_sure = not predicted.uncounted
        else:
            found, parts, is_sure = _profiled_for(
                target, fn, given, calibration, trips, _mesh_of(mesh), bool(largest), devices, prices
            )
    if as_json:
        typer.echo(json_text(found))
    else:
        say(in_options("\n\n".join(map(str, parts))))
        if known is not None:
            say_source(known, "functions")
    raise typer.Exit(0 if is_sure else UNSURE_STATUS)


def _profiled_for(
    target: str,
    fn: Callable,
    given: Any,
    calibration: FilePath | None,
    trips: list[int] | None,
    mesh: dict[str, int] | None,
    is_sized: bool,
    devices: int | None,
    prices: FilePath | None,
) -> tuple[dict[str, Any], list[object], bool]:
    """Return a function's profile on a target as JSON and as text, and whether the profile is complete and fits."""
    from rlxjax.calibration import predict_for_target
    from rlxjax.targets import DoesNotFitError, largest, load_prices, rank_meshes

    known, priced = _of_target(calibration, target), load_prices(prices) if prices else None
    options: dict[str, Any] = {"target": target, "trip_counts": trips}
    try:
        if is_sized:
            size = largest(lambda size: (fn, given(size)), target, mesh=mesh)
            return size.as_dict(), [size], True
        if devices:
            ranking = rank_meshes(fn, *given, devices=devices, prices=priced, **options)
            return ranking.as_dict(), [ranking], ranking.best is not None
        found = rlxjax.profile_function(fn, *given, level="compiled", mesh=mesh, **options)
        predicted = predict_for_target(fn, *given, calibration=known, mesh=mesh, **options)
    except DoesNotFitError as error:  # the answer is that the program does not fit
        return {"target": {"name": target, "fits": False, "reason": str(error)}}, [error], False
    is_sure = found.target is not None and found.target.fits and not predicted.uncounted
    answer, parts = found.as_dict() | {"prediction": predicted.time_as_dict()}, [found, predicted]
    cost = None
    if priced is not None and found.target is not None:
        cost = priced.cost(found.target.device.name, found.target.devices, predicted.pipelined_ns or predicted.time_ns)
        said = f"a step in a loop costs {cost or 0:.3g} {priced.currency}"
        parts.append(f"the prices file has no price for {found.target.device.name}" if cost is None else said)
    answer |= {"cost": cost, "currency": priced.currency if priced else None}
    return answer, parts, is_sure


def _of_target(file: FilePath | None, target: str) -> "rlxjax.Calibration | None":
    """Return the calibration in a file; refuse it if it is for another kind of device than the target."""
    from rlxjax.calibration import MachineMismatchWarning
    from rlxjax.models import gpu_facts, gpu_facts_of_kind
    from rlxjax.targets import target_device

    if file is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MachineMismatchWarning)  # the target is another device than this machine
        known, device = rlxjax.load_calibration(file), target_device(target)
    kind, platform = (str(known.fingerprint.get(name, "")) for name in ("device_kind", "platform"))
    is_own = gpu_facts_of_kind(kind) == gpu_facts(device) if device.platform == "cuda" else platform == "tpu"
    if not is_own:
        raise ValueError(f"--calibration: expected a calibration of {device.title}, got {file} of {kind or platform}")
    return known


@command(
    "rlxjax advise stages:scale stages:energy --arg 'f32[64]' --measure undecided",
    "rlxjax advise stages:scale stages:energy --arg 'f32[2048]' --target h100",
    statuses={0: "fuse or keep", 1: "undecided, or a function cannot be modelled"},
)
def advise(
    context: typer.Context,
    stages: Annotated[
        list[str],
        Argument(help="Functions as module:function, in order. One function is compared with its run without jit."),
    ],
    arg: Arg = None,
    args: Args = None,
    calibration: Given = None,
    min_gain: Annotated[float, Option(help="Fewer programs have to save at least this many ns per call.", min=0)] = 0.0,
    trips: Trips = None,
    measure: Annotated[
        Literal["never", "undecided", "always"] | None,
        Option(help="When to compile and time the programs. Default: RLXJAX_MEASURE, or never."),
    ] = None,
    target: Target = None,
    mesh: Axes = None,
    as_json: AsJson = False,
) -> None:
    """Say which of several jitted functions should be compiled as one program on this machine, and why.

    Your modules are imported, from the current folder too. With --target, each program is compiled for a device that
    you need not have, and the compiler's kernels, bytes, memory and estimates decide.
    """
    if target is not None and calibration:
        raise ValueError("--calibration: expected no file with --target, since the target is another device")
    is_timed = measure not in (None, "never")
    what = "timing the programs" if is_timed else f"compiling for {target}" if target else "advising"
    with _users_functions(what, stages, arg, args) as (functions, given):
        known = None if target else _asked(calibration)
        options: dict[str, Any] = {"calibration": known, "trip_counts": trips, "measure": measure, "target": target}
        options["mesh"] = _mesh_of(mesh)
        asked = functions if len(functions) > 1 else functions[0]
        advice = rlxjax.advise(asked, *given, min_gain_ns=min_gain, **options)
    if as_json:
        source = {"calibration": None, "cautions": []} if known is None else source_of(known, "functions")
        typer.echo(json_text(advice.as_dict() | source))
    else:
        say(in_options(advice.text(f"{command_line(context, 'measure')} --measure undecided")))
        if known is not None:
            say_source(known, "functions")
    raise typer.Exit(0 if advice.verdict in ("fuse", "group", "keep") else UNSURE_STATUS)
