"""How the commands print: sentences and tables of 80 columns, and every time in ns, as JSON has it."""

import json
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

#: Columns of a sentence, and of a table where there is no terminal.
TEXT_WIDTH = 80
#: Spaces between the columns of a table.
GAP = 2
#: Times from here on have four digits and a power of ten.
LONG_NS = 1e12


def console() -> Console:
    """Return where tables are printed: as wide as the terminal, or 80 columns where there is none."""
    return Console(width=None if sys.stdout.isatty() else TEXT_WIDTH)


def say(text: str, *whole: str, indent: str = "", to: Console | None = None) -> None:
    """Print a text, see `filled`, on standard output unless another place is given."""
    lines = filled(text, *whole, indent=indent)
    if to is None:
        typer.echo(lines)
    else:
        to.print(lines, highlight=False, markup=False, soft_wrap=True)


def plain(text: object) -> str:
    """Return a text in which what would steer a terminal, or turn text round, is escaped: a file may hold it."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(text))


def filled(text: str, *whole: str, indent: str = "") -> str:
    """Return a text in lines of 80 columns.

    What is copied stays on one line, however long: what stands in backticks, and files or commands that are given.

    Args:
        text: of one paragraph.
        *whole: parts of it that stay on one line.
        indent: before each line.

    Examples:
        >>> print(filled("word " * 15 + "`rlxjax calibrate`"))
        word word word word word word word word word word word word word word word
        `rlxjax calibrate`
    """
    text = plain(text)
    for part in (*re.findall("`[^`]+`", text), *map(plain, filter(None, whole))):
        text = text.replace(part, part.replace(" ", "\0"))
    text = re.sub(r"(?<=\d) (?=(%|ns|s)(\W|$))", "\0", text)  # a number and its unit
    lines = textwrap.fill(
        text,
        TEXT_WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace("\0", " ")


def ns(time_ns: float) -> str:
    """Return a time in whole ns.

    Examples:
        >>> ns(1339811.7), ns(4.2e15)
        ('1,339,812', '4.200e+15')
    """
    return f"{time_ns:,.0f}" if abs(time_ns) < LONG_NS else f"{time_ns:.3e}"


def json_text(found: Any) -> str:
    """Return an answer as JSON, which has no word for a number that is not finite: null.

    Examples:
        >>> json_text({"a": [1.5, float("nan")]})
        '{"a": [1.5, null]}'
    """
    return json.dumps(json.loads(json.dumps(found), parse_constant=lambda _: None), allow_nan=False)


def finite_ns(time_ns: Any, what: str) -> float:
    """Return a time; one that is not finite is no answer, and refused."""
    if not math.isfinite(time_ns):
        raise ValueError(f"{what}: the calibration gives no finite time; measure it anew with `rlxjax calibrate`")
    return float(time_ns)


def number(value: float) -> str:
    """Return a number with three digits, or all of a larger one."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def counted(count: int, what: str) -> str:
    """Return how many there are of something.

    Examples:
        >>> counted(1, "round"), counted(1200, "round")
        ('1 round', '1,200 rounds')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def print_table(
    console: Console,
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    texts: int = 1,
    justify: Literal["left", "right"] = "right",
) -> None:
    """Print a table no wider than the console: headings break into lines, then columns go to a table below."""
    columns = [list(map(plain, column)) for column in zip(headings, *rows, strict=True)]
    if _width(columns) > console.width:
        for column in columns:
            column[0] = _stacked(column[0], _widest(column[1:]))
    for part in _parts(columns, texts, console.width):
        console.print(Text(plain(title), style="bold"))
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
        for place, (heading, *_) in enumerate(part):
            table.add_column(Text(heading), justify="left" if place < texts else justify)
        for row in zip(*(column[1:] for column in part), strict=True):
            table.add_row(*map(Text, row))
        console.print(table)
        console.print()


def _parts(columns: list[list[str]], texts: int, width: int) -> Iterator[list[list[str]]]:
    """Yield the columns in groups that fit, each with the columns of texts; one column of numbers at least."""
    part = columns[:texts]
    for column in columns[texts:]:
        if len(part) > texts and _width([*part, column]) > width:
            yield part
            part = columns[:texts]
        part = [*part, column]
    yield part


def _width(columns: Sequence[Sequence[str]]) -> int:
    return sum(map(_widest, columns)) + GAP * (len(columns) - 1)


def _widest(texts: Sequence[str]) -> int:
    return max((len(line) for text in texts for line in text.split("\n")), default=0)


def _stacked(heading: str, width: int) -> str:
    """Return a heading in lines as long as what stands below it, or as its longest word."""
    return textwrap.fill(heading, max(width, *map(len, heading.split()), 1), break_on_hyphens=False)
