"""`welch_peaks`: checks what comes in, chooses the path, and gives back what was asked."""

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import as_index, is_symbolic, is_traced
from rlxjax._chunks import background, is_forked
from rlxjax._values import Handle, handle
from rlxjax.device._codes import normalised
from rlxjax.device._devices import Device, backend_coefficients, jax_device
from rlxjax.welch.costs._path_costs import block_graph_ns, fused_graph_ns, host_path_ns, learned_path_ns

from ._launch import MOST_PROGRAMS, keep_compiled, run_path, run_program, run_traced, whole_program
from ._models import program_of
from ._params import WelchPeakParams
from ._selection import SELECTIONS
from ._strategy import AUTO, ReferenceStrategy, WelchPath, parse_welch_peaks_strategy

if TYPE_CHECKING:
    from rlxjax.calibration import CalibratedModel, Calibration

#: What a calibration may be called that is none: the reference's built-in coefficients.
REFERENCE = "reference"

_NAMED = {path.value: path for path in (WelchPath.HOST, WelchPath.FUSED, WelchPath.BLOCK)}
#: The name of this workload among a calibration's models.
MODEL_NAME = "welch"
#: Peaks of fewer bytes are not checked for whether memory holds them; copies there are of them at most.
LEAST_CHECKED_BYTES, COPIES_OF_PEAKS = 2**26, 2
BUILT_IN_COSTS_NS = {WelchPath.HOST: host_path_ns, WelchPath.FUSED: fused_graph_ns, WelchPath.BLOCK: block_graph_ns}


def welch_peaks(
    signal: np.ndarray | jax.Array,
    params: WelchPeakParams,
    strategy: str = AUTO,
    *,
    calibration: "Calibration | str | None" = None,
    model: Any = None,
    selection: str | None = None,
) -> np.ndarray | jax.Array:
    """Return the k strongest bins of each row's mean windowed power spectrum.

    Segments overlap by half and get a symmetric Hann window; the one-sided power is `|X|^2` at DC and
    Nyquist and `2|X|^2` between, without further scaling, averaged over segments.

    Args:
        signal: `[batch, length]` or one row `[length]`, any real dtype, converted to float32. Each row's
            first `params.frame_len` samples are used.
        params: segments, segment length and number of peaks: they alone decide the result.
        strategy: how it is computed. "host" (NumPy, no device), "fused" (one program on the device, only
            peaks come back), "block" (the spectrum comes back, the host selects), "learned" (fused, with
            the pruned program of `model`, whose peaks are approximate), "auto" (the cheapest by the
            calibration; learned among them if a model is given), or
            any name that `parse_welch_peaks_strategy` knows (ultra and fast mean host, rlx the cheaper of
            fused and block). Inside a caller's own jit, grad or vmap only fused and learned can run, and
            auto means fused.
        calibration: a calibration of this machine, for auto and rlx; `default_calibration()` unless given: the one
            that `rlxjax calibrate` saved, else what known CPUs say. "reference" means the reference's built-in
            coefficients, which platforms without either fall back on.
        model: a learned FFT for `params.n_fft`.
        selection: how a device selects peaks, "maxima" or "top_k"; the peaks are the same. By default the
            one that is faster, by the calibration where it chose the path or is given, else as measured on such
            devices.

    Returns:
        float32 `[batch, k, 2]` of (bin, power), descending by power; equal powers keep the lower bin
        first, NaN powers come last, and slots beyond the bins are (0, 0.0). Of infinite samples come
        infinite and NaN powers; which bin has which depends on the path. NumPy, the caller's own to write
        to, for a NumPy signal, a JAX array for a JAX one.

    Raises:
        ValueError: a complex or masked signal, one of three or more axes or shorter than `frame_len`, an
            unknown strategy or selection, a path that cannot run inside traced code, "learned" without a
            model, a model for another segment length, a calibration that is none, or a path of a device in a
            forked process, where JAX cannot run and auto means host.
        MemoryError: peaks that memory cannot hold.

    Few rows are one call of one program. They are padded with copies of the last row to the next of four
    sizes an octave (`padded_batch`), so that varying batches compile a bounded number of programs. More rows are
    computed in chunks, on every processor: memory beyond the signal and the peaks follows from the chunk and
    from how many processors there are.

    In traced code no rows are padded; a gradient keeps the transforms of all of them.

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
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    # What a call does follows from little, and is looked up: within 1 us, in which the threads of XLA stay awake.
    what = signal.shape, signal.dtype, params, strategy, selection, traced, forked
    try:
        by = None if calibration is None else handle(calibration), None if model is None else handle(model)
        where = signal.sharding if is_jax and not traced else None  # pyright: ignore[reportAttributeAccessIssue]
        program = _whole_program(where, device, *what, *by)
        if program is not None:
            peaks = run_program(program, signal)
            return peaks if is_jax else np.array(peaks)
        path, selection = _path_of(*what, _platform_of(where), *by)
    except TypeError:  # of an argument that has no hash, which is refused by its name
        path, selection = _path_of.__wrapped__(*what, None, calibration, model)
    if signal.ndim == 1:
        signal = signal[None]
    if traced:
        return run_traced(path, signal, params, model, selection)
    # A constant inside a caller's jit is not traced, and is computed at once.
    peaks = run_path(path, signal, params, model, selection)
    if isinstance(signal, jax.Array) and not isinstance(peaks, jax.Array):
        with jax.ensure_compile_time_eval():
            peaks = jax.device_put(peaks, next(iter(signal.devices())) if signal.committed else None)
    return peaks if is_jax else _writeable(np.asarray(peaks))


def stream_welch_peaks(
    signals: Iterable[Any],
    params: WelchPeakParams,
    strategy: str = AUTO,
    *,
    calibration: "Calibration | str | None" = None,
    model: Any = None,
    selection: str | None = None,
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
    arguments = {"calibration": calibration, "model": model, "selection": selection}
    source, call, failure = iter(signals), None, None
    with background() as start:
        while failure is None:
            try:
                following = start(welch_peaks, _held(next(source)), params, strategy, **arguments)
            except Exception as error:  # noqa: BLE001 - raised below, when its turn has come
                following, failure = None, error
            if call is not None:
                yield call.result()
            call = following
    if not isinstance(failure, StopIteration):
        raise failure


def keep_programs(most: int) -> None:
    """Keep so many compiled programs of Welch peaks, the latest used, in place of 64, from none on.

    Each holds 2 to 5 MB. Who runs more sizes in turn than are kept waits for the compiler again and again.
    """
    global _whole_program
    as_index(most, "most", at_least=1)
    keep_compiled(most)
    _whole_program = functools.lru_cache(most)(_whole_program.__wrapped__)


def _held(signal) -> np.ndarray | jax.Array:
    """Return a signal that its source does not change."""
    if is_traced(signal):
        raise ValueError("signals: expected concrete ones, got a traced one; use welch_peaks in traced code")
    return signal if isinstance(signal, jax.Array) else np.array(signal)


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _whole_program(
    where: Any, device: Any, shape: tuple[Any, ...], dtype: np.dtype, *arguments: Any
) -> Callable[..., jax.Array] | None:
    """Return the program of a call that takes its signal as it is, None where there is more to do."""
    *what, calibration, model = arguments
    path, selection = _path_of(shape, dtype, *what, _platform_of(where), calibration, model)
    params, _, _, traced, _ = what
    is_whole = path is WelchPath.FUSED and dtype == np.float32 and not traced
    return whole_program(shape, params, selection, where) if is_whole else None


def _platform_of(where: Any) -> str | None:
    """Return the platform on which rows of JAX lie; None of NumPy's and of traced ones."""
    return None if where is None else next(iter(where.device_set)).platform


@functools.lru_cache(maxsize=4096)  # names and numbers
def _path_of(
    shape: tuple[Any, ...],
    dtype: np.dtype,
    params: WelchPeakParams,
    strategy: str,
    selection: str | None,
    traced: bool,
    forked: bool,
    platform: str | None,
    calibration: "Handle | Calibration | str | None",
    model: Any,
) -> tuple[WelchPath, str | None]:
    """Return the path of a call and its selection, the arguments checked; what raises is not remembered."""
    calibration, model = (given() if isinstance(given, Handle) else given for given in (calibration, model))
    assert not isinstance(calibration, Handle)
    if len(shape) == 1:
        shape = (1, *shape)
    _check_signal(shape, dtype, params)
    _check_model(model, params)
    _check_calibration(calibration)
    if selection is not None and selection not in tuple(SELECTIONS):
        raise ValueError(f"selection: expected one of {', '.join(SELECTIONS)}, got {selection!r}")
    path, by = _choose_path(strategy, shape[0], params, calibration, model, traced, forked, platform)
    if path is WelchPath.LEARNED and model is None:
        raise ValueError("strategy: 'learned' needs a learned FFT (model=), and none was given")
    if traced and path in _WHY:
        reason = f"got {strategy!r}: {_WHY[path]}"
        raise ValueError(f"strategy: expected 'fused' or 'learned' inside traced code, {reason}")
    if forked and path is not WelchPath.HOST:
        raise ValueError(
            f"strategy: expected 'host', got {strategy!r}: JAX cannot run in this process, which was forked "
            "(start processes by spawn)"
        )
    _check_peaks_fit((shape[0], params.k, 2))
    if selection is None and by is not None and path is WelchPath.FUSED:
        sizes = shape[0], params.n_fft, min(params.k, params.n_bins), params.n_segments
        selection = by.of(MODEL_NAME).variant_of("fused", *sizes).removeprefix("fused_")
    return path, selection


def _check_signal(shape: tuple[Any, ...], dtype: np.dtype, params: WelchPeakParams) -> None:
    if not isinstance(params, WelchPeakParams):
        raise ValueError(f"params: expected WelchPeakParams, got {type(params).__name__}")
    if len(shape) != 2:
        raise ValueError(f"signal: expected [batch, length] or [length], got shape {shape}")
    if dtype.kind not in "biuf" and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"signal: expected a real dtype, got {dtype}")
    if shape[1] < params.frame_len:
        raise ValueError(
            f"signal: expected rows of at least {params.frame_len} samples (n_fft {params.n_fft}, "
            f"{params.n_segments} segments), got {shape[1]}"
        )


def _check_peaks_fit(shape: tuple[Any, ...]) -> None:
    """Refuse peaks that memory cannot hold, which a device's program would end the process for.

    Raises:
        MemoryError: more bytes than the machine has, or than this process may have.
    """
    n_bytes = 4 * math.prod(shape)
    if is_symbolic(n_bytes) or n_bytes < LEAST_CHECKED_BYTES:
        return
    if hasattr(os, "sysconf") and n_bytes > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise MemoryError(f"peaks of shape {shape} take {n_bytes:,} bytes, more than this machine has")
    np.empty((COPIES_OF_PEAKS, *shape), np.float32)


def _check_model(model: Any, params: WelchPeakParams) -> None:
    if model is None:
        return
    if not hasattr(model, "n_fft"):
        raise ValueError(f"model: expected a LearnedFft (load_learned_fft), got {type(model).__name__}")
    if model.n_fft != params.n_fft:
        raise ValueError(f"model: expected one for n_fft {params.n_fft} as in params, got n_fft {model.n_fft}")
    if is_traced(*jax.tree.leaves(model)):
        raise ValueError("model: its gates decide the program, so they cannot be traced; use learned_spectrum")


def _check_calibration(calibration: "Calibration | str | None") -> None:
    if calibration is not None and calibration != REFERENCE and not hasattr(calibration, "of"):
        given = type(calibration).__name__
        raise ValueError(f"calibration: expected a Calibration (load_calibration) or {REFERENCE!r}, got {given}")


def _writeable(peaks: np.ndarray) -> np.ndarray:
    """Return peaks that may be written to: those of one chunk are a view of the device's own memory."""
    return peaks if peaks.flags.writeable else peaks.copy()


def _choose_path(
    strategy: str,
    batch: Any,
    params: WelchPeakParams,
    calibration: "Calibration | str | None",
    model: Any,
    traced: bool,
    forked: bool = False,
    platform: str | None = None,
) -> "tuple[WelchPath, Calibration | None]":
    """Return the path, and the calibration that is given or chose it; `platform` is where the rows of JAX lie."""
    given = None if isinstance(calibration, str) else calibration
    if (named := _NAMED.get(normalised(strategy))) is not None:
        return named, given
    try:
        parsed = parse_welch_peaks_strategy(strategy)
    except ValueError as error:
        raise ValueError(str(error).replace("expected one of", "expected one of host, block,")) from None
    if parsed == ReferenceStrategy.LEARNED:
        return WelchPath.LEARNED, given
    if parsed in (ReferenceStrategy.ULTRA, ReferenceStrategy.FAST):
        return WelchPath.HOST, given
    if traced:
        return WelchPath.FUSED, given
    if forked:  # the costs, too, are computed by JAX
        return (WelchPath.FUSED if parsed == ReferenceStrategy.RLX else WelchPath.HOST), given
    candidates = (WelchPath.FUSED, WelchPath.BLOCK)
    if parsed != ReferenceStrategy.RLX:
        host = (WelchPath.HOST,) if platform in (None, "cpu") else ()  # which would read all rows back
        candidates = (*host, *candidates, *(() if model is None else (WelchPath.LEARNED,)))
    by = given
    if calibration is None:
        from rlxjax.calibration import default_calibration  # loaded when first used

        by = default_calibration(platform)
    if by is not None:
        return WelchPath(_calibrated_pick(by, batch, params, tuple(map(str, candidates)), model)), by
    gates = (0, 0) if model is None else (model.active_gates, model.total_gates)
    return _cheapest_built_in(batch, params, candidates, gates, Device.CPU if platform == "cpu" else jax_device()), None


def _calibrated_pick(
    calibration: "Calibration", batch: int, params: WelchPeakParams, candidates: tuple[str, ...], model: Any
) -> str:
    """Return the candidate with the lowest prediction, a model at hand by its own work."""
    calibrated = calibration.of(MODEL_NAME)
    if not len(calibrated.posterior.facts["learned_n_fft"]):
        candidates = tuple(name for name in candidates if name != WelchPath.LEARNED)  # none was ever timed
    elif model is not None:
        calibrated = _with_work(calibrated, params.n_fft, program_of(model, params).work)
    return calibrated.cheapest(candidates, batch, params.n_fft, min(params.k, params.n_bins), params.n_segments)


@functools.lru_cache(maxsize=16)
def _with_work(calibrated: "CalibratedModel", n_fft: int, work: Any) -> "CalibratedModel":
    facts = {"learned_n_fft": n_fft, "learned_flop": work.flop, "learned_live_bins": work.live_bins}
    return calibrated.with_facts(**{name: np.array([value], float) for name, value in facts.items()})


@functools.lru_cache(maxsize=4096)
def _cheapest_built_in(
    batch: int,
    params: WelchPeakParams,
    candidates: tuple[WelchPath, ...],
    gates: tuple[int, int],
    device: Device,
) -> WelchPath:
    """Return the candidate of least built-in cost: where the host is one, rows are sent to devices of other memory."""
    row = backend_coefficients(device.value)
    upload_ns = 0.0 if row.unified_memory else 4.0 * batch * params.frame_len / float(row.readback_bw)

    def cost(path: WelchPath) -> float:
        sizes = (batch, params.n_fft, params.k, *(gates if path is WelchPath.LEARNED else ()))
        path_ns = float(BUILT_IN_COSTS_NS.get(path, learned_path_ns)(device, *sizes, n_segments=params.n_segments))
        return path_ns if path is WelchPath.HOST else path_ns + upload_ns

    with jax.ensure_compile_time_eval():
        return min(candidates, key=cost)


_WHY = {
    WelchPath.HOST: "the host path is NumPy and reads the signal's values",
    WelchPath.BLOCK: "the block path brings the spectrum back to the host",
}
