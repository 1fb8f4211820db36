"""The IO profile: graphs add; selections, saturation, readback."""

import random

import jax
import numpy as np
import pytest
from _random_graphs import random_graph

import rlxjax as rx

MAX = 2**64 - 1


def built(nodes, outputs):
    graph = rx.Graph()
    for op, inputs, shape, dtype in nodes:
        graph.add(op, inputs, shape=shape, dtype=dtype)
    graph.set_outputs(outputs)
    return graph


def test_graphs_side_by_side_add():
    """The counts of single graphs are those of the golden table."""
    for seed in range(20):
        one, other = (random_graph(random.Random(2 * seed + i)) for i in range(2))
        both = one.copy()
        for node in other.nodes:
            ids = [i + len(one.nodes) for i in node.inputs]
            both.add(node.op, ids, shape=node.shape, dtype=node.dtype, **node.attributes)
        both.set_outputs([*one.outputs, *(i + len(one.nodes) for i in other.outputs)])
        for options in ({}, {"fft_host_sync": True}):
            parts = [vars(rx.profile_graph_io(graph, **options)).values() for graph in (one, other)]
            total = rx.GraphIoProfile(*map(sum, zip(*parts, strict=True)))
            assert rx.profile_graph_io(both, **options) == total


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


def test_readback_is_host_output_and_a_quarter_of_the_traffic_where_memory_is_discrete_in_tables_too():
    host, traffic = [0, 7, 2**63, MAX], [3, 2**53 + 5, MAX, 1]
    for shape in [(4,), (4, 1), (2, 2), (1, 2, 2)]:
        table = rx.GraphIoProfile(0, 0, *(np.array(x, np.uint64).reshape(shape) for x in (host, traffic)))
        bytes_back = table.host_readback_bytes(unified_memory=False)
        assert (bytes_back.dtype, bytes_back.shape) == (np.uint64, shape)
        assert bytes_back.ravel().tolist() == [min(h + t // 4, MAX) for h, t in zip(host, traffic, strict=True)]
    for profile, expected in ((rx.GraphIoProfile(0, 0, 100, 43), [100, 110]), (rx.GraphIoProfile(0, 0, 5, MAX), None)):
        expected = expected or [5, 5 + MAX // 4]
        assert [profile.host_readback_bytes(flag) for flag in (True, False)] == expected
        assert profile.host_readback_bytes(np.array([True, False])).tolist() == expected
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
