"""What times are made of: the terms of each strategy, and coefficients beside the model's own prior."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlxjax.calibration import CalibratedModel, Calibration, Explanation, StrategyExplanation
from rlxjax.fit import COVERED, COVERED_SDS, LatencyPosterior, PosteriorFit, is_measured, named, unit_of
from rlxjax.gate import Provenance

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
)

#: Of a bar, in rows; space between two strategies, in rows.
THICKNESS, GAP = 0.72, 0.6


def coefficients(
    calibrated: CalibratedModel | Calibration | LatencyPosterior | PosteriorFit,
    *,
    earlier: CalibratedModel | LatencyPosterior | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw each coefficient as a multiple of its prior's median, with the interval that holds it in nine cases of ten.

    The prior is the model's own, which is wide: what is believed of any machine; its interval is the pale bar. A fit
    may begin from a narrower one. A filled marker is a coefficient that timings settled; a hollow one keeps most of
    what the fit began from.

    Args:
        calibrated: a model of one machine, a calibration, of which the first model is taken, a posterior, or the fit
            that found it.
        earlier: another one of the same model, whose coefficients are drawn in grey.
        ax: a matplotlib axis; that of a new figure, as high as it needs, unless given.

    Returns:
        The axis. Its x direction is logarithmic and has no unit.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: none of these, or an earlier one of another model.

    Examples:
        >>> from matplotlib.figure import Figure
        >>> from rlxjax.calibration import prior_calibration
        >>> ax = coefficients(prior_calibration("cpu"), ax=Figure().subplots())
        >>> [label.get_text() for label in ax.get_yticklabels()][:2]
        ['host_call_ns', 'launch_ns']
    """
    (whole, own), before = _known(calibrated), None if earlier is None else _known(earlier)[1]
    names, prior = list(named(own.coefficients)), own.model.prior
    columns = (own.coefficients, own.coefficient_log_sd(), prior.median, prior.log_sd)
    value, log_sd, median, prior_sd = map(_column, columns)
    settled = is_measured(log_sd, prior_sd)
    if whole is not None:
        settled = np.array([whole.provenance.get(name) is Provenance.MEASURED for name in names])
    if before is not None and before.model.name != own.model.name:
        raise ValueError(f"earlier: expected that of {own.model.name}, got that of {before.model.name}")

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
    ax.set_yticks(places, names)
    ax.tick_params(axis="y", length=0.0)
    ax.set(xscale="log", ylim=(len(names) - 0.4, -0.6))
    show(ax, "x", f"coefficient / median of its prior\nwith intervals of {100 * COVERED:g} %", plain)
    show_legend(ax, above=handles)
    return ax


def _known(given: Any) -> tuple[CalibratedModel | None, LatencyPosterior]:
    """Return the posterior that a picture is given, and the calibrated model around it, if there is one."""
    whole = given.posterior if isinstance(given, PosteriorFit) else given
    if isinstance(whole, LatencyPosterior):
        return None, whole
    calibrated = calibrated_of(whole, what="a posterior or its fit")
    return calibrated, calibrated.posterior


def _column(part: Any) -> np.ndarray:
    return np.array([float(value) for value in named(part).values()])


def terms(explanation: Explanation | Sequence[StrategyExplanation], *, ax: Axes | None = None) -> Axes:
    """Draw what each strategy's time is made of, the fastest strategy first.

    The bar of a strategy is its predicted time, with the interval that holds nine runs in ten. Below it each term
    begins where the one before ends; what a correction takes off goes to the left. Terms of no time are left out.

    Args:
        explanation: what `explain` says of one workload, or what some ways to do it take.
        ax: a matplotlib axis; that of a new figure, as high as it needs, unless given.

    Returns:
        The axis. Its x direction is time in ns from 0.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no explanation.

    Examples:
        >>> from matplotlib.figure import Figure
        >>> from rlxjax.calibration import prior_calibration
        >>> ax = terms(prior_calibration("cpu").explain(8192, n_fft=256, k=16), ax=Figure().subplots())
        >>> ax.get_yticklabels()[0].get_text().startswith("fused, ")
        True
    """
    each = explanation.strategies if isinstance(explanation, Explanation) else explanation
    if not each or not all(isinstance(one, StrategyExplanation) for one in each):
        raise ValueError(f"explanation: expected what `explain` returns, got {type(explanation).__name__}")
    shown = [{name: ns for name, ns in one.terms_ns.items() if ns} for one in each]
    n_rows = sum(1 + len(parts) for parts in shown) + GAP * (len(shown) - 1)

    ax = axis_of(ax, n_rows)
    ink, row = ink_of(ax), 0.0
    ticks: dict[float, str] = {}
    totals = []
    for one, parts in zip(each, shown, strict=True):
        low_ns, high_ns = one.interval_ns
        ax.barh([row], [one.time_ns], THICKNESS, color=NEUTRAL)
        about = {"strategy": one.strategy, "part": "total", "time (ns)": one.time_ns}
        keep(ax, about | {"from (ns)": low_ns, "to (ns)": high_ns})
        reach = [[one.time_ns - low_ns], [high_ns - one.time_ns]]
        ax.errorbar([one.time_ns], [row], xerr=reach, fmt="none", ecolor=ink, elinewidth=1.0, capsize=2.0)
        ticks[row] = f"{one.strategy}, {duration(one.time_ns)}"
        totals.append(len(ticks) - 1)
        rows, widths = row + 1.0 + np.arange(len(parts)), np.array(list(parts.values()))
        ends = np.cumsum(widths)
        colours = [COLOURS[1] if width < 0 else COLOURS[0] for width in widths]
        ax.barh(rows, widths, THICKNESS, left=ends - widths, color=colours)
        ax.vlines(ends[:-1], rows[:-1], rows[1:], color=ink, linewidth=0.6, alpha=0.6, zorder=0)
        names = [name.removesuffix("_ns").replace("_", " ") for name in parts]
        keep(ax, about | {"part": names, "time (ns)": widths})
        ticks |= dict(zip(rows, names, strict=True))
        row = row + len(parts) + 1.0 + GAP
    ax.set_yticks(list(ticks), list(ticks.values()))
    for place in totals:
        ax.get_yticklabels()[place].set_fontweight("bold")
    ax.tick_params(axis="y", length=0.0)
    ax.set_ylim(row - GAP - (1.0 - THICKNESS), -0.6)
    ax.set_xlim(left=0.0)
    show(ax, "x", "predicted time", duration, explanation.inputs if isinstance(explanation, Explanation) else None)
    return ax
