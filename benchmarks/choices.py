"""Measure the regret of choices: by the model alone, by measuring when the model is unsure, by measuring always.

    python -m benchmarks.choices CALIBRATION [--sizes 150] [--seed 45] [--judge-s 1.2] [--json FILE]

Workloads of Welch peaks are drawn at random, with rows, segments and peaks that the calibrate job does not time. Each
value of `measure` runs in its own process with an empty memory. Then all variants are timed in random order, in two
passes over all workloads, and these times judge. The regret of a choice is its slowdown against the fastest variant.
The noise is the difference between the regrets of the two passes.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import rlxjax as rx
from benchmarks._common import judged_ns, options, table, write
from calibrate.suites.welch import GRID_BATCHES, GRID_KS, GRID_N_FFTS
from rlxjax.calibration import default_calibration_path
from rlxjax.choices import Choice
from rlxjax.welch import choose_variant

MEASURES = ("never", "always", "undecided")
VARIANTS = ("host", "fused_maxima", "fused_top_k", "block")
MOST_ROWS, MOST_PEAKS, MOST_SAMPLES = 131_072, 64, 2**22


def is_smooth(number: int) -> bool:
    """Return whether a number has no prime factor above 7."""
    for factor in (2, 3, 5, 7):
        while number % factor == 0:
            number //= factor
    return number == 1


#: Segment lengths that the calibrate job does not time.
LENGTHS = np.array([n for n in range(66, 3000, 2) if is_smooth(n) and n not in GRID_N_FFTS])


def workloads(count: int, seed: int) -> list[tuple[int, int, int]]:
    """Return rows, samples of a segment and peaks, drawn uniformly in their logarithms."""
    rng, found = np.random.default_rng(seed), {}
    while len(found) < count:
        batch, wanted, k = np.exp(rng.uniform(np.log((1, 66, 1)), np.log((MOST_ROWS, 3000, MOST_PEAKS))))
        n_fft = int(LENGTHS[np.argmin(np.abs(np.log(LENGTHS / wanted)))])
        sizes = round(batch), n_fft, min(round(k), n_fft // 2 + 1)
        if sizes[0] not in GRID_BATCHES and sizes[2] not in GRID_KS and sizes[0] * n_fft <= MOST_SAMPLES:
            found[sizes] = None
    return list(found)


def signal_of(batch: int, n_fft: int, k: int) -> tuple[np.ndarray, rx.WelchPeakParams]:
    """Return rows of noise with a tone in each, and parameters."""
    params = rx.WelchPeakParams.fast(n_fft, k)
    signal = np.random.default_rng(n_fft).standard_normal((batch, params.frame_len), np.float32)
    return signal + 2 * np.sin(0.7 * np.arange(params.frame_len, dtype=np.float32)), params


def chosen(sizes: list[tuple[int, int, int]], measure: str) -> list[dict[str, Any]]:
    """Return the choice for each workload, one after the other, and its seconds."""
    found = []
    choose_variant(*signal_of(64, 256, 16), measure="never")  # imports, and programs of the model
    for own in sizes:
        begun_s = time.perf_counter()
        choice: Choice = choose_variant(*signal_of(*own), measure=measure)
        seconds = time.perf_counter() - begun_s
        found.append({"name": choice.name, "by": choice.by, "is_tie": choice.is_tie, "seconds": seconds}
                     | {"probability": choice.probability, "rounds": choice.rounds})  # fmt: skip
    return found


def fresh(calibration: Path, given: Any, measure: str) -> list[dict[str, Any]]:
    """Return the choices of a process with the calibration and without memory."""
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {"RLXJAX_HOME": home}
        shutil.copy(calibration, Path(home) / default_calibration_path().name)
        command = [sys.executable, "-m", "benchmarks.choices", str(calibration), "--choose", measure]
        command += ["--sizes", str(given.sizes), "--seed", str(given.seed)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def forms(sizes: tuple[int, int, int]) -> dict[str, Any]:
    """Return a call of each variant of a workload."""
    signal, params = signal_of(*sizes)
    return {name: functools.partial(rx.welch_peaks, signal, params, name) for name in VARIANTS}


def regrets(names: list[str], times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the regret of the choices for each workload, and its noise."""
    places = [VARIANTS.index(name) for name in names]
    logs = np.log(times)
    rows = np.arange(len(names))
    best = np.argmin(logs.mean(0), -1)
    of_pass = logs[:, rows, places] - logs[:, rows, best]
    return np.expm1(of_pass.mean(0)), np.abs(of_pass[0] - of_pass[1])


def main() -> None:
    """Choose, judge, and print a table."""
    parser = options(__doc__, sizes=150, seed=45, judge_s=1.2)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--choose", choices=MEASURES, help="only choose, in this process")
    given = parser.parse_args()
    sizes = workloads(given.sizes, given.seed)
    if given.choose:
        print(json.dumps(chosen(sizes, given.choose)))
        return
    found = {measure: fresh(given.calibration, given, measure) for measure in MEASURES}
    times = judged_ns([functools.partial(forms, own) for own in sizes], given.judge_s)
    rows, summary = [], {}
    for name, own in found.items():
        regret, noise = regrets([one["name"] for one in own], times)
        figures = {
            "mean": float(regret.mean()),
            "p95": float(np.quantile(regret, 0.95)),
            "max": float(regret.max()),
            "noise": float(noise.mean()),
            "measured": float(np.mean([one["by"] == "measured" for one in own])),
        }
        seconds = sum(one["seconds"] for one in own)
        summary[name] = {**figures, "seconds": seconds}
        rows.append([name, *(f"{100 * one:.1f} %" for one in figures.values()), f"{seconds:.0f} s"])
    headings = ["measure", "mean regret", "95th percentile", "largest", "noise", "measured"]
    print(table([*headings, "choosing took"], rows))
    cells = [dict(zip(("batch", "n_fft", "k"), own, strict=True)) for own in sizes]
    content = {"summary": summary, "workloads": cells, "choices": found, "times_ns": times.round().tolist()}
    write(given.json, content, indent=None)


if __name__ == "__main__":
    main()
