"""Strategy costs and the gate's breakdown, of one workload or of tables."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlxjax._checks import check_at_least, check_not_nan
from rlxjax._counts import as_float, as_temperature
from rlxjax._numerics import Choices, log_soft_step, soft_step
from rlxjax._typing import (
    Code,
    Count,
    Flag,
    LogProbability,
    Nanoseconds,
    Probability,
    RealLike,
    StrategyCosts,
    StrategyLogWeights,
    StrategyWeights,
)
from rlxjax._values import by_value
from rlxjax.gate._gate import FusionBenefit

from ._coefficients import CoefficientSet
from ._formulas import Learned, gather, min_gain_ns, strategy_terms
from ._graphs import readback_bytes_saved
from ._inputs import strategy_inputs


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WelchPeaksCostEstimates:
    """Cost of each strategy in ns, `[*batch]`; infinite where the strategy is not to be used."""

    ultra_ns: Nanoseconds
    fast_ns: Nanoseconds
    rlx_ns: Nanoseconds
    learned_ns: Nanoseconds

    def stack(self) -> StrategyCosts:
        """Return the four costs along a new last axis, in the order of `ReferenceStrategy`."""
        fields = (self.ultra_ns, self.fast_ns, self.rlx_ns, self.learned_ns)
        return jnp.stack(jnp.broadcast_arrays(*fields), -1)

    def pick_index(self) -> Code:
        """Return the code of the cheapest strategy, the earlier of equals, `[*batch]`."""
        return jnp.argmin(self.stack(), -1)


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SoftWelchPeaksCosts:
    """Smooth form of the estimates, `[*batch]`: finite costs, and what stands for the infinities.

    Attributes:
        costs: the relaxed costs, all finite.
        log_fuse_probability: log-probability that the gate and the compute floor let the run fuse.
        log_keep_probability: of the contrary.
        available: 1.0 or 0.0 for each strategy, `[*batch, 4]`: what is impossible stays impossible.
    """

    costs: WelchPeaksCostEstimates
    log_fuse_probability: LogProbability
    log_keep_probability: LogProbability
    available: StrategyWeights

    def log_availability(self) -> StrategyLogWeights:
        """Return each strategy's log-availability: for rlx and learned, the log fuse probability."""
        fuse, always = self.log_fuse_probability, jnp.zeros_like(self.log_fuse_probability)
        return jnp.where(self.available > 0.5, jnp.stack([always, always, fuse, fuse], -1), -jnp.inf)


@by_value
class WelchPeaksGateBreakdown(NamedTuple):
    """Why a run fuses or not; every field `[*batch]`."""

    score_ns: Nanoseconds
    min_gain_ns: Nanoseconds
    readback_saved_bytes: Count
    sync_points_saved: Count
    should_fuse_io: Flag
    should_fuse: Flag
    compute_floor_ok: Flag


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WelchPeaksEvaluation:
    """What gate and costs say of a table of runs of two segments; every field `[*batch]`.

    Attributes:
        benefit: what fusing saves, in floats.
        score_ns: the gate's score of it.
        min_gain_ns: the gate's minimum gain.
        should_fuse_io: whether the score reaches that.
        should_fuse: whether the compute floor allows it too.
        compute_floor_ok: whether it does.
        fuse_probability: the smooth form of `should_fuse_io`.
        costs: of each strategy, infinite where it is not to be used.
    """

    benefit: FusionBenefit
    score_ns: Nanoseconds
    min_gain_ns: Nanoseconds
    should_fuse_io: Flag
    should_fuse: Flag
    compute_floor_ok: Flag
    fuse_probability: Probability
    costs: WelchPeaksCostEstimates


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
    """Return what each strategy costs, by the reference's formulas.

    Every argument but `coefficients` is a scalar or an array `[*batch]`; a mixed table is one call.

    Args:
        device: a name, or device codes.
        batch: rows of the signal.
        n_fft: samples of a segment.
        k: peaks of a row.
        learned_available: whether a learned FFT is at hand.
        learned_active_gates: its gates that are on; None, or a negative number, is unknown.
        learned_total_gates: all its gates.
        coefficients: "arch", "portable", or a set of your own (differentiable as a whole).

    Raises:
        ValueError: an unknown device or set, an odd n_fft, a k or n_fft that is too small, a negative
            batch.

    Examples:
        >>> costs = estimate_welch_peaks_costs("cuda", 8192, 256, 16)
        >>> int(costs.pick_index())
        2
    """
    learned = learned_available, learned_active_gates, learned_total_gates
    return hard_costs(*strategy_inputs(device, batch, n_fft, k, *learned, coefficients))


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
) -> SoftWelchPeaksCosts:
    """Return the smooth form of `estimate_welch_peaks_costs` at a temperature in ns, `[*batch]`.

    Batch thresholds are relaxed in rows, with the temperature relative to the cost that they act on. Other arguments
    and errors as of `estimate_welch_peaks_costs`; `temperature_ns` is positive, a scalar or `[*batch]`.

    Examples:
        >>> soft = soft_estimate_welch_peaks_costs("cuda", 8192, 256, 16, temperature_ns=1e3)
        >>> int(soft.costs.pick_index())
        2
    """
    learned = learned_available, learned_active_gates, learned_total_gates
    temperature_ns = as_temperature(temperature_ns)
    inputs = strategy_inputs(device, batch, n_fft, k, *learned, coefficients, temperature_ns)
    return soft_costs(*inputs, temperature_ns)


def welch_peaks_fusion_gate_breakdown(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    coefficients: str | CoefficientSet = "arch",
) -> WelchPeaksGateBreakdown:
    """Return why a run of two segments fuses or not, every field `[*batch]`.

    Arguments and errors as of `estimate_welch_peaks_costs`.

    Examples:
        >>> b = welch_peaks_fusion_gate_breakdown("cuda", 8192, 256, 16)
        >>> bool(b.should_fuse), b.readback_saved_bytes, int(b.sync_points_saved)
        (True, 32505856, 0)
    """
    inputs = strategy_inputs(device, batch, n_fft, k, False, None, 0, coefficients)
    table = _evaluate(*inputs, 1.0)
    return WelchPeaksGateBreakdown(
        table.score_ns,
        table.min_gain_ns,
        readback_bytes_saved(batch, n_fft, k),
        jnp.asarray(table.benefit.sync_points_saved).astype(int),
        table.should_fuse_io,
        table.should_fuse,
        table.compute_floor_ok,
    )


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
    """Return the gate's breakdown, its probability and all strategy costs of a table in one program.

    The fields are those of `welch_peaks_fusion_gate_breakdown` and `estimate_welch_peaks_costs`. Counts
    come as floats, since exact ones would be made row by row on the host. `temperature_ns` is that of the
    probability, positive, a scalar or `[*batch]`. Other arguments and errors as of `estimate_welch_peaks_costs`.

    Examples:
        >>> table = evaluate_welch_peaks("cuda", jnp.array([64, 8192]), 256, 16, temperature_ns=1e6)
        >>> table.should_fuse.tolist(), table.costs.pick_index().tolist()
        ([False, True], [0, 2])
    """
    learned = learned_available, learned_active_gates, learned_total_gates
    temperature_ns = as_temperature(temperature_ns)
    inputs = strategy_inputs(device, batch, n_fft, k, *learned, coefficients, temperature_ns)
    return _evaluate(*inputs, temperature_ns)


def algorithm_bandwidth_gbps(useful_bytes: RealLike, time_ns: RealLike) -> jax.Array:
    """Return useful bytes over time in GB/s, `[*batch]`; 0 where the time is not positive.

    Args:
        useful_bytes: as `useful_bytes_touched` counts them, a scalar or `[*batch]`.
        time_ns: what the run took, a scalar or `[*batch]`.

    Raises:
        ValueError: negative or NaN bytes, or a time that is NaN.

    Examples:
        >>> print(algorithm_bandwidth_gbps(2176, 1000.0))
        2.176
    """
    useful_bytes, time_ns = as_float(useful_bytes, "useful_bytes"), as_float(time_ns, "time_ns")
    check_at_least(useful_bytes, "useful_bytes")
    check_not_nan(time_ns, "time_ns")
    positive = jnp.asarray(time_ns) > 0
    return jnp.where(positive, useful_bytes / jnp.where(positive, time_ns, 1.0), 0.0)


@jax.jit
def hard_costs(codes, set_, batch, n_fft, k, learned: Learned) -> WelchPeaksCostEstimates:
    return _evaluate(codes, set_, batch, n_fft, k, learned, 1.0).costs


@jax.jit
def _evaluate(codes, set_, batch, n_fft, k, learned: Learned, temperature_ns) -> WelchPeaksEvaluation:
    row = gather(set_, codes)
    terms = strategy_terms(row, batch, n_fft, k, learned, Choices())
    score_ns, minimum_ns = terms.score_ns, min_gain_ns(row)
    io, floor_ok = score_ns >= minimum_ns, (jnp.asarray(terms.floor_applies) < 0.5) | (terms.floor_margin_ns >= 0.0)
    should_fuse = io & floor_ok
    is_run = should_fuse & (row.strategy.is_fused_viable >= 0.5)
    costs = WelchPeaksCostEstimates(
        jnp.where(terms.ultra_possible, terms.ultra_ns, jnp.inf),
        terms.fast_ns,
        jnp.where(is_run, terms.fused_ns, jnp.inf),
        jnp.where(is_run & terms.learned_possible, terms.learned_ns, jnp.inf),
    )
    probability = soft_step(score_ns - minimum_ns, temperature_ns)
    found = WelchPeaksEvaluation(terms.benefit, score_ns, minimum_ns, io, should_fuse, floor_ok, probability, costs)
    leaves, structure = jax.tree.flatten(found)
    return structure.unflatten(jnp.broadcast_arrays(*leaves))


@jax.jit
def soft_costs(codes, set_, batch, n_fft, k, learned: Learned, temperature_ns) -> SoftWelchPeaksCosts:
    row = gather(set_, codes)
    terms = strategy_terms(row, batch, n_fft, k, learned, Choices(temperature_ns))
    viable = row.strategy.is_fused_viable >= 0.5
    io_margin = terms.score_ns - min_gain_ns(row)
    # P(floor ok) = 1 - applies * P(margin < 0), in logarithms.
    applies = jnp.asarray(terms.floor_applies)
    is_within = log_soft_step(terms.floor_margin_ns, temperature_ns)
    log_floor_ok = jnp.logaddexp(_log_share(1.0 - applies), _log_share(applies) + is_within)
    log_fuse = log_soft_step(io_margin, temperature_ns) + log_floor_ok
    costs = (terms.ultra_ns, terms.fast_ns, terms.fused_ns, terms.learned_ns, log_fuse)
    *costs, log_fuse = jnp.broadcast_arrays(*costs)
    possible = (terms.ultra_possible, True, viable, terms.learned_possible)
    available = jnp.stack([jnp.broadcast_to(p, log_fuse.shape) for p in possible], -1).astype(log_fuse.dtype)
    return SoftWelchPeaksCosts(WelchPeaksCostEstimates(*costs), log_fuse, _log_complement(log_fuse), available)


def _log_share(share: jax.Array) -> LogProbability:
    """Return the logarithm of a share; minus infinity at 0, where it has no derivative that is not finite."""
    positive = share > 0.0
    return jnp.where(positive, jnp.log(jnp.where(positive, share, 1.0)), -jnp.inf)


def _log_complement(log_p: LogProbability) -> LogProbability:
    """Return `log(1 - exp(log_p))`; minus infinity at 0, accurate at both ends."""
    log_p = jnp.minimum(log_p, -jnp.finfo(log_p.dtype).tiny)
    near_one = log_p > -math.log(2.0)
    return jnp.where(
        near_one,
        jnp.log(-jnp.expm1(jnp.where(near_one, log_p, -1.0))),
        jnp.log1p(-jnp.exp(jnp.where(near_one, -1.0, log_p))),
    )
