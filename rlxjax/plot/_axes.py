"""What all pictures have in common: axes, colours, checks of arguments, and the numbers that a picture shows."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Float

from rlxjax.calibration import CalibratedModel, Calibration
from rlxjax.extras import require
from rlxjax.fit import LatencyModel, Timings, strategy_of, unit_of
from rlxjax.units import time_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
else:
    Axes = Any  # matplotlib is imported when a picture is drawn

#: The contrast of each colour with white and with black is at least 3. Readers who confuse red and green can tell the
#: colours apart. tests/test_plot.py checks both properties.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a3cff")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", (0, (6, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1)))
#: The colour of noise, of totals and of undecided cells; and the opacity of bands behind lines.
NEUTRAL, PALE = "#808080", 0.2
#: If an axis shows at most this number of input values, each value has a tick.
MOST_TICKS = 9
#: In a new figure: the height of a line of text in font sizes, and the height of all other parts together in inches.
LINE_HEIGHT, REST_IN = 1.45, 0.9
#: The numbers that each picture shows: for each mark, a dict from heading to number. A heading ends with the unit.
_ROWS: "WeakKeyDictionary[Axes, list[dict[str, Any]]]" = WeakKeyDictionary()


def axis_of(ax: Any, lines: float | None = None) -> Axes:
    """Return the given axis or, without one, the axis of a new figure that is high enough for the lines of text."""
    require("matplotlib", "plot")
    import matplotlib.axes

    if isinstance(ax, matplotlib.axes.Axes):
        return ax
    if ax is not None:
        raise ValueError(f"ax: expected a matplotlib axis, got {type(ax).__name__}")
    from matplotlib import pyplot

    width_in, height_in = matplotlib.rcParams["figure.figsize"]
    if lines is not None:
        height_in = REST_IN + lines * LINE_HEIGHT * matplotlib.rcParams["font.size"] / 72.0
    return pyplot.subplots(figsize=(width_in, height_in), layout="constrained")[1]


def ink_of(ax: Axes) -> Any:
    """Return the colour of the labels of an axis, because that colour is readable on the axis's background."""
    return ax.xaxis.label.get_color()


def show_legend(ax: Axes, above: Sequence[Any] = ()) -> None:
    """Show the legend inside the axis or, if handles are given, above it. More than three handles take two rows."""
    where: dict[str, Any] = {}
    if above:
        columns = len(above) if len(above) <= 3 else (len(above) + 1) // 2
        # A legend that ends at the right edge may extend over the labels on the left of a narrow axis.
        where = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
        where |= {"handles": above, "ncols": columns, "handlelength": 1.2}
    ax.legend(frameon=False, labelcolor=ink_of(ax), fontsize="small", **where)


def show(
    ax: Axes, along: Literal["x", "y"], label: str, said: Callable[[float], str], sizes: Mapping[str, Any] | None = None
) -> None:
    """Label the x or y axis. `said` returns the text of a tick. The fixed input sizes stand below the label."""
    from matplotlib.ticker import LogFormatter

    class LogTicks(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return said(x) if super().__call__(x, pos) else ""  # crowded ticks get no label

    axis = getattr(ax, f"{along}axis")
    if axis.get_scale() == "log":
        axis.set_major_formatter(LogTicks())
        axis.set_minor_formatter(LogTicks())
    else:
        axis.set_major_formatter(lambda value, _: said(value))
    axis.set_label_text(label + (f"\n{in_words(sizes)}" if sizes else ""))


def show_input(ax: Axes, along: Literal["x", "y"], label: str, values: np.ndarray, sizes: Any = None) -> None:
    """Label the x or y axis, made logarithmic, with the values of an input. If the values are few, each has a tick."""
    ax.set(**{f"{along}scale": "log"})
    show(ax, along, label, plain, sizes)
    if len(values) <= MOST_TICKS:
        axis = getattr(ax, f"{along}axis")
        axis.set_ticks(values, [plain(value) for value in values])
        axis.set_ticks([], minor=True)


def duration(time_ns: float) -> str:
    """Return the text of a tick for a time, without trailing zeros: for example `1.5 ms`."""
    return re.sub(r"(\.\d+?)0+ ", r"\1 ", time_text(time_ns))


def plain(value: float) -> str:
    """Return a number as people write it: for example `8,192` or `0.5`."""
    return f"{value:,.0f}" if abs(value) >= 1000.0 else f"{value:g}"


def in_words(sizes: Mapping[str, Any]) -> str:
    """Return a text with the name and value of each size: for example `n_fft 256, k 16`."""
    return ", ".join(f"{name} {plain(float(value))}" for name, value in sizes.items())


def words_of(name: str) -> str:
    """Return the name of a coefficient, or of a part of a time, in words: `host call` for `host_call_ns`."""
    return name.removesuffix("_" + unit_of(name).lower().replace("/", "_per_")).replace("_", " ")


class Hue(NamedTuple):
    """The colour, marker and line style of a strategy or variant."""

    colour: str
    marker: str
    line: Any


def hues(model: LatencyModel, names: Sequence[str]) -> dict[str, Hue]:
    """Return the look of each strategy or variant: that of its first variant, or a free look if that look is taken."""
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
    """Return the calibration's model that was fitted to the timings, or its first model if no timings are given."""
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
            raise ValueError(f"timings: expected timings of {expected}, got timings of {got}")
        if np.ndim(timings.time_ns) != 1 or np.size(timings.time_ns) == 0:
            raise ValueError(f"timings: expected times of one machine, `[n]`, got shape {np.shape(timings.time_ns)}")
    return calibrated


def values_along(name: str, values: Any) -> Float[np.ndarray, "n"]:
    """Return the distinct values of an input in ascending order."""
    try:
        numbers = np.unique(np.asarray(values, np.float64))
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected numbers, got {type(values).__name__}") from None
    wrong = numbers[~(np.isfinite(numbers) & (numbers > 0))]
    if wrong.size:
        raise ValueError(f"{name}: expected positive finite numbers, got {wrong[0]:g}")
    if numbers.size < 2:
        raise ValueError(f"{name}: expected at least two different numbers, got {numbers.size}")
    return numbers


def other_sizes(sizes: Mapping[str, Any], *along: str) -> dict[str, Any]:
    """Return the input sizes that stay fixed in a picture. Sizes that are None are left out."""
    for name, value in sizes.items():
        if name in along:
            raise ValueError(f"{name}: this input was given twice")
        if np.ndim(value):
            raise ValueError(f"{name}: expected a single number, got {np.size(value)} numbers")
    return {name: value for name, value in sizes.items() if value is not None}


def keep(ax: Axes, figures: Mapping[str, Any]) -> None:
    """Store the numbers that a picture shows. For each heading: a column, or the same value for all rows."""
    columns = [column.tolist() for column in np.broadcast_arrays(*map(np.atleast_1d, figures.values()))]
    _ROWS.setdefault(ax, []).extend(dict(zip(figures, row, strict=True)) for row in zip(*columns, strict=True))


def rows(ax: Axes) -> list[dict[str, Any]]:
    """Return the numbers that a picture shows: for each mark, a dict from heading to number or text.

    Args:
        ax: the axis that a function of `rlxjax.plot` returned.

    Examples:
        >>> from matplotlib.figure import Figure
        >>> from rlxjax.calibration import prior_calibration
        >>> from rlxjax.plot import coefficients
        >>> first, *_ = rows(coefficients(prior_calibration("cpu"), ax=Figure().subplots()))
        >>> first["coefficient"], first["unit"]
        ('host_call_ns', 'ns')
    """
    return _ROWS.get(ax, [])
