"""How much work an element of a primitive's result is, in units of one exponential of float32.

    python -m benchmarks.primitive_weights [--rounds 10]

A loop adds a vanishing share of the primitive's result to its argument, so that nothing is left out; what the same
loop takes without the primitive is subtracted. Arguments are normal, positive or between 0 and 1, as the primitive
needs them. The table of `rlxjax/models/_primitive_weights.py` holds these numbers, rounded.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks._common import options, table, visits, write

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
    given = options(__doc__, rounds=10).parse_args()
    jax.config.update("jax_enable_x64", True)
    rng, calls = np.random.default_rng(0), {}
    for name, primitive in PRIMITIVES.items():
        for dtype in ("float32", "float64"):
            program = jax.jit(functools.partial(looped, primitive))
            calls[name, dtype] = functools.partial(program, jnp.asarray(arguments(name, rng), dtype))
    medians = {key: float(np.median(own)) for key, own in visits(calls, given.rounds).items()}
    nothing = {dtype: medians["nothing", dtype] for dtype in ("float32", "float64")}
    unit = medians["exp", "float32"] - nothing["float32"]
    weights = {name: [(medians[name, dtype] - nothing[dtype]) / unit for dtype in nothing] for name in PRIMITIVES}
    print(f"an exponential of float32: {unit / ELEMENTS / TURNS:.3f} ns")
    print(table(["primitive", *nothing], [(name, *(f"{one:.2f}" for one in own)) for name, own in weights.items()]))
    write(given.json, {"exponential_ns": unit / ELEMENTS / TURNS, "weights": weights})


if __name__ == "__main__":
    main()
