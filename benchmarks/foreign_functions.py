"""Measure which functions of other authors the rules of `rlxjax.profile_function` cover, without running them.

    python -m benchmarks.foreign_functions [--which functions] [--json FILE]

`pip install '.[foreign]'` installs the libraries. The exit status is 1 if rules do not cover a function.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import jax

import rlxjax as rx
from benchmarks._common import options, table, write
from benchmarks.foreign_table import TABLES, Foreign

#: The bounds: the least covered shares of equations and bytes, and the largest error of peak bytes.
LEAST_EQUATIONS, LEAST_BYTES, PEAK_ERROR = 0.99, 0.999, 0.10
#: The written figures of a profile.
COUNTS = ("flops", "transcendentals", "integer_ops", "fused_traffic_bytes", "peak_bytes")


def row_of(foreign: Foreign) -> dict[str, Any]:
    """Profile and compile one function; compiled peak bytes are temporaries + arguments + results - aliased."""
    fn, values = foreign.call()
    args = jax.eval_shape(lambda *args: args, *values)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        profile = rx.profile_function(fn, *args, trip_counts=foreign.trip_counts)
        compiled = jax.jit(fn).lower(*args).compile()
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis() or {}
    temp, argument, output, alias = (
        getattr(memory, f"{kind}_size_in_bytes") for kind in ("temp", "argument", "output", "alias")
    )
    peak_bytes = temp + argument + output - alias
    return {
        "name": foreign.name,
        "library": foreign.library,
        "equations": profile.coverage_equations,
        "bytes": profile.coverage_bytes,
        "covered": profile.coverage_equations >= LEAST_EQUATIONS and profile.coverage_bytes >= LEAST_BYTES,
        "uncosted": dict(profile.uncosted),
        "unknown_loops": [loop.line for loop in profile.unknown_loops],
        **{name: getattr(profile, name) for name in COUNTS},
        "compiled_peak_bytes": peak_bytes,
        "peak_ratio": profile.peak_bytes / peak_bytes,
        "xla_operations": costs.get("flops", 0.0) + costs.get("transcendentals", 0.0),
        "xla_bytes": costs.get("bytes accessed"),
    }


def cells_of(row: dict[str, Any]) -> list[str]:
    """Return a row of the table; operations and bytes in millions."""
    operations = row["flops"] + row["transcendentals"]
    millions = (operations, row["xla_operations"], row["fused_traffic_bytes"], row["xla_bytes"] or 0, row["peak_bytes"])
    shares = (f"{100 * row[name]:.4g}" for name in ("equations", "bytes"))
    return [row["name"], row["library"], *shares, *(f"{n / 1e6:.3g}" for n in millions), f"{row['peak_ratio']:.2f}"]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of rows within the bounds, and the other rows."""
    far = {row["name"]: round(row["peak_ratio"], 2) for row in rows if abs(row["peak_ratio"] - 1) > PEAK_ERROR}
    return {
        "functions": len(rows),
        "covered": sum(row["covered"] for row in rows),
        "not covered": {row["name"]: row["uncosted"] for row in rows if not row["covered"]},
        "loops of unknown length": [row["name"] for row in rows if row["unknown_loops"]],
        "peak bytes within 10 %": len(rows) - len(far),
        "peak bytes further off": far,
    }


def main() -> int:
    """Print the table and its summary."""
    parser = options(__doc__)
    parser.add_argument("--which", choices=TABLES, default="functions")
    given = parser.parse_args()
    rows = [row_of(foreign) for foreign in TABLES[given.which]]
    found = summary(rows)
    headings = ["function", "of", "equations, %", "bytes, %", "operations", "XLA's", "fused bytes", "XLA's"]
    print(table([*headings, "peak bytes", "/ compiled"], map(cells_of, rows)), json.dumps(found, indent=1), sep="\n\n")
    write(given.json, {"summary": found, "functions": rows})
    return found["covered"] < len(rows)


if __name__ == "__main__":
    sys.exit(main())
