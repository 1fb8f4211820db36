"""The answer to a question about stages: the verdict, its reason, and the figures behind it."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from rlxjax._values import counted, whole_ns
from rlxjax.calibration import FunctionPrediction
from rlxjax.fit import SURE
from rlxjax.fusion import StagePlan
from rlxjax.jaxpr import FunctionProfile
from rlxjax.targets import TargetDevice

from ._advice import Advice, StageCost
from ._decided import Decided
from ._plans import Plans
from ._stages import Stage, as_code
from ._target import change_in_words, in_bytes, not_fitting, stands_on

#: Terms that launches take, and those of the functions model that traffic takes; of a target's it takes all others.
LAUNCH_TERMS, TRAFFIC_TERMS = ("call_ns", "launch_ns"), ("elementwise_ns", "uncached_ns")


def answer(plans: Plans, whole: Sequence[Stage], *, is_plain: bool, decided: Decided | None) -> Advice:
    """Return the answer of a calibration that can be asked."""
    groupings = {plan: plans.grouping(plan) for plan in plans.plans}
    chances = {plan: own.probability for plan, own in groupings.items() if own.probability is not None}
    sure = [plan for plan, chance in chances.items() if chance >= SURE]
    plan = next(iter(sure or chances), plans.together)
    if decided is not None:
        plan = plans.plan(decided.grouping)
    if plan.time_ns == math.inf:  # no compiler makes it
        needed = in_bytes(plan.peak_bytes) if plan.peak_bytes < math.inf else "more"
        reason = f"one program needs {needed} at once, more than the device has: its compiler refuses it"
        return Advice("keep", "peak_memory", reason, target=plans.target)
    margin_ns, probability, in_domain = plans.ahead(plan, plans.apart, plans.min_gain_ns)
    each, programs = plans.predictions(plans.apart), plans.predictions(plan)
    apart, grouped = plans.grouping(plans.apart), plans.grouping(plan)
    before, after, counts = _terms(each), _terms(programs), _counts(each)
    counts.subtract(_counts(programs))
    device = plans.device
    counts.update({name: -count for name, count in counts.items() if name.startswith("recomputed") and count < 0})
    changes = {name: before.get(name, 0.0) - after.get(name, 0.0) for name in before | after}
    saved = dict(sorted(changes.items(), key=lambda part: -abs(part[1])))
    runs_apart = max(chances.values(), default=0.0) <= 1.0 - SURE if decided is None else decided.choice.name == "apart"
    if not chances:
        verdict, code = "keep", "peak_memory"
    elif runs_apart:
        verdict, code = "keep", _why_not(saved, margin_ns, counts["recomputed_elements"])
    elif sure or decided is not None:
        launches, traffic = (sum(saved.get(name, 0.0) for name in terms) for terms in (LAUNCH_TERMS, TRAFFIC_TERMS))
        traffic = traffic if device is None else sum(saved.values()) - launches
        verdict = "fuse" if len(plan.groups) == 1 else "group"
        code = "saves_launches" if launches >= traffic else "saves_traffic"
    else:
        verdict, code = "undecided", "too_close"
    is_forced = device is not None and bool(chances) and apart.peak_bytes > device.memory_bytes
    reason = _reason(code, plans, plan, margin_ns, saved, counts["recomputed_elements"])
    if decided is not None and not decided.is_by_model:
        code, reason = decided.why()
    elif len(plans.names) > 2 and verdict in ("fuse", "group"):
        rivals = (other for other in plans.plans if other != plan and plans.ahead(plan, other)[1] < SURE)
        if rival := next(rivals, None):
            reason += f"; {groupings[rival].name} is as good within the doubt"
    if chances and not plans.fits:
        needed = counted(int(plans.together.peak_bytes), "byte")
        reason += f"; one program of all needs {needed} at once, more than the device has"
    if is_forced:
        needed, has = in_bytes(apart.peak_bytes), in_bytes(device.memory_bytes if device else 0)
        reason = f"the stages apart need {needed} of {has} at once, which does not fit; {reason}"
    if device is not None:
        by_name = dict(zip(map("+".join, grouped.groups), programs, strict=True))
        by_name |= dict(zip(plans.names, each, strict=True))
        found = {name: own.profile for name, own in by_name.items()}
        changed = change_in_words([own.profile for own in each], [own.profile for own in programs])
        held = f"{in_bytes(grouped.peak_bytes)} of {in_bytes(device.memory_bytes)} at once"
        reason = "; ".join([reason, f"{changed}, {held}", *not_fitting(found)])
        verdict = verdict if not is_forced else "fuse" if len(plan.groups) == 1 else "group"
    measured, took = (None, {}) if decided is None else (decided.measured(), decided.times_ns())
    return Advice(
        verdict=verdict,
        reason_code="peak_memory" if is_forced else code,
        reason=reason,
        probability=probability,
        apart_ns=apart.time_ns,
        apart_interval_ns=apart.interval_ns,
        together_ns=grouped.time_ns,
        together_interval_ns=grouped.interval_ns,
        apart_terms_ns=before,
        together_terms_ns=after,
        min_gain_ns=plans.min_gain_ns,
        stages=tuple(
            StageCost(name, own.time_ns, _word(next(iter(own.terms_ns))), own.profile.peak_bytes)
            for name, own in zip(plans.names, each, strict=True)
        ),
        groups=grouped.groups,
        groupings=tuple(own._replace(measured_ns=took.get(own.name)) for own in groupings.values()),
        apart_peak_bytes=apart.peak_bytes,
        together_peak_bytes=grouped.peak_bytes,
        flip=_flip(saved, margin_ns - plans.min_gain_ns) if decided is None or decided.is_by_model else "",
        code=as_code(whole, ((0,),) if is_plain else plan.groups) if verdict in ("fuse", "group") else "",
        extrapolated=not in_domain,
        measured=measured,
        decided_by="model" if decided is None else decided.choice.by,
        is_tie=decided is not None and decided.choice.is_tie,
        target=plans.target,
        stands_on="" if device is None else f"predicted by {stands_on([*each, *programs])}",
        **counts,
    )


def by_measurement_alone(plans: Plans, decided: Decided, whole: Sequence[Stage], is_plain: bool) -> Advice:
    """Return the answer where nothing is predicted, and a measurement or a person decides."""
    plan = plans.plan(decided.grouping)
    verdict = "keep" if decided.choice.name == "apart" else "fuse" if len(plan.groups) == 1 else "group"
    code, reason = decided.why()
    return Advice(
        verdict=verdict,
        reason_code=code,
        reason=reason,
        min_gain_ns=plans.min_gain_ns,
        groups=plans.grouping(plan).groups,
        code="" if verdict == "keep" else as_code(whole, ((0,),) if is_plain else plan.groups),
        measured=decided.measured(),
        decided_by=decided.choice.by,
        is_tie=decided.choice.is_tie,
    )


def without_stages(
    whole: Sequence[Stage], refused: Sequence[str], together: FunctionProfile | None, device: TargetDevice | None
) -> Advice:
    """Return the answer where the compiler of a device refuses stages by themselves for their memory."""
    told, name = "; ".join(refused), None if device is None else device.name
    if together is None or together.target is None or not together.target.fits or len(whole) == 1:
        return Advice("cannot model", "peak_memory", told, target=name)
    return Advice(
        verdict="fuse",
        reason_code="peak_memory",
        reason=f"apart they do not fit, and one program {together.target.memory}; {told}",
        groups=(tuple(stage.name for stage in whole),),
        together_peak_bytes=together.peak_bytes,
        code=as_code(whole, [range(len(whole))]),
        target=name,
    )


def _counts(programs: Sequence[FunctionPrediction]) -> Counter[str]:
    """Return what programs do in all, by the fields of the answer; what is done again counts the other way."""
    profiles = [program.profile for program in programs]
    # What a compiler fuses is known; what it computes again is not.
    kernels = [group for profile in profiles for group in profile.kernels if profile.level == "jaxpr"]
    compiled = sum(int(profile.io.kernel_launches) for profile in profiles if profile.level == "compiled")
    return Counter(
        saved_calls=len(profiles),
        saved_launches=compiled + sum(group.launches for group in kernels),
        saved_sync_points=sum(int(profile.io.sync_points) for profile in profiles),
        saved_readback_bytes=sum(int(profile.io.host_output_bytes) for profile in profiles),
        saved_traffic_bytes=sum(profile.fused_traffic_bytes for profile in profiles),
        recomputed_flops=-sum(group.flops for group in kernels),
        recomputed_elements=-sum(group.computed_elements for group in kernels),
    )


def _terms(each: Sequence[FunctionPrediction]) -> dict[str, float]:
    """Return the terms of several predictions in ns, summed by name, the largest first."""
    terms: Counter[str] = Counter()
    for prediction in each:
        terms.update(prediction.terms_ns)  # pyright: ignore[reportArgumentType]
    return dict(terms.most_common())


def _reason(
    code: str, plans: Plans, plan: StagePlan, margin_ns: float, saved: Mapping[str, float], recomputed: int
) -> str:
    """Return the sentence of a reason's code."""
    subject = "one program" if len(plan.groups) == 1 else plans.grouping(plan).name
    priced = ", memory at its price," if plans.price else ""
    gain, asked = f"{whole_ns(abs(margin_ns))} ns{priced}", f"{whole_ns(plans.min_gain_ns)} ns"
    again = f", {counted(recomputed, 'number')}" if recomputed > 0 else ""
    return {
        "saves_launches": f"{subject} saves {gain} a call, most of it in calls and launches",
        "saves_traffic": f"{subject} saves {gain} a call, most of it in bytes that it does not move",
        "recompute": f"{subject} costs {gain} a call more: it computes again what it does not keep{again}",
        "loses_tiling": f"{subject} costs {gain} a call more: it transposes element by element beside other work",
        "slower": f"{subject} costs {gain} a call more, most of it in {_word(next(iter(saved), 'call_ns'))}",
        "no_gain": f"{subject} saves {gain} a call, less than the {asked} that are asked",
        "peak_memory": f"{subject} needs {counted(int(plan.peak_bytes), 'byte')} at once, more than the device has",
        "too_close": f"the difference of {gain} a call between {subject} and the stages apart is within the doubt",
    }[code]


def _why_not(saved: Mapping[str, float], margin_ns: float, recomputed: int) -> str:
    """Return the code of a reason to keep stages apart."""
    if margin_ns >= 0:
        return "no_gain"
    worst = min(saved, key=lambda name: saved[name])
    if worst == "transpose_ns":
        return "loses_tiling"
    return "recompute" if recomputed > 0 or worst in ("elementwise_ns", "random_ns") else "slower"


def _flip(saved: Mapping[str, float], margin_ns: float) -> str:
    """Return how far a verdict is from the other one, by its largest term."""
    most = next(iter(saved), None)
    if most is None or not saved[most]:
        return ""
    factor = (saved[most] - margin_ns) / saved[most]
    if factor < 0:
        return f"no change of {_word(most)} alone turns it"
    return f"it turns where the change in {_word(most)} is {factor:.2f} times as large"


def _word(term: str) -> str:
    return term.removesuffix("_ns").replace("_", " ")
