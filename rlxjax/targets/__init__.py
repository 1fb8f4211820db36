"""Predictions for TPUs and GPUs that you do not have.

`rank_targets` finds the fastest of several devices. `rank_meshes` finds the fastest way to divide a function over
devices. `largest` finds the largest size that fits. With prices per hour from you (`load_prices`), a ranking also
shows costs. This folder also has all names of the devices folder, rlxjax.devices, such as `compile_for`.
"""

from rlxjax.devices import CompiledFor as CompiledFor
from rlxjax.devices import DoesNotFitError as DoesNotFitError
from rlxjax.devices import Link as Link
from rlxjax.devices import TargetDevice as TargetDevice
from rlxjax.devices import check_compiler as check_compiler
from rlxjax.devices import compile_for as compile_for
from rlxjax.devices import context_for as context_for
from rlxjax.devices import divided as divided
from rlxjax.devices import load_target as load_target
from rlxjax.devices import mesh_of as mesh_of
from rlxjax.devices import target_device as target_device
from rlxjax.devices import target_names as target_names

from ._largest import LargestSize as LargestSize
from ._largest import largest as largest
from ._prices import Prices as Prices
from ._prices import load_prices as load_prices
from ._rank import RankedTarget as RankedTarget
from ._rank import TargetRanking as TargetRanking
from ._rank import rank_meshes as rank_meshes
from ._rank import rank_targets as rank_targets

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
