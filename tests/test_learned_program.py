"""The compiled form of a pruned learned FFT: its peaks, and that pruned work is not in the program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _welch_reference import assert_peaks_of as assert_near_peaks
from _welch_reference import noise

from rlxjax.learned import LearnedFft, learned_peaks, learned_program, learned_spectrum
from rlxjax.welch import WelchPeakParams, hann_window, welch_peaks

FORMS = ("cones", "matrix", "butterflies")
#: One size for most tests, so that models pruned alike share their programs; and one that fills the output.
PARAMS = WelchPeakParams.fast(16, k=4)
ALL_BINS = WelchPeakParams.fast(16, k=12)

each_form = pytest.mark.parametrize("form", FORMS)
peaks_of = jax.jit(learned_peaks, static_argnames="params")


def random_model(n_fft, seed, gates_on, unmasked):
    rng, exact = np.random.default_rng(seed), LearnedFft.exact(n_fft)
    gates = (rng.random(exact.gates.shape) < gates_on).astype(float)
    mask = rng.uniform(0.5, 2, exact.mask.shape) * (rng.random(exact.mask.shape) < unmasked)
    return LearnedFft(exact.twiddles + 0.1 * rng.standard_normal(exact.twiddles.shape), gates, mask)


def without(model, stage, block=slice(None)):
    gates = np.array(model.gates)
    gates[stage].reshape(-1, 2**stage)[block] = 0
    return dataclasses.replace(model, gates=gates)


def assert_peaks_of(model, signal, peaks, params):
    """Check peaks by the mean one-sided power of the hard network in float64, all of its butterflies run."""
    window, starts = hann_window(params.n_fft).astype(float), range(0, params.n_segments * params.hop, params.hop)
    segments = np.stack([signal[:, start : start + params.n_fft] * window for start in starts], 1)
    power, peaks = np.abs(np.asarray(learned_spectrum(model.hardened(), segments))) ** 2, np.asarray(peaks)
    power[..., 1:-1] *= 2
    assert_near_peaks(power.mean(1), peaks, params)
    bins, powers = peaks[..., : params.n_bins, 0].astype(int), peaks[..., : params.n_bins, 1]
    ties = (powers[:, 1:] == powers[:, :-1]) & (powers[:, 1:] == 0)
    assert np.all(np.diff(bins)[ties] > 0), "equal powers keep the lower bin first"


@each_form
def test_peaks_are_those_of_the_hard_network_and_of_the_dense_one_the_exact_peaks(form):
    for seed, (gates_on, unmasked, k) in enumerate([(0.0, 1.0, 5), (0.2, 0.6, 1), (0.7, 0.1, 12), (1.0, 0.0, 5)]):
        params = dataclasses.replace(PARAMS, k=k)
        model, signal = random_model(16, seed, gates_on, unmasked), noise(4, params, seed)
        assert_peaks_of(model, signal, peaks_of(signal, learned_program(model, params, form), params), params)
    for params in (WelchPeakParams(2, 1, k=3), ALL_BINS, WelchPeakParams(64, 3, k=16)):
        model, signal = LearnedFft.exact(params.n_fft), noise(4, params)
        assert_peaks_of(model, signal, peaks_of(signal, learned_program(model, params, form), params), params)
        assert_peaks_of(model, signal, welch_peaks(signal, params, "fused"), params)


@each_form
def test_silence_and_nan_are_treated_as_on_the_exact_path_and_masked_bins_of_power_0_rank_above_nan(form):
    signal = np.zeros((4, ALL_BINS.frame_len), np.float32)
    signal[1, 5], signal[2:] = np.nan, noise(2, ALL_BINS)
    peaks = peaks_of(signal, learned_program(LearnedFft.exact(16), ALL_BINS, form), ALL_BINS)
    exact = welch_peaks(signal, ALL_BINS, "fused")
    np.testing.assert_array_equal(peaks[:2], exact[:2])
    np.testing.assert_allclose(peaks[2:], exact[2:], rtol=1e-3, atol=1e-4)
    params, live = dataclasses.replace(PARAMS, k=9), [0, 3, 4]
    model = dataclasses.replace(LearnedFft.exact(16), mask=np.isin(np.arange(9), live).astype(float))
    signal = np.full((1, params.frame_len), np.nan, np.float32)
    (peaks,) = peaks_of(signal, learned_program(model, params, form), params)
    masked = np.setdiff1d(np.arange(9), live)
    np.testing.assert_array_equal(peaks, np.stack([[*masked, *live], [0.0] * 6 + [np.nan] * 3], -1))


LOW = dataclasses.replace(LearnedFft.exact(64), mask=(np.arange(33) < 8).astype(float))


def test_the_operations_fall_with_every_stage_or_block_that_is_off_and_the_estimate_chooses_the_form():
    # A band that the last stage's halves share, so that its blocks are live until they are cut off.
    last_off, params = without(LOW, 5), WelchPeakParams.ultra(64, k=4)
    models = (LearnedFft.exact(64), LOW, last_off, without(last_off, 4, 0))
    for form in ("cones", "butterflies"):
        flop = [learned_program(model, params, form).work.flop for model in models]
        assert flop == sorted(set(flop), reverse=True)
        assert learned_program(without(LOW, 0), params, form).work.flop < flop[1]
    for seed in range(3):
        model = random_model(64, seed, 0.6, 0.3)
        assert learned_program(model, params, "butterflies").work.flop == 10 * model.hardened().active_gates
    assert learned_program(LOW, WelchPeakParams.fast(64, 4)).matrices
    assert learned_program(LearnedFft.exact(4096), WelchPeakParams.fast(4096, 4)).stages


@each_form
def test_samples_that_no_live_bin_depends_on_are_not_read(form):
    params = WelchPeakParams.ultra(64, k=4)
    program = learned_program(without(without(LOW, 5), 4), params, form)
    assert sorted(program.samples[0].indices) == list(range(0, 64, 4))
    assert [matrix.shape for matrix in program.matrices] == ([] if form == "butterflies" else [(16, 16)])
    signal = noise(4, params)
    unread = signal.copy()
    unread[:, np.arange(64) % 4 != 0] = np.nan
    np.testing.assert_array_equal(peaks_of(unread, program, params), peaks_of(signal, program, params))


@each_form
def test_the_gradient_of_the_peak_powers_is_the_finite_difference(form):
    signal, direction = noise(2, PARAMS), noise(2, PARAMS, seed=1)
    program = learned_program(random_model(16, 3, 0.7, 0.8), PARAMS, form)
    total = jax.jit(jax.value_and_grad(lambda signal: jnp.sum(learned_peaks(signal, program, PARAMS)[..., 1])))
    slope = np.sum(np.asarray(total(signal)[1]) * direction)
    # The total is a quadratic form while the bins stay, so a central difference is exact up to rounding.
    step = 2.0**-7
    (above, _), (below, _) = total(signal + step * direction), total(signal - step * direction)
    np.testing.assert_allclose(slope, (above - below) / (2 * step), rtol=1e-3)
    assert np.all(np.isfinite(total(np.zeros_like(signal))[1]))


def test_what_does_not_fit_is_refused():
    model, wide = LearnedFft.exact(32), WelchPeakParams.fast(32, 4)
    for call, said in (
        (lambda: learned_program(model, PARAMS), "model: expected n_fft 16 as in params, got 32"),
        (lambda: learned_program(model, wide, "fft"), "form: expected one of cones, matrix, butterflies, got 'fft'"),
        (
            lambda: learned_peaks(np.zeros((1, 24)), learned_program(model, wide), PARAMS),
            "params: expected n_fft 32 as in the program, got 16",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            call()
