"""Training of the learned FFT: what it must beat, what it keeps, and the signals and measures it goes by."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import GRADIENT_RTOL

from rlxjax.learned import LearnedFft, ToneSignals, peak_recall, train_learned_fft
from rlxjax.learned._training import peak_loss
from rlxjax.welch import hann_window

N_FFT, K, SHARE = 32, 2, 0.25
LOW = ToneSignals(high=0.125, tones=(1, 3))
loss_of = jax.jit(peak_loss, static_argnames="k")
recall_of = jax.jit(peak_recall, static_argnames="k")
sample_of = jax.jit(ToneSignals.sample, static_argnums=(0, 2, 3))


def train(**arguments):
    return train_learned_fft(N_FFT, **{"signals": LOW, "k": K, "steps": 60, "fine_tuning_steps": 20, **arguments})


def random_gates(active, seed):
    """Return the exact transform with so many gates kept at random."""
    exact = LearnedFft.exact(N_FFT)
    gates = np.arange(exact.total_gates) < active
    gates = np.random.default_rng(seed).permutation(gates).reshape(exact.gates.shape)
    return jax.tree.map(lambda leaf: leaf.astype(np.float32), dataclasses.replace(exact, gates=gates.astype(float)))


@pytest.fixture(scope="module")
def trained():
    return train()


@pytest.fixture(scope="module")
def unseen():
    return sample_of(LOW, jax.random.key(999), 512, N_FFT)


@pytest.mark.slow
def test_training_beats_as_many_gates_kept_at_random_twice_over(trained, unseen):
    model = trained.model
    active = model.active_gates
    assert 0 < active < SHARE * model.total_gates
    drawn = [random_gates(active, seed) for seed in range(5)]
    assert {one.active_gates for one in drawn} == {active}
    assert recall_of(model, unseen, K) > 2 * np.mean([recall_of(one, unseen, K) for one in drawn])
    # It is hardened, and the history tells of every round.
    history = trained.history
    LearnedFft.checked(twiddles=model.twiddles, gates=model.gates, mask=model.mask)
    assert set(np.unique(model.gates)) == {0.0, 1.0}
    np.testing.assert_array_equal(model.hardened().gates, model.gates)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {np.dtype(np.float32)}
    assert np.all(np.diff([item.step for item in history]) > 0)
    assert (history[0].active_gates, history[-1].active_gates) == (model.total_gates, active)
    assert np.isfinite([item.loss for item in history]).all()
    assert f"{active} of {model.total_gates} gates" in trained.message


def test_gates_are_within_the_share_however_few_the_steps_and_the_same_seed_gives_the_same_model():
    few = {"signals": LOW, "k": 2, "steps": 1, "fine_tuning_steps": 0, "active_share": 0.3}
    first, again = (train_learned_fft(8, **few) for _ in range(2))
    assert first.model.active_gates < 0.3 * first.model.total_gates
    assert first.history[-1].step >= 1
    np.testing.assert_array_equal(first.model.hardened().gates, first.model.gates)
    assert {leaf.dtype for leaf in jax.tree.leaves(first.model)} == {np.dtype(np.float32)}
    assert jax.tree.all(jax.tree.map(np.array_equal, first.model, again.model))
    assert first.history == again.history


def test_arguments_and_signals_out_of_range_are_refused():
    for arguments, sentence in [
        *(
            ({"active_share": share}, "active_share: expected a share above 0 and at most 1")
            for share in (0, 1.5, np.nan)
        ),
        *(({name: 0}, f"{name}: expected an integer of at least 1") for name in ("k", "steps")),
        ({"fine_tuning_steps": -1}, "fine_tuning_steps: expected an integer of at least 0"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            train(**arguments)
    for arguments in (
        *({"low": low} for low in (-0.1, 0.5, np.nan)),
        *({"tones": tones} for tones in ((0, 3), (4, 3))),
        *({"amplitude": amplitude} for amplitude in ((0.0, 1.0), (2.0, 1.0))),
        {"noise_sd": -1.0},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(arguments))}.*: expected"):
            ToneSignals(**arguments)


def test_tones_stay_in_their_band_and_have_their_power_and_noise_its_standard_deviation():
    signals = ToneSignals(low=0.125, high=0.25, tones=(2, 4), amplitude=(1.0, 1.0), noise_sd=0.0)
    rows = sample_of(signals, jax.random.key(0), 2000, 256)
    assert rows.shape == (2000, 256)
    assert rows.dtype == jnp.float32
    power = np.abs(np.fft.rfft(np.asarray(rows) * hann_window(256))) ** 2
    # The main lobe of the Hann window is two bins to either side.
    assert power[:, 30:67].sum() > 0.999 * power.sum()
    assert np.mean(np.square(rows)) == pytest.approx(3 * 0.5, rel=0.05)
    np.testing.assert_array_equal(rows, sample_of(signals, jax.random.key(0), 2000, 256))
    silent = sample_of(ToneSignals(amplitude=(1e-6, 1e-6), noise_sd=2.0), jax.random.key(1), 500, 64)
    assert np.std(silent) == pytest.approx(2.0, rel=0.02)


def test_recall_is_the_share_of_common_bins_and_the_loss_does_not_see_scale(unseen):
    exact = LearnedFft.exact(N_FFT)
    assert recall_of(exact, unseen, K) == recall_of(exact, unseen, 10 * N_FFT) == 1.0
    power = np.abs(np.fft.rfft(np.asarray(unseen) * hann_window(N_FFT))) ** 2
    power[:, 1:-1] *= 2
    wanted, kept = np.argsort(-power, axis=1)[:, :K], np.array([1, 2, 3])
    masked = dataclasses.replace(exact, mask=np.isin(np.arange(N_FFT // 2 + 1), kept).astype(float))
    assert recall_of(masked, unseen, K) == pytest.approx(np.mean(np.isin(wanted, kept)))
    loss = loss_of(exact, unseen, K)
    louder = dataclasses.replace(exact, mask=3.0 * exact.mask)
    np.testing.assert_allclose(loss_of(louder, unseen, K), loss, rtol=1e-5)
    np.testing.assert_allclose(loss_of(exact, 3.0 * unseen, K), loss, rtol=1e-5)
    assert loss < loss_of(random_gates(20, 0), unseen, K)
    assert np.isfinite(loss_of(exact, jnp.zeros_like(unseen), K))


def test_the_gradient_of_the_loss_is_the_finite_difference():
    rows = np.asarray(sample_of(LOW, jax.random.key(3), 8, 8), np.float64)
    rng, exact = np.random.default_rng(0), LearnedFft.exact(8)
    model = LearnedFft(exact.twiddles, rng.uniform(0.3, 0.9, exact.gates.shape), rng.uniform(0.5, 1.5, 5))
    along = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape), model)
    at = jax.jit(lambda step: peak_loss(jax.tree.map(lambda leaf, by: leaf + step * by, model, along), rows, k=2))
    step = 1e-4
    difference = (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step)
    np.testing.assert_allclose(jax.grad(at)(0.0), difference, rtol=10 * GRADIENT_RTOL)
