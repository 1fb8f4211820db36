"""What work is: operations, graphs, any JAX function, and their exact profiles.

A `Graph` says what runs; `profile_graph_io` counts its launches, waits and bytes as a `GraphIoProfile`.
`profile_function` counts the same, and the operations, of any JAX function, as a `FunctionProfile`; `register_rule`
teaches it a primitive. Counts are exact integers and know no machine.
"""

from ._compiled import Disagreement as Disagreement
from ._function_profile import FunctionProfile as FunctionProfile
from ._function_profile import profile_function as profile_function
from ._graph import Graph as Graph
from ._graph import Node as Node
from ._graph import tensor_bytes as tensor_bytes
from ._kernels import KernelGroup as KernelGroup
from ._kernels import KernelKind as KernelKind
from ._loops import BranchSpread as BranchSpread
from ._loops import TripCounts as TripCounts
from ._loops import UnknownLoop as UnknownLoop
from ._operations import OperationCounts as OperationCounts
from ._operations import register_rule as register_rule
from ._profile import GraphIoProfile as GraphIoProfile
from ._profile import node_io_bytes as node_io_bytes
from ._profile import profile_graph_io as profile_graph_io

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
