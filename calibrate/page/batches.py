"""The picture of what every strategy takes by batch, with bands and measured points."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from calibrate.printing import ns
from calibrate.suites.welch import SHOWN_K, SHOWN_N_FFT
from rlxjax.calibration import CalibratedModel

from .markup import Markup, element
from .measured import Measured
from .panels import (
    WIDTH,
    Picture,
    axes,
    family_of,
    group,
    legend,
    mark,
    panel,
    path,
    point,
    rect,
    sign,
    strategy_signs,
    style_of,
)
from .scales import Scale
from .tables import Figure, Table
from .words import duration, size

#: Lengths of segments that have a panel, where they were timed.
N_FFTS = (64, SHOWN_N_FFT, 1024, 4096)
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 280.0, 52.0, WIDTH - 14.0, 24.0, 238.0
#: Batches at which a curve is drawn, beside those that have a mark.
CURVE_POINTS = 60
TITLE = "Time by batch"


@dataclasses.dataclass(frozen=True)
class Curve:
    """What one strategy takes by batch, `[batches]` each.

    Attributes:
        strategy: its name.
        n_fft: samples of a segment.
        k: peaks of a row.
        n_segments: of a row.
        batches: rows of the signal.
        is_marked: whether a batch has a mark and a row of the table.
        predicted_ns: the prediction.
        low_ns: lower ends of the intervals of 90 %.
        high_ns: their upper ends.
        measured_ns: measured times, NaN where there is none.
    """

    strategy: str
    n_fft: int
    k: int
    n_segments: int
    batches: np.ndarray
    is_marked: np.ndarray
    predicted_ns: np.ndarray
    low_ns: np.ndarray
    high_ns: np.ndarray
    measured_ns: np.ndarray

    def marked(self) -> list[int]:
        """Return the places that have a mark."""
        return np.flatnonzero(self.is_marked).tolist()


def batch_picture(calibrated: CalibratedModel, measured: Measured | None, k: int = SHOWN_K) -> Picture:
    """Return the picture, a panel for each length of a segment.

    Args:
        calibrated: the model of Welch peaks.
        measured: times to show as points, if there are any.
        k: peaks of a row.
    """
    curves = curves_of(calibrated, measured, k)
    if not curves:
        return Picture("batches", TITLE, ["No length of segments that is shown here was timed."])
    x = Scale(*_ends([curve.batches for curve in curves]), LEFT, RIGHT)
    y = Scale(*_ends([end for curve in curves for end in (curve.low_ns, curve.high_ns)]), BOTTOM, TOP)
    n_ffts = list(dict.fromkeys(curve.n_fft for curve in curves))
    panels = [_panel([curve for curve in curves if curve.n_fft == n_fft], x, y) for n_fft in n_ffts]
    said = (
        f"What a run takes, from a signal in NumPy to {k} peaks a row. A band holds a run with 90 %. "
        + ("Points were measured, with the same k. " if measured is not None else "")
        + "Strategies of two segments give the same peaks; ultra has one segment, and another result."
    )
    headings = ("strategy", "n_fft, samples", "batch, rows", "k, peaks", "segments")
    headings += ("predicted, ns", "90 % from, ns", "to, ns", "measured, ns")
    table = Table("Time by batch of every strategy", headings, [_row(c, place) for c in curves for place in c.marked()])
    entries = strategy_signs(dict.fromkeys(curve.strategy for curve in curves))
    entries.append((sign(rect(0, 2, 28, 10, "band"), class_="s-other"), "90 % of runs"))
    return Picture("batches", TITLE, [said], legend(*entries), panels, table)


def curves_of(calibrated: CalibratedModel, measured: Measured | None, k: int) -> list[Curve]:
    """Return what each strategy takes for each length of a segment that was timed.

    Marks are at powers of two, and where a strategy was measured.
    """
    domain = calibrated.domain
    low, high = domain["batch"]
    n_ffts = [n_fft for n_fft in N_FFTS if domain["n_fft"][0] <= n_fft <= domain["n_fft"][1]]
    columns: dict[int, np.ndarray] = {}
    for n_fft in n_ffts:
        most = min(high, domain["batch*n_fft"][1] / n_fft)
        if low < most:
            columns[n_fft] = np.round(np.geomspace(low, most, CURVE_POINTS))
    if not columns:
        return []
    of_length = {n_fft: _strategies(calibrated, n_fft, min(k, n_fft // 2 + 1)) for n_fft in columns}
    curves = []
    for strategy in dict.fromkeys(itertools.chain.from_iterable(of_length.values())):
        spans = {n_fft: own for n_fft, own in columns.items() if strategy in of_length[n_fft]}
        timed = {n_fft: _timed(measured, strategy, n_fft, k) for n_fft in spans}
        marked = {n_fft: _powers(own) | timed[n_fft].keys() for n_fft, own in spans.items()}
        batches = {n_fft: np.array(sorted({*own.tolist(), *marked[n_fft]})) for n_fft, own in spans.items()}
        batch = np.concatenate(list(batches.values()))
        n_fft_of = np.repeat(list(batches), [len(own) for own in batches.values()])
        peaks = np.minimum(k, n_fft_of // 2 + 1)
        bounds = calibrated.interval_ns(strategy, batch, n_fft_of, peaks)
        found = [np.asarray(values) for values in (calibrated.predict_ns(strategy, batch, n_fft_of, peaks), *bounds)]
        for n_fft, own in batches.items():
            predicted_ns, low_ns, high_ns = (values[n_fft_of == n_fft] for values in found)
            curves.append(
                Curve(
                    strategy,
                    n_fft,
                    k,
                    1 if strategy == "ultra" else 2,
                    own,
                    np.isin(own, list(marked[n_fft])),
                    predicted_ns,
                    low_ns,
                    high_ns,
                    np.array([timed[n_fft].get(one, math.nan) for one in own.tolist()]),
                )
            )
    return curves


def _strategies(calibrated: CalibratedModel, n_fft: int, k: int) -> list[str]:
    """Return the strategies that can run this length of a segment: a learned FFT has one length."""
    strategies = [calibrated.name_of(name, 1, n_fft, k) for name in calibrated.alternatives(1, n_fft, k)]
    return [*strategies, "ultra"] if "fast" in strategies else strategies


def _powers(batches: np.ndarray) -> set[float]:
    """Return the powers of two within batches."""
    return {2.0**power for power in range(32) if batches[0] <= 2.0**power <= batches[-1]}


def _timed(measured: Measured | None, strategy: str, n_fft: int, k: int) -> dict[float, float]:
    """Return what a strategy took by batch: the fastest of its variants."""
    found: dict[float, float] = {}
    if measured is None:
        return found
    for cell, time_ns in zip(measured.cells, measured.time_ns.tolist(), strict=True):
        if family_of(cell.strategy) == family_of(strategy) and (cell.n_fft, cell.k) == (n_fft, k):
            found[float(cell.batch)] = min(found.get(float(cell.batch), math.inf), time_ns)
    return found


def _ends(columns: Sequence[np.ndarray]) -> tuple[float, float]:
    together = np.concatenate(columns)
    return float(together.min()), float(together.max())


def _panel(curves: Sequence[Curve], x: Scale, y: Scale) -> Markup:
    ticks = [(value, size(value)) for value in x.ticks(7)]
    content = [axes(x, y, ticks, [(v, duration(v)) for v in y.ticks(8)], "batch, rows", "time of a run")]
    for curve in curves:
        places = [x(batch) for batch in curve.batches.tolist()]
        lower, middle, upper = (
            list(zip(places, map(y, values.tolist()), strict=True))
            for values in (curve.low_ns, curve.predicted_ns, curve.high_ns)
        )
        drawn = [path([*upper, *reversed(lower)], "band", is_closed=True), path(middle, "curve")]
        content.append(group(drawn, style_of(curve.strategy)))
    marks = [_mark(curve, place, x, y) for curve in curves for place in curve.marked()]
    fastest = min(curves, key=lambda curve: curve.predicted_ns[-1])
    low, high = curves[0].batches[[0, -1]].tolist()
    described = (
        f"Curves of {', '.join(curve.strategy for curve in curves)} from batch {low:,.0f} to {high:,.0f}. At the "
        f"largest batch the fastest is {fastest.strategy}."
    )
    n_fft, k = curves[0].n_fft, curves[0].k
    return panel(f"batches-{n_fft}", f"n_fft {n_fft:,}, k {k}", described, HEIGHT, *content, *marks, reach=30)


def _mark(curve: Curve, place: int, x: Scale, y: Scale) -> Markup:
    batch, predicted_ns, low_ns, high_ns, measured_ns = (
        values[place].item()
        for values in (curve.batches, curve.predicted_ns, curve.low_ns, curve.high_ns, curve.measured_ns)
    )
    at, is_measured = x(batch), not math.isnan(measured_ns)
    said = (
        f"{curve.strategy}, batch {batch:,.0f}, n_fft {curve.n_fft:,}, k {curve.k}\npredicted {ns(predicted_ns)} ns"
        + (f", measured {ns(measured_ns)} ns" if is_measured else "")
        + f"\n90 %: {ns(low_ns)} to {ns(high_ns)} ns"
    )
    spot = element("circle", cx=at, cy=y(predicted_ns), r=4.0, class_="spot")
    middle = y(measured_ns if is_measured else predicted_ns)
    dot = point(curve.strategy, at, middle, 2.8) if is_measured else None
    return mark(said, at, middle, spot, dot, strategy=curve.strategy)


def _row(curve: Curve, place: int) -> list[str | Figure]:
    times_ns = [values[place].item() for values in (curve.predicted_ns, curve.low_ns, curve.high_ns)]
    measured_ns = curve.measured_ns[place].item()
    sizes = (curve.n_fft, int(curve.batches[place]), curve.k, curve.n_segments)
    return [
        curve.strategy,
        *(Figure(f"{value:,}", value) for value in sizes),
        *(Figure(ns(time_ns), time_ns) for time_ns in times_ns),
        "" if math.isnan(measured_ns) else Figure(ns(measured_ns), measured_ns),
    ]
