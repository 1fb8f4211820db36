"""Files of rows: which there are, whether all of them can be read, and the parts that they are read in."""

import dataclasses
import glob
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ._rows import Field

#: Rows of a part: what is done again where a job was stopped.
PART_ROWS = 2**22


class Part(NamedTuple):
    """Neighbouring row groups of one file.

    Attributes:
        name: of the file that is written for it, by what it holds.
        file: the file it is read from.
        first_group: the first row group.
        groups: how many.
        first_row: the place of its first row in the file.
        rows: how many.
        keys: the values of the columns that stand in the file's path.
    """

    name: str
    file: str
    first_group: int
    groups: int
    first_row: int
    rows: int
    keys: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Source:
    """Files of rows of one schema.

    Attributes:
        schema: of every file.
        keys: the columns that stand in the files' paths, as in `year=2026/`.
        files: by path, a digest of what each holds.
        rows: of all of them.
    """

    schema: pa.Schema
    keys: pa.Schema
    files: Mapping[str, str]
    rows: int


def source_of(given: Any, without: FilePath) -> tuple[Source, list[Part]]:
    """Return what files, globs and folders hold, and its parts; every footer is read, no row.

    Args:
        given: a path, a glob, a folder, or several of them.
        without: a folder whose files are not to be read.

    Raises:
        ValueError: no file, one that is damaged or no Parquet, one of another schema, or no rows; one line.
    """
    fragments, keys = _fragments(given, without)
    schema: pa.Schema | None = None
    first, files, parts, rows = "", {}, [], 0
    for path, own_keys in fragments:
        metadata, own = _footer(path)
        if schema is None:
            schema, first = own, path
        elif problem := _difference(schema, own):
            raise ValueError(f"{path}: {problem}, as {first} has it")
        files[path] = _digest_of(path, metadata)
        parts += _parts(path, metadata, files[path], own_keys)
        rows += metadata.num_rows
    assert schema is not None
    if not rows:
        raise ValueError(f"{first}: expected rows, got none" + (f" in {len(files)} files" if len(files) > 1 else ""))
    if twice := [name for name in keys.names if name in schema.names]:
        raise ValueError(f"{first}: {twice[0]}: expected a column or a part of the path, got both")
    return Source(schema, keys, files, rows), parts


def _fragments(given: Any, without: FilePath) -> tuple[list[tuple[str, dict[str, Any]]], pa.Schema]:
    """Return the files, each with the values that stand in its path, and the types of these."""
    several = [given] if isinstance(given, str | os.PathLike) else list(given)
    found: list[tuple[str, dict[str, Any]]] = []
    keys = pa.schema([])
    for one in map(os.fspath, several):
        if os.path.isdir(one):
            import pyarrow.dataset  # as long as JAX takes to compile: only where it is needed

            data = pyarrow.dataset.dataset(one, format="parquet", partitioning="hive")
            own = [
                (fragment.path, pyarrow.dataset.get_partition_keys(fragment.partition_expression))
                for fragment in _sorted(data, one)
                if not FilePath(fragment.path).is_relative_to(without)
            ]
            found += own
            for name in own[0][1] if own else ():
                keys = keys.append(data.schema.field(name)) if name not in keys.names else keys
            continue
        paths = sorted(glob.glob(one, recursive=True)) if glob.has_magic(one) and not os.path.exists(one) else [one]
        found += [(path, {}) for path in paths if not os.path.isdir(path)]
    if not found:
        raise ValueError(f"{', '.join(map(os.fspath, several)) or 'source'}: expected Parquet files, found none")
    for path, own in found:
        if set(own) != set(keys.names):
            raise ValueError(f"{path}: expected {', '.join(keys.names)} in its path, as others have")
    if len({os.path.realpath(path) for path, _ in found}) < len(found):
        raise ValueError(f"{', '.join(map(os.fspath, several))}: names a file twice")
    return found, keys


def _sorted(data: Any, folder: str) -> Iterator[Any]:
    try:
        yield from sorted(data.get_fragments(), key=lambda fragment: fragment.path)
    except (pa.ArrowException, OSError) as reason:
        raise ValueError(f"{folder}: {said(reason)}") from None


def _footer(path: str) -> tuple[Any, pa.Schema]:
    try:
        with pq.ParquetFile(path) as file:
            return file.metadata, file.schema_arrow.remove_metadata()
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (pa.ArrowException, OSError) as reason:
        raise ValueError(f"{path}: cannot be read as Parquet ({said(reason)})") from None


def said(reason: BaseException) -> str:
    """Return what pyarrow says of a file, in one short line."""
    return " ".join(str(reason).split())[:160].rstrip(".")


def _difference(schema: pa.Schema, own: pa.Schema) -> str | None:
    for name in dict.fromkeys([*schema.names, *own.names]):
        first, other = (one.field(name).type if name in one.names else None for one in (schema, own))
        if first != other:
            expected = "no such column" if first is None else str(first)
            return f"{name}: expected {expected}, got {'no such column' if other is None else other}"
    return None


def _digest_of(path: str, metadata: Any) -> str:
    """Return a digest of a file's size and footer, in which each row group's place, size and extremes stand."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        file.seek(max(0, size - metadata.serialized_size - 8))
        return hashlib.sha256(f"{size} ".encode() + file.read()).hexdigest()


def _parts(path: str, metadata: Any, digest: str, keys: Mapping[str, Any]) -> Iterator[Part]:
    counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    begin = first_row = 0
    while begin < len(counts):
        end, rows = begin + 1, counts[begin]
        while end < len(counts) and rows + counts[end] <= PART_ROWS:
            rows += counts[end]
            end += 1
        if rows:
            yield Part(f"{digest[:16]}-{begin:05d}", path, begin, end - begin, first_row, rows, dict(keys))
        begin, first_row = end, first_row + rows


def columns_of(
    source: Source, fields: Mapping[str, Field], given: Mapping[str, str] | None, outputs: Sequence[str], file: str
) -> tuple[dict[str, str], list[str]]:
    """Return the column of each field that has one, and the columns that are carried along.

    Args:
        source: the files.
        fields: that a row has.
        given: the column of some of them, where it has another name.
        outputs: names of the columns that are added.
        file: for messages.

    Raises:
        ValueError: an unknown field, a missing column, one of a type that is no number or name, or a carried column of
            the name of one that is added; one line with file, row group and column.
    """
    given = dict(given or {})
    if unknown := [name for name in given if name not in fields]:
        raise ValueError(f"columns: expected fields among {', '.join(fields)}, got {unknown[0]!r}")
    everything, where = {*source.schema.names, *source.keys.names}, f"{file}, row group 0"
    columns = {}
    for name, field in fields.items():
        column = given.get(name, name)
        if column in everything:
            columns[name] = column
            types = source.schema if column in source.schema.names else source.keys
            _check_type(types.field(column).type, field, f"{where}: {column}")
        elif field.default is None or name in given:
            of = "" if column == name else f" (for {name})"
            raise ValueError(f"{where}: {column}{of}: no such column; columns: {', '.join(sorted(everything))}")
    carried = [name for name in (*source.schema.names, *source.keys.names) if name not in columns.values()]
    if taken := [name for name in carried if name in outputs]:
        raise ValueError(f"{where}: {taken[0]}: a column of this name is to be added; rename it, or ask for less")
    return columns, carried


def _check_type(type_: pa.DataType, field: Field, where: str) -> None:
    is_text = pa.types.is_string(type_) or pa.types.is_large_string(type_)
    if field.names:
        if is_text or (pa.types.is_dictionary(type_) and pa.types.is_string(type_.value_type)):
            return
        raise ValueError(f"{where}: expected names, got {type_}")
    if not (pa.types.is_integer(type_) or pa.types.is_floating(type_)):
        raise ValueError(f"{where}: expected integers or floats, got {type_}; cast it first")
