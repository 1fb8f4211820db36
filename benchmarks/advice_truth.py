"""Compare the predictions of `predict_profiles` for pairs of stages with measured times.

    python -m benchmarks.advice_truth CALIBRATION PAIRS [--json FILE]

PAIRS is a file of `benchmarks.stage_pairs` from the calibration's machine. Pairs with a noise above 15 % are left out,
because their times jump between two values. A pair is decided if one form is faster with a probability of 90 %, or if
both are within `REGRET` with this probability; the latter is right if the measured times are. The regret is the
average slowdown of the chosen form against the faster form. The log loss is the mean of `-log` of the probability of
the true outcome, for several spreads of a program's own error.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

import rlxjax as rx
from benchmarks._common import options, table, write
from benchmarks.decision_metrics import brier_score, log_loss
from benchmarks.stage_pairs import MOST_NOISE, PAIRS
from rlxjax.calibration import predict_profiles
from rlxjax.fit import SURE

REGRET = rx.Advice.regret
#: The tried spreads of a program's own error.
OWN_SPREADS = (0.03, 0.05, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3)


def judged(calibration: rx.Calibration, truth: dict[str, dict[str, float]]) -> list[dict]:
    """Return the prediction and the measured times of each pair."""
    rows = []
    for pair in PAIRS:
        if pair.name not in truth or truth[pair.name]["noise"] > MOST_NOISE:
            continue
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            profiles = [rx.profile_function(fn, *args) for fn, args in pair.programs()]
        times = predict_profiles(calibration.of("functions"), profiles)
        sides = [0], range(1, len(profiles))
        said = times.decision(*sides)
        ends_ns = REGRET * float(said.kept_ns) * np.array([1, -1])
        below = np.asarray(jax.nn.sigmoid((ends_ns - said.margin_ns) / said.temperature_ns))
        rows.append(
            {
                "name": pair.name,
                "half": pair.half,
                "apart_ns": truth[pair.name]["apart_ns"],
                "together_ns": truth[pair.name]["together_ns"],
                "predicted_apart_ns": float(said.kept_ns),
                "predicted_together_ns": float(said.fused_ns),
                "probability": float(said.probability),
                "no_matter": float(below[0] - below[1]),
                "by_own_spread": {str(own): float(times.decision(*sides, own).probability) for own in OWN_SPREADS},
            }
        )
    return rows


def summary(rows: list[dict]) -> dict[str, Any]:
    """Return the quality of the decisions."""
    times = np.array([[row["apart_ns"], row["together_ns"]] for row in rows])
    probability = np.array([row["probability"] for row in rows])
    pays = times[:, 1] < times[:, 0]
    is_alike = np.array([row["no_matter"] for row in rows]) >= SURE
    decided = is_alike | (np.abs(probability - 0.5) >= SURE - 0.5)
    is_right = np.where(is_alike, np.abs(times[:, 0] / times[:, 1] - 1.0) <= REGRET, (probability > 0.5) == pays)
    chosen = np.where(~is_alike & (probability > 0.5), times[:, 1], times[:, 0])
    best = times.min(1)
    return {
        "pairs": len(rows),
        "lose_by_5_percent": int(np.sum(times[:, 1] > 1.05 * times[:, 0])),
        "decided": float(decided.mean()),
        "right_of_decided": float(is_right[decided].mean()),
        "no_matter": int(is_alike.sum()),
        "right_of_no_matter": int(is_right[is_alike].sum()),
        "log_loss": log_loss(probability, pays),
        "log_loss_by_own_spread": {
            str(own): log_loss(np.array([row["by_own_spread"][str(own)] for row in rows]), pays) for own in OWN_SPREADS
        },
        "brier": brier_score(probability, pays),
        "regret": float(np.mean(chosen / best - 1)),
        "regret_of_always_fusing": float(np.mean(times[:, 1] / best - 1)),
        "regret_of_never_fusing": float(np.mean(times[:, 0] / best - 1)),
    }


def main() -> None:
    """Run the command."""
    parser = options(__doc__)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("pairs", type=Path)
    given = parser.parse_args()
    truth = json.loads(given.pairs.read_text(encoding="utf-8"))["pairs"]
    rows = judged(rx.load_calibration(given.calibration), truth)
    figures = []
    for row in sorted(rows, key=lambda row: row["apart_ns"] / row["together_ns"]):
        gains = (f"{row[f'{form}apart_ns'] / row[f'{form}together_ns']:.2f}" for form in ("", "predicted_"))
        figures.append((row["name"], *gains, f"{row['probability']:.2f}"))
    found = summary(rows)
    print(table(["pair", "gains, times", "predicted", "P"], figures), json.dumps(found, indent=1), sep="\n\n")
    kept = [{name: said for name, said in row.items() if name != "by_own_spread"} for row in rows]
    write(given.json, {"summary": found, "pairs": kept})


if __name__ == "__main__":
    main()
