"""The data of a page (sections with sentences, pictures and tables), and the template that shows the data."""

import base64
import io
import re
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

#: The style of pictures: text without math markup, as wide as a phone, and black on white in every theme.
STYLE: dict[str, Any] = {
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "text.parse_math"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **{"grid.alpha": 0.3, "figure.figsize": (5.3, 3.7), "font.size": 11.0, "svg.fonttype": "none"},
}


class Table(NamedTuple):
    """A table: rows of values by heading. The first value names the row. A table without a summary is shown open."""

    caption: str
    rows: Sequence[Row]
    summary: str = "The same figures as a table"


class Verdict(NamedTuple):
    """A verdict in a word, with reasons and cautions. `is_good` is None if the news is neither good nor bad."""

    is_good: bool | None
    word: str
    said: Sequence[str]
    cautions: Sequence[str] = ()


class Section(NamedTuple):
    """A section of a page: its name in links, heading, sentences, pictures by heading, tables, verdicts and code."""

    ident: str
    title: str
    said: Sequence[str] = ()
    pictures: Mapping[str, Markup] = {}
    tables: Sequence[Table] = ()
    verdicts: Sequence[Verdict] = ()
    code: str = ""


def mark_of(kind: str) -> str:
    """Return the words in a page's head by which `rlxjax report` recognises its own pages of the given kind."""
    return f"rlxjax page of {kind}"


def page(title: str, subtitle: str, sections: Sequence[Section], command: str, kind: str = "calibration") -> str:
    """Return an HTML file that shows the sections in order. The footer shows the command that made the file."""
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
    about = {"title": title, "subtitle": subtitle, "command": command, "mark": mark_of(kind)}
    about |= {"version": rlxjax.__version__}
    return environment.get_template("page.html.jinja").render(sections=sections, **about)


def _finalized(value: Any) -> Any:
    """Return a text without control characters; no line can break between a number and its unit."""
    if isinstance(value, Markup):
        return value
    return re.sub(r"(?<=\d) (?=%|×|[mun]?s\b|[kMG]?B\b)", "\u00a0", plain("" if value is None else value))


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def rows_of(columns: Mapping[str, Any]) -> list[Row]:
    plain_columns = (np.asarray(column).tolist() for column in columns.values())
    return [dict(zip(columns, row, strict=True)) for row in zip(*plain_columns, strict=True)]


def drawn(draws: Mapping[str, Callable[[], Axes]]) -> tuple[dict[str, Markup], list[Row]]:
    """Return pictures by heading, and the numbers that the pictures show. All pictures have the same axis ranges."""
    matplotlib.use("agg")
    # The hash salt makes the names inside a picture the same each time.
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
