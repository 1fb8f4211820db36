"""Programs that go through pieces, lines of memory that they are handed, and traced rows."""

import mmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _chunked import (
    MODEL,
    PARAMS,
    ROWS,
    each_device_path,
    each_worker_count,
    line_of,
    noise,
    peaks_of,
    placed,
    use_chunks_of,
    use_workers,
)
from _chunked import launched as launched
from _chunked import small_chunks as small_chunks
from _tolerances import FLOAT32_RTOL
from hypothesis import given
from hypothesis import strategies as st

import rlxjax as rx
from benchmarks.startup import compilations
from rlxjax.welch import _device_programs, _launch, aligned_zeros
from rlxjax.welch._device_programs import CHUNK_ROWS_MULTIPLE, chunk_rows, fused_peaks, piece_rows
from rlxjax.welch._rows import LINE_MARGIN, Line, Rows, rows_of


@given(batch=st.integers(0, 10**6), n_fft=st.integers(1, 3000).map(lambda half: 2 * half))
def test_a_piece_is_all_rows_or_whole_tiles_of_so_many_samples(batch, n_fft):
    params = rx.WelchPeakParams(n_fft, 2, 1)
    rows = piece_rows(batch, params, "cpu")
    fitting = _device_programs.PIECE_SAMPLES / (2 * n_fft)
    if batch <= fitting:
        assert rows == batch
        return
    assert rows % CHUNK_ROWS_MULTIPLE == 0
    assert fitting / 2 - CHUNK_ROWS_MULTIPLE < rows <= max(fitting, CHUNK_ROWS_MULTIPLE)


@pytest.mark.parametrize("n_fft", [64, 250, 256, 1000, 1024, 4096])
def test_pieces_leave_no_rows_of_a_chunk_or_of_a_processors_share(n_fft):
    params = rx.WelchPeakParams(n_fft, 2, 1)
    chunk = chunk_rows(params, "cpu")
    assert chunk % piece_rows(chunk, params, "cpu") == 0
    for rows in range(CHUNK_ROWS_MULTIPLE, chunk, CHUNK_ROWS_MULTIPLE):
        padded = _launch._processor_rows(rx.Path.FUSED, 2 * rows, params, 2)
        assert padded % piece_rows(padded, params, "cpu") == 0


@each_worker_count
@given(batch=st.integers(0, 10**6), n_fft=st.sampled_from([64, 250, 1024, 4096]))
def test_a_program_goes_through_as_many_chunks_as_leave_all_processors_equally_many(workers, batch, n_fft):
    params = rx.WelchPeakParams(n_fft, 2, 1)
    chunk = _launch._processor_rows(rx.Path.FUSED, batch, params, workers)
    rows = _launch._program_rows(chunk, batch, params, workers)
    if batch <= chunk:
        assert rows == chunk
        return
    times, rest = divmod(rows, chunk)
    assert rest == 0
    assert times == 1 or rows * 2 * n_fft <= _launch.PROGRAM_SAMPLES
    n_chunks = -(-batch // chunk)
    assert n_chunks % times == 0
    assert times == 1 or n_chunks // times % workers == 0
    can_double = n_chunks % (2 * times * workers) == 0
    assert not can_double or 2 * rows * 2 * n_fft > _launch.PROGRAM_SAMPLES
    assert rx.padded_batch(rows) == rows


@pytest.mark.parametrize("selection", ["maxima", "top_k"])
@pytest.mark.parametrize("batch", [4 * ROWS, 5 * ROWS])
def test_a_program_in_pieces_has_the_peaks_of_one_that_is_none(selection, batch, monkeypatch):
    params, signal = rx.WelchPeakParams(64, 3, k=5), noise(batch, rx.WelchPeakParams(64, 3, k=5))
    whole = jax.jit(lambda signal: fused_peaks(signal, params, selection))(signal)
    monkeypatch.setattr(_device_programs, "PIECE_SAMPLES", 2 * ROWS * 3 * 64)
    found = jax.jit(lambda signal: fused_peaks(signal, params, selection))(signal)
    np.testing.assert_array_equal(found[..., 0], whole[..., 0])
    np.testing.assert_allclose(found, whole, rtol=FLOAT32_RTOL)


@pytest.mark.parametrize("selection", ["maxima", "top_k"])
@pytest.mark.parametrize(("n_fft", "batch"), [(64, 4 * ROWS), (64, 5 * ROWS), (512, 9 * ROWS)])
def test_a_line_in_pieces_has_the_peaks_of_its_rows(selection, n_fft, batch, monkeypatch):
    params = rx.WelchPeakParams.fast(n_fft, 5)
    signal = noise(batch, params)
    whole = jax.jit(lambda signal: fused_peaks(signal, params, selection, "cpu"))(signal)
    monkeypatch.setattr(_device_programs, "PIECE_SAMPLES", 2 * ROWS * 2 * n_fft)
    of_line = jax.jit(lambda line: fused_peaks(line, params, selection, "cpu"))
    for first in (0, 1, LINE_MARGIN - 1):
        found = of_line(line_of(signal, first))
        np.testing.assert_array_equal(found[..., 0], whole[..., 0])
        np.testing.assert_allclose(found, whole, rtol=FLOAT32_RTOL)


def test_all_pieces_of_a_program_take_their_transforms_apart_as_the_program_does():
    params, batch = rx.WelchPeakParams.fast(552, 4), 168
    rows = piece_rows(batch, params, "cpu")
    assert rows < batch
    assert _device_programs.transform_radix(rows, params, "cpu") == 1, "a piece alone would not be"
    assert _device_programs.transform_radix(batch, params, "cpu") == 4
    run = jax.make_jaxpr(lambda signal: fused_peaks(signal, params, "top_k", "cpu"))
    text = str(run(noise(batch, params)))
    assert "fft_lengths=(138,)" in text
    assert "fft_lengths=(552,)" not in text


def test_a_program_is_traced_for_its_platform():
    params, signal = rx.WelchPeakParams.fast(1024, 4), noise(128, rx.WelchPeakParams.fast(1024, 4))
    is_loop = {}
    for platform in ("cpu", "gpu"):
        lowered = _launch.program(fused_peaks, platform).lower(signal, params, "top_k", platform)
        is_loop[platform] = "stablehlo.while" in lowered.as_text()
    assert is_loop == {"cpu": True, "gpu": False}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("selection", ["maxima", "top_k"])
def test_a_large_signal_is_used_where_it_is_by_programs_of_many_chunks_in_pieces(
    workers, selection, monkeypatch, launched
):
    tile_samples = ROWS * PARAMS.n_segments * PARAMS.n_fft
    use_workers(monkeypatch, workers)
    use_chunks_of(monkeypatch, 2 * tile_samples)
    monkeypatch.setattr(_launch, "PROGRAM_SAMPLES", 8 * tile_samples)
    monkeypatch.setattr(_device_programs, "PIECE_SAMPLES", tile_samples)
    jax.clear_caches()  # programs of these shapes may have been traced with other pieces
    signal = noise(8 * workers * ROWS)
    monkeypatch.setattr(_launch, "LEAST_IN_PLACE_BYTES", signal.nbytes)
    peaks = peaks_of(placed(signal, 4), "fused", selection=selection)
    assert launched == workers * [((8 * ROWS, PARAMS.frame_len), Line)]
    monkeypatch.undo()
    jax.clear_caches()
    expected = peaks_of(signal, "fused", selection=selection)
    np.testing.assert_array_equal(peaks[..., 0], expected[..., 0])
    np.testing.assert_allclose(peaks, expected, rtol=FLOAT32_RTOL)


@pytest.mark.parametrize("rest", [0, 5])
def test_a_program_writes_out_no_copy_of_a_line(rest):
    params = rx.WelchPeakParams.fast(256, 4)
    batch = 128 * piece_rows(2**20, params, "cpu") + rest
    samples = jax.ShapeDtypeStruct((LINE_MARGIN + batch * params.frame_len,), np.float32)
    line = Line(samples, np.int32(4), params.frame_len)  # pyright: ignore[reportArgumentType]
    compiled = _launch.program(fused_peaks, "cpu").lower(line, params, "top_k", "cpu").compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * samples.size / 4


@given(
    first=st.integers(0, LINE_MARGIN - 1),
    length=st.integers(2 * LINE_MARGIN, 70),
    columns=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    start=st.integers(0, 5),
    is_traced=st.booleans(),
)
def test_columns_of_a_line_are_those_of_its_rows(first, length, columns, start, is_traced):
    signal = np.arange(6 * length, dtype=np.float32).reshape(6, length)
    begin, end = sorted(min(place, length) for place in columns)
    line = line_of(signal, first)
    assert line.shape == signal.shape
    assert rows_of(line).count == 6
    some = Rows(line, 6 - start, jnp.asarray(start) if is_traced else start)
    np.testing.assert_array_equal(some.columns(begin, end), signal[start:, begin:end])


@each_device_path
@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])
def test_a_program_is_given_at_most_a_chunk_of_the_samples_that_count(path, as_array, small_chunks, launched):
    signal = np.pad(noise(7 * ROWS + 5).astype(np.float64), ((0, 0), (0, 300)))
    peaks_of(as_array(signal), path)
    assert len(launched) == 8
    assert sorted(launched)[1:] == [((ROWS, PARAMS.frame_len), np.float32)] * 7
    assert sorted(launched)[0] == ((rx.padded_batch(5), PARAMS.frame_len), np.float32)


@pytest.mark.parametrize(("n_fft", "n_segments"), [(250, 3), (1000, 1), (48, 5)])
def test_a_full_chunk_is_not_padded(n_fft, n_segments, launched, monkeypatch):
    use_chunks_of(monkeypatch, 2**16)
    params = rx.WelchPeakParams(n_fft, n_segments, 2)
    rows = chunk_rows(params, "cpu")
    rx.welch_peaks(noise(2 * rows, params), params, "fused", selection="top_k")
    assert [shape for shape, _ in launched] == [(rows, params.frame_len)] * 2


@each_device_path
@pytest.mark.parametrize("n_rows", [4 * ROWS, 4 * ROWS + 5])
@pytest.mark.parametrize("first", [0, 4, 7])
def test_large_signals_are_used_where_they_are_and_what_is_around_them_is_not(
    path, n_rows, first, small_chunks, launched, monkeypatch
):
    signal = noise(n_rows)
    large = placed(signal, first)
    expected = peaks_of(aligned(signal), path)
    launched.clear()
    monkeypatch.setattr(_launch, "LEAST_IN_PLACE_BYTES", large.nbytes)
    np.testing.assert_array_equal(peaks_of(large, path), expected)
    in_chunks = [ROWS] * 4 + [5] * (n_rows > 4 * ROWS)
    assert launched == [((rows, PARAMS.frame_len), Line) for rows in in_chunks]
    monkeypatch.setattr(_launch, "LEAST_IN_PLACE_BYTES", large.nbytes + 1)
    launched.clear()
    np.testing.assert_array_equal(peaks_of(large, path), expected)
    assert Line not in [kind for _, kind in launched]


def aligned(signal):
    """Return the same rows where a device can use them."""
    rows = aligned_zeros(signal.shape)
    rows[:] = signal
    return rows


def rows_elsewhere(signal):
    """Yield the same rows at addresses of all kinds, and as arrays that no device uses where they are."""
    for first in range(LINE_MARGIN):
        yield placed(signal, first)
    n_bytes = -(-signal.nbytes // _launch.PAGE_BYTES) * _launch.PAGE_BYTES
    for start in (0, n_bytes + _launch.PAGE_BYTES - signal.nbytes, 2):
        pages = mmap.mmap(-1, n_bytes + _launch.PAGE_BYTES)  # what follows the last one need not be memory
        rows = np.frombuffer(pages, np.float32, signal.size, start).reshape(signal.shape)
        rows[:] = signal
        yield rows
    yield signal.astype(np.float64)
    yield np.asfortranarray(signal)
    yield np.pad(signal, ((0, 0), (0, 3)), constant_values=np.nan)
    yield np.asarray(jnp.asarray(signal))


@each_device_path
def test_a_large_signal_elsewhere_in_memory_compiles_nothing(path, monkeypatch, launched):
    params, model = rx.WelchPeakParams.fast(64, 4), rx.LearnedFft.exact(64)
    signal = noise(4 * ROWS, params)
    assert signal.nbytes % _launch.PAGE_BYTES == 0, "so that rows end with a page"
    use_chunks_of(monkeypatch, ROWS * 2 * 64)
    monkeypatch.setattr(_launch, "LEAST_IN_PLACE_BYTES", signal.nbytes)
    expected = rx.welch_peaks(placed(signal, 4), params, path, model=model, selection="top_k")
    elsewhere = list(rows_elsewhere(signal))
    compilations.clear()
    for rows in elsewhere:
        found = rx.welch_peaks(rows, params, path, model=model, selection="top_k")
        np.testing.assert_array_equal(found, expected)
    assert not compilations
    assert {kind for _, kind in launched} == {Line}


def test_a_line_is_its_signals_memory_and_leaves_no_page_that_the_signal_is_on():
    params = rx.WelchPeakParams.fast(64, 4)
    batch = _launch.LEAST_IN_PLACE_BYTES // (4 * params.frame_len) + ROWS
    raw = np.zeros(batch * params.frame_len + _launch.PAGE_BYTES, np.float32)
    has_margin = set()
    for start in range(_launch.PAGE_BYTES // 4):
        signal = raw[start : start + batch * params.frame_len].reshape(batch, -1)
        line = _launch._line_of(signal, params, ROWS)
        assert line is not None
        assert isinstance(line.samples, np.ndarray)
        address, end = line.samples.ctypes.data, line.samples.ctypes.data + line.samples.nbytes
        assert address % _launch.ALIGNMENT_BYTES == 0
        assert address + 4 * int(line.first) == signal.ctypes.data
        last_byte = signal.ctypes.data + signal.nbytes - 1
        assert end > last_byte
        assert (end - 1) // _launch.PAGE_BYTES == last_byte // _launch.PAGE_BYTES
        has_margin.add(line.samples.size == LINE_MARGIN + signal.size)
        part = _launch._part_of(line, signal, 0, batch - 1)
        assert np.shares_memory(part.samples, signal)
        last = _launch._part_of(line, signal, batch - 1, batch)
        assert np.shares_memory(last.samples, signal) == (line.samples.size == LINE_MARGIN + signal.size)
    assert has_margin == {True, False}


@pytest.mark.parametrize("selection", ["maxima", "top_k"])
@pytest.mark.parametrize("batch", [2 * ROWS + 5])
def test_traced_rows_beyond_a_piece_have_the_peaks_and_gradient_of_one_piece(
    selection, batch, small_chunks, monkeypatch
):
    signal = jnp.asarray(noise(batch))

    def run(signal):
        def total(signal):
            peaks = fused_peaks(signal, PARAMS, selection)
            return jnp.sum(jnp.sin(peaks[..., 1])), peaks

        return jax.grad(total, has_aux=True)(signal)

    gradient, peaks = jax.jit(run)(signal)
    jaxpr = str(jax.make_jaxpr(run)(signal))
    assert "scan" in jaxpr
    monkeypatch.undo()
    whole_gradient, whole = jax.jit(lambda signal: run(signal))(signal)
    np.testing.assert_array_equal(peaks[..., 0], whole[..., 0])
    np.testing.assert_allclose(peaks[..., 1], whole[..., 1], rtol=FLOAT32_RTOL)
    scale = np.abs(whole_gradient).max()
    np.testing.assert_allclose(gradient, whole_gradient, rtol=0, atol=10 * FLOAT32_RTOL * scale)


def traced_peaks_of(signal, path):
    """Return the peaks by what runs in traced code, whatever earlier calls have traced."""
    if path == "fused":
        return fused_peaks(signal, PARAMS, "top_k")
    return _launch._learned_in_pieces(signal, _launch.program_of(MODEL, PARAMS), PARAMS, "top_k", "cpu")


@pytest.mark.parametrize("path", ["fused", "learned"])
@pytest.mark.parametrize("batch", [3 * ROWS, 2 * ROWS + 5])
def test_traced_rows_beyond_a_piece_have_in_vmap_the_peaks_and_gradient_of_one_piece(
    path, batch, small_chunks, monkeypatch
):
    signals = jnp.stack([jnp.asarray(noise(batch, seed=seed)) for seed in range(2)])

    def run(signal):
        def total(signal):
            peaks = traced_peaks_of(signal, path)
            return jnp.sum(jnp.sin(peaks[..., 1])), peaks

        return jax.grad(total, has_aux=True)(signal)

    gradients, peaks = jax.jit(jax.vmap(run))(signals)
    monkeypatch.undo()
    whole_run = jax.jit(lambda signal: run(signal))
    for signal, gradient, found in zip(signals, gradients, peaks, strict=True):
        whole_gradient, whole = whole_run(signal)
        np.testing.assert_array_equal(found[..., 0], whole[..., 0])
        np.testing.assert_allclose(found[..., 1], whole[..., 1], rtol=FLOAT32_RTOL)
        scale = np.abs(whole_gradient).max()
        np.testing.assert_allclose(gradient, whole_gradient, rtol=0, atol=10 * FLOAT32_RTOL * scale)


@pytest.mark.parametrize("path", ["fused", "learned"])
def test_traced_code_writes_out_no_copy_of_the_signal(path):
    params, model = rx.WelchPeakParams.fast(256, 4), rx.LearnedFft.exact(256)
    piece = piece_rows(2**20, params, jax.default_backend())

    def peaks(signal):
        return rx.welch_peaks(signal, params, path, model=model, selection="top_k")

    def temporary_bytes(run, batch):
        signal = jax.ShapeDtypeStruct((batch, params.frame_len), np.float32)
        return jax.jit(run).lower(signal).compile().memory_analysis().temp_size_in_bytes

    signal_bytes = 128 * piece * params.frame_len * 4
    whole, with_rest = (temporary_bytes(peaks, 128 * piece + rest) for rest in (0, 5))
    assert max(whole, with_rest) < signal_bytes / 4
    gradient = jax.grad(lambda signal: peaks(signal)[..., 1].sum())
    whole, with_rest = (temporary_bytes(gradient, 128 * piece + rest) for rest in (0, 5))
    assert with_rest < whole + signal_bytes / 4
