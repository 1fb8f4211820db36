"""What a call of `welch_peaks` runs: its arguments checked, the variants that may, and which of them does."""

import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import is_symbolic, is_traced
from rlxjax._values import FrozenDict, Handle
from rlxjax.gate._codes import normalised
from rlxjax.gate._devices import Device, backend_coefficients, jax_device

from ._decided import MODEL_NAME, decided_variant, question_of_variants, with_work
from ._device_programs import default_fused_selection
from ._launch import MOST_CALLS, whole_program
from ._params import WelchPeakParams
from ._sharded import is_on_several_devices, rows_of_a_device
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


class _Call(NamedTuple):
    """What a call may run, its arguments checked.

    Attributes:
        names: what its strategy may run, by the names of `RUNS`.
        variants: the same, by the names of variants, "fused" by itself where its one form is known.
        batch: rows of a device.
        platform: that has the rows; None of NumPy's.
        calibration: by which is picked, if there is one.
        is_open: whether this process may choose by what it measures.
    """

    names: tuple[str, ...]
    variants: tuple[str, ...]
    batch: Any
    platform: str | None
    calibration: "Calibration | None"
    is_open: bool


def call_of(
    shape: tuple[Any, ...],
    dtype: np.dtype,
    where: Any,
    traced: bool,
    forked: bool,
    params: WelchPeakParams,
    strategy: str,
    calibration: "Calibration | str | None",
    model: Any,
    measure: str | None,
) -> _Call:
    """Return what a call may run."""
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
    if measure is not None:
        from rlxjax.choices import measure_word  # loaded when first used

        measure_word(measure, "never")
    by = None if isinstance(calibration, str) else calibration
    asked = bool(measure or os.environ.get("RLXJAX_MEASURE")) and calibration != REFERENCE
    if calibration is None and (asked or len(names) > 1):
        from rlxjax.calibration import default_calibration  # loaded when first used

        by = default_calibration(platform)
    is_alone = not (traced or forked or several)
    variants = _variants_of(names, batch, params, platform)
    return _Call(names, variants, batch, platform, by, is_alone and (asked or by is not None))


@functools.lru_cache(maxsize=MOST_CALLS)
def choice(
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
    run: Callable[[str], Any] | None = None,
) -> tuple[WelchVariant | None, Callable[[], Any] | None]:
    """Return what a call runs, the arguments checked, and its program's recipe if that takes the signal as it is.

    What raises is not remembered. It is no variant where the environment asks to measure, and no `run` is given, which
    computes the peaks by a variant.
    """
    del device  # programs are compiled for JAX's default one
    calibration, model = (given() if isinstance(given, Handle) else given for given in (calibration, model))
    assert not isinstance(calibration, Handle)
    call = call_of(shape, dtype, where, traced, forked, params, strategy, calibration, model, measure)
    names, by = call.names, call.calibration
    if call.is_open and len(call.variants) > 1 and call.batch:
        given = call.variants, shape, dtype, params, by, model, call.platform
        found = decided_variant(functools.partial(question_of_variants, *given), measure, run)
        if found is None:
            return None, None
        names = (found,) if found else names
    name = names[0]
    if len(names) > 1:
        pick = _built_in_pick if by is None else functools.partial(_calibrated_pick, by)
        name = pick(names, call.batch, params, model, call.platform)
    variant = RUNS[name]
    if by is not None and name == "fused" and "fused" not in call.variants:
        sizes = call.batch, params.n_fft, min(params.k, params.n_bins), params.n_segments
        variant = VARIANTS[by.of(MODEL_NAME).variant_of(name, *sizes)]
    is_fused = variant.transform == "fft" and variant.selection != "numpy"
    is_whole = is_fused and dtype == np.float32 and not traced
    return variant, whole_program(shape, params, variant, where) if is_whole else None


#: By call, calibration, model and what is asked, the choices of calls that may measure.
_choices: dict[Any, tuple[WelchVariant, Callable[[], Any] | None]] = {}


def measured_choice(
    call: tuple[Any, ...], by: tuple[Any, Any], measure: str | None, run: Callable[[str], Any]
) -> tuple[WelchVariant, Callable[[], Any] | None]:
    """Return what a call runs that `run` may measure, by the name of a variant, once for each kind of call."""
    key = *call, *by, measure or os.environ.get("RLXJAX_MEASURE")
    try:
        if (known := _choices.get(key)) is not None:
            return known
    except TypeError:  # of an argument that has no hash
        key = None
    variant, program = choice.__wrapped__(*call, *by, measure, run)
    assert variant is not None  # as there is a `run`
    if key is not None:
        if key[-1] != "never":
            ask_again(key[:-1])
        _choices[key] = variant, program
        for oldest in list(_choices)[: max(len(_choices) - MOST_CALLS, 0)]:
            _choices.pop(oldest, None)
    return variant, program


def ask_again(asked: tuple[Any, ...] = ()) -> None:
    """Let calls ask again that measure nothing, and those that ask the same otherwise: something was measured."""
    choice.cache_clear()
    for key in [key for key in list(_choices) if key[-1] == "never" or key[:-1] == asked]:
        _choices.pop(key, None)


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
    """Refuse peaks that memory cannot hold, which a device's program would end the process for."""
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
