"""`welch_peaks`: checks what comes in, chooses what runs, and gives back what was asked."""

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from rlxjax._checks import as_index, is_symbolic, is_traced
from rlxjax._chunks import background, is_forked
from rlxjax._values import FrozenDict, Handle, handle
from rlxjax.device._codes import normalised
from rlxjax.device._devices import Device, backend_coefficients, jax_device

from ._decided import MODEL_NAME, decided_variant, with_work
from ._device_programs import default_fused_selection
from ._launch import (
    MOST_PROGRAMS,
    keep_compiled,
    run_program,
    run_sharded,
    run_traced,
    run_variant,
    whole_program,
)
from ._params import WelchPeakParams
from ._sharded import is_on_several_devices, row_axes, rows_of_a_device, split_rows
from ._variants import RUNS, VARIANTS, WelchVariant
from .costs._formulas import learned_scale
from .costs._path_costs import block_graph_ns, fused_graph_ns, host_path_ns
from .costs._strategy import AUTO, ReferenceStrategy, parse_welch_peaks_strategy

if TYPE_CHECKING:
    from rlxjax.calibration import Calibration

#: What a calibration may be called that is none: the reference's built-in coefficients.
REFERENCE = "reference"
#: What the names of the reference, and "auto", may run, in the order in which ties are resolved.
CANDIDATES: Mapping[str, tuple[str, ...]] = FrozenDict(
    {
        ReferenceStrategy.ULTRA: ("host",),
        ReferenceStrategy.FAST: ("host",),
        ReferenceStrategy.RLX: ("fused", "block"),
        ReferenceStrategy.LEARNED: ("learned",),
        AUTO: ("host", "fused", "block", "learned"),
    }
)
#: Peaks of fewer bytes are not checked for whether memory holds them; copies there are of them at most.
LEAST_CHECKED_BYTES, COPIES_OF_PEAKS = 2**26, 2


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
        strategy: how it is computed. "host" (NumPy, no device), "fused" (one program on the device, only
            peaks come back), "block" (the spectrum comes back, the host selects), "learned" (fused, with
            the pruned program of `model`, whose peaks are approximate), "auto" (the cheapest by the
            calibration; learned among them if a model is given), or
            any name that `parse_welch_peaks_strategy` knows (ultra and fast mean host, rlx the cheaper of
            fused and block). "fused_maxima" and "fused_top_k" say how the device selects peaks, which are
            the same; "fused" takes the faster form, by the calibration where one is given, else as measured on
            such devices. Inside a caller's own jit, grad or vmap only fused and learned can run, and
            auto means fused, as it does for rows on several devices.
        calibration: a calibration of this machine, for auto and rlx; `default_calibration()` unless given: the one
            that `rlxjax calibrate` saved, else what known CPUs say. "reference" means the reference's built-in
            coefficients, which platforms without either fall back on.
        model: a learned FFT for `params.n_fft`.
        measure: "undecided" also times what auto, rlx and fused may run, on these rows, where the calibration does not
            say surely which is the fastest; "always" times all of it, "never" none. What was measured is remembered, as
            `rlxjax.choose` does it, and holds in later calls whatever they ask for. `RLXJAX_MEASURE` unless given, and
            "never" where that is not set.

    Returns:
        float32 `[batch, k, 2]` of (bin, power), descending by power; equal powers keep the lower bin
        first, NaN powers come last, and slots beyond the bins are (0, 0.0). Of infinite samples come
        infinite and NaN powers; which bin has which depends on the strategy. NumPy, the caller's own to write
        to, for a NumPy signal, a JAX array for a JAX one, on the same devices and sharded as its rows.

    Raises:
        ValueError: a complex or masked signal, one of three or more axes or shorter than `frame_len`, one whose
            samples are sharded, an unknown strategy, one that cannot run inside traced code, "learned" without a
            model, a model for another segment length, a calibration that is none, one of a device in a forked
            process, where JAX cannot run and auto means host, or another word for `measure`.
        MemoryError: peaks that memory cannot hold.

    Few rows are one call of one program. They are padded with copies of the last row to the next of four
    sizes an octave (`padded_batch`), so that varying batches compile a bounded number of programs. More rows are
    computed in chunks, on every processor: memory beyond the signal and the peaks follows from the chunk and
    from how many processors there are.

    In traced code no rows are padded; a gradient keeps the transforms of all of them.

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
    # What a call does follows from little, and is looked up: within 1 us, in which the threads of XLA stay awake.
    call = signal.shape, signal.dtype, where, device, traced, forked, params, strategy
    try:
        by = None if calibration is None else handle(calibration), None if model is None else handle(model)
        variant, program = (None, None) if measure else _choice(*call, *by)
    except TypeError:  # of an argument that has no hash, which is refused by its name
        by = calibration, model
        variant, program = _choice.__wrapped__(*call, *by)
    if variant is None:
        variant, program = _measured(call, by, measure, signal)
    if program is not None:
        peaks = run_program(program, signal)
        return _placed_as(peaks, signal) if is_jax else np.array(peaks)
    if signal.ndim == 1:
        signal = signal[None]
    if traced:
        return run_traced(variant, signal, params, model)
    # A constant inside a caller's jit is not traced, and is computed at once.
    run = run_sharded if is_on_several_devices(where) else run_variant
    peaks = run(variant, signal, params, model)  # pyright: ignore[reportArgumentType]
    if is_jax:
        return _placed_as(peaks, signal)
    peaks = np.asarray(peaks)  # those of one chunk are a view of the device's own memory
    return peaks if peaks.flags.writeable else peaks.copy()


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
    with background() as start:
        while failure is None:
            try:
                following = start(
                    welch_peaks,
                    _held(next(source)),
                    params,
                    strategy,
                    calibration=calibration,
                    model=model,
                    measure=measure,
                )
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
    global _choice
    as_index(most, "most", at_least=1)
    keep_compiled(most)
    _choice = functools.lru_cache(most)(_choice.__wrapped__)
    _choices.clear()


def _placed_as(peaks: np.ndarray | jax.Array, signal: Any) -> jax.Array:
    """Return peaks where a signal's rows lie, sharded as they are."""
    where = signal.sharding
    if isinstance(peaks, jax.Array) and (
        isinstance(peaks.sharding, NamedSharding) or not isinstance(where, NamedSharding)
    ):
        return peaks
    place: Any = next(iter(where.device_set)) if signal.committed else None
    if isinstance(where, NamedSharding):
        place = NamedSharding(where.mesh, split_rows(row_axes(where, signal.shape)))
    with jax.ensure_compile_time_eval():
        return jax.device_put(peaks, place)


def _held(signal) -> np.ndarray | jax.Array:
    """Return a signal that its source does not change."""
    if is_traced(signal):
        raise ValueError("signals: expected concrete ones, got a traced one; use welch_peaks in traced code")
    return signal if isinstance(signal, jax.Array) else np.array(signal)


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _choice(
    shape: tuple[Any, ...],
    dtype: np.dtype,
    where: Any,
    device: Any,
    traced: bool,
    forked: bool,
    params: WelchPeakParams,
    strategy: str,
    calibration: "Handle | Calibration | str | None",
    model: Any,
    measure: str | None = None,
    signal: Any = None,
) -> tuple[WelchVariant | None, Callable[..., jax.Array] | None]:
    """Return what a call runs, the arguments checked, and its program where that takes the signal as it is.

    What raises is not remembered. It is no variant where the environment asks to measure, for which `signal` is needed.
    """
    del device  # programs are compiled for JAX's default one
    calibration, model = (given() if isinstance(given, Handle) else given for given in (calibration, model))
    assert not isinstance(calibration, Handle)
    _check_signal(shape if len(shape) != 1 else (1, *shape), dtype, params)
    _check_model(model, params)
    if calibration is not None and calibration != REFERENCE and not hasattr(calibration, "of"):
        given = type(calibration).__name__
        raise ValueError(f"calibration: expected a Calibration (load_calibration) or {REFERENCE!r}, got {given}")
    batch, platform = (1, *shape)[-2], None if where is None else next(iter(where.device_set)).platform
    several, is_here = is_on_several_devices(where), where is None or where.is_fully_addressable
    names = _candidates(strategy, model is not None, traced, forked, platform, several)
    if several:
        batch = rows_of_a_device(where, shape)
        if not is_here and RUNS[names[0]].selection == "numpy":
            raise ValueError(
                f"strategy: expected 'fused' or 'learned' where other processes hold rows, got {strategy!r}: "
                f"{_WHY_NOT_TRACED[names[0]]}"
            )
    _check_peaks_fit(((1, *shape)[-2] if is_here else batch, params.k, 2))
    by = None if isinstance(calibration, str) else calibration
    asked = (measure or os.environ.get("RLXJAX_MEASURE")) if calibration != REFERENCE else None
    if calibration is None and (asked or len(names) > 1):
        from rlxjax.calibration import default_calibration  # loaded when first used

        by = default_calibration(platform)
    variants = _variants_of(names, batch, params, platform)
    if len(variants) > 1 and (asked or by) and not (traced or forked or several) and batch:
        what = {"dtype": str(dtype), "shape": list(shape), "platform": platform}  # None of NumPy's arrays
        found = decided_variant(variants, batch, params, by, model, what, measure, signal)
        if found is None:
            return None, None
        names = (found,) if found else names
    name = names[0]
    if len(names) > 1:
        pick = _built_in_pick if by is None else functools.partial(_calibrated_pick, by)
        name = pick(names, batch, params, model, platform)
    variant = RUNS[name]
    if by is not None and name == "fused" and len(_variants_of((name,), batch, params, platform)) > 1:
        sizes = batch, params.n_fft, min(params.k, params.n_bins), params.n_segments
        variant = VARIANTS[by.of(MODEL_NAME).variant_of(name, *sizes)]
    is_fused = variant.transform == "fft" and variant.selection != "numpy"
    is_whole = is_fused and dtype == np.float32 and not traced
    return variant, whole_program(shape, params, variant, where) if is_whole else None


#: By call, calibration, model and what is asked, the choices of calls that may measure.
_choices: dict[Any, tuple[WelchVariant, Callable[..., jax.Array] | None]] = {}


def _measured(
    call: tuple[Any, ...], by: tuple[Any, Any], measure: str | None, signal: Any
) -> tuple[WelchVariant, Callable[..., jax.Array] | None]:
    """Return what a call runs that may be measured on its rows, once for each kind of call."""
    key = *call, *by, measure or os.environ.get("RLXJAX_MEASURE")
    try:
        if (known := _choices.get(key)) is not None:
            return known
    except TypeError:  # of an argument that has no hash
        return _choice.__wrapped__(*call, *by, measure, signal)
    found = _choice.__wrapped__(*call, *by, measure, signal)
    if len(_choices) >= MOST_PROGRAMS:
        del _choices[next(iter(_choices))]
    _choices[key] = found
    return found


def _variants_of(names: tuple[str, ...], batch: Any, params: WelchPeakParams, platform: str | None) -> tuple[str, ...]:
    """Return the variants that strategies may run, "fused" by itself where its one form is known."""
    found: list[str] = []
    for name in names:
        is_several = (
            name == "fused" and default_fused_selection(batch, params, platform or jax.default_backend()) != "kernel"
        )
        found += ("fused_maxima", "fused_top_k") if is_several else (name,)
    return tuple(found)


def _candidates(
    strategy: str, has_model: bool, traced: bool, forked: bool, platform: str | None, several: bool = False
) -> tuple[str, ...]:
    """Return what a strategy may run, by the names of `RUNS`.

    JAX's rows lie on one device of a `platform`, or on `several`.
    """
    own = normalised(strategy).replace("-", "_")
    if own in RUNS:
        names = (own,)
    else:
        try:
            names = CANDIDATES[parse_welch_peaks_strategy(strategy)]
        except ValueError as error:
            raise ValueError(str(error).replace("expected one of", "expected one of host, block,")) from None
    if names == ("learned",) and not has_model:
        raise ValueError("strategy: 'learned' needs a learned FFT (model=), and none was given")
    if traced and all(RUNS[name].selection == "numpy" for name in names):
        raise ValueError(
            f"strategy: expected 'fused' or 'learned' inside traced code, got {strategy!r}: {_WHY_NOT_TRACED[names[0]]}"
        )
    if forked and all(RUNS[name].transform != "numpy" for name in names):
        raise ValueError(
            f"strategy: expected 'host', got {strategy!r}: JAX cannot run in this process, which was forked "
            "(start processes by spawn)"
        )
    if len(names) == 1:
        return names
    if traced or (several and not forked):  # what each process of several chooses alike
        return ("fused",)
    if forked:  # where JAX cannot compute costs either
        return ("host",)
    reads_back = platform not in (None, "cpu")  # as the host would all rows, and a block their spectra
    left_out = (*(("host", "block") if reads_back else ()), "" if has_model else "learned")
    return tuple(name for name in names if name not in left_out)


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


def _calibrated_pick(
    calibration: "Calibration",
    candidates: tuple[str, ...],
    batch: int,
    params: WelchPeakParams,
    model: Any,
    platform: str | None,
) -> str:
    """Return the candidate with the lowest prediction, a model at hand by its own work."""
    del platform
    calibrated = calibration.of(MODEL_NAME)
    if not len(calibrated.posterior.facts["learned_n_fft"]):
        candidates = tuple(name for name in candidates if name != "learned")  # none was ever timed
    elif model is not None:
        calibrated = with_work(calibrated, model, params)
    return calibrated.cheapest(candidates, batch, params.n_fft, min(params.k, params.n_bins), params.n_segments)


def _built_in_pick(
    candidates: tuple[str, ...], batch: int, params: WelchPeakParams, model: Any, platform: str | None
) -> str:
    """Return the candidate of least built-in cost: where the host is one, rows are sent to devices of other memory."""
    device = Device.CPU if platform == "cpu" else jax_device()
    row = backend_coefficients(device.value)
    upload_ns = 0.0 if row.unified_memory else 4.0 * batch * params.frame_len / float(row.readback_bw)

    def cost(name: str) -> float:
        sizes, n_segments = (device, batch, params.n_fft, params.k), params.n_segments
        if name == "host":
            return float(host_path_ns(*sizes, n_segments=n_segments))
        if name == "block":
            return float(block_graph_ns(*sizes, n_segments=n_segments)) + upload_ns
        if name == "learned" and 4 * model.active_gates >= model.total_gates:
            return math.inf
        scale = learned_scale(model.active_gates, model.total_gates) if name == "learned" else 1.0
        return float(fused_graph_ns(*sizes, scale, n_segments=n_segments)) + upload_ns

    with jax.ensure_compile_time_eval():
        return min(candidates, key=cost)


_WHY_NOT_TRACED = {
    "host": "the host path is NumPy and reads the signal's values",
    "block": "the block path brings the spectrum back to the host",
}
