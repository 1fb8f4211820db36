"""What any JAX function takes: on the calibrated machine, or compiled for a device that need not be there.

Of several functions one estimate says whether some are faster than others: what they share cancels.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from rlxjax._numerics import temperature_from_sd
from rlxjax._values import by_value, whole_ns
from rlxjax.fit import COVERED, Decision, LatencyEstimate, LatencyPosterior, Runs, corrected_terms_ns, estimate
from rlxjax.jaxpr import FunctionProfile
from rlxjax.models import function_runs, untimed_operations

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
        device_ns: of a target, the part of the time that its devices take.
        host_ns: the rest of it, which the host takes to call and to wait.
        pipelined_ns: a step of a loop that does not wait for its results: the longer of what devices and host take.
        pipelined_interval_ns: that holds it with 90 %.
        mfu: what products of the function as it is written take at the data sheet's peak rate, as a share of that step;
            None without products.
        binds: what takes most of that step: "compute", "memory", "collectives" or "host".
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
        names = ("target", "stands_on", "roofline_ns", "device_ns", "host_ns", "pipelined_ns", "pipelined_interval_ns")
        names += ("mfu", "binds")
        return found | {name: getattr(self, name) for name in names} if self.target else found

    def __str__(self) -> str:
        text = f"{whole_ns(self.time_ns)} ns (90 %: {whole_ns(self.low_ns)} to {whole_ns(self.high_ns)})"
        if self.uncounted:
            text = f"at least {whole_ns(self.time_ns)} ns: {'; '.join(self.uncounted)}"
        elif not self.in_domain and not self.target:
            text += ", extrapolated" + (f": no machine timed {', '.join(self.untimed)}" if self.untimed else "")
        lines = [text + (f" on {self.target}, by {self.stands_on}" if self.target else "")]
        if self.device_ns is not None and self.host_ns is not None:
            lines.append(f"device {whole_ns(self.device_ns)} ns, host {whole_ns(self.host_ns)} ns")
        if self.pipelined_ns is not None and self.pipelined_interval_ns is not None:
            low, high = map(whole_ns, self.pipelined_interval_ns)
            peak = "" if self.mfu is None else f", {100 * self.mfu:.3g} % of the peak rate of products"
            step = f"{whole_ns(self.pipelined_ns)} ns a step (90 %: {low} to {high})"
            step = f"at least {whole_ns(self.pipelined_ns)} ns a step" if self.uncounted else step
            lines.append(f"in a loop that does not wait: {step}, bound by {self.binds}{peak}")
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
    found = times_of_runs(calibrated, function_runs(profiles), profiles, [profile.uncounted for profile in profiles])
    untimed = map(untimed_operations, profiles)
    pairs = zip(found.predictions, untimed, strict=True)
    return found._replace(
        predictions=tuple(one._replace(untimed=names, in_domain=one.in_domain and not names) for one, names in pairs)
    )


def times_of_runs(
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
