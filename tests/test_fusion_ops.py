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


def plan_of(*cases, dtype="f64"):
    """Return one plan of ops on inputs of their own, each an op with its arrays: it is compiled once for all."""
    graph, places = rx.Graph(), []
    for op, arrays in cases:
        inputs = [graph.input("x", np.shape(array), dtype) for array in arrays]
        places.append((inputs, graph.add(op, inputs)))
    graph.set_outputs(id_ for _, id_ in places)
    return rx.plan_fusion(graph), places


def results_of(cases, dtype="f64", listed=None):
    """Return what the ops of one plan give, from their own arrays or from those in `listed`."""
    plan, places = plan_of(*cases, dtype=dtype)
    arrays = [arrays for _, arrays in cases] if listed is None else listed
    results = rx.execute_plan(
        plan, {id_: x for (ids, _), own in zip(places, arrays, strict=True) for id_, x in zip(ids, own, strict=True)}
    )
    return [results[id_] for _, id_ in places]


def casts(*chains):
    """Return what one plan makes of values that it casts to dtypes in turn: of each, after each cast."""
    graph, inputs, places = rx.Graph(), {}, []
    for values, dtypes in chains:
        ids = [graph.input("x", values.shape, next(name for name, own in DTYPES.items() if own == values.dtype))]
        inputs[ids[0]] = values
        for dtype in dtypes:
            ids.append(graph.add("cast", ids[-1:], to=dtype))
        places.append(ids[1:])
    graph.set_outputs(itertools.chain(*places))
    plan = rx.plan_fusion(graph)
    assert len(plan.kernels) == 1
    results = rx.execute_plan(plan, inputs)
    return [[results[id_] for id_ in ids] for ids in places]


def assert_identical(found, expected):
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(*(np.asarray(array).view(f"u{expected.itemsize}") for array in (found, expected)))


def test_a_cast_is_numpys_and_rounds_in_a_kernel_too():
    rng = np.random.default_rng(0)  # values that every dtype can hold, or round
    values = np.concatenate([rng.uniform(-120, 120, 500), rng.normal(size=500), np.arange(-127.0, 128), [-0.0]])
    rows = [(first, second, first) for first, second in itertools.product(DTYPES, DTYPES)]
    rows += [("f64", *both, "f64") for both in itertools.permutations(["f16", "bf16", "f32", "i32"], 2)]
    no_numbers = [NAN, INFINITY, -INFINITY]
    for is_float in (True, False):  # an integer has no bits for what is no number
        own = [row for row in rows if (set(row) <= _numpy_ops.DTYPES.keys()) == is_float]
        given = [np.concatenate([values, no_numbers * is_float]).astype(DTYPES[first]) for first, *_ in own]
        for (_, *dtypes), expected, found in zip(
            own, given, casts(*((x, row[1:]) for x, row in zip(given, own, strict=True))), strict=True
        ):
            for dtype, one in zip(dtypes, found, strict=True):
                expected = expected.astype(DTYPES[dtype])
                assert_identical(one[: len(values)], expected[: len(values)])
                np.testing.assert_array_equal(np.asarray(one, np.float64)[len(values) :], no_numbers * is_float)


INTEGERS = {"i8": np.int8, "i32": np.int32, "i64": np.int64, "u8": np.uint8}
EDGES = [0, 1, -1, 2, 7, 127, 128, 255, 256, 300, -128, -129, 2**24 + 1, 2**31 - 1, -(2**31), 2**53 + 1, 2**63 - 1]


def edges_of(dtype):
    """Return edge values that a dtype holds exactly or rounded."""
    if dtype in INTEGERS:
        limits = np.iinfo(INTEGERS[dtype])
        return np.array([x for x in EDGES if limits.min <= x <= limits.max] + [limits.min], INTEGERS[dtype])
    numbers = [*EDGES, 0.5, -1.5, NAN, INFINITY, -INFINITY, -0.0]
    with np.errstate(all="ignore"):
        return np.array(numbers, np.float64).astype((DTYPES | {"bool": np.dtype(bool)})[dtype])


def as_integer(number, dtype):
    """Return a number as an integer by the rules of the page: truncated, limited, and 0 for NaN."""
    limits = np.iinfo(INTEGERS[dtype])
    if number != number:
        return 0
    number = limits.max if number == INFINITY else limits.min if number == -INFINITY else int(number)
    return min(max(number, limits.min), limits.max)


def test_a_cast_to_an_integer_limits_every_value_also_what_is_given():
    for first, second in itertools.product([*DTYPES, *INTEGERS, "bool"], INTEGERS):
        values = edges_of(first)
        graph = rx.Graph()
        x, given = graph.input("x", values.shape, first), graph.input("given", values.shape, second)
        graph.set_outputs([graph.add("cast", [x], to=second), graph.add("copy", [given])])
        results = rx.execute_plan(rx.plan_fusion(graph), {x: values, given: values})
        expected = [as_integer(value, second) for value in values.astype(object)]
        for id_ in graph.outputs:
            assert (results[id_].dtype, results[id_].tolist()) == (INTEGERS[second], expected), (first, second)


def test_an_integer_quotient_or_power_is_exact_and_then_limited_and_sums_wrap_around():
    for dtype, kind in INTEGERS.items():
        x, y = (own.ravel() for own in np.meshgrid(edges_of(dtype), edges_of(dtype)))
        bits = 8 * np.dtype(kind).itemsize

        def quotient(a, b, dtype=dtype):
            infinite = 0 if a == 0 else INFINITY if a > 0 else -INFINITY
            return as_integer(infinite if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1), dtype)

        def power(a, b, bits=bits, quotient=quotient):
            return pow(a, b, 2**bits) if b >= 0 else quotient(1, 0 if a == 0 else a * a if b % 2 == 0 else a)

        exact = {"div": quotient, "pow": power, "add": lambda a, b: a + b, "sub": lambda a, b: a - b}
        exact |= {"mul": lambda a, b: a * b, "max": max, "min": min}
        found = results_of([(op, [x, y]) for op in exact], dtype)
        for function, result in zip(exact.values(), found, strict=True):
            pairs = zip(x.tolist(), y.tolist(), strict=True)
            expected = np.array([function(*pair) % 2**bits for pair in pairs], object).astype(f"u{bits // 8}")
            assert_identical(result, expected.view(kind))
        (total,) = results_of([("reduce_sum", [x])], dtype)
        assert (int(total[0]) - sum(x.tolist())) % 2**bits == 0


def test_a_greedy_plan_gives_every_output_also_one_that_another_reads():
    graph = rx.Graph()
    x = graph.input("x", (3,))
    first = graph.add("exp", [x])
    graph.set_outputs([graph.add("neg", [first]), first])
    plan, values = rx.plan_fusion(graph, "greedy"), np.float32([0.0, 1.0, 2.0])
    assert [kernel.external_outputs for kernel in plan.kernels] == [graph.outputs[:1]]  # as in the reference
    results = rx.execute_plan(plan, {x: values})
    assert set(results) == set(graph.outputs)
    np.testing.assert_allclose(results[first], np.exp(values), rtol=1e-6)


def test_float64_near_every_tie_of_half_precision_is_rounded_once_as_by_numpy():
    halves = np.arange(2**15 - 2**10, dtype=np.uint16).view(np.float16)  # all finite ones from 0 on
    ties = (halves[:-1].astype(np.float64) + halves[1:].astype(np.float64)) / 2
    steps = (0.0, 2.0**-40, -(2.0**-40), 2.0**-20, -(2.0**-20))
    values = np.concatenate([sign * ties * (1 + step) for sign in (1, -1) for step in steps])
    # By way of float32 the first would be a tie, which goes to the even 1.
    values = np.concatenate([[1 + 2**-11 + 2**-40], values, [65519.99, 65520.0, 1e300, -1e300, 1e-300, -0.0]])
    with np.errstate(over="ignore"):
        (((found,),)) = casts((values, ["f16"]))
        assert_identical(found, values.astype(np.float16))
    assert found[0] == 1 + 2**-10


def test_half_precision_arithmetic_overflows_inside_a_kernel_as_outside():
    graph, largest = rx.Graph(), {"f16": 65504.0, "bf16": 3.3895e38}
    inputs = {graph.input("x", (4,), dtype): np.full(4, value) for dtype, value in largest.items()}
    graph.set_outputs([graph.add("sub", [graph.add("add", [x, x]), x]) for x in inputs])
    for plan in ("cost", "unfused"):
        results = rx.execute_plan(rx.plan_fusion(graph, plan), inputs)
        assert all(np.isinf(np.asarray(results[id_], np.float64)).all() for id_ in graph.outputs)


def test_nan_is_no_number_that_a_maximum_could_be_and_integers_stay_integers():
    cases = [
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
    ]
    for (*_, expected), found in zip(cases, results_of([case[:2] for case in cases]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=FLOAT64_RTOL)
    expected = {"relu": [0, 3, 0, 7], "abs": [5, 3, 0, 7], "neg": [5, -3, 0, -7], "max": [2, 3, 0, 7]}
    expected |= {"min": [-5, -9, 0, 7], "reduce_max": [7], "reduce_min": [-5], "reduce_sum": [5]}
    arrays = [np.array([-5, 3, 0, 7]), np.array([2, -9, 0, 7])]
    for dtype in ["i8", "i32"]:
        found = results_of([(op, arrays[: 2 if op in ("max", "min") else 1]) for op in expected], dtype)
        for result, values in zip(found, expected.values(), strict=True):
            assert (result.dtype, result.tolist()) == (DTYPES[dtype], values)


SMOOTH = ["sigmoid", "tanh", "gelu", "sqrt", "rsqrt", "exp", "log", "neg", "abs", "load", "store", "copy"]
SMOOTH += ["relu", "reduce_sum", "reduce_mean", "reduce_max", "reduce_min"]
OPERANDS = dict.fromkeys(SMOOTH, 1) | dict.fromkeys(["add", "sub", "mul", "div", "pow"], 2)


def test_smooth_ops_and_a_fused_layer_have_the_gradient_of_the_finite_difference():
    """The layer: normalise, scale, squash; a reduction, its broadcast, and both sides of them."""
    rng = np.random.default_rng(0)
    values, cases = np.linspace(0.2, 3.0, 24), [(op, [np.zeros(4)] * count) for op, count in OPERANDS.items()]
    tree = [[rng.permutation(values).reshape(6, 4) for _ in arrays] for _, arrays in cases]
    of_all = jax.vmap(lambda tree: sum(jnp.sum(result * 1.5) for result in results_of(cases, listed=tree)))
    assert_gradient_is_the_finite_difference(of_all, tree)
    graph = rx.Graph()
    x, w = graph.input("x", (3, 4), "f64"), graph.param("w", (3, 4), "f64")
    square = graph.add("reduce_mean", [graph.add("mul", [x, x])])
    scale = graph.add("broadcast", [graph.add("rsqrt", [square])], shape=(3, 4))
    y = graph.add("gelu", [graph.add("mul", [graph.add("mul", [x, scale]), w])])
    graph.set_outputs([graph.add("matmul", [y, graph.add("transpose", [x])])])
    tree, weights = [rng.normal(size=(5, 3, 4)), rng.normal(size=(5, 3, 4))], rng.uniform(1, 2, (3, 3))
    for name in ["cost", "unfused"]:
        run = functools.partial(rx.execute_plan, rx.plan_fusion(graph, name))
        assert_gradient_is_the_finite_difference(
            jax.vmap(lambda arrays: jnp.sum(run(dict(enumerate(arrays)))[graph.outputs[0]] * weights)),  # noqa: B023
            tree,
            scale=np.full(5, 100.0),
        )


def test_a_choice_has_a_gradient_only_where_it_chose_and_a_tie_shares_it():
    cases = [
        ("relu", [[-1.0, 0.0, 2.0, NAN]], [[0.0, 0.0, 1.0, 0.0]]),
        ("relu", [[INFINITY, -INFINITY, 1e-300, -0.0]], [[1.0, 0.0, 1.0, 0.0]]),
        ("max", [[1.0, 3.0, NAN, 2.0], [2.0, 1.0, 1.0, NAN]], [[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]),
        ("min", [[1.0, 3.0, NAN, 2.0], [2.0, 1.0, 1.0, NAN]], [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]]),
        ("reduce_max", [[NAN, 3.0, 1.0, NAN]], [[0.0, 1.0, 0.0, 0.0]]),
        ("reduce_min", [[NAN, 3.0, 1.0, NAN]], [[0.0, 0.0, 1.0, 0.0]]),
        ("abs", [[-2.0, 3.0, -INFINITY, 1.0]], [[-1.0, 1.0, -1.0, 1.0]]),
    ]
    ties = [(op, [np.ones(4)] * count) for op, count in (("max", 2), ("reduce_max", 1), ("min", 2), ("reduce_min", 1))]
    ops = [case[:2] for case in cases] + ties
    listed = [list(map(jnp.array, arrays)) for _, arrays in ops]
    found = jax.grad(lambda listed: sum(jnp.sum(result) for result in results_of(ops, listed=listed)))(listed)
    for (*_, expected), slopes in zip(cases, found, strict=False):
        np.testing.assert_array_equal(slopes, expected)
    for slopes in map(np.asarray, found[len(cases) :]):
        assert (slopes >= 0).all()
        total = slopes.sum(0) if len(slopes) == 2 else slopes.sum()
        np.testing.assert_allclose(total, np.ones_like(total), rtol=FLOAT64_RTOL)
