"""Predicted against measured times."""

import math
from collections.abc import Sequence

import numpy as np

from rlxjax.calibration import CalibratedModel, Calibration
from rlxjax.fit import Timings, estimate

from ._axes import Axes, axis_of, duration, in_words, ink_of, plain, show, show_legend
from ._given import calibrated_of
from ._hues import NEUTRAL, PALE, hues
from ._marks import mark


def predicted_vs_measured(
    calibrated: CalibratedModel | Calibration,
    timings: Timings,
    *,
    level: float = 0.9,
    noise: float | None = None,
    names: Sequence[str] | None = None,
    is_ratio: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Draw what a model predicts against what was measured, with intervals and the noise of the timings.

    Each variant has a colour and a marker; its mean absolute error, relative, is named. Error bars are the intervals of
    a run's time. The band around the diagonal is the noise floor: timings differ by that much from one another.

    Args:
        calibrated: a model of one machine, or a calibration that holds that of the timings.
        timings: of runs of the model, `[n]`.
        level: the probability that a run's time lies within its interval.
        noise: relative, half the width of the band; the calibration's noise floor unless given, no band without one.
        names: of the timings, `[n]`, for the figures behind the picture; their variants and sizes unless given.
        is_ratio: draw predictions over measured times, of which 1 is right.
        ax: a matplotlib axis; that of a new figure unless given.

    Returns:
        The axis. Both its directions are logarithmic, in ns, and show the same range; that of ratios has no unit.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: timings of another model or of none, a level that is not between 0 and 1, or noise that is
            negative.

    Examples:
        >>> from matplotlib.figure import Figure
        >>> from rlxjax.calibration import prior_calibration
        >>> from rlxjax.models import WELCH
        >>> sizes = {"batch": [64, 1024], "n_fft": [256, 256], "k": [16, 16]}
        >>> timings = Timings.checked(WELCH, variant="host", **sizes, time_ns=[9e4, 1e6])
        >>> ax = predicted_vs_measured(prior_calibration("cpu"), timings, ax=Figure().subplots())
        >>> ax.get_xlabel()
        'measured time'
    """
    whole = calibrated_of(calibrated, timings)
    noise = whole.noise_floor if noise is None else noise
    if noise is not None and not 0.0 <= noise < math.inf:
        raise ValueError(f"noise: expected a share of at least 0, got {noise}")
    found = estimate(whole.posterior, timings.runs)
    predicted_ns, low_ns, high_ns = map(np.asarray, (found.time_ns, *whole.bounds_ns(found, level)))
    measured_ns, code = np.asarray(timings.time_ns), np.asarray(timings.runs.variant)

    ratio, sizes = predicted_ns / measured_ns, timings.runs.inputs
    if names is None:
        rows = zip(*(np.broadcast_to(column, code.shape) for column in sizes.values()), strict=True)
        said = (in_words(dict(zip(sizes, row, strict=True))) for row in rows)
        names = [f"{whole.model.variants[own]}, {words}" for own, words in zip(code, said, strict=True)]
    figures = {"run": np.array(names), "measured (ns)": measured_ns, "predicted (ns)": predicted_ns}
    figures |= {"from (ns)": low_ns, "to (ns)": high_ns, "predicted / measured": ratio}

    ax = axis_of(ax)
    ends = np.array([min(measured_ns.min(), low_ns.min()), max(measured_ns.max(), high_ns.max())])
    right, scale = (np.ones(2), measured_ns) if is_ratio else (ends, np.ones(code.shape))
    ax.plot(ends, right, color=ink_of(ax), linewidth=0.8, zorder=1)
    if noise:
        label = f"noise floor {100 * noise:.2g} %"
        ax.fill_between(ends, right / (1 + noise), right * (1 + noise), color=NEUTRAL, alpha=0.4, lw=0, label=label)
    known = [name for place, name in enumerate(whole.model.variants) if place in code]
    for name, hue in hues(whole.model, known).items():
        own = code == whole.model.variants.index(name)
        reaches = np.stack([predicted_ns - low_ns, high_ns - predicted_ns]) / scale
        style = {"fmt": hue.marker, "color": (hue.colour, 0.8), "ecolor": (hue.colour, 2 * PALE), "elinewidth": 0.8}
        style |= {"markersize": 3.0, "markeredgewidth": 0.0, "zorder": 2}
        label = f"{name}, error {100 * np.mean(np.abs(ratio - 1.0)[own]):.2g} %"
        drawn = ax.errorbar(measured_ns[own], (predicted_ns / scale)[own], reaches[:, own], label=label, **style)
        mark(ax, [drawn.lines[0]], {heading: column[own] for heading, column in figures.items()})
    ax.set(xscale="log", yscale="log", aspect="auto" if is_ratio else "equal")
    show(ax, "x", "measured time", duration)
    show(ax, "y", *(("predicted / measured", plain) if is_ratio else ("predicted time", duration)))
    show_legend(ax)
    return ax
