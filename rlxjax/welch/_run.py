"""`welch_peaks`: checks what comes in, chooses what runs, and gives back what was asked."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import numpy as np
from jax.sharding import NamedSharding

from rlxjax._checks import as_index, is_traced
from rlxjax._chunks import background, is_forked

from ._choice import Call, choice, question
from ._launch import compiled, row_axes, run_program, run_sharded, run_traced, run_variant, split_rows
from ._workload import WelchPeakParams
from .costs import AUTO

if TYPE_CHECKING:
    from rlxjax.calibration import Calibration
    from rlxjax.choices import Choice


def welch_peaks(
    signal: np.ndarray | jax.Array,
    params: WelchPeakParams,
    strategy: str = AUTO,
    *,
    calibration: "Calibration | str | None" = None,
    model: Any = None,
    measure: str | None = None,
) -> np.ndarray | jax.Array:
    """Return the k strongest bins of each row's mean windowed power spectrum.

    Segments overlap by half and get a symmetric Hann window; the one-sided power is `|X|^2` at DC and
    Nyquist and `2|X|^2` between, without further scaling, averaged over segments.

    Args:
        signal: `[batch, length]` or one row `[length]`, any real dtype, converted to float32. Each row's
            first `params.frame_len` samples are used.
        params: segments, segment length and number of peaks: they alone decide the result.
        strategy: how it is computed. "host" (NumPy, no device), "fused" (one program on the device, only peaks come
            back), "block" (the spectrum comes back, the host selects), "learned" (fused, with the pruned program of
            `model`, whose peaks are approximate), "auto" (the cheapest by the calibration; learned among them if a
            model is given), or any name that `parse_welch_peaks_strategy` knows (ultra and fast mean host, rlx the
            cheaper of fused and block). "fused_maxima" and "fused_top_k" say how the device selects peaks, which are
            the same; "fused" takes the faster form, by the calibration where one is given, else as measured on such
            devices. Inside a caller's own jit, grad or vmap only fused and learned can run, and auto means fused, as it
            does for rows on several devices.
        calibration: a calibration of this machine, for auto and rlx; `default_calibration()` unless given: the one
            that `rlxjax calibrate` saved, else what known CPUs say. "reference" means the reference's built-in
            coefficients, which platforms without either fall back on.
        model: a learned FFT for `params.n_fft`.
        measure: "undecided" also times what auto, rlx and fused may run, on these rows, where the calibration does not
            say surely which is the fastest; "always" times all of it, "never" none. What was measured is remembered, as
            `rlxjax.choose` does it, and holds in later calls whatever they ask for. `RLXJAX_MEASURE` unless given, and
            "never" where that is not set.

    Returns:
        float32 `[batch, k, 2]` of (bin, power), descending by power; equal powers keep the lower bin first, NaN powers
        come last, and slots beyond the bins are (0, 0.0). Which bins infinite samples make infinite or NaN depends on
        the strategy. NumPy for a NumPy signal, a JAX array for a JAX one, on the same devices and sharded as its rows.

    Raises:
        ValueError: a complex or masked signal, one of three or more axes or shorter than `frame_len`, one whose
            samples are sharded, an unknown strategy, one that cannot run inside traced code, "learned" without a
            model, a model for another segment length, a calibration that is none, one of a device in a forked
            process, where JAX cannot run and auto means host, or another word for `measure`.
        MemoryError: peaks that memory cannot hold.

    Few rows are one call of one program. They are padded to the next of four sizes an octave (`padded_batch`), so that
    varying batches compile a bounded number of programs. More rows are computed in chunks, on every processor: memory
    beyond signal and peaks follows from the chunk and the processors. Traced code pads no rows, and its gradient keeps
    the transforms of all of them.

    Rows with a `NamedSharding` over several devices stay there: fused and learned are one program, each device has its
    own rows, and other processes may hold some. Host and block read all rows. In traced code rows stay where their type
    says how they are sharded (explicit axes of a mesh), and within `jax.shard_map`.

    Examples:
        >>> params = WelchPeakParams.fast(n_fft=256, k=1)
        >>> tone = np.sin(2 * np.pi * 32 / 256 * np.arange(params.frame_len))
        >>> int(welch_peaks(tone, params, "host")[0, 0, 0])
        32
    """
    is_jax = isinstance(signal, jax.Array)
    if not is_jax and type(signal) is not np.ndarray:
        if isinstance(signal, np.ma.MaskedArray):
            raise ValueError("signal: expected plain numbers, got a masked array; use signal.filled(...)")
        signal = np.asarray(signal)
    traced, forked = isinstance(signal, jax.core.Tracer), is_forked()
    where = signal.sharding if is_jax and not traced else None  # pyright: ignore[reportAttributeAccessIssue]
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    # What a call does follows from little, and is looked up: within 2 us, in which the threads of XLA stay awake.
    call = Call(signal.shape, signal.dtype, where, device, traced, forked, params, strategy)
    run = functools.partial(welch_peaks, signal, params, model=model)
    variant, program = choice(call, calibration, model, measure, run)
    if program is not None:
        peaks = run_program(compiled(program), signal)
        return _placed_as(peaks, signal) if is_jax else np.array(peaks)
    if signal.ndim == 1:
        signal = signal[None]
    if traced:
        return run_traced(variant, signal, params, model)
    # A constant inside a caller's jit is not traced, and is computed at once.
    run = run_sharded if call.several else run_variant
    peaks = run(variant, signal, params, model)  # pyright: ignore[reportArgumentType]
    if is_jax:
        return _placed_as(peaks, signal)
    peaks = np.asarray(peaks)  # those of one chunk are a view of the device's own memory
    return peaks if peaks.flags.writeable else peaks.copy()


def choose_variant(
    signal: np.ndarray | jax.Array,
    params: WelchPeakParams,
    strategy: str = AUTO,
    *,
    calibration: "Calibration | None" = None,
    model: Any = None,
    measure: str | None = None,
) -> "Choice":
    """Return which variant `welch_peaks` runs for a call with these arguments, and by what that is decided.

    The choice is called with a signal, and computes its peaks by that variant. Arguments as of `welch_peaks`.

    Raises:
        ValueError: as of `welch_peaks`, rows that are traced or on several devices, or nothing to decide by.

    Examples:
        >>> params = WelchPeakParams.fast(n_fft=256, k=16)
        >>> choice = choose_variant(np.zeros((8192, params.frame_len), np.float32), params, measure="never")
        >>> choice.by, sorted(own.name for own in choice.alternatives)
        ('model', ['block', 'fused_maxima', 'fused_top_k', 'host'])
    """
    rows = signal if isinstance(signal, jax.Array) else np.asarray(signal)
    where = None if is_traced(rows) or isinstance(rows, np.ndarray) else rows.sharding
    call = Call(rows.shape, rows.dtype, where, None, False, is_forked(), params, strategy)
    if is_traced(rows) or call.several:
        raise ValueError("signal: expected rows that are not traced, on one device")
    run = functools.partial(welch_peaks, rows, params, model=model)
    found = question(call, calibration, model, measure, run).decided()
    fn = functools.partial(welch_peaks, params=params, strategy=found.name, model=model)  # which holds no signal
    return dataclasses.replace(found, fn=fn)


def stream_welch_peaks(
    signals: Iterable[Any],
    params: WelchPeakParams,
    strategy: str = AUTO,
    *,
    calibration: "Calibration | str | None" = None,
    model: Any = None,
    measure: str | None = None,
) -> Iterator[np.ndarray | jax.Array]:
    """Yield the peaks of each signal of a stream, in order, while the next signal is being made or read.

    Two signals are held at a time: one that is computed, and the next one. A NumPy signal is held as a copy,
    made before the next one is asked for, so a source may fill the same buffer again. Numbers of rows in `signals`
    may differ. Other arguments as of `welch_peaks`.

    Yields:
        What `welch_peaks` returns for each signal.

    Raises:
        ValueError: as of `welch_peaks`, or a traced signal.
        Exception: what the source raised.

    Errors are raised once the signal's turn has come: the peaks of those before it are given first.

    Examples:
        >>> params = WelchPeakParams.fast(n_fft=64, k=1)
        >>> tones = (np.sin(2 * np.pi * bin_ / 64 * np.arange(96)) for bin_ in (5, 9))
        >>> [int(peaks[0, 0, 0]) for peaks in stream_welch_peaks(tones, params)]
        [5, 9]
    """
    source, call, failure = iter(signals), None, None
    options: dict[str, Any] = {"calibration": calibration, "model": model, "measure": measure}
    with background() as start:
        while failure is None:
            try:
                following = start(welch_peaks, _held(next(source)), params, strategy, **options)
            except Exception as error:  # noqa: BLE001 - raised below, when its turn has come
                following, failure = None, error
            if call is not None:
                yield call.result()
            call = following
    if not isinstance(failure, StopIteration):
        raise failure


def keep_programs(most_bytes: int) -> None:
    """Keep compiled programs of Welch peaks of so much memory, the latest used, in place of 1 GB.

    A program takes 0.3 to 6 MB, estimated from its text. One that had to go is compiled again when it is called, or
    comes from JAX's persistent cache where `jax_compilation_cache_dir` is set.

    Args:
        most_bytes: at least 1 MB. More than about 2 GB needs more memory maps than Linux lets a process have, which
            ends it (`vm.max_map_count`).

    Raises:
        ValueError: less memory than that.
    """
    compiled.keep(as_index(most_bytes, "most_bytes", at_least=2**20))


def _placed_as(peaks: np.ndarray | jax.Array, signal: Any) -> jax.Array:
    where, is_named = signal.sharding, isinstance(signal.sharding, NamedSharding)
    if isinstance(peaks, jax.Array) and (isinstance(peaks.sharding, NamedSharding) or not is_named):
        return peaks
    place: Any = next(iter(where.device_set)) if signal.committed else None
    if is_named:
        place = NamedSharding(where.mesh, split_rows(row_axes(where, signal.shape)))
    with jax.ensure_compile_time_eval():
        return jax.device_put(peaks, place)


def _held(signal) -> np.ndarray | jax.Array:
    if is_traced(signal):
        raise ValueError("signals: expected concrete ones, got a traced one; use welch_peaks in traced code")
    return signal if isinstance(signal, jax.Array) else np.array(signal)
