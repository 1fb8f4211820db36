"""The host's selection of peaks and the two forms of the device's: all are the sort of the rule, to the bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rlxjax.welch import SELECTIONS, WelchPeakParams, _workload, default_selection, schedule, selected_peaks

CPU = schedule("cpu")

each_selection = pytest.mark.parametrize("selection", SELECTIONS)


def top_places(power, k, selection):
    return SELECTIONS[selection](power, k)


places_of = jax.jit(top_places, static_argnames=("k", "selection"))
peaks_of = jax.jit(selected_peaks, static_argnames=("k", "selection"))


def sorted_places(power, k):
    """Return the places of the k largest powers of each row by a sort of (is NaN, -power, place)."""
    power = np.asarray(power)
    bins = np.broadcast_to(np.arange(power.shape[-1]), power.shape)
    return np.lexsort((bins, np.where(np.isnan(power), 0, -power), np.isnan(power)), axis=-1)[..., :k]


def assert_places_are_sorted(power, k):
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


def test_places_are_a_sort_for_every_number_of_bins_peaks_and_rows():
    shapes = [(21, 16, 5), (14, 33, 17), (14, 33, 33), (14, 1, 1), (14, 2, 2), (14, 2049, 3), (1, 33, 5), (95, 33, 5)]
    for n_rows, n_bins, k in shapes:
        assert_places_are_sorted(kinds_of_rows(n_rows, n_bins), k)
    assert_places_are_sorted(np.zeros((0, 33), np.float32), 5)


@settings(max_examples=60)
@given(
    arrays(np.complex64, (2, 2, 9), elements=st.sampled_from([0, 1, 2, 3, np.inf, np.nan])),
    st.sampled_from([1, 4, 8, 9, 12]),
)
def test_host_and_device_select_the_same_bins_of_the_same_spectrum(spectrum, k):
    power = (np.square(spectrum.real) + np.square(spectrum.imag)).sum(1) / 2
    power[:, 1:-1] *= 2
    places, expected = sorted_places(power, k), np.zeros((2, k, 2), np.float32)
    expected[:, :9, 0], expected[:, :9, 1] = places, np.take_along_axis(power, places, 1)
    np.testing.assert_array_equal(_workload.spectrum_peaks(spectrum, WelchPeakParams.fast(16, k)), expected)
    for selection in SELECTIONS:
        np.testing.assert_array_equal(peaks_of(power, k, selection), expected)


@each_selection
def test_peaks_are_the_places_with_their_powers_zeros_beyond_the_bins_and_the_numbers_of_bins(selection):
    power, numbers = kinds_of_rows(14, 9), np.arange(9) * 3 + 1
    for k in (1, 9, 12):
        places, expected = sorted_places(power, k), np.zeros((14, k, 2), np.float32)
        expected[:, :9, 0], expected[:, :9, 1] = places, np.take_along_axis(power, places, 1)
        np.testing.assert_array_equal(peaks_of(power, k, selection), expected)
        named = np.asarray(jax.jit(lambda power, k=k: selected_peaks(power, k, selection, numbers))(power))
        np.testing.assert_array_equal(named[:, :9, 0], numbers[places])
        np.testing.assert_array_equal(named[..., 1], expected[..., 1])


@each_selection
@pytest.mark.parametrize(("n_rows", "axis"), [(3, 1), (32, 0)])
def test_vmap_equals_a_loop(selection, n_rows, axis):
    power = np.stack([kinds_of_rows(n_rows, 40, seed) for seed in range(3)])
    run = jax.vmap(functools.partial(top_places, k=6, selection=selection), in_axes=axis)
    together = jax.jit(run)(np.moveaxis(power, 0, axis))
    np.testing.assert_array_equal(together, sorted_places(power, 6))


@each_selection
def test_the_gradient_of_the_powers_is_one_at_the_peaks_and_none_elsewhere(selection):
    power = jnp.asarray(np.square(np.random.default_rng(0).standard_normal((4, 33))).astype(np.float32))
    weight = jnp.arange(1.0, 6.0, dtype=jnp.float32)

    def total(power):
        return jnp.sum(selected_peaks(power, 5, selection)[..., 1] * weight[None])

    expected = np.zeros((4, 33))
    np.put_along_axis(expected, sorted_places(power, 5), np.arange(1.0, 6.0)[None], 1)
    np.testing.assert_array_equal(jax.jit(jax.grad(total))(power), expected)
    tangent = jax.jit(lambda power: jax.jvp(total, (power,), (jnp.ones_like(power),))[1])(power)
    np.testing.assert_allclose(tangent, 4 * weight.sum())


def test_maxima_are_the_default_of_many_rows_on_cpus_while_keys_tell_bins_apart():
    for rows, bins, expected in [
        (64, 1, "maxima"),
        (64, CPU.most_bins_maxima, "maxima"),
        (64, CPU.most_bins_maxima + 1, "top_k"),
        (CPU.most_rows_top_k, 129, "top_k"),
        (CPU.most_rows_top_k + 1, 129, "maxima"),
    ]:
        assert default_selection(rows, bins, "cpu") == expected
        assert {default_selection(rows, bins, platform) for platform in ("gpu", "tpu")} == {"top_k"}
