"""The profile of what XLA makes of a function: compiled in a process of its own, and where three sources disagree."""

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._equations import TRACER
from ._profile import Disagreement, FunctionProfile, dearest_first
from ._totals import add_row
from ._xla import CompiledProgram, custom_call_targets

#: The program that compiles.
_COMPILER = Path(__file__).with_name("_compile_program.py")
#: No limit: what the system can wait for.
_LONGEST_S = 1e6


class _Compiled(NamedTuple):
    """What the compiler says of a program: its text, its own analysis of costs, bytes of memory by kind."""

    text: str
    costs: Mapping[str, float]
    memory: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        memory = self.memory
        if not memory:
            raise ValueError("level: 'compiled' is not available: XLA does not say what memory the program needs")
        return memory["temp"] + memory["argument"] + memory["output"] - memory["alias"]

    def cost(self, name: str) -> int | None:
        """Return a figure of XLA's own; it leaves zeros out, and is negative where it knows none."""
        cost = self.costs.get(name, 0.0)
        return int(cost) if self.costs and cost >= 0 else None


def as_compiled(
    written: FunctionProfile,
    jitted: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    trips: Mapping[str, int],
    timeout_s: float,
) -> FunctionProfile:
    """Return the profile of a jitted function by what XLA makes of it, operations by its equations.

    Trips are those of loops whose trips XLA does not tell, by their line.

    Raises:
        ValueError: it cannot be handed on, the compiler fails, dies or takes too long, or its text is not as expected.
    """
    made = _compiled_apart(jitted, args, kwargs, timeout_s)
    program = CompiledProgram(made.text, trips, (TRACER, _COMPILER.name))
    totals = program.totals
    sums = totals.sums()
    launches, traffic = sums.launches, sums.bytes or 0
    for rows, counted in ((totals.families, written.by_family), (totals.lines, written.by_line)):
        for name, counts in counted.items():
            if any(counts[:3]):
                add_row(rows, name, counts._replace(bytes=0, launches=0))
    return dataclasses.replace(
        written,
        io=dataclasses.replace(written.io, kernel_launches=launches, device_traffic_bytes=traffic),
        fused_traffic_bytes=traffic,
        peak_bytes=made.peak_bytes,
        by_family=dearest_first(totals.families, totals.sums()),
        by_line=dearest_first(totals.lines, totals.sums()),
        unknown_loops=tuple(program.unknown_loops),
        branches=tuple(totals.spreads.values()),
        level="compiled",
        disagreements=_disagreements(written, launches, traffic, program, made),
    )


def _disagreements(
    written: FunctionProfile, launches: int, traffic: int, program: CompiledProgram, made: _Compiled
) -> tuple[Disagreement, ...]:
    """Return the counts that differ: of the equations, of the compiled program, and of XLA's own analysis."""
    of_bodies = ["XLA's figure counts the body of a loop once"] if program.loops else []
    calls = ", ".join(program.custom_calls)
    of_calls = [f"XLA's figure has nothing for custom calls ({calls})"] if calls else []
    of_flops = ["XLA's figure has integer operations and comparisons in it"]
    found = []
    for name, count, compiled, own, more in (
        ("launches", int(written.io.kernel_launches), launches, None, []),
        ("traffic bytes", written.fused_traffic_bytes, traffic, "bytes accessed", []),
        ("peak bytes", written.peak_bytes, made.peak_bytes, None, []),
        ("flops", written.flops, None, "flops", of_flops),
        ("transcendentals", written.transcendentals, None, "transcendentals", []),
    ):
        xla = made.cost(own) if own else None
        is_unknown = own is not None and xla is None
        if is_unknown or any(other not in (None, count) for other in (compiled, xla)):
            has_reason = is_unknown or xla not in (None, count if compiled is None else compiled)
            reasons = [*of_bodies, *of_calls, *more] if has_reason else []
            found.append(Disagreement(name, count, compiled, xla, "; ".join(reasons)))
    return tuple(found)


def _compiled_apart(jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float) -> _Compiled:
    """Compile a jitted function in a child process that is handed the lowered program."""
    exported = _exported(jitted, args, kwargs)
    if exported.nr_devices != 1:
        raise ValueError(f"level: 'compiled' expects a function for one device, got one for {exported.nr_devices}")
    kept = exported.module_kept_var_idx
    donated = [argument.donated for argument in jax.tree.leaves(jitted.trace(*args, **kwargs).args_info)]
    program = {
        "arguments": [_struct(exported.in_avals[i]) for i in kept],
        "results": list(map(_struct, exported.out_avals)),
        "donated": tuple(i for i, place in enumerate(kept) if donated[place]),
        "module": {
            "mlir_module_serialized": bytes(exported.mlir_module_serialized),
            "module_kept_var_idx": tuple(range(len(kept))),
            "uses_global_constants": exported.uses_global_constants,
        },
    }
    return _Compiled(**_answer(pickle.dumps(program), exported.platforms[0], timeout_s))


def _exported(jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from jax import export

    try:  # custom calls that other versions of JAX may lack are allowed: the child has the same
        targets = custom_call_targets(jitted.lower(*args, **kwargs).as_text())
        allowed = [export.DisabledSafetyCheck.custom_call(target) for target in targets]
        return export.export(jitted, disabled_checks=allowed)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  (lowering rules may raise anything)
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            "level: 'compiled' expects a function that jax.export can hand on, but it raised "
            f"{type(error).__name__}: {reason}"
        ) from error


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _answer(program: bytes, platform: str, timeout_s: float) -> dict[str, Any]:
    settings = {"JAX_PLATFORMS": platform, "JAX_ENABLE_X64": str(jnp.result_type(float) == jnp.float64)}
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ | settings
    command, limit_s = [sys.executable, "-P", str(_COMPILER)], min(timeout_s, _LONGEST_S)
    try:
        done = subprocess.run(
            command, input=program, capture_output=True, env=environment, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"fn: the compiler did not finish in {timeout_s:g} s; see compile_timeout_s") from None
    except OSError as error:
        raise ValueError(f"level: 'compiled' is not available: no process starts ({error})") from None
    if done.returncode < 0:
        raise ValueError(f"fn: the compiler ended with signal {signal.Signals(-done.returncode).name}")
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ValueError(f"fn: the compiler failed: {said or f'exit status {done.returncode}'}")
    return json.loads(done.stdout)
