"""The truth beside a prediction: both forms timed, interleaved."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax.clock import QUARTILE, mean_ns, quiet_collector, visit_ns

from ._advice import Measured

#: Seconds of timing, and the least rounds.
BUDGET_S, LEAST_ROUNDS = 2.0, 10


def measure(apart: Callable[..., Any], together: Callable[..., Any], args: tuple[Any, ...]) -> Measured:
    """Time stages apart and together, in random order in each round.

    Args:
        apart: runs the stages, each a program of its own.
        together: the same as one function, which is jitted here.
        args: of both; arrays are used as they are, shapes are filled: floats with normal numbers, others with zeros.
    """
    rng = np.random.default_rng(0)
    arrays = jax.device_put(jax.tree.map(lambda arg: _array(arg, rng), args))
    together = jax.jit(together)
    start = time.perf_counter()
    jax.block_until_ready(together(*arrays))
    first_s = time.perf_counter() - start
    forms: list[Callable[..., Any]] = [apart, together]
    times_ns: list[list[float]] = [[], []]
    jax.block_until_ready(apart(*arrays))
    end = time.perf_counter() + BUDGET_S
    with quiet_collector():
        while len(times_ns[0]) < LEAST_ROUNDS or time.perf_counter() < end:
            for number in rng.permutation(2).tolist():
                times_ns[number].append(mean_ns(visit_ns(functools.partial(forms[number], *arrays))))
    apart_ns, together_ns = (float(np.quantile(own, QUARTILE)) for own in times_ns)
    return Measured(apart_ns, together_ns, max(first_s - together_ns / 1e9, 0.0), len(times_ns[0]))


def _array(arg: Any, rng: np.random.Generator) -> Any:
    if not isinstance(arg, jax.ShapeDtypeStruct):
        return arg
    if jnp.issubdtype(arg.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), arg.shape) if arg.shape else jax.random.key(0)
    if jnp.issubdtype(arg.dtype, np.floating):
        return jnp.asarray(rng.standard_normal(arg.shape, np.float32)).astype(arg.dtype)
    return jnp.zeros(arg.shape, arg.dtype)
