"""The learned FFT against NumPy's transform and against a loop over its butterflies."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import FLOAT32_RTOL, FLOAT64_RTOL, assert_gradient_is_the_finite_difference

from rlxjax.learned import LearnedFft, learned_spectrum

SIZES = [2, 16, 64]
PRECISIONS = [(np.float64, FLOAT64_RTOL), (np.float32, FLOAT32_RTOL)]

spectrum_of = jax.jit(learned_spectrum)


def noise(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def random_model(n_fft, seed=0, hard=False):
    rng, exact = np.random.default_rng(seed), LearnedFft.exact(n_fft)
    gates = rng.random(exact.gates.shape)
    mask = rng.standard_normal(exact.mask.shape) * (rng.random(exact.mask.shape) < 0.7)
    twiddles = exact.twiddles + 0.1 * rng.standard_normal(exact.twiddles.shape)
    return LearnedFft(twiddles, gates.round() if hard else gates, mask)


def slow_spectrum(model, segment):
    """Return the spectrum of one segment by the definition, butterfly after butterfly."""
    n_fft, bits = len(segment), len(model.gates)
    places = [complex(segment[int(format(place, f"0{bits}b")[::-1], 2)]) for place in range(n_fft)]
    for stage in range(bits):
        half = 2**stage
        for j in range(n_fft // 2):
            a = 2 * half * (j // half) + j % half
            gate, twiddle = model.gates[stage, j], complex(*model.twiddles[stage, j])
            low, high = places[a], places[a + half]
            places[a] = gate * (low + twiddle * high) + (1 - gate) * low
            places[a + half] = gate * (low - twiddle * high) + (1 - gate) * high
    return np.array(places[: n_fft // 2 + 1]) * model.mask


def assert_near(actual, expected, rtol):
    assert actual.shape == expected.shape
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert np.all(np.abs(actual - expected) <= rtol * np.abs(expected).max())


def test_the_exact_model_is_the_real_transform_and_gates_mix_as_the_butterflies_say():
    for n_fft, (dtype, rtol) in itertools.product(SIZES, PRECISIONS):
        segments = noise(3, n_fft, dtype=dtype)
        exact, stages = LearnedFft.exact(n_fft), int(np.log2(n_fft))
        spectrum = spectrum_of(exact, segments)
        assert spectrum.dtype == np.result_type(dtype, np.complex64)
        assert_near(spectrum, np.fft.rfft(segments.astype(np.float64)), rtol)
        for hard in (False, True):
            model = random_model(n_fft, hard=hard)
            expected = np.stack([slow_spectrum(model, segment) for segment in segments])
            assert_near(spectrum_of(model, segments), expected, 10 * rtol)
            assert (model.n_fft, model.stages, model.n_bins) == (n_fft, stages, n_fft // 2 + 1)
            assert model.total_gates == stages * n_fft // 2 == exact.active_gates
            assert model.active_gates == sum(gate >= 0.5 for gate in model.gates.flat)
            assert type(model.active_gates) is int


def test_without_gates_a_bin_is_one_sample_in_bit_reversed_order():
    for n_fft in SIZES:
        model = LearnedFft.exact(n_fft)
        model = dataclasses.replace(model, gates=np.zeros_like(model.gates))
        order = [int(format(place, f"0{model.stages}b")[::-1], 2) for place in range(model.n_bins)]
        rows = np.tile(np.arange(n_fft, dtype=float), (3, 1))
        np.testing.assert_array_equal(spectrum_of(model, rows), [order] * 3)


def test_leading_axes_are_rows_and_integers_become_float32():
    model, segments = random_model(16), noise(2, 3, 16)
    spectra = spectrum_of(model, segments)
    assert spectra.shape == (2, 3, 9)
    for rows, expected in zip(segments, spectra, strict=True):
        together = spectrum_of(model, rows)
        assert_near(together, expected, FLOAT64_RTOL)
        for row, spectrum in zip(rows, together, strict=True):
            assert_near(spectrum_of(model, row), spectrum, FLOAT64_RTOL)
    assert spectrum_of(model, np.arange(16)).dtype == np.complex64
    assert spectrum_of(model, np.zeros((0, 16))).shape == (0, 9)


def test_gradients_of_all_leaves_and_of_the_samples_are_the_finite_differences():
    weights = noise(9, seed=2)

    @jax.jit
    def loss(leaves):
        def one(leaves):
            spectrum = spectrum_of(LearnedFft(*leaves[:3]), leaves[3])
            return jnp.sum(weights * jnp.log(1 + jnp.abs(spectrum) ** 2))

        return jax.vmap(one)(leaves)

    models = [random_model(16, seed) for seed in range(4)]
    leaves = [np.stack(leaf) for leaf in zip(*(jax.tree.leaves(model) for model in models), strict=True)]
    assert_gradient_is_the_finite_difference(loss, [*leaves, noise(4, 16)], scale=np.full(4, 100.0))


def test_jit_equals_eager_vmap_over_models_a_loop_and_new_values_do_not_retrace():
    traces = []

    @jax.jit
    def compiled(model, segments):
        traces.append(1)
        return learned_spectrum(model, segments)

    for seed in range(3):
        model, segments = random_model(8, seed), noise(3, 8, seed=seed)
        assert_near(compiled(model, segments), learned_spectrum(model, segments), FLOAT64_RTOL)
    assert len(traces) == 1
    models, segments = [random_model(8, seed) for seed in range(3)], noise(3, 8)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *models)
    for model, spectrum in zip(models, jax.vmap(spectrum_of, (0, None))(stacked, segments), strict=True):
        assert_near(spectrum, spectrum_of(model, segments), FLOAT64_RTOL)


def test_hardening_keeps_the_spectrum_of_hard_gates_and_drops_only_what_no_bin_needs():
    segments = noise(3, 16)

    @jax.jit
    @jax.jacobian
    def slope(gates, hard):
        return jnp.abs(learned_spectrum(dataclasses.replace(hard, gates=gates), segments)) ** 2

    for seed in range(3):
        model = random_model(16, seed)
        hard = model.hardened()
        rounded = dataclasses.replace(model, gates=(model.gates >= 0.5).astype(float))
        assert_near(spectrum_of(hard, segments), spectrum_of(rounded, segments), FLOAT64_RTOL)
        assert set(np.unique(hard.gates)) <= {0.0, 1.0}
        assert np.all(hard.gates <= rounded.gates)
        assert hard.hardened().active_gates == hard.active_gates
        assert dataclasses.replace(model, mask=np.zeros(9)).hardened().active_gates == 0
        # Every kept gate matters: with generic twiddles, the spectrum depends on it.
        depends = np.any(np.asarray(slope(hard.gates, hard)) != 0, axis=(0, 1))
        np.testing.assert_array_equal(depends & (rounded.gates > 0), hard.gates > 0)


def changed(name, index, value):
    leaf = getattr(LearnedFft.exact(8), name).copy()
    leaf[index] = value
    return {name: leaf}


REFUSED_LEAVES = (
    (changed("gates", (1, 2), 1.5), "gates: expected numbers from 0 to 1, got 1.5 at stage 1, butterfly 2"),
    (changed("gates", (0, 0), -0.1), "gates: expected numbers from 0 to 1, got -0.1 at stage 0"),
    (changed("gates", (2, 3), np.nan), "gates: expected .* got nan"),
    (changed("twiddles", (0, 0, 1), np.inf), "twiddles: expected finite numbers"),
    (changed("mask", 4, np.nan), "mask: expected finite numbers"),
    ({"gates": np.ones((3, 8))}, r"gates: expected shape .* got \(3, 8\)"),
    ({"gates": np.ones(4)}, r"gates: expected shape .* got \(4,\)"),
    ({"twiddles": np.ones((3, 4))}, r"twiddles: expected shape \(3, 4, 2\)"),
    ({"mask": np.ones(8)}, r"mask: expected shape \(5,\) .* got \(8,\)"),
    ({"mask": ["a"] * 5}, "mask: expected an array of real numbers"),
    ({"mask": np.ones(5, complex)}, "mask: expected an array of real numbers, got dtype complex128"),
)


def test_what_is_no_model_is_refused_with_a_sentence():
    for n_fft in (0, 1, 3, 6, 1000, -4, 2.5, "8"):
        with pytest.raises(ValueError, match="n_fft: expected a(n integer|.* power of two of at least 2)"):
            LearnedFft.exact(n_fft)
    exact = LearnedFft.exact(8)
    leaves = {"twiddles": exact.twiddles, "gates": exact.gates, "mask": exact.mask}
    for change, sentence in REFUSED_LEAVES:
        with pytest.raises(ValueError, match=sentence):
            LearnedFft.checked(**{**leaves, **change})
    assert jax.tree.all(jax.tree.map(np.array_equal, LearnedFft.checked(**leaves), exact))
    with pytest.raises(ValueError, match=r"segments: expected 8 samples each, got shape \(2, 16\)"):
        spectrum_of(exact, np.ones((2, 16)))


def test_without_its_last_stages_the_first_bins_are_the_transform_of_decimated_samples():
    exact, segments = LearnedFft.exact(64), noise(3, 64)
    for last in (1, 2):
        gates = exact.gates.copy()
        gates[-last:] = 0
        spectrum = spectrum_of(dataclasses.replace(exact, gates=gates), segments)
        n_kept = 64 >> last
        assert_near(spectrum[:, :n_kept], np.fft.fft(segments[:, :: 2**last]), FLOAT64_RTOL)
