"""Pictures as inline SVG: a panel of axes and marks, each of which says what it is."""

import dataclasses
from collections.abc import Iterable, Sequence

from .markup import Markup, element, joined
from .scales import Scale
from .tables import Table
from .words import unbroken

#: Width of a panel in its own units, in which text is as high as on a phone.
WIDTH = 380.0
#: The strategies in the order of their colours, with the shapes of their points.
SHAPES = {
    "fast": "circle",
    "fused": "square",
    "block": "diamond",
    "ultra": "up",
    "learned": "down",
}


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture, what it means in words, and its figures.

    Attributes:
        ident: of its section on the page.
        title: of the section.
        said: sentences: how to read it, and what it shows.
        legend: what its signs mean.
        panels: parts side by side, none where there is nothing to show.
        table: the same figures.
        extra: what comes after the table.
    """

    ident: str
    title: str
    said: Sequence[str]
    legend: Markup | None = None
    panels: Sequence[Markup] = ()
    table: Table | None = None
    extra: Markup | None = None


def panel(
    ident: str,
    title: str,
    description: str,
    height: float,
    *content: Markup | None,
    stride: int = 1,
    reach: float = 60.0,
) -> Markup:
    """Return a picture with a heading, which the keyboard reaches.

    Args:
        ident: unique on the page.
        title: heading.
        description: what a reader who does not see it is told.
        height: in units of a panel's width, `WIDTH`.
        *content: of the picture; of the marks in it, the nearest one to the pointer is named.
        stride: marks from one row to the next, for the keys up and down.
        reach: how far from a mark the pointer may be.
    """
    picture = element(
        "svg",
        element("title", title, id=f"{ident}-t"),
        element("desc", description, id=f"{ident}-d"),
        *content,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_labelledby=f"{ident}-t {ident}-d",
    )
    frame = element(
        "div",
        picture,
        class_="picture",
        tabindex="0",
        role="group",
        aria_label=f"{title}: arrow keys name what is shown",
        data_stride=str(stride),
        data_reach=f"{reach:g}",
    )
    return element("figure", element("figcaption", title), frame, id=ident)


def mark(said: str, x: float, y: float, *content: Markup | None, strategy: str = "", class_: str = "") -> Markup:
    """Return a part of a picture that says what it is, at the place by which the pointer finds it."""
    classes = " ".join(filter(None, ("m", strategy and style_of(strategy), class_)))
    return element("g", element("title", unbroken(said)), *content, class_=classes, data_x=float(x), data_y=float(y))


def axes(
    x: Scale,
    y: Scale,
    x_ticks: Iterable[tuple[float, str]],
    y_ticks: Iterable[tuple[float, str]],
    x_label: str,
    y_label: str,
) -> Markup:
    """Return the lines and labels of two axes; y begins at the bottom."""
    parts = []
    for value, label in x_ticks:
        at = x(value)
        parts += [line(at, y.start, at, y.end, "grid"), text(at, y.start + 15, label, "tick middle")]
    for value, label in y_ticks:
        at = y(value)
        parts += [line(x.start, at, x.end, at, "grid"), text(x.start - 5, at + 4, label, "tick end")]
    middle = (x.start + x.end) / 2
    parts.append(text(middle, y.start + 32, x_label, "label middle"))
    parts.append(text(2, y.end - 8, y_label, "label"))
    return element("g", *parts, class_="axes")


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """Return a straight line."""
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str) -> Markup:
    """Return a rectangle."""
    return element("rect", x=float(x), y=float(y), width=float(width), height=float(height), class_=class_)


def text(x: float, y: float, said: str, class_: str) -> Markup:
    """Return text whose base line begins at a place, or ends or is centred there by its class."""
    return element("text", said, x=float(x), y=float(y), class_=class_)


def path(points: Iterable[tuple[float, float]], class_: str, is_closed: bool = False) -> Markup:
    """Return a line through points, or the area within."""
    d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + ("Z" if is_closed else "")
    return element("path", d=d, class_=class_)


def point(strategy: str, x: float, y: float, radius: float = 3.2) -> Markup:
    """Return the sign of a strategy at a place."""
    shape, r = SHAPES.get(family_of(strategy), "circle"), radius
    if shape == "circle":
        return element("circle", cx=float(x), cy=float(y), r=float(r), class_="p")
    corners = {
        "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
        "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
        "up": ((0, -1.2), (1.2, 0.95), (-1.2, 0.95)),
        "down": ((0, 1.2), (1.2, -0.95), (-1.2, -0.95)),
    }[shape]
    return path([(x + r * dx, y + r * dy) for dx, dy in corners], "p", is_closed=True)


def legend(*entries: tuple[Markup, str]) -> Markup:
    """Return a line of signs and what they mean."""
    return element("ul", *(element("li", sign, said) for sign, said in entries), class_="legend")


def sign(*content: Markup, class_: str = "") -> Markup:
    """Return a small picture for a legend, 28 wide and 14 high."""
    return element("svg", *content, viewBox="0 0 28 14", aria_hidden="true", class_=f"sign {class_}".strip())


def strategy_signs(strategies: Iterable[str]) -> list[tuple[Markup, str]]:
    """Return what a legend says of strategies: a line with a point."""
    return [
        (sign(line(0, 7, 28, 7, "curve"), point(name, 14, 7, 4), class_=style_of(name)), name) for name in strategies
    ]


def family_of(strategy: str) -> str:
    """Return the strategy that a variant of it belongs to; the host's own name is that of two segments."""
    return {"host": "fast"}.get(name := strategy.partition("-")[0].partition("_")[0], name)


def style_of(strategy: str) -> str:
    """Return the class that gives a strategy its colour."""
    family = family_of(strategy)
    return f"s-{family}" if family in SHAPES else "s-other"


def group(content: Iterable[Markup], class_: str) -> Markup:
    """Return parts that belong together."""
    return element("g", joined(content), class_=class_)
