"""The latency models: a batched FFT, and Welch peaks."""

from ._fft import FFT as FFT
from ._welch import WELCH as WELCH
