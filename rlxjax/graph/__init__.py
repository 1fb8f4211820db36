"""Graphs written by hand, and their exact profiles.

A `Graph` lists the nodes that run. `profile_graph_io` counts a graph's launches, sync points and bytes as a
`GraphIoProfile`. The counts are exact integers and the same on every machine. `OPS` maps the name of an op to its `Op`.
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
