"""Find the strongest bins of signals: the functions that users call."""

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

    Segments overlap by half and have a symmetric Hann window. The one-sided power is `|X|^2` at DC and Nyquist and
    `2|X|^2` between, averaged over segments, without further scaling.

    Args:
        signal: `[batch, length]` or one row `[length]`, any real dtype, converted to float32. The first
            `params.frame_len` samples of each row are used.
        params: number of segments, segment length and number of peaks.
        strategy: how to compute the peaks. All strategies except "learned" find the same peaks.

            - "host": NumPy computes everything, without a device.
            - "fused": one program on the device returns only peaks. "fused_maxima" and "fused_top_k" are two forms of
              "fused". "fused" runs the form that is faster by the calibration that you give, or else by measurements
              on similar devices.
            - "block": the device computes the spectrum, and the host selects the peaks.
            - "learned": as "fused", but with the learned FFT `model`; the peaks are approximate.
            - "auto": the strategy that is fastest by the calibration, "learned" included if you give a model. Auto
              means "fused" in traced code (jit, grad, vmap) and for rows on several devices, and "host" in a forked
              process, in which JAX cannot run.
            - any name that `parse_welch_peaks_strategy` knows: ultra and fast mean "host"; rlx means the faster of
              "fused" and "block".

            Only "fused" and "learned" run in traced code.
        calibration: calibration of this machine, for auto and rlx. The default is `default_calibration()`: the
            calibration that `rlxjax calibrate` saved, else an average over known CPUs. "reference" means the
            reference's built-in coefficients. Platforms without a calibration use them too.
        model: a learned FFT for `params.n_fft`.
        measure: "undecided" times the variants of auto, rlx and fused on these rows if the calibration is not sure of
            the fastest. "always" times these variants in any case, "never" in no case. Later calls with any `measure`
            use the measurements, as in `rlxjax.choose`. The default is the environment variable `RLXJAX_MEASURE`, else
            "never".

    Returns:
        float32 `[batch, k, 2]` of (bin, power), the largest power first. The lower bin comes first among equal powers.
        NaN powers come last, and slots beyond the bins are (0, 0.0). Infinite samples make some bins infinite or NaN;
        the strategy determines these bins. The peaks of a NumPy signal are a NumPy array. The peaks of a JAX signal
        are a JAX array on the same devices, sharded like the rows.

    Raises:
        ValueError: the signal is complex or masked, has three or more axes, sharded samples, or rows shorter than
            `frame_len`; the strategy is unknown, or cannot run in traced code or in a forked process; "learned" comes
            without a model; the model is for another segment length; or `calibration` or `measure` is invalid.
        MemoryError: the peaks do not fit in memory.

    A small batch is padded (`padded_batch`) and runs as one program. A large batch runs in chunks on all processors, so
    the extra memory does not grow with the batch. A gradient keeps the transforms of all rows in memory.

    Rows with a `NamedSharding` stay on their devices, and other processes may hold some of the rows; "host" and "block"
    read all rows. Traced rows stay sharded over explicit axes of a mesh, and inside `jax.shard_map`.

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
    # The lookup takes 2 us: if a lookup took longer, XLA's threads would fall asleep between two calls.
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
    # A constant inside a caller's jit is no traced value, so its peaks are computed at once.
    run = run_sharded if call.several else run_variant
    peaks = run(variant, signal, params, model)  # pyright: ignore[reportArgumentType]
    if is_jax:
        return _placed_as(peaks, signal)
    peaks = np.asarray(peaks)  # if there is a single chunk, this is a read-only view of the device's memory
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
    """Return the variant that `welch_peaks` runs for these arguments, and the basis of the choice.

    Call the result with a signal to compute peaks by that variant. The arguments are those of `welch_peaks`.

    Raises:
        ValueError: as in `welch_peaks`; or the signal is traced or sharded; or there is no basis for a choice.

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
        raise ValueError("signal: expected a concrete array on one device, got a traced or sharded array")
    run = functools.partial(welch_peaks, rows, params, model=model)
    found = question(call, calibration, model, measure, run).decided()
    fn = functools.partial(welch_peaks, params=params, strategy=found.name, model=model)  # holds no signal
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
    """Yield the peaks of each signal of a stream, in order; meanwhile the source makes the next signal.

    At most two signals are in memory: the signal being computed and the next signal. Each NumPy signal is copied, so
    the source may reuse its buffer. Signals may differ in their number of rows. The other arguments are those of
    `welch_peaks`.

    Yields:
        The result of `welch_peaks` for each signal.

    Raises:
        ValueError: as in `welch_peaks`, or a signal is traced.
        Exception: any error of the source. Errors are raised after the peaks of all earlier signals.

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
            except Exception as error:  # noqa: BLE001 - raised below, after the earlier peaks
                following, failure = None, error
            if call is not None:
                yield call.result()
            call = following
    if not isinstance(failure, StopIteration):
        raise failure


def keep_programs(most_bytes: int) -> None:
    """Set the most memory that compiled programs of Welch peaks may take, 1 GB by default.

    The most recently used programs stay. A program takes an estimated 0.3 to 6 MB. The next call of a dropped program
    compiles the program again, or reads it from JAX's persistent cache if `jax_compilation_cache_dir` is set.

    Args:
        most_bytes: memory in bytes, at least 1 MB. With more than about 2 GB the process needs more memory maps than
            Linux allows (`vm.max_map_count`), and ends.

    Raises:
        ValueError: `most_bytes` is less than 1 MB.
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
        raise ValueError("signals: expected concrete arrays, got a traced array; use welch_peaks in traced code")
    return signal if isinstance(signal, jax.Array) else np.array(signal)
