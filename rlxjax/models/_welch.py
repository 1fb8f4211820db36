"""The latency model of Welch peaks: what a run takes on one machine, from a NumPy signal to NumPy peaks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float

from rlxjax._checks import is_traced
from rlxjax._numerics import namespace_of
from rlxjax._typing import RealLike
from rlxjax._values import FrozenDict
from rlxjax.fit import Facts, Input, LatencyModel, LatencyPrior, Runs, StrategySpec, wide_prior

from ._welch_coefficients import GAIN_LOG_SD, LatencyCoefficients
from ._welch_features import welch_features
from ._welch_terms import LEARNED, MAXIMA, VARIANTS, welch_terms_ns

#: How programs are scheduled where a calibration does not say: by the runner of version 12, on two processors.
_FACTS: Facts = FrozenDict(
    {
        "processors": 2,
        "tile_rows": 8,
        "chunk_samples": 2**19,
        "sizes_per_octave": 4,
        "alone_samples_host": 2**17,
        "alone_samples_fused": 2**16,
        "alone_samples_block": 2**17,
        "least_block_bins": 16,
        "least_blocks": 9,
        "learned_n_fft": (),
        "learned_flop": (),
        "learned_live_bins": (),
    }
)


_STRATEGIES: Mapping[str, StrategySpec] = FrozenDict(
    {
        "ultra": StrategySpec(("host",), FrozenDict({"n_segments": 1.0})),
        "fast": StrategySpec(("host",), FrozenDict({"n_segments": 2.0})),
        "host": StrategySpec(("host",)),
        "fused": StrategySpec(("fused_maxima", "fused_top_k")),
        "block": StrategySpec(("block",)),
        "learned": StrategySpec(("learned",)),
    }
)


@dataclasses.dataclass(frozen=True)
class WelchModel(LatencyModel):
    """Welch peaks on the host, or on a device by a fused program, block by block, or by a learned FFT.

    Every strategy but `learned` gives the same peaks. A `learned` run takes its operations from the learned models
    among the facts: `learned_n_fft`, and for each of these lengths `learned_flop`, the operations of the pruned
    program for one segment, and `learned_live_bins`, the bins that are not masked. The other facts are fields of
    the runner's schedule, by their names there.

    Examples:
        >>> runs = Runs.checked(WELCH, "host", batch=64, n_fft=256, k=16)
        >>> terms = WELCH.terms_ns(WELCH.prior.median, runs, WELCH.facts)
        >>> list(terms)
        ['call_ns', 'launch_and_sync_ns', 'upload_ns', 'transform_ns', 'selection_ns', 'readback_ns']
    """

    name, version = "welch", 15
    inputs = FrozenDict(
        {
            "batch": Input("rows", least=0),
            "n_fft": Input("samples", least=2, step=2),
            "k": Input("peaks"),
            "n_segments": Input("segments", default=2.0),
        }
    )
    variants = VARIANTS

    @property
    def prior(self) -> LatencyPrior[LatencyCoefficients]:
        """Wide, but for what processors gain."""
        return wide_prior(LatencyCoefficients(), parallel_gain=GAIN_LOG_SD)

    @property
    def facts(self) -> Facts:
        """How programs are scheduled where a calibration does not say."""
        return _FACTS

    @property
    def strategies(self) -> Mapping[str, StrategySpec]:
        """The host with one and with two segments as users name it, and the four ways to compute peaks."""
        return _STRATEGIES

    def terms_ns(self, coefficients: LatencyCoefficients, runs: Runs, facts: Facts) -> Mapping[str, RealLike]:
        """Return the parts of what runs take in ns by name, `[*batch]`; their sum is the prediction."""
        return welch_terms_ns(coefficients, runs, {**_FACTS, **facts})

    def same_result(self, runs: Runs, facts: Facts) -> Bool[Array | np.ndarray, "*batch variants"]:
        """Return which variants are candidates: learned runs with a model of their length, maxima where they select."""
        lengths, blocks = ({**_FACTS, **facts}[name] for name in ("learned_n_fft", "least_blocks"))
        xp = namespace_of(*runs.inputs.values(), *lengths, blocks)
        n_fft = xp.broadcast_to(xp.asarray(runs.inputs["n_fft"]), runs.shape)
        found = xp.zeros(runs.shape, bool)
        for length in lengths:
            found = found | (n_fft == length)
        others = xp.broadcast_to((np.arange(LEARNED) != MAXIMA) | (xp.asarray(blocks) > 0), (*runs.shape, LEARNED))
        return xp.concatenate([others, found[..., None]], axis=-1)

    def check(self, values: Mapping[str, Any]) -> None:
        """Refuse more peaks than bins."""
        if is_traced(values["k"], values["n_fft"]):
            return
        k, n_fft = (one.ravel() for one in np.broadcast_arrays(values["k"], values["n_fft"]))
        if (wrong := np.flatnonzero(k > n_fft / 2 + 1)).size:
            first = f"{k[wrong[0]]:g} with n_fft {n_fft[wrong[0]]:g}"
            raise ValueError(f"k: expected at most n_fft / 2 + 1 peaks, the bins, got {first}")

    def features(self, runs: Runs, facts: Facts) -> Float[Array | np.ndarray, "*batch features"]:
        """Return what the small correction of a variant may depend on."""
        return welch_features(runs, {**_FACTS, **facts})

    def folds(self, runs: Runs) -> Sequence[np.ndarray]:
        """Return batch and n_fft, `[n]` each: what validation leaves out together."""
        return [np.asarray(runs.inputs["batch"]), np.asarray(runs.inputs["n_fft"])]


WELCH = WelchModel()
