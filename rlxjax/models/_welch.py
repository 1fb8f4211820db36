"""The latency model of Welch peaks: what a run takes on one machine, from a NumPy signal to NumPy peaks."""

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

#: The numbers of the runner's schedule that the model depends on.
_SCHEDULED = (
    "tile_rows chunk_samples sizes_per_octave alone_samples_host alone_samples_fused alone_samples_block "
    "least_block_bins least_blocks"
)
#: log2 of the first and the last knot, and their distance, in samples, rows and samples of a segment.
KNOTS = ((6.0, 24.0, 2.0), (0.0, 14.0, 2.0), (6.0, 14.0, 1.0))
#: k at which its slope adds nothing, and the octaves that one unit of it spans.
CENTRE_K, OCTAVES_OF_K = 16.0, 2.0
#: log2 of the rows between which that slope changes.
SLOPE_KNOTS = (0.0, 2.0, 6.0, 10.0, 13.0)
#: The octaves below the most samples that one processor works on alone, over which a correction may rise.
OCTAVES_BEFORE_SHARING = 2.0
#: Standard deviation of the logarithm of a coefficient that a micro-benchmark measured by itself: a run has other
#: sizes, in another state of the caches.
MICRO_LOG_SD = 1.0
#: The coefficients that micro-benchmarks measure.
MICRO_RATES = ("memory_bytes_per_ns", "copy_bytes_per_ns", "device_flop_per_ns", "topk_bin_ns", "topk_compare_ns")


@dataclasses.dataclass(frozen=True)
class WelchModel(LatencyModel):
    """Welch peaks on the host, or on a device by a fused program, block by block, or by a learned FFT.

    Every strategy but `learned` gives the same peaks. Facts are numbers of the runner's schedule, and of the learned
    models: for each of `learned_n_fft`, the operations of a segment's pruned program and the bins that are not masked.
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
    #: How programs are scheduled where a calibration does not say: as on two processors, without learned models.
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
        """Return which variants are candidates: learned runs with a model of their length, maxima where they select."""
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
        """Return what the weights of a variant multiply: a piecewise linear function of logarithms of sizes.

        They are the rises of samples, rows and segment length between knots, each from 0 at one knot to 1 at the next
        one, before the middle knot from -1 to 0, so that a correction stays level where nothing was timed; the rise
        towards the most samples that one processor works on alone, and the level beyond them; the slope in k; and the
        level. NumPy's arrays give NumPy's, in double precision: a fit compiles nothing for them.
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
        """Return batch and n_fft, `[n]` each: what validation leaves out together."""
        return [np.asarray(runs.inputs["batch"]), np.asarray(runs.inputs["n_fft"])]


WELCH = WelchModel()


def welch_micro_prior(
    rates: Mapping[str, float], prior: LatencyPrior[LatencyCoefficients] | None = None
) -> LatencyPrior[LatencyCoefficients]:
    """Return a prior with its own medians where a micro-benchmark measured a coefficient by itself.

    Args:
        rates: by the coefficients' names, any of `MICRO_RATES`. `memory_bytes_per_ns`: a copy beyond the caches,
            bytes read and written. `copy_bytes_per_ns`: from host to device. `device_flop_per_ns`: of transforms
            within a chunk, `2.5 n log2 n` operations each. `topk_bin_ns`, `topk_compare_ns`: of `heap_rates`. A
            rate that is not positive is noise, and says nothing.
        prior: of the rest; `WELCH`'s unless given.

    Raises:
        ValueError: another name.

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
    """Return what a bin and a comparison take a heap, by least squares of timings of the selection alone, `[n]`.

    Args:
        rows: of powers.
        bins: of a row.
        k: peaks of a row; several ratios to the bins tell the two apart.
        time_ns: of one selection, less launch and wait.
    """
    count, size = np.asarray(rows, float), np.asarray(bins, float)
    comparisons = np.asarray(heap_comparisons(jnp.asarray(size), jnp.asarray(k, float)))
    columns = np.stack([count * size, count * comparisons], -1)
    by_bin, by_comparison = np.linalg.lstsq(columns, np.asarray(time_ns, float), rcond=None)[0].tolist()
    return {"topk_bin_ns": by_bin, "topk_compare_ns": by_comparison}
