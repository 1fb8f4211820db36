"""Peaks against float64, parameters, and what `welch_peaks` accepts, refuses, chooses and compiles."""

import dataclasses
import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal
from _compilations import COMPILE, compilations
from _tolerances import FLOAT32_RTOL
from _welch_reference import assert_peaks_of, noise, reference_power

import rlxjax as rx
from rlxjax.welch import _choice, mean_power, schedule

PATHS = ("host", "fused", "block")
FAST = rx.WelchPeakParams.fast(n_fft=64, k=5)

each_path = pytest.mark.parametrize("path", PATHS)
mean_power_of = jax.jit(mean_power, static_argnames="params")


def assert_right(signal, params, path):
    assert_peaks_of(reference_power(signal, params), rx.welch_peaks(signal, params, path), params)


# --- Peaks ---------------------------------------------------------------------------------------


@each_path
def test_peaks_of_noise_tones_and_offsets_are_those_of_float64_and_of_scipy(path):
    for n_fft, n_segments in [(2, 1), (2, 8), (6, 2), (30, 1), (30, 8), (256, 2), (4096, 1), (4096, 8)]:
        params = rx.WelchPeakParams(n_fft, n_segments, k=16)
        assert_right(noise(3, params), params, path)
    host_chunk = 2 * schedule("cpu").host_chunk_samples // 8192 + 1
    for batch, n_fft in ((1, 64), (7, 64), (host_chunk, 1024)):
        params = rx.WelchPeakParams.reference(n_fft, k=4)
        assert_right(noise(batch, params), params, path)
    time = np.arange(FAST.frame_len) / FAST.n_fft
    tones = [(10, 0), (10.5, 0), (0, 3), (10.25, -2), (31.9, 0.1), (32, 0)]
    for (cycles, offset), amplitude in itertools.product(tones, [1e-6, 1.0, 1e6]):
        assert_right((amplitude * (np.cos(2 * np.pi * cycles * time) + offset))[None].astype(np.float32), FAST, path)
    window = scipy.signal.windows.hann(64, sym=True)
    for n_segments in (1, 2, 8):
        params = rx.WelchPeakParams(64, n_segments, k=33)
        signal = noise(4, params)
        _, spectrum = scipy.signal.welch(
            signal.astype(np.float64), window=window, nperseg=64, noverlap=32, detrend=False, scaling="spectrum"
        )
        assert_peaks_of(spectrum * window.sum() ** 2, rx.welch_peaks(signal, params, path), params)


@each_path
def test_ties_silence_and_nan_powers_keep_the_lower_bin_first_and_leave_other_rows_alone(path):
    for k in (1, 5, 33, 40):
        params = rx.WelchPeakParams.fast(64, k)
        inside = np.arange(k) < params.n_bins
        silent = rx.welch_peaks(np.zeros((2, 96)), params, path)
        np.testing.assert_array_equal(silent[..., 0], [np.where(inside, np.arange(k), 0)] * 2)
        np.testing.assert_array_equal(silent[..., 1], 0)
        signal = noise(3, params)
        clean = rx.welch_peaks(signal, params, path)
        signal[1, 7] = np.nan
        peaks = rx.welch_peaks(signal, params, path)
        np.testing.assert_array_equal(peaks[[0, 2]], clean[[0, 2]])
        np.testing.assert_array_equal(peaks[1, :, 0], np.where(inside, np.arange(k), 0))
        np.testing.assert_array_equal(peaks[1, :, 1], np.where(inside, np.nan, 0))
    for n_segments, k in itertools.product([1, 2], [1, 7, 31]):  # an impulse ties all bins between DC and Nyquist
        params = rx.WelchPeakParams(64, n_segments, k)
        peaks = rx.welch_peaks(np.eye(1, params.frame_len, 32), params, path)[0]
        np.testing.assert_array_equal(peaks[:, 0], np.arange(1, k + 1))
        assert len(set(peaks[:, 1])) == 1


def test_peaks_are_the_same_however_a_device_selects_them():
    signal = noise(9, FAST)
    signal[2], signal[3, 40], signal[4] = 0, np.nan, np.eye(1, FAST.frame_len, 32)
    for k, as_array in ((5, np.asarray), (40, jnp.asarray)):
        params = dataclasses.replace(FAST, k=k)
        forms = ("fused_maxima", "fused_top_k", "fused", "Fused-Top_K")
        maxima, top_k, default, spelt = (rx.welch_peaks(as_array(signal), params, form) for form in forms)
        np.testing.assert_array_equal(maxima[..., 0], top_k[..., 0])
        # Another program around the same transform may round its powers otherwise.
        np.testing.assert_allclose(maxima, top_k, rtol=FLOAT32_RTOL)
        np.testing.assert_array_equal(spelt, top_k)
        assert any(np.array_equal(default, form, equal_nan=True) for form in (maxima, top_k))
    for name in ("", "Ultra-Fast", "2SEG", "RLX-compiled", "Host", "BLOCK"):
        assert_right(noise(3, FAST), FAST, name)  # with the segments of the parameters


@each_path
def test_a_sample_that_is_not_finite_leaves_no_finite_power_in_its_row_and_other_rows_alone(path):
    for n_segments, bad in itertools.product([1, 2, 3, 8], [np.nan, np.inf, -np.inf]):
        params = rx.WelchPeakParams(64, n_segments, k=33)
        clean = noise(params.frame_len + 1, params)
        signal = clean.copy()
        np.fill_diagonal(signal, bad)
        peaks = rx.welch_peaks(signal, params, path)
        np.testing.assert_array_equal(peaks[-1], rx.welch_peaks(clean, params, path)[-1])
        assert not np.any(np.isfinite(peaks[:-1, :, 1]))
        if np.isnan(bad):
            assert np.all(np.isnan(peaks[:-1, :, 1]))
            np.testing.assert_array_equal(peaks[:-1, :, 0], np.tile(np.arange(33), (params.frame_len, 1)))


@pytest.mark.parametrize("path", [*PATHS, "learned"])
def test_rows_of_any_scale_have_the_bins_of_the_same_row_at_scale_one_also_in_traced_code(path):
    """A row times a power of two has the same bins. Its powers are scaled too, until they leave float32."""
    rows = noise(4, FAST) + 3 * np.sin(2 * np.pi * 9.3 / 64 * np.arange(FAST.frame_len), dtype=np.float32)
    model = rx.learned.LearnedFft.exact(64) if path == "learned" else None
    peaks_of = functools.partial(rx.welch_peaks, params=FAST, strategy=path, model=model)
    base = peaks_of(rows)
    exponents = [-118, -70, -45, -20, 0, 20, 50, 70, 120]
    scaled = np.ldexp(rows, np.array(exponents)[:, None, None])
    with np.errstate(over="ignore", under="ignore"):
        expected = np.ldexp(base[..., 1], 2 * np.array(exponents)[:, None, None])
    expected[np.abs(expected) < np.finfo(np.float32).tiny] = 0  # a device may replace a subnormal number by 0
    extreme = np.float32([[0.0], [np.nan], [np.inf]]) + np.zeros_like(rows[:1])
    mixed = np.concatenate([*scaled, extreme])
    ways = [peaks_of(mixed), peaks_of(jnp.asarray(mixed)), np.concatenate([peaks_of(row) for row in mixed])]
    if path in ("fused", "learned"):
        ways += [
            jax.jit(peaks_of)(mixed),
            jax.vmap(peaks_of)(mixed)[:, 0],
            jax.vmap(jax.vmap(peaks_of))(mixed[None])[0, :, 0],
        ]
    for peaks in ways:
        own = np.asarray(peaks)[:-3].reshape(len(exponents), *base.shape)
        np.testing.assert_array_equal(own[..., 0], np.broadcast_to(base[..., 0], own.shape[:-1]))
        found = np.where(np.abs(own[..., 1]) < np.finfo(np.float32).tiny, 0, own[..., 1])
        np.testing.assert_allclose(found, expected, rtol=FLOAT32_RTOL)
        np.testing.assert_array_equal(np.asarray(peaks)[-3], np.stack([np.arange(5), np.zeros(5)], 1))
        assert not np.isfinite(np.asarray(peaks)[-2:, :, 1]).any()


@pytest.mark.parametrize("path", ["fused_maxima", "fused_top_k", "learned"])
def test_the_gradient_of_a_power_grows_with_the_row_also_where_the_power_leaves_float32(path):
    rows, model = noise(2, FAST), rx.learned.LearnedFft.exact(64) if path == "learned" else None

    def strongest(rows):
        return jnp.sum(rx.welch_peaks(rows, FAST, path, model=model)[:, 0, 1])

    expected = jax.grad(strongest)(rows)
    for exponent in (-70, 70):
        scaled = np.asarray(jax.jit(jax.grad(strongest))(np.ldexp(rows, exponent)))
        np.testing.assert_allclose(np.ldexp(scaled, -exponent), expected, rtol=1e-4, atol=1e-4)


@each_path
def test_any_real_signal_counts_as_its_float32_prefix(path):
    counts = np.random.default_rng(1).integers(0, 100, (3, FAST.frame_len))
    signals = [noise(6, FAST)[::2, ::-1], np.asfortranarray(noise(3, FAST)), counts > 50]
    signals += [np.pad(noise(3, FAST), ((0, 0), (0, 50)), constant_values=99.0)]
    signals += [np.broadcast_to(noise(1, FAST), (3, FAST.frame_len))]
    signals += [counts.astype(name) for name in ("int16", "uint8", "int64", "float16", "float64")]
    for signal in signals:
        expected = rx.welch_peaks(np.ascontiguousarray(signal[:, : FAST.frame_len], np.float32), FAST, path)
        for given, kept_type in ((signal, np.ndarray), (jnp.asarray(signal), jax.Array)):
            before = np.array(given)
            peaks = rx.welch_peaks(given, FAST, path)
            assert isinstance(peaks, kept_type)
            np.testing.assert_array_equal(peaks, expected)
            np.testing.assert_array_equal(given, before)
    signal = noise(1, FAST)
    np.testing.assert_array_equal(rx.welch_peaks(signal[0], FAST, path), rx.welch_peaks(signal, FAST, path))
    assert rx.welch_peaks(signal[:0], FAST, path).shape == (0, 5, 2)


# --- Mean power, gradients, traced code ----------------------------------------------------------


def test_the_mean_power_of_packed_segments_is_that_of_float64_however_loud_one_of_them_is():
    def assert_near(signal, params):
        power = reference_power(signal, params)
        error = np.abs(np.asarray(mean_power_of(signal, params)) - power)
        assert np.all(error <= FLOAT32_RTOL * power.max(1, keepdims=True))

    for n_fft, n_segments in [(2, 1), (2, 2), (4, 3), (30, 1), (30, 4), (30, 7), (4096, 1), (4096, 3)]:
        params = rx.WelchPeakParams(n_fft, n_segments, 1)
        assert_near(noise(4, params), params)
    for n_segments, loud, factor in itertools.product([2, 3, 4], [0, 1, 3], [1e-12, 1e-4, 1e4, 1e12]):
        params = rx.WelchPeakParams(64, n_segments, 1)
        signal = noise(3, params)
        signal[:, loud * params.hop : loud * params.hop + 64] *= factor
        assert_near(signal, params)
    signal = noise(6, params)
    found = jax.jit(lambda start: mean_power(signal, params, start, 3))(2)
    np.testing.assert_allclose(found, mean_power_of(signal, params)[2:5], rtol=FLOAT32_RTOL)


@pytest.mark.parametrize("n_segments", [1, 2, 3])
def test_the_mean_power_overflows_no_sooner_than_the_sum_over_segments(n_segments):
    params = rx.WelchPeakParams(64, n_segments, 1)
    shape = np.cos(2 * np.pi * 10 * np.arange(params.frame_len) / 64)[None].astype(np.float32)
    per_square = reference_power(shape, params).max()
    highest = np.finfo(np.float32).max
    largest_sum = 0.999 * highest / max(1, n_segments / 2)
    signal = shape * np.float32(np.sqrt(largest_sum / per_square))
    power = mean_power_of(signal, params)
    assert np.all(np.isfinite(power))
    np.testing.assert_allclose(power.max(), largest_sum, rtol=1e-4)
    assert np.isinf(mean_power_of(signal * np.float32(1.1 * np.sqrt(max(1, n_segments / 2))), params)[0, 10])


@pytest.mark.parametrize("strategy", ["fused_maxima", "fused_top_k"])
@pytest.mark.parametrize("n_segments", [1, 3])
def test_the_gradient_is_the_same_however_peaks_are_selected(strategy, n_segments):
    params = rx.WelchPeakParams(32, n_segments, k=3)
    signal, direction = noise(2, params), noise(2, params, seed=1)
    total = jax.jit(lambda x: jnp.sum(rx.welch_peaks(x, params, strategy)[..., 1]))
    # A quadratic form while the bins stay, so a central difference is exact up to rounding.
    power = [reference_power(signal + sign * 2.0**-10 * direction.astype(float), params) for sign in (1, -1)]
    largest = np.argsort(-reference_power(signal, params), axis=1)[:, :3]
    ends = [np.take_along_axis(each, largest, 1).sum() for each in power]
    slope = jnp.sum(jax.grad(total)(jnp.asarray(signal)) * direction)
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) * 2.0**9, rtol=10 * FLOAT32_RTOL)
    np.testing.assert_array_equal(jax.grad(total)(jnp.zeros_like(signal)), 0)


def test_jit_and_vmap_equal_eager():
    signal = jnp.asarray(noise(3, FAST))
    eager = rx.welch_peaks(signal, FAST, "fused")
    for strategy in ("fused", "auto", "RLX-compiled", "", "GPU"):
        run = functools.partial(rx.welch_peaks, params=FAST, strategy=strategy)
        for transformed in (jax.jit(run)(signal), jax.vmap(run)(signal)[:, 0]):
            np.testing.assert_array_equal(transformed[..., 0], eager[..., 0])
            np.testing.assert_allclose(transformed[..., 1], eager[..., 1], rtol=FLOAT32_RTOL)


# --- Names, parameters, refusals -----------------------------------------------------------------


def test_parameters_of_no_run_are_refused_and_bins_divide_the_sample_rate():
    for sizes, message in [
        ((255, 2, 4), "n_fft: expected an even number, got 255"),
        ((0, 2, 4), "n_fft: expected an integer of at least 2, got 0"),
        ((64, 0, 4), "n_segments: expected an integer of at least 1, got 0"),
        ((64, 2, 0), "k: expected an integer of at least 1, got 0"),
        ((64, 2, 1.5), "k: expected an integer, got 1.5"),
    ]:
        with pytest.raises(ValueError, match=message):
            rx.WelchPeakParams(*sizes)
    frequencies = FAST.bin_frequencies_hz(np.arange(FAST.n_bins), 48_000.0)
    np.testing.assert_allclose(frequencies, np.fft.rfftfreq(FAST.n_fft, 1 / 48_000.0), rtol=1e-15)


def test_padded_batches_are_monotone_and_at_most_four_an_octave():
    padded = np.array([rx.welch.padded_batch(batch) for batch in range(5001)])
    batches = np.arange(5001)
    assert np.all(padded >= batches)
    assert np.all(padded <= 1.25 * batches)
    assert np.all(np.diff(padded) >= 0)
    assert all(rx.welch.padded_batch(int(size)) == size for size in padded)
    for octave in 2 ** np.arange(12):
        assert len({size for size in padded if octave < size <= 2 * octave}) <= 4
    assert rx.welch.padded_batch(np.int64(9)) == rx.welch.padded_batch(9)


@pytest.mark.parametrize("transform", [lambda run: run, jax.jit], ids=["eager", "jit"])
def test_what_cannot_run_is_refused_in_one_sentence(transform):
    one, is_traced = np.zeros((1, 96), np.float32), transform is jax.jit
    said = "calibration: expected a Calibration (load_calibration) or 'reference', got "
    rows = [
        (np.zeros((1, 96), "complex64"), {}, "expected a real dtype, got complex64"),
        (np.zeros((1, 1, 96)), {}, "expected [batch, length] or [length], got shape (1, 1, 96)"),
        (np.zeros(()), {}, "expected [batch, length] or [length], got shape ()"),
        (np.zeros((1, 95)), {}, "at least 96 samples (n_fft 64, 2 segments), got 95"),
        (one, {"strategy": "fastest"}, "expected one of host, block, auto, ultra, "),
        (one, {"strategy": ["fused"]}, "expected one of host, block,"),
        (one, {"params": 256}, "params: expected WelchPeakParams, got int"),
        *(
            (one, {"params": dataclasses.replace(FAST, k=10**13), "strategy": name}, "take 80,000 GB")
            for name in ("fused", "learned", "auto", *(() if is_traced else ("host", "block")))
        ),
        *((one, {"calibration": bad}, said + type(bad).__name__) for bad in ("a.json", Path("a.json"), {}, 0)),
        *((one, {"strategy": name}, "expected 'fused' or 'learned'") for name in ("host", "2seg", "block") * is_traced),
    ]
    if not is_traced:
        rows.append((np.ma.array(one, mask=True), {}, "expected plain numbers, got a masked array; use .filled"))
    for signal, arguments, message in rows:
        model = rx.learned.LearnedFft.exact(64) if arguments.get("strategy") == "learned" else None
        arguments = {"params": FAST, "strategy": "fused", "model": model, **arguments}
        signal = jnp.asarray(signal) if is_traced else signal
        with pytest.raises((ValueError, MemoryError), match="^(signal|strategy|params|calibration|peaks)") as caught:
            transform(lambda x, own=arguments: rx.welch_peaks(x, **own))(signal)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


# --- Choices and programs ------------------------------------------------------------------------


@pytest.mark.parametrize("n_fft", [64, 4096])
@pytest.mark.parametrize("batch", [1, 100, 20_000])
def test_the_built_in_pick_is_of_least_cost_where_rows_are_charged_their_upload(batch, n_fft, monkeypatch):
    params = rx.WelchPeakParams.reference(n_fft, 16)
    for device in ("cpu", "cuda", "metal"):
        monkeypatch.setattr(_choice, "jax_device", lambda device=device: rx.Device(device))
        row = rx.backend_coefficients(device)
        upload_ns = 0.0 if row.unified_memory else 4 * batch * params.frame_len / row.readback_bw
        costs = {"host": rx.welch.host_path_ns, "fused": rx.fused_graph_ns, "block": rx.block_graph_ns}
        costs = {name: float(cost(device, batch, n_fft, 16, n_segments=8)) for name, cost in costs.items()}
        costs = {name: cost + upload_ns * (name != "host") for name, cost in costs.items()}
        for names in (("host", "fused", "block"), ("fused", "block")):
            found = _choice.built_in_pick(names, batch, params, None, None)
            assert found == min(names, key=costs.get)


def test_maxima_are_no_candidate_where_the_schedule_has_none():
    known, plan = rx.calibration.prior_calibration("cpu").of("welch"), schedule("gpu")
    assert known.variant_of("fused", 64, 256, 16) == "fused_maxima"
    there = known.with_facts(least_blocks=plan.least_blocks)
    assert there.variant_of("fused", 64, 256, 16) == "fused_top_k"
    assert there.alternatives(64, 256, 16) == ("host", "fused", "block")


@pytest.mark.parametrize("path", ["fused", "block"])
def test_batches_of_one_padded_size_and_new_values_compile_once(path):
    params = rx.WelchPeakParams(48, 3, k=6)

    def programs(batch):
        compilations.clear()
        signal = noise(batch, params, seed=batch)
        for same in (signal, signal.astype(np.float64), jax.device_put(signal)):
            rx.welch_peaks(same, params, path)
        return compilations.count(COMPILE)

    programs(80)
    assert [programs(batch) for batch in (65, 66, 71, 79, 80)] == [0] * 5
    assert programs(81) > 0


WITHOUT_A_DEVICE = """
import numpy, rlxjax as rx
for path in ("host", "fused", "block"):
    try:
        rx.welch_peaks(numpy.ones(96), rx.WelchPeakParams.fast(64, 5), path)
    except Exception as error:
        assert path != "host" and "no_such_platform" in str(error), error
    else:
        assert path == "host"
"""


def test_only_the_host_path_runs_where_jax_has_no_device():
    environment = {**os.environ, "JAX_PLATFORMS": "no_such_platform", "PYTHONPATH": str(Path(rx.__file__).parents[1])}
    command = [sys.executable, "-c", WITHOUT_A_DEVICE]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
