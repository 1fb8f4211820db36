"""Measure how often `validate` alarms on an unchanged machine and on a changed machine, by replayed samples.

    python -m benchmarks.validation_power FOLDER [--slowed-s 120] [--json FILE]

FOLDER comes from `benchmarks.default_runs`. Its calibrations are validated many times, each time by a few rounds of six
random independent workloads. `--slowed-s` first takes samples of the same workloads while another process keeps a
processor busy. A further replay makes times 15 % longer: all times, or the times of one strategy.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks._campaigns import WITHOUT_MODEL, busy_processor, estimates, sampled
from benchmarks._common import options, table, write
from calibrate.check import GOOD, Validation, drift_of, verdict_of
from calibrate.machine import micro_times_ns, slowness, used_by_others
from calibrate.samples import SampleLog, noise_floor, quantile_ns, read_samples
from rlxjax import Calibration
from rlxjax.calibration import CalibrationFile, read_calibration_file
from rlxjax.models import WELCH

#: Rounds and workloads of one validation.
ROUNDS, WORKLOADS = 4, 6
VALIDATIONS, SLOWED_VALIDATIONS, DRIFT = 150, 20, 1.15


def replayed(
    log: SampleLog, content: CalibrationFile, rng: np.random.Generator, strategy: str, factor: float
) -> Validation:
    """Return the verdict of one validation by part of the samples, the times of a strategy, or of all, made longer."""
    works = list(dict.fromkeys(cell.work for cell in log.cells))
    chosen = {works[place] for place in rng.permutation(len(works))[:WORKLOADS]}
    rounds = log.complete_rounds()
    first = int(rng.integers(0, len(rounds) - ROUNDS + 1))
    looks = [len(log.canaries) * end // len(rounds) for end in (first, first + ROUNDS)]
    window = SampleLog(
        log.header,
        [cell for cell in log.cells if cell.work in chosen],
        rounds[first : first + ROUNDS],
        canaries=log.canaries[slice(*looks)],
    )
    cells, visits = window.timed()
    longer = np.array([factor if strategy in ("all", cell.group) else 1.0 for cell in cells])
    calibrated = Calibration.from_file(content).of(WELCH.name)
    expected = estimates(calibrated.posterior, cells)
    now_ns, then_ns = micro_times_ns(window), {} if content.machine is None else content.machine.canary_ns
    slower = slowness(now_ns, then_ns) or 1.0
    pace_sd = calibrated.pace_log_sd
    drift = drift_of(quantile_ns(visits) * longer, expected, noise_floor(visits), slower, pace_sd)
    return verdict_of({WELCH.name: drift}, now_ns, then_ns, used_by_others(window), content.machine)


def share_of_alarms(
    log: SampleLog, files: Sequence[CalibrationFile], count: int, seed: int, strategy: str = "all", factor: float = 1.0
) -> dict[str, Any]:
    """Return the number of alarms in a number of validations, over the calibrations in turn."""
    rng = np.random.default_rng(seed)
    verdicts = [replayed(log, files[number % len(files)], rng, strategy, factor) for number in range(count)]
    drifts = [verdict.models[WELCH.name] for verdict in verdicts]
    alarms = [drift for verdict, drift in zip(verdicts, drifts, strict=True) if verdict.word != GOOD]
    return {
        "validations": count,
        "alarms": len(alarms),
        "by_all_runs": sum(drift.is_off for drift in alarms),
        "overall": [round(drift.factor, 3) for drift in drifts],
    }


def main() -> None:
    """Take missing samples, replay, print."""
    parser = options(__doc__, slowed_s=0.0)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    log, slowed_path = read_samples(given.folder / "truth.samples.jsonl"), given.folder / "slowed.samples.jsonl"
    if given.slowed_s:
        with sampled(log.cells, slowed_path) as take, busy_processor():
            take(given.slowed_s)
    files = [read_calibration_file(path) for path in sorted(given.folder.glob("run-*.json"))]
    found = {
        "unchanged": share_of_alarms(log, files, VALIDATIONS, 0),
        f"all runs {DRIFT}": share_of_alarms(log, files, VALIDATIONS, 1, "all", DRIFT),
    }
    for strategy in WITHOUT_MODEL:
        found[f"{strategy} {DRIFT}"] = share_of_alarms(log, files, VALIDATIONS, 2, strategy, DRIFT)
    if slowed_path.exists() and len((slowed := read_samples(slowed_path)).complete_rounds()) >= ROUNDS:
        found["a processor kept busy"] = share_of_alarms(slowed, files, SLOWED_VALIDATIONS, 3)
    keys = ("validations", "alarms", "by_all_runs", "by_a_strategy")
    print(
        table(["", *(key.replace("_", " ") for key in keys)], [(n, *map(said.get, keys)) for n, said in found.items()])
    )
    write(given.json, found)


if __name__ == "__main__":
    main()
