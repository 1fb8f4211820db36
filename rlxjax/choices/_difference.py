"""Whether two results are the same but for rounding, and how they differ."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._rounding import distance, own_part, rounding_moves

#: Results of two programs may lie so many times as far apart as either of them moves by rounding.
MOVES = 16.0


def difference(one: Any, other: Any, calls: Sequence[Callable[[], Any]] = ()) -> str:
    """Return how two results differ, in a few words; nothing if they are the same but for rounding.

    Each floating-point number may differ by the square root of its dtype's precision, times its own size. Where it
    differs by more, and where other numbers differ at all, it counts how far rounding moves it in either program.
    """
    (mine, structure), (others, structure_of_other) = jax.tree.flatten(one), jax.tree.flatten(other)
    if structure != structure_of_other:
        return f"{structure_of_other} instead of {structure}"
    moves: list[Any] | None = None
    for number, (left, right) in enumerate(zip(mine, others, strict=True)):
        of = f"array {number}" if len(mine) > 1 else "the array"
        if jnp.shape(left) != jnp.shape(right) or jnp.result_type(left) != jnp.result_type(right):
            kinds = [f"{jnp.result_type(own)}{list(jnp.shape(own))}" for own in (left, right)]
            return f"{of} is {kinds[1]} instead of {kinds[0]}"
        dtype, expected, got = jnp.result_type(left), own_part(left), own_part(right)
        off, is_float = distance(got, expected), jnp.issubdtype(dtype, jnp.inexact)
        most = np.zeros(off.shape)
        if is_float:
            size = np.where(np.isfinite(expected), np.abs(expected), 0.0)
            most = math.sqrt(float(jnp.finfo(dtype).eps)) * size
        if (off <= most).all():
            continue
        if moves is None:
            both = [_moves(*own) for own in zip(calls, (mine, others), strict=False)]
            moves = [sum(own) for own in zip(*both, strict=True)]
        if moves:
            most = np.maximum(most, MOVES * moves[number])
        if not (is_wrong := ~(off <= most)).any():
            continue
        if not is_float:
            return f"{of} has other values"
        worst = np.unravel_index(np.argmax(np.where(is_wrong, off / np.maximum(most, 1e-300), -1.0)), off.shape)
        where = f" at {list(map(int, worst))}" if expected.shape == jnp.shape(left) and expected.ndim else ""
        return f"{of} is off by {off[worst]:.2g}{where}, where {most[worst]:.2g} is rounding"
    return ""


def _moves(call: Callable[[], Any], results: Sequence[Any]) -> list[np.ndarray]:
    """Return how far rounding moves results; not at all where JAX cannot trace what gives them."""
    try:
        return rounding_moves(call, results)
    except Exception:  # noqa: BLE001 - a user's program may raise anything
        return [np.zeros(own_part(one).shape) for one in results]
