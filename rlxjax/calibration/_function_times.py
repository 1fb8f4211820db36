"""What any JAX function takes: on the calibrated machine, or compiled for a device that need not be there.

Of several functions one estimate says whether some are faster than others: what they share cancels.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from rlxjax._numerics import temperature_from_sd
from rlxjax._typing import Provenance
from rlxjax._values import by_value, whole_ns
from rlxjax.fit import (
    COVERED,
    COVERED_SDS,
    Decision,
    LatencyEstimate,
    LatencyPosterior,
    LatencyPrior,
    Runs,
    coefficient_names,
    corrected_terms_ns,
    estimate,
    prior_posterior,
)
from rlxjax.jaxpr import FunctionProfile, TripCounts, profile_function
from rlxjax.models import (
    FUNCTIONS,
    GPU_KERNELS,
    function_runs,
    gpu_facts,
    gpu_facts_of_kind,
    gpu_runs,
    untimed_operations,
)
from rlxjax.targets import TargetDevice, target_device

from ._artefact import population
from ._conversion import calibrated_of, coefficients_of
from ._predict import CalibratedModel

#: Relative standard deviation of what one program takes beyond what its terms explain, where another does the same
#: work: the compiler's choices, and the noise of a timing. The log loss of what `decision` says of pairs of stages that
#: were timed on a CPU falls fast up to this value, and little beyond: `benchmarks.advice_truth` prints it.
OWN_SPREAD = 0.15
#: The least relative standard deviation of the difference that a term makes between two programs: it is what the
#: compiler was taken to do, which it may not. By the pairs of the tuning half, of which it leaves none surely wrong.
TERM_SPREAD = 0.4
#: The first where the profiles are of compiled programs, which tell the compiler's choices.
COMPILED_SPREAD = 0.05
#: Standard deviations of the logarithm of a time: of hosts with one kind of card, of which two differ by 0.27; and of
#: a TPU's time by what its compiler estimates, which nobody timed here.
HOST_LOG_SD, ESTIMATE_LOG_SD = 0.3, 0.5


@by_value
class FunctionPrediction(NamedTuple):
    """What a jitted function takes when it is called with arrays of the device.

    Attributes:
        time_ns: the prediction.
        low_ns: the lower end of the interval that holds the time with 90 %.
        high_ns: its upper end.
        terms_ns: the parts of the prediction by name, largest first.
        profile: what the function computes and moves.
        in_domain: whether every count lies within what was measured; if not, the prediction is extrapolated.
        uncounted: what is done and not counted, a sentence each. The time is then the least that it may be, the upper
            end infinite, and nothing in the domain.
        target: the device that it was compiled for, where that is another one.
        stands_on: where the figures for a target come from: timings of one, a data sheet, the compiler's estimates.
        roofline_ns: what a target's data sheet says the work takes at least, where the prediction is the compiler's.
        untimed: operations that no machine timed, which are predicted by their class, and put it out of the domain.
    """

    time_ns: float
    low_ns: float
    high_ns: float
    terms_ns: Mapping[str, float]
    profile: FunctionProfile
    in_domain: bool
    uncounted: tuple[str, ...] = ()
    target: str = ""
    stands_on: str = ""
    roofline_ns: float | None = None
    untimed: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return what a program reads: counts, times in ns, shares of 1."""
        return self.profile.as_dict() | self.time_as_dict()

    def time_as_dict(self) -> dict[str, Any]:
        """Return what a program reads of the time alone, in ns, and for a target what that stands on."""
        found = {
            "uncounted": list(self.uncounted),
            "predicted_ns": self.time_ns,
            "interval_ns": [self.low_ns, self.high_ns],
            "terms_ns": dict(self.terms_ns),
            "in_domain": self.in_domain,
            "untimed": list(self.untimed),
        }
        of_target = {"target": self.target, "stands_on": self.stands_on, "roofline_ns": self.roofline_ns}
        return found | of_target if self.target else found

    def __str__(self) -> str:
        text = f"{whole_ns(self.time_ns)} ns (90 %: {whole_ns(self.low_ns)} to {whole_ns(self.high_ns)})"
        if self.uncounted:
            text = f"at least {whole_ns(self.time_ns)} ns: {'; '.join(self.uncounted)}"
        elif not self.in_domain and not self.target:
            text += ", extrapolated" + (f": no machine timed {', '.join(self.untimed)}" if self.untimed else "")
        lines = [text + (f" on {self.target}, by {self.stands_on}" if self.target else "")]
        if self.roofline_ns is not None:
            lines.append(f"roofline by data sheet: {whole_ns(self.roofline_ns)} ns")
        shown = {name: part for name, part in self.terms_ns.items() if part >= 1e-3 * self.time_ns}
        for name, part in shown.items():
            lines.append(f"{name.removesuffix('_ns').replace('_', ' '):16} {whole_ns(part):>12} ns")
        return "\n".join(lines)


@by_value
class FunctionTimes(NamedTuple):
    """What functions take, by one estimate of all of them: which of their sums is the smaller one can be asked.

    Attributes:
        predictions: of each function.
        scores: of each, what its time's logarithm owes to the unknowns, `[functions, unknowns]`.
        terms_ns: parts of each time, in one order, `[functions, terms]`.
        spread: relative standard deviation of what is a function's own, `[functions]`.
    """

    predictions: tuple[FunctionPrediction, ...]
    scores: np.ndarray
    terms_ns: np.ndarray
    spread: np.ndarray

    def decision(self, fused: Sequence[int], kept: Sequence[int], own_spread: float | None = None) -> Decision:
        """Return whether some functions take less time one after another than others, and how surely.

        What both do alike cancels, coefficients as well as what the terms miss: the doubt is that of the difference
        of each term, and a small share of the smaller time. Functions that are on both sides cancel whole. Where
        the counts of one are not whole, the doubt has no end.

        Args:
            fused: places of the functions to run if that is faster.
            kept: places of those to run otherwise.
            own_spread: relative standard deviation of what is a program's own, whatever its terms; less is expected
                of compiled programs unless given.
        """
        times_ns = np.array([found.time_ns for found in self.predictions])
        fused_ns, kept_ns = (float(sum(times_ns[place] for place in side)) for side in (fused, kept))
        change = np.zeros(len(times_ns))
        np.add.at(change, list(kept), 1.0)
        np.subtract.at(change, list(fused), 1.0)
        least_ns = min(float(np.sum(times_ns * np.maximum(side, 0.0))) for side in (change, -change))
        shared, differences = (change * times_ns) @ self.scores, change @ self.terms_ns
        asked = [self.predictions[place] for place in (*fused, *kept)]
        is_compiled = all(own.profile.level == "compiled" for own in asked)
        if own_spread is None:
            own_spread = COMPILED_SPREAD if is_compiled else OWN_SPREAD
        least_spread = 0.0 if is_compiled else TERM_SPREAD
        term_spread = max([least_spread, *self.spread[[*fused, *kept]].tolist()])
        own = term_spread**2 * np.sum(differences**2) + (own_spread * least_ns) ** 2
        is_whole = not any(own.uncounted for own in asked)
        sd_ns = float(np.sqrt(np.sum(shared**2) + own)) if is_whole else float("inf")
        margin_ns = kept_ns - fused_ns
        # What stands against itself has neither a margin nor a doubt.
        log_odds = margin_ns / temperature_from_sd(sd_ns) if sd_ns else 0.0
        probability, inside = 0.5 + 0.5 * math.tanh(0.5 * log_odds), all(own.in_domain for own in asked)
        return Decision(fused_ns, kept_ns, margin_ns, sd_ns, probability, inside)  # pyright: ignore


def predict_profiles(calibrated: CalibratedModel, profiles: Sequence[FunctionProfile]) -> FunctionTimes:
    """Return what functions with these profiles take, all by one estimate.

    Args:
        calibrated: the functions model of a calibration, `calibration.of("functions")`.
        profiles: of the functions.
    """
    found = _times(calibrated, function_runs(profiles), profiles, [profile.uncounted for profile in profiles])
    untimed = map(untimed_operations, profiles)
    pairs = zip(found.predictions, untimed, strict=True)
    return found._replace(
        predictions=tuple(one._replace(untimed=names, in_domain=one.in_domain and not names) for one, names in pairs)
    )


def _times(
    calibrated: CalibratedModel, runs: Runs, profiles: Sequence[FunctionProfile], uncounted: Sequence[tuple[str, ...]]
) -> FunctionTimes:
    """Return what runs of a model of functions take, all by one estimate."""
    count = len(profiles)
    # One program estimates up to four times as many functions as another.
    rows = np.minimum(np.arange(4 ** math.ceil(math.log(count, 4))), count - 1)
    filled = jax.tree.map(lambda column: np.asarray(column)[rows], runs)
    with jax.ensure_compile_time_eval():
        answers = jax.device_get(_estimates_and_terms(calibrated.on_device(), filled))
    found, named = jax.tree.map(lambda column: column[:count], answers)
    inside = np.broadcast_to(calibrated.in_domain(**runs.inputs) if calibrated.domain else False, runs.shape)
    times_ns, terms_ns = np.asarray(found.time_ns, np.float64), np.stack([*named.values()], -1, dtype=np.float64)
    reach = np.exp(NormalDist().inv_cdf((1.0 + COVERED) / 2.0) * np.hypot(found.log_sd(), calibrated.pace_log_sd))
    predictions = []
    for place, (profile, more) in enumerate(zip(profiles, uncounted, strict=True)):
        time_ns, factor = float(times_ns[place]), float(reach[place])
        parts = sorted(zip(named, terms_ns[place].tolist(), strict=True), key=lambda part: -part[1])
        terms = {name: part for name, part in parts if part}
        high_ns, is_inside = (math.inf, False) if more else (time_ns * factor, bool(inside[place]))
        predictions.append(FunctionPrediction(time_ns, time_ns / factor, high_ns, terms, profile, is_inside, more))
    # What shared weights leave unsure is much the same for programs that are compared.
    posterior = calibrated.posterior
    spread = np.asarray(posterior.spread)[runs.variant] * np.asarray(posterior.model.scatter(runs, posterior.facts))
    return FunctionTimes(tuple(predictions), np.asarray(found.scores, np.float64), terms_ns, spread)


@jax.jit
def _estimates_and_terms(posterior: LatencyPosterior, runs: Runs) -> tuple[LatencyEstimate, Mapping[str, Array]]:
    return estimate(posterior, runs), corrected_terms_ns(posterior, runs)


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
        return FunctionTimes(found, np.full((len(found), 1), ESTIMATE_LOG_SD), terms_ns, np.zeros(len(found)))
    programs = [profile.target.gpu for profile in profiles if profile.target and profile.target.gpu]
    if len(programs) != len(profiles) or any(own.target.devices > 1 for own in profiles if own.target):
        raise ValueError(f"target {device.name}: expected a function for one device, got one for several")
    calibrated, stands_on = known_gpu(device, calibration)
    times = _times(calibrated, gpu_runs(programs), profiles, more)
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
        if machine.coefficients and gpu_facts_of_kind(kind) == facts:
            prior = LatencyPrior(*coefficients_of(GPU_KERNELS, machine.coefficients))
            own = prior_posterior(GPU_KERNELS, prior, facts=others.posterior.facts)
            own = dataclasses.replace(own, spread=others.posterior.spread)
            one = dataclasses.replace(others, posterior=own, pace_log_sd=HOST_LOG_SD)
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
