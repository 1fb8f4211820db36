"""The IO fusion gate: does what fusing saves exceed what it costs?"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

from ._checks import check_at_least, check_not_nan, check_shapes, fields_of
from ._counts import as_float, as_temperature, difference
from ._device import Coefficients, Target, stack_rows, take_row
from ._numerics import Exact, Smooth, log_soft_step, soft_step, straight_through, times
from ._profile import GraphIoProfile
from ._typing import Code, Count, Decision, Nanoseconds, Probability, RealLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FusionBenefit:
    """What a fusion saves, field by field and signed: `before - after`. Counts as in `GraphIoProfile`."""

    launches_saved: Count = 0
    sync_points_saved: Count = 0
    host_readback_bytes_saved: Count = 0
    device_traffic_bytes_saved: Count = 0

    def score_ns(self, gate: "IoFusionGate") -> Nanoseconds:
        """Return the time saved in ns by the gate's rates, without the penalty for added sync points."""
        return _benefit_score_ns(gate, _floats(self, gate))

    def should_fuse(self, gate: "IoFusionGate") -> Decision:
        """Whether that time reaches the gate's minimum gain."""
        return self.score_ns(gate) >= gate.min_gain_ns

    def astype(self, dtype: jax.typing.DTypeLike) -> "FusionBenefit":
        """Return the counts as floats of a dtype (`float` is JAX's default), ready for traced code.

        Examples:
            >>> FusionBenefit(2**40, 0, 0, 0).astype(float).launches_saved.dtype.kind
            'f'
        """
        dtype = jnp.result_type(dtype)
        return jax.tree.map(lambda count: jnp.asarray(as_float(count, "count"), dtype), self)


def fusion_benefit(before: GraphIoProfile, after: GraphIoProfile) -> FusionBenefit:
    """Return what going from one profile to the other saves.

    The subtraction is exact: Python integers, or NumPy integers in the smallest 64-bit type that holds
    the result.

    Args:
        before: the profile without fusion, fields `[*batch]`.
        after: the profile with it.

    Raises:
        ValueError: a negative or NaN count, or a traced integer that JAX may have narrowed.

    Examples:
        >>> fusion_benefit(GraphIoProfile(2, 1, 8192, 16384), GraphIoProfile(1, 1, 512, 16384))
        ... # doctest: +NORMALIZE_WHITESPACE
        FusionBenefit(launches_saved=1, sync_points_saved=0, host_readback_bytes_saved=7680,
                      device_traffic_bytes_saved=0)
    """
    counts = []
    check_shapes(**fields_of(before, "before."), **fields_of(after, "after."))
    for field in dataclasses.fields(GraphIoProfile):
        first, second = getattr(before, field.name), getattr(after, field.name)
        check_at_least(first, f"before.{field.name}")
        check_at_least(second, f"after.{field.name}")
        counts.append(difference(first, second, field.name))
    return FusionBenefit(*counts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IoFusionGate(Coefficients):
    """What a target's launches, syncs and bytes are worth, and how much a fusion has to save.

    Every field is `[*batch]`; `jax.grad` over a whole gate works.

    Attributes:
        dispatch_ns: one kernel launch.
        roundtrip_ns: one synchronisation of host and device.
        memory_bw: device memory, bytes per nanosecond (at least 1 is used).
        host_readback_bw: device to host, bytes per nanosecond (at least 1 is used).
        unified_memory: 1 where host and device share memory: a saved readback byte is then worth 1 ns.
        host_thunk_penalty_ns: for each sync point that the fusion adds; may be infinite.
        min_gain_ns: the saving from which on it pays to fuse.
    """

    dispatch_ns: RealLike = 0.0
    roundtrip_ns: RealLike = 0.0
    memory_bw: RealLike = 1.0
    host_readback_bw: RealLike = 1.0
    unified_memory: RealLike = 0.0
    host_thunk_penalty_ns: RealLike = 0.0
    min_gain_ns: RealLike = 0.0

    def score_ns(
        self, before: GraphIoProfile | FusionBenefit, after: GraphIoProfile | None = None
    ) -> Nanoseconds:
        """Return the time that a fusion saves in ns, penalty included, `[*batch]`.

        Args:
            before: a benefit, or the profile without fusion. Traced code gives a benefit.
            after: the profile with fusion, unless a benefit is given.

        Examples:
            >>> gate = io_fusion_gate_for_target("metal")
            >>> before = GraphIoProfile(3, 0, 33554432, 184549376)
            >>> after = GraphIoProfile(4, 1, 1048576, 219152384)
            >>> print(f"{gate.score_ns(before, after):.4g} ns", gate.should_fuse(before, after))
            3.033e+07 ns True
        """
        return _score_ns(self, _floats(_benefit(before, after), self))

    def should_fuse(
        self, before: GraphIoProfile | FusionBenefit, after: GraphIoProfile | None = None
    ) -> Decision:
        """Whether the score reaches the minimum gain, `[*batch]`."""
        return self.score_ns(before, after) >= self.min_gain_ns

    def soft_score_ns(
        self,
        before: GraphIoProfile | FusionBenefit,
        after: GraphIoProfile | None = None,
        *,
        temperature_ns: RealLike,
    ) -> Nanoseconds:
        """Return the score with the penalty's threshold and the bandwidth floors relaxed."""
        temperature_ns = as_temperature(temperature_ns)
        return _soft_score_ns(self, _floats(_benefit(before, after), self), temperature_ns)

    def fuse_log_odds(
        self,
        before: GraphIoProfile | FusionBenefit,
        after: GraphIoProfile | None = None,
        *,
        temperature_ns: RealLike,
    ) -> Nanoseconds:
        """Return `(score - min_gain) / temperature`, what losses use: it has no underflow."""
        temperature_ns = as_temperature(temperature_ns)
        return (self.score_ns(before, after) - self.min_gain_ns) / temperature_ns

    def fuse_probability(
        self,
        before: GraphIoProfile | FusionBenefit,
        after: GraphIoProfile | None = None,
        *,
        temperature_ns: RealLike,
        straight_through_gradient: bool = False,
    ) -> Probability:
        """Return the smooth twin of `should_fuse`: the logistic of the log-odds, `[*batch]`.

        Args:
            before: a benefit, or the profile without fusion.
            after: the profile with fusion, unless a benefit is given.
            temperature_ns: scalar or `[*batch]`.
            straight_through_gradient: return the hard decision as 0 or 1, with this gradient.

        Examples:
            >>> gate = IoFusionGate(dispatch_ns=500.0, min_gain_ns=1_000.0)
            >>> print(gate.fuse_probability(FusionBenefit(launches_saved=2), temperature_ns=100.0))
            0.5
        """
        temperature_ns = as_temperature(temperature_ns)
        margin_ns = self.score_ns(before, after) - self.min_gain_ns
        soft = soft_step(margin_ns, temperature_ns)
        return straight_through(margin_ns >= 0.0, soft) if straight_through_gradient else soft

    def fuse_log_probability(
        self,
        before: GraphIoProfile | FusionBenefit,
        after: GraphIoProfile | None = None,
        *,
        temperature_ns: RealLike,
    ) -> Nanoseconds:
        """Return the logarithm of `fuse_probability`, without underflow."""
        temperature_ns = as_temperature(temperature_ns)
        return log_soft_step(self.score_ns(before, after) - self.min_gain_ns, temperature_ns)


#: Built-in gates (SPEC, section 2), in the order of the fields.
GATES: Mapping[Target, IoFusionGate] = MappingProxyType(
    {
        Target.METAL: IoFusionGate(500, 5_000, 200, 200, True, 2_000_000, 1_000),
        Target.MLX: IoFusionGate(500, 5_000, 200, 200, True, 2_000_000, 1_000),
        Target.CUDA: IoFusionGate(2_000, 20_000, 800, 50, False, 15_000_000, 5_000),
        Target.ROCM: IoFusionGate(2_000, 20_000, 800, 50, False, 15_000_000, 5_000),
        Target.WGPU: IoFusionGate(3_000, 30_000, 100, 40, False, 25_000_000, 10_000),
        Target.TPU: IoFusionGate(3_000, 30_000, 100, 40, False, 25_000_000, 10_000),
        Target.CPU: IoFusionGate(50, 0, 50, 50, True, 0, 0),
    }
)


def io_fusion_gate_for_target(target: "str | Code") -> IoFusionGate:
    """Return the built-in gate of a target, or a gate of arrays for target codes.

    Raises:
        ValueError: an unknown target.

    Examples:
        >>> io_fusion_gate_for_target("CUDA").min_gain_ns
        5000.0
    """
    if isinstance(target, str):
        return GATES[Target.parse(target)]
    return take_row(stack_rows([GATES[member] for member in Target]), Target.codes(target))


def gate_score_ns(gate: IoFusionGate, benefit: FusionBenefit, rules: Exact | Smooth) -> Nanoseconds:
    """Return the gate's score of float counts, with hard or relaxed choices."""
    penalty_ns = jnp.asarray(gate.host_thunk_penalty_ns)
    # An infinite penalty must meet an exact count: what a relaxation leaves of zero would be infinite.
    is_finite = jnp.isfinite(penalty_ns)
    soft = rules.relu(-benefit.sync_points_saved, scale=jnp.where(is_finite, penalty_ns, 1.0))
    added_syncs = jnp.where(is_finite, soft, jnp.maximum(-benefit.sync_points_saved, 0.0))
    return _base_ns(gate, benefit, rules) - times(added_syncs, penalty_ns)


def _base_ns(gate: IoFusionGate, benefit: FusionBenefit, rules: Exact | Smooth) -> Nanoseconds:
    readback_bw = jnp.where(jnp.asarray(gate.unified_memory) >= 0.5, 0.0, gate.host_readback_bw)
    traffic, readback = benefit.device_traffic_bytes_saved, benefit.host_readback_bytes_saved
    return (
        times(benefit.launches_saved, gate.dispatch_ns)
        + times(benefit.sync_points_saved, gate.roundtrip_ns)
        + traffic / rules.maximum(gate.memory_bw, 1.0, scale=jnp.abs(traffic) + 1)
        + readback / rules.maximum(readback_bw, 1.0, scale=jnp.abs(readback) + 1)
    )


@jax.jit
def _benefit_score_ns(gate: IoFusionGate, benefit: FusionBenefit) -> Nanoseconds:
    return _base_ns(gate, benefit, Exact())


@jax.jit
def _score_ns(gate: IoFusionGate, benefit: FusionBenefit) -> Nanoseconds:
    return gate_score_ns(gate, benefit, Exact())


@jax.jit
def _soft_score_ns(gate: IoFusionGate, benefit: FusionBenefit, temperature_ns: RealLike) -> Nanoseconds:
    return gate_score_ns(gate, benefit, Smooth(temperature_ns))


def _benefit(first: GraphIoProfile | FusionBenefit, after: GraphIoProfile | None) -> FusionBenefit:
    if isinstance(first, FusionBenefit):
        if after is not None:
            raise ValueError("after: expected nothing beside a FusionBenefit, got a profile")
        return first
    if after is None:
        raise ValueError("after: expected a profile (or a FusionBenefit in place of both), got None")
    return fusion_benefit(first, after)


def _floats(benefit: FusionBenefit, gate: IoFusionGate) -> FusionBenefit:
    counts = fields_of(benefit)
    for name, count in counts.items():
        check_not_nan(count, name)
    check_shapes(**counts, **fields_of(gate))
    return FusionBenefit(**{name: as_float(count, name) for name, count in counts.items()})
