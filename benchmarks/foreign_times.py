"""What foreign functions take, beside what a calibration that never saw them predicts.

    python -m benchmarks.foreign_times CALIBRATION [--which functions|spare|all] [--budget 60] [--json FILE]

The protocol is that of the calibrate job of functions. Functions whose loops turn an unknown number of times are
left out.
"""

import argparse
import json
from pathlib import Path

import jax
import numpy as np

import rlxjax as rx
from benchmarks.foreign_table import TABLES
from benchmarks.functions_timing import Entry, measure, time_run
from calibrate.visits import noise_floor, quartile_ns
from rlxjax.calibration import predict_profile


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--which", choices=tuple(TABLES), default="all")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of measuring")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    calibration = rx.load_calibration(options.calibration)
    entries, predictions = [], []
    for foreign in TABLES[options.which]:
        fn, args = foreign.call()
        profile = rx.profile_function(fn, *args, trip_counts=foreign.trip_counts)
        if not profile.unknown_loops:
            entries.append(Entry(foreign.name, foreign.library, True, jax.jit(fn), jax.device_put(args)))
            predictions.append(predict_profile(calibration, profile))
    for entry in entries:
        time_run(entry)
    visits, _ = measure(entries, options.budget, np.random.default_rng())
    times_ns, noise = quartile_ns(visits), noise_floor(visits)
    rows = [
        {
            "name": entry.name,
            "library": entry.family,
            "time_ns": float(time_ns),
            "noise": float(own),
            "predicted_ns": said.time_ns,
            "low_ns": said.low_ns,
            "high_ns": said.high_ns,
            "largest_term": next(iter(said.terms_ns)),
        }
        for entry, time_ns, own, said in zip(entries, times_ns, noise, predictions, strict=True)
    ]
    for row in rows:
        ratio = row["predicted_ns"] / row["time_ns"]
        print(
            f"{row['name']:34} {row['library']:20} {row['time_ns'] / 1e3:10.1f} us, predicted "
            f"{row['predicted_ns'] / 1e3:10.1f}, {ratio:5.2f} times, {row['largest_term']}"
        )
    ratios = np.array([row["predicted_ns"] / row["time_ns"] for row in rows])
    errors = np.abs(ratios - 1)
    found = {
        "functions": len(rows),
        "mean_error": float(errors.mean()),
        "median_error": float(np.median(errors)),
        "p95_error": float(np.quantile(errors, 0.95)),
        "within_10_percent": float(np.mean(errors <= 0.1)),
        "in_interval_of_90": float(np.mean([row["low_ns"] <= row["time_ns"] <= row["high_ns"] for row in rows])),
        "noise_floor": float(noise.mean()),
    }
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps({"summary": found, "functions": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
