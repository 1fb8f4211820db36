"""What `predict` and `explain` say: times, the pick, a waterfall of the terms, what would change the choice."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console

from rlxjax.calibration import CalibratedModel, Crossover, Explanation, Flip
from rlxjax.fit import LatencyModel

from .terminal import finite_ns, ns, number, print_table, say

#: Characters of the longest bar and the shortest one that is drawn, and flips that are shown.
BAR_WIDTH, LEAST_BAR_WIDTH, FLIPS_SHOWN = 16, 4, 6


def prediction_of(calibration: CalibratedModel, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return what a calibration predicts for a workload of these sizes, as JSON has it: times in ns, shares of 1."""
    candidates = [calibration.name_of(name, **sizes) for name in calibration.alternatives(**sizes)]
    runs = dict.fromkeys(candidates, sizes)
    if sizes["n_segments"] == 2:
        runs = {"ultra": {**sizes, "n_segments": 1}, **runs}
    predicted = {name: finite_ns(calibration.predict_ns(name, **run), name) for name, run in runs.items()}
    intervals = {
        name: [finite_ns(end, name) for end in calibration.interval_ns(name, **run)] for name, run in runs.items()
    }
    pick, next_best = sorted(candidates, key=predicted.__getitem__)[:2]  # of equals the earlier one
    decided = calibration.compare(pick, next_best, **sizes)
    inside = bool(decided.in_domain)
    return {
        **sizes,
        "predicted_ns": predicted,
        "interval_ns": intervals,
        "pick": pick,
        "next_best": next_best,
        "ratio_to_next_best": predicted[pick] / predicted[next_best],
        "probability": float(decided.probability),
        "verdict": pick if decided.verdict() == "fuse" else "undecided",
        "in_domain": inside,
        "extrapolated": not inside,
    }


def print_prediction(found: Mapping[str, Any]) -> None:
    """Print what `prediction_of` returned, but for the calibration that it is by."""
    for strategy, time_ns in found["predicted_ns"].items():
        low, high = map(ns, found["interval_ns"][strategy])
        mark = "  <- pick" if strategy == found["pick"] else ""
        typer.echo(f"{strategy:7} {ns(time_ns):>15} ns  (90 %: {low} to {high}){mark}")
    undecided = "undecided: " if found["verdict"] == "undecided" else ""
    say(
        f"{undecided}{found['pick']} is faster than {found['next_best']} with {100 * found['probability']:.0f} %: "
        f"{found['ratio_to_next_best']:.2f} times its time (less is better)"
    )
    if not found["in_domain"]:
        say("outside the calibrated domain: an extrapolation")


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print an explanation as tables and sentences."""
    _print_waterfall(explanation, console)
    say(margin(explanation), to=console)
    say(f"crossover: {crossed(explanation.crossover)}", to=console)
    if any(flip.factor is not None for flip in explanation.flips):
        _print_flips(explanation, console)
    else:
        say("no single input or coefficient changes the choice within a factor of 100", to=console)
    if not explanation.in_domain:
        say("outside the calibrated domain: all of this is extrapolated", to=console)


def possible(explanation: Explanation, model: LatencyModel) -> Explanation:
    """Return an explanation without the changes that no run of the model can have."""
    for strategy in explanation.strategies:
        finite_ns(strategy.time_ns, strategy.strategy)

    def can_be(flip: Flip) -> bool:
        changed = {flip.name: flip.value * (flip.factor or 1.0)} if flip.kind == "input" else {}
        try:
            model.check({**explanation.inputs, **changed})
        except ValueError:
            return False
        return True

    flips = tuple(flip for flip in explanation.flips if can_be(flip))
    return dataclasses.replace(explanation, flips=flips)


def _print_waterfall(explanation: Explanation, console: Console) -> None:
    """Print a row a term; each bar begins where the one above it ends, all on one scale."""
    sizes = ", ".join(f"{name} {value:,g}" for name, value in explanation.inputs.items())
    title = f"{sizes}: predicted ns{'' if explanation.in_domain else ', extrapolated'}"
    strategies = explanation.strategies
    names = [name.removesuffix("_ns").replace("_", " ") for name in strategies[0].terms_ns]
    rows = [*names, "total", "90 %: from", "90 %: to"]
    times = [[*map(ns, (*s.terms_ns.values(), s.time_ns, *s.interval_ns))] for s in strategies]
    digits = [max(map(len, (strategy.strategy, *own))) for strategy, own in zip(strategies, times, strict=True)]
    left = console.width - max(map(len, rows)) - sum(digits)
    width = min(left // len(strategies) - 3, BAR_WIDTH)
    ends = [list(itertools.accumulate(strategy.terms_ns.values(), initial=0.0)) for strategy in strategies]
    per_ns, columns = width / max(map(max, ends)), []
    for strategy, own, most, sums in zip(strategies, times, digits, ends, strict=True):
        spans = [*itertools.pairwise(sums), (0.0, strategy.time_ns)] if width >= LEAST_BAR_WIDTH else []
        bars = [_bar(start * per_ns, end * per_ns) for start, end in spans]
        pairs = itertools.zip_longest((strategy.strategy, *own), ["", *bars], fillvalue="")
        columns.append([f"{text:>{most}} {bar:{width}}" if bars else text for text, bar in pairs])
    headings, *cells = zip(["term", *rows], *columns, strict=True)
    print_table(console, title, headings, cells, texts=len(headings))


def _bar(start: float, end: float) -> str:
    """Return a bar between two places; of lighter shade where a term takes time away."""
    first, last = (round(max(place, 0.0)) for place in sorted((start, end)))
    return " " * first + ("█" if end >= start else "░") * (last - first)


def margin(explanation: Explanation) -> str:
    """Return by how much the pick is ahead, how sure that is, and the verdict."""
    verdict = explanation.verdict if explanation.verdict != "undecided" else "undecided, too close to call"
    return (
        f"{explanation.pick} before {explanation.runner_up} by {ns(explanation.margin_ns)} ns, give or take "
        f"{ns(explanation.margin_sd_ns)} ns; probability {100 * explanation.probability:.1f} %: {verdict}"
    )


def crossed(crossover: Crossover) -> str:
    """Return where strategies change places, with its interval, or that they do not."""
    if crossover.interval is None:
        return f"none, {crossover.sentence}"
    low, high = crossover.interval
    return f"{crossover.sentence}; 90 % between {low:,.0f} and {high:,.0f}"


def flips_title(explanation: Explanation) -> str:
    """Return what a table of the changes that turn the choice is called."""
    return f"The smallest changes with which {explanation.runner_up} would be before {explanation.pick}"


def flip_notes(flip: Flip) -> list[str]:
    """Return what to know of one such change."""
    notes = ["a jump"] if flip.is_jump else []
    return [*notes, "extrapolated"] if flip.in_domain is False else notes


def _print_flips(explanation: Explanation, console: Console) -> None:
    headings = ["input or coefficient", "value", "unit", "factor", "new value", "sds", "note"]
    rows = []
    for flip in explanation.flips[:FLIPS_SHOWN]:
        if flip.factor is not None:
            changed = number(flip.value * flip.factor)
            sds = "known" if flip.kind == "input" else "-" if flip.sds is None else f"{flip.sds:.1f}"
            note = ",\n".join(flip_notes(flip))
            factor = f"{flip.factor:.{3 if abs(math.log(flip.factor)) < 0.1 else 2}f}"
            rows.append([flip.name, number(flip.value), flip.unit, factor, changed, sds, note])
    if not any(row[-1] for row in rows):
        headings, rows = headings[:-1], [row[:-1] for row in rows]
    print_table(console, flips_title(explanation), headings, rows)
    say("sds: the change in standard deviations of what the timings say; more is less likely", to=console)
