"""The kernels of accelerators, run by the interpreter: peaks against float64, ties, NaN, derivatives, maps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import FLOAT32_RTOL
from _welch_reference import assert_peaks_of, noise, reference_power

import rlxjax as rx
from rlxjax.jaxpr._xla import CompiledProgram
from rlxjax.targets import check_compiler, compile_for
from rlxjax.welch._device_programs import default_fused_selection, fused_peaks, is_right, one_kernel_peaks
from rlxjax.welch._kernels import has_kernel

#: What kernels are for, with a device that they are compiled for where its compiler is installed.
PLATFORMS = {"gpu": "h100", "tpu": "tpu-v5e"}
COMPILERS = {"gpu": "cuda", "tpu": "tpu"}
SMALL = rx.WelchPeakParams.fast(n_fft=256, k=5)

each_platform = pytest.mark.parametrize("platform", PLATFORMS)


def kernel_of(params, platform):
    return lambda signal: one_kernel_peaks(jnp.asarray(signal), params, platform, interpret=True)


@each_platform
def test_peaks_of_any_number_of_rows_segments_and_peaks_are_those_of_float64(platform):
    for n_fft, k, n_segments in [(256, 16, 1), (256, 16, 3), (512, 1, 2), (1024, 40, 3)]:
        params = rx.WelchPeakParams(n_fft, n_segments, k)
        signal = noise(7 if n_fft == 256 else 3, params)
        signal[0] *= 1e15
        longer = np.pad(signal, ((0, 0), (0, 5)), constant_values=np.nan)
        peaks = np.asarray(kernel_of(params, platform)(longer))
        assert_peaks_of(reference_power(signal, params), peaks, params)


@each_platform
def test_equal_powers_keep_the_lower_bin_first_and_nan_comes_last_in_its_row_alone(platform):
    params = rx.WelchPeakParams(256, 1, 4)
    signal = noise(4, params)
    signal[0] = 0.0
    signal[1, 9] = np.nan
    impulse = np.zeros(256, np.float32)
    impulse[128] = 1.0  # all bins between have one power; rounding may tell them apart, but not their order by number
    signal[2] = impulse
    peaks = np.asarray(kernel_of(params, platform)(signal))
    np.testing.assert_array_equal(peaks[0], [[bin_, 0.0] for bin_ in range(4)])
    np.testing.assert_array_equal(peaks[1], [[bin_, np.nan] for bin_ in range(4)])
    powers, bins = peaks[2, :, 1], peaks[2, :, 0]
    assert all(powers[:-1] >= powers[1:])
    assert all(bins[:-1][powers[:-1] == powers[1:]] < bins[1:][powers[:-1] == powers[1:]])
    assert_peaks_of(reference_power(signal[3:], params), peaks[3:], params)


@each_platform
def test_the_derivative_is_that_of_the_other_programs(platform):
    signal = noise(2, SMALL)

    def gradient(peaks):
        return jax.jit(jax.grad(lambda rows: jnp.sum(jnp.sin(1e-3 * peaks(rows)[..., 1]))))(signal)

    own = gradient(kernel_of(SMALL, platform))
    others = gradient(lambda rows: fused_peaks(rows, SMALL, "top_k", "cpu"))
    np.testing.assert_allclose(own, others, rtol=0, atol=FLOAT32_RTOL * np.abs(others).max())


@each_platform
def test_jit_and_vmap_equal_eager(platform):
    signal, peaks = noise(6, SMALL), kernel_of(SMALL, platform)
    expected = peaks(signal)
    for found in (jax.jit(peaks)(signal), jax.vmap(peaks)(signal.reshape(2, 3, -1)).reshape(expected.shape)):
        np.testing.assert_allclose(found, expected, rtol=FLOAT32_RTOL)  # XLA optimises an interpreted kernel


def test_where_a_program_is_compiled_for_other_devices_the_peaks_are_the_same():
    signal = noise(9, SMALL)
    for platform in PLATFORMS:
        peaks = jax.jit(lambda rows, platform=platform: fused_peaks(rows, SMALL, "kernel", platform))(signal)
        assert_peaks_of(reference_power(signal, SMALL), np.asarray(peaks), SMALL)


@each_platform
def test_the_compiled_kernel_moves_the_samples_and_the_peaks_and_little_else(platform, monkeypatch, tmp_path):
    try:
        check_compiler(COMPILERS[platform])
    except ValueError:
        pytest.skip(f"nothing compiles for {PLATFORMS[platform]}: its compiler is not installed")
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))
    batch, useful = 1000, SMALL.frame_len + 2 * SMALL.k
    rows = jax.ShapeDtypeStruct((batch, SMALL.frame_len), jnp.float32)
    # Rows whose powers leave the range of float32 take another branch, which is not counted here.
    peaks = functools.partial(fused_peaks, params=SMALL, platform=platform, rescales=False)
    made = compile_for(peaks, rows, target=PLATFORMS[platform])
    moved = CompiledProgram(made.text, {}).totals.sums().bytes
    assert moved is not None
    assert moved < 1.5 * 4 * batch * useful


def test_a_kernel_that_is_wrong_on_its_device_or_fails_there_is_not_used():
    kernel = kernel_of(SMALL, "gpu")
    assert is_right(kernel, SMALL)

    def failing(rows):
        raise RuntimeError("no such instruction\nat line 9")

    wrong = [
        ("its peaks differ", lambda rows: np.asarray(kernel(rows)) * np.float32([1.0, 1.001])),
        ("its peaks differ", lambda rows: np.asarray(kernel(rows)) + np.float32([1.0, 0.0])),
        ("no such instruction", failing),
    ]
    for said, one in wrong:
        with pytest.warns(UserWarning, match=f"this device's kernel is not used: .*{said}"):
            assert not is_right(one, SMALL)


def test_kernels_are_for_accelerators_and_for_some_sizes():
    assert not has_kernel(64, SMALL, "cpu")
    for platform in PLATFORMS:
        assert default_fused_selection(64, SMALL, platform) == "kernel"
        for n_fft, k in ((250, 4), (128, 4), (2048, 4), (256, 65)):
            assert not has_kernel(64, rx.WelchPeakParams.fast(n_fft, k), platform)
        assert not has_kernel(0, SMALL, platform)


@each_platform
def test_tones_at_every_bin_have_their_peak_there(platform):
    bins = np.arange(SMALL.n_bins)
    time = np.arange(SMALL.frame_len)
    tones = np.cos(2 * np.pi * np.outer(bins, time) / SMALL.n_fft).astype(np.float32)
    np.testing.assert_array_equal(kernel_of(SMALL, platform)(tones)[:, 0, 0], bins)
