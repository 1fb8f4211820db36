"""`welch_peaks`: checks what comes in, chooses the path, pads, runs, and gives back what was asked."""

import functools
import weakref
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import as_index, is_traced
from rlxjax._device import Device, jax_device, normalised

from ._device_programs import fused_peaks, segment_spectra
from ._host import host_peaks, spectrum_peaks
from ._learned_fft import LearnedFft
from ._learned_program import LearnedProgram, learned_peaks, learned_program
from ._params import WelchPeakParams
from ._path_costs import block_graph_ns, fused_graph_ns, host_path_ns, learned_path_ns
from ._strategy import AUTO, Path, Strategy, parse_welch_peaks_strategy

if TYPE_CHECKING:
    from rlxjax._calibration import Calibration

#: Host buffers start at a multiple of this, so that a CPU device can use them where they are.
ALIGNMENT_BYTES = 64

BUILT_IN_COSTS_NS = {Path.HOST: host_path_ns, Path.FUSED: fused_graph_ns, Path.BLOCK: block_graph_ns}


def welch_peaks(
    signal: np.ndarray | jax.Array,
    params: WelchPeakParams,
    strategy: str = AUTO,
    *,
    calibration: "Calibration | None" = None,
    model: LearnedFft | None = None,
) -> np.ndarray | jax.Array:
    """Return the k strongest bins of each row's mean windowed power spectrum.

    Segments overlap by half and get a symmetric Hann window; the one-sided power is `|X|^2` at DC and
    Nyquist and `2|X|^2` between, without further scaling, averaged over segments (SPEC, section 4).

    Args:
        signal: `[batch, length]` or one row `[length]`, any real dtype, converted to float32. Each row's
            first `params.frame_len` samples are used.
        params: segments, segment length and number of peaks: they alone decide the result.
        strategy: how it is computed. "host" (NumPy, no device), "fused" (one program on the device, only
            peaks come back), "block" (the spectrum comes back, the host selects), "learned" (fused, with
            the pruned program of `model`, whose peaks are approximate), "auto" (the cheapest by the
            calibration, else by the built-in coefficients; learned among them if a model is given), or
            any name that `parse_welch_peaks_strategy` knows (ultra and fast mean host, rlx the cheaper of
            fused and block). Inside a caller's own jit, grad or vmap only fused and learned can run, and
            auto means fused.
        calibration: a calibration of this machine, for auto and rlx.
        model: a learned FFT for `params.n_fft`.

    Returns:
        float32 `[batch, k, 2]` of (bin, power), descending by power; equal powers keep the lower bin
        first, NaN powers come last, and slots beyond the bins are (0, 0.0). NumPy for a NumPy signal,
        a JAX array for a JAX one.

    Raises:
        ValueError: a complex signal, one of three or more axes or shorter than `frame_len`, an unknown
            strategy, a path that cannot run inside traced code, "learned" without a model, or a model for
            another segment length.

    Batches that a program has not seen are padded with rows of zeros to the next of four sizes an
    octave (`padded_batch`), so that varying batches compile a bounded number of programs.

    Examples:
        >>> params = WelchPeakParams.fast(n_fft=256, k=1)
        >>> tone = np.sin(2 * np.pi * 32 / 256 * np.arange(params.frame_len))
        >>> int(welch_peaks(tone, params, "host")[0, 0, 0])
        32
    """
    if not is_traced(signal) and not isinstance(signal, jax.Array):
        signal = np.asarray(signal)
    if signal.ndim == 1:
        signal = signal[None]
    _check_signal(signal, params)
    _check_model(model, params)
    traced = is_traced(signal)
    path = _choose_path(strategy, signal.shape[0], params, calibration, model, traced)
    if path is Path.LEARNED and model is None:
        raise ValueError("strategy: 'learned' needs a learned FFT (model=), and none was given")
    if traced and path not in _RUN_TRACED:
        reason = f"got {strategy!r}: {_WHY[path]}"
        raise ValueError(f"strategy: expected 'fused' or 'learned' inside traced code, {reason}")
    if traced:
        return _RUN_TRACED[path](signal, params, model)
    # A constant inside a caller's jit is not traced, and is computed at once.
    with jax.ensure_compile_time_eval():
        peaks = _RUN[path](signal, params, model)
    return jnp.asarray(peaks) if isinstance(signal, jax.Array) else np.asarray(peaks)


def padded_batch(batch: int) -> int:
    """Return the number of rows that a device program runs for a batch: four sizes an octave.

    Examples:
        >>> [padded_batch(batch) for batch in (0, 3, 9, 33, 8192)]
        [0, 3, 10, 40, 8192]
    """
    batch = as_index(batch, "batch")
    step = 1 << max(0, (batch - 1).bit_length() - 3) if batch > 0 else 1
    return -(-batch // step) * step


def aligned_zeros(shape: tuple[int, ...]) -> np.ndarray:
    """Return a float32 array of zeros whose first element is aligned for a CPU device."""
    count = int(np.prod(shape))
    raw = np.zeros(count * 4 + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + count * 4].view(np.float32).reshape(shape)


def _check_signal(signal, params: WelchPeakParams) -> None:
    if not isinstance(params, WelchPeakParams):
        raise ValueError(f"params: expected WelchPeakParams, got {type(params).__name__}")
    if signal.ndim != 2:
        raise ValueError(f"signal: expected [batch, length] or [length], got shape {signal.shape}")
    if signal.dtype.kind not in "biuf" and not jnp.issubdtype(signal.dtype, jnp.floating):
        raise ValueError(f"signal: expected a real dtype, got {signal.dtype}")
    if signal.shape[1] < params.frame_len:
        raise ValueError(
            f"signal: expected rows of at least {params.frame_len} samples (n_fft {params.n_fft}, "
            f"{params.n_segments} segments), got {signal.shape[1]}"
        )


def _check_model(model: LearnedFft | None, params: WelchPeakParams) -> None:
    if model is None:
        return
    if not isinstance(model, LearnedFft):
        raise ValueError(f"model: expected a LearnedFft (load_learned_fft), got {type(model).__name__}")
    if model.n_fft != params.n_fft:
        raise ValueError(
            f"model: expected one for n_fft {params.n_fft} as in params, got n_fft {model.n_fft}"
        )
    if is_traced(*jax.tree.leaves(model)):
        raise ValueError(
            "model: its gates decide the program, so they cannot be traced; use learned_spectrum"
        )


def _choose_path(
    strategy: str,
    batch: int,
    params: WelchPeakParams,
    calibration: "Calibration | None",
    model: LearnedFft | None,
    traced: bool,
) -> Path:
    if normalised(strategy) in (Path.HOST, Path.FUSED, Path.BLOCK):
        return Path.parse(strategy)
    try:
        parsed = parse_welch_peaks_strategy(strategy)
    except ValueError as error:
        raise ValueError(str(error).replace("expected one of", "expected one of host, block,")) from None
    if parsed == Strategy.LEARNED:
        return Path.LEARNED
    if parsed in (Strategy.ULTRA, Strategy.FAST):
        return Path.HOST
    if traced:
        return Path.FUSED
    candidates = (Path.FUSED, Path.BLOCK)
    if parsed != Strategy.RLX:
        candidates = (Path.HOST, *candidates) if model is None else (Path.HOST, *candidates, Path.LEARNED)
    if calibration is not None:
        if not hasattr(calibration, "pick_path"):
            raise ValueError(f"calibration: expected a Calibration (load_calibration), got {calibration!r}")
        work = None if model is None else _program(model, params).work
        return calibration.pick_path(batch, params.n_fft, params.k, params.n_segments, candidates, work)
    gates = (0, 0) if model is None else (model.active_gates, model.total_gates)
    return _cheapest_built_in(batch, params, candidates, gates, jax_device())


@functools.lru_cache(maxsize=4096)
def _cheapest_built_in(
    batch: int,
    params: WelchPeakParams,
    candidates: tuple[Path, ...],
    gates: tuple[int, int],
    device: Device,
) -> Path:
    def cost(path: Path) -> float:
        arguments = (device, batch, params.n_fft, params.k)
        if path is Path.LEARNED:
            return float(learned_path_ns(*arguments, *gates, n_segments=params.n_segments))
        return float(BUILT_IN_COSTS_NS[path](*arguments, n_segments=params.n_segments))

    with jax.ensure_compile_time_eval():
        return min(candidates, key=cost)


#: The program of each model and its parameters; a model that is gone takes its programs with it.
_programs: "weakref.WeakKeyDictionary[LearnedFft, dict[WelchPeakParams, LearnedProgram]]"
_programs = weakref.WeakKeyDictionary()


def _program(model: LearnedFft, params: WelchPeakParams) -> LearnedProgram:
    """Return the program of a model, its arrays on the device."""
    known = _programs.setdefault(model, {})
    if params not in known:
        with jax.ensure_compile_time_eval():
            known[params] = jax.device_put(learned_program(model, params))
    return known[params]


def _run_host(signal, params: WelchPeakParams, model: LearnedFft | None):
    return host_peaks(np.asarray(signal), params)


def _run_fused(signal, params: WelchPeakParams, model: LearnedFft | None):
    return _first_rows(_fused_program(_padded(signal, params), params), signal)


def _run_block(signal, params: WelchPeakParams, model: LearnedFft | None):
    spectrum = np.asarray(_spectrum_program(_padded(signal, params), params))
    return spectrum_peaks(spectrum[: signal.shape[0]], params)


def _run_learned(signal, params: WelchPeakParams, model: LearnedFft):
    return _first_rows(_learned_program(_padded(signal, params), _program(model, params), params), signal)


_RUN = {
    Path.HOST: _run_host,
    Path.FUSED: _run_fused,
    Path.BLOCK: _run_block,
    Path.LEARNED: _run_learned,
}
_RUN_TRACED = {
    Path.FUSED: lambda signal, params, model: fused_peaks(signal, params),
    Path.LEARNED: lambda signal, params, model: learned_peaks(signal, _program(model, params), params),
}
_fused_program = jax.jit(fused_peaks, static_argnames="params")
_spectrum_program = jax.jit(segment_spectra, static_argnames="params")
_learned_program = jax.jit(learned_peaks, static_argnames="params")


def _first_rows(peaks: jax.Array, signal):
    """Return the rows that were asked for; on the host for a host signal."""
    batch = signal.shape[0]
    if not isinstance(signal, jax.Array):
        return np.asarray(peaks)[:batch]
    return peaks if peaks.shape[0] == batch else peaks[:batch]


def _padded(signal, params: WelchPeakParams):
    """Return `[padded_batch, frame_len]` float32; where the signal lives, or on the host for a CPU's."""
    batch, rows = signal.shape[0], padded_batch(signal.shape[0])
    if isinstance(signal, jax.Array) and not _is_on_cpu(signal):
        prefix = signal[:, : params.frame_len].astype(jnp.float32)
        return prefix if rows == batch else jnp.pad(prefix, ((0, rows - batch), (0, 0)))
    signal = np.asarray(signal)
    if rows == batch and signal.dtype == np.float32 and signal.shape[1] == params.frame_len:
        return signal
    buffer = aligned_zeros((rows, params.frame_len))
    buffer[:batch] = signal[:, : params.frame_len]
    return buffer


def _is_on_cpu(signal: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in signal.devices())


_WHY = {
    Path.HOST: "the host path is NumPy and reads the signal's values",
    Path.BLOCK: "the block path brings the spectrum back to the host",
}
