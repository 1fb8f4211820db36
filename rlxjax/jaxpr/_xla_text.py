"""The text of a program that XLA compiled, taken apart: computations, instructions, their types and places."""

import math
import re
from collections.abc import Container, Mapping
from typing import NamedTuple

from ._rules import names

#: What names, groups or orders values, or ends what another instruction began.
NOTHING = names(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency opt-barrier domain partition-id "
    "replica-id"
)
ENDS = ("-done", "-update")
CALLED = re.compile(r"\b(calls|to_apply|condition|body|true_computation|false_computation)=%([\w.\-]+)")
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
TARGET = re.compile(r'custom_call_target="([^"]*)"')
TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
#: What a part of a device does while the next kernels run: bytes and no kernel.
TRANSFERS = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")
#: What devices do together.
COLLECTIVES = names(
    "all-reduce all-gather all-to-all ragged-all-to-all reduce-scatter collective-permute collective-broadcast send "
    "recv"
)
#: What gives an element for each one that it reads; a fusion computes those that are looked at.
_EACH = names("bitcast convert copy transpose reshape reverse")
#: What reads as much of its first operand as it gives.
_PARTS = ("slice", "dynamic-slice", "gather")
#: What changes part of its first operand, in place: the position of the operand that says which part.
_CHANGES = {"dynamic-update-slice": 1, "scatter": 2}

NAME = re.compile(r"%([\w.\-]+)")
_HEAD = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"  (ROOT )?%([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r" ?([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"([a-z]+[0-9]*)\w*\[([\d,<=]*)\]")
#: The layout of a value that lies in another memory than the device's main one: `{1,0:T(8,128)S(1)}`.
_ELSEWHERE = re.compile(r"\{[^{}]*S\([1-9]\d*\)[^{}]*\}")
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
        return bytes_of(self.instructions[name].type)

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
                parts += whole * self.read(reader_name) // max(bytes_of(reader.type), 1)
            elif reader.opcode in _CHANGES and reader_name not in ends:  # not in place: all of it is written anew
                parts += whole
            elif reader.opcode != "tuple":
                parts += sum(self.read_by(reader, i) for i, operand in enumerate(reader.operands) if operand == name)
        return min(parts, whole)

    def read_by(self, reader: Instruction, position: int) -> int:
        """Return the bytes that an instruction reads of one of its operands."""
        if position == 0 and reader.opcode in _PARTS:
            return bytes_of(reader.type)
        if position == 0 and reader.opcode in _CHANGES:
            return self.written_by(reader) if reader.opcode == "scatter" else 0
        return self.bytes(reader.operands[position])

    def written_by(self, instruction: Instruction) -> int:
        part = _CHANGES.get(instruction.opcode, len(instruction.operands))
        return (
            self.bytes(instruction.operands[part]) if part < len(instruction.operands) else bytes_of(instruction.type)
        )


def moved(
    instruction: Instruction, computation: Computation, others: Mapping[str, Computation], fused: str | None
) -> tuple[int, int]:
    """Return the bytes that an instruction reads from main memory and writes to it; what it fuses is given by name.

    Of a collective all bytes count, wherever they lie.
    """
    opcode, operands = instruction.opcode, instruction.operands
    ends = _ends_of(instruction, computation)
    if opcode.removesuffix("-start") in COLLECTIVES:
        results = [each.type for each in ends] or [instruction.type]
        return sum(map(computation.bytes, operands)), sum(map(bytes_of, results))
    reads = [i for i, name in enumerate(operands) if _in_memory(computation.instructions[name])]
    if fused is not None and opcode.removesuffix("-start") == "fusion":
        inside = others[fused]
        made = (inside.instructions[end] for end in inside.ends(inside.root))
        written = sum(inside.written_by(end) for end in made if _in_memory(end)) if _in_memory(instruction) else 0
        return sum(inside.read(inside.parameters[i]) for i in reads), written
    if opcode.endswith("-start"):  # its result lists operands, results and what the device keeps
        read = sum(computation.bytes(operands[i]) for i in reads)
        if not ends:
            return read, read
        if opcode in TRANSFERS:
            read = bytes_of(ends[0].type) if 0 in reads else 0
        return read, bytes_of(in_main_memory(ends[0].type))
    written = computation.written_by(instruction) if _in_memory(instruction) else 0
    if instruction.type.startswith("("):
        written = bytes_of(in_main_memory(instruction.type))
    return sum(computation.read_by(instruction, i) for i in reads), written


def _ends_of(start: Instruction, computation: Computation) -> list[Instruction]:
    """Return the instruction that ends what another one begins, if it begins something."""
    if not start.opcode.endswith("-start"):
        return []
    name = next(name for name, each in computation.instructions.items() if each is start)
    readers = (computation.instructions[reader] for reader in computation.readers.get(name, ()))
    return [each for each in readers if each.opcode.endswith("-done")][:1]


def _in_memory(instruction: Instruction) -> bool:
    """Whether a value, or one of a tuple, lies in the device's main memory."""
    return in_main_memory(instruction.type) == instruction.type or bytes_of(in_main_memory(instruction.type)) > 0


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
    return Instruction(found[1], text[:end], tuple(NAME.findall(inside)), inside, text[close:])


def _closing(text: str, start: int) -> int:
    """Return the position after the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    raise ValueError(f"no end of the parenthesis in {text[:60]!r}")


def in_main_memory(type_text: str) -> str:
    """Return a type, or those of a tuple, without the arrays that lie in a faster memory on the chip, or elsewhere."""
    return re.sub(rf"{_ARRAY.pattern}{_ELSEWHERE.pattern}", "", type_text)


def bytes_of(type_text: str) -> int:
    """Return the bytes of a value of a type, or of all the values of a tuple."""
    total = 0
    for kind, sizes in shapes_of(type_text):
        bits = 8 if kind == "pred" else int(kind.lstrip("abcdefghijklmnopqrstuvwxyz"))
        total += math.ceil(math.prod(sizes) * bits / 8)
    return total


def shapes_of(type_text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return the kind of number and the sizes of an array, or of each of a tuple."""
    return [
        (kind, tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size))
        for kind, sizes in _ARRAY.findall(type_text)
        if kind not in ("token", "opaque")
    ]


def frame_lines(text: str, no_users: Container[str]) -> dict[int, str]:
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
