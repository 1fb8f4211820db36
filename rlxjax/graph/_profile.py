"""The IO profile of a graph: four counts, exact on the host."""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import check_at_least, check_not_nan, is_traced
from rlxjax._counts import MAX_COUNT, as_float, exact, is_exact, packed, saturate
from rlxjax._typing import Count, RealLike
from rlxjax._values import by_value

from ._graph import Graph
from ._ops import OPS, Node, indices

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
        output, traffic = self.host_output_bytes, self.device_traffic_bytes
        if is_counted := is_exact(output) and is_exact(traffic):
            total = exact(output) + exact(traffic) // 4
            discrete = saturate(total) if isinstance(total, int) else packed(np.minimum(total, MAX_COUNT))
        else:
            moved = jnp.floor(as_float(traffic, "device_traffic_bytes") / 4)
            discrete = as_float(output, "host_output_bytes") + moved
        if not is_traced(unified_memory) and not np.ndim(unified_memory):
            check_not_nan(unified_memory, "unified_memory")
            return output if unified_memory else discrete
        if is_counted and not is_traced(unified_memory):
            counts = (np.asarray(exact(count), object) for count in (output, discrete))
            return packed(np.where(np.asarray(unified_memory) > 0, *counts))
        floats = as_float(output, "host_output_bytes"), as_float(discrete, "readback")
        return jnp.where(jnp.asarray(unified_memory) > 0, *floats)


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
    nodes, outputs = graph.nodes, graph.outputs
    counted = [node for node in nodes if not OPS[node.op].metadata]
    read = set(outputs if output_ids is None else indices(output_ids, "output_ids", "node", len(nodes)))
    syncs = sum(OPS[node.op].host_sync or (fft_host_sync and node.op == "fft") for node in counted)
    host_bytes = sum(node.bytes for node in counted if node.id in read)
    traffic = sum(saturate(sum(nodes[i].bytes for i in node.inputs) + node.bytes) for node in counted)
    if output_indices is not None:
        positions = indices(output_indices, "output_indices", "output", len(outputs))
        host_bytes = sum(nodes[outputs[i]].elements * _SELECTED_ELEMENT_BYTES for i in set(positions))
    return GraphIoProfile(len(counted), syncs, saturate(host_bytes), saturate(traffic))
