"""What importing loads and starts, and the compiled programs that the commands keep."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest

from calibrate import command_line
from calibrate.command_line import compiled_programs_path

ROOT = Path(__file__).parents[1]
CALIBRATION = ROOT / "notebooks" / "data" / "calibration-cpu.json"

#: Statements in their order, and the modules that each loads; nothing is configured, compiled or started.
IMPORTS = """
import json, sys
import jax
events, before, loaded = [], dict(jax.config.values), []
jax.monitoring.register_event_duration_secs_listener(lambda event, _, **__: events.append(event))
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
for statement in sys.argv[1:]:
    known = set(sys.modules)
    exec(statement)
    loaded.append(sorted(set(sys.modules) - known))
assert not events, events
assert jax.config.values == before
print(json.dumps(loaded))
"""

#: A command, how many programs JAX found in its cache and did not find, and the modes of the folders it made.
COUNTED_COMMAND = """
import collections, json, os, sys
import jax
os.umask(0)
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
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=kept | environment, check=False)
    assert done.returncode == 0, done.stderr
    return done


def files_of(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


def test_a_name_loads_its_own_part_and_importing_all_starts_nothing():
    statements = ("import rlxjax", "rlxjax.Graph", "from rlxjax import welch_peaks", "from rlxjax import *")
    statements += ("import calibrate.cli",)
    done = run_python(IMPORTS, *statements, JAX_PLATFORMS="no_such_platform")
    package, name, path, everything, _ = map(set, json.loads(done.stdout))
    assert package == {"rlxjax", "lazy_loader"}
    assert name.isdisjoint({"rlxjax.welch", "rlxjax.fit"})
    assert path.isdisjoint({"rlxjax.calibration", "rlxjax.fit"})
    everything |= name | path
    assert {"rlxjax.calibration", "rlxjax.fit", "rlxjax.welch", "rlxjax.fusion"} <= everything
    heavy = "typer rich matplotlib scipy platformdirs filelock pandas jax._src.pallas sqlite3 calibrate"
    assert everything.isdisjoint(heavy.split())


@pytest.mark.slow  # two cold processes; `.ci/run` runs it
def test_the_second_run_of_a_command_finds_its_programs_in_a_private_folder_and_prints_the_same(tmp_path):
    def predict():
        settings = {"RLXJAX_HOME": str(tmp_path / "new" / "home"), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        done = run_python(COUNTED_COMMAND, "predict", str(CALIBRATION), "--batch", "64", "--json", **settings)
        *warned, counts = done.stderr.splitlines()
        assert not [line for line in warned if "made elsewhere" not in line]
        return json.loads(counts), files_of(tmp_path), json.loads(done.stdout)

    (hits, misses), kept, first = predict()
    assert misses > 0
    assert predict() == ([hits + misses, 0], kept, first)
    folder = tmp_path / "new/home/compiled"
    modes = {path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    assert os.name != "posix" or modes == {0o700}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Caching as commands find it, in the tests' process; the folder of the user's files."""
    before = dict(jax.config.values)
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    for name, value in before.items():
        if "cache" in name and jax.config.values[name] != value:
            jax.config.update(name, value)


def kept_in():
    """Return where compiled programs are kept once a command has said so, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        command_line.keep_compiled_programs()
    return jax.config.values["jax_compilation_cache_dir"], [str(one.message) for one in caught]


def test_no_cache_is_made_where_the_user_has_one_or_wants_none_or_it_cannot_be_written(home, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    assert kept_in() == (str(tmp_path / "own"), [])
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    assert kept_in() == (None, [])
    assert not home.exists()
    jax.config.update("jax_enable_compilation_cache", True)
    home.touch()
    assert kept_in() == (None, [])


def test_the_cache_is_with_the_calibrations_or_with_the_users_caches_one_a_kind_of_processor(
    home, tmp_path, monkeypatch
):
    here = compiled_programs_path()
    assert here.is_relative_to(home)
    assert compiled_programs_path() == here
    monkeypatch.setattr(command_line, "_processor", lambda: "flags : fewer")
    assert compiled_programs_path() != here
    monkeypatch.delenv("RLXJAX_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    if sys.platform == "linux":
        assert compiled_programs_path().is_relative_to(tmp_path / "caches" / "rlxjax")


def cache_file(folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"jit_{name}-{'0123456789abcdef' * 4}-cache"
    file.write_bytes(bytes(10))
    return file


def test_the_oldest_programs_go_first(home, monkeypatch):
    for most_bytes, kept in [(100, 4), (40, 4), (39, 3), (20, 2), (0, 0)]:
        files = [cache_file(compiled_programs_path(), age) for age in range(4)]
        for age, file in enumerate(files):
            os.utime(file, (1000 - age, 1000 - age))
        monkeypatch.setattr(command_line, "MAX_BYTES", most_bytes)
        assert kept_in() == (str(files[0].parent), [])
        assert files_of(home) == set(files[:kept])
        jax.config.update("jax_compilation_cache_dir", None)


def test_only_what_the_cache_wrote_in_its_own_folder_is_removed(home, tmp_path, monkeypatch):
    folder, elsewhere = compiled_programs_path(), tmp_path / "elsewhere"
    cache_file(folder, "own")
    users = [cache_file(one, "x") for one in (folder / "below", folder.parent, folder.parent / "other", elsewhere)]
    for file in (folder / "data.bin", folder / "notes-cache"):
        file.write_bytes(bytes(10))
        users.append(file)
    (folder / "link").symlink_to(elsewhere, target_is_directory=True)
    link = cache_file(folder, "link")
    link.unlink()
    link.symlink_to(users[3])
    monkeypatch.setattr(command_line, "MAX_BYTES", 0)
    kept_in()
    assert files_of(tmp_path) == {*users, link}


@pytest.mark.skipif(os.name != "posix", reason="modes of folders are those of POSIX")
@pytest.mark.parametrize("is_above", [True, False])
@pytest.mark.parametrize("said", ["can be written by others", "symbolic link", "belongs to another user"])
def test_a_folder_that_others_could_write_programs_into_is_not_used(home, tmp_path, monkeypatch, said, is_above):
    monkeypatch.setattr(command_line, "MAX_BYTES", 0)
    folder = compiled_programs_path()
    spoilt = folder.parent if is_above else folder
    target = cache_file(tmp_path / "target", "x").parent
    if said == "symbolic link":
        spoilt.parent.mkdir(parents=True, exist_ok=True)
        spoilt.symlink_to(target, target_is_directory=True)
    else:
        spoilt.mkdir(parents=True)
        spoilt.chmod(0o777 if "written" in said else 0o700)
    if "user" in said:
        monkeypatch.setattr(os, "geteuid", lambda: home.stat().st_uid + 1)
    before = files_of(tmp_path)
    where, warned = kept_in()
    assert (where, files_of(tmp_path)) == (None, before)
    assert [said in line for line in warned] == [True]
