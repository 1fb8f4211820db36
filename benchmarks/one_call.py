"""Time single calls in a warm process, each with new sizes, so that no cache answers.

PYTHONPATH=CHECKOUT python benchmarks/one_call.py [--calls 200]

To compare two checkouts, alternate runs with the PYTHONPATH of each.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import rlxjax as rx

#: The root of the package with the counted files.
ROOT = str(Path(rx.__file__).parent)


def sizes() -> Iterator[int]:
    """Return distinct batches."""
    return itertools.count(8192)


def calls(calibration: rx.Calibration) -> dict[str, tuple[Callable[[int], Any], int]]:
    """Return the timed functions of a size by name, and the calls of each that count as one call of the others."""

    def a_few_lines(rows: int) -> rx.calibration.FunctionPrediction:
        x, w = jax.ShapeDtypeStruct((rows, 64), jnp.float32), jax.ShapeDtypeStruct((64, 32), jnp.float32)
        return calibration.predict_function(lambda x, w: jnp.tanh(x @ w).sum(-1), x, w)

    def two_stages(rows: int) -> rx.Advice:
        stages = (lambda x: jnp.tanh(x) * 2.0, lambda x: x.sum(-1))
        return rx.advise(stages, jax.ShapeDtypeStruct((rows, 64), jnp.float32), calibration=calibration)

    return {
        "predict_ns": (lambda batch: calibration.predict_ns("fused", batch, 256, 16), 1),
        "interval_ns": (lambda batch: calibration.interval_ns("fused", batch, 256, 16), 1),
        "compare": (lambda batch: calibration.compare("fused", "host", batch, 256, 16), 1),
        "pick": (lambda batch: calibration.pick(batch, 256, 16), 1),
        "predict_function": (a_few_lines, 5),
        "advise of two stages": (two_stages, 10),
    }


def median_us(call: Callable[[int], Any], count: int) -> float:
    """Return the median time in us of calls after two other calls, each waited for."""
    times_ns = []
    for size in itertools.islice(sizes(), count + 2):
        start = time.perf_counter_ns()
        jax.block_until_ready(jax.tree.leaves(call(size)))
        times_ns.append(time.perf_counter_ns() - start)
    return statistics.median(times_ns[2:]) / 1e3


def remembered_us(calls: int = 2000, rounds: int = 50) -> float:
    """Return the overhead of a remembered choice over its function in us, by interleaved calls."""
    x = jnp.ones((8, 8))
    ways = {"twice": jax.jit(lambda x: x + x), "double": jax.jit(lambda x: 2 * x)}
    with tempfile.TemporaryDirectory() as home:
        os.environ["RLXJAX_HOME"] = home
        fn = rx.choose(ways, x, measure="always").fn
    forms = (lambda: fn(x), lambda: rx.choose(ways, x, measure="always")(x))
    each = [[timeit.timeit(form, number=calls) / calls for form in forms] for _ in range(rounds)]
    return statistics.median(chosen - alone for alone, chosen in each) * 1e6


def files_of(call: Callable[[int], Any], size: int) -> list[str]:
    """Return the files of the package that a call runs through."""
    found = set()
    sys.setprofile(lambda frame, *_: found.add(frame.f_code.co_filename))
    try:
        call(size)
    finally:
        sys.setprofile(None)
    return sorted(path[len(ROOT) + 1 :] for path in found if path.startswith(ROOT))


def main() -> None:
    """Print the times and the files as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=200)
    count = parser.parse_args().calls
    calibration = rx.calibration.prior_calibration("cpu")
    assert calibration is not None
    timed = calls(calibration)
    found = {name: round(median_us(call, max(count // share, 5)), 1) for name, (call, share) in timed.items()}
    warm = files_of(timed["predict_ns"][0], 7777)
    jax.clear_caches()
    traced = files_of(timed["predict_ns"][0], 7778)
    found["choose, remembered, beside its function"] = round(remembered_us(), 2)
    print(json.dumps({"median_us": found, "files of predict_ns": warm, "and of its first call": traced}, indent=2))


if __name__ == "__main__":
    main()
