"""The artefact: what a calibrate job found of one machine, saved, loaded, asked and explained.

`load_calibration` reads a file, `default_calibration` finds the one of this machine, `save_calibration` writes one of
fits of your own. A `Calibration` holds a `CalibratedModel` for each latency model: it predicts, picks, compares and
explains.
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

from ._calibrated import CalibratedModel as CalibratedModel
from ._calibrated import Pick as Pick
from ._calibration import Calibration as Calibration
from ._calibration import default_calibration as default_calibration
from ._calibration import load_calibration as load_calibration
from ._calibration import prior_calibration as prior_calibration
from ._explanation import Crossover as Crossover
from ._explanation import Explanation as Explanation
from ._explanation import Flip as Flip
from ._explanation import StrategyExplanation as StrategyExplanation
from ._explanation import explain as explain
from ._file import GATE_UNITS as GATE_UNITS
from ._file import CalibrationFileError as CalibrationFileError
from ._file import default_calibration_path as default_calibration_path
from ._file import is_there as is_there
from ._file import machine_section as machine_section
from ._file import made_now as made_now
from ._file import read_calibration_file as read_calibration_file
from ._file import save_calibration as save_calibration
from ._file import section_of as section_of
from ._file import sections_of_file as sections_of_file
from ._file import write_sections as write_sections
from ._fingerprint import MACHINE_FIELDS as MACHINE_FIELDS
from ._fingerprint import Fingerprint as Fingerprint
from ._fingerprint import MachineMismatchWarning as MachineMismatchWarning
from ._fingerprint import current_fingerprint as current_fingerprint
from ._fingerprint import fingerprint_differences as fingerprint_differences
from ._fingerprint import fingerprint_of_device as fingerprint_of_device
from ._functions import FunctionPrediction as FunctionPrediction
from ._functions import FunctionTimes as FunctionTimes
from ._functions import predict_profiles as predict_profiles
from ._population import SPEED_LOG_SD as SPEED_LOG_SD
from ._population import PriorCoefficient as PriorCoefficient
from ._population import PriorFile as PriorFile
from ._population import PriorMachine as PriorMachine
from ._population import PriorSection as PriorSection
from ._population import is_prior_file as is_prior_file
from ._population import population as population
from ._population import population_prior as population_prior
from ._population import prior_path as prior_path
from ._population import prior_section as prior_section
from ._population import read_prior as read_prior
from ._population import section_prior as section_prior
from ._schema import SCHEMA_VERSION as SCHEMA_VERSION
from ._schema import UNITS as UNITS
from ._schema import CalibrationFile as CalibrationFile
from ._schema import ErrorSummary as ErrorSummary
from ._schema import FitSummary as FitSummary
from ._schema import GateCoefficient as GateCoefficient
from ._schema import MachineSection as MachineSection
from ._schema import ModelSection as ModelSection
from ._schema import NotNegative as NotNegative
from ._schema import Pace as Pace
from ._schema import Positive as Positive
from ._schema import Range as Range
from ._schema import Samples as Samples
from ._schema import rounded as rounded
from ._targets import KnownGpu as KnownGpu
from ._targets import known_gpu as known_gpu
from ._targets import predict_for_target as predict_for_target
from ._targets import predict_function as predict_function
from ._targets import times_for_target as times_for_target

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
