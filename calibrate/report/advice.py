"""The page of an advice: its verdict, where the time goes, and what one program saves."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rlxjax import Advice, plot
from rlxjax.calibration import StrategyExplanation, first_refusal, read_json
from rlxjax.choices import DECIDED

from ..terminal import ns, plain
from .page import Section, Table, Verdict, drawn, page, sentence

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
_MEND = "write one with `rlxjax advise ... --json > FILE`"


def advice_page(path: FilePath, command: str) -> str:
    advice, source = read_advice(path)
    sections = [Section("verdict", "Verdict", verdicts=[_verdict(advice)])]
    forms = list(zip(("apart", "together"), advice.pair, strict=False))
    is_predicted = len(forms) == 2 and None not in [own.predicted_ns for own in advice.pair]
    if is_predicted and all(own.terms_ns for own in advice.pair):
        explained = [
            StrategyExplanation(name, {plain(term): ns for term, ns in own.terms_ns.items()}, time_ns, interval)
            for name, own in forms
            if (time_ns := own.predicted_ns) and (interval := own.predicted_interval_ns or (time_ns, time_ns))
        ]
        pictures, rows = drawn({"A call of all stages": lambda: plot.terms(explained)})
        said = (
            "Parts of the predicted time of a call. Each term begins where the one before it ends; the grey bar is "
            "their sum, with the interval that holds a call with 90 %."
        )
        table = Table("Parts of the time, a call of all stages", rows)
        sections.append(Section("terms", "Where the time goes", [said], pictures, [table]))
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
            | dict(zip(("from (ns)", "to (ns)"), one.predicted_interval_ns or (None, None), strict=True))
            | {"measured (ns)": one.measured_ns if advice.rounds else None, "peak (bytes)": one.peak_bytes}
            for one in able
        ]
        sections.append(Section("groupings", "The groupings", tables=[Table("The fastest, the best first", rows, "")]))
    if is_predicted:
        # No compiler says what it computes again.
        kept = ("saved", "recomputed") if advice.target is None else ("saved",)
        names = [own.name for own in dataclasses.fields(advice) if own.name.startswith(kept)]
        counts = {name.replace("_", " "): getattr(advice, name) for name in names}
        counts |= {f"{name} peak bytes": own.peak_bytes for name, own in forms}
        table = Table("In a call; what is negative is lost", [{"what": k, "count": n} for k, n in counts.items()], "")
        sections.append(Section("counts", "What one program saves", tables=[table]))
    if advice.code:
        sections.append(Section("code", "The change", code=advice.code))
    names = " → ".join(stage.name for stage in advice.stages)
    subtitle = " · ".join(filter(None, (names, source and f"by {source}")))
    return page("Should they be one program?", subtitle, sections, command)


def read_advice(path: FilePath) -> tuple[Advice, str]:
    """Return the advice in a file, and the phrase that says which calibration it is by."""
    content = read_json(path, None, ValueError, _MEND, "an advice")
    try:
        advice = TypeAdapter(Advice).validate_python(content)
    except ValidationError as error:
        raise ValueError(f"{path}: {first_refusal(error)}; {_MEND}") from None
    for name, known in {"verdict": _WORDS, "by": DECIDED}.items():
        if (got := getattr(advice, name)) not in known:
            raise ValueError(f"{path}: {name}: expected one of {', '.join(known)}, got {got!r}; {_MEND}")
    times_ns = [time_ns for own in advice.pair for time_ns in (own.predicted_ns, own.measured_ns)]
    is_sound = all(time_ns is None or time_ns >= LEAST_NS for time_ns in times_ns)
    if not is_sound or not all(abs(number) <= MOST for number in _numbers(content)):
        raise ValueError(f"{path}: expected times of {LEAST_NS:g} ns at least, and numbers up to {MOST:g}; {_MEND}")
    source = content.get("calibration")
    return advice, source if isinstance(source, str) else ""


def _numbers(content: Any) -> Iterator[float]:
    if isinstance(content, (int, float)):
        yield content
    for value in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from _numbers(value)


def _verdict(advice: Advice) -> Verdict:
    is_good, word = _WORDS[advice.verdict]
    said, by_model = [sentence(f"{advice.reason} ({advice.reason_code})")], ""
    if advice.by != "model":
        by_model = ", by the model"
        said.append(f"Decided by {DECIDED[advice.by]}{': a tie' if advice.is_tie else ''}.")
    if advice.probability is not None:
        gain = f"saves more than {ns(advice.min_gain_ns)} ns a call" if advice.min_gain_ns else "is the faster one"
        grouped = "One program" if len(advice.groups) < 2 else " | ".join(map(" + ".join, advice.groups))
        said.append(f"{grouped} {gain} with a probability of {100 * advice.probability:.1f} %{by_model}.")
    if advice.rounds:
        took = [own.measured_ns for own in advice.pair]
        told = [f"{ns(ns_)} ns {name}" for ns_, name in zip(took, ("apart", "together"), strict=False) if ns_]
        if len(told) == 2:
            told.append(f"{(took[0] or 0.0) / (took[1] or 1.0):.3g} × as fast together")
        said.append(f"Measured: {', '.join(told) or 'others, which the groupings show'}.")
        if advice.pair and (seconds := advice.pair[1].compile_s) is not None:
            calls = advice.calls_to_pay_back
            pays = "never pays" if calls is None else f"pays after {calls:,} calls"
            said[-1] += f" Compiling took {seconds:.2f} s and {pays}."
    if advice.flip:
        said.append(sentence(advice.flip))
    cautions = ["Some count lies outside what was measured: this is an extrapolation."] if advice.extrapolated else []
    if advice.target is not None:  # nothing of this machine is in it
        cautions = [f"For {advice.target}: {advice.stands_on or 'its compiler says so'}."]
    return Verdict(is_good, word, said, cautions)
