"""The file of a learned FFT: exact in single precision, whole or not there, and refused in one line."""

import dataclasses
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlxjax as rx

MEND = "train one with train_learned_fft and save_learned_fft"


def random_model(n_fft=16, seed=0):
    rng, exact = np.random.default_rng(seed), rx.LearnedFft.exact(n_fft)
    return rx.LearnedFft(
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
    rx.save_learned_fft(random_model(), path, note="a test")
    return json.loads(path.read_text())


def assert_same(found, expected):
    for name in ("twiddles", "gates", "mask"):
        leaf = getattr(found, name)
        assert leaf.dtype == np.float32
        np.testing.assert_array_equal(leaf.view(np.int32), getattr(expected, name).view(np.int32))


def test_what_is_saved_is_what_is_loaded_bit_by_bit(path):
    for n_fft in [2, 16, 256]:
        for as_path in [str, Path]:
            model = random_model(n_fft)
            rx.save_learned_fft(model, as_path(path), note="steps 300\nseed 4")
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = rx.load_learned_fft(as_path(path))
            assert_same(found, model)
            assert (found.n_fft, found.active_gates) == (n_fft, model.active_gates)
            first = path.read_bytes()
            rx.save_learned_fft(rx.load_learned_fft(path, n_fft), path, note="steps 300\nseed 4")
            assert path.read_bytes() == first


def test_extreme_single_precision_numbers_come_back(path):
    numbers = np.array([0.0, -0.0, 1e-45, -1.1754944e-38, 3.4028235e38, 0.1, 1 / 3, 16777217.0], np.float32)
    model = random_model()
    model = dataclasses.replace(model, twiddles=np.resize(numbers, model.twiddles.shape))
    rx.save_learned_fft(model, path.parent / "new" / path.name)
    assert_same(rx.load_learned_fft(path.parent / "new" / path.name), model)


def test_leaves_of_double_precision_or_of_jax_are_kept_in_single_precision(path):
    for leaves in [lambda leaf: np.asarray(leaf, np.float64), jnp.asarray]:
        model = random_model()
        rx.save_learned_fft(jax.tree.map(leaves, model), path)
        assert_same(rx.load_learned_fft(path), model)


def test_a_loaded_model_runs_as_the_saved_one(path):
    model = jax.tree.map(np.float32, rx.LearnedFft.exact(64))
    rx.save_learned_fft(model, path)
    signal, params = np.random.default_rng(0).normal(size=(3, 96)), rx.WelchPeakParams.fast(64, 5)
    peaks = [rx.welch_peaks(signal, params, "learned", model=m) for m in (model, rx.load_learned_fft(path))]
    np.testing.assert_array_equal(*peaks)


def test_the_file_says_what_the_model_is(content):
    model = random_model()
    assert content["kind"] == "learned_fft"
    assert content["note"] == "a test"
    assert (content["n_fft"], content["active_gates"]) == (16, model.active_gates)
    assert content["total_gates"] == model.total_gates == 32


def test_a_model_that_is_none_is_not_saved(path):
    for leaf, value, said in [
        ("gates", 1.5, "gates: expected numbers from 0 to 1"),
        ("gates", -0.01, "gates: expected numbers from 0 to 1"),
        ("gates", np.nan, "gates: expected numbers from 0 to 1"),
        ("twiddles", np.inf, "twiddles: expected finite numbers"),
        ("mask", np.nan, "mask: expected finite numbers"),
    ]:
        path.write_text("the old file")
        model = random_model()
        values = getattr(model, leaf).copy()
        values.flat[3] = value
        with pytest.raises(ValueError, match=said):
            rx.save_learned_fft(dataclasses.replace(model, **{leaf: values}), path)
        assert [p.name for p in path.parent.iterdir()] == [path.name]
        assert path.read_text() == "the old file"


def test_a_write_that_fails_leaves_the_old_file_whole_and_nothing_else(path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    for existed in (False, True):
        if existed:
            path.write_text("the old file")
        for step in ("replace", "fsync", "chmod"):
            with monkeypatch.context() as broken:
                broken.setattr(os, step, fail)
                with pytest.raises(OSError, match="disk full"):
                    rx.save_learned_fft(random_model(), path)
            assert [p.name for p in path.parent.iterdir()] == [path.name] * existed
            assert not existed or path.read_text() == "the old file"


def test_the_new_file_replaces_the_old_in_one_step(path, monkeypatch):
    path.write_text("the old file")
    seen, replace = [], os.replace

    def watched(source, target):
        seen.append((path.read_text(), json.loads(Path(source).read_text())["n_fft"]))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    rx.save_learned_fft(random_model(), path)
    assert seen == [("the old file", 16)]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def assert_refused(text, path, *said):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = path.read_bytes()
    with pytest.raises(rx.LearnedFftFileError) as caught:
        rx.load_learned_fft(path)
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


def test_a_model_that_was_changed_is_refused_but_where_that_is_asked(content, path):
    path.write_text(json.dumps({**content, "mask": [0.125] * len(content["mask"])}))
    with pytest.raises(rx.LearnedFftFileError, match="digest differs from that of the content.*unsealed=True"):
        rx.load_learned_fft(path)
    assert np.all(rx.load_learned_fft(path, unsealed=True).mask == 0.125)


def test_a_truncated_file_is_refused(content, path):
    for share in np.linspace(0, 0.999, 12):
        text = json.dumps(content)
        assert_refused(text[: int(share * len(text))], path, "truncated", "line ", MEND)


def test_what_is_no_model_is_refused(path):
    for text in [
        b"\xff\xfe",
        "[]",
        "1",
        "null",
        "not JSON",
        '{"schema_version": ' + "9" * 5000 + "}",
        "[" * 100_000,
        "{}",
    ]:
        assert_refused(text, path, MEND)


def test_a_missing_file_or_a_folder_is_refused(path):
    for place, said in ((path, "no such file"), (path.parent, "expected a file, got a folder")):
        with pytest.raises(rx.LearnedFftFileError, match=f"{place}: {said}.*; {MEND}"):
            rx.load_learned_fft(place)
    assert not list(path.parent.iterdir())


def test_a_missing_field_is_refused_by_name(content, path):
    for name in [
        "schema_version",
        "kind",
        "n_fft",
        "active_gates",
        "total_gates",
        "note",
        "twiddles",
        "gates",
        "mask",
    ]:
        assert_refused(changed(content, **{name: ...}), path, name, MEND)


def test_a_field_that_is_wrong_is_refused_by_name(content, path):
    for field, value, said in [
        ("schema_version", 2, "install a newer rlxjax"),
        ("schema_version", 0, MEND),
        ("schema_version", True, MEND),
        ("schema_version", "1", MEND),
        ("kind", "calibration", MEND),
        ("surprise", 1, MEND),
        ("a\nb", 1, MEND),
        ("note", None, MEND),
        ("n_fft", 48, "16"),
        ("n_fft", 32, "16"),
        ("n_fft", 16.5, MEND),
        ("active_gates", 1000, MEND),
        ("active_gates", -1, MEND),
        ("total_gates", 31, "32"),
        ("twiddles", [], MEND),
        ("gates", 1.0, MEND),
        ("gates", [], MEND),
        ("mask", [[1.0]], MEND),
        ("mask", [1.0] * 8, "(9,)"),
        ("mask", [1.0] * 8 + [None], MEND),
        ("mask", [1.0] * 8 + [float("nan")], MEND),
        ("mask", [1.0] * 8 + [float("inf")], MEND),
        ("mask", [1.0] * 8 + ["1"], MEND),
        ("mask", [1.0] * 8 + [True], MEND),
    ]:
        assert_refused(changed(content, **{field: value}), path, " ".join(field.split()), said)


def test_a_gate_outside_0_to_1_is_refused(content, path):
    for value in [1.5, -0.1, float("nan"), float("inf"), -float("inf"), 1e300]:
        gates = json.loads(json.dumps(content["gates"]))
        gates[2][3] = value
        assert_refused(changed(content, gates=gates), path, "gates", MEND)


def test_a_number_beyond_single_precision_is_refused(content, path):
    for field in ["twiddles", "mask"]:
        values = json.loads(json.dumps(content[field]))
        (values[0][0] if field == "twiddles" else values)[1] = 1e300
        assert_refused(changed(content, **{field: values}), path, field, MEND)


def test_ragged_lists_are_refused(content, path):
    gates, twiddles = content["gates"], content["twiddles"]
    assert_refused(changed(content, gates=[gates[0][:-1], *gates[1:]]), path, "gates", MEND)
    assert_refused(changed(content, twiddles=[twiddles[0][:-1], *twiddles[1:]]), path, "twiddles", MEND)
    ragged = [[[1.0, 0.0, 0.0], *twiddles[0][1:]], *twiddles[1:]]
    assert_refused(changed(content, twiddles=ragged), path, "twiddles", MEND)


def test_arrays_of_a_length_that_is_no_power_of_two_are_refused(content, path):
    arrays = {"gates": np.ones((4, 6)), "twiddles": np.ones((4, 6, 2)), "mask": np.ones(7)}
    fields = {name: array.tolist() for name, array in arrays.items()}
    assert_refused(changed(content, n_fft=12, active_gates=24, total_gates=24, **fields), path, "gates", "(4, 6)", MEND)


def test_arrays_of_another_length_than_each_other_are_refused(content, path):
    other = rx.LearnedFft.exact(32)
    for field in ("twiddles", "gates", "mask"):
        assert_refused(changed(content, **{field: getattr(other, field).tolist()}), path, "expected shape", MEND)


def test_counts_that_contradict_the_arrays_are_refused(content, path):
    active = content["active_gates"]
    assert_refused(changed(content, active_gates=active + 1), path, f"active_gates: the arrays say {active}")
    assert_refused(changed(content, total_gates=0), path, "total_gates: the arrays say 32, got 0")


def test_a_model_for_another_length_is_refused(path):
    rx.save_learned_fft(random_model(), path)
    before = path.read_bytes()
    with pytest.raises(rx.LearnedFftFileError, match="n_fft: expected a model for n_fft 256, got one for 16"):
        rx.load_learned_fft(path, 256)
    with pytest.raises(ValueError, match="n_fft: expected an integer"):
        rx.load_learned_fft(path, "256")
    assert path.read_bytes() == before
    assert rx.load_learned_fft(path, np.int64(16)).n_fft == 16


def test_what_is_no_model_is_refused_by_what_it_is(path):
    for model in ["model.json", None]:
        with pytest.raises(ValueError, match="model: expected a LearnedFft"):
            rx.save_learned_fft(model, path)
        assert not path.exists()


def test_importing_the_package_imports_no_schema_library():
    code = "import sys, rlxjax; print(*(name for name in sys.modules if name.startswith('pydantic')))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not run.stdout.strip()
