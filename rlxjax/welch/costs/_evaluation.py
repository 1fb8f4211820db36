"""Gate and strategy costs of a whole table of workloads, in one program."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from rlxjax._checks import LEAST_SIZES, is_traced
from rlxjax._counts import as_temperature
from rlxjax._numerics import Exact, soft_step
from rlxjax._typing import Code, Flag, Nanoseconds, Probability, RealLike
from rlxjax._values import by_value
from rlxjax.device._devices import Device
from rlxjax.device._gate import FusionBenefit

from ._coefficients import CoefficientSet
from ._costs import WelchPeaksCostEstimates, estimates_of
from ._formulas import Learned, decisions, gate_benefit, gather, min_gain_ns, strategy_terms
from ._inputs import strategy_inputs


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WelchPeaksEvaluation:
    """What gate and costs say of a table of runs of two segments; every field `[*batch]`.

    Attributes:
        benefit: what fusing saves, in floats.
        score_ns: the gate's score of it.
        should_fuse_io: whether the score reaches the gate's minimum gain.
        should_fuse: whether the compute floor allows it too.
        compute_floor_ok: whether it does.
        fuse_probability: the smooth form of `should_fuse_io`.
        costs: of each strategy, infinite where it is not to be used.
    """

    benefit: FusionBenefit
    score_ns: Nanoseconds
    should_fuse_io: Flag
    should_fuse: Flag
    compute_floor_ok: Flag
    fuse_probability: Probability
    costs: WelchPeaksCostEstimates


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
    probability, a scalar or `[*batch]`; the other arguments are as of `estimate_welch_peaks_costs`.

    Raises:
        ValueError: what `estimate_welch_peaks_costs` refuses, or a temperature that is not positive.

    Examples:
        >>> table = evaluate_welch_peaks("cuda", jnp.array([64, 8192]), 256, 16, temperature_ns=1e6)
        >>> table.should_fuse.tolist(), table.costs.pick_index().tolist()
        ([False, True], [0, 2])
    """
    learned = learned_available, learned_active_gates, learned_total_gates
    temperature_ns = as_temperature(temperature_ns)
    table = device, batch, n_fft, k, *learned, coefficients, temperature_ns
    is_checked = not is_traced(*jax.tree.leaves(table))
    inputs = strategy_inputs(*table, is_checked_later=is_checked)
    result, are_workloads = _evaluate(*inputs, temperature_ns, is_checked)
    if is_checked and (is_traced(are_workloads) or not are_workloads):
        strategy_inputs(*table)  # says which size is none
    return result


@functools.partial(jax.jit, static_argnames="is_checked")
def _evaluate(
    codes, set_, batch, n_fft, k, learned: Learned, temperature_ns, is_checked: bool
) -> tuple[WelchPeaksEvaluation, Flag | None]:
    """Return the table, and whether all its rows are workloads."""
    rules = Exact()
    row = gather(set_, codes)
    terms = strategy_terms(row, batch, n_fft, k, learned, rules)
    io, floor_ok = decisions(row, terms)
    benefit = gate_benefit(row, batch, n_fft, k, rules)
    probability = soft_step(terms.score_ns - min_gain_ns(row), temperature_ns)
    costs = estimates_of(row, terms, io, floor_ok)
    result = WelchPeaksEvaluation(benefit, terms.score_ns, io, io & floor_ok, floor_ok, probability, costs)
    leaves, structure = jax.tree.flatten(result)
    result = structure.unflatten(jnp.broadcast_arrays(*leaves))
    return result, jnp.all(_is_workload(codes, batch=batch, n_fft=n_fft, k=k)) if is_checked else None


def _is_workload(codes, **sizes) -> Flag:
    half = 0.5 * jnp.asarray(sizes["n_fft"])
    is_known = (jnp.asarray(codes) >= 0) & (jnp.asarray(codes) < len(Device)) & (half - jnp.floor(half) == 0)
    is_large = [jnp.asarray(size) >= LEAST_SIZES[name] for name, size in sizes.items()]
    return functools.reduce(jnp.logical_and, is_large, is_known)
