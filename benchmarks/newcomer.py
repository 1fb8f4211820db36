"""Models as a JAX user writes them: predicted and measured times, `advise` on five splits, and seven `choose` calls.

    python -m benchmarks.newcomer [--calibration FILE] [--budget 40] [--json FILE]

Eight models come first, then further loops of small operations. All programs are timed in the same rounds. Without
`--calibration` the prior of known CPUs predicts. Splits and choices start with an empty memory.
"""

import functools
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import rlxjax as rx
from benchmarks._common import options, table, visits, write
from benchmarks.newcomer_models import CHOICES, LOOPS, MODELS, SPLITS
from rlxjax.clock import QUARTILE


def answered(ask: Callable[[], Any]) -> dict[str, Any]:
    """Return a verdict, the source of the verdict and the seconds until the verdict."""
    begun_s = time.perf_counter()
    try:
        found = ask()
        verdict = {"verdict": getattr(found, "verdict", found.name), "by": found.by, "is_tie": found.is_tie}
    except ValueError as error:
        verdict = {"verdict": "refused", "by": str(error)[:60], "is_tie": False}
    return verdict | {"seconds": time.perf_counter() - begun_s}


def main() -> None:
    """Predict, time, ask, and print three tables."""
    parser = options(__doc__, budget=40.0)
    parser.add_argument("--calibration", help="a calibration file of this machine")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as home:
        os.environ["RLXJAX_HOME"] = home
        known = rx.load_calibration(given.calibration) if given.calibration else rx.default_calibration()
        rows, calls = [], {}
        for name, (fn, args) in (MODELS | LOOPS).items():
            begun_s = time.perf_counter()
            said = rx.calibration.predict_function(known, fn, *args)
            rows.append({"name": name, "predicted_ns": said.time_ns, "low_ns": said.low_ns, "high_ns": said.high_ns}
                        | {"in_domain": said.in_domain, "seconds": time.perf_counter() - begun_s})  # fmt: skip
            calls[name] = functools.partial(jax.jit(fn), *jax.device_put(tuple(args)))
        timed = visits(calls, 1000, least=5, until_s=time.perf_counter() + given.budget)
        splits, choices = [], []
        for name, (stages, args) in SPLITS.items():
            for word in ("never", "undecided"):
                ask = functools.partial(rx.advise, stages, *args, calibration=known, measure=word)
                splits.append({"name": name, "measure": word, **answered(ask)})
        for name, (forms, args) in CHOICES.items():
            jitted = {form: jax.jit(fn) for form, fn in forms.items()}
            choices.append({"name": name, **answered(functools.partial(rx.choose, jitted, *args, calibration=known))})
    for row in rows:
        row["time_ns"] = float(np.quantile(timed[row["name"]], QUARTILE))
        row["ratio"] = row["predicted_ns"] / row["time_ns"]
        row["inside"] = bool(row["low_ns"] <= row["time_ns"] <= row["high_ns"])
    columns = ["measured, us", "predicted, us", "from", "to", "predicted / measured", "inside", "in domain", "s"]
    names = ("time_ns", "predicted_ns", "low_ns", "high_ns")
    cells = [
        [row["name"], *(f"{row[name] / 1e3:.3g}" for name in names), f"{row['ratio']:.2f}"]
        + [row["inside"], row["in_domain"], f"{row['seconds']:.2f}"]
        for row in rows
    ]
    print(table(["model", *columns], cells), end="\n\n")
    columns = ["verdict", "by", "is_tie"]
    for found in (splits, choices):
        names = [name for name in found[0] if name != "seconds"]
        print(table([*names, "s"], [[*(o[n] for n in names), f"{o['seconds']:.2f}"] for o in found]), end="\n\n")
    summary = {name: {"inside": sum(r["inside"] for r in own), "of": len(own)}
               | {"sure and outside": sum(r["in_domain"] and not r["inside"] for r in own)}
               for name, own in (("models", rows[: len(MODELS)]), ("loops", rows[len(MODELS) :]))}  # fmt: skip
    print(json.dumps(summary))
    write(given.json, {"summary": summary, "models": rows, "splits": splits, "choices": choices})


if __name__ == "__main__":
    main()
