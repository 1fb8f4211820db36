"""A stream of signals: the peaks of each, in order, whatever the source does."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlxjax as rx
from rlxjax.welch import _run

PARAMS = rx.WelchPeakParams.fast(n_fft=16, k=4)
MODEL = rx.learned.LearnedFft.exact(16)
PATHS = ("host", "fused", "block", "learned", "auto")

each_path = pytest.mark.parametrize("path", PATHS)


def noise(batch, seed=0):
    return np.random.default_rng(seed).standard_normal((batch, PARAMS.frame_len)).astype(np.float32)


def stream(signals, path="host", **given):
    return rx.welch.stream_welch_peaks(signals, PARAMS, path, model=MODEL, **given)


def assert_same_peaks(found, signals, path="host"):
    found = list(found)
    assert len(found) == len(signals)
    for peaks, signal in zip(found, signals, strict=True):
        assert isinstance(peaks, np.ndarray if isinstance(signal, np.ndarray) else jax.Array)
        np.testing.assert_array_equal(peaks, rx.welch_peaks(signal, PARAMS, path, model=MODEL))


@each_path
def test_peaks_are_those_of_each_signal_in_order_and_of_its_kind_though_a_source_fills_one_buffer_again(path):
    chunk = rx.welch.schedule("cpu").chunk_samples // 32
    signals = [noise(2), jnp.asarray(noise(3)), noise(1)[0], jnp.asarray(noise(1)[0]), noise(0), noise(chunk + 68)]
    assert_same_peaks(stream(signals, path), signals, path)
    inside = jax.jit(lambda scale: [scale * peaks for peaks in stream(signals[:2], path)])(1.0)  # which are constants
    for peaks, signal in zip(inside, signals, strict=False):
        np.testing.assert_allclose(peaks, rx.welch_peaks(signal, PARAMS, path, model=MODEL), rtol=1e-6)
    with pytest.raises(ValueError, match="concrete.*use welch_peaks"):
        jax.jit(lambda signal: next(stream([signal], path)))(noise(2))
    assert list(stream([])) == list(stream(iter(()))) == []
    signals, buffer = [noise(9, seed) for seed in range(6)], np.zeros((9, PARAMS.frame_len), np.float32)

    def source():
        for signal in signals:
            buffer[:] = signal
            yield buffer
            buffer[:] = np.nan

    assert_same_peaks(stream(source(), path), signals, path)


def test_nothing_is_read_before_it_is_asked_for_and_a_signal_is_computed_while_the_next_one_is_made(monkeypatch):
    read = []
    peaks = stream(read.append(seed) or noise(2, seed) for seed in range(5))
    assert read == []
    for asked in range(5):
        next(peaks)
        assert len(read) == min(asked + 2, 5)
    assert list(peaks) == []
    computing, made = threading.Event(), threading.Event()

    def run(signal, *arguments, **given):
        computing.set()
        assert made.wait(30), "the next signal is made meanwhile"
        return rx.welch_peaks(signal, *arguments, **given)

    monkeypatch.setattr(_run, "welch_peaks", run)

    def source():
        yield noise(2)
        assert computing.wait(30), "the first signal is computed meanwhile"
        made.set()
        yield noise(3)

    assert [len(peaks) for peaks in stream(source())] == [2, 3]


@pytest.mark.parametrize("position", [0, 1, 3])
def test_an_invalid_signal_and_what_the_source_raises_come_after_the_peaks_of_the_signals_before(position):
    signals, raised = [noise(2, seed) for seed in range(5)], OSError("the file ends here")

    def source(bad):
        yield from signals[:position]
        if bad is raised:
            raise raised
        yield bad
        yield from signals[position:]

    for bad, error, message in [
        (np.zeros((2, PARAMS.frame_len - 1)), ValueError, "at least 24 samples.*got 23"),
        ([[1.0, 2.0], [3.0]], ValueError, "inhomogeneous"),
        (raised, OSError, "the file ends here"),
    ]:
        peaks = stream(source(bad))
        assert_same_peaks([next(peaks) for _ in range(position)], signals[:position])
        with pytest.raises(error, match=message) as caught:
            next(peaks)
        assert bad is not raised or caught.value is raised
        assert list(peaks) == []


@pytest.mark.slow  # waits for threads to end; `.ci/run` runs it
@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_stream_that_is_closed_early_or_dropped_leaves_no_thread_behind(end):
    before = set(threading.enumerate())
    for n_taken in (0, 1, 3):
        peaks = stream(noise(2, seed) for seed in range(1000))
        for _ in range(n_taken):
            next(peaks)
        if end == "close":
            peaks.close()
            assert list(peaks) == []
        del peaks
        gc.collect()
        assert not set(threading.enumerate()) - before


class Signal(np.ndarray):
    """An array that a weak reference can follow."""


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])
def test_at_most_two_signals_are_held(as_array):
    made = []

    def source():
        for seed in range(6):
            signal = as_array(noise(2, seed))
            signal = signal.view(Signal) if isinstance(signal, np.ndarray) else signal
            made.append(weakref.ref(signal))
            yield signal
            del signal

    for _ in stream(source()):
        # Of NumPy signals that which the source itself holds: a copy is computed.
        assert sum(one() is not None for one in made) <= (1 if as_array is np.asarray else 2)
