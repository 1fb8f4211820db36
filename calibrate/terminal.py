"""The output of the commands: sentences, tables and JSON, and the progress on standard error."""

import contextlib
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import typer
from rich import box
from rich import progress as rich_progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlxjax.units import bytes_text, time_text

#: The width of the output, in columns, if there is no terminal.
WIDE = 1000
#: A row of a table: its values by heading. A heading ends with the unit of its numbers, in brackets.
Row = dict[str, Any]
#: For each unit, a function that prints a number with its unit. The heading then leaves out the unit.
_TEXTS: dict[str, Callable[[float], str]] = {" (ns)": time_text, " (bytes)": bytes_text}


def console() -> Console:
    """Return a console for tables. It is as wide as the terminal; without a terminal, as wide as each table."""
    return Console(width=None if sys.stdout.isatty() else WIDE)


def say(text: object, to: Console | None = None) -> None:
    """Print a text on standard output or on a console. No line breaks are added, so names in the text can be copied."""
    if to is None:
        typer.echo(plain(text))
    else:
        to.print(plain(text), highlight=False, markup=False, soft_wrap=True)


def plain(text: object) -> str:
    """Return a text with its control characters escaped, because characters in a file could control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(text))


def json_text(found: Any) -> str:
    """Return an answer as JSON; a number that is not finite becomes null.

    Examples:
        >>> json_text({"a": [1.5, float("nan")]})
        '{"a": [1.5, null]}'
    """
    return json.dumps(json.loads(json.dumps(found), parse_constant=lambda _: None), allow_nan=False)


def finite_ns(time_ns: Any, what: str) -> float:
    """Return a time as a float, and refuse a time that is not finite."""
    if not math.isfinite(time_ns):
        raise ValueError(f"{what}: the calibration gives no finite time; measure again with `rlxjax calibrate`")
    return float(time_ns)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def counted(count: int, what: str) -> str:
    """Return a number with its noun, such as `1,200 rounds`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def shown(value: Any, heading: str) -> str:
    """Return the text of a cell in a table. The unit in the heading determines how a number is printed.

    Examples:
        >>> shown(1234.5, "time (ns)"), shown(0.0234, "error (%)"), shown(True, "timed"), shown(None, "noise (%)")
        ('1.23 us', '2.3', 'yes', '')
    """
    if isinstance(value, (bool, str)):
        return value if isinstance(value, str) else "yes" if value else "no"
    if value is None or math.isnan(value):
        return ""
    if heading.endswith("(%)"):
        return f"{100 * value:.1f}"
    text_of = next((text for unit, text in _TEXTS.items() if heading.endswith(unit)), number)
    return f"-{text_of(-value)}" if value < 0 else text_of(value)


def heading_text(heading: str) -> str:
    """Return a heading. Its unit is removed if the cells print the unit."""
    return next((heading.removesuffix(unit) for unit in _TEXTS if heading.endswith(unit)), heading)


def headings_of(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name, value in row.items() if value not in (None, "")))


def print_rows(console: Console, title: str, rows: Sequence[Row]) -> None:
    headings = headings_of(rows)
    cells = [[shown(row.get(name), name) for name in headings] for row in rows]
    print_table(console, title, [*map(heading_text, headings)], cells)


def print_table(
    console: Console, title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1
) -> None:
    """Print a table. The first `texts` columns, and columns without a heading, are left-aligned. No cell is cut."""
    console.print(Text(plain(title), style="bold"))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for place, heading in enumerate(headings):
        is_text = place < texts or not heading
        table.add_column(Text(plain(heading)), justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    console.print(table)
    console.print()


class Deadline:
    """The time at which a phase must end, and whether the user interrupted the phase."""

    def __init__(self, at_s: float):
        self.at_s = at_s
        self.interrupted = False

    def left_s(self) -> float:
        return 0.0 if self.interrupted else self.at_s - time.perf_counter()


class Progress:
    """Shows the phase of a command, its progress and the remaining time, on standard error."""

    def __init__(self, console: Console | None = None, *, ends_s: float | None = None, is_quiet: bool = False):
        self._console = console or Console(stderr=True)
        self._ends_s, self._is_quiet = ends_s, is_quiet  # the planned end of the command in `time.perf_counter()`

    @contextlib.contextmanager
    def waiting(self, name: str, total: float | None = None) -> Iterator[Callable[..., None]]:
        """On a terminal, show a progress bar while the block runs. Yield the function that updates the bar."""
        if self._is_quiet or not self._console.is_terminal:
            yield lambda **_: None
            return
        columns = (
            rich_progress.TextColumn("{task.description:16}"),
            rich_progress.BarColumn(bar_width=24),
            rich_progress.TextColumn("{task.fields[steps]}"),
            rich_progress.TimeElapsedColumn(),
            _TimeLeft(self._ends_s),
        )
        with rich_progress.Progress(*columns, console=self._console, transient=True) as bar:
            yield functools.partial(bar.update, bar.add_task(name, total=total, steps=""))

    @contextlib.contextmanager
    def phase(
        self, name: str, deadline: Deadline | None = None, total: int | None = None, what: str = "round"
    ) -> Iterator[Callable[[], None]]:
        """Show a phase. Yield a function to call after each step; `what` names a step. With a deadline, show time."""
        begun_s, steps = time.perf_counter(), 0
        span_s = None if deadline is None else max(deadline.left_s(), 0.1)

        def advance() -> None:
            nonlocal steps
            steps += 1
            done = steps if span_s is None else time.perf_counter() - begun_s
            update(completed=done, steps=f"{steps}/{total}" if total else counted(steps, what))

        with self.waiting(name, total if span_s is None else span_s) as update:
            yield advance
        if not self._is_quiet:
            self._console.print(f"{name}: {time.perf_counter() - begun_s:.1f} s", highlight=False)


class _TimeLeft(rich_progress.ProgressColumn):
    """Seconds until the planned end of the command, or until the end of the phase if no such end is planned."""

    def __init__(self, ends_s: float | None):
        super().__init__()
        self._ends_s = ends_s

    def render(self, task: rich_progress.Task) -> Text:
        left_s = task.time_remaining if self._ends_s is None else self._ends_s - time.perf_counter()
        return Text("" if left_s is None else f"{left_s:.0f} s left" if left_s > 0.5 else "overdue")
