"""Arguments of functions that are timed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: Whole numbers that stand for shapes lie below this, so that they index whatever has as many rows.
INTEGERS = 100


def filled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with arrays in the place of shapes, at random and the same each time.

    Floating-point and complex numbers are normal, integers are from 0 to 99, booleans and random keys are drawn.
    """
    rng = np.random.default_rng(0)
    return jax.block_until_ready(jax.tree.map(lambda arg: _array(arg, rng), args))


def _array(arg: Any, rng: np.random.Generator) -> Any:
    if not isinstance(arg, jax.ShapeDtypeStruct):
        return arg
    shape, dtype = arg.shape, arg.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        found = jax.random.split(jax.random.key(0), shape) if shape else jax.random.key(0)
    elif jnp.issubdtype(dtype, jnp.complexfloating):
        parts = rng.standard_normal((2, *shape))
        found = jnp.asarray(parts[0] + 1j * parts[1], dtype)
    elif jnp.issubdtype(dtype, jnp.floating):
        found = jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)
    elif dtype == jnp.bool_:
        found = jnp.asarray(rng.integers(0, 2, shape), dtype)
    else:
        most = min(INTEGERS, int(jnp.iinfo(dtype).max) + 1)
        found = jnp.asarray(rng.integers(0, most, shape)).astype(dtype)
    return found if arg.sharding is None else jax.device_put(found, arg.sharding)
