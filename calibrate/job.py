"""The calibrate job: measure, fit, judge, write. Every phase is bounded by one budget."""

import dataclasses
import datetime
from pathlib import Path as FilePath

import numpy as np

from rlxjax import Calibration, IoFusionGate, LatencyPrior, Provenance, fit_latency, typical_prior
from rlxjax._calibration_file import (
    FORMULA_VERSION,
    GATE_UNITS,
    SCHEMA_VERSION,
    UNITS,
    CalibrationFile,
    FitSummary,
    FittedCoefficient,
    GateCoefficient,
    Samples,
    current_fingerprint,
    default_calibration_path,
)
from rlxjax._files import sha256_of, write_json_file
from rlxjax._fit import MIN_TIMINGS, FitResult
from rlxjax._latency import COEFFICIENT_NAMES, coefficient_unit

from .measure import Deadline, MicroRates, measure_rounds, micro_rates, time_micro
from .plan import memory_limit_bytes, prepare
from .report import Progress
from .samples import SampleLog, SampleWriter, check_resumable, read_samples, set_aside, timings_of
from .validate import error_summaries, measured_domain, noise_floor, predictions_ns
from .workloads import Cell, Grid, split_by_memory

MIN_BUDGET_S = 10.0
#: Seconds, and share of the budget, kept back for two fits (one compilation), judging and writing.
FIT_RESERVE_S, FIT_RESERVE_SHARE = 4.0, 0.1
#: Standard deviation of the logarithm of a coefficient that a micro-benchmark measured by itself.
MICRO_LOG_SD = 0.3
#: The same for bandwidths: a run moves other sizes, in another state of the caches.
TRANSFER_LOG_SD = 1.0
#: Latency coefficients that a micro-benchmark measures by itself, whatever the timed runs show of them.
MICRO_MEASURED = ("dispatch_ns", "roundtrip_ns", "upload_bytes_per_ns", "readback_bytes_per_ns")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a job found, for the report.

    Attributes:
        path: the calibration file.
        samples_path: the raw samples.
        calibration: what the file holds.
        content: the file's content.
        cells: the workloads measured.
        measured_ns: minimum over the rounds, `[cells]`.
        predicted_ns: by the coefficients in the file, `[cells]`.
        skipped: workloads that were not measured, by reason.
        rates: what the micro-benchmarks say.
        notes: sentences that a person should read.
    """

    path: FilePath
    samples_path: FilePath
    calibration: Calibration
    content: CalibrationFile
    cells: list[Cell]
    measured_ns: np.ndarray
    predicted_ns: np.ndarray
    skipped: dict[str, list[str]]
    rates: MicroRates
    notes: list[str]


def run(
    *,
    started_s: float,
    budget_s: float,
    out: FilePath | None,
    resume: bool,
    command: str,
    progress: Progress,
    grid: Grid | None = None,
    seed: int | None = None,
) -> Outcome:
    """Run the whole job.

    Args:
        started_s: `time.perf_counter()` when the command began; the budget counts from there.
        budget_s: seconds for everything, compilation and fitting included.
        out: the calibration file; the default place unless given.
        resume: go on with the samples that an earlier run left beside `out`.
        command: how the job was called, for the file.
        progress: shows the phases.
        grid: the workloads; the default grid unless given.
        seed: of the order of measuring; from the system unless given.

    Raises:
        ValueError: a budget that is too short, samples that cannot be resumed, or too few samples to fit.
    """
    if not MIN_BUDGET_S <= budget_s < float("inf"):
        raise ValueError(f"--budget: expected at least {MIN_BUDGET_S:g} seconds, got {budget_s:g}")
    grid = Grid() if grid is None else grid
    path = default_calibration_path() if out is None else out
    if path.is_dir():
        raise ValueError(f"--out: expected a file, got the folder {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    samples_path = path.with_suffix(".samples.jsonl")
    fit_at_s = started_s + budget_s - max(FIT_RESERVE_S, FIT_RESERVE_SHARE * budget_s)
    cells, too_large = split_by_memory(grid.cells(), memory_limit_bytes())
    skipped = {"would not fit in memory": [str(cell) for cell in too_large]} if too_large else {}
    here, notes = current_fingerprint(), []

    if resume:
        log = read_samples(samples_path, mend_tail=True)
        check_resumable(log, samples_path, grid.cells(), here)
    else:
        log = SampleLog(here)
        if aside := set_aside(samples_path):
            notes.append(f"Earlier samples were kept as {aside}.")

    rng, deadline = np.random.default_rng(seed), Deadline(fit_at_s)
    with SampleWriter(samples_path, log, append=resume) as writer:
        try:
            with progress.phase("micro-benchmarks"):
                time_micro(log, writer)
            plan = prepare(log, cells, rng, deadline, progress)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"samples so far are in {samples_path}: go on with --resume") from None
        if plan.cells != log.cells:
            writer.cells(plan.cells)
        if plan.is_ready:
            with progress.phase("measuring", deadline) as advance:
                measure_rounds(log, writer, plan.signals, deadline, rng, advance)
        else:
            notes.append("No time was left to measure more: this is the fit of the earlier samples.")
    skipped |= plan.left_out
    if deadline.interrupted:
        notes.append("Measuring was interrupted: this is the fit of what was measured until then.")
    with progress.phase("fitting"):
        return _fit_and_write(log, grid, path, samples_path, command, skipped, notes)


def _fit_and_write(
    log: SampleLog,
    grid: Grid,
    path: FilePath,
    samples_path: FilePath,
    command: str,
    skipped: dict[str, list[str]],
    notes: list[str],
) -> Outcome:
    cells, times_ns = log.cells, log.times_ns()
    if not len(times_ns):
        fullest = max(log.rounds, key=len, default={})
        cells = [cell for cell in log.cells if cell in fullest]
        if len(cells) < MIN_TIMINGS:
            raise ValueError(
                f"only {len(cells)} workloads were measured, too few to fit; they are in {samples_path}: "
                "go on with --resume"
            )
        times_ns = np.array([[fullest[cell] for cell in cells]], np.int64)
        notes.append("No round was finished: every workload counts once, and some are missing.")
    measured_ns, noise = times_ns.min(0).astype(float), noise_floor(times_ns)
    if np.isnan(noise).any():
        notes.append("A single round says nothing of the noise.")
    timings = timings_of(cells, measured_ns)
    rates = micro_rates(log)
    prior = micro_prior(rates)
    # Two fits: the held-out errors are those of a fit that never saw these workloads; the file gets the
    # coefficients of the same fit of all of them.
    final = fit_latency(timings, prior)
    seen = np.array([grid.place(cell.batch, cell.n_fft) == "fit" for cell in cells])
    if MIN_TIMINGS <= seen.sum() < len(cells):
        blind = fit_latency(timings, prior, seen.astype(float))
    else:
        blind, seen = final, np.ones_like(seen)
        notes.append("Too few workloads were measured to hold any out: there is no held-out error.")
    predicted_blind_ns = predictions_ns(blind.coefficients, cells)
    summaries = error_summaries(cells, measured_ns, predicted_blind_ns, noise, grid, seen)
    content = CalibrationFile(
        schema_version=SCHEMA_VERSION,
        formula_version=FORMULA_VERSION,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        units=UNITS,
        fingerprint=log.fingerprint,
        coefficients=_fitted(final),
        gate=_gate(measured_gate(rates)),
        noise_floor=None if np.isnan(noise).any() else float(noise.mean()),
        held_out=dict(summaries),
        domain=measured_domain(cells),
        samples=Samples(
            file=samples_path.name,
            sha256=sha256_of(samples_path),
            timings=sum(len(measured) for measured in log.rounds),
            rounds=len(times_ns),
            workloads=len(cells),
        ),
        fit=FitSummary(converged=final.converged, loss=final.loss, message=final.message),
        skipped=[f"{name}: {reason}" for reason, names in skipped.items() for name in names],
    )
    if not final.converged:
        notes.append(final.message)
    write_json_file(content, path)
    predicted_ns = predictions_ns(final.coefficients, cells)
    return Outcome(
        path,
        samples_path,
        Calibration.from_file(content),
        content,
        cells,
        measured_ns,
        predicted_ns,
        skipped,
        rates,
        notes,
    )


def micro_prior(rates: MicroRates) -> LatencyPrior:
    """Return the wide prior, narrowed where a micro-benchmark measured a coefficient by itself."""
    waits = {"dispatch_ns": rates.dispatch_ns, "roundtrip_ns": rates.roundtrip_ns}
    transfers = {
        "far_bytes_per_ns": rates.memory_bytes_per_ns,
        "upload_bytes_per_ns": rates.upload_bytes_per_ns,
        "readback_bytes_per_ns": rates.readback_bytes_per_ns,
    }
    prior = typical_prior()
    log_sds = dict.fromkeys(waits, MICRO_LOG_SD) | dict.fromkeys(transfers, TRANSFER_LOG_SD)
    return LatencyPrior(
        dataclasses.replace(prior.median, **waits, **transfers), dataclasses.replace(prior.log_sd, **log_sds)
    )


def measured_gate(rates: MicroRates) -> IoFusionGate:
    """Return the IO gate with this machine's rates.

    A readback is charged at its measured bandwidth, whatever the memory; an added sync point costs its
    round trip and no penalty on top; any gain counts.
    """
    return IoFusionGate.checked(
        dispatch_ns=rates.dispatch_ns,
        roundtrip_ns=rates.roundtrip_ns,
        memory_bw=rates.memory_bytes_per_ns,
        host_readback_bw=rates.readback_bytes_per_ns,
        unified_memory=False,
        host_thunk_penalty_ns=0.0,
        min_gain_ns=0.0,
    )


def _fitted(result: FitResult) -> dict[str, FittedCoefficient]:
    def provenance(name: str) -> Provenance:
        measured = result.informed[name] or name in MICRO_MEASURED
        return Provenance.MEASURED if measured else Provenance.UNCALIBRATED

    return {
        name: FittedCoefficient(
            value=getattr(result.coefficients, name), unit=coefficient_unit(name), provenance=provenance(name)
        )
        for name in COEFFICIENT_NAMES
    }


def _gate(gate: IoFusionGate) -> dict[str, GateCoefficient]:
    chosen = ("unified_memory", "host_thunk_penalty_ns", "min_gain_ns")
    return {
        name: GateCoefficient(
            value=float(getattr(gate, name)),
            unit=unit,
            provenance=Provenance.ARCH_DEFAULT if name in chosen else Provenance.MEASURED,
        )
        for name, unit in GATE_UNITS.items()
    }
