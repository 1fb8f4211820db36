"""Ctrl-C: one line and status 130, whenever it comes. Every command begins here, before JAX is imported.

No exception is raised for it: raised inside an import, or where compiled code calls Python, it would end the process
with a traceback or a crash, or get lost.
"""

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

TYPE_CHECKING = False  # that of `typing` takes as long to import as all else here
if TYPE_CHECKING:
    from .terminal import Deadline

INTERRUPTED_STATUS = 130
#: What is done when a command ends early, the last one first: each may return what the line says besides.
_last_acts: list[Callable[[], str | None]] = []


def main(command: str = "main") -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores it
        signal.signal(signal.SIGINT, _end)
    try:
        getattr(importlib.import_module(".cli", __package__), command)()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done, and said


@contextlib.contextmanager
def last_act(act: Callable[[], str | None]) -> Iterator[None]:
    """Do something should Ctrl-C end the command meanwhile."""
    _last_acts.append(act)
    try:
        yield
    finally:
        _last_acts.remove(act)


@contextlib.contextmanager
def heeded(deadline: "Deadline") -> Iterator[None]:
    """Let Ctrl-C interrupt a deadline, so that work stops by itself and keeps what it has; a second one ends all."""

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
    bar_gone = "\r\x1b[K\x1b[?25h" if sys.stderr.isatty() else ""  # the line of a progress bar, which hides the cursor
    with contextlib.suppress(OSError):
        os.write(2, f"{bar_gone}{'; '.join(said)}\n".encode(errors="replace"))
    os._exit(INTERRUPTED_STATUS)
