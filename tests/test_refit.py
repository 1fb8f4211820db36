"""`rlxjax refit`: a calibration of kept samples."""

import gzip
import json
import shlex

import pytest
from _campaigns import MICRO_NS, fitted, made_up, saved_model
from _documented import assert_documented
from typer.testing import CliRunner

from calibrate import fits
from calibrate.cli import app
from calibrate.functions import function_cells
from calibrate.sample_lines import FunctionsHeader, FunctionVisit
from calibrate.samples import read_samples
from rlxjax.calibration import read_calibration_file, sha256_of
from rlxjax.fit import fit_posterior
from rlxjax.models import WELCH
from rlxjax.welch import RUNNER_VERSION


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the samples of two campaigns: `c.samples.jsonl`, and `l.samples.jsonl` with a model."""
    folder = tmp_path_factory.mktemp("re[fit]")  # rich takes brackets for markup
    made_up(folder / "c.json")
    made_up(folder / "l.json", [saved_model(folder)])
    return folder


def refit(*arguments):
    return CliRunner().invoke(app, ["refit", *map(str, arguments)])


def without_origin(content):
    """Return what a calibration says of the machine; what is held out is the grid's, and widens the spread."""
    origin = dict.fromkeys(("created", "command", "samples"), True)
    of_grid = {"held_out": True, "cautions": True, "uncertainty": {"spread"}}
    return content.model_dump(exclude={"models": {"welch": origin | of_grid}, "machine": origin})


def test_a_refit_says_what_the_job_says_of_the_same_samples(folder):
    samples, job_path = folder / "c.samples.jsonl", folder / "job.json"
    (folder / "job.samples.jsonl").write_bytes(samples.read_bytes())
    fitted(job_path)
    result = refit(samples, "--json", "--quiet")
    assert result.exit_code == 0, result.stderr
    assert all(line.startswith("warning: ") for line in result.stderr.splitlines())
    assert_documented("calibrate", json.loads(result.stdout))
    content = read_calibration_file(folder / "c.json")
    assert without_origin(content) == without_origin(read_calibration_file(job_path))
    for section in content.sections().values():
        assert section.command == shlex.join(["rlxjax", "refit", str(samples)])
        assert (section.samples.file, section.samples.sha256) == (samples.name, sha256_of(samples))
    assert "The samples are of runner" not in result.stdout


def test_compressed_samples_of_another_runner_are_fitted_and_marked(folder):
    text = (folder / "c.samples.jsonl").read_text()
    other = text.replace(f'"runner":{RUNNER_VERSION}', f'"runner":{RUNNER_VERSION + 1}', 1)
    packed, out = folder / "other.samples.jsonl.gz", folder / "elsewhere.json"
    packed.write_bytes(gzip.compress(other.encode()))
    result = refit(packed, "--out", out)
    assert result.exit_code == 0, result.stderr
    assert f"The samples are of runner {RUNNER_VERSION + 1}, and this is runner {RUNNER_VERSION}" in result.stdout
    # What is not known of that runner's schedule is what the model takes by default.
    other, own = (read_calibration_file(file).models["welch"] for file in (out, folder / "c.json"))
    assert {name: other.facts[name] for name in ("chunk_samples", "alone_samples_fused")} == {
        name: WELCH.facts[name] for name in ("chunk_samples", "alone_samples_fused")
    }
    assert (other.domain, other.model_version) == (own.domain, own.model_version)
    assert not (folder / "other.json").exists()


def test_runs_of_a_learned_fft_are_left_out_without_its_model_and_another_model_is_refused(folder):
    samples, (model,) = folder / "l.samples.jsonl", folder.glob("model*")
    result = refit(samples)
    assert result.exit_code == 0, result.stderr
    assert "workloads of learned FFTs were left out" in result.stdout
    content = read_calibration_file(folder / "l.json")
    assert content.models["welch"].learned_ffts == []
    assert "learned" not in content.models["welch"].held_out
    refused = refit(folder / "c.samples.jsonl", "--model", model)
    assert refused.exit_code == 2
    assert f"--model: {model} is not the model that the samples timed for n_fft" in refused.stderr


def test_a_fit_that_did_not_converge_is_written_only_if_asked(folder, monkeypatch):
    def fit(*arguments, **named):
        found = fit_posterior(*arguments, **named)
        return found._replace(terms=found.terms._replace(converged=False, message="It did not converge."))

    monkeypatch.setattr(fits, "fit_posterior", fit)
    samples, out = folder / "c.samples.jsonl", folder / "unfinished.json"
    for force, status in (((), 1), (("--force",), 0)):
        result = refit(samples, "--out", out, *force)
        assert result.exit_code == status, result.stderr
        assert "It did not converge." in result.stdout
        assert out.exists() == (status == 0)
        said = shlex.join(["rlxjax", "refit", str(samples), "--out", str(out), "--force"])
        assert (said in result.stdout) == (status == 1)


@pytest.fixture
def functions(folder, tmp_path):
    """A file of samples of functions, too few to fit."""
    machine = read_samples(folder / "c.samples.jsonl").fingerprint
    lines = [
        FunctionsHeader(protocol=2, fingerprint=machine),
        FunctionVisit(round=0, name=function_cells()[0].name, times_ns=[1]),
    ]
    path = tmp_path / "x.functions.jsonl"
    path.write_text("".join(line.model_dump_json() + "\n" for line in lines))
    return path


def test_samples_of_functions_are_never_overwritten_and_take_no_option_of_welch_peaks(functions, tmp_path):
    other, link = tmp_path / "other.json", tmp_path / "link"
    other.write_text("{}")
    link.symlink_to(functions)
    before = functions.read_bytes()
    for options, said in (
        (("--out", functions, "--force"), "--out: expected a file for the calibration, got that of the samples"),
        (("--out", link, "--force"), "--out: expected a file for the calibration, got that of the samples"),
        (("--prior", other), f"--prior: expected none, as {functions} holds functions"),
        (("--model", other), f"--model: expected none, as {functions} holds functions"),
        ((), "expected times of at least"),
    ):
        result = refit(functions, "--quiet", *options)
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert said in line
        assert functions.read_bytes() == before


def test_the_command_that_is_kept_of_functions_has_force(functions, monkeypatch):
    kept = []

    def fit(*given):
        kept.append(given)
        raise ValueError("enough")

    monkeypatch.setattr("calibrate.refit.fit_functions", fit)
    refit(functions, "--force")
    ((_, path, samples, command, _, force),) = kept
    assert (path, samples) == (functions.with_name("x.json"), functions)
    assert command == shlex.join(["rlxjax", "refit", str(functions), "--force"])
    assert force is True


def lines_without(folder, kind):
    lines = (folder / "c.samples.jsonl").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if json.loads(line)["kind"] != kind)


@pytest.mark.parametrize(
    ("name", "content", "options", "said"),
    [
        ("none.samples.jsonl", None, (), "none.samples.jsonl: no such file"),
        ("a.samples.jsonl.gz", b"not packed", (), "cannot be read (Not a gzipped file"),
        ("a.samples.jsonl.gz", gzip.compress(b"x" * 99)[:-20], (), "cannot be read ("),
        ("a.samples.jsonl", b"not samples\n", (), "line 1: content: Invalid JSON"),
        ("a.samples.jsonl.1", "whole", (), "--out: expected a file, as"),
        ("a.samples.jsonl", "whole", ("--out", "a.samples.jsonl"), "got that of the samples"),
        ("a.samples.jsonl", "whole", ("--out", "link"), "got that of the samples"),
        ("a.samples.jsonl", "whole", ("--out", "."), "expected a file to write, got the folder"),
        ("a.samples.jsonl", "whole", ("--prior", "none.json"), "none.json: no such file"),
        ("a.samples.jsonl", "whole", ("--model", "none.json"), "none.json: no such file"),
        ("a.samples.jsonl", "micro", (), f"no micro-benchmark of {', '.join(list(MICRO_NS)[:5])}"),
        ("a.samples.jsonl", "timing", (), "only 0 workloads were measured"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(folder, tmp_path, monkeypatch, name, content, options, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(name)
    samples = tmp_path / name
    if isinstance(content, str):
        samples.write_text(lines_without(folder, content))
    elif content is not None:
        samples.write_bytes(content)
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()}
    result = refit(name, *options)
    assert result.exit_code == 2
    lines = [line for line in result.stderr.splitlines() if not line.startswith("fitting: ")]
    assert len(lines) == 1
    assert said in lines[0]
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()} == before
