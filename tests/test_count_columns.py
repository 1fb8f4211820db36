"""Columns of counts: their differences are those of Python's numbers, whatever NumPy type they come in."""

import itertools
import math
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rlxjax as rx
from rlxjax._counts import difference  # of signed counts, which no profile holds

INTEGERS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
SHAPES = ((), (1,), (3,), (0,), (2, 1), (1, 3))
POWERS = [sign * 2**power for power in (0, 7, 31, 53, 63, 64) for sign in (1, -1)]
EDGES = sorted({power + step for power in POWERS for step in (-1, 0, 1)})
numbers = st.sampled_from([*EDGES, 2**70, -(2**70), 2**200]) | st.integers(-(2**66), 2**66) | st.booleans()


@st.composite
def columns(draw):
    """Draw integers of any type, shape and form, the edges of the type among them."""
    dtype, shape = np.dtype(draw(st.sampled_from(INTEGERS))), draw(st.sampled_from(SHAPES))
    least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    edges = [count for count in sorted({*EDGES, least, most}) if least <= count <= most]
    counts = st.lists(
        st.sampled_from(edges) | st.integers(least, most), min_size=math.prod(shape), max_size=math.prod(shape)
    )
    column = np.array(draw(counts), dtype).reshape(shape)
    listed = column.tolist()
    as_list = listed if np.asarray(listed).dtype.kind in "iu" else column  # as NumPy would take it
    return draw(st.sampled_from([column, jnp.asarray(column), as_list, column.astype(dtype.newbyteorder())]))


def pythons_difference(before, after):
    """Return the difference by Python's integers, in the smaller 64-bit type that holds all of it."""
    before, after = np.broadcast_arrays(np.asarray(before), np.asarray(after))
    saved = [int(x) - int(y) for x, y in zip(before.ravel(), after.ravel(), strict=True)]
    if before.ndim == 0:
        return saved[0]
    for dtype in (np.int64, np.uint64):
        if all(np.iinfo(dtype).min <= count <= np.iinfo(dtype).max for count in saved):
            return np.array(saved, dtype).reshape(before.shape)
    return np.array([float(count) for count in saved]).reshape(before.shape)


@settings(max_examples=100)
@given(columns(), columns() | numbers)
def test_a_difference_of_integers_is_that_of_pythons(column, other):
    assume({np.shape(column)[-1:], np.shape(other)[-1:]} != {(3,), (0,)})
    for before, after in ((column, other), (other, column)):
        got, expected = difference(before, after, "count"), pythons_difference(before, after)
        assert type(got) is type(expected)
        assert np.asarray(got).dtype == np.asarray(expected).dtype
        assert np.shape(got) == np.shape(expected)
        np.testing.assert_array_equal(got, expected)


def test_columns_are_subtracted_without_an_object_for_each_row():
    for before, after, dtype in [
        (np.int64(2**62), np.int64(5), np.int64),
        (np.uint64(2**64 - 1), np.uint64(2**63), np.int64),
        (np.uint64(2**64 - 1), np.int64(5), np.uint64),
        (np.int32(2**31 - 1), np.uint64(2**40), np.int64),
    ]:
        pair = [rx.GraphIoProfile(*(np.full(2**16, count) for _ in range(4))) for count in (before, after)]
        tracemalloc.start()
        saved = jax.tree.leaves(rx.fusion_benefit(*pair))
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert {column.dtype for column in saved} == {np.dtype(dtype)}
        assert peak_bytes < 1.5 * sum(column.nbytes for column in saved)


def test_what_the_host_holds_is_subtracted_before_it_is_narrowed_and_by_every_method_alike():
    more, less = 2.0**40 + 4096, 2.0**40
    counts = [(np.array([more]), np.array([2**40])), (more, np.array([less])), ([more], [less])]
    counts.append((np.array([2**40 + 4096], object), np.array([less])))
    gate = rx.io_fusion_gate_for_target("cuda")
    for x64, one in itertools.product((True, False), counts):
        pair = [rx.GraphIoProfile(*[count] * 4) for count in one]
        with jax.enable_x64(x64):
            benefit, result = rx.fusion_benefit(*pair), gate.evaluate(*pair, temperature_ns=1e7)
            assert {leaf.dtype for leaf in jax.tree.leaves(benefit)} == {jnp.result_type(float)}
            np.testing.assert_array_equal(jax.tree.leaves(benefit), np.full((4, 1), 4096.0))
            jax.tree.map(np.testing.assert_array_equal, result.benefit, benefit)
            for arguments in (pair, (benefit,)):
                np.testing.assert_array_equal(result.score_ns, gate.score_ns(*arguments))
                np.testing.assert_array_equal(result.should_fuse, gate.should_fuse(*arguments))
                chance = gate.fuse_probability(*arguments, temperature_ns=1e7)
                np.testing.assert_array_equal(result.fuse_probability, chance)
            np.testing.assert_array_equal(result.score_ns, [gate.score_ns(rx.FusionBenefit(*[4096.0] * 4))])


def test_a_difference_has_the_type_and_the_value_of_one_on_a_device():
    def alone(side):
        """Return what JAX makes of one side: NumPy's floats are narrowed, others are of its default precision."""
        return side if isinstance(side, float) else jnp.asarray(side if side.dtype.kind == "f" else side.astype(float))

    firsts, seconds = (np.float16, np.float64, object), (np.float16, np.float64, bool, np.int64, float)
    for x64, first, second in itertools.product((True, False), firsts, seconds):
        before = np.array([0, 1, 0, 1]).astype(first)
        after = 1.0 if second is float else np.array([0, 0, 1, 1]).astype(second)
        # Here the dtypes of one difference differ.
        with jax.enable_x64(x64), jax.numpy_dtype_promotion("standard"):
            for pair in ((before, after), (after, before)):
                on_host, on_device = difference(*pair, "count"), alone(pair[0]) - alone(pair[1])
                assert isinstance(on_host, jax.Array)
                assert on_host.dtype == on_device.dtype
                np.testing.assert_array_equal(on_host, on_device)
    before, after = jnp.array([2.0**40 + 4096]), jnp.array([2.0**40])
    for pair in ((before, after), (np.asarray(before), after), (before, np.asarray(after))):
        np.testing.assert_array_equal(difference(*pair, "count"), before - after)
        np.testing.assert_array_equal(jax.jit(lambda *x: difference(*x, "count"))(*pair), before - after)
