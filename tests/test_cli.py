import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from _content import content, sealed
from typer.testing import CliRunner

import rlxjax
from calibrate import cli, command_line
from calibrate.cli import app
from rlxjax import load_calibration
from rlxjax.calibration import CalibrationFile, default_calibration_path, write_json_file
from rlxjax.models import WELCH

SAMPLES = Path(__file__).parent.parent / "docs/evidence/campaign-3-cpu.welch.samples.jsonl.gz"
COMMANDS = [command.callback.__name__ for command in app.registered_commands]


@pytest.fixture
def file(tmp_path):
    """A calibration file of this machine, with the prior's coefficients."""
    path = tmp_path / "calibration.json"
    write_json_file(CalibrationFile.model_validate(content()), path)
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_predict_prints_what_the_library_predicts(file):
    result = invoke("predict", file, "--batch", 512, "--n-fft", 128, "--k", 8, "--json")
    assert result.exit_code == 0
    printed, calibration = json.loads(result.stdout), load_calibration(file)
    for strategy, time_ns in printed["predicted_ns"].items():
        assert time_ns == pytest.approx(float(calibration.predict_ns(strategy, 512, 128, 8)), rel=1e-12)
    assert printed["pick"] == calibration.pick(512, 128, 8)
    assert printed["in_domain"] is True
    decided = calibration.decide(512, 128, 8, fused=printed["pick"], kept=printed["next_best"])
    assert printed["probability"] == pytest.approx(float(decided.probability), rel=1e-12)
    assert printed["probability"] >= 0.5
    assert printed["verdict"] == (printed["pick"] if printed["probability"] >= 0.9 else "undecided")


@pytest.mark.parametrize(("segments", "host"), [(1, "ultra"), (2, "fast"), (8, "host")])
def test_predict_and_explain_agree_for_any_number_of_segments(segments, host, file):
    sizes = ("--batch", 8, "--n-fft", 128, "--k", 8, "--segments", segments, "--json")
    results = [invoke(command, file, *sizes) for command in ("predict", "explain")]
    predicted, explained = (json.loads(result.stdout) for result in results)
    for name in ("pick", "verdict", "in_domain", "n_segments"):
        assert predicted[name] == explained[name]
    assert predicted["probability"] == pytest.approx(explained["probability"], rel=1e-9)
    times_ns = {one["strategy"]: one["time_ns"] for one in explained["strategies"]}
    assert host in times_ns
    assert {name: predicted["predicted_ns"][name] for name in times_ns} == pytest.approx(times_ns, rel=1e-9)


def test_a_calibration_of_the_processor_starts_it_where_jax_would_take_another(file, monkeypatch):
    started = []
    monkeypatch.setattr(command_line, "set_up_jax", started.append)
    for command in (("predict", file, "--batch", 8), ("explain", file, "--batch", 8), ("validate", file)):
        invoke(*command, *(("--budget", 1) if command[0] == "validate" else ()))
    other = json.loads(file.read_text())
    for section in (other["machine"], *other["models"].values()):
        section["fingerprint"]["platform"] = "gpu"
    file.write_text(json.dumps(sealed(other)))
    invoke("predict", file, "--batch", 8)
    assert started == ["cpu", "cpu", "cpu", None]


def test_predict_marks_the_pick_and_an_extrapolation(file):
    result = invoke("predict", file, "--batch", 100_000)
    assert result.exit_code == 0
    assert result.stdout.count("<- pick") == 1
    assert "outside the calibrated domain" in result.stdout


FILE_COMMANDS = {
    "predict": ("predict", "FILE", "--batch", 8),
    "explain": ("explain", "FILE", "--batch", 8),
    "validate": ("validate", "FILE"),
    "refit": ("refit", SAMPLES, "--prior", "FILE", "--out", "OUT"),
    "calibrate": ("calibrate", "--prior", "FILE", "--out", "OUT"),
}


def refused(command, file):
    """Return the one line by which a command refuses a calibration file; nothing is written."""
    out = file.with_name("out.json")
    before = file.read_bytes()
    result = invoke(*({"FILE": file, "OUT": out}.get(part, part) for part in FILE_COMMANDS[command]))
    assert result.exit_code == 2, command
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith(f"error: {file}: ")
    assert "Traceback" not in result.output
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]
    return line


def test_a_spoilt_file_is_refused_in_one_line_that_names_the_field(tmp_path):
    for command, spoil, field in (
        ("predict", lambda c, m: m["coefficients"]["launch_ns"].update(value=-1.0), "coefficients.launch_ns.value"),
        ("explain", lambda c, m: m["coefficients"].pop("host_call_ns"), "models.welch.coefficients.host_call_ns"),
        ("predict", lambda c, m: m["coefficients"]["memory_bytes_per_ns"].update(value=math.nan), "bytes_per_ns.value"),
        ("validate", lambda c, m: m.pop("domain"), "models.welch.domain"),
        ("calibrate", lambda c, m: m.update(model_version=12), f"model_version: expected {WELCH.version}, got 12"),
        ("predict", lambda c, m: c.update(schema_version=6), "schema_version: 6 is newer than 5"),
    ):
        spoilt, file = content(), tmp_path / "spoilt.json"
        spoil(spoilt, spoilt["models"]["welch"])
        file.write_text(json.dumps(sealed(spoilt)))
        assert field in refused(command, file)


@pytest.mark.parametrize("command", FILE_COMMANDS)
def test_a_file_of_an_earlier_schema_is_refused_in_one_line_that_says_how_to_refit(command, tmp_path):
    file = tmp_path / "old calibration.json"
    # What version 3 held: one model's coefficients and domain at the top.
    section = content()["models"]["welch"]
    earlier = {**content(), "schema_version": 3, "formula_version": 12}
    del earlier["models"]
    file.write_text(json.dumps(earlier | {name: section[name] for name in ("coefficients", "domain", "fit")}))
    line = refused(command, file)
    assert re.search(r"schema_version: expected 5, got 3;", line)
    samples = file.with_suffix(".welch.samples.jsonl")
    said = re.search("`(rlxjax refit .*?)`", line)[1]
    assert shlex.split(said) == ["rlxjax", "refit", str(samples), "--out", str(file)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("calibrate", "--budget", "1"), "at least 20 seconds, 10 a suite, got 1"),
        (("calibrate", "--only", "welch", "--budget", "1"), "at least 10 seconds, 10 a suite, got 1"),
        (("calibrate", "--only", "functions", "--budget", "1"), "at least 10 seconds, 10 a suite, got 1"),
        (("calibrate", "--device", "abacus"), "expected one of cpu, gpu, cuda, rocm, tpu, got 'abacus'"),
        (("predict", "no-such-file", "--batch", "1"), "no such file"),
        (("validate", "no-such-file"), "no such file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_file_of_another_machine_is_used_with_a_warning(file):
    content = json.loads(file.read_text())
    for section in (content["machine"], *content["models"].values()):
        section["fingerprint"]["cores"] += 1
    file.write_text(json.dumps(sealed(content)))
    result = invoke("predict", file, "--batch", 8)
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: ")
    assert "cores" in result.stderr


def run(*command, status=0, **environment):
    """Run a command in a process of its own."""
    environment |= {"TERM": "dumb", "NO_COLOR": "1", "PATH": os.path.dirname(sys.executable)}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    assert done.returncode == status, done.stderr
    return done


def test_the_package_is_the_command_and_the_job_a_module():
    module = [sys.executable, "-m", "rlxjax"]
    assert run(*module, "--version").stdout == f"rlxjax {rlxjax.__version__}\n"
    text = run("rlxjax").stdout
    assert [command for command in COMMANDS if f" {command} " not in text] == []
    help_of_the_job = run(sys.executable, "-m", "calibrate", "--help").stdout
    for option in ["device", "budget", "out", "resume", "prior", "force", "strict", "verbose", "json"]:
        assert f"--{option}" in help_of_the_job


def test_a_platform_that_jax_has_not_is_one_line():
    said = run(sys.executable, "-m", "calibrate", "--budget", "40", status=2, JAX_PLATFORMS="nonsense").stderr
    assert "Traceback" not in said
    assert said.strip().splitlines()[-1].startswith("error: JAX_PLATFORMS: ")


def test_help_has_a_short_option_everywhere():
    for command in ((), *((name,) for name in COMMANDS)):
        short, long = (invoke(*command, option) for option in ("-h", "--help"))
        assert short.exit_code == long.exit_code == 0
        assert short.stdout == long.stdout
        assert "Usage" in short.stdout


def test_without_a_file_what_is_saved_is_used_and_else_what_other_machines_say(tmp_path, monkeypatch):
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))
    results = [invoke(command, "--batch", 8) for command in ("predict", "explain")]
    for result in results:
        assert result.exit_code == 0, result.stderr
        assert "by no calibration of this machine" in result.stdout
        assert "caution: Nothing of it was timed on this machine" in result.stdout
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path / "other"))
    path = default_calibration_path()
    write_json_file(CalibrationFile.model_validate(content()), path)
    for command in ("predict", "explain"):
        result = invoke(command, "--batch", 8)
        assert f"by the calibration of {content()['models']['welch']['created']}, {path}" in " ".join(
            result.stdout.split()
        )
        printed = json.loads(invoke(command, "--batch", 8, "--json").stdout)
        assert printed["calibration"].endswith(str(path))


def test_cautions_of_a_file_are_repeated_with_every_prediction(tmp_path):
    spoilt = content()
    spoilt["models"]["welch"]["cautions"] = ["Predictions are off by 30 % on workloads."]
    path = tmp_path / "calibration.json"
    write_json_file(CalibrationFile.model_validate(spoilt), path)
    result = invoke("predict", path, "--batch", 8)
    assert result.stdout.endswith("caution: Predictions are off by 30 % on workloads.\n")
    assert json.loads(invoke("predict", path, "--batch", 8, "--json").stdout)["cautions"]


def test_a_mistake_in_the_arguments_is_one_line_too(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))
    for arguments in (
        ["nope"],
        ["predict"],
        ["predict", "x", "--batch", "many"],
        ["predict", "x", "--batch", "99999999999999999999"],
        ["calibrate", "--nope"],
        ["validate"],
    ):
        monkeypatch.setattr(sys, "argv", ["rlxjax", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert ended.value.code == 2
        assert line.startswith("error: ")


@pytest.mark.parametrize("option", ["--batch", "--n-fft", "--k", "--segments"])
def test_a_size_beyond_every_array_is_one_line(file, option):
    for command in (("predict", file), ("explain", file)):
        for size in (2**31, 10**20, -(10**20)):
            sizes = {"--batch": 8, "--n-fft": 64, "--k": 4} | {option: size}
            result = invoke(*command, *(part for pair in sizes.items() for part in pair))
            assert result.exit_code == 2, (command, size)
            assert option.strip("-").replace("-", "_") in result.output.replace("-", "_")


@pytest.mark.parametrize("command", ["predict", "explain"])
def test_the_largest_sizes_and_all_bins_as_peaks_have_a_prediction(file, command):
    largest = str(2**31 - 1)
    for sizes in (("8", "64", "33", "2"), (largest, str(2**25), str(2**24 + 1), largest)):
        options = [
            part for pair in zip(("--batch", "--n-fft", "--k", "--segments"), sizes, strict=True) for part in pair
        ]
        result = invoke(command, file, *options, "--json")
        assert result.exit_code == 0, result.stderr
        assert sizes[0] != largest or json.loads(result.stdout)["in_domain"] is False
