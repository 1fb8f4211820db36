"""Ordinary functions compiled for devices that are not there: kernels, bytes, memory and cycles beside the jaxpr's.

    python -m benchmarks.target_functions --target tpu-v5e [--target h100] [--which both] [--json FILE]

`pip install 'rlxjax[tpu-compiler]'` or `'rlxjax[cuda-compiler]'` installs a compiler, `'rlxjax[foreign]'` libraries.
Of each kind of the suite one size is compiled. A row whose last columns are words is a refusal, with its reason.
The exit status is 1 if a loop of known length is not counted by its turns.
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import rlxjax as rx
from benchmarks._common import options, table, write
from calibrate.suites.functions import timed_functions

HEADINGS = ["function", "kernels", "jaxpr's", "MB", "jaxpr's", "peak MB", "jaxpr's", "cycles", "compiled in s"]
#: How far two counts may be apart before the row is called a disagreement.
CLOSE = 1.25


class Row(NamedTuple):
    """What the compiler of a target made of a function, beside what its equations say; or why it refuses."""

    name: str
    kernels: int = 0
    jaxpr_kernels: int = 0
    bytes: int = 0
    jaxpr_bytes: int = 0
    peak_bytes: int = 0
    jaxpr_peak_bytes: int = 0
    cycles: int | None = None
    seconds: float = 0.0
    refusal: str = ""


def functions(which: str) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], tuple[int, ...] | None]]:
    """Yield functions, arguments and trip counts: one size of each kind of the suite, and those of libraries."""
    if which in ("suite", "both"):
        kinds = {name.rpartition(" ")[0].rpartition(" ")[0]: name for name in timed_functions()}
        known = timed_functions()
        for name in kinds.values():
            yield name, known[name].fn, known[name].abstract(), None
    if which in ("foreign", "both"):
        from benchmarks.foreign_table import FUNCTIONS

        for foreign in FUNCTIONS:
            yield f"{foreign.name} ({foreign.library})", *foreign.call(), foreign.trip_counts


def row_of(name: str, fn: Callable[..., Any], args: tuple[Any, ...], trips: tuple[int, ...] | None, target: str) -> Row:
    """Return what a compiler makes of a function."""
    start = time.monotonic()
    try:
        written = rx.profile_function(fn, *args, trip_counts=trips)
        made = rx.profile_function(fn, *args, trip_counts=trips, level="compiled", target=target)
    except ValueError as error:
        return Row(name, refusal=str(error), seconds=time.monotonic() - start)
    assert made.target is not None
    return Row(
        name,
        made.io.kernel_launches,
        sum(group.launches for group in written.kernels),
        made.io.device_traffic_bytes,
        written.fused_traffic_bytes,
        made.peak_bytes,
        written.peak_bytes,
        made.target.cycles,
        made.target.compile_seconds,
    )


def cells_of(row: Row) -> list[str]:
    """Return a row as text."""
    if row.refusal:
        return [row.name, *[""] * 7, row.refusal]
    sizes = (row.bytes, row.jaxpr_bytes, row.peak_bytes, row.jaxpr_peak_bytes)
    cycles = "" if row.cycles is None else f"{row.cycles:,}"
    return [
        row.name,
        f"{row.kernels:,}",
        f"{row.jaxpr_kernels:,}",
        *(f"{size / 1e6:.4g}" for size in sizes),
        cycles,
        f"{row.seconds:.2f}",
    ]


def turns(target: str) -> dict[str, tuple[float, float]]:
    """Return the kernels of a loop of ten turns and of one of a hundred, and the cycles where they are given."""

    def loop(length: int) -> Any:
        def run(x: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, length, lambda _, c: jnp.sin(c) @ c, x)

        x = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
        found = rx.profile_function(run, x, level="compiled", target=target)
        assert found.target is not None
        return {"kernels": found.io.kernel_launches, "cycles": found.target.cycles or 0.0}

    few, many = loop(10), loop(100)
    return {name: (few[name], many[name]) for name in few if few[name]}


def main() -> int:
    """Compile, print and write."""
    parser = options(__doc__)
    parser.add_argument("--target", action="append", required=True)
    parser.add_argument("--which", choices=("suite", "foreign", "both"), default="both")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    is_off = False
    for target in given.target:
        rows = [row_of(*each, target) for each in functions(given.which)]
        print(table(HEADINGS, [cells_of(row) for row in rows]))
        made = [row for row in rows if not row.refusal]
        same = sum(row.kernels == row.jaxpr_kernels for row in made)
        close = sum(1 / CLOSE < max(row.bytes, 1) / max(row.jaxpr_bytes, 1) < CLOSE for row in made)
        loops = turns(target)
        print(
            f"{target}: {len(made)} of {len(rows)} compiled, {len(rows) - len(made)} refused; kernels as the jaxpr's "
            f"in {same}, bytes within {CLOSE} times in {close}; a loop of 100 turns over one of 10: "
            + ", ".join(f"{many / few:.3f} times the {name}" for name, (few, many) in loops.items())
        )
        is_off |= any(not 9.0 < many / few < 11.0 for few, many in loops.values())
        found[target] = {"rows": [row._asdict() for row in rows], "loops": loops}
    if given.json:
        write(given.json, found)
    return int(is_off)


if __name__ == "__main__":
    sys.exit(main())
