"""What was decided and measured, kept from one process to the next in SQLite.

A connection lives as long as one question, 0.1 ms: none is shared by threads, or carried into a forked process. The
rollback journal works on network file systems too, and is whole after a process is killed.
"""

import atexit
import contextlib
import datetime
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import ValidationError

from rlxjax._files import first_refusal, home_folder, locked, read_json_file, write_json_file
from rlxjax.calibration import MACHINE_FIELDS, current_fingerprint, fingerprint_differences
from rlxjax.models import BUILT_IN

from ._remembered import Export, Remembered, timed_runs

if TYPE_CHECKING:
    import sqlite3

A = TypeVar("A")

#: Of the database, by which it is known as one of decisions, and of the form of its table and of an export.
APPLICATION_ID, SCHEMA_VERSION = 0x726C786A, 1
#: Seconds that a question waits for who writes, and once it did so in vain; characters of a key in a sentence.
WAIT_S, AGAIN_S, SHOWN_KEY = 5.0, 0.2, 8
#: Seconds that a process waits for another one that times, whose answer it may take, and the lock of who times.
TIMING_WAIT_S, TIMING_LOCK = 300.0, ".rlxjax.timing.lock"
_TABLE = (
    "CREATE TABLE decisions (key TEXT PRIMARY KEY, context TEXT NOT NULL, kind TEXT NOT NULL, created TEXT NOT NULL, "
    "content TEXT NOT NULL, pinned TEXT)"
)
#: What is pinned stays.
_KEEP = (
    "INSERT INTO decisions VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET context = excluded.context, "
    "kind = excluded.kind, created = excluded.created, content = excluded.content, "
    "pinned = coalesce(pinned, excluded.pinned)"
)
#: The mend where the place is at fault.
_ELSEWHERE = "make room for it there, or set RLXJAX_HOME to a folder that can be written"
#: Of this process: the databases that it warned of, those that another process held too long, and by database what is
#: to be written as soon as that is possible.
_WARNED_OF: set[str] = set()
_BUSY: set[FilePath] = set()
_UNWRITTEN: dict[FilePath, list[Remembered]] = {}


class Loaded(NamedTuple):
    """What became of the decisions in an export.

    Attributes:
        taken: that are remembered here from now on.
        known: that are here already, as new or newer.
        elsewhere: that another kind of machine measured.
        left_out: a sentence for each that says what no measurement says.
    """

    taken: int
    known: int
    elsewhere: int
    left_out: tuple[str, ...] = ()


class Memory:
    """What was decided and measured, in a database that processes side by side may use.

    `look_up`, `keep` and `all` go on without memory where the database is damaged, locked, of a newer version or in a
    place that cannot be written: they warn once, and ask again at the next question. What could not be kept is written
    with the next answer, or when the process ends. The others, and these too where `strict` is asked for, refuse the
    database by `ValueError`, one sentence with the path and the mend.

    Args:
        path: of the database; `decisions.sqlite` in `RLXJAX_HOME`, or among the user's data, unless given. Reading
            makes no file.
        strict: refuse what cannot be read or written.

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
        """The place of the database, whether or not there is one."""
        return self._given or home_folder("data") / "decisions.sqlite"

    def look_up(self, key: str) -> Remembered | None:
        """Return what is remembered of a key."""
        found = self._leniently(lambda: self._read("WHERE key = ?", key), [])
        return found[0] if found else None

    def all(self, context: str | None = None, kind: str | None = None) -> list[Remembered]:
        """Return all that is remembered, of one context and kind where they are given, the newest first."""
        asked = {name: value for name, value in {"context": context, "kind": kind}.items() if value is not None}
        where = f"WHERE {' AND '.join(f'{name} = ?' for name in asked)}" if asked else ""
        return self._leniently(lambda: self._read(where, *asked.values()), [])

    def keep(self, remembered: Remembered) -> None:
        """Remember a choice, in the place of an earlier one of the same key, whose pin stays."""
        self._leniently(lambda: self._write([remembered]), None)

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Keep other processes of this memory from timing meanwhile; without a place for a lock nobody waits."""
        with contextlib.ExitStack() as held:
            with contextlib.suppress(ValueError, OSError):
                held.enter_context(locked(self.path, TIMING_LOCK, TIMING_WAIT_S))
            yield

    def key_of(self, start: str) -> str:
        """Return the one key that begins so.

        Raises:
            ValueError: none does, or several do.
        """
        with self._reading() as database:
            asked = ("SELECT key FROM decisions WHERE substr(key, 1, ?) = ? LIMIT 2", (len(start), start))
            keys = [] if database is None else [key for (key,) in database.execute(*asked)]
        if start and len(keys) == 1:
            return keys[0]
        got = "the start of several keys; give more of it" if len(keys) > 1 else "a key of nothing that is remembered"
        raise ValueError(f"{start[:80]!r} is {got}; `rlxjax decisions list` shows them")

    def pin(self, key: str, name: str | None) -> None:
        """Choose the alternative of a name from now on, whatever was measured; None takes a pin away.

        Raises:
            ValueError: nothing is remembered of the key, or no alternative that runs has this name.
        """
        with self._writing() as database:
            row = database.execute("SELECT content, pinned FROM decisions WHERE key = ?", (key,)).fetchone()
            if row is None:
                raise ValueError(f"{key[:80]!r} is a key of nothing that is remembered; see `rlxjax decisions list`")
            named = {one.name: one for one in self._entry(key, *row).alternatives}
            if name is not None and name not in named:
                raise ValueError(f"expected one of {', '.join(named)}, got {name!r}")
            if name is not None and (reason := named[name].failed):
                raise ValueError(f"{name} could not run here ({reason}); pin another one")
            pinned = None if name is None else named[name].content
            database.execute("UPDATE decisions SET pinned = ? WHERE key = ?", (pinned, key))

    def forget(self, keys: Sequence[str] | None) -> int:
        """Forget what is remembered of keys, or all of it where None is given; return how many entries that were.

        Raises:
            ValueError: the database cannot be written.
        """
        if not self.path.exists():
            return 0
        with self._writing() as database:
            if keys is None:
                return database.execute("DELETE FROM decisions").rowcount
            return database.executemany("DELETE FROM decisions WHERE key = ?", [(key,) for key in keys]).rowcount

    def export(self, path: str | os.PathLike[str]) -> int:
        """Write all that is remembered to a JSON file; return how many entries that are.

        Raises:
            ValueError: the database cannot be read, or the file is the database.
            OSError: the file cannot be written.
        """
        if self.path.exists() and os.path.exists(path) and self.path.samefile(path):
            raise ValueError(f"expected another file than the database itself, got {os.fspath(path)}")
        found = self._read("")
        write_json_file(Export(decisions=[one.model_dump(mode="json") for one in found]), path)
        return len(found)

    def load(self, path: str | os.PathLike[str]) -> Loaded:
        """Remember what an export holds of machines of the same kind as this one; of one key the newer entry counts.

        An entry that says what no measurement says is left out, and the others are taken.

        Raises:
            ValueError: the file is no whole export, or the database cannot be written.
        """
        mend = "make it anew with `rlxjax decisions export`"
        raw = read_json_file(path, Export, SCHEMA_VERSION, ValueError, mend, "an export of decisions").decisions
        found, left_out, here = [], [], current_fingerprint()
        for number, entry in enumerate(raw):
            try:
                found.append(_sane(entry))
            except ValueError as reason:
                key, why = entry.get("key"), first_refusal(reason) if isinstance(reason, ValidationError) else reason
                left_out.append(f"{key[:SHOWN_KEY] if isinstance(key, str) else f'entry {number}'}: {why}")
        own = [one for one in found if not fingerprint_differences(one.machine, here, MACHINE_FIELDS)]
        taken = 0
        if own:
            with self._writing() as database:
                for one in own:
                    asked = ("SELECT created FROM decisions WHERE key = ?", (one.key,))
                    if not any(_time(one.created) <= _time(created) for (created,) in database.execute(*asked)):
                        _insert(database, one)
                        taken += 1
        return Loaded(taken, len(own) - taken, len(found) - len(own), tuple(left_out))

    def _leniently(self, ask: Callable[[], A], otherwise: A) -> A:
        """Return an answer of the database, or another one where it is in no state to answer."""
        if self._is_strict:
            return ask()
        try:
            return ask()
        except ValueError as reason:
            place = str(self._given or os.environ.get("RLXJAX_HOME", ""))
            if place not in _WARNED_OF:
                _WARNED_OF.add(place)
                warnings.warn(f"{reason}; choices go on without what is remembered there", stacklevel=3)
            return otherwise

    def _write(self, new: Sequence[Remembered]) -> None:
        """Write entries, and those of earlier answers that could not be written."""
        waiting = _UNWRITTEN.setdefault(self.path, [])
        waiting += new
        entries = list(waiting)
        with self._writing() as database:
            for one in entries:
                _insert(database, one)
        del waiting[: len(entries)]

    def _read(self, where: str, *values: str) -> list[Remembered]:
        with self._reading() as database:
            if database is None:
                return []
            asked = f"SELECT key, content, pinned FROM decisions {where} ORDER BY created DESC, key"
            rows = [*database.execute(asked, values)]
        found = [self._leniently(lambda row=row: self._entry(*row), None) for row in rows]
        return [one for one in found if one is not None]

    def _entry(self, key: str, content: str, pinned: str | None) -> Remembered:
        try:
            found = Remembered.model_validate_json(content)
        except ValidationError as reason:
            start = ascii(str(key)[:SHOWN_KEY])[1:-1]  # of a damaged file it may be anything
            mend = f"drop it with `rlxjax decisions forget {start}`"
            raise ValueError(f"{self.path}: the entry {start}: {first_refusal(reason)}; {mend}") from None
        is_there = any(one.content == pinned for one in found.alternatives)
        return found.model_copy(update={"pinned": pinned if is_there else None})

    @contextlib.contextmanager
    def _reading(self) -> "Iterator[sqlite3.Connection | None]":
        """Give the database in one transaction; None where nothing was written so far."""
        path = self.path
        with _refused(path, "read"):
            if not path.exists():
                yield None
                return
            with _connected(path, "rw") as database:  # "ro" could not undo what a killed process left
                database.execute("BEGIN")
                yield database if _is_made(path, database) else None

    @contextlib.contextmanager
    def _writing(self) -> "Iterator[sqlite3.Connection]":
        """Give the database in one transaction, made where there was none; it is written at the end, or not at all."""
        path = self.path
        with _refused(path, "written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with _connected(path, "rwc") as database:
                database.execute("BEGIN IMMEDIATE")
                if not _is_made(path, database):
                    for statement in (
                        _TABLE,
                        f"PRAGMA application_id = {APPLICATION_ID}",
                        f"PRAGMA user_version = {SCHEMA_VERSION}",
                    ):
                        database.execute(statement)
                yield database
                database.execute("COMMIT")


def _sane(entry: dict[str, Any]) -> Remembered:
    """Return a choice of an export; refuse one that says what no measurement says."""
    one = Remembered.model_validate(entry)
    if _time(one.created) > datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1):
        raise ValueError(f"created: expected a time that has come, got {one.created}")
    if one.kind in BUILT_IN and one.taught:
        timed_runs(BUILT_IN[one.kind], one.taught)
    return one


def _time(created: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(created)


def _insert(database: "sqlite3.Connection", one: Remembered) -> None:
    content = one.model_dump_json(exclude={"pinned"})
    database.execute(_KEEP, (one.key, one.context, one.kind, one.created, content, one.pinned))


def _connected(path: FilePath, mode: str) -> "contextlib.closing[sqlite3.Connection]":
    import sqlite3  # which few who import this need

    address = f"{path.absolute().as_uri()}?mode={mode}"
    wait_s = AGAIN_S if path in _BUSY else WAIT_S
    return contextlib.closing(sqlite3.connect(address, uri=True, timeout=wait_s, isolation_level=None))


def _is_made(path: FilePath, database: "sqlite3.Connection") -> bool:
    """Return whether a database has its table; refuse one of a newer version, or of somebody else."""

    def one(asked: str) -> Any:
        return database.execute(asked).fetchone()[0]

    application, version = one("PRAGMA application_id"), one("PRAGMA user_version")
    if application == APPLICATION_ID and version > SCHEMA_VERSION:
        newest = f"{version} is newer than {SCHEMA_VERSION}, the newest that this rlxjax reads"
        raise ValueError(f"{path}: schema version {newest}; install a newer rlxjax")
    if application != APPLICATION_ID and (application or version or one("SELECT count(*) FROM sqlite_master")):
        raise ValueError(f"{path}: a database of another program; move it to another place")
    return application == APPLICATION_ID


@contextlib.contextmanager
def _refused(path: FilePath, what: str) -> Iterator[None]:
    """Turn what SQLite or the system says against a database into a sentence with the mend."""
    import sqlite3

    try:
        yield
        _BUSY.discard(path)
    except OSError as reason:
        raise ValueError(f"{path}: cannot be {what} ({reason.strerror or reason}); {_ELSEWHERE}") from None
    except sqlite3.Error as reason:
        code = getattr(reason, "sqlite_errorname", "")
        if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            _BUSY.add(path)
            raise ValueError(f"{path}: another process holds it; try again once that has ended") from None
        mend = _ELSEWHERE
        if not code.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_PERM")):
            mend = "move it to another place, and what it held is measured anew"
        said = " ".join(str(reason).split())
        raise ValueError(f"{path}: cannot be {what} ({said}); {mend}") from None


@atexit.register
def write_the_rest() -> None:
    """Write what was measured and could not be written so far."""
    for path in [path for path, waiting in _UNWRITTEN.items() if waiting]:
        with contextlib.suppress(ValueError, OSError):
            Memory(path)._write([])
