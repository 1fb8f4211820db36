"""Signals beyond a chunk and traced rows beyond a piece: the peaks are those of their rows."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _compilations import compilations
from _tolerances import FLOAT32_RTOL
from _welch_reference import assert_peaks_of, noise, reference_power

import rlxjax as rx
from rlxjax.welch import fused_peaks

PARAMS = rx.WelchPeakParams.fast(64, 4)
MODEL = rx.learned.LearnedFft.exact(64)
CPU = rx.welch.schedule("cpu")
#: Of rows beyond two chunks, and no multiple of anything; by the form of the selection that compiles sooner.
BATCH = 2 * CPU.chunk_samples // (2 * 64) + 813
SIGNAL = noise(BATCH, PARAMS)
POWER = reference_power(SIGNAL, PARAMS)

each_path = pytest.mark.parametrize("path", ["host", "fused_top_k", "block", "learned"])


def peaks_of(signal, path):
    return rx.welch_peaks(signal, PARAMS, path, model=MODEL)


def signals_like(counts):
    """Yield large signals of other types and layouts."""
    raw = np.zeros(SIGNAL.nbytes + 1, np.uint8)
    unaligned = raw[1:].view(np.float32).reshape(SIGNAL.shape)
    unaligned[:] = SIGNAL
    read_only = SIGNAL.copy()
    read_only.flags.writeable = False
    yield from (unaligned, read_only, SIGNAL[::2, ::-1], np.asfortranarray(SIGNAL), SIGNAL.astype(">f4"))
    yield np.pad(SIGNAL, ((0, 0), (0, 50)), constant_values=np.nan)
    yield np.broadcast_to(SIGNAL[:1], SIGNAL.shape)
    yield from (counts.astype(name) for name in ("bool", "int16", "float16", "float64"))
    yield np.asarray(jnp.asarray(counts, jnp.bfloat16))


@each_path
def test_any_number_of_rows_and_any_real_signal_has_the_peaks_of_its_float32_prefix_wherever_it_is_given(path):
    alone = CPU.alone_samples_fused // (2 * 64)
    for batch in (0, 9, 500, alone, alone + 1, BATCH):
        assert_peaks_of(POWER[:batch], peaks_of(SIGNAL[:batch], path), PARAMS)
    for batch in (9, BATCH) if path == "fused_top_k" else ():  # selection by maxima compiles slowly
        assert_peaks_of(POWER[:batch], peaks_of(SIGNAL[:batch], "fused_maxima"), PARAMS)
    if hasattr(os, "sched_setaffinity"):
        allowed = os.sched_getaffinity(0)
        try:  # on one processor
            os.sched_setaffinity(0, {min(allowed)})
            assert_peaks_of(POWER, peaks_of(SIGNAL, path), PARAMS)
        finally:
            os.sched_setaffinity(0, allowed)
    for signal in (SIGNAL, jnp.asarray(SIGNAL[:9])):  # a constant inside jit
        inside = jax.jit(lambda scale, signal=signal: scale * peaks_of(signal, path))(1.0)
        np.testing.assert_allclose(inside, peaks_of(signal, path), rtol=FLOAT32_RTOL)
    if path not in ("host", "fused_top_k"):  # the two ways on which a signal goes, the host's and the device's
        return
    for signal in signals_like(np.random.default_rng(1).integers(0, 2, SIGNAL.shape)):
        before = signal.copy()
        expected = peaks_of(np.ascontiguousarray(signal[:, : PARAMS.frame_len], np.float32), path)
        for same in (signal, jnp.asarray(signal.astype(signal.dtype.newbyteorder("=")))):
            peaks = peaks_of(same, path)
            assert isinstance(peaks, type(same) if isinstance(same, np.ndarray) else jax.Array)
            np.testing.assert_array_equal(peaks, expected, strict=True)
        np.testing.assert_array_equal(signal, before)


@each_path
def test_further_batches_and_addresses_compile_nothing_and_peaks_are_the_callers_own_to_write_to(path):
    peaks_of(SIGNAL, path)
    shifted = np.zeros(SIGNAL.size + 16, np.float32)
    compilations.clear()
    for batch, first in ((BATCH - 1, 0), (BATCH - 1, 15), (BATCH - 200, 1), (BATCH - 200, 4)):
        rows = shifted[first : first + SIGNAL[:batch].size].reshape(batch, -1)
        rows[:] = SIGNAL[:batch]
        assert_peaks_of(POWER[:batch], peaks_of(rows, path), PARAMS)
    assert not compilations
    for batch in (0, 9, 500, BATCH):
        peaks = peaks_of(SIGNAL[:batch], path)
        expected = peaks.copy()
        peaks[...] = -1
        np.testing.assert_array_equal(peaks_of(SIGNAL[:batch], path), expected)


def test_traced_rows_beyond_a_piece_have_in_jit_and_vmap_the_peaks_and_gradient_of_their_parts():
    piece = CPU.piece_samples // (2 * 64)
    signals = jnp.stack([jnp.asarray(noise(2 * piece + 5, PARAMS, seed)) for seed in range(2)])

    def run(signal):
        def total(signal):
            peaks = fused_peaks(signal, PARAMS, "top_k")
            return jnp.sum(jnp.sin(peaks[..., 1])), peaks

        return jax.grad(total, has_aux=True)(signal)

    alone = jax.jit(run)
    batched = jax.jit(jax.vmap(run))(signals)
    for signal, *both in zip(signals, *batched, strict=True):
        for rest in (5, 0):
            rows = signal[: 2 * piece + rest]
            parts = [alone(rows[start : start + piece]) for start in range(0, len(rows), piece)]
            expected = [np.concatenate(each) for each in zip(*parts, strict=True)]
            for gradient, peaks in (both, alone(rows)) if rest else (alone(rows),):
                np.testing.assert_array_equal(peaks[..., 0], expected[1][..., 0])
                np.testing.assert_allclose(peaks[..., 1], expected[1][..., 1], rtol=FLOAT32_RTOL)
                scale = np.abs(expected[0]).max()
                np.testing.assert_allclose(gradient, expected[0], rtol=0, atol=10 * FLOAT32_RTOL * scale)


def test_a_program_for_an_accelerator_has_the_same_peaks():
    found = jax.jit(lambda signal: fused_peaks(signal, PARAMS, platform="gpu"))(SIGNAL)
    assert_peaks_of(POWER, np.asarray(found), PARAMS)
