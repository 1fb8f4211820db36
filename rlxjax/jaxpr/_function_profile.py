"""The profile of any JAX function: what it computes and moves, counted from its jaxpr and from what XLA makes of it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from rlxjax._tracing import TRACER, traced
from rlxjax._values import FrozenDict
from rlxjax.graph import GraphIoProfile
from rlxjax.targets import CompiledFor, TargetDevice, check_compiler, compile_for, target_device

from ._primitives import lowered
from ._profile import Disagreement, FunctionProfile, TargetProfile, dearest_first
from ._rules import nbytes
from ._totals import TripCounts, Trips, add_row
from ._walk import Walk
from ._xla import CompiledProgram

#: Files of this package that a compiled program names: no user's lines.
_NO_USERS = (TRACER, Path(__file__).name, "_child.py", "_compile.py")


def profile_function(
    fn: Callable[..., Any],
    *args: Any,
    level: str = "jaxpr",
    trip_counts: TripCounts | None = None,
    strict: bool = False,
    target: str | TargetDevice | None = None,
    **kwargs: Any,
) -> FunctionProfile:
    """Count what a JAX function computes and moves, without running it or allocating anything.

    Every equation of its jaxpr is counted by the rule of its primitive; calls count as what they call,
    loops as often as they turn, a conditional as its dearest branch, `shard_map` as all its devices.

    Args:
        fn: the function, jitted or not. Arrays that it closes over count as inputs.
        *args: arrays, numbers, `jax.ShapeDtypeStruct`s, or trees of them.
        level: "jaxpr", the function as written, or "compiled", what XLA makes of it for JAX's default
            backend, for one device. The function is compiled, as `jax.jit` does, and not run.
        trip_counts: how often the loops turn whose length depends on data (`while_loop`): a sequence with
            one integer for each in order of appearance, an outer loop before those inside it, or a mapping
            from their lines (`"file.py:12"`, as `unknown_loops` names them). None leaves one unknown. A
            loop from a constant to a constant needs none.
        strict: refuse primitives without a rule.
        target: of level "compiled", a device that need not be there: a name, as "tpu-v5e" or "h100", a file or a
            `TargetDevice`; see `rlxjax.targets.compile_for`. The profile says in `target` what it takes of the device.
        **kwargs: of the function. Arrays are traced, all else (axes, flags, numbers) is closed over. A jitted
            function takes them as in a call: what is no array has to be static.

    Raises:
        ValueError: `fn` does not trace with these arguments, a shape is symbolic, the level or the target is unknown,
            a trip count is no integer of at least 0 or belongs to no loop, or `strict` and a primitive has no rule;
            the compiler is not there or fails, or what it says is not as expected.

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
    if level not in ("jaxpr", "compiled"):
        raise ValueError(f"level: expected 'jaxpr' or 'compiled', got {level!r}")
    if target is not None and level != "compiled":
        raise ValueError(f"target: expected none at level {level!r}; give level='compiled'")
    if target is not None:
        target = target_device(target)
        check_compiler(target.platform)
    trips = Trips(trip_counts)
    program = traced(fn, args, kwargs)
    written = _as_written(program, trips, strict)
    if level == "jaxpr":
        return written
    if target is None:
        return _as_compiled(written, program, trips.by_line())
    made = compile_for(fn, *args, target=target, **kwargs)
    return _as_compiled_for(written, made, trips.by_line())


def _as_written(program: Any, trips: Trips, strict: bool) -> FunctionProfile:
    """Return the profile of a traced function by its equations."""
    closed = lowered(program)
    jaxpr = closed.jaxpr
    for shape in (getattr(var.aval, "shape", ()) for var in jaxpr.invars):
        if not all(isinstance(dim, int) for dim in shape):
            raise ValueError(f"args: expected shapes of known size, got the symbolic shape {shape}")
    donated = [i for i, argument in enumerate(jax.tree.leaves(program.args_info)) if argument.donated]
    walk = Walk(trips, dict(zip(jaxpr.constvars, closed.consts, strict=True)))
    totals = walk.totals(jaxpr, donated)
    trips.check_used()
    uncosted = dict(totals.uncosted.most_common())
    if strict and uncosted:
        named = ", ".join(f"{name} ({times} times)" for name, times in uncosted.items())
        raise ValueError(f"strict: expected a rule for every primitive, got none for {named}; see register_rule")
    sums = totals.sums()
    loops = (loop._replace(starts=totals.loop_starts.get(i, 0)) for i, loop in enumerate(walk.loops))
    return FunctionProfile(
        io=GraphIoProfile(
            sums.launches, totals.sync_points, sum(nbytes(var.aval) for var in jaxpr.outvars), sums.bytes or 0
        ),
        flops=sums.flops,
        transcendentals=sums.transcendentals,
        integer_ops=sums.integer_ops,
        fused_traffic_bytes=totals.fused_bytes,
        peak_bytes=totals.argument_bytes + totals.temp_bytes,
        by_family=dearest_first(totals.families, sums),
        by_line=dearest_first(totals.lines, sums),
        coverage_equations=_share(totals.equations - totals.uncosted.total(), totals.equations),
        coverage_bytes=_share(totals.counted_bytes, totals.all_bytes),
        equations=totals.equations,
        uncosted=FrozenDict(uncosted),
        unknown_loops=tuple(loops),
        branches=tuple(totals.spreads.values()),
        kernels=totals.kernels.groups(),
        trips=totals.trips,
        static_ops=totals.static_ops,
        arrays=len(jaxpr.invars) + len(jaxpr.outvars),
        results=len(jaxpr.outvars),
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def _as_compiled(written: FunctionProfile, traced: Any, trips: Mapping[str, int]) -> FunctionProfile:
    """Return the profile of a traced function by what XLA makes of it, operations by its equations."""
    try:
        with _lines_in_the_cache_key():
            made = traced.lower().compile()
    except Exception as error:  # noqa: BLE001  (lowering rules and compilers may raise anything)
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"fn: the compiler failed with {type(error).__name__}: {reason}") from error
    shardings = jax.tree.leaves((made.input_shardings, made.output_shardings))
    devices = max((len(sharding.device_set) for sharding in shardings), default=1)
    if devices != 1:
        raise ValueError(f"level: 'compiled' expects a function for one device, got one for {devices}")
    if (memory := made.memory_analysis()) is None:
        raise ValueError("level: 'compiled' is not available: XLA does not say what memory the program needs")
    used_bytes = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    program = CompiledProgram(made.as_text() or "", trips, _NO_USERS)
    return _profile(written, program, used_bytes - memory.alias_size_in_bytes, made.cost_analysis() or {})


def _as_compiled_for(written: FunctionProfile, made: CompiledFor, trips: Mapping[str, int]) -> FunctionProfile:
    """Return the profile of a function by what a compiler made of it for a target; see `_as_compiled`."""
    program = CompiledProgram(made.text, trips, _NO_USERS, made.target.platform)
    found = _profile(written, program, made.peak_bytes, made.costs, made.devices)
    estimates, left_out = _checked(made, program)
    target = TargetProfile(
        device=made.target,
        devices=made.devices,
        argument_bytes=made.argument_bytes,
        output_bytes=made.output_bytes,
        temporary_bytes=made.temporary_bytes,
        peak_bytes=made.peak_bytes,
        collectives=FrozenDict(program.collectives),
        cycles=int(estimates["cycles"]) if "cycles" in estimates else None,
        estimates=FrozenDict(estimates),
        left_out=FrozenDict(left_out),
        compiler=made.compiler,
        compile_seconds=made.seconds,
        gpu=program.gpu if made.target.platform == "cuda" else None,
    )
    return dataclasses.replace(found, target=target)


def _profile(
    written: FunctionProfile, program: CompiledProgram, peak_bytes: int, costs: Mapping[str, float], devices: int = 0
) -> FunctionProfile:
    """Return a profile with the launches, traffic and memory of a compiled program."""
    totals = program.totals
    sums = totals.sums()
    compiled = dataclasses.replace(
        written,
        io=dataclasses.replace(written.io, kernel_launches=sums.launches, device_traffic_bytes=sums.bytes or 0),
        fused_traffic_bytes=sums.bytes or 0,
        peak_bytes=peak_bytes,
        unknown_loops=tuple(program.unknown_loops),
        branches=tuple(totals.spreads.values()),
        level="compiled",
    )
    for rows, counted in ((totals.families, written.by_family), (totals.lines, written.by_line)):
        for name, counts in counted.items():
            if any(counts[:3]):
                add_row(rows, name, counts._replace(bytes=0, launches=0))
    return dataclasses.replace(
        compiled,
        by_family=dearest_first(totals.families, totals.sums()),
        by_line=dearest_first(totals.lines, totals.sums()),
        disagreements=_disagreements(written, compiled, program, costs, devices),
    )


@contextlib.contextmanager
def _lines_in_the_cache_key() -> Iterator[None]:
    """Compile anew what JAX's persistent cache holds with the lines of another file, or of an older one."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _disagreements(
    written: FunctionProfile,
    compiled: FunctionProfile,
    program: CompiledProgram,
    costs: Mapping[str, float],
    devices: int,
) -> tuple[Disagreement, ...]:
    """Return the counts that differ: of the equations, of the compiled program, and of XLA's own analysis."""
    more = ["XLA's figure counts the body of a loop once"] if program.loops else []
    if program.custom_calls:
        more.append(f"XLA's figure has nothing for custom calls ({', '.join(program.custom_calls)})")
    more += [f"compiled figures are those of one of {devices} devices"] if devices > 1 else []
    is_silent = devices > 0 and not costs  # a compiler for a GPU that is not there gives no figures
    of_flops = [*more, "XLA's figure has integer operations and comparisons in it"]
    found = []
    for name, count, made, own, reasons in (
        ("launches", int(written.io.kernel_launches), int(compiled.io.kernel_launches), None, []),
        ("traffic bytes", written.fused_traffic_bytes, compiled.fused_traffic_bytes, "bytes accessed", more),
        ("peak bytes", written.peak_bytes, compiled.peak_bytes, None, []),
        ("flops", written.flops, None, "flops", of_flops),
        ("transcendentals", written.transcendentals, None, "transcendentals", more),
    ):
        # It leaves zeros out, and is negative where it knows none.
        cost = costs.get(own, 0.0) if own and costs else -1.0
        xla = int(cost) if cost >= 0 else None
        is_unknown = own is not None and xla is None and not is_silent
        if is_unknown or any(other not in (None, count) for other in (made, xla)):
            has_reason = is_unknown or xla not in (None, count if made is None else made)
            found.append(Disagreement(name, count, made, xla, "; ".join(reasons) if has_reason else ""))
    return tuple(found)


def _checked(made: CompiledFor, program: CompiledProgram) -> tuple[dict[str, float], dict[str, str]]:
    """Return XLA's own figures that make sense, and those that make none with the reason."""
    moved = program.totals.sums().bytes or 0
    least_ns = moved / made.target.bandwidth_bytes_per_ns
    estimates: dict[str, float] = {}
    left_out: dict[str, str] = {}

    def check(name: str, value: float | None, time_ns: float | None, counts_loops: bool) -> None:
        if value is None:
            return
        if not value > 0:
            left_out[name] = f"it is {value:g}"
        elif program.loops and not counts_loops:
            left_out[name] = f"it is {value:.6g} and counts the body of a loop once"
        elif time_ns is not None and time_ns < least_ns:
            left_out[name] = (
                f"it is {time_ns / 1e3:,.4g} us, less than the {least_ns / 1e3:,.4g} us in which the device's memory "
                f"moves the {moved / 1e6:,.4g} MB of its kernels"
            )
        else:
            estimates[name] = value

    for name in ("flops", "bytes accessed"):
        check(name, made.costs.get(name), None, False)
    seconds = made.costs.get("optimal_seconds")
    check("optimal_seconds", seconds, None if seconds is None else 1e9 * seconds, False)
    if made.target.platform == "tpu":
        cycles = program.totals.cycles
        check("cycles", float(cycles), cycles / made.target.clock_ghz, True)
        if program.unknown_loops and "cycles" in estimates:
            left_out["cycles"] = f"it is {estimates.pop('cycles'):,.0f} without loops of unknown length"
        elif program.no_cycles and "cycles" in estimates:
            missing = ", ".join(program.no_cycles)
            left_out["cycles of some instructions"] = f"the compiler gives none for {missing}, which the sum leaves out"
    return estimates, left_out
