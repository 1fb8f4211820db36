"""Rows in chunks on threads: what a chunk sees, what reaches the caller, and peaks beyond a chunk."""

import contextlib
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _chunked import (
    PARAMS,
    ROWS,
    RTOL_OF_OTHER_CHUNKS,
    each_device_path,
    each_path,
    each_worker_count,
    noise,
    peaks_of,
    use_workers,
)
from _chunked import small_chunks as small_chunks
from _tolerances import FLOAT32_RTOL
from hypothesis import given
from hypothesis import strategies as st

import rlxjax as rx
from benchmarks.startup import compilations
from rlxjax import _chunks
from rlxjax.welch import _device_programs, _host, _launch
from rlxjax.welch._device_programs import CHUNK_ROWS_MULTIPLE, chunk_rows


@each_worker_count
@pytest.mark.parametrize(("n_rows", "rows"), [(0, 3), (1, 3), (3, 3), (4, 3), (100, 7), (100, 1), (5, 100)])
def test_chunks_are_all_rows_once_and_none_is_larger_than_said(workers, n_rows, rows, monkeypatch):
    use_workers(monkeypatch, workers)
    calls = []
    _chunks.for_each_chunk(lambda start, stop: calls.append((start, stop)), n_rows, rows)
    assert sorted(calls) == [(start, min(start + rows, n_rows)) for start in range(0, n_rows, rows)]


def test_as_many_chunks_run_at_a_time_as_there_are_workers(monkeypatch):
    use_workers(monkeypatch, 3)
    together = threading.Barrier(3, timeout=30)
    _chunks.for_each_chunk(lambda start, stop: together.wait(), 9, 1)


def test_several_callers_at_a_time_share_the_threads(monkeypatch):
    use_workers(monkeypatch, 3)
    done = []

    def call():
        _chunks.for_each_chunk(lambda start, stop: (time.sleep(0.001), done.append(start)), 30, 1)

    callers = [threading.Thread(target=call) for _ in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert sorted(done) == sorted(6 * list(range(30)))


def test_there_is_a_processor():
    assert _chunks.worker_count() >= 1


@each_worker_count
@pytest.mark.parametrize("error", [ValueError("row 3"), KeyboardInterrupt()])
def test_what_a_chunk_raises_reaches_the_caller_and_later_chunks_are_left_out(workers, error, monkeypatch):
    use_workers(monkeypatch, workers)
    begun, failed = [], threading.Event()

    def run(start, stop):
        begun.append(start)
        if start == 0:
            failed.set()
            raise error
        failed.wait(30)
        time.sleep(0.02)

    _chunks.for_each_chunk(lambda start, stop: time.sleep(0.01), 300, 1)
    n_threads = threading.active_count()
    with pytest.raises(type(error)) as caught:
        _chunks.for_each_chunk(run, 300, 1)
    assert caught.value is error
    assert len(begun) < 300
    assert threading.active_count() == n_threads, "later calls take the same threads"


@pytest.mark.parametrize("has_x64", [True, False])
@pytest.mark.parametrize("device", [None, "cpu", jax.devices("cpu")[0]], ids=["none", "name", "device"])
def test_the_callers_settings_hold_in_chunks_and_in_the_background(has_x64, device, monkeypatch):
    use_workers(monkeypatch, 2)
    seen = []

    def run(start, stop):
        seen.append((jnp.asarray(np.zeros(1)).dtype, jax.config.jax_default_device))

    with jax.enable_x64(has_x64), jax.default_device(device), _chunks.background() as start:
        _chunks.for_each_chunk(run, 4, 1)
        start(run, 0, 1).result()
        start(_chunks.for_each_chunk, run, 4, 1).result()
        expected = jax.config.jax_default_device
    assert seen == [(np.float64 if has_x64 else np.float32, expected)] * 9


def test_chunks_within_a_chunk_start_no_threads_and_those_in_the_background_do(monkeypatch):
    use_workers(monkeypatch, 2)
    threads = []

    def run(start, stop):
        outer, inner = threading.get_ident(), []
        _chunks.for_each_chunk(lambda *_: inner.append(threading.get_ident()), 4, 1)
        threads.append((outer, inner))

    _chunks.for_each_chunk(run, 4, 1)
    assert len(threads) == 4
    assert all(inner == [outer] * 4 for outer, inner in threads)
    together = threading.Barrier(2, timeout=30)
    with _chunks.background() as start:
        start(_chunks.for_each_chunk, lambda *_: together.wait(), 2, 1).result()


@given(
    st.integers(1, 5000).map(lambda half: 2 * half),
    st.integers(1, 40),
    st.sampled_from(["cpu", "gpu", "tpu"]),
)
def test_a_chunk_is_whole_tiles_and_padding_leaves_it_as_it_is(n_fft, n_segments, platform):
    params = rx.WelchPeakParams(n_fft, n_segments, 1)
    rows = chunk_rows(params, platform)
    samples = _device_programs.CHUNK_SAMPLES.get(platform, _device_programs.CHUNK_SAMPLES["other"])
    fitting = samples / (n_segments * n_fft)
    assert rows % CHUNK_ROWS_MULTIPLE == 0
    assert rx.padded_batch(rows) == rows
    assert rows <= max(fitting, CHUNK_ROWS_MULTIPLE)
    assert rows == CHUNK_ROWS_MULTIPLE or rows > fitting / 1.25 - CHUNK_ROWS_MULTIPLE


@each_worker_count
@pytest.mark.parametrize(("path", "unshared"), [("fused", 2**16), ("learned", 2**16), ("block", 2**17)])
@given(batch=st.integers(0, 10**6), n_fft=st.integers(1, 3000).map(lambda half: 2 * half))
def test_processors_share_rows_equally_from_some_samples_on(path, unshared, workers, batch, n_fft):
    params = rx.WelchPeakParams(n_fft, 2, 1)
    rows = _launch._processor_rows(rx.Path.parse(path), batch, params, workers)
    most = chunk_rows(params, "cpu")
    if batch <= most and batch * 2 * n_fft <= unshared:
        assert rows == batch
        return
    least = unshared // 2 // (2 * n_fft)
    assert rows % CHUNK_ROWS_MULTIPLE == 0
    assert rows == rx.padded_batch(rows)
    assert min(least, most) <= rows <= most
    # A padded size is at most a quarter more, or a tile.
    assert rows <= max(least, batch / workers, 1) * 1.25 + 2 * CHUNK_ROWS_MULTIPLE


@each_path
@each_worker_count
@pytest.mark.parametrize("batch", [ROWS + 1, 5 * ROWS - 3])
def test_peaks_do_not_depend_on_chunks_or_threads(path, workers, batch, monkeypatch, small_chunks):
    signal = noise(batch)
    use_workers(monkeypatch, workers)
    peaks = peaks_of(signal, path)
    rows = [peaks_of(signal[start : start + ROWS], path) for start in range(0, batch, ROWS)]
    np.testing.assert_array_equal(peaks, np.concatenate(rows))


@each_path
@pytest.mark.parametrize("selection", ["maxima", "top_k"])
def test_peaks_beyond_a_chunk_are_those_of_one_chunk(path, selection, small_chunks, monkeypatch):
    signal = noise(4 * ROWS + 5)
    in_chunks = peaks_of(signal, path, selection=selection)
    monkeypatch.undo()
    together = peaks_of(signal, path, selection=selection)
    np.testing.assert_array_equal(in_chunks[..., 0], together[..., 0])
    np.testing.assert_allclose(in_chunks, together, rtol=RTOL_OF_OTHER_CHUNKS[path])


@each_path
def test_the_host_transforms_at_most_a_chunk(path, small_chunks, monkeypatch):
    selected = []
    select = _host.select_peaks
    monkeypatch.setattr(
        _host,
        "select_peaks",
        lambda power, *rest, out: selected.append(len(power)) or select(power, *rest, out),
    )
    peaks_of(noise(2 * ROWS), path)
    if path in ("host", "block"):
        assert sum(selected) == 2 * ROWS
        assert max(selected) == 7
    else:
        assert not selected


def signal_like(kind, batch):
    counts = np.random.default_rng(1).integers(0, 100, (batch, PARAMS.frame_len))
    raw = np.zeros(batch * PARAMS.frame_len * 4 + 1, np.uint8)
    unaligned = raw[1:].view(np.float32).reshape(batch, -1)
    unaligned[:] = noise(batch)
    read_only = noise(batch)
    read_only.flags.writeable = False
    return {
        "strided": noise(2 * batch)[::2, ::-1],
        "column major": np.asfortranarray(noise(batch)),
        "longer rows": np.pad(noise(batch), ((0, 0), (0, 50)), constant_values=99.0),
        "one row many times": np.broadcast_to(noise(1), (batch, PARAMS.frame_len)),
        "read only": read_only,
        "unaligned": unaligned,
        "big endian": noise(batch).astype(">f4"),
        "bool": counts > 50,
        **{name: counts.astype(name) for name in ("int16", "uint8", "float16", "float64")},
    }[kind]


@each_path
@pytest.mark.parametrize(
    "kind",
    ["strided", "column major", "longer rows", "one row many times", "read only", "unaligned", "big endian"]
    + ["bool", "int16", "uint8", "float16", "float64"],
)
def test_any_real_signal_beyond_a_chunk_counts_as_its_float32_prefix(path, kind, small_chunks):
    signal = signal_like(kind, 2 * ROWS + 3)
    before = signal.copy()
    plain = np.ascontiguousarray(signal[:, : PARAMS.frame_len], np.float32)
    peaks = peaks_of(signal, path)
    assert isinstance(peaks, np.ndarray)
    np.testing.assert_array_equal(peaks, peaks_of(plain, path))
    np.testing.assert_array_equal(signal, before)


@each_path
@pytest.mark.parametrize("batch", [0, 1, ROWS - 3, ROWS, ROWS + 1, 5 * ROWS + 3])
def test_peaks_of_a_numpy_signal_are_the_callers_own_to_write_to(path, batch, small_chunks):
    signal = noise(batch)
    for given_signal in (signal, signal.astype(np.float64)):
        peaks = peaks_of(given_signal, path)
        assert peaks.flags.writeable
        expected = peaks.copy()
        peaks[..., 0] *= 0.5
        np.testing.assert_array_equal(peaks_of(given_signal, path), expected)


@each_path
def test_a_jax_signal_beyond_a_chunk_has_jax_peaks(path, small_chunks):
    signal = noise(2 * ROWS + 3)
    peaks = peaks_of(jnp.asarray(signal), path)
    assert isinstance(peaks, jax.Array)
    np.testing.assert_array_equal(peaks, peaks_of(signal, path))


@each_path
@pytest.mark.parametrize("has_x64", [True, False])
def test_peaks_beyond_a_chunk_are_float32_in_either_precision_mode(path, has_x64, small_chunks):
    signal = noise(2 * ROWS + 3).astype(np.float64)
    with jax.enable_x64(has_x64), jax.default_device(jax.devices()[0]):
        peaks = peaks_of(signal, path)
    assert peaks.dtype == np.float32
    np.testing.assert_array_equal(peaks, peaks_of(signal, path))


@each_path
def test_a_constant_signal_beyond_a_chunk_inside_jit_has_its_peaks(path, small_chunks):
    for signal in (noise(2 * ROWS + 3), jnp.asarray(noise(2 * ROWS + 3))):
        inside = jax.jit(lambda scale, signal=signal: scale * peaks_of(signal, path))(1.0)
        np.testing.assert_allclose(inside, peaks_of(signal, path), rtol=FLOAT32_RTOL)


@each_device_path
def test_an_error_in_a_chunk_reaches_the_caller(path, small_chunks, monkeypatch):
    def fail(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(_launch, "program", lambda function, platform: fail)
    with pytest.raises(MemoryError, match="no room"):
        peaks_of(noise(2 * ROWS), path)


@each_device_path
@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])
def test_a_chunk_runs_the_programs_that_small_batches_have_compiled(path, as_array, small_chunks):
    params = rx.WelchPeakParams(16, 3, k=7)
    signal = as_array(noise(9 * ROWS + 5))
    for batch in (ROWS, 5):
        peaks_of(signal[:batch], path, params)
    compilations.clear()
    peaks_of(signal, path, params)
    assert not compilations


@pytest.mark.skipif(
    _chunks.execution_stream_id is contextlib.nullcontext, reason="this JAX has no streams on a CPU"
)
def test_programs_that_a_thread_launches_into_streams_run_side_by_side():
    x = jnp.ones(100_000)  # what is cheap runs before its launch returns
    steps = jax.jit(lambda count: jax.lax.fori_loop(0, count, lambda i, x: jnp.sin(x + i), x))
    jax.block_until_ready(steps(1))
    with _chunks.in_stream(0):
        long = steps(1000)
    with _chunks.in_stream(1):
        short = steps(1)
    jax.block_until_ready(short)
    assert not long.is_ready(), "the short one did not wait for the long one"
    jax.block_until_ready(long)


@pytest.mark.parametrize("n_streams", [1, 3])
@pytest.mark.parametrize("batch", [0, 1, 4 * ROWS, 20 * ROWS - 1])
def test_chunks_are_launched_in_order_into_streams_in_turn_and_so_many_are_under_way(
    n_streams, batch, monkeypatch
):
    streams, launched = [], []
    monkeypatch.setattr(_launch, "in_stream", lambda number: contextlib.nullcontext(streams.append(number)))
    found = _launch._in_flight(
        lambda start: launched.append(start) or min(ROWS, batch - start), batch, ROWS, n_streams
    )
    for place, (start, rows) in enumerate(found):
        assert start == place * ROWS
        assert rows == min(ROWS, batch - start)
        assert len(launched) - place <= _launch.PROGRAMS_IN_FLIGHT * n_streams
    assert len(launched) == -(-batch // ROWS)
    assert streams == ([number % n_streams for number in range(len(launched))] if n_streams > 1 else [])


@each_device_path
def test_a_platform_without_threads_runs_chunks_in_flight(path, small_chunks, monkeypatch):
    signal = noise(3 * ROWS + 7)
    expected = peaks_of(signal, path)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_launch, "for_each_chunk", None)
    np.testing.assert_array_equal(peaks_of(signal, path)[..., 0], expected[..., 0])
    np.testing.assert_allclose(peaks_of(signal, path), expected, rtol=FLOAT32_RTOL)
    on_cpu = peaks_of(jnp.asarray(signal), path)
    assert isinstance(on_cpu, jax.Array)
    np.testing.assert_allclose(on_cpu, expected, rtol=FLOAT32_RTOL)
    monkeypatch.setattr(_launch, "_is_on_cpu", lambda signal: False)
    on_device = peaks_of(jnp.asarray(signal), path)
    assert isinstance(on_device, jax.Array)
    np.testing.assert_allclose(on_device, expected, rtol=FLOAT32_RTOL)
