"""Arguments of functions to time: shapes, dtypes, and random values that are valid."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Draw:
    """An argument: its shape and dtype, and the values that are valid for it.

    `values` is "normal", "positive" (0.5 to 1.5), "definite" (symmetric positive definite matrices) or "key"
    (of a random generator). Integers are uniform from 0 to `below` less 1.
    """

    shape: tuple[int, ...]
    dtype: Any = np.float32
    values: str = "normal"
    below: int = 0

    def abstract(self) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype that JAX traces."""
        if self.values == "key":
            return jax.eval_shape(lambda: jax.random.key(0))
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def array(self, rng: np.random.Generator) -> jax.Array:
        """Return a random array."""
        if self.values == "key":
            return jax.random.key(int(rng.integers(2**31)))
        if self.below:
            drawn = rng.integers(self.below, size=self.shape)
        elif self.values == "positive":
            drawn = rng.random(self.shape, np.float32) + 0.5
        else:
            drawn = rng.standard_normal(self.shape, np.float32)
        if self.values == "definite":  # the symmetric part has no eigenvalue much beyond -sqrt(2)
            drawn = (drawn + np.swapaxes(drawn, -1, -2)) / (2 * np.sqrt(self.shape[-1])) + 2 * np.eye(self.shape[-1])
        if np.issubdtype(self.dtype, np.complexfloating):
            drawn = drawn + 1j * rng.standard_normal(self.shape, np.float32)
        return jnp.asarray(drawn.astype(self.dtype))
