"""What every command has in common: help, units, width, colours, completion, and JSON as it is documented."""

import importlib
import json
import os
import pty
import re
import subprocess
import sys

import jax
import pytest
import user_script
from _content import content
from _documented import PAGE, assert_documented, assert_narrow, documented_keys
from typer.testing import CliRunner

import rlxjax
from calibrate.cli import app
from calibrate.command_help import ENDINGS, SHARED
from calibrate.refusals import one_line_errors
from rlxjax import load_calibration
from rlxjax.calibration import CalibrationFile, write_json_file

COMMANDS = [command.callback.__name__ for command in app.registered_commands]


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The name of a calibration file of this machine in the current folder."""
    write_json_file(CalibrationFile.model_validate(content()), tmp_path / "calibration.json")
    monkeypatch.chdir(tmp_path)
    return "calibration.json"


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run(*arguments, **environment):
    """Run the command in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    command = [sys.executable, "-m", "rlxjax", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=kept | environment, check=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_ends_with_an_example_and_its_exit_statuses(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert_narrow(result.stdout)
    above, _, below = result.stdout.partition("Example")
    assert "Exit status:" in below
    examples, statuses = ENDINGS[command]
    for example in examples:
        assert f"  {example}\n" in re.sub(" +\n", "\n", below)
        for option in re.findall(r"--[\w-]+", example):
            assert option in above
    for status, meaning in (SHARED | {**statuses}).items():
        assert f"{status}: {meaning}" in below


def test_the_page_lists_every_command_and_the_keys_of_those_that_print_figures():
    page = PAGE.with_name("commands.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        assert f"## `rlxjax {command}`" in page
        if "--json" in invoke(command, "--help").stdout:
            assert documented_keys(command) or command == "refit"


@pytest.mark.parametrize("command", ["calibrate", "refit", "validate", "report"])
def test_a_job_may_be_quiet(command):
    assert re.search(r"--quiet\s+-q", invoke(command, "--help").stdout)


@pytest.mark.parametrize("command", ["predict", "explain"])
def test_the_keys_of_an_answer_are_those_of_the_page(command, file):
    result = invoke(command, file, "--batch", 512, "--json")
    assert result.exit_code == 0, result.stderr
    assert_documented(command, json.loads(result.stdout))


def test_a_key_that_is_not_on_the_page_and_one_that_is_not_printed_are_found(file):
    printed = json.loads(invoke("predict", file, "--batch", 512, "--json").stdout)
    del printed["pick"]
    for wrong in (printed, printed | {"pick": "", "other": 1}):
        with pytest.raises(AssertionError):
            assert_documented("predict", wrong)


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


@pytest.mark.parametrize("sizes", [(1, 64, 1, 1), (8192, 256, 16, 2), (2**31 - 1, 2**25, 2**24 + 1, 2**31 - 1)])
@pytest.mark.parametrize("command", ["predict", "explain"])
def test_no_line_is_longer_than_80_columns(command, sizes, file):
    options = zip(("--batch", "--n-fft", "--k", "--segments"), sizes, strict=True)
    result = invoke(command, file, *(part for pair in options for part in pair))
    assert result.exit_code == 0, result.stderr
    assert_narrow(result.stdout)


@pytest.mark.parametrize("command", ["predict", "explain"])
def test_peaks_beyond_the_bins_and_no_rows_are_refused_in_one_line(command, file):
    for sizes, said in (
        (("--batch", 8, "--n-fft", 64, "--k", 34), "error: --k: expected at most 33, the bins of n_fft 64, got 34\n"),
        (("--batch", 0), "error: --batch: expected at least 1, got 0\n"),
    ):
        result = invoke(command, file, *sizes)
        assert (result.exit_code, result.stderr, result.stdout) == (2, said, "")


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
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        parts.append(part)
    process.wait()
    os.close(ours)
    return b"".join(parts).decode()


def test_a_terminal_has_colours_and_a_pipe_and_who_wants_none_have_not():
    coloured = re.compile(r"\x1b\[[0-9;]*3[0-9]")
    assert coloured.search(on_a_terminal("predict", "-h"))
    assert not coloured.search(on_a_terminal("predict", "-h", NO_COLOR="1"))
    assert_narrow(run("predict", "-h").stdout)


def test_a_shell_completes_commands_and_has_a_script_for_it():
    script = run(_RLXJAX_COMPLETE="source_bash").stdout
    assert "complete " in script
    assert "rlxjax" in script
    completed = run(_RLXJAX_COMPLETE="complete_bash", COMP_WORDS="rlxjax pre", COMP_CWORD="1")
    assert completed.stdout.split() == ["predict"]


def test_help_and_version_do_not_wait_for_jax():
    code = (
        "import sys\nfrom calibrate.cli import main\nsys.argv = ['rlxjax', {!r}]\n"
        "try:\n    main()\nfinally:\n    print('jax' in sys.modules, file=sys.stderr)"
    )
    for option in ("--help", "--version"):
        result = subprocess.run([sys.executable, "-c", code.format(option)], capture_output=True, text=True, check=True)
        assert result.stderr == "False\n"


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
