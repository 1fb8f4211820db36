"""How far rounding moves the results of a program: each number that it computes is moved by one rounding, at random."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._stages import equation_alone

#: Runs with other roundings.
DRAWS = 8
#: Calls of other programs, which run as a part of the one that calls them.
_CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"}
#: Operations that give numbers as they are, so that nothing is rounded.
_EXACT = {
    *("abs", "broadcast_in_dim", "concatenate", "copy", "copy_p", "dynamic_slice", "gather", "imag", "max", "min"),
    *("neg", "pad", "real", "reduce_max", "reduce_min", "reshape", "rev", "select_n", "slice", "sort", "squeeze"),
    *("stop_gradient", "transpose"),
}


def rounding_moves(call: Callable[[], Any], results: Sequence[Any]) -> list[np.ndarray]:
    """Return how far each number of a program's results moves in some runs of other roundings, at most.

    Monte Carlo arithmetic (Parker, Pierce and Eggert, 2000) of the program's jaxpr: its arrays, and what its operations
    give, are multiplied by 1 plus or minus the precision of their dtype, of that of the results where this is finer. A
    number that is finite in one run alone moves infinitely far.
    """
    closed = jax.make_jaxpr(call)()
    unit = max((float(jnp.finfo(one.dtype).eps) for one in results if _is_float(one.dtype)), default=0.0)

    def moved(seed: jax.Array, consts: Sequence[Any]) -> list[Any]:
        arrays = [_nudged(jnp.asarray(one), seed, number, 1.0) for number, one in enumerate(consts)]
        return _run(closed.jaxpr, arrays, [], seed, unit)

    places = [own.sharding if isinstance(own, jax.Array) and not own.is_fully_addressable else None for own in results]
    run = jax.jit(moved, out_shardings=places)
    before, furthest = [own_part(one) for one in results], [np.zeros(own_part(one).shape) for one in results]
    for seed in range(DRAWS):
        for most, old, one in zip(furthest, before, run(jnp.uint32(seed), closed.consts), strict=True):
            np.maximum(most, distance(own_part(one), old), out=most)
    return furthest


def own_part(leaf: Any) -> np.ndarray:
    """Return the numbers of an array that this process holds, floating-point ones in double precision."""
    if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        found = np.concatenate([np.ravel(shard.data) for shard in leaf.addressable_shards])
    else:
        found = np.asarray(leaf)
    if not jnp.issubdtype(found.dtype, jnp.inexact):
        return found
    return found.astype(np.complex128 if jnp.issubdtype(found.dtype, jnp.complexfloating) else np.float64)


def distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return how far numbers are apart: none where both are NaN, infinite where one alone is finite."""
    if one.dtype.kind not in "fc":
        return np.abs(one.astype(np.float64) - other.astype(np.float64))
    is_same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(one - other)
    return np.where(is_same, 0.0, np.where(np.isfinite(one) & np.isfinite(other), apart, np.inf))


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], seed: Any, unit: float) -> list[Any]:
    """Return what a jaxpr gives, where each number that is computed is moved."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for number, equation in enumerate(jaxpr.eqns):
        name, inner = equation.primitive.name, equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if name in _CALLS and inner is not None:
            given = [own.val if hasattr(own, "val") else values[own] for own in equation.invars]
            found = _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given, seed + number + 1, unit)
        else:
            alone, own_inputs = equation_alone(jaxpr, equation)
            found = alone(*(values[own] for own in own_inputs))
            if name not in _EXACT:
                found = [_nudged(one, seed, number, unit) for one in found]
        values.update(zip(equation.outvars, found, strict=True))
    return [own.val if hasattr(own, "val") else values[own] for own in jaxpr.outvars]


def _nudged(value: Any, seed: Any, number: int, most: float) -> Any:
    """Return floating-point numbers moved by one rounding, up or down as a hash of their bits says."""
    if not _is_float(value.dtype):
        return value
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return jax.lax.complex(*(_nudged(part, seed, number, most) for part in (value.real, value.imag)))
    eps = min(float(jnp.finfo(value.dtype).eps), most)
    width = 8 * value.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(value, f"uint{width}")
    bits = (bits >> max(width - 32, 0)) ^ bits if width > 32 else bits
    mixed = (bits.astype(jnp.uint32) ^ (seed * 40503 + number * 977 + 1).astype(jnp.uint32)) * jnp.uint32(2654435761)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2246822519)
    up, down = (jnp.asarray(1.0 + sign * eps, value.dtype) for sign in (1, -1))
    return value * jnp.where((mixed >> 17) & 1, up, down)
