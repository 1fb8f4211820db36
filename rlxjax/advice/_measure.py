"""What a prediction is compared with: all forms timed, interleaved."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax.clock import QUARTILE, call_ns, mean_ns, quiet_collector, visit_ns

from ._advice import Measured
from ._stages import composed

#: Seconds of timing, and the least rounds.
BUDGET_S, LEAST_ROUNDS = 2.0, 10


def measured(
    functions: Sequence[Callable[..., Any]], groups: Sequence[Sequence[int]], args: tuple[Any, ...]
) -> Measured:
    """Time stages that are jitted one by one, or one function as it runs where it is not, against the groups.

    The forms are called in random order in each round. Arrays are used as they are, shapes are filled: floats with
    normal numbers, others with zeros.
    """
    rng = np.random.default_rng(0)
    arrays = jax.device_put(jax.tree.map(lambda arg: _array(arg, rng), args))
    forms = [composed([jax.jit(fn) for fn in functions]) if len(functions) > 1 else functions[0]]
    if len(groups) > 1:
        forms.append(jax.jit(composed(functions)))
    forms.append(composed([jax.jit(composed([functions[number] for number in group])) for group in groups]))
    runs = [functools.partial(form, *arrays) for form in forms]
    first_ns = [call_ns(run) for run in runs][-1]
    rounds: list[list[float]] = []
    end = time.perf_counter() + BUDGET_S
    with quiet_collector():
        while len(rounds) < LEAST_ROUNDS or time.perf_counter() < end:
            times = {place: mean_ns(visit_ns(runs[place])) for place in rng.permutation(len(runs)).tolist()}
            rounds.append([times[place] for place in range(len(runs))])
    apart_ns, *one, grouped_ns = np.quantile(rounds, QUARTILE, axis=0).tolist()
    return Measured(apart_ns, grouped_ns, max(first_ns - grouped_ns, 0.0) / 1e9, len(rounds), *one)


def _array(arg: Any, rng: np.random.Generator) -> Any:
    if not isinstance(arg, jax.ShapeDtypeStruct):
        return arg
    if jnp.issubdtype(arg.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), arg.shape) if arg.shape else jax.random.key(0)
    if jnp.issubdtype(arg.dtype, np.floating):
        return jnp.asarray(rng.standard_normal(arg.shape, np.float32)).astype(arg.dtype)
    return jnp.zeros(arg.shape, arg.dtype)
