"""The question: which of these jitted stages should be one program here?"""

import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from rlxjax._checks import check_at_least, is_traced
from rlxjax.calibration import (
    CalibratedModel,
    Calibration,
    default_calibration,
    load_calibration,
    predict_profiles,
)
from rlxjax.fusion import StagePlan
from rlxjax.jaxpr import FunctionProfile, TripCounts
from rlxjax.models import FUNCTIONS
from rlxjax.targets import TargetDevice, target_device

from ._advice import Advice
from ._answer import Plans, answer, by_measurement_alone, compared, without_stages
from ._choose import decide, recalled
from ._description import content_of, setting_of
from ._memory import Memory, learned
from ._processes import ALONE, Party
from ._programs import (
    SURE_OF_FUNCTIONS,
    Predicted,
    Work,
    check_repeatable,
    devices_of,
    filled,
    in_words,
    predicted_programs,
    where_of,
)
from ._rank_targets import target_times
from ._stages import Span, composed, groups_of, in_order, parts_of, profiles_of
from ._way import Way, measure_word

#: The most groupings that are considered beside the stages apart.
MOST_CONSIDERED = 6


def advise(
    stages: Callable[..., Any] | Sequence[Callable[..., Any]],
    *args: Any,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    min_gain_ns: float = 0.0,
    trip_counts: TripCounts | None = None,
    memory_bytes: int | None = None,
    peak_price_ns_per_byte: float = 0.0,
    measure: str | None = None,
    check: bool = True,
    target: str | TargetDevice | None = None,
) -> Advice:
    """Say which stages that are jitted one by one should be one jitted function, and why.

    Of three or more stages, every way to group neighbours into programs is looked at: the answer names the best.
    Nothing is compiled or run, unless `measure` or `target` says so. What was measured is remembered and learned from,
    as by `choose`: an answer of the same stages, sizes, machine and calibration is by what is remembered.

    Args:
        stages: functions, in order: each takes what the one before it gives, as one argument, or as several if that
            is a tuple. One function by itself is compared with its parts: the jitted functions that it calls, and
            each other operation, as they run where it is not jitted.
        *args: of the first stage: arrays or `jax.ShapeDtypeStruct`s, or trees of them.
        calibration: of this machine, or the file of one; `default_calibration()` unless given.
        min_gain_ns: what fewer programs have to save in a call.
        trip_counts: of loops whose length depends on data, in order of appearance over all stages.
        memory_bytes: of the device; a group of stages that needs more is not advised. What JAX says of its default
            device unless given, if it says anything.
        peak_price_ns_per_byte: what a byte that lives at the peak costs in a call.
        measure: "never"; "undecided", where the model does not rule out all forms but one; "always": the stages apart,
            one program and the groupings that promise the most are compiled and timed until one is surely the best, or
            as good as the model's favourite. `RLXJAX_MEASURE` unless given, and "never" where that is not set.
        check: whether forms that are timed have to give the same results, as in `choose`.
        target: a device that need not be there, as "tpu-v5e" or "h100", in the place of this machine: every group is
            compiled for it (`rlxjax.targets.compile_for`), and the answer is by the compiler's kernels, bytes, memory
            and estimates, and by the device's data sheet. `stands_on` says which.

    Raises:
        ValueError: no stage, a stage that does not trace or does not take what the one before gives, or a gain or
            price that is no number of at least 0; stages that have side effects, donate their arguments or give other
            results together than apart, where they are measured; a target that is unknown, with `measure` or a
            calibration, or whose compiler is not there or fails.
        CalibrationFileError: a file that cannot be used, or none on a platform without a population.

    Examples:
        >>> import jax.numpy as jnp
        >>> from rlxjax.calibration import CalibratedModel
        >>> from rlxjax.fit import prior_posterior
        >>> model = CalibratedModel(prior_posterior(FUNCTIONS), {}, {}, {name: (0, 1e9) for name in FUNCTIONS.inputs})
        >>> known, rows = Calibration({"functions": model}, None, {}), jax.ShapeDtypeStruct((1000, 1000), jnp.float32)
        >>> found = advise([jnp.negative, jnp.abs], rows, calibration=known)
        >>> found.verdict, found.reason_code, found.saved_launches, found.saved_traffic_bytes
        ('fuse', 'saves_traffic', 1, 8000000)
        >>> found.code
        'fused = jax.jit(lambda x0: abs(negative(x0)), donate_argnums=(0,))  # if nobody uses x0 afterwards'
        >>> [grouping.name for grouping in advise([jnp.negative, jnp.abs, jnp.sum], rows, calibration=known).groupings]
        ['together', 'negative+abs | sum', 'negative | abs+sum', 'apart']
    """
    check_at_least(min_gain_ns, "min_gain_ns", what="number", most=math.inf)
    check_at_least(peak_price_ns_per_byte, "peak_price_ns_per_byte", what="number", most=1e18)
    if memory_bytes is not None:
        check_at_least(memory_bytes, "memory_bytes", what="number", most=math.inf)
    functions = [stages] if callable(stages) or not isinstance(stages, Iterable) else list(stages)
    if not functions or not all(map(callable, functions)):
        raise ValueError(f"stages: expected a function, or functions in order, got {stages!r}")
    device = None if target is None else target_device(target)
    word = "never" if measure is None and device is not None else measure_word(measure, "never")
    is_traced_call = is_traced(*jax.tree.leaves(args))
    if is_traced_call and word != "never":
        raise ValueError("args: expected arrays or shapes, got traced values; measure outside of the traced function")
    if device is None:
        calibration = default_calibration() if calibration is None else calibration
        if not isinstance(calibration, Calibration):
            calibration = load_calibration(calibration)
    elif word != "never" or calibration is not None:
        option = "measure" if word != "never" else "calibration"
        raise ValueError(f"{option}: expected none with target {device.name!r}, which is another device than this one")
    whole = in_order(functions, args)
    if len(functions) > 1:
        groups = groups_of(whole)
    else:
        is_jitted = isinstance(functions[0], jax.stages.Wrapped)
        parts = [] if is_jitted else parts_of(whole[0])
        if len(parts) < 2:
            why = "jitted: it is one program already" if is_jitted else "one operation, and one program already"
            return Advice("keep", "already_one_program", f"{whole[0].name} is {why}")
        groups = {(place, place): part for place, part in enumerate(parts)} | {(0, len(parts) - 1): whole[0]}
    profiles, refused = profiles_of(groups, trip_counts, device)
    if calibration is not None and FUNCTIONS.name not in calibration.models:
        mend = "measure it with `rlxjax calibrate --only functions`"
        return Advice("cannot model", "not_calibrated", f"the calibration has no functions model: {mend}")
    unmodelled = next(filter(None, (_unmodelled(profile, device) for profile in profiles.values())), None)
    if unmodelled is not None and device is not None:
        return unmodelled
    if alone := [str(error) for span, error in refused.items() if span[0] == span[1]]:
        return without_stages(whole, alone, profiles.get((0, len(whole) - 1)), device)
    if device is None:
        assert calibration is not None
        found = predict_profiles(calibration.of(FUNCTIONS.name), list(profiles.values()))
        has = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    else:
        found, has = target_times(list(profiles.values()), device), device.memory_bytes
    limit = has if memory_bytes is None else memory_bytes
    options = (math.inf if limit is None else limit, float(min_gain_ns), float(peak_price_ns_per_byte))
    plans = Plans(found, groups, profiles, refused, device, *options)
    choice = None
    is_shared = Party.of(devices_of(args)) is not ALONE  # by processes that all ask, or none of them
    is_decided = word != "never" or not is_traced_call and (is_shared or Memory().path.exists())
    if calibration is not None and is_decided and len(plans.plans) > 1 and min_gain_ns < math.inf:
        calibrated = calibration.of(FUNCTIONS.name)
        work = _work_of_stages(plans, functions, args, calibrated, word, teaches=trip_counts is None)
        choice = recalled(work, check=check) if word == "never" else decide(work, word, check=check)
        if choice is None or choice.by == "model":
            taught = learned(calibrated, Memory(), setting_of(calibrated, work.devices)[0], FUNCTIONS.name)
            if taught is not calibrated:
                also = [] if choice is None else [plans.plan(compared(choice))]
                found = predict_profiles(taught, list(profiles.values()))
                plans = Plans(found, groups, profiles, refused, device, *options, also)
    is_plain = len(functions) == 1
    if unmodelled is not None:
        return unmodelled if choice is None else by_measurement_alone(plans, choice, whole, is_plain)
    return answer(plans, whole, is_plain, choice)


def _unmodelled(profile: FunctionProfile, device: TargetDevice | None) -> Advice | None:
    """Return why a program's time cannot be predicted; None if it can."""
    # A compiler counts what has no rule, and its text does not say which unknown loop is which.
    unread = profile.target is not None and profile.target.gpu is not None and profile.target.gpu.unknown_loops
    if not (profile.unknown_loops or (device is None and profile.uncounted) or unread):
        return None
    code = "unknown_loop" if profile.unknown_loops or unread else "uncosted"
    why = profile.uncounted or ("loops that depend on data turn different numbers of times",)
    return Advice("cannot model", code, why[0], target=None if device is None else device.name)


def _work_of_stages(
    plans: Plans,
    functions: Sequence[Callable[..., Any]],
    args: tuple[Any, ...],
    calibrated: CalibratedModel,
    measure: str,
    *,
    teaches: bool,
) -> Work:
    """Return the plans of stages as ways to run them, whose times may teach the model.

    Which plans are considered is by the calibration alone, whatever was learned since: else no measurement of them
    would be found again.
    """
    arrays = functools.cache(lambda: filled(args))
    is_plain = len(functions) == 1  # it runs where it is not jitted

    @functools.cache
    def traced(span: Span) -> Any:
        return plans.groups[span].fn.trace(*plans.groups[span].args)

    def way(plan: StagePlan) -> Way:
        spans = [(group[0], group[-1]) for group in plan.groups]
        name, programs = plans.name(plan), [traced(span) for span in spans]
        if measure != "never":
            for one in programs:
                check_repeatable(name, one)
        is_given = is_plain and plan == plans.apart
        fn = functions[0] if is_given else composed([plans.groups[span].fn for span in spans])
        asked_ns = 0.0 if plan == plans.apart else plans.min_gain_ns
        return Way(
            name,
            extra_ns=asked_ns + plans.price * plan.peak_bytes,
            content=content_of(programs),
            fn=fn,
            call=lambda: fn(*arrays()),
            make=None if is_given else lambda: [one.lower().compile() for one in programs],
        )

    def predict(known: CalibratedModel) -> Predicted:
        times = plans.found
        if known is not calibrated:
            times = predict_profiles(known, [one.profile for one in times.predictions])
        return predicted_programs(ways, times, [plans.places(plan) for plan in considered], teaches)

    others = [plan for plan in plans.plans if plan != plans.apart]
    considered = [plans.apart, *others[:MOST_CONSIDERED]]
    if plans.fits and plans.together not in considered:
        considered[-1] = plans.together
    ways = [way(plan) for plan in considered]
    stages = f"the parts of {plans.groups[0, len(plans.names) - 1].name}" if is_plain else ", ".join(plans.names)
    label, workload = f"{stages}, of {in_words(args)}", where_of(args) | {"stages": len(functions)}
    return Work(ways, predict, calibrated, FUNCTIONS.name, label, workload, devices_of(args), sure=SURE_OF_FUNCTIONS)
