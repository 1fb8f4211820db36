"""Count the wrong and sure answers of `choose` about two programs of which one has slow calls.

    python -m benchmarks.contests [--contests 20] [--limit-ms 200] [--sleep] [--json FILE]

One program takes the same time at every call. The other program has the same mean time or a larger mean time, but its
quick calls are quicker. An answer is wrong and sure if it is no tie and names a program that is not faster.
"""

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import rlxjax as rx
from benchmarks._common import options, table, write

#: What the calls of both programs take in turn, in ms.
PAIRS = {
    "1.5 against 1 and 3": ([1.5], [1.0, 3.0]),
    "2 against 1 and 3": ([2.0], [1.0, 3.0]),
    "1.5 against 12 at every tenth call": ([1.5], [*[1.0] * 9, 12.0]),
    "2.1 against 12 at every tenth call": ([2.1], [*[1.0] * 9, 12.0]),
    "1.5 against 51 at every fiftieth call": ([1.5], [*[1.0] * 49, 51.0]),
    "1 against 1.1": ([1.0], [1.1]),
    "1 against 1.5": ([1.0], [1.5]),
}


def spin(taken_s: float) -> None:
    """Keep a processor busy for a number of seconds."""
    end_s = time.perf_counter() + taken_s
    while time.perf_counter() < end_s:
        pass


def program(times_ms: Sequence[float], wait: Callable[[float], None], adds: float) -> Callable[[Any], Any]:
    """Return a function whose calls take the given times in turn."""
    times = itertools.cycle(times_ms)

    def call(x: Any) -> Any:
        wait(next(times) / 1e3)
        return x + adds - adds

    return call


def main() -> None:
    parser = options(__doc__, contests=20, limit_ms=200.0)
    parser.add_argument("--sleep", action="store_true", help="programs that sleep instead of programs that compute")
    args = parser.parse_args()
    wait, found, known = time.sleep if args.sleep else spin, {}, rx.Calibration({}, None, {})
    with tempfile.TemporaryDirectory() as home:
        os.environ["RLXJAX_HOME"] = home
        for name, pair in PAIRS.items():
            means_ms = [np.mean(own) for own in pair]
            answers = []
            for number in range(args.contests):
                programs = {str(place): program(own, wait, 1.0 + place) for place, own in enumerate(pair)}
                x = jnp.zeros(1 + number + 1000 * len(found))  # a question that nobody has asked
                answers.append(rx.choose(programs, x, calibration=known, measure="always", limit_ms=args.limit_ms))
            right = str(np.argmin(means_ms)) if np.ptp(means_ms) > 1e-9 else ""
            found[name] = {
                "sure and right": sum(not own.is_tie and own.name == right for own in answers),
                "sure and wrong": sum(not own.is_tie and own.name != right for own in answers),
                "ties": sum(own.is_tie for own in answers),
                "rounds": float(np.median([own.rounds for own in answers])),
                "load": float(np.median([own.load for own in answers])),
            }
    headings = ["ms of a call", *next(iter(found.values()))]
    print(table(headings, [[name, *(f"{value:.3g}" for value in row.values())] for name, row in found.items()]))
    write(args.json, {"pairs": found})


if __name__ == "__main__":
    main()
