"""Ctrl-C: one line and status 130, whenever it comes. Every command begins here, before JAX is imported.

No exception is raised for it: raised inside an import, or where compiled code calls Python, it would end the process
with a traceback or a crash, or get lost.
"""

import sys

try:
    import contextlib
    import importlib
    import os
    import signal
    from collections.abc import Callable, Iterator
except KeyboardInterrupt:
    sys.stderr.write("interrupted\n")
    sys.exit(130)

INTERRUPTED_STATUS = 130
#: What is done when a command ends early, the last one first: each may return what the line says besides.
_last_acts: list[Callable[[], str | None]] = []


def main(command: str = "main") -> None:
    """Run a command line of `calibrate.cli`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores it
        signal.signal(signal.SIGINT, _end)
    getattr(importlib.import_module("calibrate.cli"), command)()


def ignore() -> None:
    """Ignore Ctrl-C from now on, as a command that has said its last line does, where it would end the command."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def last_act(act: Callable[[], str | None]) -> Iterator[None]:
    """Do something should Ctrl-C end the command meanwhile."""
    _last_acts.append(act)
    try:
        yield
    finally:
        _last_acts.remove(act)


@contextlib.contextmanager
def heeded(stop: Callable[[], None]) -> Iterator[None]:
    """Ask work to stop at Ctrl-C, and to keep what it has; a second one ends the command."""

    def ask(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, ask)
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
