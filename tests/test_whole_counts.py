"""Counts that are whole: loops that tell their turns, sparse products, and what is said where something is missing."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _shapes import real, whole
from hypothesis import example, given
from hypothesis import strategies as st
from jax import lax
from jax.experimental import io_callback, sparse
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

import rlxjax as rx
from rlxjax.calibration import CalibratedModel, Calibration, predict_profiles
from rlxjax.models import FUNCTIONS

D = 7
X = jax.ShapeDtypeStruct((D,), jnp.float32)
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


# Never, though it would hold later.
@example(dtype="int32", test=operator.eq, bound_first=False, step="add", numbers=(0, 4, 1))
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
#: A loop over data.
DATA = lambda x: x.sum() > 1, jnp.sin


def add(i):
    return i + 1


def fori(first, last):
    return lambda x: lax.fori_loop(first, last, lambda _, x: jnp.sin(x), x)


UNTIL_TEN = {
    "jitted": turned(0, jax.jit(lambda i: i + 1 <= TEN), jax.jit(add)),
    "an array of one element": turned(ONE, lambda i: i[0] < 11, add),
    "a converted bound": turned(0, lambda i: i < jnp.asarray(10.0).astype(jnp.int32), add),
    "billions, a tenth of them": turned(0, lambda i: i < 2**31 - 1, add),
    "halves": turned(1000, lambda i: i > 0, lambda i: i // 2),
    "two bounds": turned(0, lambda i: (i < 10) & (i * 2 < 40), add),
    "two bounds that hold later": lambda x: turned(9, lambda i: (i < 5) & (i > -20), lambda i: i - 1)(fori(0, 10)(x)),
    "no longer": turned(0, lambda i: jnp.logical_not(i >= 10), add),
    "fori": fori(0, 10),
    "fori of a bound that is handed on": lambda x: jax.jit(lambda x, n: fori(n - n, n)(x))(x, 10),
    "in a scan": lambda x: lax.scan(lambda x, _: (fori(0, TEN // 2)(x), None), x, length=2)[0],
    "in a loop": lambda x: lax.fori_loop(0, TEN // 5, lambda _, x: fori(0, TEN // 2)(x), x),
    "batched": lambda x: jax.vmap(turned(0, lambda i: i < 10, add))(x[None])[0],
    "a flag": lambda x: lax.while_loop(lambda s: s[0], lambda s: (s[1] < 9, s[1] + 1, jnp.sin(s[2])), (True, 0, x))[2],
    "the branch that is taken": lambda x: lax.cond(True, fori(0, 10), lambda x: lax.while_loop(*DATA, x), x),
    "carried": lambda x: lax.while_loop(
        lambda s: s[2] > s[0], lambda s: (s[0], jnp.sin(s[1]), s[2] - s[3], s[3]), (0, x, 30, 3)
    )[1],
}


def test_wrappers_hide_no_counter_and_wide_counters_count_beyond_32_bits():
    for name, function in UNTIL_TEN.items():
        for one in (function, jax.jit(function)):
            assert trips(one) == (2**31 - 1 if "billions" in name else 10), name
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


def test_nothing_sure_is_said_of_what_is_not_counted():
    domain = dict.fromkeys([*FUNCTIONS.inputs, *FUNCTIONS.kernels], (0.0, 1e18))
    model = CalibratedModel(rx.fit.prior_posterior(FUNCTIONS), {}, {}, domain)
    known = Calibration({"functions": model}, None, {})
    sine = rx.profile_function(jnp.sin, X)
    assert sine.uncounted == () == predict_profiles(known.of("functions"), [sine]).predictions[0].uncounted
    for name, function in UNKNOWN.items():
        profile = rx.profile_function(function, X)
        assert profile.uncounted, name
        assert all(reason in str(profile) for reason in profile.uncounted)
        if name not in ("data", "no rule", "the host", "devices"):  # one of each reason
            continue
        found = known.predict_function(function, X)
        assert (found.high_ns, found.in_domain, found.uncounted) == (np.inf, False, profile.uncounted), name
        assert 0 < found.low_ns < found.time_ns < np.inf
        assert str(found).startswith("predicted: at least ")
        assert profile.uncounted[0] in str(found)
        for one, several in ((profile, [sine]), (sine, [profile, sine])):
            decided = predict_profiles(known.of("functions"), [one, *several]).decision([0], range(1, 1 + len(several)))
            assert (float(decided.probability), decided.verdict(), decided.in_domain) == (0.5, "undecided", False), name
        assert rx.advise([function, jnp.shape], X, calibration=known).verdict == "cannot model", name
        with pytest.raises(ValueError, match="work: "):
            rx.rank_devices(function, args=(X,))


def bcoo_dot(shape, contracted, batched=((), ())):
    """Return a product of a sparse array by its parts."""
    numbers = contracted, batched
    return lambda d, i, y: sparse.bcoo_dot_general(sparse.BCOO((d, i), shape=shape), y, dimension_numbers=numbers)


NSE = 20
AT, BATCH_AT = (real(NSE), whole(NSE, 2)), (real(3, NSE), whole(3, NSE, 2))
BY_ROW, BY_PLACE, SHAPE = (real(NSE), whole(NSE), whole(10)), (real(NSE), whole(NSE), whole(NSE)), {"shape": (9, 8)}
#: Functions, what they take, and how many products of two numbers are summed up.
SPARSE = [
    (bcoo_dot((9, 8), ((1,), (0,))), (*AT, real(8, 5)), NSE * 5),
    (lambda d, i, y: y @ sparse.BCOO((d, i), **SHAPE).T, (*AT, real(5, 8)), NSE * 5),
    (bcoo_dot((3, 9, 8), ((2,), (0,))), (*BATCH_AT, real(8, 5)), 3 * NSE * 5),
    (bcoo_dot((3, 9, 8), ((2,), (2,)), ((0,), (0,))), (*BATCH_AT, real(3, 9, 8)), 3 * NSE * 9),
    (bcoo_dot((3, 9, 8), ((1, 2), (0, 1))), (*BATCH_AT, real(9, 8, 2)), 3 * NSE * 2),
    (bcoo_dot((9, 8, 4), ((0,), (0,))), (real(NSE, 4), whole(NSE, 2), real(9, 5)), NSE * 4 * 5),
    (lambda *m: sparse.BCSR(m[:3], **SHAPE) @ m[3], (*BY_ROW, real(8, 5)), NSE * 5),
    (lambda *m: sparse.CSR(m[:3], **SHAPE) @ m[3], (*BY_ROW, real(8, 5)), NSE * 5),
    (lambda *m: sparse.CSR(m, **SHAPE).todense(), BY_ROW, None),
    (lambda y: sparse.CSR.fromdense(y, nse=NSE).data, (real(9, 8),), None),
    (lambda *m: sparse.COO(m[:3], **SHAPE).T @ m[3], (*BY_PLACE, real(9)), NSE),
    (lambda *m: sparse.COO(m, **SHAPE).todense(), BY_PLACE, None),
    (lambda y: sparse.COO.fromdense(y, nse=NSE).data, (real(9, 8),), None),
]


def test_sparse_products_count_their_elements():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for function, args, products in SPARSE:
            profile = rx.profile_function(function, *args)
            assert (profile.uncounted, profile.coverage_bytes) == ((), 1)
            if products is not None:  # a product, and its sum; a sum of all has one less for each result
                assert 2 * products - 2 <= profile.flops <= 2 * products


def test_a_guard_calls_nobody_unless_it_fails():
    def calls(x):
        return jax.pure_callback(np.sin, X, x)

    guarded = rx.profile_function(lambda x: lax.cond(x[0] > 0, calls, lambda x: x, x), X)
    chosen = rx.profile_function(lambda x: lax.cond(x[0] > 0, calls, lambda x: jnp.sin(x[:1]).repeat(D), x), X)
    assert (guarded.uncounted, guarded.io.sync_points) == ((), 0)
    assert (len(chosen.uncounted), chosen.io.sync_points) == (1, 1)
