"""The calibrate job: choose cells (runs to time) of a suite, time them, fit a model, and write the calibration."""

import dataclasses
import shlex
import time
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from rlxjax import calibration as files
from rlxjax.clock import PROTOCOL
from rlxjax.fit import Cell, LatencyModel, LatencyPrior, Suite, coefficient_names
from rlxjax.models import BUILT_IN

from . import judge
from .command_line import refuse_input
from .interrupts import last_act
from .machine import measured_gate, micro_times_ns, pace_of, time_micro
from .measure import Ready, by_work, made_ready, measure_rounds, measuring_order, memory_limit_bytes
from .samples import SampleLog, calibration_of, resumed, samples_path
from .suites import users_code
from .terminal import Deadline, Progress

#: Seconds reserved for the fit: the least number, the number per coefficient, and the largest share of the budget.
FIT_RESERVE_S, FIT_COEFFICIENT_S, FIT_RESERVE_SHARE = 4.0, 0.66, 0.3
#: Compilation takes at most this share of the time that remains before the fit.
READY_SHARE = 0.6
#: The job drops the slowest cells until the time left is enough for this many rounds, or this many cells remain.
MIN_ROUNDS, MIN_CELLS = 4, 24
NO_TIME = "No time was left to measure more: this fit uses the earlier samples only."
#: A visit takes at least this many seconds, and makes at least this many calls.
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
    earlier: files.MachineSection | None = None,
) -> judge.Outcome:
    """Time a suite, fit its model, and write the result. `earlier` is the file's machine section before the job."""
    model = suite.model.name
    kept_at = samples_path(path, model)
    files.file_to_write(path)
    files.file_to_write(kept_at)
    known, notes = prior_of(suite, files.current_fingerprint().platform, prior)
    with users_code(f"{model}: the suite's facts cannot be saved"):
        log = SampleLog.new(suite, name)
    fit_s = FIT_COEFFICIENT_S * len(coefficient_names(suite.model.prior.median))
    deadline = Deadline(started_s + budget_s - max(FIT_RESERVE_S, min(fit_s, FIT_RESERVE_SHARE * budget_s)))
    rng = np.random.default_rng(seed)
    with progress.phase(f"{model}: choosing"):
        wanted, left_out = checked_cells(suite)
        limit_bytes = memory_limit_bytes()
        cells = [cell for cell in wanted if cell.n_bytes <= limit_bytes]
    skipped = {"too large for the memory": [cell.name for cell in wanted if cell.n_bytes > limit_bytes]}
    path.parent.mkdir(parents=True, exist_ok=True)
    if resume:
        log = resumed(kept_at, log.header, wanted)
    with (
        last_act(lambda: f"the samples are in {kept_at}: continue with --resume"),
        log.kept_in(kept_at, append=resume) as aside,
    ):
        if aside:
            left_out.append(f"The earlier samples are kept as {aside}.")
            name_samples(path, suite.model, kept_at.name, aside.name)
        with progress.phase(f"{model}: micro-benchmarks"):
            time_micro(log)
        start = suite.start(micro_times_ns(log)) if known is None else known
        order = log.cells
        if not log.complete_rounds():
            with progress.phase(f"{model}: ordering"), users_code(f"{model}: the model fails to predict"):
                order = measuring_order(suite, log.cells or cells, start, log.facts, rng)
        refused, more = timed(suite, log, cells, order, deadline, progress, rng=rng, prior=start)
    notes += [*left_out, *refused]
    if deadline.interrupted:
        notes.append("You interrupted the measurement: this fit uses the samples until then.")
    try:
        with progress.phase(f"{model}: fitting"):
            found = fit_and_write(suite, log, path, kept_at, command, known, notes, skipped | more, force, earlier)
    except ValueError as too_little:
        if deadline.interrupted:
            raise KeyboardInterrupt(str(too_little)) from None
        why = [said for said in refused if said != NO_TIME][:1]
        raise ValueError(" ".join([f"{too_little}.", *why]).removesuffix(".")) from None
    return dataclasses.replace(found, is_interrupted=deadline.interrupted)


def timed(
    suite: Suite,
    log: SampleLog,
    cells: Sequence[Cell],
    order: Sequence[Cell],
    deadline: Deadline,
    progress: Progress,
    *,
    rng: np.random.Generator,
    prior: LatencyPrior | None = None,
    ready_share: float = READY_SHARE,
    at_least: int = MIN_CELLS,
    least_s: float = 0.0,
) -> tuple[list[str], dict[str, list[str]]]:
    """Compile cells in order, drop the cells that are too slow, and time the other cells in rounds until the deadline.

    A log that has a complete round keeps its cells. With a prior, timing ends early once the errors are small. Return
    a sentence for each cell whose program fails, and the names of the other cells that were not timed, by reason.
    """
    model, is_fixed = suite.model.name, bool(log.complete_rounds())
    ready_by = Deadline(time.perf_counter() + (1.0 if is_fixed else ready_share) * deadline.left_s())
    with progress.phase(f"{model}: compiling", ready_by, what="program") as advance:
        least, n_threads = 0 if is_fixed else at_least, log.fingerprint.cores
        ready = made_ready(suite, order, ready_by, advance, at_least=least, n_threads=n_threads)
    refused, skipped = dict(ready.refused), {}
    if is_fixed and len(ready.programs) < len(order):
        return [f"{name} is left out: {reason}." for name, reason in refused.items()] + [NO_TIME], {}
    deadline.at_s = max(deadline.at_s, time.perf_counter() + least_s)
    if not is_fixed:
        chosen, skipped["too slow for the budget"] = affordable(order, ready, deadline.left_s())
        skipped["no time to compile"] = [c.name for c in order if c.name not in {*ready.programs, *ready.refused}]
        names = {cell.name for cell in chosen}
        log.keep_cells([suite.as_compiled(cell, ready.programs[cell.name]) for cell in cells if cell.name in names])
    enough = (lambda: False) if prior is None else judge.enough_known(suite, log, prior, deadline)
    with progress.phase(f"{model}: measuring", deadline) as advance:
        refused |= measure_rounds(log, ready.programs, deadline, rng, advance, enough)
    return [f"{name} is left out: {reason}." for name, reason in refused.items()], skipped


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
) -> judge.Outcome:
    """Fit the samples in a file again, and write the calibration of the machine that was timed."""
    path = calibration_of(kept_at) if out is None else out
    files.file_to_write(path)
    refuse_input(path, "the calibration", [("the samples", kept_at)])
    known, notes = prior_of(suite, log.fingerprint.platform, prior)
    with progress.phase(f"{suite.model.name}: fitting"):
        earlier = files.machine_section(path, log.fingerprint)
        return fit_and_write(suite, log, path, kept_at, command, known, notes, {}, force, earlier)


def fit_and_write(
    suite: Suite,
    log: SampleLog,
    path: FilePath,
    kept_at: FilePath,
    command: str,
    known: LatencyPrior | None,
    notes: list[str],
    skipped: dict[str, list[str]],
    force: bool,
    earlier: files.MachineSection | None,
) -> judge.Outcome:
    """Fit samples. Write the fit to the calibration file, or to a file beside it if the calibration predicts better."""
    header, model, micro_ns, rounds = log.header, suite.model, micro_times_ns(log), len(log.complete_rounds())
    of_suite = ["--only" if header.suite in BUILT_IN else "--suite", header.suite]
    again = shlex.join(["rlxjax", "calibrate", *of_suite, "--out", str(path), "--resume"])
    try:
        found = judge.fitted(suite, log, suite.start(micro_ns) if known is None else known)
    except ValueError as error:
        raise ValueError(f"{error}; the samples are in {kept_at}: measure more with `{again}`") from None
    terms, outliers = found.whole.terms, found.outliers()
    own = [] if header.suite in BUILT_IN else of_suite
    taken = shlex.join(["rlxjax", "refit", str(kept_at), *own, "--out", str(path), "--force"])
    said = {
        f"Runner version {header.runner} took the samples, but the suite's runner is version {suite.runner}: "
        f"predictions are for version {header.runner}.": header.runner != suite.runner,
        f"Timing protocol {header.protocol} took the samples, and this version uses protocol {PROTOCOL}: the samples "
        "have fewer calls, or pauses between calls.": header.protocol != PROTOCOL,
        "No round is complete: each measured cell has one visit, and other cells have none.": rounds == 0,
        "The noise of the timings is unknown after a single round.": found.noise_level is None,
        "There is no held-out error: too few cells were measured, or the suite holds out no cell.": found.all_seen,
        f"{len(outliers)} of {len(found.cells)} cells differ from their predictions by more than a factor of "
        f"{judge.OUTLIER_FACTOR:g}, and had little weight in the fit: {judge.shortened(outliers)}.": bool(outliers),
        "The fit without the held-out cells did not converge.": not found.blind_converged,
        terms.message: not terms.converged,
    }
    notes = [*notes, *(text for text, is_so in said.items() if is_so)]
    about: dict[str, Any] = {"suite": header.suite, "runner": header.runner, "file": kept_at.name}
    about |= {"sha256": files.sha256_of(kept_at), "timings": sum(map(len, log.rounds))}
    samples = files.Samples(**about, rounds=rounds, workloads=len(found.cells))
    made = files.made_now() | {"command": command, "fingerprint": log.fingerprint, "samples": samples}
    judged = judge.verdict_on(found.errors, found.noise_level, suite.most_error)
    own = made | {"cautions": judged.cautions, "given": header.given}
    own["skipped"] = [f"{cell}: {reason}" for reason, names in skipped.items() for cell in names]
    before = model.prior if known is None else known
    section = files.section_of(found.whole, before, found.errors, found.noise_level, outliers, **own)
    machine, of_pace, pace = None, judge.Verdict([], []), pace_of(log, earlier)
    if micro_ns:
        of_pace = judge.said_of_pace(pace, log.fingerprint.cores)
        about = made | {"gate": measured_gate(micro_ns, log.fingerprint.platform), "cautions": of_pace.cautions}
        machine = files.MachineSection(**about, canary_ns=micro_ns, pace=pace)
    content, left_out = _content_of(path, model)
    then, here = content.models.get(model.name), log.fingerprint
    is_here = then and not files.fingerprint_differences(then.fingerprint, here, files.MACHINE_FIELDS)
    why = "" if terms.converged else "The fit did not converge."
    if is_here and earlier is not None:
        why = why or judge.busier(pace.others, earlier)
    rival = content if is_here else files.population(here.platform)
    why = why or judge.why_worse(found, suite.runs(log.cells), section, rival)
    is_written = force or not why
    beside = path.with_name(f"{path.stem}.{model.name}.{'earlier' if is_written else 'worse'}.json")
    if not is_written:
        more = f"Measure more with `{again}` and a larger --budget, or use this fit anyway with `{taken}`."
        done = "changed" if path.exists() else "written"
        notes.append(f"{path} was not {done}: {why} This fit is in {beside}. {more}")
    elif model.name in content.models or left_out:
        files.write_text_file(files.read_file(path).decode(), beside)
        notes.append(f"The earlier calibration is kept as {beside}.")
    compiled, said_of_compiled = _of_compiled(suite, log, made)
    written = files.write_sections(path if is_written else beside, {model.name: section, **compiled}, machine)
    notes += [*said_of_compiled, *written]
    pays = judge.what_pays(found.calibrated, _middle(found.cells, suite))
    cautions = [*judged.cautions, *of_pace.cautions]
    holds = judge.what_holds(found.errors, suite.most_error) if cautions else []
    verdict = judge.Verdict([*judged.said, *holds, *pays, *of_pace.said], cautions)
    return judge.Outcome(path, is_written, kept_at, verdict, section, suite, found, skipped, micro_ns, notes)


def _content_of(path: FilePath, model: LatencyModel) -> tuple[files.CalibrationFile, list[str]]:
    """Return the content of a calibration file with its usable sections, and a sentence for each unusable section."""
    try:
        return files.sections_of_file(path, [model])[:2]
    except ValueError:
        return files.CalibrationFile(models={}), []


def name_samples(path: FilePath, model: LatencyModel, name: str, new: str) -> None:
    """In the section of a calibration file, replace the name of the samples file by the new name."""
    section = _content_of(path, model)[0].models.get(model.name)
    if section and section.samples and section.samples.file == name:
        samples = section.samples.model_copy(update={"file": new})
        files.write_sections(path, {model.name: section.model_copy(update={"samples": samples})})


def _of_compiled(suite: Suite, log: SampleLog, made: dict[str, Any]) -> tuple[dict[str, files.ModelSection], list[str]]:
    """Fit the suite's model of compiled programs. Return its section and a sentence; both are empty without counts."""
    other, cells = suite.of_compiled(), [cell for cell in log.cells if cell.compiled]
    if other is None or not cells or not other.model.facts.keys() <= log.facts.keys():
        return {}, []
    name = other.model.name
    prior = files.population_prior(other.model, log.fingerprint.platform) or other.model.prior
    try:
        found = judge.fitted(other, dataclasses.replace(log, cells=cells), prior)
        if not found.whole.terms.converged:
            raise ValueError(found.whole.terms.message.removesuffix("."))
    except ValueError as error:
        return {}, [f"{name} is not fitted: {error}."]
    judged = judge.verdict_on(found.errors, found.noise_level, other.most_error)
    about = made | {"cautions": judged.cautions}
    section = files.section_of(found.whole, prior, found.errors, found.noise_level, found.outliers(), **about)
    return {name: section}, [f"{name}, fitted to the compiled programs: {' '.join([*judged.said, *judged.cautions])}"]


def checked_cells(suite: Suite) -> tuple[list[Cell], list[str]]:
    """Return the cells of a suite that a fit can use, and a sentence for each cell that a fit cannot use."""
    model, cells, left_out = suite.model, {}, []
    with users_code(f"{model.name}: the suite's cells() fails"):
        wanted = list(suite.cells())
    for cell in wanted:
        if not isinstance(cell, Cell):
            raise ValueError(f"{model.name}: expected cells of type Cell, got a cell of type {type(cell).__name__}")
        try:
            if cell.name in cells:
                raise ValueError("another cell has the same name")
            suite.runs([cell])
            model.check(cell.inputs)
            cells[cell.name] = cell
        except Exception as error:  # noqa: BLE001
            left_out.append(f"{cell.name} is left out: {error}.")
    if not cells:
        raise ValueError(" ".join([f"{model.name}: expected a suite with cells, got none.", *left_out[:1]]))
    return list(cells.values()), left_out


def affordable(order: Sequence[Cell], ready: Ready, left_s: float) -> tuple[list[Cell], list[str]]:
    """Return the cells that the time left allows, at least `MIN_CELLS`, and the names of the dropped slower cells."""
    chosen = [cell for cell in order if cell.name in ready.programs]
    seconds = {cell.name: max(VISIT_S, VISIT_CALLS * ready.times_ns[cell.name] / 1e9) for cell in chosen}
    dropped = []
    while len(seconds) > MIN_CELLS and MIN_ROUNDS * sum(seconds.values()) > max(left_s, 0.0):
        dropped.append(max(seconds, key=lambda name: seconds[name]))
        del seconds[dropped[-1]]
    return [cell for cell in chosen if cell.name in seconds], dropped


def prior_of(suite: Suite, platform: str, file: FilePath | None) -> tuple[LatencyPrior | None, list[str]]:
    """Return the prior of a model, from the file if one is given, else from known machines; and notes for the user."""
    if file is None:
        return files.population_prior(suite.model, platform), []
    known, other = files.read_prior(file, suite.model)
    said = f"The prior is from the platform {other!r}, and this platform is {platform!r}."
    return known, [] if other in (None, platform) else [said]


def _middle(cells: Sequence[Cell], suite: Suite) -> dict[str, Any]:
    """Return the inputs of the middle work: of the shown works, or without these, of the works with the most cells."""
    works = by_work(cells)
    shown = [works[name] for name in suite.shown if name in works]
    most = max(map(len, works.values()))
    candidates = shown or [work for work in works.values() if len(work) == most]
    return dict(candidates[len(candidates) // 2][-1].inputs)
