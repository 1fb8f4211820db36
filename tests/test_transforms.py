"""What a transform takes by the factors of its length."""

import math

import jax
import numpy as np
from _tolerances import FLOAT64_RTOL

from rlxjax.models import factor_ratio

#: Lengths -> the sum of their prime factors, where one beyond 5 takes 1.1 times as much.
STEPS = {2: 2, 4: 4, 6: 5, 14: 2 + 7.7, 96: 13, 338: 2 + 2 * 14.3, 1000: 21, 2310: 10 + 7.7 + 12.1, 65_536: 32}
#: Of 2 and a prime of 499 the steps of Bluestein's algorithm: three times those of the next power of two.
STEPS[998] = 3 * 11 * 2048 / 998


def test_the_ratio_is_that_of_the_steps_of_a_length_and_a_gradient_takes_it_as_it_is():
    lengths = np.array([*STEPS], float)
    expected = np.array([steps / (2 * math.log2(length)) for length, steps in STEPS.items()])
    jitted = jax.jit(factor_ratio)
    for found in (jitted(lengths), factor_ratio(lengths), [*map(jitted, lengths.tolist())]):
        np.testing.assert_allclose(found, expected, rtol=FLOAT64_RTOL)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda n: factor_ratio(n).sum()))(lengths), 0.0)
