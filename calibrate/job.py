"""The calibrate job: measure, fit, judge, write. Every phase is bounded by one budget."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path as FilePath

import numpy as np

from rlxjax import Calibration, IoFusionGate, LatencyPrior, Provenance
from rlxjax.calibration import (
    GATE_UNITS,
    CalibrationFile,
    GateCoefficient,
    MachineSection,
    Samples,
    current_fingerprint,
    default_calibration_path,
    file_to_write,
    machine_section,
    made_now,
    population_prior,
    section_of,
    sha256_of,
    write_sections,
)
from rlxjax.fit import MIN_TIMINGS, Facts
from rlxjax.models import WELCH
from rlxjax.welch import RUNNER_VERSION, schedule

from .canary import canary_times_ns, pace_of
from .clock import Deadline
from .fits import EnoughKnown, check_fittable, fit_twice, prior_from, starting_prior, widened
from .interrupts import last_act
from .measure import measure_rounds
from .micro import MicroRates, micro_rates, time_micro
from .outcome import Outcome, shortened
from .plan import memory_limit_bytes, prepare
from .progress import Progress
from .samples import SampleLog, SampleWriter, check_resumable, read_samples, said_of_protocol, timings_of
from .validate import OUTLIER_FACTOR, error_summaries, outliers
from .verdict import Verdict, said_of_pace, verdict_on, what_pays
from .visits import Visits, noise_floor, quantile_ns
from .workloads import Grid, Models, load_models, split_by_memory

MIN_BUDGET_S = 10.0
#: Seconds, and share of the budget, kept back for two fits (one compilation), judging and writing.
FIT_RESERVE_S, FIT_RESERVE_SHARE = 4.0, 0.1


def run(
    *,
    started_s: float,
    budget_s: float,
    out: FilePath | None,
    resume: bool,
    command: str,
    progress: Progress,
    models: Sequence[FilePath] = (),
    grid: Grid | None = None,
    seed: int | None = None,
    force: bool = False,
    prior: FilePath | None = None,
) -> Outcome:
    """Run the whole job.

    Args:
        started_s: `time.perf_counter()` when the command began; the budget counts from there.
        budget_s: seconds for everything, compilation and fitting included.
        out: the calibration file; the default place unless given.
        resume: go on with the samples that an earlier run left beside `out`.
        command: how the job was called, for the file.
        progress: shows the phases.
        models: files of learned FFTs to time, each of another segment length.
        grid: the workloads; the default grid unless given.
        seed: of the order of measuring; from the system unless given.
        force: write a calibration even if a fit did not converge.
        prior: a calibration file to start from, of any machine.

    Raises:
        ValueError: a budget that is too short, an `out` that is no file, a prior or a model that is none,
            two models of one segment length, samples that cannot be resumed, too few samples to fit, or all
            of one batch and n_fft.
        KeyboardInterrupt: Ctrl-C before there was enough to fit.
    """
    if not MIN_BUDGET_S <= budget_s < float("inf"):
        raise ValueError(f"--budget: expected at least {MIN_BUDGET_S:g} seconds, got {budget_s:g}")
    grid = Grid() if grid is None else grid
    path = default_calibration_path() if out is None else out
    file_to_write(path)
    timed_models = load_models(models)
    here, notes = current_fingerprint(), []
    known = population_prior(WELCH, here.platform)
    if prior is not None:
        known, platform = prior_from(prior)
        if platform != here.platform:
            notes.append(f"The prior is of another platform: {platform!r}, and this is {here.platform!r}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    samples_path = path.with_suffix(".samples.jsonl")
    fit_at_s = started_s + budget_s - max(FIT_RESERVE_S, FIT_RESERVE_SHARE * budget_s)
    wanted = grid.cells(timed_models, here.platform)
    cells, too_large = split_by_memory(wanted, memory_limit_bytes())
    digests = {n_fft: timed.sha256 for n_fft, timed in timed_models.items()}
    skipped = {"would not fit in memory": [str(cell) for cell in too_large]}
    if resume:
        log = read_samples(samples_path, mend="leave out --resume to start anew", mend_tail=True)
        check_resumable(log, samples_path, wanted, here, digests)
    else:
        log = SampleLog(here)
        file_to_write(samples_path)

    rng, deadline = np.random.default_rng(seed), Deadline(fit_at_s)
    with (
        last_act(lambda: f"samples so far are in {samples_path}: go on with --resume"),
        SampleWriter(samples_path, log, append=resume) as writer,
    ):
        if writer.aside:
            notes.append(f"Earlier samples were kept as {writer.aside}.")
        if digests != log.models:
            writer.models(digests)
        with progress.phase("micro-benchmarks"):
            time_micro(log, writer)
        start, facts = starting_prior(micro_rates(log), known), facts_of(log, timed_models)
        plan = prepare(log, cells, timed_models, grid, start, facts, rng, deadline, progress)
        if plan.cells != log.cells:
            writer.cells(plan.cells)
        if plan.is_ready:
            enough = EnoughKnown(log, grid, start, facts, deadline)
            with progress.phase("measuring", deadline) as advance:
                measure_rounds(log, writer, plan.signals, deadline, rng, advance, enough)
        else:
            notes.append("No time was left to measure more: this is the fit of the earlier samples.")
    skipped |= plan.left_out
    if deadline.interrupted:
        notes.append("Measuring was interrupted: this is the fit of what was measured until then.")
    try:
        with progress.phase("fitting"):
            found = fit_and_write(log, grid, timed_models, path, samples_path, command, skipped, notes, force, known)
    except ValueError as too_little:
        if deadline.interrupted:
            raise KeyboardInterrupt(str(too_little)) from None
        raise
    return dataclasses.replace(found, is_interrupted=deadline.interrupted)


def fit_and_write(
    log: SampleLog,
    grid: Grid,
    models: Models,
    path: FilePath,
    samples_path: FilePath,
    command: str,
    skipped: dict[str, list[str]],
    notes: list[str],
    force: bool,
    known: LatencyPrior | None,
) -> Outcome:
    """Fit samples, of whatever machine they are, judge the fit, and write the calibration of that machine."""
    cells, visits, here = log.cells, log.visits(), log.fingerprint
    if log.runner != RUNNER_VERSION:
        notes.append(
            f"The samples are of runner {log.runner}, and this is runner {RUNNER_VERSION}: what is fitted to "
            "them says what that one takes."
        )
    notes.extend(said_of_protocol(log.protocol))
    if not len(visits.rounds()):
        time_ns = dict(max(log.rounds, key=len, default=[]))
        cells = [cell for cell in log.cells if cell in time_ns]
        visits = Visits.of_rounds(np.array([[time_ns[cell] for cell in cells]], float))
        notes.append("No round was finished: every workload counts once, and some are missing.")
    check_fittable(cells, samples_path)
    measured_ns, noise = quantile_ns(visits), noise_floor(visits)
    if np.isnan(noise).any():
        notes.append("A single round says nothing of the noise.")
    rates = micro_rates(log)
    seen = grid.seen(cells)
    if not MIN_TIMINGS <= seen.sum() < len(cells):
        seen = np.ones_like(seen)
        notes.append("Too few workloads were measured to hold any out: there is no held-out error.")
    timings, prior = timings_of(cells, measured_ns), starting_prior(rates, known)
    fitted = widened(fit_twice(timings, seen, prior, facts_of(log, models)), timings, seen)
    final = fitted.whole.terms
    predicted_ns = np.asarray(fitted.estimate.time_ns)
    far_off = outliers(cells, measured_ns, predicted_ns)
    if far_off:
        notes.append(
            f"{len(far_off)} of {len(cells)} workloads are off by more than {OUTLIER_FACTOR:g} times and "
            f"counted little in the fit: {shortened(list(far_off.values()))}."
        )
    if not fitted.blind_converged:
        notes.append("The fit that gives the held-out errors did not converge.")
    is_written = force or final.converged
    if not final.converged:
        notes.append(final.message)
    if not is_written:
        taken = shlex.join(["rlxjax", "refit", str(samples_path), "--out", str(path), "--force"])
        notes.append(
            "No calibration was written. Measure more with `rlxjax calibrate --resume` and a larger "
            f"--budget, or take it as it is with `{taken}`."
        )
    summaries = error_summaries(cells, measured_ns, fitted.blind, fitted.blind_terms_ns, noise, grid, seen, models)
    noise_level = None if np.isnan(noise).any() else float(noise.mean())
    judged, pace = verdict_on("workloads", summaries, noise_level), pace_of(log, machine_section(path, here))
    of_pace = said_of_pace(pace, here.cores)
    samples = Samples(
        file=samples_path.name,
        sha256=sha256_of(samples_path),
        runner=log.runner,
        timings=sum(len(round_) for round_ in log.rounds),
        rounds=len(visits.rounds()),
        workloads=len(cells),
    )
    made = made_now() | {"command": command, "fingerprint": here, "samples": samples}
    section = section_of(
        fitted.whole,
        WELCH.prior if known is None else known,
        summaries,
        noise_level,
        list(far_off.values()),
        **made,
        cautions=judged.cautions,
        skipped=[f"{name}: {reason}" for reason, names in skipped.items() for name in names],
        learned_ffts=[timed.described() for timed in models.values()],
    )
    machine = MachineSection(
        **made,
        gate=_measured_gate(rates, here.platform),
        canary_ns=canary_times_ns(log),
        pace=pace,
        cautions=of_pace.cautions,
    )
    if is_written:
        notes += write_sections(path, {WELCH.name: section}, machine)
    content = CalibrationFile(models={WELCH.name: section}, machine=machine)
    calibration = Calibration.from_file(content)
    return Outcome(
        path,
        is_written,
        samples_path,
        Verdict([*judged.said, what_pays(calibration), *of_pace.said], [*judged.cautions, *of_pace.cautions]),
        calibration,
        content,
        section,
        cells,
        measured_ns,
        predicted_ns,
        skipped,
        rates,
        notes,
    )


def facts_of(log: SampleLog, models: Models) -> Facts:
    """Return how the runner that was timed schedules, and what the learned FFTs take that it was given."""
    works = [timed.work for timed in models.values()]
    numbers = {**WELCH.facts, "processors": log.fingerprint.cores if log.fingerprint.platform == "cpu" else 1}
    if log.runner == RUNNER_VERSION:
        known = schedule(log.fingerprint.platform)._asdict()
        numbers |= {name: known[name] for name in numbers if name in known}
    return {
        **numbers,
        "learned_n_fft": np.array(list(models), float),
        "learned_flop": np.array([work.flop for work in works], float),
        "learned_live_bins": np.array([work.live_bins for work in works], float),
    }


def _measured_gate(rates: MicroRates, platform: str) -> dict[str, GateCoefficient]:
    """Return the IO gate with this machine's rates.

    A readback is charged at its measured bandwidth, whatever the memory; an added sync point costs its
    round trip and no penalty on top; any gain counts.
    """
    measured = {
        "dispatch_ns": rates.dispatch_ns,
        "roundtrip_ns": rates.roundtrip_ns,
        "memory_bw": rates.memory_bytes_per_ns,
        "host_readback_bw": rates.readback_bytes_per_ns,
    }
    chosen = {"unified_memory": False, "host_thunk_penalty_ns": 0.0, "min_gain_ns": 0.0}
    gate = IoFusionGate.checked(**measured, **chosen)
    provenance = dict.fromkeys(measured, Provenance.MEASURED) | dict.fromkeys(chosen, Provenance.ARCH_DEFAULT)
    if platform == "cpu":  # what the host reads is where it is: a view's time says nothing of a readback
        provenance["host_readback_bw"] = Provenance.UNCALIBRATED
    return {
        name: GateCoefficient(value=float(getattr(gate, name)), unit=unit, provenance=provenance[name])
        for name, unit in GATE_UNITS.items()
    }
