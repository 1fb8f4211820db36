"""Which strategy wins over two inputs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlxjax._typing import RealLike
from rlxjax.calibration import CalibratedModel, Calibration

from ._axes import Axes, axis_of, ink_of, show_input, show_legend_above
from ._given import calibrated_of, other_sizes, values_along
from ._hues import NEUTRAL, hues
from ._marks import mark

#: How opaque cells are: timed ones, and those beyond what was timed.
TIMED, BEYOND = 0.8, 0.35


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
    named = [whole.name_of(name, **cells) for name in names] if fused is None else list(names)
    figures = {across: cells[across], up: cells[up], "fastest": np.array(named)[np.ravel(fastest)]}
    figures |= {"verdict": np.array([*named, "undecided"])[winner.ravel()], "timed": is_timed.ravel()}
    figures |= {f"{name} (ns)": whole.predict_ns(name, **cells) for name in named}

    ax = axis_of(ax)
    from matplotlib.colors import ListedColormap
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colours = [*(hue.colour for hue in hues(whole.model, named).values()), NEUTRAL]
    x, y = _edges(columns), _edges(rows)
    # One image in a vector file: between transparent rectangles, seams would show.
    mesh = ax.pcolormesh(
        x, y, winner, cmap=ListedColormap(colours), vmin=-0.5, vmax=len(colours) - 0.5, rasterized=True
    )
    mark(ax, [mesh], figures)
    mesh.set_alpha(np.where(is_timed, TIMED, BEYOND).ravel().tolist())
    _draw_borders(ax, x, y, fastest, "solid")
    _draw_borders(ax, x, y, is_timed, "dotted")
    show_input(ax, "x", whole.model, across, columns, others)
    show_input(ax, "y", whole.model, up, rows)
    ax.set(xlim=x[[0, -1]], ylim=y[[0, -1]])
    labels = dict(enumerate(named)) | ({len(names): "undecided"} if (winner == len(names)).any() else {})
    handles: list[Any] = [Patch(color=colours[place], alpha=TIMED, label=label) for place, label in labels.items()]
    if not is_timed.all():
        handles.append(Line2D([], [], color=ink_of(ax), linestyle=":", label="not timed"))
    show_legend_above(ax, handles)
    return ax


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
