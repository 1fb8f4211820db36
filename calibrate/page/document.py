"""The page around its sections: one file with its style and its script, which asks no network."""

from collections.abc import Sequence
from importlib import resources

import rlxjax

from .markup import Markup, element, joined, paragraphs
from .panels import Picture
from .words import unbroken

#: A browser that obeys it loads nothing that is not in the file.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
#: What a reader may do.
_HINT = "Point at a part of a picture, tap it, or reach it by Tab and the arrow keys: the page names its figures."


def page(title: str, subtitle: str, sections: Sequence[tuple[str, str, Markup]], command: str) -> str:
    """Return a whole HTML file.

    Args:
        title: heading of the page.
        subtitle: a line below it.
        sections: name on the page, heading and content of each, in order.
        command: that made the page.
    """
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content=f"rlxjax {rlxjax.__version__}"),
        element("link", rel="icon", href="data:,"),
        element("title", f"{title} · rlxjax"),
        element("style", _shipped("page.css")),
    )
    links = (element("li", element("a", heading, href=f"#{ident}")) for ident, heading, _ in sections)
    body = element(
        "body",
        element("a", "Skip to the verdict", href=f"#{sections[0][0]}", class_="skip"),
        element("header", element("h1", title), element("p", subtitle)),
        element("nav", element("ul", *links), aria_label="Sections"),
        element("p", _HINT, class_="hint"),
        element("main", *(_section(*section) for section in sections)),
        element("footer", *_footer(command)),
        element("div", role="status", id="tip"),
        element("script", _shipped("page.js")),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def picture_section(picture: Picture) -> tuple[str, str, Markup]:
    """Return a picture as a section: what it says, its signs, its panels, its figures."""
    panels = None
    if picture.panels:
        panels = element("div", *picture.panels, class_="panels")
    table = None if picture.table is None else picture.table.folded()
    said = joined((paragraphs(picture.said), picture.legend))
    # One panel alone stands beside its text where there is place.
    shown = element("div", element("div", said), panels, class_="beside") if len(picture.panels) == 1 else None
    return picture.ident, picture.title, joined((shown or joined((said, panels)), table, picture.extra))


def verdict(is_good: bool | None, word: str, said: Sequence[str], cautions: Sequence[str]) -> Markup:
    """Return a verdict: a word, what is to be said, and what to be careful of.

    Args:
        is_good: whether the word is good news; None where it is neither.
        word: or a few.
        said: sentences.
        cautions: sentences.
    """
    tone = {True: "good", False: "bad", None: "even"}[is_good]
    careful = [element("li", element("strong", "Caution: "), unbroken(text)) for text in cautions]
    listed = element("ul", *(element("li", unbroken(text)) for text in said), *careful) if said or careful else None
    return element("div", element("p", word, class_="word"), listed, class_=f"verdict {tone}")


def _section(ident: str, heading: str, content: Markup) -> Markup:
    title = element("h2", heading, id=f"{ident}-heading")
    return element("section", title, content, id=ident, aria_labelledby=f"{ident}-heading")


def _footer(command: str) -> list[Markup]:
    made = element("p", f"Made by rlxjax {rlxjax.__version__}: ", element("code", command))
    return [made, element("p", "This file is whole: it loads nothing and sends nothing.")]


def _shipped(name: str) -> Markup:
    """Return a file of this package as it is."""
    return Markup(resources.files(__name__.rpartition(".")[0]).joinpath(name).read_text(encoding="utf-8"))
