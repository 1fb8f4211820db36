"""What an operand is made of where it is lowered, so that a loop can compute it from what it reads."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

#: Operations that cost a loop over rows little, by their names in StableHLO.
_OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "add": jnp.add,
    "divide": jnp.divide,
    "is_finite": jnp.isfinite,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "multiply": jnp.multiply,
    "negate": jnp.negative,
    "select": jnp.where,
    "subtract": jnp.subtract,
}
_COMPARISONS: dict[str, Callable[..., jax.Array]] = {
    "EQ": jnp.equal,
    "GE": jnp.greater_equal,
    "GT": jnp.greater,
    "LE": jnp.less_equal,
    "LT": jnp.less,
    "NE": jnp.not_equal,
}
#: What has written its results out: a loop of our own (`_one_loop`), whichever platform it is for.
_WRITTEN = ("stablehlo.case", "stablehlo.reduce")
#: So many operations and sources at most; what a logarithm of a cost is multiplied by has ten or twenty.
MOST_NODES = 40


class Recipe(NamedTuple):
    """How an array follows from sources, row by row.

    Attributes:
        sources: values of MLIR: scalars, and one column at most.
        nodes: an operation and the places of its operands among the nodes, or of a source None and nothing;
            the array is the last.
    """

    sources: tuple[Any, ...]
    nodes: tuple[tuple[Callable[..., jax.Array] | None, tuple[int, ...]], ...]

    def __call__(self, sources: Sequence[jax.Array]) -> jax.Array:
        """Return the array of sources, or the part of it that belongs to parts of them."""
        remaining, values = iter(sources), []
        for operation, places in self.nodes:
            operands = [values[place] for place in places]
            values.append(next(remaining) if operation is None else operation(*operands))
        return values[-1]


def recipe_of(array: Any) -> Recipe:
    """Return how a value of MLIR follows from one column of its type and scalars; else, from itself."""
    sources, nodes, places = [], [], {}

    def place_of(value: Any) -> int | None:
        """Return the place of a value among the nodes, or None where it is no matter of a few operations."""
        if value not in places and len(places) < MOST_NODES:
            places[value] = None
            operation, operands = _made_by(value, array.type)
            found = [place_of(operand) for operand in operands] if operation else []
            if operands and None not in found:
                sources.extend([] if operation else operands)
                nodes.append((operation, tuple(found)))
                places[value] = len(nodes) - 1
        return places.get(value)

    is_made = place_of(array) is not None and sum(source.type == array.type for source in sources) <= 1
    return Recipe(tuple(sources), tuple(nodes)) if is_made else Recipe((array,), ((None, ()),))


def _made_by(value: Any, column: Any) -> tuple[Callable[..., jax.Array] | None, list[Any]]:
    """Return the operation that made a value and its operands; None and a source; None and nothing."""
    maker = value.owner  # an operation, or the block that the value is an argument of
    name = getattr(maker, "name", None)
    if name is None or name in _WRITTEN:
        return None, [value] if value.type == column else []
    operands = list(maker.operands)
    if name == "stablehlo.broadcast_in_dim":
        is_scalar = operands[0].type.rank == 0 and operands[0].type.element_type == column.element_type
        return None, operands if is_scalar else []
    if name == "stablehlo.compare":
        if "compare_type" in maker.attributes and "TOTALORDER" in str(maker.attributes["compare_type"]):
            return None, []
        direction = str(maker.attributes["comparison_direction"])
        return next(compare for word, compare in _COMPARISONS.items() if word in direction), operands
    operation = _OPERATIONS.get(name.removeprefix("stablehlo."))
    return operation, operands if operation else []
