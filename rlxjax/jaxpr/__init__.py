"""Count the work of any JAX function exactly, as the function is written or as XLA compiles it.

`profile_function` counts the kernels, waits for the host, bytes and FLOP of a function. `register_rule` adds a counting
rule for your own primitive. Counts are exact integers, and they are the same on every machine.
"""

from ._buffers import Buffer as Buffer
from ._buffers import buffers_of as buffers_of
from ._exchanges import Exchange as Exchange
from ._function_profile import profile_function as profile_function
from ._kernels import Kernels as Kernels
from ._kernels import stacked as stacked
from ._operations import CLASSES as CLASSES
from ._operations import FAMILIES as FAMILIES
from ._operations import OPERATIONS as OPERATIONS
from ._operations import vocabulary_version as vocabulary_version
from ._primitives import register_rule as register_rule
from ._profile import Disagreement as Disagreement
from ._profile import FunctionProfile as FunctionProfile
from ._profile import TargetProfile as TargetProfile
from ._rules import OperationCounts as OperationCounts
from ._totals import BranchSpread as BranchSpread
from ._totals import TripCounts as TripCounts
from ._totals import UnknownLoop as UnknownLoop
from ._xla import compiled_kernels as compiled_kernels
from ._xla import gpu_program as gpu_program
from ._xla_kernels import PRODUCT_KINDS as PRODUCT_KINDS
from ._xla_kernels import PRODUCT_OPERATIONS as PRODUCT_OPERATIONS
from ._xla_kernels import GpuProgram as GpuProgram

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
