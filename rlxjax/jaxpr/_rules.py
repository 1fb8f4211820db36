"""What one operation of a JAX program does: its counts, and the rule that gives them."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

#: What a rule reads of an operand or a result: an object with a `shape` and a `dtype`.
Aval: TypeAlias = Any


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
Counting: TypeAlias = Callable[[Operation], OperationCounts | None]


class Rule(NamedTuple):
    """How an operation is counted, and how a compiler may fuse it.

    Attributes:
        family: what the profile sums it under.
        counts: of one equation.
        in_memory: how many of its first operands have to lie in memory; None is all. Others may be
            computed on the way.
        writes_memory: its result has to lie in memory; else its readers may compute it on the way.
        in_place: its result may take the memory of an operand that nobody reads later.
        costly: compilers keep its result in memory for several readers; others are computed anew by each of them.
        reads_part: it reads as much of its first operand as it gives.
        workspace: bytes that it needs while it runs.
        reorders: whether it reads an operand in another order of memory, for each.
        slices: how many separate places of an operand it reads or writes.
        also: what else latency models count of it, by name.
    """

    family: str
    counts: Counting
    in_memory: int | None = None
    writes_memory: bool = True
    in_place: bool = False
    costly: bool = False
    reads_part: bool = False
    workspace: Callable[[Operation], int] | None = None
    reorders: Callable[[Operation], Sequence[bool]] | None = None
    slices: Callable[[Operation], int] | None = None
    also: Callable[[Operation], Mapping[str, int]] | None = None


def names(text: str) -> frozenset[str]:
    """Return the words of a text: the names of primitives."""
    return frozenset(text.split())


def elements(aval: Aval) -> int:
    """Return the number of elements of an operand; 0 of a token."""
    return math.prod(getattr(aval, "shape", (0,)))


def nbytes(aval: Aval) -> int:
    """Return the bytes of an operand, of a key by its words; 0 of a token."""
    shape = getattr(aval, "shape", None)
    return 0 if shape is None else math.prod(shape) * aval.dtype.itemsize


@functools.lru_cache(maxsize=256)
def number_kind(dtype: Any) -> str:
    """Return "real", "complex", or "integer" for integers, booleans and random keys."""
    if jnp.issubdtype(dtype, np.complexfloating):
        return "complex"
    return "real" if jnp.issubdtype(dtype, np.floating) else "integer"


def is_real_on_one_side(op: Operation) -> bool:
    """Return whether an operation turns real numbers into complex ones, or back."""
    return len({number_kind(aval.dtype) for aval in (*op.inputs, *op.outputs)}) > 1


#: FLOP and transcendentals.
Pair: TypeAlias = tuple[int, int]


def arithmetic(aval: Aval, times: int, real: Pair = (1, 0), in_complex: Pair = (2, 0)) -> OperationCounts:
    """Return the counts of an operation done a number of times on numbers of a dtype."""
    kind = number_kind(aval.dtype)
    if kind == "integer":
        return OperationCounts(integer_ops=times * sum(real))
    flops, transcendentals = in_complex if kind == "complex" else real
    return OperationCounts(times * flops, times * transcendentals)


def nothing(op: Operation) -> OperationCounts:
    """Count what moves data and computes nothing."""
    return OperationCounts()
