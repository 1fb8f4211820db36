"""Prints why a strategy is picked: a waterfall of the terms, the margin, what would change the choice."""

import itertools
import math

from rich.console import Console
from rich.table import Table

from rlxjax import Crossover, Explanation, Flip
from rlxjax.calibration import StrategyExplanation

from .report import number, right

#: Characters of the longest bar, and flips that are shown.
BAR_WIDTH, FLIPS_SHOWN = 16, 6


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print an explanation as tables and sentences."""
    console.print(_waterfall(explanation))
    for text in (_margin(explanation), _crossover(explanation.crossover)):
        console.print(text, highlight=False, soft_wrap=True)
    if any(flip.factor is not None for flip in explanation.flips):
        console.print(_flip_table(explanation))
    else:
        console.print("no single input or coefficient changes the choice within a factor of 100")
    if not explanation.in_domain:
        console.print("outside the calibrated domain: all of this is extrapolated", highlight=False)


def _waterfall(explanation: Explanation) -> Table:
    """Return a row a term; each bar begins where the one above it ends, all on one scale."""
    sizes = ", ".join(f"{name} {value:g}" for name, value in explanation.inputs.items())
    table = Table("term", title=f"{sizes}: predicted us{'' if explanation.in_domain else ', extrapolated'}")
    longest = max(max(_ends(strategy)) for strategy in explanation.strategies)
    columns = []
    for strategy in explanation.strategies:
        table.add_column(strategy.strategy, justify="right")
        table.add_column("")
        low, high = map(_us, strategy.interval_ns)
        bars = [_bar(start, end, longest) for start, end in itertools.pairwise(_ends(strategy))]
        columns.append([*map(_us, strategy.terms_ns.values()), _us(strategy.time_ns), f"{low} to"])
        columns.append([*bars, _bar(0.0, strategy.time_ns, longest), high])
    terms = [name.removesuffix("_ns").replace("_", " ") for name in explanation.strategies[0].terms_ns]
    for heading, *texts in zip([*terms, "total", "90 % of runs"], *columns, strict=True):
        table.add_row(heading, *texts, end_section=heading == terms[-1])
    return table


def _ends(strategy: StrategyExplanation) -> list[float]:
    """Return the sums of the first terms, from none of them to all."""
    return list(itertools.accumulate(strategy.terms_ns.values(), initial=0.0))


def _bar(start: float, end: float, longest: float) -> str:
    """Return a bar between two times; of lighter shade where a term takes time away."""
    first, last = (round(BAR_WIDTH * max(time, 0.0) / longest) for time in (min(start, end), max(start, end)))
    return " " * first + ("█" if end >= start else "░") * (last - first)


def _margin(explanation: Explanation) -> str:
    verdict = explanation.verdict if explanation.verdict != "undecided" else "undecided, too close to call"
    return (
        f"{explanation.pick} before {explanation.runner_up} by {_us(explanation.margin_ns)} us, give or take "
        f"{_us(explanation.margin_sd_ns)}; probability {100 * explanation.probability:.1f} %: {verdict}"
    )


def _crossover(crossover: Crossover) -> str:
    if crossover.interval is None:
        return f"crossover: none, {crossover.sentence}"
    low, high = crossover.interval
    return f"crossover: {crossover.sentence}; 90 % between {low:,.0f} and {high:,.0f}"


def _flip_table(explanation: Explanation) -> Table:
    others = f"{explanation.runner_up} would be before {explanation.pick}"
    table = Table(
        "input or coefficient",
        *right("value", "factor", "new value"),
        "unit",
        *right("standard deviations"),
        "",
        title=f"The smallest changes with which {others}",
    )
    for flip in explanation.flips[:FLIPS_SHOWN]:
        if flip.factor is not None:
            changed = number(flip.value * flip.factor)
            sds = "known" if flip.kind == "input" else "-" if flip.sds is None else f"{flip.sds:.1f}"
            table.add_row(flip.name, number(flip.value), _factor(flip.factor), changed, flip.unit, sds, _notes(flip))
    return table


def _notes(flip: Flip) -> str:
    notes = ["a jump"] if flip.is_jump else []
    return ", ".join([*notes, "extrapolated"] if flip.in_domain is False else notes)


def _factor(factor: float) -> str:
    return f"{factor:.3f}" if abs(math.log(factor)) < 0.1 else f"{factor:.2f}"


def _us(time_ns: float) -> str:
    return f"{time_ns / 1e3:,.1f}"
