"""What the commands share: options, JAX set up for a calibration, and where tables are printed."""

import shlex
import sys
from pathlib import Path as FilePath
from typing import Annotated

import typer
from rich.console import Console

import rlxjax

#: Largest size of a workload: what arrays of JAX are indexed by.
MAX_SIZE = 2**31 - 1
Batch = Annotated[int, typer.Option(help="Rows of the signal.", max=MAX_SIZE)]
NFft = Annotated[int, typer.Option(help="Samples of a segment, even.", max=MAX_SIZE)]
Peaks = Annotated[int, typer.Option("--k", help="Peaks of a row; those beyond the bins are (0, 0.0).", max=MAX_SIZE)]
Segments = Annotated[int, typer.Option(help="Segments of a row.", max=MAX_SIZE)]
File = Annotated[
    FilePath | None, typer.Argument(help="A calibration file; the saved one of this machine unless given.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def set_up_jax_as(file: FilePath | None) -> FilePath:
    """Choose the platform of a calibration, the saved one unless given, and return where it is.

    That is the processor also where JAX would take an accelerator.
    """
    from rlxjax.calibration import default_calibration_path, read_calibration_file

    if file is None:
        set_up_jax(None)
        return default_calibration_path()
    set_up_jax("cpu" if read_calibration_file(file).fingerprint.platform == "cpu" else None)
    return file


def calibration_of(file: FilePath | None) -> "rlxjax.Calibration":
    """Return the calibration of a file, or the one that is used where none is given, with JAX set up for it.

    Raises:
        ValueError: neither a saved calibration nor a population of other machines.
    """
    path = set_up_jax_as(file)
    if file is not None:
        return rlxjax.load_calibration(file)
    found = rlxjax.default_calibration()
    if found is None:
        raise ValueError(f"{path}: no such file; measure this machine with `rlxjax calibrate`")
    return found


def say_source(calibration: "rlxjax.Calibration", model: str) -> None:
    """Print which calibration was used, and what a user of one of its models should know."""
    typer.echo(f"by {calibration.source}")
    known = calibration.models.get(model)
    for caution in () if known is None else known.cautions:
        typer.echo(f"caution: {caution}")


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


def console(width: int = 110) -> Console:
    """Return where tables are printed: as wide as the terminal, or so wide where there is none."""
    return Console(width=None if sys.stdout.isatty() else width)


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
