"""Whether a calibration still holds: the verdict on made-up timings, and what the command says of it."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from _content import content
from _documented import assert_documented, assert_narrow
from typer.testing import CliRunner

import rlxjax as rx
from calibrate import staleness
from calibrate.canary import CANARIES
from calibrate.cli import app
from calibrate.design import estimates
from calibrate.samples import SampleLog
from calibrate.staleness import CANARY_FACTOR, chosen_cells, judge
from calibrate.workloads import WITHOUT_MODEL, Cell
from rlxjax.calibration import CalibrationFile, current_fingerprint, write_json_file
from rlxjax.fit import LatencyEstimate
from rlxjax.models import WELCH

DOMAIN = {"batch": (1.0, 8192.0), "n_fft": (64.0, 4096.0), "k": (4.0, 64.0), "batch*n_fft": (64.0, 2.0**21)}
CELLS = chosen_cells(DOMAIN)
PREDICTED_NS = np.geomspace(5e4, 2e7, len(CELLS))
CANARY_NS = {"launch": 5e3, "copy": 1e7, "maxima wide": 4e5} | dict.fromkeys(CANARIES, 2e5)


def judged(factor=1.0, *, seed=0, spread=0.08, shared=0.02, noise=0.03, **canaries):
    """Return the verdict on runs that take a factor of the prediction, with errors as expected."""
    rng = np.random.default_rng(seed)
    errors = shared * rng.normal() + spread * rng.normal(size=len(CELLS))
    errors += np.abs(noise * rng.normal(size=len(CELLS)))
    scores = np.full((len(CELLS), 1), shared)
    expected = LatencyEstimate(PREDICTED_NS, scores, np.full(len(CELLS), spread))
    measured = PREDICTED_NS * factor * np.exp(errors)
    now = CANARY_NS | {name: CANARY_NS[name] * times for name, times in canaries.items()}
    return judge(CELLS, measured, expected, np.full(len(CELLS), noise), now, CANARY_NS)


def test_errors_that_the_calibration_expects_are_good():
    for seed, spread in itertools.product(range(20), (0.02, 0.08, 0.15)):
        verdict = judged(seed=seed, spread=spread)
        assert (verdict.word, verdict.status) == ("good", 0), (seed, spread)
        assert verdict.sentences("c.json")[1:] == ["by c.json"]


def test_runs_that_all_take_another_time_have_drifted_by_that_factor():
    for seed, factor in itertools.product(range(5), (1.3, 2.0, 0.7)):
        verdict = judged(factor, seed=seed, spread=0.05)
        assert (verdict.word, verdict.status) == ("drifted", 1), (seed, factor)
        assert verdict.overall.factor == pytest.approx(factor, rel=0.1)
        assert all(drift.factor == pytest.approx(1.0, rel=0.2) for drift in verdict.strategies.values())
        text = " ".join(verdict.sentences("my file.json"))
        assert f"{verdict.overall.factor:.2f} times what is predicted" in text
        assert "rlxjax calibrate --out 'my file.json'" in text


def test_one_strategy_that_drifts_is_named_and_no_other():
    names = np.array([cell.strategy for cell in CELLS])
    for strategy in WITHOUT_MODEL:
        verdict = judged(np.where(names == strategy, 1.8, 1.0), spread=0.05)
        assert verdict.word == "drifted"
        assert not verdict.overall.is_off
        assert [name for name, drift in verdict.strategies.items() if drift.is_off] == [strategy]
        first = verdict.sentences("c.json")[0]
        assert f"beside the others {strategy} {verdict.strategies[strategy].factor:.2f}" in first


def test_a_micro_benchmark_alone_is_named_and_explained_and_decides_nothing():
    verdict = judged(copy=2.0)
    assert verdict.word == "good"
    assert [name for name, drift in verdict.canaries.items() if drift.is_off] == ["copy"]
    text = " ".join(verdict.sentences("c.json"))
    assert "copy (device memory) takes 2.00 times as long as then" in text
    assert not judged(copy=CANARY_FACTOR).canaries["copy"].is_off


def test_a_micro_benchmark_is_named_beside_runs_that_drifted():
    text = " ".join(judged(1.5, **{"maxima wide": 1.9}).sentences("c.json"))
    assert "maxima wide (selection by maxima) takes 1.90 times as long as then" in text


def test_a_single_wild_run_is_no_drift():
    wild = np.ones(len(CELLS))
    wild[7] = 50.0
    assert judged(wild).word == "good"


def test_a_pace_that_the_canaries_share_is_said_and_is_no_drift():
    paced = dict.fromkeys(CANARIES, 1.4)
    verdict = judged(1.4, spread=0.02, **paced)
    assert verdict.word == "good"
    assert verdict.slower == pytest.approx(1.4)
    assert "The machine runs at 71 % of its pace then" in " ".join(verdict.sentences("c.json"))
    for factor in (1.0, 1.8):  # runs that do not keep pace with the canaries
        assert judged(factor, spread=0.02, **paced).word == "drifted"


def test_processors_that_others_keep_busy_are_a_drift_of_their_own():
    expected = LatencyEstimate(PREDICTED_NS, np.zeros((len(CELLS), 1)), np.full(len(CELLS), 0.02))
    noise = np.full(len(CELLS), 0.02)
    for others, word in ((0.1, "good"), (0.9, "drifted")):
        verdict = judge(CELLS, PREDICTED_NS, expected, noise, CANARY_NS, CANARY_NS, others)
        assert verdict.word == word
    assert "other programs keep 0.9 processors busy" in verdict.sentences("c.json")[0]


def test_noise_widens_what_may_be_chance_and_one_round_says_nothing_of_it():
    widths = []
    for noise in (0.0, 0.05, np.nan):
        expected = LatencyEstimate(PREDICTED_NS, np.zeros((len(CELLS), 1)), np.full(len(CELLS), 0.02))
        drift = judge(CELLS, PREDICTED_NS, expected, np.full(len(CELLS), noise), {}, CANARY_NS).overall
        widths.append(drift.high / drift.low)
    assert widths == sorted(set(widths))


@pytest.mark.parametrize(
    "domain",
    [
        DOMAIN,
        {"batch": (3.0, 3.0), "n_fft": (100.0, 100.0), "k": (1.0, 1.0), "batch*n_fft": (300.0, 300.0)},
        {"batch": (1.0, 4.0), "n_fft": (64.0, 256.0), "k": (4.0, 4.0), "batch*n_fft": (64.0, 512.0)},
    ],
)
def test_workloads_lie_in_the_domain_and_are_run_by_every_strategy(domain):
    cells = chosen_cells(domain)
    workloads = dict.fromkeys(cell[1:] for cell in cells)
    assert 1 <= len(workloads) <= 6
    assert len(workloads) == 6 or domain is not DOMAIN
    assert cells == [Cell(strategy, *sizes) for sizes in workloads for strategy in WITHOUT_MODEL]
    for batch, n_fft, k in workloads:
        for name, value in {"batch": batch, "n_fft": n_fft, "k": k, "batch*n_fft": batch * n_fft}.items():
            low, high = domain[name]
            assert low <= value <= high, (name, value)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A function that writes a calibration file, and makes the runs that are timed again a factor slower."""

    def write(factor=1.0, **fingerprint):
        path = tmp_path / "calibration.json"
        whole = content(**fingerprint)
        whole["models"]["welch"]["command"] = "rlxjax calibrate --budget 60 --out elsewhere.json"
        read = CalibrationFile.model_validate(whole)
        write_json_file(read, path)

        def timed_again(domain, here, deadline, progress):
            calibrated = rx.Calibration.from_file(read).of(WELCH.name)
            assert domain == calibrated.domain
            cells = chosen_cells(calibrated.domain)
            times = np.rint(factor * np.asarray(estimates(calibrated.posterior, cells).time_ns)).astype(int)
            rounds = [list(zip(cells, times.tolist(), strict=True))] * 3
            micro = {name: [time_ns] for name, time_ns in read.machine.canary_ns.items()}
            return SampleLog(current_fingerprint(), cells, rounds, micro)

        monkeypatch.setattr(staleness, "_time_again", timed_again)
        return path

    return write


def invoke(*arguments):
    return CliRunner().invoke(app, ["validate", *map(str, arguments)])


@pytest.mark.parametrize(("factor", "word", "status"), [(1.0, "good", 0), (1.5, "drifted", 1)])
def test_the_command_says_the_verdict_and_exits_with_its_status(factor, word, status, file):
    path = file(factor)
    result = invoke(path)
    assert result.exit_code == status, result.stderr
    assert result.stdout.startswith(f"{word}: 30 runs of 6 workloads take {factor:.2f} times")
    assert (f"rlxjax calibrate --budget 60 --out {path}" in result.stdout) == (word == "drifted")
    printed = json.loads(invoke(path, "--json").stdout)
    assert_documented("validate", printed)
    assert_narrow("\n".join(line for line in result.stdout.splitlines() if str(path) not in line))
    quiet = invoke(path, "--quiet")
    assert (quiet.exit_code, quiet.stdout) == (status, "")
    assert quiet.stderr.startswith(f"warning: {word}: 30 runs") if status else not quiet.stderr
    both = invoke(path, "--quiet", "--json")
    assert json.loads(both.stdout)["verdict"] == word
    assert both.stderr.startswith(f"warning: {word}: 30 runs") if status else not both.stderr
    assert printed["verdict"] == word
    assert printed["overall"]["factor"] == pytest.approx(factor, rel=1e-4)
    assert set(printed["strategies"]) == set(WITHOUT_MODEL)
    assert printed["timed"] == {"runs": 30, "workloads": 6}


def test_another_machine_is_not_this_one_and_nothing_is_timed(file):
    elsewhere = {"cpu_model": "Z80", "platform": "abacus", "device_kind": "H100", "cores": 999, "machine": "vax"}
    for name, value in elsewhere.items():
        path = file(**{name: value})
        result = invoke(path)
        assert result.exit_code == 2
        assert result.stdout.startswith(f"not this machine: {name} {value!r} there, ")
        assert f"rlxjax calibrate --budget 60 --out {path}" in result.stdout
        printed = json.loads(invoke(path, "--json").stdout)
        assert (printed["verdict"], printed["timed"]["runs"]) == ("not this machine", 0)


def test_other_software_is_named_and_does_not_decide(file):
    result = invoke(file(jax="0.0.1", thread_flags={"A": "1"}))
    assert result.exit_code == 0
    assert "It was made with other software: thread_flags" in result.stdout
    assert "jax '0.0.1' there" in " ".join(result.stdout.split())


def test_a_calibration_is_made_anew_as_it_was_made():
    made = "rlxjax calibrate --budget 30 --resume --device cpu --model 'a b.npz' --model c.npz --out x --force"
    expected = "rlxjax calibrate --budget 30 --device cpu --model 'a b.npz' --model c.npz --out y.json"
    assert staleness.renewal("y.json", made) == expected
    for other in ("", "rlxjax refit a.samples.jsonl --model b.npz"):
        assert staleness.renewal("y.json", other) == "rlxjax calibrate --out y.json"


def test_a_learned_path_that_is_not_timed_again_is_named():
    verdict = dataclasses.replace(judged(), models=["m.npz"])
    assert any("learned path was not timed again" in text for text in verdict.sentences("c.json"))
    assert verdict.as_json("c.json")["models_not_timed_again"] == ["m.npz"]


@pytest.mark.parametrize("budget", ["4", "nan", "inf", "-1"])
def test_a_budget_that_is_too_short_is_refused(budget, file):
    result = invoke(file(), "--budget", budget)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --budget: expected at least 5 seconds, got ")
