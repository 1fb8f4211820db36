"""What a function takes: on the calibrated machine, or on a device that need not be there, for which it is compiled."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlxjax._typing import Provenance
from rlxjax.devices import TargetDevice, target_device
from rlxjax.fit import COVERED_SDS, coefficient_names, prior_posterior
from rlxjax.jaxpr import FunctionProfile, TripCounts, profile_function
from rlxjax.models import FUNCTIONS, GPU_KERNELS, gpu_facts, gpu_facts_of_kind, gpu_runs

from ._artefact import population
from ._conversion import calibrated_of, posterior_of
from ._function_times import FunctionPrediction, FunctionTimes, predict_profiles, times_of_runs
from ._predict import CalibratedModel

#: Standard deviations of the logarithm of a time. The first is that of the pace of a host that was timed: seven other
#: sets of timings on the two cards are off by 0.08, and so are parts of a session, which `benchmarks.gpu_kernels`
#: prints. It is no other host's: two hosts differ by 0.27. The second is of a TPU's time by what its compiler
#: estimates, which nobody timed here.
PACE_LOG_SD, ESTIMATE_LOG_SD = 0.08, 0.5
#: Standard deviation of the logarithm of what no data sheet says; that a call takes time at all is no guess.
GUESSED_LOG_SD = 0.5


def predict_function(
    calibration: Any,
    fn: Callable[..., Any],
    *args: Any,
    target: str | TargetDevice | None = None,
    trip_counts: TripCounts | None = None,
    **kwargs: Any,
) -> FunctionPrediction:
    """Return what a jitted function takes on the calibrated machine; nothing is compiled or run.

    For a `target`, a device that need not be there, it is compiled, and predicted by `predict_for_target`.

    Args:
        calibration: that holds the functions model.
        fn: the function.
        *args: arrays or `jax.ShapeDtypeStruct`s, or trees of them.
        target: a name, a path to a file of a target, or a `TargetDevice`.
        trip_counts: of the loops whose length depends on data.
        **kwargs: of the function.

    Raises:
        ValueError: as of `profile_function`, or a calibration without the functions model.
    """
    if target is not None:
        return predict_for_target(fn, *args, target=target, calibration=calibration, trip_counts=trip_counts, **kwargs)
    calibrated = calibration.of(FUNCTIONS.name)
    profile = profile_function(fn, *args, trip_counts=trip_counts, **kwargs)
    return predict_profiles(calibrated, [profile]).predictions[0]


def predict_for_target(
    fn: Callable[..., Any],
    *args: Any,
    target: str | TargetDevice,
    calibration: Any = None,
    trip_counts: TripCounts | None = None,
    **kwargs: Any,
) -> FunctionPrediction:
    """Return what a function takes on a device that need not be there; it is compiled for it on the CPU.

    On a GPU the model of its kernels says so, by a calibration of such a device, by the timings of one that ships
    with this package, or by its data sheet: `stands_on` names which. On a TPU it is the compiler's own estimate of
    cycles, loops by their trips, over the clock of the data sheet: the device alone, without the host. The interval
    then holds a roofline by the data sheet too.

    All arguments are those of `predict_function`; `calibration` may be None, and its model of GPU kernels is used where
    it is of such a device.

    Raises:
        ValueError: as of `compile_for` and `profile_function`; one line.
    """
    device = target_device(target)
    profile = profile_function(fn, *args, level="compiled", target=device, trip_counts=trip_counts, **kwargs)
    more, compiled = list(profile.uncounted), profile.target
    assert compiled is not None  # a profile for a target has one
    if not compiled.fits:
        more.append(compiled.memory)
    if compiled.gpu is not None and compiled.gpu.unknown_loops and not more:
        more.append("loops of different trips that depend on data count as one turn each")
    return times_for_target([profile], device, calibration, uncounted=[tuple(more)]).predictions[0]


def times_for_target(
    profiles: Sequence[FunctionProfile],
    device: TargetDevice,
    calibration: Any = None,
    *,
    uncounted: Sequence[tuple[str, ...]] | None = None,
) -> FunctionTimes:
    """Return what functions that were compiled for a device take, all by one estimate; see `predict_for_target`.

    Args:
        profiles: of level "compiled" for the device.
        device: the target.
        calibration: a `Calibration`, whose model of GPU kernels is used where it is of such a device.
        uncounted: what is not counted of each, a sentence each; nothing unless given.

    Raises:
        ValueError: a GPU whose figures do not suffice, or a function for several of them.
    """
    more = [()] * len(profiles) if uncounted is None else uncounted
    if device.platform == "tpu":
        found = tuple(_by_cycles(device, profile, own) for profile, own in zip(profiles, more, strict=True))
        terms_ns = np.array([[prediction.time_ns] for prediction in found])
        scores = np.full((len(found), 1), ESTIMATE_LOG_SD)
        return _called(device, FunctionTimes(found, scores, terms_ns, np.zeros(len(found))))
    programs = [profile.target.gpu for profile in profiles if profile.target and profile.target.gpu]
    if len(programs) != len(profiles) or any(own.target.devices > 1 for own in profiles if own.target):
        raise ValueError(f"target {device.name}: expected a function for one device, got one for several")
    calibrated, stands_on = known_gpu(device, calibration)
    times = times_of_runs(calibrated, gpu_runs(programs), profiles, more)
    told = (found._replace(target=device.name, stands_on=stands_on) for found in times.predictions)
    return times._replace(predictions=tuple(told))


class KnownGpu(NamedTuple):
    """A model of a GPU's kernels, and in words where it comes from: a calibration, shipped timings, or a data sheet."""

    model: CalibratedModel
    stands_on: str


def known_gpu(device: TargetDevice, calibration: Any = None) -> KnownGpu:
    """Return what is known of a GPU: by a calibration of one, by one that was timed for this package, or by others.

    Args:
        device: a GPU.
        calibration: a `Calibration` that may be of such a device.

    Returns:
        The model of its kernels, and `stands_on`, the words for where that comes from.

    Raises:
        ValueError: a device whose figures do not suffice.

    Examples:
        >>> from rlxjax.targets import target_device
        >>> known_gpu(target_device("h100")).stands_on
        'timings of one NVIDIA H100 80GB HBM3'
        >>> known_gpu(target_device("l4")).stands_on
        'the data sheet of NVIDIA L4 24 GB, and what 2 other GPUs say of hosts and kernels'
    """
    facts, sheet = gpu_facts(device), f"the data sheet of {device.title}"
    if calibration is not None and GPU_KERNELS.name in calibration.models:
        kind = str(calibration.fingerprint.get("device_kind", ""))
        if gpu_facts_of_kind(kind) == facts:
            return KnownGpu(calibration.models[GPU_KERNELS.name].with_facts(**facts), f"a calibration of {kind}")
    shipped = population("gpu")
    section = None if shipped is None else shipped.models.get(GPU_KERNELS.name)
    if section is None or section.population is None:
        posterior = prior_posterior(GPU_KERNELS, facts=facts)
        provenance = dict.fromkeys(coefficient_names(posterior.coefficients), Provenance.UNCALIBRATED)
        return KnownGpu(CalibratedModel(posterior, provenance, {}, {}), sheet)
    others = calibrated_of(GPU_KERNELS, section)
    for machine in section.population.machines:
        kind = machine.fingerprint.device_kind
        if machine.uncertainty is not None and gpu_facts_of_kind(kind) == facts:
            said = {"coefficients": machine.coefficients, "uncertainty": machine.uncertainty}
            one = dataclasses.replace(
                others, posterior=posterior_of(GPU_KERNELS, section.model_copy(update=said)), pace_log_sd=PACE_LOG_SD
            )
            return KnownGpu(one.with_facts(**facts), f"timings of one {kind}")
    said = f"{sheet}, and what {len(section.population.machines)} other GPUs say of hosts and kernels"
    # Nothing of this device was measured.
    return KnownGpu(dataclasses.replace(others, domain={}).with_facts(**facts), said)


def _by_cycles(device: TargetDevice, profile: FunctionProfile, uncounted: tuple[str, ...]) -> FunctionPrediction:
    """Return a prediction by the cycles that a TPU's compiler estimates, beside a roofline by data sheet."""
    compiled = profile.target
    assert compiled is not None  # a profile for a target has one
    memory_ns = float(profile.io.device_traffic_bytes) / device.bandwidth_bytes_per_ns
    compute_ns = profile.flops / compiled.devices / device.matrix_flop_per_ns.get("bf16", math.inf)
    roofline_ns = max(memory_ns, compute_ns, 1.0)
    cycles_ns = None if compiled.cycles is None else compiled.cycles / device.clock_ghz
    time_ns, name = (cycles_ns, "XLA's estimate of cycles over the clock") if cycles_ns else (roofline_ns, "a roofline")
    if not cycles_ns and not uncounted:
        uncounted = (f"the compiler's cycles make no sense: {compiled.left_out.get('cycles', 'it gives none')}",)
    reach = math.exp(COVERED_SDS * ESTIMATE_LOG_SD)
    high_ns = math.inf if uncounted else max(roofline_ns, time_ns) * reach
    said = f"{name} by the data sheet of {device.title}, the device alone; nothing was measured"
    about = {"target": device.name, "stands_on": said, "roofline_ns": roofline_ns}
    low_ns = min(roofline_ns, time_ns) / reach
    return FunctionPrediction(time_ns, low_ns, high_ns, {"device_ns": time_ns}, profile, False, uncounted, **about)


def stands_on(programs: Sequence[FunctionPrediction]) -> str:
    """Return what the predicted times of compiled programs rest on, in a sentence."""
    told = dict.fromkeys(f"{one.stands_on} ({one.profile.target.compiler})" for one in programs if one.profile.target)
    return "; ".join(told)


def _called(device: TargetDevice, found: FunctionTimes) -> FunctionTimes:
    """Return what programs of a TPU take with their calls, which the device's figure of a launch stands for."""
    untold = [one for one in found.predictions if one.profile.target is None or one.profile.target.cycles is None]
    if untold:
        # By the data sheet alone: programs of which some have no cycles have that in common.
        sheet = {"uncounted": (), "stands_on": untold[0].stands_on}
        times = [(one, one.roofline_ns) for one in found.predictions if one.roofline_ns is not None]  # a TPU's all have
        by_sheet = tuple(
            one._replace(time_ns=ns, high_ns=ns * ns / one.low_ns, terms_ns={"device_ns": ns}, **sheet)
            for one, ns in times
        )
        found = found._replace(predictions=by_sheet, terms_ns=np.array([[ns] for _, ns in times]))
    call_ns, device_ns = device.launch_ns, np.array([prediction.time_ns for prediction in found.predictions])
    scores = np.column_stack(
        [device_ns[:, None] * found.scores, np.full(len(found.predictions), call_ns * GUESSED_LOG_SD)]
    )
    called = (
        one._replace(
            time_ns=one.time_ns + call_ns,
            high_ns=one.high_ns + call_ns * math.exp(GUESSED_LOG_SD),
            terms_ns=dict(sorted([*one.terms_ns.items(), ("call_ns", call_ns)], key=lambda part: -part[1])),
            stands_on=f"{one.stands_on.replace(', the device alone', ', and a guess of a call')}",
        )
        for one in found.predictions
    )
    terms_ns = np.column_stack([found.terms_ns, np.full(len(found.predictions), call_ns)])
    return FunctionTimes(tuple(called), scores / (device_ns + call_ns)[:, None], terms_ns, found.spread)
