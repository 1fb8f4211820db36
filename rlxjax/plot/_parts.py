"""Pictures of the parts of a predicted time, and of coefficients relative to their priors."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlxjax.calibration import CalibratedModel, Calibration, Explanation, FunctionPrediction, StrategyExplanation
from rlxjax.fit import COVERED, COVERED_SDS, LatencyPosterior, PosteriorFit, is_measured, named, unit_of
from rlxjax.gate import Provenance
from rlxjax.units import interval_text

from ._axes import (
    COLOURS,
    NEUTRAL,
    PALE,
    Axes,
    axis_of,
    calibrated_of,
    duration,
    ink_of,
    keep,
    plain,
    show,
    show_legend,
    words_of,
)

#: In rows: the thickness of a bar, the height of a label with two lines, and the space between two strategies.
THICKNESS, HEAD, GAP = 0.72, 1.5, 0.5
#: The axis ends at most at this multiple of the longest predicted time, so that a wide interval leaves the parts space.
MOST_SHOWN = 2.0


def coefficients(
    calibrated: CalibratedModel | Calibration | LatencyPosterior | PosteriorFit,
    *,
    earlier: CalibratedModel | LatencyPosterior | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw each coefficient as a multiple of the median of its prior, with its 90 % interval.

    A pale bar is the 90 % interval of the model's prior, which is wide because the prior covers all machines. A filled
    marker is a coefficient that the timings determined. A hollow marker is a coefficient that the timings did not
    determine: most of the uncertainty of its prior remains.

    Args:
        calibrated: a calibrated model, a calibration (the picture shows its first model), a posterior, or a fit.
        earlier: an earlier calibrated model or posterior to compare with, drawn in grey. It must be of the same model.
        ax: the matplotlib axis to draw on; without an axis, a new figure that is high enough for the names.

    Returns:
        The axis. Its x direction is logarithmic and has no unit, because it shows ratios.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: `calibrated` has another type, or `earlier` belongs to another model.

    Examples:
        >>> from matplotlib.figure import Figure
        >>> from rlxjax.calibration import prior_calibration
        >>> ax = coefficients(prior_calibration("cpu"), ax=Figure().subplots())
        >>> [label.get_text() for label in ax.get_yticklabels()][:2]
        ['host call (ns)', 'launch (ns)']
    """
    (whole, own), before = _known(calibrated), None if earlier is None else _known(earlier)[1]
    names, prior = list(named(own.coefficients)), own.model.prior
    columns = (own.coefficients, own.coefficient_log_sd(), prior.median, prior.log_sd)
    value, log_sd, median, prior_sd = map(_column, columns)
    settled = is_measured(log_sd, prior_sd)
    if whole is not None:
        settled = np.array([whole.provenance.get(name) is Provenance.MEASURED for name in names])
    if before is not None and before.model.name != own.model.name:
        raise ValueError(f"earlier: expected a model {own.model.name!r}, got a model {before.model.name!r}")

    ax = axis_of(ax, len(names))
    places, reach = np.arange(len(names)), np.exp(COVERED_SDS * prior_sd)
    bars = ax.barh(places, reach - 1 / reach, 0.7, left=1 / reach, color=NEUTRAL, alpha=PALE, label="prior")
    figures = {"coefficient": names, "value": value, "unit": list(map(unit_of, names)), "standard deviation": log_sd}
    figures |= {"prior": median, "its standard deviation": prior_sd}
    keep(ax, figures | {"provenance": np.where(settled, "measured", "not settled")})
    ax.axvline(1.0, color=ink_of(ax), linewidth=0.8, zorder=1)
    handles: list[Any] = [bars]

    def draw(values: np.ndarray, log_sds: np.ndarray, rows: np.ndarray, **style: Any) -> None:
        ratio, reach = values / median, np.exp(COVERED_SDS * log_sds)
        reaches = np.stack([ratio - ratio / reach, ratio * reach - ratio])
        kept = np.isfinite(rows)
        handles.append(ax.errorbar(ratio[kept], rows[kept], xerr=reaches[:, kept], **style))

    if before is not None:
        earlier_sd = before.coefficient_log_sd()
        style = {"fmt": "s", "color": NEUTRAL, "markersize": 4.0, "label": "earlier"}
        draw(_column(before.coefficients), _column(earlier_sd), places - 0.2, **style)
    for shown, face, label in ((settled, COLOURS[0], "measured"), (~settled, "none", "not settled")):
        if shown.any():
            style = {"fmt": "o", "color": COLOURS[0], "markerfacecolor": face, "markersize": 5.0, "label": label}
            draw(value, log_sd, np.where(shown, places, np.nan), **style)
    words = [f"{words_of(name)} ({unit})" if (unit := unit_of(name)) != "1" else words_of(name) for name in names]
    ax.set_yticks(places, words)
    ax.tick_params(axis="y", length=0.0)
    ax.set(xscale="log", ylim=(len(names) - 0.4, -0.6))
    show(ax, "x", f"coefficient / median of its prior\nwith intervals of {100 * COVERED:g} %", plain)
    show_legend(ax, above=handles)
    return ax


def _known(given: Any) -> tuple[CalibratedModel | None, LatencyPosterior]:
    """Return the calibrated model and its posterior. If only a posterior or a fit is given, the model is None."""
    whole = given.posterior if isinstance(given, PosteriorFit) else given
    if isinstance(whole, LatencyPosterior):
        return None, whole
    calibrated = calibrated_of(whole, what="a posterior or its fit")
    return calibrated, calibrated.posterior


def _column(part: Any) -> np.ndarray:
    return np.array([float(value) for value in named(part).values()])


def terms(explained: Any, *, ax: Axes | None = None) -> Axes:
    """Draw the parts of each predicted time in the answer of `predict_function`, `advise` or `explain`.

    A grey bar is a whole predicted time with its 90 % interval. Its label states both in numbers. An interval that is
    much longer than the time is cut at the edge of the picture. Below the grey bar are the parts of the time. Each part
    begins where the part above ends. A part that shortens the time extends to the left. Parts of 0 ns are left out.

    Args:
        explained: what `predict_function`, `advise` or `explain` returned, or a sequence of `StrategyExplanation`.
        ax: the matplotlib axis to draw on; without an axis, a new figure that is high enough for the parts.

    Returns:
        The axis. Its x direction is the predicted time in ns, from 0.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: `explained` has another type, or is an advice without predicted times.

    Examples:
        >>> from matplotlib.figure import Figure
        >>> from rlxjax.calibration import prior_calibration
        >>> ax = terms(prior_calibration("cpu").explain(8192, n_fft=256, k=16), ax=Figure().subplots())
        >>> ax.get_yticklabels()[0].get_text().splitlines()[0]
        'fused'
    """
    each = _explanations(explained)
    shown = [{name: ns for name, ns in one.terms_ns.items() if ns} for one in each]
    n_rows = sum(HEAD + len(parts) for parts in shown) + GAP * (len(shown) - 1)
    end_ns = min(max(one.interval_ns[1] for one in each), MOST_SHOWN * max(one.time_ns for one in each))

    ax = axis_of(ax, n_rows)
    ink, row = ink_of(ax), 0.0
    ticks: dict[float, str] = {}
    totals = []
    for one, parts in zip(each, shown, strict=True):
        low_ns, high_ns = one.interval_ns
        ax.barh([row], [one.time_ns], THICKNESS, color=NEUTRAL)
        about = {"strategy": one.strategy, "part": "total", "time (ns)": one.time_ns}
        keep(ax, about | {"from (ns)": low_ns, "to (ns)": high_ns})
        reach = [[one.time_ns - low_ns], [min(high_ns, 2.0 * end_ns) - one.time_ns]]
        ax.errorbar([one.time_ns], [row], xerr=reach, fmt="none", ecolor=ink, elinewidth=1.0, capsize=2.0)
        ticks[row] = f"{one.strategy}\n{interval_text(one.time_ns, low_ns, high_ns)}"
        totals.append(len(ticks) - 1)
        rows, widths = row + HEAD + np.arange(len(parts)), np.array(list(parts.values()))
        ends = np.cumsum(widths)
        colours = [COLOURS[1] if width < 0 else COLOURS[0] for width in widths]
        ax.barh(rows, widths, THICKNESS, left=ends - widths, color=colours)
        ax.vlines(ends[:-1], rows[:-1], rows[1:], color=ink, linewidth=0.6, alpha=0.6, zorder=0)
        names = [words_of(name) for name in parts]
        keep(ax, about | {"part": names, "time (ns)": widths})
        ticks |= dict(zip(rows, names, strict=True))
        row = row + len(parts) + HEAD + GAP
    ax.set_yticks(list(ticks), list(ticks.values()))
    for place in totals:
        ax.get_yticklabels()[place].set_fontweight("bold")
    ax.tick_params(axis="y", length=0.0)
    ax.set_ylim(row - GAP - (1.0 - THICKNESS), -0.9)
    ax.set_xlim(0.0, 1.05 * end_ns)
    show(ax, "x", "predicted time", duration, explained.inputs if isinstance(explained, Explanation) else None)
    return ax


def _explanations(given: Any) -> Sequence[StrategyExplanation]:
    if isinstance(given, FunctionPrediction):
        bounds_ns = (given.low_ns, given.high_ns)
        return [StrategyExplanation(given.target or "one call", given.terms_ns, given.time_ns, bounds_ns)]
    if (pair := getattr(given, "pair", None)) is not None:  # an advice, whose class stands above the pictures
        if not pair or None in [own.predicted_ns for own in pair]:
            raise ValueError("explained: expected predicted times, got an advice without predicted times")
        ends = [own.predicted_interval_ns or (own.predicted_ns, own.predicted_ns) for own in pair]
        return [StrategyExplanation(o.name, o.terms_ns, o.predicted_ns, e) for o, e in zip(pair, ends, strict=True)]
    each = given.strategies if isinstance(given, Explanation) else given
    if not isinstance(each, Sequence) or not each or not all(isinstance(one, StrategyExplanation) for one in each):
        expected = "an answer of `predict_function`, `advise` or `explain`"
        raise ValueError(f"explained: expected {expected}, got {type(given).__name__}")
    return each
