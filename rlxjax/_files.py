"""Files on disk: all reading and writing that the library does.

A JSON file is whole and of its schema, or refused in one line.
"""

import csv
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

#: Of a value that is refused, for a message.
SHOWN_CHARACTERS = 80
#: What stands at a path where a file was expected.
_KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFIFO: "named pipe",
    stat.S_IFSOCK: "socket",
}

_Content = TypeVar("_Content", bound=BaseModel)


class Strict(BaseModel):
    """Base of the schemas: no conversions, no unknown fields, no changes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def read_json_file(
    path: str | os.PathLike[str],
    schema: type[_Content],
    versions: Mapping[str, int],
    error: type[ValueError],
    mend: str,
    what: str,
) -> _Content:
    """Return the validated content of a file, which is left as it was.

    Args:
        path: the file.
        schema: of its content.
        versions: the newest version that is known, by field.
        error: what is raised.
        mend: how to make a good file, for messages.
        what: what the file should be, for messages.

    Raises:
        ValueError: of the type given, one line with the file, the field and the mend: a file that is
            missing, truncated, of a newer version, or against the schema.
    """
    path = FilePath(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise error(f"{path}: no such file; {mend}") from None
    except (OSError, UnicodeDecodeError) as reason:
        raise error(f"{path}: cannot be read ({reason}); {mend}") from None
    try:
        content = json.loads(text)
    except json.JSONDecodeError as reason:
        raise error(
            f"{path}: line {reason.lineno}: not whole JSON ({reason.msg}); the file may be truncated: {mend}"
        ) from None
    except (ValueError, RecursionError) as reason:
        raise error(f"{path}: not {what} ({reason}); {mend}") from None
    if not isinstance(content, dict):
        raise error(f"{path}: expected a JSON object; {mend}")
    for field, known in versions.items():
        version = content.get(field)
        if isinstance(version, bool):
            raise error(f"{path}: {field}: expected {known}, got {version}; {mend}")
        if isinstance(version, int) and version > known:
            raise error(
                f"{path}: {field}: {version} is newer than {known}, the newest that this rlxjax reads; "
                "install a newer rlxjax"
            )
    try:
        return schema.model_validate(content)
    except ValidationError as reason:
        raise error(f"{path}: {first_refusal(reason)}; {mend}") from None


def read_csv_file(path: str | os.PathLike[str]) -> list[tuple[int, list[str]]]:
    """Return the lines of a CSV file that are not blank: the number of each, and its cells.

    Raises:
        ValueError: one line; a file that is missing, cannot be read, or is no CSV in UTF-8.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            return [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    except FileNotFoundError:
        raise ValueError(f"{os.fspath(path)}: no such file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as reason:
        raise ValueError(f"{os.fspath(path)}: cannot be read as CSV ({reason})") from None


def first_refusal(reason: ValidationError) -> str:
    """Return the first thing that a schema refused, in one line: the field, what was expected, what came."""
    first = reason.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or "content"
    said = first["msg"].removeprefix("Value error, ")
    got = repr(first["input"])
    got = got if len(got) <= SHOWN_CHARACTERS else f"{got[:SHOWN_CHARACTERS]}..."
    shown = "" if first["type"] in ("missing", "value_error") else f", got {got}"
    return " ".join(f"{field}: {said}{shown}".split())


def file_to_write(path: str | os.PathLike[str]) -> FilePath:
    """Return the file that writing to a path makes or replaces: of a symbolic link, its target.

    Raises:
        ValueError: one line; what is there is no regular file, or cannot be reached.
    """
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
    """Write a schema's content as JSON; see `write_text_file`."""
    write_text_file(content.model_dump_json(indent=indent) + "\n", path)


def write_text_file(text: str, path: str | os.PathLike[str]) -> None:
    """Write a file so that a reader sees either the old one or the new one, whole.

    Raises:
        ValueError: the path is that of a folder, a device or a named pipe.
        OSError: its folder cannot be made or written.
    """
    path = file_to_write(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        FilePath(temporary).unlink(missing_ok=True)
        raise


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    return hashlib.sha256(FilePath(path).read_bytes()).hexdigest()
