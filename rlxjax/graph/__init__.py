"""Graphs written by hand, and their exact profiles.

A `Graph` says what runs; `profile_graph_io` counts its launches, waits and bytes as a `GraphIoProfile`. Counts are
exact integers and know no machine. `OPS` is the table of ops: what an `Op` is, and the `Shape` it makes.
"""

from ._graph import Graph as Graph
from ._graph import GraphIoProfile as GraphIoProfile
from ._graph import node_io_bytes as node_io_bytes
from ._graph import profile_graph_io as profile_graph_io
from ._graph import tensor_bytes as tensor_bytes
from ._ops import OPS as OPS
from ._ops import Node as Node
from ._ops import Op as Op
from ._ops import Shape as Shape

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
