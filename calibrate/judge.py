"""What a fit is worth: the errors on what it never saw, the noise of its timings, and whether that is good enough."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlxjax import Timings, fit_posterior
from rlxjax.calibration import CalibratedModel, ErrorSummary, Pace
from rlxjax.fit import (
    COVERED,
    COVERED_SDS,
    MIN_TIMINGS,
    Cell,
    LatencyEstimate,
    LatencyPrior,
    PosteriorFit,
    Suite,
    cell_runs,
    estimate,
    predicted_ns,
)

from .samples import SampleLog, noise_floor, quantile_ns
from .terminal import Deadline

#: A campaign has enough once each group's held-out error, and the mean noise of its timings, are no larger; and
#: seconds between two fits that say so.
TARGET_ERROR, TARGET_NOISE, ASK_EVERY_S = 0.04, 0.02, 4.0
#: A time so many times longer or shorter than its prediction is an outlier.
OUTLIER_FACTOR = 3.0
#: A calibration is ready if the noise of its timings is no larger, and no less of what was held out lies within its
#: interval of 90 %, unless so few were held out that chance tells.
MOST_NOISE, LEAST_COVERED, FEW_HELD_OUT = 0.08, 0.75, 10
#: Processors that others may use, and the least speed, in units of the usual one.
MOST_OTHERS, LEAST_PACE = 0.25, 0.85
#: The headings of a table of errors, and the fields of a summary below them.
ERROR_COLUMNS = {
    "noise floor": "noise_floor",
    "seen": "fit",
    "held out": "held_out",
    "terms alone": "terms_alone",
    "in interval of 90 %": "covered",
    "cells held out": "held_out_cells",
}


class Verdict(NamedTuple):
    """Whether a calibration is good enough: what it is worth, and what is not good enough and what to do about it."""

    said: list[str]
    cautions: list[str]

    @property
    def is_ready(self) -> bool:
        """Whether nothing is to be said against it."""
        return not self.cautions


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The fit of all timings, what it says of each cell, and its errors by group, of a fit without what is held out.

    `noise` is relative, NaN where nothing is known; `blind_converged`: whether that other fit did; `all_seen`: whether
    nothing could be held out.
    """

    cells: list[Cell]
    measured_ns: np.ndarray
    noise: np.ndarray
    whole: PosteriorFit
    estimate: LatencyEstimate
    errors: dict[str, ErrorSummary]
    blind_converged: bool
    all_seen: bool

    @property
    def noise_level(self) -> float | None:
        """The mean noise; None where a single round says nothing of it."""
        return None if np.isnan(self.noise).any() else float(self.noise.mean())

    @property
    def calibrated(self) -> CalibratedModel:
        """The model by this fit, where it was timed."""
        return CalibratedModel(self.whole.posterior, {}, {}, self.whole.runs.hull())

    def outliers(self) -> list[str]:
        """Return a phrase for each cell whose time is far off its prediction, the farthest first."""
        ratios = self.measured_ns / np.asarray(self.estimate.time_ns)
        distances = np.nan_to_num(np.abs(np.log(ratios)))
        return [
            f"{self.cells[place].name} took {ratios[place]:.3g} times its prediction"
            for place in np.argsort(-distances, kind="stable")
            if distances[place] > np.log(OUTLIER_FACTOR)
        ]


def timings_of(suite: Suite, cells: Sequence[Cell], measured_ns: np.ndarray) -> Timings:
    """Return the timings `[cells]` that a fit takes."""
    runs = cell_runs(suite.model, cells)
    return Timings.checked(suite.model, variant=runs.variant, time_ns=measured_ns, **runs.inputs)


def fitted(suite: Suite, log: SampleLog, prior: LatencyPrior) -> Fitted:
    """Fit all timings, and again those that are not held out, whose fit gives the errors and the spread of the others.

    Raises:
        ValueError: too few cells, or all with the same inputs.
    """
    cells, visits = log.timed()
    cells = list(suite.kept(cells)) if cells else []
    if len(cells) < MIN_TIMINGS:
        raise ValueError(f"{len(cells)} cells were measured, too few to fit, which takes at least {MIN_TIMINGS}")
    if len({tuple(cell.inputs.items()) for cell in cells}) == 1:
        raise ValueError(f"all {len(cells)} cells measured have the same inputs: a fit needs others as well")
    measured_ns, noise, facts = quantile_ns(visits), noise_floor(visits), log.facts
    seen = np.array([not cell.held_out for cell in cells])
    all_seen = not MIN_TIMINGS <= seen.sum() < len(cells)
    seen |= all_seen
    timings = timings_of(suite, cells, measured_ns)
    whole = fit_posterior(timings, prior, facts=facts)
    blind = whole if all_seen else fit_posterior(timings, prior, seen.astype(float), facts)
    by_whole, by_blind = (jax.tree.map(np.asarray, estimate(fit.posterior, timings.runs)) for fit in (whole, blind))
    terms_ns = np.asarray(jax.jit(predicted_ns)(blind.terms.coefficients, timings.runs, dict(facts)))
    errors = np.log(measured_ns / by_blind.time_ns)
    known_sd, variant = np.sqrt(np.sum(by_blind.scores**2, -1)), np.asarray(timings.runs.variant)
    spread = widened_spread(np.asarray(whole.posterior.spread), variant[~seen], errors[~seen], known_sd[~seen])
    return Fitted(
        cells,
        measured_ns,
        noise,
        whole._replace(posterior=dataclasses.replace(whole.posterior, spread=spread)),
        by_whole._replace(spread=spread[variant]),
        error_summaries(cells, measured_ns, by_blind, terms_ns, noise, seen),
        bool(blind.terms.converged),
        all_seen,
    )


def widened_spread(spread: np.ndarray, variant: np.ndarray, log_errors: np.ndarray, known_sd: np.ndarray) -> np.ndarray:
    """Return the spread of each variant with which intervals hold what was held out, `[variants]`; never a smaller one.

    Of the held-out runs are given, `[n]`: variants, errors of their predictions, standard deviations of these without
    the spread.
    """
    wide = np.array(spread, float)
    needed = np.sqrt(np.maximum((np.abs(log_errors) / COVERED_SDS) ** 2 - known_sd**2, 0.0))
    for code in np.unique(variant):
        mine = needed[variant == code]
        place = math.ceil(COVERED * (mine.size + 1)) / mine.size
        wide[code] = max(wide[code], float(np.quantile(mine, min(place, 1.0))))
    return wide


def error_summaries(
    cells: Sequence[Cell],
    measured_ns: np.ndarray,
    blind: LatencyEstimate,
    blind_terms_ns: np.ndarray,
    noise: np.ndarray,
    seen: np.ndarray,
) -> dict[str, ErrorSummary]:
    """Return per group the mean absolute relative error where a fit saw the cell, and where not, of columns `[cells]`.

    `blind` is what the fit predicts, `blind_terms_ns` what its terms alone do; `noise` is that of the timings.
    """
    groups = np.array([cell.group for cell in cells])
    errors, terms_errors = (np.abs(times_ns / measured_ns - 1.0) for times_ns in (blind.time_ns, blind_terms_ns))
    covered = np.abs(np.log(measured_ns / blind.time_ns)) <= COVERED_SDS * np.asarray(blind.log_sd())

    def mean(values: np.ndarray, which: np.ndarray) -> float | None:
        found = float(np.mean(values[which])) if which.any() else np.nan
        return None if np.isnan(found) else found

    summaries = {}
    for group in dict.fromkeys(groups.tolist()):
        mine = groups == group
        out = mine & ~seen
        summaries[group] = ErrorSummary(
            fit=mean(errors, mine & seen),
            held_out=mean(errors, out),
            terms_alone=mean(terms_errors, out),
            covered=mean(covered, out),
            held_out_cells=int(out.sum()),
            noise_floor=mean(noise, mine),
        )
    return summaries


def enough_known(suite: Suite, log: SampleLog, prior: LatencyPrior, deadline: Deadline) -> Callable[[], bool]:
    """Return what says whether a campaign may end: every group's held-out error and the noise are small already.

    The first half of the time is never enough; then a fit every few seconds says.
    """
    ask_at_s = time.perf_counter() + deadline.left_s() / 2.0

    def is_enough() -> bool:
        nonlocal ask_at_s
        if time.perf_counter() < ask_at_s:
            return False
        cells, visits = log.timed()
        seen = np.array([not cell.held_out for cell in cells])
        if not MIN_TIMINGS <= seen.sum() < len(cells) or not noise_floor(visits).mean() <= TARGET_NOISE:
            return False
        measured_ns = quantile_ns(visits)
        fit = fit_posterior(timings_of(suite, cells, measured_ns), prior, seen.astype(float), log.facts)
        errors = np.abs(np.asarray(estimate(fit.posterior, fit.runs).time_ns) / measured_ns - 1.0)
        groups = np.array([cell.group for cell in cells])
        ask_at_s = time.perf_counter() + ASK_EVERY_S
        return all(errors[~seen & (groups == one)].mean() <= TARGET_ERROR for one in set(groups[~seen].tolist()))

    return is_enough


def verdict_on(summaries: Mapping[str, ErrorSummary], noise_level: float | None, most_error: float) -> Verdict:
    """Return the verdict on the fit of one model by its errors by group; `most_error` is good enough."""
    again = "run `rlxjax calibrate` again, on an idle machine or with a larger --budget"
    out = [summary for summary in summaries.values() if summary.held_out is not None and summary.held_out_cells]
    if not out:
        nothing = "No cells were held out, so that nothing says how good predictions are"
        return Verdict([], [f"{nothing}: hold some out in the suite, or {again}."])
    cells = np.array([summary.held_out_cells for summary in out], float)
    error = float(cells @ [summary.held_out for summary in out] / cells.sum())
    covered = float(cells @ [summary.covered or 0.0 for summary in out] / cells.sum())
    noise = "is not known" if noise_level is None else f"is {100 * noise_level:.0f} %"
    cautions = {
        f"Predictions are off by {100 * error:.0f} % on cells that the fit never saw": error > most_error,
        f"Intervals of 90 % held {100 * covered:.0f} % of the cells that the fit never saw, and were widened": (
            cells.sum() >= FEW_HELD_OUT and covered < LEAST_COVERED
        ),
        f"The noise of the timings {noise}": noise_level is None or noise_level > MOST_NOISE,
    }
    said = [f"Typical error {100 * error:.0f} % on cells it never saw."]
    return Verdict(said, [f"{caution}: {again}." for caution, is_so in cautions.items() if is_so])


def said_of_pace(pace: Pace, processors: int) -> Verdict:
    """Return what is to be said of the machine's speed while it was timed."""
    found = Verdict([], [])
    if pace.usual is not None:
        share = f"This machine ran at {100 * pace.usual:.0f} % of its usual speed"
        if pace.usual < LEAST_PACE:
            found.cautions.append(f"{share}: times are for that pace.")
        else:
            found.said.append(f"{share}.")
    if pace.others is not None and pace.others > MOST_OTHERS:
        found.cautions.append(
            f"Other programs kept {pace.others:.1f} of {processors} processors busy: times are for that load; run "
            "`rlxjax calibrate` again once they have ended."
        )
    return found


def what_pays(calibrated: CalibratedModel, inputs: Mapping[str, float]) -> list[str]:
    """Return a sentence on the sizes from which the second strategy of a model, if any, is faster than the first.

    Of the inputs of a run in the middle of what was measured the first one varies, over its domain.
    """
    if len(calibrated.strategies) < 2:
        return []
    along, *others = inputs
    low, high = calibrated.domain[along]
    sizes = np.unique(np.round(np.geomspace(max(low, 1.0), high, 200)))
    kept, fused, *_ = calibrated.strategies
    given: dict[str, Any] = {name: inputs[name] for name in others}
    at = "".join(f" {name} {given[name]:g}" for name in others if name in calibrated.model.inputs)
    pays = np.asarray(calibrated.decide(**{along: sizes}, **given).margin_ns) > 0
    if pays.all() or not pays.any():
        return [f"{fused if pays.all() else kept} is the faster one at every {along}, at{at}."]
    if pays[-1]:
        return [f"{fused} pays from {along} {sizes[np.flatnonzero(~pays).max() + 1]:,.0f} up, at{at}."]
    return [f"{fused} pays from {along} {sizes[pays.argmax()]:,.0f} on, at{at}, but not at the largest ones."]
