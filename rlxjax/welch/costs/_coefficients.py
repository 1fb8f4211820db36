"""The coefficient sets of the strategy costs: one pytree, differentiable as a whole."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._typing import RealLike
from rlxjax._values import by_value
from rlxjax.gate._devices import (
    BACKEND_ROWS,
    FALLBACK_ROW,
    BackendCoefficients,
    Coefficients,
    Device,
    Target,
    backend_table,
    is_fused_viable,
    row_names,
    stack_rows,
)
from rlxjax.gate._gate import IoFusionGate, io_fusion_gate_for_target

_DISCRETE = (Target.CUDA, Target.ROCM)
#: `a`, `b` and `S`.
_SCALES = {
    **dict.fromkeys((Target.METAL, Target.MLX), (0.22, 1.15, 7.5)),
    **dict.fromkeys(_DISCRETE, (0.15, 0.85, 0.43)),
    Target.WGPU: (0.12, 0.0, 2.2),
}


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StrategyCoefficients(Coefficients):
    """What the reference set by hand for each device; every field `[*batch]`.

    Attributes:
        log_batch_slope: `a`, host cost per `ln(batch / 512)` beyond 512.
        log2_batch_slope: `b`, host cost per `log2(batch / 2048)` beyond 2048.
        fused_scale: `S`, of the fused graph's cost.
        block_scale: of the fft-only graph's cost on a GPU device.
        block_peak_ns: top-k on the host, for each peak, on a GPU device.
        fused_floor_ns: least cost of a fused run of fewer than 512 rows on a GPU device.
        slack: by how much the fused cost may exceed the block cost.
        large_slack: the same from 8192 rows on.
        is_gpu: 1 for every device but cpu.
        is_fused_viable: 1 for every device but cpu and tpu.
        has_native_kernel: 1 where a fused run of 2048 rows or more saves its sync point.
        falls_back: 1 where the set has no row for the device.
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
    """Everything that strategy costs depend on besides the workload; leaves are indexed by device code.

    Attributes:
        host: the cpu row, scalars.
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
        ValueError: an unknown set, or a cpu that is none.

    Examples:
        >>> float(coefficient_set("portable").backend.dispatch_ns[0])
        300.0
    """
    return _coefficient_set(name, cpu, jnp.result_type(float))


@functools.cache
def _coefficient_set(name: str, cpu: str, dtype: np.dtype) -> CoefficientSet:
    if cpu not in ("cpu", "cpu-apple"):
        raise ValueError(f"cpu: expected 'cpu' or 'cpu-apple', got {cpu!r}")
    names = row_names(name) | {Device.CPU: cpu}
    tables = (
        backend_table(names),
        stack_rows([io_fusion_gate_for_target(device.target) for device in Device]),
        stack_rows([_strategy_coefficients(device, names[device]) for device in Device]),
    )
    # One set a precision: JAX remembers NumPy arguments by identity, whatever precision they meet later.
    return CoefficientSet(BACKEND_ROWS[cpu], *jax.tree.map(lambda leaf: leaf.astype(dtype), tables))


def _strategy_coefficients(device: Device, row_name: str) -> StrategyCoefficients:
    slope, slope2, scale = _SCALES.get(device.target, (0.0, 0.0, 1.0))
    return StrategyCoefficients(
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
        has_native_kernel=device.target in (*_DISCRETE, Target.WGPU),
        falls_back=row_name == FALLBACK_ROW,
    )
