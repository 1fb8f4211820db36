"""Parity with the golden fusion table: every greedy plan, and every row executed."""

import functools
import json
import pathlib
import re

import numpy as np
import pytest
from _numpy_ops import BINARY, error_of, limits_of, value_of
from _random_graphs import arrays_for

import rlxjax as rx

GOLDEN = pathlib.Path(__file__).parent / "golden" / "fusion.json"


@functools.cache
def rows():
    return json.loads(GOLDEN.read_text())


def graph_of(row):
    graph = rx.Graph()
    for node in row["nodes"]:
        op = re.sub("(?<!^)(?=[A-Z])", "_", node["op"]).lower()
        graph.add(op, node["inputs"], shape=node["shape"], dtype="f32")
    return graph


def unequal_nodes(graph):
    """Return the nodes whose operands have unequal shapes."""
    return [node for node in graph.nodes if node.op in BINARY and len({graph.nodes[i].shape for i in node.inputs}) > 1]


def lacking(row):
    """Return the first kernel of a golden row that reads a value before it exists, and that value."""
    known = set()
    for kernel in row["kernels"]:
        if missing := [id_ for id_ in kernel["external_inputs"] if id_ not in known]:
            return kernel, missing[0]
        known.update(kernel["external_outputs"])
    return None


def assert_nodes_agree_with_numpy(graph, sourced, results):
    """Check each node's value against NumPy's of its operands, some ulps off perhaps; return the numbers compared."""
    compared, (ulp, _, least) = 0, limits_of("f32")
    for node in (graph.nodes[id_] for id_ in sorted(results)):
        operands = [np.asarray(results[i], np.float64) for i in node.inputs] or [sourced[node.id]]
        errors = [
            np.where(np.isfinite(x) & (i in results), 4 * ulp * np.abs(x) + least * (x != 0), 0)
            for i, x in zip(node.inputs or [-1], operands, strict=True)
        ]
        expected, allowed = value_of(node, *operands), error_of(node, operands, errors)
        value = np.asarray(results[node.id], np.longdouble)
        assert value.shape == tuple(node.shape)
        with np.errstate(invalid="ignore"):
            close = np.abs(value - expected) <= allowed
        same = (value == expected) | (np.isnan(value) & np.isnan(expected)) | np.isinf(allowed)
        assert np.all(close | same), (node, operands, value, expected, allowed)
        compared += int(np.sum(~np.isinf(allowed)))
    return compared


def test_every_greedy_plan_is_the_reference_s():
    assert len(rows()) == 120
    for row in rows():
        plan = rx.plan_fusion(graph_of(row), plan="greedy")
        assert len(plan.kernels) == len(row["kernels"])
        for kernel, expected in zip(plan.kernels, row["kernels"], strict=True):
            for name, value in expected.items():
                found = getattr(kernel, name)
                assert (list(found) if isinstance(found, tuple) else found) == value, (row, name)
        assert plan.memory_saved == row["total_memory_saved"]
        assert plan.original_kernel_count == row["original_kernel_count"] == len(row["nodes"])
        assert plan.fused_kernel_count == row["fused_kernel_count"]
        assert plan.kernel_reduction == pytest.approx(row["kernel_reduction"], rel=1e-12)
        assert str(plan) == row["display"]


def test_every_plan_runs_and_agrees_with_numpy_or_names_what_it_lacks():
    cannot_run = unequal = ran = compared = elements = 0
    for number, row in enumerate(rows()):
        graph = graph_of(row)
        graph.set_outputs(node.id for node in graph.nodes)
        cost, greedy, arrays = rx.plan_fusion(graph), rx.plan_fusion(graph, "greedy"), arrays_for(graph, number)
        missing, nodes = lacking(row), unequal_nodes(graph)
        if missing:
            cannot_run += 1
            kernel, id_ = missing
            with pytest.raises(ValueError, match=rf"kernel {kernel['id']} needs the value of node {id_} \("):
                rx.execute_plan(greedy, arrays)
        if nodes:
            unequal += 1
            names = "|".join(rf"node {node.id} \({node.op}\)" for node in nodes)
            for plan in (cost, *([] if missing else [greedy])):
                with pytest.raises(ValueError, match=rf"({names}): expected operands of the same shape"):
                    rx.execute_plan(plan, arrays)
        elif number % 24 == 0:  # each kernel is compiled for itself
            ran += 1
            results = rx.execute_plan(cost, arrays)
            assert set(results) == {node.id for node in graph.nodes}
            if not missing:
                found = rx.execute_plan(greedy, arrays)
                assert set(found) == set(results)  # all nodes are outputs, also inside of a chain
                assert_nodes_agree_with_numpy(graph, arrays, results | found)
            compared += assert_nodes_agree_with_numpy(graph, arrays, results)
            elements += sum(node.elements for node in graph.nodes)
    assert (cannot_run, unequal, ran) == (16, 11, 5)
    assert compared > 0.9 * elements


def test_three_unary_ops_are_one_kernel_and_a_reduction_breaks_a_greedy_chain_and_no_other():
    graph = rx.Graph()
    y = graph.add("tanh", [graph.add("relu", [graph.input("x", (64,))])])
    graph.set_outputs([graph.add("exp", [graph.add("neg", [graph.add("reduce_sum", [y])])])])
    assert [kernel.nodes for kernel in rx.plan_fusion(graph, plan="greedy").kernels] == [(1, 2), (3,), (4, 5)]
    assert [kernel.nodes for kernel in rx.plan_fusion(graph).kernels] == [(1, 2, 3, 4, 5)]
    for plan in ["greedy", "cost"]:
        for has_input in [False, True]:
            graph = rx.Graph()
            inputs = [graph.input("x", (1024,))] if has_input else []
            first = graph.add("relu", inputs, shape=(1024,))
            last = graph.add("neg", [graph.add("tanh", [first])])
            fused = rx.plan_fusion(graph, plan=plan)
            (kernel,) = fused.kernels
            assert (kernel.nodes, kernel.external_inputs) == ((first, first + 1, last), tuple(inputs))
            assert kernel.external_outputs == (last,)
            assert kernel.memory_saved == fused.memory_saved == 8192
            # The reference takes the inputs of a kernel from its count of buffers.
            assert kernel.buffers_eliminated == (1 if plan == "greedy" and has_input else 2)


def test_a_plan_of_no_kernels_has_its_line():
    line = "Fusion: 10 → 0 kernels (100% reduction), 64.0KB memory saved"
    assert str(rx.FusionPlan(kernels=[], memory_saved=65_536, original_kernel_count=10)) == line
    nothing = rx.plan_fusion(rx.Graph())
    assert nothing.kernel_reduction == 0.0
    assert str(nothing) == "Fusion: 0 → 0 kernels (0% reduction), 0.0KB memory saved"
    assert rx.execute_plan(nothing, {}) == {}
