"""The raw samples of functions: one JSON line a visit, appended as it is taken, never rewritten."""

import dataclasses
import gzip
import itertools
import zlib
from pathlib import Path as FilePath
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from rlxjax.calibration import Fingerprint, Strict, first_refusal
from rlxjax.clock import FIRST_PROTOCOL, PROTOCOL, mean_ns

from .visits import Visits

#: Of the file of samples, and how the job names it.
VERSION, FUNCTIONS_SUFFIX = 1, ".functions.jsonl"


class Header(Strict):
    """The first line of a file of samples."""

    kind: Literal["functions"] = "functions"
    version: Literal[1] = VERSION
    protocol: Annotated[int, Field(ge=1)] = FIRST_PROTOCOL
    fingerprint: Fingerprint


class Visit(Strict):
    """The timed runs of one visit of a function."""

    kind: Literal["visit"] = "visit"
    round: Annotated[int, Field(ge=0)]
    name: str
    times_ns: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]


_LINE = TypeAdapter(Annotated[Header | Visit, Field(discriminator="kind")])


@dataclasses.dataclass
class FunctionLog:
    """The samples of one campaign of functions.

    Attributes:
        fingerprint: of the machine.
        protocol: by which they were timed.
        visits: in the order in which they were made.
    """

    fingerprint: Fingerprint
    protocol: int = PROTOCOL
    visits: list[Visit] = dataclasses.field(default_factory=list)

    def names(self) -> list[str]:
        """Return the functions of every round that was begun, in order of appearance."""
        return list(dict.fromkeys(visit.name for visit in self.visits))

    def as_visits(self) -> Visits:
        """Return the visits of whole rounds; of the only one where none is whole."""
        names = self.names()
        rounds = {number: list(own) for number, own in itertools.groupby(self.visits, lambda visit: visit.round)}
        whole = [own for own in rounds.values() if len(own) == len(names)] or list(rounds.values())[:1]
        made = [
            (number, names.index(visit.name), round(mean_ns(visit.times_ns)))
            for number, own in enumerate(whole)
            for visit in own
        ]
        round_, cell, time_ns = np.array(made).T
        return Visits(round_, cell, time_ns.astype(float), len(names))


def samples_path_of(path: FilePath) -> FilePath:
    """Return where the samples of functions lie, beside a calibration file."""
    return path.with_suffix(FUNCTIONS_SUFFIX)


def read_function_samples(path: FilePath) -> FunctionLog | None:
    """Return the samples of functions that a file holds, compressed or not; None if it holds other samples.

    A last line that was cut short is left out.

    Raises:
        ValueError: a line that is none; one line that names the place.
    """
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        return None
    if not text.startswith('{"kind":"functions"'):
        return None
    log = None
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            found = _LINE.validate_json(line)
        except ValidationError as error:
            raise ValueError(f"{path}: line {number}: {first_refusal(error)}") from None
        if isinstance(found, Header):
            log = FunctionLog(found.fingerprint, found.protocol)
        elif log is not None:
            log.visits.append(found)
    return log
