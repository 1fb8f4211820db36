"""The two forms of the device's selection of peaks: both are the sort of the rule, to the bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import QUICKLY
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rlxjax.welch import SELECTIONS, schedule, selected_peaks
from rlxjax.welch._selection import default_selection

CPU = schedule("cpu")
ULP = 2.0**-23

each_selection = pytest.mark.parametrize("selection", SELECTIONS)


def top_places(power, k, selection):
    return SELECTIONS[selection](power, k)


#: Compiled in less time, for tests of many shapes.
quickly = functools.partial(jax.jit, compiler_options=QUICKLY)
places_of = jax.jit(top_places, static_argnames=("k", "selection"))
quick_places_of = quickly(top_places, static_argnames=("k", "selection"))
quick_peaks_of = quickly(selected_peaks, static_argnames=("k", "selection"))


def sorted_places(power, k):
    """Return the places of the k largest powers of each row by a sort of (is NaN, -power, place)."""
    power = np.asarray(power)
    bins = np.broadcast_to(np.arange(power.shape[-1]), power.shape)
    return np.lexsort((bins, np.where(np.isnan(power), 0, -power), np.isnan(power)), axis=-1)[..., :k]


def assert_places_are_sorted(power, k, places_of=places_of):
    for selection in SELECTIONS:
        np.testing.assert_array_equal(places_of(power, k, selection), sorted_places(power, k), selection)


def kinds_of_rows(n_rows, n_bins, seed=0):
    """Return rows of noise, of few values, of near-equal powers, of silence, and of what is not finite."""
    rng = np.random.default_rng(seed)
    shape = (n_rows, n_bins)
    special = np.array([0, 1e-45, 1e-40, 1.2e-38, 1, 1, 3.4e38, np.inf, np.nan], np.float32)
    kinds = [
        np.square(rng.standard_normal(shape)),
        rng.integers(0, 3, shape),
        1 + rng.integers(0, 2 * n_bins, shape) * 2.0**-23,
        np.zeros(shape),
        np.full(shape, np.nan),
        rng.choice(special, shape),
        np.where(rng.random(shape) < 0.5, 0, 10.0 ** rng.uniform(-38, 38, shape)),
    ]
    return np.stack([kinds[row % len(kinds)][row] for row in range(n_rows)]).astype(np.float32)


powers = st.one_of(
    st.floats(0, width=32),
    st.sampled_from([0.0, 1e-45, 1.0, 2.0, np.inf, np.nan, -np.nan]),
    st.integers(0, 300).map(lambda ulps: 1 + ulps * 2.0**-23),
)


@settings(max_examples=100)
@given(arrays(np.float32, (3, 70), elements=powers, fill=st.just(1.0)), st.sampled_from([1, 5, 70]))
def test_places_are_a_sort_of_any_powers(power, k):
    assert_places_are_sorted(power, k)


#: Those of the next test have more numbers of peaks; every shape compiles a program for each selection.
@pytest.mark.parametrize("n_bins", [3, 16, 32, 70])
def test_places_are_a_sort_for_every_number_of_bins(n_bins):
    power = kinds_of_rows(21, n_bins)
    k = 1 + (7 * n_bins) % min(n_bins, 9)
    assert_places_are_sorted(power, k, quick_places_of)


@pytest.mark.parametrize("n_bins", [1, 2, pytest.param(17, marks=pytest.mark.slow), 33])
def test_places_are_a_sort_for_one_peak_as_for_all_bins(n_bins):
    power = kinds_of_rows(14, n_bins)
    for k in {1, (n_bins + 1) // 2, max(n_bins - 1, 1), n_bins}:
        assert_places_are_sorted(power, k, quick_places_of)


@pytest.mark.parametrize("n_bins", [129, 2049, 8193])
def test_places_are_a_sort_of_many_bins(n_bins):
    for k in (1, 16):
        assert_places_are_sorted(kinds_of_rows(14, n_bins), k, quick_places_of)


@pytest.mark.parametrize(
    ("row", "k"),
    [
        (np.linspace(1, 2, 100), 4),
        (np.ones(100), 4),
        (np.full(100, np.nan), 4),
        (np.where(np.arange(100) < 2, 9, 1), 4),
        (1 + np.arange(100) * ULP, 4),
        (1 + np.arange(100)[::-1] * ULP, 4),
        (np.where(np.arange(100) == 99, 1 + ULP, 1), 1),
        (np.where(np.arange(100) == 99, 1 + ULP, 1), 4),
        (np.where(np.arange(100) == 99, 1 - ULP / 2, 1), 4),
        (np.where(np.arange(100) < 4, 9 + np.arange(100) * 8 * ULP, 1), 4),
        (np.where(np.arange(100) < 4, 9, 1 + np.arange(100) * ULP), 4),
    ],
)
@pytest.mark.parametrize("n_rows", [CPU.tile_rows, CPU.tile_rows + 1])
def test_rows_of_equal_or_nearly_equal_powers_are_sorted_beside_others(row, k, n_rows):
    rows = np.tile(np.linspace(1, 2, 100), (n_rows, 1)).astype(np.float32)
    rows[n_rows // 2] = row
    np.testing.assert_array_equal(quick_places_of(rows, k, "maxima"), sorted_places(rows, k))


def test_neighbours_that_share_a_key_are_put_in_order_wherever_they_are():
    rows = np.tile(np.linspace(2, 1, 100), (2 * CPU.tile_rows, 1)).astype(np.float32)
    for row, powers in enumerate(rows):
        powers[row + 1] = powers[row] * (1 + 2 * ULP)  # so the later bin is the larger one
    for k in (1, 4, 12):
        np.testing.assert_array_equal(quick_places_of(rows, k, "maxima"), sorted_places(rows, k))


@pytest.mark.parametrize("n_shared", [3, 4, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_more_than_two_that_share_a_key_are_put_in_order(n_shared, seed):
    rng = np.random.default_rng(seed)
    rows = np.tile(np.linspace(1, 2, 100), (2 * CPU.tile_rows, 1)).astype(np.float32)
    for powers in rows:
        powers[rng.permutation(100)[:n_shared]] = 3 + 2 * ULP * rng.integers(0, 4, n_shared)
    k = n_shared + 2
    np.testing.assert_array_equal(quick_places_of(rows, k, "maxima"), sorted_places(rows, k))


@pytest.mark.parametrize("n_tied", [1, 4, 5, 6, 40])
@pytest.mark.parametrize("step", [0, ULP])
def test_a_boundary_of_equal_or_nearly_equal_powers_is_cut_as_by_a_sort(n_tied, step):
    rng = np.random.default_rng(n_tied)
    power = rng.uniform(0, 0.5, (CPU.tile_rows, 129))
    for row in power:
        row[rng.permutation(129)[: n_tied + 3]] = np.append(1 + np.arange(n_tied) * step, [5, 6, 7])
    for k in (1, 4, 8):
        assert_places_are_sorted(power.astype(np.float32), k)


@pytest.mark.parametrize("n_rows", [0, 1, 31, 32, 96])
def test_rows_are_selected_each_on_its_own(n_rows):
    power = kinds_of_rows(n_rows, 33) if n_rows else np.zeros((0, 33), np.float32)
    assert_places_are_sorted(power, 5, quick_places_of)


@each_selection
@pytest.mark.parametrize("k", [1, 9, 12])
def test_peaks_are_the_places_with_their_powers_and_zeros_beyond_the_bins(selection, k):
    power = kinds_of_rows(14, 9)
    places = sorted_places(power, k)
    peaks = np.asarray(quick_peaks_of(power, k, selection))
    expected = np.zeros((14, k, 2), np.float32)
    expected[:, :9, 0], expected[:, :9, 1] = places, np.take_along_axis(power, places, 1)
    np.testing.assert_array_equal(peaks, expected)
    numbers = np.arange(9) * 3 + 1
    named = np.asarray(quickly(lambda power: selected_peaks(power, k, selection, numbers))(power))
    np.testing.assert_array_equal(named[:, :9, 0], numbers[places])
    np.testing.assert_array_equal(named[..., 1], expected[..., 1])


# Eagerly, maxima compile their every step.
@pytest.mark.parametrize("selection", ["top_k", pytest.param("maxima", marks=pytest.mark.slow)])
def test_jit_equals_eager(selection):
    power = kinds_of_rows(3, 20)
    np.testing.assert_array_equal(top_places(jnp.asarray(power), 4, selection), sorted_places(power, 4))


@each_selection
@pytest.mark.parametrize(("n_rows", "axis"), [(3, 1), (32, 0)])
def test_vmap_equals_a_loop(selection, n_rows, axis):
    power = np.stack([kinds_of_rows(n_rows, 40, seed) for seed in range(3)])
    run = jax.vmap(functools.partial(top_places, k=6, selection=selection), in_axes=axis)
    together = quickly(run)(np.moveaxis(power, 0, axis))
    np.testing.assert_array_equal(together, sorted_places(power, 6))


@each_selection
def test_the_gradient_of_the_powers_is_one_at_the_peaks_and_none_elsewhere(selection):
    power = jnp.asarray(np.square(np.random.default_rng(0).standard_normal((4, 33))).astype(np.float32))
    weight = jnp.arange(1.0, 6.0, dtype=jnp.float32)

    def total(power):
        return jnp.sum(selected_peaks(power, 5, selection)[..., 1] * weight[None])

    expected = np.zeros((4, 33))
    np.put_along_axis(expected, sorted_places(power, 5), np.arange(1.0, 6.0)[None], 1)
    np.testing.assert_array_equal(quickly(jax.grad(total))(power), expected)
    tangent = quickly(lambda power: jax.jvp(total, (power,), (jnp.ones_like(power),))[1])(power)
    np.testing.assert_allclose(tangent, 4 * weight.sum())


def test_maxima_are_the_default_on_cpus_while_keys_tell_bins_apart():
    assert [default_selection(64, bins, "cpu") for bins in (1, CPU.most_bins_maxima, CPU.most_bins_maxima + 1)] == [
        "maxima",
        "maxima",
        "top_k",
    ]
    assert {default_selection(64, bins, platform) for bins in (1, 9999) for platform in ("gpu", "tpu")} == {"top_k"}


@pytest.mark.parametrize("has_x64", [True, False])
def test_the_selection_is_the_same_in_single_and_double_precision_mode(has_x64):
    power = kinds_of_rows(33, 65)
    with jax.enable_x64(has_x64):
        assert_places_are_sorted(power, 9, quick_places_of)
        assert quick_peaks_of(power, 70, "maxima").dtype == np.float32


def test_few_rows_take_the_heap():
    assert [default_selection(rows, 129, "cpu") for rows in (1, CPU.most_rows_top_k, CPU.most_rows_top_k + 1)] == [
        "top_k",
        "top_k",
        "maxima",
    ]
