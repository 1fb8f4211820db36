"""The samples of functions: what their lines hold, and a campaign of them."""

import dataclasses
import itertools
from pathlib import Path as FilePath
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, TypeAdapter

from rlxjax.calibration import Fingerprint, Strict

from .sample_lines import TimeNs
from .visits import Visits

#: Of the file of samples, and how the job names it.
VERSION, FUNCTIONS_SUFFIX = 1, ".functions.jsonl"


class FunctionsHeader(Strict):
    """The first line of a file of samples."""

    kind: Literal["functions"] = "functions"
    version: Literal[1] = VERSION
    fingerprint: Fingerprint


class FunctionVisit(Strict):
    """The timed runs of one visit of a function."""

    kind: Literal["visit"] = "visit"
    round: Annotated[int, Field(ge=0)]
    name: Annotated[str, Field(max_length=256)]
    times_ns: Annotated[list[TimeNs], Field(min_length=1)]


@dataclasses.dataclass
class FunctionLog:
    """The samples of one campaign of functions.

    Attributes:
        fingerprint: of the machine.
        visits: in the order in which they were made.
    """

    fingerprint: Fingerprint
    visits: list[FunctionVisit] = dataclasses.field(default_factory=list)
    lines: ClassVar[TypeAdapter] = TypeAdapter(Annotated[FunctionsHeader | FunctionVisit, Field(discriminator="kind")])

    def header(self) -> FunctionsHeader:
        """Return the first line of the file."""
        return FunctionsHeader(fingerprint=self.fingerprint)

    def add(self, visit: FunctionVisit) -> None:
        """Add a visit, of the round of the last one or of the next.

        Raises:
            ValueError: one of another round.
        """
        last = self.visits[-1].round if self.visits else -1
        if not max(last, 0) <= visit.round <= last + 1:
            raise ValueError(f"visit.round: expected {max(last, 0)} or the next, got {visit.round}")
        self.visits.append(visit)

    def names(self) -> list[str]:
        """Return the functions of every round that was begun, in order of appearance."""
        return list(dict.fromkeys(visit.name for visit in self.visits))

    def as_visits(self) -> Visits:
        """Return the visits of whole rounds; of the only one where none is whole."""
        names = self.names()
        rounds = [list(own) for _, own in itertools.groupby(self.visits, lambda visit: visit.round)]
        whole = [own for own in rounds if len({visit.name for visit in own}) == len(names)] or rounds[:1]
        made = [
            (number, names.index(visit.name), min(visit.times_ns)) for number, own in enumerate(whole) for visit in own
        ]
        round_, cell, time_ns = np.array(made, np.int64).reshape(-1, 3).T
        return Visits(round_, cell, time_ns.astype(float), len(names))


def samples_path_of(path: FilePath) -> FilePath:
    """Return where the samples of functions lie, beside a calibration file."""
    return path.with_suffix(FUNCTIONS_SUFFIX)
