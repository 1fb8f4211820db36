"""The calibrate job with learned FFTs: runs of the variant `learned` of the one fit."""

import io
import json
import shutil

import numpy as np
import pytest
from _campaigns import GRID, fitted, made_up, run_job, saved_model
from rich.console import Console
from typer.testing import CliRunner

import rlxjax as rx
from calibrate.cli import app
from calibrate.outcome import print_outcome
from calibrate.samples import read_samples
from calibrate.workloads import WITHOUT_MODEL, Grid
from rlxjax.calibration import read_calibration_file, sha256_of
from rlxjax.learned import learned_program


@pytest.fixture(scope="module")
def model_files(tmp_path_factory):
    """A model of a length that is timed by the other strategies too, and one of a length that is not."""
    folder = tmp_path_factory.mktemp("models")
    return [saved_model(folder, 64, 8), saved_model(folder, 32, 4)]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, model_files):
    """What the job says of a finished campaign."""
    path = tmp_path_factory.mktemp("job") / "calibration.json"
    made_up(path, model_files)
    return fitted(path, model_files)


def test_the_file_describes_the_models_and_what_they_take(outcome, model_files):
    assert read_calibration_file(outcome.path) == outcome.content
    facts = outcome.section.facts
    for place, (described, file) in enumerate(zip(outcome.section.learned_ffts, model_files, strict=True)):
        model = rx.load_learned_fft(file)
        work = learned_program(model, rx.WelchPeakParams.fast(model.n_fft, 1)).work
        assert (described.file, described.sha256) == (file.name, sha256_of(file))
        assert (described.active_gates, described.total_gates) == (model.active_gates, model.total_gates)
        assert described.n_fft == facts["learned_n_fft"][place] == model.n_fft
        assert (facts["learned_flop"][place], facts["learned_live_bins"][place]) == tuple(work)
    assert read_samples(outcome.samples_path).models == {
        described.n_fft: described.sha256 for described in outcome.section.learned_ffts
    }


def test_learned_runs_of_a_known_machine_are_found(outcome):
    np.testing.assert_allclose(outcome.predicted_ns, outcome.measured_ns, rtol=0.1)
    learned = outcome.section.held_out["learned"]
    held_out = [c for c in outcome.cells if c.strategy == "learned" and GRID.place(c.batch, c.n_fft) != "fit"]
    assert learned.held_out_cells == len(held_out) > 0
    assert learned.held_out < 0.05
    assert learned.built_in > 0
    assert set(outcome.section.held_out) == {*WITHOUT_MODEL, "learned"}


def test_the_report_has_the_learned_rows(outcome):
    console = Console(record=True, width=120, file=io.StringIO())
    print_outcome(outcome, console, is_verbose=True)
    text = console.export_text()
    assert all(words in text for words in ("learned", "learned_segment_ns", "learned_flop_per_ns"))


def test_resuming_with_the_same_models_goes_on_and_with_others_is_refused(outcome, model_files, tmp_path):
    path = tmp_path / "calibration.json"
    samples = path.with_suffix(".samples.jsonl")
    shutil.copy(outcome.samples_path, samples)
    before = samples.read_bytes()
    other, more = saved_model(tmp_path, 64, 5), saved_model(tmp_path, 128)
    for models in ([], [other, model_files[1]], [*model_files, more]):
        with pytest.raises(ValueError, match="other learned models; give the same --model files") as caught:
            run_job(path, models=models, resume=True)
        assert "\n" not in str(caught.value)
        assert samples.read_bytes() == before
        assert not path.exists()
    again = fitted(path, model_files)
    made = {"created": outcome.section.created, "samples": outcome.section.samples}
    assert again.section.model_copy(update=made) == outcome.section


def test_models_that_cannot_be_timed_are_refused_before_anything_is_written(tmp_path):
    for make, said in [
        (lambda folder: [saved_model(folder, bins=8), saved_model(folder, bins=5)], "both for n_fft 64"),
        (lambda folder: [folder / "missing.json"], "missing.json: no such file; train one"),
        (lambda folder: [folder], "expected a file, got a folder"),
    ]:
        models = make(tmp_path)
        with pytest.raises(ValueError, match=said) as caught:
            run_job(tmp_path / "new" / "calibration.json", models=models)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "new").exists()


def test_the_command_refuses_a_missing_model_in_one_line(tmp_path):
    arguments = ["calibrate", "--model", tmp_path / "missing.json", "--out", tmp_path / "c.json"]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert "missing.json: no such file" in line
    assert not list(tmp_path.iterdir())


def test_predict_shows_learned_where_a_model_was_timed_and_picks_what_it_shows(outcome):
    for n_fft, timed in [(64, True), (128, False), (100, False)]:
        arguments = ["predict", str(outcome.path), "--batch", "512", "--n-fft", str(n_fft), "--k", "4"]
        shown = CliRunner().invoke(app, arguments)
        assert shown.exit_code == 0, shown.stderr
        assert any(line.startswith("learned") for line in shown.stdout.splitlines()) == timed
        assert shown.stdout.count("<- pick") == 1
        printed = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
        assert ("learned" in printed["predicted_ns"]) == timed
        assert printed["pick"] in printed["predicted_ns"]
        if timed:
            predicted = outcome.calibration.predict_ns("learned", 512, n_fft, 4)
            assert printed["predicted_ns"]["learned"] == pytest.approx(float(predicted), rel=1e-12)


MADE = ("created", "command", "samples")
OF_GRID = {"held_out": True, "uncertainty": {"spread"}}


def test_a_refit_with_the_models_says_what_the_job_says(outcome, model_files, tmp_path):
    options = [part for file in model_files for part in ("--model", file)]
    arguments = ["refit", outcome.samples_path, "--out", tmp_path / "again.json", *options]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr
    again, of_grid = read_calibration_file(tmp_path / "again.json"), OF_GRID | dict.fromkeys(MADE, True)
    assert again.models["welch"].learned_ffts == outcome.section.learned_ffts
    assert again.models["welch"].model_dump(exclude=of_grid) == outcome.section.model_dump(exclude=of_grid)


@pytest.mark.slow
def test_models_all_of_whose_runs_are_held_out_do_not_cost_the_whole_job(tmp_path):
    path, models = tmp_path / "calibration.json", [saved_model(tmp_path, 128), saved_model(tmp_path, 4096)]
    made_up(path, models)
    found = fitted(path, models)
    assert read_calibration_file(path) == found.content
    assert set(found.section.held_out) == {*WITHOUT_MODEL, "learned"}


@pytest.mark.slow
def test_a_job_times_models_from_the_first_launch_to_the_file(model_files, tmp_path):
    path, grid = tmp_path / "calibration.json", Grid((1, 2, 3), (64,), (4,), (3,), ())
    made_up(path, model_files, grid=None)
    found = run_job(path, models=model_files, grid=grid, resume=True, begun_s_ago=5.0)
    assert set(found.cells) == set(grid.cells([64, 32]))
    assert "learned" in found.section.held_out
    assert np.all(np.isfinite(found.predicted_ns) & (found.predicted_ns > 0))
    assert found.section.samples.rounds >= 1
