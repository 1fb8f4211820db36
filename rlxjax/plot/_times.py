"""Times of runs: predicted against measured, along one input of a model, and who is the fastest over two."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlxjax._typing import RealLike
from rlxjax.calibration import CalibratedModel, Calibration
from rlxjax.fit import Timings, all_inputs, estimate, strategy_of

from ._axes import (
    NEUTRAL,
    PALE,
    Axes,
    axis_of,
    calibrated_of,
    duration,
    hues,
    in_words,
    ink_of,
    keep,
    other_sizes,
    plain,
    show,
    show_input,
    show_legend,
    values_along,
)

#: How opaque the cells of a map are: timed ones, and those beyond what was timed.
TIMED, BEYOND = 0.8, 0.35
#: Headings of a prediction and the ends of its interval.
PREDICTED = ("predicted (ns)", "from (ns)", "to (ns)")


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
        ValueError: timings of another model or of none, a level that is not between 0 and 1, or noise that is negative.

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

    ratio, entries = predicted_ns / measured_ns, whole.model.inputs
    sizes = {name: column for name, column in timings.runs.inputs.items() if not entries[name].is_list}
    if names is None:
        columns = {name: np.broadcast_to(column, code.shape) for name, column in sizes.items()}
        said = [in_words({name: column[row] for name, column in columns.items()}) for row in range(code.size)]
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
        ax.errorbar(measured_ns[own], (predicted_ns / scale)[own], reaches[:, own], label=label, **style)
        keep(ax, {heading: column[own] for heading, column in figures.items()})
    ax.set(xscale="log", yscale="log", aspect="auto" if is_ratio else "equal")
    show(ax, "x", "measured time", duration)
    show(ax, "y", *(("predicted / measured", plain) if is_ratio else ("predicted time", duration)))
    show_legend(ax)
    return ax


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
        >>> known, sizes = prior_calibration("cpu"), {"n_fft": 256, "k": 16}
        >>> ax = time_by(known, "batch", [1, 64, 8192], strategies=["fused"], **sizes, ax=Figure().subplots())
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['fused']
    """
    whole = calibrated_of(calibrated, timings)
    numbers, others = values_along(along, values), other_sizes(sizes, along)
    moved = {**others, along: numbers}
    names = whole.alternatives(**moved) if strategies is None else tuple(strategies)
    if not names:
        raise ValueError("strategies: expected one at least, got none")
    runs = {name: whole.estimate(name, **moved) for name in names}
    found = {name: tuple(map(np.asarray, (run.time_ns, *whole.bounds_ns(run, level)))) for name, run in runs.items()}
    points = {} if timings is None else {n: _measured(whole, timings, n, along, numbers, others) for n in names}
    is_timed = np.broadcast_to(np.asarray(whole.in_domain(**moved)), numbers.shape)

    ax = axis_of(ax)
    beyond = ~is_timed  # and its neighbours, so that lines meet
    beyond[1:] |= ~is_timed[:-1]
    beyond[:-1] |= ~is_timed[1:]
    for name, hue in hues(whole.model, names).items():
        time_ns, low_ns, high_ns = found[name]
        ax.fill_between(numbers, low_ns, high_ns, color=hue.colour, alpha=PALE, linewidth=0.0)
        style = {"color": hue.colour, "markersize": 4.5, "markeredgecolor": ink_of(ax), "markeredgewidth": 0.5}
        figures = {"strategy": name, **others, along: numbers, **dict(zip(PREDICTED, found[name], strict=True))}
        if name in points:
            at, measured_ns = points[name]
            ax.plot(at, measured_ns, linestyle="none", marker=hue.marker, **style)
            style |= {"marker": hue.marker, "markevery": []}  # the legend shows what points look like
            of = dict(zip(at.tolist(), measured_ns.tolist(), strict=True))
            figures["measured (ns)"] = [of.get(value) for value in numbers.tolist()]
        keep(ax, figures)
        ax.plot(numbers, np.where(is_timed, time_ns, np.nan), linestyle=hue.line, label=name, **style)
        if beyond.any():
            ax.plot(numbers, np.where(beyond, time_ns, np.nan), color=hue.colour, linestyle=":")
    if beyond.any():
        ax.plot([], [], color=ink_of(ax), linestyle=":", label="not timed")
    ax.set(yscale="log")
    show_input(ax, "x", _label(whole, along), numbers, others)
    show(ax, "y", "time", duration)
    show_legend(ax)
    return ax


def _measured(
    whole: CalibratedModel, timings: Timings, name: str, along: str, values: np.ndarray, sizes: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    inputs, code = timings.runs.inputs, np.asarray(timings.runs.variant)
    at, time_ns = np.asarray(inputs[along]), np.asarray(timings.time_ns)
    wanted = all_inputs(whole.model, name, (), {**sizes, along: at})
    kept = (at >= values[0]) & (at <= values[-1])
    for key, value in wanted.items():
        own = np.asarray(inputs[key])
        kept &= ~own.any(-1) if whole.model.inputs[key].is_list else own == np.asarray(value)  # lists are left empty
    # Of several variants a strategy runs one, another one for other sizes.
    variants = strategy_of(whole.model, name).variants
    run = {value: whole.variant_of(name, **{**sizes, along: value}) for value in np.unique(at[kept]) if variants[1:]}
    own = [row for row in np.flatnonzero(kept) if whole.model.variants[code[row]] == run.get(at[row], variants[0])]
    return at[own], time_ns[own]


def decision_map(
    calibrated: CalibratedModel | Calibration,
    over: Mapping[str, Sequence[float] | np.ndarray],
    *,
    fused: str | None = None,
    kept: str | None = None,
    ax: Axes | None = None,
    **sizes: RealLike | None,
) -> Axes:
    """Draw which strategy is the fastest over two inputs of a model, and where that is undecided.

    A cell has the colour of a strategy that beats every other one surely enough, as `CalibratedModel.decided` says, and
    is grey where none does. Solid lines are where another one is predicted to be the fastest. Cells are pale beyond the
    dotted line, where nothing was timed.

    Args:
        calibrated: a model of one machine, or a calibration, of which the first model is taken.
        over: the values of two inputs by name, `[columns]` and `[rows]`: the first goes to the right, the second up.
        fused: one of two strategies to decide between; all that give the result of every cell unless given.
        kept: the other one.
        ax: a matplotlib axis; that of a new figure unless given.
        **sizes: the other inputs by name, a number each; what has a default may be left out.

    Returns:
        The axis. Its first collection holds the places of the winners in the legend, `[rows, columns]`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: not two inputs, one that is unknown or missing, fewer than two values, a value that is not positive,
            an unknown strategy, or one without the other.

    Examples:
        >>> from matplotlib.figure import Figure
        >>> from rlxjax.calibration import prior_calibration
        >>> sizes = {"batch": [1, 64, 8192], "n_fft": [256, 1024]}
        >>> ax = decision_map(prior_calibration("cpu"), sizes, fused="fused", kept="host", k=16, ax=Figure().subplots())
        >>> ax.collections[0].get_array().shape
        (2, 3)
    """
    whole = calibrated_of(calibrated)
    if not isinstance(over, Mapping) or len(over) != 2:
        raise ValueError(f"over: expected the values of two inputs by name, got {over!r:.60}")
    (across, columns), (up, rows) = ((name, values_along(name, values)) for name, values in over.items())
    others = other_sizes(sizes, across, up)
    cells = {**others, **dict(zip((across, up), map(np.ravel, np.meshgrid(columns, rows)), strict=True))}
    if (fused is None) != (kept is None):
        raise ValueError("fused, kept: expected both or neither")
    names = whole.alternatives(**cells) if fused is None or kept is None else (fused, kept)
    if len(set(names)) < 2:
        raise ValueError(f"strategies: expected two to decide between, got {', '.join(names) or 'none'}")
    shape = (len(rows), len(columns))
    found = whole.decided(**cells, candidates=names)
    fastest, is_sure = (np.asarray(column).reshape(shape) for column in (found.place, found.is_sure))
    winner = np.where(is_sure, fastest, len(names))
    is_timed = np.broadcast_to(np.asarray(whole.in_domain(**cells)), winner.size).reshape(shape)
    figures = {across: cells[across], up: cells[up], "fastest": np.array(names)[np.ravel(fastest)]}
    figures |= {"verdict": np.array([*names, "undecided"])[winner.ravel()], "timed": is_timed.ravel()}
    figures |= {f"{name} (ns)": whole.predict_ns(name, **cells) for name in names}

    ax = axis_of(ax)
    from matplotlib.colors import ListedColormap
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colours = [*(hue.colour for hue in hues(whole.model, names).values()), NEUTRAL]
    x, y = _edges(columns), _edges(rows)
    # One image in a vector file: between transparent rectangles, seams would show.
    options: dict[str, Any] = {"cmap": ListedColormap(colours), "vmin": -0.5, "vmax": len(colours) - 0.5}
    mesh = ax.pcolormesh(x, y, winner, **options, rasterized=True)
    keep(ax, figures)
    mesh.set_alpha(np.where(is_timed, TIMED, BEYOND).ravel().tolist())
    _draw_borders(ax, x, y, fastest, "solid")
    _draw_borders(ax, x, y, is_timed, "dotted")
    show_input(ax, "x", _label(whole, across), columns, others)
    show_input(ax, "y", _label(whole, up), rows)
    ax.set(xlim=x[[0, -1]], ylim=y[[0, -1]])
    labels = dict(enumerate(names)) | ({len(names): "undecided"} if (winner == len(names)).any() else {})
    handles: list[Any] = [Patch(color=colours[place], alpha=TIMED, label=label) for place, label in labels.items()]
    if not is_timed.all():
        handles.append(Line2D([], [], color=ink_of(ax), linestyle=":", label="not timed"))
    show_legend(ax, above=handles)
    return ax


def _label(whole: CalibratedModel, name: str) -> str:
    return f"{name} ({whole.model.inputs[name].unit})"


def _draw_borders(ax: Axes, x: np.ndarray, y: np.ndarray, cells: np.ndarray, line: str) -> None:
    """Draw lines between neighbours that differ, of cells `[rows, columns]` with edges at x and y."""
    style = {"colors": [ink_of(ax)], "linestyles": line, "linewidths": 1.0}
    row, column = np.argwhere(cells[:, 1:] != cells[:, :-1]).T
    ax.vlines(x[column + 1], y[row], y[row + 1], **style)
    row, column = np.argwhere(cells[1:] != cells[:-1]).T
    ax.hlines(y[row + 1], x[column], x[column + 1], **style)


def _edges(values: np.ndarray) -> np.ndarray:
    """Return the edges of cells around values, half-way between them on a logarithmic axis."""
    logs = np.log(values)
    between = (logs[:-1] + logs[1:]) / 2.0
    return np.exp([2.0 * logs[0] - between[0], *between, 2.0 * logs[-1] - between[-1]])
