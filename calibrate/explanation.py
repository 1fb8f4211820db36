"""Prints why a strategy is picked: a waterfall of the terms, the margin, what would change the choice."""

import math

from rich.console import Console
from rich.table import Table

from rlxjax import Crossover, Explanation, Flip

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
    mark = "" if explanation.in_domain else ", extrapolated"
    table = Table(title=f"{sizes}: predicted us{mark}")
    table.add_column("term")
    longest = max(_longest(strategy.terms_ns.values()) for strategy in explanation.strategies)
    columns = []
    for strategy in explanation.strategies:
        table.add_column(strategy.strategy, justify="right")
        table.add_column("")
        reached, column = 0.0, []
        for time_ns in strategy.terms_ns.values():
            column.append((_us(time_ns), _bar(reached, reached + time_ns, longest)))
            reached += time_ns
        low, high = strategy.interval_ns
        column.append((_us(strategy.time_ns), _bar(0.0, strategy.time_ns, longest)))
        column.append((f"{_us(low)} to", f"{_us(high)}"))
        columns.append(column)
    terms = [name.removesuffix("_ns").replace("_", " ") for name in explanation.strategies[0].terms_ns]
    for place, term in enumerate([*terms, "total", "90 % of runs"]):
        if place == len(terms):
            table.add_section()
        table.add_row(term, *(text for column in columns for text in column[place]))
    return table


def _longest(terms_ns) -> float:
    reached = longest = 0.0
    for time_ns in terms_ns:
        reached += time_ns
        longest = max(longest, reached)
    return longest


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
    table = Table(title=f"The smallest changes with which {others}")
    table.add_column("input or coefficient")
    for heading in ("value", "factor", "new value"):
        table.add_column(heading, justify="right")
    table.add_column("unit")
    table.add_column("standard deviations", justify="right")
    table.add_column("")
    for flip in explanation.flips[:FLIPS_SHOWN]:
        if flip.factor is not None:
            changed = _number(flip.value * flip.factor)
            sds = "known" if flip.kind == "input" else "-" if flip.sds is None else f"{flip.sds:.1f}"
            table.add_row(flip.name, _number(flip.value), _factor(flip.factor), changed, flip.unit, sds, _notes(flip))
    return table


def _notes(flip: Flip) -> str:
    notes = ["a jump"] if flip.is_jump else []
    return ", ".join([*notes, "extrapolated"] if flip.in_domain is False else notes)


def _factor(factor: float) -> str:
    return f"{factor:.3f}" if abs(math.log(factor)) < 0.1 else f"{factor:.2f}"


def _us(time_ns: float) -> str:
    return f"{time_ns / 1e3:,.1f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"
