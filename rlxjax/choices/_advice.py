"""The answer of `advise`: which grouping of stages to run, why, what it saves, and the Python code of the change."""

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
from pydantic import ConfigDict

from rlxjax._values import by_value, counted
from rlxjax.units import bytes_text, probability_text, time_text

from ._programs import Stage
from ._way import Choice, Way

#: How many groupings the text of an advice shows, and the names of the groupings that it always shows.
MOST_SHOWN, ENDS = 8, ("apart", "together")
#: What decided, in words, for each value of `Choice.by`.
DECIDED = {
    "model": "the model",
    "measured": "measuring",
    "remembered": "an earlier measurement",
    "pinned": "a person's pin",
}


@by_value
@dataclasses.dataclass(frozen=True)
class Grouping(Way):
    """A grouping of stages into programs. The name "a+b | c" means a program for `a` and `b`, and a program for `c`.

    Attributes:
        groups: for each program, the names of its stages.
        peak_bytes: the largest peak memory of any program, in bytes. Arguments of the first program stay allocated.
        probability: predicted probability that the grouping saves more than `min_gain_ns`; None for "apart" itself.
        terms_ns: the terms that add up to the predicted time: a dict from name to ns, the largest term first.
        programs: for each program, the indices of its first and its last stage; empty if read from a file.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    peak_bytes: int = 0
    probability: float | None = None
    terms_ns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    programs: tuple[tuple[int, int], ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def limit(self) -> str:
        """The name of the largest term of the predicted time, for example "call", "elementwise" or "matmul"."""
        return term_in_words(next(iter(self.terms_ns), ""))


@by_value
@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice(Choice):
    """The answer of `advise`: which grouping of stages to run, why, and what it saves.

    The grouping "apart" runs each stage as a program of its own; "together" runs all stages as one program. The
    *compared* grouping is the advised grouping or, if "apart" is advised, the fastest other grouping. The fields
    `saved_...` say what it saves per call of all stages, compared with "apart"; they are negative if it needs more.
    Predictions come from the calibration. If the model decides, it has also learned from earlier measurements.

    Attributes:
        name: name of the grouping to run: "apart" unless the verdict is "fuse" or "group".
        alternatives: the fastest groupings, the fastest first; "apart" and "together" are always among them. If the
            model cannot predict the times, there is only "apart", without times.
        probability: predicted probability that the compared grouping saves more than `min_gain_ns`; None if unknown.
        verdict: "fuse": run all stages as one program. "group": run the programs that `groups` lists. "keep": run each
            stage as its own program. "undecided": the model is not sure. "cannot model": no times are known.
        reason_code: the reason in a word. Model: `saves_launches`, `saves_traffic`, `recompute`, `loses_tiling`,
            `slower`, `no_gain`, `peak_memory`, `already_one_program`, `too_close`, `uncosted`, `unknown_loop`,
            `not_calibrated`. Timing: `measured_faster`, `measured_slower`, `no_gain`, `tie`. A person: `pinned`.
        reason: the reason as a sentence.
        compared: name of the compared grouping; empty if no grouping is compared with "apart".
        min_gain_ns: the smallest saving, in ns per call, that you asked for.
        stages: for each stage, a `Grouping` that holds only this stage.
        saved_calls: number of program calls saved.
        saved_launches: number of kernel launches saved.
        saved_sync_points: number of times that the host no longer has to wait for the device.
        saved_readback_bytes: number of bytes that the host no longer has to read back from the device.
        saved_traffic_bytes: number of bytes of memory traffic saved.
        recomputed_flops: number of additional floating-point operations.
        recomputed_elements: number of additional results of elementary operations, transcendental operations included.
        flip: a sentence that says how far the largest difference has to change for both groupings to cost the same.
        code: Python code that makes the change; empty unless the verdict is "fuse" or "group".
        target: name of the device that the stages were compiled for; None if this machine was meant.
        stands_on: a sentence that says what the times for the target are based on; empty without a target.
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
        """A tuple of the grouping "apart" and the compared grouping; empty if no grouping is compared."""
        found = [own for name in ("apart", self.compared) for own in self.alternatives if own.name == name]
        return tuple(found) if len(found) == 2 else ()

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """For each program of the compared grouping, the names of its stages."""
        return next((own.groups for own in self.alternatives if own.name == self.compared), ())

    @property
    def extrapolated(self) -> bool:
        """Whether some count of operations or bytes lies outside the calibrated range."""
        return not all(own.in_domain for own in self.pair)

    @property
    def gain_ns(self) -> float | None:
        """How many ns per call the compared grouping saves: measured if both groupings were timed, else predicted."""
        for name in ("measured_ns", "predicted_ns"):
            times = [getattr(own, name) for own in self.pair]
            if times and None not in times:
                return times[0] - times[1]
        return None

    @property
    def calls_to_pay_back(self) -> int | None:
        """The number of calls that save as much time as compiling takes; None if no number does, or if unknown."""
        seconds, gain_ns = self.pair[1].compile_s if self.pair else None, self.gain_ns
        return math.ceil(seconds * 1e9 / gain_ns) if seconds is not None and gain_ns and gain_ns > 0 else None

    def as_dict(self) -> dict[str, Any]:
        own = ("groups", "extrapolated", "gain_ns", "calls_to_pay_back")
        return super().as_dict() | {name: getattr(self, name) for name in own}

    def __str__(self) -> str:
        return self.text('rx.advise(..., measure="undecided")')

    def text(self, asking: str) -> str:
        """Return the advice as text. If undecided, it suggests `asking`, a call or command that measures."""
        word, named = "together" if len(self.groups) < 2 else "grouped", {own.name: own for own in self.alternatives}
        lines, by_model = (
            [f"{self.verdict}: {self.reason} ({self.reason_code})"],
            ", by the model" * (self.by != "model"),
        )
        if by_model:
            rounds = f" in {counted(self.rounds, 'round')}" if self.rounds else ""
            lines.append(
                f"decided by {DECIDED[self.by]}{rounds}{': a tie' if self.is_tie else ''}{self.provisional_text()}"
            )
        forms = {"apart": named.get("apart"), word: named.get(self.compared), "together": named.get("together")}
        rows = {name: own for name, own in forms.items() if own and own.times_text()}
        if rows:
            compared = "" if word == "together" else f"; grouped: {self.compared}"
            stages = counted(len(rows["apart"].groups) if "apart" in rows else len(self.stages), "stage")
            lines.append(f"apart: a program for each of {stages}; together: one program{compared}; 90 % intervals")
        lines += [f"{name:10}{own.times_text()}" for name, own in rows.items()]
        if self.probability is not None:
            gain = f"save more than {time_text(self.min_gain_ns)}" if self.min_gain_ns else "be faster than apart"
            lines.append(f"{word} is {probability_text(self.probability)} likely to {gain}{by_model}")
        if self.verdict == "undecided" or self.reason_code in ("uncosted", "unknown_loop"):
            where = "" if self.target is None else f" on a machine with {self.target}, without a target"
            lines.append(f"to decide, compile and time the programs{where}: {asking}")
        if self.extrapolated and self.target is None and self.probability is not None:
            lines.append("extrapolated: some count lies outside the calibrated range")
        times = [own.measured_ns for own in self.pair if own.measured_ns is not None]
        if len(times) == 2:
            ratio, seconds, calls = times[1] / times[0], self.pair[1].compile_s, self.calls_to_pay_back
            often = f"{max(ratio, 1.0 / ratio):.2f} times {'slower' if ratio > 1.0 else 'faster'}"
            after = "never pays off" if calls is None else f"pays off after {counted(calls, 'call')}"
            compiling = "" if seconds is None else f"; compiling takes {time_text(seconds * 1e9)} and {after}"
            lines.append(f"measured: {word} is {often}{compiling}")
        if self.probability is not None and self.pair:
            able = [own for own in self.alternatives if not own.failed]
            shown = [own for place, own in enumerate(able) if place < MOST_SHOWN or own.name in ENDS]
            lines += [f"  {own.name}  {own.times_text()}" for own in (shown if len(able) > 2 else ())]
            lines += [f"  stage {own.name}: {own.times_text()}, limited by {own.limit}" for own in self.stages]
            lines += self._changed(word)
        return "\n".join([*lines, *filter(None, (self.flip, self.stands_on, self.code))])

    def _changed(self, word: str) -> list[str]:
        changes = [
            (self.saved_calls, counted(abs(self.saved_calls), "call")),
            (self.saved_launches, counted(abs(self.saved_launches), "launch", "launches")),
            (self.saved_sync_points, counted(abs(self.saved_sync_points), "sync point")),
            (self.saved_readback_bytes, f"{bytes_text(abs(self.saved_readback_bytes))} of readback"),
            (self.saved_traffic_bytes, f"{bytes_text(abs(self.saved_traffic_bytes))} of memory traffic"),
            (-self.recomputed_elements, counted(self.recomputed_elements, "recomputed number")),
            (-self.recomputed_flops, f"{self.recomputed_flops:,} FLOP"),
        ]
        signs = {"saves": 1, "adds": -1}
        found = {verb: [text for count, text in changes if sign * count > 0] for verb, sign in signs.items()}
        peaks = "peak memory: {} apart, {} {}".format(*(bytes_text(own.peak_bytes) for own in self.pair), word)
        return [*(f"{verb} {', '.join(texts)}" for verb, texts in found.items() if texts), peaks]


def term_in_words(term: str) -> str:
    """Return the name of a term in words: "launch" for "launch_ns"."""
    return term.removesuffix("_ns").replace("_", " ")


# --- Why -----------------------------------------------------------------------------------------


def why_not(saved: Mapping[str, float], margin_ns: float, recomputed: int) -> str:
    """Return the reason code of an advice to keep a separate program for each stage."""
    if margin_ns >= 0:
        return "no_gain"
    if min(saved, key=lambda name: saved[name]) == "transpose_ns":
        return "loses_tiling"
    return "recompute" if recomputed > 0 else "slower"


def why_predicted(
    code: str, name: str, margin_ns: float, saved: Mapping[str, float], again: int, asked_ns: float, priced: str
) -> str:
    """Return the sentence that explains a reason code of the model."""
    subject, time = "one program" if name == "together" else name, time_text(abs(margin_ns))
    change = f"{subject} {f'saves {time}' if margin_ns >= 0 else f'costs {time} more'} a call{priced}"
    close = f"{time}{priced}, less than the uncertainty"
    close = f"{change}, close to the {time_text(asked_ns)} that you ask for" if asked_ns else close
    return {
        "saves_launches": f"{change}, most of it in calls and launches",
        "saves_traffic": f"{change}, most of it in memory traffic",
        "recompute": f"{change}, because it recomputes {counted(again, 'number')}",
        "loses_tiling": f"{change}, because a transpose inside another kernel moves single elements, not tiles",
        "slower": f"{change}, most of it in {term_in_words(next(iter(saved), 'call_ns'))} time",
        "no_gain": f"{change}, less than the {time_text(asked_ns)} that you ask for",
        "too_close": f"too close to call: {close}",
    }[code]


def flip(saved: Mapping[str, float], margin_ns: float) -> str:
    """Say in a sentence how far the largest difference of a term has to change for both groupings to cost the same."""
    most = next(iter(saved), None)
    if most is None or not saved[most]:
        return ""
    factor, difference = (saved[most] - margin_ns) / saved[most], f"the difference in {term_in_words(most)} time"
    if factor < 0:
        return f"break-even: none; the decision would be the same without {difference}"
    return f"break-even: if {difference} is {factor:.2f} times the predicted difference"


def compared(choice: Choice) -> str:
    """Return the name of the compared grouping: the chosen one or, if that is "apart", the best other grouping."""
    return choice.name if choice.name != "apart" else _others(choice)[0]


def why_measured(choice: Choice) -> tuple[str, str]:
    """Return the reason code of a measured or pinned choice, and the sentence that explains this code."""
    name, is_apart = choice.name, choice.name == "apart"
    runs, code = _in_words(name), "measured_slower" if is_apart else "measured_faster"
    if choice.by == "pinned":
        return "pinned", f"a person pinned {runs}; `rlxjax decisions` shows and changes pins"
    failed = "".join(f"; {own.name} {own.failed}" for own in choice.alternatives if own.failed)
    took = {own.name: own.measured_ns for own in choice.alternatives if own.measured_ns is not None}
    timed = [other for other in _others(choice) if other in took]
    if name not in took or not timed:
        return code, f"only {runs} can run{failed}"
    # A comparison with "apart" tells more than a comparison with another grouping.
    other = "apart" if "apart" in timed and not choice.is_tie else timed[0]
    times = ", ".join(f"{_in_words(own)} {time_text(took[own])}" for own in (name, other))
    costs, predicted = ([_cost_ns(choice[own], by) for own in (name, other)] for by in ("measured_ns", "predicted_ns"))
    if choice.is_tie:
        is_priced = any(own.extra_ns for own in choice.alternatives)
        priced = " (without the gain that you ask for and the price of memory)" if is_priced else ""
        is_within = max(costs) <= (1.0 + choice.regret) * min(costs)
        near = f"within {100 * choice.regret:.3g} %" if is_within else "not told apart"
        return "tie", f"a tie, {near}: measured {times} a call{priced}; chosen: {runs}{failed}"
    said, saved_ns = f"measured {times} a call", took[name] - took[other]
    if costs[1] < costs[0]:
        said += f"; {runs} won most rounds"
    elif is_apart and saved_ns > 0:
        asked = f"less than the {time_text(saved_ns + costs[1] - costs[0])} that you ask for"
        code, said = "no_gain", f"measured: {_in_words(other)} saves {time_text(saved_ns)} a call, {asked}"
    against = "; the model predicts the opposite" if predicted[1] < predicted[0] < math.inf else ""
    return code, f"{said}{against}{failed}"


def _others(choice: Choice) -> list[str]:
    """Return the names of the groupings that were not chosen: those measured by time, then the others by time."""

    def rank(own: Way) -> tuple[bool, bool, float]:
        is_timed = own.measured_ns is not None
        return bool(own.failed), not is_timed, _cost_ns(own, "measured_ns" if is_timed else "predicted_ns")

    return [own.name for own in sorted(choice.alternatives, key=rank) if own.name != choice.name]


def _cost_ns(way: Way, by: str) -> float:
    time_ns = getattr(way, by)
    return math.inf if time_ns is None else time_ns + way.extra_ns


def _in_words(name: str) -> str:
    return {"apart": "separate programs", "together": "one program"}.get(name, name)


# --- The change as code --------------------------------------------------------------------------


def as_code(stages: Sequence[Stage], groups: Sequence[Sequence[int]]) -> str:
    """Return Python code of the change: a jitted function for each group, and the composition of these functions."""
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
    """Return "*", which unpacks the previous result, if the stage does not take exactly one argument; otherwise ""."""
    return "*" if len(stage.args) != 1 else ""


def _donated(first: Stage, last: Stage, names: Sequence[str]) -> str:
    """Return the end of a call of `jax.jit`: a `donate_argnums` if the program may overwrite arguments, and ")"."""
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
    """Return names for a stage's arguments: the names of its parameters if there are enough, else x0, x1, ..."""
    try:
        parameters = list(inspect.signature(stage.fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count = len(stage.args)
    return named[:count] if len(named) >= count else [f"x{place}" for place in range(count)]
