"""What a calibration says of any JAX function: its time with an interval, and whether two functions should be one."""

from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._numerics import temperature_from_sd
from rlxjax._values import by_value, whole_ns
from rlxjax.fit import Decision, LatencyEstimate, corrected_terms_ns, estimate
from rlxjax.jaxpr import FunctionProfile, TripCounts, profile_function
from rlxjax.models import FUNCTIONS, function_runs

from ._calibrated import CalibratedModel

#: The probability that an interval holds.
LEVEL = 0.9
#: Relative standard deviation of what one program takes beyond what its terms explain, where another does the same
#: work: the compiler's choices, and the noise of a timing.
OWN_SPREAD = 0.05


class HasModels(Protocol):
    """A calibration, by what is asked of it here."""

    @property
    def models(self) -> Mapping[str, CalibratedModel]:
        """What timings say of each latency model."""
        ...


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
    """

    time_ns: float
    low_ns: float
    high_ns: float
    terms_ns: Mapping[str, float]
    profile: FunctionProfile
    in_domain: bool
    uncounted: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{whole_ns(self.time_ns)} ns (90 %: {whole_ns(self.low_ns)} to {whole_ns(self.high_ns)})"]
        if self.uncounted:
            lines = [f"at least {whole_ns(self.time_ns)} ns: {'; '.join(self.uncounted)}"]
        elif not self.in_domain:
            lines[0] += ", extrapolated"
        lines += [
            f"{name.removesuffix('_ns').replace('_', ' '):16} {whole_ns(time_ns):>12} ns"
            for name, time_ns in self.terms_ns.items()
            if time_ns >= 1e-3 * self.time_ns
        ]
        return "\n".join(lines)


def predict_function(
    calibration: HasModels,
    fn: Callable[..., Any],
    *args: Any,
    trip_counts: TripCounts | None = None,
    **kwargs: Any,
) -> FunctionPrediction:
    """Return what a jitted function takes on the calibrated machine; nothing is compiled or run.

    Args:
        calibration: that holds the functions model.
        fn: the function.
        *args: arrays or `jax.ShapeDtypeStruct`s, or trees of them.
        trip_counts: of the loops whose length depends on data.
        **kwargs: of the function.

    Raises:
        ValueError: as of `profile_function`, or a calibration without the functions model.
    """
    return predict_profile(calibration, profile_function(fn, *args, trip_counts=trip_counts, **kwargs))


def predict_profile(calibration: HasModels, profile: FunctionProfile) -> FunctionPrediction:
    """Return what a function with this profile takes.

    Args:
        calibration: that holds the functions model.
        profile: of the function.

    Raises:
        ValueError: a calibration without the functions model.
    """
    calibrated = functions_of(calibration)
    runs = function_runs([profile])
    with jax.ensure_compile_time_eval():
        found = estimate(calibrated.posterior, runs)
        terms = corrected_terms_ns(calibrated.posterior, runs)
        time_ns, log_sd = float(found.time_ns[0]), float(found.log_sd()[0])
        inside = calibrated.in_domain(**{name: float(value[0]) for name, value in runs.inputs.items()})
    more = profile.uncounted
    reach = float(np.exp(NormalDist().inv_cdf((1.0 + LEVEL) / 2.0) * np.hypot(log_sd, calibrated.pace_log_sd)))
    parts = {name: float(part[0]) for name, part in terms.items() if float(part[0])}
    parts = dict(sorted(parts.items(), key=lambda part: -part[1]))
    high_ns = float("inf") if more else time_ns * reach
    return FunctionPrediction(time_ns, time_ns / reach, high_ns, parts, profile, bool(inside) and not more, more)


def compare_functions(calibration: HasModels, together: FunctionProfile, apart: Sequence[FunctionProfile]) -> Decision:
    """Return whether one function is faster than several that do its work one after another, and how surely.

    What both do alike cancels, coefficients as well as what the terms miss: the doubt is that of the difference of
    each term, and a small share of the smaller time. Where the counts of one are not whole, it has no end.

    Args:
        calibration: that holds the functions model.
        together: profile of the one function.
        apart: profiles of the several.

    Raises:
        ValueError: a calibration without the functions model, or no function apart.
    """
    if not apart:
        raise ValueError("apart: expected one profile at least, got none")
    calibrated = functions_of(calibration)
    runs = function_runs([together, *apart])
    with jax.ensure_compile_time_eval():
        found: LatencyEstimate = estimate(calibrated.posterior, runs)
        terms = jnp.stack([jnp.asarray(part) for part in corrected_terms_ns(calibrated.posterior, runs).values()])
        times_ns, scores = jnp.asarray(found.time_ns), jnp.asarray(found.scores)
        fused_ns, kept_ns = times_ns[0], jnp.sum(times_ns[1:])
        shared = jnp.sum(times_ns[1:, None] * scores[1:], 0) - times_ns[0] * scores[0]
        differences = jnp.sum(terms[:, 1:], 1) - terms[:, 0]
        spread = found.spread[0]
        own = spread**2 * jnp.sum(differences**2) + (OWN_SPREAD * jnp.minimum(fused_ns, kept_ns)) ** 2
        is_whole = not any(profile.uncounted for profile in (together, *apart))
        sd_ns = jnp.where(is_whole, jnp.sqrt(jnp.sum(shared**2) + own), jnp.inf)
        margin_ns = kept_ns - fused_ns
        probability = jax.nn.sigmoid(margin_ns / temperature_from_sd(sd_ns))
        inside = [
            calibrated.in_domain(**{name: float(value[i]) for name, value in runs.inputs.items()})
            for i in range(1 + len(apart))
        ]
    return Decision(fused_ns, kept_ns, margin_ns, sd_ns, probability, is_whole and all(map(bool, inside)))


def functions_of(calibration: HasModels) -> CalibratedModel:
    """Return what a calibration says of functions.

    Raises:
        ValueError: it says nothing: that model was not timed.
    """
    if FUNCTIONS.name not in calibration.models:
        raise ValueError(
            "calibration: expected one with the functions model, got "
            f"{', '.join(calibration.models) or 'none'}; measure it with `rlxjax calibrate --only functions`"
        )
    return calibration.models[FUNCTIONS.name]
