"""Numbers that are known before a program runs, and how often a loop turns whose test they decide."""

import bisect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ._equations import CALLS, called_jaxpr, opened
from ._operations import elements, is_literal, names, number_kind

#: A number, or None where it is not known.
Number = bool | int | float | None
#: Turns that are no longer counted, and operations that are done at most to follow a loop turn by turn.
_MOST_TURNS, _MOST_FOLLOWED = 2**62, 50_000
#: Whole floats up to here are exact, however a compiler rounds.
_EXACT = 2**24
#: What operations raise of numbers for which they are not sure.
_UNSURE = (TypeError, ValueError, ArithmeticError, LookupError)


def _quotient(a: Any, b: Any) -> Any:
    """Return a quotient as XLA gives it: of integers rounded towards zero."""
    return a / b if isinstance(a, float) else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


_SAME = names("convert_element_type broadcast_in_dim reshape squeeze expand_dims slice copy copy_p reduce_and reduce_or")
_TESTS = names("lt le gt ge eq ne")
#: What operations do with numbers: the only elements of their operands.
_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(_SAME, lambda a: a),
    **{name: getattr(operator, name) for name in (*_TESTS, "add", "sub", "mul", "neg", "abs", "xor")},
    **{"and": operator.and_, "or": operator.or_, "max": max, "min": min, "div": _quotient},
    "rem": lambda a, b: a - b * _quotient(a, b),
    "not": lambda a: not a if isinstance(a, bool) else ~a,
    "sign": lambda a: (a > 0) - (a < 0),
    "square": lambda a: a * a,
    "shift_left": lambda a, b: a << b if b < 64 else 0,
    "shift_right_arithmetic": operator.rshift,
    "shift_right_logical": lambda a, b: a >> b if a >= 0 else None,
    "select_n": lambda which, *cases: cases[which],
    "clamp": lambda least, a, most: min(max(a, least), most),
}
#: Of these, numbers that change by a constant each turn make others that do.
_LINEAR = _SAME | names("add sub neg")


def number_of(value: Any) -> Number:
    """Return a constant of one element as a number, None of any other."""
    try:
        number = np.asarray(value).item() if math.prod(getattr(value, "shape", ())) == 1 else None
    except (TypeError, ValueError):  # it is being traced, or is a random key
        return None
    return number if isinstance(number, (bool, int, float)) else None


def result_of(equation: Any, numbers: Sequence[Number], wraps: bool = True) -> Any:
    """Return the result of an equation with one, of known numbers.

    Args:
        equation: it.
        numbers: its operands.
        wraps: whether an integer may leave its type, and come in again at the other end.

    Raises:
        TypeError: or another of `_UNSURE`: what it gives is not surely known.
    """
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


def is_known(equation: Any, numbers: Sequence[Number]) -> bool:
    """Return whether the result of an equation may be one known number."""
    name = equation.primitive.name
    return name in _OPERATIONS and None not in numbers and elements(equation.outvars[0].aval) == 1


def known_result(equation: Any, numbers: Sequence[Number]) -> Number:
    """Return the result of an equation, None where it is not one known number."""
    try:
        return result_of(equation, numbers) if is_known(equation, numbers) else None
    except _UNSURE:
        return None


def lasting(body: Any, constants: int, numbers: Sequence[Number]) -> list[Number]:
    """Return what the body of a loop is given and known in each turn: constants, and what it hands on as it is."""
    handed_on = [None] * constants + body.outvars
    return [
        number if place < constants or (place < len(handed_on) and handed_on[place] is body.invars[place]) else None
        for place, number in enumerate(numbers)
    ]


class _Loop:
    """The numbers that decide how often a `while` runs, by place; its operands come first.

    Attributes:
        start: all of them, as far as they are known before it runs.
        test: the equations of its test that compute some, each with the places of what it reads and makes.
        body: those of its body.
        moves: the place of each carried number, and of what it is after a turn.
        holds: the place of what the test says.

    Raises:
        LookupError: the test depends on what is not known.
    """

    def __init__(self, params: Mapping[str, Any], operands: Sequence[Number]) -> None:
        of_test, carried = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        places: list[int | None] = [None if number is None else place for place, number in enumerate(operands)]
        self.start: list[Any] = list(operands)
        self.test: list[tuple[Any, list[int], int]] = []
        self.body: list[tuple[Any, list[int], int]] = []
        (holds,) = self._write(opened(params["cond_jaxpr"]), places[:of_test] + places[carried:], self.test)
        after = self._write(opened(params["body_jaxpr"]), places[of_test:], self.body)
        needed, count = {holds}, 0
        while len(needed) > count:
            count = len(needed)
            needed |= {after[place - carried] for place in needed if carried <= (place or 0) < len(places)}
            needed |= {read for _, reads, place in (*self.test, *self.body) if place in needed for read in reads}
        if holds is None or None in needed:
            raise LookupError
        self.holds = holds
        self.test, self.body = ([step for step in steps if step[2] in needed] for steps in (self.test, self.body))
        self.moves = {
            place: new for place, new in zip(range(carried, len(places)), after, strict=True) if place in needed
        }

    def _write(self, jaxpr: Any, given: Sequence[int | None], steps: list[Any]) -> list[int | None]:
        """Write down what a jaxpr computes; return the places of its results, None of what is not known."""
        places: dict[Any, int | None] = dict(zip(jaxpr.invars, given, strict=True))

        def at(var: Any) -> int | None:
            if not is_literal(var):
                return places.get(var)
            number = number_of(var.val)
            return None if number is None else self._new(number)

        for equation in jaxpr.eqns:
            reads = [at(var) for var in equation.invars]
            if equation.primitive.name in CALLS:
                inner, given = called_jaxpr(equation, reads)
                places.update(zip(equation.outvars, self._write(inner, given, steps), strict=True))
            elif is_known(equation, reads):
                places[equation.outvars[0]] = self._new(None)
                steps.append((equation, reads, len(self.start) - 1))
        return [at(var) for var in jaxpr.outvars]

    def _new(self, number: Number) -> int:
        self.start.append(number)
        return len(self.start) - 1

    def values(self, steps: Sequence[Any], state: Mapping[int, Any], wraps: bool) -> list[Any]:
        """Return the numbers that equations compute of what is carried."""
        values = self.start.copy()
        for place, number in state.items():
            values[place] = number
        for equation, reads, place in steps:
            values[place] = result_of(equation, [values[read] for read in reads], wraps)
        return values

    def turned(self, state: Mapping[int, Any], wraps: bool) -> dict[int, Any]:
        """Return what is carried after one more turn."""
        values = self.values(self.body, state, wraps)
        return {place: values[new] for place, new in self.moves.items()}

    def counted(self) -> int | None:
        """Return the turns of a loop whose numbers change by constants, which no type is too small for; else None."""
        first = {place: self.start[place] for place in self.moves}
        second = self.turned(first, wraps=False)
        steps = {place: second[place] - first[place] for place in first}
        at, then = (self.values([*self.test, *self.body], state, wraps=False) for state in (first, second))

        def changes(place: int) -> bool:
            return at[place] != then[place]

        for equation, reads, place in (*self.test, *self.body):
            name, of_truths = equation.primitive.name, any(isinstance(at[read], bool) for read in reads)
            if isinstance(at[place], bool):
                is_linear = place not in self.moves.values() and name in (_SAME | {"and"} if of_truths else _TESTS)
            else:
                is_linear = name in _LINEAR or sum(map(changes, reads)) <= (name == "mul")
                is_linear &= not of_truths
            if not is_linear:
                return None
        if self.turned(second, wraps=False) != {place: second[place] + steps[place] for place in first}:
            return None

        def tested(turn: int) -> list[Any]:
            before, state = ({p: first[p] + n * steps[p] for p in first} for n in (turn - 1, turn))
            if turn and self.turned(before, wraps=False) != state:
                raise OverflowError
            return self.values(self.test, state, wraps=False)

        def fails(turn: int) -> bool:
            try:
                values = tested(turn)
            except OverflowError:
                return True
            unequal = (reads for equation, reads, _ in self.test if equation.primitive.name == "ne")
            return not values[self.holds] or any((values[a] < values[b]) != (at[a] < at[b]) for a, b in unequal)

        turns = bisect.bisect_left(range(_MOST_TURNS), True, key=fails)
        return turns if turns < _MOST_TURNS and not tested(turns)[self.holds] else None

    def followed(self) -> int | None:
        """Return the turns of a loop that ends soon, turn by turn; else None."""
        state, before = {place: self.start[place] for place in self.moves}, None
        for turns in range(_MOST_FOLLOWED // (len(self.test) + len(self.body) + 1)):
            if not self.values(self.test, state, wraps=True)[self.holds]:
                return turns
            if state == before:
                break
            before, state = state, self.turned(state, wraps=True)
        return None


def readable_trips(params: Mapping[str, Any], operands: Sequence[Number]) -> int | None:
    """Return how often a `while` runs whose test depends on known numbers only, else None.

    Args:
        params: of the equation.
        operands: what it is given, as far as it is known.
    """
    for turns in (_Loop.counted, _Loop.followed):
        try:
            if (found := turns(_Loop(params, operands))) is not None:
                return found
        except _UNSURE:
            pass
    return None
