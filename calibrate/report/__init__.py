"""The command that writes a calibration or an advice as one HTML file. Command and file use no network."""

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
    "rlxjax report calibration.json --against earlier.json",
    "rlxjax report --advice advice.json",
    statuses={0: "the page is written", 2: "bad input, or a place that cannot be written"},
)
def report(
    context: typer.Context,
    file: File = None,
    out: Annotated[
        FilePath | None,
        Option("--out", "-o", help="The HTML file to write; by default named after the calibration or advice, here."),
    ] = None,
    samples: Annotated[
        FilePath | None, Option(help="The timings; by default the file beside the calibration that it names.")
    ] = None,
    against: Annotated[
        FilePath | None, Option(help="An earlier calibration of this machine: the page shows the changes.")
    ] = None,
    of_advice: Annotated[
        FilePath | None, Option("--advice", help="The output of `rlxjax advise --json`: the page shows this advice.")
    ] = None,
    batch: Batch = 1024,
    n_fft: NFft = 256,
    k: Peaks = 16,
    suite: Suites = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print warnings and errors only.")] = False,
) -> None:
    """Write a calibration or an advice as an HTML file with the verdict, the next commands, errors and pictures.

    The file needs no network. --batch, --n-fft and --k give the size of the Welch peaks whose time the page explains.
    """
    for name in ("jinja2", "matplotlib"):
        require(name, "report")
    from rlxjax.calibration import sections_of_file, write_text_file

    with Progress(is_quiet=quiet).waiting("drawing the page"):
        if of_advice is not None:
            for name, one in {"FILE": file, "--samples": samples, "--against": against}.items():
                if one is not None:
                    raise ValueError(f"{name}: leave it out with --advice; the page shows an advice or a calibration")
            out = _place(out, "advice", of_advice, [])
            from ..report.advice import advice_page

            text = advice_page(of_advice, command_line(context))
        else:
            sizes, path = workload(batch, n_fft, k, 2), calibration_file(file)
            from ..report.calibration import calibration_page
            from ..suites import models_of, suite_of

            content = sections_of_file(path)[0]
            models, left_out = models_of(content, [suite_of(name) for name in suite or []])
            for said in left_out:
                warn(said)
            named = [section.samples for section in content.sections().values() if section.samples is not None]
            inputs = [("its samples", path.parent / own.file) for own in named]
            inputs += [("the samples", samples), ("the earlier calibration", against)]
            out = _place(out, "calibration", path, inputs)
            text = calibration_page(path, command_line(context), sizes, samples, against, models)
    with _about_place():
        write_text_file(text, out)
    if not quiet:
        say(f"report: {out}")


def _place(out: FilePath | None, kind: str, path: FilePath, inputs: list[tuple[str, FilePath | None]]) -> FilePath:
    """Return the file to write. Refuse an input of the command, and a file that is no earlier page of this kind."""
    from rlxjax.calibration import file_to_write, read_file

    from .page import mark_of

    out = out or FilePath(f"{path.stem}.html" if kind in path.stem else f"{path.stem}-{kind}.html")
    refuse_input(out, "the page", [(f"the {kind}", path), *inputs])
    with _about_place():
        place = file_to_write(out)
        if place.exists() and (old := read_file(place)) and mark_of(kind).encode() not in old:
            raise ValueError(f"{out} exists and is no {mark_of(kind)}")
    return out


@contextlib.contextmanager
def _about_place() -> Iterator[None]:
    """If a place cannot be written, name the option that gave the place."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(f"--out: {error}: give another place with -o") from None
