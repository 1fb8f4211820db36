"""The calibration file: what is written is what is loaded, of any model, and whatever is broken is one line."""

import dataclasses
import itertools
import json
import math
import pwd
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from _content import sealed
from _models import (
    GATE,
    LINE,
    TILED,
    TWIN,
    LineModel,
    calibration,
    file_content,
    line_fit,
    runs_of,
    tiled_fit,
)
from typer.testing import CliRunner

import rlxjax as rx
from calibrate.cli import app
from calibrate.command_line import compiled_programs_path, keep_compiled_programs
from rlxjax.calibration import (
    CalibrationFileError,
    MachineMismatchWarning,
    current_fingerprint,
    default_calibration,
    default_calibration_path,
    load_calibration,
    read_calibration_file,
    save_calibration,
    section_of,
    write_json_file,
)
from rlxjax.fit import coefficient_names, estimate
from rlxjax.models import BUILT_IN

BOTH = (LINE, TILED)
#: The file keeps so many digits of what a calibration is not asked for itself.
SIX_DIGITS = 5e-6


@pytest.fixture
def path(tmp_path):
    return tmp_path / "calibration.json"


def written(path, changes=None):
    path.write_text(json.dumps(file_content(changes)))
    return path


def loaded(path, changes=None, models=BOTH):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_calibration(written(path, changes), models)


def test_what_is_saved_gives_the_same_predictions_picks_and_decisions(path):
    for fits, said in (((), "none"), ((line_fit(), line_fit()), "line, line")):
        with pytest.raises(ValueError, match=f"fits: expected one fit for each of one or more models, got {said}"):
            save_calibration(path, *fits)
        assert not path.exists()
    fits = [line_fit(), tiled_fit()]
    save_calibration(path, *fits)
    whole = load_calibration(path, BOTH)
    assert whole.gate is None
    for fit in fits:
        model = fit.posterior.model
        found = whole.of(model.name)
        assert found.coefficients == pytest.approx(fit.posterior.coefficients, rel=1e-15)
        runs = runs_of(model)
        expected = estimate(fit.posterior, runs)
        got = estimate(found.posterior, runs)
        np.testing.assert_allclose(got.time_ns, expected.time_ns, rtol=SIX_DIGITS)
        np.testing.assert_allclose(got.log_sd(), expected.log_sd(), rtol=10 * SIX_DIGITS)
        np.testing.assert_allclose(found.posterior.alike, fit.posterior.alike, rtol=SIX_DIGITS)
        before = dataclasses.replace(found, posterior=fit.posterior)
        n = np.unique(runs.inputs["n"])
        np.testing.assert_array_equal(found.pick_index(n), before.pick_index(n))
        np.testing.assert_array_equal(found.decide(n).verdict(), before.decide(n).verdict())
        np.testing.assert_allclose(found.decide(n).probability, before.decide(n).probability, atol=1e-4)
        assert {name: np.shape(fact) for name, fact in found.posterior.facts.items()} == {
            name: np.shape(fact) for name, fact in model.facts.items()
        }
        # What a run was timed at is within the domain, to the bit.
        assert np.all(found.in_domain(n))


def test_what_a_file_says_is_what_is_loaded(path):
    found, content, first = loaded(path), file_content(), path.read_bytes()
    write_json_file(read_calibration_file(path, BOTH), path, indent=None)
    assert json.loads(path.read_bytes()) == json.loads(first)
    assert found == dataclasses.replace(calibration(), source=found.source)
    assert list(found.models) == ["line", "tiled"]
    assert found.gate == GATE
    section, tiles = content["models"]["tiled"], found.of("tiled")
    assert tiles.provenance == dict.fromkeys(coefficient_names(TILED.prior.median), rx.gate.Provenance.MEASURED)
    assert tiles.domain == {name: (entry["low"], entry["high"]) for name, entry in section["domain"].items()}
    assert (tiles.held_out, tiles.noise_floor) == (section["held_out"], section["noise_floor"])
    assert found.fingerprint == content["models"]["line"]["fingerprint"]
    assert loaded(path, {"models.tiled.uncertainty.alike": None}).of("tiled").posterior.alike is None
    assert "gate" not in file_content({"machine.gate": None})["machine"]
    assert loaded(path, {"machine.gate": None}).gate is None
    assert loaded(path, {"machine.gate.roundtrip_ns.value": 0.0}).gate.roundtrip_ns == 0.0


def test_a_coefficient_that_no_timing_told_is_uncalibrated():
    # What was known as well before is no measurement of these timings.
    sharp = LINE.prior._replace(log_sd=dict.fromkeys(LINE.prior.log_sd, 1e-3))
    for prior, said in ((sharp, rx.gate.Provenance.UNCALIBRATED), (LINE.prior, rx.gate.Provenance.MEASURED)):
        assert {entry.provenance for entry in section_of(line_fit(), prior).coefficients.values()} == {said}


def test_sections_of_other_models_are_left_alone(path):
    broken = {"models.tiled.model_version": 99, "models.line.facts": {"chunk": [1.0, 2.0], "more": 3.0}}
    found = loaded(path, broken, [LINE])
    assert list(found.models) == ["line"]
    assert found.posterior.facts["more"] == 3.0
    assert loaded(path, None, [TWIN, TILED]).models.keys() == {"tiled"}
    # The built-in ones are what is known unless told, in their order.
    assert load_calibration(written(path)).models == {}
    other = {f"models.{name}": file_content()["models"]["line"] for name in BUILT_IN}
    with pytest.raises(CalibrationFileError, match=f"models.{next(iter(BUILT_IN))}"):
        load_calibration(written(path, other))
    # In the order in which models are given.
    assert loaded(path, None, BOTH[::-1]).posterior.model is TILED


def test_a_section_that_cannot_be_used_is_left_out_and_kept_by_who_writes_another(path):
    """Stale, damaged, or of a schema to come: what is good is used, and what is not is kept to the byte."""
    newer = file_content()["models"]["tiled"] | {"surprise": 1, "digest": "0" * 64}
    for bad in ({"models.tiled.model_version": 99}, {"models.tiled": newer}, {"models.tiled": [1.5, None]}):
        raw = json.loads(written(path, bad).read_text())
        with pytest.warns(UserWarning, match=r"models.tiled.*rlxjax calibrate.* --out .*; the section is left out"):
            before = load_calibration(path, BOTH)
        assert [*before.models] == ["line"]
        assert before.gate == GATE
        assert float(before.predict_ns("plain", 64)) == float(calibration().predict_ns("plain", 64))
        with pytest.raises(CalibrationFileError, match=r"models\.tiled"):
            load_calibration(path, [TILED])
        save_calibration(path, line_fit())
        after = json.loads(path.read_text())
        assert [*after["models"]] == ["line", "tiled"]
        assert (after["models"]["tiled"], after["machine"]) == (raw["models"]["tiled"], raw["machine"])
        with pytest.warns(UserWarning, match=r"models\.tiled"):
            assert load_calibration(path, BOTH).gate == GATE


def test_a_section_names_its_own_samples_and_the_command_that_fits_them(path):
    for name, is_kept in itertools.product(("welch", "functions"), (False, True)):
        samples = path.parent / f"calibration.{name}.samples.jsonl"
        if is_kept:
            samples.touch()
        path.write_text(json.dumps(sealed(file_content() | {"models": {name: {}}})))
        with pytest.raises(CalibrationFileError) as refusal:
            load_calibration(path)
        assert f"`rlxjax calibrate --only {name} --out {path}`" in str(refusal.value)
        assert (f"`rlxjax refit {samples} --out {path}`" in str(refusal.value)) == is_kept


def test_what_was_edited_is_taken_with_a_word(path):
    good = json.loads(written(path).read_text())
    value = good["models"]["line"]["coefficients"]["call_ns"]["value"]
    text = path.read_text().replace(repr(value), repr(2.0 * value), 1)
    path.write_text(text)
    with pytest.warns(UserWarning, match=r"models\.line: the digest does not match"):
        assert load_calibration(path, BOTH).coefficients["call_ns"] == 2.0 * value
    # Lost whole, renamed, or without digests: no section has changed, and yet a word is said.
    for change in (lambda c: c["models"].pop("line"), lambda c: c["models"].update(lime=c["models"].pop("line"))):
        content = json.loads(json.dumps(good))
        change(content)
        path.write_text(json.dumps(content))
        with pytest.warns(UserWarning, match=f"^{path}: the digest does not match"):
            load_calibration(path, BOTH)
        with pytest.warns(UserWarning, match=f"{path}: the digest does not match .*The other sections were kept"):
            save_calibration(path, tiled_fit())
    del good["models"]["line"]["digest"]
    path.write_text(json.dumps(good))
    with pytest.warns(UserWarning, match=r"models\.line: the digest is missing"):
        load_calibration(path, BOTH)
    # What is no calibration of this schema is put aside and not lost.
    path.write_text("the old file")
    with pytest.warns(UserWarning, match=f"The file was kept as {path}.1"):
        save_calibration(path, line_fit())
    assert path.with_name(f"{path.name}.1").read_text() == "the old file"


def test_sections_that_are_written_at_once_are_all_kept(path):
    models = [type("Named", (LineModel,), {"name": f"line {place}"})() for place in range(8)]
    own = [line_fit()._replace(posterior=dataclasses.replace(line_fit().posterior, model=model)) for model in models]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda fit: save_calibration(path, fit), own))
    assert sorted(json.loads(path.read_text())["models"]) == [model.name for model in models]


REFIT = "fit the raw timings again with `rlxjax refit {samples} --out {path}`"
AGAIN = "measure again with `rlxjax calibrate --out {path}`"
SUITE_AGAIN = "measure again with `rlxjax calibrate --suite a:B --out {path}`"


def assert_refused(path, text, *said, models=BOTH, samples=None):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    before, samples = path.read_bytes(), samples or path.with_suffix(".welch.samples.jsonl")
    samples.touch()
    with pytest.raises(CalibrationFileError) as caught:
        load_calibration(path, models)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    for part in said:
        assert part.format(path=path, samples=samples) in message, message
    assert path.read_bytes() == before


def test_a_truncated_file_is_refused_wherever_it_ends_and_so_is_what_is_no_calibration(path):
    text = json.dumps(file_content(), indent=2)
    for length in range(0, len(text) - 1, 977):
        assert_refused(path, text[:length], "truncated", "line ", AGAIN)
    deep, huge = "[" * 100_000, '{"schema_version": ' + "9" * 5000 + "}"
    for text in (b"\xff\xfe", "", "[]", "1", "null", huge, deep):
        assert_refused(path, text, "rlxjax")
    assert_refused(
        path, '{"a": 1}', "expected a calibration, got other JSON; give a file that `rlxjax calibrate` wrote"
    )
    path.unlink()
    with pytest.raises(CalibrationFileError, match=f"{path}: no such file; .*rlxjax calibrate --out {path}"):
        load_calibration(path)
    with pytest.raises(CalibrationFileError, match="expected a file, got a folder; .*rlxjax calibrate"):
        load_calibration(path.parent)


TERMS, SURE = "models.line.coefficients", "models.line.uncertainty"
ONE = {"value": 1.0, "log_sd": 1.0, "unit": "ns", "provenance": "measured"}


FIELDS = [
    ("schema_version", 6, "schema_version: 6 is newer than 5, the newest that this rlxjax reads; install a newer"),
    *(("schema_version", old, REFIT) for old in (4, 0, "5", 5.0, True, None)),
    ("units.time", "s", AGAIN),
    ("surprise", 1, AGAIN),
    ("models.line.fingerprint.cores", "many", AGAIN),
    ("models", None, AGAIN),
    ("machine.canary_ns.launch", 0.0, SUITE_AGAIN),
    ("machine.gate.memory_bw", None, "machine.gate.memory_bw is missing; " + SUITE_AGAIN),
    ("machine.gate.unknown_ns", ONE, "machine.gate.unknown_ns.log_sd: Extra inputs"),
    ("machine.gate.memory_bw.unit", "ns", "machine.gate.memory_bw.unit: expected 'bytes/ns', got 'ns'"),
    ("machine.gate.unified_memory.value", 7.0, "machine.gate.unified_memory: expected 0 or 1, got 7"),
    *(("models.line.model_version", n, f"models.line.model_version: expected 1, got {n}") for n in (0, 2)),
    (f"{TERMS}.unknown_ns", ONE, "unknown_ns is unknown: expected block_ns, call_ns, item_ns; " + AGAIN),
    (f"{TERMS}.block_ns", None, f"{TERMS}.block_ns is missing; " + AGAIN),
    (f"{TERMS}.call_ns.unit", "us", f"{TERMS}.call_ns.unit: expected 'ns', got 'us'; " + AGAIN),
    *((f"{TERMS}.call_ns.{name}", bad, AGAIN) for name in ("value", "log_sd") for bad in (0.0, 5e-324, 1e30)),
    *(
        (f"{of}_ns.value", bad, mend)
        for of, mend in ((f"{TERMS}.call", AGAIN), ("machine.gate.dispatch", SUITE_AGAIN))
        for bad in (-1.0, math.nan, math.inf, "12", True)
    ),
    ("models.line.uncertainty.spread.plain", 0.0, AGAIN),
    ("models.line.uncertainty.spread.plain", None, "models.line.uncertainty.spread.plain is missing"),
    (f"{SURE}.correction.plain", [0.0], f"{SURE}.correction.plain: length: expected 0, got 1; " + AGAIN),
    (f"{SURE}.covariance_factor", [[1.0]], f"{SURE}.covariance_factor: rows: expected 3, got 1; " + AGAIN),
    (f"{SURE}.alike", {"plain": [1.0, 0.0]}, f"{SURE}.alike.blocked is missing; " + AGAIN),
    (f"{SURE}.alike.plain", [1.0], f"{SURE}.alike.plain: length: expected 2, got 1; " + AGAIN),
    (f"{SURE}.alike.plain", [0.9, 0.0], f"{SURE}.alike: expected a symmetric matrix with ones on its diagonal"),
    (f"{SURE}.alike.plain", [1.0, 1.5], AGAIN),
    (f"{SURE}.covariance_factor", [[1.0], [1.0]], "expected rows of 1, 2, 3, ... numbers"),
    ("models.tiled.facts.tile_items", None, "models.tiled.facts.tile_items is missing; " + AGAIN),
    ("models.tiled.facts.tile_items", [1.0], "models.tiled.facts.tile_items: expected a number, got [1.0]"),
    ("models.tiled.facts.knots", 1.0, "models.tiled.facts.knots: expected numbers, got 1.0"),
    ("models.tiled.domain.n*depth", None, "models.tiled.domain.n*depth is missing; " + AGAIN),
    ("models.tiled.domain.n.low", 1e9, "low 1000000000.0 is above high"),
    ("models.line.noise_floor", None, AGAIN),
    (f"{TERMS}.a\nb", 1.0, AGAIN),
]


@pytest.mark.parametrize(("field", "value", "said"), FIELDS, ids=lambda value: str(value)[:40])
def test_a_file_that_would_be_misread_is_refused_by_field_with_the_mend(field, value, said, path):
    by_name = (
        [field.split(".")[-1].replace("\n", " ")] if said in (AGAIN, REFIT) and not field.startswith("units") else []
    )
    text, (of, name, *_) = json.dumps(file_content({field: value})), [*field.split("."), ""]
    if of == "models" and name:
        (model,) = (one for one in BOTH if one.name == name)
        said = said.replace("calibrate --out", "calibrate --suite a:B --out")
        refit = REFIT.replace(" --out", " --suite a:B --out")
        said = refit if said == REFIT else said
        assert_refused(path, text, said, refit, *by_name, models=[model], samples=path.with_name("a"))
    elif of != "machine":
        assert_refused(path, text, said, *by_name)
        return
    with pytest.warns(UserWarning, match=f"^{path}: {of}.*; the section is left out$") as caught:
        found = load_calibration(written(path, {field: value}), BOTH)
    (warning,) = caught
    assert said.format(path=path) in str(warning.message)
    assert [*found.models] == [one.name for one in BOTH if of != "models" or one.name != name]
    assert (found.gate is None) == (of == "machine")


def test_a_file_of_another_machine_loads_with_a_warning_that_says_what_differs(path):
    for name, value, how in (("cores", 100_000, "elsewhere"), ("thread_flags", {"A": "1"}, "with other software")):
        here = getattr(current_fingerprint(), name)
        with pytest.warns(MachineMismatchWarning) as caught:
            found = load_calibration(written(path, {f"*.fingerprint.{name}": value}), BOTH)
        assert found.coefficients == calibration().coefficients
        (warning,) = caught
        for said in (f"{path} was made {how}", f"{name} {value!r} there, {here!r} here"):
            assert said in str(warning.message)


def test_the_warning_of_another_machine_names_the_line_that_loads(path):
    # In a process whose functions nothing wraps.
    code = "import sys, rlxjax; rlxjax.load_calibration(sys.argv[1])"
    file = written(path, {"*.fingerprint.cpu_model": "Z80"})
    root = Path(rx.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code, file], cwd=root, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("<string>:1: MachineMismatchWarning")


def test_the_default_file_lies_in_rlxjax_home_or_with_the_users_data(tmp_path, monkeypatch):
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path / "home"))
    default = default_calibration_path()
    assert default == tmp_path / "home" / f"calibration-{jax.default_backend()}.json"
    assert default_calibration_path("tpu") == tmp_path / "home" / "calibration-tpu.json"
    with pytest.raises(CalibrationFileError, match=f"{default}: no such file"):
        load_calibration()
    save_calibration(default, line_fit())
    assert load_calibration(models=[LINE]).coefficients == line_fit().posterior.coefficients
    monkeypatch.delenv("RLXJAX_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert "rlxjax" in default_calibration_path("cpu").parts


def test_a_home_is_expanded_and_one_that_is_none_is_named_in_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RLXJAX_HOME", "~/own")
    assert default_calibration_path("cpu") == tmp_path / "own" / "calibration-cpu.json"
    assert compiled_programs_path().is_relative_to(tmp_path / "own")
    (tmp_path / "file").touch()
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as in a container that runs as any user
    for home, said in (
        (tmp_path / "file", "file/calibration-cpu.json: cannot be read .*Not a directory"),
        (tmp_path / ("x" * 300), "xxx/calibration-cpu.json: cannot be read .*too long"),
        ("~nobody-here/own", "RLXJAX_HOME: expected a folder, got ~nobody-here/own; set RLXJAX_HOME to a folder"),
        ("", "RLXJAX_HOME: expected a folder, got none, and this user has no home; set RLXJAX_HOME to a folder"),
    ):
        monkeypatch.setenv("RLXJAX_HOME", str(home))
        with pytest.warns(UserWarning, match=said):
            assert default_calibration("cpu").source.startswith("no calibration of this machine")
        with pytest.raises(CalibrationFileError, match=said):
            load_calibration()
        keep_compiled_programs()
    result = CliRunner().invoke(app, ["calibrate"])
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, f"error: {said}")
