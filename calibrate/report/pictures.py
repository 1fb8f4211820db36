"""Pictures of rlxjax.plot as SVG inside a page, of which each mark says what it stands for."""

import copy
import io
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib import pyplot, style
from matplotlib.axes import Axes

from rlxjax.plot import marks

from .page import Picture, tip

#: A colour that nothing else has: in the page it is that of the text around the picture, in light and dark.
INK = "#0a0b0c"
#: Text is text, and not markup of its own. A picture is as wide as a phone.
STYLE: dict[str, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "text.parse_math"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **{"grid.color": INK, "grid.alpha": 0.12, "figure.figsize": (5.3, 3.7), "font.size": 11.0, "svg.fonttype": "none"},
}


def drawn(ident: str, **draws: Callable[[], Axes]) -> list[Picture]:
    """Return pictures whose directions reach from and to the same values."""
    matplotlib.use("agg")
    with style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # the page has the reader's fonts
        axes = {title: draw() for title, draw in draws.items()}
        figures: list[Any] = [ax.figure for ax in axes.values()]
        for along in "xy" if len(axes) > 1 else "":
            low, high = zip(*(getattr(ax, f"get_{along}lim")() for ax in axes.values()), strict=True)
            for ax in axes.values():
                ax.set(**{f"{along}lim": (min(low), max(high))})
        found = []
        for place, (title, ax) in enumerate(axes.items()):
            found.append(_picture(f"{ident}-{place}", title, ax, figures[place]))
            pyplot.close(figures[place])
    return found


def _picture(ident: str, title: str, ax: Axes, figure: Any) -> Picture:
    """Return an axis' figure as SVG for HTML, with a title in each of its marks."""
    file = io.StringIO()
    for artist in ax.get_children():
        artist.set_rasterized(False)
    with matplotlib.rc_context({"svg.hashsalt": ident}):  # names that are unique on the page, and the same each time
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    root = ElementTree.fromstring(file.getvalue())
    for part in root.iter():
        part.tag = part.tag.rpartition("}")[2]
        part.attrib = {name.rpartition("}")[2]: value for name, value in part.attrib.items()}
    definitions = list(root.iter("defs"))
    definitions[0].clear()  # a style for the whole page
    defined = {part for one in definitions for part in one.iter()}
    groups = {part.attrib.pop("id"): part for part in root.iter() if "id" in part.attrib and part not in defined}
    of_artists = marks(ax)
    for gid, rows in of_artists.items():
        shapes = [part for part in groups[gid].iter() if part.tag in ("path", "use") and part not in defined]
        for shape, row in zip(shapes, rows, strict=True):
            inner = copy.copy(shape)
            shape.clear()
            shape.tag, shape.attrib = "g", {"class": "m"}
            ElementTree.SubElement(shape, "title").text = tip(row)
            shape.append(inner)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": title}
    svg = Markup(ElementTree.tostring(root, "unicode").replace(INK, "currentColor"))
    return Picture(ident, title, svg, [row for rows in of_artists.values() for row in rows])
