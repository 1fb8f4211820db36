"""A differentiable cost model that decides, by numbers measured on this machine, whether fusing pays.

`Graph -> GraphIoProfile -> FusionBenefit -> gate score -> decision`, and
`timings -> fit -> Calibration -> the same decisions, now true here`.
"""

from ._calibration import Calibration as Calibration
from ._calibration import CalibrationFileError as CalibrationFileError
from ._calibration import MachineMismatchWarning as MachineMismatchWarning
from ._calibration import load_calibration as load_calibration
from ._cost import device_cost_ns as device_cost_ns
from ._cost import graph_cost_ns as graph_cost_ns
from ._cost import io_cost_ns as io_cost_ns
from ._cost import soft_graph_cost_ns as soft_graph_cost_ns
from ._cost import soft_io_cost_ns as soft_io_cost_ns
from ._device import BACKEND_ROWS as BACKEND_ROWS
from ._device import BackendCoefficients as BackendCoefficients
from ._device import Device as Device
from ._device import Provenance as Provenance
from ._device import Target as Target
from ._device import backend_coefficients as backend_coefficients
from ._device import fusion_target as fusion_target
from ._device import is_fused_viable as is_fused_viable
from ._device import is_gpu_device as is_gpu_device
from ._fit import FitResult as FitResult
from ._fit import LatencyPrior as LatencyPrior
from ._fit import Timings as Timings
from ._fit import fit_latency as fit_latency
from ._fit import typical_prior as typical_prior
from ._gate import FusionBenefit as FusionBenefit
from ._gate import IoFusionGate as IoFusionGate
from ._gate import fusion_benefit as fusion_benefit
from ._gate import io_fusion_gate_for_target as io_fusion_gate_for_target
from ._graph import Graph as Graph
from ._graph import Node as Node
from ._graph import tensor_bytes as tensor_bytes
from ._latency import LatencyCoefficients as LatencyCoefficients
from ._latency import LatencyTerms as LatencyTerms
from ._latency import latency_terms_ns as latency_terms_ns
from ._latency import predict_latency_ns as predict_latency_ns
from ._numerics import soft_maximum as soft_maximum
from ._numerics import soft_minimum as soft_minimum
from ._numerics import soft_relu as soft_relu
from ._numerics import soft_step as soft_step
from ._numerics import straight_through as straight_through
from ._numerics import temperature_from_sd as temperature_from_sd
from ._profile import GraphIoProfile as GraphIoProfile
from ._profile import node_io_bytes as node_io_bytes
from ._profile import profile_graph_io as profile_graph_io
from ._ranking import DeviceRanking as DeviceRanking
from ._ranking import rank_devices as rank_devices
from .fusion import REWRITES as REWRITES
from .fusion import FusedKernel as FusedKernel
from .fusion import FusionEdge as FusionEdge
from .fusion import FusionPlan as FusionPlan
from .fusion import execute_kernel as execute_kernel
from .fusion import execute_plan as execute_plan
from .fusion import plan_fusion as plan_fusion
from .fusion import rewrite_graph as rewrite_graph
from .fusion import select_peaks_only_outputs as select_peaks_only_outputs
from .welch import CoefficientSet as CoefficientSet
from .welch import Path as Path
from .welch import SoftWelchPeaksCosts as SoftWelchPeaksCosts
from .welch import Strategy as Strategy
from .welch import StrategyCoefficients as StrategyCoefficients
from .welch import WelchPeakParams as WelchPeakParams
from .welch import WelchPeaksCostEstimates as WelchPeaksCostEstimates
from .welch import WelchPeaksGateBreakdown as WelchPeaksGateBreakdown
from .welch import algorithm_bandwidth_gbps as algorithm_bandwidth_gbps
from .welch import block_graph_ns as block_graph_ns
from .welch import coefficient_set as coefficient_set
from .welch import estimate_welch_peaks_costs as estimate_welch_peaks_costs
from .welch import fused_graph_ns as fused_graph_ns
from .welch import host_fft_profile as host_fft_profile
from .welch import host_path_ns as host_path_ns
from .welch import padded_batch as padded_batch
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

__version__ = "0.1.0"
