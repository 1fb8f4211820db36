"""Strategy costs, the gate's breakdown and picks, of one workload or of tables: one formula, hard or relaxed."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import broadcast_shape, check_at_least, check_shapes, fields_of, is_traced
from rlxjax._counts import Columns, as_float, as_temperature, size_as_float
from rlxjax._numerics import Choices, dot, log_soft_step, log_softmin, soft_step, straight_through
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
from rlxjax.gate import Device, FusionBenefit, added_syncs, gate_rates, parts_ns, take_row
from rlxjax.welch._workload import FAST_SEGMENTS, ULTRA_SEGMENTS

from ._peak_graphs import FFT_WORKS, FUSED_WORKS, FUSION_BENEFITS, HOST_WORKS, columns_of, readback_bytes_saved, total
from ._reference import CoefficientSet, ReferenceStrategy, Workload


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
    """What gate and costs say of a table of runs of two segments, hard or smooth; every field `[*batch]`.

    Attributes:
        benefit: what fusing saves, in floats.
        score_ns: the gate's score of it.
        min_gain_ns: the gate's minimum gain.
        should_fuse_io: whether the score reaches that.
        should_fuse: whether the compute floor allows it too.
        compute_floor_ok: whether it does.
        fuse_probability: the smooth form of `should_fuse_io`.
        costs: of each strategy; infinite where it is not to be used, or, in the smooth form, all finite.
        log_fuse_probability: of the smooth form, the log-probability that gate and compute floor let the run fuse.
        log_keep_probability: of the contrary.
        available: of the smooth form, 1.0 or 0.0 for each strategy, `[*batch, 4]`: the impossible stays impossible.
    """

    benefit: FusionBenefit
    score_ns: Nanoseconds
    min_gain_ns: Nanoseconds
    should_fuse_io: Flag
    should_fuse: Flag
    compute_floor_ok: Flag
    fuse_probability: Probability
    costs: WelchPeaksCostEstimates
    log_fuse_probability: LogProbability | None = None
    log_keep_probability: LogProbability | None = None
    available: StrategyWeights | None = None

    def log_availability(self) -> StrategyLogWeights:
        """Return each strategy's log-availability in the smooth form: for rlx and learned, the log fuse probability."""
        fuse = jnp.asarray(self.log_fuse_probability)
        always = jnp.zeros_like(fuse)
        return jnp.where(jnp.asarray(self.available) > 0.5, jnp.stack([always, always, fuse, fuse], -1), -jnp.inf)


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
    return _costs(Workload.checked(device, batch, n_fft, k, *learned, coefficients))


def soft_estimate_welch_peaks_costs(*workload: Any, temperature_ns: RealLike, **options: Any) -> WelchPeaksEvaluation:
    """Return the smooth form of `estimate_welch_peaks_costs`, and of the gate, at a temperature in ns, `[*batch]`.

    Batch thresholds are relaxed in rows, with the temperature relative to the cost that they act on. Other arguments
    and errors as of `estimate_welch_peaks_costs`; `temperature_ns` is positive, a scalar or `[*batch]`.

    Examples:
        >>> soft = soft_estimate_welch_peaks_costs("cuda", 8192, 256, 16, temperature_ns=1e3)
        >>> int(soft.costs.pick_index())
        2
    """
    temperature_ns = as_temperature(temperature_ns)
    return _evaluate(Workload.checked(*workload, **options, temperature_ns=temperature_ns), temperature_ns, smooth=True)


def evaluate_welch_peaks(*workload: Any, temperature_ns: RealLike, **options: Any) -> WelchPeaksEvaluation:
    """Return the gate's breakdown, its probability and all strategy costs of a table in one program.

    The fields are those of `welch_peaks_fusion_gate_breakdown` and `estimate_welch_peaks_costs`. Counts
    come as floats, since exact ones would be made row by row on the host. `temperature_ns` is that of the
    probability, positive, a scalar or `[*batch]`. Other arguments and errors as of `estimate_welch_peaks_costs`.

    Examples:
        >>> table = evaluate_welch_peaks("cuda", jnp.array([64, 8192]), 256, 16, temperature_ns=1e6)
        >>> table.should_fuse.tolist(), table.costs.pick_index().tolist()
        ([False, True], [0, 2])
    """
    temperature_ns = as_temperature(temperature_ns)
    return _evaluate(Workload.checked(*workload, **options, temperature_ns=temperature_ns), temperature_ns)


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
    table = _evaluate(Workload.checked(device, batch, n_fft, k, coefficients=coefficients), 1.0)
    return WelchPeaksGateBreakdown(
        table.score_ns,
        table.min_gain_ns,
        readback_bytes_saved(batch, n_fft, k),
        jnp.asarray(table.benefit.sync_points_saved).astype(int),
        table.should_fuse_io,
        table.should_fuse,
        table.compute_floor_ok,
    )


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
    work = Workload.checked(device, batch, n_fft, k, *learned, coefficients)
    index = _legacy_index(work) if legacy else _costs(work).pick_index()
    return index if is_traced(index) or jnp.ndim(index) else list(ReferenceStrategy)[int(index)]


def soft_pick_welch_peaks_strategy(
    *workload: Any, temperature_ns: RealLike, straight_through_gradient: bool = False, **options: Any
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
    temperature_ns = as_temperature(temperature_ns)
    work = Workload.checked(*workload, **options, temperature_ns=temperature_ns)
    weights = _soft_pick(work, temperature_ns)
    if not straight_through_gradient:
        return weights
    hard = jax.nn.one_hot(_costs(work).pick_index(), len(ReferenceStrategy), dtype=weights.dtype)
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
    return jnp.exp(log_softmin(jnp.broadcast_to(stacked, (*rows, n)), temperature_ns, log_availability))


def fused_graph_ns(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    scale: RealLike = 1.0,
    coefficients: str | CoefficientSet = "arch",
    n_segments: RealLike = FAST_SEGMENTS,
) -> Nanoseconds:
    """Return the estimate of the fused graph in ns, `[*batch]`.

    Args:
        device: a name, or device codes.
        batch: rows of the signal.
        n_fft: samples of a segment.
        k: peaks of a row.
        scale: of the device's work; below 1 for a pruned learned FFT.
        coefficients: "arch", "portable", or a set of your own.
        n_segments: segments of a row.

    Raises:
        ValueError: an unknown device or set, or a size that cannot be.

    Examples:
        >>> print(fused_graph_ns("cpu", 1, 256, 16).round(2))
        8664.53
    """
    return _path_ns(_fused_ns, (device, batch, n_fft, k), coefficients, n_segments, scale)


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
    """Return the smooth form of `fused_graph_ns` in ns, `[*batch]`.

    Other arguments and errors as of `fused_graph_ns`; `temperature_ns` is positive, a scalar or `[*batch]`.

    Examples:
        >>> print(soft_fused_graph_ns("cpu", 1, 256, 16, temperature_ns=1e-3).round(2))
        8664.53
    """
    sizes = (device, batch, n_fft, k)
    return _path_ns(_fused_ns, sizes, coefficients, n_segments, scale, as_temperature(temperature_ns))


def block_graph_ns(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    coefficients: str | CoefficientSet = "arch",
    n_segments: RealLike = FAST_SEGMENTS,
) -> Nanoseconds:
    """Return the estimate of the block form (spectrum read back, top-k on the host) in ns, `[*batch]`.

    Arguments as of `fused_graph_ns`.

    Examples:
        >>> bool(block_graph_ns("cpu", 1, 256, 16) < fused_graph_ns("cpu", 1, 256, 16))
        True
    """
    return _path_ns(_block_ns, (device, batch, n_fft, k), coefficients, n_segments)


def host_path_ns(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    coefficients: str | CoefficientSet = "arch",
    n_segments: RealLike = FAST_SEGMENTS,
) -> Nanoseconds:
    """Return the estimate of the host path in ns, `[*batch]`: `adjust(host(params))`.

    Arguments as of `fused_graph_ns`.

    Examples:
        >>> print(host_path_ns("cpu", 1, 256, 16).round(1))
        4165.6
    """
    return _path_ns(_host_ns, (device, batch, n_fft, k), coefficients, n_segments)


def learned_scale(active_gates: RealLike, total_gates: RealLike) -> RealLike:
    """Return what a pruned learned FFT leaves of the fused graph's work: a share of at least 0.3."""
    return 0.30 + 0.70 * active_gates / total_gates


# --- The formulas, written once for hard and for relaxed choices ---------------------------------


def _host_ns(work: Workload, n_segments, scale, rules: Choices) -> Nanoseconds:
    columns = (work.batch * (n_segments + 1.0), *columns_of(work.batch, work.n_fft, work.k, n_segments))
    host, slopes = work.table.host, work.strategy
    ns = jnp.add(host.roundtrip_ns, dot(columns, parts_ns(HOST_WORKS, total(HOST_WORKS, columns), host, rules)))
    log_rows = jnp.log(jnp.maximum(work.batch, 1.0) / 512.0)
    gentle = rules.relu(log_rows, scale=ns)
    steep = rules.relu((log_rows - math.log(4.0)) * (1.0 / math.log(2.0)), scale=ns)  # log2(rows / 2048)
    return ns * (1.0 + slopes.log_batch_slope * gentle) * (1.0 + slopes.log2_batch_slope * steep)


def _fused_ns(work: Workload, n_segments, scale, rules: Choices) -> Nanoseconds:
    io_ns = _graph_ns(FUSED_WORKS, work, n_segments, rules)
    factor = work.strategy.fused_scale * rules.clip(scale, 0.25, 1.0, scale=io_ns)
    floor_ns = work.strategy.fused_floor_ns * work.strategy.is_gpu
    floor_ns = floor_ns * (1.0 - rules.at_least(work.batch, 512.0, scale=io_ns))
    # The clip's own relaxation would pull a scale of exactly 1 below the threshold: the hard factor decides.
    hard_factor = work.strategy.fused_scale * jnp.clip(scale, 0.25, 1.0)
    floor_ns = floor_ns + rules.at_least(hard_factor, 1.0, scale=io_ns) * io_ns
    return rules.maximum(io_ns * factor, floor_ns)


def _block_ns(work: Workload, n_segments, scale, rules: Choices) -> Nanoseconds:
    io_ns = _graph_ns(FFT_WORKS, work, n_segments, rules)
    on_gpu = io_ns * work.strategy.block_scale + work.strategy.block_peak_ns * (work.batch * work.k)
    return jnp.where(work.strategy.is_gpu >= 0.5, on_gpu, io_ns)


def _graph_ns(works, work: Workload, n_segments, rules: Choices) -> Nanoseconds:
    columns = (1.0, *columns_of(work.batch, work.n_fft, work.k, n_segments))

    def rates(set_: CoefficientSet) -> list[RealLike]:
        in_all, *each = parts_ns(works, total(works, columns), set_.backend, rules, set_.strategy.falls_back)
        return [set_.backend.roundtrip_ns + in_all, *each]

    return dot(columns[: len(works)], work.rates(rates, rules))


def _gate_score_ns(work: Workload, benefit: FusionBenefit, rules: Choices) -> Nanoseconds:
    """Return the gate's score of a benefit of two segments, by rates of the graphs, of a sample and of a peak."""

    def rates(set_: CoefficientSet) -> list[RealLike]:
        worth = gate_rates(set_.gate, benefit, rules)
        parts = [dot([*fields_of(part).values()], worth) for part in FUSION_BENEFITS]
        return [*parts, set_.gate.roundtrip_ns, set_.gate.host_thunk_penalty_ns]

    found, syncs = work.rates(rates, rules), benefit.sync_points_saved
    columns = columns_of(work.batch, work.n_fft, work.k, FAST_SEGMENTS)
    return dot((1.0, *columns, syncs, -added_syncs(syncs, found[-1], rules)), found)


@functools.partial(jax.jit, static_argnames="smooth")
def _evaluate(work: Workload, temperature_ns: RealLike, smooth: bool = False) -> WelchPeaksEvaluation:
    rules, strategy = Choices(temperature_ns if smooth else None), work.strategy
    fused_ns, block_ns = (f(work, FAST_SEGMENTS, 1.0, rules) for f in (_fused_ns, _block_ns))
    known = work.gates_known
    scale = learned_scale(work.active_gates, jnp.where(known, work.total_gates, 1.0))
    learned_ns = _fused_ns(work, FAST_SEGMENTS, jnp.where(known, scale, 1.0), rules)
    ultra_ns, fast_ns = (_host_ns(work, segments, 1.0, rules) for segments in (ULTRA_SEGMENTS, FAST_SEGMENTS))

    # From 2048 rows on a native kernel saves its sync point.
    native = strategy.has_native_kernel * rules.at_least(work.batch, 2048.0, scale=block_ns)
    benefit = total(FUSION_BENEFITS, (1.0, *columns_of(work.batch, work.n_fft, work.k, FAST_SEGMENTS)))
    benefit = dataclasses.replace(benefit, sync_points_saved=native - 1.0)
    score_ns = _gate_score_ns(work, benefit, rules)
    minimum_ns = jnp.asarray(take_row(work.table.gate.min_gain_ns, work.codes))
    many = rules.at_least(work.batch, 8192.0, scale=block_ns)
    slack = (1.0 - many) * strategy.slack + many * strategy.large_slack
    floor_margin_ns = block_ns * slack - fused_ns
    floor_applies = jnp.asarray(strategy.is_fused_viable * rules.at_least(work.batch, 2048.0, scale=block_ns))

    viable = strategy.is_fused_viable >= 0.5
    ultra_possible = ~((strategy.is_gpu >= 0.5) & (work.batch > 128))
    learned_possible = work.learned_usable & viable
    io, floor_ok = score_ns >= minimum_ns, (floor_applies < 0.5) | (floor_margin_ns >= 0.0)
    found = [benefit, score_ns, minimum_ns, io, io & floor_ok, floor_ok]
    found += [soft_step(score_ns - minimum_ns, temperature_ns)]
    if smooth:
        # P(floor ok) = 1 - applies * P(margin < 0), in logarithms.
        is_within = log_soft_step(floor_margin_ns, temperature_ns)
        log_floor_ok = jnp.logaddexp(_log_share(1.0 - floor_applies), _log_share(floor_applies) + is_within)
        log_fuse = log_soft_step(score_ns - minimum_ns, temperature_ns) + log_floor_ok
        found += [WelchPeaksCostEstimates(ultra_ns, fast_ns, fused_ns, learned_ns), log_fuse, _log_complement(log_fuse)]
    else:
        is_run = io & floor_ok & viable
        ultra_ns = jnp.where(ultra_possible, ultra_ns, jnp.inf)
        fused_ns = jnp.where(is_run, fused_ns, jnp.inf)
        learned_ns = jnp.where(is_run & learned_possible, learned_ns, jnp.inf)
        found += [WelchPeaksCostEstimates(ultra_ns, fast_ns, fused_ns, learned_ns)]
    leaves, structure = jax.tree.flatten(found)
    leaves = jnp.broadcast_arrays(*leaves)
    table = WelchPeaksEvaluation(*structure.unflatten(leaves))
    if not smooth:
        return table
    possible = jnp.broadcast_arrays(ultra_possible, True, viable, learned_possible, io)[:4]
    return dataclasses.replace(table, available=jnp.stack(possible, -1).astype(table.score_ns.dtype))


@jax.jit
def _costs(work: Workload) -> WelchPeaksCostEstimates:
    return _evaluate(work, 1.0).costs


@jax.jit
def _soft_pick(work: Workload, temperature_ns) -> StrategyWeights:
    soft = _evaluate(work, temperature_ns, smooth=True)
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
    others = {"n_segments": n_segments, "scale": scale, "temperature_ns": temperature_ns}
    work = Workload.checked(*sizes, coefficients=coefficients, **others)
    numbers = size_as_float(n_segments, "n_segments"), as_float(scale, "scale")
    return _path_program(formula, work, *numbers, temperature_ns)


@functools.partial(jax.jit, static_argnums=0)
def _path_program(formula: Callable[..., Nanoseconds], work: Workload, n_segments, scale, temperature_ns):
    return formula(work, n_segments, scale, Choices(temperature_ns))


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
