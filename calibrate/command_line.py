"""What all commands share: options, help texts, one-line errors, exit statuses, and the setup of JAX."""

import contextlib
import errno
import functools
import hashlib
import io
import os
import platform
import re
import shlex
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path as FilePath
from typing import Annotated, Any

import typer
from typer import Argument, Option

import rlxjax

from .interrupts import INTERRUPTED_STATUS
from .terminal import plain, say

#: A program that the signal SIGPIPE ends has the exit status `CLOSED_STATUS`.
NOT_WRITTEN_STATUS, BAD_INPUT_STATUS, CLOSED_STATUS = 1, 2, 141
#: The exit statuses that have the same meaning in every command.
SHARED = {0: "done", 2: "bad input; one line says why", 130: "interrupted", CLOSED_STATUS: "standard output was closed"}
_SETTINGS: Any = {"context_settings": {"help_option_names": ["-h", "--help"]}}
app = typer.Typer(
    pretty_exceptions_enable=False,
    epilog="Examples:\n  rlxjax calibrate\n  rlxjax profile mymodule:loss --arg 'f32[2048,1024]'\n"
    "  rlxjax advise mymodule:scale mymodule:energy --arg 'f32[2048,1024]'\n\n"
    "The help of each command has an example and the exit statuses: rlxjax advise -h",
    **_SETTINGS,
)

# --- Options -------------------------------------------------------------------------------------

#: The largest size of a workload, since JAX indexes arrays with 32 bits.
MAX_SIZE = 2**31 - 1


Batch = Annotated[int, Option(help="Rows of the signal.", max=MAX_SIZE)]
NFft = Annotated[int, Option(help="Samples per segment: an even number, at most 2**25.", max=MAX_SIZE)]
Peaks = Annotated[int, Option("--k", help="Peaks per row, at most n_fft / 2 + 1.", max=MAX_SIZE)]
Segments = Annotated[int, Option(help="Segments per row.", max=MAX_SIZE)]
File = Annotated[FilePath | None, Argument(help="A calibration file; default: the calibration of this machine.")]
Suites = Annotated[
    list[str] | None, Option("--suite", help="Your own suite behind a section, as module:NAME; repeatable.")
]
Prior = Annotated[
    FilePath | None, Option(help="A calibration of another machine or day to start from; fewer timings suffice.")
]
Strict = Annotated[bool, Option("--strict", help="Exit status 3 unless the calibration is good enough.")]
Force = Annotated[bool, Option("--force", help="Write the file even if the fit did not converge or is worse.")]
Verbose = Annotated[bool, Option("--verbose", help="Print tables of errors, coefficients and workloads as well.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON, with stable keys.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print only warnings, errors and --json.")]
#: The options that change only the output, not the answer.
OF_PRINTING = ("strict", "verbose", "quiet", "as_json")


def workload(batch: int, n_fft: int, k: int, segments: int) -> dict[str, Any]:
    """Return the sizes of a workload as a dict by the names of the model's inputs."""
    params = rlxjax.WelchPeakParams(n_fft, segments, k)
    if batch < 1:
        raise ValueError(f"--batch: expected at least 1, got {batch}")
    if k > params.n_bins:
        raise ValueError(f"--k: expected at most {params.n_bins}, the bins of n_fft {n_fft}, got {k}")
    return {"batch": batch, "n_fft": params.n_fft, "k": params.k, "n_segments": params.n_segments}


def refuse_input(out: FilePath, what: str, inputs: Iterable[tuple[str, FilePath | None]]) -> None:
    """Raise an error if an output file of the command is also an input file of the command."""
    for name, given in inputs:
        if given is not None and given.exists() and out.exists() and out.samefile(given):
            raise ValueError(f"--out: expected a new file for {what}, got the file of {name}: {out}")


# --- Commands ------------------------------------------------------------------------------------


def command(
    *examples: str, statuses: Mapping[int, str] | None = None, of: typer.Typer = app, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a command. Its help ends with examples and all exit statuses, including those that all commands share."""

    def added(function: Callable[..., None]) -> Callable[..., None]:
        lines = ["Example:" if len(examples) == 1 else "Examples:", *(f"  {example}" for example in examples)]
        means = sorted((SHARED | dict(statuses or {})).items())
        lines += ["", "Exit status:", *(f"  {status}: {meaning}" for status, meaning in means)]
        return of.command(name, epilog="\n".join(lines), **_SETTINGS)(one_line_errors(function))

    return added


def one_line_errors(function: Callable[..., None]) -> Callable[..., None]:
    """Print one line and exit if the input is bad or a package is missing."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default")
                warnings.showwarning = warn
                function(*args, **kwargs)
        except (ValueError, OSError, ImportError) as error:
            raise typer.Exit(_refused(error)) from None
        except KeyboardInterrupt as interrupt:
            typer.echo(plain("; ".join(["interrupted", *map(str, interrupt.args)])), err=True)
            raise typer.Exit(INTERRUPTED_STATUS) from None

    return wrapped


def run(commands: Callable[..., Any], arguments: list[str], name: str) -> None:
    """Run a command line of the program `name`. A mistake in the arguments prints one line, as all bad input does."""
    usage_error: Any = typer.BadParameter.__base__  # the base class of all mistakes in arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may lack characters, of file names for instance
    try:
        status = commands(arguments, prog_name=name, standalone_mode=False)
    except usage_error as error:
        message = " ".join(error.format_message().split()).removesuffix(".")
        status = _refused(f"{message} (see `{error.ctx.command_path if error.ctx else name} -h`)")
    except OSError as error:
        status = _refused(error)
    except SystemExit as ended:  # typer and rich end so if standard output is closed
        status = _refused(ended.__context__) if isinstance(ended.__context__, OSError) else ended.code
    except typer.Abort:
        status = INTERRUPTED_STATUS
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        status = status or _refused(error)
        assert sys.stdout is not None
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again when it ends
    sys.exit(status)


def in_options(text: object) -> str:
    """Return a text in which an argument of the library has the name of its option."""
    return str(text).replace("trip_counts", "--trips")


def _refused(error: Exception | str) -> int:
    """Print an error in one line, and return the exit status. Say nothing if the reader of the output is gone."""
    if isinstance(error, BrokenPipeError) and error.filename is None:
        return CLOSED_STATUS
    said = " ".join(in_options(error).split())
    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EIO):
        said = f"standard output: cannot be written ({error.strerror})"
    with contextlib.suppress(OSError):
        typer.echo(plain(f"error: {said}"), err=True)
    return BAD_INPUT_STATUS


def warn(message: Warning | str, *_: object, **__: object) -> None:
    typer.echo(plain(f"warning: {' '.join(str(message).split())}"), err=True)


def command_line(context: typer.Context, *left_out: str) -> str:
    """Return the text of the running command, without the output options and without the options in `left_out`."""
    parts = ["rlxjax", context.command.name or ""]
    for own in context.command.params:
        value = context.params.get(own.name or "")
        if not value or value == own.default or own.name in (*OF_PRINTING, *left_out):
            continue
        option = [max(own.opts, key=len)] if own.param_type_name == "option" else []
        values = [] if value is True else value if isinstance(value, (list, tuple)) else [value]
        parts += option if value is True else [part for one in values for part in (*option, str(one))]
    return shlex.join(parts)


# --- Calibrations and JAX ------------------------------------------------------------------------


def calibration_file(file: FilePath | None) -> FilePath:
    """Return the given file, or else the calibration file of this machine. Set JAX up for the platform in the file."""
    from rlxjax.calibration import default_calibration_path, is_there, sections_of_file

    sections = {} if file is None else sections_of_file(file)[0].sections()
    set_up_jax("cpu" if {section.fingerprint.platform for section in sections.values()} == {"cpu"} else None)
    path = default_calibration_path() if file is None else file
    if file is None and not is_there(path):
        raise ValueError(f"{path}: no such file; measure this machine with `rlxjax calibrate`")
    return path


def calibration_of(file: FilePath | None) -> "rlxjax.Calibration":
    """Return the calibration in a file, or else that of this machine. Set JAX up for the calibration's platform."""
    if file is None:
        set_up_jax(None)
        if (found := rlxjax.default_calibration()) is not None:
            return found
    return rlxjax.load_calibration(calibration_file(file))


def source_of(calibration: "rlxjax.Calibration", model: str) -> dict[str, Any]:
    """Return a dict for JSON: the source of a calibration's model, and the cautions about the model."""
    own = calibration.models.get(model)
    is_pooled = own is not None and "measured" not in own.provenance.values()  # a file may have other models only
    source = "no calibration of this machine" if is_pooled else calibration.source
    return {"calibration": source, "cautions": own.cautions if own else ()}


def say_source(calibration: "rlxjax.Calibration", model: str) -> None:
    source = source_of(calibration, model)
    say(f"based on {source['calibration']}")
    for caution in source["cautions"]:
        say(f"caution: {caution}")


def set_up_jax(device: str | None) -> None:
    """Choose JAX's platform, turn float64 on, and let JAX keep compiled programs on disk."""
    import jax

    jax.config.update("jax_enable_x64", True)
    if device is not None:
        known = ("cpu", "gpu", "cuda", "rocm", "tpu")
        if device.lower() not in known:
            raise ValueError(f"--device: expected one of {', '.join(known)}, got {device!r}")
        jax.config.update("jax_platforms", "cuda" if device.lower() == "gpu" else device.lower())
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        asked = f"--device {device}" if device else "JAX_PLATFORMS"
        raise ValueError(f"{asked}: JAX finds no such device here ({reason})") from None
    keep_compiled_programs()


# --- Compiled programs ---------------------------------------------------------------------------

#: The most bytes of programs to keep on disk for one kind of processor. The oldest programs are deleted first.
MAX_BYTES = 2**28
#: The names of two kinds of files in JAX's cache: a compiled program, and the time at which it was last used.
_CACHE_FILE = re.compile(r".+-[0-9a-f]{64}-(cache|atime)")
#: Older versions of jaxlib print an error for each loaded CPU program (https://github.com/jax-ml/jax/issues/38445).
_OLDEST_JAXLIB = (0, 10, 2)
#: The fields of /proc/cpuinfo that determine the instructions and the tuning that XLA compiles for.
_PROCESSOR_FIELDS = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU ", "Features", "isa")


def keep_compiled_programs() -> None:
    """Let JAX keep compiled programs, unless you set or disabled JAX's cache, or others can write to the folder."""
    import jax

    version = tuple(int(part) for part in re.findall(r"\d+", metadata.version("jaxlib"))[:3])
    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] or not settings["jax_enable_compilation_cache"]:
        return
    if jax.default_backend() == "cpu" and version < _OLDEST_JAXLIB:
        return
    try:
        folder = compiled_programs_path()
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for private in (folder.parent, folder):
            private.mkdir(mode=0o700, exist_ok=True)
            if reason := _why_unsafe(private.lstat()):
                warnings.warn(f"{private}: {reason}: compiled programs are not kept there", stacklevel=2)
                return
        with tempfile.TemporaryFile(dir=folder):
            pass
        files = [(file.lstat(), file) for file in folder.iterdir() if _CACHE_FILE.fullmatch(file.name)]
        files = [(status, file) for status, file in files if stat.S_ISREG(status.st_mode)]
        excess = sum(status.st_size for status, _ in files) - MAX_BYTES
        for status, file in sorted(files, key=lambda one: one[0].st_mtime):
            if excess > 0:
                file.unlink(missing_ok=True)
                excess -= status.st_size
    except (OSError, ValueError):
        return
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def compiled_programs_path() -> FilePath:
    """Return the folder of compiled programs: in the folder `RLXJAX_HOME` if that is set, else in the user's cache."""
    from rlxjax.calibration import CalibrationFileError, home_folder

    # Each kind of processor has its own folder, since JAX would load programs with another processor's instructions.
    processor = hashlib.sha256(_processor().encode()).hexdigest()[:12]
    return home_folder("cache", CalibrationFileError) / "compiled" / f"{platform.machine()}-{processor}"


def _processor() -> str:
    try:
        first, _, _ = FilePath("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")
    except OSError:
        return platform.processor()
    return "\n".join(line for line in first.splitlines() if line.startswith(_PROCESSOR_FIELDS))


def _why_unsafe(status: os.stat_result) -> str:
    """Return why a folder is not safe, or an empty text if no other user can write programs into it."""
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if os.name == "posix" and status.st_uid != os.geteuid():
        return "belongs to another user"
    if os.name == "posix" and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by others (run chmod go-w)"
    return ""
