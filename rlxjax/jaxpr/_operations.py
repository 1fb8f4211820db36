"""What one operation of a JAX program does: its counts, and the rule that gives them."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from rlxjax._checks import as_index

if TYPE_CHECKING:
    from jax.extend.core import Primitive


class Aval(Protocol):
    """What a rule reads of an operand or a result."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


class OperationCounts(NamedTuple):
    """What one operation, or a group of them, does; exact integers.

    Attributes:
        flops: floating-point operations. An add, a multiply or a comparison is one, a fused
            multiply-add two; complex numbers count by the real operations that they take.
        transcendentals: evaluations of exp, log, sqrt, sin, pow, erf and the like, which are no FLOP.
        integer_ops: operations on integers and booleans.
        bytes: bytes read and written, unfused. None in what a rule returns: every operand and every
            result once, an operand that is read twice twice, scalar literals not at all.
        launches: kernels; what moves no byte launches none.
    """

    flops: int = 0
    transcendentals: int = 0
    integer_ops: int = 0
    bytes: int | None = None
    launches: int = 1


class Operation(NamedTuple):
    """An equation as its rule sees it."""

    inputs: Sequence[Aval]
    outputs: Sequence[Aval]
    params: Mapping[str, Any]

    @property
    def operand(self) -> Aval:
        """The first operand."""
        return self.inputs[0]

    @property
    def result(self) -> Aval:
        """The first result."""
        return self.outputs[0]


#: The counts of an operation; None of one that nothing is known about.
Counting = Callable[[Operation], OperationCounts | None]
#: `(avals of the operands, avals of the results, parameters of the equation) -> counts`.
CountingRule = Callable[[Sequence[Aval], Sequence[Aval], Mapping[str, Any]], OperationCounts]


class Rule(NamedTuple):
    """How an operation is counted, and how a compiler may fuse it.

    Attributes:
        family: what the profile sums it under.
        counts: of one equation.
        in_memory: how many of its first operands have to lie in memory; None is all. Others may be
            computed on the way.
        writes_memory: its result has to lie in memory; else its readers may compute it on the way.
        in_place: its result may take the memory of an operand that nobody reads later.
        workspace: bytes that it needs while it runs.
        reorders: whether it reads an operand in another order of memory, for each.
        slices: how many separate places of an operand it reads or writes.
    """

    family: str
    counts: Counting
    in_memory: int | None = None
    writes_memory: bool = True
    in_place: bool = False
    workspace: Callable[[Operation], int] | None = None
    reorders: Callable[[Operation], Sequence[bool]] | None = None
    slices: Callable[[Operation], int] | None = None


def names(text: str) -> frozenset[str]:
    """Return the words of a text: the names of primitives."""
    return frozenset(text.split())


def is_literal(operand: Any) -> bool:
    """Whether an operand of an equation is a `jax.extend.core.Literal`, by its value: importing that loads Pallas."""
    return hasattr(operand, "val")


def elements(aval: Aval) -> int:
    """Return the number of elements of an operand; 0 of a token."""
    return math.prod(getattr(aval, "shape", (0,)))


def nbytes(aval: Aval) -> int:
    """Return the bytes of an operand, of a key by its words; 0 of a token.

    Raises:
        ValueError: a symbolic shape.
    """
    shape = getattr(aval, "shape", None)
    if shape is None:
        return 0
    if not all(isinstance(dim, int) for dim in shape):
        raise ValueError(f"args: expected shapes of known size, got the symbolic shape {shape}")
    return math.prod(shape) * aval.dtype.itemsize


@functools.lru_cache(maxsize=256)
def number_kind(dtype: Any) -> str:
    """Return "real", "complex", or "integer" for integers, booleans and random keys."""
    if jnp.issubdtype(dtype, np.complexfloating):
        return "complex"
    return "real" if jnp.issubdtype(dtype, np.floating) else "integer"


def arithmetic(aval: Aval, times: int, real: tuple[int, int], in_complex: tuple[int, int]) -> OperationCounts:
    """Return the counts of an operation done a number of times on numbers of a dtype.

    Args:
        aval: an operand, for its dtype.
        times: how often.
        real: FLOP and transcendentals of a real one; an integer one takes as many integer operations.
        in_complex: those of a complex one.
    """
    kind = number_kind(aval.dtype)
    if kind == "integer":
        return OperationCounts(integer_ops=times * sum(real))
    flops, transcendentals = in_complex if kind == "complex" else real
    return OperationCounts(times * flops, times * transcendentals)


#: What compilers keep in memory for several readers: the others are computed anew by each of them.
COSTLY = names(
    "exp exp2 expm1 log log1p tanh logistic sqrt rsqrt cbrt div rem pow erf erfc erf_inv atan2 tan asin acos atan sinh "
    "cosh asinh acosh atanh lgamma digamma igamma igammac igamma_grad_a random_gamma_grad regularized_incomplete_beta "
    "polygamma zeta bessel_i0e bessel_i1e"
)
#: Rules by the name of the primitive.
RULES: dict[str, Rule] = {}
#: Names that the walk itself knows: calls, control flow and what moves nothing.
RESERVED: set[str] = set()


def add_rules(rules: Mapping[str, Rule]) -> None:
    """Enter built-in rules; a name that is there already is a mistake of this package."""
    twice = rules.keys() & RULES.keys()
    assert not twice, twice
    RULES.update(rules)


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
