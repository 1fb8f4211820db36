"""Stages in groups, on the host: what a group does and takes, and which groups can become one."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from ._stages import StageGraph, StagePlan, group_ns


@dataclasses.dataclass(frozen=True)
class Group:
    """Stages that run as one program, the number of ends of each value in it, and what it does and takes."""

    stages: tuple[int, ...]
    touched: dict[int, int]
    compute: float
    traffic: float
    peak: float
    time: float


class HostGraph:
    """A graph as lists of Python, for searches on the host."""

    def __init__(self, graph: StageGraph):
        self.graph = graph
        self.compute = np.asarray(graph.compute_ns, np.float64).tolist()
        external = np.asarray(graph.external_read_bytes) + np.asarray(graph.external_written_bytes)
        self.external = np.asarray(external, np.float64).tolist()
        self.edges = list(zip(np.asarray(graph.producer).tolist(), np.asarray(graph.consumer).tolist(), strict=True))
        self.value_bytes: dict[int, float] = {}
        ends: dict[int, set[int]] = {}
        self.near: list[dict[int, float]] = [{} for _ in self.compute]
        self.after: list[set[int]] = [set() for _ in self.compute]
        self.before: list[set[int]] = [set() for _ in self.compute]
        columns = (np.asarray(column).tolist() for column in (graph.value, graph.edge_bytes, graph.fused_ns))
        for (i, j), value, size, fused in zip(self.edges, *columns, strict=True):
            self.value_bytes[value] = size
            ends.setdefault(value, set()).update((i, j))
            self.near[i][j] = self.near[j][i] = self.near[i].get(j, 0.0) + fused
            self.after[i].add(j)
            self.before[j].add(i)
        self.ends = {value: len(stages) for value, stages in ends.items()}
        self.touched: list[list[int]] = [[] for _ in self.compute]
        for value, stages in ends.items():
            for stage in stages:
                self.touched[stage].append(value)

    def group(self, stages: Sequence[int]) -> "Group":
        """Return a group of stages with its counts."""
        inside, touched = set(stages), {}
        compute = traffic = 0.0
        for i in stages:
            compute += self.compute[i] + 0.5 * sum(ns for j, ns in self.near[i].items() if ns and j in inside)
            traffic += self.external[i]
            for value in self.touched[i]:
                touched[value] = touched.get(value, 0) + 1
        peak = traffic + sum(self.value_bytes[value] for value in touched)
        traffic += sum(self.value_bytes[value] for value, count in touched.items() if count < self.ends[value])
        return Group(tuple(stages), touched, compute, traffic, peak, float(group_ns(self.graph, compute, traffic)))

    def joined(self, a: "Group", b: "Group") -> "Group":
        """Return two groups as one; the work grows with the smaller."""
        small, large = (a, b) if len(a.touched) < len(b.touched) else (b, a)
        inside, touched, shared, kept = set(large.stages), dict(large.touched), 0.0, 0.0
        for value, count in small.touched.items():
            other = touched.get(value, 0)
            touched[value] = count + other
            if other:
                shared += self.value_bytes[value]
                kept += self.value_bytes[value] * (count + other == self.ends[value])
        compute, traffic = a.compute + b.compute, a.traffic + b.traffic - shared - kept
        compute += sum(ns for i in small.stages for j, ns in self.near[i].items() if ns and j in inside)
        time = float(group_ns(self.graph, compute, traffic))
        return Group(
            tuple(sorted(large.stages + small.stages)), touched, compute, traffic, a.peak + b.peak - shared, time
        )

    def in_order(self, groups: Sequence[Sequence[int]]) -> list[tuple[int, ...]] | None:
        """Return groups in an order that can run, the first stages first; None if there is a cycle through one."""
        owner = {stage: number for number, group in enumerate(groups) for stage in group}
        after = [{owner[j] for i in group for j in self.after[i]} - {g} for g, group in enumerate(groups)]
        waiting = [0] * len(groups)
        for others in after:
            for g in others:
                waiting[g] += 1
        ready, order = [g for g, count in enumerate(waiting) if not count], []
        for g in ready:
            order.append(g)
            for other in after[g]:
                waiting[other] -= 1
                if not waiting[other]:
                    ready.append(other)
        return [tuple(sorted(groups[g])) for g in order] if len(order) == len(groups) else None

    def connected(self, stages: Iterable[int]) -> list[tuple[int, ...]]:
        """Return stages in sets that edges connect."""
        left, parts = set(stages), []
        while left:
            part = [left.pop()]
            for i in part:
                fresh = left.intersection(self.near[i])
                left -= fresh
                part.extend(fresh)
            parts.append(tuple(sorted(part)))
        return sorted(parts)

    def plan(self, groups: Sequence[Sequence[int]], method: str) -> StagePlan:
        """Return a plan of groups that can run."""
        ordered = self.in_order(sorted(tuple(sorted(group)) for group in groups))
        assert ordered is not None
        counted = [self.group(group) for group in ordered]
        peak = max((group.peak for group in counted), default=0.0)
        return StagePlan(tuple(ordered), float(sum(group.time for group in counted)), peak, method)


class Partition:
    """Stages parted into groups that can run, of which two at a time become one.

    Of every group it knows the stages before and after it, as bits of a whole number.
    """

    def __init__(self, host: HostGraph, groups: Iterable[Sequence[int]]):
        self.host = host
        ordered = host.in_order(list(groups))
        assert ordered is not None
        self.groups = {number: host.group(stages) for number, stages in enumerate(ordered)}
        self.owner = {i: number for number, group in self.groups.items() for i in group.stages}
        self.bits = {number: sum(1 << i for i in group.stages) for number, group in self.groups.items()}
        self.before, self.after = dict.fromkeys(self.groups, 0), dict.fromkeys(self.groups, 0)
        for number in reversed(self.groups):
            for other in {self.owner[j] for i in self.groups[number].stages for j in host.after[i]} - {number}:
                self.after[number] |= self.bits[other] | self.after[other]
        for number in self.groups:
            for other in {self.owner[j] for i in self.groups[number].stages for j in host.after[i]} - {number}:
                self.before[other] |= self.bits[number] | self.before[number]

    def can_merge(self, a: int, b: int) -> bool:
        """Whether no way leads from one group to the other through a third."""
        between = self.after[a] & self.before[b] | self.after[b] & self.before[a]
        return not between

    def merge(self, a: int, b: int, group: Group) -> None:
        """Make one group of two that can merge."""
        bits = self.bits[a] | self.bits[b]
        before, after = (self.before[a] | self.before[b]) & ~bits, (self.after[a] | self.after[b]) & ~bits
        del self.groups[b]
        self.groups[a], self.bits[a], self.before[a], self.after[a] = group, bits, before, after
        for i in group.stages:
            self.owner[i] = a
        for number in self.groups:
            if self.bits[number] & before:
                self.after[number] |= bits | after
            elif self.bits[number] & after:
                self.before[number] |= bits | before

    def neighbours(self, a: int) -> set[int]:
        """Return the groups that edges connect with a group."""
        return {self.owner[j] for i in self.groups[a].stages for j in self.host.near[i]} - {a}

    @property
    def stages(self) -> list[tuple[int, ...]]:
        """The stages of each group."""
        return [group.stages for group in self.groups.values()]

    @property
    def time(self) -> float:
        """What the groups take in ns."""
        return sum(group.time for group in self.groups.values())

    @property
    def peak(self) -> float:
        """What the largest group holds."""
        return max((group.peak for group in self.groups.values()), default=0.0)
