"""Programs of many small loops, compiled in half the time on a CPU by the versions of XLA that can."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._checks import is_traced

#: LLVM's last level of optimisation takes a third of the time that these programs compile for, and none of
#: what they run for.
QUICKLY: dict[str, int | bool] = {"xla_backend_optimization_level": 2}
if jax.__version_info__ < (0, 11, 1):
    # Loops written in XLA's older way: that takes half the time, and they run as fast. XLA has it no more,
    # and takes no option for it, in later versions.
    QUICKLY["xla_cpu_use_fusion_emitters"] = False


#: `jax.jit` for formulas. Their operations stand in a caller's program itself, beside those of his loss: a
#: derivative that is lowered there can tell a row of numbers from one number (`_slopes`).
formula_jit = functools.partial(jax.jit, inline=True)


def quick_jit(function: Callable[..., Any], static_argnames: Sequence[str] = ()) -> Callable[..., Any]:
    """Return what `jax.jit` does, compiled quickly where it is a program of its own on a CPU."""
    part = jax.jit(function, static_argnames=static_argnames)
    whole = jax.jit(function, static_argnames=static_argnames, compiler_options=QUICKLY)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # While JAX traces a caller, whatever it computes is traced.
        is_part = is_traced(jnp.zeros(()), *jax.tree.leaves((args, kwargs)))
        return (part if is_part or jax.default_backend() != "cpu" else whole)(*args, **kwargs)

    return call
