"""How often `validate` alarms without need, and how often it sees a machine that has changed, by replayed samples.

    python -m benchmarks.validation_power FOLDER [--slowed-s 120] [--json FILE]

FOLDER is that of `benchmarks.default_runs`: its calibrations are validated again and again, each time by a few rounds
of six of the independent workloads, drawn at random. `--slowed-s` first takes samples of the same workloads while
another process keeps a processor busy. Besides, the replayed times are made 15 % longer: all of them, or those of one
strategy.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from calibrate.canary import canary_times_ns
from calibrate.staleness import DRIFTED, Validation, judge
from calibrate.workloads import WITHOUT_MODEL

from benchmarks._campaigns import busy_processor, sampled
from benchmarks._common import options, table, write
from calibrate.design import estimates
from calibrate.samples import SampleLog, read_samples
from calibrate.visits import Visits, noise_floor, quantile_ns
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
    workloads = list(dict.fromkeys(cell[1:] for cell in log.cells))
    chosen = {workloads[place] for place in rng.permutation(len(workloads))[:WORKLOADS]}
    cells = [cell for cell in log.cells if cell[1:] in chosen]
    first = int(rng.integers(0, len(log.complete_rounds()) - ROUNDS + 1))
    places = {cell: place for place, cell in enumerate(cells)}
    made = [
        (number, places[cell], time_ns)
        for number, round_ in enumerate(log.complete_rounds()[first : first + ROUNDS])
        for cell, time_ns in round_
        if cell in places
    ]
    round_, cell, time_ns = np.array(made, np.int64).T
    visits = Visits(round_, cell, time_ns.astype(float), len(cells))
    sizes = np.cumsum([0, *(len(visits) for visits in log.rounds)])
    looks = [look for place, look in log.canaries if sizes[first] <= place < sizes[first + ROUNDS]]
    window = SampleLog(log.fingerprint, canaries=[(0, look) for look in looks])
    others = float(np.mean([look.others for look in looks])) if looks else None
    longer = np.array([factor if strategy in ("all", cell.strategy) else 1.0 for cell in cells])
    expected = estimates(Calibration.from_file(content).of(WELCH.name).posterior, cells)
    measured_ns = quantile_ns(visits) * longer
    then_ns = {} if content.machine is None else content.machine.canary_ns
    return judge(cells, measured_ns, expected, noise_floor(visits), canary_times_ns(window), then_ns, others)


def share_of_alarms(
    log: SampleLog, files: Sequence[CalibrationFile], count: int, seed: int, strategy: str = "all", factor: float = 1.0
) -> dict[str, Any]:
    """Return how many of so many validations alarm, a calibration in turn each."""
    rng = np.random.default_rng(seed)
    verdicts = [replayed(log, files[number % len(files)], rng, strategy, factor) for number in range(count)]
    alarms = [verdict for verdict in verdicts if verdict.word == DRIFTED]
    return {
        "validations": count,
        "alarms": len(alarms),
        "by_all_runs": sum(verdict.overall is not None and verdict.overall.is_off for verdict in alarms),
        "by_a_strategy": sum(any(drift.is_off for drift in verdict.strategies.values()) for verdict in alarms),
        "overall": [None if verdict.overall is None else round(verdict.overall.factor, 3) for verdict in verdicts],
    }


def main() -> None:
    """Take what is missing, replay, print."""
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
    if slowed_path.exists():
        found["a processor kept busy"] = share_of_alarms(read_samples(slowed_path), files, SLOWED_VALIDATIONS, 3)
    keys = ("validations", "alarms", "by_all_runs", "by_a_strategy")
    print(
        table(["", *(key.replace("_", " ") for key in keys)], [(n, *map(said.get, keys)) for n, said in found.items()])
    )
    write(given.json, found)


if __name__ == "__main__":
    main()
