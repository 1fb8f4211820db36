"""Predict the time of a function on the calibrated machine, or on a target device that need not be present."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlxjax._typing import Provenance
from rlxjax.devices import TargetDevice, target_device
from rlxjax.fit import (
    COVERED_SDS,
    LatencyPosterior,
    Runs,
    coefficient_names,
    estimate,
    prior_posterior,
)
from rlxjax.jaxpr import OPERATIONS, PRODUCT_OPERATIONS, FunctionProfile, TripCounts, profile_function
from rlxjax.models import (
    COLLECTIVES,
    FUNCTIONS,
    GPU_KERNELS,
    PIPELINED,
    TPU_KERNELS,
    collective_inputs,
    gpu_facts,
    gpu_facts_of_kind,
    gpu_runs,
    product_ns,
    tpu_facts,
    tpu_inputs,
)

from ._artefact import population
from ._conversion import calibrated_of, posterior_of
from ._function_times import FunctionPrediction, FunctionTimes, predict_profiles, times_of_runs
from ._predict import CalibratedModel

#: Standard deviations of the logarithm of the machine's speed: for a timed GPU, and for a GPU with an untimed host. The
#: first comes from seven further sets of timings on two GPUs, and from parts of a session (`benchmarks.gpu_kernels`).
PACE_LOG_SD, HOST_LOG_SD = 0.08, 0.27
#: Relative standard deviation of a step's time in a loop that does not wait, from 190 loops on an H100; and of the
#: speed of a GPU that was not timed, from the error on an H200 of the model that was fitted to the H100.
PIPELINED_SPREAD, CARD_LOG_SD = 0.19, 0.1
#: Relative standard deviation of a program's own residual on a TPU, from published step times.
TPU_SPREAD = 0.12
#: A custom kernel's time relative to the data sheet's time for its declared work, and the relative standard deviation.
CUSTOM_SLOWNESS, CUSTOM_LOG_SD = 2.0, 0.5


def predict_function(
    calibration: Any,
    fn: Callable[..., Any],
    *args: Any,
    target: str | TargetDevice | None = None,
    mesh: Mapping[str, int] | None = None,
    trip_counts: TripCounts | None = None,
    **kwargs: Any,
) -> FunctionPrediction:
    """Predict the time of a jitted function on the calibrated machine; the function is neither compiled nor run.

    If you give a `target`, the function is compiled for that device, and `predict_for_target` predicts the time.

    Args:
        calibration: a calibration that holds the functions model.
        fn: the function.
        *args: the function's arguments: arrays, `jax.ShapeDtypeStruct`s, or pytrees of these.
        target: the device, which need not be present: its name, the path of a target's file, or a `TargetDevice`.
        mesh: the size of each axis of the target's device mesh, by the axis's name; see `rlxjax.targets.compile_for`.
        trip_counts: the trip counts of loops whose length depends on data; see `profile_function`.
        **kwargs: the function's keyword arguments.

    Raises:
        ValueError: as in `profile_function`; `calibration` has no functions model; or `mesh` is given without `target`.
    """
    if target is not None:
        options: dict[str, Any] = {"calibration": calibration, "mesh": mesh, "trip_counts": trip_counts}
        return predict_for_target(fn, *args, target=target, **options, **kwargs)
    if mesh is not None:
        raise ValueError("mesh: expected none without a target")
    calibrated = calibration.of(FUNCTIONS.name)
    profile = profile_function(fn, *args, trip_counts=trip_counts, **kwargs)
    return predict_profiles(calibrated, [profile]).predictions[0]


def predict_for_target(
    fn: Callable[..., Any],
    *args: Any,
    target: str | TargetDevice,
    mesh: Mapping[str, int] | None = None,
    calibration: Any = None,
    trip_counts: TripCounts | None = None,
    **kwargs: Any,
) -> FunctionPrediction:
    """Predict the time of a function on target devices that need not be present; the function is compiled on the CPU.

    For a GPU, a model of kernels predicts the time. The model's coefficients come from a calibration of the same kind
    of GPU, from timings that ship with this package, or from the data sheet; `stands_on` names the source. For a TPU,
    a kernel's time is the compiler's estimate of cycles, divided by the data sheet's clock rate. If the compiler gives
    no estimate for a kernel, its bytes and operations give the time. A collective operation adds only the time by which
    it takes longer than the work that overlaps with it. `time_ns` is the time of a call that waits for its results.
    `pipelined_ns` is the time of a step in a loop that does not wait.

    The arguments are those of `predict_function`; `calibration` is used only if it was made on the same kind of device.

    Raises:
        ValueError: as in `compile_for` and in `profile_function`.
    """
    device = target_device(target)
    options: dict[str, Any] = {"mesh": mesh, "trip_counts": trip_counts}
    profile = profile_function(fn, *args, level="compiled", target=device, **options, **kwargs)
    found = times_for_target([profile], device, calibration).predictions[0]
    compiled = profile.target
    if compiled is None or compiled.fits:
        return found
    low_ns, _ = found.pipelined_interval_ns or (0.0, 0.0)
    none = {"high_ns": math.inf, "pipelined_interval_ns": (low_ns, math.inf), "in_domain": False}
    return found._replace(uncounted=(*found.uncounted, compiled.memory), **none)


def times_for_target(
    profiles: Sequence[FunctionProfile], device: TargetDevice, calibration: Any = None
) -> FunctionTimes:
    """Predict the times of functions compiled for a device, in one estimate; see `predict_for_target`.

    Args:
        profiles: profiles of level "compiled" for the device.
        device: the target.
        calibration: a `Calibration`, used only if it was made on the same kind of device.

    Raises:
        ValueError: a needed figure of the device is missing, or a profile has another level than "compiled".
    """
    if device.platform == "tpu":
        known = _known_tpu(device)
        runs = TPU_KERNELS.runs([tpu_inputs(profile) for profile in profiles])
    else:
        programs = [profile.target.gpu for profile in profiles if profile.target and profile.target.gpu]
        known, runs = known_gpu(device, calibration), gpu_runs(programs)
    uncounted = [profile.uncounted for profile in profiles]
    called = times_of_runs(known.model, runs, profiles, uncounted)
    piped = _pipelined(known.model)
    steps = times_of_runs(piped, dataclasses.replace(runs, model=piped.model), profiles, uncounted)
    more = [_on_top(profile, device, calibration) for profile in profiles]
    for name in dict.fromkeys(name for own in more for name in own):
        each = [own.get(name, (0.0, 0.0)) for own in more]
        called, steps = (_added(times, name, each) for times in (called, steps))
    found = tuple(
        _of_target(one, step, profile, device, known.stands_on)
        for one, step, profile in zip(called.predictions, steps.predictions, profiles, strict=True)
    )
    return called._replace(predictions=found)


def _pipelined(known: CalibratedModel) -> CalibratedModel:
    """Return the model of a step in a loop that does not wait; the coefficients come from the model of a call."""
    posterior, is_gpu = known.posterior, known.model.name == GPU_KERNELS.name
    spread = np.minimum(posterior.spread, PIPELINED_SPREAD) if is_gpu else posterior.spread
    posterior = dataclasses.replace(posterior, model=PIPELINED[known.model.name], spread=spread)
    return dataclasses.replace(known, posterior=posterior, domain={}, pace_log_sd=min(known.pace_log_sd, CARD_LOG_SD))


def _of_target(
    called: FunctionPrediction, step: FunctionPrediction, profile: FunctionProfile, device: TargetDevice, stands_on: str
) -> FunctionPrediction:
    """Return the prediction of a call, with values in the fields that only a prediction for a target has."""
    compiled, terms = profile.target, step.terms_ns
    assert compiled is not None  # a profile for a target has one
    device_ns = step.time_ns - terms.get("dispatch_ns", 0.0)
    memory_ns = float(profile.io.device_traffic_bytes) / device.bandwidth_bytes_per_ns
    compute_ns = product_ns(device, compiled.products)
    parts = {name: terms.get(f"{term}_ns", 0.0) for name, term in (("collectives",) * 2, ("host", "dispatch"))}
    parts["memory" if memory_ns >= compute_ns else "compute"] = device_ns - parts["collectives"]
    # The time of the products in the function as written, at the average rate of the compiled program's products.
    counts = np.asarray(profile.kernels.counts, float).sum(0)
    flop = counts[np.isin(list(OPERATIONS), PRODUCT_OPERATIONS)].sum() / compiled.devices
    made = sum(compiled.products.values())
    model_ns = flop * compute_ns / made if made else 0.0
    return called._replace(
        target=device.name,
        stands_on=stands_on,
        roofline_ns=max(memory_ns, compute_ns),
        device_ns=device_ns,
        host_ns=max(called.time_ns - device_ns, 0.0),
        pipelined_ns=step.time_ns,
        pipelined_interval_ns=(step.low_ns, step.high_ns),
        mfu=model_ns / step.time_ns if model_ns else None,
        binds=max(parts, key=parts.__getitem__),
    )


def _added(times: FunctionTimes, name: str, each: Sequence[tuple[float, float]]) -> FunctionTimes:
    """Add the term `name` to `times`; `each` has the term's time and standard deviation, in ns, for each function."""
    predictions, scores = [], []
    own_ns, sds_ns = (np.array(side, float) for side in zip(*each, strict=True))
    for one, more_ns, more_sd_ns, score in zip(times.predictions, own_ns, sds_ns, times.scores, strict=True):
        time_ns = one.time_ns + float(more_ns)
        sd_ns = math.hypot(one.time_ns * math.log(one.time_ns / one.low_ns) / COVERED_SDS, more_sd_ns)
        reach = math.exp(COVERED_SDS * sd_ns / time_ns)
        terms = dict(sorted([*one.terms_ns.items(), (name, float(more_ns))], key=lambda part: -part[1]))
        high_ns = math.inf if math.isinf(one.high_ns) else time_ns * reach
        new = {"time_ns": time_ns, "low_ns": time_ns / reach, "high_ns": high_ns}
        predictions.append(one._replace(terms_ns={n: part for n, part in terms.items() if part}, **new))
        scores.append([*(score * one.time_ns / time_ns), more_sd_ns / time_ns])
    terms_ns = np.column_stack([times.terms_ns, own_ns])
    return FunctionTimes(tuple(predictions), np.array(scores), terms_ns, times.spread)


def _on_top(profile: FunctionProfile, device: TargetDevice, calibration: Any) -> dict[str, tuple[float, float]]:
    """Return, by term, the mean and the standard deviation, in ns, of what collectives and custom kernels add."""
    compiled, found = profile.target, {}
    assert compiled is not None  # a profile for a target has one
    if compiled.custom.launches:
        moved_ns = (compiled.custom.bytes or 0) / device.bandwidth_bytes_per_ns
        said_ns = CUSTOM_SLOWNESS * max(moved_ns, product_ns(device, {"half": compiled.custom.flops}))
        found["custom_ns"] = said_ns - moved_ns, CUSTOM_LOG_SD * said_ns  # the model of kernels counts the bytes
    if compiled.exchanges:
        if not device.links:
            raise ValueError(f"target {device.name}: expected data of links between devices, got none")
        times_ns = np.array([one.times for one in compiled.exchanges], float)
        cycle_ns = 1.0 / device.clock_ghz if device.platform == "tpu" else 0.0
        each = [(one.beside_cycles * cycle_ns, one.beside_bytes, one.beside_flop) for one in compiled.exchanges]
        bandwidth = device.bandwidth_bytes_per_ns
        beside_ns = np.array(
            [max(ns, moved / bandwidth, product_ns(device, {"half": flop})) for ns, moved, flop in each]
        )
        known = estimate(*_exchanges(profile, device, calibration))
        each_ns, log_sd = (np.asarray(column, float) for column in (known.time_ns, known.log_sd()))

        def exposed_ns(sds: float) -> float:
            return float(times_ns @ np.maximum(each_ns * np.exp(sds * log_sd) - beside_ns, 0.0))

        low_ns, middle_ns, high_ns = map(exposed_ns, (-COVERED_SDS, 0.0, COVERED_SDS))
        found["collectives_ns"] = middle_ns, (high_ns - low_ns) / (2.0 * COVERED_SDS)
    return found


def _exchanges(profile: FunctionProfile, device: TargetDevice, calibration: Any) -> tuple[LatencyPosterior, Runs]:
    """Return the posterior of the collectives model, and a program's collectives as runs of this model."""
    compiled = profile.target
    assert compiled is not None  # a profile for a target has one
    kinds = [one.kind for one in compiled.exchanges]
    rows = [
        collective_inputs(one.kind, one.bytes, one.groups, device.links, compiled.coordinates)
        for one in compiled.exchanges
    ]
    runs = Runs.checked(COLLECTIVES, kinds, **{name: [row[name] for row in rows] for name in rows[0]})
    own = None
    if calibration is not None and calibration.fingerprint.get("device_kind") == device.kind:
        own = calibration.models.get(COLLECTIVES.name)
    return prior_posterior(COLLECTIVES) if own is None else own.posterior, runs


class KnownDevice(NamedTuple):
    """A model of a device's kernels, and a phrase for the model's source: a calibration, timings or a data sheet."""

    model: CalibratedModel
    stands_on: str


def _known_tpu(device: TargetDevice) -> KnownDevice:
    """Return the model of a TPU's kernels, which rests on no timings."""
    posterior = prior_posterior(TPU_KERNELS, spread=TPU_SPREAD, facts=tpu_facts(device))
    provenance = dict.fromkeys(coefficient_names(posterior.coefficients), Provenance.UNCALIBRATED)
    said = f"XLA's cycles and the data sheet of {device.title}; the host's time is a guess; nothing was measured"
    return KnownDevice(CalibratedModel(posterior, provenance, {}, {}), said)


def known_gpu(device: TargetDevice, calibration: Any = None) -> KnownDevice:
    """Return the model of a GPU's kernels, from a calibration, from shipped timings, or from the data sheet.

    Args:
        device: a GPU.
        calibration: a `Calibration`, used only if it was made on the same kind of GPU.

    Returns:
        The model of the GPU's kernels, and `stands_on`, the source of the model in words.

    Raises:
        ValueError: a needed figure of the device is missing.

    Examples:
        >>> from rlxjax.targets import target_device
        >>> known_gpu(target_device("h100")).stands_on
        'timings of one NVIDIA H100 80GB HBM3 and its host'
        >>> known_gpu(target_device("l4")).stands_on
        'the data sheet of NVIDIA L4 24 GB, and timings of 2 other GPUs'
    """
    facts, sheet = gpu_facts(device), f"the data sheet of {device.title}"
    if calibration is not None and GPU_KERNELS.name in calibration.models:
        kind = str(calibration.fingerprint.get("device_kind", ""))
        if gpu_facts_of_kind(kind) == facts:
            return KnownDevice(calibration.models[GPU_KERNELS.name].with_facts(**facts), f"a calibration of {kind}")
    shipped = population("gpu")
    section = None if shipped is None else shipped.models.get(GPU_KERNELS.name)
    if section is None or section.population is None:
        posterior = prior_posterior(GPU_KERNELS, facts=facts)
        provenance = dict.fromkeys(coefficient_names(posterior.coefficients), Provenance.UNCALIBRATED)
        return KnownDevice(CalibratedModel(posterior, provenance, {}, {}), sheet)
    others = calibrated_of(GPU_KERNELS, section)
    for machine in section.population.machines:
        kind = machine.fingerprint.device_kind
        if machine.uncertainty is not None and gpu_facts_of_kind(kind) == facts:
            said = {"coefficients": machine.coefficients, "uncertainty": machine.uncertainty}
            one = dataclasses.replace(
                others, posterior=posterior_of(GPU_KERNELS, section.model_copy(update=said)), pace_log_sd=PACE_LOG_SD
            )
            return KnownDevice(one.with_facts(**facts), f"timings of one {kind} and its host")
    said = f"{sheet}, and timings of {len(section.population.machines)} other GPUs"
    # No run of this device was measured.
    return KnownDevice(dataclasses.replace(others, domain={}, pace_log_sd=HOST_LOG_SD).with_facts(**facts), said)


def stands_on(programs: Sequence[FunctionPrediction]) -> str:
    """Return a text that names the sources of the programs' predicted times, separated by semicolons."""
    told = dict.fromkeys(f"{one.stands_on} ({one.profile.target.compiler})" for one in programs if one.profile.target)
    return "; ".join(told)
