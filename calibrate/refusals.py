"""Bad input to a command is one line on standard error and an exit status, never a traceback."""

import errno
import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path as FilePath
from typing import Any

import typer

from .interrupts import INTERRUPTED_STATUS
from .printing import plain

NOT_WRITTEN_STATUS, BAD_INPUT_STATUS = 1, 2
#: What every mistake in a command's arguments derives from.
_UsageError: Any = typer.BadParameter.__base__


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
