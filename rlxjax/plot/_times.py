"""Pictures of times: predicted / measured time, time against an input, and a map of the fastest strategy."""

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

#: The opacity of the cells of a map: within the range of the timed sizes, and outside it.
TIMED, BEYOND = 0.8, 0.35
#: The headings of three columns: a prediction, and the lower and the upper end of its interval.
PREDICTED = ("predicted (ns)", "from (ns)", "to (ns)")


def predicted_vs_measured(
    calibrated: CalibratedModel | Calibration,
    timings: Timings,
    *,
    level: float = 0.9,
    noise: float | None = None,
    names: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw each predicted time divided by the measured time, with its interval and the noise of the timings.

    A point on the line at 1 is a correct prediction. The bar through a point is the interval of the predicted time. The
    bar crosses the line if the interval contains the measured time. The grey band is the noise: the relative difference
    between repeated timings. Each variant has its own colour, marker and, in the legend, mean absolute relative error.

    Args:
        calibrated: a calibrated model, or a calibration that holds the model of the timings.
        timings: measured times of runs of the model, `[n]`.
        level: the probability that an interval contains the time of a run, between 0 and 1.
        noise: the relative noise of the timings, at least 0; by default the noise floor of the calibration, if known.
        names: a name for each timing, `[n]`, which `rows` returns; by default the timing's variant and sizes.
        ax: the matplotlib axis to draw on; without an axis, a new figure.

    Returns:
        The axis. Its x direction is the measured time in ns, its y direction the ratio. Both are logarithmic.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the timings are missing or belong to another model, or `level` or `noise` is out of range.

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
        raise ValueError(f"noise: expected a number of at least 0, got {noise}")
    found = estimate(whole.posterior, timings.runs)
    predicted_ns, low_ns, high_ns = map(np.asarray, (found.time_ns, *whole.bounds_ns(found, level)))
    measured_ns, code = np.asarray(timings.time_ns), np.asarray(timings.runs.variant)

    ratio, sizes = predicted_ns / measured_ns, timings.runs.inputs
    if names is None:
        columns = {name: np.broadcast_to(column, code.shape) for name, column in sizes.items()}
        said = [in_words({name: column[row] for name, column in columns.items()}) for row in range(code.size)]
        names = [f"{whole.model.variants[own]}, {words}" for own, words in zip(code, said, strict=True)]
    figures = {"run": np.array(names), "measured (ns)": measured_ns, "predicted (ns)": predicted_ns}
    figures |= {"from (ns)": low_ns, "to (ns)": high_ns, "predicted / measured": ratio}

    ax = axis_of(ax)
    ax.axhline(1.0, color=ink_of(ax), linewidth=0.8, zorder=1)
    if noise:
        label = f"noise floor {100 * noise:.2g} %"
        ax.axhspan(1 / (1 + noise), 1 + noise, color=NEUTRAL, alpha=0.4, linewidth=0.0, label=label)
    known = [name for place, name in enumerate(whole.model.variants) if place in code]
    for name, hue in hues(whole.model, known).items():
        own = code == whole.model.variants.index(name)
        reaches = np.stack([predicted_ns - low_ns, high_ns - predicted_ns]) / measured_ns
        style = {"fmt": hue.marker, "color": (hue.colour, 0.8), "ecolor": (hue.colour, 2 * PALE), "elinewidth": 0.8}
        style |= {"markersize": 3.0, "markeredgewidth": 0.0, "zorder": 2}
        label = f"{name}, error {100 * np.mean(np.abs(ratio - 1.0)[own]):.2g} %"
        ax.errorbar(measured_ns[own], ratio[own], reaches[:, own], label=label, **style)
        keep(ax, {heading: column[own] for heading, column in figures.items()})
    ax.set(xscale="log", yscale="log")
    show(ax, "x", "measured time", duration)
    show(ax, "y", "predicted / measured", plain)
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
    """Draw how the predicted time of each strategy depends on an input of a model. A band shows the interval.

    Args:
        calibrated: a calibrated model, or a calibration (the picture shows its first model).
        along: the name of the input on the x axis.
        values: at least two positive values of this input, `[n]`.
        strategies: the names of the strategies; by default all strategies that give the result at each of the values.
        timings: timings of the model. A timing is drawn as a point if its value of `along` is in the range of `values`,
            its other sizes equal `sizes`, and its variant is the one that the strategy runs there.
        level: the probability that a band contains the time of a run, between 0 and 1.
        ax: the matplotlib axis to draw on; without an axis, a new figure.
        **sizes: a number for each other input, by name. An input with a default may be left out.

    Returns:
        The axis, logarithmic in x and y, with times in ns. A line is dotted outside the range of timed sizes.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: an input is unknown or missing, a value is not positive, there are fewer than two values, a strategy
            is unknown, or `level` is out of range.

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
        raise ValueError("strategies: expected at least one, got none")
    runs = {name: whole.estimate(name, **moved) for name in names}
    found = {name: tuple(map(np.asarray, (run.time_ns, *whole.bounds_ns(run, level)))) for name, run in runs.items()}
    points = {} if timings is None else {n: _measured(whole, timings, n, along, numbers, others) for n in names}
    is_timed = np.broadcast_to(np.asarray(whole.in_domain(**moved)), numbers.shape)

    ax = axis_of(ax)
    beyond = ~is_timed  # and the neighbours of these values, so that lines meet
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
            style |= {"marker": hue.marker, "markevery": []}  # the legend shows the marker of the points
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
        kept &= np.asarray(inputs[key]) == np.asarray(value)
    # A strategy runs one of its variants, and the sizes determine which.
    variants = strategy_of(whole.model, name).variants
    run = {value: whole.variant_of(name, **{**sizes, along: value}) for value in np.unique(at[kept]) if variants[1:]}
    own = [row for row in np.flatnonzero(kept) if whole.model.variants[code[row]] == run.get(at[row], variants[0])]
    return at[own], time_ns[own]


def decision_map(
    calibrated: CalibratedModel | Calibration,
    over: Mapping[str, Sequence[float] | np.ndarray] | None = None,
    *,
    fused: str | None = None,
    kept: str | None = None,
    ax: Axes | None = None,
    **sizes: RealLike | None,
) -> Axes:
    """Draw a map that shows which strategy is fastest, with an input of a model on each axis.

    A cell has the colour of a strategy if `CalibratedModel.decided` is sure that this strategy is the fastest. Other
    cells are grey. At a solid line, the strategy with the shortest predicted time changes. A dotted line encloses the
    range of timed sizes. The cells outside this range are pale.

    Args:
        calibrated: a calibrated model, or a calibration (the picture shows its first model).
        over: a dict from the names of two inputs to their values: `[columns]` on the x axis, then `[rows]` on the y.
            By default these are the first two inputs without a size in `sizes`. Their values are then the smallest
            timed value and its doublings, cut to the part of the map in which the decision changes.
        fused: the first of two strategies to compare; by default all strategies that give the result in each cell.
        kept: the second of two strategies to compare.
        ax: the matplotlib axis to draw on; without an axis, a new figure.
        **sizes: a number for each other input, by name. An input with a default may be left out.

    Returns:
        The axis. `ax.collections[0]` holds for each cell the position of its strategy in the legend, `[rows, columns]`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: `over` does not name two inputs, an input is unknown or missing, a value is not positive, there are
            fewer than two values, a strategy is unknown, or only one of `fused` and `kept` is given.

    Examples:
        >>> from matplotlib.figure import Figure
        >>> from rlxjax.calibration import prior_calibration
        >>> sizes = {"batch": [1, 64, 8192], "n_fft": [256, 1024]}
        >>> ax = decision_map(prior_calibration("cpu"), sizes, fused="fused", kept="host", k=16, ax=Figure().subplots())
        >>> ax.collections[0].get_array().shape
        (2, 3)
    """
    whole = calibrated_of(calibrated)
    is_cropped, over = over is None, _timed(whole, sizes) if over is None else over
    if not isinstance(over, Mapping) or len(over) != 2:
        raise ValueError(f"over: expected the values of two inputs by name, got {over!r:.60}")
    (across, columns), (up, rows) = ((name, values_along(name, values)) for name, values in over.items())
    others = other_sizes(sizes, across, up)
    cells = {**others, **dict(zip((across, up), map(np.ravel, np.meshgrid(columns, rows)), strict=True))}
    if (fused is None) != (kept is None):
        raise ValueError("fused, kept: give both strategies, or leave both out")
    names = whole.alternatives(**cells) if fused is None or kept is None else (fused, kept)
    if len(set(names)) < 2:
        raise ValueError(f"strategies: expected two different strategies, got {', '.join(names) or 'none'}")
    found = whole.decided(**cells, candidates=names)
    winner = np.where(found.is_sure, found.place, len(names))
    grid = {across: cells[across], up: cells[up], "place": found.place, "winner": winner}
    grid |= {"timed": whole.in_domain(**cells)}
    shape = (len(rows), len(columns))
    grid = {name: np.broadcast_to(np.asarray(column), winner.size).reshape(shape) for name, column in grid.items()}
    if is_cropped:
        part = np.ix_(_changing(grid["winner"]), _changing(grid["winner"].T))
        grid = {name: column[part] for name, column in grid.items()}
    columns, rows = grid[across][0], grid[up][:, 0]
    fastest, winner, is_timed = grid["place"], grid["winner"], grid["timed"]
    cells = {**others, across: grid[across].ravel(), up: grid[up].ravel()}
    figures = {across: cells[across], up: cells[up], "fastest": np.array(names)[fastest.ravel()]}
    figures |= {"verdict": np.array([*names, "undecided"])[winner.ravel()], "timed": is_timed.ravel()}
    figures |= {f"{name} (ns)": whole.predict_ns(name, **cells) for name in names}

    ax = axis_of(ax)
    from matplotlib.colors import ListedColormap
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colours = [*(hue.colour for hue in hues(whole.model, names).values()), NEUTRAL]
    x, y = _edges(columns), _edges(rows)
    # A vector file of transparent rectangles would show seams between cells.
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


def _timed(whole: CalibratedModel, sizes: Mapping[str, Any]) -> dict[str, Sequence[float]]:
    """Return values for the first two inputs without a size: doublings in the timed range that the model accepts."""
    free = [name for name, entry in whole.model.inputs.items() if sizes.get(name) is None]
    free.sort(key=lambda name: whole.model.inputs[name].default is not None)
    ends = {name: whole.domain[name] for name in free[:2]}

    def is_possible(name: str, value: float) -> bool:
        try:
            whole.alternatives(**{**sizes, **{free: most for free, (_, most) in ends.items()}, name: value})
        except ValueError:
            return False
        return True

    found = {name: [*np.unique(np.clip(low * 2.0 ** np.arange(64), None, most))] for name, (low, most) in ends.items()}
    return {name: [one for one in values if is_possible(name, one)] or values for name, values in found.items()}


def _changing(cells: np.ndarray) -> np.ndarray:
    """Return the row numbers from two rows before the first change to two after the last, or all without a change."""
    changes = np.flatnonzero((cells[1:] != cells[:-1]).any(1)) + 1
    first, last = (changes[0] - 2, changes[-1] + 2) if changes.size else (0, len(cells))
    return np.arange(max(first, 0), min(last, len(cells)))


def _label(whole: CalibratedModel, name: str) -> str:
    return f"{name} ({whole.model.inputs[name].unit})"


def _draw_borders(ax: Axes, x: np.ndarray, y: np.ndarray, cells: np.ndarray, line: str) -> None:
    """Draw a line between adjacent cells, `[rows, columns]`, that differ. `x` and `y` are the edges of the cells."""
    style = {"colors": [ink_of(ax)], "linestyles": line, "linewidths": 1.0}
    row, column = np.argwhere(cells[:, 1:] != cells[:, :-1]).T
    ax.vlines(x[column + 1], y[row], y[row + 1], **style)
    row, column = np.argwhere(cells[1:] != cells[:-1]).T
    ax.hlines(y[row + 1], x[column], x[column + 1], **style)


def _edges(values: np.ndarray) -> np.ndarray:
    """Return the edges of cells around values. On a logarithmic axis an edge is half-way between two values."""
    logs = np.log(values)
    between = (logs[:-1] + logs[1:]) / 2.0
    return np.exp([2.0 * logs[0] - between[0], *between, 2.0 * logs[-1] - between[-1]])
