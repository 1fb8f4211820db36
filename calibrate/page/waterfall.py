"""The picture of where time goes: each term begins where the one before it ends."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from calibrate.explanation import crossed, flip_notes, flips_title, margin
from calibrate.printing import ns, number
from rlxjax import Explanation

from .markup import Markup, element
from .panels import WIDTH, Picture, line, mark, panel, rect, text
from .scales import Scale
from .tables import Figure, Table
from .words import chance, duration, percent, plain, times

LEFT, RIGHT, TOP, ROW_HEIGHT = 118.0, WIDTH - 70.0, 8.0, 22.0


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to do some work, and the parts of its time.

    Attributes:
        name: of the way.
        terms_ns: the parts by name in ns, in their order; one may be negative.
        time_ns: their sum.
        interval_ns: that holds the time with 90 %.
    """

    name: str
    terms_ns: Mapping[str, float]
    time_ns: float
    interval_ns: tuple[float, float]


def explanation_picture(explanation: Explanation) -> Picture:
    """Return the picture of why a strategy is picked, with what would change that."""
    sizes = ", ".join(f"{name} {value:,.0f}" for name, value in explanation.inputs.items())
    forms = [Form(one.strategy, one.terms_ns, one.time_ns, one.interval_ns) for one in explanation.strategies]
    said = [
        f"The workload is {sizes}. Each term begins where the one before it ends; the last bar is their sum, with the "
        "interval that holds a run with 90 %.",
        f"{margin(explanation, chance(explanation.probability))}.",
        f"Crossover: {crossed(explanation.crossover)}.",
    ]
    if not explanation.in_domain:
        said.append("The workload lies outside what was measured: all of this is extrapolated.")
    extra = element("details", element("summary", "What would change the choice"), _flips(explanation).markup())
    return Picture(
        "terms", "Where the time goes", said, None, waterfalls("terms", forms), term_table(forms, sizes), extra
    )


def waterfalls(ident: str, forms: Sequence[Form]) -> list[Markup]:
    """Return a panel for each way, all on one scale."""
    longest = max(max(*itertools.accumulate(form.terms_ns.values()), form.interval_ns[1]) for form in forms)
    scale = Scale(0.0, longest * 1.02, LEFT, RIGHT, is_log=False)
    return [_panel(ident, form, scale) for form in forms]


def term_table(forms: Sequence[Form], what: str) -> Table:
    """Return the parts of every way as a table."""
    terms = list(dict.fromkeys(name for form in forms for name in form.terms_ns))
    rows: list[list[str | Figure]] = [
        [plain(name), *(_figure(form.terms_ns[name]) if name in form.terms_ns else "" for form in forms)]
        for name in terms
    ]
    rows.append(["total", *(_figure(form.time_ns) for form in forms)])
    for place, label in enumerate(("90 % from", "to")):
        rows.append([label, *(_figure(form.interval_ns[place]) for form in forms)])
    return Table(f"Parts of the time, {what}", ("term", *(f"{form.name}, ns" for form in forms)), rows)


def _figure(time_ns: float) -> Figure:
    return Figure(ns(time_ns), time_ns)


def _panel(ident: str, form: Form, scale: Scale) -> Markup:
    ends = list(itertools.accumulate(form.terms_ns.values(), initial=0.0))
    bottom = TOP + (len(form.terms_ns) + 1) * ROW_HEIGHT + 6
    content = []
    for value in scale.ticks(4):
        at = scale(value)
        content += [
            line(at, TOP, at, bottom, "grid"),
            text(at, bottom + 15, duration(value) if value else "0", "tick middle"),
        ]
    content.append(text((LEFT + RIGHT) / 2, bottom + 32, "time", "label middle"))
    for row, (name, (begin, end)) in enumerate(zip(form.terms_ns, itertools.pairwise(ends), strict=True)):
        share = (end - begin) / form.time_ns
        said = f"{form.name}, {plain(name)}\n{ns(end - begin)} ns, {percent(share)} of the time"
        content.append(_bar(form.name, said, plain(name), row, begin, end, scale, "bar-part"))
        if row:
            at, y = scale(begin), TOP + row * ROW_HEIGHT
            content.append(line(at, y - 4, at, y + 4, "joint"))
    low, high = form.interval_ns
    said = f"{form.name}, total\n{ns(form.time_ns)} ns (90 %: {ns(low)} to {ns(high)})"
    row = len(form.terms_ns)
    content.append(_bar(form.name, said, "total", row, 0.0, form.time_ns, scale, "bar-total", form.interval_ns))
    longest = max(form.terms_ns, key=lambda name: form.terms_ns[name])
    described = (
        f"{form.name} takes {duration(form.time_ns)}; the largest part is {plain(longest)} with "
        f"{percent(form.terms_ns[longest] / form.time_ns)}."
    )
    title = f"{form.name}: {ns(form.time_ns)} ns"
    return panel(f"{ident}-{form.name}", title, described, bottom + 38, *content, reach=400)


def _bar(
    strategy: str,
    said: str,
    label: str,
    row: int,
    begin: float,
    end: float,
    scale: Scale,
    class_: str,
    interval: tuple[float, float] | None = None,
) -> Markup:
    y = TOP + row * ROW_HEIGHT + (6 if class_ == "bar-total" else 0)
    first, last = scale(min(begin, end)), scale(max(begin, end))
    drawn = rect(first, y + 3, max(last - first, 0.75), ROW_HEIGHT - 6, class_ if end >= begin else "bar-less")
    reaches = []
    if interval is not None:
        middle, (low, high) = y + ROW_HEIGHT / 2, map(scale, interval)
        reaches = [line(low, middle, high, middle, "reach")]
        reaches += [line(at, middle - 4, at, middle + 4, "reach") for at in (low, high)]
    name = text(LEFT - 6, y + 15, label, "tick end")
    figure = text(WIDTH - 4, y + 15, ns(end - begin), "tick end figure")
    return mark(said, (LEFT + RIGHT) / 2, y + ROW_HEIGHT / 2, drawn, *reaches, name, figure, strategy=strategy)


def _flips(explanation: Explanation) -> Table:
    """Return the smallest change of each input and coefficient from which on the runner-up is the faster one."""
    rows = []
    for flip in explanation.flips:
        if flip.factor is None:
            continue
        changed = flip.value * flip.factor
        rows.append(
            [
                flip.name,
                Figure(number(flip.value), flip.value),
                flip.unit,
                Figure(times(flip.factor), flip.factor),
                Figure(number(changed), changed),
                "known" if flip.kind == "input" else "" if flip.sds is None else f"{flip.sds:.1f}",
                ", ".join(flip_notes(flip)),
            ]
        )
    headings = ("input or coefficient", "value", "unit", "factor", "new value", "standard deviations", "note")
    return Table(flips_title(explanation), headings, rows)
