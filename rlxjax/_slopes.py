"""Derivatives of costs as slopes times tangents; transposed, all sums over the rows in one loop."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import ad, batching, mlir

from ._one_loop import jvp_of_moved
from ._recipes import recipe_of
from ._row_sums import SHORT_LOOP, sums_of_pieces, sums_of_rows


def by_slopes(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f` with a derivative that is the sum of its slopes times the tangents.

    Reverse mode sums over the rows for all the arguments that are scalars, whichever results they move, in
    one loop on a CPU, which computes the slopes anew, by reverse mode row by row: nothing but the arguments
    is kept for it.

    Args:
        f: of pytrees of arrays, each of which broadcasts to the one shape of all results; each row of them
            depends on the same row of the arrays alone.
    """

    def call(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        sloped = jax.custom_jvp(lambda *leaves: f(*structure.unflatten(leaves)))

        @functools.partial(sloped.defjvp, symbolic_zeros=True)
        def _(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
            results = sloped(*primals)
            values, results_structure = jax.tree.flatten(results)
            widest = jnp.result_type(*values)

            def of_leaves(*leaves: jax.Array) -> list[jax.Array]:
                return [value.astype(widest) for value in jax.tree.leaves(sloped.fun(*leaves))]

            moved = {
                place: tangent
                for place, tangent in enumerate(tangents)
                if not isinstance(tangent, SymbolicZero)
            }
            shape = values[0].shape
            scalars = [place for place in moved if shape and moved[place].ndim == 0]
            weights = [moved.pop(place) for place in scalars]
            changes = [jnp.zeros(shape, widest) for _ in values]
            if moved:
                changes = _changes(of_leaves, primals, moved)
            if weights:
                rows = [jnp.broadcast_to(x, shape) if x.ndim else x for x in primals]
                slopes = _Anew(of_leaves, tuple(scalars), tuple(range(len(values))))
                changes = map(jnp.add, changes, _weigh_rows(slopes, rows, weights, widest))
            changes = [change.astype(value.dtype) for change, value in zip(changes, values, strict=True)]
            return results, results_structure.unflatten(changes)

        return sloped(*map(jnp.asarray, leaves))

    return functools.wraps(f)(call)


def with_derivative_of(
    twin: Callable[..., jax.Array], f: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """Return `f` with the derivative of its twin, which returns what it does where that is finite."""

    @jax.custom_jvp
    def call(*arguments: Any) -> jax.Array:
        return f(*arguments)

    @functools.partial(call.defjvp, symbolic_zeros=True)
    def _(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
        value, change = call(*primals), jvp_of_moved(twin, primals, tangents)[1]
        return value, change.astype(value.dtype)

    return call


def along(
    value: jax.Array, slopes: Sequence[jax.Array], tangents: Sequence[Any], *, takes_in: bool = False
) -> jax.Array:
    """Return the sum of slopes times tangents, of the value's shape; zeros by structure cost nothing.

    Reverse mode sums over the rows for all the tangents that are scalars in one loop on a CPU.

    Args:
        value: `[*batch]`, what the slopes are the derivatives of.
        slopes: each of a shape that broadcasts to the value's.
        tangents: one a slope: an array of such a shape, or a symbolic zero.
        takes_in: whether the loop may compute what the rows are multiplied by, say by a division of the
            value, which is written out for it otherwise.
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
    if weights:
        total += _weigh_rows(_Kept(tuple(range(len(rows))), takes_in), rows, weights, value.dtype)[0]
    return total


def _changes(f: Callable, values: Sequence[jax.Array], tangents: dict[int, jax.Array]) -> list[jax.Array]:
    """Return the changes of the results of `f` with some of its arguments."""
    places = tuple(tangents)
    return jax.jvp(_of(f, values, places), [values[place] for place in places], [*tangents.values()])[1]


def _of(f: Callable, values: Sequence[jax.Array], places: tuple[int, ...]) -> Callable:
    """Return `f` as a function of some of its arguments."""

    def of(*moving: jax.Array) -> jax.Array:
        moved = dict(zip(places, moving, strict=True))
        return f(*(moved.get(place, value) for place, value in enumerate(values)))

    return of


class _Kept(NamedTuple):
    """Slopes of one result that are among the rows, at these places."""

    places: tuple[int, ...]
    takes_in: bool
    results: tuple[int, ...] = (0,)

    def changes(self, rows: Sequence[jax.Array], weights: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the slopes times weights, added."""
        return [functools.reduce(jnp.add, self.products(rows, weights))]

    def pulled(self, rows: Sequence[jax.Array], lasts: Sequence[jax.Array]) -> list[jax.Array]:
        """Return each slope times the last rows."""
        return self.products(rows, [*lasts] * len(self.places))

    def needed(self, rows: Sequence[jax.Array]) -> tuple[int, ...]:
        """Return the places."""
        del rows
        return self.places

    def products(self, rows: Sequence[jax.Array], factors: Sequence[jax.Array]) -> list[jax.Array]:
        return [rows[place] * factor for place, factor in zip(self.places, factors, strict=True)]


class _Anew(NamedTuple):
    """Slopes of results of a function of rows and scalars by those scalars that stand at these places."""

    f: Callable
    places: tuple[int, ...]
    results: tuple[int, ...]

    def changes(self, rows: Sequence[jax.Array], weights: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the slopes of each result times weights, added."""
        weights = [
            weight.astype(rows[place].dtype) for place, weight in zip(self.places, weights, strict=True)
        ]
        return _changes(self.chosen, rows, dict(zip(self.places, weights, strict=True)))

    def pulled(self, rows: Sequence[jax.Array], lasts: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the slopes by each scalar times the last rows, one array of those a result, added."""

        def of_row(row: list[jax.Array], lasts: list[jax.Array]) -> tuple[jax.Array, ...]:
            scalars = [row[place].astype(lasts[0].dtype) for place in self.places]
            return jax.vjp(_of(self.chosen, row, self.places), *scalars)[1](lasts)

        for _ in range(max(operand.ndim for operand in (*rows, *lasts))):
            axes = ([0 if operand.ndim else None for operand in part] for part in (rows, lasts))
            of_row = jax.vmap(of_row, tuple(axes))
        return [*of_row([*rows], [*lasts])]

    def chosen(self, *leaves: jax.Array) -> list[jax.Array]:
        values = self.f(*leaves)
        return [values[place] for place in self.results]

    def needed(self, rows: Sequence[jax.Array]) -> tuple[int, ...]:
        """Return the places of those scalars that the results depend on."""
        leaves = [jax.ShapeDtypeStruct((), row.dtype) for row in rows]
        jaxpr = jax.make_jaxpr(self.chosen)(*leaves).jaxpr
        needed = {*map(id, jaxpr.outvars)}
        for equation in reversed(jaxpr.eqns):
            if not needed.isdisjoint(map(id, equation.outvars)):
                needed.update(map(id, equation.invars))
        return tuple(place for place in self.places if id(jaxpr.invars[place]) in needed)


def _weigh_rows(slopes: Any, rows: list, weights: list, dtype: jnp.dtype) -> list[jax.Array]:
    return _weigh.bind(*rows, *(weight.astype(dtype) for weight in weights), slopes=slopes, is_sum=False)


#: Rows `[*batch]`, slopes of the operands, weighed by scalars and added, one array a result, or, its
#: transpose, the slopes by each scalar times the last operands, one a result, and summed.
#: Its class by an instance of it: `jax.extend.core`, where it is public, imports Pallas, which takes 15 ms.
_weigh = type(jax.lax.add_p)("weigh_rows")
_weigh.multiple_results = True


def _cut(operands: Sequence, slopes: _Kept | _Anew, is_sum: bool) -> tuple[Sequence, Sequence]:
    """Return the rows, and the weights or the last operands."""
    count = len(operands) - len(slopes.results if is_sum else slopes.places)
    return operands[:count], operands[count:]


def _weighed(*operands: jax.Array, slopes: _Kept | _Anew, is_sum: bool) -> list[jax.Array]:
    rows, others = _cut(operands, slopes, is_sum)
    if is_sum:
        return [jnp.sum(product) for product in slopes.pulled(rows, others)]
    shape = jnp.broadcast_shapes(*map(jnp.shape, rows))
    return [jnp.broadcast_to(change, shape) for change in slopes.changes(rows, others)]


def _lower_in_one_loop(
    ctx: mlir.LoweringRuleContext, *operands: Any, slopes: _Kept | _Anew, is_sum: bool
) -> Sequence[Any]:
    """Lower the same, the sums in one loop, which computes the last operands from what they are made of.

    Prevents: a column of them that is written out and read, of one number for a mean, or of a cost's
    reciprocals for its logarithm, where the cost is there to read.
    """
    rows, others = _cut(operands, slopes, is_sum)
    shapes, shapes_of_others = _cut(ctx.avals_in, slopes, is_sum)
    if not is_sum or not any(shape.ndim for shape in shapes):
        return mlir.lower_fun(_weighed, multiple_results=True)(ctx, *operands, slopes=slopes, is_sum=is_sum)
    recipes = [recipe_of(other) for other in others]
    sources = [source for recipe in recipes for source in recipe.sources]
    shape_of_last = shapes_of_others[0]
    shapes = [*shapes, *(shape_of_last.update(shape=tuple(source.type.shape)) for source in sources)]

    def products(*operands: jax.Array) -> list[jax.Array]:
        remaining = iter(operands[len(rows) :])
        lasts = [recipe([next(remaining) for _ in recipe.sources]) for recipe in recipes]
        return slopes.pulled(operands[: len(rows)], lasts)

    lower = mlir.lower_fun(functools.partial(_sums_in_one_loop, products, slopes), multiple_results=True)
    return lower(ctx.replace(avals_in=shapes), *rows, *sources)


def _sums_in_one_loop(products: Callable, slopes: _Kept | _Anew, *operands: jax.Array) -> list[jax.Array]:
    if isinstance(slopes, _Kept):
        return sums_of_rows(products, operands, SHORT_LOOP, slopes.takes_in)

    def sums(*operands: jax.Array) -> list[jax.Array]:
        with set_xla_metadata(inlineable="true"):
            return sums_of_pieces(products, operands)

    # A program of its own: else what the last operand is made of, divisions among it, is written out array
    # by array.
    with set_xla_metadata(inlineable="false"):
        return jax.jit(sums)(*operands)


def _weighed_shapes(*operands, slopes: _Kept | _Anew, is_sum: bool) -> list:
    if is_sum:
        return [operands[-1].update(shape=())] * len(slopes.places)
    shape = jnp.broadcast_shapes(*(operand.shape for operand in operands))
    return [operands[-1].update(shape=shape)] * len(slopes.results)


def _weigh_jvp(operands: list, tangents: list, *, slopes: _Kept | _Anew, is_sum: bool) -> tuple[list, list]:
    """The results are linear in the operands that come last."""
    count = len(_cut(operands, slopes, is_sum)[0])
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
    rows, others = _cut(operands, slopes, is_sum)
    given = [place for place, cotangent in enumerate(cotangents) if type(cotangent) is not ad.Zero]
    weights = [cotangents[place] for place in given]
    pulled: list = [None] * len(others)
    if is_sum and given:
        slopes = slopes._replace(places=tuple(slopes.places[place] for place in given))
        pulled = _weigh.bind(*rows, *weights, slopes=slopes, is_sum=False)
    elif given:
        slopes = slopes._replace(results=tuple(slopes.results[place] for place in given))
        needed = slopes.needed(rows)
        slopes_of_sum = slopes._replace(places=needed)
        sums = _weigh.bind(*rows, *weights, slopes=slopes_of_sum, is_sum=True) if needed else []
        pulled = list(map(dict(zip(needed, sums, strict=True)).get, slopes.places))
    return [None] * len(rows) + pulled


def _weigh_batch(operands: tuple, axes: tuple, **parameters: Any) -> tuple[list, list]:
    results = jax.vmap(functools.partial(_weighed, **parameters), axes)(*operands)
    return results, [0] * len(results)


_weigh.def_impl(_weighed)
_weigh.def_abstract_eval(_weighed_shapes)
ad.primitive_jvps[_weigh] = _weigh_jvp
ad.primitive_transposes[_weigh] = _weigh_transpose
batching.primitive_batchers[_weigh] = _weigh_batch
mlir.register_lowering(_weigh, mlir.lower_fun(_weighed, multiple_results=True))
# Not cached: what is lowered once for all places sees no operation that made an operand.
mlir.register_lowering(_weigh, _lower_in_one_loop, platform="cpu", cacheable=False)
