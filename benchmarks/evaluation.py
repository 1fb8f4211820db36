"""Batch evaluation against a copy of the same bytes, and gradients against values, interleaved.

python benchmarks/evaluation.py [--rows 4000000] [--rounds 15] [--keep-pages] [--json FILE]

The copy is a jitted program that reads as many arrays and writes as many of the same types, each output
from its share of the inputs by an addition. Both allocate their outputs. The bytes are those of the
arrays, so the share of the copy's bandwidth is the copy's time over the evaluation's.

Whether an allocation is of pages that the process has, or of new ones that the system clears, is a matter
of what was allocated before. Pages asked for are counted beside each time; with `--keep-pages` glibc
returns none, so that after the first calls no program asks for any. Gradients are compiled a second time with
temporary arrays in blocks that glibc keeps anyway.
"""

import argparse
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rlxjax as rx

TEMPERATURE_NS = 1e5

#: glibc reads these when a process starts: one heap, which never shrinks, and nothing mapped beside it.
KEEPS_PAGES = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}

#: For a program on a CPU: temporary arrays in blocks of at most 32 MiB, what is larger glibc does not keep.
IN_BLOCKS = {"xla_multiheap_size_constraint_per_heap": 2**25}


class Call(NamedTuple):
    """The time of a call, and the pages that it asked the system for."""

    time_ns: int
    pages: int


def copy_like(inputs: list[jax.Array], outputs: list[jax.Array]) -> Callable:
    """Return a jitted program of trivial work with arrays of these types."""

    def copy(*arrays):
        shares = [arrays[i :: len(outputs)] or (arrays[i % len(arrays)],) for i in range(len(outputs))]
        sums = [jnp.asarray(1.0) + sum(array.astype(jnp.float32) for array in share) for share in shares]
        return [
            total > 0.0 if output.dtype == bool else total.astype(output.dtype)
            for total, output in zip(sums, outputs, strict=True)
        ]

    return jax.jit(copy)


def tables(rows: int) -> dict[str, jax.Array]:
    """Return float32 columns of profiles and workloads, on the device."""
    rng = np.random.default_rng(0)
    profile = {"launches": 20, "syncs": 4, "host_bytes": 2**28, "traffic_bytes": 2**30}
    columns = {
        f"{name} {side}": rng.integers(0, most, rows)
        for side in ("before", "after")
        for name, most in profile.items()
    }
    columns |= {"batch": 2.0 ** rng.integers(0, 15, rows), "n_fft": 2.0 ** rng.integers(6, 13, rows)}
    columns |= {"k": rng.integers(1, 33, rows), "fuses": rng.integers(0, 2, rows)}
    columns |= {"score": 1e6 * rng.standard_normal(rows)}
    arrays = {name: jax.device_put(np.asarray(column, np.float32)) for name, column in columns.items()}
    codes = rng.integers(0, len(rx.Device), rows).astype(np.int32)
    return {**arrays, "device": jax.device_put(codes)}


def evaluations(columns: dict[str, jax.Array]) -> dict[str, tuple[Callable, list[jax.Array]]]:
    """Return the evaluations by name, each with its input arrays."""
    gate = rx.io_fusion_gate_for_target("cuda")
    profiles = [column for name, column in columns.items() if name.endswith(("before", "after"))]
    benefit = jax.tree.leaves(
        rx.fusion_benefit(rx.GraphIoProfile(*profiles[:4]), rx.GraphIoProfile(*profiles[4:]))
    )
    workloads = [columns["batch"], columns["n_fft"], columns["k"]]

    def gate_of_profiles(*counts):
        before, after = rx.GraphIoProfile(*counts[:4]), rx.GraphIoProfile(*counts[4:])
        return gate.evaluate(before, after, temperature_ns=TEMPERATURE_NS)

    def gate_of_benefits(*counts):
        result = gate.evaluate(rx.FusionBenefit(*counts), temperature_ns=TEMPERATURE_NS)
        return result.score_ns, result.should_fuse, result.fuse_probability

    def welch_on_cuda(*sizes):
        return rx.evaluate_welch_peaks("cuda", *sizes, temperature_ns=TEMPERATURE_NS)

    def welch_on_all(device, *sizes):
        return rx.evaluate_welch_peaks(device, *sizes, temperature_ns=TEMPERATURE_NS)

    return {
        "gate, from profiles": (gate_of_profiles, profiles),
        "gate, from benefits": (gate_of_benefits, benefit),
        "welch peaks, one device": (welch_on_cuda, workloads),
        "welch peaks, mixed devices": (welch_on_all, [columns["device"], *workloads]),
    }


def losses(columns: dict[str, jax.Array]) -> dict[str, tuple[Callable, tuple]]:
    """Return losses by name, each with its arguments; the first holds the coefficients."""
    as_floats = lambda tree: jax.tree.map(jnp.float32, tree)  # noqa: E731
    gate = as_floats(rx.io_fusion_gate_for_target("cuda"))
    row = as_floats(rx.backend_coefficients("cuda"))
    set_ = as_floats(rx.coefficient_set("arch"))
    profiles = [column for name, column in columns.items() if name.endswith(("before", "after"))]
    before = rx.GraphIoProfile(*profiles[:4])
    benefit = rx.fusion_benefit(before, rx.GraphIoProfile(*profiles[4:]))
    workloads = columns["batch"], columns["n_fft"], columns["k"]

    def cross_entropy(gate, benefit, fuses):
        log_odds = gate.fuse_log_odds(benefit, temperature_ns=TEMPERATURE_NS)
        return jnp.mean(jax.nn.softplus(log_odds) - fuses * log_odds)

    def square_of_scores(gate, benefit, score):
        return jnp.mean(jnp.square(gate.score_ns(benefit) - score))

    def square_of_probabilities(gate, benefit, fuses):
        probability = gate.fuse_probability(benefit, temperature_ns=TEMPERATURE_NS)
        return jnp.mean(jnp.square(probability - fuses))

    def log_probability(gate, benefit):
        return -jnp.mean(gate.fuse_log_probability(benefit, temperature_ns=TEMPERATURE_NS))

    def squares_of_table(gate, benefit, fuses):
        table = gate.evaluate(benefit, temperature_ns=TEMPERATURE_NS)
        return jnp.mean(jnp.square(table.fuse_probability - fuses))

    def squares_of_runs(set_, *sizes_and_fuses):
        *sizes, fuses = sizes_and_fuses
        table = rx.evaluate_welch_peaks("cuda", *sizes, coefficients=set_, temperature_ns=TEMPERATURE_NS)
        return jnp.mean(jnp.square(table.fuse_probability - fuses))

    def io_cost(row, profile):
        return jnp.mean(jnp.log(rx.io_cost_ns(profile, row)))

    def strategy_costs(set_, *sizes):
        costs = rx.estimate_welch_peaks_costs("cuda", *sizes, coefficients=set_)
        return jnp.mean(jnp.log(costs.fast_ns)) + jnp.mean(jnp.log(jnp.minimum(costs.rlx_ns, 1e30)))

    return {
        "cross entropy of fuse_log_odds": (cross_entropy, (gate, benefit, columns["fuses"])),
        "square of score_ns": (square_of_scores, (gate, benefit, columns["score"])),
        "square of fuse_probability": (square_of_probabilities, (gate, benefit, columns["fuses"])),
        "square of evaluate's probability": (squares_of_table, (gate, benefit, columns["fuses"])),
        "square of evaluate_welch_peaks's": (squares_of_runs, (set_, *workloads, columns["fuses"])),
        "fuse_log_probability": (log_probability, (gate, benefit)),
        "logarithm of io_cost_ns": (io_cost, (row, before)),
        "logarithm of two strategy costs": (strategy_costs, (set_, *workloads)),
    }


def interleaved(runs: dict, rounds: int) -> dict[str, list[Call]]:
    """Return the calls of each run, all runs in every round, in an order drawn anew."""
    rng = np.random.default_rng(1)
    calls: dict[str, list[Call]] = {key: [] for key in runs}
    keys = list(runs)
    for f, arguments in runs.values():
        for _ in range(2):
            jax.block_until_ready(f(*arguments))
    for _ in range(rounds):
        for index in rng.permutation(len(keys)):
            f, arguments = runs[keys[index]]
            pages = _pages()
            start = time.perf_counter_ns()
            result = jax.block_until_ready(f(*arguments))
            calls[keys[index]].append(Call(time.perf_counter_ns() - start, _pages() - pages))
            del result
    return calls


def _pages() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def summary(calls: dict[str, list[Call]]) -> dict[str, float]:
    """Return the smallest and the median time of each run, and the median of the pages asked for."""
    row = {}
    for key, of_run in calls.items():
        times_ns, pages = zip(*of_run, strict=True)
        row |= {f"{key}_min_ns": min(times_ns), f"{key}_median_ns": float(np.median(times_ns))}
        row[f"{key}_median_pages"] = float(np.median(pages))
    return row


def measure_evaluations(columns: dict[str, jax.Array], rounds: int) -> list[dict]:
    """Return a row per evaluation: the shares of the copy's bandwidth, compiled and called eagerly."""
    rows = []
    for name, (evaluate, inputs) in evaluations(columns).items():
        compiled = jax.jit(evaluate)
        outputs = jax.tree.leaves(compiled(*inputs))
        copy = copy_like(inputs, outputs)
        byte_count = sum(array.nbytes for array in (*inputs, *outputs))
        runs = {"compiled": compiled, "eager": evaluate, "copy": copy}
        calls = interleaved({key: (f, inputs) for key, f in runs.items()}, rounds)
        row: dict = {"evaluation": name, "inputs": len(inputs), "outputs": len(outputs), "bytes": byte_count}
        row |= summary(calls)
        for key in ("compiled", "eager"):
            for which in ("min", "median"):
                row[f"{key}_share_{which}"] = row[f"copy_{which}_ns"] / row[f"{key}_{which}_ns"]
        rows.append(row)
    return rows


def measure_gradients(columns: dict[str, jax.Array], rounds: int) -> list[dict]:
    """Return a row per loss: the time of value and gradient over that of the value, plain and in blocks."""
    rows = []
    for name, (loss, arguments) in losses(columns).items():
        runs = {"value": jax.jit(loss), "gradient": jax.jit(jax.value_and_grad(loss))}
        runs["in_blocks"] = jax.jit(jax.value_and_grad(loss), compiler_options=IN_BLOCKS)
        row = {"loss": name, **summary(interleaved({k: (f, arguments) for k, f in runs.items()}, rounds))}
        for which in ("min", "median"):
            row[f"ratio_{which}"] = row[f"gradient_{which}_ns"] / row[f"value_{which}_ns"]
            row[f"in_blocks_ratio_{which}"] = row[f"in_blocks_{which}_ns"] / row[f"value_{which}_ns"]
        rows.append(row)
    return rows


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--keep-pages", action="store_true", help="start anew with a heap that never shrinks")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.keep_pages and not os.environ.items() >= KEEPS_PAGES.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEPS_PAGES})
    columns = tables(arguments.rows)
    evaluated = measure_evaluations(columns, arguments.rounds)
    print(
        "| evaluation | arrays | copy, ms | compiled, ms | share, min (median) | eager, ms | its share "
        "| pages asked for: copy, compiled, eager |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in evaluated:
        keys = ("copy", "compiled", "eager")
        copy, compiled, eager = (row[f"{key}_min_ns"] / 1e6 for key in keys)
        pages = ", ".join(f"{row[f'{key}_median_pages']:.0f}" for key in keys)
        print(
            f"| {row['evaluation']} | {row['inputs']} → {row['outputs']} | {copy:.2f} | {compiled:.2f} "
            f"| {row['compiled_share_min']:.2f} ({row['compiled_share_median']:.2f}) "
            f"| {eager:.2f} | {row['eager_share_min']:.2f} ({row['eager_share_median']:.2f}) | {pages} |"
        )
    differentiated = measure_gradients(columns, arguments.rounds)
    print(
        "\n| loss | value, ms | value and gradient, ms | ratio, min (median) | in blocks, ms | its ratio "
        "| pages asked for: each |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in differentiated:
        keys = ("value", "gradient", "in_blocks")
        value, gradient, in_blocks = (row[f"{key}_min_ns"] / 1e6 for key in keys)
        pages = ", ".join(f"{row[f'{key}_median_pages']:.0f}" for key in keys)
        print(
            f"| {row['loss']} | {value:.2f} | {gradient:.2f} "
            f"| {row['ratio_min']:.2f} ({row['ratio_median']:.2f}) | {in_blocks:.2f} "
            f"| {row['in_blocks_ratio_min']:.2f} ({row['in_blocks_ratio_median']:.2f}) | {pages} |"
        )
    if arguments.json:
        device = jax.devices()[0]
        content = {
            "command": f"python benchmarks/evaluation.py --rows {arguments.rows} --rounds {arguments.rounds}"
            + " --keep-pages" * arguments.keep_pages,
            "device": f"{device.platform} {device.device_kind}",
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "jax": jax.__version__,
            "rows": arguments.rows,
            "rounds": arguments.rounds,
            "evaluations": evaluated,
            "gradients": differentiated,
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
