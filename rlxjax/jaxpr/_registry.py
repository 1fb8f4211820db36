"""The rule of every primitive by its name, and how to teach one of your own."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from rlxjax._checks import as_index

from . import _rules_elementwise, _rules_indexed, _rules_matrices, _rules_outside, _rules_products
from ._rules import Aval, Counting, Operation, OperationCounts, Rule, names

if TYPE_CHECKING:
    from jax.extend.core import Primitive

#: `(avals of the operands, avals of the results, parameters of the equation) -> counts`.
CountingRule: TypeAlias = Callable[[Sequence[Aval], Sequence[Aval], Mapping[str, Any]], OperationCounts]

#: Rules by the name of the primitive; no name stands in two families.
RULES: dict[str, Rule] = dict(
    **_rules_elementwise.RULES,
    **_rules_indexed.RULES,
    **_rules_matrices.RULES,
    **_rules_outside.RULES,
    **_rules_products.RULES,
)
#: What holds a jaxpr and runs it once, as if its equations stood in its place.
CALLS = names(
    "jit pjit call core_call closed_call core_closed_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr "
    "checkpoint remat remat2 composite custom_vmap_call xla_metadata_call custom_linear_solve eval_jaxpr"
)
LOOPS = names("scan while cond shard_map")
#: What names its operand anew and moves nothing.
RENAMES = names(
    "reshape squeeze expand_dims stop_gradient name optimization_barrier sharding_constraint random_wrap "
    "random_unwrap pvary pcast pbroadcast mesh_cast layout_constraint"
)
#: What is known before the program runs, or orders it.
NOTHING = names("axis_index platform_index create_token after_all dce_sink")
#: Names that the walk itself knows.
RESERVED = CALLS | LOOPS | RENAMES | NOTHING


def register_rule(primitive: "str | Primitive", rule: CountingRule, *, family: str = "custom") -> None:
    """Count a primitive of your own from now on in `profile_function`.

    Args:
        primitive: the primitive or its name.
        rule: takes the shapes and dtypes of the operands, those of the results, and the parameters of
            the equation; returns `OperationCounts`. An operand has `.shape` and `.dtype`.
        family: what `by_family` sums it under.

    Raises:
        ValueError: the primitive has a rule already, built in or registered, or the rule cannot be called.

    Examples:
        >>> from jax.extend.core import Primitive
        >>> def triple_rule(inputs, outputs, params):
        ...     return OperationCounts(flops=outputs[0].shape[0])
        >>> register_rule(Primitive("triple"), triple_rule)
        >>> register_rule("triple", triple_rule)
        Traceback (most recent call last):
            ...
        ValueError: primitive: expected one without a rule, got 'triple', which has one
    """
    name = getattr(primitive, "name", primitive)
    if not isinstance(name, str) or not name:
        raise ValueError(f"primitive: expected a Primitive or its name, got {primitive!r}")
    if not callable(rule):
        raise ValueError(f"rule: expected a function of inputs, outputs and params, got {rule!r}")
    if name in RULES or name in RESERVED:
        raise ValueError(f"primitive: expected one without a rule, got {name!r}, which has one")
    RULES[name] = Rule(family, _checked(name, rule))


def _checked(name: str, rule: CountingRule) -> Counting:
    """Return a registered rule that refuses what is no counts."""

    def checked(op: Operation) -> OperationCounts:
        counts = rule(*op)
        if not isinstance(counts, OperationCounts):
            raise ValueError(f"rule of {name!r}: expected OperationCounts, got {counts!r}")
        for field, count in zip(counts._fields, counts, strict=True):
            if count is not None:
                as_index(count, f"rule of {name!r}: {field}")
        return counts

    return checked
