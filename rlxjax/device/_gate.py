"""The IO fusion gate: does what fusing saves exceed what it costs?"""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import check_at_least, check_not_nan, check_shapes, fields_of, is_on_device, is_traced
from rlxjax._counts import as_float, as_temperature, difference, is_subtracted_on_host
from ._devices import Coefficients, Target, stack_rows, take_row
from ._gate_formulas import base_score_ns, gate_margin_ns, gate_probability, gate_score_ns
from rlxjax._numerics import Exact, Smooth, log_odds, log_soft_step, soft_step, straight_through
from rlxjax._one_loop import in_one_loop
from rlxjax.graph._profile import GraphIoProfile
from rlxjax._programs import formula_jit
from rlxjax._typing import Code, Count, Decision, Nanoseconds, Probability, RealLike


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
    the result. Floats that NumPy holds are subtracted in their own precision, and narrowed to JAX's default
    one after that.

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
        return _soft_score_ns(self, _floats(_benefit(before, after), self, temperature_ns), temperature_ns)

    def fuse_log_odds(
        self,
        before: GraphIoProfile | FusionBenefit,
        after: GraphIoProfile | None = None,
        *,
        temperature_ns: RealLike,
    ) -> Nanoseconds:
        """Return `(score - min_gain) / temperature`, what losses use: it is finite where the score is."""
        temperature_ns = as_temperature(temperature_ns)
        counts = _floats(_benefit(before, after), self, temperature_ns)
        return log_odds(_margin_ns(self, counts), temperature_ns)

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
        benefit = _benefit(before, after)
        soft = _fuse_probability(self, _floats(benefit, self, temperature_ns), temperature_ns)
        if not straight_through_gradient:
            return soft
        return straight_through(jnp.broadcast_to(self.should_fuse(benefit), soft.shape), soft)

    def fuse_log_probability(
        self,
        before: GraphIoProfile | FusionBenefit,
        after: GraphIoProfile | None = None,
        *,
        temperature_ns: RealLike,
    ) -> Nanoseconds:
        """Return the logarithm of `fuse_probability`, without underflow."""
        temperature_ns = as_temperature(temperature_ns)
        counts = _floats(_benefit(before, after), self, temperature_ns)
        return log_soft_step(_margin_ns(self, counts), temperature_ns)

    def evaluate(
        self,
        before: GraphIoProfile | FusionBenefit,
        after: GraphIoProfile | None = None,
        *,
        temperature_ns: RealLike,
    ) -> "GateEvaluation":
        """Return benefit, score, decision and probability of a whole table in one program.

        Every field is what `fusion_benefit`, `score_ns`, `should_fuse` and `fuse_probability` return,
        to the last bit.

        Args:
            before: a benefit, or the profile without fusion.
            after: the profile with fusion, unless a benefit is given.
            temperature_ns: of the probability, scalar or `[*batch]`.

        Examples:
            >>> gate = IoFusionGate(dispatch_ns=500.0, min_gain_ns=1_000.0)
            >>> table = gate.evaluate(FusionBenefit(launches_saved=jnp.arange(3.0)), temperature_ns=100.0)
            >>> table.score_ns.tolist(), table.should_fuse.tolist()
            ([0.0, 500.0, 1000.0], [False, False, True])
        """
        temperature_ns = as_temperature(temperature_ns)
        if isinstance(before, FusionBenefit) or after is None:
            benefit = _benefit(before, after)
            counts = fields_of(_floats(benefit, self, temperature_ns))
            return GateEvaluation(benefit, *_evaluate(self, counts, temperature_ns, False)[1:4])
        is_checked = not is_traced(*jax.tree.leaves((self, before, after, temperature_ns)))
        benefit, counts = _benefit_and_counts(before, after, self, temperature_ns, is_checked)
        saved, *result, is_valid = _evaluate(self, counts, temperature_ns, is_checked)
        if is_valid is not None and (is_traced(is_valid) or not np.asarray(is_valid).all()):
            fusion_benefit(before, after)  # says which count is none
        return GateEvaluation(dataclasses.replace(benefit, **saved), *result)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GateEvaluation:
    """What a gate says of a table of fusions; every field `[*batch]`.

    Attributes:
        benefit: what each fusion saves.
        score_ns: the time that it saves, penalty included.
        should_fuse: whether the score reaches the minimum gain.
        fuse_probability: the smooth twin of that decision.
    """

    benefit: FusionBenefit
    score_ns: Nanoseconds
    should_fuse: Decision
    fuse_probability: Probability


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


@formula_jit
def _benefit_score_ns(gate: IoFusionGate, benefit: FusionBenefit) -> Nanoseconds:
    return base_score_ns(gate, benefit)


@formula_jit
def _score_ns(gate: IoFusionGate, benefit: FusionBenefit) -> Nanoseconds:
    return gate_score_ns(gate, benefit, Exact())


_margin_ns = formula_jit(gate_margin_ns)


@formula_jit
def _fuse_probability(gate: IoFusionGate, benefit: FusionBenefit, temperature_ns: RealLike) -> Probability:
    return gate_probability(gate, benefit, temperature_ns)


@functools.partial(formula_jit, static_argnames="is_checked")
def _evaluate(gate: IoFusionGate, counts: dict, temperature_ns: RealLike, is_checked: bool) -> tuple:
    """Return differences, score, decision, probability, and whether every count of a profile is one."""
    pairs = {name: pair for name, pair in counts.items() if isinstance(pair, tuple)}

    def differences(counts: dict) -> tuple[dict, FusionBenefit]:
        saved = {name: counts[name][0] - counts[name][1] for name in pairs}
        return saved, FusionBenefit(**{**counts, **saved})

    def evaluate(_, rows: tuple[IoFusionGate, dict, RealLike]) -> tuple:
        gate, counts, temperature_ns = rows
        saved, benefit = differences(counts)
        score_ns = gate_score_ns(gate, benefit, Exact())
        probability = soft_step(score_ns - gate.min_gain_ns, temperature_ns)
        is_count = [(counts[name][0] >= 0) & (counts[name][1] >= 0) for name in pairs]
        is_valid = functools.reduce(jnp.logical_and, is_count) if is_checked and pairs else None
        return saved, score_ns, score_ns >= gate.min_gain_ns, probability, is_valid

    def twin(results: tuple, _, rows: tuple[IoFusionGate, dict, RealLike]) -> tuple:
        gate, counts, temperature_ns = rows
        saved, benefit = differences(counts)
        score_ns = gate_score_ns(gate, benefit, Exact())
        return saved, score_ns, results[2], gate_probability(gate, benefit, temperature_ns), results[4]

    return in_one_loop(evaluate, twin)((), (gate, counts, temperature_ns))


@formula_jit
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


def _floats(benefit: FusionBenefit, gate: IoFusionGate, temperature_ns: RealLike = 1.0) -> FusionBenefit:
    counts = fields_of(benefit)
    for name, count in counts.items():
        check_not_nan(count, name)
    check_shapes(**counts, **fields_of(gate), temperature_ns=temperature_ns)
    return FusionBenefit(**{name: as_float(count, name) for name, count in counts.items()})


def _benefit_and_counts(
    before: GraphIoProfile,
    after: GraphIoProfile,
    gate: IoFusionGate,
    temperature_ns: RealLike,
    is_checked_later: bool,
) -> tuple[FusionBenefit, dict[str, RealLike | tuple[RealLike, RealLike]]]:
    """Return what the host subtracts, and floats for the program: of a field, or the pair to subtract.

    If the program checks its input, floats that a device holds pass here.
    """
    profiles = fields_of(before, "before.") | fields_of(after, "after.")
    check_shapes(**profiles, **fields_of(gate), temperature_ns=temperature_ns)
    benefit, counts = {}, {}
    names = [field.name for field in dataclasses.fields(FusionBenefit)]
    for saved, field in zip(names, dataclasses.fields(GraphIoProfile), strict=True):
        pair = getattr(before, field.name), getattr(after, field.name)
        for value, side in zip(pair, ("before", "after"), strict=True):
            if not (is_checked_later and is_on_device(value, jnp.floating)):
                check_at_least(value, f"{side}.{field.name}")
        if is_subtracted_on_host(*pair):
            benefit[saved] = difference(*pair, field.name)
            counts[saved] = as_float(benefit[saved], saved)
        else:
            first, second = (as_float(value, field.name) for value in pair)
            counts[saved] = first, second
    return FusionBenefit(**benefit), counts
