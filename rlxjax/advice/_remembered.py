"""One choice as it is remembered: the alternatives, what each was predicted to take and took, and what it rests on."""

import datetime
from typing import Literal

from pydantic import ConfigDict, PositiveFloat, field_validator, model_validator

from rlxjax._files import Sealed, Strict
from rlxjax.calibration import Fingerprint


class Finite(Strict):
    """Base of what is remembered: JSON has no word for a number that is not finite."""

    model_config = ConfigDict(allow_inf_nan=False)


class Alternative(Finite):
    """One way to do a piece of work, with what was predicted and measured of it.

    Attributes:
        name: for people.
        content: digest of what it runs, by which it is known.
        runs: of the latency model, whose times add up to its time: each a `variant` and its `inputs` by name.
        predicted_ns: by the model; None where it says nothing.
        predicted_interval_ns: that holds the time with 90 %, as predicted.
        time_ns: measured; None if it was not, as are the next two.
        low_ns: lower end of the interval of the measured time.
        high_ns: upper end.
        failed: why it could not run.
    """

    name: str
    content: str
    runs: list[dict[str, str | dict[str, float]]] = []
    predicted_ns: float | None = None
    predicted_interval_ns: tuple[float, float] | None = None
    time_ns: PositiveFloat | None = None
    low_ns: float | None = None
    high_ns: float | None = None
    failed: str = ""

    @field_validator("predicted_interval_ns", mode="before")
    @classmethod
    def _of_json(cls, ends: object) -> object:
        return tuple(ends) if isinstance(ends, list) else ends


class Remembered(Finite):
    """A choice between alternatives that were measured, and all that it rests on.

    Attributes:
        key: digest of all that the choice depends on.
        context: digest of machine, software and calibration, the part that all choices of one setting share.
        kind: "functions", or the latency model's name.
        label: the workload in words.
        alternatives: of which one was chosen.
        chosen: content of that one.
        is_tie: whether another one is as fast within `regret`.
        probability: that the chosen one is the fastest within `regret`.
        rounds: visits of each alternative.
        regret: share of its time that the choice may lose.
        machine: that measured.
        created: ISO time, in UTC.
        pinned: content of the alternative that a person pinned, if one did.
        calibration: digest of the calibrated model that predicted; None where none did.
    """

    key: str
    context: str
    kind: str
    label: str
    alternatives: list[Alternative]
    chosen: str
    is_tie: bool
    probability: float
    rounds: int
    regret: float
    machine: Fingerprint
    created: str
    pinned: str | None = None
    calibration: str | None = None

    @field_validator("created")
    @classmethod
    def _is_a_time(cls, created: str) -> str:
        if datetime.datetime.fromisoformat(created).utcoffset() != datetime.timedelta(0):
            raise ValueError("expected an ISO time in UTC")
        return created

    @model_validator(mode="after")
    def _names_its_own(self) -> "Remembered":
        for name in ("chosen", "pinned"):
            if (content := getattr(self, name)) not in (None, *(one.content for one in self.alternatives)):
                raise ValueError(f"{name}: expected the content of an alternative, got {content!r}")
        return self

    @property
    def choice(self) -> Alternative:
        """The alternative that runs: what a person pinned, else what was chosen."""
        return self.by_content(self.pinned or self.chosen)

    def by_content(self, content: str) -> Alternative:
        """Return the alternative of a content."""
        return next(one for one in self.alternatives if one.content == content)

    @property
    def next_best(self) -> Alternative | None:
        """The fastest of the others that were measured."""
        timed = [one for one in self.alternatives if one.time_ns is not None and one.content != self.choice.content]
        return min(timed, key=lambda one: one.time_ns or 0.0, default=None)


class Export(Sealed):
    """An export of decisions, as a file."""

    schema_version: Literal[1] = 1
    decisions: list[Remembered]
