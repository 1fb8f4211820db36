"""Timings that cannot be, that are far off, too few, or all of one workload; fits that do not converge."""

import json
import time

import numpy as np
import pytest
from test_learned_job import WIDE, fitted, made_up, run_job
from typer.testing import CliRunner

import rlxjax as rx
from calibrate import cli, fits, job
from calibrate.fits import check_fittable
from calibrate.report import SKIPPED_SHOWN
from calibrate.validate import outliers
from calibrate.workloads import WITHOUT_MODEL, Cell
from rlxjax.calibration import read_calibration_file
from rlxjax.fit import fit_posterior

CELLS = WIDE.cells()
#: Far off by these factors.
SPOILT = dict(zip(CELLS[3::37], (1000.0, 1e-3, 20.0, 1e-2, 50.0), strict=False))


def spoil(samples, factors):
    """Make every time of some cells a factor longer."""
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "timing":
            factor = factors.get(Cell(line["strategy"], line["batch"], line["n_fft"], line["k"]), 1.0)
            line["times_ns"] = [max(1, int(factor * time_ns)) for time_ns in line["times_ns"]]
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_timings_a_thousand_times_off_are_down_weighted_counted_and_named(tmp_path):
    path = tmp_path / "calibration.json"
    made_up(path, [])
    spoil(path.with_suffix(".samples.jsonl"), SPOILT)
    outcome = fitted(path, [])
    named = read_calibration_file(path).fit.outliers
    assert len(named) == len(SPOILT)
    farthest_first = sorted(SPOILT, key=lambda cell: -abs(np.log(SPOILT[cell])))
    assert {text.partition(" took")[0] for text in named[:2]} == set(map(str, farthest_first[:2]))
    assert {text.partition(" took")[0] for text in named} == set(map(str, SPOILT))
    (note,) = [note for note in outcome.notes if "counted little" in note]
    assert note.startswith(f"{len(SPOILT)} of {len(CELLS)} workloads are off by more than 3 times")
    assert sum(str(cell) in note for cell in SPOILT) == min(SKIPPED_SHOWN, len(SPOILT))
    whole = np.array([cell not in SPOILT for cell in outcome.cells])
    np.testing.assert_allclose(outcome.predicted_ns[whole], outcome.measured_ns[whole], rtol=0.15)


def test_only_what_is_more_than_three_times_off_is_an_outlier():
    cells = [Cell("fast", batch, 64, 4) for batch in (1, 2, 3, 4, 5)]
    predicted = np.array([7.0, 7.0, 7.0, 7.0, np.nan])  # of the last nothing was predicted
    found = outliers(cells, 7.0 * np.array([3.1, 0.25, 1.0, 2.9, 1.0]), predicted)
    assert list(found.items()) == [
        (cells[1], "fast 2x64 k4 took 0.25 times its prediction"),
        (cells[0], "fast 1x64 k4 took 3.1 times its prediction"),
    ]


@pytest.fixture
def did_not_converge(monkeypatch):
    """Fits that say that they did not converge, whatever they found."""

    def fit(*arguments):
        found = fit_posterior(*arguments)
        message = "The fit of 150 timings did not converge in 200 steps."
        return found._replace(terms=found.terms._replace(converged=False, message=message))

    monkeypatch.setattr(fits, "fit_posterior", fit)


def test_a_fit_that_did_not_converge_is_told_and_written_only_if_asked(tmp_path, did_not_converge):
    path = tmp_path / "calibration.json"
    made_up(path, [])
    samples = path.with_suffix(".samples.jsonl").read_bytes()
    path.write_text("an earlier calibration")
    outcome = fitted(path, [])
    assert not outcome.is_written
    assert path.read_text() == "an earlier calibration"
    assert path.with_suffix(".samples.jsonl").read_bytes() == samples
    assert any("did not converge in 200 steps" in note for note in outcome.notes)
    assert f"rlxjax refit {path.with_suffix('.samples.jsonl')} --out {path} --force" in outcome.notes[-1]
    forced = run_job(path, [], grid=WIDE, resume=True, begun_s_ago=1e4, force=True)
    assert forced.is_written
    assert read_calibration_file(path).fit.converged is False
    assert not any("No calibration was written" in note for note in forced.notes)


@pytest.mark.parametrize(("flags", "status"), [((), 1), (("--force",), 0)])
def test_the_command_exits_with_1_where_nothing_was_written(
    flags, status, tmp_path, did_not_converge, monkeypatch
):
    path = tmp_path / "calibration.json"
    made_up(path, [])
    monkeypatch.setattr(cli, "_STARTED_S", time.perf_counter() - 1e4)
    monkeypatch.setattr(job, "Grid", lambda: WIDE)
    result = CliRunner().invoke(cli.app, ["calibrate", "--out", str(path), "--resume", *flags])
    assert result.exit_code == status, result.stderr
    assert "did not converge in 200 steps" in result.stdout
    assert path.exists() == (status == 0)
    assert ("calibration: not written" in result.stdout) == (status == 1)
    if status == 0:
        assert read_calibration_file(path).command.endswith("--resume --force")


def timings(batches, n_ffts, time_ns):
    count = len(batches)
    sizes = {"path": ["host"] * count, "k": [16] * count, "n_segments": [2] * count}
    return rx.Timings.checked(**sizes, batch=batches, n_fft=n_ffts, time_ns=time_ns)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_a_time_that_cannot_be_is_refused_with_its_place(bad):
    with pytest.raises(ValueError, match=r"time_ns\[2\]: expected a positive finite number, got"):
        timings([1, 2, 3], [64] * 3, [1e5, 2e5, bad])


@pytest.mark.parametrize("fit", [rx.fit_latency, fit_posterior])
def test_too_few_timings_or_those_of_one_workload_are_refused(fit):
    with pytest.raises(ValueError, match="expected at least 8 that count, got 7"):
        fit(timings(range(1, 8), [64] * 7, [1e5] * 7))
    with pytest.raises(ValueError, match="expected several workloads, got one: vary batch and n_fft"):
        fit(timings([4] * 20, [64] * 20, np.geomspace(1e5, 2e5, 20)))


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (
            CELLS[:7],
            "only 7 workloads that run no model were measured, too few to fit, which takes at least 8",
        ),
        (
            [Cell(strategy, 4, 64, k) for strategy in WITHOUT_MODEL for k in (4, 16)],
            "all 10 workloads measured have batch 4 and n_fft 64: a fit needs others as well",
        ),
    ],
)
def test_a_campaign_that_makes_no_fit_is_refused_with_what_is_missing(cells, said, tmp_path):
    with pytest.raises(ValueError, match=said) as refusal:
        check_fittable(cells, tmp_path / "c.samples.jsonl")
    assert "measure more with `rlxjax calibrate --resume`" in str(refusal.value)
    assert "\n" not in str(refusal.value)
