"""The fits of a job: one sees all workloads, one never saw those that are held out and gives their errors."""

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax import LatencyEstimate, LatencyPrior, PosteriorFit, Timings, fit_posterior, transferred_prior
from rlxjax.calibration import Calibration, read_calibration_file
from rlxjax.fit import COVERED, COVERED_SDS, MIN_TIMINGS, Facts, estimate, predicted_ns
from rlxjax.models import WELCH, fft_flop, heap_rates, welch_micro_prior

from .clock import Deadline
from .micro import DEEP_SELECTION, SHORT_TRANSFORM, WIDE_SELECTION, MicroRates
from .samples import SampleLog, timings_of
from .visits import noise_floor, quantile_ns
from .workloads import Cell, Grid

#: A campaign has enough once each strategy's held-out error, and the mean noise of its timings, are no larger; and
#: seconds between two fits that say so.
TARGET_ERROR, TARGET_NOISE, ASK_EVERY_S = 0.04, 0.02, 4.0


class Fitted(NamedTuple):
    """What the fits found.

    Attributes:
        whole: fitted to all workloads.
        estimate: of each workload by it, `[cells]`.
        blind: the same by a fit without the held-out workloads.
        blind_terms_ns: that fit's prediction without the correction, `[cells]`.
        blind_converged: whether that fit did.
    """

    whole: PosteriorFit
    estimate: LatencyEstimate
    blind: LatencyEstimate
    blind_terms_ns: np.ndarray
    blind_converged: bool


def check_fittable(cells: Sequence[Cell], samples_path: FilePath) -> None:
    """Check that workloads make a fit.

    Raises:
        ValueError: too few of them, or all of one batch and n_fft; one line that says what is missing.
    """
    kept = f"the samples are in {samples_path}: measure more with `rlxjax calibrate --resume`"
    if len(cells) < MIN_TIMINGS:
        raise ValueError(
            f"only {len(cells)} workloads were measured, too few to fit, which takes at least {MIN_TIMINGS}; {kept}"
        )
    if len(sizes := {(cell.batch, cell.n_fft) for cell in cells}) == 1:
        batch, n_fft = sizes.pop()
        raise ValueError(
            f"all {len(cells)} workloads measured have batch {batch} and n_fft {n_fft}: a fit needs others "
            f"as well; {kept}"
        )


def fit_twice(timings: Timings, seen: np.ndarray, prior: LatencyPrior, facts: Facts) -> Fitted:
    """Fit all timings, and again those that are seen.

    Args:
        timings: of the workloads, `[cells]`.
        seen: `[cells]`, whether the second fit sees a workload.
        prior: of the machine's coefficients.
        facts: how it schedules.
    """
    whole = fit_posterior(timings, prior, facts=facts)
    blind = whole if seen.all() else fit_posterior(timings, prior, seen.astype(float), facts)
    found, blind_found = (jax.tree.map(np.asarray, estimate(fit.posterior, timings.runs)) for fit in (whole, blind))
    terms_ns = jax.jit(predicted_ns)(blind.terms.coefficients, timings.runs, dict(facts))
    return Fitted(whole, found, blind_found, np.asarray(terms_ns), blind.terms.converged)


def widened(fitted: Fitted, timings: Timings, seen: np.ndarray) -> Fitted:
    """Return fits whose spread is large enough for intervals to hold what the blind one never saw.

    Args:
        fitted: by `fit_twice`.
        timings: of the workloads, `[cells]`.
        seen: `[cells]`, whether the blind fit saw a workload.
    """
    blind, variant = fitted.blind, np.asarray(timings.runs.variant)
    errors = np.log(np.asarray(timings.time_ns) / np.asarray(blind.time_ns))[~seen]
    known_sd = np.sqrt(np.sum(np.asarray(blind.scores) ** 2, -1))[~seen]
    posterior = fitted.whole.posterior
    spread = widened_spread(np.asarray(posterior.spread), variant[~seen], errors, known_sd)
    posterior = dataclasses.replace(posterior, spread=spread)
    return fitted._replace(
        whole=fitted.whole._replace(posterior=posterior),
        estimate=fitted.estimate._replace(spread=spread[variant]),
    )


def widened_spread(
    spread: np.ndarray,
    variant: np.ndarray,
    log_errors: np.ndarray,
    known_sd: np.ndarray,
) -> np.ndarray:
    """Return the spread of each variant with which intervals hold what was held out, `[variants]`; never a smaller one.

    Args:
        spread: of each variant, `[variants]`.
        variant: of the held-out runs, `[n]`.
        log_errors: of their predictions, `[n]`.
        known_sd: standard deviation of these without the spread, `[n]`.
    """
    wide = np.array(spread, float)
    needed = np.sqrt(np.maximum((np.abs(log_errors) / COVERED_SDS) ** 2 - known_sd**2, 0.0))
    for code in range(len(wide)):
        mine = needed[variant == code]
        if mine.size:
            place = math.ceil(COVERED * (mine.size + 1)) / mine.size
            wide[code] = max(wide[code], float(np.quantile(mine, min(place, 1.0))))
    return wide


class EnoughKnown:
    """Whether a campaign has reached its target, by fits of it so far."""

    def __init__(self, log: SampleLog, grid: Grid, prior: LatencyPrior, facts: Facts, deadline: Deadline):
        """Build from what the fits of the campaign take.

        Args:
            log: its samples.
            grid: says which workloads are held out.
            prior: of the machine.
            facts: how it schedules.
            deadline: of the measuring, the first half of which is never enough.
        """
        self._log, self._grid, self._prior, self._facts = log, grid, prior, facts
        self._ask_at_s = time.perf_counter() + deadline.left_s() / 2.0

    def __call__(self) -> bool:
        """Return whether every strategy's held-out error and noise are small enough; a fit every few seconds."""
        if time.perf_counter() < self._ask_at_s:
            return False
        cells, visits = self._log.cells, self._log.visits()
        seen = self._grid.seen(cells)
        if not MIN_TIMINGS <= seen.sum() < len(cells) or noise_floor(visits).mean() > TARGET_NOISE:
            return False
        measured_ns = quantile_ns(visits)
        fit = fit_posterior(timings_of(cells, measured_ns), self._prior, seen.astype(float), self._facts)
        errors = np.abs(np.asarray(estimate(fit.posterior, fit.runs).time_ns) / measured_ns - 1.0)
        names = np.array([cell.strategy for cell in cells])
        self._ask_at_s = time.perf_counter() + ASK_EVERY_S
        return all(errors[~seen & (names == name)].mean() <= TARGET_ERROR for name in set(names[~seen].tolist()))


def starting_prior(rates: MicroRates, known: LatencyPrior | None) -> LatencyPrior:
    """Return what a fit starts from: what other machines say, else what micro-benchmarks do."""
    return micro_prior(rates) if known is None else known


def prior_from(file: FilePath) -> tuple[LatencyPrior, str]:
    """Return what a calibration file, of any machine, says of this one, and the platform that it is of.

    Raises:
        CalibrationFileError: a file that is no calibration.
        ValueError: one that holds no Welch peaks.
    """
    content = read_calibration_file(file)
    calibrated = Calibration.from_file(content).of(WELCH.name)
    return transferred_prior(calibrated.posterior), content.models[WELCH.name].fingerprint.platform


def micro_prior(rates: MicroRates) -> LatencyPrior:
    """Return the model's own prior with other values where a micro-benchmark measured a coefficient by itself."""
    waits_ns = rates.dispatch_ns + rates.roundtrip_ns
    found = {"memory_bytes_per_ns": rates.memory_bytes_per_ns, "copy_bytes_per_ns": rates.upload_bytes_per_ns}
    if rates.transform_ns:
        rows, n_fft = SHORT_TRANSFORM  # a row is two segments
        found["device_flop_per_ns"] = (
            2 * rows * float(fft_flop(jnp.asarray(n_fft))) / (rates.transform_ns[0] - waits_ns)
        )
    if "top_k" in rates.selection_ns:
        times_ns = [time_ns - waits_ns for time_ns in rates.selection_ns["top_k"]]
        rows, bins, k = zip(WIDE_SELECTION, DEEP_SELECTION, strict=True)
        found |= heap_rates(rows, bins, k, times_ns)
    return welch_micro_prior(found)
