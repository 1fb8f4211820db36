"""A differentiable cost model that decides, by numbers measured on this machine, whether fusing pays.

`Graph -> GraphIoProfile -> FusionBenefit -> gate score -> decision`, and
`timings -> fit -> Calibration -> the same decisions, now true here`.

The names of every day, by task:

- count what work is: `Graph`, `profile_graph_io`, `profile_function`
- decide by built-in prices: `fusion_benefit`, `io_fusion_gate_for_target`, `rank_devices`
- decide by what was measured here: `default_calibration`, `load_calibration`, `save_calibration`; a `Calibration`
  predicts, picks, compares (a `Decision`) and explains (an `Explanation`)
- fuse: `advise`, `plan_fusion`, `execute_plan`, `plan_stages`
- a workload of your own: `LatencyModel`, `Input`, `wide_prior`, `Timings`, `fit_posterior`, `next_measurements`
- run Welch peaks: `WelchPeakParams`, `welch_peaks`, `stream_welch_peaks`
- a learned FFT: `train_learned_fft`, `save_learned_fft`, `load_learned_fft`
- take gradients of choices: `pick_weights`, `temperature_from_sd`

All others stand in the same namespace, and once more in that of their room: `rlxjax.graph`, `rlxjax.jaxpr`,
`rlxjax.device`, `rlxjax.fusion`, `rlxjax.fit`, `rlxjax.models`, `rlxjax.calibration`, `rlxjax.advice`, `rlxjax.welch`,
`rlxjax.learned`; pictures are in `rlxjax.plot` alone. `help(rlxjax.fit)` lists one room.
"""

import importlib as _importlib

#: The public names by the module that holds them, which is imported when one of them is first used.
#: Type checkers read the same names in `__init__.pyi`.
_NAMES = {
    "graph": "Graph GraphIoProfile Node node_io_bytes profile_graph_io tensor_bytes",
    "jaxpr": "BranchSpread Disagreement FunctionProfile OperationCounts UnknownLoop profile_function register_rule",
    "device": (
        "BACKEND_ROWS BackendCoefficients Device DeviceRanking FusionBenefit GateEvaluation IoFusionGate "
        "Provenance Target backend_coefficients fusion_benefit fusion_target graph_cost_ns "
        "io_cost_ns io_fusion_gate_for_target is_fused_viable rank_devices soft_graph_cost_ns "
        "soft_io_cost_ns"
    ),
    "fusion": (
        "REWRITES FusedKernel FusionEdge FusionPlan StagePlan execute_kernel execute_plan "
        "plan_fusion plan_stages rewrite_graph select_peaks_only_outputs soft_plan_ns"
    ),
    "fit": (
        "Decision Design DeviceFits FitResult Input LatencyEstimate LatencyModel LatencyPosterior LatencyPrior "
        "PosteriorFit Runs StrategySpec Timings decision estimate fit_devices fit_latency fit_posterior "
        "next_measurements pooled_prior predicted_ns prior_posterior stack_timings "
        "transferred_prior wide_prior"
    ),
    "models": ("FftLatencyCoefficients LatencyCoefficients "),
    "calibration": (
        "CalibratedModel Calibration CalibrationFileError Crossover Explanation Flip MachineMismatchWarning "
        "FunctionPrediction StrategyExplanation default_calibration load_calibration prior_calibration save_calibration"
    ),
    "advice": ("Advice Grouping Measured StageCost advise"),
    "welch": (
        "CoefficientSet ReferenceStrategy SoftWelchPeaksCosts StrategyCoefficients WelchPeakParams "
        "WelchPeaksCostEstimates WelchPeaksEvaluation WelchPeaksGateBreakdown algorithm_bandwidth_gbps block_graph_ns "
        "coefficient_set estimate_welch_peaks_costs evaluate_welch_peaks fused_graph_ns host_fft_profile host_path_ns "
        "padded_batch parse_welch_peaks_strategy pick_weights pick_welch_peaks_strategy "
        "soft_estimate_welch_peaks_costs soft_fused_graph_ns soft_pick_welch_peaks_strategy stream_welch_peaks "
        "useful_bytes_touched welch_peaks welch_peaks_fusion_gate_breakdown welch_peaks_graph"
    ),
    "learned": (
        "LearnedFft LearnedFftFileError ToneSignals TrainingResult learned_spectrum load_learned_fft peak_recall "
        "save_learned_fft train_learned_fft"
    ),
    "plot": "",
    "_numerics": ("soft_maximum soft_minimum soft_relu soft_step straight_through temperature_from_sd"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_MODULES, *(room for room in _NAMES if not room.startswith("_"))]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _importlib.import_module(f".{_MODULES.get(name, name)}", __name__)
    value = globals()[name] = getattr(module, name) if name in _MODULES else module
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


__version__ = "0.1.0"
