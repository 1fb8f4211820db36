"""The time of a fit after compilation: of many samples of one device, and of many devices.

    python benchmarks/fit_speed.py [--samples N] [--devices N] [--repeats N] [--json FILE]

Timings of known coefficients, each a factor of about 2 from the typical ones, with 5 % noise.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

import rlxjax as rx

NOISE = 0.05
#: Samples of one of many devices.
DEVICE_SAMPLES = 200


def timings_of(devices: int, count: int, seed: int) -> tuple[rx.Timings, np.ndarray]:
    """Return noisy timings of as many machines, `[devices, count]`, and the times without noise."""
    rng = np.random.default_rng(seed)
    shape = (devices, count)
    median = rx.typical_prior().median
    machines = jax.tree.map(lambda value: value * 2.0 ** rng.uniform(-1, 1, (devices, 1)), median)
    sizes = {
        "path": np.array(["host", "fused", "block"])[rng.integers(0, 3, shape)],
        "batch": 2 ** rng.integers(0, 15, shape),
        "n_fft": 2 ** rng.integers(6, 13, shape),
        "k": 2 ** rng.integers(2, 6, shape),
        "n_segments": rng.integers(1, 3, shape),
    }
    flat = {name: column.ravel() for name, column in sizes.items()}
    checked = rx.Timings.checked(**flat, time_ns=np.ones(devices * count))
    timings = jax.tree.map(lambda column: column.reshape(shape), checked)
    true_ns = true_times(machines, timings)
    noisy_ns = true_ns * np.exp(rng.normal(0, NOISE, shape))
    return rx.Timings(**{**vars(timings), "time_ns": noisy_ns}), true_ns


def true_times(coefficients: rx.LatencyCoefficients, timings: rx.Timings) -> np.ndarray:
    """Return what machines with coefficients `[devices, 1]` take, `[devices, n]`."""
    sizes = (timings.path, timings.batch, timings.n_fft, timings.k, timings.n_segments)
    return np.asarray(rx.predict_latency_ns(coefficients, *sizes, selection=timings.selection))


def measured(fit: Callable, devices: int, count: int, repeats: int) -> dict:
    """Return the times of calls of a fit with other values each, the first of which compiles."""
    seconds, found = [], None
    for turn in range(repeats + 1):
        timings, true_ns = timings_of(devices, count, turn)
        if devices == 1:
            timings = jax.tree.map(lambda column: column[0], timings)
        start = time.perf_counter()
        found = fit(timings)
        seconds.append(time.perf_counter() - start)
    coefficients = jax.tree.map(lambda leaf: np.reshape(leaf, (-1, 1)), found.coefficients)
    errors = np.abs(true_times(coefficients, jax.tree.map(np.atleast_2d, timings)) / true_ns - 1)
    return {
        "devices": devices,
        "samples_a_device": count,
        "first_s": seconds[0],
        "median_s": statistics.median(seconds[1:]),
        "max_s": max(seconds[1:]),
        "median_steps": float(np.median(found.steps)),
        "most_steps": int(np.max(found.steps)),
        "converged_share": float(np.mean(found.converged)),
        "median_error_without_noise": float(np.median(errors)),
    }


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=10_000, help="of the one device")
    parser.add_argument("--devices", type=int, default=1_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--x64", action="store_true", help="in float64, as the commands fit")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", arguments.x64)
    rows = [
        measured(rx.fit_latency, 1, arguments.samples, arguments.repeats),
        measured(rx.fit_devices, arguments.devices, DEVICE_SAMPLES, arguments.repeats),
    ]
    names = list(rows[0])
    print("| " + " | ".join(name.replace("_", " ") for name in names) + " |")
    print("|---" * len(names) + "|")
    for row in rows:
        print("| " + " | ".join(f"{row[name]:.4g}" for name in names) + " |")
    if arguments.json:
        device = jax.devices()[0]
        content = {
            "command": " ".join(["python benchmarks/fit_speed.py", *(["--x64"] if arguments.x64 else [])]),
            "device": f"{device.platform} {device.device_kind}",
            "machine": platform.machine(),
            "processors": len(os.sched_getaffinity(0)),
            "jax": jax.__version__,
            "noise": NOISE,
            "fits": rows,
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
