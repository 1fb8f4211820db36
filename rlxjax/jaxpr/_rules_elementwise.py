"""Rules of what compilers fuse: elementwise arithmetic, reductions, and moving data.

Complex numbers follow the textbook: a product is 4 multiplies and 2 adds, a quotient multiplies by the
conjugate and divides by the squared modulus (11), exp(x + iy) is exp(x) (cos y + i sin y).
"""

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
}
