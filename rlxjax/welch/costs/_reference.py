"""The reference's strategies, their coefficients as one pytree, and its graphs with closed forms."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import as_index, check_at_least, check_not_nan
from rlxjax._counts import as_float, exact, is_exact, packed, size_as_float
from rlxjax._typing import Count, RealLike
from rlxjax._values import FrozenDict, by_value
from rlxjax.gate import (
    BACKEND_ROWS,
    BackendCoefficients,
    Coefficients,
    Device,
    FusionBenefit,
    FusionTarget,
    GraphWork,
    IoFusionGate,
    NamedCode,
    backend_coefficients,
    io_fusion_gate_for_target,
    is_fused_viable,
    normalised,
    stack_rows,
)
from rlxjax.graph import Graph, GraphIoProfile
from rlxjax.welch._workload import FAST_SEGMENTS, WelchPeakParams

_Part = TypeVar("_Part")
_DISCRETE = (FusionTarget.CUDA, FusionTarget.ROCM)
#: `a`, `b` and `S`.
_SCALES = {
    **dict.fromkeys((FusionTarget.METAL, FusionTarget.MLX), (0.22, 1.15, 7.5)),
    **dict.fromkeys(_DISCRETE, (0.15, 0.85, 0.43)),
    FusionTarget.WGPU: (0.12, 0.0, 2.2),
}


class ReferenceStrategy(NamedCode):
    """The strategies of the reference. Ties go to the earlier strategy."""

    ULTRA = "ultra"
    FAST = "fast"
    RLX = "rlx"
    LEARNED = "learned"


AUTO = "auto"
_ALIASES: Mapping[str, str] = FrozenDict(
    {
        **dict.fromkeys(("", AUTO), AUTO),
        **dict.fromkeys(("ultra", "ultra-fast", "ultra-fast-rustfft", "1seg"), ReferenceStrategy.ULTRA),
        **dict.fromkeys(
            ("fast", "streaming", "fast-streaming", "fast-streaming-rustfft", "rustfft", "2seg"), ReferenceStrategy.FAST
        ),
        **dict.fromkeys(("rlx", "rlx-compiled", "compiled", "gpu", "fused"), ReferenceStrategy.RLX),
        **dict.fromkeys(("learned", "learned-compiled"), ReferenceStrategy.LEARNED),
    }
)


def parse_welch_peaks_strategy(name: str) -> str:
    """Return the strategy of a name, or "auto". Case and `-`/`_` do not matter.

    Args:
        name: name or alias of a strategy.

    Raises:
        ValueError: the name is unknown.

    Examples:
        >>> print(parse_welch_peaks_strategy("Ultra_Fast"), parse_welch_peaks_strategy(""))
        ultra auto
    """
    strategy = _ALIASES.get(normalised(name))
    if strategy is None:
        known = ", ".join(alias for alias in _ALIASES if alias)
        raise ValueError(f"strategy: expected one of {known}, got {name!r}")
    return strategy


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StrategyCoefficients(Coefficients):
    """The reference's handset strategy coefficients of a device; every field `[*batch]`.

    Attributes:
        log_batch_slope: `a`, host cost per `ln(batch / 512)` beyond 512.
        log2_batch_slope: `b`, host cost per `log2(batch / 2048)` beyond 2048.
        fused_scale: `S`, factor of the fused graph's cost.
        block_scale: factor of the fft-only graph's cost on a GPU device.
        block_peak_ns: time of top-k on the host for each peak, on a GPU device.
        fused_floor_ns: least cost of a fused run of fewer than 512 rows on a GPU device.
        slack: the fused cost may exceed the block cost by this factor.
        large_slack: the same from 8192 rows on.
        is_gpu: 1 for every device except cpu.
        is_fused_viable: 1 for every device except cpu and tpu.
        has_native_kernel: 1 if a fused run of 2048 rows or more saves its sync point.
        falls_back: 1 if the set has no row for the device.
    """

    log_batch_slope: RealLike
    log2_batch_slope: RealLike
    fused_scale: RealLike
    block_scale: RealLike
    block_peak_ns: RealLike
    fused_floor_ns: RealLike
    slack: RealLike
    large_slack: RealLike
    is_gpu: RealLike
    is_fused_viable: RealLike
    has_native_kernel: RealLike
    falls_back: RealLike


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CoefficientSet:
    """All coefficients of strategy costs. Leaves are indexed by device code.

    Attributes:
        host: row of the cpu, scalars.
        backend: rows of all devices, `[12]`.
        gate: gates of all devices, `[12]`.
        strategy: the strategies' own coefficients, `[12]`.
    """

    host: BackendCoefficients
    backend: BackendCoefficients
    gate: IoFusionGate
    strategy: StrategyCoefficients


def coefficient_set(name: str = "arch", cpu: str = "cpu") -> CoefficientSet:
    """Return a built-in coefficient set, in JAX's default precision.

    Args:
        name: "arch" or "portable".
        cpu: the row of the cpu, "cpu" or "cpu-apple".

    Raises:
        ValueError: the set or the cpu is unknown.

    Examples:
        >>> float(coefficient_set("portable").backend.dispatch_ns[0])
        300.0
    """
    return _coefficient_set(name, cpu, jnp.result_type(float))


@functools.cache
def _coefficient_set(name: str, cpu: str, dtype: np.dtype) -> CoefficientSet:
    """Make one set for each precision, because JAX caches NumPy arguments by identity."""
    if cpu not in ("cpu", "cpu-apple"):
        raise ValueError(f"cpu: expected 'cpu' or 'cpu-apple', got {cpu!r}")
    rows = {device: backend_coefficients(cpu if device is Device.CPU else device, name) for device in Device}
    strategies = []
    for device, row in rows.items():
        slope, slope2, scale = _SCALES.get(device.target, (0.0, 0.0, 1.0))
        strategies.append(
            StrategyCoefficients(
                log_batch_slope=slope,
                log2_batch_slope=slope2,
                fused_scale=scale,
                block_scale=0.72,
                block_peak_ns=80.0,
                fused_floor_ns=400_000.0,
                slack=1.10,
                large_slack=1.15 if device.target in _DISCRETE else 1.10,
                is_gpu=device is not Device.CPU,
                is_fused_viable=is_fused_viable(device),
                has_native_kernel=device.target in (*_DISCRETE, FusionTarget.WGPU),
                falls_back=row is BACKEND_ROWS["discrete"],
            )
        )
    gates = [io_fusion_gate_for_target(device.target) for device in Device]
    tables = (stack_rows([*rows.values()]), stack_rows(gates), stack_rows(strategies))
    return CoefficientSet(rows[Device.CPU], *jax.tree.map(lambda leaf: leaf.astype(dtype), tables))


# --- Graphs and profiles in closed form ----------------------------------------------------------


def welch_peaks_graph(batch: int, params: WelchPeakParams, fused: bool = True) -> Graph:
    """Return the graph of a Welch-peaks run, float32.

    *fft only*: segments `[R, n]`, a subtraction, a concatenation to n real then n imaginary columns, the
    fft in that layout `[R, 2n]`, which is the output; `R = batch * n_segments`. *Fused*: the same and
    `welch_peaks [batch, k, 2]`, which is then the only output.

    Args:
        batch: rows of the signal, `batch` above.
        params: segments, `n_segments` of `n` samples, and `k` peaks.
        fused: whether the peaks are found on the device.

    Raises:
        ValueError: batch is not a whole number of at least 0.

    Examples:
        >>> g = welch_peaks_graph(4, WelchPeakParams.fast(256, 16))
        >>> [node.op for node in g.nodes]
        ['input', 'sub', 'concat', 'fft', 'welch_peaks']
    """
    batch = as_index(batch, "batch")
    graph = Graph("welch_peaks" if fused else "welch_fft")
    segments = graph.input("segs", (batch * params.n_segments, params.n_fft), "f32")
    zeros = graph.add("sub", [segments, segments])
    output = graph.add("fft", [graph.add("concat", [segments, zeros], axis=1)])
    if fused:
        output = graph.add("welch_peaks", [output], k=params.k, n_segments=params.n_segments)
    graph.set_outputs([output])
    return graph


#: Work of the fft-only and of the fused graph: constant part, part for each sample, part for each peak.
FFT_WORKS = (GraphWork(GraphIoProfile(3, 0, 0, 0), 0, 0, 3, 3), GraphWork(GraphIoProfile(0, 0, 8, 44), 19, 20, 0, 0))
FUSED_WORKS = (
    GraphWork(GraphIoProfile(4, 1, 0, 0), 0, 0, 4, 4),
    GraphWork(GraphIoProfile(0, 0, 0, 52), 13, 20, 0, 0),
    GraphWork(GraphIoProfile(0, 0, 8, 8), 10, 8, 0, 0),
)
#: Work of the host path: parts for each launch, sample and peak.
HOST_WORKS = (
    GraphWork(GraphIoProfile(1, 0, 0, 0), 0, 0, 1, 0),
    GraphWork(GraphIoProfile(0, 0, 0, 12), 3, 0, 0, 0),
    GraphWork(GraphIoProfile(0, 0, 8, 8), 10, 0, 0, 0),
)
#: Savings of the peaks node without the sync point: constant part, part for each sample, part for each peak.
FUSION_BENEFITS = (FusionBenefit(-1, 0, 0, 0), FusionBenefit(0, 0, 8, -8), FusionBenefit(0, 0, -8, -8))


def columns_of(batch: RealLike, n_fft: RealLike, k: RealLike, n_segments: RealLike) -> tuple:
    """Return the numbers of samples in all segments and of peaks, `[*batch]`."""
    return n_segments * (batch * n_fft), batch * k


def total(parts: Sequence[_Part], columns: Sequence[RealLike]) -> _Part:
    """Return the sum of works or benefits, each times its column. Integers on the host give exact results."""

    def add(*counts: RealLike) -> RealLike:
        return sum(count * column for count, column in zip(counts, columns, strict=False) if count)

    return jax.tree.map(add, *parts)


def host_fft_profile(batch: RealLike, params: WelchPeakParams) -> GraphIoProfile:
    """Return the profile of the host path: `R + batch` launches, no syncs, peaks as output.

    Traffic is `4Rn + 8Rn + 8*batch*k`.

    Args:
        batch: rows of the signal, a scalar or `[*batch]`.
        params: segments and peaks of a row.

    Raises:
        ValueError: a negative or NaN batch.

    Examples:
        >>> host_fft_profile(1, WelchPeakParams.fast(256, 16)).device_traffic_bytes
        6272
    """
    batch, n_fft, k, n_segments = _exact_sizes(batch, params.n_fft, params.k, params.n_segments)
    columns = (batch * (n_segments + 1), *columns_of(batch, n_fft, k, n_segments))
    return _packed(total(HOST_WORKS, columns).io)


def readback_bytes_saved(batch: RealLike, n_fft: RealLike, k: RealLike) -> Count:
    """Return the readback bytes that fusing two segments saves. Integers on the host give exact results."""
    columns = (1, *columns_of(*_exact_sizes(batch, n_fft, k, FAST_SEGMENTS)))
    return _packed(total(FUSION_BENEFITS, columns).host_readback_bytes_saved)


def useful_bytes_touched(batch: RealLike, params: WelchPeakParams) -> Count:
    """Return the bytes that any implementation must touch: `4Rn + 8*batch*k`.

    Arguments and errors are those of `host_fft_profile`.

    Examples:
        >>> useful_bytes_touched(1, WelchPeakParams.fast(256, 16))
        2176
    """
    samples, peaks = columns_of(*_exact_sizes(batch, params.n_fft, params.k, params.n_segments))
    return _packed(4 * samples + 8 * peaks)


def algorithm_bandwidth_gbps(useful_bytes: RealLike, time_ns: RealLike) -> jax.Array:
    """Return useful bytes over time in GB/s, `[*batch]`; 0 for a time that is not positive.

    Args:
        useful_bytes: as `useful_bytes_touched` counts them, a scalar or `[*batch]`.
        time_ns: time of the run in ns, a scalar or `[*batch]`.

    Raises:
        ValueError: bytes are negative or NaN, or the time is NaN.

    Examples:
        >>> print(algorithm_bandwidth_gbps(2176, 1000.0))
        2.176
    """
    useful_bytes, time_ns = as_float(useful_bytes, "useful_bytes"), as_float(time_ns, "time_ns")
    check_at_least(useful_bytes, "useful_bytes")
    check_not_nan(time_ns, "time_ns")
    positive = jnp.asarray(time_ns) > 0
    return jnp.where(positive, useful_bytes / jnp.where(positive, time_ns, 1.0), 0.0)


def _exact_sizes(batch: RealLike, *others: RealLike) -> list:
    """Return sizes as exact integers if all are readable on the host, else as floats."""
    check_at_least(batch, "batch", what="size")
    if all(is_exact(value) for value in (batch, *others)):
        return [exact(value) for value in (batch, *others)]
    names = ("batch", "n_fft", "k", "n_segments")
    return [size_as_float(value, name) for value, name in zip((batch, *others), names, strict=True)]


def _packed(counts: _Part) -> _Part:
    """Return counts, or a profile, with exact counts as NumPy integers."""

    def pack(count: Count) -> Count:
        is_object = getattr(count, "dtype", None) == np.dtype(object)
        return packed(exact(count)) if is_object or is_exact(count) else count

    return jax.tree.map(pack, counts)
