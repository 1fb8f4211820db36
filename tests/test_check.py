"""Whether a calibration still holds: the verdict on made-up timings, and what the command says of it."""

import json

import numpy as np
import pytest
from _campaigns import NAME, SUITE, fitted, made_up, quick_machine
from _content import content, sealed
from _documented import assert_documented
from typer.testing import CliRunner

from calibrate import check
from calibrate.check import Agreement, Validation, chosen_cells, renewal
from calibrate.cli import app
from calibrate.judge import busier
from calibrate.measure import by_work
from calibrate.samples import SampleLog
from rlxjax import load_calibration
from rlxjax.calibration import CalibrationFile, Pace
from rlxjax.fit import COVERED_SDS, cell_runs, estimate

PREDICTED_NS = np.geomspace(5e4, 2e7, 24)


def judged(log_errors, log_sd, others=None, then=None):
    """Return the verdict on cells whose times are off by log errors, and what it says."""
    sds = np.full(len(PREDICTED_NS), log_sd)
    agreement = Agreement.of(PREDICTED_NS * np.exp(log_errors), PREDICTED_NS, sds)
    found = Validation({"toy": agreement}, others, busier(others, then))
    return found, " ".join(found.sentences("my file.json"))


def test_errors_that_the_calibration_expects_are_good_and_another_speed_is_off():
    rng = np.random.default_rng(0)
    for sd in (0.02, 0.08, 0.15):
        for _ in range(20):
            errors = sd * rng.normal(size=len(PREDICTED_NS))
            found, text = judged(errors, sd)
            assert (found.word, found.status) == ("good", 0)
            assert text.startswith(f"good: {np.sum(np.abs(errors) <= COVERED_SDS * sd)} of 24 cells of toy are inside")
            assert text.endswith("times the predicted time. calibration: my file.json")
            for factor in (0.5, 2.0):
                found, text = judged(errors + np.log(factor), sd)
                assert (found.word, found.status) == ("off", 1)
                assert found.models["toy"].factor == pytest.approx(factor, rel=0.2)
                assert "rlxjax calibrate --out 'my file.json'" in text
    scattered = np.resize([-1.0, 1.0], len(PREDICTED_NS))
    assert judged(scattered, 0.1)[0].word == "off"  # the median alone would be right
    assert judged(np.eye(1, len(PREDICTED_NS))[0] * 4.0, 0.1)[0].word == "good"  # one wild cell


def test_what_cannot_be_told_is_inconclusive():
    none = np.zeros(len(PREDICTED_NS))
    found, text = judged(none + np.log(0.56), 1.0)  # wide intervals hold every time
    assert (found.word, found.status) == ("inconclusive", 3)
    assert text.startswith("inconclusive: 24 of 24 cells of toy are inside their 90 % intervals")
    assert judged(np.where(np.arange(24) < 10, 0.0, 0.15), 0.05)[0].word == "off"
    assert judged(np.where(np.arange(24) < 15, 0.0, 0.15), 0.05)[0].word == "inconclusive"
    section = CalibrationFile.model_validate(content()).machine
    then = section.model_copy(update={"pace": Pace(usual=None, usual_ns={}, log_sd=0.05, others=0.9)})
    for errors, others, before, word in (
        (none, 0.9, None, "good"),
        (none + 0.5, 0.9, None, "inconclusive"),
        (none + 0.5, 0.9, then, "off"),  # the calibration was made beside such work
        (none + 0.5, 0.1, None, "off"),
    ):
        found, text = judged(errors, 0.05, others, before)
        assert found.word == word
        assert ("Other programs use 0.9 processors" in text) == bool(found.busy) == (others == 0.9 and before is None)
    both = {"good": judged(none, 0.1)[0].models["toy"], "off": judged(none + 1.0, 0.1)[0].models["toy"]}
    wide = {"wide": judged(none + 1.0, 2.0)[0].models["toy"]}
    assert [Validation(own).word for own in (both, both | wide, wide)] == ["off", "off", "inconclusive"]


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
            return {"toy": SampleLog(SampleLog.new(suite, NAME).header, cells, rounds)}

        monkeypatch.setattr(check, "timed_again", timed_again)
        return path

    return write


def invoke(*arguments):
    return CliRunner().invoke(app, ["validate", "--suite", NAME, *map(str, arguments)])


def test_the_command_says_the_verdict_and_exits_with_its_status(file):
    for factor, word, status in ((1.0, "good", 0), (5.0, "off", 1)):
        path = file(factor)
        result = invoke(path)
        assert result.exit_code == status, result.stderr
        assert result.stdout.startswith(f"{word}: {24 if status == 0 else 0} of 24 cells of toy are inside")
        assert f"{factor:.2f} times the predicted time" in result.stdout
        assert (f"rlxjax calibrate --budget 60 --out {path}" in result.stdout) == (word == "off")
        both = invoke(path, "--quiet", "--json")
        printed = json.loads(both.stdout)
        assert_documented("validate", printed)
        assert both.stderr.startswith(f"warning: {word}: 0 of 24 cells") if status else not both.stderr
        assert printed["verdict"] == printed["models"]["toy"]["verdict"] == word
        assert printed["models"]["toy"]["factor"] == pytest.approx(factor, rel=0.05)


def test_the_cells_are_really_timed_and_what_does_nothing_is_quicker_than_predicted(calibration, monkeypatch):
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
