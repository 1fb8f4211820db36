"""The command that writes a calibration, or an advice, as a page to read and to hand on."""

from pathlib import Path as FilePath
from typing import Annotated

import typer

from .command_line import Batch, File, NFft, Peaks, Unsealed, calibration_file, command_line, workload
from .printing import say
from .progress import Progress
from .refusals import one_line_errors, refuse_input

#: Segments of the workload that is explained.
SEGMENTS = 2
_MEND = "give another place with -o"


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
    unsealed: Unsealed = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")] = False,
) -> None:
    """Write a calibration as one HTML file: the verdict, what was measured, what changed, and pictures.

    The file is whole: it loads nothing. --batch, --n-fft and --k name the workload whose time is explained.
    """
    _check_place(out)
    progress = Progress(is_quiet=quiet)
    if advice is not None:
        for name, given in (("FILE", file), ("--samples", samples), ("--against", against)):
            if given is not None:
                raise ValueError(f"--advice: expected no {name} beside it, got {given}; make a page of each")
        refuse_input(out, "the page", [("the advice", advice)])
        with progress.waiting("drawing the page"):
            from .page import advice_page

            text = advice_page(advice, command=command_line("report", advice=advice, out=out))
    else:
        with progress.waiting("drawing the page"):
            sizes = workload(batch, n_fft, k, SEGMENTS)
            path = calibration_file(file)
            from .page import calibration_page

            given = {"samples": samples, "against": against}
            named = [("the samples", samples), ("the earlier calibration", against)]
            refuse_input(out, "the page", [("the calibration", path), *named, *_samples_beside(path)])
            asked = {"batch": batch, "n_fft": n_fft, "k": k}
            command = command_line("report", *([] if file is None else [file]), out=out, **given, **asked)
            text = calibration_page(path, command=command, workload=sizes, unsealed=unsealed, **given)
    _write(text, out)
    if not quiet:
        say(f"report: {out}", str(out))


def _check_place(path: FilePath) -> None:
    """Refuse a place where no file can be, before anything is computed."""
    from rlxjax.calibration import file_to_write

    try:
        file_to_write(path)
    except ValueError as error:
        raise ValueError(f"--out: {error}: {_MEND}") from None


def _samples_beside(path: FilePath) -> list[tuple[str, FilePath]]:
    """Return where the samples lie that a calibration file names."""
    from rlxjax.calibration import sections_of_file

    content, _ = sections_of_file(path, unsealed=True)
    named = [section.samples for section in content.sections().values()]
    return [("its samples", path.parent / samples.file) for samples in named if samples is not None]


def _write(text: str, path: FilePath) -> None:
    """Write the page whole, or not at all.

    Raises:
        ValueError: a place that cannot be written; one line with the mend.
    """
    from rlxjax.calibration import write_text_file

    try:
        write_text_file(text, path)
    except OSError as error:
        raise ValueError(f"--out: {error}: {_MEND}") from None
