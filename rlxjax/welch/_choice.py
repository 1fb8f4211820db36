"""Check the arguments of a `welch_peaks` call, and choose the variant that runs.

As in `rlxjax.choose`, a remembered choice decides first, then a calibration that is sure of the fastest variant, then
timing if the caller asks for it. Otherwise the calibration decides, or the built-in costs if there is no calibration.
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
from rlxjax.units import bytes_text

from ._device_programs import default_fused_selection
from ._launch import MOST_CALLS, program_of, rows_of_a_device, whole_program
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

#: The name of the latency model of Welch peaks in a calibration, and the name of the built-in coefficients.
MODEL_NAME, REFERENCE = "welch", "reference"
#: For each strategy of the reference and for "auto": its allowed names in `RUNS`. A tie goes to the earlier name.
CANDIDATES: Mapping[str, tuple[str, ...]] = FrozenDict(
    {
        ReferenceStrategy.ULTRA: ("host",),
        ReferenceStrategy.FAST: ("host",),
        ReferenceStrategy.RLX: ("fused", "block"),
        ReferenceStrategy.LEARNED: ("learned",),
        AUTO: ("host", "fused", "block", "learned"),
    }
)
#: Only arrays of peaks that take at least this number of bytes are compared with the memory of the machine.
LEAST_CHECKED_BYTES = 2**26
#: The largest number of copies of the peaks that a run holds at the same time.
COPIES_OF_PEAKS = 2
_WHY_NOT_TRACED = {
    "host": "NumPy reads the signal's values on the host",
    "block": "the host reads the spectrum",
}


class Call(NamedTuple):
    """The properties of a call that determine which variants are allowed. All properties are hashable."""

    shape: tuple[Any, ...]  # the signal's shape, `[batch, length]` or `[length]`
    dtype: np.dtype
    where: Any  # the sharding of a JAX array; None for NumPy arrays and traced arrays
    device: Any  # JAX's default device: programs are compiled for this device
    traced: bool
    forked: bool
    params: WelchPeakParams
    strategy: str  # as the caller spelled the name

    @property
    def platform(self) -> str | None:
        """The platform of the device that holds the rows; None for NumPy arrays and traced arrays."""
        return None if self.where is None else next(iter(self.where.device_set)).platform

    @property
    def several(self) -> bool:
        return self.where is not None and len(self.where.device_set) > 1


#: The chosen variant and program, by call, calibration, model and `measure`. The newest entry comes last.
_choices: dict[Any, tuple[WelchVariant, Callable[[], Any] | None]] = {}
_lock = threading.Lock()


def choice(
    call: Call, calibration: "Calibration | str | None", model: Any, measure: str | None, run: Callable[[str], Any]
) -> tuple[WelchVariant, Callable[[], Any] | None]:
    """Return the variant for a call, and a function that gives its program, or None if the signal must be prepared."""
    try:
        key = *call, handle(calibration), handle(model), measure or os.environ.get("RLXJAX_MEASURE")
        if (known := _choices.get(key)) is not None:
            return known
    except TypeError:  # a later check refuses an argument without a hash
        key = None
    asked = question(call, calibration, model, measure, run)
    name = asked.decided_name() or asked.predicted_name()
    variant, by = RUNS[name], asked.calibration
    if by is not None and name == "fused" and "fused" not in asked.variants:
        variant = VARIANTS[by.of(MODEL_NAME).variant_of(name, **asked.sizes)]
    is_fused = variant.transform == "fft" and variant.selection != "numpy"
    is_whole = is_fused and call.dtype == np.float32 and not call.traced
    found = variant, whole_program(call.shape, call.params, variant, call.where) if is_whole else None
    if key is not None:
        with _lock:
            _choices[key] = found
            if len(_choices) > MOST_CALLS:
                del _choices[next(iter(_choices))]
    return found


def forget_choices() -> None:
    """Forget the chosen variants of all calls, so that later calls choose again."""
    with _lock:
        _choices.clear()


@dataclasses.dataclass(frozen=True)
class Question:
    """A call of `welch_peaks` whose arguments are checked, and whose variant is not chosen yet."""

    call: Call
    model: Any
    measure: str | None
    run: Callable[[str], Any]  # runs the variant of a name, for measurements
    names: tuple[str, ...]  # names in `RUNS` that the call's strategy allows
    variants: tuple[str, ...]  # variants of these names; "fused" is a variant if only one form of "fused" can run
    sizes: dict[str, Any]  # inputs of the latency model; the batch is the number of rows on one device
    calibration: "Calibration | None"  # predicts the times
    is_open: bool  # whether measurements in this process may decide

    def work(self) -> "Work":
        """Return the alternatives of a choice: the allowed variants, and how to predict their times."""
        from rlxjax.choices import Way, Work, digest, predicted_variants

        call, sizes, ways = self.call, {name: float(size) for name, size in self.sizes.items()}, []
        for variant in self.variants:
            content = digest(MODEL_NAME, RUNNER_VERSION, variant, self._content() if variant == "learned" else "")
            fn = functools.partial(self.run, variant)
            ways.append(Way(variant, content=content, fn=fn, call=fn))

        def predict(known: "CalibratedModel") -> Any:
            return predicted_variants(ways, sizes, self._own(known))

        label = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        workload = {**self.sizes, "shape": list(call.shape), "dtype": str(call.dtype), "platform": call.platform}
        calibrated = None if self.calibration is None else self.calibration.models.get(MODEL_NAME)
        return Work(ways, predict, calibrated, MODEL_NAME, label, workload)

    def decided(self) -> "Choice":
        """Return the choice. If the choice was measured, forget the chosen variants of all calls."""
        from rlxjax.choices import decide, measure_word

        word = measure_word(self.measure, "never") if self.sizes["batch"] else "never"
        found = decide(self.work(), word, check=False)  # the results of a learned FFT differ from exact results
        if found.by == "measured":
            forget_choices()
        return found

    def decided_name(self) -> str:
        """Return the variant that a remembered choice, a measurement or a sure model decides on, or else ""."""
        if not (self.is_open and len(self.variants) > 1 and self.sizes["batch"]):
            return ""
        from rlxjax.choices import Memory, measure_word, recalled  # loaded when first used

        is_asked = measure_word(self.measure, "never") != "never"
        if not is_asked and not Memory().path.exists():
            return ""
        is_known = is_asked or (self.calibration is not None and MODEL_NAME in self.calibration.models)
        found = self.decided() if is_known else recalled(self.work(), check=False)
        return "" if found is None else found.name

    def predicted_name(self) -> str:
        """Return the name of the variant with the lowest time, as predicted by the calibration or by built-in costs."""
        if len(self.names) == 1:
            return self.names[0]
        if self.calibration is None:
            return built_in_pick(self.names, self.sizes["batch"], self.call.params, self.model, self.call.platform)
        return self._own(self.calibration.of(MODEL_NAME)).pick(candidates=self.names, **self.sizes)

    def _own(self, calibrated: "CalibratedModel") -> "CalibratedModel":
        """Return the latency model. If the call may run a learned FFT, the model knows the work of that learned FFT."""
        if "learned" not in self.names:
            return calibrated
        n_fft = self.call.params.n_fft
        return _with_work(calibrated, n_fft, program_of(self.model, self.call.params).work)

    def _content(self) -> str:
        leaves, structure = jax.tree.flatten(self.model)
        found = hashlib.sha256(str(structure).encode())
        for leaf in leaves:
            found.update(np.asarray(leaf).tobytes())
        return found.hexdigest()


@functools.lru_cache(maxsize=16)
def _with_work(calibrated: "CalibratedModel", n_fft: int, work: Any) -> "CalibratedModel":
    facts = {"learned_n_fft": n_fft, "learned_flop": work.flop, "learned_live_bins": work.live_bins}
    return calibrated.with_facts(**{name: np.array([value], float) for name, value in facts.items()})


def question(
    call: Call, calibration: "Calibration | str | None", model: Any, measure: str | None, run: Callable[[str], Any]
) -> Question:
    """Check a call, and return it as a `Question`. Raise a `ValueError` if the call cannot run."""
    params, where = call.params, call.where
    _check_signal(call)
    _check_model(model, params)
    if calibration is not None and calibration != REFERENCE and not hasattr(calibration, "of"):
        given = type(calibration).__name__
        raise ValueError(f"calibration: expected a Calibration (load_calibration) or {REFERENCE!r}, got {given}")
    names, batch = _candidates(call, model is not None), (1, *call.shape)[-2]
    own_batch = rows_of_a_device(where, call.shape) if call.several else batch
    is_here = where is None or where.is_fully_addressable
    if call.several and not is_here and RUNS[names[0]].selection == "numpy":
        why = f"got {call.strategy!r}: {_WHY_NOT_TRACED[names[0]]}"
        raise ValueError(f"strategy: expected 'fused' or 'learned' because other processes hold rows, {why}")
    _check_peaks_fit((batch if is_here else own_batch, params.k, 2))
    if measure is not None:
        from rlxjax.choices import measure_word  # loaded when first used

        measure_word(measure, "never")
    by = None if isinstance(calibration, str) else calibration
    asked = bool(measure or os.environ.get("RLXJAX_MEASURE")) and calibration != REFERENCE
    if calibration is None and (asked or len(names) > 1):
        from rlxjax.calibration import default_calibration  # loaded when first used

        by = default_calibration(call.platform)
    if by is not None and len(names) > 1 and "learned" in names and (known := by.models.get(MODEL_NAME)) is not None:
        was_timed = len(known.posterior.facts["learned_n_fft"]) > 0
        names = tuple(name for name in names if was_timed or name != "learned")
    forms = ("fused",)
    if "fused" in names:
        selection = default_fused_selection(own_batch, params, call.platform or jax.default_backend())
        forms = forms if selection == "kernel" else ("fused_maxima", "fused_top_k")
    variants = tuple(variant for name in names for variant in (forms if name == "fused" else (name,)))
    sizes = {"batch": own_batch, "n_fft": params.n_fft, "k": min(params.k, params.n_bins)}
    sizes["n_segments"] = params.n_segments
    is_open = not (call.traced or call.forked or call.several) and (asked or by is not None)
    return Question(call, model, measure, run, names, variants, sizes, by, is_open)


def _candidates(call: Call, has_model: bool) -> tuple[str, ...]:
    """Return the names in `RUNS` that a call's strategy allows."""
    own = normalised(call.strategy).replace("-", "_")
    try:
        names = (own,) if own in RUNS else CANDIDATES[parse_welch_peaks_strategy(call.strategy)]
    except ValueError as error:
        raise ValueError(str(error).replace("expected one of", "expected one of host, block,")) from None
    if names == ("learned",) and not has_model:
        raise ValueError("strategy: 'learned' needs a learned FFT (model=), and none was given")
    if call.traced and all(RUNS[name].selection == "numpy" for name in names):
        why = f"got {call.strategy!r}: {_WHY_NOT_TRACED[names[0]]}"
        raise ValueError(f"strategy: expected 'fused' or 'learned' inside traced code, {why}")
    if call.forked and all(RUNS[name].transform != "numpy" for name in names):
        why = "JAX cannot run in a forked process; start the process by spawn"
        raise ValueError(f"strategy: expected 'host', got {call.strategy!r}: {why}")
    if len(names) == 1:
        return names
    if call.traced or (call.several and not call.forked):  # all processes have to make the same choice
        return ("fused",)
    if call.forked:  # JAX cannot run the programs or compute their costs
        return ("host",)
    reads_back = call.platform not in (None, "cpu")  # "host" reads back all rows, "block" reads back spectra
    left_out = (*(("host", "block") if reads_back else ()), "" if has_model else "learned")
    return tuple(name for name in names if name not in left_out)


def _check_signal(call: Call) -> None:
    params, shape = call.params, call.shape if len(call.shape) != 1 else (1, *call.shape)
    if not isinstance(params, WelchPeakParams):
        raise ValueError(f"params: expected WelchPeakParams, got {type(params).__name__}")
    if len(shape) != 2:
        raise ValueError(f"signal: expected [batch, length] or [length], got shape {shape}")
    if call.dtype.kind not in "biuf" and not jnp.issubdtype(call.dtype, jnp.floating):
        raise ValueError(f"signal: expected a real dtype, got {call.dtype}")
    if shape[1] < params.frame_len:
        sizes = f"n_fft {params.n_fft}, {params.n_segments} segments"
        raise ValueError(f"signal: expected rows of at least {params.frame_len} samples ({sizes}), got {shape[1]}")


def _check_peaks_fit(shape: tuple[Any, ...]) -> None:
    """Raise a `MemoryError` if the peaks do not fit in memory. Otherwise a program would end the process."""
    n_bytes = 4 * math.prod(shape)
    if is_symbolic(n_bytes) or n_bytes < LEAST_CHECKED_BYTES:
        return
    if hasattr(os, "sysconf") and n_bytes > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise MemoryError(f"peaks of shape {shape} take {bytes_text(n_bytes)}, more than this machine has")
    np.empty((COPIES_OF_PEAKS, *shape), np.float32)


def _check_model(model: Any, params: WelchPeakParams) -> None:
    if model is not None and not hasattr(model, "n_fft"):
        raise ValueError(f"model: expected a LearnedFft (load_learned_fft), got {type(model).__name__}")
    if model is not None and model.n_fft != params.n_fft:
        raise ValueError(f"model: expected a model for n_fft {params.n_fft} as in params, got n_fft {model.n_fft}")
    if is_traced(*jax.tree.leaves(model)):
        raise ValueError("model: expected concrete arrays, got traced arrays; use learned_spectrum in traced code")


def built_in_pick(
    candidates: tuple[str, ...], batch: int, params: WelchPeakParams, model: Any, platform: str | None
) -> str:
    """Return the candidate with the lowest built-in cost. If the device has its own memory, the upload counts too."""
    device = Device.CPU if platform == "cpu" else jax_device()
    row = backend_coefficients(device.value)
    upload_ns = 0.0 if row.unified_memory else 4.0 * batch * params.frame_len / float(row.readback_bw)
    sizes, segments = (device, batch, params.n_fft, params.k), params.n_segments

    def cost(name: str) -> float:
        if name == "host":
            return float(host_path_ns(*sizes, n_segments=segments))
        if name == "block":
            return float(block_graph_ns(*sizes, n_segments=segments)) + upload_ns
        if name == "learned" and 4 * model.active_gates >= model.total_gates:
            return math.inf
        scale = learned_scale(model.active_gates, model.total_gates) if name == "learned" else 1.0
        return float(fused_graph_ns(*sizes, scale, n_segments=segments)) + upload_ns

    with jax.ensure_compile_time_eval():
        return min(candidates, key=cost)
