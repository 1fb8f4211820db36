"""Rewrites: named functions that make a graph cheaper. A rewrite can drop or replace outputs of the graph."""

from collections.abc import Callable, Mapping, Sequence

from rlxjax._values import FrozenDict
from rlxjax.gate import FusionTarget, fusion_benefit, io_fusion_gate_for_target
from rlxjax.graph import Graph, profile_graph_io


def select_peaks_only_outputs(graph: Graph, target: str) -> Graph:
    """Return a graph whose outputs are peaks instead of the spectra from which the peaks are computed.

    A spectrum is an output of the graph from an fft node that a welch_peaks node reads. If the peaks of that node are
    also an output, the spectrum is dropped. Otherwise the peaks replace the spectrum if the gate of the target decides
    to fuse. The order of the outputs stays. Nodes on which no output depends are removed, and the other nodes get new
    ids. A graph whose outputs stay the same is returned unchanged, for example any graph if the target is the CPU.

    Args:
        graph: the graph.
        target: the target whose gate decides: a name, or a member of `FusionTarget`.

    Raises:
        ValueError: the target is unknown.

    Examples:
        >>> g = Graph()
        >>> s = g.add("fft", [g.input("x", (8192, 512))])
        >>> p = g.add("welch_peaks", [s], k=16, n_segments=2)
        >>> g.set_outputs([s])
        >>> select_peaks_only_outputs(g, "metal").outputs, select_peaks_only_outputs(g, "cpu").outputs
        ((2,), (1,))
    """
    selected = _peaks_only_outputs(graph, FusionTarget.parse(target))
    return graph if selected is graph else _without_dead_nodes(selected, FusionTarget.CPU)


def rewrite_graph(graph: Graph, target: str, rewrites: Sequence[str] | None = None) -> Graph:
    """Apply rewrites to a graph, one after another.

    Args:
        graph: the graph, which stays unchanged.
        target: the target whose gate decides: a name, or a member of `FusionTarget`.
        rewrites: names of rewrites, in the order of application. By default all of `REWRITES`.

    Returns:
        A new graph, or the same graph if no rewrite applies.

    Raises:
        ValueError: a rewrite or the target is unknown.

    Examples:
        >>> g = Graph()
        >>> x = g.input("x", (4,))
        >>> dead, live = g.add("exp", [x]), g.add("relu", [x])
        >>> g.set_outputs([live])
        >>> [node.op for node in rewrite_graph(g, "cuda", ["dead_nodes"]).nodes]
        ['input', 'relu']
    """
    parsed = FusionTarget.parse(target)
    if isinstance(rewrites, str):
        raise ValueError(f"rewrites: expected a list of names, got {rewrites!r}")
    for name in REWRITES if rewrites is None else rewrites:
        if name not in REWRITES:
            raise ValueError(f"rewrites: expected some of {', '.join(REWRITES)}, got {name!r}")
        graph = REWRITES[name](graph, parsed)
    return graph


def _peaks_only_outputs(graph: Graph, target: FusionTarget) -> Graph:
    if target is FusionTarget.CPU:
        return graph
    outputs = list(graph.outputs)
    for spectrum in dict.fromkeys(graph.outputs):
        readers = [node.id for node in graph.nodes if node.op == "welch_peaks" and spectrum in node.inputs]
        if graph.nodes[spectrum].op != "fft" or not readers:
            continue
        if any(reader in outputs for reader in readers):
            outputs = [id_ for id_ in outputs if id_ != spectrum]
            continue
        replaced = [readers[0] if id_ == spectrum else id_ for id_ in outputs]
        before, after = (profile_graph_io(graph, output_ids=ids) for ids in (outputs, replaced))
        if io_fusion_gate_for_target(target).should_fuse(fusion_benefit(before, after)):
            outputs = replaced
    return graph if tuple(outputs) == graph.outputs else Graph.from_nodes(graph.nodes, outputs, graph.name)


def _without_dead_nodes(graph: Graph, _: FusionTarget) -> Graph:
    """Keep only inputs and the nodes on which an output depends. A graph without outputs stays unchanged."""
    if not graph.outputs:
        return graph
    live = set(graph.outputs)
    for node in reversed(graph.nodes):
        if node.id in live:
            live.update(node.inputs)
    kept = Graph(graph.name)
    number: dict[int, int] = {}
    for node in graph.nodes:
        if node.id in live or node.op == "input":
            inputs = [number[i] for i in node.inputs]
            number[node.id] = kept.add(node.op, inputs, shape=node.shape, dtype=node.dtype, **node.attributes)
    kept.set_outputs(number[id_] for id_ in graph.outputs)
    return graph if len(number) == len(graph.nodes) else kept


#: All rewrites by name, in the order in which `rewrite_graph` applies them by default.
REWRITES: Mapping[str, Callable[[Graph, FusionTarget], Graph]] = FrozenDict(
    {"peaks_only_outputs": _peaks_only_outputs, "dead_nodes": _without_dead_nodes}
)
