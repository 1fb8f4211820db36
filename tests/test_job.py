"""The calibrate job: what it writes of a campaign, what it measures, resumes, skips and refuses."""

import contextlib
import dataclasses
import io
import itertools
import json
import os
import signal

import jax
import numpy as np
import pytest
from _campaigns import GRID, fitted, made_up, run_job
from _content import sealed
from _documented import assert_documented, assert_narrow
from rich.console import Console
from typer.testing import CliRunner

from calibrate import fits, job, measure
from calibrate.cli import app
from calibrate.micro import MICRO_REPEATS, micro_rates
from calibrate.outcome import outcome_as_dict, print_outcome
from calibrate.progress import Progress
from calibrate.samples import read_samples, timings_of
from calibrate.validate import error_summaries
from calibrate.visits import noise_floor, quantile_ns
from calibrate.workloads import WITHOUT_MODEL, Grid
from rlxjax import load_calibration, transferred_prior
from rlxjax.calibration import population_prior, read_calibration_file, sha256_of
from rlxjax.fit import is_measured, named
from rlxjax.models import WELCH

#: Of few rows, whose programs compile soonest, and of no more workloads than a fit and what it never sees take.
SMALL = Grid((1, 2, 3), (64,), (4,), held_out_batches=(2,), held_out_n_ffts=())
#: The same and one batch more, so that without that batch a fit finds its program compiled.
WITH_LARGE = dataclasses.replace(SMALL, batches=(*SMALL.batches, 64))


class Interrupting(Progress):
    """Presses Ctrl-C at the end of the second round; keeps the samples that there are then."""

    def __init__(self, samples):
        super().__init__(Console(file=io.StringIO()))
        self.samples, self.before = samples, b""

    @contextlib.contextmanager
    def phase(self, name, deadline=None, total=None):
        rounds = itertools.count(1)

        def advance():
            if name == "measuring" and next(rounds) == 2:
                self.before = self.samples.read_bytes()
                signal.raise_signal(signal.SIGINT)

        with super().phase(name, deadline, total):
            yield advance


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What the job says of a finished campaign."""
    path = tmp_path_factory.mktemp("made-up") / "calibration.json"
    made_up(path)
    return fitted(path)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A job that Ctrl-C ends after two rounds: what it says, and the samples at that time."""
    path = tmp_path_factory.mktemp("interrupted") / "calibration.json"
    progress = Interrupting(path.with_suffix(".samples.jsonl"))
    # Whoever starts the tests in the background of a shell has Ctrl-C ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run_job(path, grid=SMALL, budget_s=120.0, progress=progress), progress.before
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.fixture
def begun(tmp_path):
    """The path of a calibration beside whose samples there are micro-benchmarks alone."""
    made_up(path := tmp_path / "calibration.json", grid=None)
    return path


def test_the_file_is_valid_and_loads_as_what_the_job_reports(outcome):
    assert outcome.is_written
    assert not outcome.is_interrupted
    assert read_calibration_file(outcome.path) == outcome.content
    assert outcome.section == outcome.content.models["welch"]
    assert outcome.section.learned_ffts == []
    loaded, reported = load_calibration(outcome.path).of("welch"), outcome.calibration.of("welch")
    assert named(loaded.coefficients) == named(reported.coefficients)
    np.testing.assert_array_equal(loaded.posterior.factor, reported.posterior.factor)
    assert (loaded.domain, loaded.held_out) == (reported.domain, reported.held_out)


def test_the_file_describes_the_samples_behind_it(outcome):
    log, recorded = read_samples(outcome.samples_path), outcome.section.samples
    assert recorded.sha256 == sha256_of(outcome.samples_path)
    assert recorded.timings == sum(map(len, log.rounds))
    assert recorded.rounds == len(log.complete_rounds()) == 2
    assert recorded.workloads == len(log.cells) == len(GRID.cells())
    assert outcome.content.machine.canary_ns == {name: min(times) for name, times in log.micro.items()}
    np.testing.assert_array_equal(outcome.measured_ns, quantile_ns(log.visits()))


def test_a_known_machine_is_found(outcome):
    np.testing.assert_allclose(outcome.predicted_ns, outcome.measured_ns, rtol=0.1)
    for strategy, summary in outcome.section.held_out.items():
        assert summary.held_out < 0.08, strategy  # the prior is of other machines
        assert summary.covered >= 0.8, strategy


def test_fitting_the_samples_again_gives_what_the_file_says(outcome):
    log = read_samples(outcome.samples_path)
    visits = log.visits()
    measured, prior = quantile_ns(visits), fits.starting_prior(micro_rates(log), population_prior(WELCH))
    seen = np.array([GRID.place(cell.batch, cell.n_fft) == "fit" for cell in log.cells])
    again = fits.fit_twice(timings_of(log.cells, measured), seen, prior, job.facts_of(log, {}))
    assert named(again.whole.terms.coefficients) == named(outcome.calibration.coefficients)
    np.testing.assert_array_equal(again.estimate.time_ns, outcome.predicted_ns)
    judged = (again.blind, again.blind_terms_ns, noise_floor(visits))
    summaries = error_summaries(log.cells, measured, *judged, GRID, seen)
    assert dict(summaries) == outcome.section.held_out
    assert set(summaries) == set(WITHOUT_MODEL)


def test_a_job_starts_from_what_another_calibration_says_and_names_its_platform(outcome, tmp_path):
    text = outcome.path.read_text(encoding="utf-8")
    prior = tmp_path / "other.json"
    content = json.loads(text.replace(f'"platform": "{jax.default_backend()}"', '"platform": "abacus"'))
    prior.write_text(json.dumps(sealed(content)))
    samples = tmp_path / "calibration.samples.jsonl"
    samples.write_bytes(outcome.samples_path.read_bytes())
    found = fitted(tmp_path / "calibration.json", prior=prior)
    assert any("'abacus'" in note for note in found.notes)
    known = transferred_prior(outcome.calibration.posterior)
    log = read_samples(samples)
    timings, ones = timings_of(found.cells, found.measured_ns), np.ones(len(found.cells), bool)
    again = fits.fit_twice(timings, ones, known, job.facts_of(log, {}))
    assert named(again.whole.terms.coefficients) == named(found.calibration.coefficients)
    assert named(found.calibration.coefficients) != named(outcome.calibration.coefficients)


def test_the_report_shows_predictions_decisions_and_errors(outcome):
    console = Console(width=80, file=io.StringIO())
    print_outcome(outcome, console, is_verbose=True)
    text = console.file.getvalue()
    files = (str(outcome.path), str(outcome.samples_path))
    assert_narrow("\n".join(line for line in text.splitlines() if not any(file in line for file in files)))
    for words in ("held out", "noise floor", "built-in constants", "fused is faster", "host_call_ns"):
        assert words in text


def test_the_verdict_is_a_few_sentences_that_the_file_keeps_and_a_program_reads(outcome):
    console = Console(record=True, width=80, file=open(os.devnull, "w"))  # noqa: SIM115
    print_outcome(outcome, console)
    text, said = console.export_text(), outcome_as_dict(outcome)
    assert text.startswith("Welch peaks: Ready.\n  Typical error ")
    assert "host_call_ns" not in text
    assert said["is_ready"] is True
    assert_documented("calibrate", {"welch": said})
    assert said["said"] == outcome.verdict.said
    assert load_calibration(outcome.path).of("welch").cautions == ()


def test_what_is_not_good_enough_is_kept_and_widens_the_intervals(outcome, tmp_path):
    """Times that jump from one workload to the next can be fitted, not foretold."""
    lines, rng = outcome.samples_path.read_text(encoding="utf-8").splitlines(), np.random.default_rng(0)
    factors = {}
    for number, line in enumerate(lines):
        content = json.loads(line)
        if content["kind"] == "timing":
            key = (content["strategy"], content["batch"], content["n_fft"])
            factor = factors.setdefault(key, float(np.exp(rng.normal(0.0, 0.5))))
            content["times_ns"] = [int(time_ns * factor) for time_ns in content["times_ns"]]
            lines[number] = json.dumps(content)
    samples = tmp_path / "calibration.samples.jsonl"
    samples.write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = fitted(tmp_path / "calibration.json")
    assert not found.verdict.is_ready
    assert "run `rlxjax calibrate` again" in found.verdict.cautions[0]
    calibrated = load_calibration(found.path).of("welch")
    assert calibrated.cautions == tuple(found.verdict.cautions)
    assert np.all(np.asarray(calibrated.posterior.spread)[:4] > np.asarray(outcome.calibration.posterior.spread)[:4])


def test_the_coefficients_in_the_file_are_as_sure_as_the_intervals_take_them_to_be(outcome):
    sds, before = (named(tree) for tree in (outcome.calibration.posterior.coefficient_log_sd(), WELCH.prior.log_sd))
    for name, entry in outcome.section.coefficients.items():
        assert entry.log_sd == pytest.approx(float(sds[name]), rel=1e-4)  # the factor has six digits
        assert (entry.provenance == "measured") == bool(is_measured(sds[name], before[name])), name
    provenances = {entry.provenance for entry in outcome.section.coefficients.values()}
    assert provenances == {"measured", "uncalibrated"}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a CPU cannot measure")
def test_a_cpu_measures_no_transfer_between_host_and_device(outcome):
    gate = outcome.content.machine.gate
    assert gate["host_readback_bw"].provenance == "uncalibrated"
    assert gate["memory_bw"].provenance == "measured"


def test_the_gate_in_the_file_has_the_micro_benchmarks_rates(outcome):
    rates, gate = outcome.rates, outcome.calibration.gate
    assert gate.dispatch_ns == rates.dispatch_ns
    assert gate.roundtrip_ns == rates.roundtrip_ns
    assert gate.memory_bw == rates.memory_bytes_per_ns
    assert gate.host_readback_bw == rates.readback_bytes_per_ns


def test_ctrl_c_fits_what_was_measured(interrupted):
    outcome, before = interrupted
    assert any("interrupted" in note for note in outcome.notes)
    assert outcome.is_interrupted
    assert read_calibration_file(outcome.path) == outcome.content
    assert outcome.section.samples.timings == before.count(b'"timing"') >= 2 * len(SMALL.cells())
    assert (outcome.section.samples.rounds, outcome.cells) == (2, SMALL.cells())
    assert {len(times) for times in read_samples(outcome.samples_path).micro.values()} == {MICRO_REPEATS}


@pytest.fixture
def calibrated(monkeypatch, tmp_path):
    """Call the command with jobs that return, or raise, what is given for each model; also count the jobs."""
    made = []

    def jobs(**given):
        def job_of(name):
            def run(**_):
                made.append(name)
                if isinstance(given[name], BaseException):
                    raise given[name]
                return given[name]

            return run

        monkeypatch.setattr("calibrate.job.run", job_of("welch"))
        monkeypatch.setattr("calibrate.functions_job.run_functions", job_of("functions"))
        result = CliRunner().invoke(app, ["calibrate", "--out", str(tmp_path / "c.json"), "--json", "--quiet"])
        return result, made

    return jobs


def test_after_ctrl_c_no_other_model_is_begun_and_what_there_is_is_printed(interrupted, outcome, calibrated):
    result, made = calibrated(welch=interrupted[0], functions=outcome)
    assert (result.exit_code, made) == (130, ["welch"])
    assert json.loads(result.stdout) == {"welch": outcome_as_dict(interrupted[0])}
    assert result.stderr.splitlines()[-1] == "interrupted; this is of what was measured so far"


@pytest.mark.parametrize(
    ("failure", "status", "said"),
    [(ValueError("no suite"), 2, "error: no suite"), (KeyboardInterrupt("kept in f"), 130, "interrupted; kept in f")],
)
def test_what_is_done_is_printed_though_functions_fail(outcome, calibrated, failure, status, said):
    result, made = calibrated(welch=outcome, functions=failure)
    assert (result.exit_code, made) == (status, ["welch", "functions"])
    assert json.loads(result.stdout) == {"welch": outcome_as_dict(outcome)}
    assert result.stderr.splitlines()[-1] == said


def test_a_killed_run_is_resumed_with_all_its_samples(interrupted, tmp_path):
    """Samples are flushed one by one: at any time the file is what a killed run leaves."""
    path, samples = tmp_path / "calibration.json", tmp_path / "calibration.samples.jsonl"
    _, before = interrupted
    samples.write_bytes(before + b'{"kind": "timing", "rou')
    outcome = run_job(path, resume=True, grid=SMALL, begun_s_ago=5.0)
    assert samples.read_bytes().startswith(before)
    assert outcome.section.samples.timings > before.count(b'"timing"')
    assert outcome.section.samples.rounds >= 3
    assert outcome.cells == SMALL.cells()


def test_cells_that_do_not_fit_in_memory_are_skipped_and_a_first_round_cut_short_is_fitted(begun, monkeypatch):
    limit = max(cell.working_bytes for cell in SMALL.cells())
    too_large = [str(cell) for cell in WITH_LARGE.cells() if cell.working_bytes > limit]
    fitting, visited = len(WITH_LARGE.cells()) - len(too_large), []

    def interrupted_after_a_while(call):
        visited.append(call)
        if len(visited) == fitting:
            signal.raise_signal(signal.SIGINT)
        return [100_000 + 1000 * len(visited)]

    monkeypatch.setattr(measure, "visit_ns", interrupted_after_a_while)
    monkeypatch.setattr(job, "memory_limit_bytes", lambda: limit)
    outcome = run_job(begun, resume=True, grid=WITH_LARGE, budget_s=60.0)
    assert too_large
    assert outcome.skipped["would not fit in memory"] == too_large
    assert all(any(name in line for line in outcome.section.skipped) for name in too_large)
    assert outcome.section.samples.timings == len(outcome.cells) == fitting
    assert outcome.section.noise_floor is None


def test_ctrl_c_in_the_first_visit_says_what_is_missing(begun, monkeypatch):
    def interrupted(call):
        signal.raise_signal(signal.SIGINT)
        return [1]

    monkeypatch.setattr(measure, "visit_ns", interrupted)
    with pytest.raises(KeyboardInterrupt, match="only 1 workloads were measured"):
        run_job(begun, resume=True, grid=SMALL, budget_s=60.0)


def test_what_cannot_be_done_is_refused_before_anything_is_written(tmp_path):
    path = tmp_path / "calibration.json"
    for options, said in (
        *(({"budget_s": budget_s}, "--budget: expected at least 10 seconds") for budget_s in (3.0, -1.0)),
        *(({"budget_s": float(text)}, f"at least 10 seconds, got {text}") for text in ("inf", "nan")),
        ({"prior": tmp_path / "other.json"}, "other.json"),
    ):
        with pytest.raises(ValueError, match=said):
            run_job(path, **options)
    with pytest.raises(ValueError, match="expected a file to write, got the folder"):
        run_job(tmp_path)
    assert not list(tmp_path.iterdir())
