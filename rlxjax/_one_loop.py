"""All outputs of a table in one loop over its rows, where the compiler would write a loop for each."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def in_one_loop(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f` with all its outputs computed in one loop on a CPU; elsewhere, `f`.

    XLA's CPU compiler writes a loop for each output array, and reads or computes again what several outputs
    need. It writes one loop for a reduction with several results, whatever goes into it. So every row is
    held twice along a new last axis, and what comes out is the maximum of two equal numbers: the same to
    the last bit. The compiler sees that they are equal, and nothing is computed twice. Derivatives are those
    of `f`.

    Args:
        f: `f(shared, rows)` returns arrays, each of whose rows depends on the same row of `rows` alone, up to
            broadcasting. `shared` is used as it is.
    """

    def one_loop(shared: Any, rows: Any) -> Any:
        outputs, structure = jax.tree.flatten(f(shared, jax.tree.map(_twice, rows)))
        return structure.unflatten(_once([jnp.asarray(output) for output in outputs]))

    @jax.custom_jvp
    def call(shared: Any, rows: Any) -> Any:
        if all(jnp.ndim(leaf) == 0 for leaf in jax.tree.leaves(rows)):
            return f(shared, rows)
        return jax.lax.platform_dependent(shared, rows, cpu=one_loop, default=f)

    @call.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
        return jax.jvp(f, primals, tangents)

    return functools.wraps(f)(call)


def _twice(leaf: jax.Array | float) -> jax.Array:
    leaf = jnp.asarray(leaf)
    return jnp.broadcast_to(leaf[..., None], (*leaf.shape, 2)) if leaf.ndim else leaf


def _once(outputs: list[jax.Array]) -> list[jax.Array]:
    """Return outputs without their last axis, those of one shape by one reduction."""
    once = list(outputs)
    floats = {output.dtype for output in outputs if jnp.issubdtype(output.dtype, jnp.floating)}
    widest = jnp.result_type(*floats) if floats else None
    for shape in {output.shape for output in outputs} - {()}:
        places = [place for place, output in enumerate(outputs) if output.shape == shape]
        # Compilers want floats of one precision in a reduction; the way there and back changes no value.
        arrays = [
            outputs[place].astype(widest) if outputs[place].dtype in floats else outputs[place]
            for place in places
        ]
        results = jax.lax.reduce(
            arrays, [_least(array.dtype) for array in arrays], _maxima, (len(shape) - 1,)
        )
        for place, result in zip(places, results, strict=True):
            once[place] = result.astype(outputs[place].dtype)
    return once


def _maxima(first: list[jax.Array], second: list[jax.Array]) -> list[jax.Array]:
    return [jax.lax.max(x, y) for x, y in zip(first, second, strict=True)]


def _least(dtype: jnp.dtype) -> jax.Array:
    if dtype.kind == "b":
        return jnp.asarray(False)
    return jnp.asarray(jnp.iinfo(dtype).min if dtype.kind in "iu" else -jnp.inf, dtype)
