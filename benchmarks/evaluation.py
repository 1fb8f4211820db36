"""Whole tables against a copy of the same bytes, and gradients against values, interleaved in one process.

python benchmarks/evaluation.py [--rows 4000000] [--rounds 15] [--dtypes float32 float64] [--json FILE]

The copy is a jitted program that reads as many arrays and writes as many of the same types. The share is the
copy's time over the table's, the ratio the time of a loss with its gradient over that of the loss. In chunks, the
gradient is `jax.lax.map` of the same loss over parts of the rows. All times are the smallest of the rounds.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import rlxjax as rx

TEMPERATURE = {"temperature_ns": 1e5}
CHUNKS = 16


def columns_of(rows: int, dtype: str) -> dict[str, jax.Array]:
    """Return columns of counts, sizes, targets of losses, and codes."""
    rng = np.random.default_rng(0)
    columns = {
        name: rng.integers(0, most, rows)
        for side in ("before", "after")
        for name, most in {f"{side} {i}": m for i, m in enumerate((20, 4, 2**28, 2**30))}.items()
    }
    columns |= {"batch": 2.0 ** rng.integers(0, 15, rows), "n_fft": 2.0 ** rng.integers(6, 13, rows)}
    columns |= {"k": rng.integers(1, 33, rows), "fuses": rng.integers(0, 2, rows)}
    columns |= {"score": 1e6 * rng.standard_normal(rows)}
    arrays = {name: jnp.asarray(column, dtype) for name, column in columns.items()}
    codes = {"device": len(rx.Device), "target": len(rx.Target)}
    return arrays | {name: jnp.asarray(rng.integers(0, n, rows), jnp.int32) for name, n in codes.items()}


def tables(columns: dict[str, jax.Array], benefit: rx.FusionBenefit) -> dict[str, tuple[Callable, list]]:
    """Return the evaluations by name, each with the arrays that it takes."""
    gate = rx.io_fusion_gate_for_target("cuda")
    counts = [column for name, column in columns.items() if name.startswith(("before", "after"))]
    sizes = [columns[name] for name in ("batch", "n_fft", "k")]

    def of_profiles(*counts):
        profiles = rx.GraphIoProfile(*counts[:4]), rx.GraphIoProfile(*counts[4:])
        return gate.evaluate(*profiles, **TEMPERATURE)

    def of_benefit(*counts):
        table = gate.evaluate(rx.FusionBenefit(*counts), **TEMPERATURE)
        return table.score_ns, table.should_fuse, table.fuse_probability

    def of_runs(*workload):
        device = workload[:-3] or ("cuda",)
        return rx.evaluate_welch_peaks(*device, *workload[-3:], **TEMPERATURE)

    return {
        "gate, from profiles": (of_profiles, counts),
        "gate, from benefits": (of_benefit, jax.tree.leaves(benefit)),
        "welch peaks, one device": (of_runs, sizes),
        "welch peaks, mixed devices": (of_runs, [columns["device"], *sizes]),
    }


def losses(columns: dict[str, jax.Array], benefit: rx.FusionBenefit) -> dict[str, tuple[Callable, tuple]]:
    """Return losses by name, each with its coefficients and its rows."""
    dtype = columns["k"].dtype
    as_floats = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)  # noqa: E731
    gate = as_floats(rx.io_fusion_gate_for_target("cuda"))
    gates = as_floats(rx.io_fusion_gate_for_target(np.arange(len(rx.Target))))
    row, set_ = as_floats(rx.backend_coefficients("cuda")), as_floats(rx.coefficient_set("arch"))
    profile = rx.GraphIoProfile(*(columns[f"before {i}"] for i in range(4)))
    fuses, score, codes = columns["fuses"], columns["score"], columns["target"]
    sizes = tuple(columns[name] for name in ("batch", "n_fft", "k"))
    mean_square = lambda error: jnp.mean(jnp.square(error))  # noqa: E731
    log_size = lambda score_ns: jnp.mean(jnp.log(1.0 + jnp.abs(score_ns)))  # noqa: E731

    def cross_entropy(gate, benefit, fuses):
        log_odds = gate.fuse_log_odds(benefit, **TEMPERATURE)
        return jnp.mean(jax.nn.softplus(log_odds) - fuses * log_odds)

    def two_costs(set_, device, *sizes):
        costs = rx.estimate_welch_peaks_costs(device, *sizes, coefficients=set_)
        return jnp.mean(jnp.log(costs.fast_ns)) + jnp.mean(jnp.log(jnp.minimum(costs.rlx_ns, 1e30)))

    def of_runs(set_, *sizes_and_fuses):
        *sizes, fuses = sizes_and_fuses
        table = rx.evaluate_welch_peaks("cuda", *sizes, coefficients=set_, **TEMPERATURE)
        return mean_square(table.fuse_probability - fuses)

    def by_code(gates, benefit, codes):
        return log_size(jax.tree.map(lambda leaf: leaf[codes], gates).score_ns(benefit))

    return {
        "mean of score_ns": (lambda g, b: jnp.mean(g.score_ns(b)), (gate, benefit)),
        "square of score_ns": (lambda g, b, s: mean_square(g.score_ns(b) - s), (gate, benefit, score)),
        "logarithm of score_ns": (lambda g, b: log_size(g.score_ns(b)), (gate, benefit)),
        "cross entropy of fuse_log_odds": (cross_entropy, (gate, benefit, fuses)),
        "square of fuse_probability": (
            lambda g, b, f: mean_square(g.fuse_probability(b, **TEMPERATURE) - f),
            (gate, benefit, fuses),
        ),
        "fuse_log_probability": (
            lambda g, b: -jnp.mean(g.fuse_log_probability(b, **TEMPERATURE)),
            (gate, benefit),
        ),
        "square of evaluate's probability": (
            lambda g, b, f: mean_square(g.evaluate(b, **TEMPERATURE).fuse_probability - f),
            (gate, benefit, fuses),
        ),
        "logarithm of score_ns, gates by code": (by_code, (gates, benefit, codes)),
        "logarithm of io_cost_ns": (lambda r, p: jnp.mean(jnp.log(rx.io_cost_ns(p, r))), (row, profile)),
        "relative square of io_cost_ns": (lambda r, p: mean_square(rx.io_cost_ns(p, r) / 1e7 - 1.0), (row, profile)),
        "logarithm of two strategy costs": (lambda s, *w: two_costs(s, "cuda", *w), (set_, *sizes)),
        "the same, mixed devices": (two_costs, (set_, columns["device"], *sizes)),
        "square of evaluate_welch_peaks's": (of_runs, (set_, *sizes, fuses)),
    }


def in_chunks(loss: Callable) -> Callable:
    """Return the mean of value and gradient of a loss over chunks of rows."""

    def value_and_gradient(coefficients, *rows):
        chunks = jax.tree.map(lambda column: column.reshape(CHUNKS, -1), rows)
        parts = jax.lax.map(lambda rows: jax.value_and_grad(loss)(coefficients, *rows), chunks)
        return jax.tree.map(lambda part: jnp.mean(part, 0), parts)

    return jax.jit(value_and_gradient)


def copy_of(inputs: list[jax.Array], outputs: list[jax.Array]) -> Callable:
    """Return a jitted program of trivial work that reads and writes arrays of these types."""

    def copy(*arrays):
        shares = [arrays[i :: len(outputs)] or (arrays[i % len(arrays)],) for i in range(len(outputs))]
        sums = [1.0 + sum(array.astype(float) for array in share) for share in shares]
        return [(s > 0 if o.dtype == bool else s.astype(o.dtype)) for s, o in zip(sums, outputs, strict=True)]

    return jax.jit(copy)


def least_ms(runs: dict[str, Callable], arguments: tuple | list, rounds: int) -> dict[str, float]:
    """Return the smallest time of each run in ms, all runs in every round, in an order drawn anew."""
    rng, times = np.random.default_rng(1), {name: [] for name in runs}
    for turn in range(-2, rounds):
        for name in rng.permutation(list(runs)):
            start = time.perf_counter()
            result = jax.block_until_ready(runs[name](*arguments))
            times[name] += [time.perf_counter() - start] * (turn >= 0)
            del result
    return {name: round(1e3 * min(seconds), 3) for name, seconds in times.items()}


def measure(rows: int, rounds: int, dtype: str) -> list[dict]:
    """Print and return the figures of one precision."""
    columns, figures = columns_of(rows, dtype), []
    sides = [rx.GraphIoProfile(*(columns[f"{side} {i}"] for i in range(4))) for side in ("before", "after")]
    benefit = rx.fusion_benefit(*sides)
    print(f"\n| {dtype} | copy, ms | compiled, ms | share | eager, ms | share |\n|---|---|---|---|---|---|")
    for name, (table, inputs) in tables(columns, benefit).items():
        compiled = jax.jit(table)
        copy = copy_of(inputs, jax.tree.leaves(compiled(*inputs)))
        ms = least_ms({"copy": copy, "compiled": compiled, "eager": table}, inputs, rounds)
        shares = {f"{key}_share": round(ms["copy"] / ms[key], 2) for key in ("compiled", "eager")}
        figures.append({"dtype": dtype, "table": name, **ms, **shares})
        print(f"| {name} | {ms['copy']} | {ms['compiled']} | {shares['compiled_share']} | {ms['eager']} | {shares['eager_share']} |")
    print(f"\n| {dtype} | value, ms | gradient, ms | ratio | in {CHUNKS} chunks, ms | ratio |\n|---|---|---|---|---|---|")
    for name, (loss, arguments) in losses(columns, benefit).items():
        runs = {"value": jax.jit(loss), "gradient": jax.jit(jax.value_and_grad(loss)), "chunks": in_chunks(loss)}
        ms = least_ms(runs, arguments, rounds)
        ratios = {f"{key}_ratio": round(ms[key] / ms["value"], 2) for key in ("gradient", "chunks")}
        figures.append({"dtype": dtype, "loss": name, **ms, **ratios})
        print(f"| {name} | {ms['value']} | {ms['gradient']} | {ratios['gradient_ratio']} | {ms['chunks']} | {ratios['chunks_ratio']} |")
    return figures


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float64"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = []
    for dtype in options.dtypes:
        with jax.enable_x64(dtype == "float64"):
            figures += measure(options.rows, options.rounds, dtype)
    if options.json:
        machine = {"device": jax.devices()[0].device_kind, "cores": os.cpu_count(), "jax": jax.__version__}
        sizes = {"rows": options.rows, "rounds": options.rounds}
        options.json.write_text(json.dumps({**machine, **sizes, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
