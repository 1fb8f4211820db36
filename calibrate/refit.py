"""A calibration of kept samples, of whatever machine and version they are."""

from collections.abc import Sequence
from pathlib import Path as FilePath

from rlxjax.calibration import file_to_write, population_prior
from rlxjax.models import WELCH

from .fits import prior_from
from .job import fit_and_write
from .progress import Progress
from .report import Outcome
from .samples import SampleLog
from .workloads import Grid, load_models, runs_model

#: How the job names a samples file, which may be compressed.
SAMPLES_SUFFIX = ".samples.jsonl"


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
    path = calibration_of(samples_path) if out is None else out
    if file_to_write(path) == file_to_write(samples_path):
        raise ValueError(f"--out: expected a file for the calibration, got that of the samples: {path}")
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


def calibration_of(samples_path: FilePath) -> FilePath:
    """Return the calibration file that a samples file belongs to: beside it, of the same name.

    Raises:
        ValueError: a name that says of no such file.

    Examples:
        >>> calibration_of(FilePath("a.samples.jsonl.gz")).name
        'a.json'
    """
    name, _, rest = samples_path.name.rpartition(SAMPLES_SUFFIX)
    if name and rest in ("", ".gz"):
        return samples_path.with_name(f"{name}.json")
    raise ValueError(
        f"--out: expected a file, as {samples_path} is not named like NAME{SAMPLES_SUFFIX}, which makes NAME.json"
    )
