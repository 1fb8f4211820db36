"""The formulas of the strategy costs, written once for hard and for relaxed choices (SPEC, section 5)."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlxjax._cost import Rates, float_counts, profile_cost_ns, rates_of, work_cost_ns
from rlxjax._device import BackendCoefficients, take_row
from rlxjax._gate import FusionBenefit, IoFusionGate
from rlxjax._gate_formulas import GateRates, gate_rates, gate_score_ns
from rlxjax._numerics import Exact, Smooth
from rlxjax._slopes import by_slopes
from rlxjax._typing import Decision, Nanoseconds, RealLike

from ._coefficients import CoefficientSet, StrategyCoefficients
from ._graphs import host_profile, welch_graph_work
from ._params import FAST_SEGMENTS, ULTRA_SEGMENTS

ULTRA_MAX_GPU_BATCH = 128
LEARNED_BASE, LEARNED_PER_GATE = 0.30, 0.70
MIN_SCALE, MAX_SCALE = 0.25, 1.0


class Learned(NamedTuple):
    """What is known of a learned FFT; unknown active gates are negative."""

    available: RealLike
    active_gates: RealLike
    total_gates: RealLike

    @property
    def known(self) -> Decision:
        return (jnp.asarray(self.active_gates) >= 0) & (jnp.asarray(self.total_gates) > 0)

    @property
    def usable(self) -> Decision:
        """Available, and with fewer than a quarter of its gates on."""
        sparse = jnp.asarray(4.0 * self.active_gates < self.total_gates)
        return self.known & sparse & (jnp.asarray(self.available) >= 0.5)

    @property
    def scale(self) -> RealLike:
        """What is left of the fused graph's work; all where the gates are unknown."""
        total = jnp.where(self.known, self.total_gates, 1.0)
        return jnp.where(self.known, learned_scale(self.active_gates, total), 1.0)


def learned_scale(active_gates: RealLike, total_gates: RealLike) -> RealLike:
    """Return what a pruned learned FFT leaves of the fused graph's work (SPEC, section 5)."""
    return LEARNED_BASE + LEARNED_PER_GATE * active_gates / total_gates


class Row(NamedTuple):
    """The coefficients of one device, and the host's; with hard choices, the rates that they make."""

    host: BackendCoefficients | Rates
    backend: BackendCoefficients | Rates
    gate: IoFusionGate | GateRates
    strategy: StrategyCoefficients


class Terms(NamedTuple):
    ultra_ns: Nanoseconds
    fast_ns: Nanoseconds
    fused_ns: Nanoseconds
    learned_ns: Nanoseconds
    block_ns: Nanoseconds
    score_ns: Nanoseconds
    floor_margin_ns: Nanoseconds
    floor_applies: RealLike
    learned_possible: Decision
    ultra_possible: Decision


def gather(set_: CoefficientSet, codes, rules: Exact | Smooth) -> Row:
    host, backend, gate = set_.host, set_.backend, set_.gate
    if isinstance(rules, Exact):
        host, backend, gate = rates_of(host), rates_of(backend), gate_rates(gate)
    return Row(host, take_row(backend, codes), take_row(gate, codes), take_row(set_.strategy, codes))


def host_ns(row: Row, batch, n_fft, k, n_segments, rules) -> Nanoseconds:
    slopes = row.strategy.log_batch_slope, row.strategy.log2_batch_slope
    cost_ns = _with_slopes(_host_ns, rules)
    return cost_ns(row.host, slopes, batch, n_fft, k, n_segments)


def _with_slopes(f, rules):
    """Return a formula with its rules; of hard choices the derivative is one pass over the rows."""
    f = functools.partial(f, rules=rules)
    return by_slopes(f) if isinstance(rules, Exact) else f


def _host_ns(host: BackendCoefficients | Rates, slopes, batch, n_fft, k, n_segments, *, rules) -> Nanoseconds:
    profile = float_counts(host_profile(batch, n_fft, k, n_segments))
    quarter_traffic = 3.0 * batch * n_segments * n_fft + 2.0 * batch * k
    ns = profile_cost_ns(profile, profile.host_output_bytes + quarter_traffic, host, rules)
    rows = jnp.maximum(batch, 1.0)
    log_rows = jnp.log(rows / 512.0)
    gentle = rules.relu(log_rows, scale=ns)
    steep = rules.relu((log_rows - math.log(4.0)) / math.log(2.0), scale=ns)  # log2(rows / 2048)
    return ns * (1.0 + slopes[0] * gentle) * (1.0 + slopes[1] * steep)


def fused_ns(row: Row, batch, n_fft, k, n_segments, scale, rules) -> Nanoseconds:
    falls_back = jax.lax.stop_gradient(row.strategy.falls_back)
    fused = row.strategy.fused_scale, row.strategy.fused_floor_ns, row.strategy.is_gpu
    cost_ns = _with_slopes(_fused_ns, rules)
    return cost_ns(row.backend, falls_back, fused, batch, n_fft, k, n_segments, scale)


def _fused_ns(
    backend: BackendCoefficients | Rates, falls_back, fused, batch, n_fft, k, n_segments, scale, *, rules
) -> Nanoseconds:
    fused_scale, fused_floor_ns, is_gpu = fused
    io_ns = _graph_ns(backend, falls_back, batch, n_fft, k, n_segments, True, rules)
    factor = fused_scale * rules.clip(scale, MIN_SCALE, MAX_SCALE, scale=io_ns)
    few_rows = 1.0 - rules.at_least(batch, 512.0, scale=io_ns)
    floor = fused_floor_ns * is_gpu * few_rows
    # The clip's own relaxation would pull a scale of exactly 1 below the threshold: the hard factor decides.
    hard_factor = fused_scale * jnp.clip(scale, MIN_SCALE, MAX_SCALE)
    floor = floor + rules.at_least(hard_factor, 1.0, scale=io_ns) * io_ns
    return rules.maximum(io_ns * factor, floor)


def block_ns(row: Row, batch, n_fft, k, n_segments, rules) -> Nanoseconds:
    io_ns = _graph_ns(row.backend, row.strategy.falls_back, batch, n_fft, k, n_segments, False, rules)
    on_gpu = io_ns * row.strategy.block_scale + row.strategy.block_peak_ns * (batch * k)
    return jnp.where(row.strategy.is_gpu >= 0.5, on_gpu, io_ns)


def _graph_ns(
    backend: BackendCoefficients | Rates, falls_back, batch, n_fft, k, n_segments, fused: bool, rules
) -> Nanoseconds:
    work = float_counts(welch_graph_work(batch, n_fft, k, n_segments, fused))
    return work_cost_ns(work, backend, falls_back, rules)


def gate_benefit(row: Row, batch, n_fft, k, rules, scale) -> FusionBenefit:
    """Return what fusing two segments saves, in floats (SPEC, section 5)."""
    keep, fuse = (welch_graph_work(batch, n_fft, k, FAST_SEGMENTS, fused).io for fused in (False, True))
    native = row.strategy.has_native_kernel * rules.at_least(batch, 2048.0, scale=scale)
    return FusionBenefit(
        float(keep.kernel_launches - fuse.kernel_launches),
        native - 1.0,
        keep.host_output_bytes - fuse.host_output_bytes,
        keep.device_traffic_bytes - fuse.device_traffic_bytes,
    )


def strategy_terms(row: Row, batch, n_fft, k, learned: Learned, rules: Exact | Smooth) -> Terms:
    fused = fused_ns(row, batch, n_fft, k, FAST_SEGMENTS, 1.0, rules)
    block = block_ns(row, batch, n_fft, k, FAST_SEGMENTS, rules)
    benefit = gate_benefit(row, batch, n_fft, k, rules, block)
    many = rules.at_least(batch, 8192.0, scale=block)
    slack = (1.0 - many) * row.strategy.slack + many * row.strategy.large_slack
    return Terms(
        ultra_ns=host_ns(row, batch, n_fft, k, ULTRA_SEGMENTS, rules),
        fast_ns=host_ns(row, batch, n_fft, k, FAST_SEGMENTS, rules),
        fused_ns=fused,
        learned_ns=fused_ns(row, batch, n_fft, k, FAST_SEGMENTS, learned.scale, rules),
        block_ns=block,
        score_ns=gate_score_ns(row.gate, benefit, rules),
        floor_margin_ns=block * slack - fused,
        floor_applies=row.strategy.is_fused_viable * rules.at_least(batch, 2048.0, scale=block),
        learned_possible=learned.usable & (row.strategy.is_fused_viable >= 0.5),
        ultra_possible=~((row.strategy.is_gpu >= 0.5) & (batch > ULTRA_MAX_GPU_BATCH)),
    )


def decisions(row: Row, terms: Terms) -> tuple[Decision, Decision]:
    io = terms.score_ns >= row.gate.min_gain_ns
    return io, (jnp.asarray(terms.floor_applies) < 0.5) | (terms.floor_margin_ns >= 0.0)
