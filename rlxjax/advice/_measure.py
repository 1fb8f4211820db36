"""What a prediction is compared with: all forms timed, interleaved."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax.clock import QUARTILE, mean_ns, quiet_collector, visit_ns

#: Seconds of timing, and the least rounds.
BUDGET_S, LEAST_ROUNDS = 2.0, 10


def measure(forms: Mapping[str, Callable[..., Any]], args: tuple[Any, ...]) -> tuple[dict[str, float], float, int]:
    """Time several forms of one computation, in random order in each round.

    Args:
        forms: by name, each as it runs; the last one is that of which compiling is timed.
        args: of all; arrays are used as they are, shapes are filled: floats with normal numbers, others with zeros.

    Returns:
        The lower quartile of the times of each form in ns, the seconds that compiling took, and the rounds.
    """
    rng = np.random.default_rng(0)
    arrays = jax.device_put(jax.tree.map(lambda arg: _array(arg, rng), args))
    runs = {name: functools.partial(form, *arrays) for name, form in forms.items()}
    start = 0.0
    for run in runs.values():
        start = time.perf_counter()
        jax.block_until_ready(run())
    first_s = time.perf_counter() - start
    rounds: list[list[float]] = []
    end = time.perf_counter() + BUDGET_S
    with quiet_collector():
        while len(rounds) < LEAST_ROUNDS or time.perf_counter() < end:
            times = {name: mean_ns(visit_ns(runs[name])) for name in rng.permutation([*runs]).tolist()}
            rounds.append([times[name] for name in runs])
    times_ns = dict(zip(runs, np.quantile(rounds, QUARTILE, axis=0).tolist(), strict=True))
    return times_ns, max(first_s - [*times_ns.values()][-1] / 1e9, 0.0), len(rounds)


def _array(arg: Any, rng: np.random.Generator) -> Any:
    if not isinstance(arg, jax.ShapeDtypeStruct):
        return arg
    if jnp.issubdtype(arg.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), arg.shape) if arg.shape else jax.random.key(0)
    if jnp.issubdtype(arg.dtype, np.floating):
        return jnp.asarray(rng.standard_normal(arg.shape, np.float32)).astype(arg.dtype)
    return jnp.zeros(arg.shape, arg.dtype)
