"""`welch_peaks`: check the arguments, choose a variant, and return its peaks."""

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
        params: segments, segment length and number of peaks; these alone determine the result.
        strategy: "host" (NumPy, no device), "fused" (one program on the device returns only peaks), "block" (the host
            reads the spectrum back and selects), "learned" (fused, with the pruned program of `model`, whose peaks are
            approximate), "auto" (the cheapest by the calibration; includes "learned" if a model is given), or any name
            that `parse_welch_peaks_strategy` knows (ultra and fast mean host, rlx means the cheaper of fused and
            block). "fused_maxima" and "fused_top_k" are two forms of "fused" with the same peaks. "fused" takes the
            faster form by a given calibration, else by measurements of similar devices. Inside a caller's jit, grad or
            vmap only fused and learned can run, and auto means fused. Auto also means fused for rows on several
            devices.
        calibration: calibration of this machine, for auto and rlx. The default is `default_calibration()`: the
            calibration that `rlxjax calibrate` saved, else a prior pooled from known CPUs. "reference" means the
            reference's built-in coefficients, which are also the fallback of platforms without a calibration.
        model: a learned FFT for `params.n_fft`.
        measure: "undecided" times the variants of auto, rlx and fused on these rows if the calibration is not sure of
            the fastest. "always" times all of these variants, "never" none. Measurements are remembered as by
            `rlxjax.choose`, and hold in later calls with any `measure`. The default is `RLXJAX_MEASURE`, else "never".

    Returns:
        float32 `[batch, k, 2]` of (bin, power), descending by power. Among equal powers the lower bin comes first, NaN
        powers come last, and slots beyond the bins are (0, 0.0). The bins that infinite samples make infinite or NaN
        depend on the strategy. A NumPy signal gives a NumPy array, a JAX signal a JAX array on the same devices, with
        the rows' sharding.

    Raises:
        ValueError: a signal that is complex, masked, of three or more axes, shorter than `frame_len` or with sharded
            samples; a strategy that is unknown, cannot run inside traced code, or needs a device in a forked process,
            in which JAX cannot run and auto means host; "learned" without a model; a model for another segment length;
            an object that is no calibration; an unknown word for `measure`.
        MemoryError: the peaks do not fit in memory.

    A small batch is one call of one program. Its rows are padded to the next of four sizes an octave (`padded_batch`),
    so varying batches compile a bounded number of programs. A large batch is computed in chunks on all processors: the
    memory beyond signal and peaks depends on the chunk and the number of processors. Traced code pads no rows, and its
    gradient keeps the transforms of all rows.

    Rows with a `NamedSharding` over several devices stay on these devices. Fused and learned are then one program, in
    which each device computes its own rows; other processes may hold some of the rows. Host and block read all rows. In
    traced code, rows stay sharded if their type says so (explicit axes of a mesh), and within `jax.shard_map`.

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
    # A lookup takes 2 us, so short that the threads of XLA stay awake between two calls.
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
    peaks = np.asarray(peaks)  # the peaks of a single chunk are a view of the device's own memory
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

    Call the choice with a signal to compute peaks by that variant. The arguments are those of `welch_peaks`.

    Raises:
        ValueError: as in `welch_peaks`; also traced rows, rows on several devices, or no basis for a choice.

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
    """Yield the peaks of each signal of a stream, in order, while the source makes the next signal.

    Memory holds two signals at a time: the signal in work and the next signal. A NumPy signal is copied before the
    source makes the next signal, so the source may reuse one buffer. Signals may differ in their number of rows. The
    other arguments are those of `welch_peaks`.

    Yields:
        the result of `welch_peaks` for each signal.

    Raises:
        ValueError: as in `welch_peaks`, or a traced signal.
        Exception: any error of the source.

    An error is raised after the peaks of all earlier signals.

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
    """Set the memory for compiled programs of Welch peaks, 1 GB by default; the latest used programs are kept.

    A program takes 0.3 to 6 MB, estimated from its text. A dropped program is compiled again at its next call, or comes
    from JAX's persistent cache if `jax_compilation_cache_dir` is set.

    Args:
        most_bytes: memory in bytes, at least 1 MB. Beyond about 2 GB the process needs more memory maps than Linux
            allows (`vm.max_map_count`), and Linux ends the process.

    Raises:
        ValueError: less than 1 MB.
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
