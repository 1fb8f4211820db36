"""The reference's formulas for Welch peaks: strategy costs, the gate's decision to fuse, and the cheapest strategy."""

from ._estimates import block_graph_ns as block_graph_ns
from ._estimates import estimate_welch_peaks_costs as estimate_welch_peaks_costs
from ._estimates import evaluate_welch_peaks as evaluate_welch_peaks
from ._estimates import fused_graph_ns as fused_graph_ns
from ._estimates import host_path_ns as host_path_ns
from ._estimates import pick_weights as pick_weights
from ._estimates import pick_welch_peaks_strategy as pick_welch_peaks_strategy
from ._estimates import soft_estimate_welch_peaks_costs as soft_estimate_welch_peaks_costs
from ._estimates import soft_fused_graph_ns as soft_fused_graph_ns
from ._estimates import soft_pick_welch_peaks_strategy as soft_pick_welch_peaks_strategy
from ._estimates import welch_peaks_fusion_gate_breakdown as welch_peaks_fusion_gate_breakdown
from ._formulas import WelchPeaksCostEstimates as WelchPeaksCostEstimates
from ._formulas import WelchPeaksEvaluation as WelchPeaksEvaluation
from ._formulas import WelchPeaksGateBreakdown as WelchPeaksGateBreakdown
from ._formulas import learned_scale as learned_scale
from ._reference import AUTO as AUTO
from ._reference import CoefficientSet as CoefficientSet
from ._reference import ReferenceStrategy as ReferenceStrategy
from ._reference import StrategyCoefficients as StrategyCoefficients
from ._reference import algorithm_bandwidth_gbps as algorithm_bandwidth_gbps
from ._reference import coefficient_set as coefficient_set
from ._reference import host_fft_profile as host_fft_profile
from ._reference import parse_welch_peaks_strategy as parse_welch_peaks_strategy
from ._reference import useful_bytes_touched as useful_bytes_touched
from ._reference import welch_peaks_graph as welch_peaks_graph
