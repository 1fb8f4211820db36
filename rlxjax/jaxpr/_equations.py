"""What an equation of a jaxpr is: a call, a loop, another name for its operand; and where it stands."""

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from rlxjax._tracing import TRACER

from ._registry import RENAMES, RESERVED, RULES
from ._rules import nbytes

UNKNOWN_LINE = "unknown line"
#: `/folder/file.py:12:3 (function)`, as JAX writes a place.
_PLACE = re.compile(r"(?:.*[/\\])?([^/\\]+?):(\d+)(?::\d+)?(?: |$)")


def is_literal(operand: Any) -> bool:
    """Whether an operand of an equation is a `jax.extend.core.Literal`, by its value: importing that loads Pallas."""
    return hasattr(operand, "val")


def opened(held: Any) -> Any:
    """Return the jaxpr of one that holds its constants, or itself."""
    return getattr(held, "jaxpr", held)


def inner_jaxprs(equation: Any) -> Iterable[Any]:
    for value in equation.params.values():
        for held in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(opened(held), "eqns"):
                yield held


def scan_layout(equation: Any) -> tuple[int, int]:
    """Return how many constants and carried values a scan has: its body sees a slice of all other operands."""
    body = opened(equation.params["jaxpr"])

    def same(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        ranks = ([len(getattr(var.aval, "shape", ())) for var in side] for side in (outside, inside))
        return sum(a == b for a, b in zip(*ranks, strict=True))

    carried = same(equation.outvars, body.outvars)
    return same(equation.invars, body.invars) - carried, carried


def called_jaxpr(equation: Any, operands: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Return the jaxpr that a call runs, and what it gives to it."""
    params = equation.params
    if equation.primitive.name == "custom_linear_solve":
        counts = params["const_lengths"]
        start = counts.matvec + counts.vecmat
        return opened(params["jaxprs"].solve), [*operands[start : start + counts.solve], *operands[sum(counts) :]]
    held = next(params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call") if key in params)
    return opened(held), operands


def lowered(traced: Any) -> Any:
    """Return the jaxpr with its constants of a traced function, new kinds of primitives by what they stand for."""
    return getattr(traced, "lojax", traced).jaxpr


def implementation(equation: Any) -> Any | None:
    """Return the jaxpr of what a library's primitive runs, where that is written in JAX; None of one with a rule."""
    primitive, params = equation.primitive, equation.params
    if primitive.name in RULES or primitive.name in RESERVED:
        return None
    from ._sparse import PROGRAMS  # which loads more of JAX than most need

    try:
        runs = functools.partial(PROGRAMS.get(primitive.name, primitive.impl), **params)
        made = lowered(jax.jit(runs).trace(*(var.aval for var in equation.invars))).jaxpr
    except Exception:  # noqa: BLE001  (another library's code may raise anything)
        return None
    return None if _holds(made, primitive) else made


def _holds(jaxpr: Any, primitive: Any) -> bool:
    return any(
        equation.primitive is primitive or any(_holds(opened(inner), primitive) for inner in inner_jaxprs(equation))
        for equation in jaxpr.eqns
    )


def is_renaming(equation: Any) -> bool:
    """Whether a result is its operand under another name, in the order of memory that it has already."""
    name = equation.primitive.name
    if name in ("convert_element_type", "broadcast_in_dim") and len(equation.invars) == 1:
        operand, result = equation.invars[0].aval, equation.outvars[0].aval
        return nbytes(operand) == nbytes(result) and operand.dtype == result.dtype
    return name in RENAMES


def is_outer_reduction(equation: Any) -> bool:
    """Whether it reduces axes but the last: compilers read its operand from memory."""
    axes = equation.params.get("axes", ()) if equation.primitive.name.startswith("reduce_") else ()
    return bool(axes) and len(equation.invars[0].aval.shape) - 1 not in axes


def source_line(equation: Any, otherwise: str = UNKNOWN_LINE) -> str:
    """Return the user's line that an equation comes from, as `file.py:12`, where JAX tells it."""
    from jax.extend import source_info_util  # which loads much, Pallas among it

    try:
        place = _PLACE.match(source_info_util.summarize(equation.source_info))
    except (AttributeError, TypeError):
        return otherwise
    return f"{place[1]}:{place[2]}" if place and place[1] != TRACER else otherwise
