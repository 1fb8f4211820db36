"""What every command has in common: help, units, width, colours, completion, JSON as documented, files, one line."""

import contextlib
import dataclasses
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
from _campaigns import made_up
from _content import content, sealed
from _documented import assert_documented, assert_narrow, documented_keys
from _pages import FewCells
from typer.main import get_command
from typer.testing import CliRunner

import rlxjax
from calibrate import cli, command_line
from calibrate.cli import app
from calibrate.command_line import SHARED, one_line_errors, source_of
from rlxjax import load_calibration
from rlxjax.calibration import CalibrationFile, default_calibration_path, write_json_file
from rlxjax.models import WELCH
from rlxjax.units import interval_text, time_text

TOP = get_command(app).commands
#: Every command by its name, as "decisions list" of one in a group.
COMMANDS = {
    " ".join(dict.fromkeys([name, own.name])): own
    for name, group in TOP.items()
    for own in getattr(group, "commands", {name: group}).values()
}
SIZES = ("--batch", "--n-fft", "--k", "--segments")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A calibration file of this machine, with the prior's coefficients, in the current folder."""
    monkeypatch.chdir(tmp_path)
    write_json_file(CalibrationFile.model_validate(content()), Path("calibration.json"))
    return Path("calibration.json")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def printed(*arguments):
    """Return the JSON that a command prints."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(*arguments):
    """Return the one line that is said, with status 2."""
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), arguments
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line


def sized(*sizes):
    """Return the options of so many sizes."""
    return [part for pair in zip(SIZES, sizes, strict=False) for part in pair]


# --- The command line ----------------------------------------------------------------------------


def test_the_help_of_a_command_ends_with_an_example_and_its_exit_statuses():
    for command, own in COMMANDS.items():
        result = invoke(*command.split(), "--help")
        assert (result.exit_code, result.stdout) == (0, invoke(*command.split(), "-h").stdout)
        assert_narrow(result.stdout)
        above, _, below = result.stdout.partition("Example")
        examples, statuses = own.epilog.split("Exit status:\n")
        shown = [line[1:].rstrip() for line in f" Example{below}".rstrip().splitlines()]
        assert shown == own.epilog.splitlines()
        assert f"  rlxjax {command}" in examples
        assert all(option in above for option in re.findall(r"--[\w-]+", examples))
        assert SHARED.keys() <= {int(line.partition(":")[0]) for line in statuses.splitlines()}


def test_the_keys_of_commands_that_print_figures_are_listed_and_jobs_can_be_quiet():
    for command, own in COMMANDS.items():
        names = {name for option in own.params for name in option.opts}
        assert "--json" not in names or documented_keys(command) or command == "refit"
        is_job = command in ("calibrate", "evaluate", "refit", "validate", "report")
        assert ({"--quiet", "-q"} <= names) == is_job


#: Command lines by module and arguments, run in one process; what each prints, and whether JAX was loaded.
SEVERAL = """
import contextlib, io, json, os, runpy, sys
said = []
for module, arguments, environment in json.loads(sys.argv[1]):
    sys.argv, os.environ = [module, *arguments], os.environ | environment
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__")
    said.append(out.getvalue())
print(json.dumps([*said, "jax" in sys.modules]))
"""


def test_the_package_is_the_command_which_completes_and_help_and_version_do_not_wait_for_jax():
    completed = {"_RLXJAX_COMPLETE": "complete_bash", "COMP_WORDS": "rlxjax pre", "COMP_CWORD": "1"}
    asked = [("rlxjax", ["--version"], {}), ("rlxjax", [], {}), ("calibrate", ["--help"], {})]
    asked += [("rlxjax", [], {"_RLXJAX_COMPLETE": "source_bash"}), ("rlxjax", [], completed)]
    environment = os.environ | {"TERM": "dumb", "NO_COLOR": "1"}
    command = [sys.executable, "-c", SEVERAL, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    version, text, job, script, words, has_jax = json.loads(done.stdout)
    assert version == f"rlxjax {rlxjax.__version__}\n"
    assert [command for command in TOP if not re.search(rf"^\W*{command}\b", text, re.MULTILINE)] == []
    assert all(f"--{option}" in job for option in ("device", "budget", "resume", "prior", "strict", "json"))
    assert "complete " in script
    assert "rlxjax" in script
    assert words.split() == ["predict"]
    assert has_jax is False


def test_a_terminal_has_colours_and_a_pipe_and_who_wants_none_have_not():
    ours, theirs = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    code = (
        "import os, sys\nfrom calibrate.cli import main\nsys.argv = ['rlxjax', 'predict', '-h']\n"
        "for wanted in ('', '1'):\n    os.environ['NO_COLOR'] = wanted\n    print('NEXT')\n    try:\n        main()\n"
        "    except SystemExit:\n        pass\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=kept | {"TERM": "xterm-256color"}
    )
    os.close(theirs)
    parts = []
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 65536):
            parts.append(part)
    process.wait()
    os.close(ours)
    _, coloured, plain = b"".join(parts).decode().split("NEXT")
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9]")
    assert colour.search(coloured)
    assert not colour.search(plain)
    assert_narrow(invoke("predict", "-h").stdout)


def test_a_mistake_in_the_arguments_is_one_line_too(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))
    for arguments in ("nope", "predict", "predict x --batch many", f"predict x --batch {10**20}", "calibrate --nope"):
        monkeypatch.setattr(sys, "argv", ["rlxjax", *arguments.split()])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert ended.value.code == 2
        assert line.startswith("error: ")


def test_a_package_that_is_not_installed_is_one_line_and_status_2(capsys):
    @one_line_errors
    def command():
        raise ImportError("pictures take matplotlib:\npip install 'matplotlib>=3.9'")

    with pytest.raises(Exception) as ended:  # noqa: PT011  (of typer, whose exit has no common base)
        command()
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == "error: pictures take matplotlib: pip install 'matplotlib>=3.9'\n"


def test_bad_input_is_one_line_and_status_2(file, monkeypatch):
    for arguments, said in (
        *(
            (("calibrate", "--budget", budget), f"--budget: expected at least 20 seconds, 10 per suite, got {budget}")
            for budget in ("1", "-1", "inf", "nan")
        ),
        (("calibrate", "--only", "functions", "--budget", "1"), "at least 10 seconds, 10 per suite, got 1"),
        (("calibrate", "--device", "abacus"), "expected one of cpu, gpu, cuda, rocm, tpu, got 'abacus'"),
        (("predict", "no-such-file", "--batch", "1"), "no such file"),
        (("validate", "no-such-file"), "no such file"),
        *(
            ((command, file, *sized(*sizes)), said)
            for command in ("predict", "explain")
            for sizes, said in (
                ((8, 64, 34), "--k: expected at most 33, the bins of n_fft 64, got 34"),
                ((0,), "--batch: expected at least 1, got 0"),
                ((8, 255), "expected an even number, got 255"),
            )
        ),
    ):
        assert said in refused(*arguments)
    for command, (place, option), size in (
        (command, option, size)
        for command in ("predict", "explain")
        for option in enumerate(SIZES)
        for size in (2**31, -(10**20))
    ):
        sizes = [8, 64, 4, 2]
        sizes[place] = size
        result = invoke(command, file, *sized(*sizes))
        assert result.exit_code == 2, (command, size)
        assert option.strip("-").replace("-", "_") in result.output.replace("-", "_")

    def absent():
        raise RuntimeError("Unknown backend nonsense\nand more")

    monkeypatch.setattr(jax, "devices", absent)
    said = "JAX_PLATFORMS: JAX finds no such device here (Unknown backend nonsense)"
    assert said in refused("calibrate", "--budget", "40")


# --- Predictions and explanations ----------------------------------------------------------------


def test_predict_and_explain_print_what_the_library_says_in_json_and_in_text(file):
    sizes = (file, *sized(8, 128, 8))
    text, found, known = invoke("predict", *sizes).stdout, printed("predict", *sizes), load_calibration(file)
    for strategy, time_ns in found["predicted_ns"].items():
        assert time_ns == pytest.approx(float(known.predict_ns(strategy, 8, 128, 8)), rel=1e-12)
        low, high = found["interval_ns"][strategy]
        shown = re.escape(interval_text(time_ns, low, high))
        assert re.search(rf"^  {strategy} +{shown}{'  <- pick' * (strategy == found['pick'])}$", text, re.MULTILINE)
    assert text.startswith("predicted time of a call, and its 90 % interval:\n")
    assert f"{found['ratio_to_next_best']:.2f} times the predicted time of {found['next_best']}" in text
    assert found["pick"] == known.pick(8, 128, 8)
    assert found["in_domain"] is True
    decided = known.decide(8, 128, 8, fused=found["pick"], kept=found["next_best"])
    assert 0.5 <= found["probability"] == pytest.approx(float(decided.probability), rel=1e-12)
    assert found["verdict"] == (found["pick"] if found["probability"] >= 0.9 else "undecided")
    text, found = invoke("explain", *sizes).stdout, printed("explain", *sizes)
    for strategy in found["strategies"]:
        for time_ns in (*strategy["terms_ns"].values(), strategy["time_ns"], *strategy["interval_ns"]):
            assert f" {time_text(time_ns)} " in text
    assert f"by {time_text(found['margin_ns'])}, give or take {time_text(found['margin_sd_ns'])}" in text


def test_predict_and_explain_agree_for_any_number_of_segments(file):
    for segments in (1, 2, 8):
        asked = (file, *sized(8, 128, 8, segments))
        predicted, explained = (printed(command, *asked) for command in ("predict", "explain"))
        assert_documented("predict", predicted)
        assert_documented("explain", explained)
        for name in ("pick", "verdict", "in_domain", "n_segments"):
            assert predicted[name] == explained[name]
        assert predicted["probability"] == pytest.approx(explained["probability"], rel=1e-9)
        times_ns = {one["strategy"]: one["time_ns"] for one in explained["strategies"]}
        assert predicted["predicted_ns"] == pytest.approx(times_ns, rel=1e-9)
        assert {predicted["pick"], *times_ns} <= set(load_calibration(file).of("welch").strategies)


def test_any_sizes_and_all_bins_as_peaks_have_a_prediction(file):
    largest = (2**31 - 1, 2**25, 2**24 + 1, 2**31 - 1)
    for command in ("predict", "explain"):
        for sizes in ((8, 64, 33, 2), largest):
            result = invoke(command, file, *sized(*sizes))
            assert result.exit_code == 0, result.stderr
            assert "\x1b" not in result.stdout
            assert command == "explain" or result.stdout.count("<- pick") == 1
            assert ("extrapolated: the workload is outside" in result.stdout) == (sizes == largest)


def test_a_model_that_the_file_lacks_is_based_on_no_calibration_of_this_machine(file):
    known = load_calibration(file)
    pooled = rlxjax.calibration.prior_calibration("cpu")
    both = dataclasses.replace(known, models={"welch": known.of("welch"), "functions": pooled.of("functions")})
    sources = [source_of(both, name)["calibration"] for name in ("welch", "functions")]
    assert sources == [known.source, "no calibration of this machine"]


def test_profile_says_what_a_function_does_and_takes_as_the_library_does(tmp_path, monkeypatch):
    (tmp_path / "profiled.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def norm(x): return jnp.linalg.norm(x, axis=-1)\n"
        "def halve(x): return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = invoke("profile", "profiled:norm", "--arg", "f32[64,32]").stdout
    assert all(words in text for words in ("counted: 100 %", "reduction", "predicted: ", "call ", "based on "))
    found = printed("profile", "profiled:norm", "--arg", "f32[64,32]")
    assert_documented("profile", found)
    module = importlib.import_module("profiled")
    with jax.enable_x64(False):
        known = rlxjax.default_calibration().predict_function(module.norm, jax.ShapeDtypeStruct((64, 32), "float32"))
    assert found["predicted_ns"] == pytest.approx(known.time_ns, rel=1e-4)
    assert found["counts"]["flops"] == known.profile.flops
    endless = invoke("profile", "profiled:halve", "--arg", "f32[64]", "--json")
    assert (endless.exit_code, json.loads(endless.stdout)["interval_ns"][1]) == (1, None)
    assert json.loads(endless.stdout)["uncounted"]
    said = invoke("profile", "profiled:halve", "--arg", "f32[64]").stdout
    said += invoke("profile", "profiled:norm", "--arg", "f32[64,32]", "--trips", "7").stderr
    assert ("give --trips" in said, "--trips: expected" in said, "trip_counts" in said) == (True, True, False)
    assert invoke("profile", "profiled:halve", "--arg", "f32[64]", "--trips", "7").exit_code == 0


# --- Files ---------------------------------------------------------------------------------------


def test_a_calibration_of_the_processor_starts_it_where_jax_would_take_another(file, monkeypatch):
    started = []
    monkeypatch.setattr(command_line, "set_up_jax", started.append)
    for command in (("predict", file, "--batch", 8), ("validate", file, "--budget", 1)):
        invoke(*command)
    other = json.loads(file.read_text())
    for section in (other["machine"], *other["models"].values()):
        section["fingerprint"]["platform"] = "gpu"
    file.write_text(json.dumps(sealed(other)))
    invoke("predict", file, "--batch", 8)
    assert started == ["cpu", "cpu", None]


FILE_COMMANDS = {
    "predict": ("predict", "FILE", "--batch", 8),
    "explain": ("explain", "FILE", "--batch", 8),
    "validate": ("validate", "FILE"),
    "refit": ("refit", "SAMPLES", "--suite", "_pages:FewCells", "--prior", "FILE", "--out", "OUT"),
    "calibrate": ("calibrate", "--prior", "FILE", "--out", "OUT"),
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return made_up(tmp_path_factory.mktemp("samples") / "c.json", FewCells(), rounds=0)


def refused_file(command, file, spoilt, samples=None):
    """Return the one line by which a command refuses a calibration file; nothing is written."""
    file.write_text(json.dumps(spoilt))
    before, folder = file.read_bytes(), {*file.parent.iterdir()}
    named = {"FILE": file, "OUT": file.with_name("out.json"), "SAMPLES": samples}
    line = refused(*(named.get(part, part) for part in FILE_COMMANDS[command]))
    assert line.startswith(f"error: {file}: ")
    assert (file.read_bytes(), {*file.parent.iterdir()}) == (before, folder)
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
        spoilt = content()
        spoil(spoilt, spoilt["models"]["welch"])
        assert field in refused_file(command, tmp_path / "spoilt.json", sealed(spoilt))


def test_a_file_of_an_earlier_schema_is_refused_in_one_line_that_says_how_to_refit(tmp_path, samples):
    file = tmp_path / "old calibration.json"
    # What version 3 held: one model's coefficients and domain at the top.
    earlier = {**content(), "schema_version": 3, "formula_version": 12}
    section = earlier.pop("models")["welch"]
    earlier |= {name: section[name] for name in ("coefficients", "domain", "fit")}
    file.with_suffix(".welch.samples.jsonl").touch()
    for command in FILE_COMMANDS:
        line = refused_file(command, file, earlier, samples)
        assert "schema_version: expected 5, got 3;" in line
        said = shlex.split(re.search("`(rlxjax refit .*?)`", line)[1])
        assert said == ["rlxjax", "refit", str(file.with_suffix(".welch.samples.jsonl")), "--out", str(file)]


def test_a_file_of_another_machine_is_used_with_a_warning_and_its_cautions_are_repeated(file):
    spoilt = content()
    for section in (spoilt["machine"], *spoilt["models"].values()):
        section["fingerprint"]["cores"] += 1
    spoilt["models"]["welch"]["cautions"] = ["Predictions are off by 30 % on workloads."]
    file.write_text(json.dumps(sealed(spoilt)))
    result = invoke("predict", file, "--batch", 8)
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: ")
    assert "cores" in result.stderr
    assert result.stdout.endswith("caution: Predictions are off by 30 % on workloads.\n")
    assert printed("predict", file, "--batch", 8)["cautions"]


def test_without_a_file_what_is_saved_is_used_and_else_what_other_machines_say(tmp_path, monkeypatch):
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))
    result = invoke("predict", "--batch", 8)
    assert result.exit_code == 0, result.stderr
    assert "based on no calibration of this machine" in result.stdout
    assert "caution: Nothing was timed on this machine" in result.stdout
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path / "other"))
    path = default_calibration_path()
    write_json_file(CalibrationFile.model_validate(content()), path)
    said = f"based on the calibration of {content()['models']['welch']['created']}, {path}"
    assert said in " ".join(invoke("predict", "--batch", 8).stdout.split())
    assert printed("explain", "--batch", 8)["calibration"].endswith(str(path))
