"""Counting rules: the types of counts and of rules, and the rules of all primitives that are not in `_rules_algebra`.

A complex operation counts the real operations of its textbook formula. A product is 4 multiplies and 2 adds. A quotient
(11 operations) uses the divisor's conjugate and squared modulus. exp(x + iy) is exp(x) (cos y + i sin y).
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

#: The type of the operands and results that a rule receives: any object with a `shape` and a `dtype`.
Aval: TypeAlias = Any
#: A pair of counts: floating-point operations, then transcendentals.
Pair: TypeAlias = tuple[int, int]


class OperationCounts(NamedTuple):
    """Exact integer counts of one operation, or of a group of operations.

    Attributes:
        flops: floating-point operations. An add, a multiply or a comparison counts as one, and a fused multiply-add as
            two. A complex operation counts as the real operations that it consists of.
        transcendentals: evaluations of exp, log, sqrt, sin, pow, erf and similar functions. These are not in `flops`.
        integer_ops: operations on integers and booleans.
        bytes: bytes read and written without fusion. If a rule returns None, the bytes of each operand and each
            result count, except those of scalar literals.
        launches: number of kernels that are launched; 0 for an operation that moves no bytes.
    """

    flops: int = 0
    transcendentals: int = 0
    integer_ops: int = 0
    bytes: int | None = None
    launches: int = 1


class Operation(NamedTuple):
    """The operands, results and parameters of an equation."""

    inputs: Sequence[Aval]
    outputs: Sequence[Aval]
    params: Mapping[str, Any]

    @property
    def operand(self) -> Aval:
        return self.inputs[0]

    @property
    def result(self) -> Aval:
        return self.outputs[0]


class Rule(NamedTuple):
    """How to count an operation, and how a compiler may fuse the operation with others."""

    #: The row of `by_family` in a profile that the operation counts in.
    family: str
    #: The number of computations; the cost of one on real and on complex numbers; the operand whose dtype decides.
    times: Callable[[Operation], int] | None = None
    real: Pair = (1, 0)
    in_complex: Pair = (2, 0)
    of: int = 0
    #: The bytes that the operation moves, if this is not the sum of the bytes of all operands and results.
    moved: Callable[[Operation], int] | None = None
    #: A function that returns all counts, used instead of the fields above. It returns None if the counts are unknown.
    said: Callable[[Operation], OperationCounts | None] | None = None
    #: The number of first operands that must be in memory; None means all. The kernel may compute the other operands.
    in_memory: int | None = None
    #: Whether the result must be written to memory. If not, kernels that read the result may compute it themselves.
    writes_memory: bool = True
    #: Whether the result may take over the memory of an operand that no later operation reads.
    in_place: bool = False
    #: Whether compilers store a result that several kernels read. If not, each of the kernels computes it again.
    costly: bool = False
    #: Whether the operation reads only a part of its first operand: as many bytes as the result has.
    reads_part: bool = False
    #: The bytes of scratch memory that the operation needs.
    workspace: Callable[[Operation], int] | None = None
    #: For each operand: whether the operation reads the operand in another memory layout.
    reorders: Callable[[Operation], Sequence[bool]] | None = None
    #: The number of matrices, matrix products or transforms that are computed one after another.
    pieces: Callable[[Operation], int] | None = None
    #: More counts, by name of the operation. A count under the operation's own name replaces its default count.
    also: Callable[[Operation], Mapping[str, int]] | None = None

    def counts(self, op: Operation) -> OperationCounts | None:
        if self.said is not None:
            return self.said(op)
        counts = OperationCounts()
        if self.times is not None:
            counts = arithmetic(op.inputs[self.of], self.times(op), self.real, self.in_complex)
        return counts if self.moved is None else counts._replace(bytes=self.moved(op))


def arithmetic(aval: Aval, times: int, real: Pair = (1, 0), in_complex: Pair = (2, 0)) -> OperationCounts:
    """Return the counts of `times` computations on the dtype of `aval`; each costs `real` or `in_complex`."""
    kind = number_kind(aval.dtype)
    if kind == "integer":
        return OperationCounts(integer_ops=times * sum(real))
    flops, transcendentals = in_complex if kind == "complex" else real
    return OperationCounts(times * flops, times * transcendentals)


def names(text: str) -> frozenset[str]:
    """Return the set of the names that a text holds, separated by spaces."""
    return frozenset(text.split())


def elements(aval: Aval) -> int:
    """Return the number of elements of an array; 0 for a token, which is no array."""
    # JAX gives some results of empty matrices a size of -1.
    return max(math.prod(getattr(aval, "shape", (0,))), 0)


def nbytes(*avals: Aval) -> int:
    """Return the total number of bytes of arrays. A random key counts the bytes of its words, and a token counts 0."""
    return sum(elements(aval) * aval.dtype.itemsize for aval in avals if getattr(aval, "shape", None) is not None)


@functools.lru_cache(maxsize=256)
def number_kind(dtype: Any) -> str:
    """Return "real", "complex" or "integer". Booleans and random keys count as "integer"."""
    if jnp.issubdtype(dtype, np.complexfloating):
        return "complex"
    return "real" if jnp.issubdtype(dtype, np.floating) else "integer"


def is_real_on_one_side(op: Operation) -> bool:
    """Return whether an operation converts real numbers to complex numbers or complex numbers to real numbers."""
    return len({number_kind(aval.dtype) for aval in (*op.inputs, *op.outputs)}) > 1


# --- Elementwise work, reductions, moving and indexing, random numbers, calls out of the program -----------

#: Dict from names of primitives to two costs (FLOP, transcendentals): of a real element and of a complex element.
_ELEMENTWISE: Mapping[str, tuple[Pair, Pair]] = {
    "add sub add_any neg max min eq ne lt le gt ge eq_to lt_to le_to is_finite": ((1, 0), (2, 0)),
    "floor ceil round rem nextafter reduce_precision conj and or xor not population_count clz mulhi "
    "shift_left shift_right_arithmetic shift_right_logical": ((1, 0), (1, 0)),
    "clamp": ((2, 0), (2, 0)),
    "one_minus_square": ((3, 0), (10, 0)),  # (1 + x)(1 - x)
    "mul square": ((1, 0), (6, 0)),
    "div": ((1, 0), (11, 0)),
    "abs": ((1, 0), (3, 1)),
    "sign": ((1, 0), (5, 1)),
    # The series or iterations inside a special function do not count.
    "lgamma digamma bessel_i0e bessel_i1e erf erfc erf_inv zeta polygamma atan2 cbrt": ((0, 1), (0, 1)),
    "exp exp2": ((0, 1), (2, 3)),
    "expm1": ((0, 1), (4, 3)),
    "log": ((0, 1), (4, 2)),
    "log2 log1p": ((0, 1), (6, 2)),
    "sqrt": ((0, 1), (7, 2)),
    "rsqrt": ((0, 1), (13, 2)),
    "pow": ((0, 1), (12, 5)),
    "logistic": ((0, 1), (17, 3)),
    "sin cos sinh cosh": ((0, 1), (2, 4)),
    "tan tanh": ((0, 1), (15, 4)),
    "asin acos atan asinh acosh atanh": ((0, 1), (21, 4)),
}
_COSTLY = names(
    "exp exp2 expm1 log log1p tanh logistic sqrt rsqrt cbrt div rem pow erf erfc erf_inv atan2 tan asin acos atan sinh "
    "cosh asinh acosh atanh lgamma digamma polygamma zeta bessel_i0e bessel_i1e"
)
#: Special functions that XLA computes by iterating over whole arrays until every element has converged. The number of a
#: function says how many values XLA stores for each element during the iteration.
_ITERATED = {
    **{"igamma": 25, "igammac": 25, "igamma_grad_a": 38, "random_gamma_grad": 35, "regularized_incomplete_beta": 9}
}
#: Dict from reductions to two costs (FLOP, transcendentals) of combining two elements: real ones and complex ones.
_COMBINE: Mapping[str, tuple[Pair, Pair]] = {
    **dict.fromkeys(("sum", "max", "min"), ((1, 0), (2, 0))),
    "prod": ((1, 0), (6, 0)),
    **dict.fromkeys(("and", "or", "xor"), ((1, 0), (1, 0))),
}
#: The family of primitives that make the device wait for the host.
CALLBACK = "callback"
#: Threefry-2x32 with 20 rounds (Salmon et al., SC 2011). A round is an add, a rotation (two shifts and an or) and an
#: xor. The key is added six times: with two adds the first time, and with three adds each later time.
_THREEFRY_OPS = 20 * 5 + 2 + 5 * 3
#: Philox-4x32 makes four words in 10 rounds. A round has two products that give two words each, four xors and two adds.
_PHILOX_OPS = 10 * (2 * 2 + 4 + 2) // 4


def _results(op: Operation) -> int:
    return elements(op.result)


def _integer_pow(op: Operation) -> OperationCounts:
    """Count squarings and multiplies (Knuth, The Art of Computer Programming, 4.6.3), and a division if y < 0."""
    power, inverse = abs(op.params["y"]), op.params["y"] < 0
    products = max(power.bit_length() + power.bit_count() - 2, 0)
    return arithmetic(op.result, elements(op.result), (products + inverse, 0), (6 * products + 11 * inverse, 0))


def _each(op: Operation) -> int:
    """Return the number of operations that combine two elements: 1, or all equations of a general reduction."""
    return len(op.params["jaxpr"].eqns) if "jaxpr" in op.params else 1


def _cumulated(op: Operation) -> int:
    """Return the number of operations: `n - 1` for each row of `n` elements along the axis."""
    length = op.operand.shape[op.params["axis"]]
    return elements(op.operand) - elements(op.operand) // length if length else 0


def _gamma(op: Operation) -> OperationCounts:
    """Count an accepted trial of Marsaglia and Tsang's method (2000) for each sample, with its two random numbers."""
    samples = elements(op.result)
    return OperationCounts(14 * samples, 4 * samples, 2 * _THREEFRY_OPS * samples)


def _random(ops_per_block: int, words: int = 1) -> Rule:
    """Return the rule of a random generator that makes `words` elements with every `ops_per_block` operations."""
    return Rule(
        "random", said=lambda op: OperationCounts(integer_ops=sum(map(elements, op.outputs)) * ops_per_block // words)
    )


def _random_bits(op: Operation) -> OperationCounts:
    """Count one Threefry block for each element. Every generator other than Threefry counts as Philox."""
    is_threefry = "fry" in str(op.operand.dtype)
    return OperationCounts(integer_ops=elements(op.result) * (_THREEFRY_OPS + 1 if is_threefry else _PHILOX_OPS))


def _written(index: int, combine: tuple[Pair, Pair] | None = None) -> Rule:
    """Return the rule of an in-place update, which moves only updated bytes. `combine` also reads the old values."""
    passes = 2 if combine is None else 3
    return Rule(
        "scatter",
        (lambda op: elements(op.inputs[index])) if combine else None,
        *(combine or ()),
        of=index,
        moved=lambda op: (passes - 1) * nbytes(op.inputs[index]) + nbytes(*op.inputs[1:]),
        in_place=True,
    )


def _scatter(combine: tuple[Pair, Pair] | None = None) -> Rule:
    """Return the rule of a scatter, which writes one window for each index vector."""
    return _written(2, combine)._replace(
        also=lambda op: {"scatter_places": elements(op.inputs[1]) // max(op.inputs[1].shape[-1], 1)}
    )


def _combining(op: Operation) -> OperationCounts:
    """Count one operation for each element that a single device holds."""
    counts = [arithmetic(aval, elements(aval)) for aval in op.inputs]
    return OperationCounts(sum(c.flops for c in counts), 0, sum(c.integer_ops for c in counts))


def _pallas(op: Operation) -> OperationCounts | None:
    """Return the counts that the author of a kernel declares as `cost_estimate`; None if the author declares none."""
    if (said := op.params.get("cost_estimate")) is None:
        return None
    return OperationCounts(int(said.flops), int(said.transcendentals), 0, int(said.bytes_accessed))


_FUSED = Rule("elementwise", in_memory=0, writes_memory=False, in_place=True)
_ELEMENT, _MOVED = _FUSED._replace(times=_results, of=-1), _FUSED._replace(family="movement")
_REDUCTION = Rule(  # `n - 1` operations for `n` elements
    "reduction", lambda op: max(elements(op.operand) - elements(op.result), 0) * _each(op), in_memory=0, in_place=True
)
#: A gather moves the bytes of its result twice (read and written) and the bytes of its indices once.
_TOUCHING = Rule("gather", moved=lambda op: 2 * nbytes(*op.outputs) + nbytes(*op.inputs[1:]))
_GATHER = _TOUCHING._replace(in_memory=0, writes_memory=False, reads_part=True)
#: The scratch memory holds the partial results of blocks, and a copy of these results if the array has several axes.
_CUMULATIVE = Rule("cumulative", _cumulated, workspace=lambda op: (1 + (len(op.result.shape) > 1)) * nbytes(op.result))
#: A window of `size` elements, including padding, counts `size - 1` operations.
_WINDOW = Rule("window", lambda op: _results(op) * max(math.prod(op.params["window_dimensions"]) - 1, 0) * _each(op))
#: A window counts the comparisons of its elements, and one add of an element of the source.
_SELECTION = Rule("window", lambda op: min(map(elements, op.inputs[:2])) * math.prod(op.params["window_dimensions"]))


def _costing(rule: Rule, costs: tuple[Pair, Pair]) -> Rule:
    return rule._replace(real=costs[0], in_complex=costs[1])


#: Dict from names of primitives, separated by spaces, to the rule of each of these primitives.
_TABLE: Mapping[str, Rule] = {
    "integer_pow": _FUSED._replace(said=_integer_pow),
    # A multiply and an add for each coefficient except the highest (Horner).
    "polynomial": _FUSED._replace(
        times=lambda op: elements(op.result) * (len(op.inputs) - 2), real=(2, 0), in_complex=(8, 0)
    ),
    # Primitives that move data and compute nothing.
    "broadcast_in_dim concatenate pad select_n convert_element_type bitcast_convert_type iota copy copy_p real imag "
    "complex split stack unstack tile device_put empty empty2 new_ref freeze random_clone": _MOVED,
    "slice": _MOVED._replace(reads_part=True),
    # The results have another memory layout, so they never reuse the operand's memory.
    "transpose rev": _MOVED._replace(in_place=False),
    "reduce argmax argmin": _REDUCTION,
    "gather": _GATHER._replace(
        costly=True,
        also=lambda op: {"gather_places": elements(op.result) // max(math.prod(op.params["slice_sizes"]), 1)},
    ),
    "dynamic_slice": _GATHER._replace(also=lambda op: {"gather_places": 1}),
    "get": _TOUCHING,
    # Bytes: new values read and written, old values read and written, and the indices.
    "swap": Rule("scatter", moved=lambda o: 2 * nbytes(o.result, o.inputs[1]) + nbytes(*o.inputs[2:]), in_place=True),
    "addupdate": _written(1, _COMBINE["sum"]),
    "dynamic_update_slice": _written(1)._replace(also=lambda op: {"scatter_places": 1}),
    "scatter": _scatter(),
    "scatter-add scatter-sub scatter-max scatter-min": _scatter(_COMBINE["sum"]),
    "scatter-mul": _scatter(_COMBINE["prod"]),
    "cumlogsumexp": _costing(_CUMULATIVE, ((4, 2), (12, 5))),  # max + log1p(exp(-|a - b|))
    "reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_gather_add": _WINDOW,
    "select_and_scatter_add select_and_scatter": _SELECTION,
    # Scratch: state and key of a block, three words for each element.
    "random_bits": Rule("random", said=_random_bits, workspace=lambda op: 12 * elements(op.result)),
    "threefry2x32": _random(_THREEFRY_OPS, 2),
    "random_split random_fold_in": _random(_THREEFRY_OPS),
    "random_seed": _random(3),  # two words by a shift, a mask, a conversion
    "rng_uniform rng_bit_generator": _random(_PHILOX_OPS),
    "random_gamma": Rule("random", said=_gamma, workspace=lambda op: 36 * nbytes(op.result)),  # XLA's scratch memory
    "pure_callback io_callback debug_callback debug_print python_callback infeed outfeed": Rule(CALLBACK),
    "psum psum2 psum_invariant pmax pmin reduce_scatter unreduced_psum unreduced_reduce_scatter": Rule(
        "collective", said=_combining
    ),
    "all_gather all_gather_invariant all_gather_reduced all_to_all ragged_all_to_all ppermute pshuffle psend precv "
    "reshard": Rule("collective"),
    "pallas_call": Rule("kernel", said=_pallas),
}
#: Dict from the name of a primitive to its rule.
ARRAY_RULES: Mapping[str, Rule] = {
    **{name: rule for text, rule in _TABLE.items() for name in text.split()},
    **{
        name: _costing(_ELEMENT, costs)._replace(costly=name in _COSTLY)
        for text, costs in _ELEMENTWISE.items()
        for name in text.split()
    },
    **{
        name: Rule("elementwise", _results, (0, 1), (0, 1), workspace=lambda op, kept=kept: kept * nbytes(op.result))
        for name, kept in _ITERATED.items()
    },
    **{f"reduce_{name}": _costing(_REDUCTION, costs) for name, costs in _COMBINE.items()},
    **{f"cum{name}": _costing(_CUMULATIVE, costs) for name, costs in _COMBINE.items()},
}
