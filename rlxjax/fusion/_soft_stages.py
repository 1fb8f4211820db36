"""The relaxed time of a plan of stages: differentiable in one variable an edge, and its minimisation.

Edges with the largest variables fuse first. So the variables say a chain of plans, each the one before with
two groups merged, from every stage alone to all connected stages together. With a threshold between 0 and 1
for the probabilities of edges, one of these plans is chosen; the relaxed time is the mean of the exact times
over all thresholds, which is the extension of a set function by Lovász (1983, "Submodular functions and
convexity"). The best plan of the chain therefore takes at most the relaxed time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from rlxjax._numerics import soft_step
from rlxjax._typing import Nanoseconds, RealLike

from ._stages import StageGraph, group_ns

#: Steps of the minimisation, the temperatures of the first and the last, and the share of it that the relaxation has;
#: the rest is noise.
STEPS, HOT, COLD, RELAXED_SHARE = 60, 1.0, 0.1, 0.3
LEARNING_RATE = 0.1


@jax.jit
def soft_plan_ns(
    graph: StageGraph, logits: Float[Array | np.ndarray, "*batch edges"], temperature: RealLike
) -> Nanoseconds:
    """Return the relaxed time of a plan in ns, `[*batch]`.

    With `p = soft_step(logits, temperature)`, it is the mean, over thresholds uniform between 0 and 1, of what
    the plan takes in which edges of a `p` above the threshold are fused: all stages that they connect are one
    group. As the temperature goes to 0, it tends to the time of the plan that fuses the edges of positive
    logits. It does not ask whether a plan can run. It is piecewise smooth: where two edges of different gain
    swap their order, its derivative jumps.

    Args:
        graph: the stages. Its floats may be traced; its numbers of stages may not have a batch.
        logits: of each edge, of no unit: positive to fuse.
        temperature: of the same scale, a positive number.

    Raises:
        ValueError: not one variable an edge.

    Examples:
        >>> graph = StageGraph.checked([50.0, 80.0], [(0, 1, 4000)], launch_ns=900.0, bytes_per_ns=10.0)
        >>> [round(float(soft_plan_ns(graph, jnp.array([logit]), 0.1))) for logit in (-9.0, 0.0, 9.0)]
        [2600, 1815, 1030]
    """
    logits, edges = jnp.asarray(logits), len(graph.producer)
    if logits.shape[-1:] != (edges,):
        raise ValueError(f"logits: expected one an edge, {edges}, got shape {logits.shape}")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        logits = logits.astype(float)
    return jnp.vectorize(lambda row: _mean_ns(graph, row, temperature, 1.0, 0.0), signature="(edges)->()")(logits)


def _mean_ns(
    graph: StageGraph, logits: Array, temperature: RealLike, is_stage: RealLike, price: RealLike
) -> Float[Array, ""]:
    """Return the mean over thresholds of the time and the priced peak, of edges `[edges]`."""
    if not logits.size:
        order, falls = jnp.zeros(0, int), jnp.ones(1)
    else:
        order = jnp.argsort(-jax.lax.stop_gradient(logits))
        chosen = soft_step(logits[order], temperature)
        falls = -jnp.diff(chosen, prepend=1.0, append=0.0)
    time, peak = chain_of_plans(graph, order, is_stage)
    return jnp.dot(falls.astype(time.dtype), time + price * peak)


def chain_of_plans(
    graph: StageGraph, order: Int[Array, " edges"], is_stage: RealLike = 1.0
) -> tuple[Float[Array, " plans"], Float[Array, " plans"]]:
    """Return the time and the peak of every stage alone, and after each edge of an order is fused.

    Every group stands as neighbours in one row of all stages; a gap between two of the row remembers the step
    that closed it. The ends of a value meet at the steps that close the widest gaps between them.

    Args:
        graph: the stages.
        order: of the edges.
        is_stage: 1 for stages, 0 for what fills the columns up.
    """
    stages, edges = len(graph.compute_ns), len(graph.producer)
    ends = jnp.asarray(graph.producer)[order], jnp.asarray(graph.consumer)[order]
    numbers = jnp.arange(stages)

    def merge(state, step):
        (label, place, size, last, gap), (i, j, step) = state, step
        a, b = label[i], label[j]
        merged = a != b
        moved = (label == b) & merged
        gap = gap.at[last[a]].set(jnp.where(merged, step, gap[last[a]]))
        place = jnp.where(moved, place + size[a], place)
        size = size.at[a].add(jnp.where(merged, size[b], 0))
        last = last.at[a].set(last[b])
        return (jnp.where(moved, a, label), place, size, last, gap), (a, b, merged)

    start = (numbers, jnp.zeros_like(numbers), jnp.ones_like(numbers), numbers, jnp.full(stages, edges))
    (label, place, _, _, gap), (a, b, merged) = jax.lax.scan(merge, start, (*ends, jnp.arange(edges)))
    row = jnp.lexsort((place, label))
    place, gap = jnp.zeros_like(row).at[row].set(numbers), gap[row]
    widest = _widest(gap)

    # What each stage alone does, and what each step changes of the two groups that it merges.
    alone, change = _counts(graph, place, widest, edges)

    def total(state, step):
        groups, time, peak = state
        a, b, merged, change = step
        group = groups[a] + groups[b] + change
        gain = _time(graph, groups[a]) + _time(graph, groups[b]) - _time(graph, group)
        time = time - jnp.where(merged, gain, 0.0)
        peak = jnp.where(merged, jnp.maximum(peak, group[2]), peak)
        return (groups.at[a].set(jnp.where(merged, group, groups[a])), time, peak), (time, peak)

    first = jnp.sum(jnp.asarray(is_stage, alone.dtype) * _time(graph, alone.T)), jnp.max(alone[:, 2], initial=0.0)
    _, following = jax.lax.scan(total, (alone, *first), (a, b, merged, change))
    time, peak = (jnp.concatenate([x[None], xs]) for x, xs in zip(first, following, strict=True))
    return time, peak


def _time(graph: StageGraph, counts: Array) -> Array:
    """Return what groups take, of counts `[3, *batch]`: arithmetic, traffic and peak."""
    return group_ns(graph, counts[0], counts[1])


def _counts(graph: StageGraph, place: Array, widest, edges: int) -> tuple[Array, Array]:
    """Return arithmetic, traffic and peak of each stage alone, and what the steps change of them."""
    producer, consumer = jnp.asarray(graph.producer), jnp.asarray(graph.consumer)
    external = jnp.asarray(graph.external_read_bytes) + jnp.asarray(graph.external_written_bytes)
    dtype = jnp.result_type(float, external, graph.compute_ns, graph.edge_bytes, graph.launch_ns)
    alone = jnp.stack([jnp.asarray(column, dtype) for column in (graph.compute_ns, external, external)], 1)
    # The ends of values, those of one value next to each other and in the order of the row.
    value, stage = jnp.tile(jnp.asarray(graph.value), 2), jnp.concatenate([producer, consumer])
    size = jnp.tile(jnp.asarray(graph.edge_bytes, dtype), 2)
    order = jnp.lexsort((place[stage], value))
    value, stage, size = value[order], stage[order], size[order]
    same_value = jnp.concatenate([jnp.zeros(1, bool), value[1:] == value[:-1]])[: len(value)]
    new = ~(same_value & (stage == jnp.roll(stage, 1)))
    alone = alone.at[stage, 1:].add(jnp.where(new, size, 0.0)[:, None])
    meets = jnp.where(same_value & new, widest(place[jnp.roll(stage, 1)], place[stage]), -1)
    # A step at which ends of a value meet saves a read; the last of them saves the write too. Steps of -1 and
    # `edges` are none: they go to a row that is cut off.
    lasts = jax.ops.segment_max(meets, value, edges + 1)
    sizes = jnp.zeros(edges + 1, dtype).at[value].set(size)
    change = jnp.zeros((edges + 1, 3), dtype)
    change = change.at[jnp.where(meets < 0, edges, meets), 1:].add(-size[:, None])
    change = change.at[jnp.where(lasts < 0, edges, lasts), 1].add(-sizes)
    places = place[producer], place[consumer]
    joins = widest(jnp.minimum(*places), jnp.maximum(*places))
    change = change.at[joins, 0].add(jnp.asarray(graph.fused_ns, dtype))
    return alone, change[:edges]


def _widest(gap: Int[Array, " stages"]):
    """Return a function of two places of the row, the lower first: the last step that closes a gap between them.

    From a table of the largest of every 1, 2, 4, ... neighbours; the same place twice gives one gap.
    """
    table = [gap]
    while 2 ** len(table) <= len(gap):
        half = 2 ** (len(table) - 1)
        table.append(jnp.maximum(table[-1], jnp.roll(table[-1], -half)))
    tables = jnp.stack(table)

    def widest(low: Array, high: Array) -> Array:
        length = jnp.maximum(high - low, 1)
        level = (31 - jax.lax.clz(length.astype(jnp.int32))).astype(length.dtype)
        return jnp.maximum(tables[level, low], tables[level, high - 2**level])

    return widest


@jax.jit
def minimised_logits(
    graph: StageGraph, is_stage: Array, start: Array, price: RealLike, seed: RealLike
) -> Float[Array, "starts edges"]:
    """Return the logits at which the relaxed time and priced peak are low, from starts `[starts, edges]`, by Adam.

    The temperature falls from `HOT` to `COLD`. Every step adds logistic noise of the temperature: as a mean over
    steps, edges then fuse independently of each other, and each meets the others in many orders. Without noise
    most edges would only ever be tried after all edges of a larger variable.
    """
    alone = chain_of_plans(graph, jnp.arange(start.shape[-1]), is_stage)
    scale = alone[0][0] + price * alone[1][0]
    optimiser = optax.adam(LEARNING_RATE)

    def loss(logits, temperature, key):
        noisy = logits + temperature * jax.random.logistic(key, logits.shape, logits.dtype)
        relaxed = functools.partial(
            _mean_ns, graph, temperature=RELAXED_SHARE * temperature, is_stage=is_stage, price=price
        )
        return jnp.sum(jax.vmap(relaxed)(noisy)) / scale

    def step(state, step):
        logits, moments = state
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in int32
            updates, moments = optimiser.update(jax.grad(loss)(logits, *step), moments)
        return (logits + updates, moments), None

    temperatures = jnp.geomspace(HOT, COLD, STEPS, dtype=start.dtype)
    keys = jax.random.split(jax.random.key(seed), STEPS)
    (logits, _), _ = jax.lax.scan(step, (start, optimiser.init(start)), (temperatures, keys))
    return logits
