"""What a transform takes by the factors of its length."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from _tolerances import FLOAT64_RTOL

from rlxjax.models import factor_ratio

LENGTHS = np.array([2, 4, 6, 14, 96, 160, 210, 338, 400, 480, 998, 1000, 1022, 1024, 1200, 1536, 2310, 4096, 65_536])


def steps_of(length):
    """Return the sum of the prime factors of a length, or the steps of Bluestein's algorithm."""
    total, left, factor = 0.0, length, 2
    while left > 1:
        while left % factor == 0:
            total, left = total + (factor if factor <= 5 else 1.1 * factor), left // factor
        factor += 1
    size = 2 ** math.ceil(math.log2(2 * length - 1 + 1e-9))
    return min(total, 3.0 * math.log2(size) * size / length)


def test_the_ratio_is_that_of_the_steps_of_a_length_and_a_gradient_takes_it_as_it_is():
    expected = np.array([steps_of(length) / (2 * math.log2(length)) for length in LENGTHS.tolist()])
    lengths = LENGTHS.astype(float)
    for found in (jax.jit(factor_ratio)(lengths), factor_ratio(lengths)):
        np.testing.assert_allclose(found, expected, rtol=FLOAT64_RTOL)
    np.testing.assert_allclose(factor_ratio(998.0), expected[LENGTHS.tolist().index(998)], rtol=FLOAT64_RTOL)
    of_twos = (LENGTHS & (LENGTHS - 1)) == 0
    np.testing.assert_allclose(expected[of_twos], 1.0, rtol=FLOAT64_RTOL)
    of_small_factors = np.isin(LENGTHS, (96, 160, 400, 480, 1000, 1200, 1536))
    assert np.all((expected[of_small_factors] > 0.95) & (expected[of_small_factors] < 1.1))
    assert expected[LENGTHS.tolist().index(998)] > 3.0  # twice a prime
    np.testing.assert_array_equal(jax.grad(lambda n: jnp.sum(factor_ratio(n)))(lengths), 0.0)
