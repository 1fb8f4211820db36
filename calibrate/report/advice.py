"""The page of an advice, with its verdict, terms and savings, and the section of choices that were measured."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from calibrate.decisions import is_by, summary
from calibrate.terminal import ns
from calibrate.terminal import plain as readable
from rlxjax import Advice, plot
from rlxjax.calibration import (
    MACHINE_FIELDS,
    Calibration,
    CalibrationFile,
    StrategyExplanation,
    fingerprint_differences,
    first_refusal,
    read_json,
)
from rlxjax.choices import DECIDED, Memory

from .page import Section, Table, Verdict, drawn, page

#: What the verdicts are called, and whether one program is good news.
_WORDS = {
    "fuse": (True, "Fuse: make them one program."),
    "group": (True, "Group: make some of them one program."),
    "keep": (True, "Keep them apart."),
    "undecided": (None, "Undecided."),
    "cannot model": (False, "This cannot be modelled."),
}
#: Nanoseconds of a time at least, and any number at most.
LEAST_NS, MOST = 1e-3, 1e18
ENDS = ("from (ns)", "to (ns)")
_MEND = "write one with `rlxjax advise ... --json > FILE`"


def advice_page(path: FilePath, *, command: str) -> str:
    """Return the page of an advice as HTML.

    Args:
        path: of what `rlxjax advise --json` printed.
        command: that makes the page, for its foot.

    Raises:
        ValueError: a file that holds no advice; one line with the mend.
    """
    advice, source = read_advice(path)
    sections = [Section("verdict", "Verdict", verdicts=[_verdict(advice)])]
    is_predicted = len(advice.pair) == 2 and None not in [own.predicted_ns for own in advice.pair]
    if is_predicted and all(own.terms_ns for own in advice.pair):
        sections.append(_terms(advice))
    if advice.stages:
        rows = [
            {"stage": one.name, "takes (ns)": one.time_ns, "limited by": one.limit, "peak (bytes)": one.peak_bytes}
            for one in advice.stages
        ]
        sections.append(Section("stages", "The stages", tables=[Table("Each stage, jitted by itself", rows, "")]))
    able = [own for own in advice.alternatives if not own.failed]
    if len(able) > 2:
        rows = [
            {"programs": one.name, "takes (ns)": one.predicted_ns}
            | dict(zip(ENDS, one.predicted_interval_ns or (None, None), strict=True))
            | ({"measured (ns)": one.measured_ns} if advice.rounds else {})
            | {"peak (bytes)": one.peak_bytes}
            for one in able
        ]
        sections.append(Section("groupings", "The groupings", tables=[Table("The fastest, the best first", rows, "")]))
    if is_predicted:
        sections.append(_counts(advice))
    if advice.code:
        sections.append(Section("code", "The change", code=advice.code))
    names = " → ".join(stage.name for stage in advice.stages)
    subtitle = " · ".join(filter(None, (names, f"by {source}" if source else "")))
    return page("Should they be one program?", subtitle, sections, command)


def read_advice(path: FilePath) -> tuple[Advice, str]:
    """Return the advice in a file, and the phrase that says which calibration it is by."""
    content = read_json(path, None, ValueError, _MEND, "an advice")
    try:
        advice = TypeAdapter(Advice).validate_python(content)
    except ValidationError as error:
        raise ValueError(f"{path}: {first_refusal(error)}; {_MEND}") from None
    if advice.verdict not in _WORDS:
        raise ValueError(f"{path}: verdict: expected one of {', '.join(_WORDS)}, got {advice.verdict!r}; {_MEND}")
    if advice.by not in DECIDED:
        raise ValueError(f"{path}: by: expected one of {', '.join(DECIDED)}, got {advice.by!r}; {_MEND}")
    times_ns = [time_ns for own in advice.pair for time_ns in (own.predicted_ns, own.measured_ns)]
    if not all(time_ns is None or time_ns >= LEAST_NS for time_ns in times_ns) or not all(
        abs(one) <= MOST for one in _numbers(content)
    ):
        raise ValueError(f"{path}: expected times of {LEAST_NS:g} ns at least, and numbers up to {MOST:g}; {_MEND}")
    source = content.get("calibration")
    return advice, source if isinstance(source, str) else ""


def _numbers(content: Any) -> Iterator[float]:
    """Yield all numbers in JSON."""
    if isinstance(content, (int, float)):
        yield content
    for value in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from _numbers(value)


def _verdict(advice: Advice) -> Verdict:
    is_good, word = _WORDS[advice.verdict]
    said = [f"{advice.reason[:1].upper()}{advice.reason[1:]} ({advice.reason_code})."]
    by_model = ""
    if advice.by != "model":
        by_model = ", by the model"
        said.append(f"Decided by {DECIDED[advice.by]}{': a tie' if advice.is_tie else ''}.")
    if advice.probability is not None:
        gain = f"saves more than {ns(advice.min_gain_ns)} ns a call" if advice.min_gain_ns else "is the faster one"
        grouped = "One program" if len(advice.groups) < 2 else " | ".join(map(" + ".join, advice.groups))
        said.append(f"{grouped} {gain} with a probability of {100 * advice.probability:.1f} %{by_model}.")
    if advice.rounds:
        said.append(_measured(advice))
    if advice.flip:
        said.append(f"{advice.flip[:1].upper()}{advice.flip[1:]}.")
    cautions = ["Some count lies outside what was measured: this is an extrapolation."] if advice.extrapolated else []
    if advice.target is not None:  # nothing of this machine is in it
        cautions = [f"For {advice.target}: {advice.stands_on or 'its compiler says so'}."]
    return Verdict(is_good, word, said, cautions)


def _measured(advice: Advice) -> str:
    """Return what was timed, in sentences."""
    took = [own.measured_ns for own in advice.pair]
    forms = zip(took, ("apart", "together"), strict=False)
    times = [f"{ns(time_ns)} ns {name}" for time_ns, name in forms if time_ns is not None]
    if len(times) == 2:
        times.append(f"{(took[0] or 0.0) / (took[1] or 1.0):.3g} × as fast together")
    said = f"Measured: {', '.join(times) or 'others, which the groupings show'}."
    if not advice.pair or (seconds := advice.pair[1].compile_s) is None:
        return said
    calls = advice.calls_to_pay_back
    pays = "never pays" if calls is None else f"pays after {calls:,} calls"
    return f"{said} Compiling took {seconds:.2f} s and {pays}."


def _terms(advice: Advice) -> Section:
    forms = [
        StrategyExplanation(name, {readable(term): ns for term, ns in own.terms_ns.items()}, time_ns, interval)
        for name, own in zip(("apart", "together"), advice.pair, strict=True)
        if (time_ns := own.predicted_ns) and (interval := own.predicted_interval_ns or (time_ns, time_ns))
    ]
    pictures = drawn(**{"A call of all stages": lambda: plot.terms(forms)})
    said = (
        "Parts of the predicted time of a call. Each term begins where the one before it ends; the grey bar is their "
        "sum, with the interval that holds a call with 90 %."
    )
    table = Table("Parts of the time, a call of all stages", pictures[0].rows)
    return Section("terms", "Where the time goes", [said], pictures, [table])


def _counts(advice: Advice) -> Section:
    # No compiler says what it computes again.
    kept = ("saved", "recomputed") if advice.target is None else ("saved",)
    names = [own.name for own in dataclasses.fields(advice) if own.name.startswith(kept)]
    found = {name: getattr(advice, name) for name in names}
    found |= dict(
        zip(("apart peak bytes", "together peak bytes"), [own.peak_bytes for own in advice.pair], strict=True)
    )
    rows = [{"what": name.replace("_", " "), "count": value} for name, value in found.items()]
    return Section("counts", "What one program saves", tables=[Table("In a call; what is negative is lost", rows, "")])


def decided_sections(content: CalibrationFile, calibration: Calibration) -> Iterator[Section]:
    """Yield the section of what is remembered of choices on the machine of a calibration, if anything is."""
    rows = []
    for one in Memory().all():
        section = content.models.get(one.kind)
        if (
            section is None
            or not one.machine
            or fingerprint_differences(one.machine, section.fingerprint, MACHINE_FIELDS)
        ):
            continue
        said = summary(one)
        is_own = one.kind in calibration.models and is_by(one, calibration.of(one.kind))
        rows.append(
            {"workload": one.label, "model": one.kind, "chosen": said["name"], "by": said["by"]}
            | {"a tie": "yes" if one.is_tie else "no", "takes (ns)": said["time_ns"]}
            | {"next best": said["next_best"], "its time (ns)": said["next_best_ns"]}
            | {"beside this calibration": "yes" if is_own else "no"}
        )
    if rows:
        said = (
            "Where the model was not sure, the alternatives were timed on this machine, and what was measured is "
            "remembered: later calls choose by it, and the model learns from it. A tie is between alternatives "
            "that the measurement does not tell apart: the model's favourite stays. What was decided beside another "
            "calibration is not used with this one."
        )
        yield Section("decided", "What was decided, by what", [said], tables=[Table("The newest first", rows, "")])
