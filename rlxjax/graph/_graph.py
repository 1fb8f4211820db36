"""The graph, which is a list of nodes in topological order, and its profile, which holds four exact counts."""

import dataclasses
import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import check_at_least, check_not_nan, is_traced
from rlxjax._counts import MAX_COUNT, as_float, exact, is_exact, packed, saturate
from rlxjax._typing import Count, RealLike
from rlxjax._values import FrozenDict, by_value

from ._ops import OPS, Node, indices, parse_dtype, parse_shape


def tensor_bytes(shape: Sequence[int | None], dtype: str) -> int:
    """Return the number of bytes in a tensor: its elements times the size of the dtype, at most `2**64 - 1`.

    Args:
        shape: the dimensions, with None for an unknown dimension. If a dimension is unknown, the result is 0.
        dtype: the name of the dtype, for example "f32".

    Raises:
        ValueError: a dimension is negative or not an integer, or the dtype is unknown.

    Examples:
        >>> tensor_bytes((8, 512), "f32"), tensor_bytes((None, 3), "f32")
        (16384, 0)
    """
    return Node(0, "input", (), parse_shape(shape), parse_dtype(dtype)).bytes


class Graph:
    """A list of nodes, in which each node comes after its inputs. The ids of the nodes are 0, 1, 2, ... in this order.

    Examples:
        >>> g = Graph("gain")
        >>> x = g.input("x", (8, 512), "f32")
        >>> y = g.add("mul", [x, x])
        >>> g.set_outputs([y])
        >>> g.nodes[y].shape
        (8, 512)
    """

    def __init__(self, name: str = "graph"):
        self.name = name
        self._nodes: list[Node] = []
        self._outputs: tuple[int, ...] = ()

    @classmethod
    def from_nodes(cls, nodes: Iterable[Node], outputs: Iterable[int] = (), name: str = "graph") -> "Graph":
        """Build a graph from nodes. Each node must come after its inputs. The ids must be 0, 1, 2, ... in this order.

        Raises:
            ValueError: an id is repeated or out of order, an op or dtype is unknown, or a node comes before its inputs.

        Examples:
            >>> Graph.from_nodes([Node(0, "input", (), (4,), "f32"), Node(1, "relu", (0,), (4,), "f32")], [1])
            Graph('graph', 2 nodes, outputs=[1])
        """
        graph = cls(name)
        for node in nodes:
            expected = len(graph._nodes)
            if node.id != expected:
                what = "this id came before" if node.id in range(expected) else f"expected id {expected}"
                raise ValueError(f"node {node.id} ({node.op}): {what}; the ids must be 0, 1, 2, ... in this order")
            graph.add(node.op, node.inputs, shape=node.shape, dtype=node.dtype, **node.attributes)
        graph.set_outputs(outputs)
        return graph

    def copy(self) -> "Graph":
        """Return a new graph with the same nodes and outputs."""
        other = Graph(self.name)
        other._nodes, other._outputs = self._nodes.copy(), self._outputs
        return other

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes in the order of their ids."""
        return tuple(self._nodes)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The ids of the output nodes, in the order that was given to `set_outputs`."""
        return self._outputs

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self._nodes)} nodes, outputs={list(self._outputs)})"

    def input(self, name: str, shape: Sequence[int | None], dtype: str = "f32") -> int:
        """Add an input node and return the node's id."""
        return self.add("input", [], shape=shape, dtype=dtype, name=name)

    def param(self, name: str, shape: Sequence[int | None], dtype: str = "f32") -> int:
        """Add a parameter node and return the node's id."""
        return self.add("param", [], shape=shape, dtype=dtype, name=name)

    def constant(self, name: str, shape: Sequence[int | None], dtype: str = "f32") -> int:
        """Add a constant node and return the node's id."""
        return self.add("constant", [], shape=shape, dtype=dtype, name=name)

    def add(
        self,
        op: str,
        inputs: Iterable[int] = (),
        *,
        shape: Sequence[int | None] | None = None,
        dtype: str | None = None,
        **attributes: Any,
    ) -> int:
        """Add a node and return its id.

        Args:
            op: the name of the node's op, in lower case. The table `OPS` lists the names.
            inputs: the ids of the operands, which must be in the graph already. An id may be repeated.
            shape: the shape of the output, with None for an unknown dimension. By default, the op infers the shape if
                it can. If you give a shape, neither the shape nor the number of operands is checked.
            dtype: the dtype of the output. By default, the op infers the dtype, or takes the first operand's dtype.
            **attributes: attributes, each for the ops in brackets: `axis` (concat, narrow), `start` (narrow),
                `length` (narrow), `permutation` (transpose), `to` (cast), `k` and `n_segments` (welch_peaks).

        Raises:
            ValueError: an op, dtype or input id is unknown, a dimension is negative, or the op cannot infer the shape.
        """
        rule = OPS.get(op)
        if rule is None:
            near = difflib.get_close_matches(str(op).lower(), OPS, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"unknown op {op!r}{hint}; expected one of {', '.join(OPS)}")
        id_ = len(self._nodes)
        where = f"node {id_} ({op})"
        ids = tuple(indices(inputs, f"{where}: inputs", "node", id_))
        operands = [self._nodes[i] for i in ids]
        try:
            if shape is None:
                shape, inferred = rule.inferred(operands, attributes)
            else:
                inferred = "f32" if op == "welch_peaks" or not operands else operands[0].dtype
                inferred = attributes.get("to", inferred) if op == "cast" else inferred
            shape, dtype = parse_shape(shape), parse_dtype(inferred if dtype is None else dtype)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        self._nodes.append(Node(id_, op, ids, shape, dtype, FrozenDict(attributes)))
        return id_

    def set_outputs(self, ids: Iterable[int]) -> None:
        """Make the nodes with the given ids the outputs of the graph, in the given order.

        Raises:
            ValueError: an id is not in the graph.
        """
        self._outputs = tuple(indices(ids, "outputs", "node", len(self._nodes)))


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GraphIoProfile:
    """The numbers of launches, sync points and bytes of a graph. The numbers are the same on every machine.

    Attributes:
        kernel_launches: number of kernel launches, `[*batch]`.
        sync_points: number of points at which the device waits for the host, `[*batch]`.
        host_output_bytes: number of bytes in the outputs that the host reads, `[*batch]`.
        device_traffic_bytes: number of bytes that the nodes read and write on the device, `[*batch]`.

    Each count is a Python integer or a NumPy integer array. In traced code, each count is a float array.
    """

    kernel_launches: Count = 0
    sync_points: Count = 0
    host_output_bytes: Count = 0
    device_traffic_bytes: Count = 0

    @classmethod
    def checked(cls, **counts: Count) -> "GraphIoProfile":
        """Build a profile and check its counts.

        Raises:
            ValueError: a count is negative or NaN.
        """
        for name, count in counts.items():
            check_at_least(count, name)
        return cls(**counts)

    def host_readback_bytes(self, unified_memory: RealLike) -> Count:
        """Return the number of bytes that the host reads back from the device, `[*batch]`.

        With unified memory, this is `host_output_bytes`. Without unified memory, a quarter of `device_traffic_bytes`,
        rounded down, is added, and the sum is at most `2**64 - 1`. The result is exact outside traced code.

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
            check_not_nan(unified_memory, "unified_memory", is_flag=True)
            return output if unified_memory else discrete
        if is_counted and not is_traced(unified_memory):
            counts = (np.asarray(exact(count), object) for count in (output, discrete))
            return packed(np.where(np.asarray(unified_memory) > 0, *counts))
        floats = as_float(output, "host_output_bytes"), as_float(discrete, "readback")
        return jnp.where(jnp.asarray(unified_memory) > 0, *floats)


def node_io_bytes(graph: Graph, node: Node) -> int:
    """Return the number of bytes that a node of a graph reads and writes, at most `2**64 - 1`.

    If the node reads an operand twice, the operand's bytes count twice.

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

    Each node adds a launch and its `node_io_bytes` of traffic, and also a sync point if `host_sync` is True for its op.
    Each output node adds its bytes to the host output. A node adds nothing if `metadata` is True for its op.

    Args:
        graph: the graph.
        fft_host_sync: whether each fft node also counts as a sync point.
        output_indices: the positions in `graph.outputs` of the outputs that the host reads. The host output is then 4
            bytes for each element of these outputs, whatever their op and dtype. An empty list selects no output.
        output_ids: the ids of the outputs that the host reads. By default, the host reads all outputs of the graph.

    Raises:
        ValueError: `output_indices` and `output_ids` are both given, or a position or id is not in the graph.

    Examples:
        >>> g = Graph()
        >>> x = g.input("x", (4, 256), "f32")
        >>> g.set_outputs([g.add("relu", [x])])
        >>> profile_graph_io(g)  # doctest: +NORMALIZE_WHITESPACE
        GraphIoProfile(kernel_launches=1, sync_points=0, host_output_bytes=4096,
                       device_traffic_bytes=8192)
    """
    if output_indices is not None and output_ids is not None:
        raise ValueError("output_indices and output_ids: expected at most one of the two, got both")
    nodes, outputs = graph.nodes, graph.outputs
    counted = [node for node in nodes if not OPS[node.op].metadata]
    read = set(outputs if output_ids is None else indices(output_ids, "output_ids", "node", len(nodes)))
    syncs = sum(OPS[node.op].host_sync or (fft_host_sync and node.op == "fft") for node in counted)
    host_bytes = sum(node.bytes for node in counted if node.id in read)
    traffic = sum(saturate(sum(nodes[i].bytes for i in node.inputs) + node.bytes) for node in counted)
    if output_indices is not None:
        positions = indices(output_indices, "output_indices", "output", len(outputs))
        host_bytes = sum(nodes[outputs[i]].elements * 4 for i in set(positions))
    return GraphIoProfile(len(counted), syncs, saturate(host_bytes), saturate(traffic))
