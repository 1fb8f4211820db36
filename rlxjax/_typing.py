"""The types in annotations, and the provenance of a coefficient.

`*#batch` is a leading batch shape. The batch shapes of all arguments broadcast together. A *count* is an exact integer
on the host, and a float inside traced code.
"""

import enum
import os
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Array, Bool, Float, Int

#: A path to a file.
AnyPath: TypeAlias = str | os.PathLike[str]
#: A real number or an array of real numbers: the type of every numeric argument.
RealLike: TypeAlias = float | int | np.number | np.ndarray | Array
#: A size of runs as a user gives it: a number, an array, a list of numbers, or a list of lists.
Size: TypeAlias = RealLike | Sequence[RealLike | Sequence[float]]

Nanoseconds: TypeAlias = Float[Array, "*#batch"]
Count: TypeAlias = int | float | np.number | np.ndarray | Array
Probability: TypeAlias = Float[Array, "*#batch"]
LogOdds: TypeAlias = Float[Array, "*#batch"]
LogProbability: TypeAlias = Float[Array, "*#batch"]
Flag: TypeAlias = Bool[Array, "*#batch"]
Code: TypeAlias = int | np.integer | np.ndarray | Int[Array, "*#batch"]
StrategyCosts: TypeAlias = Float[Array, "*#batch 4"]
StrategyWeights: TypeAlias = Float[Array, "*#batch 4"]
StrategyLogWeights: TypeAlias = Float[Array, "*#batch 4"]


class Provenance(enum.StrEnum):
    """The kind of source that a coefficient comes from."""

    MEASURED = "measured"
    ARCH_DEFAULT = "arch default"
    DATA_SHEET = "data sheet"
    UNCALIBRATED = "uncalibrated"
