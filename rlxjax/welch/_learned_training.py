"""Training of the learned FFT: pruning by blocks, fine-tuning, and the baselines to beat."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Real

from rlxjax._checks import as_index
from rlxjax._numerics import straight_through

from ._host import hann_window
from ._learned_fft import GATE_ON, LearnedFft, bit_reversal, live_gates
from ._learned_signals import ToneSignals, peak_loss, peak_recall

#: Rows of one training step, and of the rows that choose among fine-tuned models.
TRAINING_ROWS, VALIDATION_ROWS = 64, 512
#: The gates' weight in the loss at the start and at least, its factor up or down after a round, and the
#: steps of a round. It falls faster than it rises, so that gates do not go all at once.
LEAST_GATE_WEIGHT, GATE_WEIGHT_UP, GATE_WEIGHT_DOWN, ROUND_STEPS = 0.15, 1.1, 0.5, 10
#: Share of the pruning steps by whose end the gates are meant to be within the budget, and how many
#: rounds pruning goes on once they are.
SCHEDULE_SHARE, ROUNDS_WITHIN = 0.9, 10
#: Step sizes of Adam while pruning (gates and mask) and at the start of fine-tuning (twiddles and mask).
PRUNING_RATE, FINE_TUNING_RATE = 0.01, 0.002
#: Fine-tuned models are compared this many times.
COMPARISONS = 10


@dataclasses.dataclass(frozen=True)
class TrainingRound:
    """What one round of steps ended with.

    Attributes:
        step: steps done, pruning and fine-tuning together.
        loss: mean loss of the round's steps, the gates' term included while pruning.
        gate_weight: weight of the gates in that loss; 0 while fine-tuning.
        active_gates: gates of the hardened model.
        recall: share of the reference's peaks found on the validation rows; None while over the budget.
    """

    step: int
    loss: float
    gate_weight: float
    active_gates: int
    recall: float | None = None


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """A trained model and how it came about.

    Attributes:
        model: hardened, with float32 leaves on the host.
        history: one record a round.
        message: a sentence on the outcome.
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
    """Prune the exact transform to a share of its gates and train what is left to find the same peaks.

    *Pruning.* The gates of a (stage, block) share one number. Forward they are hard, backward their
    derivative is that of the soft gate (straight through), and each step is clipped to [0, 1]. The loss is
    `peak_loss` plus a weight times the mean gate. The weight grows while more gates are on than a
    schedule allows, which falls to the budget, and shrinks otherwise; twiddles stay exact. It ends a few
    rounds after the gates that reach a bin are within the budget; of these rounds the one with the best
    recall on validation rows is kept. If the steps run out first, the smallest gates are dropped.
    *Fine-tuning.* With those gates fixed, twiddles and mask descend `peak_loss`; again the best is kept,
    the model before included.

    Args:
        n_fft: samples of a segment, a power of two.
        signals: what to train on; tones over the full band by default.
        active_share: the active gates stay strictly below this share of all, above 0 and at most 1.
        k: peaks to match, at least 1.
        steps: most steps of pruning, at least 1.
        fine_tuning_steps: steps of fine-tuning.
        seed: of the training and validation rows; the same seed gives the same model.

    Raises:
        ValueError: an argument outside its range, with its name.

    Examples:
        >>> low = ToneSignals(high=0.125)
        >>> result = train_learned_fft(16, signals=low, k=2, steps=40, fine_tuning_steps=0)
        >>> result.model.active_gates < 0.25 * result.model.total_gates
        True
    """
    exact = _float32(LearnedFft.exact(n_fft))
    k = as_index(k, "k", at_least=1)
    steps = as_index(steps, "steps", at_least=1)
    fine_tuning_steps = as_index(fine_tuning_steps, "fine_tuning_steps")
    if not 0 < active_share <= 1:
        raise ValueError(f"active_share: expected a share above 0 and at most 1, got {active_share}")
    signals = ToneSignals() if signals is None else signals
    budget = math.ceil(active_share * exact.total_gates) - 1
    keys = jax.random.split(jax.random.key(seed), 3)
    validation = signals.sample(keys[2], VALIDATION_ROWS, n_fft)
    pruned, pruning = _prune(exact, signals, validation, budget, k, steps, keys[0])
    dropped = pruned.hardened().active_gates > budget
    model = _within_budget(pruned, budget)
    model, tuning = _fine_tune(model, signals, validation, k, fine_tuning_steps, keys[1])
    done = pruning[-1].step
    history = (*pruning, *(dataclasses.replace(item, step=item.step + done) for item in tuning))
    share = model.active_gates / model.total_gates
    message = (
        f"{model.active_gates} of {model.total_gates} gates ({share:.1%}) are on after {done} pruning steps"
    )
    message += ", the smallest dropped because the steps ran out." if dropped else "."
    return TrainingResult(model, history, message)


def _prune(
    exact: LearnedFft, signals: ToneSignals, validation: Array, budget: int, k: int, steps: int, key: Array
) -> tuple[LearnedFft, list[TrainingRound]]:
    """Return the soft model of the best round within the budget (else of the last), and the history."""
    import optax

    optimiser = optax.adam(PRUNING_RATE)

    def soft_model(state) -> LearnedFft:
        blocks, mask = state
        rows = [jnp.repeat(gates, 2**stage) for stage, gates in enumerate(blocks)]
        return LearnedFft(exact.twiddles, jnp.stack(rows), mask)

    def loss(state, segments, gate_weight):
        soft = soft_model(state)
        hard = jnp.where(soft.gates >= GATE_ON, 1.0, 0.0).astype(soft.gates.dtype)
        model = dataclasses.replace(soft, gates=straight_through(hard, soft.gates))
        return peak_loss(model, segments, k) + gate_weight * jnp.mean(soft.gates)

    def step(carry, key, gate_weight):
        state, moments = carry
        segments = signals.sample(key, TRAINING_ROWS, exact.n_fft)
        value, gradient = jax.value_and_grad(loss)(state, segments, gate_weight)
        updates, moments = optimiser.update(gradient, moments)
        state = jax.tree.map(lambda leaf, update: jnp.clip(leaf + update, 0.0, 1.0), state, updates)
        return (state, moments), value

    @jax.jit
    def run(carry, keys, gate_weight):
        carry, losses = jax.lax.scan(lambda carry, key: step(carry, key, gate_weight), carry, keys)
        return carry, jnp.mean(losses), soft_model(carry[0])

    blocks = [jnp.ones(exact.n_fft // 2 ** (stage + 1), jnp.float32) for stage in range(exact.stages)]
    state = (blocks, jnp.asarray(exact.mask))
    carry, weight, history = (state, optimiser.init(state)), LEAST_GATE_WEIGHT, []
    model = soft_model(state)
    recall_of, best, best_recall, rounds_within = jax.jit(peak_recall, static_argnames="k"), None, -1.0, 0
    for done in range(ROUND_STEPS, steps + ROUND_STEPS, ROUND_STEPS):
        done = min(done, steps)
        keys = jax.random.split(jax.random.fold_in(key, done), ROUND_STEPS)
        carry, value, model = run(carry, keys, np.float32(weight))
        hard = model.hardened()
        recall = None
        if hard.active_gates <= budget:
            rounds_within += 1
            recall = float(recall_of(hard, validation, k=k))
            if recall > best_recall:
                best, best_recall = model, recall
        history.append(TrainingRound(done, float(value), weight, hard.active_gates, recall))
        if rounds_within > ROUNDS_WITHIN:
            break
        left = max(0.0, 1.0 - done / (SCHEDULE_SHARE * steps))
        allowed = budget + (exact.total_gates - budget) * left**2
        factor = GATE_WEIGHT_UP if hard.active_gates > allowed else GATE_WEIGHT_DOWN
        weight = max(weight * factor, LEAST_GATE_WEIGHT)
    return (model if best is None else best), history


def _within_budget(model: LearnedFft, budget: int) -> LearnedFft:
    """Return the hardened model; where it has too many gates, the smallest are dropped as far as needed."""
    gates, unmasked = np.asarray(model.gates), np.asarray(model.mask) != 0
    for least in np.unique(gates[gates >= GATE_ON]):
        if live_gates(gates >= least, unmasked).sum() <= budget:
            return dataclasses.replace(model, gates=np.where(gates >= least, gates, 0)).hardened()
    return dataclasses.replace(model, gates=np.zeros_like(gates)).hardened()


def _fine_tune(
    model: LearnedFft, signals: ToneSignals, validation: Array, k: int, steps: int, key: Array
) -> tuple[LearnedFft, list[TrainingRound]]:
    """Return the best hard model on the way, and the history; the gates stay as they are."""
    import optax

    optimiser = optax.adam(optax.cosine_decay_schedule(FINE_TUNING_RATE, max(steps, 1)))

    def step(carry, key):
        state, moments = carry
        segments = signals.sample(key, TRAINING_ROWS, model.n_fft)

        def loss(state):
            return peak_loss(LearnedFft(state[0], model.gates, state[1]), segments, k)

        value, gradient = jax.value_and_grad(loss)(state)
        updates, moments = optimiser.update(gradient, moments)
        twiddles, mask = jax.tree.map(jnp.add, state, updates)
        # A masked bin stays masked: its gates may be gone.
        mask = jnp.where(model.mask != 0, jnp.maximum(mask, 0.0), 0.0)
        return ((twiddles, mask), moments), value

    @jax.jit
    def run(carry, keys):
        carry, losses = jax.lax.scan(step, carry, keys)
        return carry, jnp.mean(losses)

    recall_of = jax.jit(peak_recall, static_argnames="k")
    best, best_recall = model, float(recall_of(model, validation, k=k))
    state = (jnp.asarray(model.twiddles), jnp.asarray(model.mask))
    carry, history = (state, optimiser.init(state)), []
    round_steps = -(-steps // COMPARISONS)
    for done in range(round_steps, steps + 1, max(round_steps, 1)) if steps else ():
        carry, value = run(carry, jax.random.split(jax.random.fold_in(key, done), round_steps))
        twiddles, mask = jax.tree.map(np.asarray, carry[0])
        tuned = LearnedFft(twiddles, model.gates, mask).hardened()
        recall = float(recall_of(tuned, validation, k=k))
        history.append(TrainingRound(done, float(value), 0.0, tuned.active_gates, recall))
        if recall > best_recall:
            best, best_recall = tuned, recall
    return best, history


def random_gates(n_fft: int, active: int, key: Array) -> LearnedFft:
    """Return the exact twiddles and mask with gates kept at random, float32, for comparison.

    Args:
        n_fft: samples of a segment.
        active: gates to keep.
        key: of JAX's random numbers.
    """
    total = LearnedFft.exact(n_fft).total_gates
    return _kept(n_fft, active, jax.random.uniform(key, (total,)))


def magnitude_gates(n_fft: int, active: int, segments: Real[Array, "rows n_fft"]) -> LearnedFft:
    """Return the exact twiddles and mask with the gates kept through which most flows, without training.

    What flows through a butterfly is the root mean square of its two inputs on windowed segments. (Of its
    outputs it would be the same, times the square root of 2.)

    Args:
        n_fft: samples of a segment.
        active: gates to keep; among equals, the earlier stage and butterfly.
        segments: samples, `[rows, n_fft]`, without a window.
    """
    exact = LearnedFft.exact(n_fft)
    places = (np.asarray(segments) * hann_window(n_fft)[None]).T[bit_reversal(n_fft)].astype(complex)
    twiddles = exact.twiddles @ np.array([1.0, 1.0j])
    flow = []
    for stage in range(exact.stages):
        pairs = places.reshape(-1, 2, 2**stage, len(segments))
        flow.append(np.mean(np.abs(pairs) ** 2, axis=(1, 3)).reshape(-1))
        turned = twiddles[stage].reshape(-1, 2**stage, 1) * pairs[:, 1]
        places = np.stack([pairs[:, 0] + turned, pairs[:, 0] - turned], axis=1).reshape(n_fft, -1)
    return _kept(n_fft, active, np.concatenate(flow))


def _kept(n_fft: int, active: int, score: Array | np.ndarray) -> LearnedFft:
    exact = LearnedFft.exact(n_fft)
    active = as_index(active, "active")
    if active > exact.total_gates:
        raise ValueError(f"active: expected at most {exact.total_gates} gates, got {active}")
    gates = np.zeros(exact.total_gates)
    gates[np.argsort(-np.asarray(score), kind="stable")[:active]] = 1.0
    return _float32(dataclasses.replace(exact, gates=gates.reshape(exact.gates.shape)))


def _float32(model: LearnedFft) -> LearnedFft:
    return jax.tree.map(lambda leaf: leaf.astype(np.float32), model)
