"""The IO profile: SPEC 1 in closed form, from which it follows that graphs add; selections, saturation, readback."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlxjax as rx

MAX = 2**64 - 1
METADATA = {"input", "param", "constant", "reshape", "transpose", "narrow"}
HOST_SYNC = {"log_mel", "log_mel_backward", "custom", "welch_peaks"}
SIZE = {"f16": 2, "f32": 4, "f64": 8, "i8": 1, "c64": 8, "c128": 16, "bool": 1}
OTHERS = {"relu", "add", "reduce_sum", "matmul", "fft", "concat", "copy", "attention", "broadcast"}


@st.composite
def descriptions(draw, max_nodes=8):
    """Draw a graph as a list of (op, inputs, shape, dtype) and its outputs."""
    nodes = []
    for i in range(draw(st.integers(1, max_nodes))):
        op = draw(st.sampled_from(sorted(METADATA | HOST_SYNC | OTHERS))) if i else "input"
        inputs = draw(st.lists(st.integers(0, i - 1), max_size=3)) if i else []
        dims = st.one_of(st.integers(0, 50), st.none() if draw(st.booleans()) else st.integers(1, 2**20))
        shape = draw(st.lists(dims, max_size=3))
        nodes.append((op, inputs, shape, draw(st.sampled_from(sorted(SIZE)))))
    outputs = draw(st.lists(st.integers(0, len(nodes) - 1), max_size=4))
    return nodes, outputs


def built(nodes, outputs):
    graph = rx.Graph()
    for op, inputs, shape, dtype in nodes:
        graph.add(op, inputs, shape=shape, dtype=dtype)
    graph.set_outputs(outputs)
    return graph


def elements(node):
    return 0 if None in node[2] else math.prod(node[2])


def expected(nodes, outputs, fft_host_sync=False, positions=None):
    """Return SPEC 1, written out."""
    size = [elements(node) * SIZE[node[3]] for node in nodes]
    counted = [i for i, node in enumerate(nodes) if node[0] not in METADATA]
    syncs = sum(nodes[i][0] in HOST_SYNC or (fft_host_sync and nodes[i][0] == "fft") for i in counted)
    host = sum(size[i] for i in counted if i in outputs)
    if positions is not None:
        host = sum(4 * elements(nodes[outputs[p]]) for p in set(positions))
    traffic = sum(size[i] + sum(size[j] for j in nodes[i][1]) for i in counted)
    return rx.GraphIoProfile(len(counted), syncs, min(host, MAX), min(traffic, MAX))


@given(descriptions(), st.booleans(), st.data())
def test_a_profile_is_the_closed_form(description, fft_host_sync, data):
    nodes, outputs = description
    graph = built(nodes, outputs)
    assert rx.profile_graph_io(graph) == expected(nodes, outputs)
    option = {"fft_host_sync": fft_host_sync}
    assert rx.profile_graph_io(graph, **option) == expected(nodes, outputs, fft_host_sync)
    positions = data.draw(st.lists(st.integers(0, len(outputs) - 1))) if outputs else []
    selected = rx.profile_graph_io(graph, output_indices=positions, **option)
    assert selected == expected(nodes, outputs, fft_host_sync, positions)
    ids = data.draw(st.lists(st.integers(0, len(nodes) - 1)))
    assert rx.profile_graph_io(graph, output_ids=ids, **option) == expected(nodes, ids, fft_host_sync)


def test_node_bytes_and_selections():
    assert rx.profile_graph_io(rx.Graph()) == rx.GraphIoProfile(0, 0, 0, 0) == rx.GraphIoProfile()
    graph = built([("input", [], (10,), "f64"), ("add", [0, 0], (3,), "i8")], [1, 1])
    assert rx.graph.node_io_bytes(graph, graph.nodes[1]) == 2 * 80 + 3  # an operand that is read twice counts twice
    assert rx.profile_graph_io(graph, output_indices=iter([0, 0])).host_output_bytes == 4 * 3
    assert rx.profile_graph_io(graph, output_ids=iter([1, 1])).host_output_bytes == 3
    for selection, says in [
        ({"output_indices": [0], "output_ids": [0]}, "output_indices and output_ids: .*one of the two"),
        ({"output_indices": [], "output_ids": []}, "one of the two"),
        ({"output_indices": [2]}, "output_indices: no output 2; the graph has 2 outputs"),
        ({"output_indices": [-1]}, "output_indices: expected an integer of at least 0, got -1"),
        ({"output_indices": [0.0]}, "output_indices: expected an integer, got 0.0"),
        ({"output_ids": [2]}, "output_ids: no node 2; the graph has 2 nodes"),
        ({"output_ids": [-1]}, "output_ids: expected an integer of at least 0, got -1"),
    ]:
        with pytest.raises(ValueError, match=says):
            rx.profile_graph_io(graph, **selection)


# --- Saturation and readback ---------------------------------------------------------------------


def test_every_byte_count_saturates_and_is_exact_below():
    huge = built([("input", [], (2**40, 2**40), "f32"), ("relu", [0], (2**40, 2**40), "f32")], [1, 0])
    assert huge.nodes[0].bytes == rx.graph.node_io_bytes(huge, huge.nodes[1]) == MAX
    assert rx.profile_graph_io(huge) == rx.GraphIoProfile(1, 0, MAX, MAX)
    assert rx.profile_graph_io(huge, output_indices=[0, 1]).host_output_bytes == MAX
    assert rx.profile_graph_io(huge).host_readback_bytes(unified_memory=False) == MAX
    side = 2**30
    big = built([("input", [], (side, side), "i8"), ("relu", [0], (side, side - 1), "i8")], [1])
    assert rx.profile_graph_io(big) == rx.GraphIoProfile(1, 0, side * (side - 1), side * (2 * side - 1))


@given(st.integers(0, MAX), st.integers(0, MAX))
def test_readback_is_host_output_and_a_quarter_of_the_traffic_where_memory_is_discrete(host, traffic):
    profile = rx.GraphIoProfile(0, 0, host, traffic)
    expected = [host, min(host + traffic // 4, MAX)]
    assert [profile.host_readback_bytes(flag) for flag in (True, False)] == expected
    assert profile.host_readback_bytes(np.array([True, False])).tolist() == expected


def test_readback_of_a_table_is_that_of_its_rows_and_traced_code_rounds_down_too():
    host, traffic = [0, 7, 2**63, MAX], [3, 2**53 + 5, MAX, 1]
    for shape in [(4,), (4, 1), (2, 2), (1, 2, 2)]:
        table = rx.GraphIoProfile(0, 0, *(np.array(x, np.uint64).reshape(shape) for x in (host, traffic)))
        bytes_back = table.host_readback_bytes(unified_memory=False)
        assert (bytes_back.dtype, bytes_back.shape) == (np.uint64, shape)
        assert bytes_back.ravel().tolist() == [min(h + t // 4, MAX) for h, t in zip(host, traffic, strict=True)]
    assert jax.jit(lambda p: p.host_readback_bytes(False))(rx.GraphIoProfile(0, 0, 100.0, 43.0)) == 110


def test_a_checked_profile_refuses_what_is_no_count():
    for name in ["kernel_launches", "device_traffic_bytes"]:
        assert rx.GraphIoProfile.checked(**{name: 5}) == rx.GraphIoProfile(**{name: 5})
        for count in [-1, float("nan"), np.array([0, -3])]:
            with pytest.raises(ValueError, match=f"{name}: expected a count of at least 0"):
                rx.GraphIoProfile.checked(**{name: count})


def test_the_cases_of_the_specification():
    graph = rx.welch_peaks_graph(4, rx.WelchPeakParams.fast(512, 16), fused=False)
    profile = rx.profile_graph_io(graph)
    assert (graph.nodes[0].shape, profile.host_output_bytes) == ((8, 512), 32_768)
    assert profile.kernel_launches >= 3
    graph = built([("input", [], (4, 512), "f32")], [])
    graph.set_outputs([graph.add("welch_peaks", [0], k=16, n_segments=2)])
    assert rx.profile_graph_io(graph).host_output_bytes == 256
