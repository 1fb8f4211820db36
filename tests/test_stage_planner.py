"""Plans of stages: their time by formulas written here, the relaxation's laws, and what the planners promise."""

import dataclasses
import itertools
from functools import partial

import jax
import numpy as np
import pytest
from _compilations import compilations
from _tolerances import FLOAT32_RTOL, FLOAT64_RTOL, assert_close, assert_gradient_is_the_finite_difference

import rlxjax as rx

LAUNCH_NS, BANDWIDTH = 1000.0, 10.0
MACHINE = {"launch_ns": LAUNCH_NS, "bytes_per_ns": BANDWIDTH}
METHODS = ("gradient", "greedy", "exhaustive")


def random_graph(stages, rng):
    """Return stages that each read values of one to three of the twelve before, and write a value of two in ten.

    In every second pair, fusing costs something: about what it saves.
    """
    sizes = rng.lognormal(9.5, 1.2, (stages, 2))
    edges, values = [], []
    for consumer in range(1, stages):
        earlier = np.arange(max(0, consumer - 12), consumer)
        for producer in rng.choice(earlier, min(len(earlier), rng.integers(1, 4)), replace=False).tolist():
            result = int(rng.random() < 0.2)
            edges.append((producer, consumer, sizes[producer, result]))
            values.append(2 * producer + result)
    external = np.where(rng.random((2, stages)) < 0.3, rng.lognormal(9.0, 1.0, (2, stages)), 0.0)
    return rx.StageGraph.checked(
        rng.lognormal(7.5, 1.2, stages),
        edges,
        values=values,
        launch_ns=3000.0,
        bytes_per_ns=BANDWIDTH,
        external_read_bytes=external[0],
        external_written_bytes=external[1],
        fused_ns=rng.lognormal(8.3, 1.0, len(edges)) * (rng.random(len(edges)) < 0.5),
    )


def graphs(count, *, most=8, least=2):
    """Return random graphs, the first of them of the fewest stages."""
    rngs = (np.random.default_rng([19, i]) for i in range(count))
    return [random_graph(least + i % (most + 1 - least), rng) for i, rng in enumerate(rngs)]


def plan_ns_and_peak(graph, groups):
    """Return what a plan takes and holds, by the words of `StageGraph`."""
    time, peak = 0.0, 0.0
    edges = list(zip(graph.producer, graph.consumer, graph.value, graph.edge_bytes, graph.fused_ns, strict=True))
    for group in map(set, groups):
        compute = sum(graph.compute_ns[i] for i in group) + sum(e[4] for e in edges if {e[0], e[1]} <= group)
        external = sum(graph.external_read_bytes[i] + graph.external_written_bytes[i] for i in group)
        written = {e[2]: e[3] for e in edges if e[0] in group and e[1] not in group}
        read = {e[2]: e[3] for e in edges if e[0] not in group and e[1] in group}
        inside = {e[2]: e[3] for e in edges if {e[0], e[1]} <= group}
        traffic = external + sum(written.values()) + sum(read.values())
        time += graph.launch_ns + max(compute, traffic / graph.bytes_per_ns)
        peak = max(peak, external + sum((written | read | inside).values()))
    return time, peak


def can_run(graph, groups):
    """Whether the groups part the stages and each reads of earlier ones only."""
    place = {stage: number for number, group in enumerate(groups) for stage in group}
    return sorted(place) == list(range(len(graph.compute_ns))) == sorted(itertools.chain(*groups)) and all(
        place[i] <= place[j] for i, j in zip(graph.producer.tolist(), graph.consumer.tolist(), strict=True)
    )


def logits_of(graph, groups, size=1.0):
    """Return variables that fuse the edges inside groups."""
    place = {stage: number for number, group in enumerate(groups) for stage in group}
    inside = [place[int(i)] == place[int(j)] for i, j in zip(graph.producer, graph.consumer, strict=True)]
    return np.where(inside, size, -size)


def connected(graph, fused):
    """Return the groups that edges make if those of a mask are fused."""
    label = list(range(len(graph.compute_ns)))
    for i, j in zip(graph.producer[fused].tolist(), graph.consumer[fused].tolist(), strict=True):
        label = [label[i] if own == label[j] else own for own in label]
    return tuple(tuple(i for i, own in enumerate(label) if own == first) for first in dict.fromkeys(label))


def every_plan(graph):
    """Return all plans that can run and whose groups edges connect, by brute force over the edges to fuse."""
    masks = (np.array(fused, bool) for fused in itertools.product((False, True), repeat=len(graph.producer)))
    found = {connected(graph, fused) for fused in masks}
    return [groups for groups in found if any(can_run(graph, order) for order in itertools.permutations(groups))]


@pytest.fixture(scope="module")
def soft():
    """The relaxed time of one graph with fourteen edges."""
    graph = random_graph(8, np.random.default_rng(3))
    return graph, np.random.default_rng(4).standard_normal((5, len(graph.producer)))


def test_a_chain_takes_what_the_formula_says():
    graph = rx.StageGraph.checked(
        [100.0, 2000.0],
        [(0, 1, 5000)],
        external_read_bytes=[3000, 0],
        external_written_bytes=[0, 1000],
        fused_ns=70.0,
        **MACHINE,
    )
    apart = (LAUNCH_NS + max(100.0, 8000 / BANDWIDTH)) + (LAUNCH_NS + max(2000.0, 6000 / BANDWIDTH))
    together = LAUNCH_NS + max(100.0 + 2000.0 + 70.0, 4000 / BANDWIDTH)
    plan = rx.plan_stages(graph)
    assert (plan.groups, plan.time_ns, plan.peak_bytes) == (((0, 1),), together, 9000.0)
    apart_plan = rx.plan_stages(dataclasses.replace(graph, fused_ns=np.array([9e9])))
    assert (apart_plan.groups, apart_plan.time_ns, apart_plan.peak_bytes) == (((0,), (1,)), apart, 8000.0)


def test_a_value_is_written_once_and_read_once_by_each_group():
    edges = [(0, 1, 8000), (0, 2, 8000), (0, 3, 8000), (1, 2, 100)]
    graph = rx.StageGraph.checked(np.zeros(4), edges, values=[0, 0, 0, 1], fused_ns=[1e6, 1e6, 1e6, 0], **MACHINE)
    plan = rx.plan_stages(graph)
    assert plan.groups == ((0,), (1, 2), (3,))
    assert plan.time_ns == 3 * LAUNCH_NS + (8000 + 8000 + 8000) / BANDWIDTH


def test_results_of_a_stage_may_be_told_apart():
    edges = [(0, 1, 8000), (0, 2, 8000)]
    one, two = (
        rx.plan_stages(rx.StageGraph.checked(np.zeros(3), edges, values=values, fused_ns=9e9, **MACHINE))
        for values in ([7, 7], [7, 9])
    )
    assert two.time_ns - one.time_ns == 8000 / BANDWIDTH


def test_time_and_peak_are_those_of_the_formula():
    for graph, method in itertools.product(graphs(12), METHODS):
        plan = rx.plan_stages(graph, method=method)
        np.testing.assert_allclose(
            (plan.time_ns, plan.peak_bytes), plan_ns_and_peak(graph, plan.groups), rtol=FLOAT64_RTOL
        )
        assert plan.method == method


def test_every_plan_can_run_and_edges_connect_its_groups():
    for graph, method in itertools.product([*graphs(16, most=12), random_graph(40, np.random.default_rng(0))], METHODS):
        if method != "exhaustive" or len(graph.compute_ns) <= 12:
            plan = rx.plan_stages(graph, method=method, peak_price_ns_per_byte=0.1)
            assert can_run(graph, plan.groups)
            fused = logits_of(graph, plan.groups) > 0
            assert sorted(connected(graph, fused)) == sorted(plan.groups)


def test_a_third_program_between_two_keeps_them_apart():
    graph = rx.StageGraph.checked(
        np.zeros(3), [(0, 1, 10), (1, 2, 10), (0, 2, 10**6)], values=[0, 1, 2], fused_ns=[9e9, 9e9, 0], **MACHINE
    )
    for method in METHODS:
        assert rx.plan_stages(graph, method=method).groups == ((0,), (1,), (2,))


@pytest.mark.parametrize("price", [0.0, 0.05, 1.0])
def test_exhaustive_is_the_best_of_all_plans(price):
    for graph in graphs(8, most=5):
        if len(graph.producer) > 8:
            continue
        costs = [time + price * peak for time, peak in (plan_ns_and_peak(graph, plan) for plan in every_plan(graph))]
        plan = rx.plan_stages(graph, method="exhaustive", peak_price_ns_per_byte=price)
        np.testing.assert_allclose(plan.time_ns + price * plan.peak_bytes, min(costs), rtol=FLOAT64_RTOL)


def test_gradient_is_never_worse_than_greedy_nor_better_than_exhaustive():
    excess = {"gradient": [], "greedy": []}
    for number, graph in enumerate(graphs(40, most=12)):
        price = 0.2 * (number % 2)
        plans = {name: rx.plan_stages(graph, method=name, peak_price_ns_per_byte=price) for name in METHODS}
        cost_ns = {name: plan.time_ns + price * plan.peak_bytes for name, plan in plans.items()}
        for name, found in excess.items():
            found.append(cost_ns[name] / cost_ns["exhaustive"] - 1.0)
    gradient, greedy = map(np.array, excess.values())
    assert np.all(gradient <= greedy + 1e-9)
    assert np.all(gradient >= -1e-9)
    assert np.mean(gradient <= 0.01) >= 0.95
    assert np.mean(greedy <= 1e-9) < np.mean(gradient <= 1e-9)


def test_one_stage_and_no_edge():
    graph = rx.StageGraph.checked([5.0], **MACHINE)
    assert rx.soft_plan_ns(graph, np.zeros((0,)), 1.0) == LAUNCH_NS + 5.0
    for method in METHODS:
        assert rx.plan_stages(graph, method=method).groups == ((0,),)
        assert len(rx.plan_stages(rx.StageGraph.checked([5.0, 6.0], **MACHINE), method=method).groups) == 2


def test_units_do_not_matter():
    for graph, method in itertools.product(graphs(6), METHODS):
        doubled = dataclasses.replace(
            graph,
            compute_ns=2 * graph.compute_ns,
            fused_ns=2 * graph.fused_ns,
            launch_ns=2 * graph.launch_ns,
            bytes_per_ns=graph.bytes_per_ns / 2,
        )
        one, two = (rx.plan_stages(g, method=method) for g in (graph, doubled))
        assert two.groups == one.groups
        np.testing.assert_allclose(two.time_ns, 2 * one.time_ns, rtol=FLOAT64_RTOL)


def test_a_dearer_peak_makes_it_smaller():
    for graph in graphs(6):
        prices = [0.0, 0.01, 0.1, 1.0, 10.0]
        plans = [rx.plan_stages(graph, method="exhaustive", peak_price_ns_per_byte=price) for price in prices]
        peaks, times = ([getattr(plan, name) for plan in plans] for name in ("peak_bytes", "time_ns"))
        assert peaks == sorted(peaks, reverse=True)
        assert times == sorted(times)
        front = rx.pareto_plans(graph, prices, method="exhaustive")
        assert [(plan.time_ns, plan.peak_bytes) for plan in front] == sorted(set(zip(times, peaks, strict=True)))
        by_gradient = rx.pareto_plans(graph, prices)
        for first, second in itertools.pairwise(by_gradient):
            assert first.time_ns < second.time_ns
            assert first.peak_bytes > second.peak_bytes


def test_the_relaxed_time_tends_to_that_of_the_plan(soft):
    graph, _ = soft
    for price in (0.0, 0.01, 0.05, 0.1, 1.0):
        plan = rx.plan_stages(graph, method="exhaustive", peak_price_ns_per_byte=price)
        logits = logits_of(graph, plan.groups)
        errors = [abs(rx.soft_plan_ns(graph, logits, temperature) - plan.time_ns) for temperature in (1.0, 0.1, 0.01)]
        assert errors[1] <= errors[0]
        np.testing.assert_allclose(errors[2], 0.0, atol=FLOAT64_RTOL * plan.time_ns)


def test_the_relaxed_time_is_the_mean_over_thresholds(soft):
    graph, rows = soft
    for logits in rows[:2]:
        share = np.sort(1.0 / (1.0 + np.exp(-logits / 0.7)))
        thresholds = np.concatenate([[0.0], share, [1.0]])
        times = [
            rx.soft_plan_ns(graph, np.where(1.0 / (1.0 + np.exp(-logits / 0.7)) > t, 1e3, -1e3), 1.0)
            for t in (thresholds[1:] + thresholds[:-1]) / 2
        ]
        mean = np.dot(np.diff(thresholds), times)
        np.testing.assert_allclose(rx.soft_plan_ns(graph, logits, 0.7), mean, rtol=FLOAT64_RTOL)
        assert min(times) <= mean


def test_the_gradient_is_the_finite_difference(soft):
    graph, rows = soft
    assert_gradient_is_the_finite_difference(
        lambda tree: jax.vmap(partial(rx.soft_plan_ns, graph))(tree["logits"], tree["temperature"]),
        {"logits": rows, "temperature": np.linspace(0.5, 2.0, len(rows))},
    )

    def by_costs(tree):
        return jax.vmap(lambda row: rx.soft_plan_ns(dataclasses.replace(graph, **row), rows[0], 1.0))(tree)

    columns = {name: getattr(graph, name) for name in ("launch_ns", "bytes_per_ns", "compute_ns", "fused_ns")}
    assert_gradient_is_the_finite_difference(by_costs, jax.tree.map(lambda x: np.asarray(x)[None], columns))


def test_the_relaxed_time_is_the_same_jitted_and_in_vmap(soft):
    graph, rows = soft
    one_by_one = np.array([rx.soft_plan_ns(graph, row, 0.5) for row in rows])
    for call in (rx.soft_plan_ns, jax.jit(jax.vmap(rx.soft_plan_ns, (None, 0, None)))):
        assert_close(np.asarray(call(graph, rows, 0.5)), one_by_one, FLOAT64_RTOL)
    floats = {name: np.float32(x) for name, x in vars(graph).items() if name not in ("producer", "consumer", "value")}
    single = rx.soft_plan_ns(dataclasses.replace(graph, **floats), np.float32(rows[0]), np.float32(0.5))
    assert single.dtype == np.float32
    assert_close(np.asarray(single), np.float32(one_by_one[0]), FLOAT32_RTOL)


def test_graphs_of_about_one_size_share_a_program():
    for turn, stages in enumerate((20, 32, 25)):
        graph = rx.StageGraph.checked(np.arange(stages), [(i, i + 1, 100.0 * i) for i in range(stages - 1)], **MACHINE)
        compilations.clear()
        rx.plan_stages(graph, seed=turn, peak_price_ns_per_byte=0.1 * turn)
        assert turn == 0 or not compilations


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"edges": [(0, 2, 1)]}, "edge 0: expected stages below 2, got stage 2"),
        ({"edges": [(0, 1, 1), (1, 0, 1)]}, "edge 1: expected a consumer after its producer, .* got 1 to 0"),
        ({"edges": [(1, 1, 1)]}, "edge 0: expected a consumer after its producer"),
        ({"edges": [(-1, 1, 1)]}, "edge 0: expected an integer of at least 0, got -1"),
        ({"edges": [(0, 1)]}, r"edge 0: expected a producer, a consumer and bytes, got \(0, 1\)"),
        ({"edges": [(0, 1, -8)]}, "bytes of edges: expected a number of at least 0, got -8"),
        ({"edges": [(0, 1, 8), (0, 1, 9)]}, "edges 0 and 1: expected one producer and as many bytes"),
        ({"edges": [(0, 1, 8)], "values": [0, 1]}, "values: expected one an edge, 1, got 2"),
        ({"compute_ns": [1.0, float("nan")]}, "compute_ns: expected a number of at least 0, got nan"),
        ({"external_read_bytes": [1, 2, 3]}, r"external_read_bytes: expected one number, or 2, got shape \(3,\)"),
        ({"fused_ns": [1, 2]}, r"fused_ns: expected one number, or 0, got shape \(2,\)"),
        ({"launch_ns": -1.0}, "launch_ns: expected a number of at least 0, got -1.0"),
        ({"bytes_per_ns": 0.0}, "bytes_per_ns: expected a positive number, got 0"),
    ],
)
def test_an_impossible_graph_is_refused_in_a_sentence(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        rx.StageGraph.checked(**({"compute_ns": [1.0, 2.0]} | MACHINE | arguments))
    assert "\n" not in str(error.value)


def test_an_impossible_request_is_refused_in_a_sentence():
    graph = random_graph(13, np.random.default_rng(0))
    for arguments, message in (
        ({"method": "best"}, "method: expected one of gradient, greedy, exhaustive, got 'best'"),
        ({"method": "exhaustive"}, "method: expected at most 12 stages for 'exhaustive', got 13"),
        ({"peak_price_ns_per_byte": -1.0}, "peak_price_ns_per_byte: expected a number of at least 0, got -1.0"),
        ({"seed": -1}, "seed: expected an integer of at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            rx.plan_stages(graph, **arguments)
    with pytest.raises(ValueError, match=r"logits: expected one an edge, \d+, got shape \(3,\)"):
        rx.soft_plan_ns(graph, np.zeros(3), 1.0)
