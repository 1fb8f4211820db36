"""What is asked of each row of a table: the columns that it needs, the columns that it gives, and one jitted program.

A row that cannot be evaluated has no answer; where there is such a row, the host finds the column and the reason.
"""

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from rlxjax._checks import MOST

#: Rows that are computed together: what a processor's cache holds, or what fills an accelerator; and rows that a
#: program is compiled for at least.
CHUNK_ROWS, ACCELERATOR_ROWS, LEAST_ROWS = 2048, 2**17, 2**14

#: A column of a batch, `[rows]`, without nulls.
Column = np.ndarray


class Field(NamedTuple):
    """One number, or one name, that a row has to have.

    Attributes:
        what: it is, for messages: "count".
        least: the smallest value.
        step: what a value is a multiple of; 0 for any.
        default: the value where a table has no such column; one without has to have it.
        names: where it is a name, those that it may be.
    """

    what: str
    least: float = 0.0
    step: int = 0
    default: float | str | None = None
    names: tuple[str, ...] = ()

    @property
    def harmless(self) -> float:
        """A value that every program takes, in place of one that it does not."""
        return 0.0 if self.names else max(self.least, self.step, 1.0)


#: From columns by field to the columns that are given, and whether each row has an answer.
Program = Callable[[Mapping[str, Array]], tuple[dict[str, Array], Array]]


@dataclasses.dataclass(frozen=True)
class RowProgram:
    """What is evaluated.

    Attributes:
        name: for messages and the manifest.
        identity: all that the answers depend on, as JSON.
        fields: what a row has to have, by name.
        outputs: the columns that it gives, by name: "float32", "bool", or for names the tuple of them.
        program: traced; columns as float64 or int64, `[rows]` each.
        check: refuses columns that no row has together, by a `ValueError`.
    """

    name: str
    identity: Mapping[str, Any]
    fields: Mapping[str, Field]
    outputs: Mapping[str, str | tuple[str, ...]]
    program: Program
    check: Callable[[Mapping[str, Column]], None] | None = None


def wanted_groups(want: Sequence[str] | None, groups: Mapping[str, Any], default: Sequence[str]) -> list[str]:
    """Return which groups of columns are asked for, in the order of `groups`."""
    chosen = [*(default if want is None else want)]
    if unknown := [name for name in chosen if name not in groups]:
        raise ValueError(f"want: expected some of {', '.join(groups)}, got {unknown[0]!r}")
    if not chosen:
        raise ValueError(f"want: expected some of {', '.join(groups)}, got none")
    return [name for name in groups if name in chosen]


def bad_rows(
    program: RowProgram, columns: dict[str, Column], nulls: Mapping[str, np.ndarray], source: Mapping[str, str]
) -> dict[int, str]:
    """Return the rows that cannot be evaluated, each with the reason; their values become harmless."""
    found: dict[int, str] = {}
    for name, values in columns.items():
        field, shown = program.fields[name], source.get(name, name)
        for row in nulls.get(name, ()):
            found.setdefault(int(row), f"{shown}: expected a {field.what}, got null")
        if field.names:
            continue
        for row in _wrong(values, field):
            found.setdefault(int(row), f"{shown}: {_expected(field, values[row])}, got {values[row]:g}")
    rows = np.fromiter(found, np.int64, len(found))
    for name in columns if rows.size else ():
        columns[name] = columns[name].copy()
        columns[name][rows] = program.fields[name].harmless
    if program.check is not None:
        _check(program.check, columns, np.arange(len(next(iter(columns.values())))), found)
    return found


def _expected(field: Field, value: Any) -> str:
    if value > MOST:
        return f"expected a {field.what} of at most 2**64"
    multiple = f", a multiple of {field.step}" if field.step else ""
    return f"expected a {field.what} of at least {field.least:g}{multiple}"


def _wrong(values: Column, field: Field) -> np.ndarray:
    """Return the rows whose value a field cannot have."""
    with np.errstate(invalid="ignore"):
        wrong = ~((values >= field.least) & (values <= MOST))
        return np.flatnonzero(wrong | (values % field.step != 0) if field.step else wrong)


def _check(check: Callable, columns: Mapping[str, Column], rows: np.ndarray, found: dict[int, str]) -> None:
    """Find the rows that a check refuses, by halves."""
    try:
        check({name: values[rows] for name, values in columns.items()})
    except ValueError as refusal:
        if len(rows) > 1:
            for half in np.array_split(rows, 2):
                _check(check, columns, half, found)
            return
        row = int(rows[0])
        found.setdefault(row, str(refusal))


class Compiled:
    """A row program on all devices of this process, compiled once for each of few numbers of rows."""

    def __init__(self, program: RowProgram, devices: Sequence[Any] | None = None) -> None:
        self._program, self._lock = program, threading.Lock()
        self._mesh = Mesh(np.array(jax.local_devices() if devices is None else devices), ("rows",))
        self._compiled: dict[Any, Any] = {}

    def __call__(self, columns: Mapping[str, Column]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the answers, and whether each row has one, `[rows]` each."""
        n_rows = len(next(iter(columns.values())))
        share = -(-n_rows // self._mesh.size)
        filled = self._mesh.size * max(LEAST_ROWS, 1 << (share - 1).bit_length())
        if filled != n_rows:
            columns = {name: np.pad(values, (0, filled - n_rows), "edge") for name, values in columns.items()}
        with jax.enable_x64(True):
            if self._mesh.size > 1:
                columns = jax.device_put(columns, NamedSharding(self._mesh, PartitionSpec("rows")))
            answers, is_answer = self._of(columns)(columns)
            return {name: np.asarray(own)[:n_rows] for name, own in answers.items()}, np.asarray(is_answer)[:n_rows]

    def _of(self, columns: Mapping[str, Any]) -> Callable:
        """Return what is compiled for columns of these types and this length."""
        key = tuple((name, values.dtype, values.shape) for name, values in columns.items())
        with self._lock:
            if key not in self._compiled:
                is_cpu = self._mesh.devices.flat[0].platform == "cpu"
                run: Any = functools.partial(_in_chunks, self._program, CHUNK_ROWS if is_cpu else ACCELERATOR_ROWS)
                if self._mesh.size > 1:
                    rows = PartitionSpec("rows")
                    run = jax.shard_map(run, mesh=self._mesh, in_specs=rows, out_specs=rows, check_vma=False)
                self._compiled[key] = jax.jit(run).lower(columns).compile()
            return self._compiled[key]


def _in_chunks(program: RowProgram, most: int, columns: Mapping[str, Array]) -> Any:
    n_rows = len(next(iter(columns.values())))  # a power of two
    chunks = jax.tree.map(lambda column: column.reshape(-1, min(most, n_rows)), columns)
    return jax.tree.map(jnp.ravel, jax.lax.map(functools.partial(_judged, program), chunks))


def _judged(program: RowProgram, columns: Mapping[str, Array]) -> tuple[dict[str, Array], Array]:
    """Return the answers, and whether each row has one: of values that a field cannot have there is none."""
    answers, is_answer = program.program(columns)
    for name, values in columns.items():
        field = program.fields[name]
        if values.dtype.kind == "f":
            is_answer &= (values >= field.least) & (values <= MOST)
        elif not field.names:
            is_answer &= values >= math.ceil(field.least)
        if field.step:
            is_answer &= values % field.step == 0
    return answers, is_answer
