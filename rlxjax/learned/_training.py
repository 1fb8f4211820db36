"""Train a learned FFT on tones: switch off halves of the network, switch on single gates, fine-tune the numbers."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from rlxjax._checks import as_index
from rlxjax._typing import RealLike
from rlxjax._values import by_value
from rlxjax.welch import hann_window

from ._model import LearnedFft, butterfly_places, learned_spectrum

#: For each peak, the loss compares the bin of the peak and this number of bins on each side.
BAND_HALF_WIDTH = 3
#: The loss adds this share of a row's mean power to each power of the row, so that each logarithm stays finite.
POWER_FLOOR = 1e-6
#: The numbers of rows that serve for a training step, for the choice of a cut, for the mask, and for validation.
TRAINING_ROWS, CUT_ROWS, MASK_ROWS, VALIDATION_ROWS = 64, 256, 2048, 512
#: A bin is masked if its number of peaks is below this share of the number of peaks in the most frequent bin.
LEAST_WANTED = 0.01
#: The number of rounds of growth, and the factor of the mean of all gates in the loss of growth.
GROWTH_ROUNDS, GATE_WEIGHT = 10, 0.02
#: The initial step size of Adam in fine-tuning, and the number of validations during fine-tuning.
FINE_TUNING_RATE, COMPARISONS = 0.002, 10


@dataclasses.dataclass(frozen=True)
class ToneSignals:
    """A source of random signals that train and validate a learned FFT. Each signal is a sum of tones and white noise.

    The number of tones, their frequencies and their phases are drawn uniformly, and their amplitudes log-uniformly.

    Attributes:
        low: lowest frequency of a tone in cycles per sample (a fraction of the sampling rate), at least 0.
        high: highest frequency of a tone in cycles per sample, above `low` and at most 0.5.
        tones: the smallest and the largest number of tones in a row.
        amplitude: the smallest and the largest amplitude of a tone, in the unit of the samples.
        noise_sd: standard deviation of the noise, in the unit of the samples.

    Raises:
        ValueError: `0 <= low < high <= 0.5` is false, or another field is an empty range or has an invalid value.

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
            got = f"low {self.low} and high {self.high}"
            raise ValueError(f"low, high: expected 0 <= low < high <= 0.5 cycles per sample, got {got}")
        least, most = (as_index(number, "tones", at_least=1) for number in self.tones)
        if least > most:
            raise ValueError(f"tones: expected (least, greatest), got {self.tones}")
        if not 0 < self.amplitude[0] <= self.amplitude[1] < math.inf:
            raise ValueError(f"amplitude: expected (least, greatest), both positive, got {self.amplitude}")
        if not 0 <= self.noise_sd < math.inf:
            raise ValueError(f"noise_sd: expected a number of at least 0, got {self.noise_sd}")

    def sample(self, key: Array, count: int, n_fft: int) -> Float[Array, "count n_fft"]:
        """Return random rows of samples.

        Args:
            key: a JAX random key; the same key gives the same rows.
            count: number of rows.
            n_fft: number of samples in a row.

        Returns:
            The rows, float32 `[count, n_fft]`.
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
    """Return the mean cross entropy between a model's amplitudes and the exact amplitudes near the k strongest bins."""
    reference, power = power_of(segments), power_of(segments, model)
    _, bins = jax.lax.top_k(reference, min(k, model.n_bins))
    distance = jnp.abs(bins[..., None] - jnp.arange(model.n_bins, dtype=bins.dtype)[None, None])
    target = jnp.where(jnp.any(distance <= BAND_HALF_WIDTH, axis=1), jnp.sqrt(reference), 0.0)
    # Both amplitudes are scaled to a sum of 1, so the loss ignores their scales.
    target = target / jnp.maximum(jnp.sum(target, axis=1, keepdims=True), jnp.finfo(target.dtype).tiny)
    floor = POWER_FLOOR * jax.lax.stop_gradient(jnp.mean(power, axis=1, keepdims=True))
    logits = 0.5 * jnp.log(power + floor + jnp.finfo(power.dtype).tiny)
    return jnp.mean(-jnp.sum(target * jax.nn.log_softmax(logits, axis=1), axis=1))


def peak_recall(model: LearnedFft, segments: Real[Array | np.ndarray, "rows n_fft"], k: int) -> Float[Array, ""]:
    """Return the share of the k strongest bins of the exact FFT that are also among the k strongest bins of a model.

    Args:
        model: the model. Its gates are not rounded.
        segments: samples without a window, `[rows, n_fft]`. The function applies the symmetric Hann window.
        k: number of peaks in a row. If `k` exceeds the number of bins, all bins are peaks.

    Examples:
        >>> segments = ToneSignals().sample(jax.random.key(0), 8, 16)
        >>> print(peak_recall(LearnedFft.exact(16), segments, 4))
        1.0
    """
    k = min(k, model.n_bins)
    (_, wanted), (_, found) = (jax.lax.top_k(power_of(segments, own), k) for own in (None, model))
    return jnp.mean(jnp.any(wanted[:, :, None] == found[:, None, :], axis=-1))


def power_of(segments: RealLike, model: LearnedFft | None = None) -> Float[Array, "rows n_bins"]:
    """Apply the window to segments, and return their one-sided power by `model`, or else by the exact FFT."""
    segments = jnp.asarray(segments)
    dtype = jnp.float64 if segments.dtype == jnp.float64 else jnp.float32
    windowed = segments.astype(dtype) * hann_window(segments.shape[-1]).astype(dtype)[None]
    spectrum = jnp.fft.rfft(windowed) if model is None else learned_spectrum(model, windowed)
    power = jnp.square(spectrum.real) + jnp.square(spectrum.imag)
    return power.at[:, 1:-1].multiply(2.0)


_recall = jax.jit(peak_recall, static_argnames="k")
_loss = jax.jit(peak_loss, static_argnames="k")


class TrainingRound(NamedTuple):
    """The result of a round of training steps. `gate_weight` is the factor of the mean of all gates in the loss."""

    step: int
    loss: float
    gate_weight: float
    active_gates: int
    recall: float | None = None


@by_value
@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """A trained model and the record of its training.

    Attributes:
        model: the trained model. Its arrays are NumPy arrays of float32, and each gate is 0 or 1.
        history: a `TrainingRound` for the exact FFT, the mask, each cut, and each round of growth and fine-tuning.
        message: a sentence that says how many gates are on, and how many of these gates the cuts left and growth added.
    """

    model: LearnedFft
    history: tuple[TrainingRound, ...]
    message: str


def train_learned_fft(
    n_fft: int,
    *,
    signals: ToneSignals | None = None,
    active_share: float = 0.25,
    k: int = 16,
    steps: int = 1500,
    fine_tuning_steps: int = 1000,
    seed: int = 0,
) -> TrainingResult:
    """Switch off gates of the exact FFT, and train the rest of the network to find the same peaks as the exact FFT.

    1. *Mask*: bins that are almost never among the k strongest bins of training rows are masked.
    2. *Cuts*: a cut switches off half of the network's positions, and each butterfly that touches these positions.
       Of all possible cuts, the cut with the highest `peak_recall` on training rows is made. Cuts are repeated until
       the share of active gates is below `active_share`.
    3. *Growth*: rounds of equal size switch on the gates whose derivative promises the largest decrease of the loss,
       while the share stays below `active_share`. The model with the highest recall on validation rows is kept.
    4. *Fine-tuning*: Adam adjusts twiddles and mask. Again the model with the highest validation recall is kept.

    Args:
        n_fft: number of samples in a segment, a power of two.
        signals: the source of training and validation rows; by default `ToneSignals()`, with tones at all frequencies.
        active_share: a number above 0 and at most 1. The share of active gates in the result is below this number.
        k: number of peaks to match, at least 1.
        steps: number of steps before fine-tuning, at least 1. Mask and cuts always run; growth takes the other steps.
        fine_tuning_steps: number of steps of fine-tuning, at least 0.
        seed: random seed of training and validation rows; the same seed gives the same model.

    Raises:
        ValueError: an argument is outside its range; the message names the argument.

    Examples:
        >>> low = ToneSignals(high=0.125)
        >>> result = train_learned_fft(8, signals=low, k=2, steps=20, fine_tuning_steps=0)
        >>> result.model.active_gates < 0.25 * result.model.total_gates
        True
    """
    exact = jax.tree.map(np.float32, LearnedFft.exact(n_fft))
    k = as_index(k, "k", at_least=1)
    steps = as_index(steps, "steps", at_least=1)
    fine_tuning_steps = as_index(fine_tuning_steps, "fine_tuning_steps")
    if not 0 < active_share <= 1:
        raise ValueError(f"active_share: expected a share above 0 and at most 1, got {active_share}")
    signals = ToneSignals() if signals is None else signals
    budget = math.ceil(active_share * exact.total_gates) - 1
    keys = jax.random.split(jax.random.key(seed), 4)
    validation = signals.sample(keys[2], VALIDATION_ROWS, n_fft)
    cut, cuts = _cut(exact, signals.sample(keys[3], MASK_ROWS, n_fft), budget, k)
    grown, growth = _grow(cut, signals, validation, budget, k, max(steps - cuts[-1].step, 0), keys[0])
    model, tuning = _fine_tune(grown, signals, validation, k, fine_tuning_steps, keys[1])
    history = list(cuts)
    for part in (growth, tuning):
        history.extend([item._replace(step=item.step + history[-1].step) for item in part])
    share = model.active_gates / model.total_gates
    message = (
        f"{model.active_gates} of {model.total_gates} gates ({100 * share:.1f} %) are on: the mask and "
        f"{cuts[-1].step - 1} cuts left {cut.active_gates}, and growth added {model.active_gates - cut.active_gates}."
    )
    return TrainingResult(model, tuple(history), message)


def _cut(exact: LearnedFft, rows: Array, budget: int, k: int) -> tuple[LearnedFft, list[TrainingRound]]:
    """Return the model after mask and cuts, which has at most `budget` active gates. Also return the history."""
    stages = exact.stages
    first_place = np.array([butterfly_places(stage, gates)[0] for stage, gates in enumerate(exact.gates)])
    history: list[TrainingRound] = []

    def after(model: LearnedFft, bit: int, value: int) -> LearnedFft:
        # A butterfly of stage `bit` combines two positions that differ only in this bit of the position.
        kept = ((first_place >> bit) & 1 == value) & (np.arange(stages)[:, None] != bit)
        return dataclasses.replace(model, gates=np.where(kept, model.gates, 0)).hardened()

    _, bins = jax.lax.top_k(power_of(rows), min(k, exact.n_bins))
    often = np.bincount(np.ravel(bins), minlength=exact.n_bins)
    rows = rows[:CUT_ROWS]

    def recorded(model: LearnedFft) -> LearnedFft:
        history.append(TrainingRound(len(history), float(_loss(model, rows, k=k)), 0.0, model.active_gates))
        return model

    mask = np.where(often >= LEAST_WANTED * often.max(), recorded(exact).mask, 0)
    model, bits = recorded(dataclasses.replace(exact, mask=mask).hardened()), list(range(stages))
    while model.active_gates > budget:
        choices = [(after(model, bit, value), bit) for bit in bits for value in (0, 1)]
        model, bit = max(choices, key=lambda choice: float(_recall(choice[0], rows, k=k)))
        bits.remove(bit)
        recorded(model)
    return model, history


def _grow(
    model: LearnedFft, signals: ToneSignals, validation: Array, budget: int, k: int, steps: int, key: Array
) -> tuple[LearnedFft, list[TrainingRound]]:
    """Return the model after the best round of growth, or the given model if no round helps, and the history."""

    def loss(gates: Array, segments: Array) -> Array:
        return peak_loss(dataclasses.replace(model, gates=gates), segments, k) + GATE_WEIGHT * jnp.mean(gates)

    @jax.jit
    def run(gates: Array, keys: Array) -> tuple[Array, Array]:
        def step(total, key):
            segments = signals.sample(key, TRAINING_ROWS, model.n_fft)
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(gates, segments)), None

        total, _ = jax.lax.scan(step, (jnp.zeros((), jnp.float32), jnp.zeros_like(gates)), keys)
        return total[0] / len(keys), total[1] / len(keys)

    gates = np.asarray(model.gates)
    spare, round_steps = budget - model.active_gates, max(steps // GROWTH_ROUNDS, 1)
    rounds = min(GROWTH_ROUNDS, steps, spare)
    best = _Best(model, validation, k)
    for done in range(1, rounds + 1):
        keys = jax.random.split(jax.random.fold_in(key, done), round_steps)
        value, slope = run(jnp.asarray(gates), keys)
        slope = np.where(gates > 0, np.inf, np.asarray(slope)).reshape(-1)
        wanted = model.active_gates + spare * done // rounds - int(gates.sum())
        added = np.argsort(slope, kind="stable")[:wanted]
        gates = gates.copy()
        gates.reshape(-1)[added[slope[added] < 0]] = 1.0
        best.try_out(dataclasses.replace(model, gates=gates).hardened(), done * round_steps, value, GATE_WEIGHT)
    return best.model, best.history


def _fine_tune(
    model: LearnedFft, signals: ToneSignals, validation: Array, k: int, steps: int, key: Array
) -> tuple[LearnedFft, list[TrainingRound]]:
    """Return the best model of fine-tuning, which does not change the gates. Also return the history."""
    import optax

    optimiser = optax.adam(optax.cosine_decay_schedule(FINE_TUNING_RATE, max(steps, 1)))

    def loss(state, segments):
        return peak_loss(LearnedFft(state[0], model.gates, state[1]), segments, k)

    def step(carry, key):
        state, moments = carry
        value, gradient = jax.value_and_grad(loss)(state, signals.sample(key, TRAINING_ROWS, model.n_fft))
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its int32 step count with floats
            updates, moments = optimiser.update(gradient, moments)
        twiddles, mask = jax.tree.map(jnp.add, state, updates)
        # A masked bin stays masked, because its gates may be off.
        mask = jnp.where(model.mask != 0, jnp.maximum(mask, 0.0), 0.0)
        # The loss ignores the scale of the mask, but the power must not underflow.
        mask = mask / jnp.max(mask)
        return ((twiddles, mask), moments), value

    @jax.jit
    def run(carry, keys):
        carry, losses = jax.lax.scan(step, carry, keys)
        return carry, jnp.mean(losses)

    state = (jnp.asarray(model.twiddles), jnp.asarray(model.mask))
    carry, best = (state, optimiser.init(state)), _Best(model, validation, k)
    round_steps = -(-steps // COMPARISONS)
    for done in range(round_steps, steps + 1, max(round_steps, 1)) if steps else ():
        carry, value = run(carry, jax.random.split(jax.random.fold_in(key, done), round_steps))
        twiddles, mask = jax.tree.map(np.asarray, carry[0])
        best.try_out(LearnedFft(twiddles, model.gates, mask).hardened(), done, value, 0.0)
    return best.model, best.history


class _Best:
    """The model with the highest recall on validation rows so far, and the history of all models that were tried."""

    def __init__(self, model: LearnedFft, validation: Array, k: int):
        self.model, self.validation, self.k = model, validation, k
        self.recall = float(_recall(model, validation, k=k))
        self.history: list[TrainingRound] = []

    def try_out(self, model: LearnedFft, step: int, loss: Array, gate_weight: float) -> None:
        recall = float(_recall(model, self.validation, k=self.k))
        self.history.append(TrainingRound(step, float(loss), gate_weight, model.active_gates, recall))
        if recall > self.recall:
            self.model, self.recall = model, recall
