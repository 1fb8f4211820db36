"""Walk over a jaxpr, called jaxprs included, and count each equation that does work; loops count all iterations."""

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ._kernels import add_kernel, copying, mark_looped, reordering, reuse, work_of
from ._known import Number, Scalar, known_result, number_of, turns
from ._memory import Step, folded, fused_memory
from ._primitives import (
    CALLS,
    CUSTOMS,
    LOOPS,
    NOTHING,
    RULES,
    UNKNOWN_LINE,
    called_jaxpr,
    implementation,
    inner_jaxprs,
    is_literal,
    is_outer_reduction,
    is_renaming,
    opened,
    scan_layout,
    source_line,
)
from ._rules import CALLBACK, Operation, OperationCounts, Rule, elements, nbytes
from ._totals import CUSTOM, FUSED_BYTES, NONE, SYNC_POINTS, TRIPS, Totals, Trips, UnknownLoop

#: Calls are inlined up to this number of equations in total. A call that would exceed the limit remains a single step.
_MOST_INLINED = 100_000
_UNCOSTED = Rule("uncosted", said=lambda op: None)
#: The rule of a step that contains other steps (such as a loop), and the rule of a copy into another memory layout.
_INNER, _REORDERED = Rule("", in_place=True), Rule("movement")


class _Placed(NamedTuple):
    """An equation, its caller's line, the buffers or literals that it reads, and the buffers that it writes."""

    equation: Any
    caller: str
    reads: tuple[Any, ...]
    writes: tuple[int, ...]


class _Flat:
    """A jaxpr whose calls are inlined: equations that read and write buffers, which are arrays identified by number."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.placed: list[_Placed] = []
        self.constants: dict[int, int] = {}
        #: Buffers that are computed from literals only. These buffers need no memory.
        self.constant: set[int] = set()
        #: For each buffer: the rule of the equation that computes it. A fused result can have any memory layout.
        self.makers: dict[int, Rule] = {}
        #: Buffers that are also read in another shape. No elementwise result reuses the memory of these buffers.
        self.reshaped: set[int] = set()
        #: For an argument that is read in another memory layout: the buffer of a copy in that layout.
        self.copies: dict[int, int] = {}
        #: For a buffer of a single element: the number in the buffer, if it is known before the program runs.
        self.known: dict[int, Number] = {}
        #: For each `top_k` that sorts all elements: its first result, and how many arrays it sorts.
        self.sorts: dict[int, int] = {}
        #: The number of equations that move no data, such as reshapes.
        self.free_equations = 0

    def new(self, size_bytes: int) -> int:
        self.sizes.append(size_bytes)
        return len(self.sizes) - 1

    def held_constant(self, value: Any, aval: Any) -> int:
        if id(value) not in self.constants:
            self.constants[id(value)] = self.new(nbytes(aval))
            self.known[self.constants[id(value)]] = number_of(value)
        return self.constants[id(value)]

    def numbers(self, reads: Iterable[Any]) -> list[Number]:
        return [number_of(read.val) if is_literal(read) else self.known.get(read) for read in reads]


class Walk:
    """A walk over the jaxpr of a function that runs on a platform such as "cpu" or "cuda".

    The walk knows the user's trip counts and the values of captured arrays.
    """

    def __init__(self, trips: Trips, constants: dict[Any, Any], platform: str) -> None:
        self.loops: list[UnknownLoop] = []
        self._platform = platform
        self._trips = trips
        self._constants = constants
        self._line = UNKNOWN_LINE
        self._totals: dict[Any, Totals] = {}
        self._sizes: dict[int, tuple[int, bool]] = {}
        self._implementations: dict[int, Any] = {}

    def totals(self, jaxpr: Any, reusable: Iterable[int] = (), known: Sequence[Number] = ()) -> Totals:
        key = id(jaxpr), tuple(reusable), tuple(known)
        if key not in self._totals or self._size(jaxpr)[1]:
            self._totals[key] = self._count(jaxpr, key[1], known)
        return self._totals[key]

    def _size(self, jaxpr: Any) -> tuple[int, bool]:
        """Return the number of equations in a jaxpr after its calls are inlined, and whether it contains a `while`."""
        if id(jaxpr) not in self._sizes:
            size, has_while = len(jaxpr.eqns), False
            for equation in jaxpr.eqns:
                name = equation.primitive.name
                has_while |= name == "while"
                implemented = self._implementation(equation)
                for inner in inner_jaxprs(equation) if implemented is None else (implemented,):
                    inner_size, inner_while = self._size(opened(inner))
                    self._constants.update(zip(opened(inner).constvars, getattr(inner, "consts", ()), strict=False))
                    size += inner_size if name in CALLS or implemented is not None else 0
                    has_while |= inner_while
            self._sizes[id(jaxpr)] = size, has_while
        return self._sizes[id(jaxpr)]

    def _implementation(self, equation: Any) -> Any | None:
        if id(equation) not in self._implementations:
            self._implementations[id(equation)] = implementation(equation, self._platform)
        return self._implementations[id(equation)]

    def _called(self, equation: Any, operands: Sequence[Any]) -> tuple[Any, Sequence[Any]] | None:
        """Return the jaxpr that an equation calls, and that jaxpr's operands; None if the equation is not a call."""
        if equation.primitive.name in CALLS:
            return called_jaxpr(equation, operands)
        implemented = self._implementation(equation)
        # A branch of a conditional takes all operands except the first, which picks the branch.
        return implemented and (implemented, operands[len(operands) - len(implemented.invars) :])

    def _count(self, jaxpr: Any, reusable: Sequence[int], known: Sequence[Number]) -> Totals:
        flat, totals = _Flat(), Totals()
        inputs = [flat.new(nbytes(var.aval)) for var in jaxpr.invars]
        flat.known.update(zip(inputs, known, strict=False))
        # Unknown loops are identified by their line, so only totals without a `while` are the same for all callers.
        outputs = self._place(jaxpr, inputs, flat, self._line if self._size(jaxpr)[1] else UNKNOWN_LINE)
        kept = [buffer for buffer in outputs if isinstance(buffer, int)]
        given = [*inputs, *flat.constants.values()]
        totals.equations = flat.free_equations
        used = _used(flat.placed, kept)
        flat.sorts = _full_sorts(used, kept, flat)
        steps = [self._step(placed, flat, totals) for placed in used]
        steps = folded(steps, flat.constant, {*kept})
        # Compilers copy an argument into the needed memory layout only once.
        steps[:0] = [
            Step(None, _REORDERED, (old,), (new,), (old,), 0, work=reordering(flat.sizes[old]))
            for old, new in flat.copies.items()
        ]
        read = {buffer for step in steps for buffer in step.reads} | set(kept)
        totals.argument_bytes = sum(flat.sizes[buffer] for buffer in given if buffer in read)
        reused = {inputs[i] for i in reusable}
        kernels, fused_bytes, temp_bytes = fused_memory(steps, flat.sizes, given, kept, reused, flat.reshaped)
        totals.work.update(kernels)
        totals.work[FUSED_BYTES] += fused_bytes
        unkept = (var.aval for var, buffer in zip(jaxpr.outvars, outputs, strict=True) if buffer not in kept)
        totals.temp_bytes = temp_bytes + nbytes(*unkept)
        return totals

    def _place(self, jaxpr: Any, operands: Sequence[Any], flat: _Flat, caller: str) -> list[Any]:
        """Add a jaxpr's equations to `flat`, with the buffers that they read and write. Return the results' buffers."""
        held: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
        held.update((var, flat.held_constant(self._constants.get(var, var), var.aval)) for var in jaxpr.constvars)

        def at(var: Any) -> Any:
            if not is_literal(var):
                return held[var]
            return flat.held_constant(var.val, var.aval) if getattr(var.aval, "shape", ()) else var

        for equation in jaxpr.eqns:
            name = equation.primitive.name
            reads = [at(var) for var in equation.invars]
            called = self._called(equation, reads)
            if called and len(flat.placed) + self._size(called[0])[0] <= _MOST_INLINED:
                results = self._place(*called, flat, source_line(equation, caller))
            elif name in NOTHING or is_renaming(equation):
                flat.free_equations += 1
                is_free = name in NOTHING or not reads
                results = [None] * len(equation.outvars) if is_free else reads[: len(equation.outvars)]
                if name == "reshape":
                    flat.reshaped.update(buffer for buffer in results if isinstance(buffer, int))
            else:
                results = [flat.new(nbytes(var.aval)) for var in equation.outvars]
                flat.known.update(dict.fromkeys(results[:1], known_result(equation, flat.numbers(reads))))
                if name == "dot_general":  # the free axes of an operand become one axis
                    free = (
                        len(var.aval.shape) - sum(map(len, axes))
                        for var, *axes in zip(equation.invars, *equation.params["dimension_numbers"], strict=True)
                    )
                    flat.reshaped.update(results if max(free) > 1 else ())
                rule = RULES.get(name, _UNCOSTED)
                is_in_parts = rule.reads_part or rule.family == "scatter"
                if is_in_parts and reads and not isinstance(reads[0], int):  # only an array has parts
                    value = getattr(reads[0], "val", equation)
                    reads[0] = flat.held_constant(value, equation.invars[0].aval)
                    flat.constant.add(reads[0])
                flat.makers.update(dict.fromkeys(results, rule))
                if rule.in_memory == 0 and all(not isinstance(each, int) or each in flat.constant for each in reads):
                    flat.constant.update(results)
                flat.placed.append(_Placed(equation, caller, tuple(reads), tuple(results)))
            held.update(zip(equation.outvars, results, strict=True))
        return [at(var) for var in jaxpr.outvars]

    def _step(self, placed: _Placed, flat: _Flat, totals: Totals) -> Step:
        """Add an equation's counts to the totals, and return the equation as a `Step` that reads and writes buffers."""
        equation, caller, reads, writes = placed
        name, line = equation.primitive.name, source_line(equation, caller)
        buffers = tuple(buffer for buffer in reads if isinstance(buffer, int))
        if name in LOOPS or self._called(equation, reads):
            outer, self._line = self._line, line
            inside = self._inside(equation, line, flat.numbers(reads))
            self._line = outer
            fused_bytes = inside.work.pop(FUSED_BYTES, 0)
            for place in range(len(NONE)) if ("line", UNKNOWN_LINE, 0) in inside.work else ():
                count = inside.work.pop(("line", UNKNOWN_LINE, place))
                inside.work["line", line, place] += count
            totals.add(inside, 1)
            needs = tuple(buffer for buffer in buffers if buffer not in flat.constant)
            return Step(equation, _INNER, buffers, writes, needs, fused_bytes, inside.temp_bytes)
        rule = RULES.get(name, _UNCOSTED)
        operands, results = ([var.aval for var in side] for side in (equation.invars, equation.outvars))
        operation = Operation(operands, results, equation.params)
        if writes and (sorted_arrays := flat.sorts.get(writes[0])):
            name = "sort" if sorted_arrays == 1 else "sort_several"
            rule = RULES["sort"]._replace(workspace=lambda op: nbytes(*op.outputs))
            axis = equation.params.get("axis", -1)
            operation = Operation(operands, operands * sorted_arrays, {"dimension": axis})
        if (counts := rule.counts(operation)) is None:
            rule, counts = _UNCOSTED, OperationCounts()
        moved = sum(flat.sizes[buffer] for buffer in (*buffers, *writes)) if counts.bytes is None else counts.bytes
        totals.count(rule.family, line, counts._replace(bytes=moved))
        totals.equations += 1
        totals.all_bytes += moved
        totals.static_ops += counts.flops + counts.integer_ops
        is_ordered = any("Ordered" in type(effect).__name__ for effect in equation.effects)
        totals.work[SYNC_POINTS] += rule.family == CALLBACK or is_ordered
        if rule is _UNCOSTED:
            totals.uncosted[name] += 1
        else:
            totals.counted_bytes += moved
            for place, count in enumerate(counts._replace(bytes=moved) if name in CUSTOMS else ()):
                totals.work[CUSTOM, name, place] += count or 0
        is_read_alone = rule.in_memory is None or is_outer_reduction(name, operation)
        needs = buffers if is_read_alone else buffers[: rule.in_memory]
        workspace = rule.workspace(operation) if rule.workspace else 0
        for buffer, reordered in zip(reads, rule.reorders(operation) if rule.reorders else (), strict=False):
            if not reordered or not isinstance(buffer, int):  # a literal has no memory layout
                continue
            maker = flat.makers.get(buffer)
            if maker is not None and maker.in_memory == 0:
                continue
            if maker is not None:
                workspace += flat.sizes[buffer]
                add_kernel(totals.work, 0, 0, [reordering(flat.sizes[buffer])])
            else:
                if buffer not in flat.copies:
                    flat.copies[buffer] = flat.new(flat.sizes[buffer])
                buffers += (flat.copies[buffer],)
        hows = (how for how, read in zip(reuse(name, rule, operation), reads, strict=True) if isinstance(read, int))
        work, traffic_bytes = work_of(name, rule, counts, operation), moved if is_read_alone else None
        return Step(equation, rule, buffers, writes, needs, traffic_bytes, workspace, work, tuple(hows))

    def _inside(self, equation: Any, line: str, known: Sequence[Number]) -> Totals:
        """Return the totals of a loop, a conditional or a call that is not inlined, with its temporaries' memory."""
        name, params = equation.primitive.name, equation.params
        written = nbytes(*(var.aval for var in equation.outvars))
        result = Totals()
        if name == "scan":
            self._scan(equation, line, known, result)
        elif name == "while":
            self._while(params, line, known, result)
        elif name == "cond" and self._implementation(equation) is None:
            self._conditional(params["branches"], line, known, result)
            result.temp_bytes = max(result.temp_bytes - written, 0)
        else:
            devices, called = 1, self._called(equation, known)
            if name == "shard_map":
                mesh = params["mesh"].shape
                axes = params.get("newly_manual_axes", params.get("manual_axes", mesh))
                devices, called = math.prod(mesh[axis] for axis in axes), (opened(params["jaxpr"]), ())
            assert called
            body = self.totals(called[0], known=called[1])
            result.add(body, devices)
            result.temp_bytes = max(devices * body.temp_bytes - written, 0)
        return result

    def _scan(self, equation: Any, line: str, known: Sequence[Number], result: Totals) -> None:
        body, length = opened(equation.params["jaxpr"]), equation.params["length"]
        constants, carried = scan_layout(equation)
        self._trips.read.append((line, length))
        turn = self.totals(body, range(constants, constants + carried), known[:constants])
        result.add(turn, length)
        result.work[TRIPS] += length
        slices = [nbytes(var.aval) for var in body.outvars[carried:]]
        result.temp_bytes = max(turn.temp_bytes - sum(slices), 0)
        stacked = Counter[Any]()
        for size in slices:
            add_kernel(stacked, 2 * size, size, [copying(size, 4)])
        result.work.update({key: length * count for key, count in stacked.items()})
        mark_looped(result.work)

    def _while(self, params: Mapping[str, Any], line: str, known: Sequence[Number], result: Totals) -> None:
        cond, body = opened(params["cond_jaxpr"]), opened(params["body_jaxpr"])
        trips, number = self._told_trips(params, known), len(self.loops)
        if trips is not None:
            self._trips.read.append((line, trips))
        elif (trips := self._trips.next(line)) is None:
            self.loops.append(UnknownLoop(line, 0, NONE))
        test = self.totals(cond)
        of_test, constants = params["cond_nconsts"], params["body_nconsts"]
        turn = self.totals(body, range(constants, len(body.invars)), known[of_test : of_test + constants])
        loop = result.add_loop(test, turn, trips, line, number)
        if trips is None:
            self.loops[number] = loop
        result.temp_bytes = max(turn.temp_bytes, test.temp_bytes)
        mark_looped(result.work)

    def _told_trips(self, params: Mapping[str, Any], known: Sequence[Number]) -> int | None:
        """Return the trip count of a `while` if its condition depends on known numbers only; else None."""
        flat, of_test = _Flat(), params["cond_nconsts"]
        operands = [flat.new(0) for _ in known]
        carried = of_test + params["body_nconsts"]
        flat.known.update(zip(operands[:carried], known, strict=False))
        tested = operands[:of_test] + operands[carried:]
        (holds,) = self._place(opened(params["cond_jaxpr"]), tested, flat, UNKNOWN_LINE)
        of_test_alone = len(flat.placed)
        after = self._place(opened(params["body_jaxpr"]), operands[of_test:], flat, UNKNOWN_LINE)
        numbers: dict[Any, Number] = {**flat.known, **dict(zip(operands, known, strict=True))}

        def place(read: Any) -> Any:
            if is_literal(read):
                numbers[~id(read)] = number_of(read.val)
                return ~id(read)
            return read

        scalars = [
            Scalar(equation.primitive.name, equation.outvars[0].aval.dtype, list(map(place, reads)), writes[0])
            if writes and elements(equation.outvars[0].aval) == 1
            else None
            for equation, _, reads, writes in flat.placed
        ]
        test, turn = (list(filter(None, side)) for side in (scalars[:of_test_alone], scalars[of_test_alone:]))
        moves = dict(zip(operands[carried:], map(place, after), strict=True))
        return turns(test, turn, place(holds), moves, numbers)

    def _conditional(self, possible: Sequence[Any], line: str, known: Sequence[Number], result: Totals) -> None:
        which, *known = known
        if which is not None:
            possible = [possible[min(max(int(which), 0), len(possible) - 1)]]
        branches = [self.totals(opened(branch), known=known) for branch in possible]
        least = result.add_branches(branches, line)
        result.work[TRIPS] += 1
        # If one branch is empty, the others report an error: their callbacks do not run in a call that succeeds.
        deciding = branches if any(least.sums()[:4]) else [least]
        result.work[SYNC_POINTS] = max(branch.work[SYNC_POINTS] for branch in deciding)
        result.temp_bytes = max(branch.temp_bytes for branch in branches)


def _used(placed: Sequence[_Placed], outputs: Iterable[int]) -> list[_Placed]:
    """Return the equations whose results the outputs need, and the equations that have a side effect."""
    needed, used = set(outputs), []
    for each in reversed(placed):
        effects = any(type(effect).__name__ != "NamedAxisEffect" for effect in each.equation.effects)
        if effects or not needed.isdisjoint(each.writes):
            if each.equation.primitive.name == "scan":  # an unused stacked output is not stored
                _, carried = scan_layout(each.equation)
                kept = (buffer for buffer in each.writes[carried:] if buffer in needed)
                each = each._replace(writes=(*each.writes[:carried], *kept))
            used.append(each)
            needed.update(buffer for buffer in each.reads if isinstance(buffer, int))
    return used[::-1]


def _full_sorts(placed: Sequence[_Placed], outputs: Iterable[int], flat: _Flat) -> dict[int, int]:
    """Return the first result of each `top_k` that XLA runs as a full sort, and how many arrays it sorts.

    XLA writes a `top_k` as a sort and a slice, and merges later slices into this slice. XLA then
    recognises the `top_k` only in float32, and only if all slices of the sort are the same prefix of
    the sorted axis.
    """
    found = [each for each in placed if each.equation.primitive.name == "top_k"]
    readers: dict[Any, list[_Placed]] = {buffer: [] for each in found for buffer in each.writes}
    for each in placed if found else ():
        for buffer in each.reads:
            if isinstance(buffer, int) and buffer in readers:
                readers[buffer].append(each)
    sorts = {}
    for equation, _, _, results in found:
        operand, shape = equation.invars[0].aval, tuple(equation.outvars[0].aval.shape)
        axis, whole = equation.params.get("axis", -1) % len(shape), ((0,) * len(shape), shape)
        slices = {_slice(each, result, whole, flat) for result in results for each in readers[result]}
        if axis != len(shape) - 1:  # XLA merges no slice with the transpose that follows
            slices = {whole}
        elif not {*results}.isdisjoint(outputs):
            slices.add(whole)
        (starts, ends), *others = slices
        cut_axes = [i for i, size in enumerate(operand.shape) if ends[i] < size]
        if others or any(starts) or cut_axes != [axis] or operand.dtype != np.float32:
            sorts[results[0]] = 2 if readers[results[1]] or results[1] in outputs else 1
    return sorts


def _slice(reader: _Placed, result: int, whole: tuple[Any, Any], flat: _Flat) -> tuple[Any, Any]:
    """Return the starts and the ends of the slice of a result that XLA knows an equation to read."""
    name, params = reader.equation.primitive.name, reader.equation.params
    starts, is_reshaped = flat.numbers(reader.reads[1:]), reader.equation.invars[0].aval.shape != whole[1]
    if reader.reads[0] != result or is_reshaped or None in starts:
        return whole
    if name == "slice" and {*(params["strides"] or ())} <= {1}:
        return tuple(params["start_indices"]), tuple(params["limit_indices"])
    if name == "dynamic_slice":
        return tuple(starts), tuple(map(operator.add, starts, params["slice_sizes"]))
    return (whole[1], whole[1]) if name in ("split", "gather") else whole
