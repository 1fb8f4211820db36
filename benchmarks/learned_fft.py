"""Train learned FFTs and compare them with the exact path: recall of unseen peaks, and time of a call.

    python -m benchmarks.learned_fft [--quick] [--n-fft 256 1024] [--out FOLDER]

The benchmark writes `learned-fft.json` and one file per model. Times are ratios to the exact fused path within one run.
Every round runs all programs of one n_fft in random order, and the minimum over the rounds counts. The exit status is 1
if a model with a quarter of the gates, for 256 samples or more, has less than twice the recall of gates by magnitude.
"""

import argparse
import dataclasses
import functools
import sys
from pathlib import Path

import jax
import numpy as np

from benchmarks._common import options, table, visits, write
from rlxjax import WelchPeakParams
from rlxjax.learned import (
    LearnedFft,
    ToneSignals,
    learned_peaks,
    learned_program,
    peak_recall,
    save_learned_fft,
    train_learned_fft,
)
from rlxjax.learned._model import bit_reversal
from rlxjax.welch import fused_peaks, hann_window

BANDS = {"full": ToneSignals(), "low": ToneSignals(high=0.125)}
SHARES = (0.5, 0.25, 0.15)
BATCH = {256: 2048, 1024: 512}
K, TEST_ROWS, MAGNITUDE_ROWS = 16, 2048, 512
TEST_SEED, MAGNITUDE_SEED = 10_001, 10_002


def magnitude_gates(n_fft: int, active: int, segments: np.ndarray | jax.Array) -> LearnedFft:
    """Return the exact twiddles and mask with the gates of the largest flow, without training.

    The flow through a butterfly is the root mean square of its two inputs on windowed segments. (For its
    outputs, the flow is the same times the square root of 2.)

    Args:
        n_fft: samples of a segment.
        active: gates to keep; among equals, the earlier stage and butterfly.
        segments: samples, `[rows, n_fft]`, without a window.
    """
    exact = LearnedFft.exact(n_fft)
    places = (np.asarray(segments) * hann_window(n_fft)[None]).T[bit_reversal(n_fft)].astype(complex)
    twiddles = exact.twiddles @ np.array([1.0, 1.0j])
    flow = []
    for stage in range(exact.stages):
        pairs = places.reshape(-1, 2, 2**stage, len(segments))
        flow.append(np.mean(np.abs(pairs) ** 2, axis=(1, 3)).reshape(-1))
        turned = twiddles[stage].reshape(-1, 2**stage, 1) * pairs[:, 1]
        places = np.stack([pairs[:, 0] + turned, pairs[:, 0] - turned], axis=1).reshape(n_fft, -1)
    gates = np.zeros(exact.total_gates)
    gates[np.argsort(-np.concatenate(flow), kind="stable")[:active]] = 1.0
    model = dataclasses.replace(exact, gates=gates.reshape(exact.gates.shape))
    return jax.tree.map(lambda leaf: leaf.astype(np.float32), model)


def recalls(model: LearnedFft, signals: ToneSignals) -> dict[str, float]:
    """Return the recall of a model and of as many gates by magnitude, on held-out tones."""
    test = signals.sample(jax.random.key(TEST_SEED), TEST_ROWS, model.n_fft)
    seen = signals.sample(jax.random.key(MAGNITUDE_SEED), MAGNITUDE_ROWS, model.n_fft)
    by_magnitude = magnitude_gates(model.n_fft, model.active_gates, seen)
    return {name: float(peak_recall(one, test, k=K)) for name, one in (("trained", model), ("magnitude", by_magnitude))}


def over_exact(n_fft: int, models: dict[str, LearnedFft], rounds: int) -> dict[str, float]:
    """Return the time of each model's program over the exact program's time."""
    params, batch = WelchPeakParams.fast(n_fft, K), BATCH.get(n_fft, 2**19 // n_fft)
    rows = np.random.default_rng(0).standard_normal((batch, params.frame_len))
    signal = jax.device_put(rows.astype(np.float32))
    pruned, exact = (jax.jit(peaks, static_argnames="params") for peaks in (learned_peaks, fused_peaks))
    runs = {"exact": functools.partial(exact.lower(signal, params).compile(), signal)}
    for name, model in models.items():
        program = jax.device_put(learned_program(model, params))
        runs[name] = functools.partial(pruned.lower(signal, program, params).compile(), signal, program)
    best = {name: times.min() for name, times in visits(runs, rounds).items()}
    return {name: float(best[name] / best["exact"]) for name in models}


def run(n_fft: int, args: argparse.Namespace) -> list[dict]:
    """Train, judge and time every model of one segment length; return its rows of the table."""
    rows, models = [], {}
    for band, signals in BANDS.items():
        for share in SHARES[1:2] if args.quick else SHARES:
            result = train_learned_fft(n_fft, signals=signals, active_share=share, k=K, seed=args.seed)
            model, name = result.model, f"{band}-{share}"
            models[name] = model
            note = f"{result.message} {signals}, active_share {share}, k {K}, seed {args.seed}"
            save_learned_fft(model, args.out / f"learned-fft-{n_fft}-{name}.json", note)
            gates = {"active_gates": model.active_gates, "total_gates": model.total_gates}
            rows.append({"name": name, "n_fft": n_fft, **gates, "recall_at_16": recalls(model, signals)})
    times = over_exact(n_fft, models, args.rounds)
    return [{**row, "time_over_exact": times[row["name"]]} for row in rows]


def shown(row: dict) -> list[str]:
    """Return a printed row of the table."""
    gates, recall = f"{row['active_gates']}/{row['total_gates']}", row["recall_at_16"].values()
    figures = (*(f"{one:.3f}" for one in recall), f"{row['time_over_exact']:.2f}")
    return [row["n_fft"], row["name"], gates, *figures]


def main() -> int:
    """Run the benchmark and write its results."""
    parser = options(__doc__, rounds=40, seed=0)
    parser.add_argument("--quick", action="store_true", help="one sparsity a band")
    parser.add_argument("--n-fft", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows = [row for n_fft in given.n_fft for row in run(n_fft, given)]
    print(table(["n_fft", "model", "gates", "trained", "magnitude", "time / exact"], map(shown, rows)))
    write(given.json or given.out / "learned-fft.json", {"k": K, "batch": BATCH, "seed": given.seed, "rows": rows})
    found = [row["recall_at_16"] for row in rows if row["name"].endswith("-0.25") and row["n_fft"] >= 256]
    return any(one["trained"] < 2 * one["magnitude"] for one in found)


if __name__ == "__main__":
    sys.exit(main())
