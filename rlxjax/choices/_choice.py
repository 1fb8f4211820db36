"""What `choose` answers: which alternative, by what that was chosen, and the figures behind it."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from rlxjax._values import by_value, counted, whole_ns

#: When alternatives are timed.
MEASURES = ("never", "undecided", "always")


@by_value
class Considered(NamedTuple):
    """One alternative of a choice; times in ns of one call.

    Attributes:
        name: of it.
        predicted_ns: by the latency model; None where there is none.
        predicted_interval_ns: that holds the time with 90 %.
        measured_ns: the lower quartile of its visits; None of one that was not timed.
        measured_interval_ns: that holds it with 90 %.
        failed: why it cannot be chosen, in a sentence; empty of one that can.
        compile_s: seconds that compiling and the first call took beyond a later one; None if it was not compiled here.
    """

    name: str
    predicted_ns: float | None = None
    predicted_interval_ns: tuple[float, float] | None = None
    measured_ns: float | None = None
    measured_interval_ns: tuple[float, float] | None = None
    failed: str = ""
    compile_s: float | None = None

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
class Choice:
    """The alternative to run; call it as the alternatives are called.

    Attributes:
        name: of the alternative.
        fn: it, as it was given; of a suite what runs its program.
        by: "model", "measured" in this call, "remembered" of an earlier one, or "pinned" by a person.
        alternatives: all of them, in the order given.
        probability: that no other one is faster by more than `regret`; None where nothing says.
        is_tie: whether others are as good, as far as the measurements say: within `regret`, or not told apart.
        regret: relative difference that does not count.
        rounds: in which the alternatives were timed by turns; 0 if none was timed.
        measuring_s: seconds that compiling and timing took in this call.
        key: of the memory's entry, by which `rlxjax decisions` knows it.
    """

    name: str
    fn: Callable[..., Any] = dataclasses.field(compare=False)
    by: str
    alternatives: tuple[Considered, ...]
    probability: float | None
    is_tie: bool
    regret: float
    rounds: int = 0
    measuring_s: float = 0.0
    key: str = ""

    def __call__(self, *args: Any) -> Any:
        """Run the alternative that is chosen."""
        return self.fn(*args)

    @property
    def chosen(self) -> Considered:
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

    def __getitem__(self, name: str) -> Considered:
        """Return an alternative by its name.

        Raises:
            KeyError: none has this name.
        """
        named = {own.name: own for own in self.alternatives}
        if name not in named:
            raise KeyError(f"expected one of {', '.join(named)}, got {name!r}")
        return named[name]

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the function as plain numbers, strings and lists, for JSON."""
        found: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del found["fn"]
        return found | {"alternatives": [own._asdict() for own in self.alternatives]}

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
