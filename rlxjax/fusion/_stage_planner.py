"""Plans of stages: which pieces of a program are one, by gradient, greedily, or by trying all."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from rlxjax._checks import as_index, check_at_least

from ._soft_stages import minimised_logits
from ._stage_groups import HostGraph
from ._stage_search import MOST_STAGES, Groups, exact_groups, greedy_groups, groups_by_order, improved_groups
from ._stages import StageGraph, StagePlan

#: Up to so many stages, all starts are improved and every cap on the peak is tried; above, so many of the best.
SMALL, MOST_IMPROVED = 32, 3
#: Starts of the gradient, an even number, and the standard deviation of their noise: of small graphs, and of others.
STARTS = {True: (8, 1.0), False: (4, 0.5)}
#: Columns are filled up to this at least.
LEAST_FILLED = 32
#: The next cap on the peak of a large graph, as a share of the last plan's peak.
NEXT_CAP = 0.8


def plan_stages(
    graph: StageGraph, *, method: str = "gradient", peak_price_ns_per_byte: float = 0.0, seed: int = 0
) -> StagePlan:
    """Decide which stages of a program are one: the least time plus priced peak, by the formula of `StageGraph`.

    Every plan can run: no way leads out of a group and back into it. The stages of a group are connected by
    edges inside it. `plan_fusion` plans the kernels of a graph of known ops by launches and bytes; here a stage
    is a whole program with arithmetic of its own, and fusing may cost time.

    Args:
        graph: the stages.
        method: "gradient" minimises `soft_plan_ns` plus the priced peak from several starts, fuses the edges in
            the order of the variables found as far as that pays, and moves stages while that saves time; the
            plan is never worse than the greedy one. "greedy" makes one group of the two that save most, until
            none saves. (The greedy plan of `plan_fusion`, the reference's, asks for no cost: it takes chains in
            the order of the nodes.) "exhaustive" tries all plans of at most 12 stages.
        peak_price_ns_per_byte: what a byte held by the largest group costs, in ns.
        seed: of the starts of "gradient".

    Raises:
        ValueError: an unknown method, a negative price or seed, or too many stages for "exhaustive".

    Examples:
        >>> graph = StageGraph.checked(
        ...     [50.0, 80.0, 60.0], [(0, 1, 4000), (1, 2, 800)], launch_ns=900.0, bytes_per_ns=10.0, fused_ns=[0, 5000]
        ... )
        >>> plan = plan_stages(graph)
        >>> plan.groups, plan.time_ns
        (((0, 1), (2,)), 2010.0)
    """
    methods = {"gradient": _gradient, "greedy": _greedy, "exhaustive": _exhaustive}
    if method not in methods:
        raise ValueError(f"method: expected one of {', '.join(methods)}, got {method!r}")
    check_at_least(peak_price_ns_per_byte, "peak_price_ns_per_byte", what="number")
    as_index(seed, "seed")
    host = HostGraph(graph)
    return host.plan(methods[method](host, float(peak_price_ns_per_byte), seed), method)


def pareto_plans(
    graph: StageGraph, prices: Sequence[float], *, method: str = "gradient", seed: int = 0
) -> list[StagePlan]:
    """Return the plans that prices on peak memory lead to and no other of them beats in time and peak both.

    Args:
        graph: the stages.
        prices: of a byte of the peak, in ns.
        method: of `plan_stages`.
        seed: of `plan_stages`.

    Returns:
        The plans in the order of their time: each takes longer than the one before and holds less.

    Raises:
        ValueError: what `plan_stages` refuses.

    Examples:
        >>> graph = StageGraph.checked([50.0, 80.0], [(0, 1, 4000)], launch_ns=900.0, bytes_per_ns=10.0,
        ...     external_read_bytes=1000)
        >>> [(plan.time_ns, plan.peak_bytes) for plan in pareto_plans(graph, [0.0, 0.1, 10.0])]
        [(1100.0, 6000.0), (2800.0, 5000.0)]
    """
    plans = [plan_stages(graph, method=method, peak_price_ns_per_byte=price, seed=seed) for price in prices]
    front: list[StagePlan] = []
    for plan in sorted(plans, key=lambda plan: (plan.time_ns, plan.peak_bytes)):
        if not front or plan.peak_bytes < front[-1].peak_bytes:
            front.append(plan)
    return front


def _alone(host: HostGraph) -> Groups:
    return [(i,) for i in range(len(host.compute))]


def _greedy(host: HostGraph, price: float, seed: int) -> Groups:
    del seed
    return greedy_groups(host, price)


def _exhaustive(host: HostGraph, price: float, seed: int) -> Groups:
    del seed
    if len(host.compute) > MOST_STAGES:
        raise ValueError(f"method: expected at most {MOST_STAGES} stages for 'exhaustive', got {len(host.compute)}")
    return exact_groups(host, price)


def _gradient(host: HostGraph, price: float, seed: int) -> Groups:
    """Return the best of greedy's groups, and of those by the logits, under lower and lower caps on the peak."""
    alone, greedy = _alone(host), _greedy(host, price, seed)
    if not host.edges:
        return alone
    whole = host.connected(range(len(alone)))
    least_peak = max(host.group(group).peak for group in alone)
    orders = np.argsort(-_logits(host, greedy, price, seed), axis=1, kind="stable").tolist()
    small = len(alone) <= SMALL
    best, cap = (_time(host, greedy) + price * _peak(host, greedy), greedy), math.inf
    while True:
        starts = [greedy, alone, whole, *(groups_by_order(host, order, price, cap) for order in orders)]
        starts = sorted((s for s in starts if _peak(host, s) <= cap), key=functools.partial(_time, host))
        found = [improved_groups(host, groups, cap) for groups in (starts if small else starts[:MOST_IMPROVED])]
        groups = min(found, key=functools.partial(_time, host))
        time, peak = _time(host, groups), _peak(host, groups)
        best = min(best, (time + price * peak, groups))
        if price == 0 or peak <= least_peak or time + price * least_peak >= best[0]:
            return best[1]
        cap = max(least_peak, peak * (1 - 1e-9 if small else NEXT_CAP))


def _time(host: HostGraph, groups: Groups) -> float:
    return sum(host.group(group).time for group in groups)


def _peak(host: HostGraph, groups: Groups) -> float:
    return max(host.group(group).peak for group in groups)


def _logits(host: HostGraph, greedy: Groups, price: float, seed: int) -> np.ndarray:
    """Return the variables of the edges found from each start, `[starts, edges]`.

    Half of the starts are near greedy's plan, half near what an edge alone saves, each with noise. The columns are
    filled up to powers of two, so that few sizes are compiled.
    """
    rng, alone = np.random.default_rng(seed), [host.group(group) for group in _alone(host)]
    owner = {i: number for number, group in enumerate(greedy) for i in group}
    by_plan = np.array([1.0 if owner[i] == owner[j] else -1.0 for i, j in host.edges])
    gain = np.array([alone[i].time + alone[j].time - host.joined(alone[i], alone[j]).time for i, j in host.edges])
    by_gain = np.clip(gain / max(float(np.mean(np.abs(gain))), 1e-300), -2.0, 2.0)
    starts, noise = STARTS[len(alone) <= SMALL]
    near = np.repeat(np.stack([by_plan, by_gain]), starts // 2, axis=0)
    graph, edges = _filled(host.graph)
    start = np.full((starts, edges), -1e3)  # what fills the edges up fuses nothing
    start[:, : len(host.edges)] = near + noise * rng.standard_normal(near.shape)
    is_stage = np.arange(len(graph.compute_ns)) < len(alone)
    logits = minimised_logits(graph, is_stage, jnp.asarray(start, float), price, int(rng.integers(2**31)))
    return np.asarray(logits, np.float64)[:, : len(host.edges)]


def _filled(graph: StageGraph) -> tuple[StageGraph, int]:
    """Return a graph filled up with stages that do nothing and edges that carry nothing, and its number of edges."""
    columns = [field.name for field in dataclasses.fields(graph) if np.ndim(getattr(graph, field.name))]
    sizes = {name: max(LEAST_FILLED, 1 << (len(getattr(graph, name)) - 1).bit_length()) for name in columns}
    fill = {"value": sizes["value"] - 1}  # of no edge, if there is anything to fill

    def filled(name: str):
        column = np.asarray(getattr(graph, name))
        return np.pad(column, (0, sizes[name] - len(column)), constant_values=fill.get(name, 0))

    return dataclasses.replace(graph, **{name: filled(name) for name in columns}), sizes["value"]
