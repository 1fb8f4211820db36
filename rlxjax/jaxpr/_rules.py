"""What one operation of a JAX program does: its counts, and the record that says how they are made."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

#: What a rule reads of an operand or a result: an object with a `shape` and a `dtype`.
Aval: TypeAlias = Any
#: FLOP and transcendentals.
Pair: TypeAlias = tuple[int, int]


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


class Rule(NamedTuple):
    """How an operation is counted, and how a compiler may fuse it."""

    #: What the profile sums it under.
    family: str
    #: How often it computes, what one time takes of real and of complex numbers, and which operand says the kind.
    times: Callable[[Operation], int] | None = None
    real: Pair = (1, 0)
    in_complex: Pair = (2, 0)
    of: int = 0
    #: Bytes, where these are not those of all operands and results.
    moved: Callable[[Operation], int] | None = None
    #: What says all of that in its place; None of an operation that nothing is known about.
    said: Callable[[Operation], OperationCounts | None] | None = None
    #: How many of its first operands have to lie in memory, None of all; others may be computed on the way.
    in_memory: int | None = None
    #: Its result has to lie in memory; else its readers may compute it on the way.
    writes_memory: bool = True
    #: Its result may take the memory of an operand that nobody reads later.
    in_place: bool = False
    #: Compilers keep its result in memory for several readers; others are computed anew by each of them.
    costly: bool = False
    #: It reads as much of its first operand as it gives.
    reads_part: bool = False
    #: Bytes that it needs while it runs.
    workspace: Callable[[Operation], int] | None = None
    #: Whether it reads an operand in another order of memory, for each.
    reorders: Callable[[Operation], Sequence[bool]] | None = None
    #: How many separate places of an operand it reads or writes.
    slices: Callable[[Operation], int] | None = None
    #: What else latency models count of it, by name.
    also: Callable[[Operation], Mapping[str, int]] | None = None

    def counts(self, op: Operation) -> OperationCounts | None:
        if self.said is not None:
            return self.said(op)
        counts = OperationCounts()
        if self.times is not None:
            counts = arithmetic(op.inputs[self.of], self.times(op), self.real, self.in_complex)
        return counts if self.moved is None else counts._replace(bytes=self.moved(op))


def arithmetic(aval: Aval, times: int, real: Pair = (1, 0), in_complex: Pair = (2, 0)) -> OperationCounts:
    """Return the counts of an operation done a number of times on numbers of a dtype."""
    kind = number_kind(aval.dtype)
    if kind == "integer":
        return OperationCounts(integer_ops=times * sum(real))
    flops, transcendentals = in_complex if kind == "complex" else real
    return OperationCounts(times * flops, times * transcendentals)


def names(text: str) -> frozenset[str]:
    """Return the words of a text: the names of primitives."""
    return frozenset(text.split())


def elements(aval: Aval) -> int:
    """Return the number of elements of an operand; 0 of a token."""
    return math.prod(getattr(aval, "shape", (0,)))


def nbytes(*avals: Aval) -> int:
    """Return the bytes of operands, of a key by its words; 0 of a token."""
    return sum(elements(aval) * aval.dtype.itemsize for aval in avals if getattr(aval, "shape", None) is not None)


@functools.lru_cache(maxsize=256)
def number_kind(dtype: Any) -> str:
    """Return "real", "complex", or "integer" for integers, booleans and random keys."""
    if jnp.issubdtype(dtype, np.complexfloating):
        return "complex"
    return "real" if jnp.issubdtype(dtype, np.floating) else "integer"


def is_real_on_one_side(op: Operation) -> bool:
    """Return whether an operation turns real numbers into complex ones, or back."""
    return len({number_kind(aval.dtype) for aval in (*op.inputs, *op.outputs)}) > 1
