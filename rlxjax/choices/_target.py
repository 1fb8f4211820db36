"""Groups of stages as a device that is not there would run them: compiled, priced, and what changes in words."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from rlxjax._values import counted
from rlxjax.calibration import FunctionPrediction, FunctionTimes, times_for_target
from rlxjax.jaxpr import FunctionProfile
from rlxjax.targets import TargetDevice

#: Standard deviation of the logarithm of what no data sheet says; that a call takes time at all is no guess.
GUESSED_LOG_SD = 0.5


def target_times(profiles: Sequence[FunctionProfile], device: TargetDevice) -> FunctionTimes:
    """Return what programs that were compiled for a device take, by `times_for_target`.

    What is known of a TPU is the time of the device alone: each program is called too, which the device's figure of a
    launch stands for.

    Args:
        profiles: of level "compiled" for the device, one a program.
        device: the target.

    Raises:
        ValueError: as of `times_for_target`, or a program for several devices.
    """
    most = max((profile.target.devices for profile in profiles if profile.target), default=1)
    if most > 1:
        raise ValueError(f"target {device.name}: expected programs for one device, got one for {most}")
    found = times_for_target(profiles, device)
    if device.platform != "tpu":
        return found
    untold = [one for one in found.predictions if one.profile.target is None or one.profile.target.cycles is None]
    if untold:
        found = _by_roofline(found, untold[0].stands_on)
    call_ns, device_ns = device.launch_ns, np.array([prediction.time_ns for prediction in found.predictions])
    scores = np.column_stack([device_ns[:, None] * found.scores, np.full(len(profiles), call_ns * GUESSED_LOG_SD)])
    called = (
        one._replace(
            time_ns=one.time_ns + call_ns,
            high_ns=one.high_ns + call_ns * math.exp(GUESSED_LOG_SD),
            terms_ns=dict(sorted([*one.terms_ns.items(), ("call_ns", call_ns)], key=lambda part: -part[1])),
            stands_on=f"{one.stands_on.replace(', the device alone', ', and a guess of a call')}",
        )
        for one in found.predictions
    )
    terms_ns = np.column_stack([found.terms_ns, np.full(len(profiles), call_ns)])
    return FunctionTimes(tuple(called), scores / (device_ns + call_ns)[:, None], terms_ns, found.spread)


def _by_roofline(times: FunctionTimes, stands_on: str) -> FunctionTimes:
    """Return times of a TPU by its data sheet alone: programs of which some have no cycles have that in common."""
    found = tuple(
        one._replace(
            time_ns=one.roofline_ns,
            high_ns=one.roofline_ns * one.roofline_ns / one.low_ns,
            terms_ns={"device_ns": one.roofline_ns},
            uncounted=(),
            stands_on=stands_on,
        )
        for one in times.predictions
        if one.roofline_ns is not None  # of a TPU it never is
    )
    return times._replace(predictions=found, terms_ns=np.array([[one.time_ns] for one in found]))


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


def stands_on(programs: Sequence[FunctionPrediction]) -> str:
    """Return what the predicted times of compiled programs rest on, in a sentence."""
    told = dict.fromkeys(f"{one.stands_on} ({one.profile.target.compiler})" for one in programs if one.profile.target)
    return "; ".join(told)


def not_fitting(names: Mapping[str, FunctionProfile]) -> list[str]:
    """Return a phrase for each program that needs more memory than the device has."""
    return [f"{name} {own.target.memory}" for name, own in names.items() if own.target and not own.target.fits]
