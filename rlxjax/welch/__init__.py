"""Welch peaks: the k bins with the largest power in a signal's mean power spectrum.

`welch_peaks` returns the peaks of a signal. `stream_welch_peaks` returns the peaks of each of many signals.
`choose_variant` returns the program that `welch_peaks` runs, and the basis of the choice. `estimate_welch_peaks_costs`
and `pick_welch_peaks_strategy` use the cost formulas of the reference, the published design behind this package.
"""

from rlxjax._schedule import RUNNER_VERSION as RUNNER_VERSION
from rlxjax._schedule import Schedule as Schedule
from rlxjax._schedule import schedule as schedule

from ._device_programs import fused_peaks as fused_peaks
from ._device_programs import mean_power as mean_power
from ._device_programs import padded_batch as padded_batch
from ._launch import program_of as program_of
from ._run import choose_variant as choose_variant
from ._run import keep_programs as keep_programs
from ._run import stream_welch_peaks as stream_welch_peaks
from ._run import welch_peaks as welch_peaks
from ._selection import SELECTIONS as SELECTIONS
from ._selection import default_selection as default_selection
from ._selection import selected_peaks as selected_peaks
from ._workload import FAST_SEGMENTS as FAST_SEGMENTS
from ._workload import ULTRA_SEGMENTS as ULTRA_SEGMENTS
from ._workload import VARIANTS as VARIANTS
from ._workload import WelchPeakParams as WelchPeakParams
from ._workload import WelchVariant as WelchVariant
from ._workload import hann_window as hann_window
from ._workload import one_sided_weights as one_sided_weights
from .costs import CoefficientSet as CoefficientSet
from .costs import ReferenceStrategy as ReferenceStrategy
from .costs import StrategyCoefficients as StrategyCoefficients
from .costs import WelchPeaksCostEstimates as WelchPeaksCostEstimates
from .costs import WelchPeaksEvaluation as WelchPeaksEvaluation
from .costs import WelchPeaksGateBreakdown as WelchPeaksGateBreakdown
from .costs import algorithm_bandwidth_gbps as algorithm_bandwidth_gbps
from .costs import block_graph_ns as block_graph_ns
from .costs import coefficient_set as coefficient_set
from .costs import estimate_welch_peaks_costs as estimate_welch_peaks_costs
from .costs import evaluate_welch_peaks as evaluate_welch_peaks
from .costs import fused_graph_ns as fused_graph_ns
from .costs import host_fft_profile as host_fft_profile
from .costs import host_path_ns as host_path_ns
from .costs import parse_welch_peaks_strategy as parse_welch_peaks_strategy
from .costs import pick_weights as pick_weights
from .costs import pick_welch_peaks_strategy as pick_welch_peaks_strategy
from .costs import soft_estimate_welch_peaks_costs as soft_estimate_welch_peaks_costs
from .costs import soft_fused_graph_ns as soft_fused_graph_ns
from .costs import soft_pick_welch_peaks_strategy as soft_pick_welch_peaks_strategy
from .costs import useful_bytes_touched as useful_bytes_touched
from .costs import welch_peaks_fusion_gate_breakdown as welch_peaks_fusion_gate_breakdown
from .costs import welch_peaks_graph as welch_peaks_graph

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
