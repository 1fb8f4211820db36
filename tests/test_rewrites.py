"""Rewrites: peaks in place of spectra, dead nodes, and graphs from nodes."""

import numpy as np
import pytest

import rlxjax as rx

TARGETS = [str(target) for target in rx.FusionTarget]
GPU_TARGETS = [target for target in TARGETS if target != "cpu"]
PEAKS = {"k": 16, "n_segments": 2}


def spectrum_graph(rows=8192, columns=512, peaks=(1,)):
    """Return a graph of spectra with so many nodes of peaks each; also the ids of both, peaks by spectrum."""
    graph = rx.Graph("spectra")
    x = graph.input("segs", (rows, columns))
    spectra = [graph.add("fft", [x]) for _ in peaks]
    found = [[graph.add("welch_peaks", [s], **PEAKS) for _ in range(n)] for s, n in zip(spectra, peaks, strict=True)]
    return graph, spectra, found


def ops_of(graph, ids=None):
    return [graph.nodes[id_].op for id_ in (range(len(graph.nodes)) if ids is None else ids)]


# --- Peaks only ----------------------------------------------------------------------------------


def test_without_peaks_among_the_outputs_the_gate_decides():
    for target in TARGETS:
        gate = rx.io_fusion_gate_for_target(target)
        decisions = set()
        for rows, columns in ((2, 8), (2, 64), (2, 512), (8, 512), (32, 512), (128, 512), (1024, 512), (8192, 512)):
            graph, (spectrum,), ((peaks,),) = spectrum_graph(rows, columns)
            graph.set_outputs([spectrum])
            profiles = [rx.profile_graph_io(graph, output_ids=[id_]) for id_ in (spectrum, peaks)]
            pays = bool(gate.should_fuse(*profiles)) and target != "cpu"
            selected = rx.select_peaks_only_outputs(graph, target)
            assert selected.outputs == ((peaks,) if pays else (spectrum,)), (rows, columns)
            assert rx.profile_graph_io(selected) == profiles[pays]
            decisions.add(pays)
        assert decisions == ({False} if target == "cpu" else {False, True})


def test_a_spectrum_gives_way_to_its_peaks_and_other_outputs_stay_in_order():
    graph, (s, t, u), ((p, also), (q,), _) = spectrum_graph(peaks=(2, 1, 0))
    first, last = graph.add("neg", [0]), graph.add("abs", [s])
    for outputs, selected in [
        ([s, p], [p]),  # dropped, where its peaks are an output already
        ([p, s, p], [p, p]),
        ([s, also], [also]),
        ([last, s, first, 0, last], [last, p, first, 0, last]),
        ([last, s, first, p], [last, first, p]),
        ([s, first, s], [p, first, p]),
        ([t, s, q], [p, q]),  # each spectrum is decided by itself
        ([t, s], [q, p]),
        ([s, u], [p, u]),
    ]:
        graph.set_outputs(outputs)
        for target in GPU_TARGETS:
            found = rx.fusion.rewrite_graph(graph, target, ["peaks_only_outputs"])
            assert found.outputs == tuple(selected), outputs
            assert ops_of(found, selected) == [graph.nodes[id_].op for id_ in selected]
            live = rx.select_peaks_only_outputs(graph, target)
            assert ops_of(live, live.outputs) == ops_of(found, selected)
        # The CPU reads spectra back whatever they cost.
        assert rx.select_peaks_only_outputs(graph, "CPU") is graph


def test_a_graph_without_such_a_spectrum_comes_back_as_it_is():
    for target in TARGETS:
        graph, (spectrum,), ((peaks,),) = spectrum_graph()
        dead = graph.add("neg", [spectrum])
        for outputs in ([], [peaks], [dead], [0]):
            graph.set_outputs(outputs)
            assert rx.select_peaks_only_outputs(graph, target) is graph
        for op, reads in (("fft", 1), ("mul", 2)):  # a spectrum that no peaks read, and what is no spectrum
            other = rx.Graph()
            y = other.add(op, [other.input("x", (8192, 512))] * reads)
            if op == "mul":
                other.add("welch_peaks", [y], **PEAKS)
            other.set_outputs([y])
            assert rx.select_peaks_only_outputs(other, target) is other


# --- Rewrites by name, and dead nodes ------------------------------------------------------------


def test_rewrites_are_applied_by_name_and_all_of_them_unless_told():
    assert list(rx.fusion.REWRITES) == ["peaks_only_outputs", "dead_nodes"]
    with pytest.raises(TypeError):
        rx.fusion.REWRITES["new"] = None  # pyright: ignore
    graph, (spectrum,), ((peaks,),) = spectrum_graph()
    dead = graph.add("neg", [spectrum])
    graph.set_outputs([spectrum])
    assert rx.fusion.rewrite_graph(graph, "cuda", []) is graph
    only_peaks = rx.fusion.rewrite_graph(graph, "cuda", ["peaks_only_outputs"])
    assert (len(only_peaks.nodes), only_peaks.outputs) == (dead + 1, (peaks,))
    for rewrites, ops in [
        (["dead_nodes"], ["input", "fft"]),
        (None, ["input", "fft", "welch_peaks"]),
        # In order: once the peaks are dead, they can take no spectrum's place.
        (["dead_nodes", "peaks_only_outputs"], ["input", "fft"]),
    ]:
        found = rx.fusion.rewrite_graph(graph, rx.FusionTarget.CUDA, rewrites)
        assert (ops_of(found), found.outputs) == (ops, (len(ops) - 1,))
    for target, rewrites, says in [
        ("cuda", ["dead_node"], "rewrites: expected some of peaks_only_outputs, dead_nodes, got 'dead_node'"),
        ("cuda", "dead_nodes", "rewrites: expected .*got 'dead_nodes'"),
        ("abacus", [], "unknown target 'abacus'"),
    ]:
        with pytest.raises(ValueError, match=says):
            rx.fusion.rewrite_graph(rx.Graph(), target, rewrites)
    with pytest.raises(ValueError, match="unknown target 'abacus'"):
        rx.select_peaks_only_outputs(rx.Graph(), "abacus")


def test_removing_dead_nodes_keeps_inputs_and_results():
    graph = rx.Graph()
    x = graph.input("x", (4,))
    graph.param("unread", (4,))
    dead = graph.add("exp", [x])
    w = graph.param("w", (4,))
    source = graph.add("abs", shape=(4,))
    graph.add("sub", [dead, w])
    unused = graph.input("unused", (2,))
    live = graph.add("add", [graph.add("mul", [x, w]), source])
    assert rx.fusion.rewrite_graph(graph, "cuda") is graph  # without outputs nothing is dead
    graph.set_outputs([live, x, live])
    smaller = rx.fusion.rewrite_graph(graph, "cpu", ["dead_nodes"])
    assert ops_of(smaller) == ["input", "param", "abs", "input", "mul", "add"]
    assert smaller.outputs == (5, 0, 5)
    arrays = {x: [1.0, 2.0, 3.0, 4.0], w: [0.5] * 4, source: [-1.0] * 4, unused: [0.0] * 2}
    before = rx.execute_plan(rx.plan_fusion(graph), arrays | {1: [0.0] * 4})
    fewer = {number: arrays[id_] for number, id_ in enumerate((x, w, source, unused))}
    after = rx.execute_plan(rx.plan_fusion(smaller), fewer)
    for old, new in zip(graph.outputs, smaller.outputs, strict=True):
        np.testing.assert_array_equal(before[old], after[new])
    assert rx.fusion.rewrite_graph(smaller, "cpu") is smaller


# --- Graphs from nodes ---------------------------------------------------------------------------


def node(id_, op="relu", inputs=(0,), shape=(4,), dtype="f32", **attributes):
    return rx.graph.Node(id_, op, inputs, shape, dtype, attributes)


X = node(0, "input", (), name="x")


def test_a_graph_from_nodes_is_the_graph_of_those_nodes():
    nodes = [X, node(1), node(2, "cast", (1,), dtype="f16", to="f16"), node(3, "add", (1, 1))]
    graph = rx.Graph.from_nodes(iter(nodes), [3, 2], "again")
    assert (graph.name, graph.outputs, graph.nodes) == ("again", (3, 2), tuple(nodes))
    assert [dict(n.attributes) for n in graph.nodes] == [{"name": "x"}, {}, {"to": "f16"}, {}]
    assert rx.Graph.from_nodes(graph.nodes, graph.outputs).nodes == graph.nodes
    assert rx.Graph.from_nodes([]).outputs == ()


def test_bad_nodes_are_refused_by_name():
    for nodes, outputs, says in [
        ([X, node(0)], [], r"node 0 \(relu\): this id came before"),
        ([X, node(2)], [], r"node 2 \(relu\): expected id 1"),
        ([X, node(-1)], [], r"node -1 \(relu\): expected id 1"),
        ([X, node(1, inputs=(2,)), node(2)], [], r"node 1 \(relu\): inputs: no node 2;"),
        ([X, node(1, "relux")], [], "unknown op 'relux'"),
        ([X, node(1, dtype="f8")], [], r"node 1 \(relu\): unknown dtype 'f8'"),
        ([X], [1], "outputs: no node 1; the graph has 1 nodes"),
    ]:
        with pytest.raises(ValueError, match=says):
            rx.Graph.from_nodes(nodes, outputs)
