"""Fit latency models to timings, choose what to time next, and decide which of two runs is faster.

A `LatencyModel` predicts the time of a run as a sum of terms. `Timings` are measured runs of a model. `fit_posterior`
fits a posterior to timings: the model's coefficients with their uncertainty. `next_measurements` chooses what to time
next. `estimate` predicts times, and `compare` compares two estimates.
"""

from ._fit import FitResult as FitResult
from ._fit import PosteriorFit as PosteriorFit
from ._fit import fit_posterior as fit_posterior
from ._fit import fit_posteriors as fit_posteriors
from ._fit import is_measured as is_measured
from ._fit import pooled_prior as pooled_prior
from ._latency_model import Facts as Facts
from ._latency_model import Input as Input
from ._latency_model import LatencyModel as LatencyModel
from ._latency_model import LatencyPrior as LatencyPrior
from ._latency_model import Runs as Runs
from ._latency_model import StrategySpec as StrategySpec
from ._latency_model import all_inputs as all_inputs
from ._latency_model import alternatives_of as alternatives_of
from ._latency_model import check_size as check_size
from ._latency_model import check_takes_sizes as check_takes_sizes
from ._latency_model import coefficient_names as coefficient_names
from ._latency_model import named as named
from ._latency_model import smallest_run as smallest_run
from ._latency_model import strategy_of as strategy_of
from ._latency_model import unit_of as unit_of
from ._latency_model import wide_prior as wide_prior
from ._posterior import CORRECTION_SD as CORRECTION_SD
from ._posterior import SURE as SURE
from ._posterior import Decision as Decision
from ._posterior import Estimate as Estimate
from ._posterior import LatencyPosterior as LatencyPosterior
from ._posterior import compare as compare
from ._posterior import corrected_terms_ns as corrected_terms_ns
from ._posterior import estimate as estimate
from ._posterior import estimate_of_variant as estimate_of_variant
from ._posterior import faster_probability as faster_probability
from ._posterior import is_candidate as is_candidate
from ._posterior import own_correlation as own_correlation
from ._posterior import predicted_ns as predicted_ns
from ._posterior import prior_posterior as prior_posterior
from ._posterior import transferred_prior as transferred_prior
from ._spread import COVERED as COVERED
from ._spread import COVERED_SDS as COVERED_SDS
from ._suite import Cell as Cell
from ._suite import Design as Design
from ._suite import Suite as Suite
from ._suite import cell_runs as cell_runs
from ._suite import next_measurements as next_measurements
from ._timings import MIN_TIMINGS as MIN_TIMINGS
from ._timings import Timings as Timings
from ._timings import stack_timings as stack_timings

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
