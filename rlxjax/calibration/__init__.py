"""Save and load calibrations, and ask them for predictions and explanations.

`load_calibration` reads a file, `default_calibration` finds this machine's file, and `save_calibration` writes a file
from your own fits. A `Calibration` holds a `CalibratedModel` for each latency model. Both classes predict times,
compare strategies and pick the fastest strategy. `explain` gives the reasons for a pick.
"""

from rlxjax._files import Strict as Strict
from rlxjax._files import file_to_write as file_to_write
from rlxjax._files import first_refusal as first_refusal
from rlxjax._files import home_folder as home_folder
from rlxjax._files import locked as locked
from rlxjax._files import not_written as not_written
from rlxjax._files import read_file as read_file
from rlxjax._files import read_json as read_json
from rlxjax._files import set_aside as set_aside
from rlxjax._files import sha256_of as sha256_of
from rlxjax._files import without_duplicates as without_duplicates
from rlxjax._files import write_json_file as write_json_file
from rlxjax._files import write_text_file as write_text_file

from ._artefact import CalibrationFileError as CalibrationFileError
from ._artefact import default_calibration_path as default_calibration_path
from ._artefact import is_there as is_there
from ._artefact import machine_section as machine_section
from ._artefact import population as population
from ._artefact import population_path as population_path
from ._artefact import population_prior as population_prior
from ._artefact import read_calibration_file as read_calibration_file
from ._artefact import read_prior as read_prior
from ._artefact import save_calibration as save_calibration
from ._artefact import sections_of_file as sections_of_file
from ._artefact import write_sections as write_sections
from ._calibration import Calibration as Calibration
from ._calibration import default_calibration as default_calibration
from ._calibration import load_calibration as load_calibration
from ._calibration import prior_calibration as prior_calibration
from ._conversion import GATE_UNITS as GATE_UNITS
from ._conversion import SPEED_LOG_SD as SPEED_LOG_SD
from ._conversion import made_now as made_now
from ._conversion import population_section as population_section
from ._conversion import prior_of as prior_of
from ._conversion import section_of as section_of
from ._explanation import Crossover as Crossover
from ._explanation import Explanation as Explanation
from ._explanation import StrategyExplanation as StrategyExplanation
from ._explanation import explain as explain
from ._function_times import FunctionPrediction as FunctionPrediction
from ._function_times import FunctionTimes as FunctionTimes
from ._function_times import predict_profiles as predict_profiles
from ._predict import CalibratedModel as CalibratedModel
from ._predict import Pick as Pick
from ._predict import Predictions as Predictions
from ._sections import MACHINE_FIELDS as MACHINE_FIELDS
from ._sections import SCHEMA_VERSION as SCHEMA_VERSION
from ._sections import UNITS as UNITS
from ._sections import CalibrationFile as CalibrationFile
from ._sections import ErrorSummary as ErrorSummary
from ._sections import Fingerprint as Fingerprint
from ._sections import FittedCoefficient as FittedCoefficient
from ._sections import GateCoefficient as GateCoefficient
from ._sections import Machine as Machine
from ._sections import MachineMismatchWarning as MachineMismatchWarning
from ._sections import MachineSection as MachineSection
from ._sections import ModelSection as ModelSection
from ._sections import NotNegative as NotNegative
from ._sections import Pace as Pace
from ._sections import Positive as Positive
from ._sections import Samples as Samples
from ._sections import current_fingerprint as current_fingerprint
from ._sections import fingerprint_differences as fingerprint_differences
from ._sections import fingerprint_of_device as fingerprint_of_device
from ._sections import rounded as rounded
from ._target_times import known_gpu as known_gpu
from ._target_times import predict_for_target as predict_for_target
from ._target_times import predict_function as predict_function
from ._target_times import stands_on as stands_on
from ._target_times import times_for_target as times_for_target

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
