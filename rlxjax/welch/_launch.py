"""How the paths run: programs, padding, and batches beyond a chunk."""

import contextlib
import functools
import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import as_index
from rlxjax._chunks import for_each_chunk, in_stream, rows_of_a_processor, worker_count

from ._device_programs import (
    CHUNK_ROWS_MULTIPLE,
    chunk_rows,
    fused_peaks,
    in_pieces,
    padding_step,
    segment_spectra,
)
from ._host import host_peaks, spectrum_peaks
from ._models import ModelProgram, program_of
from ._params import WelchPeakParams
from ._rows import LINE_MARGIN, Line, Rows
from ._selection import default_selection
from ._strategy import Path

#: Host buffers start at a multiple of this, so that a CPU device can use them where they are.
ALIGNMENT_BYTES = 64
#: Least bytes of a signal that a CPU device uses where it is.
LEAST_IN_PLACE_BYTES = 2**22
#: The least size of a page of memory.
PAGE_BYTES = 2**12
#: Most samples of which a CPU's processors take no share each; a share is at least half of that. Another
#: program costs tens of microseconds, a thread for NumPy's part of the block path some hundreds.
MOST_UNSHARED_SAMPLES, MOST_UNSHARED_SAMPLES_OF_BLOCK = 2**16, 2**17
#: Most samples of the chunks that one program of the fused path on a CPU goes through: launching another one
#: takes tens of microseconds from a processor.
PROGRAM_SAMPLES = 2**21
#: Programs under way at a time, for each processor of a CPU: one computes while the next one waits, or is
#: sent. Of rows that a device cannot use where they are, so many programs' are copied at a time.
PROGRAMS_IN_FLIGHT = 2

#: A program on a CPU runs on one thread, and rows are shared among processors here: where programs share out
#: their loops themselves, threads wait for one another at the end of each.
_ON_ONE_THREAD = {
    "xla_cpu_multi_thread_eigen": False,  # the Fourier transform
    "xla_disable_hlo_passes": "cpu-parallel-task-assigner",  # all other loops
}


#: What shapes the programs of the paths, among their arguments.
_STATIC = ("params", "selection", "platform")


def padded_batch(batch: int) -> int:
    """Return the number of rows that a device program runs for a batch: four sizes an octave.

    Examples:
        >>> [padded_batch(batch) for batch in (0, 3, 9, 33, 8192)]
        [0, 3, 10, 40, 8192]
    """
    batch = as_index(batch, "batch")
    step = padding_step(batch)
    return -(-batch // step) * step


def aligned_zeros(shape: tuple[int, ...]) -> np.ndarray:
    """Return a float32 array of zeros whose first element is aligned for a CPU device."""
    count = int(np.prod(shape))
    raw = np.zeros(count * 4 + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + count * 4].view(np.float32).reshape(shape)


@functools.cache
def program(function: Callable, platform: str) -> Callable:
    """Return the program of a path on a platform: of an array of rows, or of a line."""
    names = inspect.signature(function).parameters
    static = [name for name in _STATIC if name in names]
    return jax.jit(function, static_argnames=static, compiler_options=compiler_options(platform))


def compiler_options(platform: str) -> dict[str, Any] | None:
    """Return what programs of the paths are compiled with."""
    return _ON_ONE_THREAD if platform == "cpu" else None


def run_path(
    path: Path,
    signal: np.ndarray | jax.Array,
    params: WelchPeakParams,
    model: object,
    selection: str | None,
) -> np.ndarray | jax.Array:
    """Return the peaks of concrete rows by a path, `[batch, k, 2]`, where the path leaves them."""
    if path is Path.HOST:
        return host_peaks(np.asarray(signal), params)
    platform, batch = jax.default_backend(), signal.shape[0]
    n_streams = worker_count() if platform == "cpu" else 1
    default, rows = _plan(path, batch, params, platform, n_streams)
    launch, finish = _LAUNCH[path](params, model, selection or default, platform)
    if isinstance(signal, jax.Array) and _is_on_cpu(signal):
        signal = np.asarray(signal)
    line = _line_of(signal, params, rows) if platform == "cpu" else None

    def launch_from(start: int) -> Any:
        stop = min(start + rows, batch)
        if line is not None and padded_batch(stop - start) == stop - start:
            assert isinstance(signal, np.ndarray)
            return launch(_part_of(line, signal, start, stop))
        return launch(_padded(signal if stop - start == batch else signal[start:stop], params))

    if batch <= rows:
        peaks = finish(launch_from(0))
        return _first_rows(peaks if isinstance(signal, jax.Array) else np.asarray(peaks), batch)
    found = _in_flight(launch_from, batch, rows, n_streams)
    if isinstance(signal, jax.Array) and path is not Path.BLOCK:
        return jnp.concatenate([jax.block_until_ready(_first_rows(each, batch - start)) for start, each in found])
    peaks = np.empty((batch, params.k, 2), np.float32)
    if platform == "cpu" and path is Path.BLOCK:
        _finish_on_threads(found, finish, peaks, rows)
    else:
        for start, each in found:
            peaks[start : start + rows] = np.asarray(finish(each))[: batch - start]
    return peaks


def _in_flight(launch_from: Callable[[int], Any], batch: int, rows: int, n_streams: int) -> Iterator[tuple[int, Any]]:
    """Yield the first row of each program and what was launched for it, the next ones under way meanwhile."""
    under_way = deque()
    for number, start in enumerate(range(0, batch, rows)):
        with in_stream(number % n_streams) if n_streams > 1 else contextlib.nullcontext():
            under_way.append((start, launch_from(start)))
        if len(under_way) == PROGRAMS_IN_FLIGHT * n_streams:
            yield under_way.popleft()
    yield from under_way


def _finish_on_threads(
    found: Iterator[tuple[int, Any]], finish: Callable[[Any], Any], peaks: np.ndarray, rows: int
) -> None:
    """Write the peaks of chunks: NumPy's work on what each brings back is shared among threads."""
    lock = threading.Lock()

    def run(*_: int) -> None:
        with lock:
            start, each = next(found, (None, None))
        if start is not None:  # else another thread's launch has failed
            peaks[start : start + rows] = finish(each)[: len(peaks) - start]

    for_each_chunk(run, len(peaks), rows)


@functools.lru_cache(maxsize=4096)
def _plan(path: Path, batch: int, params: WelchPeakParams, platform: str, n_processors: int) -> tuple[str, int]:
    """Return the selection of a batch where none is asked for, and the rows of a program.

    Remembered: what is computed before the first program starts is computed while all processors wait.
    """
    selection = default_selection(padded_batch(batch), params.n_bins, platform)
    if platform != "cpu":
        return selection, chunk_rows(params, platform)
    rows = _processor_rows(path, batch, params, n_processors)
    return selection, _program_rows(rows, batch, params, n_processors) if path is Path.FUSED else rows


def _processor_rows(path: Path, batch: int, params: WelchPeakParams, n_processors: int) -> int:
    """Return the rows that a processor runs at a time: its share, but neither too few nor more than a chunk.

    They are a size that padding leaves as it is.
    """
    row_samples = params.n_segments * params.n_fft
    unshared = MOST_UNSHARED_SAMPLES_OF_BLOCK if path is Path.BLOCK else MOST_UNSHARED_SAMPLES
    most = chunk_rows(params, "cpu")
    if batch <= min(most, unshared // row_samples):
        return batch
    least = max(CHUNK_ROWS_MULTIPLE, unshared // 2 // row_samples)
    rows = rows_of_a_processor(batch, least, most, n_processors)
    step = max(CHUNK_ROWS_MULTIPLE, padding_step(rows))
    return min(-(-rows // step) * step, most)


def _program_rows(rows: int, batch: int, params: WelchPeakParams, n_processors: int) -> int:
    """Return the rows of 1, 2, 4, ... chunks: as many as leave all processors equally many programs.

    Examples:
        >>> params = WelchPeakParams.fast(1024, 16)
        >>> [_program_rows(256, batch, params, n_processors=2) for batch in (512, 1024, 1536, 8192)]
        [256, 512, 256, 1024]
    """
    n_chunks, most = -(-batch // max(rows, 1)), PROGRAM_SAMPLES // (params.n_segments * params.n_fft)
    while n_chunks % (2 * n_processors) == 0 and 0 < 2 * rows <= most:
        rows, n_chunks = 2 * rows, n_chunks // 2
    return rows


def run_traced(path: Path, signal, params: WelchPeakParams, model: object, selection: str | None) -> jax.Array:
    """Return the peaks of traced rows; fused and learned only."""
    platform = jax.default_backend()
    if path is Path.FUSED:
        return _traced_fused(signal, params, selection, platform)
    assert model is not None
    return _traced_learned(signal, program_of(model, params), params, selection, platform)


def _learned_in_pieces(
    signal, arrays: ModelProgram, params: WelchPeakParams, selection: str | None, platform: str
) -> jax.Array:
    """Return the peaks that a learned FFT finds in any number of rows, whose samples it takes by indices."""
    selection = selection or default_selection(signal.shape[0], params.n_bins, platform)

    def peaks_of(rows: Rows) -> jax.Array:
        return arrays.peaks(rows.columns(0, params.frame_len), params, selection)

    return in_pieces(peaks_of, signal, params, platform)


#: What traced code runs. In a caller's `grad` or `vmap` alone each is a program, compiled once for its
#: shapes; in his own `jit` it is part of his program, compiled as he says.
_traced_fused, _traced_learned = (
    jax.jit(function, static_argnames=_STATIC, inline=True) for function in (fused_peaks, _learned_in_pieces)
)


def _model_peaks(rows: Any, arrays: ModelProgram, params: WelchPeakParams, selection: str | None = None) -> jax.Array:
    return arrays.peaks(rows, params, selection)


#: What launches the program of padded rows, and what makes their peaks of what it brings.
Launch = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def _launch_fused(params: WelchPeakParams, model: object, selection: str, platform: str) -> Launch:
    run = program(fused_peaks, platform)
    return lambda rows: run(rows, params, selection, platform), lambda peaks: peaks


def _launch_block(params: WelchPeakParams, model: object, selection: str, platform: str) -> Launch:
    run = program(segment_spectra, platform)
    return lambda rows: run(rows, params), lambda spectra: spectrum_peaks(np.asarray(spectra), params)


def _launch_learned(params: WelchPeakParams, model: object, selection: str, platform: str) -> Launch:
    run, arrays = program(_model_peaks, platform), program_of(model, params)
    return lambda rows: run(rows, arrays, params, selection), lambda peaks: peaks


_LAUNCH: dict[Path, Callable[..., Launch]] = {
    Path.FUSED: _launch_fused,
    Path.BLOCK: _launch_block,
    Path.LEARNED: _launch_learned,
}


def _first_rows(peaks, batch: int):
    """Return the rows that were asked for."""
    return peaks if peaks.shape[0] <= batch else peaks[:batch]


def _padded(signal, params: WelchPeakParams):
    """Return `[padded_batch, frame_len]` float32, where the signal lives."""
    batch, rows = signal.shape[0], padded_batch(signal.shape[0])
    if isinstance(signal, jax.Array):
        prefix = signal[:, : params.frame_len].astype(jnp.float32)
        return prefix if rows == batch else jnp.pad(prefix, ((0, rows - batch), (0, 0)))
    if rows == batch and signal.dtype == np.float32 and signal.shape[1] == params.frame_len:
        return signal
    buffer = aligned_zeros((rows, params.frame_len))
    buffer[:batch] = signal[:, : params.frame_len]
    return buffer


def _line_of(signal: np.ndarray | jax.Array, params: WelchPeakParams, rows: int) -> Line | None:
    """Return the line of a large signal, as far as a device can use it where it is; None of a small one.

    Which it is follows from the shape: programs of lines are others, and an address is to compile none.
    """
    batch, length = signal.shape[0], params.frame_len
    is_large = 4 * batch * length >= LEAST_IN_PLACE_BYTES and length >= 2 * LINE_MARGIN
    if not isinstance(signal, np.ndarray) or not is_large or 4 * rows * length % ALIGNMENT_BYTES:
        return None
    is_dense = signal.flags.c_contiguous and signal.flags.aligned and signal.shape[1] == length
    if signal.dtype != np.float32 or not is_dense:
        return Line(np.zeros(0, np.float32), np.int32(0), length)
    address = signal.__array_interface__["data"][0]
    first = address % ALIGNMENT_BYTES // 4
    start, end = address - 4 * first, address + signal.nbytes
    # A page is memory as a whole: so is what is before the signal, and what is behind it on its last one.
    end_of_line = start + 4 * LINE_MARGIN + signal.nbytes
    size = (end_of_line if (end_of_line - 1) // PAGE_BYTES == (end - 1) // PAGE_BYTES else end) - start
    return Line(np.asarray(_Memory(signal, start, size // 4)), np.int32(first), length)


def _part_of(line: Line, signal: np.ndarray, start: int, stop: int) -> Line:
    """Return the line of some rows; a copy of those whose own, or whose margin, is left out."""
    samples = line.samples[start * line.length : stop * line.length + LINE_MARGIN]
    n_samples = (stop - start) * line.length
    if len(samples) == n_samples + LINE_MARGIN:
        return Line(samples, line.first, line.length)
    samples = aligned_zeros((n_samples + LINE_MARGIN,))
    samples[:n_samples].reshape(-1, line.length)[:] = signal[start:stop, : line.length]
    return Line(samples, np.int32(0), line.length)


class _Memory:
    """Floats from an address on, around an array that is kept; NumPy reads the interface."""

    def __init__(self, owner: np.ndarray, address: int, size: int):
        self.owner = owner
        is_read_only = True
        self.__array_interface__ = {
            "version": 3,
            "data": (address, is_read_only),
            "shape": (size,),
            "typestr": owner.dtype.str,
        }


def _is_on_cpu(signal: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in signal.devices())
