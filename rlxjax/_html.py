"""What a notebook shows of an object: texts and tables, without colours of their own, so that any theme fits."""

import html
from collections.abc import Sequence
from itertools import islice

from ._values import short

#: Rows of a table that are shown; how many follow is said.
MOST_ROWS = 40
#: Entries of a cell that are shown; how many follow is said.
MOST_IN_A_CELL = 12

#: Of every cell: room beside it, and the colours of whatever is around it.
_STYLE = "padding:0 0.6em"

#: A table: its header, then its rows.
Table = Sequence[Sequence[object]]


def html_of(lead: Sequence[str], *tables: Table, remarks: Sequence[str] = ()) -> str:
    """Return lines of text, tables below them, and remarks, as HTML in which every text is escaped.

    Examples:
        >>> html_of(["a < b"], [("", "ns"), ("a", 1)])[:19]
        '<p>a &lt; b</p><tab'
    """
    return "".join([_paragraph(lead), *map(_table, tables), _paragraph(remarks)])


def _paragraph(lines: Sequence[str]) -> str:
    return f"<p>{'<br>'.join(map(html.escape, lines))}</p>" if lines else ""


def _table(rows: Table) -> str:
    shown = [*islice(rows, 1 + MOST_ROWS)]
    if left := len(rows) - len(shown):
        shown.append([f"and {left} more", *[""] * (len(rows[0]) - 1)])
    lines = [_row("td" if number else "th", row) for number, row in enumerate(shown)]
    return f"<table>{''.join(lines)}</table>"


def _row(tag: str, cells: Sequence[object]) -> str:
    first, *rest = (html.escape(_text(cell)) for cell in cells)
    others = "".join(f'<{tag} style="{_STYLE};text-align:right">{cell}</{tag}>' for cell in rest)
    return f'<tr><{tag} style="{_STYLE};text-align:left">{first}</{tag}>{others}</tr>'


def _text(cell: object) -> str:
    """Return a text as it is, whole numbers with separators, several entries one after the other."""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, (tuple, list)):
        more = len(cell) - MOST_IN_A_CELL
        return ", ".join(map(str, cell[:MOST_IN_A_CELL])) + (f" and {more:,} more" if more > 0 else "")
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else short(cell)
