"""The SQLite database of measured choices, which processes share; and what models learn from these choices.

Each query opens its own connection, because threads and forked processes cannot share a connection. SQLite's rollback
journal is used because it works on network file systems too, and survives a killed process.
"""

import atexit
import contextlib
import dataclasses
import datetime
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import ValidationError

from rlxjax._files import Sealed, first_refusal, home_folder, locked, read_json_file, write_json_file
from rlxjax._values import Handle, handle
from rlxjax.calibration import MACHINE_FIELDS, CalibratedModel, current_fingerprint, fingerprint_differences
from rlxjax.fit import LatencyModel, Runs, check_timed_size, columns_of, condition, learned_spread
from rlxjax.models import BUILT_IN

from ._way import Choice, Way, choice_of_json, json_of_choice

if TYPE_CHECKING:
    import sqlite3

A = TypeVar("A")

#: The SQLite application id of the database, and the schema version of the database and of an export.
APPLICATION_ID, SCHEMA_VERSION = 0x726C786A, 1
#: Seconds to wait while another process writes, the same after a failure, and the length of a key in messages.
WAIT_S, AGAIN_S, SHOWN_KEY = 5.0, 0.2, 8
#: Seconds to wait for another process that is timing, and the name of the lock file.
TIMING_WAIT_S, TIMING_LOCK = 300.0, ".rlxjax.timing.lock"
_MAKE = (
    "CREATE TABLE decisions (key TEXT PRIMARY KEY, context TEXT NOT NULL, kind TEXT NOT NULL, created TEXT NOT NULL, "
    "content TEXT NOT NULL, pinned TEXT)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
#: The SQL that stores a choice. If the key already has a pin, the pin stays.
_KEEP = (
    "INSERT INTO decisions VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET context = excluded.context, "
    "kind = excluded.kind, created = excluded.created, content = excluded.content, "
    "pinned = coalesce(pinned, excluded.pinned)"
)
#: What to do if the folder cannot be used, what to do if the file is damaged, and the SQLite errors of the former kind.
_ELSEWHERE = "free some space there, or set RLXJAX_HOME to a folder that can be written"
_AGAIN = "move it to another place; its choices are measured again"
_OF_THE_PLACE = ("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_PERM")
#: How many of the newest choices a model learns from, and for how many settings a process keeps its models.
MOST_LEARNED, MOST_SETTINGS = 512, 64
#: Databases that this process has warned about; databases that another process held too long; choices not yet written.
_WARNED_OF: set[str] = set()
_BUSY: set[FilePath] = set()
_UNWRITTEN: dict[FilePath, list[Choice]] = {}


class Loaded(NamedTuple):
    """The result of an import.

    Attributes:
        taken: number of choices that were imported.
        known: number of choices left out because the database has a choice of the same key that is not older.
        elsewhere: number of choices left out because another kind of machine measured them.
        left_out: for each invalid choice, a sentence that says what is wrong with it.
    """

    taken: int
    known: int
    elsewhere: int
    left_out: tuple[str, ...] = ()


class Export(Sealed):
    """The content of an export file. Each decision is a `Choice` as JSON; importing the file checks it."""

    schema_version: Literal[1] = 1
    decisions: list[dict[str, Any]]


class Memory:
    """A database of measured choices, which several processes may use at once.

    If the database is damaged, locked, too new or not writable, `look_up`, `keep` and `all` warn once and go on without
    it. All other methods raise a `ValueError` that names the path and a remedy. A choice that could not be written is
    written together with the next choice, or when the process ends.

    Args:
        path: path of the database; the default is `decisions.sqlite` in the folder `RLXJAX_HOME`, or else in the user's
            data folder. Reading creates no file.
        strict: whether `look_up`, `keep` and `all` raise this `ValueError` too, instead of a warning.

    Examples:
        >>> import tempfile
        >>> memory = Memory(FilePath(tempfile.mkdtemp()) / "decisions.sqlite")
        >>> memory.look_up("a4f0") is None, memory.all()
        (True, [])
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, strict: bool = False) -> None:
        self._given, self._is_strict = None if path is None else FilePath(path), strict

    @property
    def path(self) -> FilePath:
        """The path of the database file. The file need not exist."""
        return self._given or home_folder("data") / "decisions.sqlite"

    def look_up(self, key: str) -> Choice | None:
        """Return the choice that is remembered under a key, or None if there is none."""
        found = self._leniently(lambda: self._read("WHERE key = ?", key), [])
        return found[0] if found else None

    def all(self, context: str | None = None, kind: str | None = None) -> list[Choice]:
        """Return the remembered choices, the newest first: all of them, or only those with this `context` or `kind`."""
        asked = {name: value for name, value in {"context": context, "kind": kind}.items() if value is not None}
        where = f"WHERE {' AND '.join(f'{name} = ?' for name in asked)}" if asked else ""
        return self._leniently(lambda: self._read(where, *asked.values()), [])

    def keep(self, choice: Choice) -> None:
        """Remember a choice. It replaces an earlier choice with the same key; a pin on that key stays."""
        self._leniently(lambda: self._write([choice]), None)

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Hold a lock that keeps other processes from timing programs. If the folder is not writable, do nothing."""
        with contextlib.ExitStack() as held:
            with contextlib.suppress(ValueError, OSError):
                held.enter_context(locked(self.path, TIMING_LOCK, TIMING_WAIT_S))
            yield

    def key_of(self, start: str) -> str:
        """Return the full key that begins with the characters `start`.

        Raises:
            ValueError: no key or several keys begin with these characters.
        """
        with self._opened("read") as database:
            asked = ("SELECT key FROM decisions WHERE substr(key, 1, ?) = ? LIMIT 2", (len(start), start))
            keys = [key for (key,) in database.execute(*asked)]
        if start and len(keys) == 1:
            return keys[0]
        found = "several keys begin" if len(keys) > 1 else "no key begins"
        raise ValueError(f"{found} with {start[:80]!r}; `rlxjax decisions list` shows all keys")

    def pin(self, key: str, name: str | None) -> None:
        """Pin an alternative by name, so that it runs even if another alternative is faster. None removes the pin.

        Raises:
            ValueError: the key is unknown, or `name` is not the name of an alternative that runs.
        """
        with self._opened("written") as database:
            row = database.execute("SELECT content, pinned FROM decisions WHERE key = ?", (key,)).fetchone()
            if row is None:
                raise ValueError(f"{key[:80]!r} is an unknown key; `rlxjax decisions list` shows all keys")
            named = {own.name: own for own in self._entry(key, *row).alternatives}
            if name is not None and name not in named:
                raise ValueError(f"expected one of {', '.join(named)}, got {name!r}")
            if name is not None and (reason := named[name].failed):
                raise ValueError(f"{name} could not run here ({reason}); pin another alternative")
            pinned = None if name is None else named[name].content
            database.execute("UPDATE decisions SET pinned = ? WHERE key = ?", (pinned, key))

    def forget(self, keys: Sequence[str] | None) -> int:
        """Delete the choices with these keys, or all choices if `keys` is None; return the number of deleted choices.

        Raises:
            ValueError: the database cannot be written.
        """
        if not self.path.exists():
            return 0
        with self._opened("written") as database:
            if keys is None:
                return database.execute("DELETE FROM decisions").rowcount
            return database.executemany("DELETE FROM decisions WHERE key = ?", [(key,) for key in keys]).rowcount

    def export(self, path: str | os.PathLike[str]) -> int:
        """Write all remembered choices to a JSON file; return how many choices were written.

        Raises:
            ValueError: the database cannot be read, or `path` is the path of the database.
            OSError: the file cannot be written.
        """
        if self.path.exists() and os.path.exists(path) and self.path.samefile(path):
            raise ValueError(f"expected another file than the database itself, got {os.fspath(path)}")
        found = self._read("")
        write_json_file(Export(decisions=[one.as_dict() for one in found]), path)
        return len(found)

    def load(self, path: str | os.PathLike[str]) -> Loaded:
        """Import choices that this kind of machine measured, from an export file. If a key is known, the newer stays.

        Raises:
            ValueError: the file is not a complete export, or the database cannot be written.
        """
        mend = "write the file again with `rlxjax decisions export`"
        raw = read_json_file(path, Export, SCHEMA_VERSION, ValueError, mend, "an export of decisions").decisions
        found, left_out, here = [], [], current_fingerprint()
        for number, entry in enumerate(raw):
            try:
                one = choice_of_json(json.dumps(entry))
                if _time(one.created) > datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1):
                    raise ValueError(f"created: expected a time in the past, got {one.created}")
                if one.kind in BUILT_IN and (taught := _taught(one)):
                    _timed_runs(BUILT_IN[one.kind], taught)
                found.append(one)
            except ValueError as reason:
                key = entry.get("key")
                left_out.append(f"{key[:SHOWN_KEY] if isinstance(key, str) else f'entry {number}'}: {_said(reason)}")
        own = [one for one in found if one.machine and not fingerprint_differences(one.machine, here, MACHINE_FIELDS)]
        taken = 0
        with self._opened("written") if own else contextlib.nullcontext() as database:
            for one in own:
                asked = ("SELECT created FROM decisions WHERE key = ?", (one.key,))
                if all(_time(one.created) > _time(created) for (created,) in database.execute(*asked)):  # pyright: ignore
                    _insert(database, one)  # pyright: ignore[reportArgumentType]
                    taken += 1
        return Loaded(taken, len(own) - taken, len(found) - len(own), tuple(left_out))

    def _leniently(self, ask: Callable[[], A], otherwise: A) -> A:
        """Return the result of `ask`, a query. If it fails, warn once and return `otherwise`; raise if strict."""
        try:
            return ask()
        except ValueError as reason:
            if self._is_strict:
                raise
            place = str(self._given or os.environ.get("RLXJAX_HOME", ""))
            if place not in _WARNED_OF:
                _WARNED_OF.add(place)
                warnings.warn(f"{reason}; choices are made without this memory", stacklevel=3)
            return otherwise

    def _write(self, new: Sequence[Choice]) -> None:
        waiting = _UNWRITTEN.setdefault(self.path, [])
        waiting += new
        entries = list(waiting)
        with self._opened("written") as database:
            for one in entries:
                _insert(database, one)
        del waiting[: len(entries)]

    def _read(self, where: str, *values: str) -> list[Choice]:
        with self._opened("read") as database:
            asked = f"SELECT key, content, pinned FROM decisions {where} ORDER BY created DESC, key"
            rows = [*database.execute(asked, values)]
        found = [self._leniently(lambda row=row: self._entry(*row), None) for row in rows]
        return [one for one in found if one is not None]

    def _entry(self, key: str, content: str, pinned: str | None) -> Choice:
        try:
            found = choice_of_json(content)
        except ValueError as reason:
            start = ascii(str(key)[:SHOWN_KEY])[1:-1]  # in a damaged file the key may be anything
            mend = f"drop it with `rlxjax decisions forget {start}`"
            raise ValueError(f"{self.path}: the entry {start}: {_said(reason)}; {mend}") from None
        name = next((own.name for own in found.alternatives if own.content == pinned and not own.failed), None)
        if pinned is None or name is None:
            return found
        return dataclasses.replace(found, name=name, by="pinned", without_pin=found.name)

    @contextlib.contextmanager
    def _opened(self, to_be: Literal["read", "written"]) -> "Iterator[sqlite3.Connection]":
        """Yield the database in a transaction. A missing database is created: on disk to write, in memory to read."""
        import sqlite3  # loaded when first used

        path, is_written = self.path, to_be == "written"
        try:
            if is_written:
                path.parent.mkdir(parents=True, exist_ok=True)
            # In mode "ro", SQLite cannot undo the unfinished transaction of a killed process.
            address = f"{path.absolute().as_uri()}?mode={'rwc' if is_written else 'rw'}"
            address = address if is_written or path.exists() else ":memory:"
            wait_s = AGAIN_S if path in _BUSY else WAIT_S
            connection = sqlite3.connect(address, uri=True, timeout=wait_s, isolation_level=None)
            with contextlib.closing(connection) as database:
                database.execute("BEGIN IMMEDIATE" if is_written else "BEGIN")
                if not _is_made(path, database):
                    # A reader must not write into a file that another process is making.
                    for statement in _MAKE if is_written else [_MAKE[0].replace("TABLE", "TEMP TABLE", 1)]:
                        database.execute(statement)
                yield database
                database.execute("COMMIT" if is_written else "ROLLBACK")
            _BUSY.discard(path)
        except OSError as reason:
            raise ValueError(f"{path}: cannot be {to_be} ({reason.strerror or reason}); {_ELSEWHERE}") from None
        except sqlite3.Error as reason:
            code, said = getattr(reason, "sqlite_errorname", ""), " ".join(str(reason).split())
            if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                _BUSY.add(path)
                raise ValueError(f"{path}: another process holds the database; try again later") from None
            mend = _ELSEWHERE if code.startswith(_OF_THE_PLACE) else _AGAIN
            raise ValueError(f"{path}: cannot be {to_be} ({said}); {mend}") from None


def _said(reason: ValueError) -> object:
    return first_refusal(reason) if isinstance(reason, ValidationError) else reason


def _time(created: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(created)


def _insert(database: "sqlite3.Connection", one: Choice) -> None:
    pinned = one.chosen.content if one.by == "pinned" else None
    kept = dataclasses.replace(one, name=one.without_pin or one.name, by="measured", without_pin=None)
    database.execute(_KEEP, (one.key, one.context, one.kind, one.created, json_of_choice(kept), pinned))


def _is_made(path: FilePath, database: "sqlite3.Connection") -> bool:
    """Return whether a database has its table. Raise an error for a newer version or another program's database."""
    asked = ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
    application, version, tables = (database.execute(one).fetchone()[0] for one in asked)
    if application == APPLICATION_ID and version > SCHEMA_VERSION:
        newest = f"{version} is newer than {SCHEMA_VERSION}, the newest that this rlxjax reads"
        raise ValueError(f"{path}: schema version {newest}; install a newer rlxjax")
    if application != APPLICATION_ID and (application or version or tables):
        raise ValueError(f"{path}: a database of another program; move it to another place")
    return application == APPLICATION_ID


@atexit.register
def write_the_rest() -> None:
    """Try again to write the choices that could not be written."""
    for path in [path for path, waiting in _UNWRITTEN.items() if waiting]:
        with contextlib.suppress(ValueError, OSError):
            Memory(path)._write([])


# --- What models learn ---------------------------------------------------------------------------


#: Two dicts by database, context and kind: the measured choices by key; and the model that has learned from them.
_settings: dict[tuple[str, str, str], dict[str, Choice]] = {}
_known: dict[tuple[str, str, str], tuple[Handle, list[Choice], CalibratedModel]] = {}


def clear_learned() -> None:
    """Forget what models learned. The next call of `learned` reads the database again."""
    _settings.clear()
    _known.clear()


def learn(choice: Choice, memory: Memory, *, is_own: bool) -> None:
    """Add a choice to those that a model learns from. If `is_own`, it replaces an earlier choice of the same key."""
    choices = _settings.get((str(memory.path), choice.context, choice.kind))
    if choices is not None and is_own:
        choices.pop(choice.key, None)
    if choices is not None:
        choices.setdefault(choice.key, choice)


def learned(calibrated: CalibratedModel, memory: Memory, context: str, kind: str) -> CalibratedModel:
    """Return the calibrated model after it has learned from the measured choices of its setting."""
    place, own = (str(memory.path), context, kind), handle(calibrated)
    if place not in _settings:
        for oldest in [*_settings][: max(len(_settings) + 1 - MOST_SETTINGS, 0)]:
            _settings.pop(oldest, None)
            _known.pop(oldest, None)
        _settings[place] = {one.key: one for one in memory.all(context, kind)[::-1]}
    kept = _settings.get(place, {})  # another thread may have cleared the settings
    choices, known = [*kept.values()][-MOST_LEARNED:], _known.get(place)
    if known is not None and known[:2] == (own, choices):
        return known[2]
    try:
        found = _conditioned(calibrated, choices)
    except ValueError:  # an entry was edited by hand
        _settings[place] = able = {one.key: one for one in choices if _teaches(calibrated, one)}
        if len(able) == len(choices):
            raise
        return learned(calibrated, memory, context, kind)
    _known[place] = own, choices, found
    return found


def _taught(choice: Choice) -> list[Way]:
    """Return the alternatives that a model learns from: they have a measured time, and their runs are known."""
    return [own for own in choice.alternatives if own.measured_ns is not None and own.runs]


def _timed_runs(model: LatencyModel, ways: Sequence[Way]) -> Runs:
    """Return the runs of measured alternatives. The runs are checked like those of any measurement."""
    runs: list[Any] = [run for own in ways for run in own.runs]
    columns = columns_of(model.inputs, model.inputs, [run["inputs"] for run in runs])
    for name, entry in model.inputs.items():
        check_timed_size(columns[name], name, entry)
    model.check(columns)
    return Runs.checked(model, [run["variant"] for run in runs], **columns)


def _conditioned(calibrated: CalibratedModel, choices: list[Choice]) -> CalibratedModel:
    """Return the model conditioned on the measured times of choices. All times of the same choice form one probe."""
    taught = [(number, own) for number, choice in enumerate(choices) for own in _taught(choice)]
    if not taught:
        return calibrated
    probes, ways = np.array([number for number, _ in taught]), [own for _, own in taught]
    timed = _timed_runs(model := calibrated.model, ways)
    times, predicted_ns = np.array([own.measured_ns for own in ways]), [own.predicted_ns for own in ways]
    measurement = np.repeat(np.arange(len(times)), [len(own.runs) for own in ways])
    posterior = condition(calibrated.posterior, timed, times, measurement=measurement, probe=probes)
    if len(model.variants) > 1 and len(times) == len(measurement) and None not in predicted_ns:
        own = learned_spread(calibrated.posterior, timed, np.log(times / np.array(predicted_ns, float)), probes)
        posterior = dataclasses.replace(posterior, spread=own.spread, alike=own.alike)
    return dataclasses.replace(calibrated, posterior=posterior, domain=calibrated.domain_with(timed))


def _teaches(calibrated: CalibratedModel, one: Choice) -> bool:
    try:
        _conditioned(calibrated, [one])
    except ValueError as reason:
        warnings.warn(f"the model of {one.kind} learns nothing from entry {one.key[:8]}: {reason}", stacklevel=4)
        return False
    return True
