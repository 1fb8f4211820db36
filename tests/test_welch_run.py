"""Peaks of the three paths against float64, and what `welch_peaks` accepts, refuses and compiles."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal
from _tolerances import FLOAT32_RTOL
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import rlxjax as rx
from rlxjax.welch import _coefficients, _host, _launch, _run, _selection
from rlxjax.welch._device_programs import mean_power
from rlxjax.welch._host import CHUNK_SAMPLES

PATHS = ("host", "fused", "block")
FAST = rx.WelchPeakParams.fast(n_fft=64, k=5)

each_path = pytest.mark.parametrize("path", PATHS)


def noise(batch, params, seed=0):
    return np.random.default_rng(seed).standard_normal((batch, params.frame_len)).astype(np.float32)


def reference_power(signal, params):
    """Return the mean one-sided power `[batch, n_bins]` in float64."""
    window = 0.5 * (1 - np.cos(2 * np.pi * np.arange(params.n_fft) / (params.n_fft - 1)))
    starts = np.arange(params.n_segments) * params.hop
    segments = np.stack([signal[:, s : s + params.n_fft] for s in starts], 1).astype(np.float64)
    power = np.abs(np.fft.rfft(segments * window)) ** 2
    power[..., 1:-1] *= 2
    return power.mean(1)


def assert_peaks_of(power, peaks, params):
    k = min(params.k, params.n_bins)
    assert peaks.shape == (len(power), params.k, 2)
    assert peaks.dtype == np.float32
    np.testing.assert_array_equal(peaks[:, k:], 0.0)
    bins, powers = peaks[:, :k, 0].astype(int), peaks[:, :k, 1]
    assert all(len(set(row)) == k for row in bins)
    tolerance = FLOAT32_RTOL * power.max(1, keepdims=True)
    true = np.take_along_axis(power, bins, 1)
    best = -np.sort(-power, axis=1)[:, :k]
    assert np.all(np.abs(powers - true) <= tolerance)
    assert np.all(np.abs(true - best) <= tolerance), "other bins than those of the largest powers"
    assert np.all(np.diff(powers) <= 0)


@each_path
@pytest.mark.parametrize("n_segments", [1, 2, 8])
@pytest.mark.parametrize("n_fft", [2, 4, 6, 30, 256, 1000, 4096])
def test_peaks_of_noise_are_those_of_float64(path, n_fft, n_segments):
    params = rx.WelchPeakParams(n_fft, n_segments, k=16)
    signal = noise(3, params)
    assert_peaks_of(reference_power(signal, params), rx.welch_peaks(signal, params, path), params)


@each_path
@pytest.mark.parametrize("amplitude", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize(
    ("cycles", "offset"), [(10, 0), (10.5, 0), (0, 3), (10.25, -2), (31.9, 0.1), (32, 0)]
)
def test_peaks_of_tones_and_offsets_are_those_of_float64(path, cycles, offset, amplitude):
    time = np.arange(FAST.frame_len) / FAST.n_fft
    signal = (amplitude * (np.cos(2 * np.pi * cycles * time) + offset))[None].astype(np.float32)
    assert_peaks_of(reference_power(signal, FAST), rx.welch_peaks(signal, FAST, path), FAST)


@each_path
@pytest.mark.parametrize("n_segments", [1, 2, 8])
def test_powers_are_those_of_scipy(path, n_segments):
    params = rx.WelchPeakParams(64, n_segments, k=33)
    signal, window = noise(4, params), scipy.signal.windows.hann(64, sym=True)
    _, spectrum = scipy.signal.welch(
        signal.astype(np.float64), window=window, nperseg=64, noverlap=32, detrend=False, scaling="spectrum"
    )
    assert_peaks_of(spectrum * window.sum() ** 2, rx.welch_peaks(signal, params, path), params)


@each_path
@pytest.mark.parametrize(
    ("batch", "n_fft"), [(1, 64), (7, 64), (33, 64), (2 * CHUNK_SAMPLES // 8192 + 1, 1024)]
)
def test_peaks_of_any_batch_and_of_rows_beyond_a_chunk_are_those_of_float64(path, batch, n_fft):
    params = rx.WelchPeakParams.reference(n_fft, k=4)
    signal = noise(batch, params)
    assert_peaks_of(reference_power(signal, params), rx.welch_peaks(signal, params, path), params)


@each_path
@pytest.mark.parametrize("k", [1, 5, 33, 40])
def test_silence_gives_the_first_bins_with_power_zero(path, k):
    params = rx.WelchPeakParams.fast(64, k)
    peaks = rx.welch_peaks(np.zeros((2, 96)), params, path)
    bins = np.where(np.arange(k) < params.n_bins, np.arange(k), 0)
    np.testing.assert_array_equal(peaks[..., 0], [bins, bins])
    np.testing.assert_array_equal(peaks[..., 1], 0)


@each_path
@pytest.mark.parametrize("k", [1, 5, 33, 40])
def test_nan_powers_rank_by_bin_and_leave_other_rows_alone(path, k):
    params = rx.WelchPeakParams.fast(64, k)
    signal = noise(3, params)
    clean = rx.welch_peaks(signal, params, path)
    signal[1, 7] = np.nan
    peaks = rx.welch_peaks(signal, params, path)
    np.testing.assert_array_equal(peaks[[0, 2]], clean[[0, 2]])
    inside = np.arange(k) < params.n_bins
    np.testing.assert_array_equal(peaks[1, :, 0], np.where(inside, np.arange(k), 0))
    np.testing.assert_array_equal(peaks[1, :, 1], np.where(inside, np.nan, 0))


@each_path
@pytest.mark.parametrize("n_segments", [1, 2])
@pytest.mark.parametrize("k", [1, 7, 31])
def test_an_impulse_ties_all_bins_between_dc_and_nyquist(path, k, n_segments):
    params = rx.WelchPeakParams(64, n_segments, k)
    impulse = np.eye(1, params.frame_len, 32)
    peaks = rx.welch_peaks(impulse, params, path)[0]
    np.testing.assert_array_equal(peaks[:, 0], np.arange(1, k + 1))
    assert len(set(peaks[:, 1])) == 1


def selection_by_sorting(power, k):
    """Return the peaks of rows of powers by the rule: NaN last, larger first, lower bin first."""
    peaks = np.zeros((len(power), k, 2), np.float32)
    for row, out in zip(power, peaks, strict=True):
        order = sorted(range(len(row)), key=lambda bin_: (np.isnan(row[bin_]), -row[bin_], bin_))[:k]
        out[: len(order)] = [(bin_, row[bin_]) for bin_ in order]
    return peaks


selected_peaks_of = jax.jit(_selection.selected_peaks, static_argnames=("k", "selection"))
positive_float32 = st.floats(width=32).map(abs)


@given(arrays(np.float32, (2, 9), elements=positive_float32), st.integers(1, 12))
def test_host_selection_is_a_sort_by_power_then_bin(power, k):
    out = np.zeros((2, k, 2), np.float32)
    _host.select_peaks(power.copy(), rx.WelchPeakParams(16, 1, k), out)
    np.testing.assert_array_equal(out, selection_by_sorting(power, k))


@settings(deadline=None, max_examples=60)
@given(
    arrays(np.complex64, (2, 2, 9), elements=st.sampled_from([0, 1, 2, 3, np.inf, np.nan])),
    st.sampled_from([1, 4, 8, 9, 12]),
)
def test_paths_select_the_same_bins_of_the_same_spectrum(spectrum, k):
    params = rx.WelchPeakParams.fast(16, k)
    power = (np.square(spectrum.real) + np.square(spectrum.imag)).sum(1) / 2
    power[:, 1:-1] *= 2
    expected = selection_by_sorting(power, k)
    np.testing.assert_array_equal(_host.spectrum_peaks(spectrum, params), expected)
    for selection in _selection.SELECTIONS:
        np.testing.assert_array_equal(selected_peaks_of(power, k, selection), expected)


@pytest.mark.parametrize("path", [*PATHS, "learned"])
@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])
def test_peaks_are_the_same_however_they_are_selected(path, as_array):
    signal = noise(9, FAST)
    signal[2], signal[3, 40], signal[4] = 0, np.nan, np.eye(1, FAST.frame_len, 32)
    for k in (1, 5, 40):
        params = dataclasses.replace(FAST, k=k)
        run = functools.partial(rx.welch_peaks, params=params, strategy=path, model=rx.LearnedFft.exact(64))
        maxima, top_k, default = (run(as_array(signal), selection=form) for form in ("maxima", "top_k", None))
        np.testing.assert_array_equal(maxima[..., 0], top_k[..., 0])
        # Another program around the same transform may round its powers otherwise.
        np.testing.assert_allclose(maxima, top_k, rtol=FLOAT32_RTOL)
        assert any(np.array_equal(default, form, equal_nan=True) for form in (maxima, top_k))


@pytest.mark.parametrize("transform", [lambda run: run, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("strategy", ["host", "fused", "block", "auto"])
@pytest.mark.parametrize("selection", ["heap", "", "MAXIMA", 1])
def test_an_unknown_selection_is_refused_in_one_sentence(selection, strategy, transform):
    with pytest.raises(ValueError, match="^selection: expected one of maxima, top_k, got ") as caught:
        transform(lambda x: rx.welch_peaks(x, FAST, strategy, selection=selection))(jnp.zeros((1, 96)))
    assert repr(selection) in str(caught.value)
    assert "\n" not in str(caught.value)


mean_power_of = jax.jit(mean_power, static_argnames="params")


@pytest.mark.parametrize("n_segments", range(1, 9))
@pytest.mark.parametrize("n_fft", [2, 4, 6, 16, 30, 250, 4096])
def test_the_mean_power_of_packed_segments_is_that_of_float64(n_fft, n_segments):
    params = rx.WelchPeakParams(n_fft, n_segments, 1)
    signal = noise(4, params)
    power = reference_power(signal, params)
    error = np.abs(mean_power_of(signal, params) - power)
    assert np.all(error <= FLOAT32_RTOL * power.max(1, keepdims=True))


@pytest.mark.parametrize("n_segments", [2, 3, 4])
@pytest.mark.parametrize("loud", [0, 1, 2, 3])
@pytest.mark.parametrize("factor", [1e-12, 1e-4, 1e4, 1e12])
def test_a_loud_or_quiet_segment_has_its_share_of_the_mean_power(factor, loud, n_segments):
    params = rx.WelchPeakParams(64, n_segments, 1)
    signal = noise(3, params)
    signal[:, loud * params.hop : loud * params.hop + 64] *= factor
    power = reference_power(signal, params)
    error = np.abs(mean_power_of(signal, params) - power)
    assert np.all(error <= FLOAT32_RTOL * power.max(1, keepdims=True))


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


@each_path
@pytest.mark.parametrize("n_segments", [1, 2, 3, 8])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_sample_that_is_not_finite_leaves_no_finite_power_in_its_row_and_other_rows_alone(
    path, n_segments, bad
):
    params = rx.WelchPeakParams(64, n_segments, k=33)
    clean = noise(params.frame_len + 1, params)
    clean_peaks = rx.welch_peaks(clean, params, path)
    signal = clean.copy()
    np.fill_diagonal(signal, bad)
    peaks = rx.welch_peaks(signal, params, path)
    np.testing.assert_array_equal(peaks[-1], clean_peaks[-1])
    assert not np.any(np.isfinite(peaks[:-1, :, 1]))
    if np.isnan(bad):
        assert np.all(np.isnan(peaks[:-1, :, 1]))
        np.testing.assert_array_equal(peaks[:-1, :, 0], np.tile(np.arange(33), (params.frame_len, 1)))


@pytest.mark.parametrize("selection", ["maxima", "top_k"])
@pytest.mark.parametrize("n_segments", [1, 3])
def test_the_gradient_is_the_same_however_peaks_are_selected(selection, n_segments):
    params = rx.WelchPeakParams(32, n_segments, k=3)
    signal, direction = noise(2, params), noise(2, params, seed=1)
    total = jax.jit(lambda x: jnp.sum(rx.welch_peaks(x, params, selection=selection)[..., 1]))
    # A quadratic form while the bins stay, so a central difference is exact up to rounding.
    power = [reference_power(signal + sign * 2.0**-10 * direction.astype(float), params) for sign in (1, -1)]
    largest = np.argsort(-reference_power(signal, params), axis=1)[:, :3]
    ends = [np.take_along_axis(each, largest, 1).sum() for each in power]
    slope = jnp.sum(jax.grad(total)(jnp.asarray(signal)) * direction)
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) * 2.0**9, rtol=10 * FLOAT32_RTOL)


def signal_like(kind):
    counts = np.random.default_rng(1).integers(0, 100, (3, FAST.frame_len))
    return {
        "strided": noise(6, FAST)[::2, ::-1],
        "column major": np.asfortranarray(noise(3, FAST)),
        "longer rows": np.pad(noise(3, FAST), ((0, 0), (0, 50)), constant_values=99.0),
        "read only": np.broadcast_to(noise(1, FAST), (3, FAST.frame_len)),
        "bool": counts > 50,
        **{name: counts.astype(name) for name in ("int16", "uint8", "int64", "float16", "float64")},
    }[kind]


@each_path
@pytest.mark.parametrize(
    "kind",
    ["strided", "column major", "longer rows", "read only"]
    + ["bool", "int16", "uint8", "int64", "float16", "float64"],
)
def test_any_real_signal_counts_as_its_float32_prefix(path, kind):
    signal = signal_like(kind)
    plain = np.ascontiguousarray(signal[:, : FAST.frame_len], np.float32)
    expected = rx.welch_peaks(plain, FAST, path)
    for given_signal, kept_type in ((signal, np.ndarray), (jnp.asarray(signal), jax.Array)):
        before = np.array(given_signal)
        peaks = rx.welch_peaks(given_signal, FAST, path)
        assert isinstance(peaks, kept_type)
        np.testing.assert_array_equal(peaks, expected)
        np.testing.assert_array_equal(given_signal, before)


@each_path
def test_one_row_and_no_rows_keep_the_batch_axis(path):
    signal = noise(1, FAST)
    np.testing.assert_array_equal(rx.welch_peaks(signal[0], FAST, path), rx.welch_peaks(signal, FAST, path))
    assert rx.welch_peaks(signal[:0], FAST, path).shape == (0, 5, 2)


@pytest.mark.parametrize("strategy", ["fused", "auto", "rlx", "", "GPU"])
def test_jit_and_vmap_equal_eager(strategy):
    signal = jnp.asarray(noise(3, FAST))
    run = functools.partial(rx.welch_peaks, params=FAST, strategy=strategy)
    eager = rx.welch_peaks(signal, FAST, "fused")
    for transformed in (jax.jit(run)(signal), jax.vmap(run)(signal)[:, 0]):
        np.testing.assert_array_equal(transformed[..., 0], eager[..., 0])
        np.testing.assert_allclose(transformed[..., 1], eager[..., 1], rtol=FLOAT32_RTOL)


@pytest.mark.parametrize("strategy", ["fused", "auto"])
def test_a_constant_signal_inside_jit_has_its_peaks(strategy):
    _coefficients._coefficient_set.cache_clear()
    _run._cheapest_built_in.cache_clear()
    signal = noise(3, FAST)
    inside = jax.jit(lambda scale: scale * rx.welch_peaks(signal, FAST, strategy))(1.0)
    np.testing.assert_allclose(inside, rx.welch_peaks(signal, FAST, "fused"), rtol=FLOAT32_RTOL)


@pytest.mark.parametrize("n_segments", [1, 2])
def test_gradient_of_powers_is_that_of_float64_finite_differences(n_segments):
    params = rx.WelchPeakParams(32, n_segments, k=2)
    time = np.arange(params.frame_len) / 32
    signal = 2 * np.cos(2 * np.pi * 5 * time) + np.cos(2 * np.pi * 11 * time)

    def two_powers(rows):
        return np.sort(reference_power(rows, params))[:, -2:].sum(1)

    steps = 1e-4 * np.eye(params.frame_len)
    expected = (two_powers(signal + steps) - two_powers(signal - steps)) / 2e-4
    gradient = jax.grad(lambda x: rx.welch_peaks(x, params)[..., 1].sum())(jnp.asarray(signal))
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=FLOAT32_RTOL * np.abs(expected).max())


def test_gradient_at_silence_is_zero():
    gradient = jax.grad(lambda x: rx.welch_peaks(x, FAST)[..., 1].sum())(jnp.zeros((2, FAST.frame_len)))
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [("host", "NumPy"), ("ultra", "NumPy"), ("2seg", "NumPy"), ("block", "spectrum")],
)
def test_host_and_block_do_not_run_in_traced_code(strategy, reason):
    with pytest.raises(ValueError, match=f"expected 'fused'.*got '{strategy}'.*{reason}"):
        jax.jit(lambda x: rx.welch_peaks(x, FAST, strategy))(jnp.zeros((1, 96)))


@pytest.mark.parametrize("transform", [lambda run: run, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((1, 96), "complex64", "expected a real dtype, got complex64"),
        ((1, 1, 96), "float32", r"expected \[batch, length\].*got shape \(1, 1, 96\)"),
        ((), "float32", r"expected \[batch, length\].*got shape \(\)"),
        ((1, 95), "float32", "at least 96 samples.*got 95"),
        ((1, 0), "float32", "at least 96 samples.*got 0"),
    ],
)
def test_a_signal_that_has_no_peaks_is_refused(transform, shape, dtype, message):
    with pytest.raises(ValueError, match=message):
        transform(lambda x: rx.welch_peaks(x, FAST, "fused"))(jnp.zeros(shape, dtype))


def test_an_unknown_strategy_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="expected one of .*host.*block.*fused.*got 'fastest'"):
        rx.welch_peaks(noise(1, FAST), FAST, "fastest")
    with pytest.raises(ValueError, match="params: expected WelchPeakParams, got int"):
        rx.welch_peaks(noise(1, FAST), 256)


ALIASES = {
    "auto": ("auto", "", " AUTO "),
    "ultra": ("ultra", "ultra_fast", "Ultra-Fast", "ultra_fast_rustfft", "1seg"),
    "fast": ("fast", "streaming", "fast_streaming", "FAST-streaming_rustfft", "rustfft", "2SEG"),
    "rlx": ("rlx", "rlx_compiled", "RLX-compiled", "compiled", "gpu", "fused"),
    "learned": ("learned", "learned_compiled", "Learned-Compiled"),
}


@pytest.mark.parametrize(("meaning", "name"), [(m, name) for m, names in ALIASES.items() for name in names])
def test_every_alias_is_parsed_and_runs_with_the_segments_of_the_parameters(meaning, name):
    assert rx.parse_welch_peaks_strategy(name) == meaning
    signal = noise(3, FAST)
    if meaning == "learned":
        with pytest.raises(ValueError, match="model"):
            rx.welch_peaks(signal, FAST, name)
    else:
        assert_peaks_of(reference_power(signal, FAST), rx.welch_peaks(signal, FAST, name), FAST)


@pytest.mark.parametrize("name", ["host", "block", "fastest", "1 seg", "ultra fast"])
def test_the_parser_refuses_other_names(name):
    with pytest.raises(ValueError, match=f"expected one of auto, ultra.*got '{name}'"):
        rx.parse_welch_peaks_strategy(name)


@pytest.mark.parametrize("n_fft", [64, 4096])
@pytest.mark.parametrize("batch", [1, 100, 20_000])
def test_auto_and_rlx_run_the_path_of_least_built_in_cost(batch, n_fft):
    params, device = rx.WelchPeakParams.reference(n_fft, 16), _run.jax_device()
    costs = {
        rx.Path.HOST: rx.host_path_ns,
        rx.Path.FUSED: rx.fused_graph_ns,
        rx.Path.BLOCK: rx.block_graph_ns,
    }
    costs = {path: float(cost(device, batch, n_fft, 16, n_segments=8)) for path, cost in costs.items()}
    assert _run._choose_path("auto", batch, params, None, None, False) is min(costs, key=costs.get)
    del costs[rx.Path.HOST]
    assert _run._choose_path("rlx", batch, params, None, None, False) is min(costs, key=costs.get)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((255, 2, 4), "n_fft: expected an even number, got 255"),
        ((0, 2, 4), "n_fft: expected an integer of at least 2, got 0"),
        ((64, 0, 4), "n_segments: expected an integer of at least 1, got 0"),
        ((64, 2, 0), "k: expected an integer of at least 1, got 0"),
        ((64, 2, 1.5), "k: expected an integer, got 1.5"),
    ],
)
def test_parameters_of_no_run_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        rx.WelchPeakParams(*sizes)


def test_bins_divide_the_sample_rate():
    frequencies = FAST.bin_frequencies_hz(np.arange(FAST.n_bins), 48_000.0)
    np.testing.assert_allclose(frequencies, np.fft.rfftfreq(FAST.n_fft, 1 / 48_000.0), rtol=1e-15)


def test_padded_batches_are_monotone_and_at_most_four_an_octave():
    padded = np.array([rx.padded_batch(batch) for batch in range(5001)])
    batches = np.arange(5001)
    assert np.all(padded >= batches)
    assert np.all(padded <= 1.25 * batches)
    assert np.all(np.diff(padded) >= 0)
    assert all(rx.padded_batch(int(size)) == size for size in padded)
    for octave in 2 ** np.arange(12):
        assert len({size for size in padded if octave < size <= 2 * octave}) <= 4
    assert rx.padded_batch(np.int64(9)) == rx.padded_batch(9)


@pytest.mark.parametrize(("path", "program"), [("fused", "_fused_program"), ("block", "_spectrum_program")])
def test_batches_of_one_padded_size_and_new_values_compile_once(path, program):
    params = rx.WelchPeakParams(48, 3, k=6)
    compiled = getattr(_launch, program)._cache_size
    rx.welch_peaks(noise(80, params), params, path)
    once = compiled()
    for batch in (65, 66, 71, 79, 80):
        signal = noise(batch, params, seed=batch)
        for same in (signal, signal.astype(np.float64), jnp.asarray(signal)):
            rx.welch_peaks(same, params, path)
    assert compiled() == once
    rx.welch_peaks(noise(81, params), params, path)
    assert compiled() == once + 1


@pytest.mark.parametrize(("path", "succeeds"), [("host", True), ("fused", False), ("block", False)])
def test_only_the_host_path_runs_where_jax_has_no_device(path, succeeds):
    run_it = f"rx.welch_peaks(numpy.ones(96), rx.WelchPeakParams.fast(64, 5), {path!r})"
    run = subprocess.run(
        [sys.executable, "-c", f"import numpy, rlxjax as rx; {run_it}"],
        env={**os.environ, "JAX_PLATFORMS": "no_such_platform"},
        cwd=Path(rx.__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert (run.returncode == 0) is succeeds, run.stderr
    assert succeeds or "no_such_platform" in run.stderr
