"""Check that a calibration still holds: compare this machine with the calibrated one, and time a few cells again."""

import dataclasses
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
from rlxjax.fit import Cell, LatencyEstimate, Suite, cell_runs, estimate

from .campaign import timed
from .judge import busier
from .machine import MICRO_REPEATS, micro_times_ns, slowness, time_micro, used_by_others
from .measure import by_work, memory_limit_bytes
from .samples import SampleLog, noise_floor, quantile_ns
from .suites import suite_of_file
from .terminal import Deadline, Progress

#: The verdicts. The exit status of a verdict is its place in this list, counted from 0.
GOOD, DRIFTED, NOT_THIS_MACHINE, INCONCLUSIVE = STATUSES = "good", "drifted", "not this machine", "inconclusive"
#: The least number of seconds of a check, and the seconds that it reserves for micro-benchmarks at its end.
MIN_BUDGET_S, RESERVE_S = 5.0, 2.0
#: A model has drifted if the log ratio of its times exceeds this least value plus this many standard deviations.
LEAST_DRIFT, SURE_SDS = 0.09, 2.0
#: For normal values, the variance of the median over that of the mean; the assumed noise of a cell after one round.
MEDIAN_VARIANCE, UNKNOWN_NOISE = math.pi / 2.0, 0.1
#: The noise of the logarithm of the machine's pace, and the least change of pace that is printed. If a change is as
#: large as the noise, half of the change counts. If the change is larger, a larger share of it counts.
PACE_NOISE, PACE_SAID = 0.07, 0.05
#: The time of a micro-benchmark may change by up to this factor by chance.
CANARY_FACTOR = 1.5
#: For each suite: the number of cells to time again, the least number of such cells, and the longest run in ns.
CELLS, LEAST_CELLS, LONGEST_RUN_NS = 24, 8, 2e8
#: The largest share of the remaining time that compiling may take, and the least seconds of measuring each suite.
READY_SHARE, LEAST_MEASURING_S = 0.5, 2.0
#: The options of a section's calibrate command that the printed command for a new calibration repeats.
KEPT_OPTIONS = ("--budget", "--device", "--model", "--suite", "--only")


class Drift(NamedTuple):
    """A change of times: `factor` is measured over predicted time. A factor from `low` to `high` may be chance."""

    factor: float
    low: float
    high: float
    cells: int = 1

    @property
    def is_off(self) -> bool:
        return not self.low <= self.factor <= self.high


@dataclasses.dataclass(frozen=True)
class Validation:
    """The result of a check: the verdict, drifts, changes of machine and software, and the command of each section."""

    word: str
    models: Mapping[str, Drift] = dataclasses.field(default_factory=dict)
    canaries: Mapping[str, Drift] = dataclasses.field(default_factory=dict)
    slower: float = 1.0
    others: float | None = None
    busy: str = ""
    elsewhere: Sequence[str] = ()
    software: Sequence[str] = ()
    not_timed: Sequence[str] = ()
    commands: Sequence[str] = ()

    @property
    def status(self) -> int:
        return STATUSES.index(self.word)

    def sentences(self, file: str | os.PathLike[str]) -> list[str]:
        reasons = ["the machine is busy"] * (self.word == INCONCLUSIVE)
        reasons += [
            f"{drift.cells} cells of {name} take {drift.factor:.2f} times the predicted time ({drift.low:.2f} to "
            f"{drift.high:.2f} may be chance)"
            for name, drift in self.models.items()
        ] or list(self.elsewhere)
        said = [f"{self.word}: {'; '.join(reasons)}.", *([self.busy] if self.busy else [])]
        if self.models and not 1.0 - PACE_SAID < 1.0 / self.slower < 1.0 + PACE_SAID:
            said.append(
                f"The machine runs at {100 / self.slower:.0f} % of its speed at the calibration; the predicted times "
                "above follow this speed."
            )
        off = {name: drift.factor for name, drift in self.canaries.items() if drift.is_off}
        if longer := [f"{name} takes {factor:.2f} times its earlier time" for name, factor in off.items()]:
            said.append(f"Micro-benchmarks: {'; '.join(longer)}.")
        said += self.not_timed
        if self.software:
            said.append(f"The calibration was made with other software: {'; '.join(self.software)}.")
        if self.models:
            said.append(f"calibration: {os.fspath(file)}")
        if self.word == INCONCLUSIVE:
            said.append("Validate again once the other programs have ended, or calibrate while they run.")
        if self.word != GOOD:
            said.append(f"Calibrate again: {renewal(file, self.commands)}")
        return said

    def as_json(self, file: str | os.PathLike[str]) -> dict[str, Any]:
        def read(drifts: Mapping[str, Drift]) -> dict[str, Any]:
            return {name: {**drift._asdict(), "is_off": drift.is_off} for name, drift in drifts.items()}

        return {
            "verdict": self.word,
            "calibration": os.fspath(file),
            "models": read(self.models),
            "canaries": read(self.canaries),
            "pace": 1.0 / self.slower,
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
    about: dict[str, Any] = {"commands": [section.command for section in content.models.values()]}
    for kind, is_kind in (("elsewhere", True), ("software", False)):
        about[kind] = [text for text in differences if (text.partition(" ")[0] in files.MACHINE_FIELDS) == is_kind]
    if about["elsewhere"]:
        return Validation(NOT_THIS_MACHINE, **about)
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
    logs, machine = timed_again(known, Deadline(started_s + budget_s - RESERVE_S), progress)
    with progress.phase("judging"):
        now_ns, then_ns = micro_times_ns(machine), {} if content.machine is None else content.machine.canary_ns
        models, slower = {}, slowness(now_ns, then_ns) or 1.0
        for name, log in logs.items():
            cells, visits = log.timed()
            expected = estimate(known[name][1].posterior, cell_runs(known[name][0].model, cells))
            pace_sd = known[name][1].pace_log_sd
            models[name] = drift_of(quantile_ns(visits), expected, noise_floor(visits), slower, pace_sd)
        verdict = verdict_of(models, now_ns, then_ns, used_by_others(machine), content.machine)
    return dataclasses.replace(verdict, not_timed=not_timed, **about)


def timed_again(
    known: Mapping[str, tuple[Suite, files.CalibratedModel]], deadline: Deadline, progress: Progress
) -> tuple[dict[str, SampleLog], SampleLog]:
    """Time a few cells of each suite, in at least one round, and the micro-benchmarks. Return the timings."""
    logs, machine = {}, SampleLog.new(next(iter(known.values()))[0], "machine")
    # Half of the repeats come last, so that a slow minute does not hit all repeats.
    with progress.phase("micro-benchmarks"):
        time_micro(machine, MICRO_REPEATS // 2)
    for left, (name, (suite, calibrated)) in zip(range(len(known), 0, -1), known.items(), strict=True):
        cells, log = chosen_cells(suite, calibrated), SampleLog.new(suite, name)
        ends = Deadline(time.perf_counter() + max(deadline.left_s(), 0.0) / left)
        limits = {"ready_share": READY_SHARE, "at_least": LEAST_CELLS, "least_s": LEAST_MEASURING_S}
        refused, _ = timed(suite, log, cells, cells, ends, progress, rng=np.random.default_rng(), **limits)
        if ends.interrupted:
            raise KeyboardInterrupt
        if not log.cells:
            raise ValueError(f"{name}: no cell ran. {refused[0]}")
        machine.canaries += log.canaries
        logs[name] = log
    with progress.phase("micro-benchmarks again"):
        time_micro(machine)
    return logs, machine


def verdict_of(
    models: Mapping[str, Drift],
    canary_ns: Mapping[str, float],
    canary_then_ns: Mapping[str, float],
    others: float | None = None,
    then: files.MachineSection | None = None,
) -> Validation:
    """Return the verdict on drifts. A drift is inconclusive if the machine is busier than at the calibration `then`."""
    shared = {name: canary_ns[name] / then_ns for name, then_ns in canary_then_ns.items() if name in canary_ns}
    canaries = {name: Drift(factor, 1.0 / CANARY_FACTOR, CANARY_FACTOR) for name, factor in shared.items()}
    busy, is_off = busier(others, then), any(drift.is_off for drift in models.values())
    word = GOOD if not is_off else INCONCLUSIVE if busy else DRIFTED
    return Validation(word, models, canaries, slowness(canary_ns, canary_then_ns) or 1.0, others, busy)


def drift_of(
    measured_ns: np.ndarray, expected: LatencyEstimate, noise: np.ndarray, slower: float = 1.0, pace_sd: float = 0.0
) -> Drift:
    """Return the median ratio of measured to predicted time, and its uncertainty. The machine's pace is divided out.

    `pace_sd` is the standard deviation of the logarithm of the machine's speed during the calibration.
    """
    pace = np.log(slower)
    believed = pace**3 / (pace**2 + PACE_NOISE**2)  # a pace change within the noise hardly counts
    log_ratios = np.log(measured_ns / np.asarray(expected.time_ns)) - believed
    weights = 1.0 / (np.asarray(expected.spread) ** 2 + np.nan_to_num(noise, nan=UNKNOWN_NOISE) ** 2)
    shared = np.sum((weights @ np.asarray(expected.scores) / weights.sum()) ** 2)
    uncertainty = max(LEAST_DRIFT, SURE_SDS * pace_sd) + SURE_SDS * np.sqrt(shared + MEDIAN_VARIANCE / weights.sum())
    order = np.argsort(log_ratios)
    below = np.cumsum(weights[order])
    median = log_ratios[order][np.searchsorted(below, below[-1] / 2.0)]
    return Drift(*np.exp([median, -uncertainty, uncertainty]).tolist(), cells=len(log_ratios))


def chosen_cells(suite: Suite, calibrated: files.CalibratedModel) -> list[Cell]:
    """Return a few cells with inputs in the calibrated domain: whole works spread evenly over their predicted times."""
    limit_bytes = memory_limit_bytes()
    works = by_work([cell for cell in suite.cells() if cell.n_bytes <= limit_bytes])
    inside = [work for work in works.values() if all(calibrated.in_domain(**dict[str, Any](c.inputs)) for c in work)]
    cells = [cell for work in inside for cell in work]
    times_ns = np.asarray(estimate(calibrated.posterior, cell_runs(suite.model, cells)).time_ns) if cells else []
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
