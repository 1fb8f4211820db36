"""What a transform takes by the factors of its length."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from _tolerances import FLOAT64_RTOL

from rlxjax.models import factor_ratio

LENGTHS = np.array([2, 4, 6, 14, 96, 160, 210, 338, 400, 480, 998, 1000, 1022, 1024, 1200, 1536, 2310, 4096, 65_536])


def factors_of(length):
    """Return the prime factors of a length, by trial division."""
    found, factor = [], 2
    while length > 1:
        while length % factor == 0:
            found.append(factor)
            length //= factor
        factor += 1
    return found


def test_the_ratio_is_that_of_the_sum_of_the_factors_or_of_bluesteins_algorithm():
    for length in LENGTHS.tolist():
        steps = sum(factor if factor <= 5 else 1.1 * factor for factor in factors_of(length))
        size = 2 ** math.ceil(math.log2(2 * length - 1 + 1e-9))
        steps = min(steps, 3.0 * math.log2(size) * size / length)
        np.testing.assert_allclose(factor_ratio(float(length)), steps / (2 * math.log2(length)), rtol=FLOAT64_RTOL)


def test_powers_of_two_cost_what_they_are_counted_and_lengths_of_small_factors_hardly_more():
    np.testing.assert_allclose(factor_ratio(2.0 ** np.arange(1, 18)), 1.0, rtol=FLOAT64_RTOL)
    usual = np.asarray(factor_ratio(np.array([96.0, 160.0, 384.0, 400.0, 480.0, 1000.0, 1200.0, 1536.0])))
    assert np.all((usual > 0.95) & (usual < 1.1))
    assert factor_ratio(998.0) > 3.0  # twice a prime


def test_jit_and_a_loop_give_the_same_and_the_gradient_takes_the_ratio_as_it_is():
    lengths = LENGTHS.astype(float)
    whole = jax.jit(factor_ratio)(lengths)
    np.testing.assert_allclose(whole, [factor_ratio(length) for length in lengths], rtol=FLOAT64_RTOL)
    np.testing.assert_array_equal(jax.grad(lambda n: jnp.sum(factor_ratio(n)))(lengths), 0.0)
