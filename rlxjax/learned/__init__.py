"""The learned FFT: an FFT that is pruned and trained for one kind of signal, and that finds approximate peaks.

`train_learned_fft` trains a model. `save_learned_fft` writes the model to a file, and `load_learned_fft` reads the
file. `rlxjax.welch_peaks(..., model=)` finds peaks with the model.
"""

from ._model import LearnedFft as LearnedFft
from ._model import LearnedFftFileError as LearnedFftFileError
from ._model import learned_spectrum as learned_spectrum
from ._model import load_learned_fft as load_learned_fft
from ._model import save_learned_fft as save_learned_fft
from ._program import LearnedProgram as LearnedProgram
from ._program import LearnedWork as LearnedWork
from ._program import learned_peaks as learned_peaks
from ._program import learned_program as learned_program
from ._training import ToneSignals as ToneSignals
from ._training import TrainingResult as TrainingResult
from ._training import peak_recall as peak_recall
from ._training import train_learned_fft as train_learned_fft

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
