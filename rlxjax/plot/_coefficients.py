"""Coefficients beside the model's own prior."""

from typing import TYPE_CHECKING, Any

import numpy as np

from rlxjax.calibration import CalibratedModel, Calibration
from rlxjax.device import Provenance
from rlxjax.fit import COVERED, COVERED_SDS, LatencyPosterior, PosteriorFit, is_measured, named

from ._axes import axis_of, ink_of, show_legend_above
from ._given import calibrated_of
from ._hues import COLOURS, NEUTRAL, PALE

if TYPE_CHECKING:
    import matplotlib.axes


def coefficients(
    calibrated: CalibratedModel | Calibration | LatencyPosterior | PosteriorFit,
    *,
    ax: "matplotlib.axes.Axes | None" = None,
) -> "matplotlib.axes.Axes":
    """Draw each coefficient as a multiple of its prior's median, with the interval that holds it in nine cases of ten.

    The prior is the model's own, which is wide: what is believed of any machine; its interval is the pale bar. A fit
    may begin from a narrower one. A filled marker is a coefficient that timings settled; a hollow one keeps most of
    what the fit began from.

    Args:
        calibrated: a model of one machine, a calibration, of which the first model is taken, a posterior, or the fit
            that found it.
        ax: a matplotlib axis; that of a new figure, as high as it needs, unless given.

    Returns:
        The axis. Its x direction is logarithmic and has no unit.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: none of these.

    Examples:
        >>> from matplotlib.figure import Figure
        >>> from rlxjax.calibration import prior_calibration
        >>> ax = coefficients(prior_calibration("cpu"), ax=Figure().subplots())
        >>> [label.get_text() for label in ax.get_yticklabels()][:2]
        ['host_call_ns', 'launch_ns']
    """
    whole = calibrated.posterior if isinstance(calibrated, PosteriorFit) else calibrated
    whole = whole if isinstance(whole, LatencyPosterior) else calibrated_of(whole, what="a posterior or its fit")
    posterior = whole if isinstance(whole, LatencyPosterior) else whole.posterior
    prior = posterior.model.prior
    names = list(named(posterior.coefficients))
    value, median, log_sd, prior_sd = (
        np.array([float(part[name]) for name in names])
        for part in map(named, (posterior.coefficients, prior.median, posterior.coefficient_log_sd(), prior.log_sd))
    )
    if isinstance(whole, LatencyPosterior):
        settled = is_measured(log_sd, prior_sd)
    else:
        settled = np.array([whole.provenance.get(name) is Provenance.MEASURED for name in names])
    ratio, reach, prior_reach = value / median, np.exp(COVERED_SDS * log_sd), np.exp(COVERED_SDS * prior_sd)

    ax = axis_of(ax, len(names))
    from ._ticks import PlainLogFormatter

    places = np.arange(len(names))
    width = prior_reach - 1 / prior_reach
    bars = ax.barh(places, width, 0.7, left=1 / prior_reach, color=NEUTRAL, alpha=PALE, label="prior")
    ax.axvline(1.0, color=ink_of(ax), linewidth=0.8, zorder=1)
    handles: list[Any] = [bars]
    for is_own, face, label in ((settled, COLOURS[0], "measured"), (~settled, "none", "not settled")):
        if is_own.any():
            reaches = np.stack([ratio - ratio / reach, ratio * reach - ratio])[:, is_own]
            style = {"fmt": "o", "color": COLOURS[0], "markerfacecolor": face, "markersize": 5.0, "label": label}
            handles.append(ax.errorbar(ratio[is_own], places[is_own], xerr=reaches, **style))
    ax.set_yticks(places, names)
    ax.tick_params(axis="y", length=0.0)
    label = f"coefficient / median of its prior\nwith intervals of {100 * COVERED:g} %"
    ax.set(xscale="log", ylim=(len(names) - 0.4, -0.6), xlabel=label)
    ax.xaxis.set_major_formatter(PlainLogFormatter())
    ax.xaxis.set_minor_formatter(PlainLogFormatter())
    show_legend_above(ax, handles)
    return ax
