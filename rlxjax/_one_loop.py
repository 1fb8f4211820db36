"""All outputs of a table in one loop over its rows; the compiler would write one for each."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

#: Whether XLA takes barriers away before it writes loops: later ones write an array for each.
_BARRIERS_END = jax.__version_info__ < (0, 11, 1)


def in_one_loop(f: Callable[..., Any], twin: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return `f` with all its outputs computed in one loop on a CPU; elsewhere, `f`.

    XLA's CPU compiler writes a loop for each output array, and reads or computes again what several outputs
    need. It writes one loop for a reduction with several results, whatever goes into it. So every row is
    held twice along a new last axis, and what comes out is the larger of two equal numbers: the same to
    the last bit. The compiler sees that they are equal, and nothing is computed twice. Derivatives are those
    of the twin, if there is one.

    Args:
        f: `f(shared, rows)` returns arrays, each of whose rows depends on the same row of `rows` alone, up to
            broadcasting. `shared` is used as it is.
        twin: `twin(results, shared, rows)` returns as many arrays, whose derivatives `f` is to have. What `f`
            returns is a constant to it.
    """

    def one_loop(shared: Any, rows: Any) -> Any:
        outputs, structure = jax.tree.flatten(f(shared, jax.tree.map(_twice, rows)))
        return structure.unflatten(_once([jnp.asarray(output) for output in outputs]))

    @jax.custom_jvp
    def call(shared: Any, rows: Any) -> Any:
        if all(jnp.ndim(leaf) == 0 for leaf in jax.tree.leaves(rows)):
            return f(shared, rows)
        return jax.lax.platform_dependent(shared, rows, cpu=one_loop, default=f)

    @functools.partial(call.defjvp, symbolic_zeros=True)
    def _(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
        if twin is None:
            return jvp_of_moved(f, primals, tangents)
        results = call(*primals)
        of_results = functools.partial(twin, jax.tree.map(jax.lax.stop_gradient, results))
        changes = jvp_of_moved(of_results, primals, tangents)[1]
        return results, jax.tree.map(_as_tangent, results, changes)

    return functools.wraps(f)(call)


def jvp_of_moved(f: Callable[..., Any], primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    """Return results and tangents of `f`, by the leaves whose tangents are not zero by structure."""
    leaves, structure = jax.tree.flatten(primals)
    directions = jax.tree.leaves(tangents, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
    moved = [place for place, tangent in enumerate(directions) if not isinstance(tangent, SymbolicZero)]

    def at(*values: jax.Array) -> Any:
        moving = dict(zip(moved, values, strict=True))
        return f(*structure.unflatten([moving.get(place, leaf) for place, leaf in enumerate(leaves)]))

    values, changes = ([part[place] for place in moved] for part in (leaves, directions))
    return jax.jvp(at, values, changes)


def where_finite(result: jax.Array, twin: jax.Array) -> jax.Array:
    """Return a twin that changes where the result is finite."""
    return jax.lax.select(jnp.isfinite(result), twin, jnp.zeros_like(twin))


def _as_tangent(result: jax.Array, change: jax.Array) -> jax.Array:
    return change.astype(result.dtype) if jnp.issubdtype(result.dtype, jnp.inexact) else change


def _twice(leaf: jax.Array | float) -> jax.Array:
    """Return rows held twice; what the compiler moves ahead of that, say a logarithm, it writes out."""
    leaf = jnp.asarray(leaf)
    if leaf.ndim == 0:
        return leaf
    twice = jnp.broadcast_to(leaf[..., None], (*leaf.shape, 2))
    return jax.lax.optimization_barrier(twice) if _BARRIERS_END else twice


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
            arrays, [_least(array.dtype) for array in arrays], _larger_of_each, (len(shape) - 1,)
        )
        for place, result in zip(places, results, strict=True):
            once[place] = result.astype(outputs[place].dtype)
    return once


def _larger_of_each(first: list[jax.Array], second: list[jax.Array]) -> list[jax.Array]:
    return [_larger(x, y) for x, y in zip(first, second, strict=True)]


def _larger(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the larger of two numbers, the second where one is NaN.

    Where one result of the loop is used alone, XLA hands a reduction by `max` to a library, which has all
    rows written out twice and takes 20 times as long; a selection it keeps.
    """
    if x.dtype.kind == "c":  # the larger part of each, that is, of two equal numbers, one of them
        return jax.lax.complex(_larger(x.real, y.real), _larger(x.imag, y.imag))
    return jax.lax.select(x > y, x, y)


def _least(dtype: jnp.dtype) -> jax.Array:
    if dtype.kind == "b":
        return jnp.asarray(False)
    if dtype.kind == "c":
        return jnp.asarray(complex(-jnp.inf, -jnp.inf), dtype)
    return jnp.asarray(jnp.iinfo(dtype).min if dtype.kind in "iu" else -jnp.inf, dtype)
