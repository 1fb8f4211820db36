"""The timings behind the documentation give the figures in it."""

import gzip
import hashlib
import pathlib

import numpy as np
import pytest

from calibrate import fits, job
from calibrate.samples import quartile_ns, read_samples
from calibrate.validate import error_summaries, noise_floor
from calibrate.workloads import Grid
from rlxjax._calibration_file import read_calibration_file

ROOT = pathlib.Path(__file__).parent.parent
CALIBRATION = ROOT / "notebooks" / "data" / "calibration-cpu.json"
SAMPLES = ROOT / "docs" / "evidence" / "campaign-1-cpu.samples.jsonl.gz"
#: Another JAX may stop the fit a step earlier or later.
ERROR_ATOL = 0.005


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("evidence") / "samples.jsonl"
    path.write_bytes(gzip.decompress(SAMPLES.read_bytes()))
    return read_samples(path)


def test_the_samples_are_those_that_the_calibration_names():
    digest = hashlib.sha256(gzip.decompress(SAMPLES.read_bytes())).hexdigest()
    assert digest == read_calibration_file(CALIBRATION).samples.sha256


def test_refitting_the_samples_gives_the_errors_in_the_calibration_and_the_readme(log):
    content, grid, times = read_calibration_file(CALIBRATION), Grid(), log.times_ns()
    measured = quartile_ns(times)
    seen = np.array([grid.place(cell.batch, cell.n_fft) == "fit" for cell in log.cells])
    fitted = fits.fit_twice(log.cells, measured, seen, fits.micro_prior(job.micro_rates(log)), {})
    summaries = error_summaries(
        log.cells, measured, fitted.blind, fitted.blind_terms_ns, noise_floor(times), grid, seen
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for strategy, summary in summaries.items():
        stated = content.held_out[strategy]
        for name in ("fit", "interior", "edge", "held_out", "terms_alone", "noise_floor", "built_in"):
            assert getattr(summary, name) == pytest.approx(getattr(stated, name), abs=ERROR_ATOL)
        assert summary.covered == pytest.approx(stated.covered, abs=0.05)
        row = next(line for line in readme.splitlines() if line.startswith(f"│ {strategy} "))
        assert f"{100 * stated.held_out:.1f}" in row
        assert f"{100 * stated.built_in:.1f}" in row
