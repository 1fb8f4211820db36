"""The latency model of a batched FFT, and how the time of a transform depends on the factors of its length."""

import dataclasses
import functools
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from rlxjax._numerics import soft_roofline
from rlxjax._typing import RealLike
from rlxjax._values import FrozenDict
from rlxjax.fit import Facts, Input, LatencyModel, Runs
from rlxjax.gate import Coefficients

from ._coefficients import ROOFLINE_SHARPNESS, coefficients, prior_of, typical

#: Bytes of memory traffic per sample, for three passes: read and window, transform, and square.
FFT_BYTES_PER_SAMPLE = 20.0
#: Compute time per row is proportional to `(1 + batch / onset_rows)**-BATCH_EXPONENT`. The exponent is below 1, so that
#: the total time rises with the number of rows.
BATCH_EXPONENT = 1 / 3

#: The largest factor of a length for which libraries have unrolled code, and the relative cost of larger factors.
WRITTEN_OUT, OTHER_FACTOR = 5, 1.1
#: Cost of Bluestein's algorithm, all its passes together, relative to one of its power-of-two transforms.
BLUESTEIN = 3.0
#: A length uses Bluestein's algorithm if its largest odd divisor is at least `MOST_ODD`.
MOST_ODD = 2**14


@coefficients
@dataclasses.dataclass(frozen=True)
class FftLatencyCoefficients(Coefficients):
    """Coefficients of a batched FFT on one execution path; each field is positive, `[*batch]`.

    The defaults are orders of magnitude of a present-day machine.
    """

    call_ns: RealLike = typical(6e4, "time of one call, for any size.")
    row_ns: RealLike = typical(50.0, "time of one transform, apart from its operations.")
    flop_per_ns: RealLike = typical(10.0, "rate of FFT operations in a small batch; a row has `2.5 n log2 n`.")
    bytes_per_ns: RealLike = typical(20.0, "rate of memory traffic, which is 20 bytes per sample.")
    onset_rows: RealLike = typical(1e3, "number of rows from which larger batches take less time per row.")


@dataclasses.dataclass(frozen=True)
class FftModel(LatencyModel):
    """The time of a batched FFT on one execution path: a call, and a roofline of compute and memory time per row."""

    name, version = "fft", 1
    inputs = FrozenDict({"batch": Input("rows"), "n_fft": Input("samples", least=2, step=2)})
    variants = ("fft",)
    prior = prior_of(FftLatencyCoefficients)  # pyright: ignore

    def terms_ns(self, coefficients: FftLatencyCoefficients, runs: Runs, facts: Facts) -> Mapping[str, RealLike]:
        batch, n_fft = jnp.asarray(runs.inputs["batch"]), jnp.asarray(runs.inputs["n_fft"])
        speedup = (1.0 + batch / coefficients.onset_rows) ** BATCH_EXPONENT
        compute_ns = (coefficients.row_ns + fft_flop(n_fft) / coefficients.flop_per_ns) / speedup
        memory_ns = FFT_BYTES_PER_SAMPLE * n_fft / coefficients.bytes_per_ns
        row_ns = soft_roofline(compute_ns, memory_ns, ROOFLINE_SHARPNESS)
        return {"call_ns": coefficients.call_ns, "work_ns": batch * row_ns}


FFT = FftModel()


def fft_flop(n_fft: RealLike) -> RealLike:
    """Return the usual number of operations of a real FFT of `n` samples, `2.5 n log2 n`, `[*batch]`."""
    return 2.5 * n_fft * jnp.log2(n_fft)


def factor_ratio(length: RealLike) -> Float[Array, "*batch"]:
    """Return the steps per sample of a transform divided by `2 log2(length)`, `[*batch]`.

    The number of steps per sample is the sum of the prime factors of the length (J. W. Cooley, J. W. Tukey, An
    Algorithm for the Machine Calculation of Complex Fourier Series, 1965), so the ratio is 1 for a power of two. If the
    length has a large prime factor, Bluestein's algorithm (1970) uses transforms whose length is a power of two, about
    twice as large or larger. The length is rounded to a whole number. The gradient with respect to the length is 0.

    Args:
        length: number of samples of the transform, at least 2.

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
    """Return the number of steps per sample for transforms of 1, 3, 5, ... samples, `[MOST_ODD / 2]`."""
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
