import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from rich.console import Console
from _models import assert_same

from calibrate import fits, job, measure, plan
from calibrate.measure import MICRO_REPEATS, VISITS
from calibrate.report import Progress, print_outcome
from calibrate.samples import read_samples
from calibrate.validate import error_summaries
from calibrate.visits import noise_floor, quartile_ns
from calibrate.workloads import WITHOUT_MODEL, Grid
from rlxjax import load_calibration, transferred_prior, typical_prior
from rlxjax.calibration import read_calibration_file
from rlxjax.calibration import sha256_of

#: Of few rows, whose programs compile soonest.
GRID = Grid(
    batches=(1, 2, 3, 4),
    n_ffts=(64, 128, 256),
    ks=(4,),
    held_out_batches=(2, 4),
    held_out_n_ffts=(128,),
)
TOO_LARGE = [
    cell for cell in GRID.cells() if (cell.batch, cell.n_fft) == (4, 256) and cell.strategy != "ultra"
]
N_FITTING = len(GRID.cells()) - len(TOO_LARGE)
LONG_JOB = """
import signal, sys, time
started_s = time.perf_counter()
# Whoever starts the tests in the background of a shell has Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
import jax
jax.config.update("jax_enable_x64", True)
from pathlib import Path
from rich.console import Console
from calibrate.job import run
from calibrate.report import Progress
from calibrate.workloads import WITHOUT_MODEL, Grid
grid = Grid(batches=(1, 2, 3, 4), n_ffts=(64, 128, 256), ks=(4,),
            held_out_batches=(2, 4), held_out_n_ffts=(128,))
outcome = run(started_s=started_s, budget_s=120.0, out=Path(sys.argv[1]), resume=False, command="test",
              progress=Progress(Console(file=sys.stderr)), grid=grid)
print(outcome.notes)
"""


def run_job(path, *, resume=False, budget_s=job.MIN_BUDGET_S, begun_s_ago=0.0, grid=GRID, prior=None):
    with open(os.devnull, "w") as nowhere:
        return job.run(
            started_s=time.perf_counter() - begun_s_ago,
            budget_s=budget_s,
            out=path,
            resume=resume,
            command="a test",
            progress=Progress(Console(file=nowhere)),
            grid=grid,
            seed=0,
            prior=prior,
        )


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What a job finds that has memory for all cells but the largest ones."""
    with pytest.MonkeyPatch.context() as patch:
        limit = max(cell.working_bytes for cell in GRID.cells()) - 1
        patch.setattr(job, "memory_limit_bytes", lambda: limit)
        # However slow the machine, no other cell is left out.
        patch.setattr(plan, "MIN_CELLS", N_FITTING)
        return run_job(tmp_path_factory.mktemp("job") / "calibration.json", begun_s_ago=2.0)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A long job that Ctrl-C ends after some visits of each cell: file, output, status, samples before."""
    path = tmp_path_factory.mktemp("interrupted") / "calibration.json"
    process, samples = start_long_job(path)
    before = samples.read_bytes()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    return path, output, process.returncode, before


def start_long_job(path):
    """Start a job in a process of its own; return it once it has visited each cell a few times."""
    process = subprocess.Popen(
        [sys.executable, "-c", LONG_JOB, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    samples = path.with_suffix(".samples.jsonl")
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up and process.poll() is None:
        if samples.exists() and samples.read_bytes().count(b'"timing"') > 4 * len(GRID.cells()):
            return process, samples
        time.sleep(0.05)
    process.kill()
    raise AssertionError("the job took no samples")


def test_the_file_is_valid_and_loads_as_what_the_job_reports(outcome):
    content = read_calibration_file(outcome.path)
    assert content == outcome.content
    assert outcome.is_written
    assert content.learned is None
    assert "learned" not in content.held_out
    assert_same(load_calibration(outcome.path), outcome.calibration)


def test_the_file_describes_the_samples_behind_it(outcome):
    log, recorded = read_samples(outcome.samples_path), outcome.content.samples
    assert recorded.sha256 == sha256_of(outcome.samples_path)
    assert recorded.timings == sum(map(len, log.rounds))
    assert recorded.rounds == len(log.complete_rounds()) >= 1
    assert recorded.workloads == len(log.cells) == N_FITTING


def test_measured_times_are_of_the_same_number_of_rounds(outcome):
    visits = read_samples(outcome.samples_path).visits()
    np.testing.assert_array_equal(outcome.measured_ns, quartile_ns(visits))


def test_refitting_the_samples_gives_the_coefficients_in_the_file(outcome):
    log = read_samples(outcome.samples_path)
    visits = log.visits()
    prior = fits.micro_prior(job.micro_rates(log))
    seen = np.array([GRID.place(cell.batch, cell.n_fft) == "fit" for cell in log.cells])
    again = fits.fit_twice(log.cells, quartile_ns(visits), seen, prior, {})
    assert again.shared.terms.coefficients == outcome.calibration.coefficients
    np.testing.assert_array_equal(again.estimate.time_ns, outcome.predicted_ns)
    judged = (again.blind, again.blind_terms_ns, noise_floor(visits))
    summaries = error_summaries(log.cells, quartile_ns(visits), *judged, GRID, seen)
    assert dict(summaries) == outcome.content.held_out
    assert set(summaries) == set(WITHOUT_MODEL)


def test_a_job_starts_from_what_another_calibration_says(outcome, tmp_path):
    samples = tmp_path / "calibration.samples.jsonl"
    samples.write_bytes(outcome.samples_path.read_bytes())
    found = run_job(tmp_path / "calibration.json", resume=True, begun_s_ago=1e4, prior=outcome.path)
    log = read_samples(samples)
    known = transferred_prior(outcome.calibration.posterior)
    prior = fits.micro_prior(job.micro_rates(log), known)
    np.testing.assert_array_equal(prior.correction, known.correction)
    again = fits.fit_twice(found.cells, found.measured_ns, np.ones(len(found.cells), bool), prior, {})
    assert again.shared.terms.coefficients == found.calibration.coefficients
    weights = found.calibration.posterior.weights  # of which the file keeps six digits
    np.testing.assert_allclose(again.shared.posterior.weights, weights, atol=1e-6)
    assert found.calibration.coefficients != outcome.calibration.coefficients


def test_a_prior_that_is_no_calibration_is_refused_before_anything_is_written(tmp_path):
    prior = tmp_path / "other.json"
    with pytest.raises(ValueError, match="other.json"):
        run_job(tmp_path / "calibration.json", prior=prior)
    assert not list(tmp_path.iterdir())


def test_the_micro_benchmarks_are_kept_as_canaries(outcome):
    log = read_samples(outcome.samples_path)
    assert outcome.content.canary_ns == {name: min(times) for name, times in log.micro.items()}
    assert {len(times) for times in log.micro.values()} == {MICRO_REPEATS}


def test_the_report_shows_predictions_decisions_and_errors(outcome):
    console = Console(record=True, width=160, file=open(os.devnull, "w"))  # noqa: SIM115
    print_outcome(outcome, console)
    text = console.export_text()
    for words in ("held out", "noise floor", "built-in constants", "fused is faster", "host_call_ns"):
        assert words in text


def test_the_coefficients_in_the_file_are_as_sure_as_the_intervals_take_them_to_be(outcome):
    sds = outcome.calibration.posterior.coefficient_log_sd()
    before = typical_prior().log_sd
    for name, entry in outcome.content.coefficients.items():
        assert entry.log_sd == pytest.approx(getattr(sds, name), rel=1e-4)  # the factor has six digits
        takes_half = entry.log_sd**2 <= 0.5 * getattr(before, name) ** 2
        assert (entry.provenance == "measured") == (entry.log_sd <= 0.3 * (1 + 1e-6) and takes_half)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a CPU cannot measure")
def test_a_cpu_measures_no_transfer_between_host_and_device(outcome):
    coefficients, gate = outcome.content.coefficients, outcome.content.gate
    for way in ("upload", "readback"):
        assert coefficients[f"{way}_bytes_per_ns"].provenance == "uncalibrated"
    assert gate["host_readback_bw"].provenance == "uncalibrated"
    assert gate["memory_bw"].provenance == "measured"


def test_a_prior_of_another_platform_is_named(outcome, tmp_path):
    text = outcome.path.read_text(encoding="utf-8")
    prior = tmp_path / "other.json"
    prior.write_text(text.replace(f'"platform": "{jax.default_backend()}"', '"platform": "abacus"'))
    samples = tmp_path / "calibration.samples.jsonl"
    samples.write_bytes(outcome.samples_path.read_bytes())
    found = run_job(tmp_path / "calibration.json", resume=True, begun_s_ago=1e4, prior=prior)
    assert any("'abacus'" in note for note in found.notes)


def test_the_gate_in_the_file_has_the_micro_benchmarks_rates(outcome):
    rates, gate = outcome.rates, outcome.calibration.gate
    assert gate.dispatch_ns == rates.dispatch_ns
    assert gate.roundtrip_ns == rates.roundtrip_ns
    assert gate.memory_bw == rates.memory_bytes_per_ns
    assert gate.host_readback_bw == rates.readback_bytes_per_ns


def test_cells_that_do_not_fit_in_memory_are_skipped_and_named(outcome):
    expected = [str(cell) for cell in TOO_LARGE]
    assert outcome.skipped["would not fit in memory"] == expected
    assert all(any(name in line for line in outcome.content.skipped) for name in expected)
    assert not set(expected) & {str(cell) for cell in outcome.cells}


def test_a_budget_that_is_too_short_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--budget: expected at least 10 seconds, got 3"):
        run_job(tmp_path / "calibration.json", budget_s=3.0)
    assert not list(tmp_path.iterdir())


def test_ctrl_c_fits_what_was_measured(interrupted):
    path, output, status, _ = interrupted
    assert status == 0
    assert "interrupted" in output
    taken = read_calibration_file(path).samples
    assert taken.timings > 4 * len(GRID.cells())
    assert taken.rounds >= 1


@pytest.mark.slow
def test_a_killed_run_is_resumed_with_all_its_samples(interrupted, tmp_path):
    """Samples are flushed one by one: at any time the file is what a killed run leaves."""
    path, samples = tmp_path / "calibration.json", tmp_path / "calibration.samples.jsonl"
    *_, before = interrupted
    before = before[: before.rfind(b"\n") + 1]
    samples.write_bytes(before + b'{"kind": "timing", "rou')
    outcome = run_job(path, resume=True, budget_s=25.0)
    assert samples.read_bytes().startswith(before)
    taken_before = before.count(b'"timing"')
    assert outcome.content.samples.timings > taken_before
    counted = len(read_samples(samples).visits().time_ns)
    assert counted >= taken_before - VISITS * len(GRID.cells())


def test_ctrl_c_in_the_first_round_fits_what_was_measured(tmp_path, monkeypatch):
    visited = []

    def interrupted_after_a_while(cell, signals, real=measure.visit):
        visited.append(cell)
        if len(visited) > N_FITTING:
            raise KeyboardInterrupt
        return real(cell, signals)

    monkeypatch.setattr(measure, "visit", interrupted_after_a_while)
    outcome = run_job(tmp_path / "calibration.json", budget_s=60.0)
    assert outcome.content.samples.timings == N_FITTING
    assert outcome.content.noise_floor is None
    assert len(outcome.cells) == N_FITTING
    assert any("No round was finished" in note for note in outcome.notes)


def test_ctrl_c_in_the_first_visit_says_what_is_missing(tmp_path, monkeypatch):
    def interrupted(cell, signals):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "visit", interrupted)
    with pytest.raises(ValueError, match="only 0 workloads .* were measured"):
        run_job(tmp_path / "calibration.json", budget_s=60.0)


@pytest.mark.slow
def test_a_campaign_without_a_round_is_resumed_and_only_warm_cells_are_timed(tmp_path, outcome):
    path = tmp_path / "calibration.json"
    samples = path.with_suffix(".samples.jsonl")
    lines = outcome.samples_path.read_text().splitlines(keepends=True)
    kinds = [line.split('"')[3] for line in lines]
    first_timing = kinds.index("timing")
    partial = lines[:3] + lines[kinds.index("cells") : first_timing + 5]  # two micro repeats, five timings
    samples.write_text("".join(partial))
    again = run_job(path, resume=True, begun_s_ago=3.0)
    assert samples.read_text().startswith("".join(partial))
    log = read_samples(samples)
    assert {len(times) for times in log.micro.values()} == {MICRO_REPEATS}
    assert len(log.complete_rounds()) >= 1
    measured = dict(zip(map(str, again.cells), again.measured_ns, strict=True))
    before = dict(zip(map(str, outcome.cells), outcome.measured_ns, strict=True))
    ratios = [measured[name] / before[name] for name in measured.keys() & before.keys()]
    assert np.median(ratios) < 10  # a cold first run takes a hundred times as long


def test_a_folder_is_no_calibration_file(tmp_path):
    with pytest.raises(ValueError, match="expected a file to write, got the folder"):
        run_job(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("budget_s", [float("inf"), float("nan"), -1.0])
def test_a_budget_that_is_no_length_of_time_is_refused(tmp_path, budget_s):
    with pytest.raises(ValueError, match="--budget: expected at least 10 seconds"):
        run_job(tmp_path / "calibration.json", budget_s=budget_s)
