"""The ways to compute Welch peaks, each as what runs."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from rlxjax._values import FrozenDict


class WelchVariant(NamedTuple):
    """One way to compute Welch peaks; all but the learned ones give the same peaks.

    Attributes:
        transform: "numpy" on the host; on a device "fft", or the pruned program of a "learned" FFT.
        selection: of the peaks: "numpy" on the host; on the device "maxima", "top_k", or "kernel" of one that computes
            everything; None for the one that its schedule says.
    """

    transform: Literal["numpy", "fft", "learned"]
    selection: Literal["numpy", "maxima", "top_k", "kernel"] | None = None


#: What runs, by the names that the latency model has for its variants.
VARIANTS: Mapping[str, WelchVariant] = FrozenDict(
    {
        "host": WelchVariant("numpy", "numpy"),
        "fused_maxima": WelchVariant("fft", "maxima"),
        "fused_top_k": WelchVariant("fft", "top_k"),
        "block": WelchVariant("fft", "numpy"),
        "learned": WelchVariant("learned"),
    }
)
#: What runs by the name of a variant or of a strategy: of these, "fused" alone is several variants.
RUNS: Mapping[str, WelchVariant] = FrozenDict({**VARIANTS, "fused": WelchVariant("fft")})
