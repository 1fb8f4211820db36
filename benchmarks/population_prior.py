"""Make the shipped prior from several machines, and judge the prior with each machine left out.

    python -m benchmarks.population_prior [SAMPLES ...] [--functions FILE ...] [--programs FILE]
        [--platform gpu] [--write] [--json FILE]

SAMPLES are campaigns of Welch peaks, one per machine. `--functions` names samples of functions. `--programs` names the
compiled GPU programs of these functions; the model of GPU kernels is fitted to them with each card's data sheet. Each
campaign has its own fit from the model's wide prior, and `transferred_prior` pools the fits. To judge, all other
machines predict each campaign without its timings. `--write` writes the file in the package; models without samples
keep their sections.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import decision_metrics as metrics
from benchmarks._campaigns import Campaign, compiled_texts, estimates, read_campaign, read_gpu_samples
from benchmarks._common import options, table, write
from calibrate.judge import fitted
from calibrate.machine import CANARIES, micro_times_ns
from calibrate.samples import read_samples
from calibrate.suites import suite_of
from calibrate.suites.functions import KernelsSuite
from rlxjax import fit_posterior
from rlxjax.calibration import (
    SPEED_LOG_SD,
    CalibrationFile,
    Machine,
    ModelSection,
    population_path,
    population_prior,
    population_section,
    section_of,
    sha256_of,
    write_json_file,
)
from rlxjax.fit import (
    COVERED_SDS,
    LatencyPosterior,
    LatencyPrior,
    PosteriorFit,
    prior_posterior,
    transferred_prior,
)
from rlxjax.models import FUNCTIONS, GPU_KERNELS, WELCH
from rlxjax.welch import schedule

#: The figures of a machine that are shares.
SHARES = ("error", "regret_p95", "regret_max", "within_interval")
RATIOS = ("scale", "over_best")
#: Standard deviation of the logarithm of a coefficient of functions on another platform than CPUs.
OTHER_PLATFORM_SD = 1.5


class Timed(NamedTuple):
    """A machine's campaign and its own fit."""

    campaign: Campaign
    fit: PosteriorFit


def machine_of(path: Path) -> Timed:
    """Read a campaign and fit only this campaign."""
    own = read_campaign(path)
    return Timed(own, fit_posterior(own.timings, own.prior, facts=own.facts))


def judged(machine: Timed, others: Sequence[Timed]) -> dict[str, Any]:
    """Return the quality of other machines' predictions of a machine: picks and errors."""
    own, prior = machine.campaign, transferred_prior(*(other.fit.posterior for other in others))
    found = estimates(prior_posterior(WELCH, prior, facts=own.facts), own.cells)
    table = metrics.workloads_of(own.cells)
    regret = metrics.regrets(table.table(found.time_ns), table.table(own.measured_ns))
    logs = np.log(own.measured_ns / np.asarray(found.time_ns))
    scale = float(np.median(logs))
    return {
        "machine": own.path.name,
        "runner": own.log.header.runner,
        "scale": float(np.exp(scale)),
        "error": float(np.mean(np.abs(np.expm1(logs - scale)))),
        "regret_p95": float(np.percentile(regret, 95)),
        "regret_max": float(regret.max()),
        "over_best": float(np.exp(np.mean(np.log1p(regret)))),
        "within_interval": float(np.mean(np.abs(logs) <= COVERED_SDS * np.hypot(found.log_sd(), SPEED_LOG_SD))),
    }


def pooled(posteriors: Sequence[LatencyPosterior]) -> LatencyPrior[Any]:
    """Return the prior of a new machine from some machines."""
    return transferred_prior(*posteriors)


def of_kernels(paths: Sequence[Path], programs: Path) -> ModelSection:
    """Return the prior of the model of GPU kernels from cards' samples of functions; print the fits' errors."""
    timed = KernelsSuite(compiled_texts(programs))
    found, sources, rows = [], [], []
    for path in paths:
        log = read_gpu_samples(path)
        own = fitted(timed, log, GPU_KERNELS.prior)
        said = section_of(own.whole, GPU_KERNELS.prior)
        about = {"fingerprint": log.fingerprint, "samples": path.name, "sha256": sha256_of(path), "runner": 1}
        sources.append(Machine(**about, coefficients=said.coefficients, uncertainty=said.uncertainty))
        found.append(own)
        for name, one in own.errors.items():
            held_out = f"{100 * one.held_out:.1f}" if one.held_out is not None else "-"
            rows.append((path.name, name, one.held_out_cells, held_out, f"{100 * (one.noise_floor or 0.0):.1f}"))
    print("\nGPU kernels, errors in per cent")
    print(table(["samples", "family", "cells held out", "held out", "noise"], rows))
    fits, measured_ns = [one.whole for one in found], [one.measured_ns for one in found]
    return population_section(fits, measured_ns, pooled, dict(GPU_KERNELS.facts), sources, "gpu")


def of_welch(machines: Sequence[Timed], platform: str, command: str) -> ModelSection:
    """Return the prior of a new machine from campaigns of Welch peaks."""
    facts = {**WELCH.facts, "processors": 2 if platform == "cpu" else 1}
    facts |= {name: value for name, value in schedule(platform)._asdict().items() if name in facts}
    sources = [
        Machine(
            fingerprint=one.campaign.log.fingerprint,
            canary_ns={name: time_ns for name, time_ns in micro_times_ns(one.campaign.log).items() if name in CANARIES},
            samples=one.campaign.path.name,
            sha256=sha256_of(one.campaign.path),
            runner=one.campaign.log.header.runner,
        )
        for one in machines
    ]
    fits, measured_ns = [one.fit for one in machines], [one.campaign.measured_ns for one in machines]
    return population_section(fits, measured_ns, pooled, facts, sources, platform, command)


def main() -> None:
    """Fit, judge, print, write."""
    parser = options(__doc__)
    parser.add_argument("samples", nargs="*", type=Path)
    parser.add_argument("--functions", nargs="*", type=Path, default=[])
    parser.add_argument("--programs", type=Path, help="programs.json.gz of benchmarks.accelerator")
    parser.add_argument("--platform", default="cpu", help="of the machines, as JAX calls it")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    machines = [machine_of(path) for path in given.samples]
    rows = [judged(one, [other for other in machines if other is not one]) for one in machines if len(machines) > 1]
    print("each machine by the others, in per cent but for ratios")
    figures = [
        (row["machine"], row["runner"], *(f"{100 * row[name]:.1f}" for name in SHARES))
        + tuple(f"{row[name]:.3f}" for name in RATIOS)
        for row in rows
    ]
    print(table(["machine", "runner", *SHARES, *RATIOS], figures))
    write(given.json, {"left_out": rows})
    if not given.write:
        return
    path = population_path(given.platform)
    command = shlex.join(["python", "-m", "benchmarks.population_prior", *sys.argv[1:]])
    models = dict(CalibrationFile.model_validate_json(path.read_text(encoding="utf-8")).models)
    if machines:
        models[WELCH.name] = of_welch(machines, given.platform, command)
    if given.functions:
        logs, timed = [(path, read_samples(path)) for path in given.functions], suite_of("functions")
        known = FUNCTIONS.prior
        if given.platform != "cpu":  # the shipped medians come from CPUs
            known = known._replace(log_sd=jax.tree.map(lambda _: OTHER_PLATFORM_SD, known.log_sd))
        fits = [fitted(timed, log, known).whole for _, log in logs]
        sources = [
            Machine(fingerprint=log.fingerprint, samples=path.name, sha256=sha256_of(path), runner=1)
            for path, log in logs
        ]
        models[FUNCTIONS.name] = population_section(
            fits, None, pooled, dict(FUNCTIONS.facts), sources, given.platform, command
        )
    if given.programs:
        models[GPU_KERNELS.name] = of_kernels(given.functions, given.programs)
    write_json_file(CalibrationFile(models=models), path)
    population_prior(WELCH, given.platform)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
