"""Shapes of arrays that no test has to allocate."""

import functools

import jax
import jax.numpy as jnp


def _shaped(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


real, whole, complex_, flags = (
    functools.partial(_shaped, dtype) for dtype in (jnp.float32, jnp.int32, jnp.complex64, jnp.bool_)
)
