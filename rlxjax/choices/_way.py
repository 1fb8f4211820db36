"""The record of a choice: the alternatives with their predicted and measured times, and which alternative runs."""

import dataclasses
import datetime
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter

from rlxjax._values import by_value, counted
from rlxjax.calibration import Fingerprint, Positive
from rlxjax.clock import BUSY
from rlxjax.fit import SURE
from rlxjax.units import interval_text, number_text, probability_text, time_text

#: The values of `measure`, which say when alternatives are timed.
MEASURES = ("never", "undecided", "always")
#: The defaults of `regret`, a relative difference that does not matter, and of `limit_ms`, the milliseconds of timing.
REGRET, LIMIT_MS = 0.02, 200.0
#: The model of functions rules out an alternative that is slower with at least this probability. The model is too sure
#: if a compiler does something unexpected: `benchmarks.stage_choices` counts how often the model is right.
SURE_OF_FUNCTIONS = 0.99
#: The range of a call's measured nanoseconds. Numbers beyond these limits are mistakes.
MeasuredNs = Annotated[float, Field(ge=1e-3, le=1e15)]
#: A measured time is called unexpected if it lies outside the interval of its prediction by more than this factor.
UNEXPECTED = 2.0
Share = Annotated[float, Field(ge=0.0, le=1.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
_WHOLE = ConfigDict(extra="forbid", allow_inf_nan=False)


def _callable() -> Any:
    """Return a dataclass field for a function. The field is not compared, not shown and not saved."""
    return dataclasses.field(default=None, compare=False, repr=False)


class Record:
    """The base of dataclasses whose compared fields can be written as JSON."""

    def as_dict(self) -> dict[str, Any]:
        """Return a dict of all fields except functions, made of numbers, strings, lists and dicts, for JSON."""
        return {own.name: _plain(getattr(self, own.name)) for own in dataclasses.fields(self) if own.compare}  # pyright: ignore


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, tuple | list):
        return [_plain(own) for own in value]
    if isinstance(value, Fingerprint):
        return value.model_dump(mode="json")
    if isinstance(value, Record):
        return value.as_dict()
    return dict(value) if isinstance(value, Mapping) else value


@by_value
@dataclasses.dataclass(frozen=True)
class Way(Record):
    """One alternative of a choice. Times are in ns per call.

    Attributes:
        name: the name of the alternative.
        predicted_ns: the time that the latency model predicts; None without a prediction.
        predicted_interval_ns: the 90 % interval of the prediction.
        measured_ns: the mean time of a call, without what slowed all alternatives; None if it was not timed.
        measured_interval_ns: the 90 % interval of `measured_ns`.
        failed: a sentence that says why the alternative cannot be chosen; empty if it can be chosen.
        is_tie: whether measuring could not tell which is faster, this alternative or the chosen alternative.
        compile_s: seconds of compiling; None if not compiled here. For a program that its first call compiles, this is
            the time of the first call minus the time of a later call.
        in_domain: whether the prediction is for sizes in the calibrated range; otherwise it is an extrapolation.
        extra_ns: a cost in ns that is added to the time when alternatives are compared.
        content: digest of the alternative's programs. The digest identifies the alternative.
        fn: the function that runs if the alternative is chosen; None in a finished `Choice`, which has its own `fn`.
        call: the function without arguments that is timed; None in a finished `Choice`.
        make: a function that compiles the program; None if the first call compiles it, and in a finished `Choice`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _WHOLE
    name: str
    predicted_ns: Positive | None = None
    predicted_interval_ns: tuple[Positive, Positive] | None = None
    measured_ns: MeasuredNs | None = None
    measured_interval_ns: tuple[MeasuredNs, MeasuredNs] | None = None
    failed: str = ""
    is_tie: bool = False
    compile_s: NotNegative | None = None
    in_domain: bool = False
    extra_ns: float = 0.0
    content: str = ""
    fn: Callable[..., Any] = _callable()
    call: Callable[[], Any] = _callable()
    make: Callable[[], Any] | None = _callable()

    @property
    def time_ns(self) -> float | None:
        """The measured time; if the alternative was not timed, the predicted time."""
        return self.predicted_ns if self.measured_ns is None else self.measured_ns

    @property
    def interval_ns(self) -> tuple[float, float] | None:
        """The 90 % interval of `time_ns`."""
        return self.predicted_interval_ns if self.measured_ns is None else self.measured_interval_ns

    def times_text(self) -> str:
        """Return the times as text, for example "measured 19 ms (18 to 20)  predicted 21 ms (12 to 32)".

        The text says so if the measured time lies far outside the interval of the prediction.
        """
        times = {"measured": (self.measured_ns, self.measured_interval_ns)}
        times["predicted"] = (self.predicted_ns, self.predicted_interval_ns)
        said = [
            f"{word} {interval_text(time_ns, *ends) if ends else time_text(time_ns)}"
            for word, (time_ns, ends) in times.items()
            if time_ns is not None
        ]
        if len(said) == 2 and self.measured_ns and self.predicted_ns:
            low_ns, high_ns = self.predicted_interval_ns or (self.predicted_ns,) * 2
            if not low_ns / UNEXPECTED <= self.measured_ns <= high_ns * UNEXPECTED:
                ratio = self.measured_ns / self.predicted_ns
                word = "longer" if ratio > 1.0 else "shorter"
                said.append(f"{number_text(max(ratio, 1.0 / ratio), 2)} times {word} than predicted")
        return "  ".join(said)


@by_value
@dataclasses.dataclass(frozen=True)
class Choice(Record):
    """The answer of `choose`. Call it with the arguments of the alternatives to run the chosen alternative.

    Attributes:
        name: name of the alternative that runs.
        by: what decided: "model", "measured" in this call, "remembered" from an earlier call, or "pinned" by a person.
        alternatives: all alternatives, in the order in which they were given.
        probability: probability that no other alternative is faster by more than `regret`; None if unknown.
        is_tie: whether measuring could not tell some alternatives apart from the fastest; `Way.is_tie` marks them.
        regret: relative difference in time that does not matter.
        rounds: number of rounds of timing; a round times each alternative once. 0 if no alternative was timed.
        measuring_s: number of seconds that compiling and timing took in this call.
        is_alone: False if another process or thread was timing at the same time, so that the times may be too long.
        load: share of the machine, 0 to 1, that other work took during timing; None if nothing was timed.
        key: digest of everything that the choice depends on; `rlxjax decisions` finds the choice by this key.
        without_pin: name of the measured winner if a person pinned another alternative; otherwise None.
        kind: "functions" if the alternatives are functions; for a suite, the name of its latency model.
        label: a description of the alternatives' task in words.
        calibration: digest of the calibrated model that predicted the times; None without a prediction.
        machine: fingerprint of the machine that measured; None if the model chose.
        created: time of the measurement in UTC, as ISO text; empty if the model chose.
        fn: the chosen function as you gave it, or a function that runs the program of a suite; None after pickling.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _WHOLE
    name: str
    by: str
    alternatives: tuple[Way, ...]
    probability: Share | None = None
    is_tie: bool = False
    regret: NotNegative = REGRET
    rounds: Annotated[int, Field(ge=0)] = 0
    measuring_s: NotNegative = 0.0
    is_alone: bool = True
    load: Share | None = None
    key: str = ""
    without_pin: str | None = None
    kind: str = ""
    label: str = ""
    calibration: str | None = None
    machine: Fingerprint | None = None
    created: str = ""
    fn: Callable[..., Any] = _callable()

    def __call__(self, *args: Any) -> Any:
        """Run the chosen alternative.

        Raises:
            TypeError: the choice was pickled, so it has no function.
        """
        if self.fn is None:
            raise TypeError(f"{self.name}: this choice was pickled and has no function; choose again to call it")
        return self.fn(*args)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "fn": None}  # functions of a user can seldom be pickled

    def __copy__(self) -> "Choice":
        return dataclasses.replace(self)

    def __deepcopy__(self, memo: Any) -> "Choice":
        return dataclasses.replace(self)

    @property
    def chosen(self) -> Way:
        """The chosen alternative with its times."""
        return self[self.name]

    @property
    def time_ns(self) -> float | None:
        """The measured time of the chosen alternative; if it was not timed, its predicted time."""
        return self.chosen.time_ns

    @property
    def interval_ns(self) -> tuple[float, float] | None:
        """The 90 % interval of `time_ns`."""
        return self.chosen.interval_ns

    @property
    def next_best(self) -> Way | None:
        """The fastest measured alternative except the chosen one; None if no other alternative was measured."""
        timed = [own for own in self.alternatives if own.measured_ns is not None and own.name != self.name]
        return min(timed, key=lambda own: own.measured_ns or 0.0, default=None)

    def __getitem__(self, name: str) -> Way:
        """Return the alternative that has this name.

        Raises:
            KeyError: no alternative has this name.
        """
        named = {own.name: own for own in self.alternatives}
        if name not in named:
            raise KeyError(f"expected one of {', '.join(named)}, got {name!r}")
        return named[name]

    @property
    def is_provisional(self) -> bool:
        """Whether the machine was busy during timing, so that `choose` measures again once the machine is quiet."""
        is_disturbed = (self.load or 0.0) >= BUSY or not self.is_alone
        return is_disturbed and self.by != "pinned"

    @property
    def outcome(self) -> str:
        """A sentence that says which alternative is the fastest, how probable this is, and which others tie."""
        best = self.without_pin or self.name
        chance = probability_text(1.0 if self.probability is None else self.probability)
        others = [own for own in self.alternatives if own.name != best and not own.failed]
        said, rounds = f"{best} is the only alternative that runs", f"after {counted(self.rounds, 'round')}"
        if self.by == "model" and others:
            said = f"{best} is predicted to be the fastest, {chance} sure"
        elif self.is_tie:
            names = " and ".join(own.name for own in others if own.is_tie) or "others"
            said = f"a tie: {best} and {names} are not told apart {rounds}"
        elif self.rounds:
            margin = f"more than {100.0 * self.regret:.3g} % " if self.regret else ""
            said = f"{best} is the fastest: {chance} sure {rounds} that no other alternative is {margin}faster"
        said += " (remembered)" if self.by == "remembered" else ""
        said += self.provisional_text()
        return said + (f"; a person pinned {self.name}, which runs" if self.by == "pinned" else "")

    def provisional_text(self) -> str:
        """Return the words that end a sentence about a provisional choice, else ""."""
        if not self.is_provisional:
            return ""
        share = f"other work took {100.0 * (self.load or 0.0):.0f} % of the machine"
        why = share if self.is_alone else "another process or thread was timing too"
        return f"; provisional, because {why} during timing"

    def __str__(self) -> str:
        lines = [self.outcome, "times of a call with 90 % intervals:"]
        width = max(len(own.name) for own in self.alternatives)
        best, able = self[self.without_pin or self.name], [own for own in self.alternatives if not own.failed]
        for own in self.alternatives:
            note = f"failed: {own.failed}" if own.failed else "not told apart" if own.is_tie else ""
            if not note and own is not best and self.by != "model":
                note = "ruled out by the model" if own.measured_ns is None else slower_text(own, best)
            lines.append(f"  {'  '.join(filter(None, (f'{own.name:{width}}', own.times_text(), note)))}")
        sure = SURE_OF_FUNCTIONS if self.kind == "functions" else SURE
        is_sure = (self.probability or 0.0) >= sure and all(own.in_domain for own in able)
        if self.by == "model" and len(able) > 1 and not is_sure:
            lines.append('the model is not sure: to time the alternatives, repeat the call with measure="undecided"')
        return "\n".join(lines)


def slower_text(own: Way, best: Way) -> str:
    """Say by how much a measured alternative is slower than the fastest, if the extra costs of both are included."""
    ratio = ((own.measured_ns or 0.0) + own.extra_ns) / ((best.measured_ns or math.inf) + best.extra_ns)
    if ratio < 1.005:
        return "slower in most rounds"
    return f"{100.0 * (ratio - 1.0):.0f} % slower" if ratio < 1.995 else f"{number_text(ratio, 2)} times slower"


_CHOICE = TypeAdapter(Choice)


def choice_of_json(text: str) -> Choice:
    """Read a measured choice from JSON text; raise a `ValueError` if no measurement can give this choice."""
    one = _CHOICE.validate_json(text, strict=True)
    if datetime.datetime.fromisoformat(one.created).utcoffset() != datetime.timedelta(0):
        raise ValueError("created: expected an ISO time in UTC")
    if one.machine is None or one.by not in ("measured", "pinned") or one.probability is None:
        raise ValueError("by: expected a choice that was measured or pinned")
    for name in filter(None, (one.name, one.without_pin)):
        if name not in [own.name for own in one.alternatives if not own.failed]:
            raise ValueError(f"name: expected the name of an alternative that runs, got {name!r}")
    for own in one.alternatives:
        low, high = own.measured_interval_ns or (own.measured_ns or 0.0,) * 2
        least, most = own.predicted_interval_ns or (0.0, 0.0)
        if not low <= (own.measured_ns or 0.0) <= high or least > most:
            raise ValueError(f"{own.name}: expected a time within its interval, and the interval's lower end first")
    return one


def json_of_choice(one: Choice) -> str:
    """Return a choice as JSON text, without its functions."""
    return json.dumps(one.as_dict(), allow_nan=False)


def measure_word(given: str | None, default: str) -> str:
    """Return the word that says when to measure: `given`, else the variable `RLXJAX_MEASURE`, else `default`.

    Raises:
        ValueError: the word is not one of `MEASURES`.
    """
    name, word = ("measure", given) if given is not None else ("RLXJAX_MEASURE", os.environ.get("RLXJAX_MEASURE"))
    if not word and given is None:
        return default
    if not isinstance(word, str) or word not in MEASURES:
        raise ValueError(f"{name}: expected one of {', '.join(MEASURES)}, got {word!r}")
    return word
