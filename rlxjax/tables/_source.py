"""Files of rows: which there are, whether all of them can be read, and the parts that they are read in."""

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

#: Rows of a part: what is done again where a job was stopped.
PART_ROWS = 2**22
#: How files are compressed.
COMPRESSION = "zstd"


class Part(NamedTuple):
    """Neighbouring row groups of one file."""

    name: str  # of the file that is written for it, by its place in the job and what it holds
    file: str
    first_group: int
    groups: int  # how many
    first_row: int  # its place in the file
    rows: int  # how many


@dataclasses.dataclass(frozen=True)
class Source:
    """Files of rows of one schema."""

    schema: pa.Schema  # as it is read
    keys: Mapping[str, Mapping[str, str | None]]  # by path, texts of the `name=value` folders that lead there
    files: Mapping[str, str]  # by path, a digest of what each holds
    rows: int  # of all files

    def key_type(self, name: str, field: Field | None = None) -> pa.DataType:
        """Return the type of a key of paths: text of names; else int64 where all are, of a number float64, and text."""
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
    """Return what files, globs and folders hold but those `own` of the job, and its parts; footers are read, no row."""
    schema: pa.Schema | None = None
    first, keys, files, parts, rows = "", {}, {}, [], 0
    for path in _paths(given, own):
        keys[path] = _keys(path)
        metadata, found = _footer(path)
        if schema is None:
            schema, first = found, path
        elif problem := _difference(schema, found):
            raise ValueError(f"{path}: {problem}, as {first} has it")
        if odd := keys[path].keys() ^ keys[first].keys():
            has, lacks = (path, first) if (name := min(odd)) in keys[path] else (first, path)
            raise ValueError(f"{lacks}: expected a folder {name}=... in its path, as {has} has it")
        files[path] = digest_of_file(path, metadata)
        parts += _parts(path, metadata, files[path][:16])
        rows += metadata.num_rows
    assert schema is not None
    if not rows:
        raise ValueError(f"{first}: expected rows, got none" + (f" in {len(files)} files" if len(files) > 1 else ""))
    if twice := [name for name in keys[first] if name in schema.names]:
        raise ValueError(f"{first}: {twice[0]}: expected a column or a folder of the path, got both")
    width = max(5, len(str(len(parts) - 1)))  # so that names sort as parts do
    named = [part._replace(name=f"part-{place:0{width}d}-{part.name}") for place, part in enumerate(parts)]
    return Source(schema, keys, files, rows), named


def _paths(given: Any, own: Sequence[FilePath]) -> Iterator[str]:
    """Yield the files of paths, globs and folders in their order, but those that are written."""
    several = [given] if isinstance(given, str | os.PathLike) else list(given)
    written, found, skips = [os.path.realpath(path) for path in own], set(), False
    for one in map(os.fspath, several):
        named = sorted(glob.glob(one, recursive=True)) if glob.has_magic(one) and not os.path.exists(one) else [one]
        for path in dict.fromkeys(path for name in named for path in _files_of(name)):
            real = os.path.realpath(path)
            if any(real == place or real.startswith(place + os.sep) for place in written):
                if path == one:
                    raise ValueError(f"{path}: expected a file to read, got one that is written")
                skips = True
                continue
            if real in found:
                raise ValueError(f"{', '.join(map(os.fspath, several))}: names a file twice: {path}")
            found.add(real)
            yield path
    if not found:
        named = ", ".join(map(os.fspath, several)) or "source"
        raise ValueError(f"{named}: expected Parquet files, found none" + " but those that are written" * skips)


def _files_of(path: str) -> list[str]:
    """Return the files of a folder and its folders, but those whose names begin with `.` or `_`; or the file."""
    if not os.path.isdir(path):
        return [path]
    found = [one.path for one in LocalFileSystem().get_file_info(FileSelector(path, recursive=True)) if one.is_file]
    return sorted(one for one in found if not any(name[0] in "._" for name in FilePath(one).relative_to(path).parts))


def _keys(path: str) -> dict[str, str | None]:
    """Return the `name=value` folders that lead to a file, from the root on, so that no way to name it loses one."""
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
    # Of views pyarrow takes no rows: they are read as what they hold.
    views = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    fields = []
    for field in schema:
        own = field.type.storage_type if isinstance(field.type, pa.BaseExtensionType) else field.type
        fields.append(field.with_type(views.get(own, field.type)).with_nullable(True))
    return metadata, pa.schema(fields)


def read_as(column: Any, type_: Any) -> Any:
    """Return a column as the type that it is read as."""
    if column.type == type_:
        return column
    return (column.storage if isinstance(column, pa.ExtensionArray) else column).cast(type_)  # pyarrow's own is wrong


def unreadable(files: Iterable[str], columns: Sequence[str], why: BaseException, groups: Sequence[int] = ()) -> str:
    """Return where the first row group and column is that cannot be read, in files or in some groups of one."""
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
    """Return a digest of a file's size, time of change and footer, which other rows of the same extremes have too."""
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
    """Return how many rows of a part come before the end of each of its row groups."""
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
    """Return the column of each field that has one, the columns that are carried along, and the types of path keys."""
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
        raise ValueError(f"{where}: {taken[0]}: a column of this name is to be added; rename it, or ask for less")
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
        raise ValueError(f"{where}: expected {wanted}, got {type_}; cast it first")


def check_carried(source: Source, carried: Sequence[str]) -> None:
    """Refuse a column of a type of which pyarrow cannot take or write rows: one line."""
    for field in source.schema:
        try:
            if field.name in carried:
                one = pa.Table.from_arrays([pa.nulls(1, field.type)], schema=pa.schema([field]))
                pq.write_table(one.filter(pa.array([True])).take([0]), io.BytesIO(), compression=COMPRESSION)
        except pa.ArrowException as reason:
            file = next(iter(source.files))
            raise ValueError(f"{file}: {field.name}: {field.type} cannot be carried along ({said(reason)})") from None
