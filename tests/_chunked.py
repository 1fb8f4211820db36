"""Signals, paths and small chunks for tests of large signals."""

import numpy as np
import pytest
from _tolerances import FLOAT32_RTOL

import rlxjax as rx
from rlxjax import _chunks
from rlxjax.welch import _device_programs, _host, _launch, aligned_zeros
from rlxjax.welch._device_programs import CHUNK_ROWS_MULTIPLE
from rlxjax.welch._rows import LINE_MARGIN, Line

PARAMS = rx.WelchPeakParams(16, 3, k=4)
MODEL = rx.LearnedFft.exact(16)
ROWS = CHUNK_ROWS_MULTIPLE
PATHS = ("host", "fused", "block", "learned")
#: A program for other numbers of rows may round a power otherwise; NumPy and a spectrum alone do not.
RTOL_OF_OTHER_CHUNKS = {"host": 0, "block": 0, "fused": FLOAT32_RTOL, "learned": FLOAT32_RTOL}

each_path = pytest.mark.parametrize("path", PATHS)
each_device_path = pytest.mark.parametrize("path", PATHS[1:])
each_worker_count = pytest.mark.parametrize("workers", [1, 2, 5])


def noise(batch, params=PARAMS, seed=0):
    return np.random.default_rng(seed).standard_normal((batch, params.frame_len)).astype(np.float32)


def peaks_of(signal, path, params=PARAMS, selection="top_k"):
    """Return the peaks by the form of the selection that compiles sooner."""
    return rx.welch_peaks(signal, params, path, model=MODEL, selection=selection)


def use_workers(monkeypatch, workers):
    for module in (_chunks, _launch, _host):
        monkeypatch.setattr(module, "worker_count", lambda: workers)


def use_chunks_of(monkeypatch, samples):
    monkeypatch.setattr(_device_programs, "CHUNK_SAMPLES", {"cpu": samples, "other": 1})
    monkeypatch.setattr(_launch, "PROGRAM_SAMPLES", samples)
    monkeypatch.setattr(_launch, "_plan", _launch._plan.__wrapped__)  # what is remembered has other chunks


@pytest.fixture
def small_chunks(monkeypatch):
    """Make chunks and pieces as small as they can be: `ROWS` rows on a device, seven on the host."""
    use_chunks_of(monkeypatch, 1)
    monkeypatch.setattr(_device_programs, "PIECE_SAMPLES", 1)
    monkeypatch.setattr(_host, "CHUNK_SAMPLES", 7 * PARAMS.n_segments * PARAMS.n_fft)


def placed(signal, first):
    """Return the same rows so many samples behind an aligned address, NaN around them."""
    raw = aligned_zeros((signal.size + 2 * LINE_MARGIN,))
    raw[:] = np.nan
    rows = raw[first : first + signal.size].reshape(signal.shape)
    rows[:] = signal
    return rows


def line_of(signal, first):
    """Return rows as a line, NaN around them."""
    samples = np.full(LINE_MARGIN + signal.size, np.nan, np.float32)
    samples[first : first + signal.size] = signal.ravel()
    return Line(samples, np.int32(first), signal.shape[1])


@pytest.fixture
def launched(monkeypatch):
    """Record the shape and type of whatever a device program is given."""
    shapes = []
    program_of = _launch.program

    def recording(function, platform):
        def recorded(rows, *arguments):
            shapes.append((rows.shape, Line if isinstance(rows, Line) else np.dtype(rows.dtype)))
            return program_of(function, platform)(rows, *arguments)

        return recorded

    monkeypatch.setattr(_launch, "program", recording)
    return shapes
