"""Progress on standard error: what a command is doing, how far it is, and how long it still takes."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich import progress as rich_progress
from rich.console import Console
from rich.text import Text

from .printing import counted


class Deadline:
    """A point in time that a phase has to end by, and whether the user asked to stop."""

    def __init__(self, at_s: float):
        self.at_s = at_s
        self.interrupted = False

    def left_s(self) -> float:
        """Seconds until the deadline; 0 once the user has asked to stop."""
        return 0.0 if self.interrupted else self.at_s - time.perf_counter()


class Progress:
    """Shows on standard error which phase a command is in, how far it is, and how long the command still takes.

    A terminal shows it while it lasts. A line says how long each phase took.

    Args:
        console: another place than standard error.
        ends_s: `time.perf_counter()` when the command ends, as far as that is known.
        is_quiet: show nothing.
    """

    def __init__(self, console: Console | None = None, *, ends_s: float | None = None, is_quiet: bool = False):
        self._console = console or Console(stderr=True)
        self._ends_s, self._is_quiet = ends_s, is_quiet

    @contextlib.contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Show what is waited for, on a terminal; nothing stays of it."""
        with self._shown(name, None, None):
            yield

    @contextlib.contextmanager
    def phase(
        self, name: str, deadline: Deadline | None = None, total: int | None = None
    ) -> Iterator[Callable[[], None]]:
        """Show a phase; yield what to call at each step. With a deadline, the bar shows time."""
        begun_s = time.perf_counter()
        with self._shown(name, deadline, total) as advance:
            yield advance
        if not self._is_quiet:
            self._console.print(f"{name}: {time.perf_counter() - begun_s:.1f} s", highlight=False)

    @contextlib.contextmanager
    def counting(self, name: str, what: str) -> Iterator[Callable[[int, int], None]]:
        """Show how many of something are done, and how fast; yield what to call with those done and those there are."""
        if self._is_quiet or not self._console.is_terminal:
            yield lambda done, total: None
            return
        columns = (
            rich_progress.TextColumn("{task.description:16}"),
            rich_progress.BarColumn(bar_width=24),
            rich_progress.TextColumn("{task.fields[steps]}"),
            _TimeLeft(None),
        )
        begun: tuple[float, int] | None = None
        with rich_progress.Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(name, total=None, steps="")

            def advance(done: int, total: int) -> None:
                nonlocal begun
                begun = begun or (time.perf_counter(), done)  # what an earlier run did has no speed
                rate = (done - begun[1]) / max(time.perf_counter() - begun[0], 1e-3)
                steps = f"{done:,} of {counted(total, what)}, {rate:,.0f} a second"
                bar.update(task, completed=done, total=total, steps=steps)

            yield advance

    @contextlib.contextmanager
    def _shown(self, name: str, deadline: Deadline | None, total: int | None) -> Iterator[Callable[[], None]]:
        if self._is_quiet or not self._console.is_terminal:
            yield lambda: None
            return
        begun_s, steps = time.perf_counter(), 0
        columns = (
            rich_progress.TextColumn("{task.description:16}"),
            rich_progress.BarColumn(bar_width=24),
            rich_progress.TextColumn("{task.fields[steps]}"),
            rich_progress.TimeElapsedColumn(),
            _TimeLeft(self._ends_s),
        )
        span_s = None if deadline is None else max(deadline.left_s(), 0.1)
        with rich_progress.Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(name, total=total if span_s is None else span_s, steps="")

            def advance() -> None:
                nonlocal steps
                steps += 1
                done = steps if span_s is None else time.perf_counter() - begun_s
                bar.update(task, completed=done, steps=f"{steps}/{total}" if total else counted(steps, "round"))

            yield advance


class _TimeLeft(rich_progress.ProgressColumn):
    """Seconds until the command ends, or until the phase does where that alone can be told."""

    def __init__(self, ends_s: float | None):
        super().__init__()
        self._ends_s = ends_s

    def render(self, task: rich_progress.Task) -> Text:
        left_s = task.time_remaining if self._ends_s is None else self._ends_s - time.perf_counter()
        return Text("" if left_s is None else f"{max(left_s, 0.0):.0f} s left")
