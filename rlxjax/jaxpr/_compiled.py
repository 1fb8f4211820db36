"""The profile of what XLA makes of a function, and where three sources disagree."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from rlxjax._tracing import TRACER
from rlxjax.targets import CompiledFor

from ._profile import Disagreement, FunctionProfile, dearest_first
from ._target_profile import target_profile
from ._totals import add_row
from ._xla import CompiledProgram

#: Files of this package that a compiled program names: no user's lines.
_NO_USERS = (TRACER, Path(__file__).name, "_child.py", "_compile.py")


def as_compiled(written: FunctionProfile, traced: Any, trips: Mapping[str, int]) -> FunctionProfile:
    """Return the profile of a traced function by what XLA makes of it, operations by its equations.

    Trips are those of loops whose trips XLA does not tell, by their line.
    """
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


def as_compiled_for(written: FunctionProfile, made: CompiledFor, trips: Mapping[str, int]) -> FunctionProfile:
    """Return the profile of a function by what a compiler made of it for a target; see `as_compiled`."""
    program = CompiledProgram(made.text, trips, _NO_USERS, scalars_launch=made.target.platform != "tpu")
    found = _profile(written, program, made.peak_bytes, made.costs, made.devices)
    return dataclasses.replace(found, target=target_profile(made, program, trips))


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
    """Return the counts that differ: of the equations, of the compiled program, and of XLA's own analysis.

    Devices are those of a target, 0 without one.
    """
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
