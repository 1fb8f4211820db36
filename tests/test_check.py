"""Whether a calibration still holds: the verdict on made-up timings, and what the command says of it."""

import itertools
import json

import numpy as np
import pytest
from _campaigns import MICRO_NS, NAME, SUITE, fitted, made_up, quick_machine
from _content import content, sealed
from _documented import assert_documented
from typer.testing import CliRunner

from calibrate import check
from calibrate.check import CANARY_FACTOR, chosen_cells, drift_of, renewal, verdict_of
from calibrate.cli import app
from calibrate.machine import CANARIES
from calibrate.measure import by_work
from calibrate.samples import SampleLog
from rlxjax import load_calibration
from rlxjax.calibration import CalibrationFile, Pace
from rlxjax.fit import LatencyEstimate, cell_runs, estimate

PREDICTED_NS = np.geomspace(5e4, 2e7, 24)
CANARY_NS = {"launch": 5e3, "copy": 1e7, "maxima wide": 4e5} | dict.fromkeys(CANARIES, 2e5)


def expected(spread, shared=0.0):
    """Return what a calibration says of the cells."""
    return LatencyEstimate(PREDICTED_NS, np.full((len(PREDICTED_NS), 1), shared), np.full(len(PREDICTED_NS), spread))


def machine_then(others):
    """Return the machine of a calibration that other programs kept so many processors of busy."""
    section = CalibrationFile.model_validate(content()).machine
    return section.model_copy(update={"pace": Pace(usual=None, usual_ns={}, log_sd=0.05, others=others)})


def judged(factor=1.0, *, seed=0, spread=0.08, shared=0.02, noise=0.03, others=None, then=None, **canaries):
    """Return the verdict on cells that take a factor of the prediction, with errors as expected, and what it says."""
    rng = np.random.default_rng(seed)
    errors = shared * rng.normal() + spread * rng.normal(size=len(PREDICTED_NS))
    errors += np.abs(noise * rng.normal(size=len(PREDICTED_NS)))
    now = CANARY_NS | {name: CANARY_NS[name] * times for name, times in canaries.items()}
    slower = verdict_of({}, now, CANARY_NS).slower
    measured = PREDICTED_NS * factor * np.exp(errors)
    drift = drift_of(measured, expected(spread, shared), np.full(len(PREDICTED_NS), noise), slower)
    found = verdict_of({"toy": drift}, now, CANARY_NS, others, then)
    return found, " ".join(found.sentences("my file.json"))


def test_errors_that_the_calibration_expects_are_good():
    for seed, spread in itertools.product(range(20), (0.02, 0.08, 0.15)):
        verdict, text = judged(seed=seed, spread=spread)
        assert (verdict.word, verdict.status) == ("good", 0), (seed, spread)
        assert text.endswith("may be chance). calibration: my file.json")
    wild = np.ones(len(PREDICTED_NS))
    wild[7] = 50.0
    assert judged(wild)[0].word == "good"


def test_runs_that_all_take_another_time_have_drifted_by_that_factor():
    for seed, factor in itertools.product(range(5), (1.3, 2.0, 0.7)):
        verdict, text = judged(factor, seed=seed, spread=0.05)
        assert (verdict.word, verdict.status) == ("drifted", 1), (seed, factor)
        assert verdict.models["toy"].factor == pytest.approx(factor, rel=0.1)
        assert f"{verdict.models['toy'].factor:.2f} times the predicted time" in text
        assert "rlxjax calibrate --out 'my file.json'" in text


def test_a_micro_benchmark_and_a_shared_pace_are_no_drift_and_a_drift_of_a_busier_machine_is_inconclusive():
    verdict, text = judged(copy=2.0)
    assert verdict.word == "good"
    assert [name for name, drift in verdict.canaries.items() if drift.is_off] == ["copy"]
    assert "Micro-benchmarks: copy takes 2.00 times its earlier time" in text
    assert not judged(copy=CANARY_FACTOR)[0].canaries["copy"].is_off
    assert "maxima wide takes 1.90 times its earlier time" in judged(1.5, **{"maxima wide": 1.9})[1]

    paced = dict.fromkeys(CANARIES, 1.4)
    verdict, text = judged(1.4, spread=0.02, **paced)
    assert verdict.word == "good"
    assert verdict.slower == pytest.approx(1.4)
    assert "The machine runs at 71 % of its speed at the calibration" in text
    for factor in (1.0, 1.8):  # runs that do not keep pace with the canaries
        assert judged(factor, spread=0.02, **paced)[0].word == "drifted"

    for factor, others, then, word, status in (
        (1.0, 0.9, None, "good", 0),  # within what is chance, whoever runs beside
        (1.5, 0.9, None, "inconclusive", 3),
        (0.6, 0.9, machine_then(0.1), "inconclusive", 3),
        (1.5, 0.9, machine_then(0.9), "drifted", 1),  # the calibration was made beside such work
        (1.5, 0.1, None, "drifted", 1),
        (1.5, None, machine_then(None), "drifted", 1),
    ):
        verdict, text = judged(factor, spread=0.02, others=others, then=then)
        assert (verdict.word, verdict.status) == (word, status), (factor, others)
        assert text.startswith("inconclusive: the machine is busy; 24 cells") == (status == 3)
        assert ("Other programs use 0.9 processors" in text) == bool(verdict.busy)
        assert ("Calibrate again: rlxjax calibrate" in text) == (status > 0)


def test_noise_widens_what_may_be_chance_and_one_round_says_nothing_of_it():
    widths = []
    for noise in (0.0, 0.05, np.nan):
        drift = drift_of(PREDICTED_NS, expected(0.02), np.full(len(PREDICTED_NS), noise))
        widths.append(drift.high / drift.low)
    restless = drift_of(PREDICTED_NS, expected(0.02), np.full(len(PREDICTED_NS), 0.0), 1.0, 0.1)
    assert restless.high / restless.low > widths[0]  # the machine changed its pace at the calibration
    assert widths == sorted(set(widths))


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    """A calibration of the toy suite."""
    made_up(path := tmp_path_factory.mktemp("check") / "c.json")
    return fitted(path).path


def test_whole_works_of_the_domain_are_timed_again_spread_over_their_times(calibration):
    calibrated = load_calibration(calibration, [SUITE.model]).of("toy")
    cells = chosen_cells(SUITE, calibrated)
    assert check.LEAST_CELLS <= len(cells) <= check.CELLS + 1
    assert all(len(work) == len(SUITE.model.variants) for work in by_work(cells).values())
    times_ns = estimate(calibrated.posterior, cell_runs(SUITE.model, cells)).time_ns
    assert max(times_ns) / min(times_ns) > 5
    small = {"rows": (1.0, 16.0), "width": (1.0, 16.0), "rows*width": (1.0, 64.0)}
    few = chosen_cells(SUITE, type(calibrated)(**{**vars(calibrated), "domain": small}))
    assert few
    assert all(cell.inputs["rows"] * cell.inputs["width"] <= 64 for cell in few)


@pytest.fixture
def file(calibration, tmp_path, monkeypatch):
    """A function that writes a calibration file, and makes the cells that are timed again a factor slower."""

    def write(factor=1.0, **fingerprint):
        found = json.loads(calibration.read_text())
        for section in (found["machine"], *found["models"].values()):
            section["fingerprint"] |= fingerprint
            section["command"] = "rlxjax calibrate --budget 60 --out elsewhere.json"
        path = tmp_path / "c.json"
        path.write_text(json.dumps(sealed(found)))

        def timed_again(known, deadline, progress):
            ((suite, calibrated),) = known.values()
            cells = chosen_cells(suite, calibrated)
            times_ns = factor * np.asarray(estimate(calibrated.posterior, cell_runs(suite.model, cells)).time_ns)
            rounds = [list(zip([cell.name for cell in cells], times_ns.tolist(), strict=True))] * 3
            micro = {name: [time_ns] for name, time_ns in MICRO_NS.items()}
            header = SampleLog.new(suite, NAME).header
            return {"toy": SampleLog(header, cells, rounds)}, SampleLog(header, micro=micro)

        monkeypatch.setattr(check, "timed_again", timed_again)
        return path

    return write


def invoke(*arguments):
    return CliRunner().invoke(app, ["validate", "--suite", NAME, *map(str, arguments)])


def test_the_command_says_the_verdict_and_exits_with_its_status(file):
    for factor, word, status in ((1.0, "good", 0), (1.5, "drifted", 1)):
        path = file(factor)
        result = invoke(path)
        assert result.exit_code == status, result.stderr
        assert result.stdout.startswith(f"{word}: 24 cells of toy take {factor:.2f} times")
        assert (f"rlxjax calibrate --budget 60 --out {path}" in result.stdout) == (word == "drifted")
        both = invoke(path, "--quiet", "--json")
        printed = json.loads(both.stdout)
        assert_documented("validate", printed)
        assert both.stderr.startswith(f"warning: {word}: 24 cells") if status else not both.stderr
        assert printed["verdict"] == word
        assert printed["models"]["toy"]["factor"] == pytest.approx(factor, rel=0.05)


def test_the_cells_are_really_timed_and_what_does_nothing_is_quicker_than_predicted(calibration, monkeypatch):
    monkeypatch.setattr(check, "RESERVE_S", 5.0)
    monkeypatch.setattr(check, "LEAST_MEASURING_S", 0.2)
    with quick_machine():
        result = invoke(calibration, "--budget", "5", "--json")
    assert result.exit_code in (1, 3), result.stderr  # by what else runs here
    assert json.loads(result.stdout)["models"]["toy"]["factor"] < 0.9


def test_another_machine_is_not_this_one_and_other_software_is_named_and_does_not_decide(file):
    elsewhere = {"cpu_model": "Z80", "platform": "abacus", "device_kind": "H100", "cores": 999, "machine": "vax"}
    for name, value in elsewhere.items():
        path = file(**{name: value})
        result = invoke(path)
        assert result.exit_code == 2
        assert result.stdout.startswith(f"not this machine: {name} {value!r} there, ")
        assert f"rlxjax calibrate --budget 60 --out {path}" in result.stdout
    printed = json.loads(invoke(path, "--json").stdout)
    assert (printed["verdict"], printed["models"]) == ("not this machine", {})
    result = invoke(file(jax="0.0.1", thread_flags={"A": "1"}))
    assert result.exit_code == 0
    assert "The calibration was made with other software: thread_flags" in " ".join(result.stdout.split())
    assert "jax '0.0.1' there" in " ".join(result.stdout.split())


def test_a_suite_that_is_not_given_and_a_budget_that_is_too_short_are_refused(file):
    result = CliRunner().invoke(app, ["validate", str(file())])
    assert result.exit_code == 2
    said = f"toy was not validated: give its suite with --suite module:NAME (the file names the suite {NAME})"
    assert said in result.stderr
    for budget in ("4", "nan", "inf", "-1"):
        result = invoke(file(), "--budget", budget)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: --budget: expected at least 5 seconds, got ")


def test_a_calibration_is_made_anew_as_it_was_made():
    made = "rlxjax calibrate --budget 30 --resume --device cpu --suite a:B --model 'a b.npz' --out x --force"
    expected = "rlxjax calibrate --budget 30 --device cpu --suite a:B --model 'a b.npz' --out y.json"
    assert renewal("y.json", [made, made]) == expected
    for other in ("", "rlxjax refit a.toy.samples.jsonl"):
        assert renewal("y.json", [other]) == "rlxjax calibrate --out y.json"
    assert renewal("y.json", [made, ""]) == f"{expected} && rlxjax calibrate --out y.json"
