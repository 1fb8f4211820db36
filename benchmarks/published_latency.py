"""Compare the latency model of a batched FFT with published latencies: all other cells of a path predict each cell.

    python -m benchmarks.published_latency [FILE.csv] [--json FILE]

The table has the columns device (the execution path), n_fft, batch and ms. No device is timed here. The exit status is
1 if a fit did not converge, or if the median error of a path exceeds 12 %.
"""

import csv
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks._common import ROOT, options, table, write
from rlxjax.fit import Runs, Timings, fit_posteriors, named, predicted_ns
from rlxjax.models import FFT

PUBLISHED = ROOT / "tests" / "golden" / "published_fft_latency.csv"
#: The largest median error of a path; a cell with an error above the second number is an outlier.
MEDIAN_ERROR, OUTLIER_ERROR = 0.12, 0.25


def read_timings(path: Path) -> dict[str, Timings]:
    """Return the timings of each execution path in a table, in its order."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if missing := {"device", "n_fft", "batch", "ms"} - set(rows[0] if rows else ()):
        raise ValueError(f"{path}: expected the columns device, n_fft, batch and ms; missing {sorted(missing)}")
    timings = {}
    for device in dict.fromkeys(row["device"] for row in rows):
        own = [row for row in rows if row["device"] == device]
        sizes = {name: [row[name] for row in own] for name in ("batch", "n_fft")}
        time_ns = [float(row["ms"]) * 1e6 for row in own]
        timings[device] = Timings.checked(FFT, variant="fft", time_ns=time_ns, **sizes)
    return timings


def leave_one_out(path: str, timings: Timings) -> dict[str, Any]:
    """Return the errors of held-out cells. Each device of the fit leaves out one cell; the last leaves out none."""
    count = len(timings.time_ns)
    weights = np.append(1.0 - np.eye(count), np.ones((1, count)), 0)
    each = jax.tree.map(lambda column: np.broadcast_to(column, weights.shape), timings)
    fits = [fit.terms for fit in fit_posteriors(each, FFT.prior, weights, n_starts=1, min_timings=1)]
    coefficients = jax.tree.map(lambda *leaves: np.array(leaves), *(fit.coefficients for fit in fits))
    sizes = timings.runs.inputs["batch"], timings.runs.inputs["n_fft"]
    runs = Runs.checked(FFT, "fft", **dict(zip(("batch", "n_fft"), (size[None] for size in sizes), strict=True)))
    said_ns = predicted_ns(jax.tree.map(lambda leaf: leaf[:, None], coefficients), runs, {})
    said_ns = np.broadcast_to(said_ns, weights.shape)
    errors, of_fit = (np.abs(said / timings.time_ns - 1.0) for said in (np.diagonal(said_ns), said_ns[-1]))
    return {
        "path": path,
        "cells": count,
        "median_error": float(np.median(errors)),
        "mean_error": float(np.mean(errors)),
        "worst_error": float(np.max(errors)),
        "outliers": int(np.sum(errors > OUTLIER_ERROR)),
        "median_error_of_the_fit": float(np.median(of_fit)),
        "converged": all(fit.converged for fit in fits),
        "coefficients": {name: float(value[-1]) for name, value in named(coefficients).items()},
        "left_out_ns": np.diagonal(said_ns).tolist(),
    }


def main() -> int:
    """Fit and print the tables."""
    parser = options(__doc__)
    parser.add_argument("csv", type=Path, nargs="?", default=PUBLISHED)
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    paths = [leave_one_out(path, own) for path, own in read_timings(given.csv).items()]
    names = ("median_error", "mean_error", "worst_error", "median_error_of_the_fit")
    rows = [[own["path"], own["cells"], own["outliers"], *(f"{100 * own[n]:.1f}" for n in names)] for own in paths]
    print(table(["path", "cells", "outliers", *(f"{name.replace('_', ' ')}, %" for name in names)], rows), end="\n\n")
    rows = [[own["path"], *(f"{value:,.4g}" for value in own["coefficients"].values())] for own in paths]
    print(table(["path", *paths[0]["coefficients"]], rows))
    write(given.json, {"outlier_error": OUTLIER_ERROR, "paths": paths})
    return not all(own["converged"] and own["median_error"] <= MEDIAN_ERROR for own in paths)


if __name__ == "__main__":
    sys.exit(main())
