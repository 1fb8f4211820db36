"""Counts that are whole: loops that tell their turns, sparse products, and what is said where something is missing."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax import lax
from jax.experimental import io_callback, sparse
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

import rlxjax as rx
from rlxjax.calibration import CalibratedModel, Calibration, compare_functions, predict_profile
from rlxjax.jaxpr._sparse import PROGRAMS
from rlxjax.jaxpr._xla import CompiledProgram
from rlxjax.models import FUNCTIONS

D = 7
X = jax.ShapeDtypeStruct((D,), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((D, D), jnp.float32)
LIMIT = 200


def turned(start, test, step):
    """Return a function that takes D sines in each turn of a loop over a counter."""
    return lambda x: lax.while_loop(lambda s: test(s[0]), lambda s: (step(s[0]), jnp.sin(s[1])), (start, x))[1]


def trips(function, *args):
    """Return the turns of a function's only sines, None of a loop of unknown length."""
    profile = rx.profile_function(function, *(args or (X,)))
    assert bool(profile.unknown_loops) == bool(profile.uncounted)
    return None if profile.unknown_loops else profile.transcendentals // D


TESTS = [operator.lt, operator.le, operator.gt, operator.ge, operator.ne, operator.eq]
STEPS = {
    "add": lambda i, by: i + by,
    "added": lambda i, by: by + i,
    "sub": lambda i, by: i - by,
    "mul": lambda i, by: i * by,
    "taken from": lambda i, by: by - i,
    "shift": lambda i, by: i >> 1,
    "two": lambda i, by: (i + by) - (by + by),
    "rem": lambda i, by: by + (lax.rem if hasattr(i, "aval") else np.fmod)(i, i * 0 + 7),
}


@example(
    dtype="int32", test=operator.eq, bound_first=False, step="add", numbers=(0, 4, 1)
)  # never, though it would hold later
@example(dtype="int32", test=operator.ne, bound_first=False, step="add", numbers=(0, 4, 3))
@given(
    dtype=st.sampled_from(["int8", "uint8", "int16", "uint16", "int32", "uint32", "float32", "bfloat16"]),
    test=st.sampled_from(TESTS),
    bound_first=st.booleans(),
    step=st.sampled_from(sorted(STEPS)),
    numbers=st.tuples(*[st.integers(-130, 300)] * 2, st.integers(-5, 9)),
)
def test_a_loop_between_constants_turns_as_often_as_python_says(dtype, test, bound_first, step, numbers):
    dtype = jnp.dtype(dtype)
    with np.errstate(all="ignore"):
        start, bound, by = (np.asarray(number).astype(dtype)[()] for number in numbers)
    if dtype.kind not in "iu" and step == "shift":
        step = "add"

    def holds(i):
        return test(bound, i) if bound_first else test(i, bound)

    turns, i = 0, start
    with np.errstate(all="ignore"):
        while holds(i) and turns <= LIMIT:
            turns, i = turns + 1, np.asarray(STEPS[step](i, by)).astype(dtype)[()]
        found = trips(turned(start, holds, lambda i: STEPS[step](i, by)))
    if turns <= LIMIT and dtype.kind in "iu":
        assert found == turns
    elif turns <= LIMIT:
        assert found in (turns, None)  # floats that are not exact are not counted
    else:
        assert found is None or found > LIMIT


ONE, TEN = jnp.ones(1, jnp.int32), jnp.asarray(10)
UNTIL_TEN = {
    "jitted": turned(0, jax.jit(lambda i: i + 1 <= TEN), jax.jit(lambda i: i + 1)),
    "an array of one element": turned(ONE, lambda i: i[0] < 11, lambda i: i + 1),
    "a converted bound": turned(0, lambda i: i < jnp.asarray(10.0).astype(jnp.int32), lambda i: i + 1),
    "an array that is closed over": turned(0, lambda i: i < TEN, lambda i: i + 1),
    "an array of numpy": turned(0, lambda i: i < np.asarray(10), lambda i: i + 1),
    "billions, a tenth of them": lambda x: turned(0, lambda i: i < 2**31 - 1, lambda i: i + 1)(x),
    "halves": turned(1000, lambda i: i > 0, lambda i: i // 2),
    "two bounds that hold later": lambda x: turned(9, lambda i: (i < 5) & (i > -20), lambda i: i - 1)(
        UNTIL_TEN["fori"](x)
    ),
    "two bounds": turned(0, lambda i: (i < 10) & (i * 2 < 40), lambda i: i + 1),
    "no longer": turned(0, lambda i: jnp.logical_not(i >= 10), lambda i: i + 1),
    "fori": lambda x: lax.fori_loop(0, 10, lambda _, x: jnp.sin(x), x),
    "fori of a bound that is handed on": lambda x: jax.jit(
        lambda x, n: lax.fori_loop(n - n, n, lambda _, x: jnp.sin(x), x)
    )(x, 10),
    "in a scan": lambda x: lax.scan(
        lambda x, _: (lax.fori_loop(0, TEN // 2, lambda _, x: jnp.sin(x), x), None), x, length=2
    )[0],
    "in a loop": lambda x: lax.fori_loop(
        0, TEN // 5, lambda _, x: lax.fori_loop(0, TEN // 2, lambda _, x: jnp.sin(x), x), x
    ),
    "batched": lambda x: jax.vmap(turned(0, lambda i: i < 10, lambda i: i + 1))(x[None])[0],
    "a flag": lambda x: lax.while_loop(lambda s: s[0], lambda s: (s[1] < 9, s[1] + 1, jnp.sin(s[2])), (True, 0, x))[2],
    "the branch that is taken": lambda x: lax.cond(True, UNTIL_TEN["fori"], lambda x: lax.while_loop(*DATA, x), x),
    "carried": lambda x: lax.while_loop(
        lambda s: s[2] > s[0], lambda s: (s[0], jnp.sin(s[1]), s[2] - s[3], s[3]), (0, x, 30, 3)
    )[1],
}
#: A loop over data.
DATA = lambda x: x.sum() > 1, jnp.sin


@pytest.mark.parametrize("name", sorted(UNTIL_TEN))
def test_wrappers_hide_no_counter(name):
    for function in (UNTIL_TEN[name], jax.jit(UNTIL_TEN[name])):
        assert trips(function) == (2**31 - 1 if "billions" in name else 10)


def test_wide_counters_are_counted_beyond_32_bits():
    with jax.enable_x64(True):
        assert trips(turned(jnp.int64(0), lambda i: i < 2**40, lambda i: i + 2), jnp.zeros(D)) == 2**39


UNKNOWN = {
    "data": lambda x: lax.while_loop(*DATA, x),
    "data too": lambda x: lax.while_loop(
        lambda s: (s[0] < 9) & (s[1].sum() > 0), lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x)
    )[1],
    "no end": turned(0, lambda i: i > -1, lambda i: i),
    "tenths": turned(0.0, lambda t: t < 1, lambda t: t + 0.1),
    "a branch": lambda x: lax.cond(x[0] > 0, UNKNOWN["data"], lambda x: jnp.outer(x, x) @ x, x),
    "no rule": jax.ffi.ffi_call("none", X),
    "a kernel": pl.pallas_call(lambda x, y: y.__setitem__(..., x[...]), X),
    "the host": lambda x: jax.pure_callback(np.sin, X, x),
    "the host, ordered": lambda x: io_callback(np.sin, X, x, ordered=True),
    "print": lambda x: (jax.debug.print("{}", x), x)[1],
    "solve": lambda x: sparse.linalg.spsolve(x, jnp.arange(D), jnp.arange(D + 1), x),
    "devices": lambda x: jax.shard_map(
        lambda x: lax.psum(x, "i"),
        mesh=jax.sharding.AbstractMesh((D,), ("i",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=PartitionSpec("i"),
        out_specs=PartitionSpec(),
    )(x),
}


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_nothing_sure_is_said_of_what_is_not_counted(name):
    model = CalibratedModel(rx.prior_posterior(FUNCTIONS), {}, {}, dict.fromkeys(FUNCTIONS.inputs, (0.0, 1e18)))
    known = Calibration({"functions": model}, None, {})
    sine, profile = rx.profile_function(jnp.sin, X), rx.profile_function(UNKNOWN[name], X)
    assert sine.uncounted == () == predict_profile(known, sine).uncounted
    assert profile.uncounted
    assert all(reason in str(profile) for reason in profile.uncounted)
    found = known.predict_function(UNKNOWN[name], X)
    assert (found.high_ns, found.in_domain, found.uncounted) == (np.inf, False, profile.uncounted)
    assert 0 < found.low_ns < found.time_ns < np.inf
    assert str(found).startswith("at least ")
    assert profile.uncounted[0] in str(found)
    for one, several in ((profile, [sine]), (sine, [profile, sine])):
        decided = compare_functions(known, one, several)
        assert (float(decided.probability), decided.verdict(), decided.in_domain) == (0.5, "undecided", False)
    assert rx.advise([UNKNOWN[name], jnp.shape], X, calibration=known).verdict == "cannot model"
    with pytest.raises(ValueError, match="work: "):
        rx.rank_devices(UNKNOWN[name], args=(X,))


def real(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def whole(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def bcoo_dot(shape, contracted, batched=((), ())):
    """Return a product of a sparse array by its parts."""
    numbers = contracted, batched
    return lambda d, i, y: sparse.bcoo_dot_general(sparse.BCOO((d, i), shape=shape), y, dimension_numbers=numbers)


NSE = 20
AT = whole(NSE), whole(10)
#: Functions, what they take, and how many products of two numbers are summed up.
SPARSE = [
    (bcoo_dot((9, 8), ((1,), (0,))), (real(NSE), whole(NSE, 2), real(8, 5)), NSE * 5),
    (lambda d, i, y: y @ sparse.BCOO((d, i), shape=(9, 8)).T, (real(NSE), whole(NSE, 2), real(5, 8)), NSE * 5),
    (bcoo_dot((9, 8), ((1,), (0,))), (real(NSE), whole(NSE, 2), real(8)), NSE),
    (bcoo_dot((3, 9, 8), ((2,), (0,))), (real(3, NSE), whole(3, NSE, 2), real(8, 5)), 3 * NSE * 5),
    (bcoo_dot((3, 9, 8), ((2,), (2,)), ((0,), (0,))), (real(3, NSE), whole(3, NSE, 2), real(3, 9, 8)), 3 * NSE * 9),
    (bcoo_dot((3, 9, 8), ((0,), (0,))), (real(3, NSE), whole(3, NSE, 2), real(3, 8)), 3 * NSE * 8),
    (bcoo_dot((3, 9, 8), ((1, 2), (0, 1))), (real(3, NSE), whole(3, NSE, 2), real(9, 8, 2)), 3 * NSE * 2),
    (bcoo_dot((9, 8, 4), ((0,), (0,))), (real(NSE, 4), whole(NSE, 2), real(9, 5)), NSE * 4 * 5),
    (lambda d, i, s, y: sparse.BCSR((d, i, s), shape=(9, 8)) @ y, (real(NSE), *AT, real(8, 5)), NSE * 5),
    (lambda d, i, s, y: sparse.CSR((d, i, s), shape=(9, 8)) @ y, (real(NSE), *AT, real(8, 5)), NSE * 5),
    (lambda d, i, s, y: sparse.CSR((d, i, s), shape=(9, 8)) @ y, (real(NSE), *AT, real(8)), NSE),
    (lambda d, i, s: sparse.CSR((d, i, s), shape=(9, 8)).todense(), (real(NSE), *AT), None),
    (lambda y: sparse.CSR.fromdense(y, nse=NSE).data, (real(9, 8),), None),
    (lambda d, r, c, y: sparse.COO((d, r, c), shape=(9, 8)).T @ y, (real(NSE), AT[0], AT[0], real(9, 5)), NSE * 5),
    (lambda d, r, c, y: sparse.COO((d, r, c), shape=(9, 8)) @ y, (real(NSE), AT[0], AT[0], real(8)), NSE),
    (lambda d, r, c: sparse.COO((d, r, c), shape=(9, 8)).todense(), (real(NSE), AT[0], AT[0]), None),
    (lambda y: sparse.COO.fromdense(y, nse=NSE).data, (real(9, 8),), None),
]


def test_sparse_products_count_their_elements():
    seen = set()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for function, args, products in SPARSE:
            profile = rx.profile_function(function, *args)
            assert (profile.uncounted, profile.coverage_bytes) == ((), 1)
            if products is not None:  # a product, and its sum; a sum of all has one less for each result
                assert 2 * products - 2 <= profile.flops <= 2 * products
            for equation in jax.make_jaxpr(function)(*args).jaxpr.eqns:
                if (own := PROGRAMS.get(equation.primitive.name)) is not None:
                    seen.add(equation.primitive.name)
                    given = [var.aval for var in equation.invars]
                    results = jax.tree.leaves(jax.eval_shape(lambda *a, o=own, e=equation: o(*a, **e.params), *given))
                    assert [(one.shape, one.dtype) for one in results] == [
                        (var.aval.shape, var.aval.dtype) for var in equation.outvars
                    ]
    assert seen == PROGRAMS.keys()


def test_what_is_counted_for_a_sparse_product_is_that_product():
    rng = np.random.default_rng(0)
    dense, right = rng.normal(size=(9, 8)), rng.normal(size=(8, 5))
    rows, columns = np.nonzero(dense > 0)
    starts = np.searchsorted(rows, np.arange(10)).astype(np.int32)
    numbers, shape = (((1,), (0,)), ((), ())), sparse.BCOO.fromdense(jnp.asarray(dense), nse=1)._info
    own = PROGRAMS["bcsr_dot_general"]
    product = jax.jit(lambda *parts: own(*parts, dimension_numbers=numbers, lhs_spinfo=shape))
    found = product(dense[rows, columns], columns.astype(np.int32), starts, right)
    np.testing.assert_allclose(found, np.where(dense > 0, dense, 0) @ right, rtol=1e-5)


FUSION = """HloModule fused
%fused (p0: bf16[100,8], p1: s32[], p2: f32[1,8]) -> f32[1,8] {{
  %p0 = bf16[100,8]{{1,0}} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %p2 = f32[1,8]{{1,0}} parameter(2)
  %wide = f32[100,8]{{1,0}} convert(%p0)
{inside}
}}
ENTRY %main (a: bf16[100,8], i: s32[], b: f32[1,8]) -> f32[1,8] {{
  %a = bf16[100,8]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %b = f32[1,8]{{1,0}} parameter(2)
  ROOT %f = {type} fusion(%a, %i, %b), kind=kLoop, calls=%fused
}}
"""


@pytest.mark.parametrize(
    ("inside", "type_", "moved"),
    [
        (
            "  %part = f32[1,8]{1,0} dynamic-slice(%wide, %p1, %zero), dynamic_slice_sizes={1,8}\n"
            "  ROOT %sum = f32[1,8]{1,0} add(%part, %p2)",
            "f32[1,8]{1,0}",
            8 * 2 + 4 + 8 * 4 + 8 * 4,  # of the 16-bit stack a row, the place, the other operand, the result
        ),
        (
            "  ROOT %new = f32[100,8]{1,0} dynamic-update-slice(%wide, %p2, %p1, %zero)",
            "f32[100,8]{1,0}",
            4 + 8 * 4 + 8 * 4,
        ),
        (
            "  %new = f32[100,8]{1,0} dynamic-update-slice(%wide, %p2, %p1, %zero)\n"
            "  ROOT %back = bf16[100,8]{1,0} convert(%new)",
            "bf16[100,8]{1,0}",
            100 * 8 * 2 + 4 + 8 * 4 + 100 * 8 * 2,  # not in place: the CPU's XLA writes all of it in each turn
        ),
    ],
)  # fmt: skip
def test_a_fusion_moves_what_it_looks_at(inside, type_, moved):
    assert CompiledProgram(FUSION.format(inside=inside, type=type_), {}).totals.sums().bytes == moved


def test_a_guard_calls_nobody_unless_it_fails():
    def calls(x):
        return jax.pure_callback(np.sin, X, x)

    guarded = rx.profile_function(lambda x: lax.cond(x[0] > 0, calls, lambda x: x, x), X)
    chosen = rx.profile_function(lambda x: lax.cond(x[0] > 0, calls, lambda x: jnp.sin(x[:1]).repeat(D), x), X)
    assert (guarded.uncounted, guarded.io.sync_points) == ((), 0)
    assert (len(chosen.uncounted), chosen.io.sync_points) == (1, 1)
