"""Calibrate a fleet by one command: seconds, memory, and the share of true values in the 90 % intervals.

    python -m benchmarks.fleet [--devices N] [--timings N] [--files N] [--seed N] [--noise SD] [--json FILE]

The priors of the Welch model give each device's coefficients and correction weights. Each device has `--timings` noisy
timings of workloads from the suite's grid. All other workloads of the grid judge the fit: the time without noise
against the fit's interval, and a new noisy timing against `interval_ns`. The coefficients are judged too. The memory is
the sum over the command and its processes.
"""

import operator
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks._common import options, table, write
from calibrate.suites.welch import WelchSuite
from rlxjax import load_calibration
from rlxjax.calibration import MachineMismatchWarning
from rlxjax.fit import CORRECTION_SD, COVERED_SDS, Runs, cell_runs, coefficient_names, estimate, named, predicted_ns
from rlxjax.models import WELCH

#: Seconds between two samples of the memory.
LOOK_S = 0.1

_true_ns = jax.jit(predicted_ns)


def grid() -> Runs:
    """Return all runs of the suite's grid, `[n]`."""
    runs = cell_runs(WELCH, [cell for cell in WelchSuite().cells() if cell.variant != "learned"])
    return jax.tree.map(lambda column: np.broadcast_to(np.asarray(column), runs.shape), runs)


def drawn(runs: Runs, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the logarithms of a device's coefficients, `[c]`, and the times of runs on the device, `[n]`."""
    medians, log_sds = (np.array(jax.tree.leaves(part)) for part in WELCH.prior[:2])
    logs = np.log(medians) + log_sds * rng.standard_normal(len(medians))
    coefficients = jax.tree.structure(WELCH.prior.median).unflatten(np.exp(logs).tolist())
    features = np.asarray(WELCH.features(runs, WELCH.facts))
    weights = CORRECTION_SD * rng.standard_normal((len(WELCH.variants), features.shape[-1]))
    factor = np.exp(np.sum(features * weights[np.asarray(runs.variant)], -1))
    return logs, np.asarray(_true_ns(coefficients, runs, dict(WELCH.facts))) * factor


def made(folder: Path, given: Any) -> tuple[Runs, dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Write the timings of a fleet; return the grid, and each device's coefficients, times and timed rows."""
    rng, runs, truths = np.random.default_rng(given.seed), grid(), {}
    variants, columns = np.array(WELCH.variants)[np.asarray(runs.variant)], []
    for number in range(given.devices):
        logs, time_ns = drawn(runs, rng)
        rows = rng.permutation(runs.shape[0])[: given.timings]
        truths[device := f"device-{number:05d}"] = logs, time_ns, rows
        noisy_ns = time_ns[rows] * np.exp(given.noise * rng.standard_normal(len(rows)))
        inputs = {name: np.asarray(runs.inputs[name])[rows] for name in WELCH.inputs}
        names = pa.array([device] * len(rows))
        columns.append(pa.table({"device": names, "variant": variants[rows], **inputs, "time_ns": noisy_ns}))
    for number in range(given.files):
        pq.write_table(pa.concat_tables(columns[number :: given.files]), folder / f"part-{number:03d}.parquet")
    return runs, truths


def run(command: list[str]) -> dict[str, float]:
    """Run a command; return its seconds, its CPU seconds, and the peak MB of its processes."""
    begun_s, most, before = time.perf_counter(), 0, resource.getrusage(resource.RUSAGE_CHILDREN)
    process = psutil.Popen(command)
    while process.poll() is None:
        held = 0
        try:
            for one in (process, *process.children(recursive=True)):
                held += one.memory_info().rss
        except psutil.NoSuchProcess:
            pass
        most = max(most, held)
        time.sleep(LOOK_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.perf_counter() - begun_s, "processor_s": processor_s, "most_mb": most / 1e6}


def judged(out: Path, runs: Runs, truths: dict[str, Any], noise: float, rng: np.random.Generator) -> dict[str, Any]:
    """Return the shares of true values in the 90 % intervals, and the errors of new workloads."""
    shares: dict[str, list] = {"coefficients_in": [], "times_in": [], "timings_in": []}
    errors = []
    for device, (logs, time_ns, rows) in truths.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MachineMismatchWarning)
            posterior = load_calibration(out / f"{device}.json", models=[WELCH]).posterior
        found = np.log([float(value) for value in named(posterior.coefficients).values()])
        sds = np.array(list(named(posterior.coefficient_log_sd()).values()))
        shares["coefficients_in"].append(np.abs(found - logs) <= COVERED_SDS * sds)
        # All devices have as many runs, so one program estimates them.
        new = np.setdiff1d(np.arange(runs.shape[0]), rows)
        run = estimate(posterior, jax.tree.map(operator.itemgetter(new), runs))
        known_sd, sd = np.sqrt(np.sum(np.asarray(run.scores) ** 2, -1)), np.asarray(run.log_sd())
        off = np.log(np.asarray(run.time_ns) / time_ns[new])
        shares["times_in"].append(np.mean(np.abs(off) <= COVERED_SDS * known_sd))
        shares["timings_in"].append(np.mean(np.abs(off + noise * rng.standard_normal(len(off))) <= COVERED_SDS * sd))
        errors.append(np.median(np.abs(np.expm1(off))))
    each = np.mean(shares["coefficients_in"], 0)
    return {
        **{name: float(np.mean(values)) for name, values in shares.items()},
        "median_error": float(np.median(errors)),
        "each_coefficient": dict(zip(coefficient_names(WELCH.prior.median), each.tolist(), strict=True)),
    }


def main() -> None:
    """Make, run, judge, print."""
    parser = options(__doc__, devices=1_000, timings=200, files=8, seed=0, noise=0.04)
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    with tempfile.TemporaryDirectory() as folder:
        (source := Path(folder) / "fleet").mkdir()
        out = Path(folder) / "out"
        runs, truths = made(source, given)
        samples, model = f"{source}/*.parquet", WELCH.name
        command = [sys.executable, "-m", "rlxjax", "fleet", samples, str(out)]
        took = run([*command, "--model", model])
        found = judged(out, runs, truths, given.noise, np.random.default_rng(given.seed + 1))
    result = {
        "devices": given.devices,
        "timings": given.timings,
        "noise": given.noise,
        **took,
        **found,
    }
    shown = [(name, f"{value:.4g}") for name, value in result.items() if not isinstance(value, dict)]
    print(table(["figure", "value"], shown))
    print(table(["coefficient", "in its interval"], [(n, f"{v:.3f}") for n, v in found["each_coefficient"].items()]))
    write(given.json, result)


if __name__ == "__main__":
    main()
