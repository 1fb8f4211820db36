"""The command that writes a calibration, or an advice, as one HTML file to read and to hand on; it asks no network."""

import contextlib
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Annotated

import typer
from typer import Option

from rlxjax.extras import require

from ..command_line import (
    Batch,
    File,
    NFft,
    Peaks,
    Suites,
    calibration_file,
    command,
    command_line,
    refuse_input,
    warn,
    workload,
)
from ..terminal import Progress, say


@command(
    "rlxjax report",
    "rlxjax report calibration.json -o report.html --against earlier.json",
    statuses={0: "the page is written", 2: "bad input, or a place that cannot be written"},
)
def report(
    context: typer.Context,
    file: File = None,
    out: Annotated[FilePath, Option("--out", "-o", help="The HTML file to write.")] = FilePath("report.html"),
    samples: Annotated[
        FilePath | None, Option(help="What was timed; the file beside the calibration that it names unless given.")
    ] = None,
    against: Annotated[
        FilePath | None, Option(help="An earlier calibration of the same machine, to see what changed.")
    ] = None,
    advice: Annotated[
        FilePath | None,
        Option(help="What `rlxjax advise` printed as JSON: the page is of that, and not of a calibration."),
    ] = None,
    batch: Batch = 1024,
    n_fft: NFft = 256,
    k: Peaks = 16,
    suite: Suites = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print warnings and errors only.")] = False,
) -> None:
    """Write a calibration as one HTML file: the verdict, what was measured, what changed, and pictures.

    The file is whole: it loads nothing. --batch, --n-fft and --k name the workload whose time is explained.
    """
    for name in ("jinja2", "matplotlib"):
        require(name, "report")
    from rlxjax.calibration import file_to_write, sections_of_file, write_text_file

    with _about_place():
        file_to_write(out)
    with Progress(is_quiet=quiet).waiting("drawing the page"):
        if advice is not None:
            for name, one in {"FILE": file, "--samples": samples, "--against": against}.items():
                if one is not None:
                    raise ValueError(f"--advice: expected no {name} beside it, got {one}; make a page of each")
            refuse_input(out, "the page", [("the advice", advice)])
            from ..report.advice import advice_page

            text = advice_page(advice, command_line(context))
        else:
            sizes, path = workload(batch, n_fft, k, 2), calibration_file(file)
            from ..report.calibration import calibration_page
            from ..suites import models_of, suite_of

            content = sections_of_file(path)[0]
            models, left_out = models_of(content, [suite_of(name) for name in suite or []])
            for said in left_out:
                warn(said)
            inputs = [("the calibration", path), ("the samples", samples), ("the earlier calibration", against)]
            named = [section.samples for section in content.sections().values() if section.samples is not None]
            refuse_input(out, "the page", [*inputs, *(("its samples", path.parent / own.file) for own in named)])
            text = calibration_page(path, command_line(context), sizes, samples, against, models)
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
