"""The predicted time of any JAX function, on the calibrated machine or on a target device.

Several functions are predicted in one estimate, so that an error common to the functions cancels in comparisons.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from rlxjax._chunks import on_cpu
from rlxjax._values import by_value
from rlxjax.fit import (
    COVERED,
    Decision,
    Estimate,
    LatencyPosterior,
    Runs,
    corrected_terms_ns,
    estimate,
    faster_probability,
)
from rlxjax.jaxpr import FunctionProfile
from rlxjax.models import function_runs, untimed_operations
from rlxjax.units import interval_text, time_text

from ._predict import CalibratedModel

#: Relative standard deviation of a program's own residual: the error that another program of equal work does not share.
#: Its causes are the compiler's choices and timing noise. `benchmarks.advice_truth` prints the log loss of `decision`
#: on timed pairs of stages. If this value is raised, the loss falls fast up to the value here, and little beyond.
OWN_SPREAD = 0.15
#: Smallest relative standard deviation of a term's difference between two programs; the compiler may fuse differently
#: than the profile assumes. With this value, no sure decision is wrong on the half of the pairs used for tuning.
TERM_SPREAD = 0.4
#: The value that replaces `OWN_SPREAD` for compiled programs, since their profiles show the compiler's choices.
COMPILED_SPREAD = 0.05


@by_value
class FunctionPrediction(NamedTuple):
    """The predicted time of one call of a jitted function whose arguments are arrays on the device.

    Attributes:
        time_ns: the predicted time.
        low_ns: the lower end of the time's 90 % interval.
        high_ns: the upper end of the time's 90 % interval.
        terms_ns: the parts of the predicted time by name, the largest part first.
        profile: the profile of the function, which counts the function's work.
        in_domain: whether every count lies within the measured range; if not, the prediction is an extrapolation.
        uncounted: sentences about work that the profile does not count. If there is uncounted work, `time_ns` is a
            lower bound, `high_ns` is infinite and `in_domain` is false.
        target: the name of the target device; empty if the prediction is for the calibrated machine.
        stands_on: the source of a target's figures: timings of the same kind of device, a data sheet, or the compiler.
        roofline_ns: the shortest time in which a target could do the work, by the target's data sheet.
        untimed: names of operations that no machine has timed. Each operation is predicted with the time of its class
            of operations, and `in_domain` is false.
        device_ns: the part of `time_ns` in which a target's devices work.
        host_ns: the rest of `time_ns`, in which the host dispatches the call and waits.
        pipelined_ns: the predicted time of a step in a loop that does not wait for results. It is the longer of two
            times: the devices' time and the host's time.
        pipelined_interval_ns: the 90 % interval of `pipelined_ns`.
        mfu: model FLOP utilization: the share of `pipelined_ns` that the function's matrix products and convolutions
            would take at the data sheet's peak rate; None if the function has neither.
        binds: the name of the largest part of `pipelined_ns`: "compute", "memory", "collectives" or "host".
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
    device_ns: float | None = None
    host_ns: float | None = None
    pipelined_ns: float | None = None
    pipelined_interval_ns: tuple[float, float] | None = None
    mfu: float | None = None
    binds: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the prediction and the profile as a dict for JSON: counts, times in ns, and shares from 0 to 1."""
        return self.profile.as_dict() | self.time_as_dict()

    def time_as_dict(self) -> dict[str, Any]:
        """Return the prediction without the profile, as a dict for JSON with times in ns."""
        found = {
            "uncounted": list(self.uncounted),
            "predicted_ns": self.time_ns,
            "interval_ns": [self.low_ns, self.high_ns],
            "terms_ns": dict(self.terms_ns),
            "in_domain": self.in_domain,
            "untimed": list(self.untimed),
        }
        names = ("target", "stands_on", "roofline_ns", "device_ns", "host_ns", "pipelined_ns", "pipelined_interval_ns")
        names += ("mfu", "binds")
        return found | {name: getattr(self, name) for name in names} if self.target else found

    def __str__(self) -> str:
        def text_of(time_ns: float, interval_ns: tuple[float, float]) -> str:
            return f"at least {time_text(time_ns)}" if self.uncounted else interval_text(time_ns, *interval_ns)

        text = f"predicted: {text_of(self.time_ns, (self.low_ns, self.high_ns))} a call"
        if self.target:
            text += f" on {self.target}, based on {self.stands_on}"
        text += f": {'; '.join(self.uncounted)}" if self.uncounted else "; in brackets the 90 % interval"
        if not (self.uncounted or self.in_domain or self.target):
            text += "; extrapolated" + (f": no machine timed {', '.join(self.untimed)}" if self.untimed else "")
        lines = [text]
        if self.device_ns is not None and self.host_ns is not None:
            lines.append(f"device {time_text(self.device_ns)}, host {time_text(self.host_ns)}")
        if self.pipelined_ns is not None and self.pipelined_interval_ns is not None:
            peak = "" if self.mfu is None else f", {100 * self.mfu:.3g} % of the peak rate of products"
            step = f"{text_of(self.pipelined_ns, self.pipelined_interval_ns)} a step"
            lines.append(f"in a loop that does not wait: {step}, bound by {self.binds}{peak}")
        if self.roofline_ns is not None:
            lines.append(f"roofline by data sheet: {time_text(self.roofline_ns)}")
        shown = {name: part for name, part in self.terms_ns.items() if part >= 1e-3 * self.time_ns}
        for name, part in shown.items():
            lines.append(f"  {name.removesuffix('_ns').replace('_', ' '):14} {time_text(part):>8}")
        return "\n".join(lines)


@by_value
class FunctionTimes(NamedTuple):
    """The predicted times of several functions from one estimate, so that sums of the times can be compared.

    Attributes:
        predictions: the prediction of each function.
        scores: `[functions, unknowns]`, the change of each time's log if an unknown grows by one standard deviation.
        terms_ns: the parts of each time, `[functions, terms]`, in the same order for all functions.
        spread: relative standard deviation of each function's own residual, `[functions]`.
    """

    predictions: tuple[FunctionPrediction, ...]
    scores: np.ndarray
    terms_ns: np.ndarray
    spread: np.ndarray

    def decision(self, fused: Sequence[int], kept: Sequence[int], own_spread: float | None = None) -> Decision:
        """Compare the total times of two sets of functions, and return the probability that the first set is faster.

        The uncertainty of the difference has three parts: the model's uncertainty, which cancels for equal work; a
        share of each term's difference; and a small share of the smaller total time. A function or a sort that is in
        both sets adds none. If a function has uncounted work, the uncertainty is infinite.

        Args:
            fused: indices of the functions in the first set.
            kept: indices of the functions in the second set.
            own_spread: relative standard deviation of a program's own residual. The default is smaller if all profiles
                are of compiled programs.
        """
        times_ns = np.array([found.time_ns for found in self.predictions])
        fused_ns, kept_ns = (float(sum(times_ns[place] for place in side)) for side in (fused, kept))
        change = np.zeros(len(times_ns))
        np.add.at(change, list(kept), 1.0)
        np.subtract.at(change, list(fused), 1.0)
        # No compiler fuses other work into a sort, so the sorts that both sets need are no difference.
        sorts_ns = np.array([found.terms_ns.get("sort_ns", 0.0) for found in self.predictions])
        sides = np.maximum([change, -change], 0.0)
        least_ns = float(np.min(sides @ times_ns) - np.min(sides @ sorts_ns))
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
        probability, inside = float(faster_probability(margin_ns, sd_ns)), all(own.in_domain for own in asked)
        return Decision(fused_ns, kept_ns, margin_ns, sd_ns, probability, inside)  # pyright: ignore


def predict_profiles(calibrated: CalibratedModel, profiles: Sequence[FunctionProfile]) -> FunctionTimes:
    """Predict the times of functions from their profiles, in one estimate.

    Args:
        calibrated: the functions model of a calibration, `calibration.of("functions")`.
        profiles: the profiles of the functions.
    """
    found = times_of_runs(calibrated, function_runs(profiles), profiles, [profile.uncounted for profile in profiles])
    untimed = map(untimed_operations, profiles)
    pairs = zip(found.predictions, untimed, strict=True)
    return found._replace(
        predictions=tuple(one._replace(untimed=names, in_domain=one.in_domain and not names) for one, names in pairs)
    )


def times_of_runs(
    calibrated: CalibratedModel, runs: Runs, profiles: Sequence[FunctionProfile], uncounted: Sequence[tuple[str, ...]]
) -> FunctionTimes:
    """Predict, in one estimate, the times of functions that are given as runs of a functions model."""
    count = len(profiles)
    # The number of functions is padded to a power of four, so that few programs are compiled.
    rows = np.minimum(np.arange(4 ** math.ceil(math.log(count, 4))), count - 1)
    filled = jax.tree.map(lambda column: np.asarray(column)[rows], runs)
    with on_cpu(), jax.ensure_compile_time_eval():
        answers = jax.device_get(_estimates_and_terms(calibrated.posterior, filled))
    found, named = jax.tree.map(lambda column: column[:count], answers)
    inside = np.broadcast_to(calibrated.covers(runs) if calibrated.domain else False, runs.shape)
    times_ns, terms_ns = np.asarray(found.time_ns, np.float64), np.stack([*named.values()], -1, dtype=np.float64)
    reach = np.exp(NormalDist().inv_cdf((1.0 + COVERED) / 2.0) * np.hypot(found.log_sd(), calibrated.pace_log_sd))
    predictions = []
    for place, (profile, more) in enumerate(zip(profiles, uncounted, strict=True)):
        time_ns, factor = float(times_ns[place]), float(reach[place])
        parts = sorted(zip(named, terms_ns[place].tolist(), strict=True), key=lambda part: -part[1])
        terms = {name: part for name, part in parts if part}
        high_ns, is_inside = (math.inf, False) if more else (time_ns * factor, bool(inside[place]))
        predictions.append(FunctionPrediction(time_ns, time_ns / factor, high_ns, terms, profile, is_inside, more))
    # The uncertainty of the correction's shared weights is nearly equal for compared programs, and is left out.
    posterior = calibrated.posterior
    spread = np.asarray(posterior.spread)[runs.variant] * np.asarray(posterior.model.scatter(runs, posterior.facts))
    return FunctionTimes(tuple(predictions), np.asarray(found.scores, np.float64), terms_ns, spread)


@jax.jit
def _estimates_and_terms(posterior: LatencyPosterior, runs: Runs) -> tuple[Estimate, Mapping[str, Array]]:
    return estimate(posterior, runs), corrected_terms_ns(posterior, runs)
