"""Stages, which are jitted pieces of a program, and what a plan of them takes: one formula for every planner."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from rlxjax._checks import as_index, check_at_least, check_positive
from rlxjax._html import html_of
from rlxjax._typing import RealLike
from rlxjax._values import by_value, whole_ns


@by_value
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

    compute_ns: Float[Array | np.ndarray, " stages"]
    external_read_bytes: Float[Array | np.ndarray, " stages"]
    external_written_bytes: Float[Array | np.ndarray, " stages"]
    producer: Int[Array | np.ndarray, " edges"]
    consumer: Int[Array | np.ndarray, " edges"]
    edge_bytes: Float[Array | np.ndarray, " edges"]
    value: Int[Array | np.ndarray, " edges"]
    fused_ns: Float[Array | np.ndarray, " edges"]
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
            >>> graph.value, graph.external_read_bytes
            (array([0], dtype=int32), array([0., 0.]))
        """
        check_positive(bytes_per_ns, "bytes_per_ns")
        compute = _column(compute_ns, None, "compute_ns")
        stages = len(compute)
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


@by_value
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

    def _repr_html_(self) -> str:
        count, peak = len(self.groups), f"{self.peak_bytes:,.0f} bytes at the peak"
        lead = f"{count} program{'s' * (count != 1)} by {self.method}: {whole_ns(self.time_ns)} ns, {peak}"
        return html_of([lead], [("program", "stages"), *enumerate(self.groups)])


def group_ns(graph: StageGraph, compute_ns: Any, traffic_bytes: Any) -> Any:
    """Return what a group takes in ns, `[*batch]`, from its arithmetic and the bytes that it moves, `[*batch]`."""
    memory_ns = traffic_bytes / graph.bytes_per_ns
    above = compute_ns - memory_ns
    return graph.launch_ns + memory_ns + 0.5 * (above + abs(above))


def _column(value: Any, length: int | None, name: str) -> np.ndarray:
    check_at_least(value, name, what="number")
    column = np.asarray(value, np.float64)
    if length is None and column.ndim == 1:
        return column
    if length is None or column.shape not in ((), (length,)):
        expected = "a list" if length is None else f"one number, or {length}"
        raise ValueError(f"{name}: expected {expected}, got shape {column.shape}")
    return np.broadcast_to(column, length).copy()
