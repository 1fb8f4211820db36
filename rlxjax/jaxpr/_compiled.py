"""Compiling a function in a process of its own, and where the figures of three sources disagree."""

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

from ._xla import CompiledProgram, custom_call_targets

#: The program that compiles.
COMPILER = Path(__file__).with_name("_compile_program.py")
#: No limit: what the system can wait for.
_LONGEST_S = 1e6


class Disagreement(NamedTuple):
    """A count on which the function as written, what was compiled, and XLA's own analysis differ.

    Attributes:
        name: of the count.
        jaxpr: of the equations; of traffic the fused one.
        compiled: of the instructions that XLA made; None where its text gives none.
        xla: of XLA's own `cost_analysis()`; None where it gives none.
        reason: why they may differ, empty if nothing is known.
    """

    name: str
    jaxpr: int
    compiled: int | None
    xla: int | None
    reason: str


class Compiled(NamedTuple):
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


def compiled_apart(jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float) -> Compiled:
    """Compile a jitted function for the default backend, in a child process that is handed the lowered program.

    Raises:
        ValueError: it cannot be handed on, or the compiler fails, dies or takes too long.
    """
    exported = _exported(jitted, args, kwargs)
    if exported.nr_devices != 1:
        raise ValueError(f"level: 'compiled' expects a function for one device, got one for {exported.nr_devices}")
    kept = exported.module_kept_var_idx
    donated = [argument.donated for argument in jax.tree.leaves(jitted.trace(*args, **kwargs).args_info)]
    module = {
        "mlir_module_serialized": bytes(exported.mlir_module_serialized),
        "module_kept_var_idx": tuple(range(len(kept))),
        "uses_global_constants": exported.uses_global_constants,
    }
    program = {
        "arguments": [_struct(exported.in_avals[i]) for i in kept],
        "results": list(map(_struct, exported.out_avals)),
        "donated": tuple(i for i, place in enumerate(kept) if donated[place]),
        "module": module,
    }
    return Compiled(**_answer(pickle.dumps(program), exported.platforms[0], timeout_s))


def _exported(jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from jax import export

    try:
        try:
            return export.export(jitted)(*args, **kwargs)
        except ValueError:  # a custom call that other versions of JAX may lack: the child has the same
            targets = custom_call_targets(jitted.lower(*args, **kwargs).as_text())
            allowed = [export.DisabledSafetyCheck.custom_call(target) for target in targets]
            return export.export(jitted, disabled_checks=allowed)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  (lowering rules may raise anything)
        raise ValueError(
            f"level: 'compiled' expects a function that jax.export can hand on, but it raised {_line(error)}"
        ) from error


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _answer(program: bytes, platform: str, timeout_s: float) -> dict[str, Any]:
    settings = {"JAX_PLATFORMS": platform, "JAX_ENABLE_X64": str(jnp.result_type(float) == jnp.float64)}
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ | settings
    command = [sys.executable, "-P", str(COMPILER)]
    try:
        done = subprocess.run(
            command,
            input=program,
            capture_output=True,
            env=environment,
            timeout=min(timeout_s, _LONGEST_S),
            check=False,
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


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def disagreements(
    jaxpr: Mapping[str, int], compiled: Mapping[str, int], program: CompiledProgram, costs: Compiled
) -> tuple[Disagreement, ...]:
    """Return the counts that differ, of those that the jaxpr gives.

    Args:
        jaxpr: counts by name.
        compiled: those of them that the compiled program gives.
        program: it.
        costs: XLA's own figures.
    """
    own = {"flops": "flops", "transcendentals": "transcendentals", "traffic bytes": "bytes accessed"}
    reasons = []
    if program.loops:
        reasons.append("XLA's figure counts the body of a loop once")
    if program.custom_calls:
        reasons.append(f"XLA's figure has nothing for custom calls ({', '.join(program.custom_calls)})")
    found = []
    for name, count in jaxpr.items():
        xla = costs.cost(own[name]) if name in own else None
        others = [other for other in (compiled.get(name), xla) if other is not None]
        unknown = name in own and xla is None
        if unknown or any(other != count for other in others):
            more = ["XLA's figure has integer operations and comparisons in it"] if name == "flops" else []
            why = reasons + more if unknown or (xla is not None and xla != compiled.get(name, count)) else []
            found.append(Disagreement(name, count, compiled.get(name), xla, "; ".join(why)))
    return tuple(found)
