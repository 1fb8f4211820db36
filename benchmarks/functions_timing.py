"""Times the suite of ordinary functions, or those of a module of one's own, and writes what each takes.

python benchmarks/functions_timing.py [--module NAME] [--budget 75] [--json FILE]

A module of one's own has `functions()`, which returns tuples of a name, a family, a function and its arguments.
The file has, for each function: `time_ns` and `median_ns`, the lower quartile and the median over visits of the mean of
the calls of one; and `noise`, that of `time_ns`.
"""

import argparse
import importlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from calibrate.draws import Draw
from calibrate.functions import function_cells

from calibrate.visits import Visits, noise_floor, quantile_ns
from rlxjax.calibration import current_fingerprint
from rlxjax.clock import call_ns, mean_ns, quiet_collector, visit_ns

#: Entries whose compilation takes longer are listed.
SLOW_COMPILE_S = 0.7


class Entry(NamedTuple):
    """A function to time; what it runs on are arrays of the device."""

    name: str
    family: str
    held_out: bool
    run: Callable[..., Any]
    args: tuple[Any, ...]

    def call(self) -> Any:
        """Run it."""
        return self.run(*self.args)


def suite(rng: np.random.Generator) -> Iterator[Entry]:
    """Yield the suite of `calibrate.functions`."""
    for cell in function_cells():
        yield Entry(cell.name, cell.family, cell.held_out, jax.jit(cell.fn), cell.arguments(rng))


def module(name: str, rng: np.random.Generator) -> Iterator[Entry]:
    """Yield the functions of a module; all are held out."""
    for entry, family, fn, args in importlib.import_module(name).functions():
        arrays = jax.tree.map(lambda x: _normal(x, rng) if isinstance(x, jax.ShapeDtypeStruct) else x, args)
        yield Entry(entry, family, True, jax.jit(fn), jax.device_put(arrays))


def _normal(shape: jax.ShapeDtypeStruct, rng: np.random.Generator) -> jax.Array:
    if np.issubdtype(shape.dtype, np.integer):
        return jax.numpy.zeros(shape.shape, shape.dtype)
    return Draw(shape.shape, shape.dtype).array(rng)


def measure(entries: list[Entry], budget_s: float, rng: np.random.Generator) -> Visits:
    """Return visits by rounds, each in a new random order, until the budget is spent; two rounds at least."""
    visits: list[tuple[int, int, float]] = []
    end = time.perf_counter() + budget_s
    with quiet_collector():
        for round_ in itertools.count():
            if round_ >= 2 and time.perf_counter() > end:
                break
            for index in rng.permutation(len(entries)).tolist():
                visits.append((round_, index, mean_ns(visit_ns(entries[index].call))))
    rounds, cells, time_ns = np.array(visits).T
    return Visits(rounds.astype(int), cells.astype(int), time_ns, len(entries))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module")
    parser.add_argument("--budget", type=float, default=75.0, help="seconds of measuring")
    parser.add_argument("--threads", type=int, default=2, help="compilations at a time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)

    entries = list(module(options.module, rng) if options.module else suite(rng))
    start = time.perf_counter()
    with ThreadPoolExecutor(options.threads) as pool:
        compile_s = [ns / 1e9 for ns in pool.map(call_ns, [entry.call for entry in entries])]
    print(f"{len(entries)} functions compiled in {time.perf_counter() - start:.1f} s")
    for entry, taken in zip(entries, compile_s, strict=True):
        if taken > SLOW_COMPILE_S:
            print(f"  {entry.name}: {taken:.2f} s")

    visits = measure(entries, options.budget, np.random.default_rng())
    columns = {
        "time_ns": quantile_ns(visits),
        "median_ns": [np.median(visits.time_ns[visits.cell == index]) for index in range(len(entries))],
        "noise": noise_floor(visits),
    }
    rows = [
        {"name": entry.name, "family": entry.family, "held_out": entry.held_out, "compile_s": taken}
        | {name: float(column[index]) for name, column in columns.items()}
        for index, (entry, taken) in enumerate(zip(entries, compile_s, strict=True))
    ]
    print(f"{len(visits.rounds())} rounds, noise {np.median([row['noise'] for row in rows]):.1%} in the median")
    for row in rows:
        print(f"{row['time_ns'] / 1e3:12.1f} us {row['noise']:7.1%}  {row['family']}: {row['name']}")
    if options.json:
        result = {"fingerprint": current_fingerprint().model_dump(), "entries": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
