"""Numbers that are known before a program runs, and how often a loop turns whose test they decide."""

import bisect
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ._primitives import CALLS, called_jaxpr, is_literal, opened
from ._rules import elements, names, number_kind

#: A number, or None where it is not known.
Number = bool | int | float | None
#: Turns that are no longer counted, operations that are done at most to follow a loop turn by turn, and numbers of one.
_MOST_TURNS, _MOST_FOLLOWED, _MOST_PLACES = 2**62, 50_000, 200_000
#: Whole floats up to here are exact, however a compiler rounds.
_EXACT = 2**24
#: What operations raise on numbers of which they are not sure.
_UNSURE = (TypeError, ValueError, ArithmeticError, LookupError, RecursionError)


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
    try:
        return _result(equation, numbers, wraps=True)
    except _UNSURE:
        return None


def _result(equation: Any, numbers: Sequence[Number], wraps: bool) -> Any:
    """Return the result of an equation; raise one of `_UNSURE` where it is not one known number.

    An integer may leave its type, and come in again at the other end, only if it `wraps`.
    """
    if None in numbers or elements(equation.outvars[0].aval) != 1:
        raise LookupError
    number, dtype = _OPERATIONS[equation.primitive.name](*numbers), equation.outvars[0].aval.dtype
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


class _Loop:
    """The numbers by place that decide how often a `while` runs; its operands come first."""

    def __init__(self, params: Mapping[str, Any], operands: Sequence[Number], constants: Mapping[Any, Any]) -> None:
        of_test, carried = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        test, body = opened(params["cond_jaxpr"]), opened(params["body_jaxpr"])
        self._start, self._constants, self._reached = list[Any](operands), constants, set[int]()
        self._test: list[tuple[Any, list[int], int]] = []
        self._body: list[tuple[Any, list[int], int]] = []
        places = [functools.partial(self._operand, place) for place in range(len(operands))]
        self._holds = self._traced(test, places[:of_test] + places[carried:], self._test)(test.outvars[0])
        after = self._traced(body, places[of_test:], self._body)
        self._moves: dict[int, int] = {}
        while left := [place for place in self._reached if place >= carried and place not in self._moves]:
            self._moves |= {place: after(body.outvars[place - carried]) for place in left}
        self._first = {place: self._start[place] for place in self._moves}

    def _operand(self, place: int) -> int:
        if self._start[place] is None:
            raise LookupError
        self._reached.add(place)
        return place

    def _traced(self, jaxpr: Any, given: Sequence[Callable[[], int]], steps: list[Any]) -> Callable[[Any], int]:
        """Return what gives the place of a variable of a jaxpr, and writes down the equations that make it."""
        inputs = dict(zip(jaxpr.invars, given, strict=True))
        makers = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
        calls: dict[int, Callable[[Any], int]] = {}
        places: dict[Any, int] = {}

        def at(var: Any) -> int:
            if is_literal(var):
                return self._new(number_of(var.val))
            if var not in places:
                places[var] = made(var)
            return places[var]

        def made(var: Any) -> int:
            if var in inputs:
                return inputs[var]()
            if (equation := makers.get(var)) is None:
                return self._new(number_of(self._constants.get(var)))
            if equation.primitive.name in CALLS:
                inner, operands = called_jaxpr(equation, equation.invars)
                if id(equation) not in calls:
                    calls[id(equation)] = self._traced(inner, [functools.partial(at, var) for var in operands], steps)
                return calls[id(equation)](inner.outvars[equation.outvars.index(var)])
            if equation.primitive.name not in _OPERATIONS or len(self._start) > _MOST_PLACES:
                raise LookupError
            steps.append((equation, list(map(at, equation.invars)), len(self._start)))
            self._start.append(None)
            return steps[-1][2]

        return at

    def _new(self, number: Number) -> int:
        if number is None:
            raise LookupError
        self._start.append(number)
        return len(self._start) - 1

    def _values(self, steps: Sequence[Any], state: Mapping[int, Any], wraps: bool) -> list[Any]:
        """Return the numbers that equations make of what is carried."""
        values = self._start.copy()
        for place, number in state.items():
            values[place] = number
        for equation, reads, place in steps:
            values[place] = _result(equation, [values[read] for read in reads], wraps)
        return values

    def _turned(self, state: Mapping[int, Any], wraps: bool) -> dict[int, Any]:
        """Return what is carried after one more turn."""
        values = self._values(self._body, state, wraps)
        return {place: values[new] for place, new in self._moves.items()}

    def counted(self) -> int | None:
        """Return the turns of a loop whose numbers all change by constants, and fit their types; else None."""
        first, second = self._first, self._turned(self._first, wraps=False)
        steps = {place: second[place] - first[place] for place in first}
        at = self._values([*self._test, *self._body], first, wraps=False)
        if not at[self._holds]:
            return 0
        for equation, reads, place in (*self._test, *self._body):
            truths = {isinstance(at[each], bool) for each in (*reads, place)}
            linear = _TESTS if len(truths) == 2 else _SAME | {"and"} if True in truths else _LINEAR
            if equation.primitive.name not in linear or isinstance(at[place], bool) and place in self._moves.values():
                return None
        if self._turned(second, wraps=False) != {place: second[place] + steps[place] for place in first}:
            return None

        def tested(turn: int) -> list[Any]:
            before, state = ({place: first[place] + n * steps[place] for place in first} for n in (turn - 1, turn))
            if turn and self._turned(before, wraps=False) != state:
                raise OverflowError
            return self._values(self._test, state, wraps=False)

        def fails(turn: int) -> bool:
            try:
                values = tested(turn)
            except OverflowError:
                return True
            unequal = (reads for equation, reads, _ in self._test if equation.primitive.name == "ne")
            return not values[self._holds] or any((values[a] < values[b]) != (at[a] < at[b]) for a, b in unequal)

        turns = bisect.bisect_left(range(_MOST_TURNS), True, key=fails)
        return turns if turns < _MOST_TURNS and not tested(turns)[self._holds] else None

    def followed(self) -> int | None:
        """Return the turns of a loop that ends soon, turn by turn; else None."""
        state, earlier = self._first, None
        for turns in range(_MOST_FOLLOWED // (len(self._test) + len(self._body) + 1)):
            if not self._values(self._test, state, wraps=True)[self._holds]:
                return turns
            if state == earlier:  # it goes round in a circle
                break
            if turns & (turns - 1) == 0:
                earlier = state
            state = self._turned(state, wraps=True)
        return None


def readable_trips(params: Mapping[str, Any], operands: Sequence[Number], constants: Mapping[Any, Any]) -> int | None:
    """Return how often a `while` with these operands runs, if its test depends on known numbers only, else None."""
    for turns in (_Loop.counted, _Loop.followed):
        try:
            if (found := turns(_Loop(params, operands, constants))) is not None:
                return found
        except _UNSURE:
            pass
    return None
