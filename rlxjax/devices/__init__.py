"""Descriptions of TPUs and GPUs, and a compiler for devices that you do not have.

`target_device` returns a device by its name, `load_target` reads a device from your own file, and `compile_for`
compiles a function for a device. The extras `tpu-compiler` and `cuda-compiler` install the compilers.
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
