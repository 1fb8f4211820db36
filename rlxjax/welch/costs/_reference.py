"""The reference's strategies, its coefficients of them as one pytree, and the workloads that it prices, checked."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import check_at_least, check_not_nan, check_shapes, is_traced
from rlxjax._counts import size_as_float
from rlxjax._numerics import Choices
from rlxjax._typing import Code, Flag, RealLike
from rlxjax._values import FrozenDict, by_value
from rlxjax.gate import (
    BACKEND_ROWS,
    BackendCoefficients,
    Coefficients,
    Device,
    FusionTarget,
    IoFusionGate,
    NamedCode,
    backend_coefficients,
    io_fusion_gate_for_target,
    is_fused_viable,
    normalised,
    stack_rows,
    take_row,
    without_provenance,
)

_DISCRETE = (FusionTarget.CUDA, FusionTarget.ROCM)
#: `a`, `b` and `S`.
_SCALES = {
    **dict.fromkeys((FusionTarget.METAL, FusionTarget.MLX), (0.22, 1.15, 7.5)),
    **dict.fromkeys(_DISCRETE, (0.15, 0.85, 0.43)),
    FusionTarget.WGPU: (0.12, 0.0, 2.2),
}
#: Least value of each size of a workload.
_LEAST_SIZES = {"batch": 0, "n_fft": 2, "k": 1, "n_segments": 1}


class ReferenceStrategy(NamedCode):
    """The strategies of the reference, in the order in which ties are resolved."""

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
            ("fast", "streaming", "fast-streaming", "fast-streaming-rustfft", "rustfft", "2seg"),
            ReferenceStrategy.FAST,
        ),
        **dict.fromkeys(("rlx", "rlx-compiled", "compiled", "gpu", "fused"), ReferenceStrategy.RLX),
        **dict.fromkeys(("learned", "learned-compiled"), ReferenceStrategy.LEARNED),
    }
)


def parse_welch_peaks_strategy(name: str) -> str:
    """Return the strategy that a name means, or "auto". Case and `-`/`_` do not matter.

    Args:
        name: of a strategy, or one of its aliases.

    Raises:
        ValueError: a name that means none.

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
    """Make one set a precision: JAX remembers NumPy arguments by identity, whatever precision they meet later."""
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Workload:
    """Runs on devices, and the coefficients of all devices, as compiled programs take them: floats, `[*batch]` each."""

    codes: Code
    table: CoefficientSet
    batch: RealLike
    n_fft: RealLike
    k: RealLike
    learned_available: RealLike
    active_gates: RealLike
    total_gates: RealLike

    @classmethod
    def checked(
        cls,
        device: str | Code,
        batch: RealLike,
        n_fft: RealLike,
        k: RealLike,
        learned_available: RealLike = False,
        learned_active_gates: RealLike | None = None,
        learned_total_gates: RealLike = 0,
        coefficients: str | CoefficientSet = "arch",
        **others: RealLike | None,
    ) -> "Workload":
        """Return what a caller gives as floats; the shapes of all, `others` among them, have to agree."""
        cpu = "cpu"
        if isinstance(device, str) and normalised(device) == "cpu-apple":
            device, cpu = Device.CPU, "cpu-apple"
        if isinstance(coefficients, str):
            coefficients = coefficient_set(coefficients, cpu)
        if not isinstance(coefficients, CoefficientSet):
            raise ValueError(f"coefficients: expected a name or a CoefficientSet, got {coefficients!r}")
        active_gates = -1.0 if learned_active_gates is None else learned_active_gates
        check_not_nan(active_gates, "learned_active_gates")
        check_at_least(learned_total_gates, "learned_total_gates")
        sizes = {"batch": batch, "n_fft": n_fft, "k": k}
        for name, value in (sizes | others).items():
            if name in _LEAST_SIZES:
                check_at_least(value, name, _LEAST_SIZES[name], "size")
        if not is_traced(n_fft) and not _all_even(np.asarray(n_fft)):
            raise ValueError(f"n_fft: expected an even number, got {n_fft}")
        sizes |= {"learned_available": learned_available, "learned_active_gates": active_gates}
        sizes |= {"learned_total_gates": learned_total_gates}
        codes = Device.codes(device)
        check_shapes(device=codes, **sizes, **others)
        rows = {name: without_provenance(getattr(coefficients, name)) for name in ("host", "backend")}
        table = dataclasses.replace(coefficients, **rows)
        return cls(codes, table, *(size_as_float(size, name) for name, size in sizes.items()))

    @functools.cached_property
    def strategy(self) -> StrategyCoefficients:
        """The strategies' coefficients of each run's device."""
        return take_row(self.table.strategy, self.codes)

    def rates(self, of: Callable[[CoefficientSet], list[RealLike]], rules: Choices) -> list[RealLike]:
        """Return rates of each run's device: with hard choices, those of all devices before the selection."""
        if rules.temperature_ns is None:
            return take_row(of(self.table), self.codes)
        parts = {name: getattr(self.table, name) for name in ("backend", "gate", "strategy")}
        return of(dataclasses.replace(self.table, **take_row(parts, self.codes)))

    @property
    def gates_known(self) -> Flag:
        """Whether the gates of the learned FFT are known: unknown active ones are negative."""
        return (jnp.asarray(self.active_gates) >= 0) & (jnp.asarray(self.total_gates) > 0)

    @property
    def learned_usable(self) -> Flag:
        """Whether a learned FFT is available with fewer than a quarter of its gates on."""
        sparse = jnp.asarray(4.0 * self.active_gates < self.total_gates)
        return self.gates_known & sparse & (jnp.asarray(self.learned_available) >= 0.5)


def _all_even(numbers: np.ndarray) -> bool:
    if numbers.dtype.kind != "f":
        return not np.any(numbers % 2)
    halves = 0.5 * numbers  # a remainder of floats takes ten times as long
    with np.errstate(invalid="ignore"):
        return bool(np.all(halves - np.floor(halves) == 0))
