"""Compare Welch peaks by this library, by the naive form and by every installed peer.

    python -m benchmarks.welch_peers [--n-fft 256 1024] [--batch 1 1024] [--k 16] [--segments 2]
        [--contender fused naive ...] [--budget 5] [--json FILE]

`pip install '.[bench]'` installs three peers. Every result is checked against float64 before its timing. Ctrl-C keeps
the finished measurements. `auto` picks by this machine's saved calibration. The exit status is 1 if a result was wrong
or a contender failed.
"""

import itertools
import statistics
import sys
import time
from typing import Any

import numpy as np

import rlxjax as rx
from benchmarks._common import options, table, visits, write
from benchmarks._peers import CONTENDERS, copied
from rlxjax.clock import mean_ns, visit_ns

N_FFTS, BATCHES, KS = [64, 256, 1024, 4096], [1, 32, 256, 1024, 8192, 65536, 131072], [16]
#: The largest batch * n_fft without `--batch`, and the most rounds of a workload.
MAX_SAMPLES, MOST_ROUNDS = 2**27, 200
#: The tolerance as a share of a row's largest power, and the most compared rows.
TOLERANCE, MOST_ROWS = 1e-5, 128
#: Warm-up seconds of a contender before the rounds.
WARM_S = 0.15
#: Between contenders, wait until the process uses less than this share of a core, at most until the timeout.
IDLE_SHARE, IDLE_STEP_S, IDLE_TIMEOUT_S = 0.25, 2e-4, 0.3
COPY = "copy"


def reference_power(signal: np.ndarray, params: rx.WelchPeakParams) -> np.ndarray:
    """Return the mean one-sided power in float64 `[batch, n_bins]`."""
    window = 0.5 * (1.0 - np.cos(2.0 * np.pi * np.arange(params.n_fft) / (params.n_fft - 1)))
    total = np.zeros((len(signal), params.n_bins))
    for start in range(0, params.n_segments * params.hop, params.hop):
        total += np.abs(np.fft.rfft(signal[:, start : start + params.n_fft].astype(np.float64) * window)) ** 2
    total[:, 1:-1] *= 2.0
    return total / params.n_segments


def disagreement(result: Any, signal: np.ndarray, params: rx.WelchPeakParams) -> str | None:
    """Return the error of the peaks of a signal in words, or None.

    Powers are within `TOLERANCE` of the row's largest power from the reference's of the same rank, and so is the
    reference's power at each bin: bins are the same except among powers closer than that. Slots beyond the bins may be
    left out, and are zeros otherwise.
    """
    batch, largest = len(signal), min(params.k, params.n_bins)
    rows = np.unique(np.linspace(0, batch - 1, min(batch, MOST_ROWS)).astype(np.intp))
    pair = result if isinstance(result, tuple) else (result[..., 0], result[..., 1])
    bins, powers = (np.asarray(one.get() if hasattr(one, "get") else one.cpu() if hasattr(one, "cpu") else one)
                    for one in pair)  # fmt: skip
    if bins.shape != powers.shape or bins.shape not in ((batch, largest), (batch, params.k)):
        return f"expected peaks of shape {(batch, params.k)}, got {bins.shape} and {powers.shape}"
    bins, powers = bins[rows].astype(np.float64), powers[rows].astype(np.float64)
    if np.any(bins[:, largest:]) or np.any(powers[:, largest:]):
        return "slots beyond the bins are not zeros"
    bins, powers = bins[:, :largest], powers[:, :largest]
    if not np.all((bins >= 0) & (bins < params.n_bins) & (bins == np.floor(bins))):
        return "bins are not whole numbers of the spectrum's range"
    if np.any(np.diff(np.sort(bins, axis=1), axis=1) == 0):
        return "a bin comes twice in a row"
    expected = reference_power(signal[rows], params)
    scale = np.maximum(expected.max(axis=1, keepdims=True), np.finfo(float).tiny)
    ranked = -np.sort(-expected, axis=1)[:, :largest]
    at_bins = np.take_along_axis(expected, bins.astype(np.intp), axis=1)
    errors = np.maximum(np.abs(powers - ranked), np.abs(at_bins - ranked)) / scale
    return None if np.all(errors <= TOLERANCE) else f"a power is off by {errors.max():.2g} of its row's largest"


def check(names: list[str]) -> None:
    """Check each contender on rows of equal, sorted and single powers."""
    for n_fft, n_segments, k in ((6, 2, 4), (64, 1, 1), (64, 2, 40), (96, 8, 5), (4096, 2, 64)):
        params = rx.WelchPeakParams(n_fft, n_segments, k)
        at = np.arange(params.frame_len, dtype=np.float32)
        rows = np.array([0 * at, 0 * at + 1, at, at == 5, np.sin(at), np.exp(-at)], np.float32)
        for name in names:
            if name != COPY and (wrong := disagreement(CONTENDERS[name].build(rows, params)(), rows, params)):
                raise AssertionError(f"{name}, n_fft {n_fft}, {n_segments} segments, k {k}: {wrong}")


def visit(run: Any) -> float:
    """Return the mean time of a loop of calls, after the spinning threads of the last contender have stopped."""
    give_up_s = time.perf_counter() + IDLE_TIMEOUT_S
    while (begun_s := time.perf_counter()) < give_up_s:
        used_s = time.process_time()
        time.sleep(IDLE_STEP_S)
        if time.process_time() - used_s < IDLE_SHARE * (time.perf_counter() - begun_s):
            break
    return round(mean_ns(visit_ns(run)))


def measured(names: list[str], signal: np.ndarray, params: rx.WelchPeakParams, budget_s: float) -> dict[str, dict]:
    """Return the times and the least time of the contenders of a workload in ns, or the reason for no times."""
    until_s, runs, results = time.perf_counter() + budget_s, {}, {}
    for name in names:
        try:
            run = copied(signal, params) if name == COPY else CONTENDERS[name].build(signal, params)
            if (result := run()) is not None and name != COPY and (wrong := disagreement(result, signal, params)):
                results[name] = {"note": f"wrong: {wrong}"}
                continue
            del result
            warm_s = time.perf_counter() + WARM_S
            while time.perf_counter() < warm_s:
                run()
            runs[name] = run
        except Exception as error:  # noqa: BLE001 - whatever a peer raises
            results[name] = {"note": f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    times = visits(runs, MOST_ROUNDS, until_s=until_s, visit=visit)
    results |= {name: {"times_ns": own.tolist(), "min_ns": float(own.min())} for name, own in times.items()}
    return {name: results[name] for name in names}


def of_workload(sizes: dict[str, int], names: list[str], budget_s: float) -> dict[str, Any]:
    """Return the figures of a workload: results, ratios of ours to the peers, shares of the copy's bandwidth."""
    params = rx.WelchPeakParams(sizes["n_fft"], sizes["n_segments"], sizes["k"])
    rng, at = np.random.default_rng(0), np.arange(params.frame_len, dtype=np.float32)
    signal = rng.standard_normal((sizes["batch"], params.frame_len), np.float32)
    signal += np.sin(rng.uniform(0.1, 3.0, (sizes["batch"], 1)).astype(np.float32) * at)  # a tone in each row
    results = measured(names, signal, params, budget_s)
    best = {name: float(found["min_ns"]) for name, found in results.items() if "min_ns" in found}
    ours = [name for name in best if name != COPY and CONTENDERS[name].is_ours]
    peers = [name for name in best if name not in (*ours, COPY)]
    return {
        **sizes,
        "bytes_moved": 4 * sizes["batch"] * (params.frame_len + 2 * params.k),
        "results": results,
        "ratios": {own: {peer: best[own] / best[peer] for peer in peers} for own in ours},
        "copy_share": {name: best[COPY] / best[name] for name in (*ours, *peers) if COPY in best},
    }


def mean_ratios(cells: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the geometric means of the ratios over the workloads with both times."""
    found: dict[str, dict[str, list[float]]] = {}
    for own, by_peer in (item for cell in cells for item in cell["ratios"].items()):
        for peer, ratio in by_peer.items():
            found.setdefault(own, {}).setdefault(peer, []).append(ratio)
    return {own: {peer: statistics.geometric_mean(all_) for peer, all_ in by.items()} for own, by in found.items()}


def row_of(cell: dict[str, Any], own: str) -> list[str]:
    """Return a row of the table: sizes, our path's time, its ratios to the peers, its share of the copy."""
    names = [name for name in cell["results"] if name not in (own, COPY)]
    best = {name: found.get("min_ns") for name, found in cell["results"].items()}
    ratios = [f"{best[own] / best[name]:.2f}" if best[own] and best[name] else "-" for name in names]
    share = f"{cell['copy_share'][own]:.2f}" if own in cell["copy_share"] else "-"
    sizes = [f"{cell[size]:,}" for size in ("n_fft", "n_segments", "batch", "k")]
    return [*sizes, f"{best[own] / 1e6:.3f}" if best[own] else "-", *ratios, share]


def main() -> int:
    """Measure, print the table, and write the file."""
    parser = options(__doc__, segments=2, budget=5.0)
    for name in ("n-fft", "batch", "k"):
        parser.add_argument(f"--{name}", type=int, nargs="+")
    parser.add_argument("--contender", nargs="+", choices=[*CONTENDERS, COPY], default=[*CONTENDERS, COPY])
    given = parser.parse_args()
    skipped = {name: CONTENDERS[name].unavailable() for name in given.contender if name != COPY}
    skipped = {name: reason for name, reason in skipped.items() if reason}
    names = [name for name in given.contender if name not in skipped]
    if not names:
        parser.error(f"none can run here: {skipped}")
    check(names)
    cells, interrupted = [], False
    own = names[0]
    headings = ["n_fft", "segments", "batch", "k", f"{own}, ms"]
    headings += [f"/ {name}" for name in names if name not in (own, COPY)]
    print(table([*headings, f"share of {COPY}"], []))
    try:
        for n_fft, k, batch in itertools.product(given.n_fft or N_FFTS, given.k or KS, given.batch or BATCHES):
            if given.batch or batch * n_fft <= MAX_SAMPLES:
                sizes = {"n_fft": n_fft, "n_segments": given.segments, "batch": batch, "k": k}
                cells.append(of_workload(sizes, names, given.budget))
                print(table([], [row_of(cells[-1], own)]).splitlines()[-1], flush=True)
    except KeyboardInterrupt:
        interrupted = True
    means = mean_ratios(cells)
    print("geometric means of the ratios:", {own: {p: round(r, 3) for p, r in by.items()} for own, by in means.items()})
    said = [f"{name}: {r['note']}" for cell in cells for name, r in cell["results"].items() if "note" in r]
    print(*said, *(f"skipped {name}: {reason}" for name, reason in skipped.items()), sep="\n")
    versions = {name: CONTENDERS[name].version() for name in names if name != COPY}
    content = {"versions": versions, "skipped": skipped, "interrupted": interrupted, "cells": cells}
    write(given.json, content | {"mean_ratios": means}, indent=None)
    return 130 if interrupted else bool(said)


if __name__ == "__main__":
    sys.exit(main())
