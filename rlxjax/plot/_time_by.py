"""The time of every strategy along one input."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlxjax._typing import RealLike
from rlxjax.calibration import CalibratedModel, Calibration
from rlxjax.fit import Timings, all_inputs, strategy_of

from ._axes import Axes, axis_of, duration, ink_of, show, show_input, show_legend
from ._given import calibrated_of, other_sizes, values_along
from ._hues import PALE, hues
from ._marks import mark

#: Headings of a prediction and the ends of its interval.
PREDICTED = ("predicted (ns)", "from (ns)", "to (ns)")


def time_by(
    calibrated: CalibratedModel | Calibration,
    along: str,
    values: Sequence[float] | np.ndarray,
    *,
    strategies: Sequence[str] | None = None,
    timings: Timings | None = None,
    level: float = 0.9,
    ax: Axes | None = None,
    **sizes: RealLike | None,
) -> Axes:
    """Draw what strategies take along one input of a model, with the bands in which a run's time lies.

    Lines are dotted beyond what was timed.

    Args:
        calibrated: a model of one machine, or a calibration, of which the first model is taken.
        along: the name of the input.
        values: of that input, `[n]`; a line goes from one to the next.
        strategies: to draw; all that give the result of every value unless given.
        timings: of the model; those at the same sizes, within the values, are drawn as points. Of a strategy that may
            run one of several variants, those of the one that it runs.
        level: the probability that a run's time lies within its band.
        ax: a matplotlib axis; that of a new figure unless given.
        **sizes: the other inputs by name, a number each; what has a default may be left out.

    Returns:
        The axis. Both its directions are logarithmic, times in ns.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: an unknown or missing input, fewer than two values, a value that is not positive, an unknown
            strategy, or a level that is not between 0 and 1.

    Examples:
        >>> from matplotlib.figure import Figure
        >>> from rlxjax.calibration import prior_calibration
        >>> ax = time_by(prior_calibration("cpu"), "batch", [1, 64, 8192], n_fft=256, k=16, ax=Figure().subplots())
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['fast', 'fused', 'block']
    """
    whole = calibrated_of(calibrated, timings)
    numbers, others = values_along(along, values), other_sizes(sizes, along)
    moved = {**others, along: numbers}
    names = whole.alternatives(**moved) if strategies is None else tuple(strategies)
    if not names:
        raise ValueError("strategies: expected one at least, got none")
    named = [whole.name_of(name, **moved) if strategies is None else name for name in names]
    runs = {name: whole.estimate(name, **moved) for name in named}
    found = {name: tuple(map(np.asarray, (run.time_ns, *whole.bounds_ns(run, level)))) for name, run in runs.items()}
    points = (
        {} if timings is None else {name: _measured(whole, timings, name, along, numbers, others) for name in named}
    )
    is_timed = np.broadcast_to(np.asarray(whole.in_domain(**moved)), numbers.shape)

    ax = axis_of(ax)
    beyond = _and_neighbours(~is_timed)
    for name, hue in hues(whole.model, named).items():
        time_ns, low_ns, high_ns = found[name]
        ax.fill_between(numbers, low_ns, high_ns, color=hue.colour, alpha=PALE, linewidth=0.0)
        style = {"color": hue.colour, "markersize": 4.5, "markeredgecolor": ink_of(ax), "markeredgewidth": 0.5}
        at, measured_ns = points.get(name, (np.zeros(0), np.zeros(0)))
        if name in points:
            (drawn,) = ax.plot(at, measured_ns, linestyle="none", marker=hue.marker, **style)
            here = np.where(np.isin(at, numbers), np.searchsorted(numbers, at), len(numbers))
            figures = {key: np.append(column, np.nan)[here] for key, column in zip(PREDICTED, found[name], strict=True)}
            mark(ax, [drawn], {"strategy": name, **others, along: at, **figures, "measured (ns)": measured_ns})
            style |= {"marker": hue.marker, "markevery": []}  # the legend shows what points look like
        # What is not seen, and can be pointed at.
        free = ~np.isin(numbers, at)
        (drawn,) = ax.plot(numbers[free], time_ns[free], "o", color=hue.colour, markersize=4.5, alpha=0.0)
        figures = {key: column[free] for key, column in zip(PREDICTED, found[name], strict=True)}
        mark(ax, [drawn], {"strategy": name, **others, along: numbers[free], **figures})
        ax.plot(numbers, np.where(is_timed, time_ns, np.nan), linestyle=hue.line, label=name, **style)
        if beyond.any():
            ax.plot(numbers, np.where(beyond, time_ns, np.nan), color=hue.colour, linestyle=":")
    if beyond.any():
        ax.plot([], [], color=ink_of(ax), linestyle=":", label="not timed")
    ax.set(yscale="log")
    show_input(ax, "x", whole.model, along, numbers, others)
    show(ax, "y", "time", duration)
    show_legend(ax)
    return ax


def _measured(
    whole: CalibratedModel, timings: Timings, name: str, along: str, values: np.ndarray, sizes: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Return where a strategy was timed at these sizes, and its times in ns."""
    inputs, code = timings.runs.inputs, np.asarray(timings.runs.variant)
    at, time_ns = np.asarray(inputs[along]), np.asarray(timings.time_ns)
    wanted = all_inputs(whole.model, name, (), {**sizes, along: at})
    kept = (at >= values[0]) & (at <= values[-1])
    for key, value in wanted.items():
        kept &= np.asarray(inputs[key]) == np.asarray(value)
    # Of several variants a strategy runs one, another one for other sizes.
    variants = strategy_of(whole.model, name).variants
    run = {value: whole.variant_of(name, **{**sizes, along: value}) for value in np.unique(at[kept]) if variants[1:]}
    own = [row for row in np.flatnonzero(kept) if whole.model.variants[code[row]] == run.get(at[row], variants[0])]
    return at[own], time_ns[own]


def _and_neighbours(marked: np.ndarray) -> np.ndarray:
    """Return the marked values and those beside them, so that lines meet."""
    found = marked.copy()
    found[1:] |= marked[:-1]
    found[:-1] |= marked[1:]
    return found
