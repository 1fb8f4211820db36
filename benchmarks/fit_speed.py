"""Time fits with compilation and again without: the posterior of many timings, and the terms of many devices.

    python -m benchmarks.fit_speed [--x64] [--samples N] [--devices N] [--repeats N] [--json FILE]

The timings are simulated, with 5 % noise, for runs of the Welch model's grid. The coefficients of the machines differ
from the prior's medians by a factor of about 2.
"""

import time
from collections.abc import Callable

import jax
import numpy as np

from benchmarks._common import options, table, write
from calibrate.suites.welch import WelchSuite
from rlxjax.fit import Runs, Timings, cell_runs, fit_posterior, fit_terms, predicted_ns
from rlxjax.models import WELCH

NOISE_SD = 0.05
#: Timings per device in the fit of many devices.
DEVICE_SAMPLES = 200
#: A fit has ended if the next step promises a smaller decrease, in nats.
END_PROMISE = 1e-3

_true_ns = jax.jit(predicted_ns)


def simulated(devices: int, count: int, seed: int) -> tuple[Timings, np.ndarray]:
    """Return noisy timings of several machines, `[devices, count]`, and the times without noise."""
    rng, grid = np.random.default_rng(seed), cell_runs(WELCH, WelchSuite().cells())
    rows = rng.integers(0, grid.shape[0], (devices, count))
    runs: Runs = jax.tree.map(lambda column: np.asarray(column)[rows], grid)
    machines = jax.tree.map(lambda median: median * 2.0 ** rng.uniform(-1, 1, (devices, 1)), WELCH.prior.median)
    true_ns = np.asarray(_true_ns(machines, runs, dict(WELCH.facts)), np.float64)
    return Timings(runs, true_ns * np.exp(rng.normal(0.0, NOISE_SD, true_ns.shape))), true_ns


def measured(fit: Callable, devices: int, count: int, repeats: int) -> dict:
    """Return the times of calls of a fit with new values in each call; the first call compiles."""
    seconds, found, error = [], [], np.nan
    for turn in range(repeats + 1):
        timings, true_ns = simulated(devices, count, turn)
        one = jax.tree.map(lambda column: column[0], timings) if devices == 1 else timings
        start = time.perf_counter()
        fits = fit(one)
        seconds.append(time.perf_counter() - start)
        found = [fits.terms] if devices == 1 else fits
        coefficients = jax.tree.map(lambda *leaves: np.array(leaves)[:, None], *(own.coefficients for own in found))
        fitted_ns = np.asarray(_true_ns(coefficients, timings.runs, dict(WELCH.facts)))
        error = np.median(np.abs(fitted_ns / true_ns - 1.0))
    return {
        "devices": devices,
        "timings_of_each": count,
        "first_s": seconds[0],
        "again_s": min(seconds[1:]),
        "median_steps": float(np.median([own.steps for own in found])),
        "most_steps": float(max(own.steps for own in found)),
        "at_the_end_share": float(np.mean([own.expected_decrease < END_PROMISE for own in found])),
        "median_error": float(error),
    }


def main() -> None:
    """Measure and print the table."""
    parser = options(__doc__, samples=10_000, devices=1_000, repeats=2)
    parser.add_argument("--x64", action="store_true", help="in float64, as the commands fit")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", given.x64)
    rows = [
        measured(fit_posterior, 1, given.samples, given.repeats),
        measured(fit_terms, given.devices, DEVICE_SAMPLES, given.repeats),
    ]
    cells = [[f"{value:.4g}" for value in row.values()] for row in rows]
    print(table([name.replace("_", " ") for name in rows[0]], cells))
    write(given.json, {"rows": rows})


if __name__ == "__main__":
    main()
