"""How commands and scripts end: silence at closed pipes, on every terminal, from zip archives, at the end of Python."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: A script of a user: a choice at the top of the module, a stream that is not read to its end, and a plan.
SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, rlxjax as rx
from rlxjax.calibration import prior_calibration
ways = {"a": jax.jit(lambda x: 2.0 * x), "b": jax.jit(lambda x: x + x)}
choice = rx.choose(ways, jnp.ones((8, 8)), calibration=prior_calibration("cpu"), measure="never")
params = rx.WelchPeakParams.fast(64, 2)
stream = rx.welch.stream_welch_peaks((np.ones((4, params.frame_len), np.float32) for _ in range(9)), params)
next(stream)
print(rx.plan_fusion(rx.welch.welch_peaks_graph(8, params)))
"""
#: Two commands in one process, without their JSON.
COMMANDS = """
import runpy, sys
for command in (["explain", "--batch", "8"], ["predict", "--batch", "8"]):
    sys.argv = ["rlxjax", *command]
    try:
        runpy.run_module("rlxjax", run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, ended.code
"""


def run(*arguments, **options):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
    return subprocess.run([sys.executable, *arguments], stderr=subprocess.PIPE, env=environment, check=False, **options)


@pytest.mark.parametrize(("code", "encoding"), [(SCRIPT, "cp1252"), (COMMANDS, "latin-1"), (COMMANDS, "ascii")])
def test_output_suits_the_terminal_and_a_script_ends_in_silence(code, encoding):
    done = run("-c", code, stdout=subprocess.PIPE, env={"PYTHONIOENCODING": encoding})
    assert (done.returncode, done.stderr) == (0, b"")
    assert ("4 -> " if code == SCRIPT else "###") in done.stdout.decode(encoding)


def test_a_reader_that_is_gone_ends_a_command_in_silence_and_a_full_disk_is_one_line(tmp_path):
    for arguments in (["--help"], ["profile", "operator:neg", "--arg", "f32[4]", "--json"]):
        reading, writing = os.pipe()
        os.close(reading)
        done = run("-m", "rlxjax", *arguments, stdout=writing)
        os.close(writing)
        assert (done.returncode, done.stderr) == (141, b""), arguments
    if Path("/dev/full").exists():
        with open("/dev/full", "wb") as full:
            done = run("-m", "rlxjax", "--help", stdout=full)
        said = b"error: standard output: cannot be written (No space left on device)\n"
        assert (done.returncode, done.stderr) == (2, said)


def test_the_package_works_from_a_zip_archive(tmp_path):
    archive = tmp_path / "app.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in (ROOT / "rlxjax").rglob("*"):
            if path.is_file() and not {"_commands", "__pycache__"} & {*path.parts}:
                file.write(path, path.relative_to(ROOT))
    code = "import rlxjax as rx, jax.numpy as jnp\nprint(rx.__file__)\n"
    code += "print(rx.default_calibration().predict_function(lambda x: x @ x, jnp.ones((8, 8))).time_ns > 0)\n"
    code += "from rlxjax import *\nprint(Graph, targets.target_device('h100').name)"
    done = run("-c", code, stdout=subprocess.PIPE, cwd=tmp_path, env={"PYTHONPATH": str(archive)})
    assert (done.returncode, done.stderr) == (0, b"")
    assert str(archive) in done.stdout.decode()
