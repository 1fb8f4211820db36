"""What products and conversions of `jax.experimental.sparse` run: their primitives do not hand out their JAX code."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import sparse


def _dot(data: Any, indices: Any, right: Any, *, dimension_numbers: Any, lhs_spinfo: Any, **_: Any) -> Any:
    """Read what elements meet on the right side, multiply, and add up where the results lie."""
    (contracted, contracted_right), (batched, batched_right) = dimension_numbers
    shape, met = lhs_spinfo.shape, (*batched_right, *contracted_right)
    places = *shape[: indices.ndim - 2], indices.shape[-2]
    batch = [lax.broadcasted_iota(indices.dtype, places, axis) for axis in range(len(places) - 1)]
    at = [*batch, *jnp.moveaxis(indices, -1, 0)]
    kept = [axis for axis in range(right.ndim) if axis not in met]
    left = [*batched, *(axis for axis in range(len(shape)) if axis not in (*batched, *contracted))]
    where = tuple(at[axis] for axis in (*batched, *contracted))
    read = right.transpose(*met, *kept).at[where].get(mode="fill", fill_value=0)
    read = jnp.expand_dims(read, tuple(range(len(places), data.ndim)))
    products = jnp.expand_dims(data, tuple(range(data.ndim, data.ndim + len(kept)))) * read
    if not (where := tuple(at[axis] for axis in left if axis < len(at))):
        return products.sum(tuple(range(len(places))))
    result = jnp.zeros([*(shape[axis] for axis in left), *(right.shape[axis] for axis in kept)], products.dtype)
    return result.at[where].add(products)


def _bcoo(parts: Any, shape: Any, spinfo: Any) -> Any:
    """Return a sparse matrix by coordinates: of its rows and columns, or of elements that are stored row by row."""
    if spinfo is None:
        return sparse.BCSR(parts, shape=shape).to_bcoo()
    data, *places = parts
    return sparse.BCOO((data, jnp.stack(places, -1)), shape=spinfo.shape)


def _bcsr_dot(*operands: Any, dimension_numbers: Any, lhs_spinfo: Any, **_: Any) -> Any:
    matrix = _bcoo(operands[:3], lhs_spinfo.shape, None)
    return sparse.bcoo_dot_general(matrix, operands[3], dimension_numbers=dimension_numbers)


def _product(*operands: Any, transpose: bool, shape: Any = None, spinfo: Any = None) -> Any:
    matrix = _bcoo(operands[:3], shape, spinfo)
    return (matrix.T if transpose else matrix) @ operands[3]


def _dense(*parts: Any, shape: Any = None, spinfo: Any = None) -> Any:
    return _bcoo(parts, shape, spinfo).todense()


def _found(matrix: Any, **options: Any) -> Any:
    found = sparse.BCOO.fromdense(matrix, **options)
    return found.data, *found.indices.T


def _found_by_rows(matrix: Any, **options: Any) -> Any:
    found = sparse.BCSR.fromdense(matrix, **options)
    return found.data, found.indices, found.indptr


#: By the name of the primitive.
PROGRAMS: Mapping[str, Callable[..., Any]] = {
    "bcoo_dot_general": _dot,
    "bcsr_dot_general": _bcsr_dot,
    **dict.fromkeys(("coo_matvec", "coo_matmat", "csr_matvec", "csr_matmat"), _product),
    **dict.fromkeys(("coo_todense", "csr_todense"), _dense),
    "coo_fromdense": _found,
    "csr_fromdense": _found_by_rows,
}
