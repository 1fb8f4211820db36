"""The axis that a picture is drawn on, and what its two directions show."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rlxjax._values import FrozenDict
from rlxjax.fit import LatencyModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
else:
    Axes = Any  # matplotlib is imported when a picture is drawn

#: Values of an input that all get a tick, at most.
MOST_TICKS = 9
#: Of a new figure: how high a line is, in sizes of the font, and all else, in inches.
LINE_HEIGHT, REST_IN = 1.45, 0.9
NOTHING: Mapping[str, Any] = FrozenDict()


def axis_of(ax: Any, lines: float | None = None) -> Axes:
    """Return the axis to draw on: the given one, else that of a new figure, high enough for lines of text."""
    try:
        import matplotlib.axes
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ImportError(
            "rlxjax.plot: matplotlib is not installed; get it with `pip install 'rlxjax[plot]'`"
        ) from None
    if isinstance(ax, matplotlib.axes.Axes):
        return ax
    if ax is not None:
        raise ValueError(f"ax: expected one matplotlib axis, got {type(ax).__name__}")
    from matplotlib import pyplot

    width_in, height_in = matplotlib.rcParams["figure.figsize"]
    if lines is not None:
        height_in = REST_IN + lines * LINE_HEIGHT * matplotlib.rcParams["font.size"] / 72.0
    return pyplot.subplots(figsize=(width_in, height_in), layout="constrained")[1]


def ink_of(ax: Axes) -> Any:
    """Return the colour of an axis' own labels, which its background was chosen for."""
    return ax.xaxis.label.get_color()


def show_legend(ax: Axes, **options: Any) -> None:
    """Name what is drawn, on whatever the background is."""
    ax.legend(**{"frameon": False, "labelcolor": ink_of(ax), "fontsize": "small", **options})


def show_legend_above(ax: Axes, handles: Sequence[Any]) -> None:
    """Name what fills the axis, above it: in one row, or in two of more than three."""
    columns = len(handles) if len(handles) <= 3 else (len(handles) + 1) // 2
    # Flush with the right end, so that it reaches over the labels of the other direction where the axis is narrow.
    where = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
    show_legend(ax, handles=handles, ncols=columns, handlelength=1.2, **where)


def show(
    ax: Axes, along: Literal["x", "y"], label: str, said: Callable[[float], str], sizes: Mapping[str, Any] = NOTHING
) -> None:
    """Label a direction, and its ticks by a function of their values; sizes that stay are named below."""
    from matplotlib.ticker import LogFormatter

    class LogTicks(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return said(x) if super().__call__(x, pos) else ""  # where there is room for a label

    axis = getattr(ax, f"{along}axis")
    if axis.get_scale() == "log":
        axis.set_major_formatter(LogTicks())
        axis.set_minor_formatter(LogTicks())
    else:
        axis.set_major_formatter(lambda value, _: said(value))
    axis.set_label_text(label + (f"\n{in_words(sizes)}" if sizes else ""))


def show_input(
    ax: Axes,
    along: Literal["x", "y"],
    model: LatencyModel,
    name: str,
    values: np.ndarray,
    sizes: Mapping[str, Any] = NOTHING,
) -> None:
    """Make a direction that of an input, logarithmic; few values each get a tick."""
    ax.set(**{f"{along}scale": "log"})
    show(ax, along, f"{name} ({model.inputs[name].unit})", plain, sizes)
    if len(values) <= MOST_TICKS:
        axis = getattr(ax, f"{along}axis")
        axis.set_ticks(values, [plain(value) for value in values])
        axis.set_ticks([], minor=True)


def duration(time_ns: float) -> str:
    """Return a time with three digits, in the unit that fits it."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter("s")(float(f"{time_ns:.3g}") * 1e-9)


def plain(value: float) -> str:
    """Return a number as people write it."""
    return f"{value:,.0f}" if abs(value) >= 1000.0 else f"{value:g}"


def in_words(sizes: Mapping[str, Any]) -> str:
    """Return sizes by name."""
    return ", ".join(f"{name} {plain(float(value))}" for name, value in sizes.items())
