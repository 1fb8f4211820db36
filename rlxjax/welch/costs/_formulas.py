"""The reference's cost formulas."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import check_at_least, check_not_nan, check_shapes, fields_of, is_traced
from rlxjax._counts import as_temperature, size_as_float
from rlxjax._numerics import Choices, dot, log_soft_step, soft_step
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
from rlxjax.gate import (
    Device,
    FusionBenefit,
    added_syncs,
    gate_rates,
    normalised,
    parts_ns,
    take_row,
    without_provenance,
)
from rlxjax.welch._workload import FAST_SEGMENTS, ULTRA_SEGMENTS

from ._reference import (
    FFT_WORKS,
    FUSED_WORKS,
    FUSION_BENEFITS,
    HOST_WORKS,
    CoefficientSet,
    StrategyCoefficients,
    coefficient_set,
    columns_of,
    total,
)

#: The smallest allowed value of each size of a workload.
_LEAST_SIZES = {"batch": 0, "n_fft": 2, "k": 1, "n_segments": 1}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Workload:
    """A table of runs: their sizes as floats and their device codes, each `[*batch]`, and all devices' coefficients."""

    codes: Code
    table: CoefficientSet
    batch: RealLike
    n_fft: RealLike
    k: RealLike
    learned_available: RealLike
    active_gates: RealLike
    total_gates: RealLike
    temperature_ns: RealLike | None

    @classmethod
    def checked(
        cls,
        device: str | Code,
        batch: RealLike,
        n_fft: RealLike,
        k: RealLike,
        learned_available: RealLike = False,
        learned_active_gates: RealLike | None = None,
        learned_total_gates: RealLike = 0,
        coefficients: str | CoefficientSet = "arch",
        temperature_ns: RealLike | None = None,
        **others: RealLike,
    ) -> "Workload":
        """Check the arguments and return them as floats. The shapes of all arguments and of `others` must broadcast."""
        cpu = "cpu"
        if isinstance(device, str) and normalised(device) == "cpu-apple":
            device, cpu = Device.CPU, "cpu-apple"
        if isinstance(coefficients, str):
            coefficients = coefficient_set(coefficients, cpu)
        if not isinstance(coefficients, CoefficientSet):
            raise ValueError(f"coefficients: expected a name or a CoefficientSet, got {coefficients!r}")
        active_gates = -1.0 if learned_active_gates is None else learned_active_gates
        check_not_nan(active_gates, "learned_active_gates")
        check_at_least(learned_total_gates, "learned_total_gates")
        sizes = {"batch": batch, "n_fft": n_fft, "k": k}
        for name, value in (sizes | others).items():
            if name in _LEAST_SIZES:
                check_at_least(value, name, _LEAST_SIZES[name], "size")
        if not is_traced(n_fft) and not _all_even(np.asarray(n_fft)):
            raise ValueError(f"n_fft: expected an even number, got {n_fft}")
        sizes |= {"learned_available": learned_available, "learned_active_gates": active_gates}
        sizes |= {"learned_total_gates": learned_total_gates}
        codes = Device.codes(device)
        temperature_ns = None if temperature_ns is None else as_temperature(temperature_ns)
        check_shapes(device=codes, **sizes, **others, temperature_ns=temperature_ns)
        rows = {name: without_provenance(getattr(coefficients, name)) for name in ("host", "backend")}
        table = dataclasses.replace(coefficients, **rows)
        floats = (size_as_float(size, name) for name, size in sizes.items())
        return cls(codes, table, *floats, temperature_ns=temperature_ns)

    @functools.cached_property
    def strategy(self) -> StrategyCoefficients:
        return take_row(self.table.strategy, self.codes)

    def rates(self, of: Callable[[CoefficientSet], list[RealLike]], rules: Choices) -> list[RealLike]:
        """Return the rates of each run's device. The hard form computes the rates of all devices, and then selects."""
        if rules.temperature_ns is None:
            return take_row(of(self.table), self.codes)
        parts = {name: getattr(self.table, name) for name in ("backend", "gate", "strategy")}
        return of(dataclasses.replace(self.table, **take_row(parts, self.codes)))

    @property
    def gates_known(self) -> Flag:
        """Whether both numbers of gates are known. A negative number of active gates stands for an unknown number."""
        return (jnp.asarray(self.active_gates) >= 0) & (jnp.asarray(self.total_gates) > 0)

    @property
    def learned_usable(self) -> Flag:
        """Whether a learned FFT is available and fewer than a quarter of its gates are active."""
        sparse = jnp.asarray(4.0 * self.active_gates < self.total_gates)
        return self.gates_known & sparse & (jnp.asarray(self.learned_available) >= 0.5)


def _all_even(numbers: np.ndarray) -> bool:
    if numbers.dtype.kind != "f":
        return not np.any(numbers % 2)
    halves = 0.5 * numbers  # a float remainder is ten times slower
    with np.errstate(invalid="ignore"):
        return bool(np.all(halves - np.floor(halves) == 0))


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WelchPeaksCostEstimates:
    """The cost of each strategy in ns, `[*batch]`. A strategy that is ruled out has an infinite cost."""

    ultra_ns: Nanoseconds
    fast_ns: Nanoseconds
    rlx_ns: Nanoseconds
    learned_ns: Nanoseconds

    def stack(self) -> StrategyCosts:
        """Return the four costs along a new last axis, in the order of `ReferenceStrategy`."""
        fields = (self.ultra_ns, self.fast_ns, self.rlx_ns, self.learned_ns)
        return jnp.stack(jnp.broadcast_arrays(*fields), -1)

    def pick_index(self) -> Code:
        """Return the code of the cheapest strategy, `[*batch]`. Among equal costs, the earlier strategy is returned."""
        return jnp.argmin(self.stack(), -1)


@by_value
class WelchPeaksGateBreakdown(NamedTuple):
    """Whether the gate fuses a run, and the numbers that decide it. Every field has the shape `[*batch]`."""

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
    """The gate's decisions and the strategy costs for a table of runs of two segments. Fields have shape `[*batch]`.

    Attributes:
        benefit: the numbers of launches, syncs and bytes that fusing saves, as floats.
        score_ns: the gate's score of the benefit in ns.
        min_gain_ns: the smallest score in ns that the gate accepts.
        should_fuse_io: whether `score_ns` is at least `min_gain_ns`.
        should_fuse: whether `should_fuse_io` and `compute_floor_ok` are both true.
        compute_floor_ok: whether the fused cost is low enough compared with the block cost.
        fuse_probability: the smooth form of `should_fuse_io`, a number from 0 to 1.
        costs: the cost of each strategy. A strategy that is ruled out has an infinite cost, except in the smooth form.
        log_fuse_probability: logarithm of the probability that `should_fuse` is true; only in the smooth form.
        log_keep_probability: logarithm of the probability that `should_fuse` is false; only in the smooth form.
        available: 1.0 for each available strategy, 0.0 for each other one, `[*batch, 4]`; only in the smooth form.
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
        """Return the logarithm of each strategy's availability. The gate decides on rlx and learned only."""
        fuse = jnp.asarray(self.log_fuse_probability)
        always = jnp.zeros_like(fuse)
        return jnp.where(jnp.asarray(self.available) > 0.5, jnp.stack([always, always, fuse, fuse], -1), -jnp.inf)


def learned_scale(active_gates: RealLike, total_gates: RealLike) -> RealLike:
    """Return the work of a pruned learned FFT divided by the work of the fused graph. The result is at least 0.3."""
    return 0.30 + 0.70 * active_gates / total_gates


def host_price(work: Workload, n_segments, scale, rules: Choices) -> Nanoseconds:
    columns = (work.batch * (n_segments + 1.0), *columns_of(work.batch, work.n_fft, work.k, n_segments))
    host, slopes = work.table.host, work.strategy
    ns = jnp.add(host.roundtrip_ns, dot(columns, parts_ns(HOST_WORKS, total(HOST_WORKS, columns), host, rules)))
    log_rows = jnp.log(jnp.maximum(work.batch, 1.0) / 512.0)
    gentle = rules.relu(log_rows, scale=ns)
    steep = rules.relu((log_rows - math.log(4.0)) * (1.0 / math.log(2.0)), scale=ns)  # log2(rows / 2048)
    return ns * (1.0 + slopes.log_batch_slope * gentle) * (1.0 + slopes.log2_batch_slope * steep)


def fused_price(work: Workload, n_segments, scale, rules: Choices) -> Nanoseconds:
    io_ns = _graph_ns(FUSED_WORKS, work, n_segments, rules)
    factor = work.strategy.fused_scale * rules.clip(scale, 0.25, 1.0, scale=io_ns)
    floor_ns = work.strategy.fused_floor_ns * work.strategy.is_gpu
    floor_ns = floor_ns * (1.0 - rules.at_least(work.batch, 512.0, scale=io_ns))
    # The smooth clip would pull a scale of exactly 1 below the threshold, so the hard clip decides.
    hard_factor = work.strategy.fused_scale * jnp.clip(scale, 0.25, 1.0)
    floor_ns = floor_ns + rules.at_least(hard_factor, 1.0, scale=io_ns) * io_ns
    return rules.maximum(io_ns * factor, floor_ns)


def block_price(work: Workload, n_segments, scale, rules: Choices) -> Nanoseconds:
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
    """Return the gate's score for a run of two segments."""

    def rates(set_: CoefficientSet) -> list[RealLike]:
        worth = gate_rates(set_.gate, benefit, rules)
        parts = [dot([*fields_of(part).values()], worth) for part in FUSION_BENEFITS]
        return [*parts, set_.gate.roundtrip_ns, set_.gate.host_thunk_penalty_ns]

    found, syncs = work.rates(rates, rules), benefit.sync_points_saved
    columns = columns_of(work.batch, work.n_fft, work.k, FAST_SEGMENTS)
    return dot((1.0, *columns, syncs, -added_syncs(syncs, found[-1], rules)), found)


@functools.partial(jax.jit, static_argnames="smooth")
def evaluation(work: Workload, smooth: bool = False) -> WelchPeaksEvaluation:
    temperature_ns = 1.0 if work.temperature_ns is None else work.temperature_ns
    rules, strategy = Choices(temperature_ns if smooth else None), work.strategy
    fused_ns, block_ns = (f(work, FAST_SEGMENTS, 1.0, rules) for f in (fused_price, block_price))
    known = work.gates_known
    scale = learned_scale(work.active_gates, jnp.where(known, work.total_gates, 1.0))
    learned_ns = fused_price(work, FAST_SEGMENTS, jnp.where(known, scale, 1.0), rules)
    ultra_ns, fast_ns = (host_price(work, segments, 1.0, rules) for segments in (ULTRA_SEGMENTS, FAST_SEGMENTS))

    # A native kernel saves its sync point if the batch has 2048 rows or more.
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
        # The logarithm of P(floor ok) = 1 - applies * P(margin < 0).
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
    table = WelchPeaksEvaluation(*structure.unflatten(jnp.broadcast_arrays(*leaves)))
    if not smooth:
        return table
    possible = jnp.broadcast_arrays(ultra_possible, True, viable, learned_possible, table.score_ns)[:4]
    return dataclasses.replace(table, available=jnp.stack(possible, -1).astype(table.score_ns.dtype))


@jax.jit
def hard_costs(work: Workload) -> WelchPeaksCostEstimates:
    return evaluation(work).costs


def _log_share(share: jax.Array) -> LogProbability:
    """Return the logarithm of a share. At 0, the logarithm is minus infinity, and its derivative is finite."""
    positive = share > 0.0
    return jnp.where(positive, jnp.log(jnp.where(positive, share, 1.0)), -jnp.inf)


def _log_complement(log_p: LogProbability) -> LogProbability:
    """Return `log(1 - exp(log_p))`, accurate for probabilities near 0 and near 1."""
    log_p = jnp.minimum(log_p, -jnp.finfo(log_p.dtype).tiny)
    near_one = log_p > -math.log(2.0)
    return jnp.where(
        near_one,
        jnp.log(-jnp.expm1(jnp.where(near_one, log_p, -1.0))),
        jnp.log1p(-jnp.exp(jnp.where(near_one, -1.0, log_p))),
    )
