"""Decisions with a probability: whether one run is faster than another, and how sure that is."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rlxjax._numerics import temperature_from_sd
from rlxjax._typing import Nanoseconds, RealLike
from rlxjax._values import by_value

from ._posterior import LatencyEstimate

#: A decision is one way or the other from this probability on, and undecided below.
SURE = 0.9


@by_value
class Decision(NamedTuple):
    """Whether fusing pays, `[*batch]`.

    Attributes:
        fused_ns: predicted latency if fused.
        kept_ns: predicted latency if not.
        margin_ns: what fusing saves, negative if it costs.
        margin_sd_ns: standard deviation of that.
        probability: that the fused run is the faster one: `sigmoid(margin_ns / temperature_ns)`.
        in_domain: whether the workload lies within what was measured; if not, all of this is extrapolated.
            None where that was not asked.
    """

    fused_ns: Nanoseconds
    kept_ns: Nanoseconds
    margin_ns: Nanoseconds
    margin_sd_ns: Nanoseconds
    probability: Float[Array, "*batch"]
    in_domain: bool | np.ndarray | Array | None = None

    @property
    def temperature_ns(self) -> Nanoseconds:
        """Of a sigmoid with the margin's standard deviation: `sd * sqrt(3) / pi`."""
        return jnp.asarray(temperature_from_sd(self.margin_sd_ns))

    def verdict(self, sure: float = SURE) -> str | np.ndarray:
        """Return "fuse", "keep" or "undecided"; an array of these for arrays.

        Args:
            sure: the probability from which on it is decided, more than a half.

        Raises:
            ValueError: a probability that is none, or too small to tell.
        """
        if not 0.5 < sure <= 1.0:
            raise ValueError(f"sure: expected a probability above 0.5, got {sure}")
        probability = np.asarray(self.probability)
        words = np.where(probability >= sure, "fuse", np.where(probability <= 1.0 - sure, "keep", "undecided"))
        return words if words.ndim else str(words)


@jax.jit
def decision(fused: LatencyEstimate, kept: LatencyEstimate, alike: RealLike = 0.0) -> Decision:
    """Return the decision between two estimates of one machine, `[*batch]`: what they share cancels.

    Args:
        fused: of the run to take if it is faster.
        kept: of the run to keep otherwise.
        alike: correlation of what is each run's own, from -1 to 1: that of `LatencyPosterior.alike` where both do one
            piece of work.

    Examples:
        >>> from rlxjax.fit import Runs, estimate, prior_posterior
        >>> from rlxjax.models import FFT
        >>> posterior = prior_posterior(FFT)
        >>> small, large = (estimate(posterior, Runs.checked(FFT, "fft", batch=b, n_fft=256)) for b in (1, 10**6))
        >>> bool(decision(fused=small, kept=large).probability > 0.5)
        True
    """
    margin_ns = kept.time_ns - fused.time_ns
    shared = kept.time_ns[..., None] * kept.scores - fused.time_ns[..., None] * fused.scores
    kept_own, fused_own = kept.time_ns * kept.spread, fused.time_ns * fused.spread
    # That is `kept_own**2 + fused_own**2 - 2 alike kept_own fused_own`, and never less than nothing by rounding.
    own = (kept_own - fused_own) ** 2 + 2.0 * (1.0 - alike) * kept_own * fused_own
    sd_ns = jnp.sqrt(jnp.sum(shared**2, -1) + own)
    probability = jax.nn.sigmoid(margin_ns / temperature_from_sd(sd_ns))
    return Decision(fused.time_ns, kept.time_ns, margin_ns, sd_ns, probability)
