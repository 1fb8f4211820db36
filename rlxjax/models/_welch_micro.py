"""What micro-benchmarks say of the coefficients of Welch peaks before any run is timed."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from rlxjax.fit import LatencyPrior

from ._welch import WELCH
from ._welch_coefficients import LatencyCoefficients
from ._welch_terms import heap_comparisons

#: Standard deviation of the logarithm of a coefficient that a micro-benchmark measured by itself: a run has other
#: sizes, in another state of the caches.
MICRO_LOG_SD = 1.0
#: The coefficients that micro-benchmarks measure.
MICRO_RATES = ("memory_bytes_per_ns", "copy_bytes_per_ns", "device_flop_per_ns", "topk_bin_ns", "topk_compare_ns")


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
    columns = np.stack(
        [count * size, count * np.asarray(heap_comparisons(jnp.asarray(size), jnp.asarray(k, float)))], -1
    )
    by_bin, by_comparison = np.linalg.lstsq(columns, np.asarray(time_ns, float), rcond=None)[0].tolist()
    return {"topk_bin_ns": by_bin, "topk_compare_ns": by_comparison}
