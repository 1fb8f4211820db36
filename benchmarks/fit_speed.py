"""The time of a fit, with compilation and then again: of many timings of one device, and of many devices.

    python benchmarks/fit_speed.py [--x64] [--samples N] [--devices N] [--repeats N] [--json FILE]
    python benchmarks/fit_speed.py --x64 --campaign SAMPLES...

Simulated timings of runs from the Welch model's grid, 5 % noisy, of machines whose coefficients are each a factor
of about 2 from its prior's medians. With `--campaign`, where the fit of kept samples ends instead: the objective,
what a further step promises to take off it, and the noise.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from calibrate.samples import read_samples, timings_of
from calibrate.visits import quantile_ns
from rlxjax.fit import Runs, Timings, fit_devices, fit_latency, predicted_ns
from rlxjax.models import WELCH

NOISE_SD = 0.05
#: Timings of one of many devices.
DEVICE_SAMPLES = 200
#: A fit is at its end if a further step promises less, in nats.
END_PROMISE = 1e-3

_true_ns = jax.jit(predicted_ns)


def simulated(devices: int, count: int, seed: int) -> tuple[Timings, np.ndarray]:
    """Return noisy timings of as many machines, `[devices, count]`, and the times without noise."""
    rng, grid = np.random.default_rng(seed), WELCH.grid()
    rows = rng.integers(0, grid.shape[0], (devices, count))
    runs: Runs = jax.tree.map(lambda column: np.asarray(column)[rows], grid)
    machines = jax.tree.map(lambda median: median * 2.0 ** rng.uniform(-1, 1, (devices, 1)), WELCH.prior.median)
    true_ns = np.asarray(_true_ns(machines, runs, dict(WELCH.facts)), np.float64)
    return Timings(runs, true_ns * np.exp(rng.normal(0.0, NOISE_SD, true_ns.shape))), true_ns


def measured(fit: Callable, devices: int, count: int, repeats: int) -> dict:
    """Return the times of calls of a fit with other values each, the first of which compiles."""
    seconds, found, error = [], None, np.nan
    for turn in range(repeats + 1):
        timings, true_ns = simulated(devices, count, turn)
        one = jax.tree.map(lambda column: column[0], timings) if devices == 1 else timings
        start = time.perf_counter()
        found = fit(one)
        seconds.append(time.perf_counter() - start)
        coefficients = jax.tree.map(lambda leaf: np.reshape(leaf, (-1, 1)), found.coefficients)
        fitted_ns = np.asarray(_true_ns(coefficients, timings.runs, dict(WELCH.facts)))
        error = np.median(np.abs(fitted_ns / true_ns - 1.0))
    return {
        "devices": devices,
        "timings_of_each": count,
        "first_s": seconds[0],
        "again_s": min(seconds[1:]),
        "median_steps": np.median(found.steps),
        "most_steps": np.max(found.steps),
        "at_the_end_share": np.mean(np.asarray(found.expected_decrease) < END_PROMISE),
        "median_error": error,
    }


def campaign(path: Path) -> dict:
    """Return where the fit of the samples of a campaign ends."""
    log = read_samples(path)
    is_known = np.array([cell.variant in WELCH.variants for cell in log.cells])
    cells = [cell for cell, kept in zip(log.cells, is_known, strict=True) if kept]
    timings = timings_of(cells, quantile_ns(log.visits())[is_known])
    start = time.perf_counter()
    found = fit_latency(timings)
    return {
        "campaign": path.name,
        "timings": len(cells),
        "seconds": time.perf_counter() - start,
        "objective": found.loss,
        "promise": found.expected_decrease,
        "steps": found.steps,
        "noise_sd": found.noise_sd,
    }


def table(rows: list[dict]) -> str:
    """Return rows of one kind as Markdown."""
    names = list(rows[0])
    lines = ["| " + " | ".join(name.replace("_", " ") for name in names) + " |", "|---" * len(names) + "|"]
    cells = [[f"{row[name]:.4g}" if not isinstance(row[name], str) else row[name] for name in names] for row in rows]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells)])


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=10_000, help="timings of the one device")
    parser.add_argument("--devices", type=int, default=1_000)
    parser.add_argument("--repeats", type=int, default=2, help="of each, after the first call")
    parser.add_argument("--x64", action="store_true", help="in float64, as the commands fit")
    parser.add_argument("--campaign", type=Path, nargs="+", help="samples files to fit instead")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", arguments.x64)
    if arguments.campaign:
        rows = [campaign(path) for path in arguments.campaign]
    else:
        rows = [
            measured(fit_latency, 1, arguments.samples, arguments.repeats),
            measured(fit_devices, arguments.devices, DEVICE_SAMPLES, arguments.repeats),
        ]
    print(table(rows))
    if arguments.json:
        device = jax.devices()[0]
        content = {
            "command": " ".join(["python benchmarks/fit_speed.py", *sys.argv[1:]]),
            "device": f"{device.platform} {device.device_kind}",
            "machine": platform.machine(),
            "processors": len(os.sched_getaffinity(0)),
            "jax": jax.__version__,
            "rows": [
                {name: value if isinstance(value, str) else float(value) for name, value in row.items()} for row in rows
            ],
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
