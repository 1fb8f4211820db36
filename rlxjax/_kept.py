"""A cache of a function's results. Above a limit in bytes, it drops the least recently used results."""

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any


class Kept:
    """A function whose results are cached, at most `most_bytes` in total; the most recent result always stays."""

    def __init__(self, function: Callable[..., Any], most_bytes: int, bytes_of: Callable[..., int]):
        functools.update_wrapper(self, function)
        self._function, self._most_bytes, self._bytes_of = function, most_bytes, bytes_of
        self._lock, self._uses = threading.Lock(), itertools.count()
        # For each tuple of arguments: the result, the bytes of the result, and the number of the last use.
        self._entries: dict[tuple[Any, ...], tuple[Any, int, list[int]]] = {}

    def __call__(self, *args: Any) -> Any:
        entry = self._entries.get(args)
        if entry is None:
            result = self._function(*args)
            self._entries[args] = entry = result, self._bytes_of(result, *args), [next(self._uses)]
            self.keep(self._most_bytes)
        entry[2][0] = next(self._uses)
        return entry[0]

    def keep(self, most_bytes: int) -> None:
        """Set the limit to `most_bytes`. Drop the least recently used results until the other results fit."""
        with self._lock:
            self._most_bytes, excess = most_bytes, self.n_bytes - most_bytes
            own = self._entries.copy().items() if excess > 0 else ()
            for args, (_, n_bytes, _) in sorted(own, key=lambda item: item[1][2])[:-1]:
                if excess > 0:
                    del self._entries[args]
                    excess -= n_bytes

    @property
    def n_bytes(self) -> int:
        """The memory of all cached results, in bytes."""
        return sum(n_bytes for _, n_bytes, _ in self._entries.copy().values())
