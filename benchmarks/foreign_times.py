"""What foreign functions take, beside what a model predicts that never saw them.

    python -m benchmarks.foreign_times [--which functions|spare|all] [--budget 120] [--json FILE]

The functions that a calibration times run beside the foreign ones, in the same rounds, since a shared machine changes
its pace from minute to minute; the model is fitted to them. The protocol is that of the calibrate job. Functions whose
loops turn an unknown number of times are left out.
"""

import argparse
import json
from pathlib import Path

import jax
import numpy as np
from calibrate.functions import function_cells
from calibrate.functions_job import chosen_cells

import rlxjax as rx
from benchmarks.foreign_table import TABLES
from benchmarks.functions_timing import Entry, measure
from calibrate.visits import noise_floor, quantile_ns
from rlxjax.clock import call_ns
from rlxjax.fit import COVERED_SDS, corrected_terms_ns
from rlxjax.models import FUNCTIONS, function_runs


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--which", choices=tuple(TABLES), default="all")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of measuring")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    entries, profiles = [], []
    for cell in chosen_cells(function_cells()):
        if not cell.held_out:
            fn, shapes = cell.build()
            entries.append(Entry(cell.name, "calibration", False, jax.jit(fn), jax.device_put(cell.arguments(rng))))
            profiles.append(rx.profile_function(fn, *shapes))
    for foreign in TABLES[options.which]:
        fn, args = foreign.call()
        profile = rx.profile_function(fn, *args, trip_counts=foreign.trip_counts)
        if not profile.unknown_loops:
            entries.append(Entry(foreign.name, foreign.library, True, jax.jit(fn), jax.device_put(args)))
            profiles.append(profile)
    for entry in entries:
        call_ns(entry.call)
    visits = measure(entries, options.budget, np.random.default_rng())
    times_ns, noise = quantile_ns(visits), noise_floor(visits)
    runs = function_runs(profiles)
    timings = rx.Timings.checked(FUNCTIONS, variant=FUNCTIONS.variants[0], time_ns=times_ns, **runs.inputs)
    fit = rx.fit_posterior(timings, weights=np.array([not entry.held_out for entry in entries], float))
    found = rx.estimate(fit.posterior, runs)
    terms = {name: np.asarray(part) for name, part in corrected_terms_ns(fit.posterior, runs).items()}
    predicted_ns, log_sd = np.asarray(found.time_ns), np.asarray(found.log_sd())
    rows = [
        {
            "name": entry.name,
            "library": entry.family,
            "time_ns": float(times_ns[i]),
            "noise": float(noise[i]),
            "predicted_ns": float(predicted_ns[i]),
            "low_ns": float(predicted_ns[i] * np.exp(-COVERED_SDS * log_sd[i])),
            "high_ns": float(predicted_ns[i] * np.exp(COVERED_SDS * log_sd[i])),
            "largest_term": max(terms, key=lambda name: terms[name][i]),
        }
        for i, entry in enumerate(entries)
        if entry.held_out
    ]
    for row in rows:
        ratio = row["predicted_ns"] / row["time_ns"]
        print(
            f"{row['name']:34} {row['library']:20} {row['time_ns'] / 1e3:10.1f} us, predicted "
            f"{row['predicted_ns'] / 1e3:10.1f}, {ratio:5.2f} times, {row['largest_term']}"
        )
    ratios = np.array([row["predicted_ns"] / row["time_ns"] for row in rows])
    errors = np.abs(ratios - 1)
    summary = {
        "functions": len(rows),
        "mean_error": float(errors.mean()),
        "median_error": float(np.median(errors)),
        "p95_error": float(np.quantile(errors, 0.95)),
        "within_10_percent": float(np.mean(errors <= 0.1)),
        "in_interval_of_90": float(np.mean([row["low_ns"] <= row["time_ns"] <= row["high_ns"] for row in rows])),
        "noise_floor": float(np.mean([row["noise"] for row in rows])),
    }
    print(json.dumps(summary, indent=1))
    if options.json:
        options.json.write_text(json.dumps({"summary": summary, "functions": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
