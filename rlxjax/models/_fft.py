"""The latency of a batched FFT alone: for timings of machines that nobody here can run on."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from rlxjax._numerics import soft_roofline
from rlxjax._typing import RealLike
from rlxjax._values import FrozenDict, by_value
from rlxjax.fit import Facts, Input, LatencyModel, LatencyPrior, Runs, wide_prior
from rlxjax.gate import Coefficients

#: How sharply the larger of compute and memory time decides; 1 would be their sum.
ROOFLINE_SHARPNESS = 2
#: Bytes that transforms move for one sample: read and window, transform, square.
FFT_BYTES_PER_SAMPLE = 20.0
#: Compute time falls with the batch as `(1 + batch / onset_rows)**-BATCH_EXPONENT`; below 1, so that more
#: rows never take less time.
BATCH_EXPONENT = 1 / 3


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FftLatencyCoefficients(Coefficients):
    """What a batched FFT takes on one execution path; every field positive, `[*batch]`.

    The defaults are orders of magnitude of a present-day machine.

    Attributes:
        call_ns: one call, whatever its size.
        row_ns: one transform, apart from its operations.
        flop_per_ns: FFT operations of a small batch, `2.5 n log2 n` a row.
        bytes_per_ns: memory, 20 bytes a sample; no batch is faster than this.
        onset_rows: the batch from which more rows keep the device better occupied; very large where rows
            are worked through one by one.
    """

    call_ns: RealLike = 6e4
    row_ns: RealLike = 50.0
    flop_per_ns: RealLike = 10.0
    bytes_per_ns: RealLike = 20.0
    onset_rows: RealLike = 1e3


@dataclasses.dataclass(frozen=True)
class FftModel(LatencyModel):
    """A batched FFT on one execution path: a call, and `batch` times a row.

    A row takes `roofline(compute / (1 + batch / onset_rows)**(1/3), memory)`, with the roofline, the counts
    and the cost of a row of the Welch-peaks model.

    Examples:
        >>> serial = FftLatencyCoefficients(call_ns=1e4, flop_per_ns=2.0, onset_rows=1e9)
        >>> terms = FFT.terms_ns(serial, Runs.checked(FFT, "fft", batch=2048, n_fft=1024), FFT.facts)
        >>> round(float(sum(terms.values())) / 1e6, 1)
        26.4
    """

    name, version = "fft", 1
    inputs = FrozenDict({"batch": Input("rows"), "n_fft": Input("samples", least=2, step=2)})
    variants = ("fft",)

    @property
    def prior(self) -> LatencyPrior[FftLatencyCoefficients]:
        """Orders of magnitude of a present-day machine, wide."""
        return wide_prior(FftLatencyCoefficients())

    def terms_ns(self, coefficients: FftLatencyCoefficients, runs: Runs, facts: Facts) -> Mapping[str, RealLike]:
        """Return the call's and the transforms' part in ns, `[*batch]`."""
        del facts
        batch, n_fft = jnp.asarray(runs.inputs["batch"]), jnp.asarray(runs.inputs["n_fft"])
        speedup = (1.0 + batch / coefficients.onset_rows) ** BATCH_EXPONENT
        compute_ns = (coefficients.row_ns + fft_flop(n_fft) / coefficients.flop_per_ns) / speedup
        memory_ns = FFT_BYTES_PER_SAMPLE * n_fft / coefficients.bytes_per_ns
        row_ns = soft_roofline(compute_ns, memory_ns, ROOFLINE_SHARPNESS)
        return {"call_ns": coefficients.call_ns, "work_ns": batch * row_ns}


FFT = FftModel()


def fft_flop(n_fft: RealLike) -> RealLike:
    """Return the operations of a real transform of `n_fft` samples, `2.5 n log2 n` as it is counted, `[*batch]`."""
    return 2.5 * n_fft * jnp.log2(n_fft)
