"""The file of a learned FFT: exact in single precision, whole or not there, and refused in one line."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlxjax as rx

MEND = "train one with train_learned_fft and save_learned_fft"


def random_model(n_fft=16, seed=0):
    rng, exact = np.random.default_rng(seed), rx.learned.LearnedFft.exact(n_fft)
    return rx.learned.LearnedFft(
        rng.normal(0, 10.0 ** rng.integers(-30, 30, exact.twiddles.shape)).astype(np.float32),
        rng.random(exact.gates.shape, np.float32),
        rng.normal(size=exact.mask.shape).astype(np.float32),
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.json"


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("learned") / "model.json"
    rx.learned.save_learned_fft(random_model(), path, note="a test")
    return json.loads(path.read_text())


def assert_same(found, expected):
    for name in ("twiddles", "gates", "mask"):
        leaf = getattr(found, name)
        assert leaf.dtype == np.float32
        np.testing.assert_array_equal(leaf.view(np.int32), getattr(expected, name).view(np.int32))


def test_what_is_saved_is_what_is_loaded_bit_by_bit(path):
    extreme = np.array([0.0, -0.0, 1e-45, -1.1754944e-38, 3.4028235e38, 0.1, 1 / 3, 16777217.0], np.float32)
    extremes = dataclasses.replace(random_model(), twiddles=np.resize(extreme, (4, 8, 2)))
    for model in (random_model(2), random_model(16), random_model(256), extremes):
        for leaves in (np.asarray, jnp.asarray, functools.partial(np.asarray, dtype=np.float64)):
            rx.learned.save_learned_fft(jax.tree.map(leaves, model), path, note="steps 300\nseed 4")
            found, first = rx.learned.load_learned_fft(str(path)), path.read_bytes()
            assert_same(found, model)
            rx.learned.save_learned_fft(found, str(path), note="steps 300\nseed 4")
            assert path.read_bytes() == first
    rx.learned.save_learned_fft(model, path.parent / "new" / path.name)
    assert_same(rx.learned.load_learned_fft(path.parent / "new" / path.name), model)


def assert_refused(text, path, *said):
    path.write_text(text)
    with pytest.raises(rx.learned.LearnedFftFileError) as caught:
        rx.learned.load_learned_fft(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600, "one line that a person can read"
    assert message.startswith(f"{path}: ")
    assert all(part in message for part in said), message
    assert path.read_text() == text


def changed(content, **fields):
    """Return the text of a file with fields replaced, or left out where the value is `...`."""
    fields = {**content, **fields}
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


def test_a_model_that_was_edited_is_taken_with_a_warning(content, path):
    path.write_text(json.dumps({**content, "mask": [0.125] * len(content["mask"])}))
    with pytest.warns(UserWarning, match="digest differs from that of the content"):
        assert np.all(rx.learned.load_learned_fft(path).mask == 0.125)


def test_what_is_no_model_is_refused_in_a_line_with_the_field_and_left_as_it_is(content, path):
    for text in ("null", "not JSON", "{}", json.dumps(content)[:-100]):
        assert_refused(text, path, MEND)
    other = {name: getattr(rx.learned.LearnedFft.exact(32), name).tolist() for name in ("gates", "mask")}
    gates, twiddles = content["gates"], content["twiddles"]
    for field, value, said in [
        ("schema_version", 2, "install a newer rlxjax"),
        *((name, value, MEND) for name, value in {"kind": "calibration", "surprise": 1, "note": None}.items()),
        *(("n_fft", 48, "16"), ("n_fft", 16.5, MEND), ("active_gates", -1, MEND), ("total_gates", 0, "say 32, got 0")),
        *(("gates", own, MEND) for own in ([], 1.0, [[1.5, *gates[0][1:]], *gates[1:]], [gates[0][:-1], *gates[1:]])),
        *(("mask", [1.0] * 8 + [last], MEND) for last in (None, float("nan"), float("inf"), "1", 1e300)),
        ("twiddles", [[[1.0, 0.0, 0.0], *twiddles[0][1:]], *twiddles[1:]], MEND),
        *((field, value, "expected shape") for field, value in other.items()),
    ]:
        assert_refused(changed(content, **{field: value}), path, field, said)
    for name in content.keys() - {"digest"}:
        assert_refused(changed(content, **{name: ...}), path, name, MEND)
    path.write_text("the old file")
    for model, said in (
        (dataclasses.replace(random_model(), mask=np.full(9, np.nan)), "mask: expected"),
        (None, "model:"),
    ):
        with pytest.raises(ValueError, match=said):
            rx.learned.save_learned_fft(model, path)
        assert path.read_text() == "the old file"


def test_a_model_for_another_length_is_refused(path):
    rx.learned.save_learned_fft(random_model(), path)
    before = path.read_bytes()
    with pytest.raises(rx.learned.LearnedFftFileError, match="n_fft: expected a model for n_fft 256, got one for 16"):
        rx.learned.load_learned_fft(path, 256)
    with pytest.raises(ValueError, match="n_fft: expected an integer"):
        rx.learned.load_learned_fft(path, "256")
    assert path.read_bytes() == before
    assert rx.learned.load_learned_fft(path, np.int64(16)).n_fft == 16
