"""Whether a calibration still holds: its machine, and a few runs timed again by the job's own protocol."""

import dataclasses
import itertools
import math
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np

from rlxjax import Calibration, LatencyEstimate
from rlxjax.calibration import (
    MACHINE_FIELDS,
    Fingerprint,
    current_fingerprint,
    fingerprint_differences,
    read_calibration_file,
)
from rlxjax.models import WELCH

from .canary import canary_times_ns, slowness, used_by_others
from .clock import Deadline
from .design import estimates
from .measure import measure_rounds, warm_up
from .micro import MICRO_REPEATS, time_micro
from .plan import memory_limit_bytes
from .printing import filled
from .progress import Progress
from .samples import SampleLog, SampleWriter
from .verdict import MOST_OTHERS
from .visits import noise_floor, quantile_ns
from .workloads import WITHOUT_MODEL, Cell, Signals, split_by_memory

GOOD, DRIFTED, NOT_THIS_MACHINE = "good", "drifted", "not this machine"
#: Exit statuses; a file that cannot be used has that of another machine.
STATUSES = {GOOD: 0, DRIFTED: 1, NOT_THIS_MACHINE: 2}
MIN_BUDGET_S = 5.0

#: A drift of all runs, or of one strategy beside the others, has to be larger than this, in the logarithm, and than so
#: many standard deviations of a mean.
LEAST_DRIFT, LEAST_STRATEGY_DRIFT, SURE_SDS = 0.09, 0.25, 2.0
#: Variance of a median of normal values, of that of their mean.
MEDIAN_VARIANCE = math.pi / 2.0
#: Relative noise of a run that was timed in one round only.
UNKNOWN_NOISE = 0.1
#: Noise of a few looks at the canaries, in the logarithm: a pace of this size is believed by half, a larger one more.
PACE_NOISE = 0.07
#: A pace that differs by less is not worth a word.
PACE_SAID = 0.05
#: A micro-benchmark, alone, varies by such a factor.
CANARY_FACTOR = 1.5

#: Where in the logarithmic range of n_fft and of the batch the workloads lie.
N_FFT_PLACES, BATCH_PLACES = (0.25, 0.75), (0.5, 0.1, 0.9)
#: Share of the time left that compiling may take, but for so many workloads, and seconds left for measuring.
WARM_UP_SHARE, LEAST_WORKLOADS, LEAST_MEASURING_S = 0.5, 2, 4.0
#: Options of the job that are given again where a calibration is made anew.
KEPT_OPTIONS = ("--budget", "--device", "--model")
#: Seconds kept back for the micro-benchmarks at the end.
RESERVE_S = 2.0
#: What the micro-benchmarks time.
MEANINGS = {
    "launch": "one launch",
    "roundtrip": "one wait for the device",
    "copy": "device memory",
    "upload": "host to device",
    "readback": "device to host",
    "maxima": "selection by maxima",
    "top_k": "selection by a heap",
    "short powers": "powers of short rows",
    "long powers": "powers of long rows",
}


class Drift(NamedTuple):
    """How many times longer something takes than the calibration says, and between what it may be chance."""

    factor: float
    low: float
    high: float

    @property
    def is_off(self) -> bool:
        """Whether it is more than chance."""
        return not self.low <= self.factor <= self.high

    def chance(self) -> str:
        """Return what a person reads of the bounds."""
        return f"(less is faster; {self.low:.2f} to {self.high:.2f} would be chance)"

    def as_json(self) -> dict[str, Any]:
        """Return what a program reads."""
        return {**self._asdict(), "is_off": self.is_off}


@dataclasses.dataclass(frozen=True)
class Validation:
    """What a check found.

    Attributes:
        word: "good", "drifted" or "not this machine".
        overall: of all runs, the machine's pace taken out; None if none was timed.
        strategies: of each strategy's runs, beside all.
        canaries: of each micro-benchmark.
        slower: how many times longer the canaries take than then, the machine's pace.
        others: processors that other processes kept busy; None where nobody looked.
        elsewhere: differences that make it another machine.
        software: other differences.
        runs: runs and workloads that were timed.
        models: files of the learned FFTs that were timed for the calibration, and are not again.
        command: that made the calibration.
    """

    word: str
    overall: Drift | None = None
    strategies: Mapping[str, Drift] = dataclasses.field(default_factory=dict)
    canaries: Mapping[str, Drift] = dataclasses.field(default_factory=dict)
    slower: float = 1.0
    others: float | None = None
    elsewhere: Sequence[str] = ()
    software: Sequence[str] = ()
    runs: tuple[int, int] = (0, 0)
    models: Sequence[str] = ()
    command: str = ""

    @property
    def is_busy(self) -> bool:
        """Whether others kept more processors busy than timings bear."""
        return self.others is not None and self.others > MOST_OTHERS

    @property
    def status(self) -> int:
        """Exit status of the command."""
        return STATUSES[self.word]

    def sentences(self, file: str | os.PathLike[str]) -> list[str]:
        """Return what a person reads."""
        said = [f"{self.word}: {'; '.join(self._reasons())}."]
        if self.overall and not 1.0 - PACE_SAID < 1.0 / self.slower < 1.0 + PACE_SAID:
            pace = f"{100 / self.slower:.0f} % of its pace then (more is faster)"
            said.append(f"The machine runs at {pace}, and times follow it.")
        off = {name: drift for name, drift in self.canaries.items() if drift.is_off}
        if off:
            said.append(f"micro-benchmarks: {'; '.join(_canary_phrase(*item) for item in off.items())}.")
        if self.overall and self.models:
            said.append(f"The learned path was not timed again: that takes {', '.join(self.models)}.")
        if self.software:
            said.append(f"It was made with other software: {'; '.join(self.software)}.")
        if self.overall:
            said.append(f"by {os.fspath(file)}")
        if self.word == DRIFTED:
            said.append("If something else ran meanwhile, check again once it has ended.")
        if self.word != GOOD:
            said.append(f"Make a new one: {renewal(file, self.command)}")
        return said

    def lines(self, file: str | os.PathLike[str]) -> list[str]:
        """Return the sentences as they are printed, each from a line of its own on."""
        return [filled(text, renewal(file, self.command), os.fspath(file)) for text in self.sentences(file)]

    def as_json(self, file: str | os.PathLike[str]) -> dict[str, Any]:
        """Return what a program reads."""
        return {
            "verdict": self.word,
            "calibration": os.fspath(file),
            "overall": self.overall and self.overall.as_json(),
            "strategies": {name: drift.as_json() for name, drift in self.strategies.items()},
            "canaries": {name: drift.as_json() for name, drift in self.canaries.items()},
            "pace": 1.0 / self.slower,
            "others_processors": self.others,
            "elsewhere": list(self.elsewhere),
            "software": list(self.software),
            "timed": dict(zip(("runs", "workloads"), self.runs, strict=True)),
            "models_not_timed_again": list(self.models),
            "renewal": None if self.word == GOOD else renewal(file, self.command),
        }

    def _reasons(self) -> list[str]:
        if self.overall is None:
            return list(self.elsewhere)
        runs, workloads = self.runs
        timed = (
            f"{runs} runs of {workloads} workloads take {self.overall.factor:.2f} times what is predicted at this pace"
        )
        timed += f" {self.overall.chance()}"
        off = [f"{name} {drift.factor:.2f} {drift.chance()}" for name, drift in self.strategies.items() if drift.is_off]
        reasons = [timed]
        if off:
            reasons.append("beside the others " + ", ".join(off))
        if self.is_busy:
            reasons.append(f"other programs keep {self.others:.1f} processors busy")
        return reasons


def check(
    file: FilePath, *, started_s: float, budget_s: float, progress: Progress, unsealed: bool = False
) -> Validation:
    """Return whether a calibration file is good here, timing a few runs if it is of this machine.

    Args:
        file: the calibration file.
        started_s: `time.perf_counter()` when the command began; the budget counts from there.
        budget_s: seconds for everything, compilation included.
        progress: shows the phases.
        unsealed: also take a file that was edited by hand.

    Raises:
        ValueError: a budget that is too short, or a file that cannot be used.
    """
    if not MIN_BUDGET_S <= budget_s < float("inf"):
        raise ValueError(f"--budget: expected at least {MIN_BUDGET_S:g} seconds, got {budget_s:g}")
    content, here = read_calibration_file(file, unsealed=unsealed), current_fingerprint()
    welch = Calibration.from_file(content).of(WELCH.name)
    section, canary_ns = content.models[WELCH.name], {} if content.machine is None else content.machine.canary_ns
    elsewhere = fingerprint_differences(section.fingerprint, here, MACHINE_FIELDS)
    software = [text for text in fingerprint_differences(section.fingerprint, here) if text not in elsewhere]
    models = [model.file for model in section.learned_ffts]
    of_file = {"software": software, "models": models, "command": section.command}
    if elsewhere:
        return Validation(NOT_THIS_MACHINE, elsewhere=elsewhere, **of_file)
    log = _time_again(welch.domain, here, Deadline(started_s + budget_s - RESERVE_S), progress)
    with progress.phase("judging"):
        visits, expected = log.visits(), estimates(welch.posterior, log.cells)
        measured_ns, noise, others = quantile_ns(visits), noise_floor(visits), used_by_others(log)
        found = judge(log.cells, measured_ns, expected, noise, canary_times_ns(log), canary_ns, others)
    return dataclasses.replace(found, **of_file)


def judge(
    cells: Sequence[Cell],
    measured_ns: np.ndarray,
    expected: LatencyEstimate,
    noise: np.ndarray,
    canary_ns: Mapping[str, float],
    canary_then_ns: Mapping[str, float],
    others: float | None = None,
) -> Validation:
    """Return the verdict on timings of a few runs and of the micro-benchmarks.

    The machine's pace, by the canaries, is taken out of the runs: it is said, and is no drift by itself. The median of
    `log(measured / predicted)` that is left, weighted by how sure each is, of all runs and of each strategy beside the
    others, is held against what the calibration's own standard deviations and the noise of the timings make likely, and
    against a tolerance. Others that keep processors busy are a drift too. A micro-benchmark alone decides nothing.

    Args:
        cells: the runs, by any strategies that need no model.
        measured_ns: of a few rounds (`quantile_ns`), `[cells]`.
        expected: what the calibration says of each.
        noise: relative noise of each time; NaN where nothing is known of it, `[cells]`.
        canary_ns: the time of each micro-benchmark.
        canary_then_ns: the same, as the calibration has it.
        others: processors that other processes kept busy meanwhile; None where nobody looked.
    """
    slower = slowness(canary_ns, canary_then_ns) or 1.0
    log_ratios = np.log(measured_ns / np.asarray(expected.time_ns)) - _believed(np.log(slower))
    names, scores = np.array([cell.strategy for cell in cells]), np.asarray(expected.scores)
    own = np.asarray(expected.spread) ** 2 + np.where(np.isnan(noise), UNKNOWN_NOISE, noise) ** 2
    common = weighted_median(log_ratios, 1.0 / own)

    def drift_of(mine: np.ndarray, tolerance: float, centre: float) -> Drift:
        weights = 1.0 / own[mine]
        shared = np.sum((weights @ scores[mine] / weights.sum()) ** 2)
        doubt = tolerance + SURE_SDS * np.sqrt(shared + MEDIAN_VARIANCE / weights.sum())
        bounds = np.exp([weighted_median(log_ratios[mine], weights) - centre, -doubt, doubt])
        return Drift(*bounds.tolist())

    overall = drift_of(np.ones(len(cells), bool), LEAST_DRIFT, 0.0)
    strategies = {name: drift_of(names == name, LEAST_STRATEGY_DRIFT, common) for name in dict.fromkeys(names.tolist())}
    canaries = {
        name: Drift(canary_ns[name] / then_ns, 1.0 / CANARY_FACTOR, CANARY_FACTOR)
        for name, then_ns in canary_then_ns.items()
        if name in canary_ns
    }
    is_off = overall.is_off or any(drift.is_off for drift in strategies.values())
    runs = len(cells), len({cell[1:] for cell in cells})
    found = Validation(GOOD, overall, strategies, canaries, slower, others, runs=runs)
    return dataclasses.replace(found, word=DRIFTED) if is_off or found.is_busy else found


def _believed(log_pace: float) -> float:
    """Return how far runs follow the canaries: less than what these say, as far as that may be noise."""
    return log_pace**3 / (log_pace**2 + PACE_NOISE**2)


def weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the value that half of the weight lies below.

    Examples:
        >>> weighted_median(np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 5.0]))
        2.0
    """
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(below, below[-1] / 2.0)])


def chosen_cells(domain: Mapping[str, tuple[float, float]]) -> list[Cell]:
    """Return up to six workloads spread over a domain, each by every strategy that needs no model."""
    k = round(_between(*domain["k"], 0.5))
    workloads = []
    for batch_place, n_fft_place in itertools.product(BATCH_PLACES, N_FFT_PLACES):
        n_fft = _segment_length(*domain["n_fft"], n_fft_place)
        low, high = (samples / n_fft for samples in domain["batch*n_fft"])
        low, high = max(low, domain["batch"][0]), min(high, domain["batch"][1])
        batch = int(np.clip(round(_between(low, high, batch_place)), np.ceil(low), np.floor(high)))
        workloads.append((batch, n_fft, k))
    return [Cell(strategy, *sizes) for sizes in dict.fromkeys(workloads) for strategy in WITHOUT_MODEL]


def renewal(file: str | os.PathLike[str], command: str = "") -> str:
    """Return the command that makes a calibration anew, with the options of the one that made it.

    Examples:
        >>> renewal("a.json", "rlxjax calibrate --budget 60 --device cpu --out b.json --resume")
        'rlxjax calibrate --budget 60 --device cpu --out a.json'
    """
    job, given, options = ["rlxjax", "calibrate"], shlex.split(command), []
    if given[:2] == job:
        pairs = zip(given[2:], given[3:], strict=False)
        options = [part for pair in pairs if pair[0] in KEPT_OPTIONS for part in pair]
    return shlex.join([*job, *options, "--out", str(file)])


def _time_again(
    domain: Mapping[str, tuple[float, float]], here: Fingerprint, deadline: Deadline, progress: Progress
) -> SampleLog:
    """Return timings of the micro-benchmarks and of a few runs, of one round at least."""
    cells, _ = split_by_memory(chosen_cells(domain), memory_limit_bytes())
    if not cells:
        raise ValueError("there is no memory for any workload of the calibration's domain")
    log, signals = SampleLog(here), Signals(cells)
    with SampleWriter(FilePath(os.devnull), log, append=True) as writer:
        # Half of the repeats come last: a slow spell does not hit all of them.
        with progress.phase("micro-benchmarks"):
            time_micro(log, writer, MICRO_REPEATS // 2)
        warm_deadline = Deadline(time.perf_counter() + WARM_UP_SHARE * deadline.left_s())
        with progress.phase("compiling", total=len(cells)) as advance:
            least = LEAST_WORKLOADS * len(WITHOUT_MODEL)
            warm = warm_up(cells, signals, warm_deadline, advance, at_least=least)
        whole = len(warm) // len(WITHOUT_MODEL) * len(WITHOUT_MODEL)
        writer.cells(list(warm)[:whole] if whole else list(warm))
        measuring = Deadline(max(deadline.at_s, time.perf_counter() + LEAST_MEASURING_S))
        with progress.phase("measuring", measuring) as advance:
            measure_rounds(log, writer, signals, measuring, np.random.default_rng(), advance)
        if measuring.interrupted:
            raise KeyboardInterrupt
        with progress.phase("micro-benchmarks again"):
            time_micro(log, writer)
    return log


def _segment_length(low: float, high: float, place: float) -> int:
    """Return a power of two in a range, near a place of its logarithm; an even number where there is none."""
    wanted = _between(low, high, place)
    power = 2 ** round(np.log2(wanted))
    return power if low <= power <= high else 2 * round(wanted / 2)


def _between(low: float, high: float, place: float) -> float:
    return low * (high / low) ** place


def _canary_phrase(name: str, drift: Drift) -> str:
    meaning = next((words for start, words in MEANINGS.items() if name.startswith(start)), name)
    return f"{name} ({meaning}) takes {drift.factor:.2f} times as long as then"
