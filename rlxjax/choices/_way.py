"""The record of a choice: each way to do the work, with what it was predicted to take and took, and which one runs."""

import dataclasses
import datetime
import json
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter

from rlxjax._values import by_value, counted, whole_ns
from rlxjax.calibration import Fingerprint, Positive

#: When alternatives are timed.
MEASURES = ("never", "undecided", "always")
#: What a choice may lose, and the milliseconds of timing, unless a caller says.
REGRET, LIMIT_MS = 0.02, 200.0
#: Nanoseconds of a call that was timed: what is beyond is a mistake, as is a size of it above the most.
MeasuredNs = Annotated[float, Field(ge=1e-3, le=1e15)]
MOST_SIZE = 1e18
Share = Annotated[float, Field(ge=0.0, le=1.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
_WHOLE = ConfigDict(extra="forbid", allow_inf_nan=False)


def _callable() -> Any:
    """Return a field that no answer is compared, shown or kept by."""
    return dataclasses.field(default=None, compare=False, repr=False)


class Record:
    """What JSON can say of all that is compared."""

    def as_dict(self) -> dict[str, Any]:
        """Return everything but functions as plain numbers, strings and lists, for JSON."""
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
    """One way to do a piece of work; times in ns of one call.

    Attributes:
        name: for people.
        predicted_ns: by the latency model; None where it says nothing.
        predicted_interval_ns: that holds the time with 90 %.
        measured_ns: the lower quartile of its visits; None of one that was not timed.
        measured_interval_ns: that holds it with 90 %.
        failed: why it cannot be chosen, in a sentence; empty of one that can.
        compile_s: seconds that compiling and the first call took beyond a later one; None if it was not compiled here.
        in_domain: whether the prediction lies within what was measured; else it is an extrapolation.
        extra_ns: what it costs beside its time.
        content: digest of what it runs, by which it is known.
        runs: of the latency model, whose times add up to its own: each a `variant` and its `inputs` by name.
        fn: what a caller is given; None in an answer, whose own `fn` is that of the chosen one.
        call: of no arguments, that is timed; None in an answer.
        make: compiles it; where there is none the first call does; None in an answer.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _WHOLE
    name: str
    predicted_ns: Positive | None = None
    predicted_interval_ns: tuple[Positive, Positive] | None = None
    measured_ns: MeasuredNs | None = None
    measured_interval_ns: tuple[MeasuredNs, MeasuredNs] | None = None
    failed: str = ""
    compile_s: NotNegative | None = None
    in_domain: bool = False
    extra_ns: float = 0.0
    content: str = ""
    runs: tuple[dict[str, str | dict[str, float | list[float]]], ...] = ()
    fn: Callable[..., Any] = _callable()
    call: Callable[[], Any] = _callable()
    make: Callable[[], Any] | None = _callable()

    @property
    def time_ns(self) -> float | None:
        """As measured, else as predicted."""
        return self.predicted_ns if self.measured_ns is None else self.measured_ns

    @property
    def interval_ns(self) -> tuple[float, float] | None:
        """Of `time_ns`."""
        return self.predicted_interval_ns if self.measured_ns is None else self.measured_interval_ns


@by_value
@dataclasses.dataclass(frozen=True)
class Choice(Record):
    """The alternative to run; call it as the alternatives are called.

    Attributes:
        name: of the alternative.
        by: "model", "measured" in this call, "remembered" of an earlier one, or "pinned" by a person.
        alternatives: all of them, in the order given.
        probability: that no other one is faster by more than `regret`; None where nothing says.
        is_tie: whether others are as good, as far as the measurements say: within `regret`, or not told apart.
        regret: relative difference that does not count.
        rounds: in which the alternatives were timed by turns; 0 if none was timed.
        measuring_s: seconds that compiling and timing took in this call.
        key: of the memory's entry, by which `rlxjax decisions` knows it: a digest of all that the choice depends on.
        without_pin: the alternative that was chosen by measuring, where a person pinned one.
        kind: "functions", or the latency model's name.
        label: the workload in words.
        context: digest of machine, software and calibration, which all choices of one setting share.
        calibration: digest of the calibrated model that predicted; None where none did.
        machine: that measured; None of a choice that the model made.
        created: ISO time in UTC, of a choice that was measured.
        fn: the alternative, as it was given; of a suite what runs its program. A pickled choice has none.
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
    key: str = ""
    without_pin: str | None = None
    kind: str = ""
    label: str = ""
    context: str = ""
    calibration: str | None = None
    machine: Fingerprint | None = None
    created: str = ""
    fn: Callable[..., Any] = _callable()

    def __call__(self, *args: Any) -> Any:
        """Run the alternative that is chosen.

        Raises:
            TypeError: a choice that was pickled, which keeps no function.
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
        """The alternative with its times."""
        return self[self.name]

    @property
    def time_ns(self) -> float | None:
        """Of the alternative that is chosen: measured, else predicted."""
        return self.chosen.time_ns

    @property
    def interval_ns(self) -> tuple[float, float] | None:
        """That holds `time_ns` with 90 %."""
        return self.chosen.interval_ns

    @property
    def next_best(self) -> Way | None:
        """The fastest of the others that were measured."""
        timed = [own for own in self.alternatives if own.measured_ns is not None and own.name != self.name]
        return min(timed, key=lambda own: own.measured_ns or 0.0, default=None)

    def __getitem__(self, name: str) -> Way:
        """Return an alternative by its name.

        Raises:
            KeyError: none has this name.
        """
        named = {own.name: own for own in self.alternatives}
        if name not in named:
            raise KeyError(f"expected one of {', '.join(named)}, got {name!r}")
        return named[name]

    def __str__(self) -> str:
        said = "a tie: " if self.is_tie else ""
        chance = "" if self.probability is None else f", {100 * self.probability:.0f} % sure"
        rounds = f", {counted(self.rounds, 'round')}" if self.rounds else ""
        lines = [f"{said}{self.name} ({self.by}{rounds}{chance})"]
        width = max(len(own.name) for own in self.alternatives)
        for own in self.alternatives:
            parts = [f"  {own.name:{width}}"]
            for word, time_ns, interval in (
                ("measured", own.measured_ns, own.measured_interval_ns),
                ("predicted", own.predicted_ns, own.predicted_interval_ns),
            ):
                if time_ns is not None and interval is not None:
                    low, high = map(whole_ns, interval)
                    parts.append(f"{word} {whole_ns(time_ns)} ns (90 %: {low} to {high})")
            lines.append("  ".join([*parts, *([own.failed] if own.failed else [])]))
        return "\n".join(lines)


_CHOICE = TypeAdapter(Choice)


def choice_of_json(text: str) -> Choice:
    """Return a choice that was measured, as JSON has it; refuse one that says what no measurement says."""
    one = _CHOICE.validate_json(text, strict=True)
    if datetime.datetime.fromisoformat(one.created).utcoffset() != datetime.timedelta(0):
        raise ValueError("created: expected an ISO time in UTC")
    if one.machine is None or one.by not in ("measured", "pinned") or one.probability is None:
        raise ValueError("by: expected a choice that a machine measured, or a person pinned")
    for name in filter(None, (one.name, one.without_pin)):
        if name not in [own.name for own in one.alternatives if not own.failed]:
            raise ValueError(f"name: expected that of an alternative that runs, got {name!r}")
    for own in one.alternatives:
        low, high = own.measured_interval_ns or (own.measured_ns or 0.0,) * 2
        least, most = own.predicted_interval_ns or (0.0, 0.0)
        if not low <= (own.measured_ns or 0.0) <= high or least > most:
            raise ValueError(f"{own.name}: expected times within their intervals, from the lower end to the upper")
        for run in own.runs:
            sizes = run.get("inputs") if isinstance(run.get("variant"), str) and len(run) == 2 else None
            if not isinstance(sizes, dict) or not all(map(_is_size, sizes.values())):
                raise ValueError(f"runs: expected a variant and its inputs, each from 0 to {MOST_SIZE:g}, got {run}")
    return one


def _is_size(size: float | list[float]) -> bool:
    """Return whether a number, or each entry of a list, may be that of a run."""
    return all(map(_is_size, size)) if isinstance(size, list) else 0.0 <= size <= MOST_SIZE


def json_of_choice(one: Choice) -> str:
    """Return what is kept of a choice."""
    return json.dumps(one.as_dict(), allow_nan=False)


def measure_word(given: str | None, default: str) -> str:
    """Return when to measure: as given, else as `RLXJAX_MEASURE` says, else by default.

    Raises:
        ValueError: another word.
    """
    name, word = ("measure", given) if given is not None else ("RLXJAX_MEASURE", os.environ.get("RLXJAX_MEASURE"))
    if not word and given is None:
        return default
    if not isinstance(word, str) or word not in MEASURES:
        raise ValueError(f"{name}: expected one of {', '.join(MEASURES)}, got {word!r}")
    return word
