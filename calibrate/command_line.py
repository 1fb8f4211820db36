"""What the commands share: options, help, JAX set up for a calibration, and bad input as one line and a status."""

import errno
import functools
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

import typer

import rlxjax

from .interrupts import INTERRUPTED_STATUS
from .terminal import plain, say

NOT_WRITTEN_STATUS, BAD_INPUT_STATUS = 1, 2
#: What every mistake in a command's arguments derives from.
_UsageError: Any = typer.BadParameter.__base__
#: Largest size of a workload: what arrays of JAX are indexed by.
MAX_SIZE = 2**31 - 1


def _no_larger(size: int) -> int:
    """Return a size of a workload as it is given."""
    if size > MAX_SIZE:
        raise typer.BadParameter(f"expected at most {MAX_SIZE}, got {size}")
    return size


def size_option(help: str, *names: str) -> Any:
    """Return the option of a size of a workload."""
    return typer.Option(*names, help=help, callback=_no_larger)


Batch = Annotated[int, size_option("Rows of the signal.")]
NFft = Annotated[int, size_option("Samples of a segment, even, at most 2**25.")]
Peaks = Annotated[int, size_option("Peaks of a row, of n_fft / 2 + 1 bins at most.", "--k")]
Segments = Annotated[int, size_option("Segments of a row.")]
File = Annotated[
    FilePath | None, typer.Argument(help="A calibration file; the saved one of this machine unless given.")
]
Suites = Annotated[
    list[str] | None,
    typer.Option("--suite", help="The suite of a section of your own, as module:NAME; may be given again."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, with keys that stay.")]
Engine = Annotated[
    Literal["local", "ray"], typer.Option(help="local, all processors of this machine, or ray, a cluster of machines.")
]
Address = Annotated[str | None, typer.Option(help="Of a Ray cluster, as host:port; one is started here unless given.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings, errors and what --json asks for only.")]


def workload(batch: int, n_fft: int, k: int, segments: int) -> dict[str, int]:
    """Return the sizes of a workload by the names of the latency model's inputs."""
    params = rlxjax.WelchPeakParams(n_fft, segments, k)
    if batch < 1:
        raise ValueError(f"--batch: expected at least 1, got {batch}")
    if k > params.n_bins:
        raise ValueError(f"--k: expected at most {params.n_bins}, the bins of n_fft {n_fft}, got {k}")
    return {"batch": batch, "n_fft": params.n_fft, "k": params.k, "n_segments": params.n_segments}


def set_up_jax_as(file: FilePath | None) -> None:
    """Choose the platform of a calibration, if one is given: the processor also where JAX would take an accelerator."""
    from rlxjax.calibration import sections_of_file

    platforms: set[str] = set()
    if file is not None:
        content, *_ = sections_of_file(file)
        platforms = {section.fingerprint.platform for section in content.sections().values()}
    set_up_jax("cpu" if platforms == {"cpu"} else None)


def calibration_file(file: FilePath | None) -> FilePath:
    """Return the file of a calibration that was measured here, or another one that is given, with JAX set up for it."""
    from rlxjax.calibration import default_calibration_path, is_there

    set_up_jax_as(file)
    path = default_calibration_path() if file is None else file
    if file is None and not is_there(path):
        raise _nothing_measured(path)
    return path


def calibration_of(file: FilePath | None) -> "rlxjax.Calibration":
    """Return the calibration of a file, or the one that is used where none is given, with JAX set up for it."""
    from rlxjax.calibration import default_calibration_path

    set_up_jax_as(file)
    if file is not None:
        return rlxjax.load_calibration(file)
    found = rlxjax.default_calibration()
    if found is None:
        raise _nothing_measured(default_calibration_path())
    return found


def _nothing_measured(path: FilePath) -> ValueError:
    return ValueError(f"{path}: no such file; measure this machine with `rlxjax calibrate`")


def say_source(calibration: "rlxjax.Calibration", model: str) -> None:
    """Print which calibration was used, and what a user of one of its models should know."""
    say(f"by {calibration.source}")
    for caution in cautions_of(calibration, model):
        say(f"caution: {caution}")


def cautions_of(calibration: "rlxjax.Calibration", model: str) -> Sequence[str]:
    """Return what a user of one of a calibration's models should know."""
    return calibration.models[model].cautions if model in calibration.models else ()


def set_up_jax(device: str | None) -> None:
    """Choose the platform, before JAX starts one, turn float64 on, and keep what is compiled."""
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
        reason = (str(error).splitlines() or ["it failed to start"])[0]
        asked = f"--device {device}" if device else "JAX_PLATFORMS"
        raise ValueError(f"{asked}: JAX finds no such device here ({reason})") from None
    from .compiled import keep_compiled_programs

    keep_compiled_programs()


def command_line(command: str, *arguments: object, **options: object) -> str:
    """Return a command with the options that have a value; those of several values come again for each."""
    parts = ["rlxjax", command, *map(str, arguments)]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            parts.append(option)
        elif value:
            values = value if isinstance(value, list) else [value]
            parts += [part for one in values for part in (option, str(one))]
    return shlex.join(parts)


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a refusal, or a package that is not installed, into one line and an exit status."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default")
                warnings.showwarning = warn
                command(*args, **kwargs)
        except (ValueError, OSError, ImportError) as error:
            typer.echo(plain(f"error: {_said_of(error)}"), err=True)
            raise typer.Exit(BAD_INPUT_STATUS) from None
        except KeyboardInterrupt as interrupt:
            typer.echo(plain("; ".join(["interrupted", *map(str, interrupt.args)])), err=True)
            raise typer.Exit(INTERRUPTED_STATUS) from None

    return wrapped


def _said_of(error: Exception) -> str:
    """Return an error in one line; files that cannot be written are named by it, and so the output alone is not."""
    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EPIPE, errno.EIO):
        return f"standard output: cannot be written ({error.strerror})"
    return " ".join(str(error).split())


def refuse_input(out: FilePath, what: str, inputs: Iterable[tuple[str, FilePath | None]]) -> None:
    """Refuse to write where an input of the command is, also by another name of it."""
    for name, given in inputs:
        if given is not None and given.exists() and out.exists() and out.samefile(given):
            raise ValueError(f"--out: expected a file for {what}, got that of {name}: {out}")


def run(commands: typer.Typer, arguments: list[str], name: str) -> None:
    """Run a command line of a program of this name; a mistake in its arguments is one line, as any other bad input."""
    try:
        status = commands(arguments, prog_name=name, standalone_mode=False)
    except _UsageError as error:
        asked = error.ctx.command_path if error.ctx else name
        message = " ".join(error.format_message().split()).removesuffix(".")
        typer.echo(plain(f"error: {message} (see `{asked} -h`)"), err=True)
        status = BAD_INPUT_STATUS
    except OSError as error:
        typer.echo(plain(f"error: {_said_of(error)}"), err=True)
        status = BAD_INPUT_STATUS
    except typer.Abort:
        status = INTERRUPTED_STATUS
    sys.exit(status)


def warn(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning, a line on standard error."""
    typer.echo(plain(f"warning: {' '.join(str(message).split())}"), err=True)


#: Exit statuses that mean the same everywhere.
SHARED = {0: "done", 2: "bad input, said in one line", 130: "interrupted"}
_KEPT = {130: "interrupted; what was measured until then is printed and written"}
_FITTED = {1: "a fit did not converge, and was not written", 3: "with --strict: not good enough"}

#: What stands below the options of a command: command lines, and what each exit status means besides those of `SHARED`.
ENDINGS: dict[str, tuple[tuple[str, ...], dict[int, str]]] = {
    "calibrate": (
        (
            "rlxjax calibrate",
            "rlxjax calibrate --only functions --budget 30",
        ),
        _FITTED | _KEPT,
    ),
    "fleet": (
        ("rlxjax fleet 'timings/*.parquet' fleet",),
        {1: "some devices were left out, and are named"},
    ),
    "refit": (("rlxjax refit calibration-cpu.functions.samples.jsonl --verbose",), _FITTED),
    "validate": (
        ("rlxjax validate", "rlxjax validate calibration.json --quiet"),
        {0: "it holds", 1: "it drifted", 2: "another machine's, or bad input"},
    ),
    "predict": (("rlxjax predict --batch 8192 --n-fft 256 --k 16",), {}),
    "explain": (("rlxjax explain --batch 8192 --n-fft 256 --k 16",), {}),
    "profile": (
        (
            "rlxjax profile stages:scale --arg 'f32[2048,1024]'",
            "rlxjax profile stages:scale --arg 'f32[2048,1024]' --target tpu-v5e",
        ),
        {1: "part of what it does is not counted, or it does not fit a target"},
    ),
    "advise": (
        (
            "rlxjax advise stages:scale stages:energy --arg 'f32[64]' --measure undecided",
            "rlxjax advise stages:scale stages:energy --arg 'f32[2048]' --target h100",
        ),
        {0: "fuse or keep", 1: "undecided, or it cannot be modelled"},
    ),
    "evaluate": (
        (
            "rlxjax evaluate 'pairs/*.parquet' scored --gate cuda",
            "rlxjax evaluate runs picked --model welch --want pick,time_ns,probability",
        ),
        {1: "some rows could not be evaluated, and are named", 130: "interrupted; --resume goes on"},
    ),
    "decisions list": (("rlxjax decisions list",), {}),
    "decisions show": (("rlxjax decisions show a4f02c19",), {}),
    "decisions pin": (("rlxjax decisions pin a4f02c19 fused", "rlxjax decisions pin a4f02c19 --off"), {}),
    "decisions forget": (("rlxjax decisions forget a4f02c19", "rlxjax decisions forget --all"), {}),
    "decisions export": (("rlxjax decisions export decisions.json",), {}),
    "decisions import": (
        ("rlxjax decisions import decisions.json",),
        {1: "some decisions say what no measurement says, are named and left out"},
    ),
    "report": (
        ("rlxjax report", "rlxjax report calibration.json -o report.html --against earlier.json"),
        {0: "the page is written", 2: "bad input, or a place that cannot be written"},
    ),
}
OVERVIEW = (
    "Examples:\n  rlxjax calibrate\n  rlxjax profile mymodule:loss --arg 'f32[2048,1024]'\n"
    "  rlxjax advise mymodule:scale mymodule:energy --arg 'f32[2048,1024]'\n\n"
    "Each command has a help of its own, with an example and its exit statuses: rlxjax advise -h"
)


def epilog(command: str) -> str:
    """Return the text below the options of a command."""
    examples, statuses = ENDINGS[command]
    lines = ["Example:" if len(examples) == 1 else "Examples:", *(f"  {example}" for example in examples)]
    lines += ["", "Exit status:", *(f"  {code}: {what}" for code, what in sorted((SHARED | statuses).items()))]
    return "\n".join(lines)
