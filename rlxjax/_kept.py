"""A function whose answers are kept: the latest used, of no more memory in all than they may take."""

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any


class Kept:
    """A function that keeps answers of `most_bytes`, on any thread; the latest one stays whatever `bytes_of` says."""

    def __init__(self, function: Callable[..., Any], most_bytes: int, bytes_of: Callable[..., int]):
        functools.update_wrapper(self, function)
        self._function, self._most_bytes, self._bytes_of = function, most_bytes, bytes_of
        self._lock, self._turns = threading.Lock(), itertools.count()
        # By arguments: the answer, its bytes, and when it was last used.
        self._entries: dict[tuple[Any, ...], tuple[Any, int, list[int]]] = {}

    def __call__(self, *args: Any) -> Any:
        entry = self._entries.get(args)
        if entry is None:
            answer = self._function(*args)
            self._entries[args] = entry = answer, self._bytes_of(answer, *args), [next(self._turns)]
            self.keep(self._most_bytes)
        entry[2][0] = next(self._turns)
        return entry[0]

    def keep(self, most_bytes: int) -> None:
        """Keep answers of so many bytes from here on; those that were not used for longest go first."""
        with self._lock:
            self._most_bytes, excess = most_bytes, self.n_bytes - most_bytes
            own = self._entries.copy().items() if excess > 0 else ()
            for args, (_, n_bytes, _) in sorted(own, key=lambda item: item[1][2])[:-1]:
                if excess > 0:
                    del self._entries[args]
                    excess -= n_bytes

    @property
    def n_bytes(self) -> int:
        """The memory of all answers that are kept."""
        return sum(n_bytes for _, n_bytes, _ in self._entries.copy().values())
