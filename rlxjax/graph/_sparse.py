"""What products and conversions of `jax.experimental.sparse` run: their primitives do not hand out their JAX code."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax


def _dot(data: Any, indices: Any, right: Any, *, numbers: Any, shape: Any) -> Any:
    """Read what elements meet on the right side, multiply, and add up where the results lie."""
    (contracted, contracted_right), (batched, batched_right) = numbers
    places = *shape[: indices.ndim - 2], indices.shape[-2]
    batch = [lax.broadcasted_iota(indices.dtype, places, axis) for axis in range(len(places) - 1)]
    at = [*batch, *jnp.moveaxis(indices, -1, 0)]
    met = *batched_right, *contracted_right
    kept = [axis for axis in range(right.ndim) if axis not in met]
    left = [*batched, *(axis for axis in range(len(shape)) if axis not in (*batched, *contracted))]
    read = (
        right.transpose(*met, *kept)
        .at[tuple(at[axis] for axis in (*batched, *contracted))]
        .get(mode="fill", fill_value=0)
    )
    read = jnp.expand_dims(read, tuple(range(len(places), data.ndim)))
    products = jnp.expand_dims(data, tuple(range(data.ndim, data.ndim + len(kept)))) * read
    if not (where := tuple(at[axis] for axis in left if axis < len(at))):
        return products.sum(tuple(range(len(places))))
    result = jnp.zeros([*(shape[axis] for axis in left), *(right.shape[axis] for axis in kept)], products.dtype)
    return result.at[where].add(products)


def _bcoo(data: Any, indices: Any, right: Any, *, dimension_numbers: Any, lhs_spinfo: Any, **_: Any) -> Any:
    return _dot(data, indices, right, numbers=dimension_numbers, shape=lhs_spinfo.shape)


def _bcsr(data: Any, indices: Any, starts: Any, right: Any, **params: Any) -> Any:
    return _bcoo(data, jnp.stack([_rows(indices, starts), indices], -1), right, **params)


def _coo(
    data: Any, row: Any, column: Any, right: Any, *, transpose: bool, shape: Any = None, spinfo: Any = None
) -> Any:
    numbers = ((0 if transpose else 1,), (0,)), ((), ())
    return _dot(data, jnp.stack([row, column], -1), right, numbers=numbers, shape=shape or spinfo.shape)


def _rows(indices: Any, starts: Any) -> Any:
    """Return the rows of elements that are stored row by row, `[*batch, elements]`."""
    batch = [lax.broadcasted_iota(starts.dtype, starts.shape, axis) for axis in range(starts.ndim - 1)]
    return jnp.cumsum(jnp.zeros_like(indices).at[(*batch, starts)].add(1), axis=-1) - 1


def _dense(data: Any, row: Any, column: Any, *, shape: Any = None, spinfo: Any = None) -> Any:
    return jnp.zeros(shape or spinfo.shape, data.dtype).at[row, column].add(data)


def _found(matrix: Any, *, nse: int, index_dtype: Any) -> Any:
    """Return the elements of a dense matrix that are not 0, and their places; zeros where there are less."""
    row, column = jnp.nonzero(matrix, size=nse)
    data = jnp.where(jnp.arange(nse) < (matrix != 0).sum(), matrix[row, column], 0)
    return data, row.astype(index_dtype), column.astype(index_dtype)


def _by_rows(matrix: Any, **params: Any) -> Any:
    data, row, column = _found(matrix, **params)
    ends = jnp.cumsum(jnp.bincount(row, length=matrix.shape[0]))
    return data, column, jnp.pad(ends, (1, 0)).astype(column.dtype)


#: By the name of the primitive.
PROGRAMS: Mapping[str, Callable[..., Any]] = {
    "bcoo_dot_general": _bcoo,
    "bcsr_dot_general": _bcsr,
    **dict.fromkeys(("coo_matvec", "coo_matmat"), _coo),
    **dict.fromkeys(
        ("csr_matvec", "csr_matmat"), lambda data, at, *b, **params: _coo(data, _rows(at, b[0]), at, *b[1:], **params)
    ),
    "coo_todense": _dense,
    "csr_todense": lambda data, at, starts, **params: _dense(data, _rows(at, starts), at, **params),
    "coo_fromdense": _found,
    "csr_fromdense": _by_rows,
}
