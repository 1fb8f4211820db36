"""The reference's strategies with their coefficients, and its graphs with formulas for launches, FLOP and bytes."""

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
#: The coefficients `a`, `b` and `S` of `StrategyCoefficients`, by target.
_SCALES = {
    **dict.fromkeys((FusionTarget.METAL, FusionTarget.MLX), (0.22, 1.15, 7.5)),
    **dict.fromkeys(_DISCRETE, (0.15, 0.85, 0.43)),
    FusionTarget.WGPU: (0.12, 0.0, 2.2),
}


class ReferenceStrategy(NamedCode):
    """The strategies of the reference. Among strategies of equal cost, the earlier strategy is picked."""

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
    """Return the strategy that a name stands for, or "auto" if the name is "auto" or empty.

    Args:
        name: name or alias of a strategy, in upper or lower case, with `-` or `_` between words.

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
    """The reference's hand-set coefficients of the strategies on a device. Every field has the shape `[*batch]`.

    Attributes:
        log_batch_slope: `a`. From 512 rows on, the host cost is multiplied by `1 + a * ln(batch / 512)`.
        log2_batch_slope: `b`. From 2048 rows on, the host cost is also multiplied by `1 + b * log2(batch / 2048)`.
        fused_scale: `S`, the factor of the fused graph's cost.
        block_scale: factor of the cost of the graph with only the fft, on every device except cpu.
        block_peak_ns: time in ns in which the host selects one peak; it counts for every device except cpu.
        fused_floor_ns: lowest possible cost in ns of a fused run of fewer than 512 rows, on every device except cpu.
        slack: largest ratio of fused cost to block cost that the gate allows, for fewer than 8192 rows.
        large_slack: the same ratio for 8192 rows or more.
        is_gpu: 1 for every device except cpu.
        is_fused_viable: 1 for every device except cpu and tpu.
        has_native_kernel: 1 if a fused run of 2048 rows or more saves its sync point.
        falls_back: 1 if the coefficient set has no row of its own for the device.
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
    """All coefficients of the strategy costs. An array of shape `[12]` has an entry for each device code.

    Attributes:
        host: the backend coefficients of the cpu, as scalars.
        backend: the backend coefficients of all devices, `[12]`.
        gate: the gate's coefficients for all devices, `[12]`.
        strategy: the strategy coefficients of all devices, `[12]`.
    """

    host: BackendCoefficients
    backend: BackendCoefficients
    gate: IoFusionGate
    strategy: StrategyCoefficients


def coefficient_set(name: str = "arch", cpu: str = "cpu") -> CoefficientSet:
    """Return a built-in coefficient set, in JAX's default precision.

    Args:
        name: "arch" or "portable".
        cpu: name of the row of backend coefficients that describes the cpu, "cpu" or "cpu-apple".

    Raises:
        ValueError: `name` or `cpu` is unknown.

    Examples:
        >>> float(coefficient_set("portable").backend.dispatch_ns[0])
        300.0
    """
    return _coefficient_set(name, cpu, jnp.result_type(float))


@functools.cache
def _coefficient_set(name: str, cpu: str, dtype: np.dtype) -> CoefficientSet:
    """Return the coefficient set. Each call returns the same object, because JAX caches NumPy arguments by identity."""
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


def welch_peaks_graph(batch: int, params: WelchPeakParams, fused: bool = True) -> Graph:
    """Return the graph of a run of Welch peaks in float32.

    The input is all segments, `[R, n]` with `R = batch * n_segments`. A subtraction makes zeros, and a concatenation
    appends the zeros, so that a row is n real parts, then n imaginary parts. The fft returns spectra in this layout,
    `[R, 2n]`. The output is the peaks, `[batch, k, 2]`, if `fused` is true, and the spectra otherwise.

    Args:
        batch: number of rows of the signal.
        params: segment length `n`, number of segments and number of peaks.
        fused: whether the device finds the peaks.

    Raises:
        ValueError: `batch` is not a whole number of at least 0.

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


#: The work of the graph with only the fft, and of the fused graph: a constant part, then parts per sample and per peak.
FFT_WORKS = (GraphWork(GraphIoProfile(3, 0, 0, 0), 0, 0, 3, 3), GraphWork(GraphIoProfile(0, 0, 8, 44), 19, 20, 0, 0))
FUSED_WORKS = (
    GraphWork(GraphIoProfile(4, 1, 0, 0), 0, 0, 4, 4),
    GraphWork(GraphIoProfile(0, 0, 0, 52), 13, 20, 0, 0),
    GraphWork(GraphIoProfile(0, 0, 8, 8), 10, 8, 0, 0),
)
#: The work of the host path: parts per launch, per sample and per peak.
HOST_WORKS = (
    GraphWork(GraphIoProfile(1, 0, 0, 0), 0, 0, 1, 0),
    GraphWork(GraphIoProfile(0, 0, 0, 12), 3, 0, 0, 0),
    GraphWork(GraphIoProfile(0, 0, 8, 8), 10, 0, 0, 0),
)
#: The savings of fusing, without the sync point: a constant part, a part per sample, and a part per peak.
FUSION_BENEFITS = (FusionBenefit(-1, 0, 0, 0), FusionBenefit(0, 0, 8, -8), FusionBenefit(0, 0, -8, -8))


def columns_of(batch: RealLike, n_fft: RealLike, k: RealLike, n_segments: RealLike) -> tuple:
    """Return the number of samples in all segments, and the number of peaks, each `[*batch]`."""
    return n_segments * (batch * n_fft), batch * k


def total(parts: Sequence[_Part], columns: Sequence[RealLike]) -> _Part:
    """Return the sum of all parts, each multiplied by its column. The sum is exact for integers on the host."""

    def add(*counts: RealLike) -> RealLike:
        return sum(count * column for count, column in zip(counts, columns, strict=False) if count)

    return jax.tree.map(add, *parts)


def host_fft_profile(batch: RealLike, params: WelchPeakParams) -> GraphIoProfile:
    """Return the launches, syncs and bytes of the host path, which returns the peaks.

    For `R = batch * n_segments` segments of n samples, there are `R + batch` launches and `4Rn + 8Rn + 8*batch*k` bytes
    of memory traffic. There are no syncs.

    Args:
        batch: number of rows of the signal, a scalar or `[*batch]`.
        params: segment length, number of segments and number of peaks.

    Raises:
        ValueError: `batch` is negative or NaN.

    Examples:
        >>> host_fft_profile(1, WelchPeakParams.fast(256, 16)).device_traffic_bytes
        6272
    """
    batch, n_fft, k, n_segments = _exact_sizes(batch, params.n_fft, params.k, params.n_segments)
    columns = (batch * (n_segments + 1), *columns_of(batch, n_fft, k, n_segments))
    return _packed(total(HOST_WORKS, columns).io)


def readback_bytes_saved(batch: RealLike, n_fft: RealLike, k: RealLike) -> Count:
    """Return how many bytes of readback fusing saves in a run of two segments, exactly for integers on the host."""
    columns = (1, *columns_of(*_exact_sizes(batch, n_fft, k, FAST_SEGMENTS)))
    return _packed(total(FUSION_BENEFITS, columns).host_readback_bytes_saved)


def useful_bytes_touched(batch: RealLike, params: WelchPeakParams) -> Count:
    """Return the number of bytes that every implementation must read and write: `4Rn + 8*batch*k`.

    The names, arguments and errors are those of `host_fft_profile`.

    Examples:
        >>> useful_bytes_touched(1, WelchPeakParams.fast(256, 16))
        2176
    """
    samples, peaks = columns_of(*_exact_sizes(batch, params.n_fft, params.k, params.n_segments))
    return _packed(4 * samples + 8 * peaks)


def algorithm_bandwidth_gbps(useful_bytes: RealLike, time_ns: RealLike) -> jax.Array:
    """Return the useful bytes divided by the time, in GB/s, `[*batch]`. The result is 0 if the time is not positive.

    Args:
        useful_bytes: the result of `useful_bytes_touched`, a scalar or `[*batch]`.
        time_ns: time of the run in ns, a scalar or `[*batch]`.

    Raises:
        ValueError: `useful_bytes` is negative or NaN, or `time_ns` is NaN.

    Examples:
        >>> print(algorithm_bandwidth_gbps(2176, 1000.0))
        2.176
    """
    check_at_least(useful_bytes, "useful_bytes")
    check_not_nan(time_ns, "time_ns")
    useful_bytes, time_ns = as_float(useful_bytes, "useful_bytes"), as_float(time_ns, "time_ns")
    positive = jnp.asarray(time_ns) > 0
    return jnp.where(positive, useful_bytes / jnp.where(positive, time_ns, 1.0), 0.0)


def _exact_sizes(batch: RealLike, *others: RealLike) -> list:
    """Return the sizes as exact integers if the host can read all sizes, or else as floats."""
    check_at_least(batch, "batch", what="size")
    if all(is_exact(value) for value in (batch, *others)):
        return [exact(value) for value in (batch, *others)]
    names = ("batch", "n_fft", "k", "n_segments")
    return [size_as_float(value, name) for value, name in zip((batch, *others), names, strict=True)]


def _packed(counts: _Part) -> _Part:
    """Return counts, or a profile of counts, in which exact counts are stored as 64-bit integers."""

    def pack(count: Count) -> Count:
        is_object = getattr(count, "dtype", None) == np.dtype(object)
        return packed(exact(count)) if is_object or is_exact(count) else count

    return jax.tree.map(pack, counts)
