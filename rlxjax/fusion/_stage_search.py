"""Hard plans of stages: by greedy merges, by an order of the edges, by local moves, and by trying them all."""

import heapq
import math
from collections.abc import Sequence

import numpy as np

from ._stage_groups import Group, HostGraph, Partition

#: How many stages the exact search takes.
MOST_STAGES = 12
#: Stages that the local moves of one call look at, at most.
MOST_VISITS = 1_000_000
#: What a move has to save, as a share of the whole time: less is rounding.
LEAST_SHARE = 1e-12

Groups = list[tuple[int, ...]]


def greedy_groups(host: HostGraph, price: float) -> Groups:
    """Return groups of which no two neighbours save anything by becoming one.

    The two that save most become one first, again and again, where they can run, and save time beyond the priced
    rise of the largest peak.
    """
    partition = Partition(host, [(i,) for i in range(len(host.compute))])
    least, peak = LEAST_SHARE * partition.time, partition.peak
    queue: list[tuple[float, int, int, int, Group]] = []

    def consider(a: int, b: int) -> None:
        first, second = partition.groups[a], partition.groups[b]
        group = host.joined(first, second)
        gain = first.time + second.time - group.time - price * max(0.0, group.peak - peak)
        if gain > least:
            heapq.heappush(queue, (-gain, min(a, b), max(a, b), len(group.stages), group))

    merged = True
    while merged:
        merged = False
        for a in partition.groups:
            for b in partition.neighbours(a):
                if a < b:
                    consider(a, b)
        while queue:
            _, a, b, size, group = heapq.heappop(queue)
            if not {a, b} <= partition.groups.keys():
                continue
            has_grown = size != sum(len(partition.groups[number].stages) for number in (a, b))
            if has_grown or not partition.can_merge(a, b):
                continue
            partition.merge(a, b, group)
            merged, peak = True, max(peak, group.peak)
            for other in partition.neighbours(a):
                consider(a, other)
    return partition.stages


def groups_by_order(host: HostGraph, order: Sequence[int], price: float, cap: float = math.inf) -> Groups:
    """Return the best of the plans that fuse edges in an order, where the groups can run and hold at most `cap`."""
    partition = Partition(host, [(i,) for i in range(len(host.compute))])
    time, peak, merges = partition.time, partition.peak, []
    best, best_cost = 0, time + price * peak
    for edge in order:
        a, b = (partition.owner[i] for i in host.edges[edge])
        if a == b or not partition.can_merge(a, b):
            continue
        first, second = partition.groups[a], partition.groups[b]
        group = host.joined(first, second)
        if group.peak > cap:
            continue
        partition.merge(a, b, group)
        merges.append((first.stages, second.stages))
        time, peak = time + group.time - first.time - second.time, max(peak, group.peak)
        if time + price * peak < best_cost:
            best, best_cost = len(merges), time + price * peak
    groups = {(i,) for i in range(len(host.compute))}
    for first, second in merges[:best]:
        groups -= {first, second}
        groups.add(tuple(sorted(first + second)))
    return sorted(groups)


def improved_groups(host: HostGraph, groups: Groups, cap: float = math.inf) -> Groups:
    """Return groups that take no longer, after moves of stages between neighbours while these save time.

    A move parts a group at a stage (those that follow from it, or lead to it, go), takes a stage out, gives it
    to a group that an edge connects it with, or makes one group of two neighbours.
    """
    state = {number: host.group(group) for number, group in enumerate(groups)}
    owner = {i: number for number, group in state.items() for i in group.stages}
    least, visits, fresh = LEAST_SHARE * sum(group.time for group in state.values()), 0, len(state)
    waiting = dict.fromkeys(range(len(host.compute)))
    while waiting and visits < MOST_VISITS:
        i, _ = waiting.popitem()
        for old, new in _moves(host, state, owner, i):
            parts = [part for stages in new for part in host.connected(stages)]
            after = [host.group(part) for part in parts]
            visits += sum(map(len, parts))
            saved = sum(state[g].time for g in old) - sum(group.time for group in after)
            if saved <= least or any(group.peak > cap for group in after):
                continue
            kept = [group.stages for number, group in state.items() if number not in old]
            visits += len(host.compute) // 8
            if host.in_order(kept + parts) is None:
                continue
            for number in old:
                del state[number]
            for group in after:
                state[fresh] = group
                owner.update(dict.fromkeys(group.stages, fresh))
                fresh += 1
            touched = {j for part in parts for j in part}
            waiting.update(dict.fromkeys(sorted(touched.union(*(host.near[j] for j in touched)))))
            break
    return [group.stages for group in state.values()]


def _moves(host: HostGraph, state: dict[int, Group], owner: dict[int, int], i: int):
    """Yield the groups that a move of stage `i` ends and the sets of stages that it makes of them."""
    own = owner[i]
    mine = set(state[own].stages)
    if len(mine) > 1:
        parts = [{i}, _reached(i, host.after, mine), _reached(i, host.before, mine)]
        for number, part in enumerate(parts):
            if len(part) < len(mine) and part not in parts[:number]:
                yield (own,), (part, mine - part)
    for other in dict.fromkeys(owner[j] for j in host.near[i] if owner[j] != own):
        theirs = set(state[other].stages)
        yield (own, other), (mine | theirs,)
        if len(mine) > 1:
            yield (own, other), (mine - {i}, theirs | {i})


def _reached(i: int, after: Sequence[set[int]], inside: set[int]) -> set[int]:
    seen, stack = {i}, [i]
    while stack:
        fresh = (after[stack.pop()] & inside) - seen
        seen |= fresh
        stack.extend(fresh)
    return seen


def exact_groups(host: HostGraph, price: float) -> Groups:
    """Return the best of all plans that can run and whose groups edges connect.

    Plans are built program by program, by dynamic programming over the sets of stages that have run. A price
    on the peak is dealt with by the best plans under lower and lower caps.
    """
    stages = len(host.compute)
    masks, groups = _connected_sets(host)
    time, peak = (np.array([getattr(group, name) for group in groups]) for name in ("time", "peak"))
    needed = np.array([sum({1 << j for i in group.stages for j in host.before[i]}) for group in groups], np.int64)
    needed &= ~masks
    least_peak = max((host.group([i]).peak for i in range(stages)), default=0.0)
    best, best_cost, cap = [], math.inf, math.inf
    while True:
        usable = np.flatnonzero(peak < cap)
        found = _fastest(stages, masks[usable], needed[usable], time[usable])
        if found is None:
            return best
        plan = [groups[usable[g]] for g in found]
        own_time, cap = sum(group.time for group in plan), max((group.peak for group in plan), default=0.0)
        if own_time + price * cap < best_cost:
            best, best_cost = [group.stages for group in plan], own_time + price * cap
        if price == 0 or own_time + price * least_peak >= best_cost:
            return best


def _connected_sets(host: HostGraph) -> tuple[np.ndarray, list[Group]]:
    """Return every set of stages that edges connect, as bits and as groups."""
    near = [sum(1 << j for j in others) for others in host.near]
    found = stack = [1 << i for i in range(len(near))]
    seen = set(found)
    while stack:
        following = []
        for mask in stack:
            inside = [i for i in range(len(near)) if mask >> i & 1]
            around = 0
            for i in inside:
                around |= near[i]
            for j in range(len(near)):
                grown = mask | 1 << j
                if around >> j & 1 and grown not in seen:
                    seen.add(grown)
                    following.append(grown)
        found, stack = found + following, following
    groups = [host.group([i for i in range(len(near)) if mask >> i & 1]) for mask in found]
    return np.array(found, np.int64), groups


def _fastest(stages: int, masks: np.ndarray, needed: np.ndarray, time: np.ndarray) -> list[int] | None:
    """Return the groups, in the order in which they run, that run all stages in the least time."""
    best, last = np.full(1 << stages, np.inf), np.full(1 << stages, -1)
    best[0] = 0.0
    for done in range((1 << stages) - 1):
        if best[done] == np.inf:
            continue
        ready = np.flatnonzero(((masks & done) | (needed & ~done)) == 0)
        after, total = done | masks[ready], best[done] + time[ready]
        better = total < best[after]
        best[after[better]], last[after[better]] = total[better], ready[better]
    plan, done = [], (1 << stages) - 1
    while done and last[done] >= 0:
        plan.append(int(last[done]))
        done &= ~int(masks[last[done]])
    return None if done else plan[::-1]
