"""Campaigns that hold timings far off, too few, or all of one workload; fits that do not converge."""

import os

import jax
import numpy as np
import pytest
from _campaigns import GRID
from rich.console import Console
from typer.testing import CliRunner

from calibrate import cli, fits
from calibrate.fits import check_fittable
from calibrate.micro import NEEDED_MICRO
from calibrate.outcome import SKIPPED_SHOWN
from calibrate.progress import Progress
from calibrate.refit import refit
from calibrate.samples import SampleLog, SampleWriter, read_samples, timings_of
from calibrate.validate import outliers
from calibrate.workloads import WITHOUT_MODEL, Cell
from rlxjax.calibration import current_fingerprint, read_calibration_file
from rlxjax.fit import fit_posterior, predicted_ns
from rlxjax.models import WELCH

#: As many as other campaigns of the tests have, so that their fits share a program.
CELLS = GRID.cells()
#: Far off by these factors.
SPOILT = dict(zip(CELLS[3::19], (1000.0, 1e-3, 20.0), strict=False))


def campaign(path, factors):
    """Write the samples of two rounds on a machine of the prior's medians, some times a factor longer."""
    runs, rng = timings_of(CELLS, np.ones(len(CELLS))).runs, np.random.default_rng(0)
    true_ns = np.asarray(jax.jit(predicted_ns)(WELCH.prior.median, runs, dict(WELCH.facts)))
    log = SampleLog(current_fingerprint())
    with SampleWriter(path, log, append=False) as writer:
        for name in NEEDED_MICRO:
            writer.micro(name, 1e5)
        writer.cells(CELLS)
        for round_ in range(2):
            for cell, time_ns in zip(CELLS, true_ns, strict=True):
                factor = factors.get(cell, 1.0) * np.exp(rng.normal(0.02, 0.01))
                writer.timing(round_, cell, [max(1, int(time_ns * factor))])
    return path


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    return campaign(tmp_path_factory.mktemp("campaign") / "c.samples.jsonl", SPOILT)


def refitted(samples, out, force=False):
    with open(os.devnull, "w") as nowhere:
        progress = Progress(Console(file=nowhere))
        return refit(read_samples(samples), samples, out=out, command="a test", progress=progress, force=force)


def test_timings_a_thousand_times_off_are_down_weighted_counted_and_named(spoilt, tmp_path):
    outcome = refitted(spoilt, tmp_path / "calibration.json")
    named = read_calibration_file(outcome.path).models[WELCH.name].fit.outliers
    farthest_first = sorted(SPOILT, key=lambda cell: -abs(np.log(SPOILT[cell])))
    assert {text.partition(" took")[0] for text in named} == set(map(str, SPOILT))
    assert {text.partition(" took")[0] for text in named[:2]} == set(map(str, farthest_first[:2]))
    (note,) = [note for note in outcome.notes if "counted little" in note]
    assert note.startswith(f"{len(SPOILT)} of {len(CELLS)} workloads are off by more than 3 times")
    assert sum(str(cell) in note for cell in SPOILT) == min(SKIPPED_SHOWN, len(SPOILT))
    whole = np.array([cell not in SPOILT for cell in outcome.cells])
    np.testing.assert_allclose(outcome.predicted_ns[whole], outcome.measured_ns[whole], rtol=0.2)


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

    def fit(*arguments, **named):
        found = fit_posterior(*arguments, **named)
        message = "The fit of 150 timings did not converge in 200 steps."
        return found._replace(terms=found.terms._replace(converged=False, message=message))

    monkeypatch.setattr(fits, "fit_posterior", fit)


def test_a_fit_that_did_not_converge_is_told_and_written_only_if_asked(spoilt, tmp_path, did_not_converge):
    path, samples = tmp_path / "calibration.json", spoilt.read_bytes()
    path.write_text("an earlier calibration")
    outcome = refitted(spoilt, path)
    assert not outcome.is_written
    assert path.read_text() == "an earlier calibration"
    assert spoilt.read_bytes() == samples
    assert any("did not converge in 200 steps" in note for note in outcome.notes)
    assert f"rlxjax refit {spoilt} --out {path} --force" in outcome.notes[-1]
    forced = refitted(spoilt, path, force=True)
    assert forced.is_written
    assert read_calibration_file(path).models[WELCH.name].fit.converged is False
    assert not any("No calibration was written" in note for note in forced.notes)


@pytest.mark.parametrize(("flags", "status"), [((), 1), (("--force",), 0)])
def test_the_command_exits_with_1_where_nothing_was_written(flags, status, spoilt, tmp_path, did_not_converge):
    path = tmp_path / "calibration.json"
    result = CliRunner().invoke(cli.app, ["refit", str(spoilt), "--out", str(path), *flags])
    assert result.exit_code == status, result.stderr
    assert "did not converge in 200 steps" in " ".join(result.stdout.split())
    assert path.exists() == (status == 0)
    assert ("calibration: not written" in result.stdout) == (status == 1)
    if status == 0:
        assert read_calibration_file(path).models["welch"].command.endswith("--force")


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (CELLS[:7], "only 7 workloads were measured, too few to fit, which takes at least 8"),
        (
            [Cell(strategy, 4, 64, k) for strategy in WITHOUT_MODEL for k in (4, 16)],
            "workloads measured have batch 4 and n_fft 64: a fit needs others as well",
        ),
    ],
)
def test_a_campaign_that_makes_no_fit_is_refused_with_what_is_missing(cells, said, tmp_path):
    with pytest.raises(ValueError, match=said) as refusal:
        check_fittable(cells, tmp_path / "c.samples.jsonl")
    assert "measure more with `rlxjax calibrate --resume`" in str(refusal.value)
    assert "\n" not in str(refusal.value)
