"""Derivatives of costs as slopes times tangents; transposed, all sums over the rows in one loop."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import ad, batching, mlir

from ._one_loop import in_one_loop, jvp_of_moved

#: Sums over rows on a CPU first add so many neighbouring runs of so many rows.
_RUNS, _RUN_ROWS = 8, 16


def by_slopes(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return `f` with a derivative that is the sum of its slopes times the tangents.

    Reverse mode sums over the rows for all the arguments that are scalars in one loop on a CPU, which
    computes the slopes anew, by reverse mode row by row: nothing but the arguments is kept for it.

    Args:
        f: of pytrees of arrays, each of which broadcasts to the shape of the result; each row of it depends
            on the same row of the arrays alone.
    """

    def call(*arguments: Any) -> jax.Array:
        leaves, structure = jax.tree.flatten(arguments)
        sloped = jax.custom_jvp(lambda *leaves: f(*structure.unflatten(leaves)))

        @functools.partial(sloped.defjvp, symbolic_zeros=True)
        def _(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
            value = sloped(*primals)
            moved = {
                place: tangent
                for place, tangent in enumerate(tangents)
                if not isinstance(tangent, SymbolicZero)
            }
            scalars = [place for place in moved if value.ndim > 0 and moved[place].ndim == 0]
            weights = [moved.pop(place) for place in scalars]
            change = _change(sloped.fun, primals, moved) if moved else jnp.zeros_like(value)
            rows = [jnp.broadcast_to(x, value.shape) if x.ndim else x for x in primals]
            return value, change + _weigh_rows(value, _Anew(sloped.fun, tuple(scalars)), rows, weights)

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
    total, rows, weights = jnp.zeros_like(value), [], []
    for slope, tangent in zip(slopes, tangents, strict=True):
        if isinstance(tangent, SymbolicZero):
            continue
        if value.ndim == 0 or tangent.ndim > 0:
            total = total + slope * tangent
        else:
            rows.append(jnp.broadcast_to(slope, value.shape))
            weights.append(tangent)
    return total + _weigh_rows(value, _Kept(tuple(range(len(rows)))), rows, weights)


def _change(f: Callable, values: Sequence[jax.Array], tangents: dict[int, jax.Array]) -> jax.Array:
    """Return the change of `f` with some of its arguments."""
    places = tuple(tangents)
    return jax.jvp(_of(f, values, places), [values[place] for place in places], [*tangents.values()])[1]


def _of(f: Callable, values: Sequence[jax.Array], places: tuple[int, ...]) -> Callable:
    """Return `f` as a function of some of its arguments."""

    def of(*moving: jax.Array) -> jax.Array:
        moved = dict(zip(places, moving, strict=True))
        return f(*(moved.get(place, value) for place, value in enumerate(values)))

    return of


class _Kept(NamedTuple):
    """Slopes that are among the rows, at these places."""

    places: tuple[int, ...]

    def change(self, rows: Sequence[jax.Array], weights: Sequence[jax.Array]) -> jax.Array:
        """Return the slopes times weights, added."""
        return functools.reduce(jnp.add, self.products(rows, weights))

    def pulled(self, rows: Sequence[jax.Array], last: jax.Array) -> list[jax.Array]:
        """Return each slope times the last rows."""
        return self.products(rows, [last] * len(self.places))

    def products(self, rows: Sequence[jax.Array], factors: Sequence[jax.Array]) -> list[jax.Array]:
        return [rows[place] * factor for place, factor in zip(self.places, factors, strict=True)]


class _Anew(NamedTuple):
    """Slopes of a function of rows and scalars by those scalars that stand at these places."""

    f: Callable
    places: tuple[int, ...]

    def change(self, rows: Sequence[jax.Array], weights: Sequence[jax.Array]) -> jax.Array:
        """Return the slopes times weights, added."""
        weights = [
            weight.astype(rows[place].dtype) for place, weight in zip(self.places, weights, strict=True)
        ]
        return _change(self.f, rows, dict(zip(self.places, weights, strict=True)))

    def pulled(self, rows: Sequence[jax.Array], last: jax.Array) -> list[jax.Array]:
        """Return each slope times the last rows."""

        def of_row(row: list[jax.Array], last: jax.Array) -> tuple[jax.Array, ...]:
            scalars = [row[place].astype(last.dtype) for place in self.places]
            return jax.vjp(_of(self.f, row, self.places), *scalars)[1](last)

        for _ in range(last.ndim):
            of_row = jax.vmap(of_row, ([0 if row.ndim else None for row in rows], 0))
        return [*of_row([*rows], last)]


def _weigh_rows(value: jax.Array, slopes: Any, rows: list, weights: list) -> jax.Array:
    if not weights:
        return jnp.zeros_like(value)
    return _weigh.bind(
        *rows, *(weight.astype(value.dtype) for weight in weights), slopes=slopes, is_sum=False
    )[0]


#: Rows `[*batch]`, slopes of the operands, weighed by scalars and added, or, its transpose, all slopes times
#: the last operand and summed.
#: Its class by an instance of it: `jax.extend.core`, where it is public, imports Pallas, which takes 15 ms.
_weigh = type(jax.lax.add_p)("weigh_rows")
_weigh.multiple_results = True


def _weighed(*operands: jax.Array, slopes: _Kept | _Anew, is_sum: bool) -> list[jax.Array]:
    if is_sum:
        return [jnp.sum(product) for product in slopes.pulled(operands[:-1], operands[-1])]
    count = len(operands) - len(slopes.places)
    total = slopes.change(operands[:count], operands[count:])
    return [jnp.broadcast_to(total, jnp.broadcast_shapes(*map(jnp.shape, operands)))]


def _weighed_in_one_loop(*operands: jax.Array, slopes: _Kept | _Anew, is_sum: bool) -> list[jax.Array]:
    """Return the same, the sums in one loop."""
    if not is_sum:
        return _weighed(*operands, slopes=slopes, is_sum=is_sum)

    def products(*operands: jax.Array) -> list[jax.Array]:
        return slopes.pulled(operands[:-1], operands[-1])

    def sums(*operands: jax.Array) -> list[jax.Array]:
        with set_xla_metadata(inlineable="true"):
            return _sums(products, operands)

    if isinstance(slopes, _Kept):
        return _sums(products, operands)
    # A program of its own: else what the last operand is made of, divisions among it, is written out array
    # by array.
    with set_xla_metadata(inlineable="false"):
        return jax.jit(sums)(*operands)


def _sums(products: Callable[..., Sequence[jax.Array]], operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the sums of products of rows; runs of rows are added first, row by row."""
    count = max(operand.size for operand in operands)
    whole = count - count % (_RUNS * _RUN_ROWS)
    if whole == 0:
        return [jnp.sum(product) for product in products(*operands)]

    def cut(start: int, stop: int | None) -> list[jax.Array]:
        return [operand.reshape(-1)[start:stop] if operand.ndim else operand for operand in operands]

    def run(place: int) -> list[jax.Array]:
        grouped = [rows.reshape(-1, _RUNS, _RUN_ROWS) if rows.ndim else rows for rows in cut(0, whole)]
        return [rows[:, place] if rows.ndim else rows for rows in grouped]

    def add(_, runs: list[list[jax.Array]]) -> list[jax.Array]:
        addends = zip(*(products(*rows) for rows in runs), strict=True)
        return [functools.reduce(jnp.add, addend) for addend in addends]

    totals = [jnp.sum(total) for total in in_one_loop(add)((), [run(place) for place in range(_RUNS)])]
    if whole == count:
        return totals
    rest = products(*cut(whole, None))
    return [total + jnp.sum(left) for total, left in zip(totals, rest, strict=True)]


def _weighed_shapes(*operands, slopes: _Kept | _Anew, is_sum: bool) -> list:
    if is_sum:
        return [operands[-1].update(shape=())] * len(slopes.places)
    shape = jnp.broadcast_shapes(*(operand.shape for operand in operands))
    return [operands[-1].update(shape=shape)]


def _weigh_jvp(operands: list, tangents: list, *, slopes: _Kept | _Anew, is_sum: bool) -> tuple[list, list]:
    """The results are linear in the weights; those come last."""
    count = len(operands) - (1 if is_sum else len(slopes.places))
    weigh = functools.partial(_weigh.bind, slopes=slopes, is_sum=is_sum)
    results, changes = weigh(*operands), []
    if any(type(tangent) is not ad.Zero for tangent in tangents[count:]):
        changes.append(weigh(*operands[:count], *map(ad.instantiate_zeros, tangents[count:])))
    if any(type(tangent) is not ad.Zero for tangent in tangents[:count]):

        def of_rows(*rows: jax.Array) -> list[jax.Array]:
            return _weighed(*rows, *operands[count:], slopes=slopes, is_sum=is_sum)

        of_zero = [SymbolicZero(t.aval) if type(t) is ad.Zero else t for t in tangents[:count]]
        changes.append(jvp_of_moved(of_rows, tuple(operands[:count]), tuple(of_zero))[1])
    return results, [functools.reduce(jnp.add, change) for change in zip(*changes, strict=True)]


def _weigh_transpose(cotangents: list, *operands, slopes: _Kept | _Anew, is_sum: bool) -> list:
    given = [place for place, cotangent in enumerate(cotangents) if type(cotangent) is not ad.Zero]
    count = len(operands) - (1 if is_sum else len(slopes.places))
    if not given:
        return [None] * len(operands)
    if is_sum:
        slopes = slopes._replace(places=tuple(slopes.places[place] for place in given))
    weights = [cotangents[place] for place in given]
    results = _weigh.bind(*operands[:count], *weights, slopes=slopes, is_sum=not is_sum)
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
