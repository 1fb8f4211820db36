"""Where the commands keep compiled programs, so that a second run need not compile them again."""

import hashlib
import os
import platform
import re
import stat
import tempfile
import warnings
from importlib import metadata
from pathlib import Path as FilePath

import jax

from rlxjax.calibration import CalibrationFileError, home_folder

#: Of what is kept for one kind of processor; the oldest programs go first.
MAX_BYTES = 2**28
#: Names that JAX gives to the files of its cache: of a program, and of the time at which it was last used.
_CACHE_FILE = re.compile(r".+-[0-9a-f]{64}-(cache|atime)")
#: An earlier one prints an error for every CPU program that it loads (https://github.com/jax-ml/jax/issues/38445).
_OLDEST_JAXLIB = (0, 10, 2)
#: What /proc/cpuinfo says of the instructions and the tuning that XLA compiles for.
_PROCESSOR_FIELDS = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU ", "Features", "isa")


def keep_compiled_programs() -> None:
    """Let JAX keep what it compiles between runs, unless a user keeps it or wants no cache, or a folder is not safe."""
    version = tuple(int(part) for part in re.findall(r"\d+", metadata.version("jaxlib"))[:3])
    unsuitable = jax.default_backend() == "cpu" and version < _OLDEST_JAXLIB
    settings = jax.config.values
    if unsuitable or settings["jax_compilation_cache_dir"] or not settings["jax_enable_compilation_cache"]:
        return
    try:
        folder = compiled_programs_path()
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for private in (folder.parent, folder):
            private.mkdir(mode=0o700, exist_ok=True)
            if reason := _why_unsafe(private):
                warnings.warn(f"{private}: {reason}: compiled programs are not kept there", stacklevel=2)
                return
        with tempfile.TemporaryFile(dir=folder):
            pass
        _remove_oldest(folder, MAX_BYTES)
    except (OSError, CalibrationFileError):
        return
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def compiled_programs_path() -> FilePath:
    """Return where compiled programs are kept: with the calibrations in `RLXJAX_HOME`, else in the user's cache."""
    # Each kind of processor has a folder of its own: JAX loads a program with instructions of another one.
    kind = hashlib.sha256(_processor().encode()).hexdigest()[:12]
    return home_folder("cache", CalibrationFileError) / "compiled" / f"{platform.machine()}-{kind}"


def _processor() -> str:
    try:
        first, _, _ = FilePath("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")
    except OSError:
        return platform.processor()
    return "\n".join(line for line in first.splitlines() if line.startswith(_PROCESSOR_FIELDS))


def _why_unsafe(folder: FilePath) -> str:
    """Return why programs from a folder are not run, empty if they may be: somebody else could write them."""
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if os.name != "posix":
        return ""
    if status.st_uid != os.geteuid():
        return "belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "may be written by others (chmod go-w mends that)"
    return ""


def _remove_oldest(folder: FilePath, most_bytes: int) -> None:
    """Remove the oldest files that the cache wrote in its folder; nothing else is touched."""
    found = [(file.lstat(), file) for file in folder.iterdir() if _CACHE_FILE.fullmatch(file.name)]
    files = [(status, file) for status, file in found if stat.S_ISREG(status.st_mode)]
    excess = sum(status.st_size for status, _ in files) - most_bytes
    for status, file in sorted(files, key=lambda file: file[0].st_mtime):
        if excess <= 0:
            return
        file.unlink(missing_ok=True)
        excess -= status.st_size
