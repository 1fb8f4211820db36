"""Ctrl-C at any moment prints one line and gives exit status 130. Every command starts here, before JAX is imported.

The handler raises no exception. Inside an import, or while compiled code calls Python, an exception would cause a
traceback or a crash, or be lost.
"""

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

TYPE_CHECKING = False  # importing `typing` would double the import time
if TYPE_CHECKING:
    from .terminal import Deadline

INTERRUPTED_STATUS = 130
#: The functions that Ctrl-C calls, the newest first. Each function may return a text to add to the printed line.
_last_acts: list[Callable[[], str | None]] = []


def main(command: str = "main") -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell lets background jobs ignore Ctrl-C
        signal.signal(signal.SIGINT, _end)
    try:
        getattr(importlib.import_module(".cli", __package__), command)()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the output is complete


@contextlib.contextmanager
def last_act(act: Callable[[], str | None]) -> Iterator[None]:
    """Call a function if Ctrl-C ends the command inside the `with` block."""
    _last_acts.append(act)
    try:
        yield
    finally:
        _last_acts.remove(act)


@contextlib.contextmanager
def heeded(deadline: "Deadline") -> Iterator[None]:
    """Let Ctrl-C end the work that has a deadline, and keep the work's results. A second Ctrl-C ends the command."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        deadline.interrupted = True

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(*_: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    said = ["interrupted"]
    for act in reversed(_last_acts):
        with contextlib.suppress(Exception):
            said += [text for text in [act()] if text]
    bar_gone = "\r\x1b[K\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar hides the cursor
    with contextlib.suppress(OSError):
        os.write(2, f"{bar_gone}{'; '.join(said)}\n".encode(errors="replace"))
    os._exit(INTERRUPTED_STATUS)
