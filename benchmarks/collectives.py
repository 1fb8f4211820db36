"""Fit collectives on eight forced devices of this CPU, and compare predictions with held-out times.

    python -m benchmarks.collectives [--seconds S] [--json FILE]

Every kind of collective is timed at seven sizes, in groups of two, four and eight devices, in interleaved rounds. The
fit sees four sizes. The table has the other three sizes in groups of eight. The exit status is 1 if fewer than 12 of 15
times lie in their 90 % intervals, or if the intervals of all groups contain less than 75 %.
"""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import sys
import time

import jax
import numpy as np

from benchmarks._common import options, table, write
from calibrate.command_line import set_up_jax
from calibrate.judge import timings_of
from calibrate.measure import made_ready, measure_rounds
from calibrate.samples import SampleLog, noise_floor, quantile_ns
from calibrate.suites.collectives import CollectivesSuite
from calibrate.terminal import Deadline
from rlxjax.fit import COVERED_SDS, estimate, fit_posterior, named

#: The least cells of the table within their intervals, and the least share of all held-out cells.
LEAST_INSIDE, LEAST_SHARE = 12, 0.75


def main() -> None:
    """Measure, fit, predict, and print the table."""
    given = options(__doc__, seconds=150.0).parse_args()
    set_up_jax("cpu")
    suite, rng = CollectivesSuite(), np.random.default_rng(0)
    cells = suite.cells()
    ready = made_ready(suite, cells, Deadline(np.inf), n_threads=2)
    log = SampleLog.new(suite, "collectives")
    log.keep_cells([cell for cell in cells if cell.name in ready.programs])
    measure_rounds(log, ready.programs, Deadline(time.perf_counter() + given.seconds), rng, lambda: None)
    cells, visits = log.timed()
    measured_ns, noise = quantile_ns(visits), noise_floor(visits)
    seen = np.array([not cell.held_out for cell in cells])
    fit = fit_posterior(timings_of(suite, cells, measured_ns), suite.start({}), seen.astype(float))
    said = jax.tree.map(np.asarray, estimate(fit.posterior, fit.runs))
    width = np.exp(COVERED_SDS * np.asarray(said.log_sd()))
    inside = np.abs(np.log(measured_ns / said.time_ns)) <= np.log(width)
    rows = [
        {
            "cell": cell.name,
            "predicted_us": float(said.time_ns[place] / 1e3),
            "low_us": float(said.time_ns[place] / width[place] / 1e3),
            "high_us": float(said.time_ns[place] * width[place] / 1e3),
            "measured_us": float(measured_ns[place] / 1e3),
            "noise": float(noise[place]),
            "is_inside": bool(inside[place]),
            "is_held_out": cell.held_out,
        }
        for place, cell in enumerate(cells)
    ]
    shown = [row for row in rows if row["is_held_out"] and row["cell"].endswith(" of 8")]
    texts = [
        [row["cell"], *(f"{row[name]:,.0f}" for name in ("predicted_us", "low_us", "high_us", "measured_us"))]
        + [f"{100 * row['noise']:.0f} %", "yes" if row["is_inside"] else "no"]
        for row in shown
    ]
    print(table(["kind, bytes, devices", "predicted us", "90 % from", "to", "measured us", "noise", "inside"], texts))
    error = float(np.median(np.abs(np.log(measured_ns / said.time_ns))[~seen]))
    share, n_inside = float(inside[~seen].mean()), sum(row["is_inside"] for row in shown)
    coefficients = {name: float(value) for name, value in named(fit.terms.coefficients).items()}
    print(f"{n_inside} of {len(shown)} inside; {100 * share:.0f} % of all {np.sum(~seen)} that were held out; ", end="")
    print(
        f"median factor {np.exp(error):.2f}; {len(log.complete_rounds())} rounds; left out: {ready.refused or 'none'}"
    )
    about = {"rounds": len(log.complete_rounds()), "refused": ready.refused, "coefficients": coefficients}
    write(
        given.json,
        about | {"inside": n_inside, "held_out_share_inside": share, "median_log_error": error, "rows": rows},
    )
    sys.exit(not (n_inside >= LEAST_INSIDE and share >= LEAST_SHARE))


if __name__ == "__main__":
    main()
