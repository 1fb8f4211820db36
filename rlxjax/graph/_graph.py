"""The graph: nodes in topological order.

The way data takes begins here: `Graph -> GraphIoProfile -> FusionBenefit -> score`.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from rlxjax._values import FrozenDict

from ._ops import OPS, Node, indices, parse_dtype, parse_shape


def tensor_bytes(shape: Sequence[int | None], dtype: str) -> int:
    """Return the bytes of a tensor: elements times the size of the dtype, at most `2**64 - 1`.

    Args:
        shape: its dimensions; with an unknown one, None, there are 0 elements.
        dtype: its name, such as "f32".

    Raises:
        ValueError: a dimension that is no size, or an unknown dtype.

    Examples:
        >>> tensor_bytes((8, 512), "f32"), tensor_bytes((None, 3), "f32")
        (16384, 0)
    """
    return Node(0, "input", (), parse_shape(shape), parse_dtype(dtype)).bytes


class Graph:
    """A list of nodes in topological order, with ids 0, 1, 2, ... in order of adding.

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
        """Build a graph from its nodes, in topological order, with ids 0, 1, 2, ...

        Raises:
            ValueError: naming the node: an id that came before or is out of order, an unknown op or dtype,
                an input that does not come before its node (a forward reference, a cycle, an unknown id).

        Examples:
            >>> Graph.from_nodes([Node(0, "input", (), (4,), "f32"), Node(1, "relu", (0,), (4,), "f32")], [1])
            Graph('graph', 2 nodes, outputs=[1])
        """
        graph = cls(name)
        for node in nodes:
            expected = len(graph._nodes)
            if node.id != expected:
                what = "this id came before" if node.id in range(expected) else f"expected id {expected}"
                raise ValueError(f"node {node.id} ({node.op}): {what}; ids are 0, 1, 2, ... in order")
            graph.add(node.op, node.inputs, shape=node.shape, dtype=node.dtype, **node.attributes)
        graph.set_outputs(outputs)
        return graph

    def copy(self) -> "Graph":
        """Return a graph of its own with the same nodes and outputs."""
        other = Graph(self.name)
        other._nodes, other._outputs = self._nodes.copy(), self._outputs
        return other

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, in order of their ids."""
        return tuple(self._nodes)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The ids of the outputs, in the order given."""
        return self._outputs

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self._nodes)} nodes, outputs={list(self._outputs)})"

    def input(self, name: str, shape: Sequence[int | None], dtype: str = "f32") -> int:
        """Add an input; return its id."""
        return self.add("input", [], shape=shape, dtype=dtype, name=name)

    def param(self, name: str, shape: Sequence[int | None], dtype: str = "f32") -> int:
        """Add a parameter; return its id."""
        return self.add("param", [], shape=shape, dtype=dtype, name=name)

    def constant(self, name: str, shape: Sequence[int | None], dtype: str = "f32") -> int:
        """Add a constant; return its id."""
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
            op: a name of the op table, in lower case.
            inputs: ids of nodes already in the graph; one id may come more than once.
            shape: the output's shape, None for an unknown dimension. Inferred where the op allows it;
                where given it is taken as given, and the number of operands is not looked at.
            dtype: the output's dtype; the inferred one, or the first operand's, unless given.
            **attributes: what the op needs: `axis` (concat, narrow), `start`, `length` (narrow),
                `permutation` (transpose), `to` (cast), `k`, `n_segments` (welch_peaks).

        Raises:
            ValueError: an unknown op, dtype or input id, a negative dimension, or operands from which
                no shape follows.
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
        """Say which nodes are the graph's outputs, in order.

        Raises:
            ValueError: an id that is not in the graph.
        """
        self._outputs = tuple(indices(ids, "outputs", "node", len(self._nodes)))
