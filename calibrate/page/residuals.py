"""The picture of predictions against what was measured, with intervals and the noise floor."""

import math
from collections.abc import Mapping

import numpy as np

from calibrate.printing import ns
from calibrate.suites.welch import TIMED as STRATEGIES
from rlxjax.calibration import ErrorSummary

from .markup import Markup
from .measured import Measured
from .panels import (
    WIDTH,
    Picture,
    axes,
    legend,
    line,
    mark,
    panel,
    point,
    rect,
    sign,
)
from .scales import Scale, ratio_scale, ratio_ticks
from .tables import Figure, Table
from .words import duration, percent, times

#: Of a panel: its height, and the places of its axes.
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 250.0, 44.0, WIDTH - 18.0, 24.0, 208.0
#: The least and the largest reach of the axis of ratios, in logarithms.
LEAST_REACH, MOST_REACH = math.log(1.25), math.log(5.0)


def residual_picture(measured: Measured | None, said: str, held_out: Mapping[str, ErrorSummary]) -> Picture:
    """Return the picture, a panel a strategy; without measured times a sentence that says why there are none.

    Args:
        measured: times, and what is predicted of them.
        said: where they are from, or why there are none.
        held_out: errors by strategy, with the noise of its timings.
    """
    ident, title = "residuals", "Predicted against measured"
    if measured is None:
        return Picture(ident, title, [said])
    ratio = measured.predicted_ns / measured.time_ns
    inside = (measured.low_ns <= measured.time_ns) & (measured.time_ns <= measured.high_ns)
    off = np.abs(ratio - 1.0)
    reach = min(max(float(np.max(np.abs(np.log(ratio)))) * 1.15, LEAST_REACH), MOST_REACH)
    x = Scale(float(measured.time_ns.min()) / 1.2, float(measured.time_ns.max()) * 1.2, LEFT, RIGHT)
    y = ratio_scale(reach, BOTTOM, TOP)
    names = np.array([cell.strategy for cell in measured.cells])
    panels = []
    for name in (name for name in STRATEGIES if (names == name).any()):
        places = np.flatnonzero(names == name)
        places = places[np.argsort(measured.time_ns[places], kind="stable")]
        summary = held_out.get(name)
        noise = None if summary is None else summary.noise_floor
        head = f"{name}: off by {percent(float(off[places].mean()))} in the mean"
        described = (
            f"{len(places)} workloads from {duration(float(measured.time_ns[places].min()))} to "
            f"{duration(float(measured.time_ns[places].max()))}. {percent(float(inside[places].mean()))} of the "
            f"measured times lie within their interval of 90 %."
        )
        panels.append(_panel(name, head, described, measured, places, x, y, noise))
    sentences = [
        f"{said} A point is a workload: across is what it took, up is the prediction over that, so that 1 is right. A "
        "bar is the interval that holds a run with 90 %, and should reach the line at 1. The grey band is the noise of "
        "the timings: two halves of the same campaign differ so much in the mean.",
        f"Predictions are off by {percent(float(off.mean()))} in the mean, and {percent(float(inside.mean()))} of the "
        "measured times lie within their interval. These are workloads that the fit saw; errors of those that it never "
        "saw are in the table of errors above.",
    ]
    signs = legend(
        (sign(line(14, 1, 14, 13, "bar"), point("fast", 14, 7), class_="s-other"), "prediction and interval of 90 %"),
        (sign(rect(0, 3, 28, 8, "noise")), "noise floor"),
    )
    return Picture(ident, title, sentences, signs, panels, _table(measured, ratio))


def _panel(
    name: str,
    title: str,
    described: str,
    measured: Measured,
    places: np.ndarray,
    x: Scale,
    y: Scale,
    noise: float | None,
) -> Markup:
    ticks = [(value, duration(value)) for value in x.ticks(6)]
    content = [
        axes(x, y, ticks, [(value, f"{value:g}") for value in ratio_ticks(y, 15.0)], "measured", "predicted ÷ measured")
    ]
    if noise:
        top, bottom = y(math.exp(noise)), y(math.exp(-noise))
        content.append(rect(LEFT, top, RIGHT - LEFT, bottom - top, "noise"))
    content.append(line(LEFT, y(1.0), RIGHT, y(1.0), "zero"))
    content += [_mark(measured, place, x, y) for place in places.tolist()]
    return panel(f"residuals-{name}", title, described, HEIGHT, *content)


def _mark(measured: Measured, place: int, x: Scale, y: Scale) -> Markup:
    cell, time_ns, predicted_ns = measured.cells[place], measured.time_ns[place], measured.predicted_ns[place]
    low_ns, high_ns = measured.low_ns[place], measured.high_ns[place]
    said = (
        f"{cell.strategy}, batch {cell.batch:,}, n_fft {cell.n_fft:,}, k {cell.k}\nmeasured {ns(time_ns)} ns, "
        f"predicted {ns(predicted_ns)} ns, {times(predicted_ns / time_ns)}\n90 %: {ns(low_ns)} to {ns(high_ns)} ns"
    )
    at, middle = x(time_ns), y(predicted_ns / time_ns)
    bar = line(at, y(low_ns / time_ns), at, y(high_ns / time_ns), "bar")
    return mark(said, at, middle, bar, point(cell.strategy, at, middle, 2.6), strategy=cell.strategy)


def _table(measured: Measured, ratio: np.ndarray) -> Table:
    order = np.argsort(-np.abs(np.log(ratio)), kind="stable").tolist()
    rows = []
    for place in order:
        cell = measured.cells[place]
        noise = float(measured.noise[place])
        rows.append(
            [
                cell.strategy,
                *(Figure(f"{value:,}", value) for value in (cell.batch, cell.n_fft, cell.k)),
                *(
                    Figure(ns(value), value)
                    for value in (
                        float(measured.time_ns[place]),
                        float(measured.predicted_ns[place]),
                        float(measured.low_ns[place]),
                        float(measured.high_ns[place]),
                    )
                ),
                Figure(f"{ratio[place]:.3f}", float(ratio[place])),
                Figure(percent(noise), noise) if math.isfinite(noise) else "",
            ]
        )
    headings = ("strategy", "batch, rows", "n_fft, samples", "k, peaks", "measured, ns", "predicted, ns")
    headings += ("90 % from, ns", "to, ns", "predicted ÷ measured", "noise")
    return Table("Every workload that was timed, the one that is furthest off first", headings, rows)
