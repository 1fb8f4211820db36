"""Timings in, coefficients and how sure they are out: fits, posteriors, design and decisions of any latency model.

A `LatencyModel` says what runs take as a sum of terms. `Timings` are measured runs of it: `fit_latency` finds the
coefficients (a `FitResult`), `fit_posterior` also how sure they are (a `PosteriorFit`), `next_measurements` what to
time next. `estimate` predicts runs, and `decision` compares two estimates.
"""

from ._correction import CORRECTION_SD as CORRECTION_SD
from ._decision import SURE as SURE
from ._decision import Decision as Decision
from ._decision import decision as decision
from ._design import Design as Design
from ._design import information_gain as information_gain
from ._design import next_measurements as next_measurements
from ._devices import DeviceFits as DeviceFits
from ._devices import fit_devices as fit_devices
from ._fit import FitResult as FitResult
from ._fit import fit_latency as fit_latency
from ._laplace import is_measured as is_measured
from ._model import Facts as Facts
from ._model import Input as Input
from ._model import LatencyModel as LatencyModel
from ._model import Runs as Runs
from ._model import StrategySpec as StrategySpec
from ._names import coefficient_names as coefficient_names
from ._names import coefficient_table as coefficient_table
from ._names import named as named
from ._names import unit_of as unit_of
from ._pooling import pooled_prior as pooled_prior
from ._posterior import LatencyEstimate as LatencyEstimate
from ._posterior import LatencyPosterior as LatencyPosterior
from ._posterior import corrected_terms_ns as corrected_terms_ns
from ._posterior import estimate as estimate
from ._posterior import prior_posterior as prior_posterior
from ._posterior import transferred_prior as transferred_prior
from ._posterior_fit import COVERED as COVERED
from ._posterior_fit import COVERED_SDS as COVERED_SDS
from ._posterior_fit import PosteriorFit as PosteriorFit
from ._posterior_fit import fit_posterior as fit_posterior
from ._predict import predicted_ns as predicted_ns
from ._prior import LatencyPrior as LatencyPrior
from ._prior import wide_prior as wide_prior
from ._strategies import all_inputs as all_inputs
from ._strategies import alternatives_of as alternatives_of
from ._strategies import strategy_of as strategy_of
from ._suite import Cell as Cell
from ._suite import Suite as Suite
from ._suite import cell_runs as cell_runs
from ._timings import MIN_TIMINGS as MIN_TIMINGS
from ._timings import Timings as Timings
from ._timings import stack_timings as stack_timings

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
