"""What the commands share: options, and JAX set up for a calibration."""

import shlex
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

import typer

import rlxjax

from .printing import say

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
    _, _, path = calibration.source.partition(", ")
    say(f"by {calibration.source}", path)
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


def columns_by_field(given: list[str]) -> dict[str, str]:
    """Return the columns that `--column field=name` gives."""
    columns = {}
    for text in given:
        field, equals, name = text.partition("=")
        if not (field and equals and name) or field in columns:
            raise ValueError(f"--column: expected field=name, each field once, got {text!r}")
        columns[field] = name
    return columns
