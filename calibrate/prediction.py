"""What `rlxjax predict` says: what each strategy takes, the pick, and how sure that is."""

from collections.abc import Mapping
from typing import Any

import typer

import rlxjax
from rlxjax.models import WELCH

from .printing import finite_ns, ns, say


def prediction_of(known: "rlxjax.Calibration", sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return what a calibration predicts for a workload, as JSON has it: times in ns, shares of 1.

    With two segments, ultra is there as well: the host's path with one, another result.

    Args:
        known: the calibration.
        sizes: of the workload, by the names of the model's inputs.
    """
    calibration = known.of(WELCH.name)
    candidates = [calibration.name_of(name, **sizes) for name in calibration.alternatives(**sizes)]
    runs = dict.fromkeys(candidates, sizes)
    if sizes["n_segments"] == 2:
        runs = {"ultra": {**sizes, "n_segments": 1}, **runs}
    predicted = {name: finite_ns(calibration.predict_ns(name, **run), name) for name, run in runs.items()}
    intervals = {
        name: [finite_ns(end, name) for end in calibration.interval_ns(name, **run)] for name, run in runs.items()
    }
    pick, next_best = sorted(candidates, key=predicted.__getitem__)[:2]  # of equals the earlier one
    decided = calibration.compare(pick, next_best, **sizes)
    inside = bool(decided.in_domain)
    return {
        **sizes,
        "predicted_ns": predicted,
        "interval_ns": intervals,
        "pick": pick,
        "next_best": next_best,
        "ratio_to_next_best": predicted[pick] / predicted[next_best],
        "probability": float(decided.probability),
        "verdict": pick if decided.verdict() == "fuse" else "undecided",
        "in_domain": inside,
        "extrapolated": not inside,
    }


def print_prediction(found: Mapping[str, Any]) -> None:
    """Print what `prediction_of` returned, but for the calibration that it is by."""
    for strategy, time_ns in found["predicted_ns"].items():
        low, high = map(ns, found["interval_ns"][strategy])
        mark = "  <- pick" if strategy == found["pick"] else ""
        typer.echo(f"{strategy:7} {ns(time_ns):>15} ns  (90 %: {low} to {high}){mark}")
    undecided = "undecided: " if found["verdict"] == "undecided" else ""
    say(
        f"{undecided}{found['pick']} is faster than {found['next_best']} with {100 * found['probability']:.0f} %: "
        f"{found['ratio_to_next_best']:.2f} times its time (less is better)"
    )
    if not found["in_domain"]:
        say("outside the calibrated domain: an extrapolation")
