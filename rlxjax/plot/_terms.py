"""The parts of each strategy's time, as a waterfall."""

from collections.abc import Sequence

import numpy as np

from rlxjax.calibration import Explanation, StrategyExplanation

from ._axes import NOTHING, Axes, axis_of, duration, ink_of, show
from ._hues import COLOURS, NEUTRAL
from ._marks import mark

#: Of a bar, in rows; space between two strategies, in rows.
THICKNESS, GAP = 0.72, 0.6


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
        (bar,) = ax.barh([row], [one.time_ns], THICKNESS, color=NEUTRAL)
        about = {"strategy": one.strategy, "part": "total", "time (ns)": one.time_ns}
        mark(ax, [bar], about | {"from (ns)": [low_ns], "to (ns)": high_ns})
        reach = [[one.time_ns - low_ns], [high_ns - one.time_ns]]
        ax.errorbar([one.time_ns], [row], xerr=reach, fmt="none", ecolor=ink, elinewidth=1.0, capsize=2.0)
        ticks[row] = f"{one.strategy}, {duration(one.time_ns)}"
        totals.append(len(ticks) - 1)
        rows, widths = row + 1.0 + np.arange(len(parts)), np.array(list(parts.values()))
        ends = np.cumsum(widths)
        colours = [COLOURS[1] if width < 0 else COLOURS[0] for width in widths]
        bars = ax.barh(rows, widths, THICKNESS, left=ends - widths, color=colours)
        ax.vlines(ends[:-1], rows[:-1], rows[1:], color=ink, linewidth=0.6, alpha=0.6, zorder=0)
        names = [name.removesuffix("_ns").replace("_", " ") for name in parts]
        mark(ax, bars.patches, about | {"part": names, "time (ns)": widths})
        ticks |= dict(zip(rows, names, strict=True))
        row = row + len(parts) + 1.0 + GAP
    ax.set_yticks(list(ticks), list(ticks.values()))
    for place in totals:
        ax.get_yticklabels()[place].set_fontweight("bold")
    ax.tick_params(axis="y", length=0.0)
    ax.set_ylim(row - GAP - (1.0 - THICKNESS), -0.6)
    ax.set_xlim(left=0.0)
    show(ax, "x", "predicted time", duration, explanation.inputs if isinstance(explanation, Explanation) else NOTHING)
    return ax
