"""Whether Welch peaks of many sizes in turn take as long as of one size again, and what memory their programs take.

python -m benchmarks.many_sizes [--sizes 1000] [--rows 64] [--k 4] [--strategy fused] [--jax] [--bound-mb 1073]

The sizes are transform lengths, each with 1 to `--rows` rows; with `--fixed` each length has `--rows` rows alone. The
first pass compiles. In the second one each size is called, and once more at once: that is the call of one size.
"""

import json
import time

import jax
import numpy as np
import psutil

import rlxjax as rx
from benchmarks._common import options
from rlxjax.clock import quiet_collector
from rlxjax.learned import LearnedFft
from rlxjax.welch import keep_programs
from rlxjax.welch._launch import compiled

LEAST_LENGTH = 256


def resident_mb() -> float:
    """Return the memory of this process in MB."""
    return psutil.Process().memory_info().rss / 1e6


def memory_maps() -> int:
    """Return how many memory maps this process has."""
    return len(psutil.Process().memory_maps(grouped=False))


def passes(sizes: list[tuple[int, int]], k: int, strategy: str, is_jax: bool) -> dict[str, float]:
    """Return what two passes over sizes of (segment length, rows) take: times a call in us, memory in MB."""
    samples = np.random.default_rng(0).standard_normal(max(3 * n_fft // 2 * rows for n_fft, rows in sizes), np.float32)
    model = LearnedFft.exact(sizes[0][0]) if strategy == "learned" else None

    def timed_us(n_fft: int, rows: int, calls: int) -> list[float]:
        params = rx.WelchPeakParams.fast(n_fft, k)
        signal = samples[: rows * params.frame_len].reshape(rows, params.frame_len)
        signal = jax.block_until_ready(jax.device_put(signal)) if is_jax else signal
        times = []
        for _ in range(calls):
            start = time.perf_counter_ns()
            jax.block_until_ready(rx.welch_peaks(signal, params, strategy, model=model))
            times.append((time.perf_counter_ns() - start) / 1e3)
        return times

    timed_us(*sizes[0], calls=2)
    found = {"MB before": resident_mb()}
    first = [timed_us(*size, calls=1)[0] for size in sizes]
    found |= {"first pass, us a call": float(np.mean(first)), "MB after it": resident_mb()}
    with quiet_collector():
        times = np.array([timed_us(*size, calls=2) for size in sizes])
    in_turn, again = times.mean(0)
    found |= {"MB after the second": resident_mb(), "programs, MB": compiled.n_bytes / 1e6, "maps": memory_maps()}
    found |= {"second pass, us a call": in_turn, "one size, us a call": again}
    medians = np.median(times, axis=0)
    return found | {"ratio": in_turn / again, "ratio of medians": medians[0] / medians[1]}


def main() -> None:
    """Print the figures."""
    parser = options(__doc__, sizes=1000, rows=64, k=4, bound_mb=2**30 / 1e6)
    parser.add_argument("--strategy", default="fused")
    parser.add_argument("--fixed", action="store_true", help="no other number of rows than --rows")
    parser.add_argument("--jax", action="store_true", help="JAX arrays in place of NumPy's")
    given = parser.parse_args()
    keep_programs(int(given.bound_mb * 1e6))
    counts = [given.rows] if given.fixed else range(1, given.rows + 1)
    lengths = [LEAST_LENGTH + 2 * place for place in range(-(-given.sizes // len(counts)))]
    if given.strategy == "learned":  # a model has one length
        lengths, counts = [64], range(1, given.sizes + 1)
    sizes = [(n_fft, rows) for rows in counts for n_fft in lengths][: given.sizes]
    found = passes(sizes, given.k, given.strategy, given.jax)
    for name, value in found.items():
        print(f"{name:24s} {value:,.3g}" if value < 100 else f"{name:24s} {value:,.0f}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
