"""Tables: rows of figures with a caption, and behind a picture the same figures as it shows."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from .markup import Markup, element, joined

#: A table of more rows is left out of print.
LONG_ROWS = 40


class Figure(NamedTuple):
    """A number in a table.

    Attributes:
        text: as it is read.
        value: with all its digits, in the file's unit.
    """

    text: str
    value: float


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; the first entry of each row names it.

    Attributes:
        caption: what it shows.
        headings: of the columns, with units.
        rows: text or figures, an entry for each heading.
    """

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str | Figure]]

    def markup(self) -> Markup:
        """Return it as HTML, in a frame that scrolls by itself where it is too wide."""
        is_number = [
            bool(self.rows) and all(isinstance(row[place], Figure) or row[place] == "" for row in self.rows)
            for place in range(len(self.headings))
        ]
        head = joined(
            element("th", heading, scope="col", class_="n" if right else None)
            for heading, right in zip(self.headings, is_number, strict=True)
        )
        body = joined(element("tr", _entry("th", row[0], scope="row"), *map(_data, row[1:])) for row in self.rows)
        table = element(
            "table",
            element("caption", self.caption),
            element("thead", element("tr", head)),
            element("tbody", body),
        )
        return element("div", table, class_="scroll", tabindex="0", role="region", aria_label=self.caption)

    def folded(self, summary: str = "The same figures as a table") -> Markup:
        """Return it behind a line that opens it."""
        rows = f"{summary} ({len(self.rows)} rows)"
        long = "long" if len(self.rows) > LONG_ROWS else None
        return element("details", element("summary", rows), self.markup(), class_=long)


def facts(pairs: Sequence[tuple[str, str]]) -> Markup:
    """Return names and what they are, where there is something."""
    return element("dl", *(element("div", element("dt", name), element("dd", said)) for name, said in pairs if said))


def _data(entry: str | Figure) -> Markup:
    return _entry("td", entry)


def _entry(tag: str, entry: str | Figure, **attributes: str) -> Markup:
    if isinstance(entry, Figure):
        return element(tag, entry.text, class_="n", data_value=repr(float(entry.value)), **attributes)
    return element(tag, entry, **attributes)
