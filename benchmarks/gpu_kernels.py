"""Judge the model of GPU kernels: errors on unseen kinds and sizes, on another card, and on pairs of stages.

    python -m benchmarks.gpu_kernels [--card FOLDER] [--target NAME] [--other SAMPLES] [--page] [--json FILE]

Two models are fitted to the same samples of one card: the kernels model to the compiled programs, the functions model
to the jaxprs. Errors are on held-out cells. For the kernels model, further fits leave out each kind of function with
all sizes, and the largest size of every kind. The fit then predicts three more sets: the other card's samples, with
that card's data sheet; the sizes of larger.json, which no fit saw; and the faster form of each pair of stages. The
other card has the same architecture, so its programs count as the first card's programs.

`kept` judges the shipped answers for the targets h100 and h200: the errors, and the share of timings inside the 90 %
interval, for the suite in two sessions, larger sizes, pairs of stages, facts, and all together. `--kept` prints only
this.
"""

import gzip
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks._common import ROOT, options, placed, table, write
from benchmarks.accelerator._suites import LARGE
from calibrate.judge import Fitted, fitted, timings_of
from calibrate.samples import SampleLog, noise_floor, quantile_ns, read_samples
from calibrate.suites.functions import KINDS, FunctionsSuite, KernelsSuite
from rlxjax.calibration import known_gpu
from rlxjax.fit import (
    COVERED_SDS,
    LatencyPosterior,
    Runs,
    estimate,
    fit_posteriors,
    prior_posterior,
    transferred_prior,
)
from rlxjax.jaxpr import gpu_program
from rlxjax.models import FUNCTIONS, GPU_KERNELS, gpu_facts_of_kind, gpu_runs
from rlxjax.targets import target_device

EVIDENCE = ROOT / "docs" / "evidence"
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


def read_log(path: Path) -> SampleLog:
    """Read samples of functions with the facts of the card's data sheet."""
    log = read_samples(path)
    facts = dict(gpu_facts_of_kind(log.fingerprint.device_kind) or {})
    log.header = log.header.model_copy(update={"facts": facts})
    return log


def programs_of(path: Path) -> dict[str, str]:
    """Return the texts of a file of compiled programs by name."""
    kept = json.loads(gzip.decompress(path.read_bytes()))["programs"]
    return {name: one["text"] for name, one in kept.items() if "text" in one}


def runs_of(texts: Mapping[str, str], names: Sequence[str]) -> Runs:
    """Return the runs of some programs, `[names]`."""
    return gpu_runs([gpu_program(texts[name]) for name in names])


def held_out(found: Fitted) -> float:
    """Return the mean error of the held-out cells."""
    seen = [one for one in found.errors.values() if one.held_out_cells]
    return sum((one.held_out or 0.0) * one.held_out_cells for one in seen) / sum(one.held_out_cells for one in seen)


def left_out(suite: KernelsSuite, log: SampleLog) -> dict[str, Any]:
    """Return errors on each kind by a fit without the kind, and on the largest sizes by a fit without these sizes."""
    cells, visits = log.timed()
    noise = noise_floor(visits)
    timings = timings_of(suite, cells, quantile_ns(visits))
    kinds = np.array([cell.name.rsplit(" ", 2)[0] for cell in cells])
    sizes = np.array([math.prod(map(int, cell.name.split()[-2].split("x"))) for cell in cells])
    several = [kind for kind in np.unique(kinds) if np.sum(kinds == kind) > 1]
    largest = [np.flatnonzero(kinds == kind)[np.argmax(sizes[kinds == kind])] for kind in several]
    outs = np.stack([*(kinds == kind for kind in np.unique(kinds)), np.isin(np.arange(len(cells)), largest)])
    many = jax.tree.map(lambda column: np.repeat(np.asarray(column)[None], len(outs), 0), timings)
    fits = fit_posteriors(many, GPU_KERNELS.prior, (~outs).astype(float), log.facts, n_starts=2)
    found = {}
    for name, folds in (("kinds", range(len(outs) - 1)), ("sizes", range(len(outs) - 1, len(outs)))):
        logs, sds, seen = [], [], np.any(outs[folds], 0)
        for fold in folds:
            own = jax.tree.map(np.asarray, estimate(fits[fold].posterior, timings.runs))
            logs.append(np.log(np.asarray(timings.time_ns) / own.time_ns)[outs[fold]])
            sds.append(own.log_sd()[outs[fold]])
        errors = np.abs(np.expm1(-np.concatenate(logs)))
        found[name] = {
            "programs": len(errors),
            "error": float(np.mean(errors)),
            "median_error": float(np.median(errors)),
            "noise": float(np.mean(noise[seen])),
            "within_interval": float(np.mean(np.abs(np.concatenate(logs)) <= COVERED_SDS * np.concatenate(sds))),
        }
    return found


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


def of_larger(posterior: LatencyPosterior, of_functions: LatencyPosterior, folder: Path, target: str) -> dict[str, Any]:
    """Return the errors of both models on sizes that no fit saw."""
    times = json.loads((folder / "larger.json").read_text(encoding="utf-8"))["times"]
    texts = programs_of(folder / "programs.json.gz")
    kinds = [kind._replace(sizes=LARGE[kind.name]) for kind in KINDS if kind.name in LARGE]
    cells = [cell for cell in FunctionsSuite(kinds).cells() if "alone_ns" in times.get(cell.name, {})]
    measured_ns = np.array([times[cell.name]["alone_ns"] for cell in cells])
    runs = runs_of(texts, [cell.name for cell in cells])
    predicted_ns = np.asarray(estimate(posterior, runs).time_ns)
    answered = known_gpu(target_device(target)).model
    return {
        "programs": len(cells),
        "kernels": judged(posterior, runs, measured_ns),
        "as_target": judged(answered.posterior, runs, measured_ns, answered.pace_log_sd),
        "functions": judged(of_functions, FunctionsSuite(kinds).runs(cells), measured_ns),
        "predicted_over_measured": {
            cell.name: round(float(ratio), 3) for cell, ratio in zip(cells, predicted_ns / measured_ns, strict=True)
        },
    }


def of_pairs(posterior: LatencyPosterior, folder: Path) -> dict[str, Any]:
    """Return how often the predicted sum of stages and time together order the forms rightly, beyond the noise."""
    pairs = json.loads((folder / "pairs.json").read_text(encoding="utf-8"))["pairs"]
    texts = programs_of(folder / "judged-programs.json.gz")
    stages = {name: [one for one in texts if one.startswith(f"{name}, stage ")] for name in pairs}
    names = [name for name in pairs if f"{name}, together" in texts and stages[name]]
    programs = [program for name in names for program in (f"{name}, together", *stages[name])]
    predicted = np.asarray(estimate(posterior, runs_of(texts, programs)).time_ns)
    times = dict(zip(programs, predicted, strict=True))
    clear = right = together = 0
    errors = []
    for name in names:
        one, fused_ns = pairs[name], times[f"{name}, together"]
        errors.append(fused_ns / one["together_ns"] - 1.0)
        ratio = one["apart_ns"] / one["together_ns"]
        if abs(np.log(ratio)) > np.log(one["noise"]):
            clear += 1
            together += ratio > 1
            right += (sum(times[stage] for stage in stages[name]) > fused_ns) == (ratio > 1)
    return {
        "pairs": len(names),
        "beyond_noise": clear,
        "right": int(right),
        "together_is_faster": int(together),
        "error_of_together": float(np.mean(np.abs(errors))),
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


def timed(card: str, samples: str) -> dict[str, float]:
    """Return the times of cells by name; print the change of the host's pace over the parts of many visits."""
    cells, visits = read_log(EVIDENCE / f"accelerator-{card}" / samples).timed()
    cell_ns = quantile_ns(visits)
    if len(visits.cell) > PARTS * len(cells):  # each part visits most cells
        slower = np.log(visits.time_ns / cell_ns[visits.cell])
        paces = [np.median(part) for part in np.array_split(slower, PARTS)]
        print(f"{samples}: the pace of a {PARTS}th of the visits is off its mean by {np.std(paces):.2f}")
    return dict(zip([cell.name for cell in cells], cell_ns.tolist(), strict=True))


def kept_times(card: str, samples: str) -> dict[str, dict[str, float]]:
    """Return the kept timings of a card for each set, by the names of the H100's programs."""
    found = {"suite": timed(card, samples)}
    if card == "h100":
        larger, pairs = read(card, "larger.json")["times"], read(card, "pairs.json")["pairs"]
        together = {name: row["together_ns"] for name, row in pairs.items()}
    else:
        larger = read(card, "functions-more.json")["larger"]
        together = {name: row["together_ns"] for name, row in read(card, "gpu-pairs.json").items()}
    larger = {LARGER.get(name, f"{name} float32" * (card != "h100") or name): row for name, row in larger.items()}
    if card == "h100":
        found["suite, another session"] = timed(card, "default.functions.samples.jsonl.gz")
    return found | {
        "larger sizes": {
            name: float(np.ravel(row["alone_ns"])[0]) for name, row in larger.items() if "alone_ns" in row
        },
        "pairs": {f"{name}, together": time_ns for name, time_ns in together.items()},
        "facts": of_facts(read(card, "facts.json")),
    }


def kept(card: str, samples: str) -> dict[str, dict[str, float]]:
    """Return the errors of a target's predictions on its kept timings, and the share inside the intervals, by set."""
    answered = known_gpu(target_device(card)).model
    folder, found, runs, times = EVIDENCE / "accelerator-h100", {}, [], []
    texts = programs_of(folder / "programs.json.gz") | programs_of(folder / "judged-programs.json.gz")
    for name, kept_ns in kept_times(card, samples).items():
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
    parser.add_argument("--card", type=Path, default=EVIDENCE / "accelerator-h100")
    parser.add_argument("--target", default="h100", help="the card, as a target")
    parser.add_argument("--other", type=Path, default=EVIDENCE / "accelerator-h200" / "gpu.functions.samples.jsonl.gz")
    parser.add_argument("--page", action="store_true", help="put the table into docs/targets.md")
    parser.add_argument("--kept", action="store_true", help="judge the shipped answers alone")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    names = {"h100": "h100.functions.samples.jsonl.gz", "h200": "gpu.functions.samples.jsonl.gz"}
    by_card = {card: kept(card, name) for card, name in names.items()}
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
    samples = max(given.card.glob("*.functions.samples.jsonl*"))
    log, other = read_log(samples), read_log(given.other)
    suite = KernelsSuite(programs_of(given.card / "programs.json.gz"))
    kernels, functions = fitted(suite, log, GPU_KERNELS.prior), fitted(FunctionsSuite(), log, FUNCTIONS.prior)
    posterior = kernels.whole.posterior
    again, by_functions = fitted(suite, other, GPU_KERNELS.prior), fitted(FunctionsSuite(), other, FUNCTIONS.prior)
    carried = prior_posterior(GPU_KERNELS, transferred_prior(posterior), facts=other.facts)
    content = {
        "card": log.fingerprint.device_kind,
        "other": other.fingerprint.device_kind,
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
        "carried": judged(carried, again.whole.runs, again.measured_ns),
        "other_held_out": {"kernels": held_out(again), "functions": held_out(by_functions)},
        "left_out": {one.fingerprint.device_kind: left_out(suite, one) for one in (log, other)},
        "larger": of_larger(posterior, functions.whole.posterior, given.card, given.target),
        "pairs": of_pairs(posterior, given.card),
        "kept": by_card,
    }
    rows = [
        (name, one["cells"], *(_share(one[key]) for key in ("kernels", "functions", "noise")))
        for name, one in content["families"].items()
    ]
    all_ = content["held_out"]
    rows.append(("all", sum(row[1] for row in rows), _share(all_["kernels"]), _share(all_["functions"]), ""))
    text = table(["family", "cells held out", "GPU kernels (%)", "functions (%)", "noise (%)"], rows)
    print(text)
    print(json.dumps({name: content[name] for name in list(content)[4:]}, indent=1))
    write(given.json, content)
    if given.page:
        placed(PAGE, MARK, text)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


if __name__ == "__main__":
    main()
