"""Whether two results are the same but for rounding, and how they differ."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def difference(one: Any, other: Any) -> str:
    """Return how two results differ, in a few words; nothing if they are the same but for rounding.

    Floating-point numbers may differ by the square root of their dtype's precision, of the largest in their array.
    """
    (mine, structure), (others, structure_of_other) = jax.tree.flatten(one), jax.tree.flatten(other)
    if structure != structure_of_other:
        return f"{structure_of_other} instead of {structure}"
    for number, (left, right) in enumerate(zip(mine, others, strict=True)):
        of = f"array {number}" if len(mine) > 1 else "the array"
        if jnp.shape(left) != jnp.shape(right) or jnp.result_type(left) != jnp.result_type(right):
            kinds = [f"{jnp.result_type(own)}{list(jnp.shape(own))}" for own in (left, right)]
            return f"{of} is {kinds[1]} instead of {kinds[0]}"
        dtype = jnp.result_type(left)
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        expected, got = np.asarray(left), np.asarray(right)
        if jnp.issubdtype(dtype, jnp.inexact):
            wide = np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else np.float64
            expected, got = expected.astype(wide), got.astype(wide)
            largest = np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected))
            most = math.sqrt(float(jnp.finfo(dtype).eps)) * float(largest)
            if not np.allclose(got, expected, rtol=0.0, atol=most, equal_nan=True):
                is_finite = np.isfinite(got) & np.isfinite(expected)
                off = np.max(np.abs(np.where(is_finite, got, 0.0) - np.where(is_finite, expected, 0.0)), initial=0.0)
                return f"{of} is off by {off:.2g}, where {most:.2g} is rounding"
        elif not np.array_equal(expected, got):
            return f"{of} has other values"
    return ""
