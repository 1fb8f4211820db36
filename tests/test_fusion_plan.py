"""Plans: what every one of them keeps to, that the cheapest is found, and by which costs it is chosen."""

import itertools
import random
import types

import _fusion_model as model
import pytest
from _fusion_model import COEFFICIENTS
from _random_graphs import SHAPES, graphs, random_graph
from hypothesis import given, settings
from hypothesis import strategies as st

import rlxjax as rx

any_coefficients = st.sampled_from(list(COEFFICIENTS.values()))


def close(value):
    return pytest.approx(value, rel=1e-12, abs=1e-9)


def kernels_of(plan):
    return [kernel.nodes for kernel in plan.kernels]


SAYS = {
    "saved": "; the value ",
    "alone": "runs alone, because its op never shares a kernel",
    "shapes": "loops over",
    "cycle": "a cycle",
    "nothing": "would save",
}


def reason_for(graph, kernels, first, second):
    """Return why an edge is inside a kernel or between two: a key of `SAYS`."""
    a, b = ([ids for ids in kernels if id_ in ids][0] for id_ in (first, second))
    if a == b:
        return "saved"
    if any(graph.nodes[id_].op not in model.SHARES for id_ in (first, second)):
        return "alone"
    if not model.is_legal(graph, [*a, *b]):
        return "shapes"
    merged = [ids for ids in kernels if ids not in (a, b)]
    return "nothing" if model.is_acyclic(graph, [*merged, (*a, *b)]) else "cycle"


@settings(max_examples=60)
@given(graphs(), any_coefficients)
def test_plans_keep_their_laws_and_the_cost_plan_is_the_cheapest(graph, coefficients):
    alone = [[id_] for id_ in model.running(graph)]
    syncs = sum(graph.nodes[id_].op in ("custom", "log_mel") for (id_,) in alone)
    on_host = rx.profile_graph_io(graph).host_output_bytes
    plans = {name: rx.plan_fusion(graph, name, coefficients) for name in ("cost", "greedy", "unfused")}
    for name, plan in plans.items():
        assert [kernel.id for kernel in plan.kernels] == list(range(len(plan.kernels)))
        assert sorted(id_ for kernel in plan.kernels for id_ in kernel.nodes) == model.running(graph)
        assert plan.memory_saved == sum(kernel.memory_saved for kernel in plan.kernels)
        assert (plan.original_kernel_count, plan.fused_kernel_count) == (len(alone), len(plan.kernels))
        assert plan.kernel_reduction == 1 - len(plan.kernels) / len(alone)
        for profile, kernels in ((plan.before, alone), (plan.after, kernels_of(plan))):
            launches, traffic = (sum(count(graph, ids) for ids in kernels) for count in (model.launches, model.traffic))
            assert profile == rx.GraphIoProfile(launches, syncs, on_host, traffic)
        assert plan.cost_ns == close(float(rx.io_cost_ns(plan.after, plan.coefficients)))
        assert plan.unfused_cost_ns == close(plans["unfused"].cost_ns)
        benefit = rx.fusion_benefit(plan.before, plan.after)
        assert benefit.sync_points_saved == benefit.host_readback_bytes_saved == 0
        assert min(benefit.launches_saved, benefit.device_traffic_bytes_saved) >= 0
        if name != "greedy":
            assert_kernels_are_what_they_say(graph, plan)
            assert_edges_are_explained(graph, plan, name)
    can_run = model.is_acyclic(graph, kernels_of(plans["greedy"]))
    for name in ("unfused", *(["greedy"] if can_run else [])):
        assert plans["cost"].cost_ns <= plans[name].cost_ns * (1 + 1e-12) + 1e-9


def assert_kernels_are_what_they_say(graph, plan):
    known = {node.id for node in graph.nodes} - set(model.running(graph))
    for kernel in plan.kernels:
        assert list(kernel.nodes) == sorted(kernel.nodes)
        assert known.issuperset(kernel.external_inputs), "a kernel runs before what it reads"
        known.update(kernel.external_outputs)
        assert list(kernel.external_inputs) == model.reads(graph, kernel.nodes)
        assert list(kernel.external_outputs) == model.writes(graph, kernel.nodes)
        inner = set(kernel.nodes) - set(kernel.external_outputs)
        assert kernel.memory_saved == sum(graph.nodes[id_].bytes for id_ in inner)
        assert kernel.buffers_eliminated == len(inner)
        assert model.is_legal(graph, kernel.nodes), "shapes that no reduction joins"


def assert_edges_are_explained(graph, plan, name):
    ids = model.running(graph)
    pairs = [(x, i) for i in ids for x in dict.fromkeys(graph.nodes[i].inputs) if x in ids]
    assert [(edge.producer, edge.consumer) for edge in plan.edges] == pairs
    for edge in plan.edges:
        pair = edge.producer, edge.consumer
        assert edge.is_fused == any(set(pair) <= set(kernel.nodes) for kernel in plan.kernels)
        gain = sum(model.cost(graph, [id_], plan.coefficients) for id_ in pair)
        assert edge.gain_ns == close(gain - model.cost(graph, pair, plan.coefficients))
        reason = reason_for(graph, kernels_of(plan), *pair)
        assert [key for key, says in SAYS.items() if says in edge.reason] == [reason], edge
        if name == "cost" and reason == "nothing":
            assert edge.gain_ns == close(0.0), "two kernels that may be one would save as one"


SIZES = [(10,), (30,), (10, 10), (1_000,), (100, 100), (100_000,), (1_000_000,)]
#: Kinds of nodes among which fusions often exclude each other.
HARD = ("unary", *("binary",) * 3, *("reduce",) * 2, *("broadcast",) * 2, "alone", "view", "cast")


def hard_graph(seed, most_nodes=8):
    """Return a graph of few nodes and of one to four shapes, 10 to 1e6 elements and one element."""
    rng = random.Random(seed)
    while True:
        shapes = [(1,), *rng.sample(SIZES, rng.randint(1, 4))]
        graph = random_graph(rng, most_nodes, shapes, kinds=HARD)
        if 5 <= len(model.running(graph)) <= most_nodes:
            return graph


def test_the_cost_plan_is_nearly_always_the_best_of_all():
    near = []
    for seed, coefficients in zip(range(90), itertools.cycle(COEFFICIENTS.values()), strict=False):
        graph = hard_graph(seed)
        plan = rx.plan_fusion(graph, "cost", coefficients)
        spent = sum(model.cost(graph, ids, plan.coefficients) for ids in kernels_of(plan))
        near.append(spent <= 1.01 * model.best_cost(graph, plan.coefficients))
    assert sum(near) >= 0.95 * len(near)


def test_a_plan_of_three_thousand_nodes_is_that_of_its_blocks():
    plans = {}
    for count in (10, 300):
        graph = rx.Graph()
        x = graph.input("x", (16, 16))
        for _ in range(count):  # of ten nodes: two operands, a reduction and its broadcast, a matmul
            y = x
            for op in ("tanh", "exp", "neg"):
                y = graph.add(op, [y])
            total = graph.add("broadcast", [graph.add("reduce_max", [y])], shape=(16, 16))
            y = graph.add("add", [graph.add("abs", [graph.add("sub", [y, total])]), x])
            x = graph.add("relu", [graph.add("matmul", [y, x])])
        graph.set_outputs([x])
        plans[count] = rx.plan_fusion(graph, coefficients="cuda")
        # A block is one kernel and a matmul; the relu after the last matmul is a kernel of its own.
        assert plans[count].original_kernel_count == 10 * count
        assert plans[count].after.kernel_launches == 2 * count + 1
    per_block = (plans[300].after.device_traffic_bytes - plans[10].after.device_traffic_bytes) / 290
    # The kernel reads a product, and writes its relu and the other operand of the next product.
    assert per_block == (3 + 3) * 1024


def test_the_coefficients_decide_which_of_two_fusions_is_made():
    """Of two big nodes that share a kernel, or two pairs of small ones, but not all three.

    The first big node comes before a small one of each pair, and after it the other; so one big kernel
    would lie on both sides of a small one.
    """
    graph = rx.Graph()
    last = big = graph.input("big", (100_000,))
    first, pairs = graph.add("relu", [big]), []
    for shape in ((10,), (20,)):
        small = graph.input("small", shape)
        after_big = graph.add("add", [graph.add("custom", [first], shape=shape), small])
        before_big = graph.add("exp", [small])
        last = graph.add("add", [last, graph.add("custom", [before_big], shape=(100_000,))])
        graph.add("custom", [after_big], shape=(1,))
        pairs.append({after_big, before_big})
    for dispatch_ns, memory_bw, saves in [(1.0, 1.0, "bytes"), (1e6, 1e3, "launches")]:
        gate = rx.IoFusionGate(dispatch_ns=dispatch_ns, memory_bw=memory_bw, unified_memory=True)
        plan = rx.plan_fusion(graph, coefficients=gate)
        together = [set(kernel.nodes) for kernel in plan.kernels]
        assert any({first, last} <= nodes for nodes in together) == (saves == "bytes")
        assert all(pair in together for pair in pairs) == (saves == "launches")


def test_coefficients_may_be_a_set_a_device_a_row_a_gate_or_what_has_a_gate():
    graph = random_graph(random.Random(0))
    cuda = rx.backend_coefficients("cuda")
    assert rx.plan_fusion(graph, coefficients="cuda").coefficients == cuda
    assert rx.plan_fusion(graph, coefficients=cuda).coefficients == cuda
    for name in ("arch", "portable", "PORTABLE"):
        row = rx.plan_fusion(graph, coefficients=name).coefficients
        assert any(row == rx.backend_coefficients(device, name) for device in rx.Device)
    assert rx.plan_fusion(graph).coefficients == rx.plan_fusion(graph, coefficients="arch").coefficients
    metal = rx.io_fusion_gate_for_target("metal")
    for given_gate in (metal, types.SimpleNamespace(gate=metal)):
        row = rx.plan_fusion(graph, coefficients=given_gate).coefficients
        for name in ("dispatch_ns", "roundtrip_ns", "memory_bw", "unified_memory"):
            assert getattr(row, name) == getattr(metal, name)
        assert row.readback_bw == metal.host_readback_bw


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"plan": "best"}, "plan: expected one of cost, greedy, unfused, got 'best'"),
        ({"coefficients": "abacus"}, "unknown device 'abacus'"),
        ({"coefficients": 3.0}, "coefficients: expected a set, a device.*got 3.0"),
        ({"coefficients": None}, "coefficients: expected a set, a device.*got None"),
        ({"coefficients": rx.backend_coefficients([0, 1])}, "a single backend, got arrays"),
        ({"coefficients": rx.io_fusion_gate_for_target([0, 1])}, "a single backend, got arrays"),
        ({"coefficients": rx.IoFusionGate(dispatch_ns=[1.0, 2.0])}, "a single backend, got arrays"),
    ],
)
def test_a_bad_plan_and_bad_coefficients_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        rx.plan_fusion(rx.Graph(), **options)


@pytest.mark.parametrize(
    ("op", "count", "expected"),
    [
        *[("add", 1, 2), ("add", 0, 2), ("relu", 2, 1), ("reduce_sum", 0, 1), ("broadcast", 0, 1), ("matmul", 3, 2)],
        *[("concat", 0, "at least 1"), ("input", 1, 0)],
    ],
)
def test_a_wrong_number_of_operands_is_refused(op, count, expected):
    graph = rx.Graph()
    x = graph.input("x", SHAPES[3])
    graph.add(op, [x] * count, shape=SHAPES[3], axis=0)
    with pytest.raises(ValueError, match=rf"node 1 \({op}\): expected {expected} operand.*got {count}"):
        rx.plan_fusion(graph)
    for name in ("greedy", "unfused"):
        plan = rx.plan_fusion(graph, name)
        assert plan.original_kernel_count == (op != "input")
        with pytest.raises(ValueError, match=rf"node 1 \({op}\): expected {expected}"):
            rx.execute_plan(plan, {x: [1.0] * 5})
