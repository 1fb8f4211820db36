"""One choice as it is remembered: the alternatives, what each was predicted to take and took, and what it rests on."""

import datetime
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, field_validator, model_validator

from rlxjax._files import Sealed, Strict
from rlxjax.calibration import Fingerprint, Positive
from rlxjax.fit import LatencyModel, Runs, check_timed_size

#: Nanoseconds of a call that was timed, and a size of it at most: what is beyond is a mistake.
MeasuredNs = Annotated[float, Field(ge=1e-3, le=1e15)]
MOST_SIZE = 1e18


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
    predicted_ns: Positive | None = None
    predicted_interval_ns: tuple[Positive, Positive] | None = None
    time_ns: MeasuredNs | None = None
    low_ns: MeasuredNs | None = None
    high_ns: MeasuredNs | None = None
    failed: str = ""

    @field_validator("predicted_interval_ns", mode="before")
    @classmethod
    def _of_json(cls, ends: object) -> object:
        return tuple(ends) if isinstance(ends, list) else ends

    @field_validator("runs")
    @classmethod
    def _are_runs(cls, runs: list[Any]) -> list[Any]:
        for run in runs:
            sizes = run.get("inputs") if isinstance(run.get("variant"), str) and len(run) == 2 else None
            if not isinstance(sizes, dict) or not all(0.0 <= size <= MOST_SIZE for size in sizes.values()):
                raise ValueError(f"expected a variant and its inputs, each from 0 to {MOST_SIZE:g}, got {run}")
        return runs

    @model_validator(mode="after")
    def _in_order(self) -> "Alternative":
        time_ns, (low, high) = self.time_ns, self.predicted_interval_ns or (0.0, 0.0)
        if not (self.low_ns or time_ns or 0.0) <= (time_ns or 0.0) <= (self.high_ns or time_ns or 0.0) or low > high:
            raise ValueError("expected times within their intervals, from the lower end to the upper")
        return self


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
    probability: Annotated[float, Field(ge=0.0, le=1.0)]
    rounds: NonNegativeInt
    regret: NonNegativeFloat
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
            running = [one.content for one in self.alternatives if not one.failed]
            if (content := getattr(self, name)) not in (None, *running):
                raise ValueError(f"{name}: expected the content of an alternative that runs, got {content!r}")
        return self

    @property
    def choice(self) -> Alternative:
        """The alternative that runs: what a person pinned, else what was chosen."""
        return self.by_content(self.pinned or self.chosen)

    def by_content(self, content: str) -> Alternative:
        """Return the alternative of a content."""
        return next(one for one in self.alternatives if one.content == content)

    @property
    def taught(self) -> list[Alternative]:
        """Those of which a model learns: they were timed, and their runs are known."""
        return [one for one in self.alternatives if one.time_ns is not None and one.runs]

    @property
    def next_best(self) -> Alternative | None:
        """The fastest of the others that were measured."""
        timed = [one for one in self.alternatives if one.time_ns is not None and one.content != self.choice.content]
        return min(timed, key=lambda one: one.time_ns or 0.0, default=None)


class Export(Sealed):
    """An export of decisions, as a file: each is as `Remembered` says, and is checked when it is taken."""

    schema_version: Literal[1] = 1
    decisions: list[dict[str, Any]]


def timed_runs(model: LatencyModel, alternatives: Sequence[Alternative]) -> Runs:
    """Return the runs of alternatives that were timed, checked as those of any measurement."""
    runs: list[Any] = [run for one in alternatives for run in one.runs]
    columns = {name: np.array([run["inputs"].get(name, np.nan) for run in runs], float) for name in model.inputs}
    for name, entry in model.inputs.items():
        check_timed_size(columns[name], name, entry)
    model.check(columns)
    return Runs.checked(model, [run["variant"] for run in runs], **columns)
