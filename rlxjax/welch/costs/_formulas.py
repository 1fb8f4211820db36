"""The formulas of the strategy costs, written once for hard and for relaxed choices."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from rlxjax._checks import fields_of
from rlxjax._numerics import Choices, dot
from rlxjax._typing import Code, Flag, Nanoseconds, RealLike
from rlxjax.gate._costs import counted_work, rates_of, work_ns
from rlxjax.gate._devices import take_row
from rlxjax.gate._gate import FusionBenefit, added_syncs, gate_rates
from rlxjax.welch._workload import FAST_SEGMENTS, ULTRA_SEGMENTS

from ._coefficients import CoefficientSet, StrategyCoefficients
from ._graphs import FFT_WORKS, FUSED_WORKS, FUSION_BENEFITS, HOST_WORKS, columns_of, total

ULTRA_MAX_GPU_BATCH = 128
#: From so many rows on a native kernel saves its sync point.
NATIVE_MIN_BATCH = 2048.0
LEARNED_BASE, LEARNED_PER_GATE = 0.30, 0.70
MIN_SCALE, MAX_SCALE = 0.25, 1.0


class Learned(NamedTuple):
    """What is known of a learned FFT; unknown active gates are negative."""

    available: RealLike
    active_gates: RealLike
    total_gates: RealLike

    @property
    def known(self) -> Flag:
        return (jnp.asarray(self.active_gates) >= 0) & (jnp.asarray(self.total_gates) > 0)

    @property
    def usable(self) -> Flag:
        """Available, and with fewer than a quarter of its gates on."""
        sparse = jnp.asarray(4.0 * self.active_gates < self.total_gates)
        return self.known & sparse & (jnp.asarray(self.available) >= 0.5)

    @property
    def scale(self) -> RealLike:
        """What is left of the fused graph's work; all where the gates are unknown."""
        total = jnp.where(self.known, self.total_gates, 1.0)
        return jnp.where(self.known, learned_scale(self.active_gates, total), 1.0)


def learned_scale(active_gates: RealLike, total_gates: RealLike) -> RealLike:
    """Return what a pruned learned FFT leaves of the fused graph's work."""
    return LEARNED_BASE + LEARNED_PER_GATE * active_gates / total_gates


class Row(NamedTuple):
    """The coefficients of all devices, `[12]`, and those of a row's device for the strategies."""

    table: CoefficientSet
    codes: Code
    strategy: StrategyCoefficients

    def rates(self, of: Callable[[CoefficientSet], list[RealLike]], rules: Choices) -> list[RealLike]:
        """Return rates of a row's device: with hard choices, those of all devices before the selection."""
        if rules.temperature_ns is None:
            return take_row(of(self.table), self.codes)
        parts = {name: getattr(self.table, name) for name in ("backend", "gate", "strategy")}
        return of(dataclasses.replace(self.table, **take_row(parts, self.codes)))


class Terms(NamedTuple):
    ultra_ns: Nanoseconds
    fast_ns: Nanoseconds
    fused_ns: Nanoseconds
    learned_ns: Nanoseconds
    benefit: FusionBenefit
    score_ns: Nanoseconds
    floor_margin_ns: Nanoseconds
    floor_applies: RealLike
    learned_possible: Flag
    ultra_possible: Flag


def gather(set_: CoefficientSet, codes: Code) -> Row:
    return Row(set_, codes, take_row(set_.strategy, codes))


def host_ns(row: Row, batch, n_fft, k, n_segments, rules: Choices) -> Nanoseconds:
    columns = (batch * (n_segments + 1.0), *columns_of(batch, n_fft, k, n_segments))
    host = row.table.host
    rates = rates_of(host, total(HOST_WORKS, columns), rules)
    ns = jnp.add(host.roundtrip_ns, dot(columns, [work_ns(work, rates) for work in HOST_WORKS]))
    log_rows = jnp.log(jnp.maximum(batch, 1.0) / 512.0)
    gentle = rules.relu(log_rows, scale=ns)
    steep = rules.relu((log_rows - math.log(4.0)) * (1.0 / math.log(2.0)), scale=ns)  # log2(rows / 2048)
    slopes = row.strategy
    return ns * (1.0 + slopes.log_batch_slope * gentle) * (1.0 + slopes.log2_batch_slope * steep)


def fused_ns(row: Row, batch, n_fft, k, n_segments, scale, rules: Choices) -> Nanoseconds:
    io_ns = _graph_ns(row, batch, n_fft, k, n_segments, True, rules)
    factor = row.strategy.fused_scale * rules.clip(scale, MIN_SCALE, MAX_SCALE, scale=io_ns)
    floor_ns = row.strategy.fused_floor_ns * row.strategy.is_gpu
    floor_ns = floor_ns * (1.0 - rules.at_least(batch, 512.0, scale=io_ns))
    # The clip's own relaxation would pull a scale of exactly 1 below the threshold: the hard factor decides.
    hard_factor = row.strategy.fused_scale * jnp.clip(scale, MIN_SCALE, MAX_SCALE)
    floor_ns = floor_ns + rules.at_least(hard_factor, 1.0, scale=io_ns) * io_ns
    return rules.maximum(io_ns * factor, floor_ns)


def block_ns(row: Row, batch, n_fft, k, n_segments, rules: Choices) -> Nanoseconds:
    io_ns = _graph_ns(row, batch, n_fft, k, n_segments, False, rules)
    on_gpu = io_ns * row.strategy.block_scale + row.strategy.block_peak_ns * (batch * k)
    return jnp.where(row.strategy.is_gpu >= 0.5, on_gpu, io_ns)


def _graph_ns(row: Row, batch, n_fft, k, n_segments, fused: bool, rules: Choices) -> Nanoseconds:
    works, columns = FUSED_WORKS if fused else FFT_WORKS, (1.0, *columns_of(batch, n_fft, k, n_segments))

    def part_ns(set_: CoefficientSet) -> list[RealLike]:
        counted = [counted_work(work, set_.strategy.falls_back) for work in works]
        rates = rates_of(set_.backend, total(works, columns), rules)
        in_all, *each = (work_ns(work, rates) for work in counted)
        return [set_.backend.roundtrip_ns + in_all, *each]

    return dot(columns[: len(works)], row.rates(part_ns, rules))


def gate_benefit(row: Row, batch, n_fft, k, rules: Choices, scale=None) -> FusionBenefit:
    """Return what fusing two segments saves, in floats."""
    native = row.strategy.has_native_kernel * rules.at_least(batch, NATIVE_MIN_BATCH, scale=scale)
    benefit = total(FUSION_BENEFITS, (1.0, *columns_of(batch, n_fft, k, FAST_SEGMENTS)))
    return dataclasses.replace(benefit, sync_points_saved=native - 1.0)


def gate_score_ns(row: Row, benefit: FusionBenefit, batch, n_fft, k, rules: Choices) -> Nanoseconds:
    """Return the gate's score of that benefit: what the graphs, a sample and a peak are worth are rates."""

    def part_ns(set_: CoefficientSet) -> list[RealLike]:
        rates = gate_rates(set_.gate, benefit, rules)
        parts = [dot([*fields_of(part).values()], rates) for part in FUSION_BENEFITS]
        return [*parts, set_.gate.roundtrip_ns, set_.gate.host_thunk_penalty_ns]

    rates, syncs = row.rates(part_ns, rules), benefit.sync_points_saved
    columns = (1.0, *columns_of(batch, n_fft, k, FAST_SEGMENTS), syncs, -added_syncs(syncs, rates[-1], rules))
    return dot(columns, rates)


def min_gain_ns(row: Row) -> Nanoseconds:
    """Return the minimum gain of a row's gate."""
    return jnp.asarray(take_row(row.table.gate.min_gain_ns, row.codes))


def strategy_terms(row: Row, batch, n_fft, k, learned: Learned, rules: Choices) -> Terms:
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
        benefit=benefit,
        score_ns=gate_score_ns(row, benefit, batch, n_fft, k, rules),
        floor_margin_ns=block * slack - fused,
        floor_applies=row.strategy.is_fused_viable * rules.at_least(batch, 2048.0, scale=block),
        learned_possible=learned.usable & (row.strategy.is_fused_viable >= 0.5),
        ultra_possible=~((row.strategy.is_gpu >= 0.5) & (batch > ULTRA_MAX_GPU_BATCH)),
    )
