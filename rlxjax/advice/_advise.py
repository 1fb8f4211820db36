"""The question: which of these jitted stages should be one program here?"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rlxjax._checks import check_at_least
from rlxjax._numerics import temperature_from_sd
from rlxjax._values import counted, whole_ns
from rlxjax.calibration import (
    Calibration,
    FunctionPrediction,
    FunctionTimes,
    default_calibration,
    load_calibration,
    predict_profiles,
)
from rlxjax.fit import SURE
from rlxjax.fusion import StagePlan, plan_stages
from rlxjax.jaxpr import TripCounts
from rlxjax.models import FUNCTIONS

from ._advice import Advice, Grouping, StageCost
from ._measure import measured
from ._stages import Span, Stage, as_code, groups_of, in_order, parts_of, profiles_of

#: Terms of the functions model that launches take, and those that traffic takes.
LAUNCH_TERMS, TRAFFIC_TERMS = ("call_ns", "launch_ns"), ("elementwise_ns", "uncached_ns")
#: The most groupings that are looked at: all of those of seven stages.
MOST_GROUPINGS = 64


def advise(
    stages: Callable[..., Any] | Sequence[Callable[..., Any]],
    *args: Any,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    min_gain_ns: float = 0.0,
    trip_counts: TripCounts | None = None,
    memory_bytes: int | None = None,
    peak_price_ns_per_byte: float = 0.0,
    measure: bool = False,
) -> Advice:
    """Say which stages that are jitted one by one should be one jitted function, and why.

    Of three or more stages, every way to group neighbours into programs is looked at: the answer names the best.
    Nothing is compiled or run, unless `measure` is set.

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
        measure: also compile and time the forms: the stages apart, as advised, and as one program.

    Raises:
        ValueError: no stage, a stage that does not trace or does not take what the one before gives, or a gain or
            price that is no number of at least 0.
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
    calibration = default_calibration() if calibration is None else calibration
    if not isinstance(calibration, Calibration):
        calibration = load_calibration(calibration)
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
    profiles = profiles_of(groups, trip_counts)
    if FUNCTIONS.name not in calibration.models:
        mend = "measure it with `rlxjax calibrate --only functions`"
        return Advice("cannot model", "not_calibrated", f"the calibration has no functions model: {mend}")
    for profile in profiles.values():
        if profile.uncounted:
            code = "unknown_loop" if profile.unknown_loops else "uncosted"
            return Advice("cannot model", code, profile.uncounted[0])
    if memory_bytes is None:
        memory_bytes = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    limit = math.inf if memory_bytes is None else memory_bytes
    found = predict_profiles(calibration, list(profiles.values()))
    question = _Question(found, groups, limit, float(min_gain_ns), float(peak_price_ns_per_byte))
    return _answer(question, whole, functions, args if measure else None)


class _Question:
    """Groups of stages with their profiles, all predicted by one estimate, and the plans that they allow."""

    def __init__(
        self, found: FunctionTimes, groups: Mapping[Span, Stage], limit: float, min_gain_ns: float, price: float
    ):
        self.found, self.min_gain_ns, self.price = found, min_gain_ns, price
        self.place = {span: place for place, span in enumerate(groups)}
        count = 1 + max(last for _, last in groups)
        self.names = [groups[number, number].name for number in range(count)]
        leaves = jax.tree.leaves(groups[0, count - 1].args)
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if hasattr(leaf, "dtype"))
        times, peaks = np.full((count, count), np.inf), np.zeros((count, count))
        for span, prediction in zip(groups, found.predictions, strict=True):
            times[span] = prediction.time_ns
            peaks[span] = prediction.profile.peak_bytes + (held if span[0] else 0)
        is_stage, is_all = np.eye(count, dtype=bool), np.zeros(times.shape, bool)
        is_all[0, -1] = True
        self.apart, self.together = (plan_stages(np.where(own, times, np.inf), peaks)[0] for own in (is_stage, is_all))
        self.fits = self.together.peak_bytes <= limit
        times[(peaks > limit) & ~is_stage] = np.inf
        plans = plan_stages(times, peaks, peak_price_ns_per_byte=price, count=MOST_GROUPINGS)
        ends = [self.together, self.apart] if self.fits else [self.apart]
        self.plans = [*plans, *(plan for plan in ends if plan not in plans)]

    def predictions(self, plan: StagePlan) -> list[FunctionPrediction]:
        """Return what is predicted of each program of a plan."""
        return [self.found.predictions[place] for place in self._places(plan)]

    def ahead(self, plan: StagePlan, other: StagePlan, min_gain_ns: float = 0.0) -> tuple[float, float, bool]:
        """Return what a plan saves in ns, the probability that this is more than asked, and whether both were measured.

        A gain in ns has the price of the bytes at the peak in it.
        """
        decided = self.found.decision(self._places(plan), self._places(other))
        margin_ns = float(decided.margin_ns) + self.price * (other.peak_bytes - plan.peak_bytes)
        odds = (margin_ns - min_gain_ns) / temperature_from_sd(float(decided.margin_sd_ns))
        return margin_ns, 0.5 + 0.5 * math.tanh(0.5 * odds), bool(decided.in_domain)

    def grouping(self, plan: StagePlan) -> Grouping:
        """Return a plan in the words of the answer."""
        each = self.predictions(plan)
        interval = (sum(one.low_ns for one in each), sum(one.high_ns for one in each))
        names = tuple(tuple(self.names[number] for number in group) for group in plan.groups)
        probability = None if plan == self.apart else self.ahead(plan, self.apart, self.min_gain_ns)[1]
        return Grouping(names, sum(one.time_ns for one in each), interval, int(plan.peak_bytes), probability)

    def _places(self, plan: StagePlan) -> list[int]:
        return [self.place[group[0], group[-1]] for group in plan.groups]


def _answer(
    question: _Question, whole: Sequence[Stage], functions: Sequence[Callable[..., Any]], args: tuple[Any, ...] | None
) -> Advice:
    """Return the answer of a calibration that can be asked; also time the forms if it is given the arguments."""
    groupings = {plan: question.grouping(plan) for plan in question.plans}
    chances = {plan: own.probability for plan, own in groupings.items() if own.probability is not None}
    sure = [plan for plan, chance in chances.items() if chance >= SURE]
    plan = next(iter(sure or chances), question.together)
    margin_ns, probability, in_domain = question.ahead(plan, question.apart, question.min_gain_ns)
    each, programs = question.predictions(question.apart), question.predictions(plan)
    apart, grouped = question.grouping(question.apart), question.grouping(plan)
    before, after, counts = _terms(each), _terms(programs), _counts(each)
    counts.subtract(_counts(programs))
    counts.update({name: -count for name, count in counts.items() if name.startswith("recomputed") and count < 0})
    changes = {name: before.get(name, 0.0) - after.get(name, 0.0) for name in before | after}
    saved = dict(sorted(changes.items(), key=lambda part: -abs(part[1])))
    if not chances:
        verdict, code = "keep", "peak_memory"
    elif sure:
        launches, traffic = (sum(saved.get(name, 0.0) for name in terms) for terms in (LAUNCH_TERMS, TRAFFIC_TERMS))
        verdict = "fuse" if len(plan.groups) == 1 else "group"
        code = "saves_launches" if launches >= traffic else "saves_traffic"
    elif max(chances.values()) <= 1.0 - SURE:
        verdict, code = "keep", _why_not(saved, margin_ns, counts["recomputed_elements"])
    else:
        verdict, code = "undecided", "too_close"
    reason = _reason(code, question, plan, margin_ns, saved, counts["recomputed_elements"])
    if len(question.names) > 2 and sure:
        rivals = (other for other in question.plans if other != plan and question.ahead(plan, other)[1] < SURE)
        if rival := next(rivals, None):
            reason += f"; {groupings[rival].name} is as good within the doubt"
    if chances and not question.fits:
        needed = counted(int(question.together.peak_bytes), "byte")
        reason += f"; one program of all needs {needed} at once, more than the device has"
    groups = plan.groups if len(functions) > 1 else ((0,),)
    return Advice(
        verdict=verdict,
        reason_code=code,
        reason=reason,
        probability=probability,
        apart_ns=apart.time_ns,
        apart_interval_ns=apart.interval_ns,
        together_ns=grouped.time_ns,
        together_interval_ns=grouped.interval_ns,
        apart_terms_ns=before,
        together_terms_ns=after,
        min_gain_ns=question.min_gain_ns,
        stages=tuple(
            StageCost(name, own.time_ns, _word(next(iter(own.terms_ns))), own.profile.peak_bytes)
            for name, own in zip(question.names, each, strict=True)
        ),
        groups=grouped.groups,
        groupings=tuple(groupings.values()),
        apart_peak_bytes=apart.peak_bytes,
        together_peak_bytes=grouped.peak_bytes,
        flip=_flip(saved, margin_ns - question.min_gain_ns),
        code=as_code(whole, groups) if sure else "",
        extrapolated=not in_domain,
        measured=None if args is None else measured(functions, groups, args),
        **counts,
    )


def _counts(programs: Sequence[FunctionPrediction]) -> Counter[str]:
    """Return what programs do in all, by the fields of the answer; what is done again counts the other way."""
    profiles = [program.profile for program in programs]
    kernels = [group for profile in profiles for group in profile.kernels]
    return Counter(
        saved_calls=len(profiles),
        saved_launches=sum(group.launches for group in kernels),
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
    code: str, question: "_Question", plan: StagePlan, margin_ns: float, saved: Mapping[str, float], recomputed: int
) -> str:
    """Return the sentence of a reason's code."""
    subject = "one program" if len(plan.groups) == 1 else question.grouping(plan).name
    priced = ", memory at its price," if question.price else ""
    gain, asked = f"{whole_ns(abs(margin_ns))} ns{priced}", f"{whole_ns(question.min_gain_ns)} ns"
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
