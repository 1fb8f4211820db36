"""The timings behind the documentation give the figures in it."""

import json
import pathlib

import pytest

from benchmarks.calibration_evidence import FIT, evidence, read_campaign, summary_tables
from calibrate import fits
from calibrate.job import facts_of
from calibrate.samples import read_samples, timings_of
from calibrate.validate import error_summaries
from calibrate.visits import noise_floor, quantile_ns
from calibrate.workloads import Grid
from rlxjax.calibration import population_prior, read_calibration_file, sha256_of
from rlxjax.models import WELCH

ROOT = pathlib.Path(__file__).parent.parent
CALIBRATION = ROOT / "notebooks" / "data" / "calibration-cpu.json"
EVIDENCE = ROOT / "docs" / "evidence"
SAMPLES = EVIDENCE / "campaign-3-cpu.samples.jsonl.gz"
CAMPAIGNS = sorted(EVIDENCE.glob("*.samples.jsonl.gz"))
#: Another JAX may stop the fit a step earlier or later.
ERROR_ATOL = 0.005
#: The same of what few choices decide: one in 56 of the largest, two timings in 280, a few pairs in 300.
REGRET_ATOL, COVERED_ATOL, ORDERED_ATOL = 0.03, 0.01, 0.01


def test_the_samples_are_those_that_the_calibration_names():
    named = read_calibration_file(CALIBRATION).models["welch"].samples
    assert (named.file, named.sha256) == (SAMPLES.name, sha256_of(SAMPLES))


@pytest.mark.slow
def test_refitting_the_samples_gives_the_errors_in_the_calibration():
    stated, grid, log = read_calibration_file(CALIBRATION).models["welch"].held_out, Grid(), read_samples(SAMPLES)
    visits = log.visits()
    measured = quantile_ns(visits)
    seen = grid.seen(log.cells)
    timings, prior = timings_of(log.cells, measured), population_prior(WELCH, "cpu")
    fitted = fits.fit_twice(timings, seen, prior, facts_of(log, {}))
    summaries = error_summaries(
        log.cells, measured, fitted.blind, fitted.blind_terms_ns, noise_floor(visits), grid, seen
    )
    assert set(summaries) == set(stated)
    for strategy, summary in summaries.items():
        for name in ("fit", "interior", "edge", "held_out", "terms_alone", "noise_floor", "built_in"):
            assert getattr(summary, name) == pytest.approx(getattr(stated[strategy], name), abs=ERROR_ATOL)
        assert summary.covered == pytest.approx(stated[strategy].covered, abs=0.05)


def test_the_page_states_the_figures_of_the_evidence():
    campaigns = json.loads((EVIDENCE / "calibration-evidence.json").read_text(encoding="utf-8"))["campaigns"]
    assert [path.name.split(".")[0] for path in CAMPAIGNS] == list(campaigns)
    assert summary_tables(campaigns) in (ROOT / "docs" / "calibrated-model.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.name.split(".")[0])
def test_the_timings_of_every_campaign_give_the_figures_of_its_evidence(path):
    stated = json.loads((EVIDENCE / "calibration-evidence.json").read_text(encoding="utf-8"))
    expected = stated["campaigns"][path.name.split(".")[0]]
    found = evidence(read_campaign(path), Grid())
    for strategy, errors in expected["errors"].items():
        for kind in ("held_out", "terms_alone", "noise_floor"):
            assert found["errors"][strategy][kind] == pytest.approx(errors[kind], abs=ERROR_ATOL)
    for method in ("built-in constants", "non-negative least squares", FIT):
        mine, its = found["methods"][method], expected["methods"][method]
        assert mine["error"] == pytest.approx(its["error"], abs=ERROR_ATOL)
        assert mine["regret_mean"] == pytest.approx(its["regret_mean"], abs=ERROR_ATOL)
        assert mine["regret_max"] == pytest.approx(its["regret_max"], abs=REGRET_ATOL)
        assert mine["ordered"] == pytest.approx(its["ordered"], abs=ORDERED_ATOL)
        assert mine["brier"] == pytest.approx(its["brier"], abs=ERROR_ATOL)
    assert found["coverage"]["share"] == pytest.approx(expected["coverage"]["share"], abs=COVERED_ATOL)
