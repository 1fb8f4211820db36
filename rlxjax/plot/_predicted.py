"""Predicted against measured times."""

import math
from typing import TYPE_CHECKING

import numpy as np

from rlxjax.calibration import CalibratedModel, Calibration
from rlxjax.fit import Timings, estimate

from ._axes import axis_of, ink_of, show_legend, show_times
from ._given import calibrated_of
from ._hues import NEUTRAL, PALE, hues

if TYPE_CHECKING:
    import matplotlib.axes


def predicted_vs_measured(
    calibrated: CalibratedModel | Calibration,
    timings: Timings,
    *,
    level: float = 0.9,
    noise: float | None = None,
    ax: "matplotlib.axes.Axes | None" = None,
) -> "matplotlib.axes.Axes":
    """Draw what a model predicts against what was measured, with intervals and the noise of the timings.

    Each variant has a colour and a marker; its mean absolute error, relative, is named. Error bars are the intervals of
    a run's time. The band around the diagonal is the noise floor: timings differ by that much from one another.

    Args:
        calibrated: a model of one machine, or a calibration that holds that of the timings.
        timings: of runs of the model, `[n]`.
        level: the probability that a run's time lies within its interval.
        noise: relative, half the width of the band; the calibration's noise floor unless given, no band without one.
        ax: a matplotlib axis; that of a new figure unless given.

    Returns:
        The axis. Both its directions are logarithmic, in ns, and show the same range.

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
        'measured time (µs)'
    """
    whole = calibrated_of(calibrated, timings)
    noise = whole.noise_floor if noise is None else noise
    if noise is not None and not 0.0 <= noise < math.inf:
        raise ValueError(f"noise: expected a share of at least 0, got {noise}")
    found = estimate(whole.posterior, timings.runs)
    predicted_ns, low_ns, high_ns = map(np.asarray, (found.time_ns, *whole.bounds_ns(found, level)))
    measured_ns, code = np.asarray(timings.time_ns), np.asarray(timings.runs.variant)

    ax = axis_of(ax)
    ends = np.array([min(measured_ns.min(), low_ns.min()), max(measured_ns.max(), high_ns.max())])
    ax.plot(ends, ends, color=ink_of(ax), linewidth=0.8, zorder=1)
    if noise:
        label = f"noise floor {100 * noise:.2g} %"
        ax.fill_between(ends, ends / (1 + noise), ends * (1 + noise), color=NEUTRAL, alpha=0.4, lw=0, label=label)
    names = [name for place, name in enumerate(whole.model.variants) if place in code]
    for name, hue in hues(whole.model, names).items():
        own = code == whole.model.variants.index(name)
        error = np.mean(np.abs(predicted_ns / measured_ns - 1.0)[own])
        reach_ns = np.stack([predicted_ns - low_ns, high_ns - predicted_ns])[:, own]
        ax.errorbar(
            measured_ns[own],
            predicted_ns[own],
            reach_ns,
            fmt=hue.marker,
            color=(hue.colour, 0.8),
            ecolor=(hue.colour, 2 * PALE),
            elinewidth=0.8,
            markersize=3.0,
            markeredgewidth=0.0,
            label=f"{name}, error {100 * error:.2g} %",
            zorder=2,
        )
    ax.set(xscale="log", yscale="log", aspect="equal")
    show_times(ax, "x", "measured time")
    show_times(ax, "y", "predicted time")
    show_legend(ax)
    return ax
