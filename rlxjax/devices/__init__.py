"""Devices that need not be there: what each has, and functions compiled for them.

`target_device` returns one by its name, `load_target` one's own from a file, `compile_for` compiles for it. What
compiles comes with the extras `tpu-compiler` and `cuda-compiler`.
"""

from ._compile import CompiledFor as CompiledFor
from ._compile import DoesNotFitError as DoesNotFitError
from ._compile import check_compiler as check_compiler
from ._compile import compile_for as compile_for
from ._mesh import context_for as context_for
from ._mesh import divided as divided
from ._mesh import mesh_of as mesh_of
from ._table import Link as Link
from ._table import TargetDevice as TargetDevice
from ._table import load_target as load_target
from ._table import target_device as target_device
from ._table import target_names as target_names

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
