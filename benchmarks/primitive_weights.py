"""How much work an element of a primitive's result is, in units of one exponential of float32.

    python -m benchmarks.primitive_weights [--rounds 10]

A loop adds a vanishing share of the primitive's result to its argument, so that nothing is left out; what the same
loop takes without the primitive is subtracted. Arguments are normal, positive or between 0 and 1, as the primitive
needs them. The table of `rlxjax/models/_primitive_weights.py` holds these numbers, rounded.
"""

import argparse
import functools
import gc
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ELEMENTS, TURNS = 2**16, 10
POSITIVE = (
    "sqrt rsqrt log pow div lgamma digamma igamma igammac igamma_grad_a random_gamma_grad random_gamma polygamma "
    "zeta rem"
)
BETWEEN_0_AND_1 = "erf_inv asin acos atanh regularized_incomplete_beta log1p"
UNARY = (
    "sqrt rsqrt exp exp2 expm1 log log1p tanh logistic sin cos tan cbrt erf erfc erf_inv lgamma digamma asin acos atan "
    "sinh cosh asinh atanh bessel_i0e bessel_i1e"
)
PRIMITIVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "nothing": lambda x: x,
    **{name: getattr(lax, name) for name in UNARY.split()},
    "div": lambda x: 1.7 / x,
    "pow": lambda x: lax.pow(x, jnp.asarray(1.7, x.dtype)),
    "rem": lambda x: lax.rem(x, jnp.asarray(0.3, x.dtype)),
    "atan2": lambda x: lax.atan2(x, 1.5 - x),
    "acosh": lambda x: lax.acosh(jnp.abs(x) + 1),
    "nextafter": lambda x: lax.nextafter(x, jnp.ones_like(x)),
    "igamma": lambda x: lax.igamma(x + 1, x),
    "igammac": lambda x: lax.igammac(x + 1, x),
    "igamma_grad_a": lambda x: lax.igamma_grad_a(x + 1, x),
    "random_gamma_grad": lambda x: lax.random_gamma_grad(x + 1, x),
    "regularized_incomplete_beta": lambda x: lax.betainc(x + 1, x + 2, x * 0.4),
    "random_gamma": lambda x: jax.random.gamma(jax.random.key(0), x, dtype=x.dtype),
    "polygamma": lambda x: lax.polygamma(jnp.ones_like(x), x + 1),
    "zeta": lambda x: lax.zeta(x + 2, x + 1),
}


def looped(primitive: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return the argument after a few turns, each of which computes the primitive."""
    tiny = jnp.asarray(1e-30, x.dtype)
    return lax.fori_loop(0, TURNS, lambda _, y: y + tiny * primitive(y), x)


def arguments(name: str, rng: np.random.Generator) -> np.ndarray:
    """Return numbers that a primitive is defined for."""
    if name in POSITIVE.split():
        return np.abs(rng.standard_normal(ELEMENTS)) * 2 + 0.05
    if name in BETWEEN_0_AND_1.split():
        return rng.uniform(0.02, 0.95, ELEMENTS)
    return rng.standard_normal(ELEMENTS)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rng, programs = np.random.default_rng(0), {}
    for name, primitive in PRIMITIVES.items():
        for dtype in (np.float32, np.float64):
            x = jnp.asarray(arguments(name, rng), dtype)
            program = jax.jit(functools.partial(looped, primitive))
            jax.block_until_ready(program(x))
            programs[name, np.dtype(dtype).name] = program, x
    keys, times_ns = list(programs), {key: [] for key in programs}
    gc.disable()
    for _ in range(options.rounds):
        for place in rng.permutation(len(keys)):
            program, x = programs[keys[place]]
            start = time.perf_counter_ns()
            jax.block_until_ready(program(x))
            times_ns[keys[place]].append(time.perf_counter_ns() - start)
    medians = {key: float(np.median(own)) for key, own in times_ns.items()}
    nothing = {dtype: medians["nothing", dtype] for dtype in ("float32", "float64")}
    unit = medians["exp", "float32"] - nothing["float32"]
    print(f"an exponential of float32: {unit / ELEMENTS / TURNS:.3f} ns")
    for name in PRIMITIVES:
        weights = ((medians[name, dtype] - nothing[dtype]) / unit for dtype in nothing)
        print(f"{name:30}", *(f"{weight:9.2f}" for weight in weights))


if __name__ == "__main__":
    main()
