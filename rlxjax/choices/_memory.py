"""What was chosen by measuring: kept from one process to the next in SQLite, and what models learn from it.

A connection lives as long as one question, 0.1 ms: none is shared by threads, or carried into a forked process. The
rollback journal works on network file systems too, and is whole after a process is killed.
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

#: Of the database, by which it is known as one of decisions, and of the form of its table and of an export.
APPLICATION_ID, SCHEMA_VERSION = 0x726C786A, 1
#: Seconds that a question waits for who writes, and once it did so in vain; characters of a key in a sentence.
WAIT_S, AGAIN_S, SHOWN_KEY = 5.0, 0.2, 8
#: Seconds that a process waits for another one that times, whose answer it may take, and the lock of who times.
TIMING_WAIT_S, TIMING_LOCK = 300.0, ".rlxjax.timing.lock"
_MAKE = (
    "CREATE TABLE decisions (key TEXT PRIMARY KEY, context TEXT NOT NULL, kind TEXT NOT NULL, created TEXT NOT NULL, "
    "content TEXT NOT NULL, pinned TEXT)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
#: What is pinned stays.
_KEEP = (
    "INSERT INTO decisions VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET context = excluded.context, "
    "kind = excluded.kind, created = excluded.created, content = excluded.content, "
    "pinned = coalesce(pinned, excluded.pinned)"
)
#: What helps where the place is at fault, and how SQLite's names of such errors begin; what helps where it is not.
_ELSEWHERE = "free some space there, or set RLXJAX_HOME to a folder that can be written"
_ANEW = "move it to another place, and what it held is measured anew"
_OF_THE_PLACE = ("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_PERM")
#: The newest choices that a model learns from, and the settings of which one process keeps what it learned.
MOST_LEARNED, MOST_SETTINGS = 512, 64
#: Of this process: the databases that it warned of, those that another process held too long, and by database what is
#: to be written as soon as that is possible.
_WARNED_OF: set[str] = set()
_BUSY: set[FilePath] = set()
_UNWRITTEN: dict[FilePath, list[Choice]] = {}


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


class Export(Sealed):
    """An export of decisions, as a file: each is a `Choice`, and is checked when it is taken."""

    schema_version: Literal[1] = 1
    decisions: list[dict[str, Any]]


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

    def look_up(self, key: str) -> Choice | None:
        """Return what is remembered of a key."""
        found = self._leniently(lambda: self._read("WHERE key = ?", key), [])
        return found[0] if found else None

    def all(self, context: str | None = None, kind: str | None = None) -> list[Choice]:
        """Return all that is remembered, of one context and kind where they are given, the newest first."""
        asked = {name: value for name, value in {"context": context, "kind": kind}.items() if value is not None}
        where = f"WHERE {' AND '.join(f'{name} = ?' for name in asked)}" if asked else ""
        return self._leniently(lambda: self._read(where, *asked.values()), [])

    def keep(self, choice: Choice) -> None:
        """Remember a choice, in the place of an earlier one of the same key, whose pin stays."""
        self._leniently(lambda: self._write([choice]), None)

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
        with self._opened("read") as database:
            asked = ("SELECT key FROM decisions WHERE substr(key, 1, ?) = ? LIMIT 2", (len(start), start))
            keys = [key for (key,) in database.execute(*asked)]
        if start and len(keys) == 1:
            return keys[0]
        got = "the start of several keys; give more of it" if len(keys) > 1 else "a key of nothing that is remembered"
        raise ValueError(f"{start[:80]!r} is {got}; `rlxjax decisions list` shows them")

    def pin(self, key: str, name: str | None) -> None:
        """Choose the alternative of a name from now on, whatever was measured; None takes a pin away.

        Raises:
            ValueError: nothing is remembered of the key, or no alternative that runs has this name.
        """
        with self._opened("written") as database:
            row = database.execute("SELECT content, pinned FROM decisions WHERE key = ?", (key,)).fetchone()
            if row is None:
                raise ValueError(f"{key[:80]!r} is a key of nothing that is remembered; see `rlxjax decisions list`")
            named = {own.name: own for own in self._entry(key, *row).alternatives}
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
        with self._opened("written") as database:
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
        write_json_file(Export(decisions=[one.as_dict() for one in found]), path)
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
                one = choice_of_json(json.dumps(entry))
                if _time(one.created) > datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1):
                    raise ValueError(f"created: expected a time that has come, got {one.created}")
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
            start = ascii(str(key)[:SHOWN_KEY])[1:-1]  # in a damaged file it may be anything
            mend = f"drop it with `rlxjax decisions forget {start}`"
            raise ValueError(f"{self.path}: the entry {start}: {_said(reason)}; {mend}") from None
        name = next((own.name for own in found.alternatives if own.content == pinned and not own.failed), None)
        if pinned is None or name is None:
            return found
        return dataclasses.replace(found, name=name, by="pinned", without_pin=found.name)

    @contextlib.contextmanager
    def _opened(self, to_be: Literal["read", "written"]) -> "Iterator[sqlite3.Connection]":
        """Give the database in one transaction, which is written at the end, or not at all.

        It is made where there is none, to read it in memory alone. What SQLite or the system says against it is a
        sentence with the mend.
        """
        import sqlite3  # which few who import this need

        path, is_written = self.path, to_be == "written"
        try:
            if is_written:
                path.parent.mkdir(parents=True, exist_ok=True)
            # "ro" could not undo what a killed process left
            address = f"{path.absolute().as_uri()}?mode={'rwc' if is_written else 'rw'}"
            address = address if is_written or path.exists() else ":memory:"
            wait_s = AGAIN_S if path in _BUSY else WAIT_S
            connection = sqlite3.connect(address, uri=True, timeout=wait_s, isolation_level=None)
            with contextlib.closing(connection) as database:
                database.execute("BEGIN IMMEDIATE" if is_written else "BEGIN")
                if not _is_made(path, database):
                    # A reader must not write into a file that another process is about to make.
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
                raise ValueError(f"{path}: another process holds it; try again once that has ended") from None
            mend = _ELSEWHERE if code.startswith(_OF_THE_PLACE) else _ANEW
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
    """Return whether a database has its table; refuse one of a newer version, or of somebody else."""
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
    """Write what was measured and could not be written so far."""
    for path in [path for path, waiting in _UNWRITTEN.items() if waiting]:
        with contextlib.suppress(ValueError, OSError):
            Memory(path)._write([])


# --- What models learn ---------------------------------------------------------------------------


#: By database, context and kind: the choices that were measured by key, those of other processes read once, and what
#: a model knows by them.
_settings: dict[tuple[str, str, str], dict[str, Choice]] = {}
_known: dict[tuple[str, str, str], tuple[Handle, list[Choice], CalibratedModel]] = {}


def clear_learned() -> None:
    """Forget what models learned; the next question reads the database anew."""
    _settings.clear()
    _known.clear()


def learn(choice: Choice, memory: Memory, *, is_own: bool) -> None:
    """Add a choice to those that a model learns from: one of this process in the place of an earlier one."""
    choices = _settings.get((str(memory.path), choice.context, choice.kind))
    if choices is not None and is_own:
        choices.pop(choice.key, None)
    if choices is not None:
        choices.setdefault(choice.key, choice)


def learned(calibrated: CalibratedModel, memory: Memory, context: str, kind: str) -> CalibratedModel:
    """Return a model that knows what was measured in its setting."""
    place, own = (str(memory.path), context, kind), handle(calibrated)
    if place not in _settings:
        for oldest in [*_settings][: max(len(_settings) + 1 - MOST_SETTINGS, 0)]:
            _settings.pop(oldest, None)
            _known.pop(oldest, None)
        _settings[place] = {one.key: one for one in memory.all(context, kind)[::-1]}
    kept = _settings.get(place, {})  # none where another thread has cleared them
    choices, known = [*kept.values()][-MOST_LEARNED:], _known.get(place)
    if known is not None and known[:2] == (own, choices):
        return known[2]
    try:
        found = _conditioned(calibrated, choices)
    except ValueError:  # a person edited an entry
        _settings[place] = able = {one.key: one for one in choices if _teaches(calibrated, one)}
        if len(able) == len(choices):
            raise
        return learned(calibrated, memory, context, kind)
    _known[place] = own, choices, found
    return found


def _taught(choice: Choice) -> list[Way]:
    """Return the alternatives from which a model learns: they were timed, and their runs are known."""
    return [own for own in choice.alternatives if own.measured_ns is not None and own.runs]


def _timed_runs(model: LatencyModel, ways: Sequence[Way]) -> Runs:
    """Return the runs of alternatives that were timed, checked as those of any measurement."""
    runs: list[Any] = [run for own in ways for run in own.runs]
    columns = columns_of(model.inputs, model.inputs, [run["inputs"] for run in runs])
    for name, entry in model.inputs.items():
        check_timed_size(columns[name], name, entry)
    model.check(columns)
    return Runs.checked(model, [run["variant"] for run in runs], **columns)


def _conditioned(calibrated: CalibratedModel, choices: list[Choice]) -> CalibratedModel:
    """Return the model that all measured times of some choices condition: those of one choice are a probe."""
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
        warnings.warn(f"the entry {one.key[:8]} of {one.kind} teaches nothing: {reason}", stacklevel=4)
        return False
    return True
