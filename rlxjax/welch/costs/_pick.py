"""The pick among strategies: hard, by softmin, and by the reference's older thresholds."""

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import broadcast_shape, check_shapes, is_traced
from rlxjax._counts import Columns, as_temperature
from rlxjax._numerics import log_softmin, straight_through
from rlxjax._typing import Code, RealLike, StrategyWeights
from rlxjax.gate._devices import Device

from ._coefficients import CoefficientSet
from ._costs import WelchPeaksCostEstimates, hard_costs, soft_costs
from ._formulas import Learned
from ._inputs import strategy_inputs
from ._strategy import ReferenceStrategy


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
    """Return the cheapest strategy, the earlier of ultra, fast, rlx, learned on ties.

    A scalar workload on the host gives a `ReferenceStrategy`; arrays and traced values give codes, `[*batch]`.
    With `legacy`, the strategy is picked by thresholds instead of costs. Other arguments and errors as of
    `estimate_welch_peaks_costs`.

    Examples:
        >>> print(pick_welch_peaks_strategy("metal", 8192, 256, 16))
        rlx
    """
    learned = learned_available, learned_active_gates, learned_total_gates
    inputs = strategy_inputs(device, batch, n_fft, k, *learned, coefficients)
    index = _legacy_index(*inputs) if legacy else hard_costs(*inputs).pick_index()
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
    """Return the weight of each strategy, `[*batch, 4]` in the order of `ReferenceStrategy`.

    The law of total probability over the fuse decision: with probability `p` the run may fuse and the
    weights are the softmin over all available strategies; otherwise over those that need no fusion. Its
    limit is the hard pick everywhere. The single softmin with `log(p)` as log-availability is
    `pick_weights(costs, log_availability=...)`; its limit differs where a run that may not fuse would
    be cheaper by more than its gate misses.

    With `straight_through_gradient`, the hard pick is returned as a one-hot row, with this gradient; `temperature_ns`
    is positive, a scalar or `[*batch]`. Other arguments and errors as of `estimate_welch_peaks_costs`.

    Examples:
        >>> soft_pick_welch_peaks_strategy("metal", 8192, 256, 16, temperature_ns=1.0).round(3).tolist()
        [0.0, 0.0, 1.0, 0.0]
    """
    learned = learned_available, learned_active_gates, learned_total_gates
    temperature_ns = as_temperature(temperature_ns)
    inputs = strategy_inputs(device, batch, n_fft, k, *learned, coefficients, temperature_ns)
    weights = _soft_pick(*inputs, temperature_ns)
    if not straight_through_gradient:
        return weights
    hard = jax.nn.one_hot(hard_costs(*inputs).pick_index(), len(ReferenceStrategy), dtype=weights.dtype)
    return straight_through(jnp.broadcast_to(hard, weights.shape), weights)


def pick_weights(
    costs: WelchPeaksCostEstimates | Columns,
    *,
    temperature_ns: RealLike,
    log_availability: RealLike = 0.0,
) -> jax.Array:
    """Return the softmin of costs over the last axis: `exp(-cost / temperature) * availability`.

    Args:
        costs: estimates, or an array `[*batch, n]` of costs in ns. An infinite cost has weight 0, and
            neither its value nor its gradient is NaN; if all are infinite, all weights are 0.
        temperature_ns: scalar or `[*batch]`.
        log_availability: `[*batch, n]`; minus infinity is impossible.

    Raises:
        ValueError: costs without an axis, shapes that do not agree, or a temperature that is not positive.

    Examples:
        >>> pick_weights(jnp.array([1.0, jnp.inf, 1.0]), temperature_ns=5.0).tolist()
        [0.5, 0.0, 0.5]
    """
    temperature_ns = as_temperature(temperature_ns)
    stacked = costs.stack() if isinstance(costs, WelchPeaksCostEstimates) else jnp.asarray(costs)
    if stacked.ndim == 0:
        raise ValueError(f"costs: expected at least one axis, that of the strategies, got {costs}")
    if not jnp.issubdtype(stacked.dtype, jnp.floating):
        stacked = stacked.astype(jnp.result_type(float))
    check_shapes(costs=stacked, log_availability=log_availability)
    *rows, n = broadcast_shape(stacked.shape, np.shape(log_availability))
    check_shapes(**{"rows of costs": jnp.broadcast_to(0.0, rows)}, temperature_ns=temperature_ns)
    rows = broadcast_shape(rows, np.shape(temperature_ns))
    stacked = jnp.broadcast_to(stacked, (*rows, n))
    return jnp.exp(log_softmin(stacked, temperature_ns, log_availability))


@jax.jit
def _soft_pick(codes, set_, batch, n_fft, k, learned: Learned, temperature_ns) -> StrategyWeights:
    soft = soft_costs(codes, set_, batch, n_fft, k, learned, temperature_ns)
    costs = soft.costs.stack()
    anything = jnp.where(soft.available > 0.5, 0.0, -jnp.inf)
    needs_fusion = jnp.arange(len(ReferenceStrategy)) >= ReferenceStrategy.RLX.code
    unfused = jnp.where(jnp.broadcast_to(needs_fusion, costs.shape), -jnp.inf, anything)
    fuse, keep = (
        jnp.exp(log_p[..., None]) * jnp.exp(log_softmin(costs, temperature_ns, availability))
        for log_p, availability in (
            (soft.log_fuse_probability, anything),
            (soft.log_keep_probability, unfused),
        )
    )
    return fuse + keep


@jax.jit
def _legacy_index(codes, set_, batch, n_fft, k, learned: Learned):
    del set_, n_fft, k
    is_gpu = jnp.asarray(codes) != Device.CPU.code
    large = is_gpu & (batch >= 8192)
    ultra = batch <= jnp.where(is_gpu, 128, 256)
    choice = jnp.where(ultra, ReferenceStrategy.ULTRA.code, ReferenceStrategy.FAST.code)
    choice = jnp.where(large, ReferenceStrategy.RLX.code, choice)
    return jnp.where(large & learned.usable, ReferenceStrategy.LEARNED.code, choice)
