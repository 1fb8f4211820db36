"""The fits of a job: one sees all workloads, one never saw those that are held out and gives their errors."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlxjax import LatencyPrior, fit_latency, typical_prior
from rlxjax._fit import MIN_TIMINGS, FitResult
from rlxjax._latency import LatencyCoefficients
from rlxjax._learned_latency import LearnedLatencyCoefficients, fit_learned
from rlxjax.welch import Path

from .measure import MicroRates
from .samples import timings_of
from .validate import learned_predictions_ns, predictions_ns, sizes_of, works_of
from .workloads import Cell, Models

#: Standard deviation of the logarithm of a coefficient that a micro-benchmark measured by itself.
MICRO_LOG_SD = 0.3
#: The same for bandwidths: a run moves other sizes, in another state of the caches.
TRANSFER_LOG_SD = 1.0


class Fitted(NamedTuple):
    """What the fits found.

    Attributes:
        shared: the machine's coefficients, fitted to all workloads that run no model.
        learned: those of the pruned transform, fitted to the workloads that do; None if too few do.
        predicted_ns: by these, `[cells]`.
        predicted_blind_ns: by the same fits without the held-out workloads, `[cells]`.
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
    is_learned = np.array([cell.path is Path.LEARNED for cell in cells])
    shared_cells = [cell for cell in cells if cell.path is not Path.LEARNED]
    learned_cells = [cell for cell in cells if cell.path is Path.LEARNED]
    timings = timings_of(shared_cells, measured_ns[~is_learned])
    results, predictions = [], []
    for weights in (np.ones(len(cells)), seen.astype(float)):
        if results and seen.all():
            results, predictions = results * 2, predictions * 2
            break
        shared = fit_latency(timings, prior, weights[~is_learned])
        predicted = np.full(len(cells), np.nan)
        predicted[~is_learned] = predictions_ns(shared.coefficients, shared_cells)
        learned = None
        if np.sum(weights[is_learned] > 0) >= MIN_TIMINGS:
            flop, live_bins = works_of(learned_cells, models)
            learned = fit_learned(
                shared.coefficients,
                flop,
                live_bins,
                sizes_of(learned_cells),
                measured_ns[is_learned],
                weights[is_learned],
            )
            own = learned.coefficients
            predicted[is_learned] = learned_predictions_ns(own, shared.coefficients, learned_cells, models)
        results.append((shared, learned))
        predictions.append(predicted)
    return Fitted(*results[0], *predictions)


def micro_prior(rates: MicroRates) -> LatencyPrior:
    """Return the wide prior, narrowed where a micro-benchmark measured a coefficient by itself."""
    waits = {"dispatch_ns": rates.dispatch_ns, "roundtrip_ns": rates.roundtrip_ns}
    transfers = {
        "far_bytes_per_ns": rates.memory_bytes_per_ns,
        "upload_bytes_per_ns": rates.upload_bytes_per_ns,
        "readback_bytes_per_ns": rates.readback_bytes_per_ns,
    }
    prior = typical_prior()
    log_sds = dict.fromkeys(waits, MICRO_LOG_SD) | dict.fromkeys(transfers, TRANSFER_LOG_SD)
    return LatencyPrior(
        dataclasses.replace(prior.median, **waits, **transfers), dataclasses.replace(prior.log_sd, **log_sds)
    )
