"""What a learned FFT is trained and judged on: signals, the loss on their peaks, the recall of peaks."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from rlxjax._checks import as_index
from rlxjax._typing import RealLike
from rlxjax.welch import hann_window

from ._model import LearnedFft, learned_spectrum

#: Bins on either side of a reference peak that belong to its band.
BAND_HALF_WIDTH = 3
#: Power of a bin below this share of its row's mean counts as this share.
POWER_FLOOR = 1e-6


@dataclasses.dataclass(frozen=True)
class ToneSignals:
    """Sums of tones in white noise: what a learned FFT is trained and judged on.

    A row has a uniformly drawn number of tones; each has a uniform frequency and phase and a
    log-uniform amplitude.

    Attributes:
        low: lowest frequency of a tone, cycles a sample (a fraction of the sampling rate), at least 0.
        high: highest frequency, above `low` and at most 0.5.
        tones: least and greatest number of tones of a row.
        amplitude: least and greatest amplitude of a tone, in the unit of the samples.
        noise_sd: standard deviation of the noise, in that unit.

    Raises:
        ValueError: a band outside 0 to 0.5, or an empty or negative range.

    Examples:
        >>> ToneSignals(high=0.125).sample(jax.random.key(0), 4, 64).shape
        (4, 64)
    """

    low: float = 0.0
    high: float = 0.5
    tones: tuple[int, int] = (6, 10)
    amplitude: tuple[float, float] = (0.5, 2.0)
    noise_sd: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 0.5:
            raise ValueError(f"low, high: expected 0 <= low < high <= 0.5 cycles a sample, got {self.low}, {self.high}")
        least, most = (as_index(number, "tones", at_least=1) for number in self.tones)
        if least > most:
            raise ValueError(f"tones: expected (least, greatest), got {self.tones}")
        if not 0 < self.amplitude[0] <= self.amplitude[1] < math.inf:
            raise ValueError(f"amplitude: expected (least, greatest), both positive, got {self.amplitude}")
        if not 0 <= self.noise_sd < math.inf:
            raise ValueError(f"noise_sd: expected a number of at least 0, got {self.noise_sd}")

    def sample(self, key: Array, count: int, n_fft: int) -> Float[Array, "count n_fft"]:
        """Draw rows of samples.

        Args:
            key: of JAX's random numbers; the same key gives the same rows.
            count: rows.
            n_fft: samples of a row.

        Returns:
            float32 `[count, n_fft]`.
        """
        keys = jax.random.split(key, 5)
        shape = (count, self.tones[1], 1)
        draw = functools.partial(jax.random.uniform, shape=shape, dtype=jnp.float32)
        frequency = draw(keys[0], minval=self.low, maxval=self.high)
        phase = draw(keys[1], maxval=2 * math.pi)
        logs = [math.log(limit) for limit in self.amplitude]
        amplitude = jnp.exp(draw(keys[2], minval=logs[0], maxval=logs[1]))
        number = jax.random.randint(keys[3], (count, 1, 1), self.tones[0], self.tones[1] + 1)
        amplitude = jnp.where(jnp.arange(self.tones[1])[None, :, None] < number, amplitude, 0.0)
        time = jnp.arange(n_fft, dtype=jnp.float32)[None, None]
        tones = jnp.sum(amplitude * jnp.cos(2 * math.pi * frequency * time + phase), axis=1)
        return tones + self.noise_sd * jax.random.normal(keys[4], tones.shape, jnp.float32)


def peak_loss(model: LearnedFft, segments: Real[Array | np.ndarray, "rows n_fft"], k: int) -> Float[Array, ""]:
    """Return how far a model's spectra are from the exact transform's peaks; the lower the better.

    A row's target is the exact transform's amplitude within 3 bins of its k strongest bins, 0 elsewhere,
    scaled to a sum of 1; the loss is the mean cross entropy of the model's amplitude, scaled likewise, and
    so does not see the scale of either. Gates may be soft or hard; segments have no window.
    """
    reference, power = power_of(segments), power_of(segments, model)
    _, bins = jax.lax.top_k(reference, min(k, model.n_bins))
    distance = jnp.abs(bins[..., None] - jnp.arange(model.n_bins, dtype=bins.dtype)[None, None])
    in_band = jnp.any(distance <= BAND_HALF_WIDTH, axis=1)
    target = jnp.where(in_band, jnp.sqrt(reference), 0.0)
    target = target / jnp.maximum(jnp.sum(target, axis=1, keepdims=True), jnp.finfo(target.dtype).tiny)
    floor = POWER_FLOOR * jax.lax.stop_gradient(jnp.mean(power, axis=1, keepdims=True))
    logits = 0.5 * jnp.log(power + floor + jnp.finfo(power.dtype).tiny)
    cross_entropy = -jnp.sum(target * jax.nn.log_softmax(logits, axis=1), axis=1)
    return jnp.mean(cross_entropy)


def peak_recall(model: LearnedFft, segments: Real[Array | np.ndarray, "rows n_fft"], k: int) -> Float[Array, ""]:
    """Return the share of the exact transform's k strongest bins that are among the model's k strongest.

    Args:
        model: the network; its gates are taken as they are.
        segments: samples, `[rows, n_fft]`, without a window: the symmetric Hann window is applied to both.
        k: peaks of a row; at most all bins count.

    Examples:
        >>> segments = ToneSignals().sample(jax.random.key(0), 8, 64)
        >>> print(peak_recall(LearnedFft.exact(64), segments, 4))
        1.0
    """
    k = min(k, model.n_bins)
    (_, wanted), (_, found) = (jax.lax.top_k(power_of(segments, own), k) for own in (None, model))
    return jnp.mean(jnp.any(wanted[:, :, None] == found[:, None, :], axis=-1))


def power_of(segments: RealLike, model: LearnedFft | None = None) -> Float[Array, "rows n_bins"]:
    """Return the one-sided power of windowed segments, by a model or by the exact transform."""
    segments = jnp.asarray(segments)
    dtype = jnp.float64 if segments.dtype == jnp.float64 else jnp.float32
    windowed = segments.astype(dtype) * hann_window(segments.shape[-1]).astype(dtype)[None]
    spectrum = jnp.fft.rfft(windowed) if model is None else learned_spectrum(model, windowed)
    power = jnp.square(spectrum.real) + jnp.square(spectrum.imag)
    return power.at[:, 1:-1].multiply(2.0)
