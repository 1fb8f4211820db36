"""The machine's pace: small programs timed again and again, and what others use of the processors meanwhile."""

import time
from collections.abc import Mapping

import numpy as np
import psutil

from rlxjax.calibration import MachineSection, Pace, Range, population

from .micro import micro_benchmarks
from .samples import SampleLog, SampleWriter

#: The micro-benchmarks that tell the pace.
CANARIES = ("top_k deep", "top_k wide", "maxima deep", "upload")
#: Seconds between two looks.
EVERY_S = 1.0
#: Of the looks at a canary, the share that its time is not below.
LOW_QUANTILE = 0.25
#: Standard deviation of the logarithm of a machine's speed from one minute to the next, where nothing is known of this
#: one; it counts as so many looks.
PACE_LOG_SD, PACE_LOOKS = 0.05, 10


def canary_times_ns(log: SampleLog) -> dict[str, float]:
    """Return what micro-benchmarks took in ns: the least of their repeats, of canaries a low quantile of the looks."""
    found = {name: min(times_ns) for name, times_ns in log.micro.items()}
    for name in CANARIES:
        if looks := [look.times_ns[name] for _, look in log.canaries if name in look.times_ns]:
            found[name] = float(np.quantile(looks, LOW_QUANTILE))
    return found


def slowness(now_ns: Mapping[str, float], then_ns: Mapping[str, float]) -> float | None:
    """Return how many times longer the canaries take than another time, in the geometric mean; None without any."""
    ratios = [now_ns[name] / then_ns[name] for name in CANARIES if name in now_ns and name in then_ns]
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else None


def speed_among_known(now_ns: Mapping[str, float], platform: str) -> Range | None:
    """Return a machine's speed in units of the fastest and of the slowest machine of its platform's population.

    None without a population that has canaries.
    """
    known = population(platform)
    machines = [] if known is None else [one for section in known.models.values() for one in section.machines]
    speeds = [found for one in machines if (found := slowness(one.canary_ns, now_ns)) is not None]
    return Range(low=min(speeds), high=max(speeds)) if speeds else None


def used_by_others(log: SampleLog) -> float | None:
    """Return the processors that other processes kept busy, in the mean over looks; None without two of these."""
    others = [look.others for _, look in log.canaries[1:]]
    return float(np.mean(others)) if others else None


def pace_of(log: SampleLog, earlier: MachineSection | None) -> Pace:
    """Return how fast the machine was while the samples were taken.

    Args:
        log: the samples.
        earlier: what a calibration says of the same machine, if there is one. The quickest of all is the usual speed.

    What is known of other machines is the population's of the platform. Samples without looks say nothing.
    """
    looks = np.log([[look.times_ns[name] for name in CANARIES] for _, look in log.canaries])
    changes = np.mean(looks - np.median(looks, 0), -1) if len(looks) else np.zeros(0)
    # Of looks a second apart; those of a minute differ as much at least.
    squares = np.sum(np.minimum(np.abs(changes), 2.0 * PACE_LOG_SD) ** 2) + PACE_LOOKS * PACE_LOG_SD**2
    now_ns = canary_times_ns(log) if log.canaries else {}
    usual_ns = {name: now_ns[name] for name in CANARIES if name in now_ns}
    ratio = None
    if earlier is not None and earlier.pace is not None:
        then_ns = earlier.pace.usual_ns
        if (slower := slowness(now_ns, then_ns)) is not None:
            ratio = 1.0 / slower
            usual_ns = dict(then_ns) if slower > 1.0 else usual_ns
    return Pace(
        usual=ratio,
        known=speed_among_known(now_ns, log.fingerprint.platform),
        usual_ns=usual_ns,
        log_sd=float(np.sqrt(squares / (len(changes) + PACE_LOOKS))),
        others=used_by_others(log),
    )


class CanaryWatch:
    """Looks at the pace every second or so, and keeps what it sees with the samples.

    The first look is at once.
    """

    def __init__(self, writer: SampleWriter):
        self._writer = writer
        self._next_s = 0.0
        self._others = OthersUse()

    def look(self) -> None:
        """Time the canaries, if it is time to."""
        if time.perf_counter() < self._next_s:
            return
        others = self._others.processors()
        benchmarks = micro_benchmarks()
        self._writer.canary({name: benchmarks[name]() for name in CANARIES}, others)
        self._next_s = time.perf_counter() + EVERY_S


class OthersUse:
    """How many processors other processes kept busy since the last time it was asked."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._last = self._seen()

    def processors(self) -> float:
        """Return the mean number; 0 where the clock has hardly moved."""
        last, self._last = self._last, self._seen()
        wall_s, all_s, own_s = (now - then for now, then in zip(self._last, last, strict=True))
        return max(all_s - own_s, 0.0) / wall_s if wall_s > 0 else 0.0

    def _seen(self) -> tuple[float, float, float]:
        """Return the time, and the seconds of processors that all processes and this one used."""
        everyone, own = psutil.cpu_times(), self._process.cpu_times()
        idle = everyone.idle + getattr(everyone, "iowait", 0.0)
        guests = getattr(everyone, "guest", 0.0) + getattr(everyone, "guest_nice", 0.0)  # counted as user as well
        return time.perf_counter(), sum(everyone) - idle - guests, own.user + own.system
