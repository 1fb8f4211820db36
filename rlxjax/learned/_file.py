"""Saving and loading a learned FFT."""

import os

import numpy as np

from rlxjax._checks import as_index

from ._model import LearnedFft


class LearnedFftFileError(ValueError):
    """A model file that cannot be used: one line with the file, the field and the mend."""


def save_learned_fft(model: LearnedFft, path: str | os.PathLike[str], note: str = "") -> None:
    """Write a model to a file; a reader sees either the old file or the new one, whole.

    Args:
        model: the model; its leaves are kept in single precision.
        path: the file.
        note: how it was trained, for a reader.

    Raises:
        ValueError: something that is no model, one with gates outside [0, 1], leaves that are not finite or
            of wrong shapes.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_learned_fft(LearnedFft.exact(8), f"{folder}/model.json")
        ...     load_learned_fft(f"{folder}/model.json", n_fft=8).active_gates
        12
    """
    from rlxjax._files import write_json_file

    from ._schema import SCHEMA_VERSION, LearnedFftFile, single_precision

    if not isinstance(model, LearnedFft):
        raise ValueError(f"model: expected a LearnedFft, got {type(model).__name__}")
    if not isinstance(note, str):
        raise ValueError(f"note: expected a string, got {note!r}")
    names = ("twiddles", "gates", "mask")
    whole = LearnedFft.checked(**{name: single_precision(getattr(model, name)) for name in names})
    content = LearnedFftFile(
        schema_version=SCHEMA_VERSION,
        kind="learned_fft",
        n_fft=whole.n_fft,
        active_gates=whole.active_gates,
        total_gates=whole.total_gates,
        note=note,
        # The shortest decimals that give the same single-precision numbers.
        **{name: getattr(whole, name).astype(str).astype(float).tolist() for name in names},
    )
    write_json_file(content, path, indent=None)


def load_learned_fft(path: str | os.PathLike[str], n_fft: int | np.integer | None = None) -> LearnedFft:
    """Load a model that `save_learned_fft` wrote.

    Args:
        path: the file.
        n_fft: the segment length that it has to be for, if that matters already.

    Raises:
        LearnedFftFileError: a file that is missing, truncated, changed, of a future schema, has gates outside [0, 1]
            or another value that is no model's, or is a model for another `n_fft`; one line that names the
            file, the field and the mend.

    Examples:
        >>> load_learned_fft("missing.json")
        Traceback (most recent call last):
        rlxjax.learned._file.LearnedFftFileError: missing.json: no such file; ...
    """
    from rlxjax._files import read_json_file

    from ._schema import SCHEMA_VERSION, LearnedFftFile

    mend = "train one with train_learned_fft and save_learned_fft"
    error, what = LearnedFftFileError, "a learned FFT"
    content = read_json_file(path, LearnedFftFile, SCHEMA_VERSION, error, mend, what)
    if n_fft is not None and content.n_fft != as_index(n_fft, "n_fft"):
        expected = f"expected a model for n_fft {n_fft}, got one for {content.n_fft}"
        raise LearnedFftFileError(f"{path}: n_fft: {expected}; {mend}")
    return content.model()
