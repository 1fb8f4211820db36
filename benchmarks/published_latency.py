"""The latency model of a batched FFT against published latencies: each cell predicted from all others of its path.

    python -m benchmarks.published_latency [FILE.csv] [--cells N] [--json FILE]

With several paths, also each path from N of its cells alone (5 unless given), every choice of them, with a
wide prior and with the prior that the other paths make likely. The table has the columns device (the
execution path), n_fft, batch and ms. No device is timed here. The exit status is 1 if
a fit did not converge, or a path is off by more than 12 % in the median.
"""

import csv
import dataclasses
import itertools
import sys
from pathlib import Path

import jax
import numpy as np

from benchmarks._common import ROOT, options, table, write
from rlxjax.fit import (
    FitResult,
    LatencyPrior,
    Runs,
    Timings,
    fit_devices,
    fit_latency,
    named,
    pooled_prior,
    predicted_ns,
    stack_timings,
    unit_of,
)
from rlxjax.models import FFT, FftLatencyCoefficients

PUBLISHED = ROOT / "tests" / "golden" / "published_fft_latency.csv"
#: A cell is an outlier if its prediction from the others is off by more than this share of its latency.
OUTLIER_ERROR = 0.25
#: The median error of a path, at most.
MEDIAN_ERROR = 0.12
#: Cells that a new path is given, and rounds of fitting and pooling the others.
FEW_CELLS, POOLING_ROUNDS = 5, 10


@dataclasses.dataclass(frozen=True)
class PathReport:
    """What the fit makes of one execution path.

    Attributes:
        path: its name in the table.
        timings: the published cells, `[n]`.
        fit: of all cells.
        left_out_ns: what each cell is predicted to take by the fit of the others, `[n]`.
        converged: whether every one of these fits did.
    """

    path: str
    timings: Timings
    fit: FitResult
    left_out_ns: np.ndarray
    converged: bool

    def errors(self) -> np.ndarray:
        """Return the relative error of each left-out cell, `[n]`."""
        return self.left_out_ns / self.timings.time_ns - 1.0


def sizes_of(timings: Timings) -> tuple[np.ndarray, np.ndarray]:
    """Return batch and n_fft of timings, `[n]` each."""
    return timings.runs.inputs["batch"], timings.runs.inputs["n_fft"]


def read_timings(path: Path) -> dict[str, Timings]:
    """Return the timings of each execution path in a table, in its order."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if missing := {"device", "n_fft", "batch", "ms"} - set(rows[0] if rows else ()):
        raise ValueError(f"{path}: expected the columns device, n_fft, batch and ms; missing {sorted(missing)}")
    timings = {}
    for device in dict.fromkeys(row["device"] for row in rows):
        own = [row for row in rows if row["device"] == device]
        timings[device] = Timings.checked(
            FFT,
            variant="fft",
            batch=[row["batch"] for row in own],
            n_fft=[row["n_fft"] for row in own],
            time_ns=[float(row["ms"]) * 1e6 for row in own],
        )
    return timings


def leave_one_out(path: str, timings: Timings) -> PathReport:
    """Fit all cells, and all but each; a weight of zero leaves one out, so that all fits are one program."""
    count = len(timings.time_ns)
    fits = [fit_latency(timings, weights=weights) for weights in 1.0 - np.eye(count)]
    left_out_ns = [
        float(latency_ns(fit.coefficients, batch, n_fft))
        for fit, batch, n_fft in zip(fits, *sizes_of(timings), strict=True)
    ]
    final = fit_latency(timings, weights=np.ones(count))
    converged = all(fit.converged for fit in (*fits, final))
    return PathReport(path, timings, final, np.array(left_out_ns), converged)


def summary(report: PathReport) -> dict:
    """Return a report as JSON content."""
    errors, (batch, n_fft) = np.abs(report.errors()), sizes_of(report.timings)
    return {
        "path": report.path,
        "cells": len(errors),
        "median_error": float(np.median(errors)),
        "mean_error": float(np.mean(errors)),
        "worst_error": float(np.max(errors)),
        "median_error_of_the_fit": float(np.median(np.abs(_fitted_ns(report) / report.timings.time_ns - 1))),
        "converged": report.converged,
        "coefficients": {
            name: {
                "value": value,
                "unit": unit_of(name),
                "log_sd": getattr(report.fit.log_sd, name),
                "measured": report.fit.measured[name],
            }
            for name, value in named(report.fit.coefficients).items()
        },
        "rows": [
            {
                "n_fft": int(n_fft[i]),
                "batch": int(batch[i]),
                "published_ns": float(report.timings.time_ns[i]),
                "left_out_ns": float(report.left_out_ns[i]),
                "is_outlier": bool(errors[i] > OUTLIER_ERROR),
            }
            for i in range(len(errors))
        ],
    }


def text(paths: list[dict]) -> str:
    """Return the tables of summaries as Markdown; a star marks a coefficient that no timing says anything of."""
    errors = [
        [path["path"], path["cells"], *(f"{100 * path[f'{name}_error']:.1f}" for name in ("median", "mean", "worst"))]
        + [sum(row["is_outlier"] for row in path["rows"]), f"{100 * path['median_error_of_the_fit']:.1f}"]
        for path in paths
    ]
    known = [path["coefficients"] for path in paths]
    coefficients = [
        [path["path"], *(f"{_number(one['value'])}{'' if one['measured'] else ' *'}" for one in own.values())]
        for path, own in zip(paths, known, strict=True)
    ]
    headings = ["path", "cells", "median, %", "mean, %", "worst, %", "outliers", "median of the fit, %"]
    units = [f"{name}, {one['unit']}" for name, one in known[0].items()]
    return f"{table(headings, errors)}\n\n{table(['path', *units], coefficients)}"


def pooled(timings: Timings, weights: np.ndarray) -> LatencyPrior:
    """Return the prior of a further path, from timings `[paths, n]`: fitted and pooled in turn."""
    wide = prior = FFT.prior
    for _ in range(POOLING_ROUNDS):
        prior = pooled_prior(fit_devices(timings, prior, weights), wide)
    return prior


def few_cells(timings: dict[str, Timings], cells: int = FEW_CELLS) -> dict:
    """Predict each path from every choice of a few of its cells, alone and with the others' prior; return JSON content.

    An error is `abs(log(predicted / published))` of the cells that were not chosen.
    """
    stacked, weights = stack_timings(list(timings.values()))
    paths = []
    for index, (path, own) in enumerate(timings.items()):
        others = np.arange(len(timings)) != index
        prior = pooled(jax.tree.map(lambda column, others=others: column[others], stacked), weights[others])
        choices = np.array(list(itertools.combinations(range(len(own.time_ns)), cells)))
        row = {
            "path": path,
            "choices": len(choices),
            "median": {name: float(value) for name, value in named(prior.median).items()},
            "log_sd": {name: float(value) for name, value in named(prior.log_sd).items()},
        }
        priors = {"alone": FFT.prior, "pooled": prior}
        padded = jax.tree.map(lambda column, index=index: column[index], stacked)
        errors = {name: _few_errors(padded, weights[index], choices, prior) for name, prior in priors.items()}
        paths.append(row | errors)
    return {"cells": cells, "paths": paths}


def _few_errors(timings: Timings, weights: np.ndarray, choices: np.ndarray, prior: LatencyPrior) -> dict:
    """Return the errors of the cells that count and were not chosen: over all choices, and of the worst."""
    count, n = len(choices), len(timings.time_ns)
    seen = np.zeros((count, n))
    np.put_along_axis(seen, choices, 1.0, 1)
    each = jax.tree.map(lambda column: np.broadcast_to(column, (count, n)), timings)
    fits = fit_devices(each, prior, seen, min_timings=choices.shape[1])
    coefficients = jax.tree.map(lambda leaf: leaf[:, None], fits.coefficients)
    predicted = np.asarray(latency_ns(coefficients, *(size[None] for size in sizes_of(timings))))
    left_out = np.abs(np.log(predicted / timings.time_ns))[weights > seen].reshape(count, -1)
    return {
        "median_error": float(np.median(left_out)),
        "mean_error": float(np.mean(left_out)),
        "tenth_worst_error": float(np.quantile(left_out.mean(1), 0.9)),
        "worst_error": float(np.max(left_out.mean(1))),
        "converged_share": float(np.mean(fits.converged)),
    }


def few_text(found: dict) -> str:
    """Return the table as Markdown, in per cent."""
    names = ("median_error", "mean_error", "tenth_worst_error", "worst_error")
    shares = [[path[how][name] for name in names for how in ("alone", "pooled")] for path in found["paths"]]
    shares.append(np.mean(shares, 0).tolist())
    heads = [(path["path"], path["choices"]) for path in found["paths"]] + [("mean of the paths", "")]
    headings = [f"{how}: {what}" for what in ("median", "mean", "90th", "worst") for how in ("alone", "pooled")]
    rows = [[*head, *(f"{100 * one:.1f}" for one in own)] for head, own in zip(heads, shares, strict=True)]
    return table([f"path, {found['cells']} cells given", "choices", *headings], rows)


def _number(value: float) -> str:
    """Return three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_predicted_ns = jax.jit(predicted_ns)


def latency_ns(coefficients: FftLatencyCoefficients, batch: np.ndarray, n_fft: np.ndarray) -> jax.Array:
    """Return what batched FFTs take in ns, `[*batch]`."""
    return _predicted_ns(coefficients, Runs.checked(FFT, "fft", batch=batch, n_fft=n_fft), {})


def _fitted_ns(report: PathReport) -> np.ndarray:
    return np.asarray(latency_ns(report.fit.coefficients, *sizes_of(report.timings)))


def main() -> int:
    """Fit and print the tables."""
    parser = options(__doc__, cells=FEW_CELLS)
    parser.add_argument("csv", type=Path, nargs="?", default=PUBLISHED)
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    timings = read_timings(given.csv)
    paths = [summary(leave_one_out(path, own)) for path, own in timings.items()]
    print(text(paths))
    few = few_cells(timings, given.cells) if len(timings) > 1 else None
    if few:
        print("", few_text(few), sep="\n")
    write(given.json, {"outlier_error": OUTLIER_ERROR, "paths": paths, "few_cells": few})
    return not all(path["converged"] and path["median_error"] <= MEDIAN_ERROR for path in paths)


if __name__ == "__main__":
    sys.exit(main())
