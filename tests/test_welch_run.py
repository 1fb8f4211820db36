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
from _compilations import COMPILE, compilations
from _tolerances import FLOAT32_RTOL
from _welch_reference import assert_peaks_of, noise, reference_power
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import rlxjax as rx
from rlxjax.welch import SELECTIONS, _host, _run, schedule, selected_peaks

PATHS = ("host", "fused", "block")
FAST = rx.WelchPeakParams.fast(n_fft=64, k=5)

each_path = pytest.mark.parametrize("path", PATHS)


@each_path
@pytest.mark.parametrize("n_segments", [1, 2, 8])
@pytest.mark.parametrize("n_fft", [2, 6, 30, 256, 4096])
def test_peaks_of_noise_are_those_of_float64(path, n_fft, n_segments):
    params = rx.WelchPeakParams(n_fft, n_segments, k=16)
    signal = noise(3, params)
    assert_peaks_of(reference_power(signal, params), rx.welch_peaks(signal, params, path), params)


@each_path
@pytest.mark.parametrize("amplitude", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize(("cycles", "offset"), [(10, 0), (10.5, 0), (0, 3), (10.25, -2), (31.9, 0.1), (32, 0)])
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
    ("batch", "n_fft"), [(1, 64), (7, 64), (2 * schedule("cpu").host_chunk_samples // 8192 + 1, 1024)]
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


selected_peaks_of = jax.jit(selected_peaks, static_argnames=("k", "selection"))
positive_float32 = st.floats(width=32).map(abs)


@given(arrays(np.float32, (2, 9), elements=positive_float32), st.integers(1, 12))
def test_host_selection_is_a_sort_by_power_then_bin(power, k):
    out = np.zeros((2, k, 2), np.float32)
    _host.select_peaks(power.copy(), rx.WelchPeakParams(16, 1, k), out)
    np.testing.assert_array_equal(out, selection_by_sorting(power, k))


@settings(max_examples=60)
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
    for selection in SELECTIONS:
        np.testing.assert_array_equal(selected_peaks_of(power, k, selection), expected)


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])
def test_peaks_are_the_same_however_a_device_selects_them(as_array):
    signal = noise(9, FAST)
    signal[2], signal[3, 40], signal[4] = 0, np.nan, np.eye(1, FAST.frame_len, 32)
    for k in (5, 40):
        params = dataclasses.replace(FAST, k=k)
        forms = ("fused_maxima", "fused_top_k", "fused", "Fused-Top_K")
        maxima, top_k, default, spelt = (rx.welch_peaks(as_array(signal), params, form) for form in forms)
        np.testing.assert_array_equal(maxima[..., 0], top_k[..., 0])
        # Another program around the same transform may round its powers otherwise.
        np.testing.assert_allclose(maxima, top_k, rtol=FLOAT32_RTOL)
        np.testing.assert_array_equal(spelt, top_k)
        assert any(np.array_equal(default, form, equal_nan=True) for form in (maxima, top_k))


@each_path
@pytest.mark.parametrize("n_segments", [1, 2, 3, 8])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_sample_that_is_not_finite_leaves_no_finite_power_in_its_row_and_other_rows_alone(path, n_segments, bad):
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
    ["strided", "column major", "longer rows", "read only"] + ["bool", "int16", "uint8", "int64", "float16", "float64"],
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
    signal = noise(3, FAST)
    inside = jax.jit(lambda scale: scale * rx.welch_peaks(signal, FAST, strategy))(1.0)
    np.testing.assert_allclose(inside, rx.welch_peaks(signal, FAST, "fused"), rtol=FLOAT32_RTOL)


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


@pytest.mark.parametrize("transform", [lambda run: run, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("strategy", ["host", "ultra", "fused", "block", "learned", "auto", "rlx"])
@pytest.mark.parametrize("calibration", ["calibration.json", Path("calibration.json"), {}, 0])
def test_what_is_no_calibration_is_refused_in_one_sentence_whatever_the_strategy(calibration, strategy, transform):
    arguments = {"calibration": calibration, "model": rx.LearnedFft.exact(64)}
    run = transform(lambda x: rx.welch_peaks(x, FAST, strategy, **arguments))
    streamed = rx.stream_welch_peaks([np.zeros(96)], FAST, strategy, **arguments)
    for refused in (lambda: run(jnp.zeros((1, 96))), lambda: next(streamed)):
        with pytest.raises(ValueError, match="^calibration: expected a Calibration ") as caught:
            refused()
        said = (
            f"calibration: expected a Calibration (load_calibration) or 'reference', got {type(calibration).__name__}"
        )
        assert str(caught.value) == said


@pytest.mark.parametrize("n_fft", [64, 4096])
@pytest.mark.parametrize("batch", [1, 100, 20_000])
def test_the_built_in_pick_is_of_least_cost_where_rows_are_charged_their_upload(batch, n_fft, monkeypatch):
    params = rx.WelchPeakParams.reference(n_fft, 16)
    for device in ("cpu", "cuda", "metal"):
        monkeypatch.setattr(_run, "jax_device", lambda device=device: rx.Device(device))
        row = rx.backend_coefficients(device)
        upload_ns = 0.0 if row.unified_memory else 4 * batch * params.frame_len / row.readback_bw
        costs = {"host": rx.host_path_ns, "fused": rx.fused_graph_ns, "block": rx.block_graph_ns}
        costs = {name: float(cost(device, batch, n_fft, 16, n_segments=8)) for name, cost in costs.items()}
        costs = {name: cost + upload_ns * (name != "host") for name, cost in costs.items()}
        for names in (("host", "fused", "block"), ("fused", "block")):
            found = _run._built_in_pick(names, batch, params, None, None)
            assert found == min(names, key=costs.get)


def test_what_lies_on_an_accelerator_stays_there():
    for where, names in ((None, ("host", "fused", "block")), ("abacus", ("fused", "block"))):
        assert _run._candidates("auto", False, False, False, where) == names
        assert _run._candidates("auto", True, False, False, where) == (*names, "learned")


def test_maxima_are_no_candidate_where_the_schedule_has_none():
    known, plan = rx.prior_calibration("cpu").of("welch"), schedule("gpu")
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


@pytest.mark.parametrize("path", [*PATHS, "learned", "auto"])
@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])
def test_peaks_that_memory_cannot_hold_are_a_memory_error_before_any_work(path, as_array):
    params, signal = dataclasses.replace(FAST, k=10**13), as_array(noise(2, FAST))
    transforms = (lambda run: run, jax.jit) if path in ("fused", "learned", "auto") else (lambda run: run,)
    for transform in transforms:
        with pytest.raises(MemoryError, match="take 160,000,000,000,000 bytes"):
            transform(lambda x: rx.welch_peaks(x, params, path, model=rx.LearnedFft.exact(64)))(signal)


def test_a_masked_array_is_refused_in_one_sentence():
    signal = np.ma.masked_invalid(noise(2, FAST))
    with pytest.raises(ValueError, match="^signal: expected plain numbers, got a masked array; use signal"):
        rx.welch_peaks(signal, FAST)
    np.testing.assert_array_equal(
        rx.welch_peaks(signal.filled(0), FAST, "host"), rx.welch_peaks(np.asarray(signal), FAST, "host")
    )


def test_arguments_without_a_hash_are_refused_by_name():
    signal = noise(1, FAST)
    for arguments, said in [
        ({"params": {"n_fft": 64}}, "params: expected WelchPeakParams, got dict"),
        ({"strategy": ["fused"]}, "expected one of host, block,"),
    ]:
        with pytest.raises(ValueError, match=said):
            rx.welch_peaks(signal, **({"params": FAST} | arguments))


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
