"""How often a loop of a compiled program turns, where its counter runs from a constant to a constant."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from ._xla_text import Computation, Instruction

_INDEX = re.compile(r"\bindex=(\d+)")
_DIRECTION = re.compile(r"\bdirection=(\w+)")
_SAME = ("copy", "bitcast", "convert", "copy-done", "copy-start", "reshape")
_TURNED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}


class _Slot(NamedTuple):
    """A value that a loop carries, by its place."""

    place: int


def trips_of(loop: Instruction, outside: Computation, computations: Mapping[str, Computation]) -> int | None:
    """Return how often a `while` turns whose test compares a counter with a number; None of any other."""
    test, body = (computations[loop.called[each]] for each in ("condition", "body"))
    compared = test.instructions[test.root]
    direction = _DIRECTION.search(compared.attributes)
    if compared.opcode != "compare" or direction is None or direction[1] not in _TURNED:
        return None
    sides = [_value(test, name) for name in compared.operands]
    numbers = [_start(side, loop, outside, body) if _is_kept(side, body) else side for side in sides]
    sense = direction[1]
    if isinstance(numbers[0], int):
        numbers, sense = numbers[::-1], _TURNED[sense]
    counter, limit = numbers
    if not isinstance(counter, _Slot) or not isinstance(limit, int):
        return None
    first, step = _start(counter, loop, outside, body), _step(counter, loop, outside, body)
    if first is None or not step or (step > 0) != (sense in ("LT", "LE")):
        return None
    last = limit if sense in ("LT", "GT") else limit + (1 if step > 0 else -1)
    return max(-(-(last - first) // step), 0)


def _value(inside: Computation, name: str) -> int | _Slot | None:
    """Return what a value of a loop's computation is: a number, or what the loop carries at a place."""
    instruction = inside.instructions[name]
    if instruction.opcode == "constant":
        return int(instruction.inside) if instruction.inside.lstrip("-").isdecimal() else None
    if instruction.opcode in _SAME:
        return _value(inside, instruction.operands[0])
    if instruction.opcode == "get-tuple-element":
        of, place = inside.instructions[instruction.operands[0]], _INDEX.search(instruction.attributes)
        return _Slot(int(place[1])) if place and of.opcode == "parameter" else None
    return None


def _next(body: Computation, slot: _Slot) -> str | None:
    """Return what a turn leaves at a place, by the name of the instruction that makes it."""
    left = body.instructions[body.root]
    return left.operands[slot.place] if left.opcode == "tuple" else None


def _is_kept(value: int | _Slot | None, body: Computation) -> bool:
    """Whether no turn changes what a loop carries at a place."""
    return isinstance(value, _Slot) and (name := _next(body, value)) is not None and _value(body, name) == value


def _start(value: int | _Slot | None, loop: Instruction, outside: Computation, body: Computation) -> int | None:
    """Return a number, or the one that a loop begins with at a place."""
    if not isinstance(value, _Slot):
        return value
    given = outside.instructions[loop.operands[0]]
    found = _value(outside, given.operands[value.place]) if given.opcode == "tuple" else None
    return found if isinstance(found, int) else None


def _step(counter: _Slot, loop: Instruction, outside: Computation, body: Computation) -> int | None:
    """Return what a turn adds to a counter."""
    name = _next(body, counter)
    added = body.instructions[name] if name else None
    if added is None or added.opcode != "add":
        return None
    sides = [_value(body, operand) for operand in added.operands]
    if counter not in sides:
        return None
    other = sides[1 - sides.index(counter)]
    if isinstance(other, _Slot) and not _is_kept(other, body):
        return None
    return _start(other, loop, outside, body)
