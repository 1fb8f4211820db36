"""What importing loads and starts, and the compiled programs that the commands keep."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from calibrate import compiled

ROOT = Path(__file__).parents[1]
CALIBRATION = ROOT / "notebooks" / "data" / "calibration-cpu.json"
CACHE_SETTINGS = ("jax_enable_compilation_cache", "jax_compilation_cache_dir")

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


#: The same of one small program, as commands keep theirs.
COUNTED_PROGRAM = """
import collections, json, sys
import jax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.split("/")[-1]]))
from calibrate.compiled import keep_compiled_programs
keep_compiled_programs()
jax.jit(lambda x: x + 1.0)(1.0)
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


def compile_one(**environment):
    """Compile one program as commands do; return the warnings, and the counts of programs found and not found."""
    *warned, counts = run_python(COUNTED_PROGRAM, **environment).stderr.splitlines()
    return warned, json.loads(counts)


def files_of(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


def loaded_by(statement):
    """Return the modules that a statement loads after JAX."""
    code = f"import sys, jax; before = set(sys.modules); {statement}; print(*set(sys.modules) - before)"
    return set(run_python(code).stdout.split())


def test_all_names_load_what_every_call_needs_and_no_more():
    heavy = "typer rich matplotlib scipy platformdirs filelock pandas jax._src.pallas"
    loaded = loaded_by("from rlxjax import *")
    assert {"rlxjax.calibration", "rlxjax.fit", "rlxjax.welch", "rlxjax.fusion"} <= loaded
    assert loaded.isdisjoint({*heavy.split(), "calibrate"})


def test_a_name_loads_its_own_part():
    assert loaded_by("import rlxjax") == {"rlxjax"}
    assert loaded_by("import rlxjax; rlxjax.Graph").isdisjoint({"rlxjax.welch", "rlxjax.fit"})
    assert loaded_by("from rlxjax import welch_peaks").isdisjoint({"rlxjax.calibration", "rlxjax.fit"})


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
    options = {"JAX_COMPILATION_CACHE_DIR": str(own), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    compile_one(RLXJAX_HOME=str(home), **options)
    assert files_of(own)
    assert not home.exists()
    compile_one(RLXJAX_HOME=str(home), JAX_ENABLE_COMPILATION_CACHE="0")
    assert not home.exists()


def test_a_folder_that_cannot_be_written_is_no_failure_and_no_warning(tmp_path):
    a_file = tmp_path / "home"
    a_file.touch()
    assert compile_one(RLXJAX_HOME=str(a_file)) == ([], [0, 0])


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


def cache_file(folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"jit_{name}-{'0123456789abcdef' * 4}-cache"


@pytest.mark.parametrize(("most_bytes", "kept"), [(100, 4), (40, 4), (39, 3), (20, 2), (0, 0)])
def test_the_oldest_programs_go_first(tmp_path, most_bytes, kept):
    files = [cache_file(tmp_path, age) for age in range(4)]
    for age, file in enumerate(files):
        file.write_bytes(bytes(10))
        os.utime(file, (1000 - age, 1000 - age))
    compiled._remove_oldest(tmp_path, most_bytes)
    assert files_of(tmp_path) == set(files[:kept])


def test_only_what_the_cache_wrote_in_its_own_folder_is_removed(tmp_path):
    folder, elsewhere = tmp_path / "compiled" / "machine", tmp_path / "elsewhere"
    own = cache_file(folder, "own")
    users = [folder / "data.bin", folder / "notes-cache", cache_file(folder / "below", "x")]
    users += [cache_file(folder.parent, "x"), cache_file(folder.parent / "other", "x")]
    users += [cache_file(elsewhere, "x")]
    for file in [own, *users]:
        file.write_bytes(bytes(10))
    (folder / "link").symlink_to(elsewhere, target_is_directory=True)
    cache_file(folder, "link").symlink_to(users[-1])
    compiled._remove_oldest(folder, 0)
    assert files_of(tmp_path) == {*users, cache_file(folder, "link")}


@pytest.fixture
def caching():
    """Caching as commands find it, in the tests' process."""
    before = {name: jax.config.values[name] for name in CACHE_SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def made_writable(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def made_a_link(folder):
    folder.parent.mkdir(parents=True, exist_ok=True)
    target = cache_file(folder.parents[1] / "target", "x")
    target.write_bytes(bytes(10))
    folder.symlink_to(target.parent, target_is_directory=True)


@pytest.mark.skipif(os.name != "posix", reason="modes of folders are those of POSIX")
@pytest.mark.parametrize(
    ("spoil", "said"), [(made_writable, "may be written by others"), (made_a_link, "symbolic link")]
)
@pytest.mark.parametrize("is_above", [True, False])
def test_a_folder_that_others_could_write_programs_into_is_not_used(
    tmp_path, monkeypatch, recwarn, caching, spoil, said, is_above
):
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "MAX_BYTES", 0)
    path = compiled.compiled_programs_path()
    spoil(path.parent if is_above else path)
    before = files_of(tmp_path), jax.config.values["jax_compilation_cache_dir"]
    compiled.keep_compiled_programs()
    assert (files_of(tmp_path), jax.config.values["jax_compilation_cache_dir"]) == before
    assert [said in str(one.message) for one in recwarn] == [True]


def test_a_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    assert not compiled._why_unsafe(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert compiled._why_unsafe(tmp_path) == "belongs to another user"


@pytest.mark.skipif(os.name != "posix", reason="modes of folders are those of POSIX")
def test_the_folders_that_the_commands_make_are_private_whatever_the_umask(tmp_path):
    home = tmp_path / "new" / "home"
    run_python(f"import os; os.umask(0)\n{COUNTED_PROGRAM}", RLXJAX_HOME=str(home))
    made = [home / "compiled", *(home / "compiled").iterdir()]
    assert len(made) == 2
    assert files_of(home)
    assert {folder.stat().st_mode & 0o777 for folder in made} == {0o700}
