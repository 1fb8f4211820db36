"""What the search prices kernels by: launches and bytes."""

import dataclasses
from collections.abc import Sequence

from ._kernel_graph import KernelGraph, Partition


@dataclasses.dataclass(frozen=True)
class LinearCost:
    """What a launch and a byte of traffic cost in ns."""

    launch_ns: float
    byte_ns: float

    def of_kernel(self, graph: KernelGraph, group: Sequence[int]) -> float:
        """Return the cost of one kernel."""
        launched = any(graph.launches[i] for i in group)
        return self.launch_ns * launched + self.byte_ns * graph.traffic_bytes(group)

    def of(self, graph: KernelGraph, partition: Partition) -> float:
        """Return the cost of all kernels."""
        return sum(self.of_kernel(graph, group) for group in partition)
