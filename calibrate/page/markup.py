"""Markup from plain values: text is escaped, unless it is markup already."""

import html
from collections.abc import Iterable

from .words import unbroken

#: Elements that hold nothing and have no end.
_VOID = frozenset({"link", "meta"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def element(tag: str, *children: str | None, **attributes: str | float | bool | None) -> Markup:
    """Return an element of HTML or SVG.

    Args:
        tag: its name.
        *children: markup, or text, which is escaped; None is left out.
        **attributes: by name, `_` for `-` and one at the end dropped; None and False are left out. A float is a place
            in a picture and gets two decimals.

    Examples:
        >>> element("a", "R&D", element("b", "!"), class_="x", data_value=1.0, hidden=None)
        '<a class="x" data-value="1">R&amp;D<b>!</b></a>'
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    opened = f"<{tag}{given}>"
    return Markup(opened if tag in _VOID else f"{opened}{joined(children)}</{tag}>")


def joined(parts: Iterable[str | None]) -> Markup:
    """Return parts one after another; what is no markup is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else html.escape(part) for part in parts if part))


def paragraphs(sentences: Iterable[str]) -> Markup:
    """Return a paragraph for each text."""
    return joined(element("p", unbroken(sentence)) for sentence in sentences)


def _attribute(value: str | float | bool) -> str:
    if isinstance(value, bool):
        return ""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return html.escape(str(value))
