"""The calibrate job with learned models: what it times, fits, writes, resumes and refuses."""

import dataclasses
import json
import os
import shutil
import time

import numpy as np
import pytest
from rich.console import Console
from _models import assert_same
from typer.testing import CliRunner

import rlxjax as rx
from calibrate import fits, job, plan, workloads
from calibrate.cli import app
from calibrate.measure import MICRO_REPEATS
from calibrate.report import Progress, print_outcome
from calibrate.samples import SampleLog, SampleWriter, read_samples
from calibrate.visits import quartile_ns
from calibrate.workloads import WITHOUT_MODEL, Grid, TimedModel
from rlxjax.calibration import current_fingerprint, read_calibration_file
from rlxjax.calibration import sha256_of
from rlxjax._latency import coefficient_unit
from rlxjax._learned_latency import (
    LEARNED_COEFFICIENT_NAMES,
    LearnedLatencyCoefficients,
    fit_learned,
    learned_terms_ns,
)
from rlxjax.learned._program import learned_program

#: Takes long: `make test-all` runs it.
pytestmark = pytest.mark.slow

#: Of few rows, whose programs compile soonest.
GRID = Grid(batches=(1, 2, 3, 4, 5), n_ffts=(64,), ks=(2, 4, 8), held_out_batches=(3,), held_out_n_ffts=())
#: Of a campaign whose times are made up; a length of a model's own lies outside or is held out.
WIDE = Grid((1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096), (64, 128, 256), (4,), (32, 4096), (128,))
MICRO_NS = {"launch": 1e4, "roundtrip": 1e4, "copy": 1e7, "upload": 1e6, "readback": 1e6}
MICRO_NS |= {"maxima wide": 5e5, "maxima deep": 6e5, "top_k wide": 4e5, "top_k deep": 2e6}
MICRO_NS |= {"short powers": 3.5e5, "long powers": 5e5}
OWN = LearnedLatencyCoefficients(learned_segment_ns=30.0, learned_flop_per_ns=20.0)
FAR_FROM_NOW_S = 1e4


def pruned(n_fft, bins):
    exact = rx.LearnedFft.exact(n_fft)
    gates = exact.gates.copy()
    gates[-2:] = 0
    mask = (np.arange(exact.n_bins) < bins).astype(float)
    return dataclasses.replace(exact, gates=gates, mask=mask).hardened()


def saved(folder, n_fft=64, bins=8, name=None):
    path = folder / (name or f"model-{n_fft}-{bins}.json")
    rx.save_learned_fft(pruned(n_fft, bins), path)
    return path


def run_job(
    path, models, *, grid=GRID, resume=False, begun_s_ago=0.0, budget_s=job.MIN_BUDGET_S, force=False
):
    with open(os.devnull, "w") as nowhere:
        return job.run(
            started_s=time.perf_counter() - begun_s_ago,
            budget_s=budget_s,
            out=path,
            resume=resume,
            command="a test",
            progress=Progress(Console(file=nowhere)),
            models=models,
            grid=grid,
            seed=0,
            force=force,
        )


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, model_file):
    with pytest.MonkeyPatch.context() as patch:
        # However slow the machine, no cell is left out.
        patch.setattr(plan, "MIN_CELLS", len(GRID.cells([64])))
        return run_job(tmp_path_factory.mktemp("job") / "calibration.json", [model_file], begun_s_ago=5.0)


def made_up(path, models):
    """Write the samples of a finished campaign on a known machine; return the models by segment length."""
    timed = workloads.load_models(models)
    log, shared = SampleLog(current_fingerprint()), rx.typical_prior().median
    rng, cells = np.random.default_rng(0), WIDE.cells(timed)
    with SampleWriter(path.with_suffix(".samples.jsonl"), log, append=False) as writer:
        if timed:
            writer.models({n_fft: model.sha256 for n_fft, model in timed.items()})
        for _ in range(MICRO_REPEATS):
            for name, time_ns in MICRO_NS.items():
                writer.micro(name, time_ns)
        writer.cells(cells)
        times_ns = [predicted_ns(cell, timed, shared) for cell in cells]
        for round_ in range(2):
            for cell, time_ns in zip(cells, times_ns, strict=True):
                writer.timing(round_, cell, [int(time_ns * np.exp(rng.normal(0.02, 0.01)))])
    return timed


def predicted_ns(cell, timed, shared):
    sizes = (cell.batch, cell.n_fft, cell.k, cell.n_segments)
    if cell.strategy == "learned":
        return float(learned_terms_ns(OWN, shared, *timed[cell.n_fft].work, *sizes).total_ns())
    return float(rx.predict_latency_ns(shared, cell.path.value, *sizes, selection=cell.selection))


def fitted(path, models):
    """Return the outcome of a job that has no time left but to fit the samples beside a path."""
    return run_job(path, models, grid=WIDE, resume=True, begun_s_ago=FAR_FROM_NOW_S)


def test_the_file_is_valid_and_describes_the_model(outcome, model_file):
    content = read_calibration_file(outcome.path)
    assert content == outcome.content
    assert_same(rx.load_calibration(outcome.path), outcome.calibration)
    (described,) = content.learned.models
    model = rx.load_learned_fft(model_file)
    work = learned_program(model, rx.WelchPeakParams.fast(64, 4)).work
    assert (described.n_fft, described.flop, described.live_bins) == (64, *work)
    assert (described.active_gates, described.total_gates) == (model.active_gates, 192)
    assert (described.file, described.sha256) == (model_file.name, sha256_of(model_file))
    assert set(content.learned.coefficients) == set(LEARNED_COEFFICIENT_NAMES)
    for name, entry in content.learned.coefficients.items():
        assert entry.value > 0
        assert entry.unit == coefficient_unit(name)
        assert entry.provenance in (rx.Provenance.MEASURED, rx.Provenance.UNCALIBRATED)
    assert content.learned.fit.message.startswith("The fit of ")


def test_learned_runs_have_errors_of_their_own(outcome):
    learned = outcome.content.held_out["learned"]
    assert learned.fit is not None, outcome.notes
    assert learned.held_out_cells == sum((c.strategy, c.batch) == ("learned", 3) for c in outcome.cells) == 2
    assert learned.held_out == learned.interior
    assert learned.built_in > 0
    assert [cell for cell in outcome.cells if cell.strategy == "learned"] == [
        cell for cell in GRID.cells([64]) if cell.strategy == "learned"
    ]
    assert np.all(np.isfinite(outcome.predicted_ns) & (outcome.predicted_ns > 0))


def test_the_samples_name_the_models_and_refitting_them_gives_the_coefficients(outcome, model_file):
    log = read_samples(outcome.samples_path)
    assert log.models == {64: sha256_of(model_file)}
    measured, (flop, live_bins) = quartile_ns(log.visits()), TimedModel.load(model_file).work
    mine = np.array([cell.strategy == "learned" for cell in log.cells])
    sizes = np.array([(c.batch, c.n_fft, c.k, 2) for c in log.cells if c.strategy == "learned"]).T
    count = mine.sum()
    again = fit_learned(
        outcome.calibration.coefficients,
        np.full(count, flop),
        np.full(count, live_bins),
        sizes,
        measured[mine],
    )
    assert again.coefficients == outcome.calibration.learned.coefficients


def test_learned_runs_do_not_touch_the_machine_s_coefficients(outcome, model_file):
    log = read_samples(outcome.samples_path)
    measured, models = quartile_ns(log.visits()), workloads.load_models([model_file])
    prior = fits.micro_prior(job.micro_rates(log))
    without = np.array([cell.strategy != "learned" for cell in log.cells])
    seen = np.array([GRID.place(cell.batch, cell.n_fft) == "fit" for cell in log.cells])
    cells = [cell for cell in log.cells if cell.strategy != "learned"]
    dropped = fits.fit_twice(cells, measured[without], seen[without], prior, {})
    assert dropped.learned is None
    assert dropped.shared.terms.coefficients == outcome.calibration.coefficients
    both = fits.fit_twice(log.cells, measured, seen, prior, models)
    np.testing.assert_array_equal(both.blind.time_ns[without], dropped.blind.time_ns)


def test_the_report_has_the_learned_rows(outcome):
    console = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: SIM115
    print_outcome(outcome, console)
    text = console.export_text()
    assert all(words in text for words in ("learned", *LEARNED_COEFFICIENT_NAMES))


def test_resuming_with_the_same_model_goes_on_and_with_another_is_refused(outcome, model_file, tmp_path):
    path = tmp_path / "calibration.json"
    samples = path.with_suffix(".samples.jsonl")
    shutil.copy(outcome.samples_path, samples)
    before = samples.read_bytes()
    other, more = saved(tmp_path, bins=5), saved(tmp_path, 128)
    for models in ([], [other], [model_file, more]):
        with pytest.raises(ValueError, match="other learned models; give the same --model files") as caught:
            run_job(path, models, resume=True)
        assert "\n" not in str(caught.value)
        assert samples.read_bytes() == before
        assert not path.exists()
    again = run_job(path, [model_file], resume=True, begun_s_ago=2.0)
    assert samples.read_bytes().startswith(before)
    assert again.content.samples.timings > outcome.content.samples.timings
    assert again.content.learned.models == outcome.content.learned.models


def test_models_that_cannot_be_timed_are_refused_before_anything_is_written(tmp_path):
    for make, said in [
        (lambda folder: [saved(folder, bins=8), saved(folder, bins=5)], "both for n_fft 64"),
        (lambda folder: [folder / "missing.json"], "missing.json: no such file; train one"),
        (lambda folder: [folder], "cannot be read"),
    ]:
        models = make(tmp_path)
        with pytest.raises(ValueError, match=said) as caught:
            run_job(tmp_path / "new" / "calibration.json", models)
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


def test_a_made_up_campaign_of_two_models_is_fitted(tmp_path):
    path, models = tmp_path / "calibration.json", [saved(tmp_path), saved(tmp_path, 256, 20)]
    made_up(path, models)
    outcome = fitted(path, models)
    found = outcome.calibration.learned
    assert set(found.works) == {64, 256}
    np.testing.assert_allclose(outcome.predicted_ns, outcome.measured_ns, rtol=0.1)
    assert outcome.content.held_out["learned"].held_out < 0.1
    assert outcome.calibration.learned_strategies(256) == ("learned",)


def test_a_model_that_the_blind_fit_cannot_see_does_not_cost_the_whole_job(tmp_path):
    for n_fft in [128, 4096]:
        path, models = tmp_path / f"calibration-{n_fft}.json", [saved(tmp_path, n_fft)]
        made_up(path, models)
        outcome = fitted(path, models)
        assert read_calibration_file(path) == outcome.content
        assert set(WITHOUT_MODEL) <= set(outcome.content.held_out)


def test_a_model_off_the_grid_does_not_widen_the_domain_of_the_other_paths(tmp_path):
    path, models = tmp_path / "calibration.json", [saved(tmp_path, 32, 4)]
    made_up(path, models)
    assert fitted(path, models).calibration.in_domain(8, 32, 4) is False
