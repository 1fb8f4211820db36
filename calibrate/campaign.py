"""The calibrate job, of any suite: choose cells, make them ready, measure, fit, judge, write, all within one budget."""

import dataclasses
import shlex
import time
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from rlxjax import Calibration
from rlxjax.calibration import (
    CalibrationFile,
    MachineSection,
    ModelSection,
    Samples,
    current_fingerprint,
    file_to_write,
    machine_section,
    made_now,
    population_prior,
    read_prior,
    section_of,
    sha256_of,
    write_sections,
)
from rlxjax.clock import PROTOCOL
from rlxjax.fit import Cell, LatencyModel, LatencyPrior, Suite, cell_runs
from rlxjax.models import BUILT_IN

from .command_line import refuse_input
from .interrupts import last_act
from .judge import OUTLIER_FACTOR, Verdict, enough_known, fitted, said_of_pace, verdict_on, what_pays
from .machine import measured_gate, micro_times_ns, pace_of, time_micro
from .measure import Ready, by_work, made_ready, measure_rounds, measuring_order, memory_limit_bytes
from .named import users_code
from .outcome import Outcome, shortened
from .samples import (
    SampleLog,
    SampleWriter,
    calibration_of,
    check_resumable,
    header_of,
    read_samples,
    samples_path,
)
from .terminal import Deadline, Progress

#: Seconds, and share of the budget, kept back for two fits (one compilation), judging and writing.
FIT_RESERVE_S, FIT_RESERVE_SHARE = 4.0, 0.1
#: Share of the time before the fit that making ready may take.
READY_SHARE = 0.6
#: Rounds that have to fit in the remaining time; the slowest works are left out until they do, down to so many cells.
MIN_ROUNDS, MIN_CELLS = 4, 24
#: Seconds that a visit takes at least, and calls of a cell in it.
VISIT_S, VISIT_CALLS = 0.004, 2


def run(
    suite: Suite,
    name: str,
    *,
    started_s: float,
    budget_s: float,
    path: FilePath,
    command: str,
    progress: Progress,
    resume: bool = False,
    prior: FilePath | None = None,
    force: bool = False,
    seed: int | None = None,
) -> Outcome:
    """Time a suite and put the section of its model into the calibration file."""
    kept_at, model = samples_path(path, suite.model.name), suite.model.name
    file_to_write(path)
    file_to_write(kept_at)
    here = current_fingerprint()
    known, notes = prior_of(suite, here.platform, prior)
    rng = np.random.default_rng(seed)
    with users_code(f"{model}: the facts of its suite cannot be kept"):
        header = header_of(suite, name, here)
    deadline = Deadline(started_s + budget_s - max(FIT_RESERVE_S, FIT_RESERVE_SHARE * budget_s))
    skipped: dict[str, list[str]] = {}
    with progress.phase(f"{model}: choosing"):
        wanted, left_out = checked_cells(suite)
        notes += left_out
        limit_bytes = memory_limit_bytes()
        skipped["would not fit in memory"] = [cell.name for cell in wanted if cell.n_bytes > limit_bytes]
        cells = [cell for cell in wanted if cell.n_bytes <= limit_bytes]
    path.parent.mkdir(parents=True, exist_ok=True)
    log = SampleLog(header)
    if resume:
        log = read_samples(kept_at, mend="leave out --resume to start anew", mend_tail=True)
        check_resumable(log, kept_at, header, wanted)
    with (
        last_act(lambda: f"samples so far are in {kept_at}: go on with --resume"),
        SampleWriter(kept_at, log, append=resume) as writer,
    ):
        if writer.aside:
            notes.append(f"Earlier samples were kept as {writer.aside}.")
        with progress.phase(f"{model}: micro-benchmarks"):
            time_micro(writer)
        start = suite.start(micro_times_ns(log)) if known is None else known
        is_fixed = bool(log.complete_rounds())
        order, share, least = log.cells, 1.0, 0  # all cells are to have as many rounds
        if not is_fixed:
            share, least = READY_SHARE, MIN_CELLS
            with progress.phase(f"{model}: ordering"), users_code(f"{model}: its model predicts nothing"):
                order = measuring_order(suite, log.cells or cells, start, log.facts, rng)
        ready_by = Deadline(time.perf_counter() + share * deadline.left_s())
        with progress.phase(f"{model}: compiling", total=len(order)) as advance:
            ready = made_ready(suite, order, ready_by, advance, at_least=least, n_threads=here.cores)
        refused = dict(ready.refused)
        if is_fixed and len(ready.programs) < len(order):
            notes.append("No time was left to measure more: this is the fit of the earlier samples.")
        else:
            chosen, too_slow = (order, []) if is_fixed else affordable(order, ready, deadline.left_s())
            skipped["too slow for the budget"] = too_slow
            skipped["no time to compile"] = [
                cell.name for cell in order if cell.name not in {*ready.programs, *ready.refused}
            ]
            if not is_fixed:
                names = {one.name for one in chosen}
                writer.cells([suite.as_compiled(one, ready.programs[one.name]) for one in cells if one.name in names])
            enough = enough_known(suite, log, start, deadline)
            with progress.phase(f"{model}: measuring", deadline) as advance:
                refused |= measure_rounds(writer, ready.programs, deadline, rng, advance, enough)
    notes += (of_cells := [f"{cell} is left out: {reason}." for cell, reason in refused.items()])
    if deadline.interrupted:
        notes.append("Measuring was interrupted: this is the fit of what was measured until then.")
    try:
        with progress.phase(f"{model}: fitting"):
            found = fit_and_write(suite, log, path, kept_at, command, skipped, notes, force, known)
    except ValueError as too_little:
        if deadline.interrupted:
            raise KeyboardInterrupt(str(too_little)) from None
        raise ValueError(" ".join([f"{too_little}.", *of_cells[:1]]).removesuffix(".")) from None
    return dataclasses.replace(found, is_interrupted=deadline.interrupted)


def refit(
    suite: Suite,
    log: SampleLog,
    kept_at: FilePath,
    *,
    out: FilePath | None,
    command: str,
    progress: Progress,
    force: bool = False,
    prior: FilePath | None = None,
) -> Outcome:
    """Fit the samples of a file again, of whatever machine they are, and write the calibration of that machine.

    It is written to `out`, or else to the file of these samples (`calibration_of`); the options are those of `run`.
    """
    path = calibration_of(kept_at) if out is None else out
    file_to_write(path)
    refuse_input(path, "the calibration", [("the samples", kept_at)])
    known, notes = prior_of(suite, log.fingerprint.platform, prior)
    with progress.phase(f"{suite.model.name}: fitting"):
        return fit_and_write(suite, log, path, kept_at, command, {}, notes, force, known)


def fit_and_write(
    suite: Suite,
    log: SampleLog,
    path: FilePath,
    kept_at: FilePath,
    command: str,
    skipped: dict[str, list[str]],
    notes: list[str],
    force: bool,
    known: LatencyPrior | None,
) -> Outcome:
    """Fit samples, judge the fit, and put its section and that of the machine into the calibration file."""
    header, model = log.header, suite.model
    if header.runner != suite.runner:
        notes.append(
            f"The samples are of runner {header.runner}, and this is runner {suite.runner}: what is fitted to "
            "them says what that one takes."
        )
    if header.protocol != PROTOCOL:
        notes.append(
            f"The samples were timed by protocol {header.protocol}, and this is protocol {PROTOCOL}: a time is the "
            "mean of a loop of calls, and these hold few calls of each loop, or pauses between them."
        )
    micro_ns = micro_times_ns(log)
    try:
        found = fitted(suite, log, suite.start(micro_ns) if known is None else known)
    except ValueError as error:
        again = shlex.join(["rlxjax", "calibrate", *_of_suite(header.suite), "--out", str(path), "--resume"])
        raise ValueError(f"{error}; the samples are in {kept_at}: measure more with `{again}`") from None
    terms, outliers = found.whole.terms, found.outliers()
    if len(log.complete_rounds()) == 0:
        notes.append("No round was finished: every cell counts once, and some are missing.")
    if found.noise_level is None:
        notes.append("A single round says nothing of the noise.")
    if found.all_seen:
        is_any = any(cell.held_out for cell in found.cells)
        why = "Too few cells were measured to hold any out" if is_any else "No cell that was measured is held out"
        notes.append(f"{why}: there is no held-out error.")
    if outliers:
        notes.append(
            f"{len(outliers)} of {len(found.cells)} cells are off by more than {OUTLIER_FACTOR:g} times and "
            f"counted little in the fit: {shortened(outliers)}."
        )
    if not found.blind_converged:
        notes.append("The fit that gives the held-out errors did not converge.")
    is_written = force or terms.converged
    if not terms.converged:
        notes.append(terms.message)
    if not is_written:
        own = [] if header.suite in BUILT_IN else _of_suite(header.suite)
        taken = shlex.join(["rlxjax", "refit", str(kept_at), *own, "--out", str(path), "--force"])
        notes.append(
            "No calibration was written. Measure more with `rlxjax calibrate --resume` and a larger "
            f"--budget, or take it as it is with `{taken}`."
        )
    judged = verdict_on(found.errors, found.noise_level, suite.most_error)
    samples = Samples(
        suite=header.suite,
        file=kept_at.name,
        sha256=sha256_of(kept_at),
        runner=header.runner,
        timings=sum(map(len, log.rounds)),
        rounds=len(log.complete_rounds()),
        workloads=len(found.cells),
    )
    made = made_now() | {"command": command, "fingerprint": log.fingerprint, "samples": samples}
    section = section_of(
        found.whole,
        model.prior if known is None else known,
        found.errors,
        found.noise_level,
        outliers,
        **made,
        cautions=judged.cautions,
        skipped=[f"{cell}: {reason}" for reason, names in skipped.items() for cell in names],
        given=header.given,
    )
    machine, of_pace = None, Verdict([], [])
    if micro_ns:
        pace = pace_of(log, machine_section(path, log.fingerprint))
        of_pace = said_of_pace(pace, log.fingerprint.cores)
        machine = MachineSection(
            **made,
            gate=measured_gate(micro_ns, log.fingerprint.platform),
            canary_ns=micro_ns,
            pace=pace,
            cautions=of_pace.cautions,
        )
    if is_written:
        notes += write_sections(path, {model.name: section, **_of_compiled(suite, log, made, notes)}, machine)
    content = CalibrationFile(models={model.name: section}, machine=machine)
    calibrated = Calibration.from_file(content, [model]).of(model.name)
    pays = what_pays(calibrated, _middle(found.cells, suite))
    verdict = Verdict([*judged.said, *pays, *of_pace.said], [*judged.cautions, *of_pace.cautions])
    return Outcome(path, is_written, kept_at, verdict, calibrated, section, suite, found, skipped, micro_ns, notes)


def _of_compiled(suite: Suite, log: SampleLog, made: dict[str, Any], notes: list[str]) -> dict[str, ModelSection]:
    """Return the section of the model of compiled programs, of samples whose cells say what was compiled; else none."""
    other, cells = suite.of_compiled(), [cell for cell in log.cells if cell.compiled]
    if other is None or not cells or not other.model.facts.keys() <= log.facts.keys():
        return {}
    name = other.model.name
    prior = population_prior(other.model, log.fingerprint.platform) or other.model.prior
    try:
        found = fitted(other, dataclasses.replace(log, cells=cells), prior)
    except ValueError as error:
        notes.append(f"{name} is not fitted: {error}.")
        return {}
    if not found.whole.terms.converged:
        notes.append(f"{name} is not fitted: {found.whole.terms.message}")
        return {}
    judged = verdict_on(found.errors, found.noise_level, other.most_error)
    notes.append(f"{name}, by what was compiled: {' '.join([*judged.said, *judged.cautions])}")
    errors, outliers = found.errors, found.outliers()
    section = section_of(found.whole, prior, errors, found.noise_level, outliers, **made, cautions=judged.cautions)
    return {name: section}


def checked_cells(suite: Suite) -> tuple[list[Cell], list[str]]:
    """Return the cells of a suite that can be fitted, and a sentence for each of the others."""
    model, cells, left_out = suite.model, {}, []
    with users_code(f"{model.name}: its cells are none"):
        wanted = list(suite.cells())
    for cell in wanted:
        if not isinstance(cell, Cell):
            raise ValueError(f"{model.name}: expected cells of type Cell, got one of type {type(cell).__name__}")
        try:
            if cell.name in cells:
                raise ValueError("another cell has its name")
            cell_runs(model, [cell])
            model.check(cell.inputs)
            cells[cell.name] = cell
        except Exception as error:  # noqa: BLE001
            left_out.append(f"{cell.name} is left out: {error}.")
    if not cells:
        raise ValueError(" ".join([f"{model.name}: expected a suite with cells, got none.", *left_out[:1]]))
    return list(cells.values()), left_out


def _of_suite(name: str) -> list[str]:
    """Return the option that names a suite."""
    return ["--only" if name in BUILT_IN else "--suite", name]


def affordable(order: Sequence[Cell], ready: Ready, left_s: float) -> tuple[list[Cell], list[str]]:
    """Return the cells that `MIN_ROUNDS` rounds of fit in the time left, `MIN_CELLS` at least, and the slower ones."""
    chosen = [cell for cell in order if cell.name in ready.programs]
    seconds = {cell.name: max(VISIT_S, VISIT_CALLS * ready.times_ns[cell.name] / 1e9) for cell in chosen}
    slow_first = sorted(seconds, key=lambda name: -seconds[name])
    dropped: list[str] = []
    while len(seconds) > MIN_CELLS and MIN_ROUNDS * sum(seconds.values()) > max(left_s, 0.0):
        dropped.append(slow_first[len(dropped)])
        del seconds[dropped[-1]]
    return [cell for cell in chosen if cell.name in seconds], dropped


def prior_of(suite: Suite, platform: str, file: FilePath | None) -> tuple[LatencyPrior | None, list[str]]:
    """Return what other machines say of this one, and notes on it: a prior file, a calibration, else the population."""
    if file is None:
        return population_prior(suite.model, platform), []
    known, other = prior_from(file, suite.model)
    if other in (None, platform):
        return known, []
    return known, [f"The prior is of another platform: {other!r}, and this is {platform!r}."]


def prior_from(file: FilePath, model: LatencyModel) -> tuple[LatencyPrior, str | None]:
    """Return what a calibration, of a machine or of a population, says of a further machine, and of which platform."""
    return read_prior(file, model)


def _middle(cells: Sequence[Cell], suite: Suite) -> dict[str, float]:
    """Return the inputs of a shown work, or else of one in the middle, of those with most cells."""
    works = by_work(cells)
    shown = [works[name] for name in suite.shown if name in works]
    most = max(map(len, works.values()))
    candidates = shown or [work for work in works.values() if len(work) == most]
    return dict(candidates[len(candidates) // 2][-1].inputs)
