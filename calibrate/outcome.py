"""What a person reads when a job is done: the verdict in sentences, and tables."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from rich.console import Console

from rlxjax.calibration import CalibratedModel, ModelSection, Samples
from rlxjax.fit import Suite

from .judge import Fitted, Verdict
from .measure import by_work
from .terminal import counted, ns, number, print_table, say

SKIPPED_SHOWN, WORKS_SHOWN = 4, 4
#: Headings of the table of errors, and what stands below them.
ERROR_COLUMNS = {
    "noise floor": "noise_floor",
    "seen": "fit",
    "held out": "held_out",
    "terms alone": "terms_alone",
    "in interval of 90 %": "covered",
    "cells held out": "held_out_cells",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a calibrate job found.

    Attributes:
        path: the calibration file.
        is_written: whether it was written: not where a fit did not converge, unless that was asked for.
        samples_path: the raw samples.
        verdict: whether it is good enough, in sentences.
        calibrated: the model by what the job put into the file.
        section: of the file.
        suite: that was timed.
        fitted: the fit of all timings, and what it is worth.
        skipped: cells that were not measured, by reason.
        micro_ns: what the micro-benchmarks took.
        notes: sentences that a person should read.
        is_interrupted: whether Ctrl-C ended the measuring.
    """

    path: FilePath
    is_written: bool
    samples_path: FilePath
    verdict: Verdict
    calibrated: CalibratedModel
    section: ModelSection
    suite: Suite
    fitted: Fitted
    skipped: Mapping[str, Sequence[str]]
    micro_ns: Mapping[str, float]
    notes: Sequence[str]
    is_interrupted: bool = False

    @property
    def samples(self) -> Samples:
        """What was timed."""
        assert self.section.samples is not None  # the job's sections name theirs
        return self.section.samples

    def as_dict(self) -> dict[str, Any]:
        """Return what a program reads: times in ns, shares of 1."""
        samples = self.samples
        return {
            "is_written": self.is_written,
            "is_ready": self.verdict.is_ready,
            "said": self.verdict.said,
            "cautions": self.verdict.cautions,
            "notes": self.notes,
            "noise_floor": self.section.noise_floor,
            "errors": {name: summary.model_dump() for name, summary in self.section.held_out.items()},
            "timed": {"timings": samples.timings, "workloads": samples.workloads, "rounds": samples.rounds},
            "samples": str(self.samples_path),
            "calibration": str(self.path),
        }


def print_outcome(outcome: Outcome, console: Console, *, is_verbose: bool = False) -> None:
    """Print what a calibration is worth; also the errors, the coefficients and a few works where that is asked."""
    samples, verdict = outcome.samples, outcome.verdict
    details = []
    if is_verbose:
        _print_errors(outcome.section, console)
        _print_coefficients(outcome.section, console)
        _print_works(outcome, console)
        micro = ", ".join(f"{name} {ns(time_ns)} ns" for name, time_ns in outcome.micro_ns.items())
        details = [f"micro-benchmarks: {micro}"] if micro else []
        details += [f"skipped, {reason}: {shortened(names)}" for reason, names in outcome.skipped.items() if names]
    counts = f"{counted(samples.workloads, 'cell')}, {counted(samples.rounds, 'round')}"
    say(f"{outcome.suite.model.name}: {'Ready.' if verdict.is_ready else 'Not ready.'}", to=console)
    for text in (
        *verdict.said,
        *(f"caution: {text}" for text in verdict.cautions),
        *details,
        *outcome.notes,
        f"{counted(samples.timings, 'visit')} ({counts}) in {outcome.samples_path}",
        f"calibration: {outcome.path if outcome.is_written else 'not written'}",
    ):
        say(f"  {text}", to=console)


def shortened(names: Sequence[str]) -> str:
    """Return names, the first few of many."""
    more = len(names) - SKIPPED_SHOWN
    return ", ".join(names[:SKIPPED_SHOWN]) + (f" and {more} more, named in the file" if more > 0 else "")


def _print_errors(section: ModelSection, console: Console) -> None:
    """Print the errors of each group; what there is more of goes downwards."""
    rows = [["", *ERROR_COLUMNS]]
    for name, summary in section.held_out.items():
        rows.append([name, *(_error(getattr(summary, field)) for field in ERROR_COLUMNS.values())])
    headings, *rows = map(list, zip(*rows, strict=True)) if len(rows) <= len(ERROR_COLUMNS) else rows
    print_table(console, "Mean absolute error of predictions, per cent", headings, rows)


def _print_coefficients(section: ModelSection, console: Console) -> None:
    rows = [
        [name, entry.unit, number(entry.value), _give_or_take(entry.log_sd), entry.provenance]
        for name, entry in section.coefficients.items()
    ]
    print_table(console, "Coefficients", ["coefficient", "unit", "value", "give or take", "provenance"], rows, texts=2)


def _print_works(outcome: Outcome, console: Console) -> None:
    """Print what a few works take by each of several ways, and what is decided by that."""
    found, model = outcome.fitted, outcome.suite.model
    times_ns = {
        cell.name: times
        for cell, *times in zip(found.cells, np.asarray(found.estimate.time_ns), found.measured_ns, strict=True)
    }
    works = {name: cells for name, cells in by_work(found.cells).items() if len(cells) > 1}
    shown = [name for name in outcome.suite.shown if name in works] or list(works)
    rows, decisions = [], []
    for work in shown[:: max(1, len(shown) // WORKS_SHOWN)][:WORKS_SHOWN]:
        last: Mapping[str, Any] = works[work][-1].inputs
        alike = [cell for cell in works[work] if cell.inputs == last]
        fastest = min(alike, key=lambda cell: times_ns[cell.name][1])
        for cell in works[work]:
            predicted_ns, measured_ns = times_ns[cell.name]
            note = "fastest" if cell is fastest and len(alike) > 1 else ""
            ratio = f"{predicted_ns / measured_ns:.2f}"
            rows.append([work, cell.group, ns(predicted_ns), ns(measured_ns), ratio, note])
        if len(outcome.calibrated.strategies) > 1:
            pick, decided = outcome.calibrated.pick(**last), outcome.calibrated.decide(**last)
            kept, fused, *_ = outcome.calibrated.strategies
            sure = f"{fused} is faster than {kept} with {100 * float(decided.probability):.0f} %: {decided.verdict()}"
            decisions.append(f"{work}: {pick} is picked; {sure}.")
    if not rows:
        return
    headings = ["work", "", "predicted, ns", "measured, ns", "predicted / measured", ""]
    print_table(console, f"{model.name} (a ratio of 1 is best)", headings, rows, texts=2)
    for text in decisions:
        say(text, to=console)


def _give_or_take(log_sd: float) -> str:
    """Return one standard deviation, in per cent where it is small, else as a factor."""
    return f"{100 * log_sd:.0f} %" if log_sd < 0.5 else f"x {math.exp(log_sd):.1f}"


def _error(value: float | None) -> str:
    """Return a share in per cent, or a count."""
    return "-" if value is None else str(value) if isinstance(value, int) else f"{100 * value:.1f}"
