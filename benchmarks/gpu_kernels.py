"""Judge the model of GPU kernels on an H100: errors on held-out cells, on an H200, and inside the shipped intervals.

    python -m benchmarks.gpu_kernels [--page] [--kept] [--json FILE]

Two models are fitted to the H100's samples of functions: the kernels model to the compiled programs, the functions
model to the jaxprs. The fit of kernels then predicts the H200's samples with the H200's data sheet. Both cards have the
same architecture, so the programs of the H100 count for both.

`kept` judges the shipped answers for the targets h100 and h200: the errors, and the share of timings inside the 90 %
interval, for the suite in two sessions, larger sizes, pairs of stages, facts, and all together. `--kept` prints only
this.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks._campaigns import compiled_texts, read_gpu_samples
from benchmarks._common import ROOT, options, placed, table, write
from calibrate.judge import Fitted, fitted, timings_of
from calibrate.samples import quantile_ns
from calibrate.suites.functions import FunctionsSuite, KernelsSuite
from rlxjax.calibration import known_gpu
from rlxjax.fit import (
    COVERED_SDS,
    LatencyPosterior,
    Runs,
    estimate,
    prior_posterior,
    transferred_prior,
)
from rlxjax.jaxpr import gpu_program
from rlxjax.models import FUNCTIONS, GPU_KERNELS, gpu_runs
from rlxjax.targets import target_device

EVIDENCE = ROOT / "docs" / "evidence"
#: The samples of functions of each card.
SAMPLES = {
    "h100": EVIDENCE / "accelerator-h100" / "h100.functions.samples.jsonl.gz",
    "h200": EVIDENCE / "accelerator-h200" / "gpu.functions.samples.jsonl.gz",
}
#: The H100's compiled programs.
PROGRAMS = EVIDENCE / "accelerator-h100" / "programs.json.gz"
PAGE, MARK = ROOT / "docs" / "targets.md", "GPU kernels"
#: The parts of a card's samples for the comparison of paces.
PARTS = 20
#: Trip counts of the loops in facts.json that the compiled text does not show.
UNKNOWN_TURNS = {"unknown line": 100}
#: The H200's larger sizes, by the names of the H100's programs.
LARGER = {
    "add multiply 2^26": "add multiply 67108864 float32",
    "tanh 2^26 bfloat16": "tanh 67108864 bfloat16",
    "matmul 2048": "matmul 2048x2048x2048 float32",
    "matmul 4096": "matmul 4096x4096x4096 float32",
    "matmul 8192": "matmul 8192x8192x8192 float32",
    "matmul 4096 bfloat16": "matmul 4096x4096x4096 bfloat16",
    "matmul 8192 bfloat16": "matmul 8192x8192x8192 bfloat16",
    "sort 2^24": "sort 1x16777216 float32",
    "convolve 64x112x64": "convolve NHWC 64x112x64x64x3 float32",
    "attention 8x2048x16x64": "attention 8x2048x16x64 bfloat16",
}


def held_out(found: Fitted) -> float:
    """Return the mean error of the held-out cells."""
    seen = [one for one in found.errors.values() if one.held_out_cells]
    return sum((one.held_out or 0.0) * one.held_out_cells for one in seen) / sum(one.held_out_cells for one in seen)


def judged(
    posterior: LatencyPosterior, runs: Runs, measured_ns: np.ndarray, pace_log_sd: float = 0.0
) -> dict[str, float]:
    """Return the errors of predictions with and without a common scale, and the share of timings in their intervals."""
    found = jax.tree.map(np.asarray, estimate(posterior, runs))
    logs = np.log(measured_ns / found.time_ns)
    scale = float(np.median(logs))
    return {
        "error": float(np.mean(np.abs(np.expm1(-logs)))),
        "median_error": float(np.median(np.abs(np.expm1(-logs)))),
        "scale": float(np.exp(scale)),
        "scaled_error": float(np.mean(np.abs(np.expm1(scale - logs)))),
        "within_interval": float(np.mean(np.abs(logs) <= COVERED_SDS * np.hypot(found.log_sd(), pace_log_sd))),
    }


def read(card: str, name: str) -> Any:
    """Return the content of a card's file."""
    return json.loads((EVIDENCE / f"accelerator-{card}" / name).read_text(encoding="utf-8"))


def of_facts(facts: Mapping[str, Any]) -> dict[str, float]:
    """Return the times of calls by program name, for either card."""
    found = {"empty": facts["empty"], **facts.get("loops", {})}
    found |= {f"copy 2^{(row['bytes'] // 8).bit_length() - 1}": row for row in facts["copy"]}
    chains = facts.get("kernels", facts.get("kernels in a row", {}))
    found |= {f"{count} kernels in a row": row for count, row in chains.items()}
    found |= {f"product {row['dtype']} {row['n']} {row['precision']}": row for row in facts["products"]}
    # A list has the usual time and the least time.
    return {name: float(np.ravel(row["alone_ns"])[0]) for name, row in found.items() if "alone_ns" in row}


def timed(path: Path) -> dict[str, float]:
    """Return the times of cells by name; print the change of the host's pace over the parts of many visits."""
    cells, visits = read_gpu_samples(path).timed()
    cell_ns = quantile_ns(visits)
    if len(visits.cell) > PARTS * len(cells):  # each part visits most cells
        slower = np.log(visits.time_ns / cell_ns[visits.cell])
        paces = [np.median(part) for part in np.array_split(slower, PARTS)]
        print(f"{path.name}: the pace of a {PARTS}th of the visits is off its mean by {np.std(paces):.2f}")
    return dict(zip([cell.name for cell in cells], cell_ns.tolist(), strict=True))


def kept_times(card: str) -> dict[str, dict[str, float]]:
    """Return the kept timings of a card for each set, by the names of the H100's programs."""
    found = {"suite": timed(SAMPLES[card])}
    if card == "h100":
        larger, pairs = read(card, "larger.json")["times"], read(card, "pairs.json")["pairs"]
        found["suite, another session"] = timed(SAMPLES[card].with_name("default.functions.samples.jsonl.gz"))
    else:
        larger = read(card, "functions-more.json")["larger"]
        pairs = read(card, "gpu-pairs.json")
    larger = {LARGER.get(name, f"{name} float32" * (card != "h100") or name): row for name, row in larger.items()}
    return found | {
        "larger sizes": {
            name: float(np.ravel(row["alone_ns"])[0]) for name, row in larger.items() if "alone_ns" in row
        },
        "pairs": {f"{name}, together": row["together_ns"] for name, row in pairs.items()},
        "facts": of_facts(read(card, "facts.json")),
    }


def kept(card: str) -> dict[str, dict[str, float]]:
    """Return the errors of a target's predictions on its kept timings, and the share inside the intervals, by set."""
    answered = known_gpu(target_device(card)).model
    found, runs, times = {}, [], []
    texts = compiled_texts(PROGRAMS) | compiled_texts(PROGRAMS.with_name("judged-programs.json.gz"))
    for name, kept_ns in kept_times(card).items():
        names = [one for one in kept_ns if one in texts]
        programs = [gpu_program(texts[one], UNKNOWN_TURNS if one.startswith("unknown") else {}) for one in names]
        runs, times = [*runs, *programs], [*times, *(kept_ns[one] for one in names)]
        measured_ns = np.array([kept_ns[one] for one in names])
        own = judged(answered.posterior, gpu_runs(programs), measured_ns, answered.pace_log_sd)
        found[name] = {"programs": len(names), **own}
    own = judged(answered.posterior, gpu_runs(runs), np.array(times), answered.pace_log_sd)
    return {**found, "all": {"programs": len(times), **own}}


def main() -> None:
    """Fit, judge, print, write."""
    parser = options(__doc__)
    parser.add_argument("--page", action="store_true", help="put the table into docs/targets.md")
    parser.add_argument("--kept", action="store_true", help="judge the shipped answers alone")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    by_card = {card: kept(card) for card in SAMPLES}
    rows = [
        (
            *(card, name, one["programs"], f"{one['scale']:.2f}"),
            *(_share(one[key]) for key in ("error", "median_error", "within_interval")),
        )
        for card, sets in by_card.items()
        for name, one in sets.items()
    ]
    print(table(["target", "timings", "programs", "scale", "error (%)", "median error (%)", "inside 90 % (%)"], rows))
    if given.kept:
        return
    log, other = (read_gpu_samples(path) for path in SAMPLES.values())
    suite = KernelsSuite(compiled_texts(PROGRAMS))
    kernels, functions = fitted(suite, log, GPU_KERNELS.prior), fitted(FunctionsSuite(), log, FUNCTIONS.prior)
    carried = prior_posterior(GPU_KERNELS, transferred_prior(kernels.whole.posterior), facts=other.facts)
    cells, visits = other.timed()
    others = timings_of(suite, cells, quantile_ns(visits))
    content = {
        "held_out": {"kernels": held_out(kernels), "functions": held_out(functions)},
        "families": {
            name: {
                "cells": one.held_out_cells,
                "kernels": one.held_out,
                "functions": functions.errors[name].held_out,
                "noise": one.noise_floor,
            }
            for name, one in kernels.errors.items()
        },
        "carried": judged(carried, others.runs, np.asarray(others.time_ns)),
        "kept": by_card,
    }
    rows = [
        (name, one["cells"], *(_share(one[key]) for key in ("kernels", "functions", "noise")))
        for name, one in content["families"].items()
    ]
    all_ = content["held_out"]
    rows.append(("all", sum(row[1] for row in rows), _share(all_["kernels"]), _share(all_["functions"]), ""))
    text = table(["family", "cells held out", "GPU kernels (%)", "functions (%)", "noise (%)"], rows)
    print(text, json.dumps(content["carried"], indent=1), sep="\n")
    write(given.json, content)
    if given.page:
        placed(PAGE, MARK, text)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


if __name__ == "__main__":
    main()
