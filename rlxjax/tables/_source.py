"""Find and check the input files of a job, and divide their rows into parts."""

import dataclasses
import glob
import hashlib
import io
import os
import re
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, LocalFileSystem

from ._ray import said
from ._rows import Field

#: The largest number of rows in a part, unless a row group is larger. A resumed job repeats unfinished parts.
PART_ROWS = 2**22
#: The compression of written files.
COMPRESSION = "zstd"


class Part(NamedTuple):
    """A part of a job: consecutive row groups of one file."""

    name: str  # of the written file: the part's number and a digest of the input
    file: str
    first_group: int
    groups: int  # number of row groups
    first_row: int  # index in the file
    rows: int  # number of rows


@dataclasses.dataclass(frozen=True)
class Source:
    """The input files of a job. All files have the same schema."""

    schema: pa.Schema  # after `read_as`
    keys: Mapping[str, Mapping[str, str | None]]  # by path, the texts of its `name=value` folders
    files: Mapping[str, str]  # by path, a digest of the file
    rows: int  # in all files

    def key_type(self, name: str, field: Field | None = None) -> pa.DataType:
        """Return a key's type: text for a field of names, int64 for integers, float64 for other fields, else text."""
        paths = {text: path for path, own in self.keys.items() if (text := own[name]) is not None}
        if field is not None and field.names:
            return pa.string()
        if all(re.fullmatch("-?[0-9]+", text) and -(2**63) <= int(text) < 2**63 for text in paths):
            return pa.int64()
        for text in paths if field is not None else ():
            try:
                pa.scalar(text).cast(pa.float64())
            except pa.ArrowInvalid:
                raise ValueError(f"{paths[text]}: {name}: expected a number in the path, got {text!r}") from None
        return pa.string() if field is None else pa.float64()


def source_of(given: Any, own: Sequence[FilePath]) -> tuple[Source, list[Part]]:
    """Return the source that files, globs and folders name, and its parts. The job's `own` paths are left out."""
    schema: pa.Schema | None = None
    first, keys, files, parts, rows = "", {}, {}, [], 0
    for path in _paths(given, own):
        keys[path] = _keys(path)
        metadata, found = _footer(path)
        if schema is None:
            schema, first = found, path
        elif problem := _difference(schema, found):
            raise ValueError(f"{path}: {problem}; all files need the columns of {first}")
        if odd := keys[path].keys() ^ keys[first].keys():
            has, lacks = (path, first) if (name := min(odd)) in keys[path] else (first, path)
            raise ValueError(f"{lacks}: expected a folder {name}=... in the path, as in {has}")
        files[path] = digest_of_file(path, metadata)
        parts += _parts(path, metadata, files[path][:16])
        rows += metadata.num_rows
    assert schema is not None
    if not rows:
        raise ValueError(f"{first}: expected rows, got none" + (f" in {len(files)} files" if len(files) > 1 else ""))
    if twice := [name for name in keys[first] if name in schema.names]:
        raise ValueError(f"{first}: {twice[0]}: expected a column or a folder of the path, got both")
    width = max(5, len(str(len(parts) - 1)))  # the names sort in the order of the parts
    named = [part._replace(name=f"part-{place:0{width}d}-{part.name}") for place, part in enumerate(parts)]
    return Source(schema, keys, files, rows), named


def _paths(given: Any, own: Sequence[FilePath]) -> Iterator[str]:
    """Yield the files that paths, globs and folders name, in order. The files that the job writes are left out."""
    several = [given] if isinstance(given, str | os.PathLike) else list(given)
    written, found, skips = [os.path.realpath(path) for path in own], set(), False
    for one in map(os.fspath, several):
        named = sorted(glob.glob(one, recursive=True)) if glob.has_magic(one) and not os.path.exists(one) else [one]
        for path in dict.fromkeys(path for name in named for path in _files_of(name)):
            real = os.path.realpath(path)
            if any(real == place or real.startswith(place + os.sep) for place in written):
                if path == one:
                    raise ValueError(f"{path}: expected a file to read, got a file that the job writes")
                skips = True
                continue
            if real in found:
                raise ValueError(f"{', '.join(map(os.fspath, several))}: expected each file once, got {path} twice")
            found.add(real)
            yield path
    if not found:
        named = ", ".join(map(os.fspath, several)) or "source"
        raise ValueError(f"{named}: expected Parquet files, found none" + " except those that the job writes" * skips)


def _files_of(path: str) -> list[str]:
    """Return the file, or the files in a folder and its subfolders, without names that begin with `.` or `_`."""
    if not os.path.isdir(path):
        return [path]
    found = [one.path for one in LocalFileSystem().get_file_info(FileSelector(path, recursive=True)) if one.is_file]
    return sorted(one for one in found if not any(name[0] in "._" for name in FilePath(one).relative_to(path).parts))


def _keys(path: str) -> dict[str, str | None]:
    """Return a dict from name to value for the folders `name=value` in the absolute path of a file."""
    found: dict[str, str | None] = {}
    try:
        path.encode()
        for folder in FilePath(os.path.abspath(path)).parts[:-1]:
            name, equals, value = folder.partition("=")
            name, text = (urllib.parse.unquote(part, errors="strict") for part in (name, value))
            if name in found and equals:
                raise ValueError(f"{path}: expected one folder {name}=... in its path, got two")
            if name and equals:
                found[name] = None if value == "__HIVE_DEFAULT_PARTITION__" else text
    except UnicodeError:
        raise ValueError(f"{path!a}: expected a path in UTF-8") from None
    return found


def _footer(path: str) -> tuple[Any, pa.Schema]:
    try:
        with pq.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow.remove_metadata()
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (pa.ArrowException, OSError) as reason:
        raise ValueError(f"{path}: cannot be read as Parquet ({said(reason)})") from None
    if twice := [name for name, count in Counter(schema.names).items() if count > 1]:
        raise ValueError(f"{path}: expected columns of different names, got {twice[0]!r} twice")
    # pyarrow cannot select rows of view types, so a view is read as plain strings or bytes.
    views = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    fields = []
    for field in schema:
        own = field.type.storage_type if isinstance(field.type, pa.BaseExtensionType) else field.type
        fields.append(field.with_type(views.get(own, field.type)).with_nullable(True))
    return metadata, pa.schema(fields)


def read_as(column: Any, type_: Any) -> Any:
    """Return a column, cast to a type if the column has another type."""
    if column.type == type_:
        return column
    return (column.storage if isinstance(column, pa.ExtensionArray) else column).cast(
        type_
    )  # an extension's cast is wrong


def unreadable(files: Iterable[str], columns: Sequence[str], why: BaseException, groups: Sequence[int] = ()) -> str:
    """Return a message that names the first unreadable row group and column in files. `groups` limits the search."""
    for file in files:
        place = file
        try:
            with pq.ParquetFile(file, page_checksum_verification=True) as whole:
                for group in groups or range(whole.num_row_groups):
                    for column in columns:
                        place = f"{file}, row group {group}: {column}"
                        whole.read_row_group(group, [column])
        except (pa.ArrowException, OSError) as reason:
            return f"{place}: cannot be read ({said(reason)})"
    return f"{', '.join(files)}: cannot be read ({said(why)})"


def _difference(schema: pa.Schema, own: pa.Schema) -> str | None:
    for name in dict.fromkeys([*schema.names, *own.names]):
        first, other = (one.field(name).type if name in one.names else None for one in (schema, own))
        if first != other:
            expected = "no such column" if first is None else str(first)
            return f"{name}: expected {expected}, got {'no such column' if other is None else other}"
    return None


def digest_of_file(path: str, metadata: Any) -> str:
    """Return a digest of the size, the modification time and the footer of a file."""
    with open(path, "rb") as file:
        known = os.fstat(file.fileno())
        file.seek(max(0, known.st_size - metadata.serialized_size - 8))
        return hashlib.sha256(f"{known.st_size} {known.st_mtime_ns} ".encode() + file.read()).hexdigest()


def _parts(path: str, metadata: Any, name: str) -> Iterator[Part]:
    counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    begin = first_row = 0
    while begin < len(counts):
        end, rows = begin + 1, counts[begin]
        while end < len(counts) and rows + counts[end] <= PART_ROWS:
            rows += counts[end]
            end += 1
        if rows:
            yield Part(f"{name}-{begin:05d}", path, begin, end - begin, first_row, rows)
        begin, first_row = end, first_row + rows


def ends_of_groups(part: Part) -> np.ndarray:
    """Return, for each row group in a part, the number of the part's rows up to the end of the row group."""
    metadata = pq.read_metadata(part.file)
    groups = range(part.first_group, part.first_group + part.groups)
    return np.cumsum([metadata.row_group(group).num_rows for group in groups])


def columns_of(
    source: Source,
    fields: Mapping[str, Field],
    given: Mapping[str, str] | None,
    outputs: Sequence[str] = (),
    keeps_fields: bool = False,
) -> tuple[dict[str, str], list[str], dict[str, Any]]:
    """Return a dict from field to column, the columns that the output keeps, and a dict from each key to its type."""
    given, file = dict(given or {}), next(iter(source.files))
    if unknown := [name for name in given if name not in fields]:
        raise ValueError(f"columns: expected fields among {', '.join(fields)}, got {unknown[0]!r}")
    keys = source.keys[file]
    everything, where = [*source.schema.names, *keys], f"{file}, row group 0"
    columns, types = {}, {}
    for name, field in fields.items():
        column = given.get(name, name)
        if column not in everything:
            if field.default is None or name in given:
                of = "" if column == name else f" (for {name})"
                raise ValueError(f"{where}: {column}{of}: no such column; columns: {', '.join(sorted(everything))}")
            continue
        columns[name] = column
        if column in keys and not field.is_list:
            types[column] = source.key_type(column, field)
        else:
            type_ = pa.string() if column in keys else source.schema.field(column).type
            _check_type(type_, field, f"{where}: {column}")
    carried = [name for name in everything if keeps_fields or name not in columns.values()]
    if taken := [name for name in carried if name in outputs]:
        raise ValueError(f"{where}: {taken[0]}: the output adds a column of this name; rename yours")
    return columns, carried, {name: source.key_type(name) for name in keys} | types


def _check_type(type_: pa.DataType, field: Field, where: str) -> None:
    if field.names:
        text = type_.value_type if pa.types.is_dictionary(type_) else type_
        if pa.types.is_string(text) or (pa.types.is_large_string(text) and text is type_):
            return
        raise ValueError(f"{where}: expected names, got {type_}")
    is_list = pa.types.is_list(type_) or pa.types.is_large_list(type_)
    of = type_.value_type if field.is_list and is_list else type_
    if is_list != field.is_list or not (pa.types.is_integer(of) or pa.types.is_floating(of)):
        wanted = f"{'lists of ' if field.is_list else ''}integers or floats"
        raise ValueError(f"{where}: expected {wanted}, got {type_}; cast the column first")


def check_carried(source: Source, carried: Sequence[str]) -> None:
    """Raise a ValueError if pyarrow cannot write the type of a column that the output keeps."""
    for field in source.schema:
        try:
            if field.name in carried:
                one = pa.Table.from_arrays([pa.nulls(1, field.type)], schema=pa.schema([field]))
                pq.write_table(one.filter(pa.array([True])).take([0]), io.BytesIO(), compression=COMPRESSION)
        except pa.ArrowException as reason:
            file = next(iter(source.files))
            raise ValueError(f"{file}: {field.name}: pyarrow cannot write {field.type} ({said(reason)})") from None
