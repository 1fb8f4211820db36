"""Parse the text that XLA prints of a compiled program: computations, instructions, array types and source lines."""

import functools
import math
import os
import re
from collections.abc import Mapping
from string import ascii_lowercase
from typing import NamedTuple

from rlxjax._tracing import PACKAGE

from ._rules import names

#: Opcodes of instructions that compute nothing: they only name, group or order values.
NOTHING = names(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency opt-barrier domain partition-id "
    "replica-id"
)
#: Suffixes of the opcodes of instructions that continue or end an asynchronous operation.
ENDS = ("-done", "-update")
#: Opcodes that start a copy. The copy runs at the same time as the next kernels. It moves bytes but launches no kernel.
TRANSFERS = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")
#: Opcodes of collectives, the instructions that exchange data between devices.
COLLECTIVES = names(
    "all-reduce all-gather all-to-all ragged-all-to-all reduce-scatter collective-permute collective-broadcast send "
    "recv"
)
#: Opcodes that compute each result element from one operand element. A fusion computes only the elements that are used.
_EACH = names("bitcast convert copy transpose reshape reverse")
#: Opcodes that read only a part of their first operand: as many bytes as the result has.
_PARTS = ("slice", "dynamic-slice", "gather")
#: Dict from opcodes that update a part of their first operand in place to the position of the new values' operand.
_CHANGES = {"dynamic-update-slice": 1, "scatter": 2}

_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(calls|to_apply|condition|body|true_computation|false_computation|called_computations)=\{?%([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_HEAD = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"  (ROOT )?%([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r" ?([a-z][a-z0-9\-]*)\(")
#: An array type. A layout with `S(1)` or more, such as `{1,0:T(8,128)S(1)}`, means that it is not in main memory.
_ARRAY = re.compile(r"([a-z]+[0-9]*)\w*\[([\d,<=]*)\](\{[^{}]*S\([1-9]\d*\)[^{}]*\})?")
#: Files of rlxjax that lower and compile the user's function. The callers of these files are not part of the function.
_LOWERING = ("_tracing.py", "_function_profile.py", "_compile.py", "_child.py")
_FIELD, _PARENTHESIS = re.compile(r"(\w+)=(\d+)"), re.compile(r"[()]")


class Array(NamedTuple):
    """An array type: the kind of number (such as f32), the shape, and whether the array is outside of main memory."""

    kind: str
    sizes: tuple[int, ...]
    is_elsewhere: bool

    @property
    def bits(self) -> int:
        return 8 if self.kind == "pred" else int(self.kind.lstrip(ascii_lowercase))

    @property
    def itemsize(self) -> int:
        return max(self.bits // 8, 1)

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def bytes(self) -> int:
        return math.ceil(self.elements * self.bits / 8)


class Instruction(NamedTuple):
    name: str
    opcode: str
    arrays: tuple[Array, ...]
    is_tuple: bool
    operands: tuple[str, ...]
    #: The text in the parentheses after the opcode. For a parameter, this text is the position of the parameter.
    inside: str
    attributes: str

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @property
    def main_bytes(self) -> int:
        return sum(array.bytes for array in self.arrays if not array.is_elsewhere)

    @property
    def is_in_memory(self) -> bool:
        """Whether any array of the result lies in the device's main memory."""
        return not any(array.is_elsewhere for array in self.arrays) or self.main_bytes > 0

    @property
    def called(self) -> dict[str, str]:
        return dict(_CALLED.findall(self.attributes))

    @property
    def branches(self) -> list[str]:
        listed, called = _BRANCHES.search(self.attributes), self.called
        return _NAME.findall(listed[1]) if listed else [called["true_computation"], called["false_computation"]]

    @property
    def target(self) -> str:
        found = _TARGET.search(self.attributes) if self.opcode == "custom-call" else None
        return found[1] if found else ""


class Computation:
    def __init__(self) -> None:
        self.instructions: dict[str, Instruction] = {}
        self.root = ""
        self.readers: dict[str, list[Instruction]] = {}
        self.parameters: dict[int, str] = {}

    def add(self, instruction: Instruction, is_root: bool) -> None:
        self.instructions[instruction.name] = instruction
        self.root = instruction.name if is_root else self.root
        for operand in dict.fromkeys(instruction.operands):
            self.readers.setdefault(operand, []).append(instruction)
        if instruction.opcode == "parameter":
            self.parameters[int(instruction.inside)] = instruction.name

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands]

    def moved(self, instruction: Instruction, fused: "Computation | None") -> tuple[int, int]:
        """Return the bytes that an instruction or fusion reads from main memory, and the bytes that it writes there."""
        operands, opcode = self.operands(instruction), instruction.opcode.removesuffix("-start")
        is_start = opcode != instruction.opcode
        readers = self.readers.get(instruction.name, ()) if is_start else ()
        end = next((each for each in readers if each.opcode.endswith("-done")), None)
        if opcode in COLLECTIVES:
            return sum(each.bytes for each in operands), (end or instruction).bytes
        reads = [i for i, operand in enumerate(operands) if operand.is_in_memory]
        if fused is not None and opcode == "fusion":
            made = fused._ends if instruction.is_in_memory else ()
            written = sum(fused._written(end) for end in map(fused.instructions.get, made) if end and end.is_in_memory)
            return sum(fused._read(fused.parameters[i]) for i in reads), written
        if is_start:  # the result of a start lists operands, results and scratch memory
            read = sum(operands[i].bytes for i in reads)
            if end is None:
                return read, read
            if instruction.opcode in TRANSFERS:
                read = end.bytes if 0 in reads else 0
            return read, end.main_bytes
        written = self._written(instruction) if instruction.is_in_memory else 0
        written = instruction.main_bytes if instruction.is_tuple else written
        return sum(self._read_by(instruction, i) for i in reads), written

    @functools.cached_property
    def _ends(self) -> list[str]:
        """The names of the instructions that compute the results of this fusion, without tuples and views."""
        left, ends = [self.root], []
        while left:
            instruction = self.instructions[left.pop(0)]
            if instruction.opcode in ("tuple", "bitcast"):
                left[:0] = instruction.operands
            else:
                ends.append(instruction.name)
        return ends

    def _read(self, name: str) -> int:
        """Return how many bytes of a value the fusion reads: all, unless all readers of the value read only a part."""
        whole = self.instructions[name].bytes
        parts = whole if name in self._ends else 0
        for reader in self.readers.get(name, ()):
            if reader.opcode in _EACH:
                parts += whole * self._read(reader.name) // max(reader.bytes, 1)
            elif reader.opcode in _CHANGES and reader.name not in self._ends:  # not in place: the whole array is copied
                parts += whole
            elif reader.opcode != "tuple":
                parts += sum(self._read_by(reader, i) for i, operand in enumerate(reader.operands) if operand == name)
        return min(parts, whole)

    def _read_by(self, reader: Instruction, position: int) -> int:
        """Return the bytes that an instruction reads from its operand at `position`."""
        if position == 0 and reader.opcode in _PARTS:
            return reader.bytes
        if position == 0 and reader.opcode in _CHANGES:
            return self._written(reader) if reader.opcode == "scatter" else 0
        return self.instructions[reader.operands[position]].bytes

    def _written(self, instruction: Instruction) -> int:
        part = _CHANGES.get(instruction.opcode, len(instruction.operands))
        changed = instruction.operands[part : part + 1]
        return self.instructions[changed[0]].bytes if changed else instruction.bytes


def computations(text: str) -> tuple[dict[str, Computation], str]:
    """Parse the text of a program. Return a dict from name to computation, and the name of the entry computation."""
    found: dict[str, Computation] = {}
    entry, current = None, Computation()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = found.setdefault(head[2], Computation())
            entry = head[2] if head[1] else entry
        elif found and (each := _INSTRUCTION.match(line)):
            current.add(_instruction(each[2], each[3]), bool(each[1]))
    if entry is None:
        raise ValueError("no entry computation")
    return found, entry


def _instruction(name: str, text: str) -> Instruction:
    """Parse the text of an instruction, which has the form `type opcode(operands), attributes`."""
    is_tuple = text.startswith("(")
    end = _closing(text, 0) if is_tuple else text.index(" ")
    if (found := _OPCODE.match(text, end)) is None:
        raise ValueError(f"no opcode in {text[:60]!r}")
    close = _closing(text, found.end() - 1)
    inside = text[found.end() : close - 1]
    arrays = tuple(
        Array(kind, tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size), bool(elsewhere))
        for kind, sizes, elsewhere in _ARRAY.findall(text[:end])
        if kind not in ("token", "opaque")
    )
    return Instruction(name, found[1], arrays, is_tuple, tuple(_NAME.findall(inside)), inside, text[close:])


def _closing(text: str, start: int) -> int:
    """Return the position right after the closing parenthesis that matches the opening parenthesis at `start`."""
    depth = 0
    for found in _PARENTHESIS.finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    raise ValueError(f"no closing parenthesis in {text[:60]!r}")


def frame_lines(text: str) -> dict[int, str]:
    """Return the user's source line (`file.py:12`) of each stack frame. A frame in rlxjax gets its caller's line."""

    def table(name: str) -> dict[int, str]:
        rows = text.partition(f"\n{name}\n")[2].partition("\n\n")[0].splitlines()
        return {int(key): row for key, _, row in (row.partition(" ") for row in rows)}

    files = {key: path.strip('"').replace("\\\\", "\\") for key, path in table("FileNames").items()}
    places = {key: dict(_FIELD.findall(row)) for key, row in table("FileLocations").items()}
    found = {}
    for key, row in sorted(table("StackFrames").items()):  # a caller comes before the frames that it calls
        frame = dict(_FIELD.findall(row))
        place = places[int(frame["file_location_id"])]
        file = files[int(place["file_name_id"])]
        caller = int(frame.get("parent_frame_id", 0)) - 1  # ids start at 1, and 1 means no caller
        if not file.startswith(PACKAGE):
            found[key] = f"{os.path.basename(file)}:{place['line']}"
        elif caller in found and not file.endswith(_LOWERING):
            found[key] = found[caller]
    return found


def fused_in(
    instruction: Instruction, computation: Computation, computations: Mapping[str, Computation]
) -> list[tuple[Instruction, Computation]]:
    """Return the instructions inside a fusion or call, or else the instruction itself, each with its computation."""
    name = {"fusion": "calls", "custom-call-start": "called_computations"}.get(instruction.opcode, "")
    inside = computations.get(instruction.called.get(name, ""))
    if inside is None:
        return [(instruction, computation)]
    return [one for each in inside.instructions.values() for one in fused_in(each, inside, computations)]
