"""What ops compute inside kernels: casts that really round, NaN, and gradients through plans."""

import functools
import itertools

import _numpy_ops
import jax
import jax.numpy as jnp
import numpy as np
from _tolerances import FLOAT64_RTOL, assert_gradient_is_the_finite_difference

import rlxjax as rx

DTYPES = {name: np.dtype(dtype) for name, dtype in (_numpy_ops.DTYPES | _numpy_ops.INTEGERS).items()}
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


def cast(values, *dtypes):
    """Return what a kernel makes of values that it casts to dtypes in turn: after each cast."""
    graph = rx.Graph()
    ids = [graph.input("x", (None,), next(name for name, dtype in DTYPES.items() if dtype == values.dtype))]
    for dtype in dtypes:
        ids.append(graph.add("cast", ids[-1:], to=dtype))
    graph.set_outputs(ids[1:])
    plan = rx.plan_fusion(graph)
    assert len(plan.kernels) == 1
    results = rx.execute_plan(plan, {0: values})
    return [results[id_] for id_ in ids[1:]]


def assert_identical(found, expected):
    assert found.dtype == expected.dtype
    bits = [np.asarray(array).view(f"u{expected.itemsize}") for array in (found, expected)]
    np.testing.assert_array_equal(*bits)


# --- Casts ---------------------------------------------------------------------------------------


def test_a_cast_is_numpys_and_rounds_in_a_kernel_too():
    rng = np.random.default_rng(0)  # values that every dtype can hold, or round
    values = np.concatenate([rng.uniform(-120, 120, 500), rng.normal(size=500), np.arange(-127.0, 128), [-0.0]])
    rows = [(first, second, first) for first, second in itertools.product(DTYPES, DTYPES)]
    rows += [("f64", *both, "f64") for both in itertools.permutations(["f16", "bf16", "f32", "i32"], 2)]
    no_numbers = [NAN, INFINITY, -INFINITY]
    for first, *others in rows:
        extremes = no_numbers if {first, *others} <= _numpy_ops.DTYPES.keys() else []
        given = expected = np.concatenate([values, extremes]).astype(DTYPES[first])
        for dtype, found in zip(others, cast(given, *others), strict=True):
            expected = expected.astype(DTYPES[dtype])
            assert_identical(found[: len(values)], expected[: len(values)])
            np.testing.assert_array_equal(np.asarray(found, np.float64)[len(values) :], extremes)


def test_float64_near_every_tie_of_half_precision_is_rounded_once_as_by_numpy():
    halves = np.arange(2**15 - 2**10, dtype=np.uint16).view(np.float16)  # all finite ones from 0 on
    ties = (halves[:-1].astype(np.float64) + halves[1:].astype(np.float64)) / 2
    steps = (0.0, 2.0**-40, -(2.0**-40), 2.0**-20, -(2.0**-20))
    values = np.concatenate([sign * ties * (1 + step) for sign in (1, -1) for step in steps])
    # By way of float32 the first would be a tie, which goes to the even 1.
    values = np.concatenate([[1 + 2**-11 + 2**-40], values, [65519.99, 65520.0, 1e300, -1e300, 1e-300, -0.0]])
    with np.errstate(over="ignore"):
        (found,) = cast(values, "f16")
        assert_identical(found, values.astype(np.float16))
    assert found[0] == 1 + 2**-10


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
    expected = {"relu": [0, 3, 0, 7], "abs": [5, 3, 0, 7], "neg": [5, -3, 0, -7], "max": [2, 3, 0, 7]}
    expected |= {"min": [-5, -9, 0, 7], "reduce_max": [7], "reduce_min": [-5], "reduce_sum": [5]}
    for dtype in ["i8", "i32"]:
        for op, values in expected.items():
            arrays = [np.array([-5, 3, 0, 7]), np.array([2, -9, 0, 7])][: 2 if op in ("max", "min") else 1]
            results = run(plan_of(op, len(arrays), dtype=dtype), *arrays)
            assert (results.dtype, results.tolist()) == (DTYPES[dtype], values)


# --- Gradients -----------------------------------------------------------------------------------

SMOOTH = ["sigmoid", "tanh", "gelu", "sqrt", "rsqrt", "exp", "log", "neg", "abs", "load", "store", "copy"]
SMOOTH += ["relu", "reduce_sum", "reduce_mean", "reduce_max", "reduce_min"]
OPERANDS = dict.fromkeys(SMOOTH, 1) | dict.fromkeys(["add", "sub", "mul", "div", "pow"], 2)


def test_smooth_ops_and_a_fused_layer_have_the_gradient_of_the_finite_difference():
    """The layer: normalise, scale, squash; a reduction, its broadcast, and both sides of them."""
    rng = np.random.default_rng(0)
    plans = {op: plan_of(op, operands) for op, operands in OPERANDS.items()}
    values = np.linspace(0.2, 3.0, 24)
    tree = {op: [rng.permutation(values).reshape(6, 4) for _ in range(n)] for op, n in OPERANDS.items()}
    of_all = jax.vmap(
        lambda tree: sum(jnp.sum(run(plans[op], *arrays) * jnp.array(1.5)) for op, arrays in tree.items())
    )
    assert_gradient_is_the_finite_difference(of_all, tree)
    graph = rx.Graph()
    x, w = graph.input("x", (3, 4), "f64"), graph.param("w", (3, 4), "f64")
    square = graph.add("reduce_mean", [graph.add("mul", [x, x])])
    scale = graph.add("broadcast", [graph.add("rsqrt", [square])], shape=(3, 4))
    y = graph.add("gelu", [graph.add("mul", [graph.add("mul", [x, scale]), w])])
    graph.set_outputs([graph.add("matmul", [y, graph.add("transpose", [x])])])
    tree, weights = [rng.normal(size=(5, 3, 4)), rng.normal(size=(5, 3, 4))], rng.uniform(1, 2, (3, 3))
    for name in ["cost", "unfused"]:
        of_layer = functools.partial(run, rx.plan_fusion(graph, name))
        assert_gradient_is_the_finite_difference(
            jax.vmap(lambda arrays: jnp.sum(of_layer(*arrays) * weights)), tree, scale=np.full(5, 100.0)
        )


def test_a_choice_has_a_gradient_only_where_it_chose_and_a_tie_shares_it():
    def gradients_of(op, *arrays):
        plan = plan_of(op, len(arrays))
        return np.stack(jax.grad(lambda arrays: jnp.sum(run(plan, *arrays)))(list(map(jnp.array, arrays))))

    for op, arrays, expected in [
        ("relu", [[-1.0, 0.0, 2.0, NAN]], [[0.0, 0.0, 1.0, 0.0]]),
        ("relu", [[INFINITY, -INFINITY, 1e-300, -0.0]], [[1.0, 0.0, 1.0, 0.0]]),
        ("max", [[1.0, 3.0, NAN, 2.0], [2.0, 1.0, 1.0, NAN]], [[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]),
        ("min", [[1.0, 3.0, NAN, 2.0], [2.0, 1.0, 1.0, NAN]], [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]]),
        ("reduce_max", [[NAN, 3.0, 1.0, NAN]], [[0.0, 1.0, 0.0, 0.0]]),
        ("reduce_min", [[NAN, 3.0, 1.0, NAN]], [[0.0, 0.0, 1.0, 0.0]]),
        ("abs", [[-2.0, 3.0, -INFINITY, 1.0]], [[-1.0, 1.0, -1.0, 1.0]]),
    ]:
        np.testing.assert_array_equal(gradients_of(op, *arrays), expected)
    for op in ["max", "min"]:
        both, whole = gradients_of(op, np.ones(4), np.ones(4)), gradients_of(f"reduce_{op}", np.ones(4))
        np.testing.assert_array_equal(both.sum(0), np.ones(4))
        assert ((both >= 0) & (both <= 1)).all()
        assert (whole >= 0).all()
        np.testing.assert_allclose(whole.sum(), 1.0, rtol=FLOAT64_RTOL)
