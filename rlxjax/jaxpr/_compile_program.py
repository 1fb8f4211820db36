"""A program of its own that compiles a lowered function, and writes what XLA says of it; it knows no other file."""

import dataclasses
import json
import os
import pickle
import sys
from typing import Any


def compiled(program: dict[str, Any]) -> dict[str, Any]:
    """Compile a program for the default device.

    Args:
        program: its `arguments` and `results` as `jax.ShapeDtypeStruct`s, the positions of the `donated`
            arguments, and the `module`, as fields of `jax.export.Exported`.

    Returns:
        Its `text`, XLA's `costs`, and its `memory` by kind, in bytes.
    """
    import jax
    import jax.numpy as jnp
    from jax import export

    def stand_in(*_: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(result.shape, result.dtype) for result in program["results"])

    arguments = program["arguments"]
    exported = dataclasses.replace(export.export(jax.jit(stand_in))(*arguments), **program["module"])
    made = jax.jit(exported.call, donate_argnums=program["donated"]).lower(*arguments).compile()
    memory, costs = made.memory_analysis(), made.cost_analysis() or {}
    kinds = ("temp", "argument", "output", "alias")
    return {
        "text": made.as_text(),
        "costs": {name: float(cost) for name, cost in costs.items()},
        "memory": {kind: int(getattr(memory, f"{kind}_size_in_bytes")) for kind in kinds} if memory else {},
    }


if __name__ == "__main__":
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the compiler prints is no answer
    with answer:
        json.dump(compiled(pickle.load(sys.stdin.buffer)), answer)
