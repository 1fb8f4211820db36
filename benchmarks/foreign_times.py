"""Compare the times of foreign functions with predictions of a model that never saw these functions.

    python -m benchmarks.foreign_times [--which functions|spare|all] [--budget 120] [--json FILE]

The functions of a calibration run in the same rounds as the foreign functions, because a shared machine changes its
pace from minute to minute. The model is fitted to the functions of the calibration, with the protocol of the calibrate
job. Functions with loops of unknown trip count are left out.
"""

import functools
import json
import time

import jax
import numpy as np

import rlxjax as rx
from benchmarks._common import options, table, visits, write
from benchmarks.foreign_table import TABLES
from calibrate.samples import Visits, noise_floor, quantile_ns
from calibrate.suites.functions import timed_functions
from rlxjax.clock import call_ns
from rlxjax.fit import COVERED_SDS
from rlxjax.models import FUNCTIONS, function_runs

MOST_ROUNDS = 1000


def main() -> None:
    """Run the command."""
    parser = options(__doc__, budget=120.0)
    parser.add_argument("--which", choices=tuple(TABLES), default="all")
    given = parser.parse_args()
    rng, calls, profiles, libraries = np.random.default_rng(0), {}, [], []
    for name, function in timed_functions().items():
        if not function.held_out:
            calls[name] = functools.partial(jax.jit(function.fn), *jax.device_put(function.arguments(rng)))
            profiles.append(rx.profile_function(function.fn, *function.abstract()))
            libraries.append("")
    for foreign in TABLES[given.which]:
        fn, args = foreign.call()
        profile = rx.profile_function(fn, *args, trip_counts=foreign.trip_counts)
        if not profile.unknown_loops:
            calls[foreign.name] = functools.partial(jax.jit(fn), *jax.device_put(args))
            profiles.append(profile)
            libraries.append(foreign.library)
    for call in calls.values():
        call_ns(call)
    found = visits(calls, MOST_ROUNDS, least=2, until_s=time.perf_counter() + given.budget)
    timed = Visits.of_rounds(np.stack(list(found.values()), 1))
    times_ns, noise, runs = quantile_ns(timed), noise_floor(timed), function_runs(profiles)
    timings = rx.Timings.checked(FUNCTIONS, variant=FUNCTIONS.variants[0], time_ns=times_ns, **runs.inputs)
    fit = rx.fit_posterior(timings, weights=np.array([not library for library in libraries], float))
    said = rx.fit.estimate(fit.posterior, runs)
    predicted_ns, log_sd = np.asarray(said.time_ns), np.asarray(said.log_sd())
    rows = [
        {
            "name": name,
            "library": libraries[i],
            "time_ns": float(times_ns[i]),
            "noise": float(noise[i]),
            "predicted_ns": float(predicted_ns[i]),
            "low_ns": float(predicted_ns[i] * np.exp(-COVERED_SDS * log_sd[i])),
            "high_ns": float(predicted_ns[i] * np.exp(COVERED_SDS * log_sd[i])),
        }
        for i, name in enumerate(calls)
        if libraries[i]
    ]
    ratios = np.array([row["predicted_ns"] / row["time_ns"] for row in rows])
    figures = [
        (row["name"], row["library"], f"{row['time_ns'] / 1e3:.1f}", f"{row['predicted_ns'] / 1e3:.1f}", f"{ratio:.2f}")
        for row, ratio in zip(rows, ratios, strict=True)
    ]
    print(table(["function", "of", "us", "predicted, us", "times"], figures), end="\n\n")
    errors = np.abs(ratios - 1)
    summary = {
        "functions": len(rows),
        "mean_error": float(errors.mean()),
        "median_error": float(np.median(errors)),
        "in_interval_of_90": float(np.mean([row["low_ns"] <= row["time_ns"] <= row["high_ns"] for row in rows])),
        "noise_floor": float(np.mean([row["noise"] for row in rows])),
    }
    print(json.dumps(summary, indent=1))
    write(given.json, {"summary": summary, "functions": rows})


if __name__ == "__main__":
    main()
