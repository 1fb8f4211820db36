"""What `advise` answers: a verdict, the reason, the figures behind it, and the change as code."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rlxjax._values import by_value, counted, whole_ns

from ._way import Record, Way

#: The fastest groupings that are shown, and the names of those that always are.
MOST_SHOWN, ENDS = 8, ("apart", "together")
#: By what a verdict is, in words.
DECIDED = {
    "model": "the model",
    "measured": "measuring",
    "remembered": "an earlier measurement, which is remembered",
    "pinned": "a person, who pinned it",
}


class StageCost(NamedTuple):
    """One stage, jitted by itself.

    Attributes:
        name: of its function.
        time_ns: predicted.
        limit: the largest part of that time: "call", "elementwise", "matmul", ...
        peak_bytes: that live at once while it runs.
    """

    name: str
    time_ns: float
    limit: str
    peak_bytes: int


@by_value
@dataclasses.dataclass(frozen=True)
class Grouping(Way):
    """One way to group stages into programs; `name` is the stages, joined where they run as one program.

    Attributes:
        groups: names of the stages of each program.
        peak_bytes: that live at once while the largest program runs, arguments of the first one held.
        probability: that it saves more than what is asked; None of the stages apart.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    peak_bytes: int = 0
    probability: float | None = None


def grouping_name(groups: tuple[tuple[str, ...], ...]) -> str:
    """Return the stages of each program, joined where they run as one."""
    if len(groups) == 1:
        return "together"
    return "apart" if max(map(len, groups)) == 1 else " | ".join(map("+".join, groups))


class Measured(NamedTuple):
    """What the forms took when they were timed; None of one that the model rules out, which is not.

    Attributes:
        apart_ns: the stages one after another: the lower quartile over the rounds.
        together_ns: grouped as `groups` of the advice says.
        compile_s: seconds that compiling what is grouped took; None where it was not compiled in this call.
        rounds: in which the forms were timed by turns.
        one_program_ns: all stages as one program, where that is another grouping.
    """

    apart_ns: float | None
    together_ns: float | None
    compile_s: float | None
    rounds: int
    one_program_ns: float | None = None


@by_value
@dataclasses.dataclass(frozen=True)
class Advice(Record):
    """Whether stages should run as fewer programs, and which; figures are per call of all of them.

    What is compared with the stages apart is the *grouping* of `groups`: the one program of all stages, or of three
    and more stages the one that is advised, else the fastest. A prediction is by the calibration, and by what was
    measured here of others where the model decides.

    Attributes:
        verdict: "fuse": as one program. "group": as the programs of `groups`. "keep": apart. "undecided": no
            grouping surely saves what is asked, and not all of them surely fail to, by the model, which decides
            alone. "cannot model": nothing is predicted, and nothing measured.
        reason_code: stable, for programs: `saves_launches`, `saves_traffic`; `recompute`, `loses_tiling`, `slower`,
            `no_gain`, `peak_memory`, `already_one_program`; `too_close`; `uncosted`, `unknown_loop`, `not_calibrated`;
            of what is not decided by the model `measured_faster`, `measured_slower`, `no_gain`, `tie`, `pinned`.
        reason: the same in a sentence.
        probability: that the grouping saves more than `min_gain_ns`, by the model; None where nothing can be said.
        apart_ns: predicted time of the stages, jitted one by one; None likewise.
        apart_interval_ns: that holds it with 90 %.
        together_ns: predicted time of the grouping.
        together_interval_ns: that holds it with 90 %.
        apart_terms_ns: the parts of `apart_ns` by name, the largest first.
        together_terms_ns: those of `together_ns`.
        min_gain_ns: what has to be saved.
        stages: cost of each stage.
        groups: names of the stages of each program of the grouping.
        groupings: the fastest ones, the best first, and always the stages apart and together.
        saved_calls: programs that are called less.
        saved_launches: kernels that the grouping has less.
        saved_sync_points: waits for the host that it has less.
        saved_readback_bytes: bytes of results that it has less.
        saved_traffic_bytes: bytes that it moves less.
        recomputed_flops: floating-point operations that it does more.
        recomputed_elements: results of operations, transcendental ones included, that it computes more.
        apart_peak_bytes: that live at once while the stages run, all arguments held.
        together_peak_bytes: that live at once while the grouping runs.
        flip: what would have to change for the other verdict, in a sentence.
        code: the change, as Python; empty unless the verdict is "fuse" or "group".
        extrapolated: whether some count lies outside what was measured.
        measured: what the forms took, if they were timed.
        decided_by: "model"; "measured" in this call; "remembered" of an earlier one; "pinned" by a person.
        is_tie: whether other forms are as good, as far as the measurement says; the model's favourite stays.
        target: the device that they were compiled for, where one was named.
        stands_on: what the times for it rest on, in a sentence; empty of this machine, whose calibration says so.
    """

    verdict: str
    reason_code: str
    reason: str
    probability: float | None = None
    apart_ns: float | None = None
    apart_interval_ns: tuple[float, float] | None = None
    together_ns: float | None = None
    together_interval_ns: tuple[float, float] | None = None
    apart_terms_ns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    together_terms_ns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    min_gain_ns: float = 0.0
    stages: tuple[StageCost, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    groupings: tuple[Grouping, ...] = ()
    saved_calls: int = 0
    saved_launches: int = 0
    saved_sync_points: int = 0
    saved_readback_bytes: int = 0
    saved_traffic_bytes: int = 0
    recomputed_flops: int = 0
    recomputed_elements: int = 0
    apart_peak_bytes: int = 0
    together_peak_bytes: int = 0
    flip: str = ""
    code: str = ""
    extrapolated: bool = False
    measured: Measured | None = None
    decided_by: str = "model"
    is_tie: bool = False
    target: str | None = None
    stands_on: str = ""

    @property
    def gain_ns(self) -> float | None:
        """What the grouping saves in a call: as measured where both were timed, else as predicted."""
        for told in (self.measured, self):
            if told is not None and told.apart_ns is not None and told.together_ns is not None:
                return told.apart_ns - told.together_ns
        return None

    @property
    def calls_to_pay_back(self) -> int | None:
        """The calls after which compiling the grouping has paid; None if it was not timed, or never pays."""
        if self.measured is None or self.measured.compile_s is None or not self.gain_ns or self.gain_ns < 0:
            return None
        return math.ceil(self.measured.compile_s * 1e9 / self.gain_ns)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, strings and lists, for JSON."""
        return super().as_dict() | {"gain_ns": self.gain_ns, "calls_to_pay_back": self.calls_to_pay_back}

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.reason} ({self.reason_code})"]
        by_model = "" if self.decided_by == "model" else " by the model"
        if by_model:
            lines.append(f"decided by {DECIDED[self.decided_by]}{': a tie' if self.is_tie else ''}")
        if self.apart_ns is None or self.together_ns is None or self.probability is None:
            timed = [] if self.measured is None else self._measured_lines(self.measured)
            return "\n".join([*lines, *timed, *filter(None, [self.code])])
        for name, time_ns, interval in (
            ("apart", self.apart_ns, self.apart_interval_ns),
            ("together" if len(self.groups) < 2 else "grouped", self.together_ns, self.together_interval_ns),
        ):
            low, high = map(whole_ns, interval or (math.nan, math.nan))
            lines.append(f"{name:10}{whole_ns(time_ns):>15} ns  (90 %: {low} to {high})")
        lines.append(f"saves more than {whole_ns(self.min_gain_ns)} ns with {100 * self.probability:.0f} %{by_model}")
        if self.extrapolated and self.target is None:
            lines.append("outside what was measured: an extrapolation")
        if len(self.groupings) > 2:
            shown = [own for place, own in enumerate(self.groupings) if place < MOST_SHOWN or own.name in ENDS]
            for own in shown:
                low, high = map(whole_ns, own.predicted_interval_ns or (math.nan, math.nan))
                took = "" if own.measured_ns is None else f", measured {whole_ns(own.measured_ns)} ns"
                lines.append(f"  {whole_ns(own.predicted_ns or math.nan):>13} ns  ({low} to {high})  {own.name}{took}")
        if self.measured is not None:
            lines += self._measured_lines(self.measured)
        lines += [f"  {stage.name}: {whole_ns(stage.time_ns)} ns, limited by {stage.limit}" for stage in self.stages]
        again = f"; computes {counted(self.recomputed_elements, 'number')} again, {self.recomputed_flops:,} FLOP"
        lines.append(
            f"saves {counted(self.saved_calls, 'call')}, {counted(self.saved_launches, 'launch', 'launches')}, "
            f"{counted(self.saved_sync_points, 'sync point')}, "
            f"{counted(self.saved_readback_bytes, 'byte')} of readback, "
            f"{counted(self.saved_traffic_bytes, 'byte')} of traffic{again if self.target is None else ''}"
        )
        peaks = (counted(peak, "byte") for peak in (self.apart_peak_bytes, self.together_peak_bytes))
        lines.append("peak memory: {} apart, {} together".format(*peaks))
        lines += [text for text in (self.flip, self.stands_on, self.code) if text]
        return "\n".join(lines)

    def _measured_lines(self, measured: Measured) -> list[str]:
        """Return what was timed, and when it pays."""
        forms = [("apart", measured.apart_ns), ("together", measured.together_ns)]
        if len(self.groups) > 1:
            forms[1:] = [("grouped", measured.together_ns), ("together", measured.one_program_ns)]
        times = [f"{name} {whole_ns(time_ns)} ns" for name, time_ns in forms if time_ns is not None]
        if measured.apart_ns is not None and measured.together_ns is not None:
            times.append(f"{measured.together_ns / measured.apart_ns:.2f} times as long (less is better)")
        lines = [f"measured in {counted(measured.rounds, 'round')}: {', '.join(times)}"]
        if measured.compile_s is not None:
            pays = self.calls_to_pay_back
            after = "never pays" if pays is None else f"pays after {counted(pays, 'call')}"
            lines.append(f"compiling takes {measured.compile_s:.2f} s and {after}")
        return lines
