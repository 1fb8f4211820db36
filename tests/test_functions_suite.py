"""The suite of ordinary functions: names, families, what is held out, and that rules count all of it."""

import jax
import numpy as np
import pytest

import rlxjax as rx
from calibrate.draws import Draw
from calibrate.functions import function_cells

CELLS = function_cells()
FAMILIES = {
    "elementwise", "reduction", "matmul", "convolution", "scan", "fft", "sort", "gather", "softmax", "layer norm",
    "attention", "mlp", "linear algebra", "random", "update",
}  # fmt: skip
#: Bytes of the arguments of one function, and of all.
MOST_BYTES, MOST_BYTES_TOGETHER = 100e6, 1e9


def n_bytes(shapes):
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def test_names_are_unique():
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def test_every_family_has_seen_and_held_out_functions():
    for held_out in (False, True):
        assert {cell.family for cell in CELLS if cell.held_out == held_out} == FAMILIES
    assert 0.25 < np.mean([cell.held_out for cell in CELLS]) < 0.4


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_rules_count_every_equation(cell):
    fn, shapes = cell.build()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as such functions are used
        profile = rx.profile_function(fn, *shapes)
    assert profile.coverage_equations == 1, profile.uncosted
    assert not profile.unknown_loops
    assert 0 < n_bytes(shapes) <= MOST_BYTES


def test_bytes_together_are_bounded():
    assert sum(n_bytes(cell.build()[1]) for cell in CELLS) <= MOST_BYTES_TOGETHER


def test_without_64_bits_no_argument_has_them():
    with jax.enable_x64(False):
        few = function_cells()
        dtypes = {leaf.dtype for cell in few for leaf in jax.tree.leaves(cell.build()[1])}
    assert len(few) < len(CELLS)
    assert not dtypes & {np.dtype("float64"), np.dtype("complex128")}
    assert {cell.name: cell.held_out for cell in few}.items() <= {cell.name: cell.held_out for cell in CELLS}.items()


@pytest.mark.parametrize("values", ["normal", "positive", "definite"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64"])
def test_drawn_values_are_valid(values, dtype):
    array = Draw((3, 24, 24), np.dtype(dtype), values).array(np.random.default_rng(0))
    assert array.shape == (3, 24, 24)
    assert array.dtype == dtype
    real = np.asarray(array.real, np.float64)
    if values == "positive":
        assert real.min() > 0
    if values == "definite" and dtype.startswith("float"):
        np.testing.assert_array_equal(real, np.swapaxes(real, -1, -2))
        assert np.linalg.eigvalsh(real).min() > 0


def test_drawn_indices_are_in_range():
    draw = Draw((1000,), np.int32, below=7)
    array = np.asarray(draw.array(np.random.default_rng(0)))
    assert set(array.tolist()) == set(range(7))
    assert draw.abstract() == jax.ShapeDtypeStruct(array.shape, array.dtype)


def test_a_drawn_key_is_of_the_dtype_that_is_traced():
    draw = Draw((), values="key")
    assert draw.array(np.random.default_rng(0)).dtype == draw.abstract().dtype
