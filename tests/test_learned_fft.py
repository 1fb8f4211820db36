"""The learned FFT against NumPy's transform and a loop over its butterflies; its file, exact in single precision."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import FLOAT32_RTOL, FLOAT64_RTOL, assert_gradient_is_the_finite_difference

from rlxjax.learned import LearnedFft, LearnedFftFileError, learned_spectrum, load_learned_fft, save_learned_fft

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


def assert_near(actual, expected, rtol=FLOAT64_RTOL):
    assert actual.shape == expected.shape
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert np.all(np.abs(actual - expected) <= rtol * np.abs(expected).max())


def test_the_exact_model_is_the_real_transform_and_gates_mix_as_the_butterflies_say():
    for n_fft, (dtype, rtol) in itertools.product(SIZES, PRECISIONS):
        segments, exact = noise(3, n_fft, dtype=dtype), LearnedFft.exact(n_fft)
        spectrum = spectrum_of(exact, segments)
        assert spectrum.dtype == np.result_type(dtype, np.complex64)
        assert_near(spectrum, np.fft.rfft(segments.astype(np.float64)), rtol)
        for hard in (False, True):
            model = random_model(n_fft, hard=hard)
            expected = np.stack([slow_spectrum(model, segment) for segment in segments])
            assert_near(spectrum_of(model, segments), expected, 10 * rtol)
            assert (model.n_fft, model.n_bins) == (n_fft, n_fft // 2 + 1)
            assert model.total_gates == model.stages * n_fft // 2 == exact.active_gates
            assert model.active_gates == sum(gate >= 0.5 for gate in model.gates.flat)
        # Without gates a bin is one sample, in bit-reversed order.
        order = [int(format(place, f"0{exact.stages}b")[::-1], 2) for place in range(exact.n_bins)]
        rows = np.tile(np.arange(n_fft, dtype=dtype), (3, 1))
        found = spectrum_of(dataclasses.replace(exact, gates=np.zeros_like(exact.gates)), rows)
        np.testing.assert_array_equal(found, [order] * 3)
    # Without its last stages, the first bins are the transform of decimated samples.
    gates = exact.gates.copy()
    for last in (1, 2):
        gates[-last:] = 0
        spectrum = spectrum_of(dataclasses.replace(exact, gates=gates), noise(3, 64))
        assert_near(spectrum[:, : 64 >> last], np.fft.fft(noise(3, 64)[:, :: 2**last]))


def test_leading_axes_are_rows_and_integers_become_float32():
    models, segments = [random_model(8, seed) for seed in range(3)], noise(2, 3, 8)
    for row, spectrum in zip(segments.reshape(6, 8), spectrum_of(models[0], segments).reshape(6, 5), strict=True):
        assert_near(learned_spectrum(models[0], row), spectrum)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *models)
    for model, spectrum in zip(models, jax.vmap(spectrum_of, (0, None))(stacked, segments), strict=True):
        assert_near(spectrum, spectrum_of(model, segments))
    assert spectrum_of(model, np.arange(8)).dtype == np.complex64
    assert spectrum_of(model, np.zeros((0, 8))).shape == (0, 5)


def test_gradients_of_all_leaves_and_of_the_samples_are_the_finite_differences():
    weights = noise(5, seed=2)

    @jax.jit
    @jax.vmap
    def loss(leaves):
        spectrum = spectrum_of(LearnedFft(*leaves[:3]), leaves[3])
        return jnp.sum(weights * jnp.log(1 + jnp.abs(spectrum) ** 2))

    models = [random_model(8, seed) for seed in range(4)]
    leaves = [np.stack(leaf) for leaf in zip(*(jax.tree.leaves(model) for model in models), strict=True)]
    assert_gradient_is_the_finite_difference(loss, [*leaves, noise(4, 8)], scale=np.full(4, 100.0))


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
        assert_near(spectrum_of(hard, segments), spectrum_of(rounded, segments))
        assert set(np.unique(hard.gates)) <= {0.0, 1.0}
        assert hard.hardened().active_gates == hard.active_gates
        assert dataclasses.replace(model, mask=np.zeros(9)).hardened().active_gates == 0
        # Every kept gate matters: with generic twiddles, the spectrum depends on it.
        depends = np.any(np.asarray(slope(hard.gates, hard)) != 0, axis=(0, 1))
        np.testing.assert_array_equal(depends & (rounded.gates > 0), hard.gates > 0)


def changed_leaf(name, index, value):
    leaf = getattr(LearnedFft.exact(8), name).copy()
    leaf[index] = value
    return {name: leaf}


REFUSED_LEAVES = (
    (changed_leaf("gates", (1, 2), 1.5), "gates: expected numbers from 0 to 1, got 1.5 at stage 1, butterfly 2"),
    (changed_leaf("gates", (2, 3), np.nan), "gates: expected .* got nan"),
    (changed_leaf("twiddles", (0, 0, 1), np.inf), "twiddles: expected finite numbers"),
    (changed_leaf("mask", 4, np.nan), "mask: expected finite numbers"),
    ({"gates": np.ones((3, 8))}, r"gates: expected shape .* got \(3, 8\)"),
    ({"twiddles": np.ones((3, 4))}, r"twiddles: expected shape \(3, 4, 2\)"),
    ({"mask": np.ones(8)}, r"mask: expected shape \(5,\) .* got \(8,\)"),
    ({"mask": np.ones(5, complex)}, "mask: expected an array of real numbers, got dtype complex128"),
)


def test_what_is_no_model_is_refused_with_a_sentence():
    for n_fft in (0, 1, 3, 6, 1000, -4, 2.5, "8"):
        with pytest.raises(ValueError, match="n_fft: expected a(n integer|.* power of two of at least 2)"):
            LearnedFft.exact(n_fft)
    exact = LearnedFft.exact(8)
    leaves = {name: getattr(exact, name) for name in ("twiddles", "gates", "mask")}
    for change, sentence in REFUSED_LEAVES:
        with pytest.raises(ValueError, match=sentence):
            LearnedFft.checked(**{**leaves, **change})
    assert jax.tree.all(jax.tree.map(np.array_equal, LearnedFft.checked(**leaves), exact))
    with pytest.raises(ValueError, match=r"segments: expected 8 samples each, got shape \(2, 16\)"):
        spectrum_of(exact, np.ones((2, 16)))


# The file.

MEND = "train a model with train_learned_fft, and write the model with save_learned_fft"


def saved_model(n_fft=16):
    """Return a model in single precision, its twiddles of any size."""
    rng, exact = np.random.default_rng(0), random_model(n_fft)
    twiddles = rng.normal(0, 10.0 ** rng.integers(-30, 30, exact.twiddles.shape))
    return jax.tree.map(np.float32, dataclasses.replace(exact, twiddles=twiddles))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "model.json"


def test_what_is_saved_is_what_is_loaded_bit_by_bit(path):
    extreme = np.array([0.0, -0.0, 1e-45, -1.1754944e-38, 3.4028235e38, 0.1, 1 / 3, 16777217.0], np.float32)
    extremes = dataclasses.replace(saved_model(), twiddles=np.resize(extreme, (4, 8, 2)))
    for model in (saved_model(2), saved_model(), saved_model(256), extremes):
        for leaves in (np.asarray, jnp.asarray, functools.partial(np.asarray, dtype=np.float64)):
            save_learned_fft(jax.tree.map(leaves, model), path, note="steps 300\nseed 4")
            found, first = load_learned_fft(str(path)), path.read_bytes()
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
                np.testing.assert_array_equal(one.view(np.int32), other.view(np.int32))
            save_learned_fft(found, str(path), note="steps 300\nseed 4")
            assert path.read_bytes() == first
    assert load_learned_fft(path, np.int64(16)).n_fft == 16
    for n_fft, error, said in (
        (256, LearnedFftFileError, "n_fft: expected 256, got 16"),
        ("256", ValueError, "n_fft: expected an integer"),
    ):
        with pytest.raises(error, match=said):
            load_learned_fft(path, n_fft)
    assert path.read_bytes() == first


def test_what_is_no_model_is_refused_in_a_line_with_the_field_and_left_as_it_is(path):
    save_learned_fft(saved_model(), path, note="a test")
    content = json.loads(path.read_text())
    gates = content["gates"]
    cases = [(json.dumps(content)[:-100], MEND)]  # damage of other kinds has tests of its own
    cases += [
        (json.dumps({**content, field: value}), field, said)
        for field, value, said in [
            ("schema_version", 2, "install a newer rlxjax"),
            ("kind", "calibration", MEND),
            ("n_fft", 48, "16"),
            ("total_gates", 0, "got 0"),
            ("gates", [[1.5, *gates[0][1:]], *gates[1:]], MEND),
            ("gates", [gates[0][1:], *gates[1:]], MEND),
            ("mask", [1.0] * 8 + [float("nan")], MEND),
            ("mask", [1.0] * 17, "expected shape"),
        ]
    ]
    for text, *said in cases:
        path.write_text(text)
        with pytest.raises(LearnedFftFileError) as caught:
            load_learned_fft(path)
        message = str(caught.value)
        assert "\n" not in message
        assert len(message) < 600, "one line that a person can read"
        assert message.startswith(f"{path}: ")
        assert all(part in message for part in said), message
        assert path.read_text() == text
    for model, sentence in (
        (dataclasses.replace(saved_model(), mask=np.full(9, np.nan)), "mask: exp"),
        (None, "model:"),
    ):
        with pytest.raises(ValueError, match=sentence):
            save_learned_fft(model, path)
        assert path.read_text() == text
    path.write_text(json.dumps({**content, "mask": [0.125] * len(content["mask"])}))
    with pytest.warns(UserWarning, match="the digest does not match the content"):
        assert np.all(load_learned_fft(path).mask == 0.125)
