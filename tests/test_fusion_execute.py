"""Plans run: the same results as node by node, kernels compiled once, transforms, and what is refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _numpy_ops import error_of
from _random_graphs import GIVEN, arrays_for, graphs
from hypothesis import given, settings
from hypothesis import strategies as st

import rlxjax as rx

#: Few shapes, so that many nodes of the random graphs compile to the same kernels.
RUN_SHAPES = ((1,), (5,), (3, 4), (12,))


def chain(*ops, shape=(4,), plan="cost", name="x"):
    """Return the plan of ops on an input 0, which is also the second operand of those that take two."""
    graph = rx.Graph()
    y = x = graph.input(name, shape)
    for op in ops:
        y = graph.add(op, [y, x] if op in ("add", "sub", "div", "pow") else [y], name=name)
    graph.set_outputs([y])
    return rx.plan_fusion(graph, plan=plan)


@settings(max_examples=12)
@given(graphs(15, RUN_SHAPES, runs=True), st.integers(0, 2**32 - 1))
def test_the_cost_plan_gives_what_running_node_by_node_gives(graph, seed):
    arrays = arrays_for(graph, seed)
    apart = rx.execute_plan(rx.plan_fusion(graph, "unfused"), arrays)
    plan = rx.plan_fusion(graph, coefficients="cuda")
    results = rx.execute_plan(plan, arrays)
    assert {id_ for kernel in plan.kernels for id_ in kernel.external_outputs} <= set(results)
    values = arrays | {id_: np.asarray(array, np.longdouble) for id_, array in apart.items()}
    errors = {}  # how far each node may be from its value: what its operands' errors do to it, and its own
    for node in graph.nodes:
        operands = [values[i] for i in node.inputs] or [arrays[node.id]]
        before = [errors[i] for i in node.inputs] or [np.zeros(node.shape)]
        errors[node.id] = np.zeros(node.shape) if node.op in GIVEN else error_of(node, operands, before)
    for id_, array in results.items():
        assert (array.shape, array.dtype) == (apart[id_].shape, apart[id_].dtype)
        array, value, error = np.asarray(array, np.longdouble), values[id_], errors[id_]
        with np.errstate(invalid="ignore"):
            agrees = np.isinf(error) | (array == value) | (np.abs(array - value) <= error)
        assert np.all(agrees | (np.isnan(array) & np.isnan(value))), (graph.nodes[id_], array, value, error)


@pytest.mark.parametrize(
    ("ops", "value", "expected"),
    [
        (("exp", "log"), 100.0, np.inf),
        (("pow", "log"), -2.5, np.nan),
        (("rsqrt", "log"), -0.0, np.nan),
        (("div", "div"), 1e-30, 1e30),
        (("add", "sub"), 3e38, np.inf),
        (("relu", "relu"), np.nan, 0.0),
    ],
)
def test_a_kernel_computes_its_ops_and_no_formula_that_is_equal_in_exact_numbers(ops, value, expected):
    """A compiler turns log(exp(x)) into x, log(pow(x, y)) into y log|x| and x / x / x into x / (x x)."""
    for plan in ("unfused", "cost"):
        fused = chain(*ops, plan=plan)
        assert len(fused.kernels) == (1 if plan == "cost" else 2)
        found = rx.execute_plan(fused, {0: np.full(4, value)})[2]
        np.testing.assert_allclose(found, np.full(4, np.float32(expected)), rtol=1e-6)


@pytest.mark.parametrize("plan", ["cost", "unfused"])
def test_broadcasts_views_and_products_are_numpy_s_and_reductions_of_nothing_are_zero(plan):
    graph, array = rx.Graph(), np.arange(6, dtype=np.float32).reshape(2, 3)
    x, column, nothing = graph.input("x", (2, 3)), graph.input("column", (2, 1)), graph.input("nothing", (0, 3))
    total, turned = graph.add("reduce_sum", [x]), graph.add("transpose", [x])
    expected = {
        graph.add("broadcast", [total], shape=(2, 3)): np.full((2, 3), 15.0),
        graph.add("broadcast", [total], shape=(5,)): np.full(5, 15.0),
        graph.add("broadcast", [column], shape=(2, 3)): [[7.0] * 3, [8.0] * 3],
        turned: array.T,
        graph.add("reshape", [x], shape=(3, 2)): array.reshape(3, 2),
        graph.add("reshape", [x], shape=(None, 6)): array.reshape(1, 6),
        graph.add("narrow", [x], axis=-1, start=1, length=2): array[:, 1:],
        graph.add("concat", [x, x], axis=0): np.concatenate([array, array]),
        graph.add("matmul", [x, turned]): array @ array.T,
        graph.add("neg", [graph.add("narrow", [x], axis=0, length=1)]): -array[:1],
        **{graph.add(f"reduce_{kind}", [nothing]): [0.0] for kind in ("sum", "max", "min", "mean")},
    }
    graph.set_outputs(expected)
    results = rx.execute_plan(
        rx.plan_fusion(graph, plan), {x: array, column: [[7.0], [8.0]], nothing: np.zeros((0, 3))}
    )
    for id_, value in expected.items():
        np.testing.assert_array_equal(results[id_], value)


def test_what_is_given_is_converted_to_the_dtype_of_the_graph_comes_back_as_an_output_and_has_to_be_given():
    graph = rx.Graph()
    half, whole = graph.input("half", (2,), "f16"), graph.param("whole", (2,), "i32")
    graph.set_outputs([half, graph.add("neg", [half]), graph.add("neg", [whole]), whole, half])
    plan = rx.plan_fusion(graph)
    results = rx.execute_plan(plan, {half: [1 / 3, 2.0], whole: np.array([1.5, 2.0]), 99: "ignored"})
    dtypes = {half: "float16", whole: "int32", 2: "float16", 3: "int32"}
    assert {id_: str(array.dtype) for id_, array in results.items()} == dtypes
    assert results[half].tolist() == [float(np.float16(1 / 3)), 2.0]
    assert results[3].tolist() == [-1, -2]
    with pytest.raises(ValueError, match=r"node 1 \(param 'whole'\): no array was given"):
        rx.execute_plan(plan, {half: [1.0, -1.0]})


@pytest.mark.parametrize("plan", ["cost", "unfused", "greedy"])
def test_a_node_without_operands_takes_its_array_by_its_id_and_gives_its_value_to_others(plan):
    graph = rx.Graph()
    source = graph.add("abs", shape=(2,))
    wall = graph.add("concat", [source], axis=0)
    total = graph.add("add", [source, graph.add("neg", [wall])])
    graph.set_outputs([source, total])
    results = rx.execute_plan(rx.plan_fusion(graph, plan), {source: [-1.0, 2.0], total: "ignored"})
    assert (results[source].tolist(), results[total].tolist()) == ([1.0, 2.0], [0.0, 0.0])


def test_a_kernel_alone_gives_its_outputs_and_ignores_what_it_does_not_need():
    graph = rx.Graph()
    x = graph.input("x", (2,))
    inner = graph.add("add", [graph.add("relu", [x]), graph.add("exp", shape=(2,))])
    left, right = graph.add("neg", [inner]), graph.add("sqrt", [inner])
    (kernel,) = rx.plan_fusion(graph).kernels
    results = rx.fusion.execute_kernel(kernel, {x: [-1.0, 3.0], 2: [0.0, 0.0], inner: [9.0], 77: None})
    assert {id_: array.tolist() for id_, array in results.items()} == {left: [-1.0, -4.0], right: [1.0, 2.0]}
    for missing, says in ((x, r"node 0 \(input 'x'\)"), (2, r"node 2 \(exp\)")):
        with pytest.raises(ValueError, match=f"{says}: no array was given"):
            rx.fusion.execute_kernel(kernel, {id_: [1.0, 1.0] for id_ in (x, 2) if id_ != missing})


def test_equal_kernels_share_one_function_and_new_values_do_not_retrace():
    first = chain("tanh", "gelu", shape=(3, 7))
    second = chain("tanh", "gelu", shape=(3, 7), plan="greedy", name="other")
    function = first.kernels[0].function
    assert function is second.kernels[0].function
    for ops, shape in ((("tanh", "gelu"), (7, 3)), (("gelu", "tanh"), (3, 7))):
        assert chain(*ops, shape=shape).kernels[0].function is not function
    for scale, plan in itertools.product((1.0, 2.0), (first, second)):
        rx.execute_plan(plan, {0: np.full((3, 7), scale, np.float32)})
    assert function._cache_size() == 1


@pytest.mark.parametrize("name", ["cost", "unfused"])
def test_jit_is_eager_and_vmap_is_a_loop(name):
    graph, shape = rx.Graph(), (3, 4)  # the softmax over everything
    x = graph.input("x", shape, "f64")
    top = graph.add("broadcast", [graph.add("reduce_max", [x])], shape=shape)
    e = graph.add("exp", [graph.add("sub", [x, top])])
    total = graph.add("broadcast", [graph.add("reduce_sum", [e])], shape=shape)
    graph.set_outputs([graph.add("div", [e, total])])
    plan = rx.plan_fusion(graph, name)
    batch = np.random.default_rng(0).normal(size=(5, 3, 4))
    batch[3, 1] = -np.inf

    def run(x):
        return rx.execute_plan(plan, {0: x})[plan.graph.outputs[0]]

    eager = np.stack([run(x) for x in batch])
    np.testing.assert_allclose(eager.sum((1, 2)), 1.0, rtol=1e-12)
    np.testing.assert_allclose(jax.jit(run)(batch[0]), eager[0], rtol=1e-14)
    np.testing.assert_allclose(jax.jit(jax.vmap(run))(batch), eager, rtol=1e-14)


@pytest.mark.parametrize(
    ("op", "shapes", "options", "says"),
    [
        ("add", [(2,), (3,)], {"shape": (2,)}, "expected operands of the same shape, got .2,., .3,."),
        ("add", [(2,), (1,)], {"shape": (2,)}, "operands of the same shape"),
        ("relu", [(2,)], {"shape": (3,)}, "its shape is .3,. in the graph.*give .2,."),
        ("broadcast", [(3,)], {"shape": (2,)}, "broadcast"),
        ("broadcast", [(1,)], {"shape": (None,)}, "unknown dimension"),
        ("reshape", [(3,)], {"shape": (2,)}, "reshape"),
        ("reshape", [(4,)], {"shape": (None, None)}, "unknown"),
        ("transpose", [(2, 3)], {"shape": (3, 2), "permutation": (0,)}, "permutation"),
        ("narrow", [(4,)], {"shape": (2,)}, "axis|length"),
        ("narrow", [(4,)], {"shape": (4,), "axis": 0, "start": 3, "length": 4}, "start|limit"),
        ("concat", [(2,), (2,)], {"shape": (4,)}, "axis"),
        ("concat", [(2,), (2, 2)], {"shape": (4,), "axis": 0}, "dimension|shape"),
        ("matmul", [(2, 3), (2, 3)], {"shape": (2, 3)}, "dimension|shape"),
        ("sub", [(2,), (2,)], {"dtype": "bool"}, "bool"),
        ("custom", [(2,)], {"shape": (2,)}, "no kernel computes this op"),
        ("fft", [(2,)], {}, "no kernel computes this op"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_the_name_of_the_node(op, shapes, options, says):
    graph, dtype = rx.Graph(), "bool" if op == "sub" else "f32"
    graph.add(op, [graph.input("x", shape, dtype) for shape in shapes], **({"dtype": dtype} | options))
    with pytest.raises(ValueError, match=rf"node {len(shapes)} \({op}\): .*({says})"):
        rx.execute_plan(rx.plan_fusion(graph), {i: np.ones(shape) for i, shape in enumerate(shapes)})


def test_arrays_of_another_shape_places_that_are_none_and_64_bits_are_refused():
    plan = chain("relu", shape=(2,))
    for array in (np.ones(3), np.ones((1, 2)), 1.0, [[1.0, 2.0]]):
        with pytest.raises(ValueError, match=r"node 0 \(input\): expected an array of shape \(2,\), got \("):
            rx.execute_plan(plan, {0: array})
    for node_id in (-1, 0.5, "x"):
        with pytest.raises(ValueError, match="inputs: node id: expected an integer"):
            rx.execute_plan(plan, {node_id: jnp.ones(2)})
    for given_dtype, other, named in (("f32", "f64", r"node 1 \(cast\)"), ("f64", "f32", r"node 0 \(input")):
        graph = rx.Graph()
        x = graph.input("x", (2,), given_dtype)
        graph.add("cast", [x], to=other)
        with jax.enable_x64(False), pytest.raises(ValueError, match=rf"{named}.*: f64 needs 64-bit mode"):
            rx.execute_plan(rx.plan_fusion(graph), {x: np.ones(2)})
        assert rx.execute_plan(rx.plan_fusion(graph), {x: np.ones(2)})[1].tolist() == [1.0, 1.0]
