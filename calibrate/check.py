"""Check that a calibration still holds: compare this machine with the calibrated one, and time a few cells again."""

import math
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np

from rlxjax import Calibration
from rlxjax import calibration as files
from rlxjax.fit import COVERED_SDS, Cell, Suite, estimate

from .campaign import timed
from .judge import LEAST_COVERED, busier
from .machine import used_by_others
from .measure import by_work, memory_limit_bytes
from .samples import SampleLog, quantile_ns
from .suites import suite_of_file
from .terminal import Deadline, Progress

#: The verdicts. The exit status of a verdict is its place in this list, counted from 0.
GOOD, OFF, NOT_THIS_MACHINE, INCONCLUSIVE = STATUSES = "good", "off", "not this machine", "inconclusive"
MIN_BUDGET_S = 5.0
#: A model is off if fewer of its cells than this share are inside their intervals. A model is good if at least
#: `LEAST_COVERED` are, and the median factor between measured and predicted times is at most `MOST_FACTOR`.
LEAST_INSIDE, MOST_FACTOR = 0.5, 1.25
#: For each suite: the number of cells to time again, the least number of such cells, and the longest run in ns.
CELLS, LEAST_CELLS, LONGEST_RUN_NS = 24, 8, 2e8
#: The largest share of the remaining time that compiling may take, and the least seconds of measuring each suite.
READY_SHARE, LEAST_MEASURING_S = 0.5, 2.0
#: The options of a section's calibrate command that the printed command for a new calibration repeats.
KEPT_OPTIONS = ("--budget", "--device", "--model", "--suite", "--only")


class Agreement(NamedTuple):
    """How many cells took a time inside their 90 % interval, and the median of measured over predicted time."""

    cells: int
    inside: int
    factor: float

    @classmethod
    def of(cls, measured_ns: np.ndarray, predicted_ns: np.ndarray, log_sd: np.ndarray) -> "Agreement":
        log_ratio = np.log(measured_ns / predicted_ns)
        inside = int(np.sum(np.abs(log_ratio) <= COVERED_SDS * log_sd))
        return cls(len(log_ratio), inside, float(np.exp(np.median(log_ratio))))

    @property
    def word(self) -> str:
        """The verdict on an idle machine. Wide intervals contain times that are far from the prediction."""
        if self.inside < LEAST_INSIDE * self.cells:
            return OFF
        is_near = 1.0 / MOST_FACTOR <= self.factor <= MOST_FACTOR
        return GOOD if is_near and self.inside >= LEAST_COVERED * self.cells else INCONCLUSIVE


class Validation(NamedTuple):
    """The result of a check: agreements, the load, changes of machine and software, and the command of each section."""

    models: Mapping[str, Agreement] = {}
    others: float | None = None
    busy: str = ""
    elsewhere: Sequence[str] = ()
    software: Sequence[str] = ()
    not_timed: Sequence[str] = ()
    commands: Sequence[str] = ()

    @property
    def word(self) -> str:
        if self.elsewhere:
            return NOT_THIS_MACHINE
        words = {own.word for own in self.models.values()}
        return GOOD if words == {GOOD} else OFF if OFF in words and not self.busy else INCONCLUSIVE

    @property
    def status(self) -> int:
        return STATUSES.index(self.word)

    def sentences(self, file: str | os.PathLike[str]) -> list[str]:
        found = [
            f"{own.inside} of {own.cells} cells of {name} are inside their 90 % intervals, and the median time is "
            f"{own.factor:.2f} times the predicted time"
            for name, own in self.models.items()
        ]
        said = [f"{self.word}: {'; '.join(found or self.elsewhere)}.", *filter(None, [self.busy]), *self.not_timed]
        if self.software:
            said.append(f"The calibration was made with other software: {'; '.join(self.software)}.")
        if self.models:
            said.append(f"calibration: {os.fspath(file)}")
        if self.word == INCONCLUSIVE:
            said.append("Validate again on an idle machine, or with a larger --budget.")
        if self.word != GOOD:
            said.append(f"Calibrate again: {renewal(file, self.commands)}")
        return said

    def as_json(self, file: str | os.PathLike[str]) -> dict[str, Any]:
        return {
            "verdict": self.word,
            "calibration": os.fspath(file),
            "models": {name: own._asdict() | {"verdict": own.word} for name, own in self.models.items()},
            "others_processors": self.others,
            "elsewhere": self.elsewhere,
            "software": self.software,
            "not_timed": self.not_timed,
            "renewal": None if self.word == GOOD else renewal(file, self.commands),
        }


def check(
    file: FilePath, *, started_s: float, budget_s: float, progress: Progress, suites: Sequence[Suite] = ()
) -> Validation:
    """Time a few cells of each model in a calibration file, and return whether the file holds on this machine."""
    if not MIN_BUDGET_S <= budget_s < float("inf"):
        raise ValueError(f"--budget: expected at least {MIN_BUDGET_S:g} seconds, got {budget_s:g}")
    content, here = files.read_calibration_file(file), files.current_fingerprint()
    made_on = [section.fingerprint for section in content.sections().values()]
    differences = dict.fromkeys(text for own in made_on for text in files.fingerprint_differences(own, here))
    elsewhere = [text for text in differences if text.partition(" ")[0] in files.MACHINE_FIELDS]
    software = [text for text in differences if text not in elsewhere]
    commands = [section.command for section in content.models.values()]
    if elsewhere:
        return Validation(elsewhere=elsewhere, software=software, commands=commands)
    found: dict[str, Suite] = {}
    not_timed = []
    for name, section in content.models.items():
        try:
            if section.samples is None:
                raise ValueError("the section names no samples")
            suite = suite_of_file(section.samples.suite, name, suites)
            if suite.model.name != name:
                raise ValueError(f"the model is fitted to the compiled programs of {suite.model.name}")
            found[name] = suite
        except ValueError as error:
            not_timed.append(f"{name} was not validated: {error}.")
        if section.given:
            not_timed.append(f"Runs with the files {', '.join(section.given)} were not validated.")
    if not found:
        raise ValueError(f"{file}: no section can be validated: {' '.join(not_timed)}")
    calibration = Calibration.from_file(content, [suite.model for suite in found.values()])
    known = {name: (suite, calibration.of(name)) for name, suite in found.items()}
    models, looks = {}, []
    for name, log in timed_again(known, Deadline(started_s + budget_s), progress).items():
        (suite, calibrated), (cells, visits) = known[name], log.timed()
        expected = estimate(calibrated.posterior, suite.runs(cells))
        log_sd = np.hypot(np.asarray(expected.log_sd()), calibrated.pace_log_sd)
        models[name] = Agreement.of(quantile_ns(visits), np.asarray(expected.time_ns), log_sd)
        looks.append(used_by_others(log))
    others = max((own for own in looks if own is not None), default=None)
    busy = busier(others, content.machine)
    return Validation(models, others, busy, elsewhere, software, not_timed, commands)


def timed_again(
    known: Mapping[str, tuple[Suite, files.CalibratedModel]], deadline: Deadline, progress: Progress
) -> dict[str, SampleLog]:
    """Time a few cells of each suite, in at least one round. Return the timings of each model."""
    logs = {}
    for left, (name, (suite, calibrated)) in zip(range(len(known), 0, -1), known.items(), strict=True):
        cells, log = chosen_cells(suite, calibrated), SampleLog.new(suite, name)
        ends = Deadline(time.perf_counter() + max(deadline.left_s(), 0.0) / left)
        limits = {"ready_share": READY_SHARE, "at_least": LEAST_CELLS, "least_s": LEAST_MEASURING_S}
        refused, _ = timed(suite, log, cells, cells, ends, progress, rng=np.random.default_rng(), **limits)
        if ends.interrupted:
            raise KeyboardInterrupt
        if not log.cells:
            raise ValueError(f"{name}: no cell ran. {refused[0]}")
        logs[name] = log
    return logs


def chosen_cells(suite: Suite, calibrated: files.CalibratedModel) -> list[Cell]:
    """Return a few cells with inputs in the calibrated domain: whole works spread evenly over their predicted times."""
    limit_bytes = memory_limit_bytes()
    works = by_work([cell for cell in suite.cells() if cell.n_bytes <= limit_bytes])
    inside = [work for work in works.values() if np.all(calibrated.covers(suite.runs(work)))]
    cells = [cell for work in inside for cell in work]
    times_ns = np.asarray(estimate(calibrated.posterior, suite.runs(cells)).time_ns) if cells else []
    slowest_ns: dict[str, float] = {}
    for cell, time_ns in zip(cells, times_ns, strict=True):
        slowest_ns[cell.work] = max(time_ns, slowest_ns.get(cell.work, 0.0))
    by_time = sorted((name for name, ns in slowest_ns.items() if ns <= LONGEST_RUN_NS), key=slowest_ns.__getitem__)
    if not by_time:
        raise ValueError(f"{suite.model.name}: no cell within the calibration's domain can run here")
    width = max(map(len, works.values()))
    places = np.unique(np.linspace(0, len(by_time) - 1, math.ceil(CELLS / width)).round().astype(int))
    order = np.random.default_rng(0).permutation(places)
    return [cell for place in order for cell in works[by_time[place]]]


def renewal(file: str | os.PathLike[str], commands: Sequence[str] = ()) -> str:
    """Return shell commands that calibrate again, with the options of the commands that made the sections."""
    job, again = ["rlxjax", "calibrate"], []
    for given in map(shlex.split, commands or [""]):
        pairs = zip(given[2:], given[3:], strict=False) if given[:2] == job else ()
        options = [part for pair in pairs if pair[0] in KEPT_OPTIONS for part in pair]
        again.append(shlex.join([*job, *options, "--out", str(file)]))
    return " && ".join(dict.fromkeys(again))
