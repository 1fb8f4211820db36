"""Read and write files. The message of each error is a single line that names the file."""

import contextlib
import csv
import errno
import gzip
import hashlib
import io
import json
import math
import os
import secrets
import socket
import stat
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_serializer, model_validator

from ._typing import AnyPath
from .extras import require
from .units import bytes_text

#: The most characters of a refused value that a message shows.
SHOWN_CHARACTERS = 80
#: The most bytes of a file, before decompression and after it, and the most columns of a CSV file.
MOST_BYTES, MOST_COLUMNS = 2**28, 2**16
#: The seconds that a writer waits for another writer in the same folder, and the name of the lock file.
LOCK_WAIT_S, LOCK_NAME = 5.0, ".rlxjax.lock"
#: The word for each kind of path that is not a regular file.
_KINDS = {
    **{stat.S_IFDIR: "folder", stat.S_IFCHR: "device", stat.S_IFBLK: "device"},
    **{stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"},
}
#: The error numbers that a file system without locks returns.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)

_Content = TypeVar("_Content", bound=BaseModel)


class Strict(BaseModel):
    """The base class of file schemas. Values are not converted. Unknown fields and changes of objects are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Sealed(Strict):
    """The base class of schemas for files with a digest of their content, which shows whether a file was edited."""

    @model_serializer(mode="wrap")
    def _with_digest(self, content_of: Any) -> dict[str, Any]:
        return (content := content_of(self)) | {"digest": digest_of(content)}

    @model_validator(mode="before")
    @classmethod
    def _without_digest(cls, content: Any) -> Any:
        return _without_digest(content) if isinstance(content, dict) else content


def _without_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != "digest"}


def digest_of(content: Mapping[str, Any]) -> str:
    """Return the hexadecimal SHA-256 of a JSON object without its key `digest`. The order of keys does not matter."""
    text = json.dumps(_without_digest(content), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def digest_problem(content: Mapping[str, Any]) -> str | None:
    """Return a sentence that says that a JSON object was edited after it was written; None if it was not edited."""
    with contextlib.suppress(RecursionError):
        if content.get("digest") == digest_of(content):
            return None
    got = "does not match the content" if "digest" in content else "is missing"
    return f"the digest {got}: the file was edited; it is used as it is"


def home_folder(kind: Literal["data", "cache"], error: type[ValueError] = ValueError) -> FilePath:
    """Return the folder that `RLXJAX_HOME` names, else the user's data or cache folder. Raise `error` without any."""
    import platformdirs

    given = os.environ.get("RLXJAX_HOME")
    users = platformdirs.user_data_dir if kind == "data" else platformdirs.user_cache_dir
    try:
        return FilePath(given or users("rlxjax", appauthor=False)).expanduser()
    except RuntimeError:
        got = given or "none, and this user has no home"
        raise error(f"RLXJAX_HOME: expected a folder, got {got}; set RLXJAX_HOME to a folder") from None


def read_file(path: str | os.PathLike[str], error: type[ValueError] = ValueError, mend: str = "") -> bytes:
    """Return a file's content, decompressed if the name ends in `.gz`. The message of an `error` ends with `mend`."""
    try:
        content = _content_of(path)
        if os.fspath(path).endswith(".gz"):
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
                content = file.read(MOST_BYTES + 1)
        if len(content) <= MOST_BYTES:
            return content
        problem = f"expected at most {bytes_text(MOST_BYTES)}, got more"
    except FileNotFoundError:
        problem = "no such file"
    except IsADirectoryError as reason:  # the error of `_content_of` for a path that is not a regular file
        problem = reason.strerror
    except (OSError, EOFError, ValueError, zlib.error) as reason:
        problem = f"cannot be read ({getattr(reason, 'strerror', None) or reason})"
    raise error("; ".join(filter(None, (f"{os.fspath(path)}: {problem}", mend))))


def _content_of(path: str | os.PathLike[str]) -> bytes:
    """Return at most `MOST_BYTES + 1` bytes of a regular file. Raise `IsADirectoryError` for a pipe or a device."""
    try:
        mode = os.stat(path).st_mode
    except NotADirectoryError:
        if not FilePath(path).is_relative_to(FilePath(__file__).parent):
            raise
        return __spec__.loader.get_data(os.fspath(path))  # the package lies in a zip archive
    if not stat.S_ISREG(mode):
        raise IsADirectoryError(0, f"expected a file, got a {_KINDS.get(stat.S_IFMT(mode), 'special file')}")
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return file.read(MOST_BYTES + 1)


def read_json(path: AnyPath, version: int | None, error: type[ValueError], mend: str, what: str) -> dict[str, Any]:
    """Return the JSON object in a file of schema `version`; the arguments are those of `read_json_file`."""
    path, got = FilePath(path), read_file(path, error, mend)
    try:
        content = json.loads(got.decode("utf-8"), object_pairs_hook=without_duplicates)
    except UnicodeDecodeError as reason:
        raise error(f"{path}: cannot be read ({reason}); {mend}") from None
    except json.JSONDecodeError as reason:
        where = f"line {reason.lineno}: not whole JSON ({reason.msg})"
        raise error(f"{path}: {where}; the file may be truncated; {mend}") from None
    except (ValueError, RecursionError) as reason:
        raise error(f"{path}: not {what} ({reason}); {mend}") from None
    if not isinstance(content, dict):
        raise error(f"{path}: expected a JSON object; {mend}")
    if version is not None:
        check_version(path, content, version, error, mend)
    return content


def check_version(path: AnyPath, content: Mapping[str, Any], version: int, error: type[ValueError], mend: str) -> None:
    """Raise an `error` unless the content of a file has the schema `version`."""
    own = content.get("schema_version")
    if type(own) is int and own > version:
        newest = f"{own} is newer than {version}, the newest that this rlxjax reads; install a newer rlxjax"
        raise error(f"{path}: schema_version: {newest}")
    if repr(own) != repr(version):
        raise error(f"{path}: schema_version: expected {version}, got {own!r}; {mend}")


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from its pairs of key and value; raise `ValueError` if two pairs have the same key."""
    content = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"the key {name[:SHOWN_CHARACTERS]!r} comes twice")
        content[name] = value
    return content


def read_json_file(
    path: str | os.PathLike[str], schema: type[_Content], version: int, error: type[ValueError], mend: str, what: str
) -> _Content:
    """Return the checked content of a file; warn if the file was edited. The message of an `error` ends with `mend`."""
    content = read_json(path, version, error, mend, what)
    try:
        found = schema.model_validate(content)
    except ValidationError as reason:
        raise error(f"{os.fspath(path)}: {first_refusal(reason)}; {mend}") from None
    if issubclass(schema, Sealed) and (problem := digest_problem(content)):
        warnings.warn(f"{os.fspath(path)}: {problem}", stacklevel=3)
    return found


def read_csv_file(path: str | os.PathLike[str]) -> list[tuple[int, list[str]]]:
    """Return the line number and the cells of each line of a CSV file; blank lines are left out."""
    found = []
    try:
        reader = csv.reader(io.StringIO(read_file(path).decode("utf-8-sig"), newline=""), strict=True)
        for row in reader:
            if len(row) > MOST_COLUMNS:
                raise csv.Error(f"line {reader.line_num}: expected at most {MOST_COLUMNS:,} cells, got {len(row):,}")
            if any(map(str.strip, row)):
                found.append((reader.line_num, [cell.strip() for cell in row]))
    except (UnicodeDecodeError, csv.Error) as reason:
        raise ValueError(f"{os.fspath(path)}: cannot be read as CSV ({reason})") from None
    return found


def read_parquet_file(path: str | os.PathLike[str]) -> Any:
    """Return the pyarrow table in a Parquet file."""
    require("pyarrow", "scale")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, page_checksum_verification=True).read()
    except FileNotFoundError:
        raise ValueError(f"{os.fspath(path)}: no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{os.fspath(path)}: expected a file, got a folder") from None
    except (pa.ArrowException, OSError) as reason:
        said = " ".join(str(reason).split())[:SHOWN_CHARACTERS]
        raise ValueError(f"{os.fspath(path)}: cannot be read as Parquet ({said})") from None


def first_refusal(reason: ValidationError) -> str:
    """Return a text for the first problem that a schema found: the field, the expected value and the given value."""
    first = reason.errors()[0]
    field, got = ".".join(map(str, first["loc"])) or "content", repr(first["input"])
    got = got if len(got) <= SHOWN_CHARACTERS else f"{got[:SHOWN_CHARACTERS]}..."
    shown = "" if first["type"] in ("missing", "value_error") else f", got {got}"
    return " ".join(f"{field}: {first['msg'].removeprefix('Value error, ')}{shown}".split())


def file_to_write(path: str | os.PathLike[str]) -> FilePath:
    """Return the file that a write to a path creates or replaces: a symbolic link's target, else the path itself."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        pass
    except OSError as reason:
        raise ValueError(f"{os.fspath(path)}: cannot be written ({reason.strerror})") from None
    else:
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "special file")
            raise ValueError(f"expected a file to write, got the {kind} {os.fspath(path)}")
    return FilePath(os.path.realpath(path))


def write_json_file(content: BaseModel, path: str | os.PathLike[str], indent: int | None = 2) -> None:
    """Write the content as JSON, as `write_text_file` does."""
    write_text_file(content.model_dump_json(indent=indent) + "\n", path)


def write_text_file(text: str, path: str | os.PathLike[str]) -> None:
    """Write a file, compressed if its name ends in `.gz`. A reader sees the whole old file or the whole new file."""
    content = text.encode()
    if os.fspath(path).endswith(".gz"):
        content = gzip.compress(content, mtime=0)
    with whole_file(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[FilePath]:
    """Yield a temporary path to write to. The written file then replaces the file at `path`, with its permissions."""
    path, temporary = file_to_write(path), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        old = path.stat() if path.exists() else None
        place = path.with_name(f".{secrets.token_hex(8)}.tmp")  # short: `path.name` may have the greatest length
        os.close(os.open(place, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if old is None else 0o600))
        temporary = place
        yield place
        with open(place, "rb") as file:
            os.fsync(file.fileno())
        if old is not None:
            for owner in (-1, old.st_uid):  # the user may have no right to change the owner, so the group comes first
                with contextlib.suppress(PermissionError):
                    os.chown(place, owner, old.st_gid)
            os.chmod(place, stat.S_IMODE(old.st_mode))
        os.replace(place, path)
    except BaseException as reason:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if isinstance(reason, OSError):
            raise not_written(path, reason) from None
        raise


def not_written(path: str | os.PathLike[str], reason: OSError) -> OSError:
    """Return the error to raise for a file that cannot be written."""
    return OSError(f"{os.fspath(path)}: cannot be written ({reason.strerror or reason})")


def set_aside(path: FilePath) -> FilePath | None:
    """Rename a file to the next free numbered name, and return the new path. Return None if there is no file."""
    number = 1
    while os.path.lexists(path):
        aside = path.with_name(f"{path.name}.{number}")
        try:
            os.close(os.open(aside, os.O_CREAT | os.O_EXCL))
            os.replace(path, aside)
        except FileExistsError:
            number += 1
        except FileNotFoundError:  # another process renamed the file first
            aside.unlink()
        else:
            return aside
    return None


class HeldError(ValueError):
    """The error of a lock that is held. `holder` says in which file, who holds it, and since when."""

    def __init__(self, holder: str, message: str = "") -> None:
        super().__init__(message or holder)
        self.holder = holder


@contextlib.contextmanager
def locked(
    path: str | os.PathLike[str],
    name: str = LOCK_NAME,
    wait_s: float | None = None,
    old_s: float = math.inf,
) -> Iterator[None]:
    """Hold the lock of a file's folder; raise `HeldError` if another process holds the lock longer than `wait_s`.

    A lock of another host, which cannot be asked whether its process runs, is ignored after `old_s`.
    """
    # A thread may take the same lock several times. The system releases the lock when the process ends. If the file
    # system has no locks, a file `<name>.held` is the lock.
    from filelock import FileLock, SoftFileLock, Timeout  # loaded when first used

    place, wait_s = file_to_write(path).parent / name, LOCK_WAIT_S if wait_s is None else wait_s
    marker = place
    try:
        try:
            lock = FileLock(place, is_singleton=True, fallback_to_soft=False)
            lock.acquire(wait_s)
        except OSError as reason:
            if reason.errno not in _NO_LOCKS:
                raise
            marker = place.with_name(f"{name}.held")
            lock = SoftFileLock(marker, is_singleton=True)
            who, since_s = _holder(marker)
            if time.time() - since_s > old_s and not who.endswith(f" of {socket.gethostname()}"):
                marker.unlink(missing_ok=True)
            lock.acquire(wait_s)
    except Timeout:
        who, since_s = _holder(marker)
        since = f"since {local_time(since_s)}"
        killed = "" if marker is place else f"; if that process was killed, remove {marker}"
        raise HeldError(
            f"{marker}: {who} holds this lock {since}",
            f"{place.parent}: {who} measures for this folder or writes to this folder {since}; "
            f"try again after that process ends, or give another folder{killed}",
        ) from None
    except OSError as reason:
        raise not_written(place, reason) from None
    try:
        if marker is place:
            with contextlib.suppress(OSError):  # a full disk has no space for the text
                place.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
        yield
    finally:
        if lock.lock_counter == 1:  # a process that waits for the lock makes a new lock file
            place.unlink(missing_ok=True)
        lock.release()


def _holder(marker: FilePath) -> tuple[str, float]:
    """Return who holds a lock, and since when. The lock file contains the process id and the host."""
    who, since_s = "another process", time.time()
    with contextlib.suppress(OSError, ValueError):
        since_s = marker.stat().st_mtime
        pid, host = marker.read_text(errors="replace").split()[:2]
        who = f"process {pid} of {host}"
    return who, since_s


def local_time(seconds: float | None = None) -> str:
    """Return a time in seconds since 1970, by default the present, as a local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    return hashlib.sha256(_content_of(path)).hexdigest()
