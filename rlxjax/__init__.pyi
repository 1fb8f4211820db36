"""The public names at the top of the package. `__init__.py` reads this file, and imports a module on first use."""

from . import calibration as calibration
from . import choices as choices
from . import fit as fit
from . import fusion as fusion
from . import gate as gate
from . import graph as graph
from . import jaxpr as jaxpr
from . import learned as learned
from . import models as models
from . import plot as plot
from . import tables as tables
from . import targets as targets
from . import welch as welch
from ._numerics import soft_maximum as soft_maximum
from ._numerics import soft_minimum as soft_minimum
from ._numerics import soft_relu as soft_relu
from ._numerics import soft_step as soft_step
from ._numerics import straight_through as straight_through
from ._numerics import temperature_from_sd as temperature_from_sd
from .calibration import Calibration as Calibration
from .calibration import default_calibration as default_calibration
from .calibration import load_calibration as load_calibration
from .calibration import save_calibration as save_calibration
from .choices import Advice as Advice
from .choices import Choice as Choice
from .choices import advise as advise
from .choices import choose as choose
from .fit import Cell as Cell
from .fit import Input as Input
from .fit import LatencyModel as LatencyModel
from .fit import Suite as Suite
from .fit import Timings as Timings
from .fit import fit_posterior as fit_posterior
from .fusion import FusedKernel as FusedKernel
from .fusion import FusionPlan as FusionPlan
from .fusion import execute_plan as execute_plan
from .fusion import plan_fusion as plan_fusion
from .fusion import select_peaks_only_outputs as select_peaks_only_outputs
from .gate import Device as Device
from .gate import FusionBenefit as FusionBenefit
from .gate import FusionTarget as FusionTarget
from .gate import IoFusionGate as IoFusionGate
from .gate import backend_coefficients as backend_coefficients
from .gate import fusion_benefit as fusion_benefit
from .gate import fusion_target as fusion_target
from .gate import graph_cost_ns as graph_cost_ns
from .gate import io_cost_ns as io_cost_ns
from .gate import io_fusion_gate_for_target as io_fusion_gate_for_target
from .gate import is_fused_viable as is_fused_viable
from .gate import rank_devices as rank_devices
from .graph import Graph as Graph
from .graph import GraphIoProfile as GraphIoProfile
from .graph import profile_graph_io as profile_graph_io
from .jaxpr import FunctionProfile as FunctionProfile
from .jaxpr import profile_function as profile_function
from .welch import WelchPeakParams as WelchPeakParams
from .welch import WelchPeaksCostEstimates as WelchPeaksCostEstimates
from .welch import WelchPeaksGateBreakdown as WelchPeaksGateBreakdown
from .welch import algorithm_bandwidth_gbps as algorithm_bandwidth_gbps
from .welch import block_graph_ns as block_graph_ns
from .welch import estimate_welch_peaks_costs as estimate_welch_peaks_costs
from .welch import fused_graph_ns as fused_graph_ns
from .welch import host_fft_profile as host_fft_profile
from .welch import parse_welch_peaks_strategy as parse_welch_peaks_strategy
from .welch import pick_weights as pick_weights
from .welch import pick_welch_peaks_strategy as pick_welch_peaks_strategy
from .welch import soft_estimate_welch_peaks_costs as soft_estimate_welch_peaks_costs
from .welch import soft_fused_graph_ns as soft_fused_graph_ns
from .welch import soft_pick_welch_peaks_strategy as soft_pick_welch_peaks_strategy
from .welch import useful_bytes_touched as useful_bytes_touched
from .welch import welch_peaks as welch_peaks
from .welch import welch_peaks_fusion_gate_breakdown as welch_peaks_fusion_gate_breakdown
from .welch import welch_peaks_graph as welch_peaks_graph

__all__ = [
    "Advice",
    "Calibration",
    "Cell",
    "Choice",
    "FunctionProfile",
    "FusionBenefit",
    "FusionPlan",
    "Graph",
    "GraphIoProfile",
    "Input",
    "IoFusionGate",
    "LatencyModel",
    "Suite",
    "Timings",
    "WelchPeakParams",
    "choices",
    "advise",
    "calibration",
    "choose",
    "default_calibration",
    "gate",
    "execute_plan",
    "fit",
    "fit_posterior",
    "fusion",
    "fusion_benefit",
    "graph",
    "io_fusion_gate_for_target",
    "jaxpr",
    "learned",
    "load_calibration",
    "models",
    "plan_fusion",
    "plot",
    "profile_function",
    "profile_graph_io",
    "rank_devices",
    "save_calibration",
    "soft_maximum",
    "soft_minimum",
    "soft_relu",
    "soft_step",
    "straight_through",
    "tables",
    "targets",
    "temperature_from_sd",
    "welch",
    "welch_peaks",
]

__version__: str
