"""Compare whole tables with a copy of the same bytes, and gradients with values, interleaved in one process.

python -m benchmarks.evaluation [--rows 4000000] [--rounds 15] [--json FILE]

The copy is a jitted program that reads and writes as many arrays of the same types. A share is the copy's time over the
table's time. A ratio is the time of a loss with its gradient over the time of the loss. In chunks, the gradient is
`jax.lax.map` of the same loss over parts of the rows. Times are the smallest of all rounds.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

import rlxjax as rx
from benchmarks._common import options, visits, write

TEMPERATURE = {"temperature_ns": 1e5}
CHUNKS = 16


def columns_of(rows: int) -> dict[str, jax.Array]:
    """Return float32 columns of counts, sizes, targets of losses, and codes."""
    keys = iter(jax.random.split(jax.random.key(0), 16))

    def whole(low: int, high: int) -> jax.Array:
        return jax.random.randint(next(keys), (rows,), low, high, jnp.int32)

    counts = {"launches": 20, "syncs": 4, "host_bytes": 2**28, "traffic_bytes": 2**30}
    columns = {f"{side} {name}": whole(0, n).astype(jnp.float32) for side in "ab" for name, n in counts.items()}
    columns |= {"batch": (1 << whole(0, 15)).astype(jnp.float32), "n_fft": (1 << whole(6, 13)).astype(jnp.float32)}
    columns |= {"k": whole(1, 33).astype(jnp.float32), "fuses": whole(0, 2).astype(jnp.float32)}
    columns["score"] = 1e6 * jax.random.normal(next(keys), (rows,), jnp.float32)
    return columns | {"device": whole(0, len(rx.Device)), "target": whole(0, len(rx.FusionTarget))}


def profile_of(columns: Mapping[str, jax.Array], side: str) -> rx.GraphIoProfile:
    """Return the profile before ("a") or after ("b")."""
    return rx.GraphIoProfile(*(column for name, column in columns.items() if name.startswith(f"{side} ")))


def tables(columns: dict[str, jax.Array]) -> dict[str, tuple[Callable, tuple]]:
    """Return the evaluations by name, each with its arguments."""
    gate = rx.io_fusion_gate_for_target("cuda")
    before, after = profile_of(columns, "a"), profile_of(columns, "b")
    sizes = tuple(columns[name] for name in ("batch", "n_fft", "k"))

    def of_benefit(benefit):
        table = gate.evaluate(benefit, **TEMPERATURE)
        return table.score_ns, table.should_fuse, table.fuse_probability

    def of_runs(*workload):
        return rx.welch.evaluate_welch_peaks(*workload[:-3] or ("cuda",), *workload[-3:], **TEMPERATURE)

    return {
        "gate, from profiles": (lambda *pair: gate.evaluate(*pair, **TEMPERATURE), (before, after)),
        "gate, from benefits": (of_benefit, (rx.fusion_benefit(before, after),)),
        "welch peaks, one device": (of_runs, sizes),
        "welch peaks, mixed devices": (of_runs, (columns["device"], *sizes)),
    }


def losses(columns: dict[str, jax.Array]) -> dict[str, tuple[Callable, tuple]]:
    """Return losses by name, each with its coefficients and its rows."""
    as_floats = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf, columns["k"].dtype), tree)  # noqa: E731
    gate, row = as_floats(rx.io_fusion_gate_for_target("cuda")), as_floats(rx.backend_coefficients("cuda"))
    set_ = as_floats(rx.welch.coefficient_set("arch"))
    profile = profile_of(columns, "a")
    benefit = rx.fusion_benefit(profile, profile_of(columns, "b"))
    sizes = tuple(columns[name] for name in ("batch", "n_fft", "k"))

    def square(gate, benefit, score_ns):
        return jnp.mean(jnp.square(gate.score_ns(benefit) - score_ns))

    def cross_entropy(gate, benefit, fuses):
        log_odds = gate.fuse_log_odds(benefit, **TEMPERATURE)
        return jnp.mean(jax.nn.softplus(log_odds) - fuses * log_odds)

    def io_costs(row, profile):
        return jnp.mean(jnp.log(rx.io_cost_ns(profile, row)))

    def two_costs(set_, device, *sizes):
        costs = rx.estimate_welch_peaks_costs(device, *sizes, coefficients=set_)
        return jnp.mean(jnp.log(costs.fast_ns)) + jnp.mean(jnp.log(jnp.minimum(costs.rlx_ns, 1e30)))

    return {
        "square of score_ns": (square, (gate, benefit, columns["score"])),
        "cross entropy of fuse_log_odds": (cross_entropy, (gate, benefit, columns["fuses"])),
        "logarithm of io_cost_ns": (io_costs, (row, profile)),
        "logarithm of two strategy costs": (lambda s, *w: two_costs(s, "cuda", *w), (set_, *sizes)),
        "the same, mixed devices": (two_costs, (set_, columns["device"], *sizes)),
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

    def copy(*arguments):
        arrays = jax.tree.leaves(arguments)
        shares = [arrays[i :: len(outputs)] or (arrays[i % len(arrays)],) for i in range(len(outputs))]
        sums = [1.0 + sum(array.astype(float) for array in share) for share in shares]
        return [(s > 0 if o.dtype == bool else s.astype(o.dtype)) for s, o in zip(sums, outputs, strict=True)]

    return jax.jit(copy)


def least_ms(runs: dict[str, Callable], arguments: tuple, rounds: int) -> dict[str, float]:
    """Return the smallest time of each run in ms; every round has all runs in a new random order."""
    times = visits({name: functools.partial(run, *arguments) for name, run in runs.items()}, rounds)
    return {name: round(own.min() / 1e6, 2) for name, own in times.items()}


def measured(kind: str, name: str, ms: dict[str, float], base: str) -> dict:
    """Print and return the times of one table or loss, and the ratios to the base."""
    others = [key for key in ms if key != base]
    quotients = {key: ms[base] / ms[key] if kind == "table" else ms[key] / ms[base] for key in others}
    cells = [f"{key} {ms[key]} ms, {quotients[key]:.2f}" for key in others]
    print(f"| {name} | {base} {ms[base]} ms | {' | '.join(cells)} |", flush=True)
    return {kind: name, "ms": ms, "quotients": {k: round(q, 2) for k, q in quotients.items()}}


def measure(rows: int, rounds: int) -> list[dict]:
    """Return shares of a copy's bandwidth, and ratios of gradients."""
    columns, figures = columns_of(rows), []
    for name, (table, inputs) in tables(columns).items():
        compiled = jax.jit(table)
        copy = copy_of(jax.tree.leaves(inputs), jax.tree.leaves(compiled(*inputs)))
        ms = least_ms({"copy": copy, "compiled": compiled}, inputs, rounds)
        figures.append(measured("table", name, ms, "copy"))
    for name, (loss, arguments) in losses(columns).items():
        runs = {"value": jax.jit(loss), "gradient": jax.jit(jax.value_and_grad(loss))}
        ms = least_ms(runs | {"in chunks": in_chunks(loss)}, arguments, rounds)
        figures.append(measured("loss", name, ms, "value"))
    return figures


def main() -> None:
    """Measure and print the tables."""
    given = options(__doc__, rows=4_000_000, rounds=15).parse_args()
    write(given.json, {"figures": measure(given.rows, given.rounds)})


if __name__ == "__main__":
    main()
