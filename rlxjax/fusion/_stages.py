"""Stages, which are jitted pieces of a program, and what a plan of them takes: one formula for every planner."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from rlxjax._checks import as_index, check_at_least, check_positive
from rlxjax._typing import RealLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StageGraph:
    """Stages of a program, the values that pass between them, and the machine that runs them.

    Stages are numbered in an order that can run. An edge says that one stage reads a value of another; a
    value may have several edges. A *group* is a set of stages that run as one program, and a *plan*
    parts the stages into groups. A group takes

        launch_ns + max(compute, traffic / bytes_per_ns),
        compute = sum of compute_ns of its stages + sum of fused_ns of the edges inside it,
        traffic = external bytes of its stages + bytes of each value that it touches and does not contain,

    and a plan takes the sum over its groups. A group touches a value if the producer or a consumer is in
    it, and contains it if all of them are: so a value that stays inside moves no bytes, any other is
    written once and read once by each group that needs it. What a group holds at once, its peak, is taken
    as all external bytes of its stages plus the bytes of each value that it touches, as if nothing were
    freed before its end; the peak of a plan is that of its largest group.

    Attributes:
        compute_ns: what the arithmetic of each stage takes alone, `[stages]`.
        external_read_bytes: arguments of the whole program that each stage reads, `[stages]`. They are read
            in any plan; two stages of one group that read the same argument read it twice.
        external_written_bytes: results of the whole program that each stage writes, `[stages]`.
        producer: the stage that writes the value of each edge, `[edges]`.
        consumer: the stage that reads it, `[edges]`.
        edge_bytes: the bytes of that value, `[edges]`.
        value: which value it is, `[edges]`, numbered from 0.
        fused_ns: what is added to the arithmetic where both ends of an edge are in one group, `[edges]`: work
            that the compiler then does again, or a library call that it loses.
        launch_ns: what starting a program takes.
        bytes_per_ns: how fast bytes move to and from memory.
    """

    compute_ns: Float[Array | np.ndarray, "stages"]
    external_read_bytes: Float[Array | np.ndarray, "stages"]
    external_written_bytes: Float[Array | np.ndarray, "stages"]
    producer: Int[Array | np.ndarray, "edges"]
    consumer: Int[Array | np.ndarray, "edges"]
    edge_bytes: Float[Array | np.ndarray, "edges"]
    value: Int[Array | np.ndarray, "edges"]
    fused_ns: Float[Array | np.ndarray, "edges"]
    launch_ns: RealLike
    bytes_per_ns: RealLike

    @classmethod
    def checked(
        cls,
        compute_ns: Sequence[float] | np.ndarray,
        edges: Sequence[tuple[int, int, float]] = (),
        *,
        launch_ns: float,
        bytes_per_ns: float,
        external_read_bytes: float | Sequence[float] | np.ndarray = 0.0,
        external_written_bytes: float | Sequence[float] | np.ndarray = 0.0,
        fused_ns: float | Sequence[float] | np.ndarray = 0.0,
        values: Sequence[int] | None = None,
    ) -> "StageGraph":
        """Return a graph whose numbers are possible.

        Args:
            compute_ns: what the arithmetic of each stage takes alone, in ns.
            edges: producer, consumer and bytes of each edge.
            launch_ns: what starting a program takes, in ns.
            bytes_per_ns: how fast bytes move to and from memory.
            external_read_bytes: arguments of the whole program that each stage reads: one number, or one a stage.
            external_written_bytes: results of the whole program that each stage writes: the same.
            fused_ns: what fusing adds to the arithmetic: one number, or one an edge.
            values: a number for the value of each edge, if stages have several results of which others read
                one; without it, all edges of a producer carry the same value.

        Raises:
            ValueError: a negative number or NaN, a rate of 0, an unknown stage, an edge that does not lead to a
                later stage (as one of every cycle does), or edges of one value that disagree.

        Examples:
            >>> graph = StageGraph.checked([50.0, 80.0], [(0, 1, 4000)], launch_ns=900.0, bytes_per_ns=10.0)
            >>> plan_ns(graph, [[0], [1]]), plan_ns(graph, [[0, 1]])
            (2600.0, 1030.0)
        """
        check_positive(bytes_per_ns, "bytes_per_ns")
        compute = _column(compute_ns, None, "compute_ns")
        edges, stages = [tuple(edge) for edge in edges], len(compute)
        for number, edge in enumerate(edges):
            if len(edge) != 3:
                raise ValueError(f"edge {number}: expected a producer, a consumer and bytes, got {edge!r}")
            ends = [as_index(end, f"edge {number}") for end in edge[:2]]
            if max(ends) >= stages:
                raise ValueError(f"edge {number}: expected stages below {stages}, got stage {max(ends)}")
            if ends[0] >= ends[1]:
                raise ValueError(
                    f"edge {number}: expected a consumer after its producer, as stages without a cycle can be "
                    f"numbered, got {ends[0]} to {ends[1]}"
                )
        producer, consumer = (np.array([edge[i] for edge in edges], np.int32) for i in (0, 1))
        numbers = list(producer if values is None else values)
        if len(numbers) != len(edges):
            raise ValueError(f"values: expected one an edge, {len(edges)}, got {len(numbers)}")
        graph = cls(
            compute,
            _column(external_read_bytes, stages, "external_read_bytes"),
            _column(external_written_bytes, stages, "external_written_bytes"),
            producer,
            consumer,
            _column([edge[2] for edge in edges], None, "bytes of edges"),
            np.unique(np.array([as_index(v, "values") for v in numbers], np.int64), return_inverse=True)[1].astype(
                np.int32
            ),
            _column(fused_ns, len(edges), "fused_ns"),
            float(_column(launch_ns, 1, "launch_ns")[0]),
            float(bytes_per_ns),
        )
        first: dict[int, int] = {}
        for number, value in enumerate(graph.value.tolist()):
            other = first.setdefault(value, number)
            if producer[other] != producer[number] or graph.edge_bytes[other] != graph.edge_bytes[number]:
                raise ValueError(
                    f"edges {other} and {number}: expected one producer and as many bytes, since they carry one value; "
                    "`values` tells values apart"
                )
        return graph


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """Which stages run as one program.

    Attributes:
        groups: the stages of each program, programs in an order that can run.
        time_ns: what the plan takes.
        peak_bytes: what its largest group holds at once.
        method: how it was made.
    """

    groups: tuple[tuple[int, ...], ...]
    time_ns: float
    peak_bytes: float
    method: str


def group_ns(graph: StageGraph, compute_ns: Any, traffic_bytes: Any) -> Any:
    """Return what a group takes in ns, `[*batch]`, from its arithmetic and the bytes that it moves, `[*batch]`."""
    memory_ns = traffic_bytes / graph.bytes_per_ns
    above = compute_ns - memory_ns
    return graph.launch_ns + memory_ns + 0.5 * (above + abs(above))


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
        columns = (np.asarray(column).tolist() for column in (graph.value, graph.edge_bytes, graph.fused_ns))
        for (i, j), value, size, fused in zip(self.edges, *columns, strict=True):
            self.value_bytes[value] = size
            ends.setdefault(value, set()).update((i, j))
            self.near[i][j] = self.near[j][i] = self.near[i].get(j, 0.0) + fused
            self.after[i].add(j)
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
        return Group(large.stages + small.stages, touched, compute, traffic, a.peak + b.peak - shared, time)

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

    def connected(self, stages: Sequence[int]) -> list[tuple[int, ...]]:
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
        return StagePlan(tuple(ordered), sum(group.time for group in counted), peak, method)


@dataclasses.dataclass(frozen=True)
class Group:
    """Stages that run as one program, the number of ends of each value in it, and what it does and takes."""

    stages: tuple[int, ...]
    touched: dict[int, int]
    compute: float
    traffic: float
    peak: float
    time: float


def plan_ns(graph: StageGraph, groups: Sequence[Sequence[int]]) -> float:
    """Return what a plan takes in ns, by the formula of `StageGraph`."""
    host = HostGraph(graph)
    return sum(host.group(group).time for group in groups)


def _column(value: Any, length: int | None, name: str) -> np.ndarray:
    check_at_least(value, name, what="number")
    column = np.asarray(value, np.float64)
    if length is None and column.ndim == 1:
        return column
    if length is None or column.shape not in ((), (length,)):
        raise ValueError(f"{name}: expected a list of {length or 'one number a stage'}, got shape {column.shape}")
    return np.broadcast_to(column, length).copy()
