"""The file of a learned FFT: exact in single precision, whole or not there, and refused in one line."""

import dataclasses
import functools
import json
import os
import warnings
from pathlib import Path

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
    as_float64 = functools.partial(np.asarray, dtype=np.float64)
    for model in (random_model(2), random_model(16), random_model(256), extremes):
        for as_path, leaves in ((str, np.asarray), (Path, jnp.asarray), (Path, as_float64)):
            rx.learned.save_learned_fft(jax.tree.map(leaves, model), as_path(path), note="steps 300\nseed 4")
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = rx.learned.load_learned_fft(as_path(path))
            assert_same(found, model)
            assert (found.n_fft, found.active_gates) == (model.n_fft, model.active_gates)
            first = path.read_bytes()
            rx.learned.save_learned_fft(rx.learned.load_learned_fft(path, model.n_fft), path, note="steps 300\nseed 4")
            assert path.read_bytes() == first
        said = {"kind": "learned_fft", "n_fft": model.n_fft, "active_gates": model.active_gates}
        assert said.items() <= json.loads(first).items()
    rx.learned.save_learned_fft(model, path.parent / "new" / path.name)
    assert_same(rx.learned.load_learned_fft(path.parent / "new" / path.name), model)


def test_a_model_that_is_none_is_not_saved(path):
    for leaf, value, said in [
        ("gates", 1.5, "gates: expected numbers from"),
        ("mask", np.nan, "mask: expected finite"),
    ]:
        path.write_text("the old file")
        model = random_model()
        values = getattr(model, leaf).copy()
        values.flat[3] = value
        with pytest.raises(ValueError, match=said):
            rx.learned.save_learned_fft(dataclasses.replace(model, **{leaf: values}), path)
        assert [p.name for p in path.parent.iterdir()] == [path.name]
        assert path.read_text() == "the old file"
    path.unlink()
    for model in ("model.json", None):
        with pytest.raises(ValueError, match="model: expected a LearnedFft"):
            rx.learned.save_learned_fft(model, path)
        assert not path.exists()


def test_a_write_that_fails_leaves_the_old_file_whole_and_nothing_else(path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    for existed in (False, True):
        if existed:
            path.write_text("the old file")
        for step in ("replace", "fsync", *["chmod"] * existed):
            with monkeypatch.context() as broken:
                broken.setattr(os, step, fail)
                with pytest.raises(OSError, match="disk full"):
                    rx.learned.save_learned_fft(random_model(), path)
            assert [p.name for p in path.parent.iterdir()] == [path.name] * existed
            assert not existed or path.read_text() == "the old file"


def assert_refused(text, path, *said):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = path.read_bytes()
    with pytest.raises(rx.learned.LearnedFftFileError) as caught:
        rx.learned.load_learned_fft(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600, "one line that a person can read"
    assert message.startswith(f"{path}: ")
    assert all(part in message for part in said), message
    assert path.read_bytes() == before


def changed(content, **fields):
    """Return the text of a file with fields replaced, or left out where the value is `...`."""
    fields = {**content, **fields}
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


def test_a_model_that_was_edited_is_taken_with_a_warning(content, path):
    path.write_text(json.dumps({**content, "mask": [0.125] * len(content["mask"])}))
    with pytest.warns(UserWarning, match="digest differs from that of the content"):
        assert np.all(rx.learned.load_learned_fft(path).mask == 0.125)


def test_what_is_no_model_is_refused_and_left_as_it_is(content, path):
    for text in (b"\xff\xfe", "null", "not JSON", "[" * 100_000, "{}", '{"schema_version": ' + "9" * 5000 + "}"):
        assert_refused(text, path, MEND)
    text = json.dumps(content)
    for share in np.linspace(0, 0.999, 12):
        assert_refused(text[: int(share * len(text))], path, "truncated", "line ", MEND)
    path.unlink()
    for place, said in ((path, "no such file"), (path.parent, "expected a file, got a folder")):
        with pytest.raises(rx.learned.LearnedFftFileError, match=f"{place}: {said}.*; {MEND}"):
            rx.learned.load_learned_fft(place)
    assert not list(path.parent.iterdir())


def test_a_field_that_is_wrong_is_refused_by_name(content, path):
    for field, value, said in [
        ("schema_version", 2, "install a newer rlxjax"),
        *(("schema_version", version, MEND) for version in (0, True, "1")),
        *(
            (name, value, MEND)
            for name, value in {"kind": "calibration", "surprise": 1, "a\nb": 1, "note": None}.items()
        ),
        *(("n_fft", 48, "16"), ("n_fft", 32, "16"), ("n_fft", 16.5, MEND)),
        *(("active_gates", 1000, MEND), ("active_gates", -1, MEND), ("total_gates", 31, "32")),
        *(("twiddles", [], MEND), ("gates", 1.0, MEND), ("gates", [], MEND), ("mask", [[1.0]], MEND)),
        ("mask", [1.0] * 8, "(9,)"),
        *(("mask", [1.0] * 8 + [last], MEND) for last in (None, float("nan"), float("inf"), "1", True)),
    ]:
        assert_refused(changed(content, **{field: value}), path, " ".join(field.split()), said)
    for name in content.keys() - {"digest"}:
        assert_refused(changed(content, **{name: ...}), path, name, MEND)


def test_arrays_that_are_no_model_are_refused(content, path):
    gates, twiddles, mask = (content[name] for name in ("gates", "twiddles", "mask"))
    wrong = [{"gates": [*gates[:2], [*gates[2][:3], value, *gates[2][4:]], gates[3]]} for value in (1.5, -0.1, 1e300)]
    wrong += [{"gates": [[*gates[0][:7], value], *gates[1:]]} for value in (float("nan"), float("inf"), -float("inf"))]
    # Beyond single precision, ragged, and of lengths that do not agree.
    wrong += [{"twiddles": [[[1.0, 1e300], *twiddles[0][1:]], *twiddles[1:]]}, {"mask": [1e300, *mask[1:]]}]
    wrong += [{"gates": [gates[0][:-1], *gates[1:]]}, {"twiddles": [twiddles[0][:-1], *twiddles[1:]]}]
    wrong += [{"twiddles": [[[1.0, 0.0, 0.0], *twiddles[0][1:]], *twiddles[1:]]}]
    for change in wrong:
        assert_refused(changed(content, **change), path, *change, MEND)
    other = rx.learned.LearnedFft.exact(32)
    for field in ("twiddles", "gates", "mask"):
        assert_refused(changed(content, **{field: getattr(other, field).tolist()}), path, "expected shape", MEND)
    arrays = {"gates": np.ones((4, 6)).tolist(), "twiddles": np.ones((4, 6, 2)).tolist(), "mask": [1.0] * 7}
    assert_refused(changed(content, n_fft=12, active_gates=24, total_gates=24, **arrays), path, "gates", "(4, 6)", MEND)
    active = content["active_gates"]
    assert_refused(changed(content, active_gates=active + 1), path, f"active_gates: the arrays say {active}")
    assert_refused(changed(content, total_gates=0), path, "total_gates: the arrays say 32, got 0")


def test_a_model_for_another_length_is_refused(path):
    rx.learned.save_learned_fft(random_model(), path)
    before = path.read_bytes()
    with pytest.raises(rx.learned.LearnedFftFileError, match="n_fft: expected a model for n_fft 256, got one for 16"):
        rx.learned.load_learned_fft(path, 256)
    with pytest.raises(ValueError, match="n_fft: expected an integer"):
        rx.learned.load_learned_fft(path, "256")
    assert path.read_bytes() == before
    assert rx.learned.load_learned_fft(path, np.int64(16)).n_fft == 16
