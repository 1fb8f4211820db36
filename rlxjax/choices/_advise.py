"""`advise` says which stages should be compiled together as one program."""

import dataclasses
import functools
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rlxjax._checks import check_at_least, is_traced
from rlxjax._tracing import is_from_jit
from rlxjax._values import counted
from rlxjax.calibration import (
    CalibratedModel,
    Calibration,
    FunctionPrediction,
    FunctionTimes,
    default_calibration,
    load_calibration,
    predict_profiles,
    stands_on,
    times_for_target,
)
from rlxjax.devices import DoesNotFitError, TargetDevice, target_device
from rlxjax.fit import SURE, faster_probability
from rlxjax.fusion import plan_stages
from rlxjax.jaxpr import FunctionProfile, TripCounts, profile_function
from rlxjax.models import FUNCTIONS
from rlxjax.units import bytes_text, time_text

from ._advice import Advice, Grouping, as_code, compared, flip, verdict_of, why_measured, why_not, why_predicted
from ._calls import ALONE, Party
from ._choose import decide, recalled
from ._description import content_of
from ._programs import (
    Predicted,
    Stage,
    Work,
    as_arguments,
    check_repeatable,
    devices_of,
    figures_of,
    filled,
    in_order,
    in_words,
    parts_of,
    predicted_programs,
    where_of,
)
from ._store import Memory
from ._way import REGRET, SURE_OF_FUNCTIONS, Choice, Way, measure_word

#: A group of neighbouring stages: the index of its first stage and the index of its last stage.
Span = tuple[int, int]
#: At most this number of groupings is predicted (7 stages have 64), and at most this number is timed besides "apart".
MOST_GROUPINGS, MOST_CONSIDERED = 64, 6
#: Terms of the model that count as launches, and as traffic. With a target, all terms except launches count as traffic.
LAUNCH_TERMS, TRAFFIC_TERMS = ("call_ns", "launch_ns", "loop_ns"), ("memory_ns", "movement_ns", "transpose_ns")


def advise(
    stages: Callable[..., Any] | Sequence[Callable[..., Any]],
    *args: Any,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    min_gain_ns: float = 0.0,
    trip_counts: TripCounts | None = None,
    memory_bytes: int | None = None,
    peak_price_ns_per_byte: float = 0.0,
    measure: str | None = None,
    regret: float = REGRET,
    check: bool = True,
    target: str | TargetDevice | None = None,
    mesh: Mapping[str, int] | None = None,
) -> Advice:
    """Say which stages to compile together as one jitted function, and why.

    For three or more stages, the advice is the fastest way to group neighbouring stages into programs. Nothing is
    compiled or run unless you give `measure` or `target`. Measured times are remembered, as in `choose`.

    Args:
        stages: functions, in the order in which they run. Each stage takes the result of the previous stage: a tuple as
            several arguments, anything else as one argument. If you give a single function, the alternative to jit is
            to run it operation by operation; jitted functions that it calls stay whole.
        *args: arguments of the first stage: arrays, `jax.ShapeDtypeStruct`s, or trees of them.
        calibration: the calibration of this machine, or the path of its file; the default is `default_calibration()`.
        min_gain_ns: how many ns per call a grouping has to save to be better than "apart"; at least 0.
        trip_counts: number of iterations of each loop whose length depends on data, in order over all stages.
        memory_bytes: memory of the device in bytes. No program that needs more is advised. The default is the limit
            that JAX reports for its default device; if JAX reports none, there is no limit.
        peak_price_ns_per_byte: a cost, in ns per call, that each byte of peak memory adds to a grouping; at least 0.
        measure: "never", "always", or "undecided", which measures only if the model is not sure. Measuring compiles
            "apart", "together" and the most promising groupings. It times them until one is surely the fastest, or
            until the remaining ones are surely equal. The default is `RLXJAX_MEASURE`, or else "never".
        regret: relative difference in time that does not matter to you, from 0 to 1. If a grouping and "apart" surely
            differ by less, the verdict is "keep".
        check: whether to raise an error if the programs that are timed give unequal results, as in `choose`.
        target: a device to advise for instead of this machine, for example "tpu-v5e" or "h100"; it need not be present.
            Each program is compiled for the target (`rlxjax.targets.compile_for`). Times are predicted from the kernels
            and bytes that the compiler reports and from the data sheet; `stands_on` says more. A grouping that needs
            less of one resource and no more of any other is always better.
        mesh: a mesh of target devices: a dict from axis name to size, see `rlxjax.targets.compile_for`.

    Returns:
        The advice. Call the advice with the arguments of the first stage to run the advised programs.

    Raises:
        ValueError: `stages` is empty; a stage cannot be traced or does not take the previous result; a number is
            negative; stages to measure have side effects, donate arguments or give unequal results; `target` is
            unknown, is given with `measure` or `calibration`, or its compiler is missing or fails; `mesh` is given
            without `target`.
        CalibrationFileError: the calibration file cannot be used, or rlxjax has no calibration for this platform.

    Examples:
        >>> import jax.numpy as jnp
        >>> from rlxjax.calibration import CalibratedModel
        >>> from rlxjax.fit import prior_posterior
        >>> domain = {name: (0, 1e9) for name in (*FUNCTIONS.inputs, *FUNCTIONS.kernels)}
        >>> model = CalibratedModel(prior_posterior(FUNCTIONS), {}, {}, domain)
        >>> known, rows = Calibration({"functions": model}, None, {}), jax.ShapeDtypeStruct((1000, 1000), jnp.float32)
        >>> found = advise([jnp.negative, jnp.abs], rows, calibration=known)
        >>> found.verdict, found.reason_code, found.saved_launches, found.saved_traffic_bytes
        ('fuse', 'saves_traffic', 1, 8000000)
        >>> print(found.code)
        from jax.numpy import negative
        stage2 = stages[1]  # stages: the functions that you gave, in order
        fused = jax.jit(lambda x0: stage2(negative(x0)))
        # fused = jax.jit(fused.__wrapped__, donate_argnums=(0,))  # if no code uses x0 afterwards
        >>> [one.name for one in advise([jnp.negative, jnp.abs, jnp.sum], rows, calibration=known).alternatives]
        ['together', 'negative+abs | sum', 'negative | abs+sum', 'apart']
    """
    check_at_least(min_gain_ns, "min_gain_ns", what="number", most=math.inf)
    check_at_least(regret, "regret", what="number", most=1.0)
    check_at_least(peak_price_ns_per_byte, "peak_price_ns_per_byte", what="number", most=1e18)
    if memory_bytes is not None:
        check_at_least(memory_bytes, "memory_bytes", what="number", most=math.inf)
    functions = [stages] if callable(stages) or not isinstance(stages, Iterable) else list(stages)
    if not functions or not all(map(callable, functions)):
        raise ValueError(f"stages: expected a function or a list of functions, got {stages!r}")
    device = None if target is None else target_device(target)
    word = "never" if measure is None and device is not None else measure_word(measure, "never")
    is_traced_call = is_traced(*jax.tree.leaves(args))
    if is_traced_call and word != "never":
        raise ValueError("args: expected arrays or shapes, got traced values; measure outside the traced function")
    if device is None:
        calibration = default_calibration() if calibration is None else calibration
        if not isinstance(calibration, Calibration):
            calibration = load_calibration(calibration)
        if mesh is not None:
            raise ValueError("mesh: give a target too, or leave the mesh out")
    elif word != "never" or calibration is not None:
        option = "measure" if word != "never" else "calibration"
        raise ValueError(f"{option}: leave it out with target {device.name!r}, because the target is another device")
    whole = in_order(functions, args)
    fn = functions[0] if len(functions) == 1 else composed(whole)
    apart = Grouping("apart", groups=tuple((stage.name,) for stage in whole))
    said = functools.partial(Advice, "apart", "model", fn=fn, target=None if device is None else device.name)
    said = functools.partial(said, alternatives=(apart,), regret=regret)
    if len(functions) > 1:
        groups = groups_of(whole)
    else:
        is_jitted = is_from_jit(fn)
        parts = [] if is_jitted else parts_of(whole[0])
        if len(parts) < 2:
            why = f"{whole[0].name} is {'jitted' if is_jitted else 'a single operation'}, so it is one program already"
            return said(verdict="keep", reason_code="already_one_program", reason=why)
        groups = {(place, place): part for place, part in enumerate(parts)} | {(0, len(parts) - 1): whole[0]}
    profiles, refused = profiles_of(groups, trip_counts, device, mesh)
    cannot = functools.partial(said, verdict="cannot model")
    if calibration is not None and FUNCTIONS.name not in calibration.models:
        reason = "the calibration has no model of functions: run `rlxjax calibrate --only functions`"
        return cannot(reason_code="not_calibrated", reason=reason)
    unknown = next(filter(None, (_unmodelled(profile, device) for profile in profiles.values())), None)
    unmodelled = cannot(reason_code=unknown[0], reason=unknown[1]) if unknown else None
    if unmodelled and device is not None:
        return unmodelled
    if alone := [str(error) for span, error in refused.items() if span[0] == span[1]]:
        reason, one = "; ".join(alone), profiles.get((0, len(whole) - 1))
        if one is None or one.target is None or not one.target.fits or len(whole) == 1:
            return cannot(reason_code="peak_memory", reason=reason)
        own = Grouping("together", groups=(tuple(stage.name for stage in whole),), peak_bytes=one.peak_bytes)
        reason = f"separate programs do not fit, and one program {one.target.memory}; {reason}"
        found = said(verdict="fuse", reason_code="peak_memory", reason=reason, alternatives=(own,), compared="together")
        return dataclasses.replace(found, name="together", code=as_code(functions, whole, [range(len(whole))]))
    if device is None:
        assert calibration is not None
        times = predict_profiles(calibration.of(FUNCTIONS.name), list(profiles.values()))
        has = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    else:
        times, has = times_for_target(list(profiles.values()), device), device.memory_bytes
    limit, prices = has if memory_bytes is None else memory_bytes, (float(min_gain_ns), float(peak_price_ns_per_byte))
    asked = _Question(functions, args, whole, groups, profiles, refused, device, limit, *prices, float(regret))
    forms, choice = asked.forms(times), None
    is_shared = Party.of(devices_of(args)) is not ALONE  # either all processes that hold the arguments ask, or none
    is_decided = word != "never" or not is_traced_call and (is_shared or Memory().path.exists())
    able = [own for own in forms if not own.failed]
    if calibration is not None and is_decided and len(able) > 1 and min_gain_ns < math.inf:
        calibrated = calibration.of(FUNCTIONS.name)
        work = asked.work(able, times, calibrated, word)
        options = {"regret": float(regret), "check": check}
        choice = recalled(work, **options) if word == "never" else decide(work, word, **options)
    return unmodelled if unmodelled and choice is None else asked.answer(forms, times, choice)


def _unmodelled(profile: FunctionProfile, device: TargetDevice | None) -> tuple[str, str] | None:
    """Return the reason code and the reason why a program's time cannot be predicted; None if it can be predicted."""
    # A compiler counts also primitives without a rule. Its text does not identify loops of unknown length.
    unread = profile.target is not None and profile.target.gpu is not None and profile.target.gpu.unknown_loops
    if not (profile.unknown_loops or (device is None and profile.uncounted) or unread):
        return None
    said = profile.uncounted or ("trip counts of loops depend on data",)
    return "unknown_loop" if profile.unknown_loops or unread else "uncosted", said[0]


# --- Stages and groups of them -------------------------------------------------------------------


def composed(stages: Sequence[Stage]) -> Callable[..., Any]:
    """Return a function that runs all stages, each on the result of the previous stage."""
    functions = [stage.fn for stage in stages]

    def together(*args: Any) -> Any:
        result: Any = args
        for fn in functions:
            result = fn(*as_arguments(result))
        return result

    return together


def groups_of(stages: Sequence[Stage]) -> dict[Span, Stage]:
    """Return a jitted program for every group of neighbouring stages."""
    groups = {}
    for first, last in itertools.combinations_with_replacement(range(len(stages)), 2):
        own = stages[first : last + 1]
        fn = own[0].fn if first == last else jax.jit(composed(own))
        groups[first, last] = Stage("+".join(stage.name for stage in own), fn, own[0].args, own[-1].result)
    return groups


def profiles_of(
    groups: Mapping[Span, Stage],
    trip_counts: TripCounts | None,
    device: TargetDevice | None,
    mesh: Mapping[str, int] | None = None,
) -> tuple[dict[Span, FunctionProfile], dict[Span, DoesNotFitError]]:
    """Profile each group with the trip counts of its own loops; also return the errors of groups that do not fit."""
    refused: dict[Span, DoesNotFitError] = {}
    options: dict[str, Any] = {} if device is None else {"level": "compiled", "target": device, "mesh": mesh}

    def profiles(of: Mapping[Span, TripCounts | None]) -> dict[Span, FunctionProfile]:
        found = {}
        for span, trips in of.items():
            try:
                found[span] = profile_function(groups[span].fn, *groups[span].args, trip_counts=trips, **options)
            except DoesNotFitError as error:
                refused[span] = DoesNotFitError(f"{groups[span].name}: {error}", error.needed_bytes)
        return found

    found = profiles(dict.fromkeys(groups))
    if trip_counts is None:
        return found, refused
    whole = max(groups, key=lambda span: span[1] - span[0])
    shares: dict[Span, TripCounts | None] = {}
    if isinstance(trip_counts, Mapping):
        # A line that this group lacks may belong to another group.
        for span, profile in found.items():
            lines = (loop.line for loop in profile.unknown_loops)
            shares[span] = {line: trip_counts[line] for line in lines if line in trip_counts}
    else:
        if alone := [error for span, error in refused.items() if span[0] == span[1]]:
            raise alone[0]  # the loops of this stage are not counted
        given = list(trip_counts)
        loops = (len(found[number, number].unknown_loops) for number in range(whole[1] + 1))
        before = list(itertools.accumulate(loops, initial=0))
        shares = {(first, last): given[before[first] : before[last + 1]] for first, last in groups}
    shares[whole] = trip_counts
    return found | profiles({span: share for span, share in shares.items() if share or span == whole}), refused


# --- The forms, and the answer -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Question:
    """A question to `advise`: the stages, a program for each group of stages, and limits. A `form` is a `Grouping`."""

    given: Sequence[Callable[..., Any]]
    args: tuple[Any, ...]
    whole: Sequence[Stage]
    groups: Mapping[Span, Stage]
    profiles: Mapping[Span, FunctionProfile]
    refused: Mapping[Span, DoesNotFitError]
    device: TargetDevice | None
    limit: float
    min_gain_ns: float
    price: float
    regret: float

    @functools.cached_property
    def names(self) -> list[str]:
        return [self.groups[number, number].name for number in range(1 + max(last for _, last in self.groups))]

    def forms(self, times: FunctionTimes) -> list[Grouping]:
        """Return the groupings that fit in memory, best first; then "together", fitting or not, and "apart"."""
        count = len(self.names)
        leaves = jax.tree.leaves(self.groups[0, count - 1].args)
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if hasattr(leaf, "dtype"))
        time_ns, peaks = np.full((count, count), np.inf), np.zeros((count, count))
        for span, found in zip(self.profiles, times.predictions, strict=True):
            time_ns[span] = found.time_ns
            peaks[span] = found.profile.peak_bytes + (held if span[0] else 0)
        for span, error in self.refused.items():
            peaks[span] = error.needed_bytes or 0
        is_out = (peaks > self.limit) & ~np.eye(count, dtype=bool)
        allowed_ns = np.where(is_out, np.inf, time_ns)
        plans = plan_stages(allowed_ns, peaks, peak_price_ns_per_byte=self.price, count=MOST_GROUPINGS)
        planned = [tuple((group[0], group[-1]) for group in plan.groups) for plan in plans]
        one, apart = ((0, count - 1),), tuple((number, number) for number in range(count))
        forms: list[Grouping] = []
        for programs in dict.fromkeys([apart, *planned, one]):
            groups = tuple(tuple(self.names[first : last + 1]) for first, last in programs)
            name = {one: "together", apart: "apart"}.get(programs, " | ".join(map("+".join, groups)))
            peak_bytes, failed = int(max(peaks[span] for span in programs)), ""
            if programs == one and one not in planned:
                failed = f"one program needs {bytes_text(peak_bytes)} at once, more than the device has"
                if one[0] in self.refused:
                    needs = bytes_text(peak_bytes) if peak_bytes else "more"
                    failed = f"one program needs {needs} of memory, and its compiler rejects it: the device has less"
            own = Grouping(name, failed=failed, groups=groups, peak_bytes=peak_bytes, programs=programs)
            each = self.predictions(times, own)
            # An incomplete count predicts no time.
            if each and (self.device or not any(_unmodelled(found.profile, None) for found in each)):
                own = dataclasses.replace(own, **_predicted(each))
                chance = self.ahead(times, own, forms[0], self.min_gain_ns)[1] if forms else None
                own = dataclasses.replace(own, probability=chance)
            forms.append(own)
        order = [*planned, one, apart]
        return sorted(forms, key=lambda own: order.index(own.programs))

    def places(self, form: Grouping) -> list[int]:
        order = {span: place for place, span in enumerate(self.profiles)}
        return [order[span] for span in form.programs if span in order]

    def predictions(self, times: FunctionTimes, form: Grouping) -> list[FunctionPrediction]:
        return [times.predictions[place] for place in self.places(form)]

    def ahead(
        self, times: FunctionTimes, form: Grouping, other: Grouping, asked_ns: float = 0.0
    ) -> tuple[float, float]:
        """Return how many ns a form saves, price of peak memory included, and the chance that it saves `asked_ns`."""
        decided = times.decision(self.places(form), self.places(other))
        margin_ns, sd_ns = float(decided.margin_ns), float(decided.margin_sd_ns)
        if self.device is not None:  # traffic that contradicts the sign of the margin adds uncertainty
            sides = [self.predictions(times, own) for own in (other, form)]
            before, after = (sum(one.profile.fused_traffic_bytes for one in side) for side in sides)
            traffic_ns = (before - after) / self.device.bandwidth_bytes_per_ns
            sd_ns = math.hypot(sd_ns, traffic_ns if traffic_ns * margin_ns < 0 else 0.0)
        margin_ns += self.price * (other.peak_bytes - form.peak_bytes)
        if self.device is not None and margin_ns >= asked_ns and self.dominates(times, form, other):
            return margin_ns, 1.0
        if self.device is not None and self.dominates(times, other, form):
            return margin_ns, 0.0
        return margin_ns, float(faster_probability(margin_ns - asked_ns, sd_ns))

    def dominates(self, times: FunctionTimes, form: Grouping, other: Grouping) -> bool:
        """Whether the compiler reports that a form needs less of one resource than `other`, and no more of others."""

        def figures(own: Grouping) -> list[int]:
            profiles = [one.profile for one in self.predictions(times, own)]
            made = [one.target for one in profiles if one.target]
            kernels = sum(int(one.io.kernel_launches) for one in profiles)
            cycles = sum(one.cycles or 0 for one in made)
            exchanged = sum(each.bytes * each.times for one in made for each in one.exchanges)
            moved = sum(one.fused_traffic_bytes for one in profiles)
            return [len(profiles), kernels, moved, cycles, exchanged, own.peak_bytes]

        pairs = list(zip(figures(form), figures(other), strict=True))
        is_whole = not any(one.uncounted for own in (form, other) for one in self.predictions(times, own))
        return is_whole and all(one <= two for one, two in pairs) and any(one < two for one, two in pairs)

    def run_by(self, form: Grouping) -> Callable[..., Any]:
        """Return the function that runs a form. For "apart" of a single function, this is the given function."""
        is_given = form.name == "apart" and len(self.whole) == 1
        return self.given[0] if is_given else composed([self.groups[span] for span in form.programs])

    def work(self, forms: Sequence[Grouping], times: FunctionTimes, calibrated: CalibratedModel, measure: str) -> Work:
        """Return the forms as a `Work`."""
        arrays, is_plain = functools.cache(lambda: filled(self.args)), len(self.whole) == 1
        traced = functools.cache(lambda span: self.groups[span].fn.trace(*self.groups[span].args))

        def way(form: Grouping) -> Way:
            programs, fn = [traced(span) for span in form.programs], self.run_by(form)
            for one in programs if measure != "never" else ():
                check_repeatable(form.name, one)
            extra_ns = self.price * form.peak_bytes + (0.0 if form.name == "apart" else self.min_gain_ns)
            content, make = content_of(programs), lambda: [one.lower().compile() for one in programs]
            make = None if fn is self.given[0] else make
            return Way(form.name, extra_ns=extra_ns, content=content, fn=fn, call=lambda: fn(*arrays()), make=make)

        def predict(_: CalibratedModel) -> Predicted:
            return predicted_programs(ways, times, [self.places(form) for form in considered])

        named = {form.name: form for form in forms}
        considered = [named.pop("apart"), *named.values()][: 1 + MOST_CONSIDERED]
        if "together" in named and named["together"] not in considered:
            considered[-1] = named["together"]
        ways = [way(form) for form in considered]
        stages = f"operations of {self.whole[0].name}" if is_plain else ", ".join(self.names)
        label, workload = f"{stages} on {in_words(self.args)}", where_of(self.args) | {"stages": len(self.whole)}
        devices = devices_of(self.args)
        return Work(ways, predict, calibrated, FUNCTIONS.name, label, workload, devices, sure=SURE_OF_FUNCTIONS)

    def decided(self, times: FunctionTimes, forms: Sequence[Grouping], grouped: Grouping, choice: Choice | None) -> str:
        """Return what the model decides: the grouping is "faster" or "slower", "no_matter", or "too_close" to call."""
        (apart,) = (own for own in forms if own.name == "apart")
        others = [own for own in forms if own is not apart and not own.failed]
        most = max(own.probability or 0.0 for own in others)
        regret_ns, name = self.regret * (apart.predicted_ns or 0.0), choice and choice.name
        matters = [self.ahead(times, own, apart, regret_ns)[1] for own in others]
        matters[others.index(grouped)] += 1.0 - self.ahead(times, grouped, apart, -regret_ns)[1]
        if max(matters) <= 1.0 - SURE:
            return "no_matter"
        if most >= SURE or name not in (None, "apart"):
            return "faster"
        return "slower" if name or most <= 1.0 - SURE else "too_close"

    def answer(self, forms: Sequence[Grouping], times: FunctionTimes, choice: Choice | None) -> Advice:
        named, device, asked_ns = {own.name: own for own in forms}, self.device, self.min_gain_ns
        apart, together = named["apart"], named["together"]
        chances = {own.name: own.probability or 0.0 for own in forms if own.name != "apart" and not own.failed}
        sure = [name for name, chance in chances.items() if chance >= SURE]
        grouped = named[compared(choice) if choice else next(iter(sure or chances), "together")]
        each, programs = self.predictions(times, apart), self.predictions(times, grouped)
        code, runs, reason = "peak_memory", apart, together.failed
        has = "" if device is None else f"{bytes_text(device.memory_bytes)} at once"
        figures: dict[str, Any] = {"stages": (), "flip": "", "stands_on": ""}
        margin_ns, probability, saved = 0.0, None, {}
        if grouped.predicted_ns is not None:
            margin_ns, probability = self.ahead(times, grouped, apart, asked_ns)
            before, after = apart.terms_ns, grouped.terms_ns
            changes = {name: before.get(name, 0.0) - after.get(name, 0.0) for name in {**before, **after}}
            saved = dict(sorted(changes.items(), key=lambda part: -abs(part[1])))
            figures |= _saved(each, programs)
            figures["stages"] = tuple(
                Grouping(name, **_predicted([own]), groups=((name,),), peak_bytes=own.profile.peak_bytes)
                for name, own in zip(self.names, each, strict=True)
            )
        if choice is not None and choice.by != "model":
            code, name, reason = why_measured(choice)
            runs = named[name]
        elif chances:
            again, needs = figures["recomputed_elements"], ""
            code = self.decided(times, forms, grouped, choice)
            runs = grouped if code == "faster" else apart
            if device is not None and apart.peak_bytes > device.memory_bytes:
                code, runs, needs = "peak_memory", grouped, f"{bytes_text(apart.peak_bytes)} of {has}"
            if code == "slower":
                code = why_not(saved, margin_ns, again)
            elif code == "faster":
                launches, traffic = (sum(saved.get(name, 0.0) for name in own) for own in (LAUNCH_TERMS, TRAFFIC_TERMS))
                traffic = traffic if device is None else sum(saved.values()) - launches
                code = "saves_launches" if launches >= traffic else "saves_traffic"
            figures["flip"] = flip(saved, margin_ns - asked_ns) if code != "no_matter" else ""
            priced = " (price of peak memory included)" if self.price else ""
            details = margin_ns, saved, again, asked_ns, self.regret, priced, needs
            reason = why_predicted(code, grouped.name, *details)
            others = [own for own in forms if own is not grouped and not own.failed]
            if len(self.names) > 2 and runs is grouped:
                rivals = (own.name for own in others if self.ahead(times, grouped, own)[1] < SURE)
                reason += next((f"; {name} may be as fast" for name in rivals), "")
        if len(self.whole) == 1:
            reason += f"; compared with running {self.whole[0].name} operation by operation, without jit"
        if chances and together.failed:
            reason += f"; {together.failed}"
        if device is not None and programs:
            found = dict(zip([*map("+".join, grouped.groups), *self.names], [*programs, *each], strict=True))
            changed = change_in_words([own.profile for own in each], [own.profile for own in programs])
            targets = {name: own.profile.target for name, own in found.items()}
            unfit = [f"{name} {own.memory}" for name, own in targets.items() if own and not own.fits]
            steps_ns = [sum(one.pipelined_ns or 0.0 for one in side) for side in (each, programs)]
            step = f"{time_text(abs(steps_ns[0] - steps_ns[1]))} {'less' if steps_ns[0] > steps_ns[1] else 'more'}"
            loop = f"in a loop that waits for no result, {step} a step"
            reason = "; ".join([reason, loop, f"{changed}, {bytes_text(grouped.peak_bytes)} of {has}", *unfit])
            figures["stands_on"] = f"predicted by {stands_on([*each, *programs])}"
        joined = [range(first, last + 1) for first, last in runs.programs] if len(self.whole) > 1 else [(0,)]
        taken = {} if choice is None else {own.name: own for own in choice.alternatives}
        names = ("measured_ns", "measured_interval_ns", "failed", "is_tie", "compile_s")
        took = [{name: getattr(taken.get(own.name, own), name) for name in names} for own in forms]
        for own, new in zip(forms, took, strict=True):  # a tie with "apart" is a tie with the grouping that runs
            new["is_tie"] = own is not runs and (new["is_tie"] or code == "tie" and own is grouped)
        said = {"by": "model", "regret": self.regret} if choice is None else vars(choice)
        said = said | figures | {"name": runs.name, "fn": self.run_by(runs), "probability": probability}
        said["alternatives"] = tuple(dataclasses.replace(own, **new) for own, new in zip(forms, took, strict=True))
        said["is_tie"] = code == "tie"
        return Advice(
            **said,
            verdict=verdict_of(code, runs.name),
            reason_code=code,
            reason=reason,
            compared=grouped.name,
            min_gain_ns=asked_ns,
            code=as_code(self.given, self.whole, joined) if runs is grouped else "",
            target=None if device is None else device.name,
        )


def _predicted(each: Sequence[FunctionPrediction]) -> dict[str, Any]:
    """Return the fields of a `Grouping` that hold its prediction; its programs run one after another."""
    terms: Counter[str] = Counter()
    for one in each:
        terms.update(one.terms_ns)  # pyright: ignore[reportArgumentType]
    return figures_of(each) | {"terms_ns": dict(terms.most_common())}


def _saved(apart: Sequence[FunctionPrediction], grouped: Sequence[FunctionPrediction]) -> dict[str, Any]:
    """Return the fields `saved_...` and `recomputed_...` of an `Advice`, for the second grouping against the first."""

    def totals(programs: Sequence[FunctionPrediction]) -> dict[str, int]:
        profiles = [program.profile for program in programs]
        # A compiled text shows fusions but no recomputation.
        kernels = [profile.kernels for profile in profiles if profile.level == "jaxpr"]
        compiled = sum(int(profile.io.kernel_launches) for profile in profiles if profile.level == "compiled")
        return {
            "saved_calls": len(profiles),
            "saved_launches": compiled + sum(int(table.launches.sum()) for table in kernels),
            "saved_sync_points": sum(int(profile.io.sync_points) for profile in profiles),
            "saved_readback_bytes": sum(int(profile.io.host_output_bytes) for profile in profiles),
            "saved_traffic_bytes": sum(profile.fused_traffic_bytes for profile in profiles),
            "recomputed_flops": sum(int(table.flops.sum()) for table in kernels),
            "recomputed_elements": sum(int(table.elements.sum()) for table in kernels),
        }

    before, after = totals(apart), totals(grouped)
    saved = {name: count - after[name] for name, count in before.items()}
    return {name: max(-count, 0) if name.startswith("recomputed") else count for name, count in saved.items()}


def change_in_words(apart: Sequence[FunctionProfile], grouped: Sequence[FunctionProfile]) -> str:
    """Say how a grouping changes the compiler's counts: for example, "1 kernel instead of 3, 134 MB less traffic"."""
    sides = (apart, grouped)
    before, after = (sum(int(own.io.kernel_launches) for own in side) for side in sides)
    moved, left = (sum(own.fused_traffic_bytes for own in side) for side in sides)
    cycles = [[own.target.cycles if own.target else None for own in side] for side in sides]
    change = f"{bytes_text(abs(moved - left))} {'less' if moved > left else 'more'} traffic"
    parts = [f"{counted(after, 'kernel')} instead of {before:,}", change if moved != left else "equal traffic"]
    if None not in (*cycles[0], *cycles[1]):
        parts.append("{:,} cycles instead of {:,}".format(*(sum(own or 0 for own in side) for side in cycles[::-1])))
    return ", ".join(parts)
