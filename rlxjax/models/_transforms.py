"""What a Fourier transform takes by the factors of its length."""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from rlxjax._typing import RealLike

#: The largest factor that libraries write out, and what a step of another one costs, of those.
WRITTEN_OUT, OTHER_FACTOR = 5, 1.1
#: Steps of a transform of a power of two that Bluestein's algorithm takes for one of its own, with its other passes.
BLUESTEIN = 3.0
#: Odd numbers below this are factored; a length whose odd part is larger is left to Bluestein's algorithm.
MOST_ODD = 2**14


def factor_ratio(length: RealLike) -> Float[Array, "*batch"]:
    """Return what a transform takes, of one that takes `2 log2(length)` steps a sample, `[*batch]`.

    A transform takes as many steps a sample as its factors are together (J. W. Cooley, J. W. Tukey, An Algorithm for
    the Machine Calculation of Complex Fourier Series, 1965), so that the ratio of powers of two is 1. Large prime
    factors are left to Bluestein's algorithm (1970), by transforms of a power of two of at least twice the length.
    Lengths are rounded to whole numbers; the gradient takes the ratio as it is.

    Args:
        length: of the transform, at least 2.

    Examples:
        >>> [round(float(factor_ratio(n)), 2) for n in (1024, 1000, 998)]
        [1.0, 1.05, 3.4]
    """
    length = lax.stop_gradient(jnp.maximum(jnp.round(jnp.asarray(length, jnp.result_type(float))), 2.0))
    whole = length.astype(jnp.int32)
    twos = whole & -whole
    place = whole // twos // 2
    steps_of_odd = jnp.asarray(_steps_of_odd(), length.dtype)
    odd_steps = steps_of_odd[jnp.minimum(place, MOST_ODD // 2 - 1)]
    steps = jnp.where(place < MOST_ODD // 2, 2.0 * jnp.log2(twos.astype(length.dtype)) + odd_steps, jnp.inf)
    smooth_log2 = jnp.floor(jnp.log2(2.0 * length - 1.0)) + 1.0
    bluestein = BLUESTEIN * smooth_log2 * 2.0**smooth_log2 / length
    return jnp.minimum(steps, bluestein) / (2.0 * jnp.log2(length))


@functools.cache
def _steps_of_odd() -> np.ndarray:
    """Return the steps a sample of transforms of 1, 3, 5, ... samples, `[MOST_ODD / 2]`."""
    steps, is_prime = np.zeros(MOST_ODD), np.ones(MOST_ODD, bool)
    for factor in range(3, MOST_ODD, 2):
        if not is_prime[factor]:
            continue
        is_prime[factor * factor :: factor] = False
        power = factor
        while power < MOST_ODD:
            steps[power::power] += factor if factor <= WRITTEN_OUT else OTHER_FACTOR * factor
            power *= factor
    return steps[1::2]
