"""The quality of a fit: the errors on held-out cells, the noise of the timings, the verdict, and the printed result."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from rlxjax import Timings, calibration, fit_posterior
from rlxjax.calibration import CalibratedModel, ErrorSummary, ModelSection
from rlxjax.fit import (
    COVERED,
    COVERED_SDS,
    MIN_TIMINGS,
    Cell,
    Estimate,
    LatencyPrior,
    PosteriorFit,
    Runs,
    Suite,
    estimate,
    predicted_ns,
)
from rlxjax.units import number_text, time_text

from .measure import by_work
from .samples import SampleLog, noise_floor, quantile_ns
from .terminal import Deadline, Row, counted, print_rows, say

#: A campaign ends early if each group's held-out error and the mean noise are this small; seconds between checks.
TARGET_ERROR, TARGET_NOISE, ASK_EVERY_S = 0.04, 0.02, 4.0
#: A cell is an outlier if its time differs from its prediction by more than this factor.
OUTLIER_FACTOR = 3.0
#: For a ready calibration: the largest noise, the least share of held-out cells inside their 90 % intervals, and the
#: least number of held-out cells for which that share is judged.
MOST_NOISE, LEAST_COVERED, FEW_HELD_OUT = 0.08, 0.75, 10
#: The most processors that other programs may use; the machine's least speed relative to its fastest calibration.
MOST_OTHERS, LEAST_PACE = 0.25, 0.85
#: A fit is worse if it has less than this share of a rival's visits or held-out cells, or intervals this much wider.
LEAST_SHARE, MOST_WIDER = 1.0 / 3.0, 1.25
#: The largest number of cells that a sentence names, and of works that a table shows.
SKIPPED_SHOWN, WORKS_SHOWN = 4, 4
#: The headings of the table of errors, and for each heading the field of a summary.
ERRORS = {"noise floor (%)": "noise_floor", "seen (%)": "fit", "held out (%)": "held_out"}
ERRORS |= {"terms alone (%)": "terms_alone", "in 90 % interval (%)": "covered", "cells held out": "held_out_cells"}


class Verdict(NamedTuple):
    """Sentences about the quality of a calibration, and cautions that say what to do."""

    said: list[str]
    cautions: list[str]

    @property
    def is_ready(self) -> bool:
        return not self.cautions


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A fit of all timings, each cell's estimate, and each group's errors from a second fit without held-out cells."""

    cells: list[Cell]
    measured_ns: np.ndarray
    noise: np.ndarray
    whole: PosteriorFit
    estimate: Estimate
    errors: dict[str, ErrorSummary]
    blind_converged: bool
    all_seen: bool

    @property
    def noise_level(self) -> float | None:
        """The mean noise of the cells; None after a single round."""
        return None if np.isnan(self.noise).any() else float(self.noise.mean())

    @property
    def calibrated(self) -> CalibratedModel:
        return CalibratedModel(self.whole.posterior, {}, {}, self.whole.runs.hull())

    def outliers(self) -> list[str]:
        """Return a phrase for each cell whose time is far from its prediction; the farthest cell comes first."""
        ratios = self.measured_ns / np.asarray(self.estimate.time_ns)
        distances = np.nan_to_num(np.abs(np.log(ratios)))
        return [
            f"{self.cells[place].name} took {ratios[place]:.3g} times its prediction"
            for place in np.argsort(-distances, kind="stable")
            if distances[place] > np.log(OUTLIER_FACTOR)
        ]


def timings_of(suite: Suite, cells: Sequence[Cell], measured_ns: np.ndarray) -> Timings:
    return Timings(suite.runs(cells), measured_ns)


def fitted(suite: Suite, log: SampleLog, prior: LatencyPrior) -> Fitted:
    """Fit all timings. A second fit, without the held-out cells, gives their errors and the spread of new runs."""
    cells, visits = log.timed()
    if len(cells) < MIN_TIMINGS:
        raise ValueError(f"expected at least {MIN_TIMINGS} measured cells for a fit, got {len(cells)}")
    runs = suite.runs(cells)
    columns = *runs.inputs.values(), *runs.kernels.values()
    if not any(np.any(column != column[:1]) for column in columns):
        raise ValueError(f"expected cells with different inputs for a fit, got {len(cells)} with the same inputs")
    measured_ns, noise, facts = quantile_ns(visits), noise_floor(visits), log.facts
    seen = np.array([not cell.held_out for cell in cells])
    all_seen = not MIN_TIMINGS <= seen.sum() < len(cells)
    seen |= all_seen
    timings = Timings(runs, measured_ns)
    whole = fit_posterior(timings, prior, facts=facts)
    blind = whole if all_seen else fit_posterior(timings, prior, seen.astype(float), facts)
    by_whole, by_blind = (jax.tree.map(np.asarray, estimate(one.posterior, timings.runs)) for one in (whole, blind))
    terms_ns = np.asarray(jax.jit(predicted_ns)(blind.terms.coefficients, timings.runs, dict(facts)))
    errors = np.log(measured_ns / by_blind.time_ns)
    known_sd, variant = np.sqrt(np.sum(by_blind.scores**2, -1)), np.asarray(timings.runs.variant)
    own = np.asarray(whole.posterior.spread)
    scatter = np.broadcast_to(np.asarray(suite.model.scatter(timings.runs, facts)), variant.shape)
    spread = widened_spread(own, variant[~seen], (errors / scatter)[~seen], (known_sd / scatter)[~seen])
    whole = whole._replace(posterior=dataclasses.replace(whole.posterior, spread=spread))
    by_whole = by_whole._replace(spread=spread[variant] * scatter)
    summaries = error_summaries(cells, measured_ns, by_blind, terms_ns, noise, seen)
    return Fitted(cells, measured_ns, noise, whole, by_whole, summaries, bool(blind.terms.converged), all_seen)


def widened_spread(spread: np.ndarray, variant: np.ndarray, log_errors: np.ndarray, known_sd: np.ndarray) -> np.ndarray:
    """Return each variant's spread, `[n]`, widened so that its 90 % intervals contain 90 % of its held-out runs."""
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
    blind: Estimate,
    blind_terms_ns: np.ndarray,
    noise: np.ndarray,
    seen: np.ndarray,
) -> dict[str, ErrorSummary]:
    """Return each group's mean absolute relative errors, on seen and on held-out cells. Each array is `[cells]`."""
    groups = np.array([cell.group for cell in cells])
    errors, terms_errors = (np.abs(times_ns / measured_ns - 1.0) for times_ns in (blind.time_ns, blind_terms_ns))
    covered = np.abs(np.log(measured_ns / blind.time_ns)) <= COVERED_SDS * np.asarray(blind.log_sd())

    def mean(values: np.ndarray, which: np.ndarray) -> float | None:
        return None if not which.any() or np.isnan(found := float(np.mean(values[which]))) else found

    def of_group(mine: np.ndarray) -> ErrorSummary:
        out, own = mine & ~seen, {"fit": mean(errors, mine & seen), "noise_floor": mean(noise, mine)}
        own |= {"held_out": mean(errors, out), "terms_alone": mean(terms_errors, out), "covered": mean(covered, out)}
        return ErrorSummary(held_out_cells=int(out.sum()), **own)

    return {group: of_group(groups == group) for group in dict.fromkeys(groups.tolist())}


def enough_known(suite: Suite, log: SampleLog, prior: LatencyPrior, deadline: Deadline) -> Callable[[], bool]:
    """Return a function that says whether errors and noise are small. In the first half of the time, it says no."""
    ask_at_s = time.perf_counter() + deadline.left_s() / 2.0

    def is_enough() -> bool:
        nonlocal ask_at_s
        if time.perf_counter() < ask_at_s:
            return False
        cells, visits = log.timed()
        seen = np.array([not cell.held_out for cell in cells])
        measured_ns, noise = quantile_ns(visits), noise_floor(visits)
        if not MIN_TIMINGS <= seen.sum() < len(cells) or not noise.mean() <= TARGET_NOISE:
            return False
        blind = fit_posterior(timings_of(suite, cells, measured_ns), prior, seen.astype(float), log.facts)
        found = jax.tree.map(np.asarray, estimate(blind.posterior, blind.runs))
        errors = error_summaries(cells, measured_ns, found, found.time_ns, noise, seen).values()
        ask_at_s = time.perf_counter() + ASK_EVERY_S
        return all(own.held_out is None or own.held_out <= TARGET_ERROR for own in errors)

    return is_enough


def verdict_on(summaries: Mapping[str, ErrorSummary], noise_level: float | None, most_error: float) -> Verdict:
    """Return the verdict on the fit of a model. `most_error` is the largest mean held-out error that is good enough."""
    again = "run `rlxjax calibrate` again, on an idle machine or with a larger --budget"
    if not (out := [own for own in summaries.values() if own.held_out is not None and own.held_out_cells]):
        return Verdict([], [f"No cell was held out, so the error is unknown: hold out cells of the suite, or {again}."])
    cells = np.array([summary.held_out_cells for summary in out], float)
    error = float(cells @ [summary.held_out for summary in out] / cells.sum())
    covered = float(cells @ [summary.covered or 0.0 for summary in out] / cells.sum())
    noise = "is unknown" if noise_level is None else f"is {100 * noise_level:.0f} %"
    cautions = {
        f"The mean error on held-out cells is {100 * error:.0f} %": error > most_error,
        f"90 % intervals held {100 * covered:.0f} % of the held-out cells, and were widened": (
            cells.sum() >= FEW_HELD_OUT and covered < LEAST_COVERED
        ),
        f"The noise of the timings {noise}": noise_level is None or noise_level > MOST_NOISE,
    }
    said = [f"Mean error {100 * error:.0f} % on cells that the fit never saw."]
    return Verdict(said, [f"{caution}: {again}." for caution, is_so in cautions.items() if is_so])


def said_of_pace(pace: calibration.Pace, processors: int) -> Verdict:
    """Return sentences about the machine's speed, and about other programs that ran during the measurement."""
    found = Verdict([], [])
    if pace.usual is not None:
        share = f"This machine ran at {100 * pace.usual:.0f} % of its speed at the fastest earlier calibration"
        if pace.usual < LEAST_PACE:
            found.cautions.append(f"{share}: predicted times are for this speed.")
        else:
            found.said.append(f"{share}.")
    if pace.others is not None and pace.others > MOST_OTHERS:
        found.cautions.append(
            f"Other programs used {pace.others:.1f} of {processors} processors: predicted times are for this load; "
            "run `rlxjax calibrate` again once the other programs have ended."
        )
    return found


def busier(others: float | None, then: calibration.MachineSection | None) -> str:
    """Return a sentence if other programs use more processors now than at a calibration, else an empty text."""
    before = 0.0 if then is None or then.pace is None else then.pace.others or 0.0
    if others is None or others - before <= MOST_OTHERS:
        return ""
    return f"Other programs use {others:.1f} processors, and used {before:.1f} at the calibration."


def why_worse(found: Fitted, runs: Runs, mine: ModelSection, rival: calibration.CalibrationFile | None) -> str:
    """Return why a fit predicts worse than a rival (a calibration or a population); empty if it is not worse."""
    model = found.whole.posterior.model
    its = None if rival is None else rival.models.get(model.name)
    if rival is None or its is None or (its.samples and mine.samples and its.samples.sha256 == mine.samples.sha256):
        return ""
    sizes = [(mine.samples.timings, its.samples.timings, "visits")] if mine.samples and its.samples else []
    held_out = [sum(own.held_out_cells for own in one.held_out.values()) for one in (mine, its)]
    for own, other, what in (*sizes, (*held_out, "held-out cells")):
        if own < LEAST_SHARE * other:
            return f"The fit has {own:,} {what}, the earlier fit {other:,}."
    known = calibration.Calibration.from_file(rival, [model]).of(model.name).posterior
    found_sd, known_sd = (estimate(one, runs).log_sd() for one in (found.whole.posterior, known))
    now, then = (COVERED_SDS * float(np.median(log_sd)) for log_sd in (found_sd, known_sd))
    if now <= MOST_WIDER * then:
        return ""
    factors = "{} in each direction, and {}".format(*(number_text(math.exp(min(one, 99.0)), 2) for one in (now, then)))
    return f"A typical 90 % interval reaches a factor of {factors} without this fit."


def what_holds(summaries: Mapping[str, ErrorSummary], most_error: float) -> list[str]:
    """Return sentences that name the groups whose held-out error is small, large or unknown."""
    kinds: dict[str, list[str]] = {
        "You may use predictions of these groups (held-out error)": [],
        "Use only the intervals of these groups": [],
        "No cell was held out of these groups": [],
    }
    good, bad, unknown = kinds.values()
    for name, own in summaries.items():
        if (error := own.held_out) is None:
            unknown.append(name)
        else:
            (good if error <= most_error else bad).append(f"{name} ({100 * error:.0f} %)")
    return [f"{said}: {', '.join(texts)}." for said, texts in kinds.items() if texts]


def what_pays(calibrated: CalibratedModel, inputs: Mapping[str, Any]) -> list[str]:
    """Return a sentence that says where along the first input the second strategy is faster."""
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
        return [f"{fused if pays.all() else kept} is faster at every {along}, at{at}."]
    if pays[-1]:
        return [f"{fused} is faster from {along} {sizes[np.flatnonzero(~pays).max() + 1]:,.0f} up, at{at}."]
    return [f"{fused} is faster from {along} {sizes[pays.argmax()]:,.0f} on, at{at}, but not at the largest sizes."]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a calibrate job: the files, the verdict, and the fit that was judged."""

    path: FilePath
    is_written: bool
    samples_path: FilePath
    verdict: Verdict
    section: ModelSection
    suite: Suite
    fitted: Fitted
    skipped: Mapping[str, Sequence[str]]  # cells without timings, by reason
    micro_ns: Mapping[str, float]
    notes: Sequence[str]
    is_interrupted: bool = False

    @property
    def samples(self) -> calibration.Samples:
        assert self.section.samples is not None
        return self.section.samples

    def as_dict(self) -> dict[str, Any]:
        return {
            "is_written": self.is_written,
            "is_ready": self.verdict.is_ready,
            "said": self.verdict.said,
            "cautions": self.verdict.cautions,
            "notes": self.notes,
            "noise_floor": self.section.noise_floor,
            "errors": {name: summary.model_dump() for name, summary in self.section.held_out.items()},
            "timed": self.samples.model_dump(include={"timings", "workloads", "rounds"}),
            "samples": str(self.samples_path),
            "calibration": str(self.path),
        }


def print_outcome(outcome: Outcome, console: Console, *, is_verbose: bool = False) -> None:
    """Print the verdict on a calibration. With `is_verbose`, also print errors, coefficients and a few works."""
    samples, verdict, details = outcome.samples, outcome.verdict, []
    if is_verbose:
        print_rows(console, "Mean absolute error of predictions", error_rows(outcome.section))
        print_rows(console, "Coefficients", _coefficient_rows(outcome.section))
        if rows := _work_rows(outcome):
            print_rows(console, f"{outcome.suite.model.name} (a ratio of 1 is best)", rows)
        if outcome.micro_ns:
            times = (f"{name} {time_text(time_ns)}" for name, time_ns in outcome.micro_ns.items())
            details.append(f"micro-benchmarks: {', '.join(times)}")
        details += [f"skipped, {reason}: {shortened(names)}" for reason, names in outcome.skipped.items() if names]
    counts = f"{counted(samples.workloads, 'cell')}, {counted(samples.rounds, 'round')}"
    word = "Not written" if not outcome.is_written else "Ready" if verdict.is_ready else "Not ready"
    say(f"{outcome.suite.model.name}: {word}.", to=console)
    for text in (
        *verdict.said,
        *(f"caution: {text}" for text in verdict.cautions),
        *details,
        *outcome.notes,
        f"{counted(samples.timings, 'visit')} ({counts}) in {outcome.samples_path}",
        *([f"calibration: {outcome.path}"] if outcome.is_written else []),
    ):
        say(f"  {text}", to=console)


def shortened(names: Sequence[str]) -> str:
    more = len(names) - SKIPPED_SHOWN
    return ", ".join(names[:SKIPPED_SHOWN]) + (f" and {more} more, which the file names" if more > 0 else "")


def error_rows(section: ModelSection) -> list[Row]:
    """Return the errors of each group as rows of a table."""
    return [
        {"of": name} | {text: getattr(own, field) for text, field in ERRORS.items()}
        for name, own in section.held_out.items()
    ]


def _coefficient_rows(section: ModelSection) -> list[Row]:
    return [
        {
            "coefficient": name,
            "unit": entry.unit,
            "value": entry.value,
            "uncertainty": f"{100 * entry.log_sd:.0f} %" if entry.log_sd < 0.5 else f"x {math.exp(entry.log_sd):.1f}",
            "provenance": entry.provenance,
        }
        for name, entry in section.coefficients.items()
    ]


def _work_rows(outcome: Outcome) -> list[Row]:
    """Return the predicted and the measured time of each strategy, for a few works."""
    found, rows = outcome.fitted, []
    pairs = zip(found.measured_ns, found.estimate.time_ns, strict=True)
    times_ns = {cell.name: pair for cell, pair in zip(found.cells, pairs, strict=True)}
    works = {name: cells for name, cells in by_work(found.cells).items() if len(cells) > 1}
    shown = [name for name in outcome.suite.shown if name in works] or list(works)
    for work in shown[:: max(1, len(shown) // WORKS_SHOWN)][:WORKS_SHOWN]:
        alike = [cell.name for cell in works[work] if cell.inputs == works[work][-1].inputs]
        fastest = min(alike, key=lambda name: times_ns[name]) if len(alike) > 1 else ""
        for cell in works[work]:
            measured, predicted = times_ns[cell.name]
            row = {"work": work, "of": cell.group}
            row |= {"predicted (ns)": predicted, "measured (ns)": measured}
            row |= {"predicted / measured": predicted / measured, "fastest": cell.name == fastest}
            rows.append(row)
    return rows
