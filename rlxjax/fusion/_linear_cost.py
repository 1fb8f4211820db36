"""What kernels are priced by: launches and bytes, as a backend's row, a measured gate or a name says."""

import math
from typing import NamedTuple, Protocol

import jax
import numpy as np

from rlxjax._checks import is_traced
from rlxjax.gate import BackendCoefficients, IoFusionGate, backend_coefficients, jax_device, normalised

from ._kernel_graph import KernelGraph, Partition


class HasGate(Protocol):
    """What holds a measured gate, as a `Calibration` does."""

    @property
    def gate(self) -> IoFusionGate: ...


class LinearCost(NamedTuple):
    """What a launch and a byte of traffic cost in ns."""

    launch_ns: float
    byte_ns: float

    @classmethod
    def of_row(cls, row: BackendCoefficients) -> "LinearCost":
        """Return what a launch and a byte of traffic add to `io_cost_ns` on a backend."""
        byte_ns = 1.0 / max(float(row.memory_bw), 1.0)
        if not float(row.unified_memory) >= 0.5:
            byte_ns += 0.25 / max(float(row.readback_bw), 1.0)
        return cls(float(row.dispatch_ns), byte_ns)

    def of(self, graph: KernelGraph, partition: Partition) -> float:
        """Return the cost of all kernels."""
        works = map(graph.work, partition)
        return sum(self.launch_ns * launches + self.byte_ns * moved_bytes for launches, moved_bytes in works)


def backend_row(coefficients: str | BackendCoefficients | IoFusionGate | HasGate) -> BackendCoefficients:
    """Return the backend whose costs decide; an unknown name, something else and arrays are refused."""
    if isinstance(coefficients, str):
        if normalised(coefficients) in ("arch", "portable"):
            return backend_coefficients(jax_device(), coefficients)
        return backend_coefficients(coefficients)
    row = getattr(coefficients, "gate", coefficients)
    if isinstance(row, IoFusionGate):
        rates = (row.dispatch_ns, row.roundtrip_ns, row.memory_bw, row.host_readback_bw, row.unified_memory)
        row = BackendCoefficients(*rates, sgemm_gflops=math.inf, small_sgemm_gflops=math.inf)  # it has none
    if not isinstance(row, BackendCoefficients):
        raise ValueError(
            "coefficients: expected a set, a device, BackendCoefficients, an IoFusionGate or a Calibration, "
            f"got {coefficients!r}"
        )
    if is_traced(*jax.tree.leaves(row)):
        raise ValueError("coefficients: a plan is made on the host, so they cannot be traced")
    if any(map(np.ndim, jax.tree.leaves(row))):
        raise ValueError("coefficients: expected one backend, got arrays of several")
    row.check("coefficients: ")
    return row
