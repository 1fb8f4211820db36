"""The command that writes a calibration, or an advice, as a page to read and to hand on."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Annotated

import typer

from .command_line import (
    Batch,
    File,
    NFft,
    Peaks,
    Suites,
    calibration_file,
    command_line,
    one_line_errors,
    refuse_input,
    warn,
    workload,
)
from .terminal import Progress, say

#: Segments of the workload that is explained.
SEGMENTS = 2


@one_line_errors
def report(
    file: File = None,
    out: Annotated[FilePath, typer.Option("--out", "-o", help="The HTML file to write.")] = FilePath("report.html"),
    samples: Annotated[
        FilePath | None,
        typer.Option(help="What was timed; the file beside the calibration that it names unless given."),
    ] = None,
    against: Annotated[
        FilePath | None, typer.Option(help="An earlier calibration of the same machine, to see what changed.")
    ] = None,
    advice: Annotated[
        FilePath | None,
        typer.Option(help="What `rlxjax advise` printed as JSON: the page is of that, and not of a calibration."),
    ] = None,
    batch: Batch = 1024,
    n_fft: NFft = 256,
    k: Peaks = 16,
    suite: Suites = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")] = False,
) -> None:
    """Write a calibration as one HTML file: the verdict, what was measured, what changed, and pictures.

    The file is whole: it loads nothing. --batch, --n-fft and --k name the workload whose time is explained.
    """
    for name in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"rlxjax report: {name} is not installed; get it with `pip install 'rlxjax[report]'`")
    from rlxjax.calibration import file_to_write, sections_of_file, write_text_file

    with _about_place():
        file_to_write(out)
    progress, given = Progress(is_quiet=quiet), {"samples": samples, "against": against}
    with progress.waiting("drawing the page"):
        if advice is not None:
            for name, one in {"FILE": file, **{f"--{key}": value for key, value in given.items()}}.items():
                if one is not None:
                    raise ValueError(f"--advice: expected no {name} beside it, got {one}; make a page of each")
            refuse_input(out, "the page", [("the advice", advice)])
            from .report import advice_page

            text = advice_page(advice, command=command_line("report", advice=advice, out=out))
        else:
            sizes, path = workload(batch, n_fft, k, SEGMENTS), calibration_file(file)
            from .report import calibration_page
            from .suites import models_of, suite_of

            content = sections_of_file(path)[0]
            models, left_out = models_of(content, [suite_of(name) for name in suite or []])
            for text in left_out:
                warn(text)
            named = [section.samples for section in content.sections().values()]
            beside = [("its samples", path.parent / own.file) for own in named if own is not None]
            of_options = [("the samples", samples), ("the earlier calibration", against)]
            refuse_input(out, "the page", [("the calibration", path), *of_options, *beside])
            asked = {"batch": batch, "n_fft": n_fft, "k": k, "suite": suite}
            command = command_line("report", *([] if file is None else [file]), out=out, **given, **asked)
            text = calibration_page(
                path,
                command=command,
                workload=sizes,
                samples=samples,
                against=against,
                models=models,
            )
    with _about_place():
        write_text_file(text, out)
    if not quiet:
        say(f"report: {out}")


@contextlib.contextmanager
def _about_place() -> Iterator[None]:
    """Name the option where a place cannot be written."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(f"--out: {error}: give another place with -o") from None
