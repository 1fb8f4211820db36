"""What is checked where values enter: readable on the host or not, sizes, signs, shapes.

Nothing can be said of a traced value; every check passes it.
"""

import operator
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.core
import numpy as np

from ._typing import RealLike

#: Least value of each size of a workload.
LEAST_SIZES: Mapping[str, int] = MappingProxyType({"batch": 0, "n_fft": 2, "k": 1, "n_segments": 1})


def is_traced(*values: object) -> bool:
    """Whether any of the values is being traced by a JAX transformation."""
    return any(isinstance(value, jax.core.Tracer) for value in values)


def check_at_least(value: RealLike, name: str, least: float = 0, what: str = "count") -> None:
    """Refuse NaN and numbers below `least`.

    Raises:
        ValueError: with the first such number.
    """
    if is_traced(value):
        return
    flat = np.asarray(value).reshape(-1)
    if flat.dtype.kind not in "biufO":
        raise ValueError(f"{name}: expected a {what}, got {value!r}")
    bad = [not number >= least for number in flat] if flat.dtype == object else ~(flat >= least)
    if np.any(bad):
        raise ValueError(f"{name}: expected a {what} of at least {least}, got {flat[np.argmax(bad)]}")


def check_positive(value: RealLike, name: str) -> None:
    """Refuse NaN, zero and negative numbers."""
    if not is_traced(value) and not np.all(np.asarray(value) > 0):
        raise ValueError(f"{name}: expected positive numbers, got {value}")


def check_sizes(**sizes: RealLike) -> None:
    """Refuse sizes of a workload below their least value, an odd n_fft, and shapes that do not agree.

    Args:
        **sizes: any of `batch`, `n_fft`, `k`, `n_segments`.
    """
    for name, value in sizes.items():
        check_at_least(value, name, LEAST_SIZES[name], "size")
    n_fft = sizes.get("n_fft")
    if n_fft is not None and not is_traced(n_fft) and np.any(np.asarray(n_fft) % 2):
        raise ValueError(f"n_fft: expected an even number, got {n_fft}")
    check_shapes(**sizes)


def check_shapes(**values: RealLike) -> None:
    """Refuse shapes that do not broadcast, naming each."""
    shapes = {name: np.shape(value) for name, value in values.items()}
    try:
        np.broadcast_shapes(*shapes.values())
    except ValueError:
        shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items() if shape)
        raise ValueError(f"expected shapes that broadcast together, got {shown}") from None


def as_index(value: object, name: str, *, at_least: int = 0) -> int:
    """Return a Python integer, or say what was expected."""
    try:
        number = operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise ValueError(f"{name}: expected an integer, got {value!r}") from None
    if number < at_least:
        raise ValueError(f"{name}: expected an integer of at least {at_least}, got {number}")
    return number
