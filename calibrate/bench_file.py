"""What the benchmark writes: its schema on one screen, and what follows from raw times."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from rlxjax.calibration import Fingerprint, Strict

BENCH_SCHEMA_VERSION = 1
COPY = "copy"
#: Growth in the batch is fitted from here on, where launches no longer count.
GROWTH_FROM_BATCH, GROWTH_POINTS = 1024, 3


class Result(Strict):
    """One contender in one cell: its times in ns in the order of the rounds, or a note why there are none."""

    status: Literal["measured", "wrong", "failed"]
    note: str = ""
    times_ns: list[int] = []
    min_ns: float | None = None
    median_ns: float | None = None

    @classmethod
    def of(cls, times_ns: Sequence[int]) -> "Result":
        """Return the result of times, one at least."""
        best, middle = float(min(times_ns)), float(statistics.median(times_ns))
        return cls(status="measured", times_ns=list(times_ns), min_ns=best, median_ns=middle)


class CellResult(Strict):
    """One workload.

    Attributes:
        bytes_moved: of samples and peaks together, what the copy reads and writes.
        results: by contender.
        ratios: of ours to a peer's minimum, by our path and by peer: below 1 ours is faster.
        copy_share: of the bandwidth that the copy reaches, by contender.
    """

    n_fft: int
    n_segments: int
    batch: int
    k: int
    bytes_moved: int
    results: dict[str, Result]
    ratios: dict[str, dict[str, float]]
    copy_share: dict[str, float]

    @classmethod
    def of(cls, results: dict[str, Result], ours: Sequence[str], **sizes: int) -> "CellResult":
        """Return what follows from the results of a workload, some of them ours."""
        best = minima(results)
        return cls(**sizes, results=results, ratios=ratios(best, ours), copy_share=copy_shares(best))


class Growth(Strict):
    """How the minimum grows: least-squares slopes on log-log axes.

    Attributes:
        axis: what varies.
        fixed: what does not, as `n_fft 256, k 16`.
        values: of the axis.
        theory: slope of the batch, or of `n log n` over the same segment lengths.
        slopes: by contender.
    """

    axis: Literal["batch", "n_fft"]
    fixed: str
    values: list[int]
    theory: float
    slopes: dict[str, float]


class BenchFile(Strict):
    """A benchmark: the machine, who took part in which version, every time, and what follows.

    Attributes:
        skipped: why a contender or a cell was left out, by name.
        mean_ratios: geometric means of the cells' ratios, by our path and by peer.
    """

    bench_schema_version: int
    created: str
    command: str
    protocol: str
    fingerprint: Fingerprint
    versions: dict[str, str]
    ours: list[str]
    skipped: dict[str, str]
    interrupted: bool = False
    cells: list[CellResult] = []
    growth: list[Growth] = []
    mean_ratios: dict[str, dict[str, float]] = {}


def minima(results: Mapping[str, Result]) -> dict[str, float]:
    """Return the minimum of each contender that has one."""
    return {name: result.min_ns for name, result in results.items() if result.min_ns is not None}


def ratios(best_ns: Mapping[str, float], ours: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return ours / peer by our path and by peer."""
    peers = [name for name in best_ns if name not in ours and name != COPY]
    return {own: {peer: best_ns[own] / best_ns[peer] for peer in peers} for own in ours if own in best_ns and peers}


def copy_shares(best_ns: Mapping[str, float]) -> dict[str, float]:
    """Return the share of the copy's bandwidth by contender."""
    return {name: best_ns[COPY] / time_ns for name, time_ns in best_ns.items() if name != COPY and COPY in best_ns}


def mean_ratios(cells: Sequence[CellResult]) -> dict[str, dict[str, float]]:
    """Return the geometric means over the cells that have both."""
    gathered: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        for own, by_peer in cell.ratios.items():
            for peer, ratio in by_peer.items():
                gathered[own][peer].append(ratio)
    return {
        own: {peer: statistics.geometric_mean(found) for peer, found in by_peer.items()}
        for own, by_peer in gathered.items()
    }


def log_log_slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the least-squares slope of log(values) over log(sizes).

    Examples:
        >>> round(log_log_slope([1, 10, 100], [3, 30, 300]), 12)
        1.0
    """
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def growth(cells: Sequence[CellResult]) -> list[Growth]:
    """Return the slopes in the batch, then in n_fft, wherever there are enough points."""
    return [*_growth_along("batch", "n_fft", cells), *_growth_along("n_fft", "batch", cells)]


def _growth_along(axis: Literal["batch", "n_fft"], other: str, cells: Sequence[CellResult]) -> list[Growth]:
    """Return the slopes along one size, for each value of the other size and of k."""
    groups: dict[tuple[int, int], dict[int, dict[str, float]]] = defaultdict(dict)
    for cell in cells:
        if axis == "n_fft" or cell.batch >= GROWTH_FROM_BATCH:
            groups[getattr(cell, other), cell.k][getattr(cell, axis)] = minima(cell.results)
    found = []
    for (fixed, k), points in groups.items():
        if len(points) < GROWTH_POINTS:
            continue
        values = sorted(points)
        names = [name for name in points[values[0]] if all(name in point for point in points.values())]
        theory = values if axis == "batch" else [n * np.log(n) for n in values]
        found.append(
            Growth(
                axis=axis,
                fixed=f"{other} {fixed}, k {k}",
                values=values,
                theory=log_log_slope(values, theory),
                slopes={name: log_log_slope(values, [points[v][name] for v in values]) for name in names},
            )
        )
    return found
