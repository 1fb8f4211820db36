"""The walk over a jaxpr: every equation that does work is counted, calls are looked into, loops multiplied."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import source_info_util
from jax.extend.core import Literal

from . import _operations_heavy, _operations_indexed  # noqa: F401  (they enter their rules)
from ._buffers import Step, fused_memory
from ._loops import BranchSpread, Trips, UnknownLoop, readable_trips
from ._operations import RESERVED, RULES, Operation, OperationCounts, Rule, elements, names, nbytes
from ._operations_heavy import CALLBACKS

#: What holds a jaxpr and runs it once, as if its equations stood in its place.
_CALLS = names(
    "jit pjit call core_call closed_call core_closed_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr "
    "checkpoint remat remat2 composite custom_vmap_call xla_metadata_call custom_linear_solve eval_jaxpr"
)
_LOOPS = names("scan while cond shard_map")
#: What names its operand anew and moves nothing.
_RENAMES = names(
    "reshape squeeze expand_dims stop_gradient name optimization_barrier sharding_constraint random_wrap "
    "random_unwrap pvary pcast pbroadcast mesh_cast layout_constraint"
)
#: What is known before the program runs, or orders it.
_NOTHING = names("axis_index platform_index create_token after_all dce_sink")
RESERVED |= _CALLS | _LOOPS | _RENAMES | _NOTHING
#: A value that costs nothing to read: a scalar literal is part of the kernel.
_FREE = None
#: A called jaxpr of more equations is one step of its caller, so that calls of calls stay bounded.
_MOST_INLINED = 100_000

_UNKNOWN_LINE = "unknown line"
#: The file of this package from which functions are traced: no user's line.
_TRACER = "_function_profile.py"
#: `/folder/file.py:12:3 (function)`, as JAX writes a place.
_PLACE = re.compile(r"(?:.*[/\\])?([^/\\]+?):(\d+)(?::\d+)?(?: |$)")

_UNCOSTED = Rule("uncosted", lambda op: None)


@dataclasses.dataclass
class Totals:
    """What one jaxpr does; rows are FLOP, transcendentals, integer operations, bytes, launches."""

    families: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    lines: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    equations: int = 0
    counted_equations: int = 0
    all_bytes: int = 0
    counted_bytes: int = 0
    sync_points: int = 0
    fused_bytes: int = 0
    temp_bytes: int = 0
    #: Of the arguments and constants that somebody uses.
    argument_bytes: int = 0
    uncosted: Counter[str] = dataclasses.field(default_factory=Counter)
    #: How often each loop of unknown length is started; None inside another one.
    loop_starts: dict[int, int | None] = dataclasses.field(default_factory=dict)
    spreads: dict[str, BranchSpread] = dataclasses.field(default_factory=dict)

    def sums(self) -> OperationCounts:
        """Return everything that is known, over all families."""
        return OperationCounts(*map(sum, zip((0, 0, 0, 0, 0), *self.families.values(), strict=True)))

    def add(self, other: "Totals", times: int) -> None:
        """Add the work of another jaxpr that runs so many times."""
        for mine, others in ((self.families, other.families), (self.lines, other.lines)):
            for name, row in others.items():
                _add(mine, name, row, times)
        self.sync_points += times * other.sync_points
        self.fused_bytes += times * other.fused_bytes
        self.meet(other, times)

    def meet(self, other: "Totals", times: int | None) -> None:
        """Add what is met, each equation once, and its bytes as often as they move; None is unknown, and once."""
        for number, starts in other.loop_starts.items():
            self.loop_starts[number] = None if starts is None or times is None else starts * times
        self.spreads.update(other.spreads)
        times = 1 if times is None else times
        self.equations += other.equations
        self.counted_equations += other.counted_equations
        self.all_bytes += times * other.all_bytes
        self.counted_bytes += times * other.counted_bytes
        self.uncosted.update(other.uncosted)


def _add(rows: dict[str, list[int]], name: str, row: Sequence[int], times: int) -> None:
    mine = rows.get(name)
    if mine is None:
        rows[name] = [times * count for count in row]
    else:
        for i, count in enumerate(row):
            mine[i] += times * count


class _Placed(NamedTuple):
    """An equation with the buffers that it reads (or literals) and makes, and the user's line."""

    equation: Any
    line: str
    reads: tuple[Any, ...]
    writes: tuple[int, ...]


class _Flat:
    """A jaxpr with its calls written out, between numbered buffers."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.placed: list[_Placed] = []
        self.constants: dict[int, int] = {}
        #: Buffers that are made of literals: nobody has to keep them.
        self.constant: set[int] = set()
        #: Equations that move nothing; they count as counted.
        self.free_equations = 0

    def new(self, aval: Any) -> int:
        self.sizes.append(nbytes(aval))
        return len(self.sizes) - 1

    def held_constant(self, value: Any, aval: Any) -> int:
        if id(value) not in self.constants:
            self.constants[id(value)] = self.new(aval)
        return self.constants[id(value)]


class Walk:
    """One walk over a traced function."""

    def __init__(self, trips: Trips) -> None:
        self.loops: list[UnknownLoop] = []
        self._trips = trips
        self._totals: dict[Any, Totals] = {}
        self._facts: dict[int, tuple[int, bool]] = {}
        self._counts: dict[int, tuple[Rule, OperationCounts, int]] = {}

    def totals(self, jaxpr: Any, reusable: Iterable[int] = ()) -> Totals:
        """Return what a jaxpr does when it runs once.

        Args:
            jaxpr: it.
            reusable: positions of the arguments whose memory it may take.
        """
        key = id(jaxpr), tuple(reusable)
        if key not in self._totals or self._size(jaxpr)[1]:
            self._totals[key] = self._count(jaxpr, key[1])
        return self._totals[key]

    def _size(self, jaxpr: Any) -> tuple[int, bool]:
        """Return how many equations a jaxpr has with its calls written out, and whether a `while` is in it."""
        if id(jaxpr) not in self._facts:
            size, has_while = len(jaxpr.eqns), False
            for equation in jaxpr.eqns:
                name = equation.primitive.name
                has_while |= name == "while"
                for inner in _inner_jaxprs(equation):
                    inner_size, inner_while = self._size(inner)
                    size += inner_size if name in _CALLS else 0
                    has_while |= inner_while
            self._facts[id(jaxpr)] = size, has_while
        return self._facts[id(jaxpr)]

    def _count(self, jaxpr: Any, reusable: Sequence[int]) -> Totals:
        flat = _Flat()
        inputs = [flat.new(var.aval) for var in jaxpr.invars]
        outputs = self._place(jaxpr, inputs, flat)
        kept = [buffer for buffer in outputs if isinstance(buffer, int)]
        totals = Totals(equations=flat.free_equations, counted_equations=flat.free_equations)
        steps = [self._step(placed, flat, totals) for placed in _used(flat.placed, kept)]
        given = [*inputs, *flat.constants.values()]
        used = {buffer for step in steps for buffer in step.reads} | set(kept)
        totals.argument_bytes = sum(flat.sizes[buffer] for buffer in given if buffer in used)
        fused_bytes, temp_bytes = fused_memory(steps, flat.sizes, given, kept, {inputs[i] for i in reusable})
        totals.fused_bytes += fused_bytes
        totals.temp_bytes = temp_bytes + sum(
            nbytes(var.aval) for var, buffer in zip(jaxpr.outvars, outputs, strict=True) if buffer not in kept
        )
        return totals

    def _place(self, jaxpr: Any, operands: Sequence[Any], flat: _Flat, caller: str = _UNKNOWN_LINE) -> list[Any]:
        """Write the equations of a jaxpr out and return the buffers of its results.

        What has no line of its own, because a library's function was traced before, has that of its caller.
        """
        held: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
        held.update((var, flat.held_constant(var, var.aval)) for var in jaxpr.constvars)

        def at(var: Any) -> Any:
            if not isinstance(var, Literal):
                return held[var]
            return flat.held_constant(var.val, var.aval) if getattr(var.aval, "shape", ()) else var

        for equation in jaxpr.eqns:
            name = equation.primitive.name
            reads = [at(var) for var in equation.invars]
            called = _called(equation, reads) if name in _CALLS else None
            if called and len(flat.placed) + self._size(called[0])[0] <= _MOST_INLINED:
                results = self._place(*called, flat, source_line(equation, caller))
            elif _is_renaming(equation):
                flat.free_equations += 1
                results = reads[: len(equation.outvars)] if reads else [_FREE] * len(equation.outvars)
            elif name in _NOTHING:
                flat.free_equations += 1
                results = [_FREE] * len(equation.outvars)
            else:
                results = [flat.new(var.aval) for var in equation.outvars]
                rule = RULES.get(name, _UNCOSTED)
                if rule.in_memory == 0 and all(not isinstance(b, int) or b in flat.constant for b in reads):
                    flat.constant.update(results)
                flat.placed.append(_Placed(equation, source_line(equation, caller), tuple(reads), tuple(results)))
            held.update(zip(equation.outvars, results, strict=True))
        return [at(var) for var in jaxpr.outvars]

    def _step(self, placed: _Placed, flat: _Flat, totals: Totals) -> Step:
        """Add an equation to the totals, and return what it does between buffers."""
        equation, line, reads, writes = placed
        name = equation.primitive.name
        buffers = tuple(buffer for buffer in reads if isinstance(buffer, int))
        if name in _LOOPS or name in _CALLS:
            inside = self._inside(equation, line, reads)
            if _UNKNOWN_LINE in inside.lines:
                _add(inside.lines, line, inside.lines.pop(_UNKNOWN_LINE), 1)
            totals.add(inside, 1)
            totals.fused_bytes -= inside.fused_bytes
            needs = tuple(buffer for buffer in buffers if buffer not in flat.constant)
            return Step(buffers, writes, needs, True, inside.fused_bytes, None, False, True, inside.temp_bytes)
        rule, counts, workspace = self._counted(equation)
        moved = counts.bytes
        if moved is None:
            moved = sum(flat.sizes[buffer] for buffer in (*buffers, *writes))
        row = (counts.flops, counts.transcendentals, counts.integer_ops, moved, counts.launches)
        _add(totals.families, rule.family, row, 1)
        _add(totals.lines, line, row, 1)
        totals.equations += 1
        totals.all_bytes += moved
        totals.sync_points += name in CALLBACKS or any("Ordered" in type(e).__name__ for e in equation.effects)
        if rule is _UNCOSTED:
            totals.uncosted[name] += 1
        else:
            totals.counted_equations += 1
            totals.counted_bytes += moved
        part = None
        if name in ("slice", "gather", "dynamic_slice"):
            part = elements(equation.outvars[0].aval), max(elements(equation.invars[0].aval), 1)
        if rule.in_memory is None or _is_outer_reduction(equation):
            needs, traffic = buffers, moved
        else:
            needs, traffic = buffers[: rule.in_memory], None
        costly = counts.transcendentals > 0 or name == "div"
        return Step(buffers, writes, needs, rule.writes_memory, traffic, part, costly, rule.in_place, workspace)

    def _counted(self, equation: Any) -> tuple[Rule, OperationCounts, int]:
        if id(equation) not in self._counts:
            rule = RULES.get(equation.primitive.name, _UNCOSTED)
            op = Operation(
                [var.aval for var in equation.invars], [var.aval for var in equation.outvars], equation.params
            )
            counts = rule.counts(op)
            if counts is None:
                rule, counts = _UNCOSTED, OperationCounts()
            self._counts[id(equation)] = rule, counts, rule.workspace(op) if rule.workspace else 0
        return self._counts[id(equation)]

    def _inside(self, equation: Any, line: str, reads: Sequence[Any]) -> Totals:
        """Return what the jaxprs of a loop, a conditional or a large call do, with the memory they need beside it."""
        name, params = equation.primitive.name, equation.params
        written = sum(nbytes(var.aval) for var in equation.outvars)
        result = Totals()
        if name == "scan":
            body = _open(params["jaxpr"])
            constants, carried = _scan_layout(equation)
            turn = self.totals(body, range(constants, constants + carried))
            result.add(turn, params["length"])
            slices = sum(nbytes(var.aval) for var in body.outvars[carried:])
            result.temp_bytes = max(turn.temp_bytes - slices, 0)
        elif name == "while":
            self._while(equation, line, reads, result)
        elif name == "cond":
            branches = [self.totals(_open(branch)) for branch in params["branches"]]
            sums = [branch.sums() for branch in branches]
            order = sorted(range(len(branches)), key=lambda i: (sums[i].flops, sums[i].bytes))
            for number, branch in enumerate(branches):
                if number == order[-1]:
                    result.add(branch, 1)
                else:
                    result.meet(branch, 0)
            if len(branches) > 1:
                result.spreads[line] = BranchSpread(line, sums[order[0]], sums[order[-1]])
            result.temp_bytes = max(max(branch.temp_bytes for branch in branches) - written, 0)
        elif name == "shard_map":
            mesh = params["mesh"].shape
            axes = params.get("newly_manual_axes", params.get("manual_axes", mesh))
            devices = math.prod(mesh[axis] for axis in axes)
            body = self.totals(_open(params["jaxpr"]))
            result.add(body, devices)
            result.temp_bytes = max(devices * body.temp_bytes - written, 0)
        else:
            called, _ = _called(equation, reads)
            body = self.totals(called)
            result.add(body, 1)
            result.temp_bytes = max(body.temp_bytes - written, 0)
        return result

    def _while(self, equation: Any, line: str, reads: Sequence[Any], result: Totals) -> None:
        params = equation.params
        cond, body = _open(params["cond_jaxpr"]), _open(params["body_jaxpr"])
        trips = readable_trips(equation, reads)
        number = len(self.loops)
        if trips is None and (trips := self._trips.next(line)) is None:
            self.loops.append(UnknownLoop(line, 0, OperationCounts()))
        test = self.totals(cond)
        turn = self.totals(body, range(params["body_nconsts"], len(body.invars)))
        result.add(test, 1 + (trips or 0))
        if trips is not None:
            result.add(turn, trips)
        else:
            both = [test.sums(), turn.sums()]
            self.loops[number] = UnknownLoop(line, 0, OperationCounts(*map(sum, zip(*both, strict=True))))
            result.meet(turn, None)
            result.loop_starts[number] = 1
        result.temp_bytes = max(turn.temp_bytes, test.temp_bytes)


def _inner_jaxprs(equation: Any) -> Iterable[Any]:
    for value in equation.params.values():
        for held in value if isinstance(value, (tuple, list)) else (value,):
            inner = _open(held)
            if hasattr(inner, "eqns"):
                yield inner


def _open(held: Any) -> Any:
    """Return the jaxpr of one that holds its constants, or itself."""
    return getattr(held, "jaxpr", held)


def _scan_layout(equation: Any) -> tuple[int, int]:
    """Return how many constants and carried values a scan has: its body sees a slice of all other operands."""
    body = _open(equation.params["jaxpr"])

    def same(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        return sum(
            len(getattr(a.aval, "shape", ())) == len(getattr(b.aval, "shape", ()))
            for a, b in zip(outside, inside, strict=True)
        )

    carried = same(equation.outvars, body.outvars)
    return same(equation.invars, body.invars) - carried, carried


def _called(equation: Any, operands: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Return the jaxpr that a call runs, and what it gives to it."""
    params = equation.params
    if equation.primitive.name == "custom_linear_solve":
        counts, given = params["const_lengths"], 0
        for part in ("matvec", "vecmat", "solve"):
            start, given = given, given + getattr(counts, part)
        right_side = operands[sum(counts) :]
        return _open(params["jaxprs"].solve), [*operands[start:given], *right_side]
    held = next(params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call") if key in params)
    return _open(held), operands


def _is_renaming(equation: Any) -> bool:
    """Whether a result is its operand under another name, in the order of memory that it has already."""
    name = equation.primitive.name
    if name in ("convert_element_type", "broadcast_in_dim") and len(equation.invars) == 1:
        operand, result = equation.invars[0].aval, equation.outvars[0].aval
        return nbytes(operand) == nbytes(result) and operand.dtype == result.dtype
    return name in _RENAMES


def _is_outer_reduction(equation: Any) -> bool:
    """Whether it reduces axes but the last: compilers read its operand from memory."""
    axes = equation.params.get("axes", ()) if equation.primitive.name.startswith("reduce_") else ()
    return bool(axes) and len(equation.invars[0].aval.shape) - 1 not in axes


def _used(placed: Sequence[_Placed], outputs: Iterable[int]) -> list[_Placed]:
    """Return the equations whose results somebody uses, or that have an effect."""
    needed, used = set(outputs), []
    for each in reversed(placed):
        effects = (e for e in each.equation.effects if type(e).__name__ != "NamedAxisEffect")
        if not needed.isdisjoint(each.writes) or any(True for _ in effects):
            if each.equation.primitive.name == "scan":  # a stack that nobody reads is not kept
                _, carried = _scan_layout(each.equation)
                kept = (buffer for buffer in each.writes[carried:] if buffer in needed)
                each = each._replace(writes=(*each.writes[:carried], *kept))
            used.append(each)
            needed.update(buffer for buffer in each.reads if isinstance(buffer, int))
    return used[::-1]


def source_line(equation: Any, otherwise: str = _UNKNOWN_LINE) -> str:
    """Return the user's line that an equation comes from, as `file.py:12`, where JAX tells it."""
    try:
        place = _PLACE.match(source_info_util.summarize(equation.source_info))
    except (AttributeError, TypeError):
        return otherwise
    return f"{place[1]}:{place[2]}" if place and place[1] != _TRACER else otherwise
