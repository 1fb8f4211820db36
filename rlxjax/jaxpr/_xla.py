"""What a program that XLA compiled runs and moves, read from its text; nothing else here knows that text."""

import math
import re
from collections.abc import Container, Mapping
from typing import NamedTuple

from ._equations import UNKNOWN_LINE
from ._loops import UnknownLoop
from ._rules import OperationCounts, names
from ._totals import Totals

#: What names, groups or orders values, or ends what another instruction began.
NOTHING = names(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency opt-barrier domain partition-id "
    "replica-id"
)
ENDS = ("-done", "-update")
#: What gives an element for each one that it reads; a fusion computes those that are looked at.
_EACH = names("bitcast convert copy transpose reshape reverse")
#: What reads as much of its first operand as it gives.
_PARTS = ("slice", "dynamic-slice", "gather")
#: What changes part of its first operand, in place: the position of the operand that says which part.
_CHANGES = {"dynamic-update-slice": 1, "scatter": 2}

_NAME = re.compile(r"%([\w.\-]+)")
_HEAD = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"  (ROOT )?%([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r" ?([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"([a-z]+[0-9]*)\w*\[([\d,<=]*)\]")
CALLED = re.compile(r"\b(calls|to_apply|condition|body|true_computation|false_computation)=%([\w.\-]+)")
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
TARGET = re.compile(r'custom_call_target="([^"]*)"')
_KIND = re.compile(r"\bkind=k(\w+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_FIELD = re.compile(r"(\w+)=(\d+)")


class Instruction(NamedTuple):
    opcode: str
    type: str
    operands: tuple[str, ...]
    #: The text of the parentheses, which for a parameter is its position.
    inside: str
    attributes: str


class Computation:
    def __init__(self) -> None:
        self.instructions: dict[str, Instruction] = {}
        self.root = ""
        self.readers: dict[str, list[str]] = {}
        self.parameters: dict[int, str] = {}

    def add(self, name: str, instruction: Instruction, is_root: bool) -> None:
        self.instructions[name] = instruction
        self.root = name if is_root else self.root
        for operand in dict.fromkeys(instruction.operands):
            self.readers.setdefault(operand, []).append(name)
        if instruction.opcode == "parameter":
            self.parameters[int(instruction.inside)] = name

    def bytes(self, name: str) -> int:
        """Return the bytes of a value, or of all the values of a tuple."""
        return _bytes(self.instructions[name].type)

    def ends(self, name: str) -> list[str]:
        """Return what a value of a fusion is made of: the values of a tuple, under their first names."""
        instruction = self.instructions[name]
        if instruction.opcode not in ("tuple", "bitcast"):
            return [name]
        return [end for operand in instruction.operands for end in self.ends(operand)]

    def read(self, name: str) -> int:
        """Return the bytes of a value that its readers in a fusion look at; all, unless every one takes a part."""
        whole, ends = self.bytes(name), self.ends(self.root)
        parts = whole if name in ends else 0
        for reader_name in self.readers.get(name, ()):
            reader = self.instructions[reader_name]
            if reader.opcode in _EACH:
                parts += whole * self.read(reader_name) // max(_bytes(reader.type), 1)
            elif reader.opcode in _CHANGES and reader_name not in ends:  # not in place: all of it is written anew
                parts += whole
            elif reader.opcode != "tuple":
                parts += sum(self.read_by(reader, i) for i, operand in enumerate(reader.operands) if operand == name)
        return min(parts, whole)

    def read_by(self, reader: Instruction, position: int) -> int:
        """Return the bytes that an instruction reads of one of its operands."""
        if position == 0 and reader.opcode in _PARTS:
            return _bytes(reader.type)
        if position == 0 and reader.opcode in _CHANGES:
            return self.written_by(reader) if reader.opcode == "scatter" else 0
        return self.bytes(reader.operands[position])

    def written_by(self, instruction: Instruction) -> int:
        part = _CHANGES.get(instruction.opcode, len(instruction.operands))
        return self.bytes(instruction.operands[part]) if part < len(instruction.operands) else _bytes(instruction.type)


class CompiledProgram:
    """A compiled program: what it runs, and what of it no figure of XLA's own covers.

    Attributes:
        totals: launches and bytes by kind of instruction and by the user's line.
        unknown_loops: the loops whose trips the text does not tell.
        loops: how many loops turn more than once, or nobody knows how often.
        custom_calls: the targets of custom calls, in order.

    Trips are those of loops whose trips the text does not tell, by their line. Some files are no user's.

    Raises:
        ValueError: the text is not written as expected.
    """

    def __init__(self, text: str, trips: Mapping[str, int], no_users: Container[str] = ()) -> None:
        self.unknown_loops: list[UnknownLoop] = []
        self.loops = 0
        self.custom_calls: dict[str, None] = {}
        self._totals: dict[str, Totals] = {}
        self._trips = trips
        try:
            self._computations, entry = computations(text)
            self._lines = _frame_lines(text, no_users)
            self.totals = self._count(entry)
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"level: 'compiled' is not available: XLA's text is not written as expected "
                f"({type(error).__name__}: {error})"
            ) from None
        starts = self.totals.loop_starts
        self.unknown_loops = [loop._replace(starts=starts.get(i, 0)) for i, loop in enumerate(self.unknown_loops)]

    def _count(self, name: str) -> Totals:
        """Return what a computation does when it runs once."""
        if name not in self._totals:
            computation, totals = self._computations[name], Totals()
            for instruction in computation.instructions.values():
                if instruction.opcode not in NOTHING and not instruction.opcode.endswith(ENDS):
                    self._add(instruction, computation, totals)
            self._totals[name] = totals
        return self._totals[name]

    def _add(self, instruction: Instruction, computation: Computation, totals: Totals) -> None:
        opcode, attributes = instruction.opcode, instruction.attributes
        called = dict(CALLED.findall(attributes))
        frame = _FRAME.search(attributes)
        line = self._lines.get(int(frame[1]), UNKNOWN_LINE) if frame else UNKNOWN_LINE
        if opcode == "while":
            known = TRIPS.search(attributes)
            trips = int(known[1]) if known else self._trips.get(line)
            self.loops += trips != 1
            test, turn = self._count(called["condition"]), self._count(called["body"])
            loop = totals.add_loop(test, turn, trips, line, len(self.unknown_loops))
            self.unknown_loops += [loop] if trips is None else []
        elif opcode == "conditional":
            listed = BRANCHES.search(attributes)
            taken = _NAME.findall(listed[1]) if listed else [called["true_computation"], called["false_computation"]]
            totals.add_branches(list(map(self._count, taken)), line)
        elif opcode == "call" or (opcode == "async-start" and "calls" in called):
            totals.add(self._count(called["to_apply" if opcode == "call" else "calls"]), 1)
        else:
            family = opcode
            if opcode == "custom-call" and (target := TARGET.search(attributes)):
                family = f"custom-call {target[1]}"
                self.custom_calls[target[1]] = None
            elif opcode == "fusion" and (kind := _KIND.search(attributes)):
                family = f"{kind[1].lower()} fusion"
            read, written = moved(instruction, computation, self._computations, called.get("calls"))
            totals.count(family, line, OperationCounts(bytes=read + written))


def moved(
    instruction: Instruction, computation: Computation, computations: Mapping[str, Computation], fused: str | None
) -> tuple[int, int]:
    """Return the bytes that an instruction reads, and those that it writes; what it fuses is given by name."""
    operands = range(len(instruction.operands))
    if fused is not None and instruction.opcode.removesuffix("-start") == "fusion":
        inside = computations[fused]
        written = sum(inside.written_by(inside.instructions[end]) for end in inside.ends(inside.root))
        return sum(inside.read(inside.parameters[i]) for i in operands), written
    if instruction.opcode.endswith("-start"):  # its result lists operands, results and what the device keeps
        both = sum(map(computation.bytes, instruction.operands))
        return both, both
    return sum(computation.read_by(instruction, i) for i in operands), computation.written_by(instruction)


def shapes_of(type_text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return the kind of number and the sizes of an array, or of each of a tuple."""
    return [
        (kind, tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size))
        for kind, sizes in _ARRAY.findall(type_text)
        if kind not in ("token", "opaque")
    ]


def computations(text: str) -> tuple[dict[str, Computation], str]:
    """Take the text apart; return the computations by name, and the name of the one that is entered."""
    found: dict[str, Computation] = {}
    entry, current = None, Computation()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = found.setdefault(head[2], Computation())
            entry = head[2] if head[1] else entry
        elif found and (each := _INSTRUCTION.match(line)):
            current.add(each[2], _instruction(each[3]), bool(each[1]))
    if entry is None:
        raise ValueError("no entry computation")
    return found, entry


def _instruction(text: str) -> Instruction:
    """Take `type opcode(operands), attributes` apart."""
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    found = _OPCODE.match(text, end)
    if found is None:
        raise ValueError(f"no opcode in {text[:60]!r}")
    close = _closing(text, found.end() - 1)
    inside = text[found.end() : close - 1]
    return Instruction(found[1], text[:end], tuple(_NAME.findall(inside)), inside, text[close:])


def _closing(text: str, start: int) -> int:
    """Return the position after the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    raise ValueError(f"no end of the parenthesis in {text[:60]!r}")


def _bytes(type_text: str) -> int:
    """Return the bytes of a value of a type, or of all the values of a tuple."""
    total = 0
    for kind, sizes in shapes_of(type_text):
        bits = 8 if kind == "pred" else int(kind.lstrip("abcdefghijklmnopqrstuvwxyz"))
        total += math.ceil(math.prod(sizes) * bits / 8)
    return total


def _frame_lines(text: str, no_users: Container[str]) -> dict[int, str]:
    """Return the line, `file.py:12`, of every stack frame that the text lists, where it is a user's."""

    def table(name: str) -> dict[int, str]:
        rows = text.partition(f"\n{name}\n")[2].partition("\n\n")[0].splitlines()
        return {int(key): row for key, _, row in (row.partition(" ") for row in rows)}

    files = {key: path.strip('"').replace("\\", "/").rpartition("/")[2] for key, path in table("FileNames").items()}
    places = {key: dict(_FIELD.findall(row)) for key, row in table("FileLocations").items()}
    frames = {key: dict(_FIELD.findall(row)) for key, row in table("StackFrames").items()}
    at = {key: places[int(frame["file_location_id"])] for key, frame in frames.items()}
    found = {key: (files[int(place["file_name_id"])], place["line"]) for key, place in at.items()}
    return {key: f"{file}:{line}" for key, (file, line) in found.items() if file not in no_users}
