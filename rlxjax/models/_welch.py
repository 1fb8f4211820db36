"""The latency model of Welch peaks: the time of a run on one machine, from a NumPy signal to NumPy peaks."""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rlxjax._checks import is_traced
from rlxjax._numerics import namespace_of
from rlxjax._schedule import schedule
from rlxjax._typing import RealLike
from rlxjax._values import FrozenDict
from rlxjax.fit import Facts, Input, LatencyModel, LatencyPrior, Runs, StrategySpec

from ._coefficients import prior_of
from ._welch_terms import (
    LEARNED,
    MAXIMA,
    VARIANTS,
    LatencyCoefficients,
    alone_samples,
    heap_comparisons,
    welch_terms_ns,
)

#: Names of the numbers in the runner's schedule that the model uses.
_SCHEDULED = (
    "tile_rows chunk_samples sizes_per_octave alone_samples_host alone_samples_fused alone_samples_block "
    "least_block_bins least_blocks"
)
#: For the samples of a run, the rows, and the samples of a segment: log2 of the first knot, the last knot and the step.
KNOTS = ((6.0, 24.0, 2.0), (0.0, 14.0, 2.0), (6.0, 14.0, 1.0))
#: The k at which the slope features are zero, and the number of octaves of k that change such a feature by 1.
CENTRE_K, OCTAVES_OF_K = 16.0, 2.0
#: log2 of the numbers of rows between which the slope in k changes.
SLOPE_KNOTS = (0.0, 2.0, 6.0, 10.0, 13.0)
#: A correction may rise over this number of octaves below the most samples on which a processor works alone.
OCTAVES_BEFORE_SHARING = 2.0
#: Standard deviation of the logarithm of a micro-benchmarked coefficient, since a run has other sizes and cache states.
MICRO_LOG_SD = 1.0
#: Names of the coefficients that micro-benchmarks measure.
MICRO_RATES = ("memory_bytes_per_ns", "copy_bytes_per_ns", "device_flop_per_ns", "topk_bin_ns", "topk_compare_ns")


@dataclasses.dataclass(frozen=True)
class WelchModel(LatencyModel):
    """The time of Welch peaks: on the host, or on a device in a fused program, block by block or by a learned FFT.

    All strategies except `learned` give the same peaks. The facts are numbers of the runner's schedule and figures of
    the learned models: for each length in `learned_n_fft`, the FLOP per segment and the number of unmasked (live) bins.
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
    prior = prior_of(LatencyCoefficients)  # pyright: ignore
    #: The default facts: the schedule of a CPU with two processors, and no learned models.
    facts: ClassVar[Facts] = FrozenDict(  # pyright: ignore
        {
            "processors": 2,
            **{name: getattr(schedule("cpu"), name) for name in _SCHEDULED.split()},
            **dict.fromkeys(("learned_n_fft", "learned_flop", "learned_live_bins"), ()),
        }
    )
    strategies = FrozenDict(  # pyright: ignore
        {
            "ultra": StrategySpec(("host",), FrozenDict({"n_segments": 1.0})),
            "fast": StrategySpec(("host",), FrozenDict({"n_segments": 2.0})),
            "host": StrategySpec(("host",)),
            "fused": StrategySpec(("fused_maxima", "fused_top_k")),
            "block": StrategySpec(("block",)),
            "learned": StrategySpec(("learned",)),
        }
    )

    def terms_ns(self, coefficients: LatencyCoefficients, runs: Runs, facts: Facts) -> Mapping[str, RealLike]:
        return welch_terms_ns(coefficients, runs, {**self.facts, **facts})

    def same_result(self, runs: Runs, facts: Facts) -> Bool[Array | np.ndarray, "*batch variants"]:
        """Return whether each variant is a candidate. `learned` and `fused_maxima` are candidates only in some runs."""
        lengths, blocks = ({**self.facts, **facts}[name] for name in ("learned_n_fft", "least_blocks"))
        xp = namespace_of(*runs.inputs.values(), *lengths, blocks)
        n_fft = xp.broadcast_to(xp.asarray(runs.inputs["n_fft"]), runs.shape)
        found = xp.zeros(runs.shape, bool)
        for length in lengths:
            found = found | (n_fft == length)
        others = xp.broadcast_to((np.arange(LEARNED) != MAXIMA) | (xp.asarray(blocks) > 0), (*runs.shape, LEARNED))
        return xp.concatenate([others, found[..., None]], axis=-1)

    def impossible(self, facts: Facts) -> Sequence[str]:
        return () if np.size({**self.facts, **facts}["learned_n_fft"]) else (VARIANTS[LEARNED],)

    def check(self, values: Mapping[str, Any]) -> None:
        if is_traced(values["k"], values["n_fft"]):
            return
        k, n_fft = (one.ravel() for one in np.broadcast_arrays(values["k"], values["n_fft"]))
        if (wrong := np.flatnonzero(k > n_fft / 2 + 1)).size:
            first = f"{k[wrong[0]]:g} with n_fft {n_fft[wrong[0]]:g}"
            raise ValueError(f"k: expected at most n_fft / 2 + 1 peaks, the bins, got {first}")

    def features(self, runs: Runs, facts: Facts) -> Float[Array | np.ndarray, "*batch features"]:
        """Return the features of the correction: functions that are piecewise linear in the logarithms of the sizes.

        For samples, rows and segment length, there is a feature for each pair of neighbouring knots. It rises by 1
        between these knots, and is 0 at the middle knot. Outside the knots a correction is thus constant. The other
        features are a rise towards the most samples on which a processor works alone, a step there, slopes in k, and a
        constant. If all inputs are NumPy arrays, so are the features, in double precision and without compilation.
        """
        xp = namespace_of(runs.variant, *runs.inputs.values())
        sizes = (xp.asarray(runs.inputs[name], xp.result_type(float)) for name in ("batch", "n_fft", "k", "n_segments"))
        variant, *sizes = xp.broadcast_arrays(xp.asarray(runs.variant), *sizes)
        rows, length, peaks, segments = (xp.maximum(size, 1.0) for size in sizes)
        samples = rows * length * segments

        def way_between(size: RealLike, low: float, high: float) -> RealLike:
            return xp.clip((xp.log2(size) - low) / (high - low), 0.0, 1.0)

        columns = []
        for size, (first, last, step) in zip((samples, rows, length), KNOTS, strict=True):
            count = round((last - first) / step)
            places = np.arange(float(count)).reshape((1,) * rows.ndim + (count,))
            rises = xp.clip((xp.log2(size)[..., None] - first) / step - places, 0.0, 1.0)
            columns.append(rises - np.where(places < count // 2, 1.0, 0.0))
        filled = samples / alone_samples(variant, {**self.facts, **facts})
        rise = xp.clip(1.0 + xp.log2(filled) / OCTAVES_BEFORE_SHARING, 0.0, 1.0)
        octaves_of_k = xp.log2(peaks / CENTRE_K) / OCTAVES_OF_K
        of_rows = [way_between(rows, low, high) for low, high in pairwise(SLOPE_KNOTS)]
        of_length = 2.0 * way_between(length, *KNOTS[2][:2]) - 1.0
        slopes = [octaves_of_k * change for change in (1.0, *of_rows, of_length)]
        last = [xp.where(filled > 1.0, 0.0, rise), xp.where(filled > 1.0, 1.0, 0.0), *slopes, xp.ones_like(peaks)]
        return xp.concatenate([*columns, xp.stack(last, -1)], axis=-1)

    def folds(self, runs: Runs) -> Sequence[np.ndarray]:
        """Return two arrays, batch and n_fft, `[n]` each. Validation holds out runs with the same value together."""
        return [np.asarray(runs.inputs["batch"]), np.asarray(runs.inputs["n_fft"])]


WELCH = WelchModel()


def welch_micro_prior(
    rates: Mapping[str, float], prior: LatencyPrior[LatencyCoefficients] | None = None
) -> LatencyPrior[LatencyCoefficients]:
    """Return a prior whose medians are micro-benchmark results, for the coefficients that were measured.

    Args:
        rates: a dict from names in `MICRO_RATES` to measured values. `memory_bytes_per_ns`: bytes that a copy beyond
            the caches reads and writes. `copy_bytes_per_ns`: bytes that a copy from host to device moves.
            `device_flop_per_ns`: `2.5 n log2 n` operations for each transform in a chunk. `topk_bin_ns` and
            `topk_compare_ns`: the result of `heap_rates`. A value that is not positive is noise and is ignored.
        prior: the prior for the other coefficients; by default the prior of `WELCH`.

    Raises:
        ValueError: a name in `rates` is unknown.

    Examples:
        >>> welch_micro_prior({"memory_bytes_per_ns": 7.0}).median.memory_bytes_per_ns
        7.0
    """
    prior = WELCH.prior if prior is None else prior
    if unknown := [name for name in rates if name not in MICRO_RATES]:
        raise ValueError(f"rates: expected {', '.join(MICRO_RATES)}, got {unknown[0]!r}")
    found = {name: float(rate) for name, rate in rates.items() if rate > 0}
    return prior._replace(
        median=dataclasses.replace(prior.median, **found),
        log_sd=dataclasses.replace(prior.log_sd, **dict.fromkeys(found, MICRO_LOG_SD)),
    )


def heap_rates(
    rows: Sequence[float] | np.ndarray,
    bins: Sequence[float] | np.ndarray,
    k: Sequence[float] | np.ndarray,
    time_ns: Sequence[float] | np.ndarray,
) -> dict[str, float]:
    """Fit `topk_bin_ns` and `topk_compare_ns` to timings of the selection by a heap, `[n]`, by least squares.

    Args:
        rows: number of rows in each timing.
        bins: number of bins in a row.
        k: number of peaks in a row. Both times can be told apart only if the ratio of k to bins varies.
        time_ns: time of each selection in ns, without launch and wait.
    """
    count, size = np.asarray(rows, float), np.asarray(bins, float)
    comparisons = np.asarray(heap_comparisons(jnp.asarray(size), jnp.asarray(k, float)))
    columns = np.stack([count * size, count * comparisons], -1)
    by_bin, by_comparison = np.linalg.lstsq(columns, np.asarray(time_ns, float), rcond=None)[0].tolist()
    return {"topk_bin_ns": by_bin, "topk_compare_ns": by_comparison}
