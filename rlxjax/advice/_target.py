"""Groups of stages as a device that is not there would run them: compiled, priced, and what changes in words."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from rlxjax._values import counted
from rlxjax.calibration import FunctionPrediction, FunctionTimes
from rlxjax.jaxpr import FunctionProfile
from rlxjax.targets import TargetDevice

#: Standard deviations of logarithms: of what no data sheet says, and of what compilers and data sheets do.
GUESSED_LOG_SD, TOLD_LOG_SD = 0.8, 0.25
#: Standard normal deviate of an interval of 90 %.
REACH = 1.645


def target_times(profiles: Sequence[FunctionProfile], device: TargetDevice) -> FunctionTimes:
    """Return what programs that were compiled for a device take by their compiler and the device's data sheet.

    A TPU takes its compiler's cycles over its clock, where these are given for all programs; any other device, the
    bytes of the kernels over its bandwidth, and a launch a kernel. A program is called once on both.
    """
    told = [profile.target.cycles if profile.target else None for profile in profiles]
    by_cycles = device.platform == "tpu" and None not in told
    rows = []
    for profile, cycles in zip(profiles, told, strict=True):
        if by_cycles:
            rows.append({"call_ns": device.launch_ns, "cycles_ns": (cycles or 0) / device.clock_ghz})
        else:
            launches = 1 if device.platform == "tpu" else max(profile.io.kernel_launches, 1)
            moved_ns = profile.fused_traffic_bytes / device.bandwidth_bytes_per_ns
            rows.append({"launch_ns": launches * device.launch_ns, "traffic_ns": moved_ns})
    terms_ns = np.array([list(row.values()) for row in rows])
    times_ns = terms_ns.sum(-1)
    scores = terms_ns * [GUESSED_LOG_SD, TOLD_LOG_SD] / times_ns[:, None]
    found = []
    for row, time_ns, own, profile in zip(rows, times_ns.tolist(), scores, profiles, strict=True):
        factor = math.exp(REACH * math.hypot(*own))
        terms = dict(sorted(row.items(), key=lambda part: -part[1]))
        found.append(FunctionPrediction(time_ns, time_ns / factor, time_ns * factor, terms, profile, True))
    return FunctionTimes(tuple(found), scores, terms_ns, 0.0)


def opposed_ns(device: TargetDevice, margin_ns: float, saved_bytes: float) -> float:
    """Return what bytes over bandwidth say against a margin: 0 where they say the same."""
    traffic_ns = saved_bytes / device.bandwidth_bytes_per_ns
    return abs(traffic_ns) if traffic_ns * margin_ns < 0 else 0.0


@dataclasses.dataclass(frozen=True)
class _Counts:
    kernels: int
    bytes: int
    cycles: int | None


def _counts(programs: Sequence[FunctionProfile]) -> _Counts:
    cycles = [profile.target.cycles if profile.target else None for profile in programs]
    return _Counts(
        sum(int(profile.io.kernel_launches) for profile in programs),
        sum(profile.fused_traffic_bytes for profile in programs),
        None if None in cycles else sum(own or 0 for own in cycles),
    )


def change_in_words(apart: Sequence[FunctionProfile], grouped: Sequence[FunctionProfile]) -> str:
    """Return what a grouping changes by the compiler's figures, as "1 kernel for 3, 134 MB less"."""
    before, after = _counts(apart), _counts(grouped)
    saved = before.bytes - after.bytes
    parts = [f"{counted(after.kernels, 'kernel')} for {before.kernels:,}"]
    parts.append(f"{in_bytes(abs(saved))} {'less' if saved > 0 else 'more'}" if saved else "as many bytes")
    if before.cycles is not None and after.cycles is not None:
        parts.append(f"{after.cycles:,} cycles for {before.cycles:,}")
    return ", ".join(parts)


def in_bytes(count: float) -> str:
    """Return bytes as people write them.

    Examples:
        >>> in_bytes(134217728), in_bytes(8), in_bytes(17179869184)
        ('134 MB', '8 B', '17.2 GB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def stands_on(programs: Sequence[FunctionProfile]) -> str:
    """Return what the predicted times of compiled programs rest on, in a sentence."""
    told = [profile.target for profile in programs if profile.target]
    if any(own.cycles is None for own in told):
        how = "bytes of the kernels that XLA's compiler makes, over the rates"
    else:
        how = "cycles that XLA's compiler estimates, over the clock"
    return f"{how} of the device's data sheet, and a guess of a launch; nothing is measured ({told[0].compiler})"


def not_fitting(names: Mapping[str, FunctionProfile]) -> list[str]:
    """Return a phrase for each program that needs more memory than the device has."""
    return [f"{name} {own.target.memory}" for name, own in names.items() if own.target and not own.target.fits]
