"""What `advise` answers: which grouping of some stages runs, why, what that changes, and the change as code."""

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
from pydantic import ConfigDict

from rlxjax._values import by_value, counted, whole_ns

from ._programs import Stage
from ._way import Choice, Way

#: The fastest groupings that are shown, and the names of those that always are.
MOST_SHOWN, ENDS = 8, ("apart", "together")
#: By what a verdict is, in words.
DECIDED = {
    "model": "the model",
    "measured": "measuring",
    "remembered": "an earlier measurement, which is remembered",
    "pinned": "a person, who pinned it",
}


@by_value
@dataclasses.dataclass(frozen=True)
class Grouping(Way):
    """One way to group stages into programs; `name` is the stages, joined where they run as one program.

    Attributes:
        groups: names of the stages of each program.
        peak_bytes: that live at once while the largest program runs, arguments of the first one held.
        probability: that it saves more than what is asked, by the model; None of the stages apart.
        terms_ns: the parts of the predicted time by name, the largest first.
        programs: the first and the last stage of each program by number; empty in an answer that was read.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    peak_bytes: int = 0
    probability: float | None = None
    terms_ns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    programs: tuple[tuple[int, int], ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def limit(self) -> str:
        """The largest part of the predicted time: "call", "elementwise", "matmul", ..."""
        return term_in_words(next(iter(self.terms_ns), ""))


@by_value
@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice(Choice):
    """Whether stages should run as fewer programs, and which: a choice of a `Grouping`, why, and what it changes.

    One grouping is *compared* with the stages apart: the one program of all stages, or of three and more stages the
    one that is advised, else the fastest. A prediction is by the calibration, and by what was measured here of others
    where the model decides. Counts are of one call of all stages.

    Attributes:
        name: of the grouping to run; "apart" unless the verdict is "fuse" or "group".
        alternatives: the fastest groupings, the best first, and always the stages apart and together; the stages
            apart alone, without times, where nothing is predicted.
        probability: that the compared grouping saves more than `min_gain_ns`, by the model; None where nothing says.
        verdict: "fuse": as one program. "group": as the programs of `groups`. "keep": apart. "undecided": no
            grouping surely saves what is asked, and not all of them surely fail to, by the model, which decides
            alone. "cannot model": nothing is predicted, and nothing measured.
        reason_code: stable, for programs: `saves_launches`, `saves_traffic`; `recompute`, `loses_tiling`, `slower`,
            `no_gain`, `peak_memory`, `already_one_program`; `too_close`; `uncosted`, `unknown_loop`, `not_calibrated`;
            of what is not decided by the model `measured_faster`, `measured_slower`, `no_gain`, `tie`, `pinned`.
        reason: the same in a sentence.
        compared: name of the grouping that is compared with the stages apart; empty where none is.
        min_gain_ns: what has to be saved.
        stages: each stage, jitted by itself.
        saved_calls: programs that are called less.
        saved_launches: kernels that the grouping has less.
        saved_sync_points: waits for the host that it has less.
        saved_readback_bytes: bytes of results that it has less.
        saved_traffic_bytes: bytes that it moves less.
        recomputed_flops: floating-point operations that it does more.
        recomputed_elements: results of operations, transcendental ones included, that it computes more.
        flip: what would have to change for the other verdict, in a sentence.
        code: the change, as Python; empty unless the verdict is "fuse" or "group".
        target: the device that they were compiled for, where one was named.
        stands_on: what the times for it rest on, in a sentence; empty of this machine, whose calibration says so.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict()
    alternatives: tuple[Grouping, ...] = ()
    verdict: str
    reason_code: str
    reason: str
    compared: str = ""
    min_gain_ns: float = 0.0
    stages: tuple[Grouping, ...] = ()
    saved_calls: int = 0
    saved_launches: int = 0
    saved_sync_points: int = 0
    saved_readback_bytes: int = 0
    saved_traffic_bytes: int = 0
    recomputed_flops: int = 0
    recomputed_elements: int = 0
    flip: str = ""
    code: str = ""
    target: str | None = None
    stands_on: str = ""

    @property
    def pair(self) -> tuple[Grouping, ...]:
        """The stages apart, and the grouping that is compared with them; empty where nothing is compared."""
        named = {own.name: own for own in self.alternatives}
        found = named.get("apart"), named.get(self.compared)
        return tuple(own for own in found if own is not None) if None not in found else ()

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Names of the stages of each program of the compared grouping."""
        return next((own.groups for own in self.alternatives if own.name == self.compared), ())

    @property
    def extrapolated(self) -> bool:
        """Whether some count lies outside what was measured."""
        return not all(own.in_domain for own in self.pair)

    @property
    def gain_ns(self) -> float | None:
        """What the compared grouping saves in a call: as measured where both were timed, else as predicted."""
        for name in ("measured_ns", "predicted_ns"):
            times = [getattr(own, name) for own in self.pair]
            if times and None not in times:
                return times[0] - times[1]
        return None

    @property
    def calls_to_pay_back(self) -> int | None:
        """The calls after which compiling the grouping has paid; None if it was not timed, or never pays."""
        seconds, gain_ns = self.pair[1].compile_s if self.pair else None, self.gain_ns
        return math.ceil(seconds * 1e9 / gain_ns) if seconds is not None and gain_ns and gain_ns > 0 else None

    def as_dict(self) -> dict[str, Any]:
        own = ("groups", "extrapolated", "gain_ns", "calls_to_pay_back")
        return super().as_dict() | {name: getattr(self, name) for name in own}

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.reason} ({self.reason_code})"]
        by_model = "" if self.by == "model" else " by the model"
        if by_model:
            lines.append(f"decided by {DECIDED[self.by]}{': a tie' if self.is_tie else ''}")
        if self.probability is None or not self.pair:
            return "\n".join([*lines, *self._timed(), *filter(None, [self.code])])
        apart, grouped = self.pair
        for name, own in (("apart", apart), (self._word, grouped)):
            lines.append(f"{name:10}{_ns(own.predicted_ns):>15} ns  (90 %: {_ends(own)})")
        lines.append(f"saves more than {whole_ns(self.min_gain_ns)} ns with {100 * self.probability:.0f} %{by_model}")
        if self.extrapolated and self.target is None:
            lines.append("outside what was measured: an extrapolation")
        able = [own for own in self.alternatives if not own.failed]
        for place, own in enumerate(able if len(able) > 2 else ()):
            if place < MOST_SHOWN or own.name in ENDS:
                took = "" if own.measured_ns is None else f", measured {whole_ns(own.measured_ns)} ns"
                lines.append(f"  {_ns(own.predicted_ns):>13} ns  ({_ends(own)})  {own.name}{took}")
        lines += self._timed()
        lines += [f"  {stage.name}: {_ns(stage.time_ns)} ns, limited by {stage.limit}" for stage in self.stages]
        again = f"; computes {counted(self.recomputed_elements, 'number')} again, {self.recomputed_flops:,} FLOP"
        lines.append(
            f"saves {counted(self.saved_calls, 'call')}, {counted(self.saved_launches, 'launch', 'launches')}, "
            f"{counted(self.saved_sync_points, 'sync point')}, "
            f"{counted(self.saved_readback_bytes, 'byte')} of readback, "
            f"{counted(self.saved_traffic_bytes, 'byte')} of traffic{again if self.target is None else ''}"
        )
        lines.append("peak memory: {} apart, {} together".format(*(counted(o.peak_bytes, "byte") for o in self.pair)))
        return "\n".join([*lines, *filter(None, (self.flip, self.stands_on, self.code))])

    @property
    def _word(self) -> str:
        return "together" if len(self.groups) < 2 else "grouped"

    def _timed(self) -> list[str]:
        took = {own.name: own.measured_ns for own in self.alternatives if own.measured_ns is not None}
        if not took:
            return []
        forms = {"apart": "apart", self._word: self.compared} | {"together": "together"}
        times = [f"{word} {whole_ns(took[name])} ns" for word, name in forms.items() if name in took]
        if {"apart", self.compared} <= took.keys():
            times.append(f"{took[self.compared] / took['apart']:.2f} times as long (less is better)")
        lines = [f"measured in {counted(self.rounds, 'round')}: {', '.join(times)}"]
        if self.pair and (seconds := self.pair[1].compile_s) is not None:
            pays = self.calls_to_pay_back
            after = "never pays" if pays is None else f"pays after {counted(pays, 'call')}"
            lines.append(f"compiling takes {seconds:.2f} s and {after}")
        return lines


def _ns(time_ns: float | None) -> str:
    return whole_ns(math.nan if time_ns is None else time_ns)


def _ends(way: Way) -> str:
    return " to ".join(map(whole_ns, way.predicted_interval_ns or (math.nan, math.nan)))


def term_in_words(term: str) -> str:
    """Return a term's name as people write it."""
    return term.removesuffix("_ns").replace("_", " ")


# --- Why -----------------------------------------------------------------------------------------


def why_not(saved: Mapping[str, float], margin_ns: float, recomputed: int) -> str:
    """Return the code of a reason to keep stages apart."""
    if margin_ns >= 0:
        return "no_gain"
    if min(saved, key=lambda name: saved[name]) == "transpose_ns":
        return "loses_tiling"
    return "recompute" if recomputed > 0 else "slower"


def why_predicted(
    code: str, name: str, margin_ns: float, saved: Mapping[str, float], again: int, asked_ns: float, priced: str
) -> str:
    """Return the sentence of a reason's code."""
    subject, gain = "one program" if name == "together" else name, f"{whole_ns(abs(margin_ns))} ns{priced} a call"
    numbers = f", {counted(again, 'number')}" if again > 0 else ""
    return {
        "saves_launches": f"{subject} saves {gain}, most of it in calls and launches",
        "saves_traffic": f"{subject} saves {gain}, most of it in bytes that it does not move",
        "recompute": f"{subject} costs {gain} more: it computes again what it does not keep{numbers}",
        "loses_tiling": f"{subject} costs {gain} more: it transposes element by element beside other work",
        "slower": f"{subject} costs {gain} more, most of it in {term_in_words(next(iter(saved), 'call_ns'))}",
        "no_gain": f"{subject} saves {gain}, less than the {whole_ns(asked_ns)} ns that are asked",
        "too_close": f"the difference of {gain} between {subject} and the stages apart is within the doubt",
    }[code]


def flip(saved: Mapping[str, float], margin_ns: float) -> str:
    """Return how far a verdict is from the other one, by its largest term."""
    most = next(iter(saved), None)
    if most is None or not saved[most]:
        return ""
    factor = (saved[most] - margin_ns) / saved[most]
    if factor < 0:
        return f"no change of {term_in_words(most)} alone turns it"
    return f"it turns where the change in {term_in_words(most)} is {factor:.2f} times as large"


def compared(choice: Choice) -> str:
    """Return the name of what is compared with the stages apart: the form that runs, or the best of the others."""
    return choice.name if choice.name != "apart" else _others(choice)[0]


def why_measured(choice: Choice) -> tuple[str, str]:
    """Return the code and the sentence of what is not by the model."""
    name, is_apart = choice.name, choice.name == "apart"
    runs, be, code = _in_words(name), "are" if is_apart else "is", "measured_slower" if is_apart else "measured_faster"
    if choice.by == "pinned":
        stay = "stay" if is_apart else "stays"
        return "pinned", f"{runs} {stay}, which a person pinned; `rlxjax decisions` shows and changes it"
    failed = "".join(f"; {own.name} {own.failed}" for own in choice.alternatives if own.failed)
    took = {own.name: own.measured_ns for own in choice.alternatives if own.measured_ns is not None}
    timed = [other for other in _others(choice) if other in took]
    if name not in took or not timed:
        return code, f"{runs} {be} all that runs{failed}"
    # Of the stages apart, if they were timed, a grouping says more.
    other = "apart" if "apart" in timed and not choice.is_tie else timed[0]
    times = [f"{_in_words(one)} {whole_ns(took[one])} ns" for one in (name, other)]
    costs, predicted = ([_cost_ns(choice[one], by) for one in (name, other)] for by in ("measured_ns", "predicted_ns"))
    if choice.is_tie:
        is_priced = any(own.extra_ns for own in choice.alternatives)
        priced = ", with the gain that is asked and memory at its price" if is_priced else ""
        is_within = max(costs) <= (1.0 + choice.regret) * min(costs)
        share = f"within {100 * choice.regret:.3g} % of each other as measured"
        near = share if is_within else "not told apart by measuring"
        return "tie", f"{times[0]} and {times[1]}{priced} are {near}: a tie; {runs} {be} chosen{failed}"
    said = f"as measured {times[0]} a call, {times[1]}"
    saved_ns, asked_ns = took[name] - took[other], took[name] - took[other] + costs[1] - costs[0]
    if costs[1] < costs[0]:
        said += "; round by round the first is the better one"
    elif is_apart and saved_ns > 0:
        saved = f"{_in_words(other)} saves {whole_ns(saved_ns)} ns a call as measured"
        code, said = "no_gain", f"{saved}, of {whole_ns(asked_ns)} ns asked"
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


# --- The change as code --------------------------------------------------------------------------


def as_code(stages: Sequence[Stage], groups: Sequence[Sequence[int]]) -> str:
    """Return the change as Python: one jitted function a group, with what it may overwrite, and their composition."""
    names = ["fused"] if len(groups) == 1 else [f"fused{number + 1}" for number in range(len(groups))]
    first = _argument_names(stages[0])
    lines, call = [], ", ".join(first)
    for name, group in zip(names, groups, strict=True):
        own = [stages[number] for number in group]
        arguments = _argument_names(own[0])
        text = ", ".join(arguments)
        for place, stage in enumerate(own):
            text = f"{stage.name}({_star(stage) if place else ''}{text})"
        fn = own[0].name if len(own) == 1 else f"lambda {', '.join(arguments)}: {text}"
        lines.append(f"{name} = jax.jit({fn}{_donated(own[0], own[-1], arguments)}")
        call = f"{name}({_star(own[0]) if group[0] else ''}{call})"
    if len(groups) > 1:
        lines.append(f"fused = lambda {', '.join(first)}: {call}")
    return "\n".join(lines)


def _star(stage: Stage) -> str:
    """Return how a stage takes the results of the one before it: all of several."""
    return "*" if len(stage.args) != 1 else ""


def _donated(first: Stage, last: Stage, names: Sequence[str]) -> str:
    """Return the end of a call of `jax.jit`: which arguments the program may overwrite."""
    free = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(last.result)]
    donated: list[int] = []
    for place, arg in enumerate(first.args):
        own = (getattr(arg, "shape", None), getattr(arg, "dtype", None))
        if own in free:
            free.remove(own)
            donated.append(place)
    if not donated:
        return ")"
    used = " and ".join(names[place] for place in donated)
    numbers = ", ".join(map(str, donated)) + ("," if len(donated) == 1 else "")
    return f", donate_argnums=({numbers}))  # if nobody uses {used} afterwards"


def _argument_names(stage: Stage) -> list[str]:
    """Return names of a stage's arguments: those of its parameters where each argument has one."""
    try:
        parameters = list(inspect.signature(stage.fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count = len(stage.args)
    return named[:count] if len(named) >= count else [f"x{place}" for place in range(count)]
