"""Inputs that are lists of sizes, one list per run. Their columns are `[*batch, entries]`, padded with zeros.

If a run has several lists, entry i of every list describes part i of the work. A zero means no work. All lists are
padded to the same length, a power of two, so that lists of another length seldom compile a program again.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rlxjax._checks import check_shapes, unmasked
from rlxjax._numerics import namespace_of


def batch_shape(entry: Any, column: Any) -> tuple[Any, ...]:
    """Return the shape `[*batch]` of an input's column: the column's shape, without the axis of a list's entries.

    Examples:
        >>> from rlxjax.fit import Input
        >>> batch_shape(Input("rows"), np.ones((3, 4))), batch_shape(Input("bytes", is_list=True), np.ones((3, 4)))
        ((3, 4), (3,))
    """
    shape = np.shape(column)
    return shape[: len(shape) - entry.is_list]


def as_lists(entries: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs by name. Inputs that are lists become arrays `[*batch, entries]`, all with the same last axis.

    Args:
        entries: the inputs of a model by name, each an `Input`.
        values: the values of some inputs by name. Numbers stay unchanged. Give lists as an array `[*batch, entries]`;
            as a list of numbers, for a single run; or as a list of lists, for many runs. The number 0 is an empty list.

    Raises:
        ValueError: the lists within a run differ in length, or a value is not a list of numbers.

    Examples:
        >>> from rlxjax.fit import Input
        >>> as_lists({"bytes": Input("bytes", is_list=True)}, {"bytes": [[1, 2, 3], [4]]})["bytes"].tolist()
        [[1.0, 2.0, 3.0, 0.0], [4.0, 0.0, 0.0, 0.0]]
    """
    names = [name for name, entry in entries.items() if entry.is_list and name in values]
    if not names:
        return dict(values)
    found = {name: _list(name, values[name]) for name in names}
    lengths = {name: own for name, (_, own) in found.items()}
    check_shapes(**lengths)
    for place, said in unequal_lists(lengths).items():
        raise ValueError(f"run {', '.join(map(str, place))}: {said}" if place else said)
    most = width(max(column.shape[-1] for column, _ in found.values()))
    return {**values, **{name: widened_lists(column, most) for name, (column, _) in found.items()}}


def _list(name: str, value: Any) -> tuple[Any, Any]:
    """Return lists as an array `[*batch, entries]`, and the number of entries in each list before padding."""
    given = value = unmasked(value, name)
    if not isinstance(value, jax.Array):
        try:
            value = np.asarray(given)
        except ValueError:  # the lists differ in length
            value = np.asarray(given, object)
    if value.dtype == object:
        try:
            rows = [np.asarray(row, np.float64) for row in np.ravel(value)]
            lengths = np.array([len(row) for row in rows], int)
            column = stacked_lists(np.concatenate([*rows, ()]), lengths)
            return column.reshape(*value.shape, column.shape[1]), lengths.reshape(value.shape)
        except (TypeError, ValueError):
            raise ValueError(f"{name}: expected a list of numbers for each run, got {given!r:.60}") from None
    if not value.ndim and not (isinstance(value, np.ndarray) and value == 0):
        value = value.reshape(1)
    if not value.ndim or not value.shape[-1]:
        return np.zeros((*value.shape[:-1], 1)), np.zeros(value.shape[:-1], int)
    return value, np.asarray(value.shape[-1])


def unequal_lists(lengths: Mapping[str, np.ndarray]) -> dict[tuple[int, ...], str]:
    """Return error messages by run index, one message for each run whose nonempty lists differ in length."""
    each = np.stack(np.broadcast_arrays(*lengths.values()), -1)
    wrong = np.argwhere(((each > 0) & (each != each.max(-1, keepdims=True))).any(-1)).tolist()
    said = {place: zip(lengths, each[place].tolist(), strict=True) for place in map(tuple, wrong)}
    return {
        place: f"expected lists of the same length, got {' and '.join(f'{name} of length {own}' for name, own in of)}"
        for place, of in said.items()
    }


def stacked_lists(entries: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return lists as rows, `[n, width]`, padded with zeros. `entries` joins all lists; `lengths` are their lengths."""
    rows = np.zeros((len(lengths), width(int(lengths.max(initial=1)))), entries.dtype)
    rows[np.arange(rows.shape[1]) < lengths[:, None]] = entries
    return rows


def width(count: int) -> int:
    """Return the padded length of a list with `count` entries: the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def widened_lists(column: Any, most: int) -> Any:
    """Return a column with the last axis padded with zeros to the length `most`."""
    more = most - np.shape(column)[-1]
    return namespace_of(column).pad(column, [(0, 0)] * (np.ndim(column) - 1) + [(0, more)]) if more else column


def columns_of(entries: Mapping[str, Any], names: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the column of each named input. Each row gives the sizes of a run by name; a missing size becomes NaN."""
    columns = {name: [row.get(name, np.nan) for row in rows] for name in names}
    lists = [name for name in columns if name in entries and entries[name].is_list]
    numbers = {name: np.array(column, float) for name, column in columns.items() if name not in lists}
    own = {name: [*map(np.atleast_1d, columns[name])] or np.zeros((0, 1)) for name in lists}  # without runs, no list
    return as_lists(entries, columns | numbers | own)


def places_of(column: Any) -> np.ndarray:
    """Return, for each value (a number or a list) in a column, its index among the sorted distinct values, `[n]`."""
    column = np.asarray(column)
    return np.unique(column, axis=0 if column.ndim > 1 else None, return_inverse=True)[1].reshape(-1)


def size_text(value: Any) -> str:
    """Return a size as text. The text of a list shows the entries without the padding.

    Examples:
        >>> size_text(256.0), size_text([8.0, 2.5, 0.0, 0.0])
        ('256', '[8 2.5]')
    """
    if not np.ndim(value):
        return f"{value:g}"
    return f"[{' '.join(f'{entry:g}' for entry in np.trim_zeros(np.asarray(value), 'b'))}]"
