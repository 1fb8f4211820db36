"""The profile of any JAX function: what it computes and moves, counted from its jaxpr."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from rlxjax._html import html_of
from rlxjax._values import FrozenDict, by_value
from rlxjax.graph import GraphIoProfile

from ._compiled import COMPILER, Disagreement, compiled_apart, disagreements
from ._equations import TRACER
from ._kernels import KernelGroup
from ._loops import BranchSpread, TripCounts, Trips, UnknownLoop
from ._operations import OperationCounts, nbytes
from ._totals import Totals, add_row
from ._walk import Walk
from ._xla import CompiledProgram

_SHOWN_LINES = 10


@by_value
@dataclasses.dataclass(frozen=True)
class FunctionProfile:
    """What a function computes and moves when it is called once; counts are exact integers.

    Loops whose length depends on data count as no trip, and are listed in `unknown_loops`; `uncounted` says in
    words what else is missing.

    Of level "compiled", what moves and runs is that of the instructions that XLA made: `io.kernel_launches`,
    `io.device_traffic_bytes` (which is then `fused_traffic_bytes`), `peak_bytes`, `unknown_loops` and
    `branches`. XLA's text gives no operations: these, and the coverage, stay those of the jaxpr. Rows of
    `by_family` hold the operations of a family of primitives, or launches and bytes of a kind of
    instruction ("loop fusion", "copy", "custom-call TopK"), or both where the names are the same. Arrays that
    the function closes over are part of the compiled program, and no memory of its runs.

    Attributes:
        io: launches (an equation that does work is one), sync points (callbacks and ordered effects),
            bytes of the results, and the traffic of every equation by itself: operands and results.
        flops: floating-point operations; a fused multiply-add is two.
        transcendentals: exp, log, sqrt, sin, pow and the like, which are no FLOP.
        integer_ops: operations on integers and booleans.
        fused_traffic_bytes: the traffic if what may be computed on the way to its readers is.
        peak_bytes: the arguments and constants that are used, the results, and the most temporaries that
            live at once, fused.
        by_family: counts by family of operation, dearest first.
        by_line: counts by the user's line, `file.py:12`, dearest first.
        coverage_equations: share of the equations that a rule counts, each once however often it runs.
        coverage_bytes: share of the unfused bytes that they move.
        equations: how many there are, calls written out; what nobody uses is left out.
        uncosted: primitives without a rule, each with how often it was met; they count by their bytes only.
        unknown_loops: the loops of unknown length, in order of appearance.
        branches: each conditional with its cheapest and its dearest branch; the dearest is counted.
        kernels: what is launched if what may be computed on the way is, by kind and size, of the jaxpr.
        trips: turns of loops, and choices among branches.
        arrays: that a call takes and gives.
        results: those that it gives.
        static_ops: floating-point and integer operations, those of a loop's body once.
        level: "jaxpr" or "compiled".
        disagreements: of level "compiled", the counts on which the jaxpr, the compiled program and XLA's own
            analysis differ.
    """

    io: GraphIoProfile
    flops: int
    transcendentals: int
    integer_ops: int
    fused_traffic_bytes: int
    peak_bytes: int
    by_family: Mapping[str, OperationCounts]
    by_line: Mapping[str, OperationCounts]
    coverage_equations: float
    coverage_bytes: float
    equations: int
    uncosted: Mapping[str, int]
    unknown_loops: tuple[UnknownLoop, ...]
    branches: tuple[BranchSpread, ...]
    kernels: tuple[KernelGroup, ...]
    trips: int
    arrays: int
    results: int
    static_ops: int
    level: str = "jaxpr"
    disagreements: tuple[Disagreement, ...] = ()

    @property
    def uncounted(self) -> tuple[str, ...]:
        """What is done and not counted, a sentence each: no figure but a least one rests on such counts."""
        reasons = []
        for line, starts, turn in self.unknown_loops:
            if starts != 0:
                times = "an unknown number of times" if starts is None else f"{starts} times"
                reasons.append(
                    f"how often the loop at {line} turns depends on data: give trip_counts; it is started {times}, "
                    f"and a turn takes {_short(turn.flops)}FLOP and {_short(turn.bytes or 0)}B"
                )
        for name, times in self.uncosted.items():
            reasons.append(f"{name} has no rule and counts by its bytes only, {times} times: see register_rule")
        if self.io.sync_points:
            reasons.append("what the host does when the program calls it is not known")
        if "collective" in self.by_family:
            reasons.append("how long devices wait for each other is not known")
        return tuple(reasons)

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ("  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]) for first, *rest in rows)
        return "\n".join([*self._totals(), "", *table, *self._remarks()])

    def _repr_html_(self) -> str:
        return html_of(self._totals(), self._rows(), remarks=self._remarks())

    def _totals(self) -> list[str]:
        io = self.io
        covered = f"covered by rules: {_percent(self.coverage_equations)} of {self.equations} equations"
        traffic = f"{_short(io.device_traffic_bytes)}B of traffic"
        if self.level == "jaxpr":
            covered += f", {_percent(self.coverage_bytes)} of {_short(io.device_traffic_bytes)}B"
            traffic += f", {_short(self.fused_traffic_bytes)}B if fused"
        else:
            covered += "; launches, traffic and memory are those of the compiled program"
        return [
            covered,
            f"{_short(self.flops)}FLOP, {_short(self.transcendentals).strip()} transcendentals, "
            f"{_short(self.integer_ops).strip()} integer operations",
            f"{traffic}, {_short(self.peak_bytes)}B live at the peak",
            f"{io.kernel_launches} launches, {io.sync_points} sync points, {_short(io.host_output_bytes)}B of results",
        ]

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("", "FLOP", "transcendentals", "integer", "bytes", "launches")]
        lines = list(self.by_line.items())[:_SHOWN_LINES]
        for name, counts in [*self.by_family.items(), *lines]:
            rows.append((name, *(_short(count or 0).strip() for count in counts)))
        return rows

    def _remarks(self) -> list[str]:
        remarks = [f"not counted: {reason}" for reason in self.uncounted]
        for line, least, most in self.branches:
            remarks.append(
                f"conditional at {line}: {_short(least.flops).strip()} to {_short(most.flops)}FLOP, "
                f"{_short(least.bytes or 0).strip()} to {_short(most.bytes or 0)}B; the dearest is counted"
            )
        for name, *counts, reason in self.disagreements:
            jaxpr, compiled, xla = ("none" if count is None else _short(count).strip() for count in counts)
            why = f"; {reason}" if reason else ""
            remarks.append(f"{name}: jaxpr {jaxpr}, compiled {compiled}, XLA's own figure {xla}{why}")
        return remarks


class _Program(NamedTuple):
    """A function as JAX traces it, and the jitted function with the arguments that give it."""

    traced: Any
    jitted: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def profile_function(
    fn: Callable[..., Any],
    *args: Any,
    level: str = "jaxpr",
    trip_counts: TripCounts | None = None,
    strict: bool = False,
    compile_timeout_s: float = 60.0,
    **kwargs: Any,
) -> FunctionProfile:
    """Count what a JAX function computes and moves, without running it or allocating anything.

    Every equation of its jaxpr is counted by the rule of its primitive; calls count as what they call,
    loops as often as they turn, a conditional as its dearest branch, `shard_map` as all its devices.

    Args:
        fn: the function, jitted or not. Arrays that it closes over count as inputs.
        *args: arrays, numbers, `jax.ShapeDtypeStruct`s, or trees of them.
        level: "jaxpr", the function as written, or "compiled", what XLA makes of it for JAX's default
            backend. That is compiled in a process of its own, whose start takes a second or two. It is handed
            the lowered program and knows nothing else of this process; `compiler_options` of `jax.jit` and
            programs for several devices or with callbacks do not reach it.
        trip_counts: how often the loops turn whose length depends on data (`while_loop`): a sequence with
            one integer for each in order of appearance, an outer loop before those inside it, or a mapping
            from their lines (`"file.py:12"`, as `unknown_loops` names them). None leaves one unknown. A
            loop from a constant to a constant needs none.
        strict: refuse primitives without a rule.
        compile_timeout_s: seconds after which that process is ended.
        **kwargs: of the function. Arrays are traced, all else (axes, flags, numbers) is closed over. A jitted
            function takes them as in a call: what is no array has to be static.

    Raises:
        ValueError: `fn` does not trace with these arguments, a shape is symbolic, the level is unknown, a trip
            count is no integer of at least 0 or belongs to no loop, or `strict` and a primitive has no rule; the
            compiler fails, dies or takes too long, or what it says is not as expected.

    Examples:
        >>> import jax.numpy as jnp
        >>> matrix = jax.ShapeDtypeStruct((400_000, 800_000), jnp.float32)
        >>> vector = jax.ShapeDtypeStruct((800_000,), jnp.float32)
        >>> profile = profile_function(lambda a, x: jnp.exp(a @ x), matrix, vector)
        >>> profile.flops, profile.transcendentals, profile.io.kernel_launches
        (640000000000, 400000, 2)
        >>> compiled = profile_function(lambda x: jnp.exp(2 * x) + 1, vector, level="compiled")
        >>> compiled.io.kernel_launches, compiled.io.device_traffic_bytes, compiled.peak_bytes
        (1, 6400000, 6400000)
    """
    if not callable(fn):
        raise ValueError(f"fn: expected a function, got {fn!r}")
    if level not in _LEVELS:
        raise ValueError(f"level: expected one of {', '.join(map(repr, _LEVELS))}, got {level!r}; it is not available")
    if (
        isinstance(compile_timeout_s, bool)
        or not isinstance(compile_timeout_s, (int, float))
        or not compile_timeout_s > 0
    ):
        raise ValueError(f"compile_timeout_s: expected seconds above 0, got {compile_timeout_s!r}")
    trips = Trips(trip_counts)
    return _LEVELS[level](_traced(fn, args, kwargs), trips, strict, compile_timeout_s)


def _profile_jaxpr(program: _Program, trips: Trips, strict: bool, timeout_s: float = 0.0) -> FunctionProfile:
    """Return the profile of a traced function by its equations."""
    traced = getattr(program.traced, "lojax", program.traced)  # what new kinds of primitives stand for
    closed = traced.jaxpr
    donated = [argument.donated for argument in jax.tree.leaves(traced.args_info)]
    walk = Walk(trips, dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)))
    totals = walk.totals(closed.jaxpr, [i for i, is_donated in enumerate(donated) if is_donated])
    trips.check_used()
    uncosted = dict(totals.uncosted.most_common())
    if strict and uncosted:
        named = ", ".join(f"{name} ({times} times)" for name, times in uncosted.items())
        raise ValueError(f"strict: expected a rule for every primitive, got none for {named}; see register_rule")
    results = sum(nbytes(var.aval) for var in closed.jaxpr.outvars)
    sums = totals.sums()
    loops = (loop._replace(starts=totals.loop_starts.get(i, 0)) for i, loop in enumerate(walk.loops))
    return FunctionProfile(
        io=GraphIoProfile(sums.launches, totals.sync_points, results, sums.bytes or 0),
        flops=sums.flops,
        transcendentals=sums.transcendentals,
        integer_ops=sums.integer_ops,
        fused_traffic_bytes=totals.fused_bytes,
        peak_bytes=totals.argument_bytes + totals.temp_bytes,
        by_family=_dearest_first(totals.families, totals),
        by_line=_dearest_first(totals.lines, totals),
        coverage_equations=_share(totals.counted_equations, totals.equations),
        coverage_bytes=_share(totals.counted_bytes, totals.all_bytes),
        equations=totals.equations,
        uncosted=FrozenDict(uncosted),
        unknown_loops=tuple(loops),
        branches=tuple(totals.spreads.values()),
        kernels=totals.kernels.groups(),
        trips=totals.trips,
        static_ops=totals.static_ops,
        arrays=len(closed.jaxpr.invars) + len(closed.jaxpr.outvars),
        results=len(closed.jaxpr.outvars),
    )


def _profile_compiled(program: _Program, trips: Trips, strict: bool, timeout_s: float) -> FunctionProfile:
    """Return the profile of a traced function by what XLA makes of it, operations by its equations."""
    written = _profile_jaxpr(program, trips, strict)
    made = compiled_apart(program.jitted, program.args, program.kwargs, timeout_s)
    instructions = CompiledProgram(made.text, trips.by_line(), (TRACER, COMPILER.name))
    totals = instructions.totals
    launches, traffic = totals.sums().launches, totals.sums().bytes or 0
    for rows, counted in ((totals.families, written.by_family), (totals.lines, written.by_line)):
        for name, counts in counted.items():
            if any(counts[:3]):
                add_row(rows, name, (*counts[:3], 0, 0), 1)
    as_written = {
        "launches": written.io.kernel_launches,
        "traffic bytes": written.fused_traffic_bytes,
        "peak bytes": written.peak_bytes,
        "flops": written.flops,
        "transcendentals": written.transcendentals,
    }
    as_made = {"launches": launches, "traffic bytes": traffic, "peak bytes": made.peak_bytes}
    return dataclasses.replace(
        written,
        io=dataclasses.replace(written.io, kernel_launches=launches, device_traffic_bytes=traffic),
        fused_traffic_bytes=traffic,
        peak_bytes=made.peak_bytes,
        by_family=_dearest_first(totals.families, totals),
        by_line=_dearest_first(totals.lines, totals),
        unknown_loops=tuple(instructions.unknown_loops),
        branches=tuple(totals.spreads.values()),
        level="compiled",
        disagreements=disagreements(as_written, as_made, instructions, made),
    )


#: How a traced function is profiled, by level.
_LEVELS: Mapping[str, Callable[[_Program, Trips, bool, float], FunctionProfile]] = {
    "jaxpr": _profile_jaxpr,
    "compiled": _profile_compiled,
}


def _traced(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Program:
    """Return a function as JAX traces it; what is neither an array nor a positional number is closed over.

    Raises:
        ValueError: the arguments do not match, or it does not trace.
    """
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"args: expected what {_name(fn)} takes, but {error}") from None
    except ValueError:  # a builtin without a signature
        pass
    try:
        if isinstance(fn, jax.stages.Wrapped):
            return _Program(fn.trace(*args, **kwargs), fn, args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        numbers = len(jax.tree.leaves(args))
        dynamic = [_is_array(leaf) or (i < numbers and _is_number(leaf)) for i, leaf in enumerate(leaves)]

        def of_arrays(*arrays: Any) -> Any:
            given = iter(arrays)
            mixed = [next(given) if traced else leaf for leaf, traced in zip(leaves, dynamic, strict=True)]
            own_args, own_kwargs = jax.tree.unflatten(tree, mixed)
            return fn(*own_args, **own_kwargs)

        jitted = jax.jit(of_arrays)
        arrays = tuple(leaf for leaf, traced in zip(leaves, dynamic, strict=True) if traced)
        return _Program(jitted.trace(*arrays), jitted, arrays, {})
    except Exception as error:  # noqa: BLE001  (a user's function may raise anything)
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"fn: expected a function that JAX traces, but {_name(fn)} raised {type(error).__name__}: {reason}"
        ) from error


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_number(leaf: object) -> bool:
    return isinstance(leaf, (int, float, complex))


def _dearest_first(rows: Mapping[str, list[int]], totals: Totals) -> Mapping[str, OperationCounts]:
    """Order rows by their share of the operations plus their share of the bytes."""
    sums = totals.sums()
    operations, moved = max(sum(sums[:3]), 1), max(sums.bytes or 0, 1)
    order = sorted(rows, key=lambda name: -(sum(rows[name][:3]) / operations + rows[name][3] / moved))
    return FrozenDict({name: OperationCounts(*rows[name]) for name in order})


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def _percent(share: float) -> str:
    """Return a share so that it reads 100 % only if it is."""
    return "100 %" if share == 1 else f"{min(100 * share, 99.99):.2f} %"


def _short(count: Any) -> str:
    """Return a count with three to four digits and the prefix of its power of a thousand."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(count) < 1000 or prefix == "P":
            return f"{count:.4g} {prefix}"
        count /= 1000
    raise AssertionError
