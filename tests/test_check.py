"""Whether a calibration still holds: the verdict on made-up timings, and what the command says of it."""

import itertools
import json

import numpy as np
import pytest
from _campaigns import MICRO_NS, NAME, SUITE, fitted, made_up
from _content import sealed
from _documented import assert_documented
from typer.testing import CliRunner

from calibrate import check
from calibrate.check import CANARY_FACTOR, chosen_cells, drift_of, renewal, verdict_of
from calibrate.cli import app
from calibrate.machine import CANARIES
from calibrate.measure import by_work
from calibrate.samples import SampleLog
from rlxjax import load_calibration
from rlxjax.fit import LatencyEstimate, cell_runs, estimate

PREDICTED_NS = np.geomspace(5e4, 2e7, 24)
CANARY_NS = {"launch": 5e3, "copy": 1e7, "maxima wide": 4e5} | dict.fromkeys(CANARIES, 2e5)


def expected(spread, shared=0.0):
    """Return what a calibration says of the cells."""
    return LatencyEstimate(PREDICTED_NS, np.full((len(PREDICTED_NS), 1), shared), np.full(len(PREDICTED_NS), spread))


def judged(factor=1.0, *, seed=0, spread=0.08, shared=0.02, noise=0.03, others=None, **canaries):
    """Return the verdict on cells that take a factor of the prediction, with errors as expected."""
    rng = np.random.default_rng(seed)
    errors = shared * rng.normal() + spread * rng.normal(size=len(PREDICTED_NS))
    errors += np.abs(noise * rng.normal(size=len(PREDICTED_NS)))
    now = CANARY_NS | {name: CANARY_NS[name] * times for name, times in canaries.items()}
    slower = verdict_of({}, now, CANARY_NS).slower
    measured = PREDICTED_NS * factor * np.exp(errors)
    drift = drift_of(measured, expected(spread, shared), np.full(len(PREDICTED_NS), noise), slower)
    return verdict_of({"toy": drift}, now, CANARY_NS, others)


def test_errors_that_the_calibration_expects_are_good():
    for seed, spread in itertools.product(range(20), (0.02, 0.08, 0.15)):
        verdict = judged(seed=seed, spread=spread)
        assert (verdict.word, verdict.status) == ("good", 0), (seed, spread)
        assert verdict.sentences("c.json")[1:] == ["by c.json"]
    wild = np.ones(len(PREDICTED_NS))
    wild[7] = 50.0
    assert judged(wild).word == "good"


def test_runs_that_all_take_another_time_have_drifted_by_that_factor():
    for seed, factor in itertools.product(range(5), (1.3, 2.0, 0.7)):
        verdict = judged(factor, seed=seed, spread=0.05)
        assert (verdict.word, verdict.status) == ("drifted", 1), (seed, factor)
        assert verdict.models["toy"].factor == pytest.approx(factor, rel=0.1)
        text = " ".join(verdict.sentences("my file.json"))
        assert f"{verdict.models['toy'].factor:.2f} times what is predicted" in text
        assert "rlxjax calibrate --out 'my file.json'" in text


def test_a_micro_benchmark_alone_is_named_and_explained_and_decides_nothing():
    verdict = judged(copy=2.0)
    assert verdict.word == "good"
    assert [name for name, drift in verdict.canaries.items() if drift.is_off] == ["copy"]
    text = " ".join(verdict.sentences("c.json"))
    assert "micro-benchmarks: copy takes 2.00 times as long as then" in text
    assert not judged(copy=CANARY_FACTOR).canaries["copy"].is_off
    text = " ".join(judged(1.5, **{"maxima wide": 1.9}).sentences("c.json"))
    assert "maxima wide takes 1.90 times as long as then" in text


def test_a_pace_that_the_canaries_share_is_said_and_is_no_drift():
    paced = dict.fromkeys(CANARIES, 1.4)
    verdict = judged(1.4, spread=0.02, **paced)
    assert verdict.word == "good"
    assert verdict.slower == pytest.approx(1.4)
    assert "The machine runs at 71 % of its pace then" in " ".join(verdict.sentences("c.json"))
    for factor in (1.0, 1.8):  # runs that do not keep pace with the canaries
        assert judged(factor, spread=0.02, **paced).word == "drifted"


def test_processors_that_others_keep_busy_are_a_drift_of_their_own():
    for others, word in ((0.1, "good"), (0.9, "drifted")):
        verdict = judged(spread=0.02, others=others)
        assert verdict.word == word
    assert "other programs keep 0.9 processors busy" in verdict.sentences("c.json")[0]


def test_noise_widens_what_may_be_chance_and_one_round_says_nothing_of_it():
    widths = []
    for noise in (0.0, 0.05, np.nan):
        drift = drift_of(PREDICTED_NS, expected(0.02), np.full(len(PREDICTED_NS), noise))
        widths.append(drift.high / drift.low)
    assert widths == sorted(set(widths))


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    """A calibration of the toy suite."""
    made_up(path := tmp_path_factory.mktemp("check") / "c.json")
    return fitted(path).path


def test_whole_works_of_the_domain_are_timed_again_spread_over_their_times(calibration):
    calibrated = load_calibration(calibration, [SUITE.model]).of("toy")
    cells = chosen_cells(SUITE, calibrated)
    works = by_work(cells)
    assert check.LEAST_CELLS <= len(cells) <= check.CELLS + 1
    assert all(len(work) == len(SUITE.model.variants) for work in works.values())
    times_ns = [float(calibrated.predict_ns(cell.variant, **cell.inputs)) for cell in cells]
    assert max(times_ns) / min(times_ns) > 5
    small = {"rows": (1.0, 16.0), "width": (1.0, 16.0), "rows*width": (1.0, 64.0)}
    few = chosen_cells(SUITE, type(calibrated)(**{**vars(calibrated), "domain": small}))
    assert few
    assert all(cell.inputs["rows"] * cell.inputs["width"] <= 64 for cell in few)


@pytest.fixture
def file(calibration, tmp_path, monkeypatch):
    """A function that writes a calibration file, and makes the cells that are timed again a factor slower."""

    def write(factor=1.0, **fingerprint):
        content = json.loads(calibration.read_text())
        for section in (content["machine"], *content["models"].values()):
            section["fingerprint"] |= fingerprint
            section["command"] = "rlxjax calibrate --budget 60 --out elsewhere.json"
        path = tmp_path / "c.json"
        path.write_text(json.dumps(sealed(content)))

        def timed_again(timed, deadline, progress):
            ((suite, calibrated),) = timed.values()
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


@pytest.mark.parametrize(("factor", "word", "status"), [(1.0, "good", 0), (1.5, "drifted", 1)])
def test_the_command_says_the_verdict_and_exits_with_its_status(factor, word, status, file):
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
    result = invoke(calibration, "--budget", "5", "--json")
    assert result.exit_code == 1, result.stderr
    assert json.loads(result.stdout)["models"]["toy"]["factor"] < 0.9


def test_another_machine_is_not_this_one_and_nothing_is_timed(file):
    elsewhere = {"cpu_model": "Z80", "platform": "abacus", "device_kind": "H100", "cores": 999, "machine": "vax"}
    for name, value in elsewhere.items():
        path = file(**{name: value})
        result = invoke(path)
        assert result.exit_code == 2
        assert result.stdout.startswith(f"not this machine: {name} {value!r} there, ")
        assert f"rlxjax calibrate --budget 60 --out {path}" in result.stdout
    printed = json.loads(invoke(path, "--json").stdout)
    assert (printed["verdict"], printed["models"]) == ("not this machine", {})


def test_other_software_is_named_and_does_not_decide(file):
    result = invoke(file(jax="0.0.1", thread_flags={"A": "1"}))
    assert result.exit_code == 0
    assert "It was made with other software: thread_flags" in " ".join(result.stdout.split())
    assert "jax '0.0.1' there" in " ".join(result.stdout.split())


def test_a_section_whose_suite_is_not_given_is_not_timed_and_the_option_is_named(file):
    result = CliRunner().invoke(app, ["validate", str(file())])
    assert result.exit_code == 2
    assert (
        f"toy was not timed again: give its suite with --suite module:NAME (the file calls it {NAME})" in result.stderr
    )


def test_a_calibration_is_made_anew_as_it_was_made():
    made = "rlxjax calibrate --budget 30 --resume --device cpu --suite a:B --model 'a b.npz' --out x --force"
    expected = "rlxjax calibrate --budget 30 --device cpu --suite a:B --model 'a b.npz' --out y.json"
    assert renewal("y.json", [made, made]) == expected
    for other in ("", "rlxjax refit a.toy.samples.jsonl"):
        assert renewal("y.json", [other]) == "rlxjax calibrate --out y.json"
    assert renewal("y.json", [made, ""]) == f"{expected} && rlxjax calibrate --out y.json"


def test_a_budget_that_is_too_short_is_refused(file):
    for budget in ("4", "nan", "inf", "-1"):
        result = invoke(file(), "--budget", budget)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: --budget: expected at least 5 seconds, got ")
