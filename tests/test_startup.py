"""What importing loads and starts, and the compiled programs that the commands keep."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from calibrate import compiled

ROOT = Path(__file__).parents[1]
CALIBRATION = ROOT / "notebooks" / "data" / "calibration-cpu.json"

#: A command, and how many programs JAX found in its cache and did not find.
COUNTED_COMMAND = """
import collections, json, sys
import jax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.split("/")[-1]]))
from calibrate.cli import main
try:
    main()
finally:
    print(json.dumps([events["cache_hits"], events["cache_misses"]]), file=sys.stderr)
"""


def run_python(code, *arguments, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "RLXJAX_"))}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=kept | environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def predict(**environment):
    """Run a command; return what it printed, its warnings, and the counts of programs found and not found."""
    done = run_python(COUNTED_COMMAND, "predict", str(CALIBRATION), "--batch", "64", "--json", **environment)
    *warned, counts = done.stderr.splitlines()
    return (
        json.loads(done.stdout),
        [line for line in warned if "made elsewhere" not in line],
        json.loads(counts),
    )


def files_of(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


def loaded_by(statement):
    """Return the modules that a statement loads after JAX."""
    code = f"import sys, jax; before = set(sys.modules); {statement}; print(*set(sys.modules) - before)"
    return set(run_python(code).stdout.split())


def test_all_names_load_what_every_call_needs_and_no_more():
    heavy = "optax pydantic typer rich matplotlib scipy platformdirs filelock pandas jax._src.pallas"
    loaded = loaded_by("from rlxjax import *")
    assert {"rlxjax._calibration", "rlxjax._design", "rlxjax.welch", "rlxjax.fusion"} <= loaded
    assert loaded.isdisjoint({*heavy.split(), "calibrate"})


def test_a_name_loads_its_own_part():
    assert loaded_by("import rlxjax") == {"rlxjax"}
    assert loaded_by("import rlxjax; rlxjax.Graph").isdisjoint({"rlxjax.welch", "rlxjax._latency"})
    assert loaded_by("from rlxjax import welch_peaks").isdisjoint({"rlxjax._calibration", "rlxjax._fit"})


def test_importing_compiles_nothing_and_starts_no_backend():
    run_python(
        "import jax; events = [];"
        "jax.monitoring.register_event_duration_secs_listener(lambda event, _, **__: events.append(event));"
        "jax.monitoring.register_event_listener(lambda event, **_: events.append(event));"
        "import calibrate.cli; from rlxjax import *; assert not events, events",
        JAX_PLATFORMS="no_such_platform",
    )


def test_the_second_run_of_a_command_finds_its_programs_and_prints_the_same(tmp_path):
    first, warned, (hits, misses) = predict(RLXJAX_HOME=str(tmp_path))
    assert not warned
    assert misses > 0
    kept = files_of(tmp_path)
    again, warned, counts = predict(RLXJAX_HOME=str(tmp_path))
    assert (counts, warned) == ([hits + misses, 0], [])
    assert files_of(tmp_path) == kept
    assert again == first


def test_the_users_own_cache_is_used_as_it_is(tmp_path):
    own, home = tmp_path / "own", tmp_path / "home"
    predict(
        RLXJAX_HOME=str(home),
        JAX_COMPILATION_CACHE_DIR=str(own),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )
    assert files_of(own)
    assert not home.exists()
    predict(RLXJAX_HOME=str(home), JAX_ENABLE_COMPILATION_CACHE="0")
    assert not home.exists()


def test_a_folder_that_cannot_be_written_is_no_failure_and_no_warning(tmp_path):
    a_file = tmp_path / "home"
    a_file.touch()
    _, warned, counts = predict(RLXJAX_HOME=str(a_file))
    assert (counts, warned) == ([0, 0], [])


def test_the_cache_is_with_the_calibrations_or_with_the_users_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))
    assert compiled.compiled_programs_path().is_relative_to(tmp_path)
    monkeypatch.delenv("RLXJAX_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    if sys.platform == "linux":
        assert compiled.compiled_programs_path().is_relative_to(tmp_path / "caches" / "rlxjax")


def test_another_processor_has_another_folder(monkeypatch):
    here = compiled.compiled_programs_path()
    assert compiled.compiled_programs_path() == here
    monkeypatch.setattr(compiled, "_processor", lambda: "flags : fewer")
    assert compiled.compiled_programs_path() != here


@pytest.mark.parametrize(("most_bytes", "kept"), [(100, 4), (40, 4), (39, 3), (20, 2), (0, 0)])
def test_the_oldest_programs_go_first(tmp_path, most_bytes, kept):
    files = [tmp_path / "machine" / f"{age}-cache" for age in range(4)]
    files[0].parent.mkdir()
    for age, file in enumerate(files):
        file.write_bytes(bytes(10))
        os.utime(file, (1000 - age, 1000 - age))
    compiled._remove_oldest(tmp_path, most_bytes)
    assert files_of(tmp_path) == set(files[:kept])
