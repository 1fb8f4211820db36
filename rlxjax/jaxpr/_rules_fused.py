"""Rules of what compilers fuse: elementwise arithmetic, reductions, and moving data.

Complex numbers follow the textbook: a product is 4 multiplies and 2 adds, a quotient multiplies by the
conjugate and divides by the squared modulus (11), exp(x + iy) is exp(x) (cos y + i sin y).
"""

from ._operations import Counting, Operation, OperationCounts, Rule, add_rules, arithmetic, elements, names, nbytes

Pair = tuple[int, int]

#: Names -> (FLOP, transcendentals) of a real element, and of a complex one.
_ELEMENTWISE: dict[str, tuple[Pair, Pair]] = {
    **dict.fromkeys(("add", "sub", "add_any", "neg"), ((1, 0), (2, 0))),
    **dict.fromkeys(("max", "min", "eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to"), ((1, 0), (2, 0))),
    **dict.fromkeys(("floor", "ceil", "round", "rem", "nextafter", "reduce_precision"), ((1, 0), (1, 0))),
    **dict.fromkeys(("and", "or", "xor", "not", "population_count", "clz", "mulhi"), ((1, 0), (1, 0))),
    **dict.fromkeys(("shift_left", "shift_right_arithmetic", "shift_right_logical"), ((1, 0), (1, 0))),
    "is_finite": ((1, 0), (2, 0)),
    "clamp": ((2, 0), (2, 0)),
    "conj": ((1, 0), (1, 0)),
    "one_minus_square": ((3, 0), (10, 0)),  # (1 + x)(1 - x)
    "mul": ((1, 0), (6, 0)),
    "square": ((1, 0), (6, 0)),
    "div": ((1, 0), (11, 0)),
    "abs": ((1, 0), (3, 1)),
    "sign": ((1, 0), (5, 1)),
    # What a special function computes inside, series or iterations, is not looked at.
    **dict.fromkeys(("lgamma", "digamma", "bessel_i0e", "bessel_i1e", "erf", "erfc", "erf_inv"), ((0, 1), (0, 1))),
    **dict.fromkeys(("zeta", "polygamma", "atan2", "cbrt"), ((0, 1), (0, 1))),
    **dict.fromkeys(("exp", "exp2"), ((0, 1), (2, 3))),
    "expm1": ((0, 1), (4, 3)),
    "log": ((0, 1), (4, 2)),
    "log2": ((0, 1), (6, 2)),
    "log1p": ((0, 1), (6, 2)),
    "sqrt": ((0, 1), (7, 2)),
    "rsqrt": ((0, 1), (13, 2)),
    "pow": ((0, 1), (12, 5)),
    "logistic": ((0, 1), (17, 3)),
    **dict.fromkeys(("sin", "cos", "sinh", "cosh"), ((0, 1), (2, 4))),
    **dict.fromkeys(("tan", "tanh"), ((0, 1), (15, 4))),
    **dict.fromkeys(("asin", "acos", "atan", "asinh", "acosh", "atanh"), ((0, 1), (21, 4))),
}

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
COMBINE: dict[str, Pair] = {
    "sum": (1, 2),
    "prod": (1, 6),
    "max": (1, 2),
    "min": (1, 2),
    **dict.fromkeys(("and", "or", "xor"), (1, 1)),
}

#: What moves data and computes nothing.
_MOVEMENT = names(
    "broadcast_in_dim concatenate pad slice select_n convert_element_type bitcast_convert_type "
    "iota copy copy_p real imag complex split stack unstack tile device_put empty empty2 new_ref freeze random_clone"
)


def _elementwise(real: Pair, in_complex: Pair) -> Counting:
    def count(op: Operation) -> OperationCounts:
        return arithmetic(op.inputs[-1], elements(op.result), real, in_complex)

    return count


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
    """`n - 1` operations for `n` elements."""

    def count(op: Operation) -> OperationCounts:
        times = max(elements(op.operand) - elements(op.result), 0)
        return arithmetic(op.operand, times, (combine[0], 0), (combine[1], 0))

    return count


def _general_reduction(op: Operation) -> OperationCounts:
    """The equations of the function that combines, each a real operation."""
    times = max(elements(op.operand) - elements(op.result), 0) * len(op.params["jaxpr"].eqns)
    return arithmetic(op.operand, times, (1, 0), (2, 0))


def _iterated(values: int) -> Rule:
    """Return the rule of a loop over whole arrays, which keeps so many values of each element."""
    return Rule("elementwise", _elementwise((0, 1), (0, 1)), workspace=lambda op: values * nbytes(op.result))


def _moved(op: Operation) -> OperationCounts:
    return OperationCounts()


def _fused(family: str, count: Counting) -> Rule:
    return Rule(family, count, in_memory=0, writes_memory=False, in_place=True)


def _reducing(count: Counting) -> Rule:
    return Rule("reduction", count, in_memory=0, in_place=True)


add_rules({name: _fused("elementwise", _elementwise(*costs)) for name, costs in _ELEMENTWISE.items()})
add_rules({"integer_pow": _fused("elementwise", _integer_pow), "polynomial": _fused("elementwise", _polynomial)})
add_rules({name: _iterated(values) for name, values in _ITERATED.items()})
add_rules({name: _fused("movement", _moved) for name in _MOVEMENT})
# Their results lie in another order, and so never where the operand lies.
add_rules({name: _fused("movement", _moved)._replace(in_place=False) for name in ("transpose", "rev")})
add_rules({f"reduce_{name}": _reducing(_reduction(cost)) for name, cost in COMBINE.items()})
add_rules({f"arg{name}": _reducing(_reduction(COMBINE[name])) for name in ("max", "min")})
add_rules({"reduce": _reducing(_general_reduction)})
