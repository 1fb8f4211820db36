"""The IO fusion gate, which decides whether a fusion saves enough time."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from rlxjax._checks import check_at_least, check_not_nan, check_shapes, fields_of
from rlxjax._counts import as_float, as_temperature, difference
from rlxjax._numerics import Choices, dot, log_odds, log_soft_step, soft_step, straight_through
from rlxjax._typing import Code, Count, Flag, LogOdds, LogProbability, Nanoseconds, Probability, RealLike
from rlxjax._values import FrozenDict, by_value
from rlxjax.graph import GraphIoProfile

from ._backends import Coefficients, FusionTarget, stack_rows, take_row

#: The types of the first two arguments of a gate: profiles before and after the fusion, or a `FusionBenefit` and None.
Before: TypeAlias = "GraphIoProfile | FusionBenefit"
After: TypeAlias = GraphIoProfile | None


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FusionBenefit:
    """The counts that a fusion saves: each count of the `GraphIoProfile` before the fusion minus the count after it."""

    launches_saved: Count = 0
    sync_points_saved: Count = 0
    host_readback_bytes_saved: Count = 0
    device_traffic_bytes_saved: Count = 0

    def score_ns(self, gate: "IoFusionGate") -> Nanoseconds:
        """Return the time that the fusion saves, in ns, at the gate's rates. Added sync points cost no penalty here."""
        return dataclasses.replace(gate, host_thunk_penalty_ns=0.0).score_ns(self)

    def should_fuse(self, gate: "IoFusionGate") -> Flag:
        """Return whether the result of `score_ns`, which has no penalty, is at least the gate's minimum gain."""
        return self.score_ns(gate) >= gate.min_gain_ns

    def astype(self, dtype: jax.typing.DTypeLike) -> "FusionBenefit":
        """Return the counts, converted to a float dtype, for use in traced code. `float` means JAX's default dtype.

        Examples:
            >>> FusionBenefit(2**40, 0, 0, 0).astype(float).launches_saved.dtype.kind
            'f'
        """
        dtype = jnp.result_type(dtype)
        return jax.tree.map(lambda count: jnp.asarray(as_float(count, "count"), dtype), self)


def fusion_benefit(before: GraphIoProfile, after: GraphIoProfile) -> FusionBenefit:
    """Return the counts that a fusion saves: the counts of `before` minus the counts of `after`.

    Integers are subtracted exactly. NumPy floats are first subtracted and then converted to JAX's default precision.

    Args:
        before: the profile without fusion. Each count is `[*batch]`.
        after: the profile with fusion. Each count is `[*batch]`.

    Raises:
        ValueError: a count is negative or NaN, or a count is a traced integer that JAX may have narrowed to 32 bits.

    Examples:
        >>> benefit = fusion_benefit(GraphIoProfile(2, 1, 8192, 16384), GraphIoProfile(1, 1, 512, 16384))
        >>> benefit.launches_saved, benefit.host_readback_bytes_saved
        (1, 7680)
    """
    check_shapes(**fields_of(before, "before."), **fields_of(after, "after."))
    saved = []
    for name, count in fields_of(before).items():
        check_at_least(count, f"before.{name}")
        check_at_least(getattr(after, name), f"after.{name}")
        saved.append(difference(count, getattr(after, name), name))
    return FusionBenefit(*saved)


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IoFusionGate(Coefficients):
    """The costs on a target by which the gate decides whether a fusion is worthwhile. Each field is `[*batch]`.

    `jax.grad` can differentiate with respect to all fields of a gate at once.

    Attributes:
        dispatch_ns: time of a kernel launch, in ns.
        roundtrip_ns: time of a synchronisation between host and device, in ns.
        memory_bw: bandwidth of device memory, in bytes per ns. A bandwidth below 1 counts as 1.
        host_readback_bw: bandwidth from device to host, in bytes per ns. A bandwidth below 1 counts as 1.
        unified_memory: 1 if host and device share memory, else 0. If 1, each saved readback byte saves 1 ns.
        host_thunk_penalty_ns: penalty, in ns, for each sync point that the fusion adds. The penalty may be infinite.
        min_gain_ns: the least score, in ns, at which a fusion is worthwhile.
    """

    dispatch_ns: RealLike = 0.0
    roundtrip_ns: RealLike = 0.0
    memory_bw: RealLike = 1.0
    host_readback_bw: RealLike = 1.0
    unified_memory: RealLike = 0.0
    host_thunk_penalty_ns: RealLike = 0.0
    min_gain_ns: RealLike = 0.0

    def score_ns(self, before: Before, after: After = None, *, temperature_ns: RealLike | None = None) -> Nanoseconds:
        """Return the score of a fusion, in ns, `[*batch]`: the saved time minus the penalty for added sync points.

        Args:
            before: the profile without fusion, or a `FusionBenefit`. In traced code, give a `FusionBenefit`.
            after: the profile with fusion, or None if `before` is a `FusionBenefit`.
            temperature_ns: a temperature, in ns, that makes each `max` in the score smooth; None gives the hard score.

        Examples:
            >>> gate = io_fusion_gate_for_target("metal")
            >>> before = GraphIoProfile(3, 0, 33554432, 184549376)
            >>> after = GraphIoProfile(4, 1, 1048576, 219152384)
            >>> print(f"{gate.score_ns(before, after):.4g} ns", gate.should_fuse(before, after))
            3.033e+07 ns True
        """
        temperature_ns = None if temperature_ns is None else as_temperature(temperature_ns)
        return _score_ns(self, _checked(self, before, after, temperature_ns)[1], temperature_ns)

    def should_fuse(self, before: Before, after: After = None) -> Flag:
        """Return whether the score of a fusion is at least the gate's minimum gain, `[*batch]`."""
        return self.score_ns(before, after) >= self.min_gain_ns

    def fuse_log_odds(self, before: Before, after: After = None, *, temperature_ns: RealLike) -> LogOdds:
        """Return `(score - min_gain) / temperature`, `[*batch]`. The result is always finite, so losses can use it."""
        return self._of_margin(log_odds, before, after, temperature_ns)

    def fuse_probability(
        self, before: Before, after: After = None, *, temperature_ns: RealLike, straight_through_gradient: bool = False
    ) -> Probability:
        """Return the smooth form of `should_fuse`, `[*batch]`: the sigmoid of `fuse_log_odds`.

        With `straight_through_gradient`, the value is the hard decision (0 or 1) and the gradient is the smooth form's.

        Examples:
            >>> gate = IoFusionGate(dispatch_ns=500.0, min_gain_ns=1_000.0)
            >>> print(gate.fuse_probability(FusionBenefit(launches_saved=2), temperature_ns=100.0))
            0.5
        """
        soft = self._of_margin(soft_step, before, after, temperature_ns)
        if not straight_through_gradient:
            return soft
        return straight_through(jnp.broadcast_to(self.should_fuse(before, after), soft.shape), soft)

    def fuse_log_probability(self, before: Before, after: After = None, *, temperature_ns: RealLike) -> LogProbability:
        """Return the logarithm of `fuse_probability`, computed without underflow, `[*batch]`."""
        return self._of_margin(log_soft_step, before, after, temperature_ns)

    def evaluate(self, before: Before, after: After = None, *, temperature_ns: RealLike) -> "GateEvaluation":
        """Return the benefit, score, decision and probability of many fusions. A single program computes all results.

        `before` and `after` are the same as in `score_ns`. The temperature affects only the probability.

        Examples:
            >>> gate = IoFusionGate(dispatch_ns=500.0, min_gain_ns=1_000.0)
            >>> table = gate.evaluate(FusionBenefit(launches_saved=jnp.arange(3.0)), temperature_ns=100.0)
            >>> table.score_ns.tolist(), table.should_fuse.tolist()
            ([0.0, 500.0, 1000.0], [False, False, True])
        """
        temperature_ns = as_temperature(temperature_ns)
        benefit, counts = _checked(self, before, after, temperature_ns)
        return GateEvaluation(benefit, *_evaluate(self, counts, temperature_ns))

    def _of_margin(self, relaxed: Callable[..., Any], before: Before, after: After, temperature_ns: Any) -> Any:
        """Return `relaxed(margin, temperature_ns)`. The margin is the score minus the minimum gain."""
        temperature_ns = as_temperature(temperature_ns)
        return _relaxed_margin(relaxed, self, _checked(self, before, after, temperature_ns)[1], temperature_ns)


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GateEvaluation:
    """The results of `IoFusionGate.evaluate` for many fusions. Each field is `[*batch]`.

    `benefit` holds the counts that the fusions save. Each other field is the result of the method of its name.
    """

    benefit: FusionBenefit
    score_ns: Nanoseconds
    should_fuse: Flag
    fuse_probability: Probability


#: A dict from each fusion target to its built-in gate.
GATES: Mapping[FusionTarget, IoFusionGate] = FrozenDict(
    {
        FusionTarget.METAL: IoFusionGate(500, 5_000, 200, 200, True, 2_000_000, 1_000),
        FusionTarget.MLX: IoFusionGate(500, 5_000, 200, 200, True, 2_000_000, 1_000),
        FusionTarget.CUDA: IoFusionGate(2_000, 20_000, 800, 50, False, 15_000_000, 5_000),
        FusionTarget.ROCM: IoFusionGate(2_000, 20_000, 800, 50, False, 15_000_000, 5_000),
        FusionTarget.WGPU: IoFusionGate(3_000, 30_000, 100, 40, False, 25_000_000, 10_000),
        FusionTarget.TPU: IoFusionGate(3_000, 30_000, 100, 40, False, 25_000_000, 10_000),
        FusionTarget.CPU: IoFusionGate(50, 0, 50, 50, True, 0, 0),
    }
)


def io_fusion_gate_for_target(target: "str | Code | Sequence[int]") -> IoFusionGate:
    """Return the built-in gate of a target. For target codes `[*batch]`, each field of the gate is an array `[*batch]`.

    Args:
        target: a target name, or target codes `[*batch]`.

    Raises:
        ValueError: the target is unknown.

    Examples:
        >>> io_fusion_gate_for_target("CUDA").min_gain_ns
        5000.0
    """
    if isinstance(target, str):
        return GATES[FusionTarget.parse(target)]
    return take_row(stack_rows([GATES[member] for member in FusionTarget]), FusionTarget.codes(target))


def gate_rates(gate: IoFusionGate, benefit: FusionBenefit, rules: Choices) -> list[RealLike]:
    """Return the time, in ns, that a gate assigns to a unit of each count, in the field order of `FusionBenefit`."""
    is_unified = jnp.asarray(gate.unified_memory) >= 0.5
    transfers = (
        (jnp.where(is_unified, 0.0, gate.host_readback_bw), benefit.host_readback_bytes_saved),
        (gate.memory_bw, benefit.device_traffic_bytes_saved),
    )
    per_byte = [1.0 / rules.maximum(bw, 1.0, scale=jnp.abs(saved) + 1.0) for bw, saved in transfers]
    return [gate.dispatch_ns, gate.roundtrip_ns, *per_byte]


def added_syncs(sync_points_saved: Count, penalty_ns: RealLike, rules: Choices) -> jax.Array:
    """Return the number of sync points that a fusion adds, or 0 if the fusion saves sync points."""
    syncs, is_finite = -jnp.asarray(sync_points_saved), jnp.isfinite(penalty_ns)
    relaxed = rules.relu(syncs, scale=jnp.where(is_finite, penalty_ns, 1.0))
    # The relaxed count is always above 0, and its product with an infinite penalty would always be infinite.
    return jnp.where(is_finite, relaxed, Choices().relu(syncs))


def _score(gate: IoFusionGate, benefit: FusionBenefit, rules: Choices) -> Nanoseconds:
    penalty_ns = gate.host_thunk_penalty_ns
    added = added_syncs(benefit.sync_points_saved, penalty_ns, rules)
    return dot([*fields_of(benefit).values(), -added], [*gate_rates(gate, benefit, rules), penalty_ns])


@jax.jit
def _score_ns(gate: IoFusionGate, benefit: FusionBenefit, temperature_ns: RealLike | None) -> Nanoseconds:
    return _score(gate, benefit, Choices(temperature_ns))


@functools.partial(jax.jit, static_argnums=0)
def _relaxed_margin(relaxed, gate: IoFusionGate, benefit: FusionBenefit, temperature_ns: RealLike) -> jax.Array:
    return relaxed(_score(gate, benefit, Choices()) - gate.min_gain_ns, temperature_ns)


@jax.jit
def _evaluate(gate: IoFusionGate, benefit: FusionBenefit, temperature_ns: RealLike) -> tuple[jax.Array, ...]:
    score_ns = _score(gate, benefit, Choices())
    return score_ns, score_ns >= gate.min_gain_ns, soft_step(score_ns - gate.min_gain_ns, temperature_ns)


def _checked(gate: IoFusionGate, before: Before, after: After, temperature_ns: Any) -> tuple[Any, Any]:
    """Check all values and shapes. Return the benefit with exact counts, and the same benefit with float counts."""
    if isinstance(before, FusionBenefit):
        benefit = before
        if after is not None:
            raise ValueError("after: must be left out if the first argument is a FusionBenefit, got a profile")
    elif after is None:
        raise ValueError("after: expected the profile with fusion, got None; or give a FusionBenefit instead of both")
    else:
        benefit = fusion_benefit(before, after)
    counts = fields_of(benefit)
    for name, count in counts.items():
        check_not_nan(count, name)
    gate.check("gate.")
    check_shapes(**counts, **fields_of(gate), **({} if temperature_ns is None else {"temperature_ns": temperature_ns}))
    return benefit, FusionBenefit(**{name: as_float(count, name) for name, count in counts.items()})
