"""What users of Welch peaks call: predictions by path, timings, and priors, each a thin function over `WELCH`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpy.typing import ArrayLike

from rlxjax._checks import check_shapes, fields_of, is_traced
from rlxjax._numerics import namespace_of
from rlxjax._typing import Code, Nanoseconds, RealLike
from rlxjax.fit import Facts, LatencyPrior, Runs, Timings

from ._welch import WELCH
from ._welch_coefficients import LatencyCoefficients
from ._welch_terms import MAXIMA, TERMS, TOP_K, heap_comparisons

#: Names of paths and of the forms of the fused path's selection, in the order of their codes.
PATHS, SELECTIONS = ("host", "fused", "block", "learned"), ("maxima", "top_k")
#: Standard deviation of the logarithm of a coefficient that a micro-benchmark measured by itself: a run has other
#: sizes, in another state of the caches.
MICRO_LOG_SD = 1.0
#: The coefficients that micro-benchmarks measure.
MICRO_RATES = ("memory_bytes_per_ns", "copy_bytes_per_ns", "device_flop_per_ns", "topk_bin_ns", "topk_compare_ns")


def typical_prior() -> LatencyPrior[LatencyCoefficients]:
    """Return the prior that fits of Welch peaks start from: orders of magnitude of a present-day machine, wide.

    Examples:
        >>> typical_prior().median.launch_ns
        50000.0
    """
    return WELCH.prior


def latency_terms_ns(
    coefficients: LatencyCoefficients,
    path: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    n_segments: RealLike,
    selection: str | Code | None = None,
    facts: Facts | None = None,
) -> Mapping[str, Array]:
    """Return the predicted parts of one run's latency by name in ns, from a NumPy signal to NumPy peaks, `[*batch]`.

    Args:
        coefficients: of the machine.
        path: "host", "fused", "block" or "learned", or codes in this order.
        batch: rows; the device paths run whole chunks and `padded_batch` of the rest, which the gradient takes as
            `batch`.
        n_fft: samples of a segment.
        k: peaks of a row.
        n_segments: segments of a row.
        selection: how the fused path selects, "maxima" or "top_k", or codes in this order; the cheaper of the two
            unless given.
        facts: how the machine schedules, and its learned models; those of `WELCH` unless given.

    Every argument but the facts is a scalar or `[*batch]`.

    Raises:
        ValueError: an unknown path or selection, a size that cannot be, or shapes that do not broadcast.

    Examples:
        >>> terms = latency_terms_ns(typical_prior().median, "fused", 64, 256, 16, 2)
        >>> float(terms["launch_and_sync_ns"])
        50000.0
    """
    sizes = {"batch": batch, "n_fft": n_fft, "k": k, "n_segments": n_segments}
    coefficients.check("coefficients.")
    variants = [_variants(path, form) for form in (SELECTIONS if selection is None else [selection])]
    check_shapes(variant=variants[0], **sizes, **fields_of(coefficients))
    runs = [Runs.checked(WELCH, variant, **sizes) for variant in variants]
    found = _terms_of_cheapest(coefficients, runs, dict(WELCH.facts if facts is None else facts))
    return {name: found[name] for name in TERMS}


def predict_latency_ns(
    coefficients: LatencyCoefficients,
    path: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    n_segments: RealLike,
    selection: str | Code | None = None,
    facts: Facts | None = None,
) -> Nanoseconds:
    """Return the predicted latency of one run in ns, `[*batch]`; arguments and errors as of `latency_terms_ns`.

    Examples:
        >>> bool(predict_latency_ns(typical_prior().median, "fused", 64, 256, 16, 2) > 5e4)
        True
    """
    return sum_of(latency_terms_ns(coefficients, path, batch, n_fft, k, n_segments, selection, facts))


def welch_timings(
    *,
    path: str | Sequence[str] | Code,
    batch: ArrayLike,
    n_fft: ArrayLike,
    k: ArrayLike,
    n_segments: ArrayLike,
    time_ns: ArrayLike,
    selection: str | Sequence[str] | Code | None = None,
) -> Timings:
    """Return timings of Welch peaks from lists or arrays `[n]` that a fit takes.

    Args:
        path: names, or codes in the order of `PATHS`; one is that of all.
        batch: rows.
        n_fft: samples of a segment.
        k: peaks of a row.
        n_segments: segments of a row.
        time_ns: of one run.
        selection: how fused runs selected, "maxima" unless given.

    Raises:
        ValueError: as of `Timings.checked`, or an unknown path or selection.

    Examples:
        >>> sizes = {"batch": [8, 64], "n_fft": [256, 256], "k": [16, 16], "n_segments": [2, 2]}
        >>> welch_timings(path="fused", **sizes, time_ns=[1e5, 2e5]).time_ns.shape
        (2,)
    """
    variant = _variants(path, "maxima" if selection is None else selection)
    return Timings.checked(
        WELCH, variant=variant, batch=batch, n_fft=n_fft, k=k, n_segments=n_segments, time_ns=time_ns
    )


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


def sum_of(terms: Mapping[str, Any]) -> Array:
    """Return the sum of a prediction's parts."""
    first, *others = terms.values()
    return sum(others, start=jnp.asarray(first))


@jax.jit
def _terms_of_cheapest(coefficients, runs: Sequence[Runs], facts: Facts) -> dict[str, Array]:
    """Return the terms of the variants that take the least time; of equal ones, those of the first."""
    found, *others = (WELCH.terms_ns(coefficients, own.together(), facts) for own in runs)
    for terms in others:
        is_cheaper = jnp.asarray(sum_of(terms) < sum_of(found))
        found = {name: jnp.where(is_cheaper, terms[name], part) for name, part in found.items()}
    return dict(zip(found, jnp.broadcast_arrays(*found.values()), strict=True))


def _variants(path: str | Sequence[str] | Code, selection: str | Sequence[str] | Code) -> Code:
    """Return the places of runs of a path with a form of the selection in `WELCH.variants`."""
    paths, forms = _codes("path", path, PATHS), _codes("selection", selection, SELECTIONS)
    xp = namespace_of(paths, forms)
    fused = xp.where(xp.asarray(forms) == 0, MAXIMA, TOP_K)
    return xp.where(xp.asarray(paths) == 0, 0, xp.where(xp.asarray(paths) == 1, fused, xp.asarray(paths) + 1))


def _codes(what: str, value: str | Sequence[str] | Code, known: tuple[str, ...]) -> Code:
    if is_traced(value):
        return value  # pyright: ignore[reportReturnType]
    array = np.asarray(value)
    if array.dtype.kind in "UO":
        names = [str(name) for name in array.flat]
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"{what}: expected one of {', '.join(known)}, got {unknown[0]!r}")
        return np.array([known.index(name) for name in names], np.int32).reshape(array.shape)
    if array.dtype.kind not in "iu" or (array.size and not 0 <= array.min() <= array.max() < len(known)):
        raise ValueError(f"{what}: expected names, or codes from 0 to {len(known) - 1}, got {value}")
    return array
