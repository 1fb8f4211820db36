"""Functions for users: strategy costs, the gate's decision to fuse, and the cheapest strategy."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import broadcast_shape, check_at_least, check_real, check_shapes, is_traced
from rlxjax._counts import Columns, as_float, as_temperature, size_as_float
from rlxjax._numerics import Choices, log_softmin, straight_through
from rlxjax._typing import Code, Nanoseconds, RealLike, StrategyWeights
from rlxjax.gate import Device
from rlxjax.welch._workload import FAST_SEGMENTS

from ._formulas import (
    WelchPeaksCostEstimates,
    WelchPeaksEvaluation,
    WelchPeaksGateBreakdown,
    Workload,
    block_price,
    evaluation,
    fused_price,
    hard_costs,
    host_price,
)
from ._reference import CoefficientSet, ReferenceStrategy, readback_bytes_saved


def estimate_welch_peaks_costs(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    learned_available: RealLike = False,
    learned_active_gates: RealLike | None = None,
    learned_total_gates: RealLike = 0,
    coefficients: str | CoefficientSet = "arch",
) -> WelchPeaksCostEstimates:
    """Return the cost of each strategy by the reference's formulas.

    Every argument except `coefficients` is a scalar or an array `[*batch]`, so a single call can compute a whole table.

    Args:
        device: a device name, or device codes.
        batch: number of rows of the signal, at least 0.
        n_fft: number of samples in a segment, an even number.
        k: number of peaks in a row, at least 1.
        learned_available: whether a learned FFT is available.
        learned_active_gates: number of the learned FFT's active gates; None or a negative number means unknown.
        learned_total_gates: number of all gates of the learned FFT.
        coefficients: "arch", "portable", or a `CoefficientSet`, by which you can differentiate the costs.

    Raises:
        ValueError: the device or coefficient set is unknown, `n_fft` is odd, or a size is too small.

    Examples:
        >>> costs = estimate_welch_peaks_costs("cuda", 8192, 256, 16)
        >>> int(costs.pick_index())
        2
    """
    learned = learned_available, learned_active_gates, learned_total_gates
    return hard_costs(Workload.checked(device, batch, n_fft, k, *learned, coefficients))


def soft_estimate_welch_peaks_costs(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    learned_available: RealLike = False,
    learned_active_gates: RealLike | None = None,
    learned_total_gates: RealLike = 0,
    coefficients: str | CoefficientSet = "arch",
    *,
    temperature_ns: RealLike,
) -> WelchPeaksEvaluation:
    """Return the smooth form of the costs of `estimate_welch_peaks_costs`, and of the gate's decision.

    `temperature_ns` is the temperature in ns, positive, a scalar or `[*batch]`. Thresholds on the number of rows become
    smooth functions of that number. Other arguments and errors are those of `estimate_welch_peaks_costs`.

    Examples:
        >>> soft = soft_estimate_welch_peaks_costs("cuda", 8192, 256, 16, temperature_ns=1e3)
        >>> int(soft.costs.pick_index())
        2
    """
    learned = learned_available, learned_active_gates, learned_total_gates
    return evaluation(Workload.checked(device, batch, n_fft, k, *learned, coefficients, temperature_ns), smooth=True)


def evaluate_welch_peaks(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    learned_available: RealLike = False,
    learned_active_gates: RealLike | None = None,
    learned_total_gates: RealLike = 0,
    coefficients: str | CoefficientSet = "arch",
    *,
    temperature_ns: RealLike,
) -> WelchPeaksEvaluation:
    """Return, for a table of workloads, the gate's decision with its reasons and probability, and the strategy costs.

    `temperature_ns` is the temperature of the probability in ns, positive, a scalar or `[*batch]`. Numbers of launches,
    syncs and bytes are floats. Other arguments and errors are those of `estimate_welch_peaks_costs`.

    Examples:
        >>> table = evaluate_welch_peaks("cuda", jnp.array([64, 8192]), 256, 16, temperature_ns=1e6)
        >>> table.should_fuse.tolist(), table.costs.pick_index().tolist()
        ([False, True], [0, 2])
    """
    learned = learned_available, learned_active_gates, learned_total_gates
    return evaluation(Workload.checked(device, batch, n_fft, k, *learned, coefficients, temperature_ns))


def welch_peaks_fusion_gate_breakdown(
    device: str | Code, batch: RealLike, n_fft: RealLike, k: RealLike, coefficients: str | CoefficientSet = "arch"
) -> WelchPeaksGateBreakdown:
    """Return whether the gate fuses a run of two segments, and the numbers that decide it, each `[*batch]`.

    The arguments and errors are those of `estimate_welch_peaks_costs`.

    Examples:
        >>> b = welch_peaks_fusion_gate_breakdown("cuda", 8192, 256, 16)
        >>> bool(b.should_fuse), b.readback_saved_bytes, int(b.sync_points_saved)
        (True, 32505856, 0)
    """
    table = evaluation(Workload.checked(device, batch, n_fft, k, coefficients=coefficients))
    saved = readback_bytes_saved(batch, n_fft, k), jnp.asarray(table.benefit.sync_points_saved).astype(int)
    decided = table.should_fuse_io, table.should_fuse, table.compute_floor_ok
    return WelchPeaksGateBreakdown(table.score_ns, table.min_gain_ns, *saved, *decided)


def pick_welch_peaks_strategy(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    learned_available: RealLike = False,
    learned_active_gates: RealLike | None = None,
    learned_total_gates: RealLike = 0,
    coefficients: str | CoefficientSet = "arch",
    legacy: bool = False,
) -> ReferenceStrategy | Code:
    """Return the cheapest strategy. Among equal costs, the order is ultra, fast, rlx, learned.

    The result is a `ReferenceStrategy` for scalar sizes, and an array of codes, `[*batch]`, for arrays and traced
    values. If `legacy` is true, thresholds on sizes pick the strategy, not costs. Other arguments and errors are those
    of `estimate_welch_peaks_costs`.

    Examples:
        >>> print(pick_welch_peaks_strategy("metal", 8192, 256, 16))
        rlx
    """
    learned = learned_available, learned_active_gates, learned_total_gates
    work = Workload.checked(device, batch, n_fft, k, *learned, coefficients)
    index = _legacy_index(work) if legacy else hard_costs(work).pick_index()
    return index if is_traced(index) or jnp.ndim(index) else list(ReferenceStrategy)[int(index)]


def soft_pick_welch_peaks_strategy(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    learned_available: RealLike = False,
    learned_active_gates: RealLike | None = None,
    learned_total_gates: RealLike = 0,
    coefficients: str | CoefficientSet = "arch",
    *,
    temperature_ns: RealLike,
    straight_through_gradient: bool = False,
) -> StrategyWeights:
    """Return the weight of each strategy, `[*batch, 4]`, in the order of `ReferenceStrategy`.

    The gate allows fusion with a probability `p`. The weights are `p` times the softmin of the costs of all available
    strategies, plus `1 - p` times the softmin of the costs of ultra and fast. Towards temperature 0, all
    weight goes to the pick of `pick_welch_peaks_strategy`. If `straight_through_gradient` is true, the result is a
    one-hot row with weight 1 for this pick, but with the gradient of the weights. `temperature_ns` is the temperature
    in ns, positive, a scalar or `[*batch]`. Other arguments and errors are those of `estimate_welch_peaks_costs`.

    Examples:
        >>> soft_pick_welch_peaks_strategy("metal", 8192, 256, 16, temperature_ns=1.0).round(3).tolist()
        [0.0, 0.0, 1.0, 0.0]
    """
    learned = learned_available, learned_active_gates, learned_total_gates
    work = Workload.checked(device, batch, n_fft, k, *learned, coefficients, temperature_ns)
    weights = _soft_pick(work)
    if not straight_through_gradient:
        return weights
    hard = jax.nn.one_hot(hard_costs(work).pick_index(), len(ReferenceStrategy), dtype=weights.dtype)
    return straight_through(jnp.broadcast_to(hard, weights.shape), weights)


def pick_weights(
    costs: WelchPeaksCostEstimates | Columns, *, temperature_ns: RealLike, log_availability: RealLike = 0.0
) -> jax.Array:
    """Return weights proportional to `exp(-cost / temperature) * availability`. The weights of a row sum to 1.

    Args:
        costs: `WelchPeaksCostEstimates`, or an array `[*batch, n]` of costs in ns. A strategy of infinite cost has
            weight 0, and no NaN in its gradient. If all costs of a row are infinite, all its weights are 0.
        temperature_ns: the temperature in ns, positive, a scalar or `[*batch]`.
        log_availability: logarithm of each strategy's availability, `[*batch, n]`; minus infinity rules a strategy out.

    Raises:
        ValueError: `costs` is a scalar, shapes do not agree, or the temperature is not positive.

    Examples:
        >>> pick_weights(jnp.array([1.0, jnp.inf, 1.0]), temperature_ns=5.0).tolist()
        [0.5, 0.0, 0.5]
    """
    temperature_ns = as_temperature(temperature_ns)
    stacked = costs.stack() if isinstance(costs, WelchPeaksCostEstimates) else costs
    check_real(costs=stacked, log_availability=log_availability)
    stacked = jnp.asarray(stacked)
    if stacked.ndim == 0:
        raise ValueError(f"costs: expected an array whose last axis is the strategies, got the scalar {costs}")
    if not jnp.issubdtype(stacked.dtype, jnp.floating):
        stacked = stacked.astype(jnp.result_type(float))
    check_shapes(costs=stacked, log_availability=log_availability)
    *rows, n = broadcast_shape(stacked.shape, np.shape(log_availability))
    check_shapes(**{"rows of costs": jnp.broadcast_to(0.0, rows)}, temperature_ns=temperature_ns)
    rows = broadcast_shape(rows, np.shape(temperature_ns))
    return jnp.exp(log_softmin(jnp.broadcast_to(stacked, (*rows, n)), temperature_ns, log_availability))


def fused_graph_ns(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    scale: RealLike = 1.0,
    coefficients: str | CoefficientSet = "arch",
    n_segments: RealLike = FAST_SEGMENTS,
    *,
    temperature_ns: RealLike | None = None,
) -> Nanoseconds:
    """Return the cost of the fused graph, in which the device computes everything, in ns, `[*batch]`.

    Args:
        device: a device name, or device codes.
        batch: number of rows of the signal.
        n_fft: number of samples in a segment.
        k: number of peaks in a row.
        scale: factor of the device's work; a pruned learned FFT has a factor below 1.
        coefficients: "arch", "portable", or a `CoefficientSet`.
        n_segments: number of segments in a row.
        temperature_ns: temperature of the smooth form in ns, positive, a scalar or `[*batch]`; None means not smooth.

    Raises:
        ValueError: the device or coefficient set is unknown, or a size is invalid.

    Examples:
        >>> print(fused_graph_ns("cpu", 1, 256, 16).round(2))
        8664.53
    """
    return _path_ns(fused_price, (device, batch, n_fft, k), coefficients, n_segments, scale, temperature_ns)


def soft_fused_graph_ns(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    scale: RealLike = 1.0,
    coefficients: str | CoefficientSet = "arch",
    n_segments: RealLike = FAST_SEGMENTS,
    *,
    temperature_ns: RealLike,
) -> Nanoseconds:
    """Return the smooth form of `fused_graph_ns` in ns, `[*batch]`, with the same arguments and errors.

    Examples:
        >>> print(soft_fused_graph_ns("cpu", 1, 256, 16, temperature_ns=1e-3).round(2))
        8664.53
    """
    sizes = device, batch, n_fft, k
    return fused_graph_ns(*sizes, scale, coefficients, n_segments, temperature_ns=temperature_ns)


def block_graph_ns(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    coefficients: str | CoefficientSet = "arch",
    n_segments: RealLike = FAST_SEGMENTS,
) -> Nanoseconds:
    """Return the cost in ns, `[*batch]`, if the host reads the spectrum back and selects the peaks.

    The arguments are those of `fused_graph_ns`.

    Examples:
        >>> bool(block_graph_ns("cpu", 1, 256, 16) < fused_graph_ns("cpu", 1, 256, 16))
        True
    """
    return _path_ns(block_price, (device, batch, n_fft, k), coefficients, n_segments)


def host_path_ns(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    coefficients: str | CoefficientSet = "arch",
    n_segments: RealLike = FAST_SEGMENTS,
) -> Nanoseconds:
    """Return the cost in ns, `[*batch]`, if the host computes everything.

    The arguments are those of `fused_graph_ns`.

    Examples:
        >>> print(host_path_ns("cpu", 1, 256, 16).round(1))
        4165.6
    """
    return _path_ns(host_price, (device, batch, n_fft, k), coefficients, n_segments)


@jax.jit
def _soft_pick(work: Workload) -> StrategyWeights:
    temperature_ns: Any = work.temperature_ns
    soft = evaluation(work, smooth=True)
    costs = soft.costs.stack()
    anything = jnp.where(jnp.asarray(soft.available) > 0.5, 0.0, -jnp.inf)
    needs_fusion = jnp.arange(len(ReferenceStrategy)) >= ReferenceStrategy.RLX.code
    unfused = jnp.where(jnp.broadcast_to(needs_fusion, costs.shape), -jnp.inf, anything)
    fuse, keep = (
        jnp.exp(jnp.asarray(log_p)[..., None]) * jnp.exp(log_softmin(costs, temperature_ns, availability))
        for log_p, availability in ((soft.log_fuse_probability, anything), (soft.log_keep_probability, unfused))
    )
    return fuse + keep


@jax.jit
def _legacy_index(work: Workload) -> Code:
    is_gpu = jnp.asarray(work.codes) != Device.CPU.code
    large = is_gpu & (work.batch >= 8192)
    ultra = work.batch <= jnp.where(is_gpu, 128, 256)
    choice = jnp.where(ultra, ReferenceStrategy.ULTRA.code, ReferenceStrategy.FAST.code)
    choice = jnp.where(large, ReferenceStrategy.RLX.code, choice)
    return jnp.where(large & work.learned_usable, ReferenceStrategy.LEARNED.code, choice)


def _path_ns(formula, sizes: tuple, coefficients, n_segments, scale: RealLike = 1.0, temperature_ns=None):
    check_at_least(scale, "scale", what="number")
    options = {"coefficients": coefficients, "temperature_ns": temperature_ns}
    work = Workload.checked(*sizes, **options, n_segments=n_segments, scale=scale)
    return _path_program(formula, work, size_as_float(n_segments, "n_segments"), as_float(scale, "scale"))


@functools.partial(jax.jit, static_argnums=0)
def _path_program(formula: Callable[..., Nanoseconds], work: Workload, n_segments, scale) -> Nanoseconds:
    return formula(work, n_segments, scale, Choices(work.temperature_ns))
