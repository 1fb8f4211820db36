"""Measured choices as files that processes share, and the lock that keeps two of them from timing at once.

A choice is one JSON file, named by its key. A pin is a file beside it. Files are written whole: readers need no lock.
"""

import atexit
import contextlib
import dataclasses
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as FilePath

from pydantic import ValidationError

from rlxjax._files import (
    HeldError,
    first_refusal,
    home_folder,
    local_time,
    locked,
    read_file,
    read_json,
    write_text_file,
)

from ._way import Choice, choice_of_json

#: The version of a choice's file, and the suffixes of the files of a choice and of its pin.
SCHEMA_VERSION, CHOICE, PIN = 1, ".json", ".pin"
#: The name of the lock file, and the seconds after which a lock is old if its holder cannot be asked.
TIMING_LOCK, OLD_S = ".rlxjax.timing.lock", 600.0
#: Seconds to wait for another thread or process that is timing: before a warning, and after the warning.
SILENT_S, WARNED_S = 10.0, 50.0
#: Files and folders that this process has warned about; holders of the lock that it no longer waits for.
_WARNED_OF: set[FilePath] = set()
_GIVEN_UP: set[str] = set()
#: A function from the seconds to wait to a context manager that holds a lock, or raises `HeldError`.
_Lock = Callable[[float], contextlib.AbstractContextManager[None]]
#: Choices that could not be written.
_UNWRITTEN: dict[FilePath, Choice] = {}


class Memory:
    """A folder of measured choices, which several processes may use at once.

    The file `KEY.json` holds a choice. The file `KEY.pin` holds the name or the content of its pinned alternative. If
    a file is damaged, `look_up` and `all` warn once and leave the choice out. If the folder cannot be written, `keep`
    warns once; the choice stays in this process, and is written when the process ends if the folder is writable then.

    Args:
        path: path of the folder; the default is `choices` in the folder `RLXJAX_HOME`, or else in the user's data
            folder. Reading creates no folder.

    Examples:
        >>> import tempfile
        >>> memory = Memory(tempfile.mkdtemp())
        >>> memory.look_up("a4f0") is None, memory.all()
        (True, [])
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._given = None if path is None else FilePath(path)

    @property
    def path(self) -> FilePath:
        """The path of the folder. The folder need not exist."""
        return self._given or home_folder("data") / "choices"

    def look_up(self, key: str) -> Choice | None:
        """Return the choice that is remembered under a key, or None if there is none."""
        path = FilePath(key)
        try:
            path = self._file(key)
            if path not in _UNWRITTEN and not os.path.lexists(path):
                return None
            return self._pinned(_UNWRITTEN.get(path) or self._read(key))
        except ValueError as reason:
            _warn(path, f"{reason}; the choice is made again")
            return None

    def read(self, key: str) -> Choice:
        """Return the choice in the file of a key.

        Raises:
            ValueError: there is no such file, or it holds no measured choice of this key.
        """
        return self._pinned(self._read(key))

    def all(self, kind: str | None = None) -> list[Choice]:
        """Return the remembered choices, the newest first: all of them, or only those of this `kind`."""
        found = [one for key in self._keys() if (one := self.look_up(key)) is not None]
        found = [one for one in found if kind in (None, one.kind)]
        return sorted(found, key=lambda one: one.created, reverse=True)

    def keep(self, choice: Choice) -> None:
        """Remember a choice. It replaces an earlier choice with the same key; a pin on that key stays."""
        name = choice.without_pin or choice.name
        measured = dataclasses.replace(choice, name=name, by="measured", without_pin=None)
        folder = FilePath()
        try:
            folder = self.path
            _UNWRITTEN[self._file(choice.key)] = measured
            _write(self._file(choice.key))
        except (ValueError, OSError) as reason:
            mend = "free some space there, or set RLXJAX_HOME to a folder that can be written"
            _warn(folder, f"{reason}; choices are remembered in this process only; {mend}")

    @contextlib.contextmanager
    def timing(self) -> Iterator[bool]:
        """Wait for other threads and processes that time programs, at most 60 s each; yield whether this one is alone.

        If the folder cannot be written, other processes cannot be seen.
        """
        with contextlib.ExitStack() as held:
            yield _is_taken(held, _only_thread) and _is_taken(
                held, lambda wait_s: locked(self.path / TIMING_LOCK, TIMING_LOCK, wait_s, OLD_S)
            )

    def key_of(self, start: str) -> str:
        """Return the full key that begins with the characters `start`.

        Raises:
            ValueError: no key or several keys begin with these characters.
        """
        keys = [key for key in self._keys() if key.startswith(start)]
        if start and len(keys) == 1:
            return keys[0]
        found = "several keys begin" if len(keys) > 1 else "no key begins"
        raise ValueError(f"{found} with {start[:80]!r}; `rlxjax decisions list` shows all keys")

    def pin(self, key: str, name: str | None) -> None:
        """Pin an alternative by name, so that it runs even if another alternative is faster. None removes the pin.

        Raises:
            ValueError: the key is unknown, or `name` is not the name of an alternative that runs.
            OSError: the folder cannot be written.
        """
        if key not in self._keys():
            mend = "`rlxjax decisions list` shows all keys"
            raise ValueError(f"{key[:80]!r} is an unknown key; {mend}")
        if name is None:
            self._file(key, PIN).unlink(missing_ok=True)
            return
        named = {own.name: own for own in self._read(key).alternatives}
        if name not in named:
            raise ValueError(f"expected one of {', '.join(named)}, got {name!r}")
        if reason := named[name].failed:
            raise ValueError(f"{name} could not run here ({reason}); pin another alternative")
        write_text_file(f"{named[name].content}\n", self._file(key, PIN))

    def forget(self, keys: Sequence[str] | None) -> int:
        """Delete the choices with these keys and their pins, or all choices if `keys` is None; return their number.

        Raises:
            OSError: the folder cannot be written.
        """
        count = 0
        for key in {*self._keys(), *self._keys(PIN)} if keys is None else keys:
            _UNWRITTEN.pop(self._file(key), None)
            count += os.path.lexists(self._file(key))
            for suffix in (CHOICE, PIN):
                self._file(key, suffix).unlink(missing_ok=True)
        return count

    def _file(self, key: str, suffix: str = CHOICE) -> FilePath:
        return self.path / f"{key}{suffix}"

    def _keys(self, suffix: str = CHOICE) -> list[str]:
        try:
            names = os.listdir(self.path)
        except OSError:
            return []
        return sorted(name.removesuffix(suffix) for name in names if name.endswith(suffix))

    def _read(self, key: str) -> Choice:
        path = self._file(key)
        mend = f"remove it with `rlxjax decisions forget {ascii(key[:8])[1:-1]}`"
        content = read_json(path, SCHEMA_VERSION, ValueError, mend, "a measured choice")
        del content["schema_version"]
        try:
            found = choice_of_json(json.dumps(content))
            if found.key != key:
                raise ValueError(f"key: expected the name of the file, got {found.key[:80]!r}")
        except (ValueError, RecursionError) as reason:
            said = first_refusal(reason) if isinstance(reason, ValidationError) else reason
            raise ValueError(f"{path}: {said}; {mend}") from None
        return found

    def _pinned(self, found: Choice) -> Choice:
        path = self._file(found.key, PIN)
        if not os.path.lexists(path):
            return found
        pinned = read_file(path).decode(errors="replace").strip()
        able = [own for own in found.alternatives if not own.failed]
        for own in able:
            if pinned in (own.content, own.name):
                return dataclasses.replace(found, name=own.name, by="pinned", without_pin=found.name)
        names = ", ".join(own.name for own in able)
        _warn(path, f"{path}: expected one of {names}, got {pinned[:80]!r}; nothing is pinned")
        return found


def _write(path: FilePath) -> None:
    content = {"schema_version": SCHEMA_VERSION, **_UNWRITTEN[path].as_dict()}
    write_text_file(json.dumps(content, indent=1, allow_nan=False) + "\n", path)
    _UNWRITTEN.pop(path, None)


@atexit.register
def write_the_rest() -> None:
    """Try again to write the choices that could not be written."""
    for path in [*_UNWRITTEN]:
        with contextlib.suppress(ValueError, OSError):
            _write(path)


def _warn(of: FilePath, text: str) -> None:
    """Warn, but only once about the same file or folder."""
    if of not in _WARNED_OF:
        _WARNED_OF.add(of)
        warnings.warn(text, stacklevel=4)


# --- One thread and one process times programs at once -------------------------------------------

#: The lock that a thread holds while it times programs, and the name of this thread.
_timing, _timing_thread = threading.RLock(), ""


@contextlib.contextmanager
def _only_thread(wait_s: float) -> Iterator[None]:
    global _timing_thread
    if not _timing.acquire(timeout=wait_s):
        raise HeldError(_timing_thread)
    name = threading.current_thread().name
    _timing_thread = f"{name} of this process times programs since {local_time()}"
    try:
        yield
    finally:
        _timing.release()


def _is_taken(held: contextlib.ExitStack, lock: _Lock) -> bool:
    """Take a lock. Warn if this takes long, and return False if it takes too long; wait for a holder only once."""
    holder = ""
    for wait_s in (0.0, SILENT_S, WARNED_S):
        try:
            held.enter_context(lock(wait_s))
            return True
        except HeldError as reason:
            holder = reason.holder
        except (ValueError, OSError):  # the folder cannot be written
            return True
        if holder in _GIVEN_UP:
            return False
        if wait_s == SILENT_S:
            plan = f"choose waits another {WARNED_S:g} s, and then times all the same"
            warnings.warn(f"{holder}; {plan}", stacklevel=6)
    _GIVEN_UP.add(holder)
    return False
