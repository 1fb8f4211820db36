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


def check_at_least(value: Any, name: str, least: float = 0, what: str = "count", most: float = MOST) -> None:
    """Raise `ValueError` unless every number is between `least` and `most`."""
    if is_traced(value):
        return
    flat = _numbers(value, name, what)
    if flat.size and not _minimum(flat) >= least:
        bad = next(number for number in flat.tolist() if not number >= least)
        raise ValueError(f"{name}: expected a {what} of at least {least}, got {bad}")
    _check_at_most(flat, name, what, most)


def check_positive(value: Any, name: str, what: str = "number") -> None:
    """Raise `ValueError` unless every number is positive."""
    if is_traced(value):
        return
    flat = _numbers(value, name, f"positive {what}")
    if flat.size and not _minimum(flat) > 0:
        bad = next(number for number in flat.tolist() if not number > 0)
        raise ValueError(f"{name}: expected a positive {what}, got {bad:g}")
    _check_at_most(flat, name, what, MOST)


def _check_at_most(flat: np.ndarray, name: str, what: str, most: float) -> None:
    if flat.size and flat.dtype.kind not in "biu" and not float(flat.max()) <= most:
        raise ValueError(f"{name}: expected a {what} of at most {most:.4g}, got {flat.max():.4g}")


def check_not_nan(value: Any, name: str) -> None:
    """Raise `ValueError` if NumPy arrays or Python numbers contain NaN; JAX arrays are not checked."""
    if isinstance(value, jax.Array) or is_traced(value):
        return
    flat = _numbers(value, name, "number")
    if flat.dtype.kind == "f" and flat.size and math.isnan(_minimum(flat)):
        raise ValueError(f"{name}: expected numbers, got NaN")


def _minimum(flat: np.ndarray) -> float:
    """Return the smallest of the numbers, found in one pass; NaN if any number is NaN."""
    with np.errstate(invalid="ignore"):
        return flat.min().item() if flat.dtype != object else min(flat)


def _numbers(value: Any, name: str, what: str) -> np.ndarray:
    try:
        flat = np.asarray(value).reshape(-1)
    except ValueError as error:
        raise ValueError(f"{name}: expected a {what}, got {value!r} ({error})") from None
    is_number = flat.dtype.kind in "biuf" or str(flat.dtype) == "bfloat16"
    if not is_number and not (flat.dtype == object and all(isinstance(number, int) for number in flat)):
        raise ValueError(f"{name}: expected a {what}, got {value!r}")
    return flat


def check_shapes(**values: Any) -> None:
    """Raise `ValueError` if the shapes do not broadcast together."""
    shapes = {name: np.shape(value) for name, value in values.items()}
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
        number = operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise ValueError(f"{name}: expected an integer, got {value!r}") from None
    if number < at_least:
        raise ValueError(f"{name}: expected an integer of at least {at_least}, got {number}")
    return number
