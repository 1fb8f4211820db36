"""What a program that XLA compiled runs and moves, read from its text; no other folder knows that text."""

import re
from collections.abc import Container, Mapping

from ._equations import UNKNOWN_LINE
from ._loops import UnknownLoop
from ._rules import OperationCounts
from ._totals import Totals
from ._xla_loops import trips_of
from ._xla_text import (
    BRANCHES,
    CALLED,
    COLLECTIVES,
    ENDS,
    NAME,
    NOTHING,
    TARGET,
    TRANSFERS,
    TRIPS,
    Computation,
    Instruction,
    bytes_of,
    computations,
    frame_lines,
    moved,
)

#: Calls that stand for another view of memory.
_VIEWS = ("ConcatBitcast", "AllocateBuffer")
_KIND = re.compile(r"\bkind=k(\w+)")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_TRITON = re.compile(r'"fusion_backend_config":\{"kind":"_*([^"]+)"')
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')


class CompiledProgram:
    """A compiled program: what it runs, and what of it no figure of XLA's own covers.

    Attributes:
        totals: launches and bytes by kind of instruction and by the user's line.
        unknown_loops: the loops whose trips the text does not tell.
        loops: how many loops turn more than once, or nobody knows how often.
        custom_calls: the targets of custom calls, in order.
        collectives: what devices do together, by name: how often, and bytes that one device reads and writes.
        no_cycles: what the compiler estimates no cycles of, by kind, where it does so for others.

    Trips are those of loops whose trips the text does not tell, by their line. Some files are no user's. On a TPU
    instructions on single numbers are no kernels: `scalars_launch` is False.

    Raises:
        ValueError: the text is not written as expected.
    """

    def __init__(
        self, text: str, trips: Mapping[str, int], no_users: Container[str] = (), scalars_launch: bool = True
    ) -> None:
        self.unknown_loops: list[UnknownLoop] = []
        self.loops = 0
        self.custom_calls: dict[str, None] = {}
        self._totals: dict[str, Totals] = {}
        self._trips = trips
        self._scalars_launch = scalars_launch
        self.no_cycles: dict[str, None] = {}
        try:
            self._computations, entry = computations(text)
            self._lines = frame_lines(text, no_users)
            self.totals = self._count(entry)
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"level: 'compiled' is not available: XLA's text is not written as expected "
                f"({type(error).__name__}: {error})"
            ) from None
        starts = self.totals.loop_starts
        families = self.totals.families
        self.collectives = {name: families[name] for name in families if name in COLLECTIVES}
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
            trips = int(known[1]) if known else trips_of(instruction, computation, self._computations, called)
            trips = self._trips.get(line) if trips is None else trips
            self.loops += trips != 1
            test, turn = self._count(called["condition"]), self._count(called["body"])
            loop = totals.add_loop(test, turn, trips, line, len(self.unknown_loops))
            self.unknown_loops += [loop] if trips is None else []
        elif opcode == "conditional":
            listed = BRANCHES.search(attributes)
            taken = NAME.findall(listed[1]) if listed else [called["true_computation"], called["false_computation"]]
            totals.add_branches(list(map(self._count, taken)), line)
        elif opcode == "call" or (opcode == "async-start" and "calls" in called):
            totals.add(self._count(called["to_apply" if opcode == "call" else "calls"]), 1)
        elif self._scalars_launch or not _is_scalar(instruction, computation):
            family = self._family(instruction)
            if family in _VIEWS:
                return
            both = sum(moved(instruction, computation, self._computations, called.get("calls")))
            totals.count(family, line, OperationCounts(bytes=both, launches=int(opcode not in TRANSFERS)))
            if cycles := _CYCLES.search(attributes):
                totals.cycles += int(cycles[1])
            elif both and opcode not in TRANSFERS:
                self.no_cycles[family] = None

    def _family(self, instruction: Instruction) -> str:
        """Return the kind of an instruction, a custom call by its target, a fusion by what makes its code."""
        opcode, attributes = instruction.opcode, instruction.attributes
        if opcode == "custom-call" and (target := TARGET.search(attributes)):
            if target[1] in _VIEWS:
                return target[1]
            self.custom_calls[target[1]] = None
            return f"custom-call {target[1]}"
        if opcode == "fusion" and (made_by := _TRITON.search(attributes)):
            return f"{made_by[1].removesuffix('_fusion').replace('_', ' ')} fusion"
        if opcode == "fusion" and (kind := _KIND.search(attributes)):
            return f"{kind[1].lower()} fusion"
        return opcode.removesuffix("-start")


def _is_scalar(instruction: Instruction, computation: Computation) -> bool:
    """Whether an instruction works on single numbers alone, as a loop's counter."""
    if instruction.opcode in ("fusion", "custom-call") or instruction.opcode.removesuffix("-start") in COLLECTIVES:
        return False
    values = [instruction, *(computation.instructions[name] for name in instruction.operands)]
    return all(bytes_of(value.type) <= 8 for value in values)
