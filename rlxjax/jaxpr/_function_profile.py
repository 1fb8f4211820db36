"""Profile any JAX function: count operations, bytes, launches and memory of its jaxpr or of its compiled program."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from rlxjax._tracing import configured, default_platform, traced
from rlxjax._values import FrozenDict
from rlxjax.devices import CompiledFor, TargetDevice, check_compiler, compile_for, context_for, mesh_of, target_device
from rlxjax.graph import GraphIoProfile
from rlxjax.units import bytes_text, time_text

from ._kernels import kernel_table
from ._primitives import UNKNOWN_LINE, lowered
from ._profile import Disagreement, FunctionProfile, TargetProfile, costliest_first, count_text
from ._rules import OperationCounts, nbytes
from ._totals import CUSTOM, FUSED_BYTES, SYNC_POINTS, TRIPS, TripCounts, Trips, summed
from ._walk import Walk
from ._xla import CompiledProgram


def profile_function(
    fn: Callable[..., Any],
    *args: Any,
    level: str = "jaxpr",
    trip_counts: TripCounts | None = None,
    strict: bool = False,
    target: str | TargetDevice | None = None,
    mesh: Mapping[str, int] | None = None,
    **kwargs: Any,
) -> FunctionProfile:
    """Count the operations, bytes, launches and memory of a JAX function without running the function.

    Each equation counts what the rule of its primitive says. The equations of called functions count too. A loop counts
    all iterations, a conditional its most expensive branch, and `shard_map` the work of all its devices. The branches
    of `lax.platform_dependent` are an exception: the branch of the target's platform or, without a target, of JAX's
    default backend counts.

    Args:
        fn: the function, jitted or not. Arrays that the function captures count as inputs.
        *args: the positional arguments of the function: arrays, numbers, `jax.ShapeDtypeStruct`s, or pytrees of these.
        level: "jaxpr" counts the function as written. "compiled" counts the program that XLA compiles for the target
            or, without a target, for one device of JAX's default backend. The function is compiled but not run.
        trip_counts: the trip counts of the `while_loop`s whose trip count depends on data. A sequence holds an integer
            for each of these loops in order of appearance, outer loops first. A mapping holds trip counts by source
            line, such as `{"file.py:12": 5}`; `unknown_loops` lists the lines. None stands for an unknown trip count.
        strict: if True, raise an error if a primitive has no rule.
        target: a device to compile for at level "compiled": a name such as "tpu-v5e" or "h100", the path of a file, or
            a `TargetDevice`; see `rlxjax.targets.compile_for`. The device itself is not needed. The result's `target`
            describes the program on the device.
        mesh: to compile for several devices of the target: a dict from the name of each mesh axis to its size.
        **kwargs: keyword arguments of the function. Arrays are traced; other values (such as axes, flags and numbers)
            are constants. If the function is jitted, it receives all keyword arguments unchanged.

    Raises:
        ValueError: JAX cannot trace `fn` with these arguments; a shape is symbolic; the level or the target is unknown;
            a trip count is not an integer of at least 0, or matches no loop; `strict` is True and a primitive has no
            rule; the compiler is missing, fails, or prints text that cannot be parsed.

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
        raise ValueError(f"target: expected level='compiled' with a target, got level={level!r}")
    if target is not None:
        target = target_device(target)
        check_compiler(target.platform)
    trips = Trips(trip_counts)
    if target is None and mesh is not None:
        raise ValueError("mesh: expected none without a target")
    with context_for(mesh_of((args, kwargs), mesh) if target is not None else None):
        program = traced(fn, args, kwargs)
    platform = default_platform() if target is None else target.platform
    found = _as_written(program, trips, strict, platform)
    if level == "compiled":
        made = None if target is None else compile_for(fn, *args, target=target, mesh=mesh, **kwargs)
        found = _as_compiled(found, program, made, trips.by_line())
    # If `fn` is a library's function, none of the user's lines appears: the function's name replaces the line.
    entry = {UNKNOWN_LINE: getattr(fn, "__qualname__", type(fn).__name__)}
    return dataclasses.replace(found, by_line=FrozenDict({entry.get(n, n): row for n, row in found.by_line.items()}))


def _as_written(program: Any, trips: Trips, strict: bool, platform: str) -> FunctionProfile:
    """Return the profile of a traced function, counted from the equations of its jaxpr."""
    closed = lowered(program)
    jaxpr = closed.jaxpr
    for shape in (getattr(var.aval, "shape", ()) for var in jaxpr.invars):
        if not all(isinstance(dim, int) for dim in shape):
            raise ValueError(f"args: expected shapes of known size, got the symbolic shape {shape}")
    donated = [i for i, argument in enumerate(jax.tree.leaves(program.args_info)) if argument.donated]
    walk = Walk(trips, dict(zip(jaxpr.constvars, closed.consts, strict=True)), platform)
    totals = walk.totals(jaxpr, donated)
    trips.check_used()
    uncosted, sums = dict(totals.uncosted.most_common()), totals.sums()
    if strict and uncosted:
        named = ", ".join(f"{name} ({times} times)" for name, times in uncosted.items())
        raise ValueError(f"strict: expected a rule for every primitive, got none for {named}; see register_rule")
    costed = totals.equations - totals.uncosted.total()
    result_bytes = nbytes(*(var.aval for var in jaxpr.outvars))
    return FunctionProfile(
        io=GraphIoProfile(sums.launches, totals.work[SYNC_POINTS], result_bytes, sums.bytes or 0),
        flops=sums.flops,
        transcendentals=sums.transcendentals,
        integer_ops=sums.integer_ops,
        fused_traffic_bytes=totals.work[FUSED_BYTES],
        peak_bytes=totals.argument_bytes + totals.temp_bytes,
        by_family=costliest_first(totals.rows("family")),
        by_line=costliest_first(totals.rows("line")),
        coverage_equations=costed / totals.equations if totals.equations else 1.0,
        coverage_bytes=totals.counted_bytes / totals.all_bytes if totals.all_bytes else 1.0,
        equations=totals.equations,
        uncosted=FrozenDict(uncosted),
        unknown_loops=tuple(loop._replace(starts=totals.loop_starts.get(i, 0)) for i, loop in enumerate(walk.loops)),
        branches=tuple(totals.spreads.values()),
        kernels=kernel_table(totals.work),
        trips=totals.work[TRIPS],
        static_ops=totals.static_ops,
        custom=summed(*totals.rows(CUSTOM).values()),
        arrays=len(jaxpr.invars) + len(jaxpr.outvars),
        results=len(jaxpr.outvars),
    )


def _compiled_here(traced: Any) -> tuple[str, int, Mapping[str, float]]:
    """Compile a traced function for the default backend; return the text, the peak bytes and XLA's cost analysis."""
    try:
        # JAX's persistent cache may hold the same program with other source lines.
        with configured("jax_compilation_cache_include_metadata_in_key", True):
            made = traced.lower().compile()
    except Exception as error:  # noqa: BLE001  (lowering rules and compilers may raise anything)
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"fn: the compiler failed with {type(error).__name__}: {reason}") from error
    shardings = jax.tree.leaves((made.input_shardings, made.output_shardings))
    devices = max((len(sharding.device_set) for sharding in shardings), default=1)
    if devices != 1:
        raise ValueError(f"level: 'compiled' expects a function for one device, got a function for {devices} devices")
    if (memory := made.memory_analysis()) is None:
        raise ValueError("level: 'compiled' is not available: XLA does not report the memory of the program")
    used_bytes = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    return made.as_text() or "", used_bytes - memory.alias_size_in_bytes, made.cost_analysis() or {}


def _as_compiled(
    written: FunctionProfile, traced: Any, made: CompiledFor | None, trips: Mapping[str, int]
) -> FunctionProfile:
    """Return the profile of the function compiled for a target or this machine; operations are those of `written`."""
    if made is None:
        text, peak_bytes, costs = _compiled_here(traced)
        program = CompiledProgram(text, trips)
    else:
        peak_bytes, costs = made.peak_bytes, made.costs
        program = CompiledProgram(made.text, trips, made.target.platform, made.devices)
    totals = program.totals
    sums = totals.sums()
    for what, counted in (("family", written.by_family), ("line", written.by_line)):
        for name, counts in counted.items():
            for place, count in enumerate(counts[:3] if any(counts[:3]) else ()):
                totals.work[what, name, place] += count
    turns = {loop.line: loop.per_trip for loop in written.unknown_loops}  # XLA's text lists no operations
    compiled = dataclasses.replace(
        written,
        io=dataclasses.replace(written.io, kernel_launches=sums.launches, device_traffic_bytes=sums.bytes or 0),
        fused_traffic_bytes=sums.bytes or 0,
        peak_bytes=peak_bytes,
        by_family=costliest_first(totals.rows("family")),
        by_line=costliest_first(totals.rows("line")),
        unknown_loops=tuple(
            loop._replace(per_trip=OperationCounts(*turns.get(loop.line, loop.per_trip)[:3], *loop.per_trip[3:]))
            for loop in program.unknown_loops
        ),
        branches=tuple(totals.spreads.values()),
        level="compiled",
        target=None if made is None else _on_target(made, program, written),
    )
    return dataclasses.replace(
        compiled, disagreements=_disagreements(written, compiled, program, costs, 0 if made is None else made.devices)
    )


def _disagreements(
    written: FunctionProfile,
    compiled: FunctionProfile,
    program: CompiledProgram,
    costs: Mapping[str, float],
    devices: int,
) -> tuple[Disagreement, ...]:
    """Return the counts that are not the same in the jaxpr, in the compiled program and in XLA's own analysis."""
    calls = ", ".join(program.custom_calls)
    applies = {
        "XLA's figure counts the body of a loop once": program.loops,
        f"XLA's figure leaves out custom calls ({calls})": calls,
        f"the compiled figures are for one of {devices} devices": devices > 1,
    }
    more = [reason for reason, is_so in applies.items() if is_so]
    is_silent = devices > 0 and not costs  # the compiler for an absent GPU gives no figures
    of_flops = [*more, "XLA's figure includes integer operations and comparisons"]
    found = []
    for name, count, made, own, reasons in (
        ("launches", int(written.io.kernel_launches), int(compiled.io.kernel_launches), None, []),
        ("traffic bytes", written.fused_traffic_bytes, compiled.fused_traffic_bytes, "bytes accessed", more),
        ("peak bytes", written.peak_bytes, compiled.peak_bytes, None, []),
        ("flops", written.flops, None, "flops", of_flops),
        ("transcendentals", written.transcendentals, None, "transcendentals", more),
    ):
        # XLA leaves zeros out, and gives a negative figure if the figure is unknown.
        cost = costs.get(own, 0.0) if own and costs else -1.0
        xla = int(cost) if cost >= 0 else None
        is_unknown = own is not None and xla is None and not is_silent
        if is_unknown or any(other not in (None, count) for other in (made, xla)):
            has_reason = is_unknown or xla not in (None, count if made is None else made)
            found.append(Disagreement(name, count, made, xla, "; ".join(reasons) if has_reason else ""))
    return tuple(found)


def _on_target(made: CompiledFor, program: CompiledProgram, written: FunctionProfile) -> TargetProfile:
    """Return the profile of a program on its target, including those of XLA's own figures that are plausible."""
    is_tpu, gpu = made.target.platform == "tpu", program.gpu
    unknown = tuple({"tpu_custom_call"} & program.custom_calls.keys()) if is_tpu else gpu.unknown
    moved = program.totals.sums().bytes or 0
    least_ns = moved / made.target.bandwidth_bytes_per_ns
    figures = {name: made.costs[name] for name in ("flops", "bytes accessed", "optimal_seconds") if name in made.costs}
    times_ns = {"optimal_seconds": 1e9 * figures.get("optimal_seconds", 0.0)}
    if is_tpu:
        cycles = figures["cycles"] = float(program.cycles)
        times_ns["cycles"] = cycles / made.target.clock_ghz
    estimates: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for name, value in figures.items():
        if not value > 0:
            left_out[name] = f"the figure is {value:g}"
        elif program.loops and name != "cycles":
            left_out[name] = f"the figure {count_text(value).strip()} counts the body of a loop once"
        elif times_ns.get(name, least_ns) < least_ns:
            left_out[name] = (
                f"{time_text(times_ns[name])} is less than the {time_text(least_ns)} that the device's memory "
                f"takes to move the {bytes_text(moved)} of the kernels"
            )
        elif name == "cycles" and program.unknown_loops:
            left_out[name] = f"the figure {count_text(value).strip()} leaves out loops of unknown length"
        else:
            estimates[name] = value
    if is_tpu and program.no_cycles:
        missing = ", ".join(program.no_cycles)
        left_out["cycles of some instructions"] = f"the compiler gives no cycles for {missing}"
    return TargetProfile(
        device=made.target,
        devices=made.devices,
        argument_bytes=made.argument_bytes,
        output_bytes=made.output_bytes,
        temporary_bytes=made.temporary_bytes,
        peak_bytes=made.peak_bytes,
        collectives=FrozenDict(program.collectives),
        cycles=program.cycles if is_tpu else None,
        estimates=FrozenDict(estimates),
        left_out=FrozenDict(left_out),
        compiler=made.compiler,
        compile_seconds=made.seconds,
        gpu=None if is_tpu else gpu,
        own_cycles=program.own_cycles,
        others=gpu.kernels if is_tpu else None,
        exchanges=program.exchanges,
        mesh=made.mesh,
        coordinates=made.coordinates,
        products=FrozenDict(program.products),
        custom=OperationCounts(*((count or 0) // made.devices for count in written.custom)),
        # If all primitives have rules, the custom kernels are the compiler's own.
        unknown=unknown if written.uncosted else (),
    )
