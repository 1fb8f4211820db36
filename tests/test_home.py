"""No test reads or writes the files and variables of the user: neither do workers, doctests and started processes."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import rlxjax as rx
from rlxjax.choices import Memory

ROOT = Path(__file__).parents[1]
#: Tests and a doctest that ask for this machine's calibration and choices, here and in a process that they start.
ASKING = (
    "tests/test_home.py::test_a_test_and_the_processes_that_it_starts_have_an_empty_home",
    "tests/test_choose.py::test_where_the_model_is_sure_nothing_is_compiled_or_run_and_nothing_is_remembered",
    "rlxjax/choices/_choose.py::rlxjax.choices._choose.choose",
)
SEES = """
import os, pathlib
from rlxjax.calibration import default_calibration_path
from rlxjax._files import home_folder
print(sorted(name for name in os.environ if name.startswith(("RLXJAX_", "JAX_DEBUG", "XDG_DATA"))))
print([default_calibration_path().exists()], pathlib.Path.home())
"""


def test_a_test_and_the_processes_that_it_starts_have_an_empty_home():
    assert "RLXJAX_MEASURE" not in os.environ
    done = subprocess.run([sys.executable, "-c", SEES], cwd=ROOT, capture_output=True, text=True, check=True)
    named = [name for name in ("RLXJAX_CHECK_ALL", "RLXJAX_HOME") if name in os.environ]
    assert done.stdout.splitlines() == [str(named), f"[False] {Path.home()}"]
    assert "rlxjax-tests-" in str(Path.home())


@pytest.mark.slow  # it runs pytest; `.ci/run` runs it
def test_a_hostile_home_changes_no_test_and_no_test_changes_it(tmp_path, monkeypatch):
    home = tmp_path / "home" / "rlxjax"
    monkeypatch.setenv("RLXJAX_HOME", str(home))
    ways = {"one": jax.jit(lambda x: x + 1.0), "two": jax.jit(lambda x: x + x)}
    Memory().pin(rx.choose(ways, jnp.ones(4), measure="always", limit_ms=1.0).key, "two")
    for folder in (home, home.parent / "data" / "rlxjax"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "calibration-cpu.json").write_text("damaged")
    files = {path: path.read_bytes() for path in home.parent.rglob("*") if path.is_file()}
    hostile = {"HOME": home.parent, "XDG_DATA_HOME": home.parent / "data", "RLXJAX_HOME": home}
    hostile |= {"RLXJAX_MEASURE": "bad", "JAX_DEBUG_NANS": "1", "JAX_DISABLE_JIT": "1", "JAX_ENABLE_X64": "0"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", *ASKING]
    environment = kept | {name: str(value) for name, value in hostile.items()}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    assert {path: path.read_bytes() for path in home.parent.rglob("*") if path.is_file()} == files
