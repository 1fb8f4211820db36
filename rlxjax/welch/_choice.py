"""What a call of `welch_peaks` runs: its arguments checked, the variants that may, and which of them does.

It is chosen as `rlxjax.choose` chooses: by what is remembered, by a calibration where that is sure, by timing where
that is asked for. The reference's built-in costs decide where no calibration is known.
"""

import dataclasses
import functools
import hashlib
import math
import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import is_symbolic, is_traced
from rlxjax._schedule import RUNNER_VERSION
from rlxjax._values import FrozenDict, handle
from rlxjax.gate import Device, backend_coefficients, jax_device, normalised

from ._device_programs import default_fused_selection
from ._launch import MOST_CALLS, is_on_several_devices, program_of, rows_of_a_device, whole_program
from ._workload import RUNS, VARIANTS, WelchPeakParams, WelchVariant
from .costs import (
    AUTO,
    ReferenceStrategy,
    block_graph_ns,
    fused_graph_ns,
    host_path_ns,
    learned_scale,
    parse_welch_peaks_strategy,
)

if TYPE_CHECKING:
    from rlxjax.calibration import CalibratedModel, Calibration
    from rlxjax.choices import Choice, Work

#: The name of this workload among a calibration's models.
MODEL_NAME = "welch"
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
_WHY_NOT_TRACED = {
    "host": "the host path is NumPy and reads the signal's values",
    "block": "the block path brings the spectrum back to the host",
}


class Call(NamedTuple):
    """What of a call decides what it may run; all of it has a hash.

    Attributes:
        shape: of the signal, `[batch, length]` or `[length]`.
        dtype: of the signal.
        where: the sharding of rows that JAX holds; None of NumPy's and of traced ones.
        device: JAX's default one, which programs are compiled for.
        traced: whether the signal is.
        forked: whether this process was forked.
        params: of the run.
        strategy: as the caller spells it.
    """

    shape: tuple[Any, ...]
    dtype: np.dtype
    where: Any
    device: Any
    traced: bool
    forked: bool
    params: WelchPeakParams
    strategy: str


class Candidates(NamedTuple):
    """What a call may run, its arguments checked.

    Attributes:
        names: what its strategy may run, by the names of `RUNS`.
        variants: the same, by the names of variants, "fused" by itself where its one form is known.
        sizes: of the latency model, the rows being those of a device.
        platform: that has the rows; None of NumPy's.
        calibration: by which is picked, if there is one.
        is_open: whether this process may choose by what it measures.
    """

    names: tuple[str, ...]
    variants: tuple[str, ...]
    sizes: dict[str, Any]
    platform: str | None
    calibration: "Calibration | None"
    is_open: bool


#: By call, calibration, model and what is to be measured: what runs, the latest last.
_choices: dict[Any, tuple[WelchVariant, Callable[[], Any] | None]] = {}
_lock = threading.Lock()


def choice(
    call: Call, calibration: "Calibration | str | None", model: Any, measure: str | None, run: Callable[[str], Any]
) -> tuple[WelchVariant, Callable[[], Any] | None]:
    """Return what a call runs, and its program's recipe if that takes the signal as it is; `run` measures a variant.

    What raises is not remembered.
    """
    try:
        key = *call, handle(calibration), handle(model), measure or os.environ.get("RLXJAX_MEASURE")
        if (known := _choices.get(key)) is not None:
            return known
    except TypeError:  # of an argument that has no hash, which is refused by its name
        key = None
    own = candidates(call, calibration, model, measure)
    name = _chosen(call, own, model, measure, run) or _picked(call, own, model)
    variant, by = RUNS[name], own.calibration
    if by is not None and name == "fused" and "fused" not in own.variants:
        variant = VARIANTS[by.of(MODEL_NAME).variant_of(name, **own.sizes)]
    is_fused = variant.transform == "fft" and variant.selection != "numpy"
    is_whole = is_fused and call.dtype == np.float32 and not call.traced
    found = variant, whole_program(call.shape, call.params, variant, call.where) if is_whole else None
    if key is not None:
        with _lock:
            _choices[key] = found
            if len(_choices) > MOST_CALLS:
                del _choices[next(iter(_choices))]
    return found


def candidates(call: Call, calibration: "Calibration | str | None", model: Any, measure: str | None) -> Candidates:
    """Return what a call may run."""
    shape, params, where, strategy = call.shape, call.params, call.where, call.strategy
    _check_signal(shape if len(shape) != 1 else (1, *shape), call.dtype, params)
    _check_model(model, params)
    if calibration is not None and calibration != REFERENCE and not hasattr(calibration, "of"):
        given = type(calibration).__name__
        raise ValueError(f"calibration: expected a Calibration (load_calibration) or {REFERENCE!r}, got {given}")
    batch, platform = (1, *shape)[-2], None if where is None else next(iter(where.device_set)).platform
    several, is_here = is_on_several_devices(where), where is None or where.is_fully_addressable
    names = _candidates(strategy, model is not None, call.traced, call.forked, platform, several)
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
    if by is not None and len(names) > 1 and "learned" in names:
        known = by.models.get(MODEL_NAME)
        if known is not None and not len(known.posterior.facts["learned_n_fft"]):  # none was ever timed
            names = tuple(name for name in names if name != "learned")
    variants: list[str] = []
    for name in names:
        is_known = (
            name != "fused" or default_fused_selection(batch, params, platform or jax.default_backend()) == "kernel"
        )
        variants += (name,) if is_known else ("fused_maxima", "fused_top_k")
    sizes = {"batch": batch, "n_fft": params.n_fft, "k": min(params.k, params.n_bins), "n_segments": params.n_segments}
    is_open = not (call.traced or call.forked or several) and (asked or by is not None)
    return Candidates(names, tuple(variants), sizes, platform, by, is_open)


def work_of(call: Call, own: Candidates, model: Any, run: Callable[[str], Any]) -> "Work":
    """Return the variants that may run as ways to do a call."""
    from rlxjax.choices import Way, Work, digest, predicted_variants

    sizes, ways = {name: float(size) for name, size in own.sizes.items()}, []
    for variant in own.variants:
        content = digest(MODEL_NAME, RUNNER_VERSION, variant, _content_of(model) if variant == "learned" else "")
        run_variant = functools.partial(run, variant)
        ways.append(Way(variant, content=content, fn=run_variant, call=run_variant))

    def predict(known: "CalibratedModel") -> Any:
        by = _with_work(known, model, call.params) if "learned" in own.variants else known
        found, sd_ns = predicted_variants(ways, sizes, by)
        # The model's facts do not say the work of this learned FFT: its time is not to teach them.
        return [dataclasses.replace(one, runs=()) if one.name == "learned" else one for one in found], sd_ns

    label = ", ".join(f"{name} {size}" for name, size in own.sizes.items())
    workload = {**own.sizes, "shape": list(call.shape), "dtype": str(call.dtype), "platform": own.platform}
    calibrated = None if own.calibration is None else own.calibration.models.get(MODEL_NAME)
    return Work(ways, predict, calibrated, MODEL_NAME, label, workload, runner=RUNNER_VERSION)


def decided(work: "Work", measure: str | None) -> "Choice":
    """Return the choice; calls may ask again once something was measured."""
    from rlxjax.choices import decide, measure_word

    word = measure_word(measure, "never") if work.workload["batch"] else "never"
    found = decide(work, word, check=False)  # a learned FFT is approximate, and the others are tested
    if found.by == "measured":
        forget_choices()
    return found


def forget_choices() -> None:
    """Let calls ask again what they run."""
    with _lock:
        _choices.clear()


def _chosen(call: Call, own: Candidates, model: Any, measure: str | None, run: Callable[[str], Any]) -> str:
    """Return the variant that is remembered, measured, or sure by what the model learned; empty if there is none."""
    if not (own.is_open and len(own.variants) > 1 and own.sizes["batch"]):
        return ""
    from rlxjax.choices import Memory, measure_word, recalled  # loaded when first used

    is_asked = measure_word(measure, "never") != "never"
    if not is_asked and not Memory().path.exists():
        return ""
    work = work_of(call, own, model, run)
    is_known = is_asked or work.calibrated is not None
    found = decided(work, measure) if is_known else recalled(work, check=False)
    return "" if found is None else found.name


def _picked(call: Call, own: Candidates, model: Any) -> str:
    """Return the candidate with the lowest prediction, a model at hand by its own work, or of least built-in cost."""
    if len(own.names) == 1:
        return own.names[0]
    if own.calibration is None:
        return _built_in_pick(own.names, own.sizes["batch"], call.params, model, own.platform)
    known = own.calibration.of(MODEL_NAME)
    if "learned" in own.names:
        known = _with_work(known, model, call.params)
    return known.cheapest(own.names, **own.sizes)


def _with_work(calibrated: "CalibratedModel", model: Any, params: WelchPeakParams) -> "CalibratedModel":
    """Return the model of Welch peaks where a learned FFT runs with the work of the one that is given."""
    return _with_facts(calibrated, params.n_fft, program_of(model, params).work)


@functools.lru_cache(maxsize=16)
def _with_facts(calibrated: "CalibratedModel", n_fft: int, work: Any) -> "CalibratedModel":
    facts = {"learned_n_fft": n_fft, "learned_flop": work.flop, "learned_live_bins": work.live_bins}
    return calibrated.with_facts(**{name: np.array([value], float) for name, value in facts.items()})


def _content_of(model: Any) -> str:
    """Return the digest of a learned FFT."""
    leaves, structure = jax.tree.flatten(model)
    found = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


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
