"""Built-in coefficients of devices, the IO fusion gate, the cost of profiles and graphs, and the ranking of devices.

An `IoFusionGate` computes the time that a fusion saves, and `io_fusion_gate_for_target` returns the built-in gates.
`io_cost_ns` computes the cost of a profile, and `graph_cost_ns` the cost of a graph, from the `BackendCoefficients` of
a device. `rank_devices` compares devices by cost. With a temperature, a score or cost is computed in a smooth form.

`Coefficients` is the base class for your own coefficients. `NamedCode` is the base class of enums with integer codes.
`stack_rows` makes a table of coefficients, and `take_row` returns the rows of a table at given codes. `parts_ns`,
`gate_rates` and `added_syncs` compute parts of the built-in formulas, for use in formulas of your own.
"""

from rlxjax._typing import Provenance as Provenance

from ._backends import BACKEND_ROWS as BACKEND_ROWS
from ._backends import BackendCoefficients as BackendCoefficients
from ._backends import Coefficients as Coefficients
from ._backends import Device as Device
from ._backends import FusionTarget as FusionTarget
from ._backends import NamedCode as NamedCode
from ._backends import backend_coefficients as backend_coefficients
from ._backends import fusion_target as fusion_target
from ._backends import is_fused_viable as is_fused_viable
from ._backends import jax_device as jax_device
from ._backends import normalised as normalised
from ._backends import stack_rows as stack_rows
from ._backends import take_row as take_row
from ._backends import without_provenance as without_provenance
from ._costs import DeviceRanking as DeviceRanking
from ._costs import GraphWork as GraphWork
from ._costs import graph_cost_ns as graph_cost_ns
from ._costs import io_cost_ns as io_cost_ns
from ._costs import parts_ns as parts_ns
from ._costs import rank_devices as rank_devices
from ._io_gate import FusionBenefit as FusionBenefit
from ._io_gate import GateEvaluation as GateEvaluation
from ._io_gate import IoFusionGate as IoFusionGate
from ._io_gate import added_syncs as added_syncs
from ._io_gate import fusion_benefit as fusion_benefit
from ._io_gate import gate_rates as gate_rates
from ._io_gate import io_fusion_gate_for_target as io_fusion_gate_for_target

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
