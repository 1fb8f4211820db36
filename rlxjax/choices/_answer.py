"""The answer to a question about stages: the verdict, its reason, and the figures behind it."""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from rlxjax._numerics import temperature_from_sd
from rlxjax._values import counted, whole_ns
from rlxjax.calibration import FunctionPrediction, FunctionTimes
from rlxjax.fit import SURE
from rlxjax.fusion import StagePlan, plan_stages
from rlxjax.jaxpr import FunctionProfile
from rlxjax.targets import DoesNotFitError, TargetDevice

from ._advice import Advice, Grouping, Measured, StageCost, grouping_name
from ._rank_targets import change_in_words, in_bytes, not_fitting, opposed_ns, stands_on
from ._stages import Span, Stage, as_code
from ._way import Choice, Way

#: Terms that launches take, and those of the functions model that traffic takes; of a target's it takes all others.
LAUNCH_TERMS, TRAFFIC_TERMS = ("call_ns", "launch_ns"), ("elementwise_ns", "uncached_ns")
#: The most groupings that are looked at: all of those of seven stages.
MOST_GROUPINGS = 64


class Plans:
    """Groups of stages, those that were profiled all predicted by one estimate, and the plans that they allow.

    Args:
        found: what is predicted of the groups that have a profile, in their order.
        groups: all of them.
        profiles: of those that there is a program of.
        refused: those that the compiler of a device refuses for their memory.
        device: that they are compiled for; None of this machine.
        limit: bytes of the device's memory.
        min_gain_ns: what is asked.
        price: of a byte that lives at the peak.
        also: plans that are looked at whatever they take.
    """

    def __init__(
        self,
        found: FunctionTimes,
        groups: Mapping[Span, Stage],
        profiles: Mapping[Span, FunctionProfile],
        refused: Mapping[Span, DoesNotFitError],
        device: TargetDevice | None,
        limit: float,
        min_gain_ns: float,
        price: float,
        also: Sequence[StagePlan] = (),
    ) -> None:
        self.found, self.device, self.min_gain_ns, self.price = found, device, min_gain_ns, price
        self.groups = groups
        self.target = None if device is None else device.name
        self.place = {span: place for place, span in enumerate(profiles)}
        count = 1 + max(last for _, last in groups)
        self.names = [groups[number, number].name for number in range(count)]
        leaves = jax.tree.leaves(groups[0, count - 1].args)
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if hasattr(leaf, "dtype"))
        times, peaks = np.full((count, count), np.inf), np.zeros((count, count))
        for span, prediction in zip(self.place, found.predictions, strict=True):
            times[span] = prediction.time_ns
            peaks[span] = prediction.profile.peak_bytes + (held if span[0] else 0)
        is_stage, is_all = np.eye(count, dtype=bool), np.zeros(times.shape, bool)
        is_all[0, -1] = True
        for span, error in refused.items():
            peaks[span] = error.needed_bytes or np.inf
        self.apart = plan_stages(np.where(is_stage, times, np.inf), peaks)[0]
        one_program = plan_stages(np.where(is_all, times, np.inf), peaks)
        not_made = StagePlan((tuple(range(count)),), np.inf, float(peaks[0, -1]))
        self.together = one_program[0] if one_program else not_made
        self.fits = bool(one_program) and self.together.peak_bytes <= limit
        times[(peaks > limit) & ~is_stage] = np.inf
        plans = plan_stages(times, peaks, peak_price_ns_per_byte=price, count=MOST_GROUPINGS)
        self.plans = [*plans]
        for plan in [*([self.together] if self.fits else []), self.apart, *also]:
            if all(plan.groups != own.groups for own in self.plans):
                self.plans.append(plan)

    def predictions(self, plan: StagePlan) -> list[FunctionPrediction]:
        """Return what is predicted of each program of a plan."""
        return [self.found.predictions[place] for place in self.places(plan)]

    def plan(self, name: str) -> StagePlan:
        """Return the plan of a name."""
        return next(plan for plan in self.plans if self.name(plan) == name)

    def name(self, plan: StagePlan) -> str:
        """Return a plan's name, as that of its grouping."""
        return grouping_name(self._named(plan))

    def ahead(self, plan: StagePlan, other: StagePlan, min_gain_ns: float = 0.0) -> tuple[float, float, bool]:
        """Return what a plan saves in ns, the probability that this is more than asked, and whether both were measured.

        A gain in ns has the price of the bytes at the peak in it.
        """
        decided = self.found.decision(self.places(plan), self.places(other))
        margin_ns, sd_ns = float(decided.margin_ns), float(decided.margin_sd_ns)
        if self.device is not None:  # what bytes say against an estimate is a doubt
            moved = [sum(one.profile.fused_traffic_bytes for one in self.predictions(own)) for own in (other, plan)]
            sd_ns = math.hypot(sd_ns, opposed_ns(self.device, margin_ns, moved[0] - moved[1]))
        margin_ns += self.price * (other.peak_bytes - plan.peak_bytes)
        odds = (margin_ns - min_gain_ns) / temperature_from_sd(sd_ns)
        return margin_ns, 0.5 + 0.5 * math.tanh(0.5 * odds), bool(decided.in_domain)

    def grouping(self, plan: StagePlan) -> Grouping:
        """Return a plan as a way to run the stages."""
        each = self.predictions(plan)
        return Grouping(
            self.name(plan),
            predicted_ns=sum(one.time_ns for one in each),
            predicted_interval_ns=(sum(one.low_ns for one in each), sum(one.high_ns for one in each)),
            in_domain=all(one.in_domain for one in each),
            groups=self._named(plan),
            peak_bytes=int(plan.peak_bytes),
            probability=None if plan == self.apart else self.ahead(plan, self.apart, self.min_gain_ns)[1],
        )

    def _named(self, plan: StagePlan) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(self.names[number] for number in group) for group in plan.groups)

    def places(self, plan: StagePlan) -> list[int]:
        """Return where the programs of a plan are among the predictions."""
        return [self.place[group[0], group[-1]] for group in plan.groups]


def answer(plans: Plans, whole: Sequence[Stage], is_plain: bool, choice: Choice | None) -> Advice:
    """Return the answer of a calibration that can be asked."""
    groupings = {plan: plans.grouping(plan) for plan in plans.plans}
    chances = {plan: own.probability for plan, own in groupings.items() if own.probability is not None}
    sure = [plan for plan, chance in chances.items() if chance >= SURE]
    plan = next(iter(sure or chances), plans.together)
    if choice is not None:
        plan = plans.plan(compared(choice))
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
    runs_apart = max(chances.values(), default=0.0) <= 1.0 - SURE if choice is None else choice.name == "apart"
    if not chances:
        verdict, code = "keep", "peak_memory"
    elif runs_apart:
        verdict, code = "keep", _why_not(saved, margin_ns, counts["recomputed_elements"])
    elif sure or choice is not None:
        launches, traffic = (sum(saved.get(name, 0.0) for name in terms) for terms in (LAUNCH_TERMS, TRAFFIC_TERMS))
        traffic = traffic if device is None else sum(saved.values()) - launches
        verdict = "fuse" if len(plan.groups) == 1 else "group"
        code = "saves_launches" if launches >= traffic else "saves_traffic"
    else:
        verdict, code = "undecided", "too_close"
    is_forced = device is not None and bool(chances) and apart.peak_bytes > device.memory_bytes
    reason = _reason(code, plans, plan, margin_ns, saved, counts["recomputed_elements"])
    if choice is not None and choice.by != "model":
        code, reason = why(choice)
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
        groupings=tuple(_as_measured(own, choice) for own in groupings.values()),
        apart_peak_bytes=apart.peak_bytes,
        together_peak_bytes=grouped.peak_bytes,
        flip=_flip(saved, margin_ns - plans.min_gain_ns) if choice is None or choice.by == "model" else "",
        code=as_code(whole, ((0,),) if is_plain else plan.groups) if verdict in ("fuse", "group") else "",
        extrapolated=not in_domain,
        measured=_measured(choice),
        decided_by="model" if choice is None else choice.by,
        is_tie=choice is not None and choice.is_tie,
        target=plans.target,
        stands_on="" if device is None else f"predicted by {stands_on([*each, *programs])}",
        **counts,
    )


def by_measurement_alone(plans: Plans, choice: Choice, whole: Sequence[Stage], is_plain: bool) -> Advice:
    """Return the answer where nothing is predicted, and a measurement or a person decides."""
    plan = plans.plan(compared(choice))
    verdict = "keep" if choice.name == "apart" else "fuse" if len(plan.groups) == 1 else "group"
    code, reason = why(choice)
    return Advice(
        verdict=verdict,
        reason_code=code,
        reason=reason,
        min_gain_ns=plans.min_gain_ns,
        groups=plans.grouping(plan).groups,
        code="" if verdict == "keep" else as_code(whole, ((0,),) if is_plain else plan.groups),
        measured=_measured(choice),
        decided_by=choice.by,
        is_tie=choice.is_tie,
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


# --- Where not the model decides -----------------------------------------------------------------


def compared(choice: Choice) -> str:
    """Return the name of what is compared with the stages apart: the form that runs, or the best of the others."""
    return choice.name if choice.name != "apart" else _others(choice)[0]


def _as_measured(grouping: Grouping, choice: Choice | None) -> Grouping:
    """Return a grouping with what it took."""
    own = next((own for own in choice.alternatives if own.name == grouping.name), None) if choice else None
    if own is None:
        return grouping
    names = ("measured_ns", "measured_interval_ns", "failed", "compile_s")
    return dataclasses.replace(grouping, **{name: getattr(own, name) for name in names})


def _measured(choice: Choice | None) -> Measured | None:
    """Return what the forms took; None where none was timed."""
    if choice is None or all(own.measured_ns is None for own in choice.alternatives):
        return None
    of = {own.name: own for own in choice.alternatives}
    grouped, one = of[compared(choice)], of.get("together")
    one_program_ns = None if one is None or one is grouped else one.measured_ns
    return Measured(of["apart"].measured_ns, grouped.measured_ns, grouped.compile_s, choice.rounds, one_program_ns)


def why(choice: Choice) -> tuple[str, str]:
    """Return the code and the sentence of what is not by the model."""
    name = choice.name
    runs, (stay, are) = _in_words(name), ("stay", "are") if name == "apart" else ("stays", "is")
    if choice.by == "pinned":
        return "pinned", f"{runs} {stay}, which a person pinned; `rlxjax decisions` shows and changes it"
    failed = "".join(f"; {own.name} {own.failed}" for own in choice.alternatives if own.failed)
    took = {own.name: own.measured_ns for own in choice.alternatives if own.measured_ns is not None}
    timed = [other for other in _others(choice) if other in took]
    if name not in took or not timed:
        return ("measured_slower" if name == "apart" else "measured_faster"), f"{runs} {are} all that runs{failed}"
    # Of the stages apart, if they were timed, a grouping says more.
    other = "apart" if "apart" in timed and not choice.is_tie else timed[0]
    times = [f"{_in_words(one)} {whole_ns(took[one])} ns" for one in (name, other)]
    costs, predicted = ([_cost_ns(choice[one], by) for one in (name, other)] for by in ("measured_ns", "predicted_ns"))
    is_priced = any(own.extra_ns for own in choice.alternatives)
    priced = ", with the gain that is asked and memory at its price" if is_priced else ""
    if choice.is_tie:
        share = f"{100 * choice.regret:.3g} %"
        is_within = max(costs) <= (1.0 + choice.regret) * min(costs)
        near = f"within {share} of each other as measured" if is_within else "not told apart by measuring"
        said = f"{times[0]} and {times[1]}{priced} are {near}: a tie; {runs} {are} chosen"
        return "tie", f"{said}{failed}"
    said = f"as measured {times[0]} a call, {times[1]}{priced}"
    code = "measured_slower" if name == "apart" else "measured_faster"
    saved_ns, asked_ns = took[name] - took[other], took[name] - took[other] + costs[1] - costs[0]
    if costs[1] < costs[0]:
        said += "; round by round the first is the better one"
    elif name == "apart" and saved_ns > 0:
        code, saved = "no_gain", f"{_in_words(other)} saves {whole_ns(saved_ns)} ns a call as measured"
        said = f"{saved}, of {whole_ns(asked_ns)} ns asked"
    against = "; the model predicts the opposite" if predicted[1] < predicted[0] < math.inf else ""
    return code, f"{said}{against}{failed}"


def _others(choice: Choice) -> list[str]:
    """Return the names of what was not chosen: the best first, by what is measured, else predicted."""

    def rank(own: Way) -> tuple[bool, bool, float]:
        is_timed = own.measured_ns is not None
        return bool(own.failed), not is_timed, _cost_ns(own, "measured_ns" if is_timed else "predicted_ns")

    return [own.name for own in sorted(choice.alternatives, key=rank) if own.name != choice.name]


def _cost_ns(way: Way, by: str) -> float:
    time_ns = getattr(way, by)
    return math.inf if time_ns is None else time_ns + way.extra_ns


def _in_words(name: str) -> str:
    return {"apart": "the stages apart", "together": "one program"}.get(name, name)
