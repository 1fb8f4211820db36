"""The profile of any JAX function: what it computes and moves, counted from its jaxpr."""

from collections.abc import Callable
from typing import Any

import jax

from rlxjax._tracing import traced
from rlxjax._values import FrozenDict
from rlxjax.graph import GraphIoProfile
from rlxjax.targets import TargetDevice, check_compiler, compile_for, target_device

from ._compiled import as_compiled, as_compiled_for
from ._equations import lowered
from ._loops import TripCounts, Trips
from ._profile import FunctionProfile, dearest_first
from ._rules import nbytes
from ._walk import Walk


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
        return as_compiled(written, program, trips.by_line())
    made = compile_for(fn, *args, target=target, **kwargs)
    return as_compiled_for(written, made, trips.by_line())


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
