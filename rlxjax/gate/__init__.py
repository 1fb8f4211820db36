"""Devices with their built-in prices, the IO gate, costs of profiles and graphs, and ranking.

An `IoFusionGate` prices a `FusionBenefit`: built in by `io_fusion_gate_for_target`. A `BackendCoefficients` row
prices a whole profile (`io_cost_ns`) or graph (`graph_cost_ns`); `rank_devices` compares devices.
What begins with `soft_` is the smooth form of the same name.
"""

from rlxjax._provenance import Provenance as Provenance

from ._costs import graph_cost_ns as graph_cost_ns
from ._costs import io_cost_ns as io_cost_ns
from ._costs import soft_graph_cost_ns as soft_graph_cost_ns
from ._costs import soft_io_cost_ns as soft_io_cost_ns
from ._devices import BACKEND_ROWS as BACKEND_ROWS
from ._devices import BackendCoefficients as BackendCoefficients
from ._devices import Device as Device
from ._devices import Target as Target
from ._devices import backend_coefficients as backend_coefficients
from ._devices import fusion_target as fusion_target
from ._devices import is_fused_viable as is_fused_viable
from ._devices import jax_device as jax_device
from ._gate import FusionBenefit as FusionBenefit
from ._gate import GateEvaluation as GateEvaluation
from ._gate import IoFusionGate as IoFusionGate
from ._gate import fusion_benefit as fusion_benefit
from ._gate import io_fusion_gate_for_target as io_fusion_gate_for_target
from ._ranking import DeviceRanking as DeviceRanking
from ._ranking import rank_devices as rank_devices

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
