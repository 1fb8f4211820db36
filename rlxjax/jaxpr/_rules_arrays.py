"""Rules of all but algebra: elementwise work, reductions, moving and indexing, random numbers, what is outside.

Complex numbers follow the textbook: a product is 4 multiplies and 2 adds, a quotient multiplies by the
conjugate and divides by the squared modulus (11), exp(x + iy) is exp(x) (cos y + i sin y).
"""

import math
from collections.abc import Mapping

from ._rules import Counting, Operation, OperationCounts, Pair, Rule, arithmetic, elements, names, nbytes, nothing

#: Names -> (FLOP, transcendentals) of a real element, and of a complex one.
_ELEMENTWISE: Mapping[str, tuple[Pair, Pair]] = {
    **dict.fromkeys(
        names("add sub add_any neg max min eq ne lt le gt ge eq_to lt_to le_to is_finite"), ((1, 0), (2, 0))
    ),
    **dict.fromkeys(names("floor ceil round rem nextafter reduce_precision conj"), ((1, 0), (1, 0))),
    **dict.fromkeys(names("and or xor not population_count clz mulhi"), ((1, 0), (1, 0))),
    **dict.fromkeys(names("shift_left shift_right_arithmetic shift_right_logical"), ((1, 0), (1, 0))),
    "clamp": ((2, 0), (2, 0)),
    "one_minus_square": ((3, 0), (10, 0)),  # (1 + x)(1 - x)
    **dict.fromkeys(("mul", "square"), ((1, 0), (6, 0))),
    "div": ((1, 0), (11, 0)),
    "abs": ((1, 0), (3, 1)),
    "sign": ((1, 0), (5, 1)),
    # What a special function computes inside, series or iterations, is not looked at.
    **dict.fromkeys(names("lgamma digamma bessel_i0e bessel_i1e erf erfc erf_inv"), ((0, 1), (0, 1))),
    **dict.fromkeys(names("zeta polygamma atan2 cbrt"), ((0, 1), (0, 1))),
    **dict.fromkeys(("exp", "exp2"), ((0, 1), (2, 3))),
    "expm1": ((0, 1), (4, 3)),
    "log": ((0, 1), (4, 2)),
    **dict.fromkeys(("log2", "log1p"), ((0, 1), (6, 2))),
    "sqrt": ((0, 1), (7, 2)),
    "rsqrt": ((0, 1), (13, 2)),
    "pow": ((0, 1), (12, 5)),
    "logistic": ((0, 1), (17, 3)),
    **dict.fromkeys(names("sin cos sinh cosh"), ((0, 1), (2, 4))),
    **dict.fromkeys(("tan", "tanh"), ((0, 1), (15, 4))),
    **dict.fromkeys(names("asin acos atan asinh acosh atanh"), ((0, 1), (21, 4))),
}
_COSTLY = names(
    "exp exp2 expm1 log log1p tanh logistic sqrt rsqrt cbrt div rem pow erf erfc erf_inv atan2 tan asin acos atan sinh "
    "cosh asinh acosh atanh lgamma digamma polygamma zeta bessel_i0e bessel_i1e"
)
#: Special functions that iterate until the last element has converged -> values of an element that are kept
#: meanwhile, as XLA writes their series and continued fractions.
_ITERATED = {
    "igamma": 25,
    "igammac": 25,
    "igamma_grad_a": 38,
    "random_gamma_grad": 35,
    "regularized_incomplete_beta": 9,
}
#: Names -> FLOP of putting one more real element in, and one more complex one.
COMBINE: Mapping[str, Pair] = {
    **dict.fromkeys(("sum", "max", "min"), (1, 2)),
    "prod": (1, 6),
    **dict.fromkeys(("and", "or", "xor"), (1, 1)),
}
#: What moves data and computes nothing.
_MOVEMENT = names(
    "broadcast_in_dim concatenate pad select_n convert_element_type bitcast_convert_type "
    "iota copy copy_p real imag complex split stack unstack tile device_put empty empty2 new_ref freeze random_clone"
)


def _elementwise(real: Pair, in_complex: Pair) -> Counting:
    return lambda op: arithmetic(op.inputs[-1], elements(op.result), real, in_complex)


def _integer_pow(op: Operation) -> OperationCounts:
    """Squares and multiplies (Knuth, The Art of Computer Programming, 4.6.3), then one division if y < 0."""
    power = abs(op.params["y"])
    products = max(power.bit_length() + power.bit_count() - 2, 0)
    inverse = op.params["y"] < 0
    return arithmetic(op.result, elements(op.result), (products + inverse, 0), (6 * products + 11 * inverse, 0))


def _polynomial(op: Operation) -> OperationCounts:
    """A multiply and an add for each coefficient but the highest (Horner)."""
    return arithmetic(op.operand, elements(op.result) * (len(op.inputs) - 2), (2, 0), (8, 0))


def _reduction(combine: Pair) -> Counting:
    """`n - 1` operations for `n` elements; of a general reduction each of its function's equations is one."""

    def count(op: Operation) -> OperationCounts:
        times = max(elements(op.operand) - elements(op.result), 0)
        each = len(op.params["jaxpr"].eqns) if "jaxpr" in op.params else 1
        return arithmetic(op.operand, times * each, (combine[0], 0), (combine[1], 0))

    return count


def _fused(family: str, count: Counting, costly: bool = False) -> Rule:
    return Rule(family, count, in_memory=0, writes_memory=False, in_place=True, costly=costly)


def _iterated(values: int) -> Rule:
    """Return the rule of a loop over whole arrays, which keeps so many values of each element."""
    return Rule("elementwise", _elementwise((0, 1), (0, 1)), workspace=lambda op: values * nbytes(op.result))


def _reducing(combine: Pair) -> Rule:
    return Rule("reduction", _reduction(combine), in_memory=0, in_place=True)


_MOVED = _fused("movement", nothing)


#: Threefry-2x32 with 20 rounds (Salmon et al., SC 2011): a round is an add, a rotation (two shifts and an or)
#: and an xor; the key goes in six times, two adds the first time and three after it.
_THREEFRY_OPS = 20 * 5 + 2 + 5 * 3
#: Philox-4x32 with 10 rounds gives four words: a round is two products of two words, four xors and two adds.
_PHILOX_OPS = 10 * (2 * 2 + 4 + 2) // 4


def _touched(op: Operation) -> OperationCounts:
    """What is read of the operand and written: the result twice, and the indices."""
    return OperationCounts(bytes=2 * sum(map(nbytes, op.outputs)) + sum(map(nbytes, op.inputs[1:])))


def _swapped(op: Operation) -> OperationCounts:
    """The new values read and written, the old ones read and written, and the indices."""
    return OperationCounts(bytes=2 * nbytes(op.result) + nbytes(op.inputs[1]) + sum(map(nbytes, op.inputs[1:])))


def _written(index: int, combine: Pair | None = None) -> Counting:
    """Updates, the operand of an index, written into another in place; where they are combined, it is read as well."""

    def count(op: Operation) -> OperationCounts:
        updates = op.inputs[index]
        passes = 2 if combine is None else 3
        indices = sum(map(nbytes, op.inputs[1:])) - nbytes(updates)
        real, in_complex = combine or (0, 0)
        counts = arithmetic(updates, elements(updates), (real, 0), (in_complex, 0))
        return counts._replace(bytes=passes * nbytes(updates) + indices)

    return count


def _cumulative(real: Pair, in_complex: Pair) -> Rule:
    """`n - 1` operations along the axis; partial results of blocks, and their copy if there are other axes."""

    def count(op: Operation) -> OperationCounts:
        length = op.operand.shape[op.params["axis"]]
        times = elements(op.operand) - elements(op.operand) // length if length else 0
        return arithmetic(op.operand, times, real, in_complex)

    return Rule("cumulative", count, workspace=lambda op: (2 if len(op.result.shape) > 1 else 1) * nbytes(op.result))


def _windows(op: Operation) -> OperationCounts:
    """`size - 1` operations for a window, padding included."""
    times = elements(op.result) * max(math.prod(op.params["window_dimensions"]) - 1, 0)
    return arithmetic(op.operand, times * (len(op.params["jaxpr"].eqns) if "jaxpr" in op.params else 1))


def _select_and_scatter(op: Operation) -> OperationCounts:
    """For each window the comparisons of its elements, and one add of its source."""
    source = min(op.inputs[:2], key=elements)  # the other one, which the windows cover, is no smaller
    return arithmetic(source, elements(source) * math.prod(op.params["window_dimensions"]))


def _gamma(op: Operation) -> OperationCounts:
    """One accepted trial of Marsaglia and Tsang (2000): a normal and a uniform number, two logs, a cube, a power."""
    samples = elements(op.result)
    return OperationCounts(14 * samples, 4 * samples, 2 * _THREEFRY_OPS * samples)


def _random(ops_per_block: int, words: int = 1) -> Rule:
    """Operations of a block, which gives so many elements."""

    def count(op: Operation) -> OperationCounts:
        return OperationCounts(integer_ops=sum(map(elements, op.outputs)) * ops_per_block // words)

    return Rule("random", count)


def _random_bits(op: Operation) -> OperationCounts:
    """One block of Threefry for an element, whose two words are put together; other generators as Philox."""
    is_threefry = "fry" in str(op.operand.dtype)
    return OperationCounts(integer_ops=elements(op.result) * (_THREEFRY_OPS + 1 if is_threefry else _PHILOX_OPS))


def _scatter(combine: Pair | None = None) -> Rule:
    """Return the rule of a scatter, which writes a window for each vector of its indices."""
    return Rule(
        "scatter",
        _written(2, combine),
        in_place=True,
        slices=lambda op: elements(op.inputs[1]) // max(op.inputs[1].shape[-1], 1),
    )


_GATHER = Rule("gather", _touched, in_memory=0, writes_memory=False, reads_part=True)


#: The family of primitives at which the device waits for the host.
CALLBACK = "callback"
_COMBINING = names("psum psum2 psum_invariant pmax pmin reduce_scatter unreduced_psum unreduced_reduce_scatter")
_EXCHANGING = names(
    "all_gather all_gather_invariant all_gather_reduced all_to_all ragged_all_to_all ppermute pshuffle "
    "psend precv reshard"
)


def _combining(op: Operation) -> OperationCounts:
    """One operation for every element that a device gives."""
    counts = [arithmetic(aval, elements(aval)) for aval in op.inputs]
    return OperationCounts(sum(c.flops for c in counts), 0, sum(c.integer_ops for c in counts))


def _pallas(op: Operation) -> OperationCounts | None:
    """What the kernel's author says; nothing is known without it."""
    estimate = op.params.get("cost_estimate")
    if estimate is None:
        return None
    return OperationCounts(int(estimate.flops), int(estimate.transcendentals), 0, int(estimate.bytes_accessed))


#: By the name of the primitive.
RULES: Mapping[str, Rule] = {
    **{name: _fused("elementwise", _elementwise(*costs), name in _COSTLY) for name, costs in _ELEMENTWISE.items()},
    "integer_pow": _fused("elementwise", _integer_pow),
    "polynomial": _fused("elementwise", _polynomial),
    **{name: _iterated(values) for name, values in _ITERATED.items()},
    **dict.fromkeys(_MOVEMENT, _MOVED),
    "slice": _MOVED._replace(reads_part=True),
    # Their results lie in another order, and so never where the operand lies.
    **dict.fromkeys(("transpose", "rev"), _MOVED._replace(in_place=False)),
    **{f"reduce_{name}": _reducing(combine) for name, combine in COMBINE.items()},
    **{f"arg{name}": _reducing(COMBINE[name]) for name in ("max", "min")},
    "reduce": _reducing((1, 2)),
    "gather": _GATHER._replace(
        costly=True, slices=lambda op: elements(op.result) // max(math.prod(op.params["slice_sizes"]), 1)
    ),
    "dynamic_slice": _GATHER._replace(slices=lambda op: 1),
    "get": Rule("gather", _touched),
    "swap": Rule("scatter", _swapped, in_place=True),
    "addupdate": Rule("scatter", _written(1, (1, 2)), in_place=True),
    "dynamic_update_slice": Rule("scatter", _written(1), in_place=True, slices=lambda op: 1),
    "scatter": _scatter(),
    **{f"scatter-{name}": _scatter(COMBINE[name]) for name in ("max", "min")},
    **dict.fromkeys(("scatter-add", "scatter-sub"), _scatter(COMBINE["sum"])),
    "scatter-mul": _scatter(COMBINE["prod"]),
    **{f"cum{name}": _cumulative((real, 0), (in_complex, 0)) for name, (real, in_complex) in COMBINE.items()},
    "cumlogsumexp": _cumulative((4, 2), (12, 5)),  # max + log1p(exp(-|a - b|))
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add"),
        Rule("window", _windows),
    ),
    **dict.fromkeys(("select_and_scatter_add", "select_and_scatter"), Rule("window", _select_and_scatter)),
    # The state of a block and its key: three words of 32 bits for every element.
    "random_bits": Rule("random", _random_bits, workspace=lambda op: 12 * elements(op.result)),
    "threefry2x32": _random(_THREEFRY_OPS, 2),
    **dict.fromkeys(("random_split", "random_fold_in"), _random(_THREEFRY_OPS)),
    "random_seed": _random(3),  # two words by a shift, a mask, a conversion
    **dict.fromkeys(("rng_uniform", "rng_bit_generator"), _random(_PHILOX_OPS)),
    "random_gamma": Rule("random", _gamma, workspace=lambda op: 36 * nbytes(op.result)),  # XLA's state of a trial
    **dict.fromkeys(
        names("pure_callback io_callback debug_callback debug_print python_callback infeed outfeed"),
        Rule(CALLBACK, nothing),
    ),
    **dict.fromkeys(_COMBINING, Rule("collective", _combining)),
    **dict.fromkeys(_EXCHANGING, Rule("collective", nothing)),
    "pallas_call": Rule("kernel", _pallas),
}
