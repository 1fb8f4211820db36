"""The latency models: a batched FFT, and Welch peaks."""

from ._fft import FFT as FFT
from ._welch import WELCH as WELCH

#: The models that a calibration file is read for, by name; the first one is what a calibration is asked for.
BUILT_IN = {model.name: model for model in (WELCH, FFT)}
