"""What ops compute inside kernels: casts that really round, NaN, and gradients through plans."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from _tolerances import FLOAT64_RTOL, assert_gradient_is_the_finite_difference

import rlxjax as rx

DTYPES = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "i8": np.dtype(np.int8),
    "i32": np.dtype(np.int32),
}
FLOATS = ("f16", "bf16", "f32", "f64")
NAN, INFINITY = float("nan"), float("inf")


def plan_of(op, operands=1, shape=(4,), dtype="f64", plan="cost", **attributes):
    """Return the plan of one node, the last, on inputs 0, 1, ..."""
    graph = rx.Graph()
    ids = [graph.input(f"x{number}", shape, dtype) for number in range(operands)]
    graph.set_outputs([graph.add(op, ids, **attributes)])
    return rx.plan_fusion(graph, plan=plan)


def run(plan, *arrays):
    results = rx.execute_plan(plan, dict(enumerate(arrays)))
    return results[plan.graph.outputs[0]]


def cast_plan(*dtypes):
    """Return the plan, of one kernel, of an input 0 of the first dtype, cast to the others in turn."""
    graph = rx.Graph()
    y = graph.input("x", (None,), dtypes[0])
    for dtype in dtypes[1:]:
        y = graph.add("cast", [y], to=dtype)
    graph.set_outputs([y])
    plan = rx.plan_fusion(graph)
    assert len(plan.kernels) == 1
    return plan


def in_range(first):
    """Return values of a dtype that every dtype can hold, or round."""
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.uniform(-120, 120, 500), rng.normal(size=500), np.arange(-127.0, 128), [-0.0]])
    return values.astype(DTYPES[first])


def assert_identical(found, expected):
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(
        np.asarray(found).view(f"u{expected.itemsize}"), expected.view(f"u{expected.itemsize}")
    )


# --- Casts ---------------------------------------------------------------------------------------


def test_a_cast_is_numpy_s():
    for first, second in list(itertools.product(DTYPES, DTYPES)):
        values = in_range(first)
        assert_identical(run(cast_plan(first, second), values), values.astype(DTYPES[second]))


def test_a_cast_there_and_back_in_one_kernel_rounds():
    for first, second in list(itertools.permutations(DTYPES, 2)):
        values = in_range(first)
        expected = values.astype(DTYPES[second]).astype(DTYPES[first])
        assert_identical(run(cast_plan(first, second, first), values), expected)


def test_casts_in_a_row_round_one_after_the_other():
    for second, third in list(itertools.permutations(["f16", "bf16", "f32", "i32"], 2)):
        values = in_range("f64")
        expected = values.astype(DTYPES[second]).astype(DTYPES[third]).astype(np.float64)
        assert_identical(run(cast_plan("f64", second, third, "f64"), values), expected)


def test_a_float64_is_rounded_to_half_precision_once():
    # By way of float32 it would be a tie, which goes to the even 1.
    value = np.array([1 + 2**-11 + 2**-40])
    assert run(cast_plan("f64", "f16"), value)[0] == 1 + 2**-10 == value.astype(np.float16)[0]


def test_float64_near_every_tie_of_half_precision_is_rounded_as_by_numpy():
    halves = np.arange(2**15 - 2**10, dtype=np.uint16).view(np.float16)  # all finite ones from 0 on
    ties = (halves[:-1].astype(np.float64) + halves[1:].astype(np.float64)) / 2
    steps = (0.0, 2.0**-40, -(2.0**-40), 2.0**-20, -(2.0**-20))
    values = np.concatenate([sign * ties * (1 + step) for sign in (1, -1) for step in steps])
    values = np.concatenate([values, [65504.0, 65519.99, 65520.0, 1e300, -1e300, 1e-300, -0.0]])
    with np.errstate(over="ignore"):
        assert_identical(run(cast_plan("f64", "f16"), values), values.astype(np.float16))


def test_a_cast_keeps_what_is_no_number():
    for first, second in list(itertools.permutations(FLOATS, 2)):
        values = np.array([NAN, INFINITY, -INFINITY]).astype(DTYPES[first])
        results = run(cast_plan(first, second), values)
        np.testing.assert_array_equal(np.asarray(results, np.float64), values.astype(np.float64))


def test_half_precision_arithmetic_overflows_inside_a_kernel_as_outside():
    for dtype, largest in [("f16", 65504.0), ("bf16", 3.3895e38)]:
        graph = rx.Graph()
        x = graph.input("x", (4,), dtype)
        graph.set_outputs([graph.add("sub", [graph.add("add", [x, x]), x])])
        for plan in ("cost", "unfused"):
            results = run(rx.plan_fusion(graph, plan), np.full(4, largest))
            assert np.isinf(np.asarray(results, np.float64)).all()


# --- NaN and ties --------------------------------------------------------------------------------


def test_nan_is_no_number_that_a_maximum_could_be():
    for op, arrays, expected in [
        ("relu", [[NAN, -1.0, 0.0, 2.0]], [0.0, 0.0, 0.0, 2.0]),
        ("max", [[NAN, 1.0, NAN, 2.0], [3.0, NAN, NAN, 1.0]], [3.0, 1.0, NAN, 2.0]),
        ("min", [[NAN, 1.0, NAN, 2.0], [3.0, NAN, NAN, 1.0]], [3.0, 1.0, NAN, 1.0]),
        ("reduce_max", [[NAN, -INFINITY, -2.0, NAN]], [-2.0]),
        ("reduce_min", [[NAN, INFINITY, 2.0, NAN]], [2.0]),
        ("reduce_max", [[NAN, -INFINITY, NAN, NAN]], [-INFINITY]),
        ("reduce_max", [[NAN] * 4], [NAN]),
        ("reduce_min", [[NAN] * 4], [NAN]),
        ("reduce_sum", [[NAN, 1.0, 2.0, 3.0]], [NAN]),
        ("pow", [[2.0, -2.0, 0.0, -8.0], [0.5, 3.0, 0.0, 1 / 3]], [2**0.5, -8.0, 1.0, NAN]),
    ]:
        results = run(plan_of(op, len(arrays)), *arrays)
        np.testing.assert_allclose(results, expected, rtol=FLOAT64_RTOL)


def test_integers_stay_integers():
    for op in ["relu", "abs", "neg", "max", "min", "reduce_max", "reduce_min", "reduce_sum"]:
        for dtype in ["i8", "i32"]:
            arrays = [np.array([-5, 3, 0, 7]), np.array([2, -9, 0, 7])][: 2 if op in ("max", "min") else 1]
            expected = {"relu": [0, 3, 0, 7], "abs": [5, 3, 0, 7], "neg": [5, -3, 0, -7], "max": [2, 3, 0, 7]}
            expected |= {"min": [-5, -9, 0, 7], "reduce_max": [7], "reduce_min": [-5], "reduce_sum": [5]}
            results = run(plan_of(op, len(arrays), dtype=dtype), *arrays)
            assert results.dtype == DTYPES[dtype]
            assert results.tolist() == expected[op]


# --- Gradients -----------------------------------------------------------------------------------

SMOOTH = ["sigmoid", "tanh", "gelu", "sqrt", "rsqrt", "exp", "log", "neg", "abs", "load", "store", "copy"]
SMOOTH += ["relu", "reduce_sum", "reduce_mean", "reduce_max", "reduce_min"]


def test_a_smooth_op_has_the_gradient_of_its_finite_difference():
    for op, operands in [(op, 1) for op in SMOOTH] + [(op, 2) for op in ("add", "sub", "mul", "div", "pow")]:
        rng = np.random.default_rng(0)
        tree = [rng.permutation(np.linspace(0.2, 3.0, 24)).reshape(6, 4) for _ in range(operands)]
        plan = plan_of(op, operands)
        assert_gradient_is_the_finite_difference(
            jax.vmap(lambda arrays: jnp.sum(run(plan, *arrays) * jnp.array(1.5))), tree
        )


def test_a_fused_layer_has_the_gradient_of_its_finite_difference():
    """Normalise, scale, squash: a reduction, its broadcast, and both sides of them."""
    for name in ["cost", "unfused"]:
        graph = rx.Graph()
        x, w = graph.input("x", (3, 4), "f64"), graph.param("w", (3, 4), "f64")
        square = graph.add("reduce_mean", [graph.add("mul", [x, x])])
        scale = graph.add("broadcast", [graph.add("rsqrt", [square])], shape=(3, 4))
        y = graph.add("gelu", [graph.add("mul", [graph.add("mul", [x, scale]), w])])
        graph.set_outputs([graph.add("matmul", [y, graph.add("transpose", [x])])])
        plan = rx.plan_fusion(graph, name)
        rng = np.random.default_rng(1)
        tree = [rng.normal(size=(5, 3, 4)), rng.normal(size=(5, 3, 4))]
        weights = rng.uniform(1, 2, (3, 3))
        assert_gradient_is_the_finite_difference(
            jax.vmap(lambda arrays: jnp.sum(run(plan, *arrays) * weights)), tree, scale=np.full(5, 100.0)
        )


def test_a_choice_has_a_gradient_only_where_it_chose():
    for op, arrays, expected in [
        ("relu", [[-1.0, 0.0, 2.0, NAN]], [[0.0, 0.0, 1.0, 0.0]]),
        ("relu", [[INFINITY, -INFINITY, 1e-300, -0.0]], [[1.0, 0.0, 1.0, 0.0]]),
        ("max", [[1.0, 3.0, NAN, 2.0], [2.0, 1.0, 1.0, NAN]], [[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]),
        ("min", [[1.0, 3.0, NAN, 2.0], [2.0, 1.0, 1.0, NAN]], [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]]),
        ("reduce_max", [[NAN, 3.0, 1.0, NAN]], [[0.0, 1.0, 0.0, 0.0]]),
        ("reduce_min", [[NAN, 3.0, 1.0, NAN]], [[0.0, 0.0, 1.0, 0.0]]),
        ("abs", [[-2.0, 3.0, -INFINITY, 1.0]], [[-1.0, 1.0, -1.0, 1.0]]),
    ]:
        plan = plan_of(op, len(arrays))
        arrays = [jnp.array(array) for array in arrays]
        gradients = jax.grad(lambda arrays: jnp.sum(run(plan, *arrays)))(arrays)
        np.testing.assert_array_equal(np.stack(gradients), expected)


def test_a_tie_shares_the_gradient():
    for op in ["max", "min"]:
        plan, x = plan_of(op, 2), jnp.ones(4)
        gradients = jax.grad(lambda arrays: jnp.sum(run(plan, *arrays)))([x, x])
        np.testing.assert_array_equal(sum(gradients), np.ones(4))
        assert all(((gradient >= 0) & (gradient <= 1)).all() for gradient in gradients)
        whole = jax.grad(lambda x: run(plan_of(f"reduce_{op}"), x)[0])(x)
        assert (whole >= 0).all()
        np.testing.assert_allclose(whole.sum(), 1.0, rtol=FLOAT64_RTOL)
