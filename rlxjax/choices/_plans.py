"""The plans that the groups of some stages allow, and which of two is ahead."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from rlxjax._numerics import temperature_from_sd
from rlxjax.calibration import FunctionPrediction, FunctionTimes
from rlxjax.fusion import StagePlan, plan_stages
from rlxjax.jaxpr import FunctionProfile
from rlxjax.targets import DoesNotFitError, TargetDevice

from ._advice import Grouping, grouping_name
from ._stages import Span, Stage
from ._target import opposed_ns

#: The most groupings that are looked at: all of those of seven stages.
MOST_GROUPINGS = 64


class Plans:
    """Groups of stages, those that were profiled all predicted by one estimate, and the plans that they allow.

    Args:
        found: what is predicted of the groups that have a profile, in their order.
        groups: all of them.
        profiles: of those that there is a program of.
        refused: those that the compiler of a device refuses for their memory.
        device: that they are compiled for; None of this machine.
        limit: bytes of the device's memory.
        min_gain_ns: what is asked.
        price: of a byte that lives at the peak.
        also: plans that are looked at whatever they take.
    """

    def __init__(
        self,
        found: FunctionTimes,
        groups: Mapping[Span, Stage],
        profiles: Mapping[Span, FunctionProfile],
        refused: Mapping[Span, DoesNotFitError],
        device: TargetDevice | None,
        limit: float,
        min_gain_ns: float,
        price: float,
        also: Sequence[StagePlan] = (),
    ) -> None:
        self.found, self.device, self.min_gain_ns, self.price = found, device, min_gain_ns, price
        self.groups = groups
        self.target = None if device is None else device.name
        self.place = {span: place for place, span in enumerate(profiles)}
        count = 1 + max(last for _, last in groups)
        self.names = [groups[number, number].name for number in range(count)]
        leaves = jax.tree.leaves(groups[0, count - 1].args)
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if hasattr(leaf, "dtype"))
        times, peaks = np.full((count, count), np.inf), np.zeros((count, count))
        for span, prediction in zip(self.place, found.predictions, strict=True):
            times[span] = prediction.time_ns
            peaks[span] = prediction.profile.peak_bytes + (held if span[0] else 0)
        is_stage, is_all = np.eye(count, dtype=bool), np.zeros(times.shape, bool)
        is_all[0, -1] = True
        for span, error in refused.items():
            peaks[span] = error.needed_bytes or np.inf
        self.apart = plan_stages(np.where(is_stage, times, np.inf), peaks)[0]
        one_program = plan_stages(np.where(is_all, times, np.inf), peaks)
        not_made = StagePlan((tuple(range(count)),), np.inf, float(peaks[0, -1]))
        self.together = one_program[0] if one_program else not_made
        self.fits = bool(one_program) and self.together.peak_bytes <= limit
        times[(peaks > limit) & ~is_stage] = np.inf
        plans = plan_stages(times, peaks, peak_price_ns_per_byte=price, count=MOST_GROUPINGS)
        self.plans = [*plans]
        for plan in [*([self.together] if self.fits else []), self.apart, *also]:
            if all(plan.groups != own.groups for own in self.plans):
                self.plans.append(plan)

    def predictions(self, plan: StagePlan) -> list[FunctionPrediction]:
        """Return what is predicted of each program of a plan."""
        return [self.found.predictions[place] for place in self.places(plan)]

    def plan(self, name: str) -> StagePlan:
        """Return the plan of a name."""
        return next(plan for plan in self.plans if self.name(plan) == name)

    def name(self, plan: StagePlan) -> str:
        """Return a plan's name, as that of its grouping."""
        return grouping_name(self._named(plan))

    def ahead(self, plan: StagePlan, other: StagePlan, min_gain_ns: float = 0.0) -> tuple[float, float, bool]:
        """Return what a plan saves in ns, the probability that this is more than asked, and whether both were measured.

        A gain in ns has the price of the bytes at the peak in it.
        """
        decided = self.found.decision(self.places(plan), self.places(other))
        margin_ns, sd_ns = float(decided.margin_ns), float(decided.margin_sd_ns)
        if self.device is not None:  # what bytes say against an estimate is a doubt
            moved = [sum(one.profile.fused_traffic_bytes for one in self.predictions(own)) for own in (other, plan)]
            sd_ns = math.hypot(sd_ns, opposed_ns(self.device, margin_ns, moved[0] - moved[1]))
        margin_ns += self.price * (other.peak_bytes - plan.peak_bytes)
        odds = (margin_ns - min_gain_ns) / temperature_from_sd(sd_ns)
        return margin_ns, 0.5 + 0.5 * math.tanh(0.5 * odds), bool(decided.in_domain)

    def grouping(self, plan: StagePlan) -> Grouping:
        """Return a plan in the words of the answer."""
        each = self.predictions(plan)
        interval = (sum(one.low_ns for one in each), sum(one.high_ns for one in each))
        names = self._named(plan)
        probability = None if plan == self.apart else self.ahead(plan, self.apart, self.min_gain_ns)[1]
        return Grouping(names, sum(one.time_ns for one in each), interval, int(plan.peak_bytes), probability)

    def _named(self, plan: StagePlan) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(self.names[number] for number in group) for group in plan.groups)

    def places(self, plan: StagePlan) -> list[int]:
        """Return where the programs of a plan are among the predictions."""
        return [self.place[group[0], group[-1]] for group in plan.groups]
