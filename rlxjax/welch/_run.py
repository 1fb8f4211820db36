"""Find the strongest bins of signals: the functions that users call."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import numpy as np
from jax.sharding import NamedSharding

from rlxjax._checks import as_index, is_traced, unmasked
from rlxjax._chunks import background, is_forked

from ._choice import Call, choice, question
from ._launch import compiled, row_axes, run_program, run_sharded, run_traced, run_variant, split_rows
from ._workload import WelchPeakParams, rescaled_peaks
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
    """Return the k bins with the largest power in the mean power spectrum of each row of a signal.

    A row consists of segments that overlap by half. `X` is the transform of a segment times a symmetric Hann window.
    The one-sided power is `|X|^2` at DC and Nyquist, and `2|X|^2` at the bins between. It is averaged over the segments
    of the row, and not scaled further.

    Args:
        signal: `[batch, length]` or a single row `[length]`, of any real dtype; samples are converted to float32. Only
            the first `params.frame_len` samples of each row are used.
        params: number of segments, segment length and number of peaks.
        strategy: how to compute the peaks. All strategies except "learned" find the same peaks.

            - "host": NumPy computes everything, without a device.
            - "fused": a single program on the device computes everything. "fused_maxima" and "fused_top_k" are its two
              forms, which select the peaks in different ways. "fused" runs the form that the given calibration expects
              to be faster, or else the form that was faster on similar devices.
            - "block": the device computes the spectra of the segments, and the host selects the peaks.
            - "learned": like "fused", but with the learned FFT `model`. The peaks are approximate.
            - "auto": the strategy that the calibration expects to be the fastest; "learned" only if you give a model.
              In traced code (jit, grad, vmap) and for rows on several devices, "auto" means "fused". In a forked
              process, in which JAX cannot run, "auto" means "host".
            - any name that `parse_welch_peaks_strategy` knows: "ultra" and "fast" mean "host"; "rlx" means the faster
              of "fused" and "block".

            Only "fused" and "learned" run in traced code.
        calibration: the calibration of this machine, by which "auto" and "rlx" choose. The default is
            `default_calibration()`: the calibration that `rlxjax calibrate` saved, or else an average over known CPUs.
            "reference" means the reference's built-in coefficients, which also serve platforms without a calibration.
        model: a learned FFT whose segments have `params.n_fft` samples.
        measure: "undecided" times, on these rows, the variants that the strategy allows, if the calibration is not sure
            which variant is the fastest. "always" times them in any case, and "never" times nothing. Later calls use
            the measurements, whatever their own `measure`, as in `rlxjax.choose`. The default is the environment
            variable `RLXJAX_MEASURE`, or else "never".

    Returns:
        The peaks (bin, power), float32 `[batch, k, 2]`. Larger powers come first. Among equal powers, lower bins come
        first. NaN powers come last. If `k` exceeds the number of bins, the last peaks are (0, 0.0). Rows of any scale
        have the right bins, because very small and very large rows are multiplied by a power of two. A power beyond
        float32 is infinite. A power or a sample below 1.2e-38 may count as 0. Infinite samples
        make some powers infinite or NaN; the strategy determines at which bins. The peaks of a NumPy signal are a
        NumPy array. The peaks of a JAX signal are a JAX array on the same devices, sharded like the rows.

    Raises:
        ValueError: the signal is complex or masked, or has three or more axes, sharded samples, or rows shorter than
            `params.frame_len`; the strategy is unknown, cannot run in traced code or in a forked process, or needs a
            `model`; the model is for another segment length; or `calibration` or `measure` is invalid.
        MemoryError: the peaks do not fit in memory.

    A small batch is padded (`padded_batch`) and runs as one program. A large batch runs in chunks on all processors, so
    the working memory does not grow with the batch. A gradient keeps the transforms of all rows in memory.

    Rows with a `NamedSharding` stay on their devices, which may belong to other processes, but "host" and "block" read
    all rows on the host. Traced rows stay sharded over explicit axes of a mesh, and inside `jax.shard_map`.

    Examples:
        >>> params = WelchPeakParams.fast(n_fft=256, k=1)
        >>> tone = np.sin(2 * np.pi * 32 / 256 * np.arange(params.frame_len))
        >>> int(welch_peaks(tone, params, "host")[0, 0, 0])
        32
    """
    is_jax = isinstance(signal, jax.Array)
    if not is_jax and type(signal) is not np.ndarray:
        signal = np.asarray(unmasked(signal, "signal"))
    traced, forked = isinstance(signal, jax.core.Tracer), is_forked()
    where = signal.sharding if is_jax and not traced else None  # pyright: ignore[reportAttributeAccessIssue]
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    # The lookup takes 2 us: if a lookup took longer, XLA's threads would fall asleep between two calls.
    call = Call(signal.shape, signal.dtype, where, device, traced, forked, params, strategy)
    run = functools.partial(welch_peaks, signal, params, model=model)
    variant, program = choice(call, calibration, model, measure, run)
    if program is not None:
        own = functools.partial(run_program, compiled(program))
        peaks = own(signal)
        if call.platform in (None, "cpu"):
            found, rows = np.array(peaks), np.asarray(signal).reshape(-1, signal.shape[-1])
            rescaled = rescaled_peaks(found, rows, lambda scaled: own(scaled.reshape(signal.shape)))
            peaks = peaks if is_jax and rescaled is found else rescaled
        return _placed_as(peaks, signal) if is_jax else peaks
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

    Call the result with a signal to compute its peaks by that variant. The arguments are those of `welch_peaks`.

    Raises:
        ValueError: as in `welch_peaks`; or the signal is traced or sharded; or nothing is known by which to choose.

    Examples:
        >>> params = WelchPeakParams.fast(n_fft=256, k=16)
        >>> choice = choose_variant(np.zeros((8192, params.frame_len), np.float32), params, measure="never")
        >>> choice.by, sorted(own.name for own in choice.alternatives)
        ('model', ['block', 'fused_maxima', 'fused_top_k', 'host'])
    """
    rows = signal if isinstance(signal, jax.Array) else np.asarray(unmasked(signal, "signal"))
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
    """Yield the peaks of each signal in `signals`, in order. Meanwhile, `signals` makes the next signal.

    At most two signals are in memory: the signal whose peaks are being computed, and the next signal. NumPy signals are
    copied, so `signals` may yield the same buffer again. Signals may differ in their number of rows. The other
    arguments are those of `welch_peaks`.

    Yields:
        The result of `welch_peaks` for each signal.

    Raises:
        ValueError: as in `welch_peaks`, or a signal is traced.
        Exception: any error that `signals` raises. It is raised after the peaks of all earlier signals are yielded.

    Examples:
        >>> params = WelchPeakParams.fast(n_fft=64, k=1)
        >>> tones = (np.sin(2 * np.pi * bin_ / 64 * np.arange(96)) for bin_ in (5, 9))
        >>> [int(peaks[0, 0, 0]) for peaks in stream_welch_peaks(tones, params)]
        [5, 9]
    """
    source, call, failure = iter(signals), None, None
    options: dict[str, Any] = {"calibration": calibration, "model": model, "measure": measure}
    start = background()
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
    """Set the largest memory that all compiled programs of Welch peaks together may take. The default is 1 GB.

    Beyond this memory, the least recently used programs are dropped. A program takes about 0.3 to 6 MB. A call that
    needs a dropped program compiles it again, or reads it from JAX's cache if `jax_compilation_cache_dir` is set.

    Args:
        most_bytes: memory in bytes, at least 1 MB. Programs of more than about 2 GB in total need more memory maps than
            Linux allows a process (`vm.max_map_count`), and the process ends.

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
    return signal if isinstance(signal, jax.Array) else np.array(unmasked(signal, "signal"))
