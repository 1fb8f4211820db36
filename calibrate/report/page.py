"""A page as data: sections of sentences, pictures and tables, and the one template that shows them."""

import base64
import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib import pyplot, style
from matplotlib.axes import Axes

import rlxjax
from calibrate.terminal import ns, number, plain
from rlxjax import plot

#: Text is text, and not markup of its own. A picture is as wide as a phone, and black on white in any theme.
STYLE: dict[str, Any] = {
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "text.parse_math"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **{"grid.alpha": 0.3, "figure.figsize": (5.3, 3.7), "font.size": 11.0, "svg.fonttype": "none"},
}

#: Figures by heading; the unit of a number stands in brackets at the end of its heading.
Row = Mapping[str, Any]


class Picture(NamedTuple):
    """A picture: its heading, its SVG as an address that holds it, and the figures behind it."""

    title: str
    address: Markup
    rows: Sequence[Row]


class Table(NamedTuple):
    """Rows of figures by heading, the first entry of each names it; and what opens it: without a summary it is open."""

    caption: str
    rows: Sequence[Row]
    summary: str = "The same figures as a table"

    def headings(self) -> list[str]:
        """Return the headings of which any row has something."""
        return list(dict.fromkeys(name for row in self.rows for name, value in row.items() if value is not None))


class Verdict(NamedTuple):
    """A judgement: whether it is good news, None if it is neither; in a word; its reasons, and cautions."""

    is_good: bool | None
    word: str
    said: Sequence[str]
    cautions: Sequence[str] = ()


class Section(NamedTuple):
    """A section: its name in addresses, its heading, verdicts, sentences, pictures, their figures and others, code."""

    ident: str
    title: str
    said: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    verdicts: Sequence[Verdict] = ()
    code: str = ""


def page(title: str, subtitle: str, sections: Sequence[Section], command: str) -> str:
    """Return a whole HTML file of sections in their order, with the command that makes it at its foot."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("calibrate.report", "."),
        autoescape=True,
        finalize=_finalized,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"shown": shown, "verbatim": lambda text: Markup(escape(plain(text)))}
    about = {"title": title, "subtitle": subtitle, "command": command, "version": rlxjax.__version__}
    return environment.get_template("page.html.jinja").render(sections=sections, **about)


def rows_of(columns: Mapping[str, Any]) -> list[Row]:
    """Return rows of plain figures from columns of equal length by heading."""
    plain_columns = (np.asarray(column).tolist() for column in columns.values())
    return [dict(zip(columns, row, strict=True)) for row in zip(*plain_columns, strict=True)]


def shown(value: Any, heading: str) -> str:
    """Return a figure as it is read, by the unit in its heading; text as it is.

    Examples:
        >>> shown(1234.5, "time (ns)"), shown(0.0234, "error (%)"), shown(True, "timed"), shown(None, "noise (%)")
        ('1,234', '2.3', 'yes', '')
    """
    if isinstance(value, (bool, str)):
        return value if isinstance(value, str) else "yes" if value else "no"
    if value is None or math.isnan(value):
        return ""
    if heading.endswith("(%)"):
        return f"{100 * value:.1f}"
    text = ns(value) if heading.endswith("(ns)") else number(abs(value))
    return f"−{text.lstrip('-')}" if value < 0 else text


def drawn(**draws: Callable[[], Axes]) -> list[Picture]:
    """Return pictures by their headings, whose directions reach from and to the same values."""
    matplotlib.use("agg")
    # Names inside a picture are the same each time.
    with style.context(["default", STYLE, {"svg.hashsalt": "rlxjax"}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # the page has the reader's fonts
        axes = {title: draw() for title, draw in draws.items()}
        for along in "xy" if len(axes) > 1 else "":
            low, high = zip(*(getattr(ax, f"get_{along}lim")() for ax in axes.values()), strict=True)
            for ax in axes.values():
                ax.set(**{f"{along}lim": (min(low), max(high))})
        found = []
        for title, ax in axes.items():
            figure: Any = ax.figure
            figure.savefig(file := io.BytesIO(), format="svg", metadata={"Date": None})
            address = f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
            found.append(Picture(title, Markup(address), plot.rows(ax)))
            pyplot.close(figure)
    return found


def _finalized(value: Any) -> Any:
    """Return text without what would steer or turn it, in which no line ends between a number and its unit."""
    if isinstance(value, Markup):
        return value
    text = plain("" if value is None else value)
    for unit in ("%", "ns", "×"):
        text = text.replace(f" {unit}", f"\u00a0{unit}")
    return text
