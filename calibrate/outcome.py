"""What a person reads when a job is done: the verdict in sentences, and tables."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from rich.console import Console

from rlxjax.calibration import ModelSection, Samples
from rlxjax.fit import Suite

from .judge import ERROR_COLUMNS, Fitted, Verdict
from .measure import by_work
from .terminal import counted, ns, number, print_table, say

SKIPPED_SHOWN, WORKS_SHOWN = 4, 4


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a calibrate job found: where it is, unless the fit did not converge; the verdict, and all it stands on.

    `skipped`: cells that were not measured, by reason; `notes`: sentences that a person should read.
    """

    path: FilePath
    is_written: bool
    samples_path: FilePath
    verdict: Verdict
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
    """Print what a calibration is worth; also the errors, the coefficients and a few works where that is asked."""
    samples, verdict, details = outcome.samples, outcome.verdict, []
    if is_verbose:
        _print_errors(outcome.section, console)
        _print_coefficients(outcome.section, console)
        _print_works(outcome, console)
        if outcome.micro_ns:
            times = (f"{name} {ns(time_ns)} ns" for name, time_ns in outcome.micro_ns.items())
            details.append(f"micro-benchmarks: {', '.join(times)}")
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

    def said(value: float | None) -> str:
        return "-" if value is None else str(value) if isinstance(value, int) else f"{100 * value:.1f}"

    groups = section.held_out.items()
    rows = [["", *ERROR_COLUMNS]]
    rows += [[name, *(said(getattr(own, field)) for field in ERROR_COLUMNS.values())] for name, own in groups]
    headings, *rows = map(list, zip(*rows, strict=True)) if len(rows) <= len(ERROR_COLUMNS) else rows
    print_table(console, "Mean absolute error of predictions, per cent", headings, rows)


def _print_coefficients(section: ModelSection, console: Console) -> None:
    def give_or_take(log_sd: float) -> str:
        return f"{100 * log_sd:.0f} %" if log_sd < 0.5 else f"x {math.exp(log_sd):.1f}"

    rows = [
        [name, entry.unit, number(entry.value), give_or_take(entry.log_sd), entry.provenance]
        for name, entry in section.coefficients.items()
    ]
    print_table(console, "Coefficients", ["coefficient", "unit", "value", "give or take", "provenance"], rows, texts=2)


def _print_works(outcome: Outcome, console: Console) -> None:
    """Print what a few works take by each of several ways, and what is decided by that."""
    found, calibrated = outcome.fitted, outcome.fitted.calibrated
    names, pairs = [cell.name for cell in found.cells], zip(found.measured_ns, found.estimate.time_ns, strict=True)
    times_ns = dict(zip(names, pairs, strict=True))
    works = {name: cells for name, cells in by_work(found.cells).items() if len(cells) > 1}
    shown = [name for name in outcome.suite.shown if name in works] or list(works)
    rows, decisions = [], []
    for work in shown[:: max(1, len(shown) // WORKS_SHOWN)][:WORKS_SHOWN]:
        last: Mapping[str, Any] = works[work][-1].inputs
        alike = [cell.name for cell in works[work] if cell.inputs == last]
        fastest = min(alike, key=lambda name: times_ns[name]) if len(alike) > 1 else ""
        for cell in works[work]:
            measured, predicted = times_ns[cell.name]
            note = "fastest" if cell.name == fastest else ""
            rows.append([work, cell.group, ns(predicted), ns(measured), f"{predicted / measured:.2f}", note])
        if len(calibrated.strategies) > 1:
            decided, (kept, fused, *_) = calibrated.decide(**last), calibrated.strategies
            sure = f"{fused} is faster than {kept} with {100 * float(decided.probability):.0f} %: {decided.verdict()}"
            decisions.append(f"{work}: {calibrated.pick(**last)} is picked; {sure}.")
    if rows:
        headings = ["work", "", "predicted, ns", "measured, ns", "predicted / measured", ""]
        print_table(console, f"{outcome.suite.model.name} (a ratio of 1 is best)", headings, rows, texts=2)
    for text in decisions:
        say(text, to=console)
