"""Counting rules of JAX primitives by name, and `register_rule` for primitives of your own."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from rlxjax._checks import as_index
from rlxjax._tracing import PACKAGE

from . import _rules_algebra
from ._rules import ARRAY_RULES, Aval, Operation, OperationCounts, Rule, names, nbytes

if TYPE_CHECKING:
    from jax.extend.core import Primitive

#: A function from (avals of the operands, avals of the results, parameters of the equation) to counts.
CountingRule: TypeAlias = Callable[[Sequence[Aval], Sequence[Aval], Mapping[str, Any]], OperationCounts]

#: Dict from the name of a primitive to its rule. Each primitive has only one rule.
RULES: dict[str, Rule] = dict(**ARRAY_RULES, **_rules_algebra.RULES)
#: Primitives that run an inner jaxpr once. The equations of the inner jaxpr count instead of the call.
CALLS = names(
    "jit pjit call core_call closed_call core_closed_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr "
    "checkpoint remat remat2 composite custom_vmap_call xla_metadata_call custom_linear_solve eval_jaxpr"
)
LOOPS = names("scan while cond shard_map")
#: Primitives whose result is their operand under another name or shape. They move no data.
RENAMES = names(
    "reshape squeeze expand_dims stop_gradient name optimization_barrier sharding_constraint random_wrap "
    "random_unwrap pvary pcast pbroadcast mesh_cast layout_constraint"
)
#: Reductions. If each result comes from a single element, a reduction returns its operand and moves no data.
_SUMMING = names("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor")
#: Primitives that cost nothing: they return a constant of the program, or only put its effects in order.
NOTHING = names("axis_index platform_index create_token after_all dce_sink")
#: Names of handwritten kernels and of primitives from `register_rule`. Their authors declare the counts.
CUSTOMS = {"pallas_call", "ffi_call"}
#: Names of primitives that the walk over a jaxpr handles without a rule.
RESERVED = CALLS | LOOPS | RENAMES | NOTHING


def register_rule(primitive: "str | Primitive", rule: CountingRule, *, family: str = "custom") -> None:
    """Register a counting rule that `profile_function` uses for your own primitive.

    Args:
        primitive: the primitive, or the name of the primitive.
        rule: a function `(inputs, outputs, params) -> OperationCounts`. Each input and output has a `.shape` and a
            `.dtype`; `params` maps the names of the equation's parameters to their values.
        family: the row of `by_family` that the primitive counts in.

    Raises:
        ValueError: the primitive already has a rule, or `rule` is not a function.

    Examples:
        >>> from jax.extend.core import Primitive
        >>> def triple_rule(inputs, outputs, params):
        ...     return OperationCounts(flops=outputs[0].shape[0])
        >>> register_rule(Primitive("triple"), triple_rule)
        >>> register_rule("triple", triple_rule)
        Traceback (most recent call last):
            ...
        ValueError: primitive: expected a primitive without a rule, but 'triple' already has a rule
    """
    name = getattr(primitive, "name", primitive)
    if not isinstance(name, str) or not name:
        raise ValueError(f"primitive: expected a Primitive or its name, got {primitive!r}")
    if not callable(rule):
        raise ValueError(f"rule: expected a function of inputs, outputs and params, got {rule!r}")
    if name in RULES or name in RESERVED:
        raise ValueError(f"primitive: expected a primitive without a rule, but {name!r} already has a rule")

    def checked(op: Operation) -> OperationCounts:
        counts = rule(*op)
        if not isinstance(counts, OperationCounts):
            raise ValueError(f"rule of {name!r}: expected OperationCounts, got {counts!r}")
        for field, count in zip(counts._fields, counts, strict=True):
            if count is not None:
                as_index(count, f"rule of {name!r}: {field}")
        return counts

    RULES[name] = Rule(family, said=checked)
    CUSTOMS.add(name)


UNKNOWN_LINE = "unknown line"
#: The largest number of stack frames that are searched for a line of the user's code.
_MOST_FRAMES = 64
#: A source line as JAX writes it: `/folder/file.py:12:3 (function)`.
_PLACE = re.compile(r"(?:.*[/\\])?([^/\\]+?):(\d+)(?::\d+)?(?: |$)")


def is_literal(operand: Any) -> bool:
    """Whether an operand is a literal. An `isinstance` check would need an import that loads Pallas."""
    return hasattr(operand, "val")


def opened(held: Any) -> Any:
    """Return the jaxpr inside a closed jaxpr; an open jaxpr is returned unchanged."""
    return getattr(held, "jaxpr", held)


def inner_jaxprs(equation: Any) -> Iterable[Any]:
    for value in equation.params.values():
        for held in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(opened(held), "eqns"):
                yield held


def scan_layout(equation: Any) -> tuple[int, int]:
    """Return the number of constants and the number of carried values of a scan. Other operands are read in slices."""
    body = opened(equation.params["jaxpr"])

    def same(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        ranks = ([len(getattr(var.aval, "shape", ())) for var in side] for side in (outside, inside))
        return sum(a == b for a, b in zip(*ranks, strict=True))

    carried = same(equation.outvars, body.outvars)
    return same(equation.invars, body.invars) - carried, carried


def called_jaxpr(equation: Any, operands: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Return the jaxpr that a call runs, and the operands of that jaxpr."""
    params = equation.params
    if equation.primitive.name == "custom_linear_solve":
        counts = params["const_lengths"]
        start = counts.matvec + counts.vecmat
        return opened(params["jaxprs"].solve), [*operands[start : start + counts.solve], *operands[sum(counts) :]]
    held = next(params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call") if key in params)
    return opened(held), operands


def lowered(traced: Any) -> Any:
    """Return the closed jaxpr of a traced function, with high-level primitives replaced by their implementation."""
    return getattr(traced, "lojax", traced).jaxpr


def implementation(equation: Any, platform: str) -> Any | None:
    """Return the jaxpr that implements a primitive; None if there is none, or if it has a rule.

    The implementation of `lax.platform_dependent`, which is a `cond`, is the platform's branch.
    """
    primitive, params = equation.primitive, equation.params
    branches: Any = zip(params.get("branches_platforms") or (), params.get("branches", ()), strict=False)
    of_platform = {name: branch for group, branch in branches for name in group or ("others",)}
    if branch := of_platform.get(platform, of_platform.get("others")):
        return opened(branch)
    if primitive.name in RULES or primitive.name in RESERVED:
        return None
    try:
        runs = functools.partial(_SPARSE_PROGRAMS.get(primitive.name, primitive.impl), **params)
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
    """Whether the result of an equation is its operand in the same memory layout, so that no data moves."""
    name = equation.primitive.name
    if name in ("convert_element_type", "broadcast_in_dim") and len(equation.invars) == 1:
        operand, result = equation.invars[0].aval, equation.outvars[0].aval
        return nbytes(operand) == nbytes(result) and operand.dtype == result.dtype
    if name in _SUMMING and equation.invars[0].aval.size == equation.outvars[0].aval.size:
        return True
    if name == "transpose":
        shape = equation.invars[0].aval.shape
        order = [axis for axis in equation.params["permutation"] if shape[axis] > 1]
        return order == sorted(order)
    return name in RENAMES


def is_outer_reduction(name: str, op: Operation) -> bool:
    """Whether a reduction keeps the last axis. If so, compilers read the reduction's operand from memory."""
    axes = op.params.get("axes", ()) if name.startswith("reduce_") else ()
    return bool(axes) and len(op.operand.shape) - 1 not in axes


def source_line(equation: Any, otherwise: str = UNKNOWN_LINE) -> str:
    """Return the user's source line of an equation, such as `file.py:12`; `otherwise` if JAX does not know the line."""
    from jax.extend import source_info_util  # a slow import, which loads Pallas

    try:
        said = source_info_util.summarize(equation.source_info)
        if said.startswith(PACKAGE):  # a caller has the user's line
            callers = source_info_util.summarize(equation.source_info, _MOST_FRAMES).splitlines()
            said = next((one for one in reversed(callers) if not one.startswith(PACKAGE)), "")
    except (AttributeError, TypeError):
        return otherwise
    place = _PLACE.match(said)
    return f"{place[1]}:{place[2]}" if place else otherwise


# --- Implementations of products and conversions in `jax.experimental.sparse` ------------------------


def _sparse() -> Any:
    from jax.experimental import sparse  # a slow import that few functions need

    return sparse


def _dot(data: Any, indices: Any, right: Any, *, dimension_numbers: Any, lhs_spinfo: Any, **_: Any) -> Any:
    """Multiply each stored element of a sparse matrix with the matching row of `right`, and sum the products."""
    (contracted, contracted_right), (batched, batched_right) = dimension_numbers
    shape, met = lhs_spinfo.shape, (*batched_right, *contracted_right)
    places = *shape[: indices.ndim - 2], indices.shape[-2]
    batch = [lax.broadcasted_iota(indices.dtype, places, axis) for axis in range(len(places) - 1)]
    at = [*batch, *jnp.moveaxis(indices, -1, 0)]
    kept = [axis for axis in range(right.ndim) if axis not in met]
    left = [*batched, *(axis for axis in range(len(shape)) if axis not in (*batched, *contracted))]
    where = tuple(at[axis] for axis in (*batched, *contracted))
    read = right.transpose(*met, *kept).at[where].get(mode="fill", fill_value=0)
    read = jnp.expand_dims(read, tuple(range(len(places), data.ndim)))
    products = jnp.expand_dims(data, tuple(range(data.ndim, data.ndim + len(kept)))) * read
    if not (where := tuple(at[axis] for axis in left if axis < len(at))):
        return products.sum(tuple(range(len(places))))
    result = jnp.zeros([*(shape[axis] for axis in left), *(right.shape[axis] for axis in kept)], products.dtype)
    return result.at[where].add(products)


def _bcoo(parts: Any, shape: Any, spinfo: Any) -> Any:
    """Return a sparse matrix in coordinate form; `parts` are its coordinates or, without `spinfo`, compressed rows."""
    if spinfo is None:
        return _sparse().BCSR(parts, shape=shape).to_bcoo()
    data, *places = parts
    return _sparse().BCOO((data, jnp.stack(places, -1)), shape=spinfo.shape)


def _product(*operands: Any, transpose: bool, shape: Any = None, spinfo: Any = None) -> Any:
    matrix = _bcoo(operands[:3], shape, spinfo)
    return (matrix.T if transpose else matrix) @ operands[3]


def _found(matrix: Any, **options: Any) -> Any:
    found = _sparse().BCOO.fromdense(matrix, **options)
    return found.data, *found.indices.T


def _found_by_rows(matrix: Any, **options: Any) -> Any:
    found = _sparse().BCSR.fromdense(matrix, **options)
    return found.data, found.indices, found.indptr


#: Dict from the name of a sparse primitive to a function that implements the primitive.
_SPARSE_PROGRAMS: Mapping[str, Callable[..., Any]] = {
    "bcoo_dot_general": _dot,
    "bcsr_dot_general": lambda *operands, dimension_numbers, lhs_spinfo, **_: _sparse().bcoo_dot_general(
        _bcoo(operands[:3], lhs_spinfo.shape, None), operands[3], dimension_numbers=dimension_numbers
    ),
    **dict.fromkeys(("coo_matvec", "coo_matmat", "csr_matvec", "csr_matmat"), _product),
    "coo_todense": lambda *parts, spinfo: _bcoo(parts, None, spinfo).todense(),
    "csr_todense": lambda *parts, shape: _bcoo(parts, shape, None).todense(),
    "coo_fromdense": _found,
    "csr_fromdense": _found_by_rows,
}
