"""What a person reads: progress while the job runs, and tables when it is done."""

import contextlib
import dataclasses
import math
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from rich import progress as rich_progress
from rich.console import Console
from rich.table import Column, Table

from rlxjax.calibration import Calibration, CalibrationFile, ModelSection
from rlxjax.welch import FAST_SEGMENTS

from .clock import Deadline
from .micro import MicroRates
from .verdict import Verdict
from .workloads import SAME_RESULT, SHOWN_BATCHES, SHOWN_K, SHOWN_N_FFT, Cell

SKIPPED_SHOWN = 4
#: Characters of a line of sentences; lines that name files are as long as they are.
TEXT_WIDTH = 80
#: Headings of the table of errors, and what stands below them.
ERROR_COLUMNS = {
    "noise floor": "noise_floor",
    "seen": "fit",
    "held out": "held_out",
    "interior": "interior",
    "edge": "edge",
    "terms alone": "terms_alone",
    "in interval of 90": "covered",
    "cells held out": "held_out_cells",
    "built-in constants": "built_in",
}
#: Those of functions.
FUNCTION_COLUMNS = {
    "noise floor": "noise_floor",
    "seen": "fit",
    "held out": "held_out",
    "in interval of 90": "covered",
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
        calibration: what the file holds.
        content: the file's content.
        section: of it, what it says of Welch peaks.
        cells: the workloads measured.
        measured_ns: of the visits (`quantile_ns`), `[cells]`.
        predicted_ns: by the coefficients in the file, `[cells]`.
        skipped: workloads that were not measured, by reason.
        rates: what the micro-benchmarks say.
        notes: sentences that a person should read.
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
    """

    path: FilePath
    is_written: bool
    samples_path: FilePath
    verdict: Verdict
    section: ModelSection
    notes: list[str]


class Progress:
    """Shows on standard error, or another console, which phase the job is in, and how far."""

    def __init__(self, console: Console | None = None):
        self._console = console or Console(stderr=True)

    @contextlib.contextmanager
    def phase(
        self, name: str, deadline: Deadline | None = None, total: int | None = None
    ) -> Iterator[Callable[[], None]]:
        """Show a phase; yield what to call at each step. With a deadline, the bar shows time."""
        begun, steps = time.perf_counter(), 0
        if not self._console.is_terminal:
            yield lambda: None
            self._console.print(f"{name}: {time.perf_counter() - begun:.1f} s", highlight=False)
            return
        columns = (
            rich_progress.TextColumn("{task.description:10}"),
            rich_progress.BarColumn(),
            rich_progress.TextColumn("{task.fields[steps]}"),
            rich_progress.TimeElapsedColumn(),
        )
        span = None if deadline is None else max(deadline.left_s(), 0.1)
        with rich_progress.Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(name, total=total if span is None else span, steps="")

            def advance() -> None:
                nonlocal steps
                steps += 1
                done = steps if span is None else time.perf_counter() - begun
                unit = f"{steps}/{total}" if total else f"{steps} rounds"
                bar.update(task, completed=done, steps=unit)

            yield advance
        self._console.print(f"{name}: {time.perf_counter() - begun:.1f} s", highlight=False)


def print_outcome(outcome: Outcome, console: Console, *, is_verbose: bool = False) -> None:
    """Print what a calibration is worth; also the errors, the coefficients and a few workloads where that is asked."""
    samples = outcome.content.samples
    assert samples is not None  # the job's files name theirs
    counts = f"{samples.timings} timings ({samples.workloads} workloads, {samples.rounds} rounds)"
    details = []
    if is_verbose:
        console.print(_error_table(outcome.section, "strategy", ERROR_COLUMNS))
        console.print(_coefficient_table(outcome.section))
        console.print(_decision_table(outcome))
        details = [_micro_line(outcome)]
        details += [f"skipped, {reason}: {shortened(names)}" for reason, names in outcome.skipped.items() if names]
    _print_verdict("Welch peaks", outcome, counts, details, console)


def print_functions(outcome: FunctionsOutcome, console: Console, *, is_verbose: bool = False) -> None:
    """Print what the functions model is worth; also the errors and the coefficients where that is asked."""
    samples = outcome.section.samples
    assert samples is not None  # the job's sections name theirs
    if is_verbose:
        console.print(_error_table(outcome.section, "functions", FUNCTION_COLUMNS))
        console.print(_coefficient_table(outcome.section))
    counts = f"{samples.timings} visits ({samples.workloads} functions, {samples.rounds} rounds)"
    _print_verdict("Functions", outcome, counts, [], console)


def _print_verdict(
    model: str, outcome: Outcome | FunctionsOutcome, counts: str, details: Sequence[str], console: Console
) -> None:
    """Print the verdict in sentences, a line each, and where the files are."""
    verdict = outcome.verdict
    sentences = [*verdict.said, *(f"caution: {text}" for text in verdict.cautions)]
    for text in (
        f"{model}: {'Ready.' if verdict.is_ready else 'Not ready.'}",
        *(textwrap.fill(text, TEXT_WIDTH, initial_indent="  ", subsequent_indent="  ") for text in sentences),
        *details,
        *outcome.notes,
        f"  {counts} in {outcome.samples_path}",
        f"  calibration: {outcome.path if outcome.is_written else 'not written'}",
    ):
        # Names of files are printed as they are, and on one line: commands are copied.
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def outcome_as_dict(outcome: Outcome | FunctionsOutcome) -> dict[str, Any]:
    """Return what a program reads of an outcome: times in ns, shares of 1."""
    return {
        "is_written": outcome.is_written,
        "is_ready": outcome.verdict.is_ready,
        "said": outcome.verdict.said,
        "cautions": outcome.verdict.cautions,
        "notes": outcome.notes,
        "noise_floor": outcome.section.noise_floor,
        "errors": {name: summary.model_dump() for name, summary in outcome.section.held_out.items()},
        "samples": str(outcome.samples_path),
        "calibration": str(outcome.path),
    }


def shortened(names: Sequence[str]) -> str:
    """Return names, the first few of many."""
    more = len(names) - SKIPPED_SHOWN
    return ", ".join(names[:SKIPPED_SHOWN]) + (f" and {more} more, named in the file" if more > 0 else "")


def right(*headings: str) -> list[Column]:
    """Return columns of numbers."""
    return [Column(heading, justify="right") for heading in headings]


def number(value: float) -> str:
    """Return a number with three digits, or all of a larger one."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def _error_table(section: ModelSection, of: str, columns: Mapping[str, str]) -> Table:
    title = "Mean absolute error of predictions, per cent"
    table = Table(Column(of, no_wrap=True), *right(*columns), title=title)
    for name, summary in section.held_out.items():
        shown = [getattr(summary, field) for field in columns.values()]
        table.add_row(name, *(str(value) if isinstance(value, int) else _percent(value) for value in shown))
    return table


def _coefficient_table(section: ModelSection) -> Table:
    table = Table("coefficient", *right("value", "give or take"), "unit", "provenance", title="Coefficients")
    for name, entry in section.coefficients.items():
        table.add_row(name, number(entry.value), _give_or_take(entry.log_sd), entry.unit, entry.provenance)
    return table


def _decision_table(outcome: Outcome) -> Table:
    has_learned = any(model.n_fft == SHOWN_N_FFT for model in outcome.content.learned_ffts)
    strategies = (*SAME_RESULT, *["learned"] * has_learned)
    title = f"n_fft {SHOWN_N_FFT}, k {SHOWN_K}, {FAST_SEGMENTS} segments: predicted / measured, us"
    table = Table(*right("batch", *strategies), "picked", "fused is faster", "fastest", title=title)
    times_ns = dict(zip(outcome.cells, zip(outcome.predicted_ns, outcome.measured_ns, strict=True), strict=True))
    for batch in SHOWN_BATCHES:
        cells = {strategy: Cell(strategy, batch, SHOWN_N_FFT, SHOWN_K) for strategy in strategies}
        row = {strategy: times_ns[cell] for strategy, cell in cells.items() if cell in times_ns}
        if not row:
            continue
        decided = outcome.calibration.decide(batch, SHOWN_N_FFT, SHOWN_K)
        table.add_row(
            str(batch),
            *(f"{row[s][0] / 1e3:,.0f} / {row[s][1] / 1e3:,.0f}" if s in row else "-" for s in strategies),
            str(outcome.calibration.pick(batch, SHOWN_N_FFT, SHOWN_K)),
            f"{100 * float(decided.probability):.0f} %: {decided.verdict()}",
            min(row, key=lambda s: row[s][1]),
        )
    return table


def _micro_line(outcome: Outcome) -> str:
    rates = outcome.rates
    return (
        f"micro-benchmarks: launch {rates.dispatch_ns / 1e3:.1f} us, round trip {rates.roundtrip_ns / 1e3:.1f} us, "
        f"device memory {number(rates.memory_bytes_per_ns)} GB/s, upload {number(rates.upload_bytes_per_ns)} GB/s, "
        f"readback {number(rates.readback_bytes_per_ns)} GB/s"
    )


def _give_or_take(log_sd: float) -> str:
    """Return one standard deviation, in per cent where it is small, else as a factor."""
    return f"{100 * log_sd:.0f} %" if log_sd < 0.5 else f"x {math.exp(log_sd):.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
