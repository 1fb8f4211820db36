"""The artefact: what a calibrate job found of one machine, saved, loaded, asked and explained."""

from rlxjax._files import Strict as Strict
from rlxjax._files import file_to_write as file_to_write
from rlxjax._files import first_refusal as first_refusal
from rlxjax._files import sha256_of as sha256_of
from rlxjax._files import write_json_file as write_json_file

from ._calibrated import CalibratedModel as CalibratedModel
from ._calibrated import extents as extents
from ._calibration import Calibration as Calibration
from ._calibration import load_calibration as load_calibration
from ._explanation import Crossover as Crossover
from ._explanation import Explanation as Explanation
from ._explanation import Flip as Flip
from ._explanation import StrategyExplanation as StrategyExplanation
from ._explanation import explain as explain
from ._file import GATE_UNITS as GATE_UNITS
from ._file import CalibrationFileError as CalibrationFileError
from ._file import default_calibration_path as default_calibration_path
from ._file import read_calibration_file as read_calibration_file
from ._file import section_of as section_of
from ._fingerprint import MACHINE_FIELDS as MACHINE_FIELDS
from ._fingerprint import Fingerprint as Fingerprint
from ._fingerprint import MachineMismatchWarning as MachineMismatchWarning
from ._fingerprint import current_fingerprint as current_fingerprint
from ._fingerprint import fingerprint_differences as fingerprint_differences
from ._schema import SCHEMA_VERSION as SCHEMA_VERSION
from ._schema import UNITS as UNITS
from ._schema import CalibrationFile as CalibrationFile
from ._schema import ErrorSummary as ErrorSummary
from ._schema import FitSummary as FitSummary
from ._schema import GateCoefficient as GateCoefficient
from ._schema import LearnedFftFile as LearnedFftFile
from ._schema import ModelSection as ModelSection
from ._schema import Positive as Positive
from ._schema import Range as Range
from ._schema import Samples as Samples
