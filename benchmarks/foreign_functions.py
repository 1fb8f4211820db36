"""What `rlxjax`, JAX's roofline and XLA say of functions that nobody here wrote; nothing is run or timed.

    python -m benchmarks.foreign_functions [--which functions] [--json FILE]

`pip install 'rlxjax[foreign]'` installs the libraries. The exit status is 1 if rules do not cover a function.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from absl import logging
from jax.experimental import roofline

import rlxjax as rx
from benchmarks._common import options, table, write
from benchmarks.foreign_table import TABLES, Foreign

HEADINGS = ["function", "of", "covered, %", "op.", "roofline", "XLA", "fused bytes", "roofline", "XLA"]
HEADINGS += ["peak bytes", "/ compiled", "holds"]
#: The bounds of a table: shares of equations and bytes covered, and by how much peak bytes may be off.
LEAST_EQUATIONS, LEAST_BYTES, PEAK_ERROR = 0.99, 0.999, 0.10
#: What a compiled program holds of which XLA's own figures need a second look.
HOLDS = {
    "loop": r" while\(",
    "LAPACK": r'custom_call_target="lapack',
    "fft": r" fft\(",
    "library fusion": r" fusion\(.*kind=kCustom",
}


class Others(NamedTuple):
    """What another source says; None where it says nothing.

    Attributes:
        operations: floating-point operations and transcendentals.
        n_bytes: bytes moved.
        error: why it raised, empty if it did not.
    """

    operations: float | None
    n_bytes: float | None
    error: str = ""


class Row(NamedTuple):
    """What is said of one function.

    Attributes:
        name: of the function.
        library: it comes from.
        profile: what `rlxjax.profile_function` says.
        compiled_peak_bytes: temporaries + arguments + results - aliased of the compiled program.
        roofline: `unfused_flops`, with transcendentals in them, and `hbm_bytes`.
        xla: `flops` + `transcendentals` and `bytes accessed` of `cost_analysis()`.
        holds: which of `HOLDS` the compiled program holds.
        turns_given: how often its loops turn was given.
    """

    name: str
    library: str
    profile: rx.FunctionProfile
    compiled_peak_bytes: int
    roofline: Others
    xla: Others
    holds: tuple[str, ...]
    turns_given: bool

    @property
    def operations(self) -> int:
        """FLOP and transcendentals, as others count them together."""
        return self.profile.flops + self.profile.transcendentals

    @property
    def is_covered(self) -> bool:
        profile = self.profile
        return profile.coverage_equations >= LEAST_EQUATIONS and profile.coverage_bytes >= LEAST_BYTES

    @property
    def peak_ratio(self) -> float:
        return self.profile.peak_bytes / self.compiled_peak_bytes


def row_of(foreign: Foreign) -> Row:
    """Profile, trace and compile one function."""
    fn, values = foreign.call()
    args = jax.eval_shape(lambda *args: args, *values)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        profile = rx.profile_function(fn, *args, trip_counts=foreign.trip_counts)
        compiled = jax.jit(fn).lower(*args).compile()
        said = _roofline(fn, args)
    memory, costs, text = compiled.memory_analysis(), compiled.cost_analysis() or {}, compiled.as_text()
    kinds = ("temp", "argument", "output", "alias")
    temp, argument, output, alias = (getattr(memory, f"{kind}_size_in_bytes") for kind in kinds)
    operations = costs.get("flops", 0.0) + costs.get("transcendentals", 0.0)
    return Row(
        foreign.name,
        foreign.library,
        profile,
        temp + argument + output - alias,
        said,
        Others(operations, costs.get("bytes accessed")),
        tuple(name for name, pattern in HOLDS.items() if re.search(pattern, text)),
        foreign.trip_counts is not None,
    )


def _roofline(fn: Callable[..., Any], args: Sequence[Any]) -> Others:
    try:
        _, result = roofline.roofline(fn)(*args)
    except Exception as error:  # noqa: BLE001  (whatever it raises is what it says)
        return Others(None, None, type(error).__name__)
    return Others(result.unfused_flops, result.hbm_bytes)


def cells_of(row: Row) -> list[str]:
    """Return a row of the table; operations and bytes in millions."""
    profile, said, xla = row.profile, row.roofline, row.xla
    return [
        row.name + ("\\*" if row.turns_given else ""),
        row.library,
        _covered(profile),
        _million(row.operations),
        said.error or _million(said.operations),
        _million(xla.operations),
        _million(profile.fused_traffic_bytes),
        said.error or _million(said.n_bytes),
        _million(xla.n_bytes),
        _million(profile.peak_bytes),
        f"{row.peak_ratio:.2f}",
        ", ".join(row.holds),
    ]


def _covered(profile: rx.FunctionProfile) -> str:
    shares = [f"{100 * share:.1f}".removesuffix(".0") for share in (profile.coverage_equations, profile.coverage_bytes)]
    return shares[0] if shares[0] == shares[1] else " / ".join(shares)


def _million(count: float | None) -> str:
    """Return a count in millions with three digits, and no exponent."""
    millions = (count or 0) / 1e6
    if count is None:
        return "none"
    if millions >= 100:
        return f"{millions:.0f}"
    return f"{millions:.3g}" if millions >= 0.001 else "<0.001" if count else "0"


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how many rows are within the bounds, and where others say something else."""
    off = [row for row in rows if row.xla.operations is not None and _ratio(row.operations, row.xla.operations) > 2]
    return {
        "functions": len(rows),
        "covered": sum(row.is_covered for row in rows),
        "not covered": {row.name: dict(row.profile.uncosted) for row in rows if not row.is_covered},
        "loops of unknown length": [row.name for row in rows if row.profile.unknown_loops],
        "peak bytes within 10 %": sum(_is_close(row) for row in rows),
        "peak bytes further off": {
            row.name: f"{row.peak_ratio:.2f} {', '.join(row.holds)}".strip() for row in rows if not _is_close(row)
        },
        "roofline raises": {row.name: row.roofline.error for row in rows if row.roofline.error},
        "roofline has no operations": [row.name for row in rows if row.operations and row.roofline.operations == 0],
        "roofline has less than half": [
            row.name for row in rows if row.roofline.operations and row.roofline.operations * 2 < row.operations
        ],
        "roofline has no bytes": sum(row.roofline.n_bytes == 0 for row in rows),
        "XLA's operations off by more than 2 times": {
            row.name: f"{(row.xla.operations or 0) / max(row.operations, 1):.2g} {', '.join(row.holds)}".strip()
            for row in off
        },
    }


def _is_close(row: Row) -> bool:
    return abs(row.peak_ratio - 1) <= PEAK_ERROR


def _ratio(one: float, other: float) -> float:
    return max(one, other, 1) / max(min(one, other), 1)


def main() -> int:
    """Print the table and its summary."""
    parser = options(__doc__)
    parser.add_argument("--which", choices=TABLES, default="functions")
    given = parser.parse_args()
    logging.set_verbosity(logging.ERROR)  # the roofline warns of each equation without a rule
    rows = [row_of(foreign) for foreign in TABLES[given.which]]
    found = summary(rows)
    print(table(HEADINGS, map(cells_of, rows)), json.dumps(found, indent=1), sep="\n\n")
    write(given.json, {"summary": found, "functions": list(map(_figures, rows))})
    return found["covered"] < len(rows)


def _figures(row: Row) -> dict[str, Any]:
    profile, counts = row.profile, ("flops", "transcendentals", "integer_ops", "fused_traffic_bytes", "peak_bytes")
    return {
        "name": row.name,
        "library": row.library,
        **{name: getattr(profile, name) for name in ("coverage_equations", "coverage_bytes", *counts)},
        "uncosted": dict(profile.uncosted),
        "unknown_loops": [loop.line for loop in profile.unknown_loops],
        "compiled_peak_bytes": row.compiled_peak_bytes,
        "roofline": row.roofline._asdict(),
        "xla": row.xla._asdict(),
        "holds": row.holds,
    }


if __name__ == "__main__":
    sys.exit(main())
