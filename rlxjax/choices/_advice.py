"""The answer of `advise`: which grouping of stages to run, why, what it saves, and the Python code of the change."""

import builtins
import dataclasses
import inspect
import keyword
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
from pydantic import ConfigDict

from rlxjax._values import by_value, counted
from rlxjax.units import bytes_text, probability_text, time_text

from ._programs import Stage, as_arguments
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
    Predictions come from the calibration.

    Attributes:
        name: name of the grouping to run: "apart" unless the verdict is "fuse" or "group".
        alternatives: the fastest groupings, the fastest first; "apart" and "together" are always among them. If the
            model cannot predict the times, there is only "apart", without times.
        probability: predicted probability that the compared grouping saves more than `min_gain_ns`; None if unknown.
        verdict: "fuse": run all stages as one program. "group": run the programs that `groups` lists. "keep": run each
            stage as its own program. "undecided": the model is not sure. "cannot model": no times are known.
        is_tie: whether measuring could not tell the compared grouping from "apart"; the verdict is then "keep".
        reason_code: the reason in a word. Model: `saves_launches`, `saves_traffic`, `recompute`, `loses_tiling`,
            `slower`, `no_gain`, `no_matter`, `peak_memory`, `already_one_program`, `too_close`, `uncosted`,
            `unknown_loop`, `not_calibrated`. Timing: `measured_faster`, `measured_slower`, `no_gain`, `tie`. A
            person: `pinned`.
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
        """For each program to run, the names of its stages."""
        return next((own.groups for own in self.alternatives if own.name == self.name), ())

    @property
    def is_change(self) -> bool:
        """Whether the advice is to change the code."""
        return self.verdict in ("fuse", "group")

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
        """The number of calls in which the change saves as much as compiling takes; None if it was not measured."""
        is_timed = self.is_change and self.pair and self.pair[0].measured_ns is not None
        seconds = self.pair[1].compile_s if is_timed else None
        gain_ns = self.gain_ns or 0.0
        return math.ceil(seconds * 1e9 / gain_ns) if seconds and gain_ns > 0.0 else None

    @property
    def paying_back(self) -> str:
        """The end of a sentence that says how long compiling takes and when that pays off; empty if unknown."""
        calls, seconds = self.calls_to_pay_back, self.pair[1].compile_s if self.pair else None
        if calls is None or seconds is None:
            return ""
        return f"; compiling takes {time_text(1e9 * seconds)} and pays off after {counted(calls, 'call')}"

    def as_dict(self) -> dict[str, Any]:
        own = ("groups", "extrapolated", "gain_ns", "calls_to_pay_back")
        return super().as_dict() | {name: getattr(self, name) for name in own}

    def __str__(self) -> str:
        return self.text('rx.advise(..., measure="undecided")')

    def text(self, asking: str) -> str:
        """Return the advice as text. If undecided, it suggests `asking`, a call or command that measures."""
        word = "together" if self.compared in ("", "together") else "grouped"
        named = {own.name: own for own in self.alternatives}
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
        if len(times) == 2 and not self.is_tie:
            ratio = times[1] / times[0]
            often = f"{max(ratio, 1.0 / ratio):.2f} times {'slower' if ratio > 1.0 else 'faster'}"
            lines.append(f"measured: {word} is {often}{self.paying_back}")
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


def verdict_of(code: str, name: str) -> str:
    """Return the verdict that follows from a reason code and from the name of the grouping to run."""
    return "undecided" if code == "too_close" else {"apart": "keep", "together": "fuse"}.get(name, "group")


def why_not(saved: Mapping[str, float], margin_ns: float, recomputed: int) -> str:
    """Return the reason code of an advice to keep a separate program for each stage."""
    if margin_ns >= 0:
        return "no_gain"
    if min(saved, key=lambda name: saved[name]) == "transpose_ns":
        return "loses_tiling"
    return "recompute" if recomputed > 0 else "slower"


def why_predicted(
    code: str,
    name: str,
    margin_ns: float,
    saved: Mapping[str, float],
    again: int,
    asked_ns: float,
    regret: float,
    priced: str,
    needs: str,
) -> str:
    """Return the sentence that explains a reason code of the model."""
    time = time_text(abs(margin_ns))
    change = f"{_in_words(name)} {f'saves {time}' if margin_ns >= 0 else f'costs {time} more'} a call{priced}"
    close = f"{time}{priced}, less than the uncertainty"
    close = f"{change}, close to the {time_text(asked_ns)} that you ask for" if asked_ns else close
    return {
        "saves_launches": f"{change}, most of it in calls and launches",
        "saves_traffic": f"{change}, most of it in memory traffic",
        "recompute": f"{change}, because it recomputes {counted(again, 'number')}",
        "loses_tiling": f"{change}, because a transpose inside another kernel moves single elements, not tiles",
        "slower": f"{change}, most of it in {term_in_words(next(iter(saved), 'call_ns'))} time",
        "no_gain": f"{change}, less than the {time_text(asked_ns)} that you ask for",
        "no_matter": f"either way: less than {100 * regret:.3g} % apart; {change}",
        "too_close": f"too close to call: {close}",
        "peak_memory": f"separate programs do not fit: they need {needs}; {change}",
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


def why_measured(choice: Choice) -> tuple[str, str, str]:
    """Return the reason code of a measured or pinned choice, the name of the grouping to run, and the reason.

    Only the chosen grouping and "apart" are compared; if "apart" was chosen, "apart" and the best other grouping. It
    is a tie if their times are equal within `regret`. It is also a tie if their intervals overlap and the choice does
    not tell the groupings apart or contradicts their times.
    """
    name, runs = choice.name, _in_words(choice.name)
    if choice.by == "pinned":
        return "pinned", name, f"a person pinned {runs}; `rlxjax decisions` shows and changes pins"
    failed = "".join(f"; {own.name} {own.failed}" for own in choice.alternatives if own.failed)
    apart, other = choice["apart"], choice[compared(choice)]
    if apart.measured_ns is None or other.measured_ns is None:
        code = "measured_slower" if name == "apart" else "measured_faster"
        is_out = name != "apart" and other.measured_ns is not None and not apart.failed
        said = "the model rules out separate programs" if is_out else f"only {runs} can run"
        return code, name, said + failed
    faster, slower = sorted((apart, other), key=lambda own: _cost_ns(own, "measured_ns"))
    costs_ns, predicted_ns = ([_cost_ns(own, by) for own in (faster, slower)] for by in ("measured_ns", "predicted_ns"))
    ends_ns = [own.measured_interval_ns or (own.measured_ns or 0.0,) * 2 for own in (faster, slower)]
    is_near = costs_ns[1] <= (1.0 + choice.regret) * costs_ns[0]
    is_apart = ends_ns[0][1] + faster.extra_ns < ends_ns[1][0] + slower.extra_ns
    times = ", ".join(f"{_in_words(own.name)} {time_text(own.measured_ns or 0.0)}" for own in (faster, slower))
    if is_near or not is_apart and (apart.is_tie or other.is_tie or faster.name != name):
        is_priced = any(own.extra_ns for own in choice.alternatives)
        priced = " (without the gain that you ask for and the price of memory)" if is_priced else ""
        near = f"within {100 * choice.regret:.3g} %" if is_near else "not told apart"
        return "tie", "apart", f"a tie, {near}: measured {times} a call{priced}{failed}"
    code, said = "measured_slower" if faster is apart else "measured_faster", f"measured {times} a call"
    saved_ns = apart.measured_ns - other.measured_ns
    if faster is apart and saved_ns > 0:
        asked = f"less than the {time_text(saved_ns + costs_ns[1] - costs_ns[0])} that you ask for"
        code, said = "no_gain", f"measured: {_in_words(other.name)} saves {time_text(saved_ns)} a call, {asked}"
    rivals = "".join(f"; {own.name} may be as fast" for own in choice.alternatives if own.is_tie and own is not apart)
    against = "; the model predicts the opposite" if predicted_ns[1] < predicted_ns[0] < math.inf else ""
    return code, faster.name, f"{said}{against}{rivals if faster is other else ''}{failed}"


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


#: Names that the code itself uses.
RESERVED = re.compile(r"jax|stages|(fused|stage|x)\d*")


def as_code(given: Sequence[Callable[..., Any]], stages: Sequence[Stage], groups: Sequence[Sequence[int]]) -> str:
    """Return Python code of the change: a jitted function for each group, and the composition of these functions.

    Functions are imported if they can be. The others are taken from `stages`, a list of all functions.
    """
    names, lines = _names_of(given)
    programs = ["fused"] if len(groups) == 1 else [f"fused{number + 1}" for number in range(len(groups))]
    taken = {"jax", *names, *programs}
    call = first = ", ".join(_argument_names(stages[0], taken))
    # A tuple is unpacked into the arguments of the next stage.
    stars = ["", *("*" if as_arguments(one.result) is one.result else "" for one in stages)]

    for program, group in zip(programs, groups, strict=True):
        arguments = _argument_names(stages[group[0]], taken)
        text = ", ".join(arguments)
        for place, number in enumerate(group):
            text = f"{names[number]}({stars[number] if place else ''}{text})"
        is_plain = len(group) == 1 and inspect.isfunction(given[group[0]])
        fn = names[group[0]] if is_plain else f"lambda {', '.join(arguments)}: {text}"
        lines.append(f"{program} = jax.jit({fn})")
        if not group[0]:
            lines += _donating(program, stages[0], stages[group[-1]], arguments)
        call = f"{program}({stars[group[0]]}{call})"
    return "\n".join([*lines, *[f"fused = lambda {first}: {call}"] * (len(groups) > 1)])


def _names_of(given: Sequence[Callable[..., Any]]) -> tuple[list[str], list[str]]:
    """Return a name for each function, and the lines of code that import or define the names."""
    found = [tuple(str(getattr(fn, own, "")) for own in ("__module__", "__name__")) for fn in given]
    names, lines, imports = [], [], {}
    for number, (fn, (module, name)) in enumerate(zip(given, found, strict=True)):
        is_there = getattr(sys.modules.get(module), "__dict__", {}).get(name) is fn
        is_public = module == "__main__" or not re.search(r"\b_", module)
        is_taken = any(other == name for own, (_, other) in zip(given, found, strict=True) if own is not fn)
        is_taken = is_taken or hasattr(builtins, name) or RESERVED.fullmatch(name)
        if is_there and is_public and name.isidentifier() and not (is_taken or keyword.iskeyword(name)):
            imports.setdefault(module, {})[name] = None
        else:
            name = f"stage{number + 1}"
            lines.append(f"{name} = stages[{number}]  # stages: the functions that you gave, in order")
        names.append(name)
    imports.pop("__main__", None)
    return names, [*(f"from {module} import {', '.join(own)}" for module, own in imports.items()), *lines]


def _donating(program: str, first: Stage, last: Stage, names: Sequence[str]) -> list[str]:
    """Return a comment with a line of code that lets a program overwrite its arguments; none if no result fits."""
    free = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(last.result)]
    donated: list[int] = []
    for place, arg in enumerate(first.args):
        own = (getattr(arg, "shape", None), getattr(arg, "dtype", None))
        if own in free:
            free.remove(own)
            donated.append(place)
    used = " and ".join(names[place] for place in donated)
    line = f"# {program} = jax.jit({program}.__wrapped__, donate_argnums={tuple(donated)})"
    return [f"{line}  # if no code uses {used} afterwards"] if donated else []


def _argument_names(stage: Stage, taken: set[str]) -> list[str]:
    """Return names for a stage's arguments: the names of its parameters if they are free, else x0, x1, ..."""
    try:
        parameters = list(inspect.signature(stage.fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    count = len(stage.args)
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    is_free = len(named) == count and taken.isdisjoint(named)
    return named if is_free else [f"x{place}" for place in range(count)]
