"""Columns of counts: their differences are those of Python's numbers, whatever NumPy type they come in."""

import itertools
import math

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
