"""The formulas of the strategy costs, written once for hard and for relaxed choices (SPEC, section 5)."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlxjax._numerics import Exact, Smooth, soft_step, straight_through
from rlxjax._slopes import by_slopes, with_derivative_of
from rlxjax._typing import Decision, Nanoseconds, RealLike
from rlxjax.device._costs import Rates, float_counts, profile_cost_ns, rates_of, work_cost_ns
from rlxjax.device._devices import BackendCoefficients, take_row
from rlxjax.device._gate import FusionBenefit, IoFusionGate
from rlxjax.device._gate_formulas import GateRates, gate_rates, gate_score_ns
from rlxjax.welch._params import FAST_SEGMENTS, ULTRA_SEGMENTS

from ._coefficients import CoefficientSet, StrategyCoefficients
from ._graphs import host_profile, welch_graph_work

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


class IoTerms(NamedTuple):
    """What an io cost with hard choices is made of; every field a scalar or `[*batch]`."""

    fixed_ns: Nanoseconds
    ns_per_sample: Nanoseconds
    ns_per_peak: Nanoseconds
    ns_per_row: Nanoseconds | None

    def at(self, batch, n_fft, k) -> Nanoseconds:
        samples, peaks = batch * n_fft, batch * k  # of one table, the same for every cost of it
        rows_ns = 0.0 if self.ns_per_row is None else self.ns_per_row * batch
        return self.fixed_ns + rows_ns + self.ns_per_sample * samples + self.ns_per_peak * peaks


def _io_terms(io_ns: Callable[..., Nanoseconds], row: BackendCoefficients | Rates, *, of_rows: bool) -> IoTerms:
    """Return the terms of an io cost, which is `fixed + batch * (row + sample * n_fft + peak * k)`.

    Those of the samples and peaks are derivatives at a batch of one, the others value and derivative of no
    rows. Infinite rates count as 0, with the derivatives of finite ones.

    Args:
        io_ns: of rates, batch, n_fft and k.
        row: the rates, each a scalar or `[*batch]`.
        of_rows: whether it has a term of the rows alone.
    """
    *rates, unified_memory = rates_of(row)
    none, one = (jnp.asarray(size, jnp.result_type(*rates)) for size in (0.0, 1.0))
    finite = [straight_through(jnp.where(jnp.isinf(rate), none, rate), jnp.asarray(rate)) for rate in rates]
    io_ns_of = functools.partial(io_ns, Rates._make([*finite, unified_memory]))
    fixed_ns, ns_per_row = jax.jvp(lambda batch: io_ns_of(batch, none, none), [none], [one])
    _, ns_per_sample = jax.jvp(lambda n_fft: io_ns_of(one, n_fft, none), [none], [one])
    _, ns_per_peak = jax.jvp(lambda k: io_ns_of(one, none, k), [none], [one])
    return IoTerms(fixed_ns, ns_per_sample, ns_per_peak, ns_per_row if of_rows else None)


def host_ns(row: Row, batch, n_fft, k, n_segments, rules) -> Nanoseconds:
    cost_ns = _with_rules(_host_ns, rules, twin=_host_ns_by_terms)
    return cost_ns(row.host, _batch_slopes(row), batch, n_fft, k, n_segments)


def _batch_slopes(row: Row) -> tuple:
    return row.strategy.log_batch_slope, row.strategy.log2_batch_slope


def _host_ns(host: BackendCoefficients | Rates, slopes, batch, n_fft, k, n_segments, *, rules) -> Nanoseconds:
    return _adjusted_ns(_host_io_ns(host, batch, n_fft, k, n_segments, rules), slopes, batch, rules)


def _host_ns_by_terms(host: Rates, slopes, batch, n_fft, k, n_segments) -> Nanoseconds:
    return by_slopes(_host_ns_of_terms)(_host_terms(host, n_segments), slopes, batch, n_fft, k)


def _host_terms(host: BackendCoefficients | Rates, n_segments) -> IoTerms:
    def io_ns(rates: Rates, batch, n_fft, k) -> Nanoseconds:
        return _host_io_ns(rates, batch, n_fft, k, n_segments, Exact())

    return _io_terms(io_ns, host, of_rows=True)


def _host_ns_of_terms(terms: IoTerms, slopes, batch, n_fft, k) -> Nanoseconds:
    return _adjusted_ns(terms.at(batch, n_fft, k), slopes, batch, Exact())


def _host_io_ns(host: BackendCoefficients | Rates, batch, n_fft, k, n_segments, rules) -> Nanoseconds:
    profile = float_counts(host_profile(batch, n_fft, k, n_segments))
    quarter_traffic = 3.0 * batch * n_segments * n_fft + 2.0 * batch * k
    return profile_cost_ns(profile, profile.host_output_bytes + quarter_traffic, host, rules)


def _adjusted_ns(ns: Nanoseconds, slopes, batch, rules) -> Nanoseconds:
    if isinstance(rules, Exact):
        gentle = log_rows = jnp.log(rules.maximum(batch / 512.0, 1.0))  # of what is below, 0 in both slopes
    else:
        log_rows = jnp.log(jnp.maximum(batch, 1.0) / 512.0)
        gentle = rules.relu(log_rows, scale=ns)
    steep = rules.relu((log_rows - math.log(4.0)) * (1.0 / math.log(2.0)), scale=ns)  # log2(rows / 2048)
    return ns * (1.0 + slopes[0] * gentle) * (1.0 + slopes[1] * steep)


def fused_ns(row: Row, batch, n_fft, k, n_segments, scale, rules) -> Nanoseconds:
    cost_ns = _with_rules(_fused_ns, rules, twin=_fused_ns_by_terms)
    return cost_ns(row.backend, _falls_back(row), _factor_and_floor(row), batch, n_fft, k, n_segments, scale)


def _falls_back(row: Row) -> RealLike:
    return jax.lax.stop_gradient(row.strategy.falls_back)


def _factor_and_floor(row: Row) -> tuple:
    return row.strategy.fused_scale, row.strategy.fused_floor_ns * row.strategy.is_gpu


def _fused_ns(
    backend: BackendCoefficients | Rates, falls_back, fused, batch, n_fft, k, n_segments, scale, *, rules
) -> Nanoseconds:
    io_ns = _graph_ns(backend, falls_back, batch, n_fft, k, n_segments, True, rules)
    return _floored_ns(io_ns, fused, batch, scale, rules)


def _fused_ns_by_terms(backend: Rates, falls_back, fused, batch, n_fft, k, n_segments, scale) -> Nanoseconds:
    terms = _fused_terms(backend, falls_back, n_segments)
    return by_slopes(_fused_ns_of_terms)(terms, fused, batch, n_fft, k, scale)


def _fused_terms(backend: BackendCoefficients | Rates, falls_back, n_segments) -> IoTerms:
    def io_ns(rates: Rates, batch, n_fft, k) -> Nanoseconds:
        return _graph_ns(rates, falls_back, batch, n_fft, k, n_segments, True, Exact())

    return _io_terms(io_ns, backend, of_rows=False)


def _fused_ns_of_terms(terms: IoTerms, fused, batch, n_fft, k, scale) -> Nanoseconds:
    return _floored_ns(terms.at(batch, n_fft, k), fused, batch, scale, Exact())


def _floored_ns(io_ns: Nanoseconds, fused, batch, scale, rules) -> Nanoseconds:
    fused_scale, fused_floor_ns = fused
    factor = fused_scale * rules.clip(scale, MIN_SCALE, MAX_SCALE, scale=io_ns)
    floor = fused_floor_ns * (1.0 - rules.at_least(batch, 512.0, scale=io_ns))
    # The clip's own relaxation would pull a scale of exactly 1 below the threshold: the hard factor decides.
    hard_factor = fused_scale * jnp.clip(scale, MIN_SCALE, MAX_SCALE)
    floor = floor + rules.at_least(hard_factor, 1.0, scale=io_ns) * io_ns
    return rules.maximum(io_ns * factor, floor)


def _with_rules(f, rules, *, twin):
    """Return a formula with its rules; with hard choices, the only ones of a twin, with its derivative."""
    f = functools.partial(f, rules=rules)
    return with_derivative_of(twin, f) if isinstance(rules, Exact) else f


def costs_ns_by_terms(row: Row, batch, n_fft, k, learned: Learned) -> list[Nanoseconds]:
    """Return the costs of all strategies as if each were possible and no rate infinite, but for rounding.

    Their derivative is one pass over the rows for all of them.
    """

    @by_slopes
    def costs_ns(slopes, on_host, fused, on_device, batch, n_fft, k, scale) -> list[Nanoseconds]:
        costs = [_host_ns_of_terms(of_host, slopes, batch, n_fft, k) for of_host in on_host]
        costs += [_fused_ns_of_terms(on_device, fused, batch, n_fft, k, part) for part in (1.0, scale)]
        return jnp.broadcast_arrays(*costs)

    on_host = [_host_terms(row.host, n_segments) for n_segments in (ULTRA_SEGMENTS, FAST_SEGMENTS)]
    on_device = _fused_terms(row.backend, _falls_back(row), FAST_SEGMENTS)
    slopes, fused = _batch_slopes(row), _factor_and_floor(row)
    # The sums are computed in this order: of what they share the loop then holds the least at a time.
    return costs_ns(slopes, on_host, fused, on_device, batch, n_fft, k, learned.scale)


def block_ns(row: Row, batch, n_fft, k, n_segments, rules) -> Nanoseconds:
    io_ns = _graph_ns(row.backend, row.strategy.falls_back, batch, n_fft, k, n_segments, False, rules)
    on_gpu = io_ns * row.strategy.block_scale + row.strategy.block_peak_ns * (batch * k)
    return jnp.where(row.strategy.is_gpu >= 0.5, on_gpu, io_ns)


def _graph_ns(
    backend: BackendCoefficients | Rates, falls_back, batch, n_fft, k, n_segments, fused: bool, rules
) -> Nanoseconds:
    work = float_counts(welch_graph_work(batch, n_fft, k, n_segments, fused))
    return work_cost_ns(work, backend, falls_back, rules)


def gate_benefit(has_native_kernel: RealLike, batch, n_fft, k, rules, scale=None) -> FusionBenefit:
    """Return what fusing two segments saves, in floats (SPEC, section 5)."""
    keep, fuse = (welch_graph_work(batch, n_fft, k, FAST_SEGMENTS, fused).io for fused in (False, True))
    native = has_native_kernel * rules.at_least(batch, NATIVE_MIN_BATCH, scale=scale)
    return FusionBenefit(
        float(keep.kernel_launches - fuse.kernel_launches),
        native - 1.0,
        keep.host_output_bytes - fuse.host_output_bytes,
        keep.device_traffic_bytes - fuse.device_traffic_bytes,
    )


class ScoreTerms(NamedTuple):
    """What the hard score of fusing two segments is made of; every field a scalar or `[*batch]`."""

    few_rows_ns: Nanoseconds
    many_rows_ns: Nanoseconds
    ns_per_sample: Nanoseconds
    ns_per_peak: Nanoseconds

    def at(self, batch, n_fft, k) -> Nanoseconds:
        fixed_ns = jnp.where(batch >= NATIVE_MIN_BATCH, self.many_rows_ns, self.few_rows_ns)
        return fixed_ns + self.ns_per_sample * (batch * n_fft) + self.ns_per_peak * (batch * k)


def score_and_probability_by_terms(row: Row, batch, n_fft, k, temperature_ns) -> list[Nanoseconds]:
    """Return score and smooth step of its margin, but for rounding; their derivative is one pass."""

    @by_slopes
    def score_and_probability(terms: ScoreTerms, min_gain_ns, batch, n_fft, k, temperature_ns):
        score_ns = terms.at(batch, n_fft, k)
        return jnp.broadcast_arrays(score_ns, soft_step(score_ns - min_gain_ns, temperature_ns))

    return score_and_probability(_score_terms(row), row.gate.min_gain_ns, batch, n_fft, k, temperature_ns)


def _score_terms(row: Row) -> ScoreTerms:
    """Return the terms of the score; those of samples and peaks are derivatives at a batch of one."""

    def score_ns(batch, n_fft, k) -> Nanoseconds:
        benefit = gate_benefit(row.strategy.has_native_kernel, batch, n_fft, k, Exact())
        return gate_score_ns(rates, benefit, Exact())

    rates = gate_rates(row.gate)
    dtype = jnp.result_type(*rates)
    none, one, many = (jnp.asarray(size, dtype) for size in (0.0, 1.0, NATIVE_MIN_BATCH))
    _, ns_per_sample = jax.jvp(lambda n_fft: score_ns(one, n_fft, none), [none], [one])
    _, ns_per_peak = jax.jvp(lambda k: score_ns(one, none, k), [none], [one])
    return ScoreTerms(score_ns(none, none, none), score_ns(many, none, none), ns_per_sample, ns_per_peak)


def strategy_terms(row: Row, batch, n_fft, k, learned: Learned, rules: Exact | Smooth) -> Terms:
    fused = fused_ns(row, batch, n_fft, k, FAST_SEGMENTS, 1.0, rules)
    block = block_ns(row, batch, n_fft, k, FAST_SEGMENTS, rules)
    benefit = gate_benefit(row.strategy.has_native_kernel, batch, n_fft, k, rules, block)
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
