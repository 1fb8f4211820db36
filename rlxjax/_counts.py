"""Exact integer counts on the host, and their conversion to floats."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ._checks import check_positive, is_traced, real_numbers
from ._typing import Count

#: The largest count. A larger count becomes this number, as in the reference implementation.
MAX_COUNT = 2**64 - 1

#: A count, or an array of counts (a column), as a user gives it.
Columns: TypeAlias = Count | Sequence[Any]

_NARROWED = ("int32", "uint32")


def saturate(count: int) -> int:
    """Return the smaller of `count` and `2**64 - 1`."""
    return min(count, MAX_COUNT)


def is_exact(value: object) -> bool:
    """Whether the value is an untraced integer or an untraced array of integers."""
    if is_traced(value):
        return False
    if isinstance(value, int):
        return True
    dtype = value.dtype if isinstance(value, jax.Array) else np.asarray(value).dtype
    return np.issubdtype(dtype, np.integer)


def exact(value: Columns) -> int | np.ndarray:
    """Return a count as a Python integer, and a column of counts as an array of Python integers."""
    if isinstance(value, int):
        return value
    array = np.asarray(value)
    return int(array) if array.ndim == 0 else array.astype(object)


def packed(value: int | np.ndarray) -> int | np.ndarray:
    """Return exact counts as int64 or uint64, or as float64 if neither type can hold every count."""
    if isinstance(value, int) or value.dtype == np.int64:
        return value
    least, most = (int(value.min()), int(value.max())) if value.size else (0, 0)
    return value.astype(_type_of(least, most) or np.float64)


def _type_of(least: int, most: int) -> type[np.integer] | None:
    """Return a 64-bit integer type that can hold every number from `least` to `most`; None if there is no such type."""
    types = [dtype for dtype in (np.int64, np.uint64) if np.iinfo(dtype).min <= least and most <= np.iinfo(dtype).max]
    return types[0] if types else None


def difference(before: Columns, after: Columns, name: str) -> Count:
    """Return `before - after`: exact if both are integers on the host, else in floating point."""
    if is_exact(before) and is_exact(after):
        saved = _difference_in_64_bits(np.asarray(before), np.asarray(after))
        return packed(exact(before) - exact(after) if saved is None else saved)
    if isinstance(before, jax.Array) or isinstance(after, jax.Array):
        return as_float(before, name) - as_float(after, name)
    first, second = _held_float(before, name), _held_float(after, name)
    if isinstance(first, float) and isinstance(second, float):
        return first - second
    with np.errstate(over="ignore", invalid="ignore"):
        return _narrowed(np.asarray(first - second))


def _difference_in_64_bits(before: np.ndarray, after: np.ndarray) -> np.ndarray | None:
    """Return the exact difference of two columns, or None if the difference may need more than 64 bits."""
    is_column = before.ndim > 0 or after.ndim > 0
    if not is_column or not before.size or not after.size or object in (before.dtype, after.dtype):
        return None
    dtype = _type_of(int(before.min()) - int(after.max()), int(before.max()) - int(after.min()))
    return None if dtype is None else np.subtract(before, after, dtype=dtype, casting="unsafe")


def as_float(value: Columns, name: str) -> jax.Array | np.ndarray | float:
    """Return a count or a real number as a float. Integers and float64 NumPy arrays get JAX's default precision."""
    if isinstance(value, (int, float)):
        return _held_float(value, name)
    if isinstance(value, jax.core.Tracer):
        dtype = value.dtype
        if jnp.issubdtype(dtype, jnp.floating):
            return jnp.asarray(value)
        weak = getattr(value, "weak_type", False)
        if jnp.result_type(int) == jnp.int32 and dtype.name in _NARROWED and not weak:
            raise ValueError(
                f"{name}: expected a float count inside traced code, got {dtype.name}, to which JAX narrows 64-bit "
                "integers; convert counts before tracing (`benefit.astype(float)`), or turn jax_enable_x64 on"
            )
        return jnp.asarray(value, jnp.result_type(float))
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating):
        return value
    held = _held_float(value, name)
    return _narrowed(held) if isinstance(held, np.ndarray) else held


def size_as_float(value: Columns, name: str) -> jax.Array | np.ndarray | float:
    """Return a size (batch, n_fft or k) as a float. Unlike a count, a size may be a traced 32-bit integer."""
    if isinstance(value, jax.core.Tracer) and jnp.issubdtype(value.dtype, jnp.integer):
        return jnp.asarray(value, jnp.result_type(float))
    return as_float(value, name)


def as_temperature(value: Columns, name: str = "temperature_ns") -> jax.Array | np.ndarray | float:
    """Check that a temperature is positive, and return it as a float."""
    check_positive(value, name)
    return as_float(value, name)


def _held_float(value: Columns, name: str) -> np.ndarray | float:
    """Return numbers on the host as floats; numbers that are not floats become float64."""
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    array = real_numbers(value, name, is_flag=True)
    return array if array.dtype.kind == "f" else array.astype(np.float64)


def _narrowed(array: np.ndarray) -> jax.Array:
    """Return a NumPy array of floats as a JAX array. A float64 array gets JAX's default precision."""
    return jnp.asarray(array, None if array.dtype != np.float64 else jnp.result_type(float))
