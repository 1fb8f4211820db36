"""The fits of a job: one sees all workloads, one never saw those that are held out and gives their errors."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax import Calibration, LatencyPrior, transferred_prior, typical_prior
from rlxjax._calibration_file import read_calibration_file
from rlxjax._fit import MIN_TIMINGS, FitResult, predicted_ns
from rlxjax._latency import LatencyCoefficients
from rlxjax._latency_formulas import TRANSFORM_BYTES_PER_SAMPLE, fft_flop, maxima_ns, top_k_ns
from rlxjax._learned_latency import LearnedLatencyCoefficients, fit_learned
from rlxjax._posterior import LEAST_SPREAD, LatencyEstimate, PosteriorFit, fit_posterior

from .measure import DEEP_SELECTION, LONG_TRANSFORM, SHORT_TRANSFORM, WIDE_SELECTION, MicroRates
from .samples import timings_of
from .validate import estimates, learned_predictions_ns, sizes_of, works_of
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
        shared: the machine's, fitted to all workloads that run no model.
        learned: that of the pruned transform, fitted to the workloads that do; None if too few do.
        estimate: of each workload by these; NaN where too few run a model.
        blind: the same by fits without the held-out workloads.
        blind_terms_ns: the blind fit's prediction without the correction, `[cells]`.
        blind_converged: whether that fit did.
    """

    shared: PosteriorFit
    learned: FitResult[LearnedLatencyCoefficients] | None
    estimate: LatencyEstimate
    blind: LatencyEstimate
    blind_terms_ns: np.ndarray
    blind_converged: bool


def check_fittable(cells: Sequence[Cell], samples_path: FilePath) -> None:
    """Check that runs without a model make a fit.

    Raises:
        ValueError: too few of them, or all of one batch and n_fft; one line that says what is missing.
    """
    kept = f"the samples are in {samples_path}: measure more with `rlxjax calibrate --resume`"
    if len(cells) < MIN_TIMINGS:
        raise ValueError(
            f"only {len(cells)} workloads that run no model were measured, too few to fit, which takes at "
            f"least {MIN_TIMINGS}; {kept}"
        )
    if len(sizes := {(cell.batch, cell.n_fft) for cell in cells}) == 1:
        batch, n_fft = sizes.pop()
        raise ValueError(
            f"all {len(cells)} workloads measured have batch {batch} and n_fft {n_fft}: a fit needs others "
            f"as well; {kept}"
        )


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
    shared, learned, found, terms_ns = _fit(cells, measured_ns, everything, prior, models)
    if seen.all():
        return Fitted(shared, learned, found, found, terms_ns, shared.terms.converged)
    blind, _, blind_found, blind_terms_ns = _fit(cells, measured_ns, seen.astype(float), prior, models)
    return Fitted(shared, learned, found, blind_found, blind_terms_ns, blind.terms.converged)


def _fit(
    cells: Sequence[Cell],
    measured_ns: np.ndarray,
    weights: np.ndarray,
    prior: LatencyPrior[LatencyCoefficients],
    models: Models,
) -> tuple[PosteriorFit, FitResult[LearnedLatencyCoefficients] | None, LatencyEstimate, np.ndarray]:
    """Return the machine's fit, the pruned transform's on top of it, and what both say of the cells."""
    is_learned = np.array([runs_model(cell) for cell in cells])
    shared_cells = [cell for cell in cells if not runs_model(cell)]
    learned_cells = [cell for cell in cells if runs_model(cell)]
    timings = timings_of(shared_cells, measured_ns[~is_learned])
    shared = fit_posterior(timings, prior, weights[~is_learned])
    found = estimates(shared.posterior, shared_cells)
    terms_ns = np.full(len(cells), np.nan)
    terms_ns[~is_learned] = predicted_ns(shared.terms.coefficients, timings)
    if not learned_cells:
        return shared, None, found, terms_ns
    learned, learned_ns, spread = None, np.full(len(learned_cells), np.nan), np.nan
    if np.sum(weights[is_learned] > 0) >= MIN_TIMINGS:
        flop, live_bins = works_of(learned_cells, models)
        sizes, times_ns = sizes_of(learned_cells), measured_ns[is_learned]
        coefficients = shared.terms.coefficients
        learned = fit_learned(coefficients, flop, live_bins, sizes, times_ns, weights[is_learned])
        learned_ns = learned_predictions_ns(learned.coefficients, coefficients, learned_cells, models)
        spread = learned_spread(learned)
    terms_ns[is_learned] = learned_ns
    time_ns, spreads = np.full(len(cells), np.nan), np.full(len(cells), spread)
    scores = np.zeros((len(cells), found.scores.shape[1]))
    for whole, part in ((time_ns, found.time_ns), (scores, found.scores), (spreads, found.spread)):
        whole[~is_learned] = part
    time_ns[is_learned] = learned_ns
    whole = LatencyEstimate(*map(jnp.asarray, (time_ns, scores, spreads)))
    return shared, learned, whole, terms_ns


def learned_spread(learned: FitResult[LearnedLatencyCoefficients]) -> float:
    """Return the standard deviation of the logarithm of a learned run's time around its prediction."""
    return max(LEAST_SPREAD, learned.noise_sd)


def prior_from(file: FilePath) -> tuple[LatencyPrior[LatencyCoefficients], str]:
    """Return what a calibration file, of any machine, says of this one, and the platform that it is of.

    Raises:
        CalibrationFileError: a file that is no calibration.
    """
    content = read_calibration_file(file)
    return transferred_prior(Calibration.from_file(content).posterior), content.fingerprint.platform


def micro_prior(
    rates: MicroRates, prior: LatencyPrior[LatencyCoefficients] | None = None
) -> LatencyPrior[LatencyCoefficients]:
    """Return a prior with its own values where a micro-benchmark measured a coefficient by itself.

    Args:
        rates: what micro-benchmarks say.
        prior: of the rest; the wide one unless given.
    """
    waits = {"dispatch_ns": rates.dispatch_ns, "roundtrip_ns": rates.roundtrip_ns}
    transfers = {
        "far_bytes_per_ns": rates.memory_bytes_per_ns,
        "upload_bytes_per_ns": rates.upload_bytes_per_ns,
        "readback_bytes_per_ns": rates.readback_bytes_per_ns,
    }
    prior = typical_prior() if prior is None else prior
    selections = _selection_rates(rates, prior.median)
    transforms = _transform_rates(rates)
    log_sds = dict.fromkeys(waits, MICRO_LOG_SD)
    log_sds |= dict.fromkeys(transfers | selections | transforms, TRANSFER_LOG_SD)
    if "row_far_bytes_per_ns" in transforms:
        log_sds["row_far_bytes_per_ns"] = MICRO_LOG_SD
    return prior._replace(
        median=dataclasses.replace(prior.median, **waits, **transfers, **selections, **transforms),
        log_sd=dataclasses.replace(prior.log_sd, **log_sds),
    )


def _transform_rates(rates: MicroRates) -> dict[str, float]:
    """Return what a transform costs, and on top where its rows are long: of the short and the long one."""
    if not rates.transform_ns:
        return {}
    short_ns, long_ns = np.array(rates.transform_ns) - rates.dispatch_ns - rates.roundtrip_ns
    (rows, n_fft), long_samples = SHORT_TRANSFORM, np.prod(LONG_TRANSFORM)
    # In the cache, a sample takes as long in a long row as in a short one: longer rows make fewer passes.
    on_top_ns = long_ns - short_ns * long_samples / (rows * n_fft)
    # A row is two segments.
    found = {
        "device_flop_per_ns": float(fft_flop(jnp.array(2.0 * rows), jnp.array(float(n_fft)))) / short_ns,
        "row_far_bytes_per_ns": 2.0 * TRANSFORM_BYTES_PER_SAMPLE * long_samples / on_top_ns,
    }
    # A time may be all launch, or noise: what is no rate says nothing.
    return {name: float(value) for name, value in found.items() if value > 0}


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
        return np.array([float(maxima_ns(only, rows, float(bins), k)) for rows, bins, k in shapes])
    return np.array([float(top_k_ns(only, rows, bins, k)) for rows, bins, k in shapes])
