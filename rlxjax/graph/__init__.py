"""What work is: operations, graphs, and their exact profiles."""

from ._graph import Graph as Graph
from ._graph import Node as Node
from ._graph import tensor_bytes as tensor_bytes
from ._profile import GraphIoProfile as GraphIoProfile
from ._profile import node_io_bytes as node_io_bytes
from ._profile import profile_graph_io as profile_graph_io
