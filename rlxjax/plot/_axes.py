"""What pictures share: the axis and its directions, colours, what they are given, and the figures behind them.

Every colour has a contrast of 3 at least with white and with black, and differs from the others for eyes that take red
for green: tests/test_plot.py computes both.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Float

from rlxjax.calibration import CalibratedModel, Calibration
from rlxjax.extras import require
from rlxjax.fit import LatencyModel, Timings, strategy_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
else:
    Axes = Any  # matplotlib is imported when a picture is drawn

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a3cff")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", (0, (6, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1)))
#: The colour of what is no way to do the work: noise, a total, what is undecided; how opaque what lies behind lines is.
NEUTRAL, PALE = "#808080", 0.2
#: Values of an input that all get a tick, at most.
MOST_TICKS = 9
#: Of a new figure: how high a line is, in sizes of the font, and all else, in inches.
LINE_HEIGHT, REST_IN = 1.45, 0.9
#: The figures behind each picture, a row a mark, by heading; the unit of a number stands in its heading.
_ROWS: "WeakKeyDictionary[Axes, list[dict[str, Any]]]" = WeakKeyDictionary()


def axis_of(ax: Any, lines: float | None = None) -> Axes:
    """Return the axis to draw on: the given one, else that of a new figure, high enough for lines of text."""
    require("matplotlib", "plot")
    import matplotlib.axes

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


def show_legend(ax: Axes, above: Sequence[Any] = ()) -> None:
    """Name what is drawn, on whatever the background is; what fills the axis above it, more than three in two rows."""
    where: dict[str, Any] = {}
    if above:
        columns = len(above) if len(above) <= 3 else (len(above) + 1) // 2
        # Flush with the right end, so that it reaches over the labels of the other direction where the axis is narrow.
        where = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
        where |= {"handles": above, "ncols": columns, "handlelength": 1.2}
    ax.legend(frameon=False, labelcolor=ink_of(ax), fontsize="small", **where)


def show(
    ax: Axes, along: Literal["x", "y"], label: str, said: Callable[[float], str], sizes: Mapping[str, Any] | None = None
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


def show_input(ax: Axes, along: Literal["x", "y"], label: str, values: np.ndarray, sizes: Any = None) -> None:
    """Make a direction that of an input, logarithmic; few values each get a tick."""
    ax.set(**{f"{along}scale": "log"})
    show(ax, along, label, plain, sizes)
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


class Hue(NamedTuple):
    """How one of several things is drawn."""

    colour: str
    marker: str
    line: Any


def hues(model: LatencyModel, names: Sequence[str]) -> dict[str, Hue]:
    """Return how strategies or variants are drawn: as the first variant of each, if that is free, in every picture."""
    variants, own = list(model.variants), {}
    for name in names:
        place = variants.index(name if name in variants else strategy_of(model, name).variants[0])
        if place not in own.values():
            own[name] = place
    free = (place for place in range(len(variants) + len(names)) if place not in own.values())
    places = {name: own[name] if name in own else next(free) for name in names}
    return {
        name: Hue(COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)], LINES[place % len(LINES)])
        for name, place in places.items()
    }


def calibrated_of(calibrated: Any, timings: Any = None, what: str = "") -> CalibratedModel:
    """Return the calibrated model that is meant: of a calibration that of the timings, without any the first."""
    if timings is not None and not isinstance(timings, Timings):
        raise ValueError(f"timings: expected Timings, got {type(timings).__name__}")
    if isinstance(calibrated, Calibration):
        calibrated = calibrated.of(None if timings is None else timings.model.name)
    if not isinstance(calibrated, CalibratedModel):
        expected = f"a Calibration, one of its models, {what}" if what else "a Calibration or one of its models"
        raise ValueError(f"calibrated: expected {expected}, got {type(calibrated).__name__}")
    if timings is not None:
        own, other = calibrated.model, timings.model
        if (own.name, own.version) != (other.name, other.version):
            expected, got = (f"{model.name} (version {model.version})" for model in (own, other))
            raise ValueError(f"timings: expected those of {expected}, got those of {got}")
        if np.ndim(timings.time_ns) != 1 or np.size(timings.time_ns) == 0:
            raise ValueError(f"timings: expected one machine's, `[n]`, got shape {np.shape(timings.time_ns)}")
    return calibrated


def values_along(name: str, values: Any) -> Float[np.ndarray, "n"]:
    """Return the different values of an input in ascending order."""
    try:
        numbers = np.unique(np.asarray(values, np.float64))
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected numbers, got {type(values).__name__}") from None
    wrong = numbers[~(np.isfinite(numbers) & (numbers > 0))]
    if wrong.size:
        raise ValueError(f"{name}: expected positive finite numbers, got {wrong[0]:g}")
    if numbers.size < 2:
        raise ValueError(f"{name}: expected two different numbers at least, got {numbers.size}")
    return numbers


def other_sizes(sizes: Mapping[str, Any], *along: str) -> dict[str, Any]:
    """Return the sizes that stay as they are, those that are left to their default left out."""
    for name, value in sizes.items():
        if name in along:
            raise ValueError(f"{name}: given twice")
        if np.ndim(value):
            raise ValueError(f"{name}: expected one number, got {np.size(value)}")
    return {name: value for name, value in sizes.items() if value is not None}


def keep(ax: Axes, figures: Mapping[str, Any]) -> None:
    """Keep figures behind a picture: a column, or one value for all rows, by heading."""
    columns = [column.tolist() for column in np.broadcast_arrays(*map(np.atleast_1d, figures.values()))]
    _ROWS.setdefault(ax, []).extend(dict(zip(figures, row, strict=True)) for row in zip(*columns, strict=True))


def rows(ax: Axes) -> list[dict[str, Any]]:
    """Return the figures behind a picture, a row a mark, by heading.

    Args:
        ax: an axis that a function of `rlxjax.plot` drew on.

    Examples:
        >>> from matplotlib.figure import Figure
        >>> from rlxjax.calibration import prior_calibration
        >>> from rlxjax.plot import coefficients
        >>> first, *_ = rows(coefficients(prior_calibration("cpu"), ax=Figure().subplots()))
        >>> first["coefficient"], first["unit"]
        ('host_call_ns', 'ns')
    """
    return _ROWS.get(ax, [])
