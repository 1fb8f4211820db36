"""Graphs that you build node by node, and their exact profiles.

A `Graph` is a list of nodes that each run an op. `profile_graph_io` counts the launches, sync points and bytes of a
graph, and returns a `GraphIoProfile`. The counts are exact integers. `OPS` maps the name of each op to its `Op`.
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
