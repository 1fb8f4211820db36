"""Sums over the rows of several products of columns, all in one loop on a CPU."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ._one_loop import in_one_loop


class Runs(NamedTuple):
    """So many neighbouring runs of so many rows are added first, row by row."""

    number: int
    rows: int


#: For products of a few operations and for long ones, as measured (docs/evaluation.md).
SHORT_LOOP, LONG_LOOP = Runs(8, 16), Runs(16, 8)


#: What runs add up to is made piece by piece where it takes more bytes, and of a piece it takes no more than
#: that: what is added to the columns of a program is then little, and nothing is asked of the system for it.
MOST_BYTES, PIECE_BYTES = 2**23, 2**20


def sums_of_rows(
    products: Callable[..., Sequence[jax.Array]], operands: Sequence[jax.Array], runs: Runs, takes_in: bool
) -> list[jax.Array]:
    """Return the sums of products of rows; runs of rows are added first, row by row."""
    columns, count, group = _flat(operands), _count(operands), runs.number * runs.rows
    whole = count - count % group
    if 0 < count - whole < group - runs.rows:  # each run is cut from as many rows, which start where it does
        whole -= group
    if whole <= 0:
        return [jnp.sum(product) for product in products(*columns)]
    add_runs = _runs_reduced if takes_in else _runs_in_one_loop
    totals = [jnp.sum(total) for total in add_runs(products, columns, whole, runs)]
    return _with_rest(totals, products, columns, whole)


def sums_of_pieces(
    products: Callable[..., Sequence[jax.Array]], operands: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return the sums of long products of rows, those of many rows piece by piece."""
    columns, count, group = _flat(operands), _count(operands), LONG_LOOP.number * LONG_LOOP.rows
    totals = jax.eval_shape(lambda *columns: [*map(jnp.sum, products(*columns))], *columns)
    added_bytes = sum(total.dtype.itemsize for total in totals) * count / LONG_LOOP.number
    pieces = math.ceil(added_bytes / PIECE_BYTES)
    size = (count - group) // (group * pieces) * group
    if added_bytes <= MOST_BYTES or size == 0:
        return sums_of_rows(products, operands, LONG_LOOP, takes_in=False)

    def add(piece: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        added = _runs_in_one_loop(products, columns, size, LONG_LOOP, piece * size)
        return [total + jnp.sum(own) for total, own in zip(totals, added, strict=True)]

    totals = jax.lax.fori_loop(0, pieces, add, [jnp.zeros((), total.dtype) for total in totals])
    return _with_rest(totals, products, columns, pieces * size)


def _flat(operands: Sequence[jax.Array]) -> list[jax.Array]:
    return [operand.reshape(-1) if operand.ndim else operand for operand in operands]


def _count(operands: Sequence[jax.Array]) -> int:
    return max(operand.size for operand in operands)


def _with_rest(
    totals: list[jax.Array], products: Callable, columns: Sequence[jax.Array], whole: int
) -> list[jax.Array]:
    """Return totals with the rows that are left after so many."""
    if whole == max(column.size for column in columns):
        return totals
    rest = products(*(column[whole:] if column.ndim else column for column in columns))
    return [total + jnp.sum(left) for total, left in zip(totals, rest, strict=True)]


def _runs_in_one_loop(
    products: Callable,
    columns: Sequence[jax.Array],
    whole: int,
    runs: Runs,
    first: jax.Array | int = 0,
) -> list[jax.Array]:
    """Return sums of neighbouring runs, however long the products are; of columns that are written out.

    Those of so many rows from the first on, as many as there are after it or fewer by a group of runs.
    """
    products = jax.jit(products)  # traced once, not for every run

    def run(column: jax.Array, place: int) -> jax.Array:
        if column.ndim == 0:
            return column
        if column.size == whole:
            return column.reshape(-1, *runs)[:, place]
        # Out of one slice for all runs the compiler makes a copy of the column.
        start = first + place * runs.rows
        return jax.lax.dynamic_slice_in_dim(column, start, whole).reshape(-1, *runs)[:, 0]

    def add(_, runs_of_columns: list[list[jax.Array]]) -> list[jax.Array]:
        addends = zip(*(products(*run_of_each) for run_of_each in runs_of_columns), strict=True)
        return [functools.reduce(jnp.add, addend) for addend in addends]

    return in_one_loop(add)((), [[run(column, place) for column in columns] for place in range(runs.number)])


def _runs_reduced(
    products: Callable, columns: Sequence[jax.Array], whole: int, runs: Runs
) -> list[jax.Array]:
    """Return sums of neighbouring runs, in a loop that may compute the columns too.

    The compiler makes vector code of it as long as it unrolls it, which what is long it does not.
    """
    cut = (column[:whole] if column.ndim else column for column in columns)
    grouped = [product.reshape(-1, *runs) for product in products(*cut)]
    zeros = [jnp.zeros((), group.dtype) for group in grouped]
    return jax.lax.reduce(grouped, zeros, lambda sums, runs: [*map(jnp.add, sums, runs)], (1,))
