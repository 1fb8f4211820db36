"""Find numbers that are known before a program runs, and trip counts of loops that depend on known numbers only."""

import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ._rules import elements, names, number_kind

#: The value of a single number; None if the value is unknown before the program runs.
Number = bool | int | float | None
#: The largest trip count that is found, and the largest number of operations that are simulated to find a trip count.
_MOST_TURNS, _MOST_FOLLOWED = 2**62, 50_000
#: A float result is known only if it is an integer of at most this size. Rounding then has no effect.
_EXACT = 2**24
#: If the computation of a result raises one of these errors, the result is unknown.
_UNSURE = (TypeError, ValueError, ArithmeticError, LookupError)


def _quotient(a: Any, b: Any) -> Any:
    """Return `a / b` as XLA computes it: integer quotients are rounded towards zero."""
    return a / b if isinstance(a, float) else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


_SAME = names(
    "convert_element_type broadcast_in_dim reshape squeeze expand_dims slice copy copy_p reduce_and reduce_or"
)
_TESTS, _LINEAR = names("lt le gt ge eq ne"), _SAME | names("add sub neg")
#: Dict from the name of a primitive to a Python function that computes the primitive's result from single numbers.
_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(_SAME, lambda a: a),
    **{name: getattr(operator, name) for name in (*_TESTS, "add", "sub", "mul", "neg", "abs", "xor")},
    **{"and": operator.and_, "or": operator.or_, "max": max, "min": min, "div": _quotient},
    "rem": lambda a, b: math.fmod(a, b) if isinstance(a, float) else a - b * _quotient(a, b),
    "not": lambda a: not a if isinstance(a, bool) else ~a,
    "sign": lambda a: (a > 0) - (a < 0),
    "square": lambda a: a * a,
    "shift_left": lambda a, b: a << b if b < 64 else 0,
    "shift_right_arithmetic": operator.rshift,
    "shift_right_logical": lambda a, b: a >> b if a >= 0 else None,
    "select_n": lambda which, *cases: cases[which],
    "clamp": lambda least, a, most: min(max(a, least), most),
}


def number_of(value: Any) -> Number:
    """Return the number that an array of one element holds; None for every other value."""
    try:
        number = np.asarray(value).item() if math.prod(getattr(value, "shape", ())) == 1 else None
    except (TypeError, ValueError):  # a traced value or a random key
        return None
    return number if isinstance(number, (bool, int, float)) else None


def known_result(equation: Any, numbers: Sequence[Number]) -> Number:
    """Return the result of an equation with these operands if the result is a single known number; else None."""
    if None in numbers or not equation.outvars or elements(equation.outvars[0].aval) != 1:
        return None
    try:
        return _result(equation.primitive.name, equation.outvars[0].aval.dtype, numbers, wraps=True)
    except _UNSURE:
        return None


def _result(name: str, dtype: Any, numbers: Sequence[Number], wraps: bool) -> Any:
    """Return the result of an operation; raise one of `_UNSURE` if it is unknown. If `wraps`, integers may overflow."""
    number = _OPERATIONS[name](*numbers)
    if jnp.issubdtype(dtype, np.integer):
        least, most = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
        if not least <= number <= most and (isinstance(number, float) or not wraps):
            raise OverflowError
        return (int(number) - least) % (most - least + 1) + least
    if number_kind(dtype) == "integer":
        return bool(number)
    if not (float(number).is_integer() and abs(number) <= _EXACT and np.asarray(number, dtype) == number):
        raise OverflowError
    return float(number)


class Scalar(NamedTuple):
    """An operation on single numbers. `reads` and `place` are keys (places) of the operands and of the result."""

    name: str
    dtype: Any
    reads: Sequence[Hashable]
    place: Hashable


def turns(
    test: Sequence[Scalar],
    body: Sequence[Scalar],
    holds: Hashable,
    moves: Mapping[Any, Hashable],
    known: Mapping[Any, Number],
) -> int | None:
    """Return the trip count of a loop, or None if the trip count depends on unknown numbers.

    A place is a key that stands for a value. `holds` is the place of the condition's result. `moves` maps the place of
    each carried value to the place of its next value. `known` maps places to constants and to initial carried values.
    """
    known = {place: number for place, number in known.items() if number is not None}
    needed, size = {holds}, 0
    while len(needed) > size:
        size = len(needed)
        for each in (*body[::-1], *test[::-1]):
            needed.update(each.reads if each.place in needed and each.place not in known else ())
        needed.update([moves[place] for place in needed if place in moves])
    test, body = ([each for each in side if each.place in needed and each.place not in known] for side in (test, body))
    moves = {place: moves[place] for place in needed if place in moves}

    def values(state: Mapping[Hashable, Any], wraps: bool, of: Sequence[Scalar] = (*test, *body)) -> dict[Any, Any]:
        """Return the value at each place after the operations `of`, given the carried values in `state`."""
        found: dict[Any, Any] = {**known, **state}
        for each in of:
            found[each.place] = _result(each.name, each.dtype, [found[read] for read in each.reads], wraps)
        return found

    def turned(found: Mapping[Hashable, Any]) -> dict[Any, Any]:
        return {place: found[new] for place, new in moves.items()}

    def counted() -> int | None:
        """Return the trip count if each number changes by a constant step without overflow; else None."""
        at = values({}, wraps=False)
        if not at[holds]:
            return 0
        then = values(turned(at), wraps=False)
        found = math.inf
        for each in (*test, *body):
            truths = {isinstance(at[place], bool) for place in (*each.reads, each.place)}
            linear = _TESTS if len(truths) == 2 else _SAME | {"and"} if True in truths else _LINEAR
            if each.name not in linear or (isinstance(at[each.place], bool) and each.place in moves.values()):
                return None
            if each.name in _TESTS:
                gap, next_gap = (numbers[each.reads[0]] - numbers[each.reads[1]] for numbers in (at, then))
                found = min(found, _first_failure(each.name, gap, next_gap - gap))
        if not found < _MOST_TURNS:
            return None

        def after(times: int) -> dict[Any, Any]:
            return {place: at[place] + times * (then[place] - at[place]) for place in moves}

        last = values(after(int(found) - 1), wraps=False)
        is_linear = turned(then) == after(2) and turned(last) == after(int(found))
        ends = not values(after(int(found)), wraps=False, of=test)[holds]
        return int(found) if is_linear and last[holds] and ends else None

    def followed() -> int | None:
        """Simulate one iteration after another, and return the trip count; None if there are too many iterations."""
        state, earlier = {place: known[place] for place in moves}, None
        for times in range(_MOST_FOLLOWED // (len(test) + len(body) + 1)):
            if not values(state, wraps=True, of=test)[holds]:
                return times
            if state == earlier:  # the loop repeats a state, so it never ends
                break
            if times & (times - 1) == 0:
                earlier = state
            state = turned(values(state, wraps=True))
        return None

    for way in (counted, followed):
        try:
            if (found := way()) is not None:
                return found
        except _UNSURE:
            pass
    return None


def _first_failure(test: str, gap: Any, step: Any) -> float:
    """Return the first iteration (from 0) where a comparison fails. `gap` (left minus right) grows by `step`."""
    if test == "eq":
        return 1 if step else math.inf
    if test == "ne":
        hits, rest = divmod(-gap, step) if step else (0, 1)
        return hits if hits > 0 and not rest else math.inf
    gap, step = (gap, step) if test in ("lt", "le") else (-gap, -step)
    return math.inf if step <= 0 else -(gap // step) if test in ("lt", "gt") else -gap // step + 1
