"""The parameters of a Welch-peaks run, and what follows from them."""

import dataclasses

import jax
import numpy as np

from rlxjax._checks import as_index, check_positive
from rlxjax._typing import RealLike

#: Numbers of bins beyond half of this are not whole in float32.
MOST_N_FFT = 2**25
#: Segments of the presets.
ULTRA_SEGMENTS, FAST_SEGMENTS, REFERENCE_SEGMENTS = 1, 2, 8


@dataclasses.dataclass(frozen=True)
class WelchPeakParams:
    """Segment length, number of segments and number of peaks; segments overlap by half.

    Attributes:
        n_fft: samples of a segment, even, at least 2 and at most 2**25.
        n_segments: segments of a row, at least 1.
        k: peaks of a row, at least 1; slots beyond the bins are (0, 0.0).

    Raises:
        ValueError: an odd, too small or too large `n_fft`, or an `n_segments` or `k` below 1.

    Examples:
        >>> params = WelchPeakParams.fast(n_fft=256, k=16)
        >>> params.frame_len, params.n_bins
        (384, 129)
    """

    n_fft: int
    n_segments: int
    k: int

    def __post_init__(self) -> None:
        n_fft = as_index(self.n_fft, "n_fft", at_least=2)
        if n_fft % 2:
            raise ValueError(f"n_fft: expected an even number, got {n_fft}")
        if n_fft > MOST_N_FFT:
            raise ValueError(f"n_fft: expected at most {MOST_N_FFT}, got {n_fft}")
        object.__setattr__(self, "n_fft", n_fft)
        for name in ("n_segments", "k"):
            object.__setattr__(self, name, as_index(getattr(self, name), name, at_least=1))

    @classmethod
    def ultra(cls, n_fft: int, k: int) -> "WelchPeakParams":
        """One segment."""
        return cls(n_fft, ULTRA_SEGMENTS, k)

    @classmethod
    def fast(cls, n_fft: int, k: int) -> "WelchPeakParams":
        """Two segments."""
        return cls(n_fft, FAST_SEGMENTS, k)

    @classmethod
    def reference(cls, n_fft: int, k: int) -> "WelchPeakParams":
        """Eight segments."""
        return cls(n_fft, REFERENCE_SEGMENTS, k)

    @property
    def hop(self) -> int:
        """Samples between the starts of two segments."""
        return self.n_fft // 2

    @property
    def frame_len(self) -> int:
        """Samples of a row that are used."""
        return self.n_fft + (self.n_segments - 1) * self.hop

    @property
    def n_bins(self) -> int:
        """Bins of the one-sided spectrum, DC and Nyquist included."""
        return self.n_fft // 2 + 1

    def bin_frequencies_hz(self, bins: RealLike, sample_rate_hz: float) -> RealLike:
        """Return the centre frequencies in Hz of bins, in their shape.

        Examples:
            >>> float(WelchPeakParams.fast(256, 1).bin_frequencies_hz(32, 16_000.0))
            2000.0
        """
        check_positive(sample_rate_hz, "sample_rate_hz")
        bins = bins if isinstance(bins, jax.Array) else np.asarray(bins)
        return bins * (sample_rate_hz / self.n_fft)
