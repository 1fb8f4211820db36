"""The IO profile of a graph: four counts, exact on the host."""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import as_index, check_at_least, check_not_nan, is_traced
from rlxjax._counts import as_float, exact, is_exact, packed, saturate
from rlxjax._html import html_of
from rlxjax._typing import Count, RealLike
from rlxjax._values import by_value

from ._graph import Graph, Node
from ._ops import OPS

#: Bytes of one selected output element, whatever its dtype.
_SELECTED_ELEMENT_BYTES = 4


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GraphIoProfile:
    """What a graph costs before any coefficient is known.

    Attributes:
        kernel_launches: launches, shape `[*batch]`.
        sync_points: points where the device waits for the host.
        host_output_bytes: bytes of the outputs that the host reads.
        device_traffic_bytes: bytes that nodes read and write on the device.

    Counts are Python integers or NumPy integer arrays, or floats in traced code.
    """

    kernel_launches: Count = 0
    sync_points: Count = 0
    host_output_bytes: Count = 0
    device_traffic_bytes: Count = 0

    def _repr_html_(self) -> str:
        rows = [(name.replace("_", " "), count) for name, count in vars(self).items()]
        return html_of([], [("", "count"), *rows])

    @classmethod
    def checked(cls, **counts: Count) -> "GraphIoProfile":
        """Build a profile from counts that came from outside.

        Raises:
            ValueError: a negative or NaN count.
        """
        for name, count in counts.items():
            check_at_least(count, name)
        return cls(**counts)

    def host_readback_bytes(self, unified_memory: RealLike) -> Count:
        """Return the bytes that have to come back to the host, shape `[*batch]`.

        `host_output_bytes` under unified memory, else a quarter of the device traffic (rounded down) on
        top of it, saturating at `2**64 - 1`. Exact where counts and flag can be read on the host.

        Examples:
            >>> GraphIoProfile(1, 0, 100, 41).host_readback_bytes(unified_memory=False)
            110
        """
        for name in ("host_output_bytes", "device_traffic_bytes"):
            check_at_least(getattr(self, name), name)
        if is_traced(unified_memory) or np.ndim(unified_memory):
            unified, discrete = self.host_output_bytes, self.host_readback_bytes(False)
            if not is_traced(unified_memory) and is_exact(unified) and is_exact(discrete):
                counts = (np.asarray(exact(count), object) for count in (unified, discrete))
                return packed(np.where(np.asarray(unified_memory) > 0, *counts))
            unified, discrete = as_float(unified, "host_output_bytes"), as_float(discrete, "readback")
            return jnp.where(jnp.asarray(unified_memory) > 0, unified, discrete)
        check_not_nan(unified_memory, "unified_memory")
        if unified_memory:
            return self.host_output_bytes
        if is_exact(self.host_output_bytes) and is_exact(self.device_traffic_bytes):
            total = exact(self.host_output_bytes) + exact(self.device_traffic_bytes) // 4
            if isinstance(total, int):
                return saturate(total)
            saturated = np.array([saturate(count) for count in total.flat], object)
            return packed(saturated.reshape(total.shape))
        traffic = as_float(self.device_traffic_bytes, "device_traffic_bytes")
        return as_float(self.host_output_bytes, "host_output_bytes") + jnp.floor(traffic / 4)


def node_io_bytes(graph: Graph, node: Node) -> int:
    """Return the bytes that a node of a graph reads and writes, at most `2**64 - 1`.

    Args:
        graph: the graph, whose nodes it reads.
        node: the node; an operand that it reads twice counts twice.

    Examples:
        >>> graph = Graph()
        >>> x = graph.input("x", (10,))
        >>> doubled = graph.add("add", [x, x])
        >>> node_io_bytes(graph, graph.nodes[doubled])
        120
    """
    return saturate(sum(graph.nodes[i].bytes for i in node.inputs) + node.bytes)


def profile_graph_io(
    graph: Graph,
    fft_host_sync: bool = False,
    output_indices: Iterable[int] | None = None,
    output_ids: Iterable[int] | None = None,
) -> GraphIoProfile:
    """Count a graph's launches, sync points, host output bytes and device traffic.

    Every node that is no metadata op is one launch and `node_io_bytes` of traffic, one sync point if its
    op is a host-sync op, and its bytes of host output if it is among the outputs.

    Args:
        graph: the graph.
        fft_host_sync: count every fft node as one more sync point.
        output_indices: select outputs by position. Host output becomes the sum of `elements * 4` over
            the positions, each once, metadata ops included. An empty list selects nothing.
        output_ids: select outputs by node: the default rule with this output list.

    Raises:
        ValueError: both selections at once, or a position or node that the graph does not have.

    Examples:
        >>> g = Graph()
        >>> x = g.input("x", (4, 256), "f32")
        >>> g.set_outputs([g.add("relu", [x])])
        >>> profile_graph_io(g)  # doctest: +NORMALIZE_WHITESPACE
        GraphIoProfile(kernel_launches=1, sync_points=0, host_output_bytes=4096,
                       device_traffic_bytes=8192)
    """
    if output_indices is not None and output_ids is not None:
        raise ValueError("output_indices and output_ids: expected one of the two, got both")
    nodes = graph.nodes
    for name, chosen in (("output_indices", output_indices), ("output_ids", output_ids)):
        if chosen is not None and not isinstance(chosen, Iterable):
            raise ValueError(f"{name}: expected a list, got {chosen!r}")
    outputs = graph.outputs if output_ids is None else [_output_id(graph, i) for i in output_ids]
    wanted = set(outputs)
    launches = syncs = host_bytes = traffic = 0
    for node in nodes:
        op = OPS[node.op]
        if op.metadata:
            continue
        launches += 1
        traffic += saturate(sum(nodes[i].bytes for i in node.inputs) + node.bytes)
        syncs += op.host_sync + (fft_host_sync and node.op == "fft")
        if node.id in wanted:
            host_bytes += node.bytes
    if output_indices is not None:
        positions = {_output_position(graph, i) for i in output_indices}
        host_bytes = sum(nodes[graph.outputs[i]].elements * _SELECTED_ELEMENT_BYTES for i in positions)
    return GraphIoProfile(launches, syncs, saturate(host_bytes), saturate(traffic))


def _output_position(graph: Graph, position: int) -> int:
    index = as_index(position, "output_indices")
    if index >= len(graph.outputs):
        raise ValueError(f"output_indices: no position {index}; the graph has {len(graph.outputs)} outputs")
    return index


def _output_id(graph: Graph, node_id: int) -> int:
    index = as_index(node_id, "output_ids")
    if index >= len(graph.nodes):
        raise ValueError(f"output_ids: no node {index}; the graph has {len(graph.nodes)} nodes")
    return index
