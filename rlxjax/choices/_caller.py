"""Calls of a user's programs, which may raise, exit, or never end."""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from rlxjax._chunks import with_callers_settings

R = TypeVar("R")


class FailedError(Exception):
    """A call gave no result; the text says why, and goes on from the name of what was called."""


class Caller:
    """Makes calls one after another on a thread of its own, under the caller's settings for JAX.

    There nothing is traced, and the process goes on where a call does not end: the thread is left to it.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], Any] | None] | None = None
        self._answers: queue.SimpleQueue[tuple[Any, str]] = queue.SimpleQueue()

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        if self._asked is not None:
            self._asked.put(None)
        self._asked = None

    def __call__(self, call: Callable[[], R], limit_s: float) -> R:
        """Return what a call gives; a call that raises, exits, or does not end in time is a `FailedError`."""
        if self._asked is None:
            self._asked, self._answers = queue.SimpleQueue(), queue.SimpleQueue()
            serve = with_callers_settings(_serve)
            threading.Thread(target=serve, args=(self._asked, self._answers), daemon=True).start()
        self._asked.put(call)
        try:
            result, failed = self._answers.get(timeout=limit_s)
        except queue.Empty:
            self.__exit__()
            raise FailedError(f"did not end within {limit_s:g} s") from None
        if failed:
            raise FailedError(failed)
        return result


def _serve(asked: "queue.SimpleQueue[Any]", answers: "queue.SimpleQueue[tuple[Any, str]]") -> None:
    while (call := asked.get()) is not None:
        try:
            answers.put((call(), ""))
        except BaseException as error:  # noqa: BLE001 - a user's program may raise anything, and may exit
            answers.put((None, raised(error)))
        del call


def raised(error: BaseException) -> str:
    """Return in a few words that a program raised an error."""
    reason = str(error).strip().partition("\n")[0]
    return f"raised {type(error).__name__}{f': {reason}' if reason else ''}"
