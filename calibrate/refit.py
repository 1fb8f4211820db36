"""Calibrations of kept samples, of whatever machine and version they are."""

from collections.abc import Sequence
from pathlib import Path as FilePath

from rlxjax.calibration import file_to_write, population_prior
from rlxjax.models import WELCH

from .fits import prior_from
from .functions_job import fit_functions
from .job import fit_and_write
from .outcome import FunctionsOutcome, Outcome
from .progress import Progress
from .refusals import refuse_input
from .sample_lines import FUNCTIONS_SUFFIX
from .samples import FunctionLog, SampleLog
from .workloads import Grid, load_models, runs_model

#: How the job names samples files, which may be compressed.
SAMPLES_SUFFIXES = (".samples.jsonl", FUNCTIONS_SUFFIX)


def refit(
    log: SampleLog,
    samples_path: FilePath,
    *,
    out: FilePath | None,
    command: str,
    progress: Progress,
    models: Sequence[FilePath] = (),
    force: bool = False,
    prior: FilePath | None = None,
) -> Outcome:
    """Fit the model to samples and write the calibration of the machine that they were taken on.

    Args:
        log: the samples.
        samples_path: where they were read from.
        out: the calibration file; that of the samples unless given, see `calibration_of`.
        command: how this was called, for the file.
        progress: shows the phase.
        models: files of the learned FFTs that were timed; runs of others are left out.
        force: write a calibration even if a fit did not converge.
        prior: a calibration file to start from, of any machine.

    Raises:
        ValueError: an `out` that is no file or the samples themselves, a model that was not timed, a prior
            that is none, or samples that make no fit.
    """
    path = _place_of(samples_path, out)
    timed_models = load_models(models)
    for n_fft, timed in timed_models.items():
        if log.models.get(n_fft) != timed.sha256:
            raise ValueError(f"--model: {timed.file} is not the model that the samples timed for n_fft {n_fft}")
    notes = []
    left_out = [cell for cell in log.cells if runs_model(cell) and cell.n_fft not in timed_models]
    if left_out:
        log.cells = [cell for cell in log.cells if cell not in left_out]
        notes.append(f"{len(left_out)} workloads of learned FFTs were left out: give the models that ran with --model.")
    known = population_prior(WELCH, log.fingerprint.platform) if prior is None else prior_from(prior)[0]
    with progress.phase("fitting"):
        return fit_and_write(log, Grid(), timed_models, path, samples_path, command, {}, notes, force, known)


def refit_functions(
    log: FunctionLog, samples_path: FilePath, *, out: FilePath | None, command: str, progress: Progress, force: bool
) -> FunctionsOutcome:
    """Fit samples of functions, and put the fit into the calibration of the machine that they were taken on.

    Raises:
        ValueError: an `out` that is no file or the samples themselves, or samples of too few functions.
    """
    path = _place_of(samples_path, out)
    with progress.phase("fitting functions"):
        return fit_functions(log, path, samples_path, command, [], force)


def _place_of(samples_path: FilePath, out: FilePath | None) -> FilePath:
    """Return where the calibration goes: to no place where no file can be, and not over the samples."""
    path = calibration_of(samples_path) if out is None else out
    file_to_write(path)
    refuse_input(path, "the calibration", [("the samples", samples_path)])
    return path


def calibration_of(samples_path: FilePath) -> FilePath:
    """Return the calibration file that a samples file belongs to: beside it, of the same name.

    Raises:
        ValueError: a name that says of no such file.

    Examples:
        >>> calibration_of(FilePath("a.samples.jsonl.gz")).name
        'a.json'
    """
    for suffix in SAMPLES_SUFFIXES:
        name, _, rest = samples_path.name.rpartition(suffix)
        if name and rest in ("", ".gz"):
            return samples_path.with_name(f"{name}.json")
    likes = " or ".join(f"NAME{suffix}" for suffix in SAMPLES_SUFFIXES)
    raise ValueError(f"--out: expected a file, as {samples_path} is not named like {likes}, which makes NAME.json")
