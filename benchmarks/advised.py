"""The stages of the `rlxjax advise` example in docs/functions.md."""

import jax
import jax.numpy as jnp


def scale(x: jax.Array) -> jax.Array:
    """Return numbers between -1 and 1."""
    return 0.5 * x + 0.1


def energy(y: jax.Array) -> jax.Array:
    """Return the energy of each row."""
    return jnp.sum(y * y, axis=-1)


def waves(x: jax.Array) -> jax.Array:
    """Return the sines of a table."""
    return jnp.sin(x)


def look_up(table: jax.Array) -> jax.Array:
    """Return a quarter of a million entries of a table."""
    return table[jnp.arange(1 << 18) * 7919 & (len(table) - 1)]
