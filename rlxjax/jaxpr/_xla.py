"""Count the kernels, bytes and exchanges of a program that XLA compiled for a CPU, TPU or GPU, from XLA's text."""

import re
from collections import Counter
from collections.abc import Hashable, Mapping

import numpy as np

from ._exchanges import Exchange, collectives_in, exchange_of
from ._kernels import Kernels, kernel_table, mark_looped
from ._known import Number, Scalar, turns
from ._primitives import UNKNOWN_LINE
from ._rules import OperationCounts, names
from ._totals import CYCLES, EXCHANGE, OWN_CYCLES, PRODUCT, Totals, UnknownLoop
from ._xla_kernels import GpuProgram, add_kernels, end_row, products_of, unknown_targets
from ._xla_text import COLLECTIVES, ENDS, NOTHING, TRANSFERS, Computation, Instruction, computations, frame_lines

#: Opcodes that a TPU's compiler implements with special code.
_OWN = names("reduce-window select-and-scatter sort scatter gather rng-bit-generator fft cholesky triangular-solve")
#: Targets of custom calls that compute nothing and only give another view of memory.
_VIEWS = ("ConcatBitcast", "AllocateBuffer")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
_KIND = re.compile(r"\bkind=k(\w+)")
FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_TRITON = re.compile(r'"fusion_backend_config":\{"kind":"_*([^"]+)"')
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_INDEX = re.compile(r"\bindex=(\d+)")
_DIRECTION = re.compile(r"\bdirection=(\w+)")
_INTEGERS = {"pred": np.dtype(bool)} | {
    f"{'su'[kind == 'u']}{8 * size}": np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)
}
#: Dict from an opcode that may act on a loop counter to a primitive. Comparisons are named by their `direction`.
_SCALARS = dict.fromkeys(("copy", "bitcast", "convert", "copy-done", "copy-start", "reshape"), "copy") | {"add": "add"}


class CompiledProgram:
    """The counts of a compiled program. `trips` maps source lines to trip counts, for loops whose text states none."""

    def __init__(self, text: str, trips: Mapping[str, int], platform: str = "cpu", devices: int = 1) -> None:
        #: The loops with unknown trip counts; and the number of loops, without the loops that run a single iteration.
        self.unknown_loops: list[UnknownLoop] = []
        self.loops = 0
        #: The targets of custom calls, in order; and the kinds of kernels for which XLA estimates no cycles.
        self.custom_calls: dict[str, None] = {}
        self.no_cycles: dict[str, None] = {}
        self._trips, self._platform, self._devices = trips, platform, devices
        try:
            self._computations, name = computations(text)
            self._lines = frame_lines(text)
            #: The program's totals: launches and bytes by kind of instruction, and again by the user's source line.
            self.totals = self._count(name)
            entry = self._computations[name]
            results = len(entry.instructions[entry.root].arrays)
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"compiled program: XLA's text is not written as expected ({type(error).__name__}: {error})"
            ) from None
        self.cycles, self.own_cycles = self.totals.work[CYCLES], self.totals.work[OWN_CYCLES]
        #: For each name of a collective: the number of launches, and the bytes that a single device reads and writes.
        self.collectives = {name: row for name, row in self.totals.rows("family").items() if name in COLLECTIVES}
        #: The same collectives as `Exchange`s, which say which devices take part and which work overlaps.
        self.exchanges = tuple(
            name._replace(times=times) for (what, name, _), times in self.totals.work.items() if what == EXCHANGE
        )
        #: Floating-point operations of matrix products and convolutions, by kind of product (see `PRODUCT_KINDS`).
        self.products = {name: flop for (what, name, _), flop in self.totals.work.items() if what == PRODUCT}
        starts = self.totals.loop_starts
        self.unknown_loops = [loop._replace(starts=starts.get(i, 0)) for i, loop in enumerate(self.unknown_loops)]
        #: Kernels and launches of one call. On a TPU, kernels whose time follows from estimated cycles are left out.
        self.gpu = GpuProgram(
            len(entry.parameters),
            results,
            kernel_table(self.totals.kernels),
            **self.totals.commands,
            unknown_loops=len(self.unknown_loops),
            unknown=unknown_targets(self.custom_calls),
        )

    def _count(self, name: str, added_to: Totals | None = None) -> Totals:
        """Return the totals of one run of a computation. If `added_to` is given, add the counts to these totals."""
        computation, totals = self._computations[name], added_to or Totals()
        begun: dict[str, tuple[Exchange, list[int]]] = {}
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode not in NOTHING and not opcode.endswith(ENDS):
                self._add(instruction, computation, totals)
            if self._devices > 1 and opcode not in NOTHING:
                self._exchange(instruction, computation, totals, begun)
        for exchange, marks in begun.values():
            cycles, moved, flop = (end - start for start, end in zip(marks[:3], marks[3:], strict=True))
            beside = exchange._replace(beside_cycles=cycles, beside_bytes=moved, beside_flop=flop)
            totals.work[EXCHANGE, beside, 0] += 1
        end_row(totals.commands)
        return totals

    def _exchange(
        self,
        instruction: Instruction,
        computation: Computation,
        totals: Totals,
        begun: dict[str, tuple[Exchange, list[int]]],
    ) -> None:
        """Record the start or end of an exchange. The work that is counted in between overlaps with the exchange."""
        if instruction.opcode.endswith(ENDS):
            names = [name for name in instruction.operands if name in begun]
            if names and instruction.opcode.endswith("-update"):  # the `-done` refers to its `-update`
                begun[instruction.name] = begun.pop(names.pop())
        else:
            names = []
            for found, inside in collectives_in(instruction, computation, self._computations):
                if (made := exchange_of(found, inside, instruction, self._devices)) is None:
                    continue
                exchange, channel = made
                # Fusions of the same channel are steps of the same exchange. A `-done` names its `-start`.
                key = channel if instruction.opcode == "fusion" else instruction.name
                if key in begun:
                    names.append(key)
                else:
                    begun[key] = exchange, [*self._done(totals)] * 2
        for name in names:
            begun[name] = begun[name][0], begun[name][1][:3] + [*self._done(totals)]

    def _done(self, totals: Totals) -> tuple[int, int, int]:
        """Return three counts up to here: `OWN_CYCLES`, the bytes of kernels without collectives, FLOP of products."""
        flop = sum(count for (what, *_), count in totals.work.items() if what == PRODUCT)
        rows = totals.rows("family").items()
        return totals.work[OWN_CYCLES], sum(row.bytes or 0 for name, row in rows if name not in COLLECTIVES), flop

    def _add(self, instruction: Instruction, computation: Computation, totals: Totals) -> None:
        opcode, called = instruction.opcode, instruction.called
        frame = FRAME.search(instruction.attributes)
        line = self._lines.get(int(frame[1]), UNKNOWN_LINE) if frame else UNKNOWN_LINE
        if opcode == "while":
            end_row(totals.commands)
            self._add_loop(instruction, computation, line, totals)
        elif opcode == "conditional":
            end_row(totals.commands)
            totals.commands["readbacks"] += 1
            totals.add_branches(list(map(self._count, instruction.branches)), line)
        elif opcode in ("call", "call-start", "async-start") and (
            inside := called.get("to_apply", called.get("calls"))
        ):
            self._count(inside, totals)
        elif self._platform != "tpu" or not _is_scalar(instruction, computation):
            family = self._family(instruction)
            if family in _VIEWS:
                return
            fused = self._computations[called["calls"]] if "calls" in called else None
            both = sum(computation.moved(instruction, fused))
            totals.count(family, line, OperationCounts(bytes=both, launches=int(opcode not in TRANSFERS)))
            is_exchange = bool(self._devices > 1 and collectives_in(instruction, computation, self._computations))
            cycles = _CYCLES.search(instruction.attributes)
            products = products_of(instruction, computation, self._computations)
            for kind, flop in products:
                totals.work[PRODUCT, kind, 0] += flop
            # A TPU's compiler estimates two to five times the memory time for kernels that stream over arrays.
            is_own = bool(products or instruction.target or opcode in _OWN)
            totals.work[CYCLES] += int(cycles[1]) if cycles else 0
            totals.work[OWN_CYCLES] += int(cycles[1]) if cycles and is_own else 0
            is_kernel = opcode not in TRANSFERS and not is_exchange
            if both > 0 and cycles is None and is_kernel:
                self.no_cycles[family] = None
            is_told = self._platform == "tpu" and (cycles is not None and is_own or not (both or cycles))
            if is_kernel and not is_told:
                add_kernels(instruction, computation, self._computations, totals, self._platform)

    def _add_loop(self, loop: Instruction, outside: Computation, line: str, totals: Totals) -> None:
        known, called = _TRIPS.search(loop.attributes), loop.called
        trips = int(known[1]) if known else None
        if trips is None and self._platform != "cuda":  # a GPU keeps its loop counter on the device
            trips = self._told_trips(loop, outside)
        trips = self._trips.get(line) if trips is None else trips
        self.loops += trips != 1
        test, turn = self._count(called["condition"]), self._count(called["body"])
        if known and self._platform == "cuda":  # the host of a GPU reads no loop condition
            test = Totals()
        elif known:
            test.kernels, test.commands = Counter(), Counter()
        else:
            totals.commands["readbacks"] += 2 if trips is None else trips + 1
        for part in (test, turn):
            mark_looped(part.kernels)
        added = totals.add_loop(test, turn, trips, line, len(self.unknown_loops))
        if trips is None:  # one iteration, and the condition that ends the loop
            self.unknown_loops.append(added)
            totals.add_kernels(turn, 1)
            totals.add_kernels(test, 1)

    def _told_trips(self, loop: Instruction, outside: Computation) -> int | None:
        """Return the trip count of a `while` if it follows from constants in the text, else None."""
        known: dict[Hashable, Number] = {}
        moves: dict[Hashable, Hashable] = {}
        sides: list[list[Scalar]] = []
        for side in (inside := [self._computations[loop.called[way]] for way in ("condition", "body")]):
            carried: dict[str, Hashable] = {}  # the position of a carried value, by the name that reads the value
            sides.append([])
            for name, each in side.instructions.items():
                reads = [carried.get(operand, (len(sides), operand)) for operand in each.operands]
                place, text = (len(sides), name), each.attributes
                direction = _DIRECTION.search(text) if each.opcode == "compare" else None
                if each.opcode == "get-tuple-element" and side.operands(each)[0].opcode == "parameter":
                    carried[name] = next(map(int, _INDEX.findall(text)), None)
                elif each.opcode == "constant" and each.inside.lstrip("-").isdecimal():
                    known[place] = int(each.inside)
                elif opcode := direction[1].lower() if direction else _SCALARS.get(each.opcode):
                    if each.arrays and (dtype := _INTEGERS.get(each.arrays[0].kind)) is not None:
                        sides[-1].append(Scalar(opcode, dtype, reads, place))
                elif name == side.root and each.opcode == "tuple" and side is inside[1]:
                    moves = dict(enumerate(reads))
        given = outside.instructions[loop.operands[0]]
        for place, name in enumerate(given.operands if given.opcode == "tuple" else ()):
            while (first := outside.instructions[name]).opcode in _SCALARS and first.opcode != "add":
                name = first.operands[0]
            if first.opcode == "constant" and first.inside.lstrip("-").isdecimal():
                known[place] = int(first.inside)
        return turns(sides[0], sides[1], (1, inside[0].root), moves, known)

    def _family(self, instruction: Instruction) -> str:
        """Return the name of an instruction's row in `by_family`: from its target, kind of fusion, or opcode."""
        opcode, attributes = instruction.opcode, instruction.attributes
        if target := instruction.target:
            if target in _VIEWS:
                return target
            self.custom_calls[target] = None
            return f"custom-call {target}"
        if opcode == "fusion" and (made_by := _TRITON.search(attributes)):
            return f"{made_by[1].removesuffix('_fusion').replace('_', ' ')} fusion"
        if opcode == "fusion" and (kind := _KIND.search(attributes)):
            return f"{kind[1].lower()} fusion"
        return opcode.removesuffix("-start")


def _is_scalar(instruction: Instruction, computation: Computation) -> bool:
    """Whether all operands and results are single numbers, such as a loop counter. A TPU then launches no kernel."""
    if instruction.opcode in ("fusion", "custom-call") or instruction.opcode.removesuffix("-start") in COLLECTIVES:
        return False
    return all(value.bytes <= 8 for value in (instruction, *computation.operands(instruction)))


def gpu_program(text: str, trips: Mapping[str, int] | None = None) -> GpuProgram:
    """Return the kernels and launches of a program that was compiled for a GPU, read from the program's text.

    Args:
        text: the text of the program, as `jax.stages.Compiled.as_text` returns it.
        trips: trip counts by source line, for loops whose text states no count. A loop without any count runs once.

    Raises:
        ValueError: the text cannot be parsed.

    Examples:
        >>> text = '''
        ... %fused (p: f32[8]) -> f32[8] {
        ...   %p = f32[8]{0} parameter(0)
        ...   ROOT %tanh = f32[8]{0} tanh(%p)
        ... }
        ... ENTRY %main (x: f32[8]) -> f32[8] {
        ...   %x = f32[8]{0} parameter(0)
        ...   ROOT %fusion = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
        ... }'''
        >>> kernels = gpu_program(text).kernels
        >>> kernels.family_names(), kernels.launches.tolist(), kernels.operations(0)
        (['elementwise'], [1], {'tanh': 8})
    """
    return CompiledProgram(text, trips or {}, platform="cuda").gpu


def compiled_kernels(text: str, trips: Mapping[str, int] | None = None) -> Kernels:
    """Return the kernels of a program that was compiled for a CPU or GPU; the arguments are those of `gpu_program`.

    Raises:
        ValueError: the text cannot be parsed.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> text = jax.jit(jnp.tanh).lower(jnp.ones(8)).compile().as_text()
        >>> compiled_kernels(text).operations(0)
        {'tanh': 8}
    """
    return CompiledProgram(text, trips or {}).gpu.kernels
