"""A differentiable cost model that decides, by numbers measured on this machine, whether fusing pays.

`Graph -> GraphIoProfile -> FusionBenefit -> gate score -> decision`, and
`timings -> fit -> Calibration -> the same decisions, now true here`.
"""

import importlib as _importlib

#: The public names by the module that holds them, which is imported when one of them is first used.
#: Type checkers read the same names in `__init__.pyi`.
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
        "FftLatencyCoefficients FftTimings fft_latency_ns fit_fft_devices fit_fft_latency typical_fft_prior"
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

__all__ = [*_MODULES, "fusion", "welch"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _importlib.import_module(f".{_MODULES.get(name, name)}", __name__)
    value = globals()[name] = getattr(module, name) if name in _MODULES else module
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


__version__ = "0.1.0"
