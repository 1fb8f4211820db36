"""The fits of a job: one sees all workloads, one never saw those that are held out and gives their errors."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from rlxjax import LatencyPrior, fit_latency, typical_prior
from rlxjax._fit import MIN_TIMINGS, FitResult
from rlxjax._latency import LatencyCoefficients
from rlxjax._latency_formulas import maxima_ns, top_k_ns
from rlxjax._learned_latency import LearnedLatencyCoefficients, fit_learned

from .measure import DEEP_SELECTION, WIDE_SELECTION, MicroRates
from .samples import timings_of
from .validate import learned_predictions_ns, predictions_ns, sizes_of, works_of
from .workloads import Cell, Models, runs_model

#: Standard deviation of the logarithm of a coefficient that a micro-benchmark measured by itself.
MICRO_LOG_SD = 0.3
#: The same for bandwidths and selections: a run has other sizes, in another state of the caches.
TRANSFER_LOG_SD = 1.0
#: The two coefficients of each form of selection that are told apart by a wide and a deep one.
MAXIMA_RATES, TOP_K_RATES = ("maxima_key_ns", "maxima_bin_ns"), ("topk_bin_ns", "topk_update_ns")


class Fitted(NamedTuple):
    """What the fits found.

    Attributes:
        shared: the machine's coefficients, fitted to all workloads that run no model.
        learned: those of the pruned transform, fitted to the workloads that do; None if too few do.
        predicted_ns: by these, `[cells]`; NaN where too few run a model.
        predicted_blind_ns: by the same fits without the held-out workloads, `[cells]`; NaN likewise.
    """

    shared: FitResult[LatencyCoefficients]
    learned: FitResult[LearnedLatencyCoefficients] | None
    predicted_ns: np.ndarray
    predicted_blind_ns: np.ndarray


def fit_twice(
    cells: Sequence[Cell],
    measured_ns: np.ndarray,
    seen: np.ndarray,
    prior: LatencyPrior[LatencyCoefficients],
    models: Models,
) -> Fitted:
    """Fit all workloads, and again those that are seen.

    Args:
        cells: the workloads.
        measured_ns: `[cells]`.
        seen: `[cells]`, whether the second fit sees a workload.
        prior: of the machine's coefficients.
        models: that learned cells run.
    """
    everything = np.ones(len(cells))
    shared, learned, predicted_ns = _fit(cells, measured_ns, everything, prior, models)
    if seen.all():
        return Fitted(shared, learned, predicted_ns, predicted_ns)
    *_, predicted_blind_ns = _fit(cells, measured_ns, seen.astype(float), prior, models)
    return Fitted(shared, learned, predicted_ns, predicted_blind_ns)


def _fit(
    cells: Sequence[Cell],
    measured_ns: np.ndarray,
    weights: np.ndarray,
    prior: LatencyPrior[LatencyCoefficients],
    models: Models,
) -> tuple[FitResult[LatencyCoefficients], FitResult[LearnedLatencyCoefficients] | None, np.ndarray]:
    """Return the machine's fit, the pruned transform's on top of it, and the predictions of both."""
    is_learned = np.array([runs_model(cell) for cell in cells])
    shared_cells = [cell for cell in cells if not runs_model(cell)]
    learned_cells = [cell for cell in cells if runs_model(cell)]
    timings = timings_of(shared_cells, measured_ns[~is_learned], jax.default_backend())
    shared = fit_latency(timings, prior, weights[~is_learned])
    predicted_ns = np.full(len(cells), np.nan)
    predicted_ns[~is_learned] = predictions_ns(shared.coefficients, shared_cells)
    if np.sum(weights[is_learned] > 0) < MIN_TIMINGS:
        return shared, None, predicted_ns
    flop, live_bins = works_of(learned_cells, models)
    sizes, times_ns = sizes_of(learned_cells), measured_ns[is_learned]
    learned = fit_learned(shared.coefficients, flop, live_bins, sizes, times_ns, weights[is_learned])
    predicted_ns[is_learned] = learned_predictions_ns(
        learned.coefficients, shared.coefficients, learned_cells, models
    )
    return shared, learned, predicted_ns


def micro_prior(rates: MicroRates) -> LatencyPrior:
    """Return the wide prior, narrowed where a micro-benchmark measured a coefficient by itself."""
    waits = {"dispatch_ns": rates.dispatch_ns, "roundtrip_ns": rates.roundtrip_ns}
    transfers = {
        "far_bytes_per_ns": rates.memory_bytes_per_ns,
        "upload_bytes_per_ns": rates.upload_bytes_per_ns,
        "readback_bytes_per_ns": rates.readback_bytes_per_ns,
    }
    prior = typical_prior()
    selections = _selection_rates(rates, prior.median)
    log_sds = dict.fromkeys(waits, MICRO_LOG_SD) | dict.fromkeys(transfers | selections, TRANSFER_LOG_SD)
    return LatencyPrior(
        dataclasses.replace(prior.median, **waits, **transfers, **selections),
        dataclasses.replace(prior.log_sd, **log_sds),
    )


def _selection_rates(rates: MicroRates, typical: LatencyCoefficients) -> dict[str, float]:
    """Return the coefficients of each form of selection: two micro-benchmarks give two equations."""
    found = {}
    for form, (first, second) in {"maxima": MAXIMA_RATES, "top_k": TOP_K_RATES}.items():
        if form not in rates.selection_ns:
            continue
        names = (first, second)
        columns = [_selection_column(form, name, typical) for name in names]
        matrix = np.stack(columns, axis=1)
        times_ns = np.array(rates.selection_ns[form]) - rates.dispatch_ns - rates.roundtrip_ns
        solved = np.linalg.solve(matrix, times_ns)
        # A time may be all launch, or noise: what is no rate says nothing.
        found |= {name: float(value) for name, value in zip(names, solved, strict=True) if value > 0}
    return found


def _selection_column(form: str, name: str, typical: LatencyCoefficients) -> np.ndarray:
    """Return what a unit of one coefficient adds to the wide and the deep selection, in ns."""
    only = jax.tree.map(lambda _: 0.0, typical)
    only = dataclasses.replace(only, **{name: 1.0})
    shapes = (WIDE_SELECTION, DEEP_SELECTION)
    if form == "maxima":
        return np.array([float(maxima_ns(only, rows, float(bins), k)[0]) for rows, bins, k in shapes])
    return np.array([float(top_k_ns(only, rows, bins, k)) for rows, bins, k in shapes])
