"""Where the commands keep compiled programs, so that a second run need not compile them again."""

import hashlib
import os
import platform
import re
import tempfile
from importlib import metadata
from pathlib import Path as FilePath

import jax

#: Of all that is kept; the oldest files go first.
MAX_BYTES = 2**28
#: An earlier one prints an error for every CPU program that it loads (https://github.com/jax-ml/jax/issues/38445).
_OLDEST_JAXLIB = (0, 10, 2)
#: What /proc/cpuinfo says of the instructions and the tuning that XLA compiles for.
_PROCESSOR_FIELDS = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU ", "Features", "isa")


def keep_compiled_programs() -> None:
    """Let JAX keep what it compiles between runs; where that cannot be, it compiles again.

    A cache of the user's own (`JAX_COMPILATION_CACHE_DIR`) is used as it is, and
    `JAX_ENABLE_COMPILATION_CACHE=0` turns caching off.
    """
    version = tuple(int(part) for part in re.findall(r"\d+", metadata.version("jaxlib"))[:3])
    unsuitable = jax.default_backend() == "cpu" and version < _OLDEST_JAXLIB
    settings = jax.config.values
    is_on, own = settings["jax_enable_compilation_cache"], settings["jax_compilation_cache_dir"]
    if unsuitable or own or not is_on:
        return
    folder = compiled_programs_path()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        _remove_oldest(folder.parent, MAX_BYTES)
    except OSError:
        return
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def compiled_programs_path() -> FilePath:
    """Return where compiled programs are kept: `RLXJAX_HOME` where it is set, else the user's cache.

    Each kind of processor has a folder of its own: JAX loads a program with instructions of another one.
    """
    import platformdirs

    home = os.environ.get("RLXJAX_HOME") or platformdirs.user_cache_dir("rlxjax", appauthor=False)
    processor = hashlib.sha256(_processor().encode()).hexdigest()[:12]
    return FilePath(home) / "compiled" / f"{platform.machine()}-{processor}"


def _processor() -> str:
    try:
        first, _, _ = FilePath("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")
    except OSError:
        return platform.processor()
    return "\n".join(line for line in first.splitlines() if line.startswith(_PROCESSOR_FIELDS))


def _remove_oldest(folder: FilePath, most_bytes: int) -> None:
    files = [(path.stat(), path) for path in folder.rglob("*") if path.is_file()]
    files.sort(key=lambda file: file[0].st_mtime)
    excess = sum(stat.st_size for stat, _ in files) - most_bytes
    for stat, path in files:
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= stat.st_size
