"""The question: should these jitted stages be one program here?"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from rlxjax._numerics import logistic
from rlxjax._values import counted, whole_ns
from rlxjax.calibration import (
    Calibration,
    FunctionPrediction,
    default_calibration,
    load_calibration,
    predict_profiles,
)
from rlxjax.fit import SURE
from rlxjax.jaxpr import FunctionProfile, TripCounts, profile_function
from rlxjax.models import FUNCTIONS

from ._advice import Advice, Measured, StageCost
from ._measure import measure as timed
from ._stages import Stage, as_code, composed, in_order, name_of, parts_of

#: Terms of the functions model that launches take, and those that traffic takes.
LAUNCH_TERMS, TRAFFIC_TERMS = ("call_ns", "launch_ns"), ("elementwise_ns", "uncached_ns")


def advise(
    stages: Callable[..., Any] | Sequence[Callable[..., Any]],
    *args: Any,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    min_gain_ns: float = 0.0,
    trip_counts: TripCounts | None = None,
    memory_bytes: int | None = None,
    measure: bool = False,
) -> Advice:
    """Say whether stages that are jitted one by one should be one jitted function, and why.

    Nothing is compiled or run, unless `measure` is set.

    Args:
        stages: functions, in order: each takes what the one before it gives, as one argument, or as several if that
            is a tuple. One function by itself is compared with its parts: the jitted functions that it calls, and
            each other operation, as they run where it is not jitted.
        *args: of the first stage: arrays or `jax.ShapeDtypeStruct`s, or trees of them.
        calibration: of this machine, or the file of one; `default_calibration()` unless given.
        min_gain_ns: what one program has to save in a call.
        trip_counts: of loops whose length depends on data, in order of appearance over all stages.
        memory_bytes: of the device; one program that needs more is not advised. What JAX says of its default
            device unless given, if it says anything.
        measure: also compile and time both forms.

    Raises:
        ValueError: no stage, a stage that does not trace or does not take what the one before gives, or a gain that
            is no number of at least 0.
        CalibrationFileError: a file that cannot be used, or none on a platform without a population.

    Examples:
        >>> import jax.numpy as jnp
        >>> from rlxjax.calibration import CalibratedModel
        >>> from rlxjax.fit import prior_posterior
        >>> model = CalibratedModel(prior_posterior(FUNCTIONS), {}, {}, {name: (0, 1e9) for name in FUNCTIONS.inputs})
        >>> rows = jax.ShapeDtypeStruct((1000, 1000), jnp.float32)
        >>> found = advise([jnp.negative, jnp.abs], rows, calibration=Calibration({"functions": model}, None, {}))
        >>> found.verdict, found.reason_code, found.saved_launches, found.saved_traffic_bytes
        ('fuse', 'saves_traffic', 1, 8000000)
        >>> found.code
        'fused = jax.jit(lambda x0: abs(negative(x0)), donate_argnums=(0,))  # if nobody uses x0 afterwards'
    """
    if isinstance(min_gain_ns, bool) or not isinstance(min_gain_ns, (int, float)) or not min_gain_ns >= 0:
        raise ValueError(f"min_gain_ns: expected a number of at least 0, got {min_gain_ns!r}")
    functions = [stages] if callable(stages) or not isinstance(stages, Iterable) else list(stages)
    if not functions or not all(map(callable, functions)):
        raise ValueError(f"stages: expected a function, or functions in order, got {stages!r}")
    if not isinstance(calibration, Calibration):
        known = default_calibration() if calibration is None else None
        calibration = load_calibration(calibration) if known is None else known
    whole = in_order(functions, args)
    if len(functions) == 1:
        if isinstance(functions[0], jax.stages.Wrapped):
            return Advice("keep", "already_one_program", f"{whole[0].name} is jitted: it is one program already")
        apart = parts_of(functions[0], args)
        if len(apart) < 2:
            return Advice("keep", "already_one_program", f"{whole[0].name} is one operation, and one program already")
    else:
        apart = whole
    together = composed(functions)
    profile = profile_function(together, *args, trip_counts=trip_counts)
    parts = _profiles(apart, trip_counts)
    if refusal := _refusal(calibration, [profile, *parts]):
        return refusal
    return _advice(calibration, whole, apart, profile, parts, float(min_gain_ns), memory_bytes, args, measure)


def _profiles(stages: Sequence[Stage], trip_counts: TripCounts | None) -> list[FunctionProfile]:
    """Return the profile of each stage, with its own share of the trip counts."""
    if trip_counts is None or isinstance(trip_counts, Mapping):
        # A line that a stage does not have is no mistake, since another one has it.
        found = [profile_function(stage.fn, *stage.args) for stage in stages]
        named = trip_counts or {}
        own = [{loop.line: named[loop.line] for loop in one.unknown_loops if loop.line in named} for one in found]
        return [
            profile_function(stage.fn, *stage.args, trip_counts=counts) if counts else one
            for stage, counts, one in zip(stages, own, found, strict=True)
        ]
    left, found = list(trip_counts), []
    for stage in stages:
        count = len(profile_function(stage.fn, *stage.args).unknown_loops)
        found.append(profile_function(stage.fn, *stage.args, trip_counts=left[:count] if count else None))
        left = left[count:]
    return found


def _refusal(calibration: Calibration, profiles: Sequence[FunctionProfile]) -> Advice | None:
    """Return the answer where nothing can be predicted, None where it can."""
    if FUNCTIONS.name not in calibration.models:
        mend = "measure it with `rlxjax calibrate --only functions`"
        return Advice("cannot model", "not_calibrated", f"the calibration has no functions model: {mend}")
    for profile in profiles:
        if profile.uncounted:
            code = "unknown_loop" if profile.unknown_loops else "uncosted"
            return Advice("cannot model", code, profile.uncounted[0])
    return None


def _advice(
    calibration: Calibration,
    whole: Sequence[Stage],
    apart: Sequence[Stage],
    profile: FunctionProfile,
    parts: Sequence[FunctionProfile],
    min_gain_ns: float,
    memory_bytes: int | None,
    args: tuple[Any, ...],
    measure: bool,
) -> Advice:
    """Return the answer of a calibration that can be asked."""
    found = predict_profiles(calibration, [profile, *parts])
    one, *each = found.predictions
    decided = found.decision([0], range(1, 1 + len(parts)))
    margin_ns, temperature_ns = float(decided.margin_ns), float(decided.temperature_ns)
    probability = float(logistic((margin_ns - min_gain_ns) / temperature_ns))
    saved = _difference(each, one)
    recomputed_flops = max(_executed_flops([profile]) - _executed_flops(parts), 0)
    recomputed = max(_executed_elements([profile]) - _executed_elements(parts), 0)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(args) if hasattr(leaf, "dtype"))
    peaks = [part.peak_bytes + (held if number else 0) for number, part in enumerate(parts)]
    limit = _device_bytes() if memory_bytes is None else memory_bytes
    if limit is not None and profile.peak_bytes > limit:
        verdict, code = "keep", "peak_memory"
    elif probability >= SURE:
        launches, traffic = (sum(saved.get(name, 0.0) for name in terms) for terms in (LAUNCH_TERMS, TRAFFIC_TERMS))
        verdict, code = "fuse", "saves_launches" if launches >= traffic else "saves_traffic"
    elif probability <= 1.0 - SURE:
        verdict, code = "keep", _why_not(saved, margin_ns, recomputed)
    else:
        verdict, code = "undecided", "too_close"
    spread = [sum(prediction.low_ns for prediction in each), sum(prediction.high_ns for prediction in each)]
    return Advice(
        verdict=verdict,
        reason_code=code,
        reason=_sentence(code, margin_ns, min_gain_ns, saved, profile.peak_bytes, recomputed),
        probability=probability,
        apart_ns=float(decided.kept_ns),
        apart_interval_ns=(spread[0], spread[1]),
        together_ns=one.time_ns,
        together_interval_ns=(one.low_ns, one.high_ns),
        apart_terms_ns=_summed(each),
        together_terms_ns=dict(one.terms_ns),
        min_gain_ns=min_gain_ns,
        stages=tuple(
            StageCost(stage.name, own.time_ns, _word(next(iter(own.terms_ns))), own.profile.peak_bytes)
            for stage, own in zip(apart, each, strict=True)
        ),
        saved_calls=len(parts) - 1,
        saved_launches=sum(map(_launches, parts)) - _launches(profile),
        saved_sync_points=sum(int(part.io.sync_points) for part in parts) - int(profile.io.sync_points),
        saved_readback_bytes=sum(int(part.io.host_output_bytes) for part in parts) - int(profile.io.host_output_bytes),
        saved_traffic_bytes=sum(part.fused_traffic_bytes for part in parts) - profile.fused_traffic_bytes,
        recomputed_flops=recomputed_flops,
        recomputed_elements=recomputed,
        apart_peak_bytes=max(peaks),
        together_peak_bytes=profile.peak_bytes,
        flip=_flip(saved, margin_ns - min_gain_ns),
        code=_code(whole, args) if verdict == "fuse" else "",
        extrapolated=not decided.in_domain,
        measured=_measured(whole, args) if measure else None,
    )


def _difference(each: Sequence[FunctionPrediction], one: FunctionPrediction) -> dict[str, float]:
    """Return what one program saves of each term in ns, the largest change first."""
    saved = _summed(each)
    for name, time_ns in one.terms_ns.items():
        saved[name] = saved.get(name, 0.0) - time_ns
    return dict(sorted(saved.items(), key=lambda part: -abs(part[1])))


def _summed(each: Sequence[FunctionPrediction]) -> dict[str, float]:
    """Return the terms of several predictions as one sum each in ns, the largest first."""
    terms: dict[str, float] = {}
    for prediction in each:
        for name, time_ns in prediction.terms_ns.items():
            terms[name] = terms.get(name, 0.0) + time_ns
    return dict(sorted(terms.items(), key=lambda part: -part[1]))


def _launches(profile: FunctionProfile) -> int:
    return sum(group.launches for group in profile.kernels)


def _executed_flops(profiles: Sequence[FunctionProfile]) -> int:
    return sum(group.flops for profile in profiles for group in profile.kernels)


def _executed_elements(profiles: Sequence[FunctionProfile]) -> int:
    return sum(group.computed_elements for profile in profiles for group in profile.kernels)


def _why_not(saved: Mapping[str, float], margin_ns: float, recomputed: int) -> str:
    """Return the code of a reason to keep stages apart."""
    if margin_ns >= 0:
        return "no_gain"
    worst = min(saved, key=lambda name: saved[name])
    if worst == "transpose_ns":
        return "loses_tiling"
    return "recompute" if recomputed > 0 or worst in ("elementwise_ns", "random_ns") else "slower"


def _sentence(
    code: str, margin_ns: float, min_gain_ns: float, saved: Mapping[str, float], peak_bytes: int, recomputed: int
) -> str:
    most = next(iter(saved), "call_ns")
    gain = f"{whole_ns(abs(margin_ns))} ns"
    return {
        "saves_launches": f"one program saves {gain} a call, most of it in calls and launches",
        "saves_traffic": f"one program saves {gain} a call, most of it in bytes that it does not move",
        "recompute": f"one program costs {gain} a call more: it computes again what it does not keep"
        + (f", {counted(recomputed, 'number')}" if recomputed > 0 else ""),
        "loses_tiling": f"one program costs {gain} a call more: it transposes element by element beside other work",
        "slower": f"one program costs {gain} a call more, most of it in {_word(most)}",
        "no_gain": f"one program saves {gain} a call, less than the {whole_ns(min_gain_ns)} ns that are asked",
        "peak_memory": f"one program needs {counted(peak_bytes, 'byte')} at once, more than the device has",
        "too_close": f"the difference of {gain} a call is within the doubt",
    }[code]


def _flip(saved: Mapping[str, float], margin_ns: float) -> str:
    """Return how far a verdict is from the other one, by its largest term."""
    most = next(iter(saved), None)
    if most is None or not saved[most]:
        return ""
    factor = (saved[most] - margin_ns) / saved[most]
    if factor < 0:
        return f"no change of {_word(most)} alone turns it"
    return f"it turns where the change in {_word(most)} is {factor:.2f} times as large"


def _code(whole: Sequence[Stage], args: tuple[Any, ...]) -> str:
    result = jax.eval_shape(composed([stage.fn for stage in whole]), *args)
    named = [stage._replace(name=name_of(stage.fn, number)) for number, stage in enumerate(whole)]
    return as_code(named, result)


def _measured(whole: Sequence[Stage], args: tuple[Any, ...]) -> Measured:
    """Time stages that are jitted one by one, or one function as it runs where it is not, against one program."""
    functions = [stage.fn for stage in whole]
    apart = composed([jax.jit(fn) for fn in functions]) if len(functions) > 1 else functions[0]
    return timed(apart, composed(functions), args)


def _word(term: str) -> str:
    return term.removesuffix("_ns").replace("_", " ")


def _device_bytes() -> int | None:
    """Return the memory of JAX's default device, if it says."""
    stats = jax.devices()[0].memory_stats()
    return stats.get("bytes_limit") if stats else None
