"""Numbers that are known before a program runs, and how often a loop turns whose test they decide."""

import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ._rules import elements, names, number_kind

#: A number, or None where it is not known.
Number = bool | int | float | None
#: Turns that are no longer counted, and operations that are done at most to follow a loop turn by turn.
_MOST_TURNS, _MOST_FOLLOWED = 2**62, 50_000
#: Whole floats up to here are exact, however a compiler rounds.
_EXACT = 2**24
#: What operations raise on numbers of which they are not sure.
_UNSURE = (TypeError, ValueError, ArithmeticError, LookupError)


def _quotient(a: Any, b: Any) -> Any:
    """Return a quotient as XLA gives it: of integers rounded towards zero."""
    return a / b if isinstance(a, float) else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


_SAME = names(
    "convert_element_type broadcast_in_dim reshape squeeze expand_dims slice copy copy_p reduce_and reduce_or"
)
_TESTS, _LINEAR = names("lt le gt ge eq ne"), _SAME | names("add sub neg")
#: What operations do with numbers: the only elements of their operands.
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
    """Return a constant of one element as a number, None of any other."""
    try:
        number = np.asarray(value).item() if math.prod(getattr(value, "shape", ())) == 1 else None
    except (TypeError, ValueError):  # it is being traced, or is a random key
        return None
    return number if isinstance(number, (bool, int, float)) else None


def known_result(equation: Any, numbers: Sequence[Number]) -> Number:
    """Return the result of an equation, None where it is not one known number."""
    aval = equation.outvars[0].aval if equation.outvars else None
    if None in numbers or elements(aval) != 1:
        return None
    try:
        return _result(equation.primitive.name, aval.dtype, numbers, wraps=True)
    except _UNSURE:
        return None


def _result(name: str, dtype: Any, numbers: Sequence[Number], wraps: bool) -> Any:
    """Return the result of an operation; raise one of `_UNSURE` where it is not one known number.

    An integer may leave its type, and come in again at the other end, only if it `wraps`.
    """
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
    """An operation on single numbers by the name of its primitive: the type that it gives, what it reads, and where."""

    name: str
    dtype: Any
    reads: Sequence[Hashable]
    place: Hashable


class _Loop:
    """The numbers by place that decide how often a loop runs; see `turns`."""

    def __init__(
        self,
        test: Sequence[Scalar],
        body: Sequence[Scalar],
        holds: Hashable,
        moves: Mapping[Hashable, Hashable],
        known: Mapping[Hashable, Number],
    ) -> None:
        needed, size = {holds}, 0
        while len(needed) > size:
            size = len(needed)
            for each in (*body[::-1], *test[::-1]):
                needed.update(each.reads if each.place in needed and each.place not in known else ())
            needed.update([moves[place] for place in needed if place in moves])
        self._test, self._body = (
            [each for each in side if each.place in needed and each.place not in known] for side in (test, body)
        )
        self._holds, self._known = holds, known
        self._moves = {place: moves[place] for place in needed if place in moves}
        self._first = {place: known[place] for place in self._moves}

    def _values(self, state: Mapping[Hashable, Any], wraps: bool, tests_only: bool = False) -> dict[Hashable, Any]:
        """Return the numbers that operations make of what is carried."""
        values: dict[Hashable, Any] = {**self._known, **state}
        for each in self._test if tests_only else (*self._test, *self._body):
            values[each.place] = _result(each.name, each.dtype, [values[read] for read in each.reads], wraps)
        return values

    def _turned(self, values: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return what is carried after one more turn."""
        return {place: values[new] for place, new in self._moves.items()}

    def counted(self) -> int | None:
        """Return the turns of a loop whose numbers all change by constants, and fit their types; else None."""
        at = self._values(self._first, wraps=False)
        if not at[self._holds]:
            return 0
        then = self._values(self._turned(at), wraps=False)
        found = math.inf
        for each in (*self._test, *self._body):
            truths = {isinstance(at[place], bool) for place in (*each.reads, each.place)}
            linear = _TESTS if len(truths) == 2 else _SAME | {"and"} if True in truths else _LINEAR
            if each.name not in linear or (isinstance(at[each.place], bool) and each.place in self._moves.values()):
                return None
            if each.name in _TESTS:
                gap, next_gap = (values[each.reads[0]] - values[each.reads[1]] for values in (at, then))
                found = min(found, _first_failure(each.name, gap, next_gap - gap))
        if not found < _MOST_TURNS:
            return None

        def after(turns: int) -> dict[Hashable, Any]:
            return {place: at[place] + turns * (then[place] - at[place]) for place in self._moves}

        last = self._values(after(int(found) - 1), wraps=False)
        ends = not self._values(after(int(found)), wraps=False, tests_only=True)[self._holds]
        is_linear = self._turned(then) == after(2) and self._turned(last) == after(int(found))
        return int(found) if is_linear and last[self._holds] and ends else None

    def followed(self) -> int | None:
        """Return the turns of a loop that ends soon, turn by turn; else None."""
        state, earlier = self._first, None
        for turns in range(_MOST_FOLLOWED // (len(self._test) + len(self._body) + 1)):
            if not self._values(state, wraps=True, tests_only=True)[self._holds]:
                return turns
            if state == earlier:  # it goes round in a circle
                break
            if turns & (turns - 1) == 0:
                earlier = state
            state = self._turned(self._values(state, wraps=True))
        return None


def _first_failure(test: str, gap: Any, step: Any) -> float:
    """Return the first turn in which a comparison fails that holds at first, by the difference of its sides."""
    if test == "eq":
        return 1 if step else math.inf
    if test == "ne":
        hits, rest = divmod(-gap, step) if step else (0, 1)
        return hits if hits > 0 and not rest else math.inf
    gap, step = (gap, step) if test in ("lt", "le") else (-gap, -step)
    return math.inf if step <= 0 else -(gap // step) if test in ("lt", "gt") else -gap // step + 1


def turns(
    test: Sequence[Scalar],
    body: Sequence[Scalar],
    holds: Hashable,
    moves: Mapping[Hashable, Hashable],
    known: Mapping[Hashable, Number],
) -> int | None:
    """Return how often a loop runs whose test leaves its outcome at a place, None unless known numbers decide it.

    `moves` leads from the place of what is carried to where a turn leaves it; `known` has constants, and what is
    carried at first.
    """
    known = {place: number for place, number in known.items() if number is not None}
    for way in (_Loop.counted, _Loop.followed):
        try:
            if (found := way(_Loop(test, body, holds, moves, known))) is not None:
                return found
        except _UNSURE:
            pass
    return None
