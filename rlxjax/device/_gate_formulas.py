"""The formulas of the gate, written once for hard and for relaxed choices (SPEC, section 2)."""

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from rlxjax._numerics import Exact, Smooth, soft_step, times
from rlxjax._slopes import along, by_slopes
from rlxjax._typing import Nanoseconds, Probability, RealLike

if TYPE_CHECKING:
    from ._gate import FusionBenefit, IoFusionGate


class GateRates(NamedTuple):
    """What the score with hard choices is linear in, and the gate's minimum gain; every field `[*batch]`."""

    dispatch_ns: RealLike
    roundtrip_ns: RealLike
    traffic_ns_per_byte: RealLike
    readback_ns_per_byte: RealLike
    host_thunk_penalty_ns: RealLike
    min_gain_ns: RealLike


def gate_rates(gate: "IoFusionGate | GateRates") -> GateRates:
    """Return a gate's rates; of rates, themselves.

    Of a table of gates they cost nothing; of rows that were selected from it, two divisions a row.
    """
    if isinstance(gate, GateRates):
        return gate
    traffic_ns, readback_ns = (1.0 / jnp.maximum(bw, 1.0) for bw in (gate.memory_bw, _readback_bw(gate)))
    waits_ns = gate.dispatch_ns, gate.roundtrip_ns
    return GateRates(*waits_ns, traffic_ns, readback_ns, gate.host_thunk_penalty_ns, gate.min_gain_ns)


def gate_score_ns(
    gate: "IoFusionGate | GateRates", benefit: "FusionBenefit", rules: Exact | Smooth
) -> Nanoseconds:
    """Return the gate's score of float counts, with hard or relaxed choices; those take no rates."""
    if isinstance(rules, Exact):
        return _exact_margin_ns(*_exact_arguments(gate, benefit), jnp.asarray(0.0))
    assert not isinstance(gate, GateRates)
    penalty_ns = jnp.asarray(gate.host_thunk_penalty_ns)
    # An infinite penalty must meet an exact count: what a relaxation leaves of zero would be infinite.
    is_finite = jnp.isfinite(penalty_ns)
    soft = rules.relu(-benefit.sync_points_saved, scale=jnp.where(is_finite, penalty_ns, 1.0))
    added_syncs = jnp.where(is_finite, soft, jnp.maximum(-benefit.sync_points_saved, 0.0))
    traffic, readback = benefit.device_traffic_bytes_saved, benefit.host_readback_bytes_saved
    return (
        times(benefit.launches_saved, gate.dispatch_ns)
        + times(benefit.sync_points_saved, gate.roundtrip_ns)
        + traffic / rules.maximum(gate.memory_bw, 1.0, scale=jnp.abs(traffic) + 1)
        + readback / rules.maximum(_readback_bw(gate), 1.0, scale=jnp.abs(readback) + 1)
    ) - times(added_syncs, penalty_ns)


def gate_margin_ns(gate: "IoFusionGate", benefit: "FusionBenefit") -> Nanoseconds:
    """Return by how much the hard score of float counts exceeds the gate's minimum gain."""
    return _exact_margin_ns(*_exact_arguments(gate, benefit), jnp.asarray(gate.min_gain_ns))


def gate_probability(
    gate: "IoFusionGate | GateRates", benefit: "FusionBenefit", temperature_ns: RealLike
) -> Probability:
    """Return the smooth step of that margin; its reverse mode is one pass over the rows."""

    @by_slopes
    def probability(rates: GateRates, benefit: "FusionBenefit", temperature_ns: RealLike) -> Probability:
        return soft_step(gate_score_ns(rates, benefit, Exact()) - rates.min_gain_ns, temperature_ns)

    return probability(gate_rates(gate), benefit, temperature_ns)


def base_score_ns(gate: "IoFusionGate", benefit: "FusionBenefit") -> Nanoseconds:
    """Return the hard score of float counts without the penalty for added sync points."""
    return _base_ns(_exact_arguments(gate, benefit)[0], _counts(benefit))


def _readback_bw(gate: "IoFusionGate") -> RealLike:
    return jnp.where(jnp.asarray(gate.unified_memory) >= 0.5, 0.0, gate.host_readback_bw)


def _counts(benefit: "FusionBenefit") -> list[Nanoseconds]:
    """Return the counts in the order of the rates."""
    counts = (
        benefit.launches_saved,
        benefit.sync_points_saved,
        benefit.device_traffic_bytes_saved,
        benefit.host_readback_bytes_saved,
    )
    return [jnp.asarray(count) for count in counts]


def _exact_arguments(gate: "IoFusionGate | GateRates", benefit: "FusionBenefit") -> tuple:
    *rates_ns, penalty_ns, _ = map(jnp.asarray, gate_rates(gate))
    return rates_ns, penalty_ns, _counts(benefit)


def _base_ns(rates_ns: list[Nanoseconds], counts: list[Nanoseconds]) -> Nanoseconds:
    launches, syncs, traffic, readback = map(times, counts, rates_ns)
    return launches + syncs + traffic + readback


@jax.custom_jvp
def _exact_margin_ns(
    rates_ns: list[Nanoseconds], penalty_ns: Nanoseconds, counts: list[Nanoseconds], least_ns: Nanoseconds
) -> Nanoseconds:
    """Prevents: a derivative in as many passes over the rows as the formula has operations.

    The score less what is subtracted from it is linear in rates, penalty and that, so the derivative is one
    sum of products; transposed, sums over the rows, all in one loop.
    """
    base_ns, syncs = _base_ns(rates_ns, counts), counts[1]
    return jnp.where(syncs < 0, base_ns + times(syncs, penalty_ns), base_ns) - least_ns


@functools.partial(_exact_margin_ns.defjvp, symbolic_zeros=True)
def _exact_margin_jvp(primals, tangents):
    rates_ns, penalty_ns, counts, _ = primals
    syncs = counts[1]
    slopes_ns = [rates_ns[0], jnp.where(syncs < 0, rates_ns[1] + penalty_ns, rates_ns[1]), *rates_ns[2:]]
    # Where a coefficient is infinite the derivative by its count is 0, as in `times`.
    slopes_ns = [jnp.where(jnp.isinf(slope), 0.0, slope) for slope in slopes_ns]
    # Of the sync points the negative ones; a minimum with 0 would be written out before the sum.
    added_syncs = 0.5 * (syncs - jnp.abs(syncs))
    margin_ns = _exact_margin_ns(*primals)
    factors = [*counts, added_syncs, *slopes_ns, -jnp.ones_like(margin_ns)]
    return margin_ns, along(margin_ns, factors, [*tangents[0], tangents[1], *tangents[2], tangents[3]])
