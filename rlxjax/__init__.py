"""A differentiable cost model that decides, by numbers measured on this machine, whether fusing pays.

`Graph -> GraphIoProfile -> FusionBenefit -> gate score -> decision`, and
`timings -> fit -> Calibration -> the same decisions, now true here`.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from ._calibration import Calibration as Calibration
    from ._calibration import CalibrationFileError as CalibrationFileError
    from ._calibration import MachineMismatchWarning as MachineMismatchWarning
    from ._calibration import load_calibration as load_calibration
    from ._cost import device_cost_ns as device_cost_ns
    from ._cost import graph_cost_ns as graph_cost_ns
    from ._cost import io_cost_ns as io_cost_ns
    from ._cost import soft_graph_cost_ns as soft_graph_cost_ns
    from ._cost import soft_io_cost_ns as soft_io_cost_ns
    from ._design import Design as Design
    from ._design import information_gain as information_gain
    from ._design import next_measurements as next_measurements
    from ._device import BACKEND_ROWS as BACKEND_ROWS
    from ._device import BackendCoefficients as BackendCoefficients
    from ._device import Device as Device
    from ._device import Provenance as Provenance
    from ._device import Target as Target
    from ._device import backend_coefficients as backend_coefficients
    from ._device import fusion_target as fusion_target
    from ._device import is_fused_viable as is_fused_viable
    from ._device import is_gpu_device as is_gpu_device
    from ._device_fits import DeviceFits as DeviceFits
    from ._device_fits import fit_devices as fit_devices
    from ._explanation import Crossover as Crossover
    from ._explanation import Explanation as Explanation
    from ._explanation import Flip as Flip
    from ._explanation import StrategyExplanation as StrategyExplanation
    from ._fft_latency import FftLatencyCoefficients as FftLatencyCoefficients
    from ._fft_latency import FftTimings as FftTimings
    from ._fft_latency import fft_latency_ns as fft_latency_ns
    from ._fft_latency import fit_fft_devices as fit_fft_devices
    from ._fft_latency import fit_fft_latency as fit_fft_latency
    from ._fft_latency import typical_fft_prior as typical_fft_prior
    from ._fit import FitResult as FitResult
    from ._fit import fit_latency as fit_latency
    from ._gate import FusionBenefit as FusionBenefit
    from ._gate import GateEvaluation as GateEvaluation
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
    from ._learned_file import LearnedFftFileError as LearnedFftFileError
    from ._learned_file import load_learned_fft as load_learned_fft
    from ._learned_file import save_learned_fft as save_learned_fft
    from ._numerics import soft_maximum as soft_maximum
    from ._numerics import soft_minimum as soft_minimum
    from ._numerics import soft_relu as soft_relu
    from ._numerics import soft_step as soft_step
    from ._numerics import straight_through as straight_through
    from ._numerics import temperature_from_sd as temperature_from_sd
    from ._pooling import pooled_prior as pooled_prior
    from ._posterior import LatencyEstimate as LatencyEstimate
    from ._posterior import LatencyPosterior as LatencyPosterior
    from ._posterior import PosteriorFit as PosteriorFit
    from ._posterior import estimate as estimate
    from ._posterior import fit_posterior as fit_posterior
    from ._posterior import prior_posterior as prior_posterior
    from ._posterior import transferred_prior as transferred_prior
    from ._prior import LatencyPrior as LatencyPrior
    from ._prior import typical_prior as typical_prior
    from ._profile import GraphIoProfile as GraphIoProfile
    from ._profile import node_io_bytes as node_io_bytes
    from ._profile import profile_graph_io as profile_graph_io
    from ._ranking import DeviceRanking as DeviceRanking
    from ._ranking import rank_devices as rank_devices
    from ._timings import Timings as Timings
    from ._timings import stack_timings as stack_timings
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
    from .welch import LearnedFft as LearnedFft
    from .welch import Path as Path
    from .welch import SoftWelchPeaksCosts as SoftWelchPeaksCosts
    from .welch import Strategy as Strategy
    from .welch import StrategyCoefficients as StrategyCoefficients
    from .welch import ToneSignals as ToneSignals
    from .welch import TrainingResult as TrainingResult
    from .welch import WelchPeakParams as WelchPeakParams
    from .welch import WelchPeaksCostEstimates as WelchPeaksCostEstimates
    from .welch import WelchPeaksEvaluation as WelchPeaksEvaluation
    from .welch import WelchPeaksGateBreakdown as WelchPeaksGateBreakdown
    from .welch import algorithm_bandwidth_gbps as algorithm_bandwidth_gbps
    from .welch import block_graph_ns as block_graph_ns
    from .welch import coefficient_set as coefficient_set
    from .welch import estimate_welch_peaks_costs as estimate_welch_peaks_costs
    from .welch import evaluate_welch_peaks as evaluate_welch_peaks
    from .welch import fused_graph_ns as fused_graph_ns
    from .welch import host_fft_profile as host_fft_profile
    from .welch import host_path_ns as host_path_ns
    from .welch import learned_path_ns as learned_path_ns
    from .welch import learned_spectrum as learned_spectrum
    from .welch import padded_batch as padded_batch
    from .welch import parse_welch_peaks_strategy as parse_welch_peaks_strategy
    from .welch import peak_recall as peak_recall
    from .welch import pick_weights as pick_weights
    from .welch import pick_welch_peaks_strategy as pick_welch_peaks_strategy
    from .welch import soft_estimate_welch_peaks_costs as soft_estimate_welch_peaks_costs
    from .welch import soft_fused_graph_ns as soft_fused_graph_ns
    from .welch import soft_pick_welch_peaks_strategy as soft_pick_welch_peaks_strategy
    from .welch import stream_welch_peaks as stream_welch_peaks
    from .welch import train_learned_fft as train_learned_fft
    from .welch import useful_bytes_touched as useful_bytes_touched
    from .welch import welch_peaks as welch_peaks
    from .welch import welch_peaks_fusion_gate_breakdown as welch_peaks_fusion_gate_breakdown
    from .welch import welch_peaks_graph as welch_peaks_graph
else:
    #: The public names by the module that holds them, which is imported when one of them is first used.
    _NAMES = {
        "_calibration": "Calibration CalibrationFileError MachineMismatchWarning load_calibration",
        "_cost": "device_cost_ns graph_cost_ns io_cost_ns soft_graph_cost_ns soft_io_cost_ns",
        "_design": "Design information_gain next_measurements",
        "_device": (
            "BACKEND_ROWS BackendCoefficients Device Provenance Target backend_coefficients "
            "fusion_target is_fused_viable is_gpu_device"
        ),
        "_device_fits": "DeviceFits fit_devices",
        "_explanation": "Crossover Explanation Flip StrategyExplanation",
        "_fft_latency": (
            "FftLatencyCoefficients FftTimings fft_latency_ns fit_fft_devices fit_fft_latency "
            "typical_fft_prior"
        ),
        "_fit": "FitResult fit_latency",
        "_gate": "FusionBenefit GateEvaluation IoFusionGate fusion_benefit io_fusion_gate_for_target",
        "_graph": "Graph Node tensor_bytes",
        "_latency": "LatencyCoefficients LatencyTerms latency_terms_ns predict_latency_ns",
        "_learned_file": "LearnedFftFileError load_learned_fft save_learned_fft",
        "_numerics": "soft_maximum soft_minimum soft_relu soft_step straight_through temperature_from_sd",
        "_pooling": "pooled_prior",
        "_posterior": (
            "LatencyEstimate LatencyPosterior PosteriorFit estimate fit_posterior prior_posterior "
            "transferred_prior"
        ),
        "_prior": "LatencyPrior typical_prior",
        "_profile": "GraphIoProfile node_io_bytes profile_graph_io",
        "_ranking": "DeviceRanking rank_devices",
        "_timings": "Timings stack_timings",
        "fusion": (
            "REWRITES FusedKernel FusionEdge FusionPlan execute_kernel execute_plan plan_fusion "
            "rewrite_graph select_peaks_only_outputs"
        ),
        "welch": (
            "CoefficientSet LearnedFft Path SoftWelchPeaksCosts Strategy StrategyCoefficients "
            "ToneSignals TrainingResult WelchPeakParams WelchPeaksCostEstimates "
            "WelchPeaksEvaluation WelchPeaksGateBreakdown algorithm_bandwidth_gbps block_graph_ns "
            "coefficient_set estimate_welch_peaks_costs evaluate_welch_peaks fused_graph_ns "
            "host_fft_profile host_path_ns learned_path_ns learned_spectrum padded_batch "
            "parse_welch_peaks_strategy peak_recall pick_weights pick_welch_peaks_strategy "
            "soft_estimate_welch_peaks_costs soft_fused_graph_ns soft_pick_welch_peaks_strategy "
            "stream_welch_peaks train_learned_fft useful_bytes_touched welch_peaks "
            "welch_peaks_fusion_gate_breakdown welch_peaks_graph"
        ),
    }
    _MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

    __all__ = [*_MODULES, "fusion", "welch"]

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _importlib.import_module(f".{_MODULES.get(name, name)}", __name__)
        value = globals()[name] = getattr(module, name) if name in _MODULES else module
        return value

    def __dir__() -> list[str]:
        return sorted([*__all__, "__version__"])


__version__ = "0.1.0"
