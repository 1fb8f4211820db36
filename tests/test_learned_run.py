"""`welch_peaks` with a learned FFT: its results, refusals, choices and programs."""

import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _compilations import COMPILE, compilations
from _tolerances import FLOAT32_RTOL
from _welch_reference import noise as noise_of

import rlxjax as rx
from rlxjax.learned import learned_peaks, learned_program

N_FFT = 64
FAST = rx.WelchPeakParams.fast(N_FFT, k=5)
compiled_peaks = jax.jit(learned_peaks, static_argnames="params")


def noise(batch, params=FAST):
    return noise_of(batch, params)


def pruned(n_fft=N_FFT, stages_off=2, bins=None):
    """Return a model of a low band, the last stages cut off: fewer than a quarter of its gates are on."""
    exact = rx.learned.LearnedFft.exact(n_fft)
    gates = exact.gates.copy()
    gates[exact.stages - stages_off :] = 0
    mask = np.arange(exact.n_bins) < (n_fft // 8 if bins is None else bins)
    return dataclasses.replace(exact, gates=gates, mask=mask.astype(float)).hardened()


SPARSE = pruned()
BUILT_IN_COSTS_NS = (rx.welch.host_path_ns, rx.fused_graph_ns, rx.block_graph_ns)


def test_the_run_is_that_of_the_program_under_each_name_and_one_row_keeps_the_batch_axis():
    program, everything = learned_program(SPARSE, FAST), noise(33)
    expected = compiled_peaks(everything, program, FAST)
    for as_array in (np.asarray, jnp.asarray):
        for name, batch in (("learned", 0), ("LEARNED", 1), ("learned_compiled", 33), ("Learned-Compiled", 1)):
            signal = as_array(everything[:batch])
            peaks = rx.welch_peaks(signal, FAST, name, model=SPARSE)
            assert isinstance(peaks, type(signal))
            assert (peaks.shape, peaks.dtype) == ((batch, 5, 2), np.float32)
            np.testing.assert_array_equal(peaks[..., 0], expected[:batch, :, 0])
            np.testing.assert_allclose(peaks[..., 1], expected[:batch, :, 1], rtol=FLOAT32_RTOL)
        np.testing.assert_array_equal(rx.welch_peaks(as_array(everything[0]), FAST, "learned", model=SPARSE), peaks)


def test_jit_and_vmap_equal_eager_and_auto_in_traced_code_is_fused():
    signal = jnp.asarray(noise(3))
    for strategy, as_ in (("learned", "learned"), ("auto", "fused")):
        run = functools.partial(rx.welch_peaks, params=FAST, strategy=strategy, model=SPARSE)
        eager = rx.welch_peaks(signal, FAST, as_, model=SPARSE)
        for transformed in (jax.jit(run)(signal), jax.vmap(run)(signal)[:, 0]):
            np.testing.assert_array_equal(transformed[..., 0], eager[..., 0])
            np.testing.assert_allclose(transformed[..., 1], eager[..., 1], rtol=FLOAT32_RTOL)


def test_models_that_do_not_fit_are_refused_whatever_the_strategy():
    def powers(model, strategy="learned"):
        return rx.welch_peaks(jnp.ones((1, 96)), FAST, strategy, model=model)[..., 1].sum()

    for model, said in (
        (rx.learned.LearnedFft.exact(128), "model: expected a model for n_fft 64 as in params, got n_fft 128"),
        ("model.json", "model: expected a LearnedFft .load_learned_fft., got str"),
        ({"gates": 1}, "model: expected a LearnedFft .load_learned_fft., got dict"),
    ):
        for strategy in ("learned", "auto", "rlx", "host", "ultra", "fused", "block"):
            with pytest.raises(ValueError, match=said):
                powers(model, strategy)
    with pytest.raises(ValueError, match="'learned' needs a learned FFT .model=., and none was given"):
        powers(None)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf]), SPARSE)
    for transform, model in ((jax.jit, SPARSE), (jax.grad, SPARSE), (jax.vmap, stacked)):
        with pytest.raises(ValueError, match="model: .* got traced arrays; use learned_spectrum"):
            transform(powers)(model)


def test_auto_runs_what_is_cheapest_by_the_reference_and_no_model_with_a_quarter_of_its_gates_on():
    paths, exact = ("host", "fused", "block"), rx.learned.LearnedFft.exact(N_FFT)
    for batch in (1, 8):
        costs = [float(cost("cpu", batch, N_FFT, 5)) for cost in BUILT_IN_COSTS_NS]
        signal = noise(batch)
        for strategy, among in (("auto", paths), ("rlx", paths[1:])):
            cheapest = min(among, key=lambda path: costs[paths.index(path)])
            expected = rx.welch_peaks(signal, FAST, cheapest)
            np.testing.assert_array_equal(rx.welch_peaks(signal, FAST, strategy, calibration="reference"), expected)
    learned = rx.welch_peaks(signal, FAST, "learned", model=SPARSE)
    np.testing.assert_array_equal(rx.welch_peaks(signal, FAST, model=SPARSE, calibration="reference"), learned)
    # None of the models below has the bins of the transform, so their peaks tell which path ran.
    expected = rx.welch_peaks(signal, FAST, "fused")
    gates = (np.arange(exact.total_gates) < exact.total_gates // 4).reshape(exact.gates.shape).astype(float)
    for strategy, model in (("auto", dataclasses.replace(exact, gates=gates)), ("rlx", SPARSE)):
        peaks = rx.welch_peaks(signal, FAST, strategy, model=model, calibration="reference")
        np.testing.assert_allclose(peaks, expected, rtol=1e-3)
        assert not np.array_equal(rx.welch_peaks(signal, FAST, "learned", model=model)[..., 0], expected[..., 0])


def test_models_pruned_alike_share_programs_for_signals_of_one_padded_shape_and_are_collected():
    model, params = pruned(bins=6), dataclasses.replace(FAST, k=3)
    given = [noise(40, params), noise(40, params).astype(np.float64), jnp.asarray(noise(40, params))]
    for signal in given:
        rx.welch_peaks(signal, params, "learned", model=model)
    retrained = dataclasses.replace(model, twiddles=model.twiddles * 0.9)
    compilations.clear()
    for signal in given:
        rx.welch_peaks(signal, params, "learned", model=retrained)
    for batch in (33, 37):
        rx.welch_peaks(noise(batch, params), params, "learned", model=model)
    assert COMPILE not in compilations
    gone = [weakref.ref(model), weakref.ref(retrained)]
    del model, retrained
    gc.collect()
    assert [reference() for reference in gone] == [None] * 2
