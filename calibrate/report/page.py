"""A page as data: sections of sentences, pictures and tables, and the one template that shows them."""

import base64
import io
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
from rlxjax import plot

from ..terminal import Row, heading_text, headings_of, plain, shown

#: Text is text, and not markup of its own. A picture is as wide as a phone, and black on white in any theme.
STYLE: dict[str, Any] = {
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "text.parse_math"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **{"grid.alpha": 0.3, "figure.figsize": (5.3, 3.7), "font.size": 11.0, "svg.fonttype": "none"},
}


class Table(NamedTuple):
    """Rows of figures by heading, the first entry of each names it; and what opens it: without a summary it is open."""

    caption: str
    rows: Sequence[Row]
    summary: str = "The same figures as a table"


class Verdict(NamedTuple):
    """A judgement: whether it is good news, None if it is neither; in a word; its reasons, and cautions."""

    is_good: bool | None
    word: str
    said: Sequence[str]
    cautions: Sequence[str] = ()


class Section(NamedTuple):
    """A section: its name in addresses, its heading, sentences, pictures by heading, tables, verdicts, code."""

    ident: str
    title: str
    said: Sequence[str] = ()
    pictures: Mapping[str, Markup] = {}
    tables: Sequence[Table] = ()
    verdicts: Sequence[Verdict] = ()
    code: str = ""


def page(title: str, subtitle: str, sections: Sequence[Section], command: str) -> str:
    """Return a whole HTML file of sections in their order, with the command that makes it at its foot."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__ or "", "."),
        autoescape=True,
        finalize=_finalized,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"shown": shown, "headings": headings_of, "heading": heading_text}
    environment.filters |= {"verbatim": lambda text: Markup(escape(plain(text)))}
    about = {"title": title, "subtitle": subtitle, "command": command, "version": rlxjax.__version__}
    return environment.get_template("page.html.jinja").render(sections=sections, **about)


def _finalized(value: Any) -> Any:
    """Return text without what would steer or turn it, in which no line ends between a number and its unit."""
    if isinstance(value, Markup):
        return value
    text = plain("" if value is None else value)
    for unit in ("%", "ns", "×"):
        text = text.replace(f" {unit}", f"\u00a0{unit}")
    return text


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def rows_of(columns: Mapping[str, Any]) -> list[Row]:
    plain_columns = (np.asarray(column).tolist() for column in columns.values())
    return [dict(zip(columns, row, strict=True)) for row in zip(*plain_columns, strict=True)]


def drawn(draws: Mapping[str, Callable[[], Axes]]) -> tuple[dict[str, Markup], list[Row]]:
    """Return pictures by their headings, with axes from and to the same values, and the figures behind them."""
    matplotlib.use("agg")
    # Names inside a picture are the same each time.
    with style.context(["default", STYLE, {"svg.hashsalt": "rlxjax"}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # the page has the reader's fonts
        axes = {title: draw() for title, draw in draws.items()}
        for along in "xy" if len(axes) > 1 else "":
            low, high = zip(*(getattr(ax, f"get_{along}lim")() for ax in axes.values()), strict=True)
            for ax in axes.values():
                ax.set(**{f"{along}lim": (min(low), max(high))})
        pictures, rows = {}, []
        for title, ax in axes.items():
            figure: Any = ax.figure
            figure.savefig(file := io.BytesIO(), format="svg", metadata={"Date": None})
            pictures[title] = Markup(f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}")
            rows += plot.rows(ax)
            pyplot.close(figure)
    return pictures, rows
