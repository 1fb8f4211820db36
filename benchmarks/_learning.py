"""Learn the weights that machines share from timings of many programs on several machines, by optax.

With `w` the weight of an operation and `k` the machine, `log w_k = log w + shift of the class of operations on k`: the
weights are shared, and each machine has its own shifts. The unknowns are weights, shifts, and the pace of the machine
during each batch of programs. `optax.lbfgs` maximises one robust posterior over all unknowns.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from rlxjax.fit import predicted_ns
from rlxjax.jaxpr import CLASSES, OPERATIONS, FunctionProfile, Kernels, stacked
from rlxjax.models._coefficients import prior_of
from rlxjax.models._functions import PROFILE_FIELDS, FunctionCoefficients, kernel_runs
from rlxjax.models._weights import BELIEVED, WIDE_LOG_SD, WIDE_SCATTER, WIDTHS, KnownWeights, Weights, wide_weights

#: Prior standard deviations of logarithms: of an operation's own weight, of a class at a width of numbers, of an
#: operation at a width, and of a machine's pace while a batch was timed.
OPERATION_SD, CLASS_WIDTH_SD, OPERATION_WIDTH_SD, PACE_SD = 1.0, 1.0, 1.2, 0.15
#: Standard deviation of the logarithm of a time beyond what the model explains, and of weights between machines.
TIME_SD, MACHINES_SD, HUBER_DELTA = 0.12, 0.15, 2.0
#: Standard deviation of a coefficient's logarithm between machines, as one machine more.
COEFFICIENT_SD = 0.5
#: The width of numbers that weights are of, others are relative to it: 4 bytes.
_WORD = 2
STEPS = 250


class TimedPrograms(NamedTuple):
    """Timed programs with equal numbers of kernel rows; columns `[n]`."""

    kernels: Kernels  # `[n, kernels]`
    sizes: Mapping[str, Any]  # by name: arrays, results, trips, static_ops, peak_bytes
    time_ns: Float[np.ndarray, "n"]
    batch: Int[np.ndarray, "n"]  # of programs that were timed together, over all machines
    machine: Int[np.ndarray, "n"]  # from 0
    influence: Float[np.ndarray, "n"]  # how much each counts, 1 as a rule


class Learned(NamedTuple):
    """The result of learning from timings."""

    known: KnownWeights  # with what they say of a further machine
    machines: FunctionCoefficients  # of each machine, `[machines]`
    pace: Float[np.ndarray, "batches"]  # the logarithm of how much slower a machine was while a batch was timed


def timed_programs(
    profiles: Sequence[FunctionProfile],
    time_ns: Sequence[float],
    batch: Sequence[int],
    machine: Sequence[int],
    influence: Sequence[float] | np.ndarray | None = None,
) -> list[TimedPrograms]:
    """Return programs grouped by how many rows of kernels they have, to a power of four, so that little is padded."""
    width = np.array([-(-max(len(profile.kernels) - 1, 3).bit_length() // 2) for profile in profiles])
    columns, groups = [np.asarray(each) for each in (time_ns, batch, machine)], []
    columns.append(np.ones(len(width)) if influence is None else np.asarray(influence))
    for own in np.unique(width).tolist():
        rows = np.flatnonzero(width == own)
        chosen = [profiles[row] for row in rows.tolist()]
        sizes = {name: np.array([getattr(one, name) for one in chosen], float) for name in PROFILE_FIELDS}
        kernels = stacked([one.kernels for one in chosen], 4**own)
        groups.append(TimedPrograms(kernels, sizes, *(column[rows] for column in columns)))
    return groups


def _unknowns(machines: int, batches: int) -> tuple[dict[str, Any], dict[str, Any]]:
    prior, wide = prior_of(FunctionCoefficients, log_sd=0.8), wide_weights()
    names = list(FunctionCoefficients.__dataclass_fields__)
    start = {
        "operation": np.log(wide.operation_ns[:, _WORD]),
        "class_width": np.zeros((len(CLASSES), WIDTHS)),
        "operation_width": np.zeros((len(OPERATIONS), WIDTHS)),
        "pace": np.zeros(batches),
        "coefficients": {name: np.full(machines, np.log(getattr(prior.median, name))) for name in names},
        "others": {name: np.log(getattr(wide, name)) for name in BELIEVED},
    }
    sds = {
        "operation": OPERATION_SD,
        "class_width": CLASS_WIDTH_SD,
        "operation_width": OPERATION_WIDTH_SD,
        "pace": PACE_SD,
        "coefficients": {name: float(getattr(prior.log_sd, name)) for name in names},
        "others": {name: one.log_sd for name, one in BELIEVED.items()},
    }
    return start, sds


def _weights(logs: Mapping[str, Any]) -> Weights:
    """Return weights by the unknowns' logarithms; one whose spread is not asked for."""
    of_class = np.array([CLASSES.index(OPERATIONS[name]) for name in OPERATIONS])
    widths = jnp.asarray(logs["class_width"])[of_class] + logs["operation_width"]
    widths = widths.at[:, _WORD].set(0.0)
    operation_ns = jnp.exp(jnp.asarray(logs["operation"])[:, None] + widths)
    others = {name: jnp.exp(leaf) for name, leaf in logs["others"].items()}
    return Weights(operation_ns, jnp.zeros_like(operation_ns), **others)


def _log_ns(logs: Mapping[str, Any], group: TimedPrograms) -> Array:
    own = {name: jnp.exp(jnp.asarray(value))[group.machine] for name, value in logs["coefficients"].items()}
    coefficients = FunctionCoefficients(**own)
    runs = kernel_runs(group.kernels, _weights(logs), **group.sizes)
    return jnp.log(predicted_ns(coefficients, runs, {})) + jnp.asarray(logs["pace"])[group.batch]


def learned_weights(
    groups: Sequence[TimedPrograms],
    provenance: Mapping[str, Any] | None = None,
    steps: int = STEPS,
    scatter: float = WIDE_SCATTER,
    known: KnownWeights | None = None,
    only: Sequence[str] = (),
) -> Learned:
    """Return the most probable weights for the timed programs of all machines.

    Args:
        groups: timed programs of all machines.
        provenance: facts about the timings, kept with the weights.
        steps: count of L-BFGS steps.
        scatter: standard deviation of the logarithm of a time that no fit saw.
        known: weights and medians that stay as they are, without those named in `only`.
        only: names in `BELIEVED` of the weights to learn, if `known` is given.

    Raises:
        ValueError: no program.
    """
    if not groups:
        raise ValueError("groups: expected timed programs, got none")
    machines = 1 + max(int(group.machine.max()) for group in groups)
    batches = 1 + max(int(group.batch.max()) for group in groups)
    start, sds = _unknowns(machines, batches)
    if known is not None:
        operation, kept = np.log(known.weights.operation_ns), [name for name in BELIEVED if name not in only]
        start |= {"operation": operation[:, _WORD], "operation_width": operation - operation[:, [_WORD]]}
        start["coefficients"] |= {name: np.full(machines, np.log(value)) for name, value in known.median.items()}
        start["others"] |= {name: np.log(getattr(known.weights, name)) for name in kept}
        sds |= dict.fromkeys(("operation", "class_width", "operation_width"), 0.0)
        sds |= {"coefficients": dict.fromkeys(known.median, 0.0), "others": sds["others"] | dict.fromkeys(kept, 0.0)}
    spread = jax.tree.map(lambda leaf, own: np.full(np.shape(leaf), own), start, sds)

    def logs_of(z: Any) -> Any:
        return jax.tree.map(lambda first, own, each: first + own * each, start, spread, z)

    def misfit(residual: Array) -> Array:
        return optax.losses.huber_loss(residual / TIME_SD, delta=HUBER_DELTA)

    @jax.jit
    def loss(z: Any) -> Array:
        logs = logs_of(z)
        fits = (jnp.sum(g.influence * misfit(_log_ns(logs, g) - jnp.log(g.time_ns))) for g in groups)
        return sum(fits) + 0.5 * optax.tree.norm(z, squared=True)

    z = _minimised(loss, jax.tree.map(jnp.zeros_like, start), steps)
    logs = jax.device_get(logs_of(z))
    weights = jax.device_get(_weights(logs))
    machines_own = FunctionCoefficients(**{name: np.exp(value) for name, value in logs["coefficients"].items()})
    if known is not None:
        weights = dataclasses.replace(known.weights, **{name: getattr(weights, name) for name in only})
        known = dataclasses.replace(known, weights=weights, provenance=dict(provenance or {}))
        return Learned(known, machines_own, logs["pace"])
    weights = dataclasses.replace(weights, operation_log_sd=_operation_log_sd(logs, groups))
    means = {name: float(np.mean(value)) for name, value in logs["coefficients"].items()}
    log_sd = {}
    for name, value in logs["coefficients"].items():
        own_sd = np.sqrt((COEFFICIENT_SD**2 + np.sum((value - means[name]) ** 2)) / machines)
        log_sd[name] = float(min(own_sd, sds["coefficients"][name]))
    median = {name: float(np.exp(mean)) for name, mean in means.items()}
    known = KnownWeights(weights, median, log_sd, scatter, dict(provenance or {}))
    return Learned(known, machines_own, logs["pace"])


def _minimised(loss: Any, z: Any, steps: int) -> Any:
    solver = optax.lbfgs(memory_size=20)
    value_and_grad = optax.value_and_grad_from_state(loss)

    @jax.jit
    def run(z: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            z, state = carry
            value, slope = value_and_grad(z, state=state)
            with jax.numpy_dtype_promotion("standard"):  # optax counts steps in int32 and int64
                update, state = solver.update(slope, state, z, value=value, grad=slope, value_fn=loss)
            return (optax.apply_updates(z, update), state), None

        return jax.lax.scan(step, (z, solver.init(z)), None, length=steps)[0][0]

    return run(z)


def _operation_log_sd(logs: Mapping[str, Any], groups: Sequence[TimedPrograms]) -> np.ndarray:
    """Return the standard deviation of each log weight by operation and width, machine differences included."""

    def told(name: str) -> np.ndarray:
        """Return the diagonal of the curvature of the misfit of all programs."""

        def log_ns(own: Array, one: TimedPrograms) -> Array:
            return _log_ns({**logs, name: own}, jax.tree.map(lambda leaf: leaf[None], one))[0]

        each = jax.jit(jax.vmap(jax.grad(log_ns), (None, 0)))
        slopes = [(group.influence, each(jnp.asarray(logs[name]), group)) for group in groups]
        return np.sum([np.tensordot(counted, np.asarray(slope) ** 2, 1) for counted, slope in slopes], 0) / TIME_SD**2

    of_operation, of_width = told("operation")[:, None], told("operation_width")
    width_variance = 1.0 / (1.0 / (OPERATION_WIDTH_SD**2 + CLASS_WIDTH_SD**2) + of_width)
    width_variance[:, _WORD] = 0.0
    variance = 1.0 / (1.0 / OPERATION_SD**2 + of_operation) + width_variance + MACHINES_SD**2
    return np.where(of_operation > 0, np.sqrt(variance), WIDE_LOG_SD)
