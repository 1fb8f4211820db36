"""What a person reads when a job is done: the verdict in sentences, and tables."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from rich.console import Console

from rlxjax.calibration import Calibration, CalibrationFile, ModelSection
from rlxjax.welch import FAST_SEGMENTS

from .micro import MicroRates
from .printing import counted, ns, number, print_table, say
from .verdict import Verdict
from .workloads import SAME_RESULT, SHOWN_BATCHES, SHOWN_K, SHOWN_N_FFT, Cell

SKIPPED_SHOWN = 4
#: Headings of the table of errors, and what stands below them.
ERROR_COLUMNS = {
    "noise floor": "noise_floor",
    "seen": "fit",
    "held out": "held_out",
    "interior": "interior",
    "edge": "edge",
    "terms alone": "terms_alone",
    "in interval of 90 %": "covered",
    "cells held out": "held_out_cells",
    "built-in constants": "built_in",
}
#: Those of functions.
FUNCTION_COLUMNS = {
    "noise floor": "noise_floor",
    "seen": "fit",
    "held out": "held_out",
    "in interval of 90 %": "covered",
    "functions held out": "held_out_cells",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a calibrate job found.

    Attributes:
        path: the calibration file.
        is_written: whether it was written: not where a fit did not converge, unless that was asked for.
        samples_path: the raw samples.
        verdict: whether it is good enough, in sentences.
        calibration: of that.
        content: what the job put into the file.
        section: of it, what it says of Welch peaks.
        cells: the workloads measured.
        measured_ns: of the visits (`quantile_ns`), `[cells]`.
        predicted_ns: by the coefficients in the file, `[cells]`.
        skipped: workloads that were not measured, by reason.
        rates: what the micro-benchmarks say.
        notes: sentences that a person should read.
        is_interrupted: whether Ctrl-C ended the measuring.
    """

    path: FilePath
    is_written: bool
    samples_path: FilePath
    verdict: Verdict
    calibration: Calibration
    content: CalibrationFile
    section: ModelSection
    cells: list[Cell]
    measured_ns: np.ndarray
    predicted_ns: np.ndarray
    skipped: dict[str, list[str]]
    rates: MicroRates
    notes: list[str]
    is_interrupted: bool = False


@dataclasses.dataclass(frozen=True)
class FunctionsOutcome:
    """What the job found of functions.

    Attributes:
        path: the calibration file.
        is_written: whether it was written.
        samples_path: the raw samples.
        verdict: whether it is good enough, in sentences.
        section: what the file says of functions.
        notes: sentences that a person should read.
        is_interrupted: whether Ctrl-C ended the measuring.
    """

    path: FilePath
    is_written: bool
    samples_path: FilePath
    verdict: Verdict
    section: ModelSection
    notes: list[str]
    is_interrupted: bool = False


def print_outcome(outcome: Outcome, console: Console, *, is_verbose: bool = False) -> None:
    """Print what a calibration is worth; also the errors, the coefficients and a few workloads where that is asked."""
    samples = outcome.section.samples
    assert samples is not None  # the job's sections name theirs
    timed = f"{counted(samples.workloads, 'workload')}, {counted(samples.rounds, 'round')}"
    details = []
    if is_verbose:
        _print_errors(outcome.section, "strategy", ERROR_COLUMNS, console)
        _print_coefficients(outcome.section, console)
        _print_decisions(outcome, console)
        details = [_micro_line(outcome)]
        details += [f"skipped, {reason}: {shortened(names)}" for reason, names in outcome.skipped.items() if names]
    _print_verdict("Welch peaks", outcome, f"{counted(samples.timings, 'timing')} ({timed})", details, console)


def print_functions(outcome: FunctionsOutcome, console: Console, *, is_verbose: bool = False) -> None:
    """Print what the functions model is worth; also the errors and the coefficients where that is asked."""
    samples = outcome.section.samples
    assert samples is not None  # the job's sections name theirs
    if is_verbose:
        _print_errors(outcome.section, "functions", FUNCTION_COLUMNS, console)
        _print_coefficients(outcome.section, console)
    timed = f"{counted(samples.workloads, 'function')}, {counted(samples.rounds, 'round')}"
    _print_verdict("Functions", outcome, f"{counted(samples.timings, 'visit')} ({timed})", [], console)


def _print_verdict(
    model: str, outcome: Outcome | FunctionsOutcome, counts: str, details: Sequence[str], console: Console
) -> None:
    """Print the verdict in sentences, each from a line of its own on, and where the files are."""
    verdict, files = outcome.verdict, (str(outcome.samples_path), str(outcome.path))
    say(f"{model}: {'Ready.' if verdict.is_ready else 'Not ready.'}", to=console)
    for text in (
        *verdict.said,
        *(f"caution: {text}" for text in verdict.cautions),
        *details,
        *outcome.notes,
        f"{counts} in {outcome.samples_path}",
        f"calibration: {outcome.path if outcome.is_written else 'not written'}",
    ):
        say(text, *files, indent="  ", to=console)


def outcome_as_dict(outcome: Outcome | FunctionsOutcome) -> dict[str, Any]:
    """Return what a program reads of an outcome: times in ns, shares of 1."""
    samples = outcome.section.samples
    assert samples is not None  # the job's sections name theirs
    return {
        "is_written": outcome.is_written,
        "is_ready": outcome.verdict.is_ready,
        "said": outcome.verdict.said,
        "cautions": outcome.verdict.cautions,
        "notes": outcome.notes,
        "noise_floor": outcome.section.noise_floor,
        "errors": {name: summary.model_dump() for name, summary in outcome.section.held_out.items()},
        "timed": {"timings": samples.timings, "workloads": samples.workloads, "rounds": samples.rounds},
        "samples": str(outcome.samples_path),
        "calibration": str(outcome.path),
    }


def shortened(names: Sequence[str]) -> str:
    """Return names, the first few of many."""
    more = len(names) - SKIPPED_SHOWN
    return ", ".join(names[:SKIPPED_SHOWN]) + (f" and {more} more, named in the file" if more > 0 else "")


def _print_errors(section: ModelSection, of: str, columns: Mapping[str, str], console: Console) -> None:
    """Print the errors of each strategy or family; what there is more of goes downwards."""
    names, title = list(section.held_out), "Mean absolute error of predictions, per cent"
    cells = [[_error(getattr(summary, field)) for field in columns.values()] for summary in section.held_out.values()]
    if len(columns) > len(names):
        rows = [[heading, *own] for heading, own in zip(columns, zip(*cells, strict=True), strict=True)]
        print_table(console, title, ["", *names], rows)
    else:
        print_table(console, title, [of, *columns], [[name, *own] for name, own in zip(names, cells, strict=True)])


def _print_coefficients(section: ModelSection, console: Console) -> None:
    rows = [
        [name, entry.unit, number(entry.value), _give_or_take(entry.log_sd), entry.provenance]
        for name, entry in section.coefficients.items()
    ]
    print_table(console, "Coefficients", ["coefficient", "unit", "value", "give or take", "provenance"], rows, texts=2)


def _print_decisions(outcome: Outcome, console: Console) -> None:
    """Print what a few workloads take, and what is decided by that."""
    times_ns = dict(zip(outcome.cells, zip(outcome.predicted_ns, outcome.measured_ns, strict=True), strict=True))
    rows, decisions = [], []
    for batch in SHOWN_BATCHES:
        cells = {name: Cell(name, batch, SHOWN_N_FFT, SHOWN_K) for name in (*SAME_RESULT, "learned")}
        found = {name: times_ns[cell] for name, cell in cells.items() if cell in times_ns}
        if not found:
            continue
        fastest = min(found, key=lambda name: found[name][1])
        for name, (predicted_ns, measured_ns) in found.items():
            ratio = f"{predicted_ns / measured_ns:.2f}"
            note = "fastest" if name == fastest else ""
            rows.append([f"{batch:,}", name, ns(predicted_ns), ns(measured_ns), ratio, note])
        pick = outcome.calibration.pick(batch, SHOWN_N_FFT, SHOWN_K)
        decided = outcome.calibration.compare("fused", "host", batch, SHOWN_N_FFT, SHOWN_K)
        sure = f"fused is faster with {100 * float(decided.probability):.0f} %: {decided.verdict()}"
        decisions.append(f"Batch {batch:,}: {pick} is picked; {sure}.")
    if not rows:
        return
    headings = ["batch", "strategy", "predicted, ns", "measured, ns", "predicted / measured", ""]
    title = f"n_fft {SHOWN_N_FFT}, k {SHOWN_K}, {FAST_SEGMENTS} segments (a ratio of 1 is best)"
    print_table(console, title, headings, rows, texts=2)
    for text in decisions:
        say(text, to=console)


def _micro_line(outcome: Outcome) -> str:
    rates = outcome.rates
    return (
        f"micro-benchmarks: launch {ns(rates.dispatch_ns)} ns, round trip {ns(rates.roundtrip_ns)} ns; in bytes/ns, "
        f"device memory {number(rates.memory_bytes_per_ns)}, upload {number(rates.upload_bytes_per_ns)}, "
        f"readback {number(rates.readback_bytes_per_ns)}"
    )


def _give_or_take(log_sd: float) -> str:
    """Return one standard deviation, in per cent where it is small, else as a factor."""
    return f"{100 * log_sd:.0f} %" if log_sd < 0.5 else f"x {math.exp(log_sd):.1f}"


def _error(value: float | None) -> str:
    """Return a share in per cent, or a count."""
    return "-" if value is None else str(value) if isinstance(value, int) else f"{100 * value:.1f}"
