"""All outputs of a table, or all sums, in one loop over its rows; the compiler would write one for each."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

#: A sum over rows on a CPU first adds this many rows that lie `_LANES` apart: few enough that the compiler
#: unrolls them, and with that makes vector operations of the loop.
_ADDENDS, _LANES = 8, 2048


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


def along(value: jax.Array, slopes: Sequence[jax.Array], tangents: Sequence[Any]) -> jax.Array:
    """Return the sum of slopes times tangents, of the value's shape; zeros by structure cost nothing.

    Reverse mode sums over the rows for all the tangents that are scalars in one loop on a CPU.

    Args:
        value: `[*batch]`, what the slopes are the derivatives of.
        slopes: each of a shape that broadcasts to the value's.
        tangents: one a slope: an array of such a shape, or a symbolic zero.
    """
    total = jnp.zeros_like(value)
    operands: tuple[list, list] = [], []
    for slope, tangent in zip(slopes, tangents, strict=True):
        if isinstance(tangent, SymbolicZero):
            continue
        if value.ndim == 0 or tangent.ndim > 0:
            total = total + slope * tangent
        else:
            operands[0].append(jnp.broadcast_to(slope, value.shape).astype(value.dtype))
            operands[1].append(tangent.astype(value.dtype))
    return total + _weigh.bind(*operands[0], *operands[1], is_sum=False)[0] if operands[0] else total


#: Rows `[*batch]` weighed by scalars and added, or, its transpose, all rows times the last ones and summed.
_weigh = Primitive("weigh_rows")
_weigh.multiple_results = True


def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.sum(array) for array in arrays]


def _sums_in_one_loop(arrays: list[jax.Array]) -> list[jax.Array]:
    """Return the sum of each array, all of one shape, by a reduction with several results."""
    size = arrays[0].size
    whole = size - size % (_ADDENDS * _LANES)
    if whole == 0:
        return _sums(arrays)
    arrays = [array.reshape(-1) for array in arrays]
    blocks = [array[:whole].reshape(-1, _ADDENDS, _LANES) for array in arrays]
    zeros = [jnp.zeros((), array.dtype) for array in arrays]
    parts = jax.lax.reduce(blocks, zeros, lambda x, y: [a + b for a, b in zip(x, y, strict=True)], (1,))
    if whole == size:
        return _sums(parts)
    return [jnp.sum(part) + jnp.sum(array[whole:]) for part, array in zip(parts, arrays, strict=True)]


def _weighed(*operands: jax.Array, is_sum: bool, sums: Callable = _sums) -> list[jax.Array]:
    if is_sum:
        return sums([slope * operands[-1] for slope in operands[:-1]])
    half = len(operands) // 2
    products = [slope * weight for slope, weight in zip(operands[:half], operands[half:], strict=True)]
    return [functools.reduce(jnp.add, products)]


def _weighed_shapes(*operands, is_sum: bool) -> list:
    if is_sum:
        return [slope.update(shape=()) for slope in operands[:-1]]
    return [operands[0]]


def _weigh_jvp(operands: list, tangents: list, *, is_sum: bool) -> tuple[list, list]:
    """Both parts are linear: the tangents of the weights come first, those of the slopes after them."""
    count = len(operands) - 1 if is_sum else len(operands) // 2
    results, changes = _weigh.bind(*operands, is_sum=is_sum), []
    of_slopes, of_weights = (
        [*map(ad.instantiate_zeros, part)] for part in (tangents[:count], tangents[count:])
    )
    if any(type(tangent) is not ad.Zero for tangent in tangents[count:]):
        changes.append(_weigh.bind(*operands[:count], *of_weights, is_sum=is_sum))
    if any(type(tangent) is not ad.Zero for tangent in tangents[:count]):
        changes.append(_weighed(*of_slopes, *operands[count:], is_sum=is_sum))
    return results, [functools.reduce(jnp.add, change) for change in zip(*changes, strict=True)]


def _weigh_transpose(cotangents: list, *operands, is_sum: bool) -> list:
    given = [place for place, cotangent in enumerate(cotangents) if type(cotangent) is not ad.Zero]
    count = len(operands) - 1 if is_sum else len(operands) // 2
    if not given:
        return [None] * len(operands)
    slopes = [operands[place] for place in given] if is_sum else operands[:count]
    results = _weigh.bind(*slopes, *[cotangents[place] for place in given], is_sum=not is_sum)
    return [None] * count + results


def _weigh_batch(operands: tuple, axes: tuple, *, is_sum: bool) -> tuple[list, list]:
    results = jax.vmap(functools.partial(_weighed, is_sum=is_sum), axes)(*operands)
    return results, [0] * len(results)


_weigh.def_impl(_weighed)
_weigh.def_abstract_eval(_weighed_shapes)
ad.primitive_jvps[_weigh] = _weigh_jvp
ad.primitive_transposes[_weigh] = _weigh_transpose
batching.primitive_batchers[_weigh] = _weigh_batch
mlir.register_lowering(_weigh, mlir.lower_fun(_weighed, multiple_results=True))
_lower_on_cpu = functools.partial(_weighed, sums=_sums_in_one_loop)
mlir.register_lowering(_weigh, mlir.lower_fun(_lower_on_cpu, multiple_results=True), platform="cpu")
