"""Checks of the sizes, signs and shapes that a user gives. A check of values accepts every traced value."""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

#: The largest time, count or rate that is accepted.
MOST = 2.0**64


def is_traced(*values: object) -> bool:
    """Whether a JAX transformation is tracing any of the values."""
    return any(isinstance(value, jax.core.Tracer) for value in values)


def is_on_device(value: object, kind: jax.typing.DTypeLike) -> bool:
    """Whether the value is an untraced JAX array with at least one axis and a dtype of the given kind."""
    if is_traced(value) or not isinstance(value, jax.Array):
        return False
    return value.ndim > 0 and jnp.issubdtype(value.dtype, kind)


def unmasked(value: Any, name: str) -> Any:
    """Return a value in which nothing is masked. A masked array without masked elements becomes a plain array."""
    if isinstance(value, (list, tuple)):
        is_nested = any(isinstance(item, (np.ma.MaskedArray, list, tuple)) for item in value)
        return [unmasked(item, name) for item in value] if is_nested else value
    if not isinstance(value, np.ma.MaskedArray):
        return value
    if np.ma.is_masked(value):
        raise ValueError(f"{name}: expected plain numbers, got a masked array; use .filled(...) or .compressed()")
    return np.asarray(value)


def real_numbers(value: Any, name: str, what: str = "number", is_flag: bool = False) -> Any:
    """Return real numbers as an array. All numbers of a user enter here; traced values pass unchanged.

    Raises:
        ValueError: an element is masked, or is no integer and no real float: a boolean (unless it is a flag), a complex
            number, a text, bytes, a date or another object.
    """
    if type(value) in (int, float):
        return np.asarray(value)
    if is_traced(value):
        return value
    try:
        array = np.asarray(unmasked(value, name))
    except ValueError as error:
        known = str(error).startswith(f"{name}: ")
        raise error if known else ValueError(f"{name}: expected a {what}, got {_shown(value)} ({error})") from None
    is_number = (
        array.dtype.kind in "iuf" or (is_flag and array.dtype == bool) or jnp.issubdtype(array.dtype, jnp.floating)
    )
    if not is_number and not (array.dtype == object and all(type(number) is int for number in array.flat)):
        raise ValueError(f"{name}: expected a {what}, got {_shown(value)}")
    return array


def _shown(value: object) -> str:
    return " ".join(repr(value).split())[:80]


def check_real(**values: Any) -> None:
    """Raise `ValueError` unless all values are real numbers or booleans; JAX arrays are not read."""
    for name, value in values.items():
        if not isinstance(value, jax.Array):
            real_numbers(value, name, is_flag=True)


def check_at_least(
    value: Any, name: str, least: float = 0, what: str = "count", most: float = MOST, is_flag: bool = False
) -> None:
    """Raise `ValueError` unless every number is between `least` and `most`."""
    if is_traced(value):
        return
    flat = real_numbers(value, name, what, is_flag).reshape(-1)
    if flat.size and not _minimum(flat) >= least:
        bad = next(number for number in flat.tolist() if not number >= least)
        raise ValueError(f"{name}: expected a {what} of at least {least}, got {bad}")
    _check_at_most(flat, name, what, most)


def check_positive(value: Any, name: str, what: str = "number") -> None:
    """Raise `ValueError` unless every number is positive."""
    if is_traced(value):
        return
    flat = real_numbers(value, name, f"positive {what}").reshape(-1)
    if flat.size and not _minimum(flat) > 0:
        bad = next(number for number in flat.tolist() if not number > 0)
        raise ValueError(f"{name}: expected a positive {what}, got {bad:g}")
    _check_at_most(flat, name, what, MOST)


def _check_at_most(flat: np.ndarray, name: str, what: str, most: float) -> None:
    if flat.size and flat.dtype.kind not in "biu" and not float(flat.max()) <= most:
        raise ValueError(f"{name}: expected a {what} of at most {most:.4g}, got {flat.max():.4g}")


def check_not_nan(value: Any, name: str, is_flag: bool = False) -> None:
    """Raise `ValueError` if NumPy arrays or Python numbers contain NaN; JAX arrays are not checked."""
    if isinstance(value, jax.Array) or is_traced(value):
        return
    flat = real_numbers(value, name, "number", is_flag).reshape(-1)
    if flat.dtype.kind == "f" and flat.size and math.isnan(_minimum(flat)):
        raise ValueError(f"{name}: expected numbers, got NaN")


def _minimum(flat: np.ndarray) -> float:
    """Return the smallest of the numbers, found in one pass; NaN if any number is NaN."""
    with np.errstate(invalid="ignore"):
        return flat.min().item() if flat.dtype != object else min(flat)


def check_shapes(**values: Any) -> None:
    """Raise `ValueError` if the shapes do not broadcast together."""
    shapes = {name: np.shape(unmasked(value, name)) for name, value in values.items()}
    try:
        broadcast_shape(*shapes.values())
    except ValueError:
        shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items() if shape)
        raise ValueError(f"expected shapes that broadcast together, got {shown}") from None


def broadcast_shape(*shapes: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shape to which several shapes broadcast; sizes may be symbols of `jax.export`."""
    try:
        return np.broadcast_shapes(*shapes)
    except TypeError:
        return jnp.broadcast_shapes(*shapes)


def is_symbolic(size: object) -> bool:
    """Whether a size is a symbol of `jax.export`. Code that compares symbols may raise an error."""
    return not isinstance(size, (int, np.integer))


def fields_of(record: object, prefix: str = "") -> dict[str, Any]:
    """Return a dict of the numeric fields of a dataclass by name, for `check_shapes`."""
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}  # pyright: ignore
    return {prefix + name: value for name, value in values.items() if name != "provenance"}


def as_index(value: object, name: str, *, at_least: int = 0) -> int:
    """Return the value as a Python integer; raise `ValueError` if the value is not an integer or is too small."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise ValueError(f"{name}: expected an integer, got {value!r}") from None
    if number < at_least:
        raise ValueError(f"{name}: expected an integer of at least {at_least}, got {number}")
    return number
