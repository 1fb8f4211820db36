"""Rewrites: peaks in place of spectra, dead nodes, and graphs from nodes."""

import numpy as np
import pytest

import rlxjax as rx

GPU_TARGETS = [str(target) for target in rx.Target if target != "cpu"]
PEAKS = {"k": 16, "n_segments": 2}


def spectrum_graph(rows=8192, readers=1, spectra=1, columns=512):
    """Return a graph of spectra and their peaks; also the ids of both, peaks by spectrum."""
    graph = rx.Graph("spectra")
    x = graph.input("segs", (rows, columns))
    found, peaks = [], []
    for _ in range(spectra):
        found.append(graph.add("fft", [x]))
        peaks.append([graph.add("welch_peaks", [found[-1]], **PEAKS) for _ in range(readers)])
    return graph, found, peaks


def ops_of(graph, ids=None):
    return [graph.nodes[id_].op for id_ in (range(len(graph.nodes)) if ids is None else ids)]


# --- Peaks only ----------------------------------------------------------------------------------


def test_a_spectrum_is_dropped_where_its_peaks_are_an_output_already():
    for target in GPU_TARGETS:
        for rows in [2, 8192]:
            graph, (spectrum,), ((peaks,),) = spectrum_graph(rows)
            for outputs in ([spectrum, peaks], [peaks, spectrum], [spectrum, peaks, spectrum]):
                graph.set_outputs(outputs)
                assert rx.select_peaks_only_outputs(graph, target).outputs == (peaks,)


def test_without_peaks_among_the_outputs_the_gate_decides():
    for target in [str(target) for target in rx.Target]:
        gate = rx.io_fusion_gate_for_target(target)
        decisions = set()
        for rows, columns in (
            (2, 8),
            (2, 64),
            (2, 512),
            (8, 512),
            (32, 512),
            (128, 512),
            (1024, 512),
            (8192, 512),
        ):
            graph, (spectrum,), ((peaks,),) = spectrum_graph(rows, columns=columns)
            graph.set_outputs([spectrum])
            profiles = [rx.profile_graph_io(graph, output_ids=[id_]) for id_ in (spectrum, peaks)]
            pays = bool(gate.should_fuse(*profiles)) and target != "cpu"
            selected = rx.select_peaks_only_outputs(graph, target)
            assert selected.outputs == ((peaks,) if pays else (spectrum,)), (rows, columns)
            decisions.add(pays)
        assert decisions == ({False} if target == "cpu" else {False, True})


def test_the_cpu_reads_spectra_back_whatever_they_cost():
    graph, (spectrum,), ((peaks,),) = spectrum_graph()
    for outputs in ([spectrum], [spectrum, peaks]):
        graph.set_outputs(outputs)
        assert rx.select_peaks_only_outputs(graph, "CPU") is graph


def test_other_outputs_stay_in_order():
    for target in GPU_TARGETS:
        graph, (spectrum,), ((peaks,),) = spectrum_graph()
        first, last = graph.add("neg", [0]), graph.add("abs", [spectrum])
        graph.set_outputs([last, spectrum, first, 0, last])
        selected = rx.select_peaks_only_outputs(graph, target)
        assert selected.outputs == (last, peaks, first, 0, last)
        graph.set_outputs([last, spectrum, first, peaks])
        assert rx.select_peaks_only_outputs(graph, target).outputs == (last, first, peaks)
        # A spectrum that is listed twice is read back once, and so are its peaks.
        graph.set_outputs([spectrum, first, spectrum])
        selected = rx.select_peaks_only_outputs(graph, target)
        assert ops_of(selected, selected.outputs) == ["welch_peaks", "neg", "welch_peaks"]


def test_every_spectrum_is_decided_by_itself():
    for target in GPU_TARGETS:
        graph, (first, second), ((peaks,), (other,)) = spectrum_graph(spectra=2)
        graph.set_outputs([second, first, other])
        assert rx.select_peaks_only_outputs(graph, target).outputs == (peaks, other)
        graph.set_outputs([second, first])
        assert rx.select_peaks_only_outputs(graph, target).outputs == (other, peaks)
        alone = graph.add("fft", [0])
        graph.set_outputs([first, alone])
        selected = rx.select_peaks_only_outputs(graph, target)
        assert ops_of(selected, selected.outputs) == ["welch_peaks", "fft"]


def test_of_two_peaks_of_a_spectrum_one_is_enough():
    for target in GPU_TARGETS:
        graph, (spectrum,), (peaks,) = spectrum_graph(readers=2)
        for output in peaks:
            graph.set_outputs([spectrum, output])
            selected = rx.select_peaks_only_outputs(graph, target)
            assert ops_of(selected, selected.outputs) == ["welch_peaks"]
            assert len(selected.nodes) == 3
        graph.set_outputs([spectrum])
        selected = rx.select_peaks_only_outputs(graph, target)
        assert ops_of(selected) == ["input", "fft", "welch_peaks"]
        assert selected.outputs == (2,)


def test_what_reaches_no_output_is_removed_and_the_rest_numbered_anew():
    for target in GPU_TARGETS:
        graph = rx.Graph("dead")
        x = graph.input("x", (8192, 512))
        graph.add("exp", [x])
        unread = graph.param("unread", (3,))
        spectrum = graph.add("fft", [x])
        graph.add("neg", [unread])
        second = graph.input("second", (2,))
        peaks = graph.add("welch_peaks", [spectrum], **PEAKS)
        graph.set_outputs([spectrum, second])
        selected = rx.select_peaks_only_outputs(graph, target)
        assert selected.name == "dead"
        assert ops_of(selected) == ["input", "fft", "input", "welch_peaks"]
        assert selected.outputs == (3, 2)
        kept = [graph.nodes[id_] for id_ in (x, spectrum, second, peaks)]
        for node, before in zip(selected.nodes, kept, strict=True):
            assert (node.shape, node.dtype) == (before.shape, before.dtype)
            assert dict(node.attributes) == dict(before.attributes)
        assert [node.inputs for node in selected.nodes] == [(), (0,), (), (1,)]
        assert len(graph.nodes) == 7
        assert graph.outputs == (spectrum, second)


def test_a_graph_without_such_a_spectrum_comes_back_as_it_is():
    for target in [str(target) for target in rx.Target]:
        graph, (spectrum,), ((peaks,),) = spectrum_graph()
        dead = graph.add("neg", [spectrum])
        for outputs in ([], [peaks], [dead], [0]):
            graph.set_outputs(outputs)
            assert rx.select_peaks_only_outputs(graph, target) is graph
        unread = rx.Graph()
        unread.set_outputs([unread.add("fft", [unread.input("x", (8192, 512))])])
        assert rx.select_peaks_only_outputs(unread, target) is unread
        squared = rx.Graph()
        y = squared.add("mul", [squared.input("x", (8192, 512))] * 2)
        squared.add("welch_peaks", [y], **PEAKS)
        squared.set_outputs([y])
        assert rx.select_peaks_only_outputs(squared, target) is squared


def test_the_rewritten_graph_has_the_profile_that_the_gate_decided_by():
    graph, (spectrum,), ((peaks,),) = spectrum_graph()
    graph.set_outputs([spectrum])
    selected = rx.select_peaks_only_outputs(graph, "cuda")
    assert rx.profile_graph_io(selected) == rx.profile_graph_io(graph, output_ids=[peaks])


# --- Rewrites by name ----------------------------------------------------------------------------


def test_rewrites_are_applied_by_name_and_all_of_them_unless_told():
    assert list(rx.REWRITES) == ["peaks_only_outputs", "dead_nodes"]
    graph, (spectrum,), ((peaks,),) = spectrum_graph()
    dead = graph.add("neg", [spectrum])
    graph.set_outputs([spectrum])
    assert rx.rewrite_graph(graph, "cuda", []) is graph
    only_peaks = rx.rewrite_graph(graph, "cuda", ["peaks_only_outputs"])
    assert (len(only_peaks.nodes), only_peaks.outputs) == (dead + 1, (peaks,))
    only_live = rx.rewrite_graph(graph, "cuda", ["dead_nodes"])
    assert (ops_of(only_live), only_live.outputs) == (["input", "fft"], (1,))
    everything = rx.rewrite_graph(graph, rx.Target.CUDA)
    assert (ops_of(everything), everything.outputs) == (["input", "fft", "welch_peaks"], (2,))
    # In order: once the peaks are dead, they can take no spectrum's place.
    other_order = rx.rewrite_graph(graph, "cuda", ["dead_nodes", "peaks_only_outputs"])
    assert ops_of(other_order) == ["input", "fft"]


def test_an_unknown_rewrite_or_target_is_refused():
    for target, rewrites, says in [
        ("cuda", ["dead_node"], "rewrites: expected some of peaks_only_outputs, dead_nodes, got 'dead_node'"),
        ("cuda", "dead_nodes", "rewrites: expected .*got 'dead_nodes'"),
        ("abacus", ["dead_nodes"], "unknown target 'abacus'"),
        ("abacus", [], "unknown target 'abacus'"),
    ]:
        with pytest.raises(ValueError, match=says):
            rx.rewrite_graph(rx.Graph(), target, rewrites)
        with pytest.raises(ValueError, match="unknown target 'abacus'"):
            rx.select_peaks_only_outputs(rx.Graph(), "abacus")


def test_the_rewrites_cannot_be_changed():
    with pytest.raises(TypeError):
        rx.REWRITES["new"] = None  # pyright: ignore


# --- Dead nodes ----------------------------------------------------------------------------------


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
    graph.set_outputs([live, x, live])
    smaller = rx.rewrite_graph(graph, "cpu", ["dead_nodes"])
    assert ops_of(smaller) == ["input", "param", "abs", "input", "mul", "add"]
    assert smaller.outputs == (5, 0, 5)
    arrays = {x: [1.0, 2.0, 3.0, 4.0], w: [0.5] * 4, source: [-1.0] * 4, unused: [0.0] * 2}
    before = rx.execute_plan(rx.plan_fusion(graph), arrays | {1: [0.0] * 4})
    fewer = {number: arrays[id_] for number, id_ in enumerate((x, w, source, unused))}
    after = rx.execute_plan(rx.plan_fusion(smaller), fewer)
    for old, new in zip(graph.outputs, smaller.outputs, strict=True):
        np.testing.assert_array_equal(before[old], after[new])
    assert rx.rewrite_graph(smaller, "cpu") is smaller


def test_a_graph_without_outputs_has_no_dead_nodes():
    graph = rx.Graph()
    graph.add("relu", [graph.input("x", (4,))])
    assert rx.rewrite_graph(graph, "cuda") is graph


# --- Graphs from nodes ---------------------------------------------------------------------------


def node(id_, op="relu", inputs=(0,), shape=(4,), dtype="f32", **attributes):
    return rx.Node(id_, op, inputs, shape, dtype, attributes)


X = node(0, "input", (), name="x")


def test_a_graph_from_nodes_is_the_graph_of_those_nodes():
    nodes = [X, node(1), node(2, "cast", (1,), dtype="f16", to="f16"), node(3, "add", (1, 1))]
    graph = rx.Graph.from_nodes(iter(nodes), [3, 2], "again")
    assert (graph.name, graph.outputs, graph.nodes) == ("again", (3, 2), tuple(nodes))
    assert [dict(n.attributes) for n in graph.nodes] == [{"name": "x"}, {}, {"to": "f16"}, {}]
    assert rx.Graph.from_nodes(graph.nodes, graph.outputs).nodes == graph.nodes
    assert rx.Graph.from_nodes([]).outputs == ()


def test_bad_nodes_are_refused_by_name():
    for nodes, says in [
        ([X, node(0)], r"node 0 \(relu\): this id came before"),
        ([X, node(1), node(1, "neg")], r"node 1 \(neg\): this id came before"),
        ([X, node(2)], r"node 2 \(relu\): expected id 1"),
        ([node(1), X], r"node 1 \(relu\): expected id 0"),
        ([X, node(-1)], r"node -1 \(relu\): expected id 1"),
        ([X, node(1, inputs=(2,)), node(2)], r"node 1 \(relu\): no node 2 yet"),
        ([X, node(1, "add", (0, 1))], r"node 1 \(add\): no node 1 yet"),
        ([X, node(1, inputs=(7,))], r"node 1 \(relu\): no node 7 yet"),
        ([X, node(1, "relux")], "unknown op 'relux'"),
        ([X, node(1, dtype="f8")], r"node 1 \(relu\): unknown dtype 'f8'"),
        ([X, node(1, shape=(-1,))], r"node 1 \(relu\): dimension"),
    ]:
        with pytest.raises(ValueError, match=says):
            rx.Graph.from_nodes(nodes)


def test_an_unknown_output_is_refused():
    with pytest.raises(ValueError, match="outputs: no node 1 yet; the graph has 1 nodes"):
        rx.Graph.from_nodes([X], [1])
