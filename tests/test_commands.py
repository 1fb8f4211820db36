"""What every command has in common: help, units, width, colours, completion, JSON as documented, files, one line."""

import contextlib
import importlib
import json
import math
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import user_script
from _content import content, sealed
from _documented import assert_documented, assert_narrow, documented_keys
from typer.main import get_command
from typer.testing import CliRunner

import rlxjax
from calibrate import cli, command_line
from calibrate.cli import app
from calibrate.command_line import ENDINGS, SHARED, one_line_errors
from rlxjax import load_calibration
from rlxjax.calibration import CalibrationFile, default_calibration_path, write_json_file
from rlxjax.models import WELCH

SAMPLES = Path(__file__).parent.parent / "docs/evidence/campaign-3-cpu.welch.samples.jsonl.gz"
TOP = get_command(app).commands
#: Every command by its name, as "decisions list" of one in a group.
COMMANDS = {
    " ".join(dict.fromkeys([name, own.name])): own
    for name, group in TOP.items()
    for own in getattr(group, "commands", {name: group}).values()
}


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A calibration file of this machine, with the prior's coefficients, in the current folder."""
    monkeypatch.chdir(tmp_path)
    write_json_file(CalibrationFile.model_validate(content()), Path("calibration.json"))
    return Path("calibration.json")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


SIZES = ("--batch", "--n-fft", "--k", "--segments")


def sized(*sizes):
    """Return the options of so many sizes."""
    return [part for pair in zip(SIZES, sizes, strict=False) for part in pair]


def run(*command, status=0, **environment):
    """Run a command in a process of its own."""
    environment |= {"TERM": "dumb", "NO_COLOR": "1", "PATH": os.path.dirname(sys.executable)}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    assert done.returncode == status, done.stderr
    return done


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_ends_with_an_example_and_its_exit_statuses(command):
    result = invoke(*command.split(), "--help")
    assert result.exit_code == 0
    assert result.stdout == invoke(*command.split(), "-h").stdout
    assert_narrow(result.stdout)
    above, _, below = result.stdout.partition("Example")
    assert "Exit status:" in below
    examples, statuses = ENDINGS[command]
    for example in examples:
        assert f"  {example}\n" in re.sub(" +\n", "\n", below)
        for option in re.findall(r"--[\w-]+", example):
            assert option in above
    for status, meaning in (SHARED | statuses).items():
        assert f"{status}: {meaning}" in below


def test_the_keys_of_commands_that_print_figures_are_listed_and_jobs_can_be_quiet():
    for command, own in COMMANDS.items():
        names = {name for option in own.params for name in option.opts}
        assert "--json" not in names or documented_keys(command) or command == "refit"
        is_job = command in ("calibrate", "evaluate", "fleet", "refit", "validate", "report")
        assert ({"--quiet", "-q"} <= names) == is_job


@pytest.mark.parametrize(("n_fft", "k"), [(64, 16), (256, 30)])
def test_no_change_that_is_said_asks_for_more_peaks_than_bins(n_fft, k, file):
    known = load_calibration(file).explain(64, n_fft, k, model="welch")

    def has_bins(flip):
        sizes = {"n_fft": n_fft, "k": k} | {flip["name"]: flip["value"] * (flip["factor"] or 1.0)}
        return sizes["k"] <= sizes["n_fft"] / 2 + 1

    every = known.as_dict()["flips"]
    assert not all(map(has_bins, every))  # the model has no bound of one input by another
    result = invoke("explain", file, "--batch", 64, "--n-fft", n_fft, "--k", k, "--json")
    assert json.loads(result.stdout)["flips"] == [flip for flip in every if has_bins(flip)]


def test_texts_say_the_times_of_the_json(file):
    sizes = (file, "--batch", 512, "--n-fft", 128, "--k", 8)
    text, printed = invoke("predict", *sizes).stdout, json.loads(invoke("predict", *sizes, "--json").stdout)
    for strategy, time_ns in printed["predicted_ns"].items():
        low, high = printed["interval_ns"][strategy]
        assert re.search(rf"^{strategy} +{time_ns:,.0f} ns  \(90 %: {low:,.0f} to {high:,.0f}\)", text, re.MULTILINE)
    assert f"{printed['ratio_to_next_best']:.2f} times its time (less is better)" in " ".join(text.split())
    text, printed = invoke("explain", *sizes).stdout, json.loads(invoke("explain", *sizes, "--json").stdout)
    for strategy in printed["strategies"]:
        for time_ns in (*strategy["terms_ns"].values(), strategy["time_ns"], *strategy["interval_ns"]):
            assert f" {time_ns:,.0f} " in text
    assert f"{printed['margin_ns']:,.0f} ns" in text


@pytest.mark.parametrize("command", ["predict", "explain"])
def test_any_sizes_and_all_bins_as_peaks_have_a_prediction(command, file):
    largest = (2**31 - 1, 2**25, 2**24 + 1, 2**31 - 1)
    for sizes in ((1, 64, 1, 1), (8, 64, 33, 2), largest):
        arguments = (command, file, *sized(*sizes))
        text, printed = invoke(*arguments), invoke(*arguments, "--json")
        assert (text.exit_code, printed.exit_code) == (0, 0), text.stderr
        assert "\x1b" not in text.stdout
        assert command == "explain" or text.stdout.count("<- pick") == 1
        if sizes == largest:
            assert json.loads(printed.stdout)["in_domain"] is False
            assert "outside the calibrated domain" in text.stdout


@pytest.mark.parametrize("command", ["predict", "explain"])
def test_sizes_that_cannot_be_are_refused_in_one_line_that_names_the_option(command, file):
    for sizes, said in (
        ((8, 64, 34), "--k: expected at most 33, the bins of n_fft 64, got 34"),
        ((0,), "--batch: expected at least 1, got 0"),
        ((8, 255), "expected an even number, got 255"),
    ):
        result = invoke(command, file, *sized(*sizes))
        assert (result.exit_code, result.stderr.count("\n"), result.stdout) == (2, 1, "")
        assert said in result.stderr
    for i, option in enumerate(SIZES):
        for size in (2**31, 10**20, -(10**20)):
            sizes = [8, 64, 4, 2]
            sizes[i] = size
            result = invoke(command, file, *sized(*sizes))
            assert result.exit_code == 2, (command, size)
            assert option.strip("-").replace("-", "_") in result.output.replace("-", "_")


def test_a_package_that_is_not_installed_is_one_line_and_status_2(capsys):
    @one_line_errors
    def command():
        raise ImportError("pictures take matplotlib:\npip install 'rlxjax[plot]'")

    with pytest.raises(Exception) as ended:  # noqa: PT011  (of typer, whose exit has no common base)
        command()
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == "error: pictures take matplotlib: pip install 'rlxjax[plot]'\n"


def on_a_terminal(*arguments, **environment):
    """Return what a command prints on a terminal."""
    ours, theirs = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    kept |= {"TERM": "xterm-256color", **environment}
    process = subprocess.Popen([sys.executable, "-m", "rlxjax", *arguments], stdout=theirs, stderr=theirs, env=kept)
    os.close(theirs)
    parts = []
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 65536):
            parts.append(part)
    process.wait()
    os.close(ours)
    return b"".join(parts).decode()


def test_a_terminal_has_colours_and_a_pipe_and_who_wants_none_have_not():
    coloured = re.compile(r"\x1b\[[0-9;]*3[0-9]")
    assert coloured.search(on_a_terminal("predict", "-h"))
    assert not coloured.search(on_a_terminal("predict", "-h", NO_COLOR="1"))
    assert_narrow(invoke("predict", "-h").stdout)


def test_a_shell_completes_commands_and_has_a_script_for_it():
    script = run("rlxjax", _RLXJAX_COMPLETE="source_bash").stdout
    assert "complete " in script
    assert "rlxjax" in script
    completed = run("rlxjax", _RLXJAX_COMPLETE="complete_bash", COMP_WORDS="rlxjax pre", COMP_CWORD="1")
    assert completed.stdout.split() == ["predict"]


def test_the_package_is_the_command_and_help_and_version_do_not_wait_for_jax():
    assert run(sys.executable, "-m", "rlxjax", "--version").stdout == f"rlxjax {rlxjax.__version__}\n"
    text = run("rlxjax").stdout
    assert [command for command in TOP if not re.search(rf"^\W*{command}\b", text, re.MULTILINE)] == []
    code = (
        "import sys\nfrom calibrate.cli import main\n"
        "for option in ('--help', '--version'):\n    sys.argv = ['rlxjax', option]\n    try:\n        main()\n"
        "    except SystemExit:\n        pass\nprint('jax' in sys.modules, file=sys.stderr)"
    )
    assert run(sys.executable, "-c", code).stderr == "False\n"
    help_of_the_job = run(sys.executable, "-m", "calibrate", "--help").stdout
    for option in ("device", "budget", "out", "resume", "prior", "force", "strict", "verbose", "json"):
        assert f"--{option}" in help_of_the_job


def test_a_script_of_everyday_calls_runs():
    lines = user_script.main()
    assert lines[0].startswith("gate: fuse")
    assert "strongest bin: 32" in lines


def test_profile_says_what_a_function_does_and_takes_as_the_library_does(tmp_path, monkeypatch):
    (tmp_path / "profiled.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def norm(x): return jnp.linalg.norm(x, axis=-1)\n"
        "def halve(x): return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    result = CliRunner().invoke(app, ["profile", "profiled:norm", "--arg", "f32[64,32]"])
    assert result.exit_code == 0, result.stderr
    for words in ("covered by rules: 100 %", "reduction", " ns (90 %: ", "call ", "by "):
        assert words in result.stdout
    printed = json.loads(CliRunner().invoke(app, ["profile", "profiled:norm", "--arg", "f32[64,32]", "--json"]).stdout)
    assert_documented("profile", printed)
    module = importlib.import_module("profiled")
    shape = jax.ShapeDtypeStruct((64, 32), "float32")
    with jax.enable_x64(False):
        found = rlxjax.default_calibration().predict_function(module.norm, shape)
    assert printed["predicted_ns"] == pytest.approx(found.time_ns, rel=1e-4)
    assert printed["counts"]["flops"] == found.profile.flops
    endless = CliRunner().invoke(app, ["profile", "profiled:halve", "--arg", "f32[64]", "--json"])
    assert endless.exit_code == 1
    assert json.loads(endless.stdout)["uncounted"]
    assert json.loads(endless.stdout)["interval_ns"][1] is None
    told = CliRunner().invoke(app, ["profile", "profiled:halve", "--arg", "f32[64]", "--trips", "7"])
    assert told.exit_code == 0, told.stdout


# --- Files ---------------------------------------------------------------------------------------


def test_predict_prints_what_the_library_predicts(file):
    result = invoke("predict", file, "--batch", 512, "--n-fft", 128, "--k", 8, "--json")
    printed, calibration = json.loads(result.stdout), load_calibration(file)
    for strategy, time_ns in printed["predicted_ns"].items():
        assert time_ns == pytest.approx(float(calibration.predict_ns(strategy, 512, 128, 8)), rel=1e-12)
    assert printed["pick"] == calibration.pick(512, 128, 8)
    assert printed["in_domain"] is True
    decided = calibration.decide(512, 128, 8, fused=printed["pick"], kept=printed["next_best"])
    assert printed["probability"] == pytest.approx(float(decided.probability), rel=1e-12)
    assert printed["probability"] >= 0.5
    assert printed["verdict"] == (printed["pick"] if printed["probability"] >= 0.9 else "undecided")


def test_predict_and_explain_agree_for_any_number_of_segments(file):
    for segments, host in ((1, "ultra"), (2, "fast"), (8, "host")):
        asked = (file, *sized(8, 128, 8, segments), "--json")
        predicted, explained = (json.loads(invoke(command, *asked).stdout) for command in ("predict", "explain"))
        assert_documented("predict", predicted)
        assert_documented("explain", explained)
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


def test_a_file_of_an_earlier_schema_is_refused_in_one_line_that_says_how_to_refit(tmp_path):
    file = tmp_path / "old calibration.json"
    # What version 3 held: one model's coefficients and domain at the top.
    earlier = {**content(), "schema_version": 3, "formula_version": 12}
    section = earlier.pop("models")["welch"]
    file.write_text(json.dumps(earlier | {name: section[name] for name in ("coefficients", "domain", "fit")}))
    for command in FILE_COMMANDS:
        line = refused(command, file)
        assert "schema_version: expected 5, got 3;" in line
        said = shlex.split(re.search("`(rlxjax refit .*?)`", line)[1])
        assert said == ["rlxjax", "refit", str(file.with_suffix(".welch.samples.jsonl")), "--out", str(file)]


def test_bad_input_is_one_line_and_status_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, said in (
        *(
            (("calibrate", "--budget", budget), f"--budget: expected at least 20 seconds, 10 a suite, got {budget}")
            for budget in ("1", "-1", "inf", "nan")
        ),
        (("calibrate", "--only", "functions", "--budget", "1"), "at least 10 seconds, 10 a suite, got 1"),
        (("calibrate", "--device", "abacus"), "expected one of cpu, gpu, cuda, rocm, tpu, got 'abacus'"),
        (("predict", "no-such-file", "--batch", "1"), "no such file"),
        (("validate", "no-such-file"), "no such file"),
    ):
        result = invoke(*arguments)
        assert (result.exit_code, len(result.stderr.strip().splitlines())) == (2, 1)
        assert said in result.stderr


def test_a_file_of_another_machine_is_used_with_a_warning(file):
    content = json.loads(file.read_text())
    for section in (content["machine"], *content["models"].values()):
        section["fingerprint"]["cores"] += 1
    file.write_text(json.dumps(sealed(content)))
    result = invoke("predict", file, "--batch", 8)
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: ")
    assert "cores" in result.stderr


def test_a_platform_that_jax_has_not_is_one_line():
    said = run(sys.executable, "-m", "calibrate", "--budget", "40", status=2, JAX_PLATFORMS="nonsense").stderr
    assert "Traceback" not in said
    assert said.strip().splitlines()[-1].startswith("error: JAX_PLATFORMS: ")


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
