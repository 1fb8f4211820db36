"""Judge the calibrate command at its default budget, on a cold cache, run after run, by independent timings.

    python -m benchmarks.default_runs FOLDER [--runs 10] [--truth-s 25] [--workloads 70] [--arguments "--only welch"]
    python -m benchmarks.default_runs FOLDER --judge [--json FILE]

Each run is its own process with an empty RLXJAX_HOME. Between the runs, this process times workloads outside every grid
with the job's protocol: random batches, segment lengths and numbers of peaks, powers of two or not. FOLDER keeps the
calibrations, the command's output and the samples of the independent timings. `--judge` reads the finished runs in
FOLDER.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import decision_metrics as metrics
from benchmarks._campaigns import WITHOUT_MODEL, estimates, read_campaign, sampled
from benchmarks._common import options, write
from calibrate.suites.welch import welch_cell
from rlxjax import load_calibration
from rlxjax.fit import COVERED_SDS, Cell, Estimate
from rlxjax.models import WELCH

#: Segment lengths of the independent workloads, and the most samples of one.
LENGTHS = (96, 128, 160, 192, 256, 320, 384, 400, 480, 512, 600, 768, 1000, 1024, 1200, 1280, 1536, 1920, 2048)
MOST_ROWS, MOST_PEAKS, MOST_SAMPLES = 131_072, 64, 2**22
SEED = 32


class Judged(NamedTuple):
    """The quality of one calibration.

    Attributes:
        scale: the median of measured over predicted times of all cells.
        errors: mean absolute relative error of each strategy without the scale.
        odd_errors: the same for lengths that are no power of two.
        ordered: share of pairs ordered as measured.
        pairs: the number of pairs.
        far_wrong: the number of misordered pairs that differ by more than 15 %.
        regret_p95: 95th percentile of the picks' regrets.
        regret_max: the largest regret.
        covered: share of times within their 90 % interval, with the scale.
        ready: whether the command said "ready".
    """

    scale: float
    errors: dict[str, float]
    odd_errors: dict[str, float]
    ordered: float
    pairs: int
    far_wrong: int
    regret_p95: float
    regret_max: float
    covered: float
    ready: bool


def independent_cells(count: int, seed: int = SEED) -> list[Cell]:
    """Return random workloads, each with every strategy that needs no learned model."""
    rng, workloads = np.random.default_rng(seed), {}
    while len(workloads) < count:
        batch = round(float(np.exp(rng.uniform(0, np.log(MOST_ROWS)))))
        n_fft, k = int(rng.choice(LENGTHS)), round(float(np.exp(rng.uniform(0, np.log(MOST_PEAKS)))))
        if batch * n_fft <= MOST_SAMPLES:
            workloads[batch, n_fft, k] = None
    return [welch_cell(group, *sizes) for sizes in workloads for group in WITHOUT_MODEL]


def run(folder: Path, runs: int, truth_s: float, workloads: int, arguments: Sequence[str]) -> None:
    """Calibrate again and again, with independent timings before, between and after."""
    folder.mkdir(parents=True, exist_ok=True)
    with sampled(independent_cells(workloads), folder / "truth.samples.jsonl") as take:
        take(truth_s)
        for number in range(runs):
            calibrate(folder / f"run-{number}.json", arguments)
            take(truth_s)


def calibrate(out: Path, arguments: Sequence[str]) -> None:
    """Run the calibrate command in a new process without earlier results, and keep its output."""
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "rlxjax", "calibrate", "--out", str(out), *arguments]
        begun_s = time.perf_counter()
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | {"RLXJAX_HOME": home}
        )
        taken_s = time.perf_counter() - begun_s
    text = f"$ {shlex.join(command)}\n{done.stdout}{done.stderr}exit status {done.returncode}, {taken_s:.1f} s\n"
    out.with_suffix(".txt").write_text(text, encoding="utf-8")
    print(f"{out.stem}: exit status {done.returncode}, {taken_s:.1f} s", flush=True)


def judge(file: Path, cells: Sequence[Cell], measured_ns: np.ndarray, noise: np.ndarray) -> Judged:
    """Return the quality of a calibration file by independent timings, `[cells]`."""
    calibration = load_calibration(file)
    calibrated = calibration.of(WELCH.name)
    found: Estimate = estimates(calibrated.posterior, cells)
    logs = np.log(measured_ns / np.asarray(found.time_ns))
    scale = float(np.median(logs))
    names, lengths = np.array([cell.group for cell in cells]), np.array([int(cell.inputs["n_fft"]) for cell in cells])
    odd = lengths & (lengths - 1)
    errors = np.abs(np.expm1(scale - logs))
    reach = COVERED_SDS * np.hypot(np.asarray(found.log_sd()), calibrated.pace_log_sd)
    table = metrics.workloads_of(cells)
    measured, said = table.table(measured_ns), table.table(np.asarray(found.time_ns))
    of_strategy = {name: noise[names == name].mean() for name in np.unique(names)}
    ordered, n_pairs = metrics.ordering(said, measured, table.table(np.array([of_strategy[name] for name in names])))
    pairs = metrics.pairs_of(measured)
    (one, other), (said_one, said_other) = pairs.of(measured), pairs.of(said)
    is_far = np.maximum(one, other) / np.minimum(one, other) > 1.15
    regret = metrics.spread(metrics.regrets(said, measured))
    return Judged(
        scale=float(np.exp(scale)),
        errors={name: float(errors[names == name].mean()) for name in dict.fromkeys(names)},
        odd_errors={name: float(errors[(names == name) & (odd > 0)].mean()) for name in dict.fromkeys(names)},
        ordered=ordered,
        pairs=n_pairs,
        far_wrong=int((is_far & ((said_one < said_other) != (one < other))).sum()),
        regret_p95=regret["p95"],
        regret_max=regret["max"],
        covered=float((np.abs(logs) <= reach).mean()),
        ready=not calibrated.cautions,
    )


def report(folder: Path) -> dict[str, Any]:
    """Judge the runs of a folder, print a line each, and return all figures."""
    _, log, cells, visits, measured_ns, noise, *_ = read_campaign(folder / "truth.samples.jsonl")
    files = sorted(folder.glob("run-?.json")) + sorted(folder.glob("run-??.json"))
    judged = {file.stem: judge(file, cells, measured_ns, noise) for file in files}
    print(f"{len(cells)} cells, {len(visits.rounds())} rounds, noise {noise.mean():.1%}")
    print("per cent; errors by strategy with the common scale taken out (lengths that are no power of two)")
    for name, one in judged.items():
        errors = " ".join(f"{key} {100 * v:.1f} ({100 * one.odd_errors[key]:.1f})" for key, v in one.errors.items())
        print(
            f"{name}: scale {one.scale:.3f}; {errors}; ordered {100 * one.ordered:.2f} of {one.pairs}, far off "
            f"{one.far_wrong}; regret {100 * one.regret_p95:.2f}, {100 * one.regret_max:.2f}; covered "
            f"{100 * one.covered:.0f}; {'ready' if one.ready else 'cautions'}"
        )
    if judged:
        print(f"covered, all runs: {100 * np.mean([one.covered for one in judged.values()]):.1f}")
    return {
        "fingerprint": log.fingerprint.model_dump(),
        "cells": len(cells),
        "rounds": len(visits.rounds()),
        "noise": float(noise.mean()),
        "runs": {name: one._asdict() for name, one in judged.items()},
    }


def main() -> None:
    """Run the command."""
    parser = options(__doc__, runs=10, truth_s=25.0, workloads=70)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arguments", default="", help="of the calibrate command")
    parser.add_argument("--judge", action="store_true", help="judge what is there, and run nothing")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if not given.judge:
        run(given.folder, given.runs, given.truth_s, given.workloads, shlex.split(given.arguments))
    write(given.json, report(given.folder))


if __name__ == "__main__":
    main()
