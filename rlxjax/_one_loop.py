"""All outputs of a table, or all sums, in one loop over its rows; the compiler would write one for each."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

#: A sum over rows on a CPU first adds so many parts of them.
_PARTS = 8
#: Whether XLA takes barriers away before it writes loops: later ones write an array for each.
_BARRIERS_END = jax.__version_info__ < (0, 11, 1)


def in_one_loop(f: Callable[..., Any], where_finite: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return `f` with all its outputs computed in one loop on a CPU; elsewhere, `f`.

    XLA's CPU compiler writes a loop for each output array, and reads or computes again what several outputs
    need. It writes one loop for a reduction with several results, whatever goes into it. So every row is
    held twice along a new last axis, and what comes out is the maximum of two equal numbers: the same to
    the last bit. The compiler sees that they are equal, and nothing is computed twice. Derivatives are those
    of `f`, or those of `where_finite` where the result is finite, and 0 elsewhere.

    Args:
        f: `f(shared, rows)` returns arrays, each of whose rows depends on the same row of `rows` alone, up to
            broadcasting. `shared` is used as it is.
        where_finite: returns the floats that `f` returns where those are finite.
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
        if where_finite is None:
            return _jvp(f, primals, tangents)
        results, changes = call(*primals), _jvp(where_finite, primals, tangents)[1]
        return results, jax.tree.map(_if_finite, results, changes)

    return functools.wraps(f)(call)


def _jvp(f: Callable[..., Any], primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    """Return results and tangents of `f`, by the leaves whose tangents are not zero by structure."""
    leaves, structure = jax.tree.flatten(primals)
    directions = jax.tree.leaves(tangents, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
    moved = [place for place, tangent in enumerate(directions) if not isinstance(tangent, SymbolicZero)]

    def at(*values: jax.Array) -> Any:
        moving = dict(zip(moved, values, strict=True))
        return f(*structure.unflatten([moving.get(place, leaf) for place, leaf in enumerate(leaves)]))

    values, changes = ([part[place] for place in moved] for part in (leaves, directions))
    return jax.jvp(at, values, changes)


def _if_finite(result: jax.Array, change: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(result), change, jnp.zeros_like(change))


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
            arrays, [_least(array.dtype) for array in arrays], _maxima, (len(shape) - 1,)
        )
        for place, result in zip(places, results, strict=True):
            once[place] = result.astype(outputs[place].dtype)
    return once


def _maxima(first: list[jax.Array], second: list[jax.Array]) -> list[jax.Array]:
    return [_larger(x, y) for x, y in zip(first, second, strict=True)]


def _larger(x: jax.Array, y: jax.Array) -> jax.Array:
    if x.dtype.kind == "c":  # the larger part of each, that is, of two equal numbers, one of them
        return jax.lax.complex(jax.lax.max(x.real, y.real), jax.lax.max(x.imag, y.imag))
    return jax.lax.max(x, y)


def _least(dtype: jnp.dtype) -> jax.Array:
    if dtype.kind == "b":
        return jnp.asarray(False)
    if dtype.kind == "c":
        return jnp.asarray(complex(-jnp.inf, -jnp.inf), dtype)
    return jnp.asarray(jnp.iinfo(dtype).min if dtype.kind in "iu" else -jnp.inf, dtype)


def by_slopes(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return `f` with a derivative that is the sum of its slopes times the tangents.

    Reverse mode sums over the rows for all the arguments that are scalars in one loop on a CPU, which
    computes the slopes anew: nothing but the arguments is kept for it.

    Args:
        f: of pytrees of arrays, each of which broadcasts to the shape of the result; each row of it depends
            on the same row of the arrays alone.
    """

    def call(*arguments: Any) -> jax.Array:
        leaves, structure = jax.tree.flatten(arguments)
        sloped = jax.custom_jvp(lambda *leaves: f(*structure.unflatten(leaves)))

        @functools.partial(sloped.defjvp, symbolic_zeros=True)
        def _(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
            def slope(place: int, primals: Sequence[jax.Array]) -> jax.Array:
                def of_one(x: jax.Array) -> jax.Array:
                    return sloped.fun(*primals[:place], x, *primals[place + 1 :])

                return jax.jvp(of_one, [primals[place]], [jnp.ones_like(primals[place])])[1]

            value = sloped(*primals)
            slopes = [functools.partial(slope, place) for place in range(len(primals))]
            return value, _along(value, slopes, tangents, primals, is_anew=True)

        return sloped(*map(jnp.asarray, leaves))

    return functools.wraps(f)(call)


def along(value: jax.Array, slopes: Sequence[jax.Array], tangents: Sequence[Any]) -> jax.Array:
    """Return the sum of slopes times tangents, of the value's shape; zeros by structure cost nothing.

    Reverse mode sums over the rows for all the tangents that are scalars in one loop on a CPU.

    Args:
        value: `[*batch]`, what the slopes are the derivatives of.
        slopes: each of a shape that broadcasts to the value's.
        tangents: one a slope: an array of such a shape, or a symbolic zero.
    """
    picks = [functools.partial(_entry, place) for place in range(len(slopes))]
    operands = [jnp.broadcast_to(slope, value.shape) for slope in slopes]
    return _along(value, picks, tangents, operands, is_anew=False)


def _entry(place: int, slopes: Sequence[jax.Array]) -> jax.Array:
    return slopes[place]


def _along(
    value: jax.Array,
    slopes: Sequence[Callable],
    tangents: Sequence[Any],
    operands: Sequence[jax.Array],
    *,
    is_anew: bool,
) -> jax.Array:
    """Return the sum of slopes, each a function of the operands, times tangents.

    `is_anew`: whether the slopes are computed from the operands rather than being some of them.
    """
    total, chosen, weights = jnp.zeros_like(value), [], []
    for slope, tangent in zip(slopes, tangents, strict=True):
        if isinstance(tangent, SymbolicZero):
            continue
        if value.ndim == 0 or tangent.ndim > 0:
            total = total + slope(operands) * tangent
        else:
            chosen.append(slope)
            weights.append(tangent.astype(value.dtype))
    if not chosen:
        return total
    rows = [jnp.broadcast_to(operand, value.shape) if operand.ndim else operand for operand in operands]
    return total + _weigh.bind(*rows, *weights, slopes=tuple(chosen), is_sum=False, is_anew=is_anew)[0]


#: Rows `[*batch]`, slopes of the operands, weighed by scalars and added, or, its transpose, all slopes times
#: the last operand and summed.
#: Its class by an instance of it: `jax.extend.core`, where it is public, imports Pallas, which takes 15 ms.
_weigh = type(jax.lax.add_p)("weigh_rows")
_weigh.multiple_results = True


def _products(slopes: tuple[Callable, ...], operands: Sequence[jax.Array], weights: Sequence[jax.Array]):
    return [slope(operands) * weight for slope, weight in zip(slopes, weights, strict=True)]


def _weighed(*operands: jax.Array, slopes: tuple[Callable, ...], is_sum: bool, **_: bool) -> list[jax.Array]:
    if is_sum:
        *rows, last = operands
        return [jnp.sum(product) for product in _products(slopes, rows, [last] * len(slopes))]
    rows, weights = operands[: -len(slopes)], operands[-len(slopes) :]
    total = functools.reduce(jnp.add, _products(slopes, rows, weights))
    return [jnp.broadcast_to(total, jnp.broadcast_shapes(*map(jnp.shape, operands)))]


def _weighed_in_one_loop(
    *operands: jax.Array, slopes: tuple[Callable, ...], is_sum: bool, is_anew: bool
) -> list[jax.Array]:
    """Return the same, the sums in one loop, over parts of the rows in step."""
    size = operands[-1].size // _PARTS
    if not is_sum or size == 0:
        return _weighed(*operands, slopes=slopes, is_sum=is_sum)

    if is_anew:  # Else what the last operand is made of, divisions among it, is written out array by array.
        operands = *operands[:-1], *_once([_twice(operands[-1])])

    def cut(start: int, stop: int | None) -> list[jax.Array]:
        return [operand.reshape(-1)[start:stop] if operand.ndim else operand for operand in operands]

    def add(_, parts: list[list[jax.Array]]) -> list[jax.Array]:
        products = [_products(slopes, rows, [last] * len(slopes)) for *rows, last in parts]
        return [functools.reduce(jnp.add, addends) for addends in zip(*products, strict=True)]

    parts = [cut(part * size, (part + 1) * size) for part in range(_PARTS)]
    totals = [jnp.sum(total) for total in in_one_loop(add)((), parts)]
    if _PARTS * size == operands[-1].size:
        return totals
    rest = _weighed(*cut(_PARTS * size, None), slopes=slopes, is_sum=True)
    return [total + left for total, left in zip(totals, rest, strict=True)]


def _weighed_shapes(*operands, slopes: tuple, is_sum: bool, **_: bool) -> list:
    if is_sum:
        return [operands[-1].update(shape=())] * len(slopes)
    shape = jnp.broadcast_shapes(*(operand.shape for operand in operands))
    return [operands[-1].update(shape=shape)]


def _weigh_jvp(
    operands: list, tangents: list, *, slopes: tuple, is_sum: bool, is_anew: bool
) -> tuple[list, list]:
    """The results are linear in the weights; those come last."""
    count = len(operands) - (1 if is_sum else len(slopes))
    weigh = functools.partial(_weigh.bind, slopes=slopes, is_sum=is_sum, is_anew=is_anew)
    results, changes = weigh(*operands), []
    if any(type(tangent) is not ad.Zero for tangent in tangents[count:]):
        changes.append(weigh(*operands[:count], *map(ad.instantiate_zeros, tangents[count:])))
    if any(type(tangent) is not ad.Zero for tangent in tangents[:count]):

        def of_rows(*rows: jax.Array) -> list[jax.Array]:
            return _weighed(*rows, *operands[count:], slopes=slopes, is_sum=is_sum)

        of_zero = [SymbolicZero(t.aval) if type(t) is ad.Zero else t for t in tangents[:count]]
        changes.append(_jvp(of_rows, tuple(operands[:count]), tuple(of_zero))[1])
    return results, [functools.reduce(jnp.add, change) for change in zip(*changes, strict=True)]


def _weigh_transpose(cotangents: list, *operands, slopes: tuple, is_sum: bool, is_anew: bool) -> list:
    given = [place for place, cotangent in enumerate(cotangents) if type(cotangent) is not ad.Zero]
    count = len(operands) - (1 if is_sum else len(slopes))
    if not given:
        return [None] * len(operands)
    slopes = tuple(slopes[place] for place in given) if is_sum else slopes
    weights = [cotangents[place] for place in given]
    results = _weigh.bind(*operands[:count], *weights, slopes=slopes, is_sum=not is_sum, is_anew=is_anew)
    return [None] * count + results


def _weigh_batch(operands: tuple, axes: tuple, **parameters: Any) -> tuple[list, list]:
    results = jax.vmap(functools.partial(_weighed, **parameters), axes)(*operands)
    return results, [0] * len(results)


_weigh.def_impl(_weighed)
_weigh.def_abstract_eval(_weighed_shapes)
ad.primitive_jvps[_weigh] = _weigh_jvp
ad.primitive_transposes[_weigh] = _weigh_transpose
batching.primitive_batchers[_weigh] = _weigh_batch
mlir.register_lowering(_weigh, mlir.lower_fun(_weighed, multiple_results=True))
mlir.register_lowering(_weigh, mlir.lower_fun(_weighed_in_one_loop, multiple_results=True), platform="cpu")
