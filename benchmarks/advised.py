"""The stages of the `rlxjax advise` example in docs/functions.md."""

import jax
import jax.numpy as jnp


def scale(x: jax.Array) -> jax.Array:
    """Return numbers between -1 and 1."""
    return 0.5 * x + 0.1


def energy(y: jax.Array) -> jax.Array:
    """Return the energy of each row."""
    return jnp.sum(y * y, axis=-1)
